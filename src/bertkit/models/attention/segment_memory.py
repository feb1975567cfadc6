"""The memory of Transformer-XL and XLNet: each layer's inputs for earlier text, without gradient.

Dai et al. 2019, Transformer-XL, arXiv:1901.02860, section 3.2; Yang et al. 2019, XLNet, arXiv:1906.08237, section 2.4.
XLNet's released code remembers only the first tokens of a sequence.

Shapes: T packed tokens, B sequences, S tokens of each, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bertkit.data.batch import PackedBatch


def layer_name(number: int) -> str:
    """The name of a layer's memory."""
    return f"memory.{number}"


def remembered(
    inputs: Sequence[Tensor],
    batch: PackedBatch,
    previous: Sequence[Tensor] | None,
    *,
    reused: int | None,
    kept: int,
) -> dict[str, Tensor]:
    """The memory for the text that follows each sequence: one tensor (B, memory, D) per layer, by name.

    Args:
        inputs: inputs of the layers, (T, D) each.
        batch: sequences of equal length.
        previous: the memory before this batch.
        reused: how many of the first tokens of each sequence are remembered; None: all.
        kept: maximum length of the memory; 0: unlimited.

    Raises:
        ValueError: sequences differ in length.
    """
    check_memory(batch, previous)
    memory = {}
    for number, input_TD in enumerate(inputs):
        states_BSD = input_TD.detach().view(batch.num_sequences, -1, input_TD.shape[1])[:, :reused]
        if previous is not None:
            states_BSD = torch.cat([previous[number], states_BSD], dim=1)
        memory[layer_name(number)] = states_BSD[:, -kept:]
    return memory


def check_memory(batch: PackedBatch, memory: Sequence[Tensor] | None = None) -> None:
    """Raise ValueError unless the batch's sequences have one length and are as many as those of the memory."""
    if batch.num_sequences * batch.sequences.max_length != batch.num_tokens:
        raise ValueError("with a memory, all sequences of a batch must have the same length")
    if memory and memory[0].shape[0] != batch.num_sequences:
        raise ValueError(f"the memory is for {memory[0].shape[0]} sequences, but the batch has {batch.num_sequences}")

"""The memory of Transformer-XL and XLNet: each layer's input of earlier text, without gradient.

Dai et al. 2019, Transformer-XL, arXiv:1901.02860, section 3.2; Yang et al. 2019, XLNet, arXiv:1906.08237, section 2.4,
whose released code remembers the first tokens of a sequence alone.

Shapes: T packed tokens, B sequences, S tokens of each, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bertkit.data.batch import PackedBatch


def layer_name(number: int) -> str:
    """The memory of a layer, by name."""
    return f"memory.{number}"


def remembered(
    inputs: Sequence[Tensor],
    batch: PackedBatch,
    previous: Sequence[Tensor] | None,
    *,
    reused: int | None,
    kept: int,
) -> dict[str, Tensor]:
    """The memory for the text that follows each sequence: a tensor (B, memory, D) per layer, by name.

    Args:
        inputs: of the layers, (T, D) each.
        batch: sequences of one length.
        previous: the memory before it.
        reused: the first tokens of each sequence that are remembered; None: all.
        kept: the longest memory; 0: all there was.

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
    """A memory needs sequences of one length, as many as it has; ValueError otherwise."""
    if batch.num_sequences * batch.sequences.max_length != batch.num_tokens:
        raise ValueError("a memory needs sequences of one length in a batch")
    if memory and memory[0].shape[0] != batch.num_sequences:
        raise ValueError(f"the memory is of {memory[0].shape[0]} sequences, the batch has {batch.num_sequences}")

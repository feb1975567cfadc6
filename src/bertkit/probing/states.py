"""Hidden states of words, layer by layer, through the recorder alone.

Layers are counted as the papers of this package count them (Ethayarajh 2019, arXiv:1909.00512, section 3; Tenney et al.
2019, arXiv:1905.05950): layer 0 is what the first layer reads, the embeddings with everything that is added to them;
layer l is what comes out of the l-th. Where a family puts a norm behind the last layer, the last state is taken behind
it, as `hidden_states` of `transformers` has it.

A word of several pieces has their mean (Ethayarajh's and Wiedemann's choice), or its first piece's state (Devlin's for
tagging).

Shapes: T packed tokens, W words of a batch, D width, L layers, the embeddings counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertkit.errors import DataError
from bertkit.models.headed import HeadedModel
from bertkit.models.recorder import Recorder, layer_points
from bertkit.probing.sentences import EncodedSentence, batches, packed

Pooling = Literal["mean", "first"]
_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class WordStates:
    """The states of the words of some sentences, in the order of the sentences and of their words.

    Attributes:
        sentences: what was computed together.
        states: for each layer asked for, (W, D), float32 on the CPU.
        sentence_W: which of `sentences` each word belongs to.
        word_W: the word's place in its sentence.
    """

    sentences: tuple[EncodedSentence, ...]
    states: tuple[Tensor, ...]
    sentence_W: NDArray[np.int64]
    word_W: NDArray[np.int64]


def layer_states(
    model: HeadedModel,
    sentences: Iterable[EncodedSentence],
    *,
    points: Sequence[str] | None = None,
    pooling: Pooling = "mean",
    max_batch_tokens: int = 4096,
    device: torch.device = _CPU,
) -> Iterator[WordStates]:
    """States of all words, a batch at a time and in the order of the sentences; memory is one batch's.

    Args:
        model: put on the device and out of training mode.
        sentences: of any number.
        points: what to record, (T, D) each; all layers where None, the embeddings first.
        pooling: what a word of several pieces has.
        max_batch_tokens: tokens computed at once; decides speed and memory alone.
        device: where to compute, in fp32.

    Raises:
        DataError: no hidden states to record, or they are not numbers.
    """
    model = model.to(device).eval()
    wanted = layer_points(model) if points is None else tuple(points)
    for some in batches(sentences, max_batch_tokens):
        yield _states_of(model, some, wanted, pooling, device)


@torch.inference_mode()
def _states_of(
    model: HeadedModel,
    sentences: tuple[EncodedSentence, ...],
    points: Sequence[str],
    pooling: Pooling,
    device: torch.device,
) -> WordStates:
    recorder = Recorder(points)
    model(packed(sentences).to(device), recorder)
    offsets = np.cumsum([0, *(each.ids_T.size for each in sentences)])
    spans_W2 = np.concatenate([each.spans_W2 + offset for each, offset in zip(sentences, offsets, strict=False)])
    pool = pooled_mean if pooling == "mean" else pooled_first
    spans = torch.from_numpy(spans_W2).to(device)
    states = tuple(pool(recorder.kept[point], spans).float().cpu() for point in points)
    for point, state in zip(points, states, strict=True):
        if not state.isfinite().all():
            raise DataError(f"states at {point} are not numbers (NaN or infinite): the weights are damaged or diverged")
    counts = [len(each.words) for each in sentences]
    return WordStates(
        sentences,
        states,
        np.repeat(np.arange(len(sentences)), counts),
        np.concatenate([np.arange(count) for count in counts]),
    )


def pooled_mean(hidden_TD: Tensor, spans_W2: Tensor) -> Tensor:
    """The mean over each word's pieces, (W, D)."""
    lengths_W = spans_W2[:, 1] - spans_W2[:, 0]
    if int(lengths_W.max()) == 1:
        return hidden_TD.index_select(0, spans_W2[:, 0])
    total = int(lengths_W.sum())
    word_P = torch.repeat_interleave(lengths_W, output_size=total)
    starts_W = torch.cumsum(lengths_W, 0) - lengths_W
    token_P = torch.arange(total, device=hidden_TD.device) - starts_W[word_P] + spans_W2[word_P, 0]
    sums_WD = hidden_TD.new_zeros(lengths_W.numel(), hidden_TD.shape[1])
    sums_WD.index_add_(0, word_P, hidden_TD.index_select(0, token_P))
    return sums_WD / lengths_W[:, None]


def pooled_first(hidden_TD: Tensor, spans_W2: Tensor) -> Tensor:
    """The state of each word's first piece, (W, D)."""
    return hidden_TD.index_select(0, spans_W2[:, 0])

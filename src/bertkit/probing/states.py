"""Hidden states of words, layer by layer, through the recorder.

Layers are numbered as in Ethayarajh 2019, arXiv:1909.00512, section 3, and Tenney et al. 2019, arXiv:1905.05950. Layer
0 is the first layer's input: the embeddings with everything that is added to them. Layer l is the output of the l-th
layer. If a family has a norm after the last layer, the last state is taken after it, as in `hidden_states` of
`transformers`. The state of a word of several tokens is the mean of their states (as in Ethayarajh's and Wiedemann's
work).

Shapes: T packed tokens, W words of a batch, D width, L layers, including the embeddings, P tokens of all words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bertkit.arrays import Int64Array
from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.models.headed import HeadedModel
from bertkit.models.hook_points import device_of, layer_points
from bertkit.models.recorder import Recorder
from bertkit.models.scoring.rules import reads_causally
from bertkit.probing.sentences import EncodedSentence, batches, packed
from bertkit.training.engine import Engine


@dataclass(frozen=True, eq=False)
class WordStates:
    """The states of the words of some sentences, in the order of the sentences and of their words.

    Attributes:
        sentences: the sentences that were computed together.
        states: one tensor per layer, (W, D), float32 on the CPU.
        sentence_W: the sentence of each word, as an index into `sentences`.
        word_W: the word's index in its sentence.
    """

    sentences: tuple[EncodedSentence, ...]
    states: tuple[Tensor, ...]
    sentence_W: Int64Array
    word_W: Int64Array


def layer_states(
    model: HeadedModel,
    sentences: Iterable[EncodedSentence],
    engine: Engine,
    *,
    points: Sequence[str] | None = None,
) -> Iterator[WordStates]:
    """States of all words, batch by batch in the order of the sentences; one batch is in memory at a time.

    An encoder that was only trained from left to right reads that way here too.

    Args:
        model: is moved to the device and put in evaluation mode.
        sentences: any number.
        engine: where to compute, in fp32, and the tokens computed at once; affects only speed and memory.
        points: hook points with values of shape (T, D); by default those of all layers, the embeddings first.

    Raises:
        DataError: the model has no hidden states to record, or they are not finite.
    """
    model = model.to(engine.device).eval()
    points = layer_points(model) if points is None else points
    causal = reads_causally(model)
    for some in batches(sentences, engine.micro_batch_tokens):
        offsets = np.cumsum([0, *(each.ids_T.size for each in some)])
        spans_W2 = np.concatenate([each.spans_W2 + offset for each, offset in zip(some, offsets, strict=False)])
        spans = torch.from_numpy(spans_W2).to(engine.device)
        states = tuple(
            word_means(each, spans).float().cpu() for each in recorded(model, packed(some, causal=causal), points)
        )
        counts = [len(each.words) for each in some]
        word_W = np.concatenate([np.arange(count) for count in counts])
        yield WordStates(some, states, np.repeat(np.arange(len(some)), counts), word_W)


@torch.inference_mode()
def recorded(model: HeadedModel, batch: PackedBatch, points: Sequence[str]) -> list[Tensor]:
    """The values at these hook points, on the model's device.

    Raises:
        DataError: they are not finite.
    """
    recorder = Recorder(points)
    model(batch.to(device_of(model)), recorder)
    for point in points:
        if not recorder.kept[point].isfinite().all():
            raise DataError(f"values at {point} are not numbers (NaN or infinite): the weights are damaged or diverged")
    return [recorder.kept[point] for point in points]


def word_means(hidden_TD: Tensor, spans_W2: Tensor) -> Tensor:
    """The mean over each word's tokens, (W, D)."""
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

"""Where the heads of a model look: their maps, and what each head's attention comes to on average.

Clark et al. 2019, "What Does BERT Look At?", arXiv:1906.04341, sections 3.1 to 3.3: attention to [CLS], [SEP],
punctuation, the token itself, the one before and the one behind it, and the entropy of a head. As in the paper's text
a share is a mean over all tokens that attend, the first and the last one included, which have no neighbour on one side.
Two things differ from the code published with it: entropy is that of the map itself, which is not smoothed first, and
tokens weigh the same whatever the length of their sentence.

Siblings: head_distances.py (how alike two heads are), head_patterns.py (shapes of maps), head_syntax.py (words).

Shapes: B sequences of a batch, S its longest, n tokens of one sentence, L layers, N heads of a layer, A heads of all
layers, one layer after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.models.headed import HeadedModel
from bertkit.models.recorder import Recorder, point_shapes
from bertkit.probing.sentences import EncodedSentence, batches, packed
from bertkit.text.tokenizer import Tokenizer

Floats = NDArray[np.float64]
PATTERN = "blocks.{n}.attn.hook_pattern"
TARGETS = ("cls", "sep", "punctuation", "self", "previous", "next")
"""What attention is measured to."""
_COLUMNS = TARGETS[:3]
_DIAGONALS = {"self": 0, "previous": -1, "next": 1}
_POOL = 512
_MOST_CELLS = 1 << 25
"""Cells of all maps of a batch, unless a single sentence has more."""
_CPU = torch.device("cpu")


def pattern_points(model: HeadedModel) -> tuple[str, ...]:
    """The point of each layer's maps.

    Raises:
        DataError: the family has no attention maps to record.
    """
    device = next(model.parameters()).device
    points = point_shapes(model, PackedBatch.from_ids([[0, 0]]).to(device))
    found: list[str] = []
    while (name := PATTERN.format(n=len(found))) in points:
        found.append(name)
    if not found:
        kind = model.encoder.config.model_type
        raise DataError(
            f"a model of the family {kind} has no attention maps (no point {PATTERN.format(n=0)}); `bertkit probe"
            " points` lists what it has"
        )
    return tuple(found)


@dataclass(frozen=True, eq=False)
class Maps:
    """All attention maps of some sentences.

    Attributes:
        sentences: what was computed together.
        layers: for each layer (B, N, S, S), float32, queries first; rows and columns behind a sentence's end are 0.
    """

    sentences: tuple[EncodedSentence, ...]
    layers: tuple[Tensor, ...]

    @property
    def heads(self) -> int:
        """A."""
        return sum(layer.shape[1] for layer in self.layers)

    def of(self, place: int) -> Tensor:
        """The maps of one of the sentences, (A, n, n)."""
        size = self.sentences[place].ids_T.size
        return torch.cat([layer[place, :, :size, :size] for layer in self.layers])


def attention_maps(
    model: HeadedModel,
    sentences: Iterable[EncodedSentence],
    *,
    max_batch_tokens: int = 4096,
    device: torch.device = _CPU,
) -> Iterator[Maps]:
    """The maps of all sentences, a batch at a time, sentences of like length together; memory is one batch's.

    Args:
        model: put on the device and out of training mode.
        sentences: of any number; the order in which they come back is another.
        max_batch_tokens: tokens computed at once, or fewer where their maps are large; decides speed and memory alone.
        device: where to compute, in fp32.

    Raises:
        DataError: no maps to record, or they are not numbers.
    """
    model = model.to(device).eval()
    points = pattern_points(model)
    for some in batches(sentences, max_batch_tokens, pool=_POOL):
        for part in _parts(some, len(points) * _heads_of(model)):
            yield _maps_of(model, part, points, device)


def _heads_of(model: HeadedModel) -> int:
    return int(getattr(model.encoder.config, "num_attention_heads", 1))


def _parts(sentences: tuple[EncodedSentence, ...], heads: int) -> Iterator[tuple[EncodedSentence, ...]]:
    """A batch whose maps are few enough, or several."""
    longest = max(each.ids_T.size for each in sentences)
    size = max(1, _MOST_CELLS // (heads * longest * longest))
    for first in range(0, len(sentences), size):
        yield sentences[first : first + size]


@torch.inference_mode()
def _maps_of(
    model: HeadedModel, sentences: tuple[EncodedSentence, ...], points: Sequence[str], device: torch.device
) -> Maps:
    recorder = Recorder(points)
    model(packed(sentences).to(device), recorder)
    layers = tuple(recorder.kept[point].float().cpu() for point in points)
    for point, layer in zip(points, layers, strict=True):
        if not layer.isfinite().all():
            raise DataError(f"{point} is not numbers (NaN or infinite): the weights are damaged or diverged")
    return Maps(sentences, layers)


@dataclass(frozen=True, eq=False)
class Columns:
    """Where the special tokens of a vocabulary stand in a sentence.

    Attributes:
        cls_id, sep_id: their ids; None where the vocabulary has none.
    """

    cls_id: int | None
    sep_id: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Columns:
        has = tokenizer.roles
        return cls(tokenizer.cls_id if "cls" in has else None, tokenizer.sep_id if "sep" in has else None)

    def marks(self, sentence: EncodedSentence) -> NDArray[np.bool_]:
        """Which tokens are [CLS], [SEP] and punctuation, (n, 3)."""
        marks = np.zeros((sentence.ids_T.size, len(_COLUMNS)), dtype=np.bool_)
        for column, token_id in enumerate((self.cls_id, self.sep_id)):
            if token_id is not None:
                marks[sentence.places(token_id), column] = True
        within = ~sentence.special_T
        marks[within, 2] = sentence.punctuation_W[sentence.word_T[within]]
        return marks


class HeadSums:
    """Sums over tokens of what each head does; maps are added batch by batch, in any order.

    Args:
        columns: which special tokens there are.

    Attributes:
        sentences, tokens: how many were added.
    """

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self.sentences = self.tokens = 0
        self._sums: dict[str, Tensor] = {}
        self._even: dict[str, float] = {}
        self._shape = (0, 0)

    def add(self, maps: Maps) -> None:
        """One more batch."""
        longest = maps.layers[0].shape[-1]
        marks_BSK = torch.zeros(len(maps.sentences), longest, len(_COLUMNS))
        for place, sentence in enumerate(maps.sentences):
            marks = torch.from_numpy(self.columns.marks(sentence))
            marks_BSK[place, : marks.shape[0]] = marks.float()
        cls_BS, sep_BS = marks_BSK[..., 0], marks_BSK[..., 1]
        self._shape = (len(maps.layers), maps.layers[0].shape[1])
        position_S = torch.arange(longest)
        distance_SS = (position_S[:, None] - position_S).abs().float()
        rows: dict[str, list[Tensor]] = {}
        for layer_BNSS in maps.layers:
            by_row_BNSK = layer_BNSS @ marks_BSK[:, None]
            found = {name: by_row_BNSK[..., column] for column, name in enumerate(_COLUMNS)}
            entropy_BNS = -torch.xlogy(layer_BNSS, layer_BNSS).sum(-1)
            found |= {
                "entropy": entropy_BNS,
                "entropy_of_cls": entropy_BNS * cls_BS[:, None],
                "sep_to_sep": found["sep"] * sep_BS[:, None],
                "distance": (layer_BNSS * distance_SS).sum(-1),
            }
            sums = {name: value.double().sum((0, 2)) for name, value in found.items()}
            for name, offset in _DIAGONALS.items():
                sums[name] = layer_BNSS.diagonal(offset, -2, -1).double().sum((0, 2))
            for name, value in sums.items():
                rows.setdefault(name, []).append(value)
        for name, values in rows.items():
            total = torch.cat(values)
            self._sums[name] = self._sums[name] + total if name in self._sums else total
        for sentence in maps.sentences:
            self._add_even(sentence)

    def _add_even(self, sentence: EncodedSentence) -> None:
        """What a head would come to that attends to all tokens alike."""
        size = sentence.ids_T.size
        marks = self.columns.marks(sentence)
        position = np.arange(size)
        found = dict(zip(_COLUMNS, marks.sum(0).astype(float).tolist(), strict=True))
        found |= {"self": 1.0, "previous": (size - 1) / size, "next": (size - 1) / size}
        found["sep_to_sep"] = found["sep"] * marks[:, 1].mean()
        found["entropy"] = size * float(np.log(size))
        found["entropy_of_cls"] = float(marks[:, 0].sum()) * float(np.log(size))
        found["distance"] = float(np.abs(position[:, None] - position).mean(1).sum())
        for name, value in found.items():
            self._even[name] = self._even.get(name, 0.0) + value
        for name, value in (("cls", marks[:, 0].sum()), ("sep", marks[:, 1].sum())):
            self._even[f"{name} tokens"] = self._even.get(f"{name} tokens", 0.0) + float(value)
        self.sentences += 1
        self.tokens += size

    def profile(self) -> HeadProfile:
        """The means.

        Raises:
            ValueError: nothing was added.
        """
        if not self.tokens:
            raise ValueError("no maps were added")
        layers, heads = self._shape

        def means(name: str, count: float) -> Floats:
            values: Floats = self._sums[name].numpy().reshape(layers, heads)
            return values / count if count else np.full((layers, heads), np.nan)

        def divisor(name: str) -> float:
            if name == "sep_to_sep":
                return self._even["sep tokens"]
            return self._even["cls tokens"] if name == "entropy_of_cls" else float(self.tokens)

        missing = [name for name in ("cls", "sep") if not self._even[f"{name} tokens"]]
        values = {name: means(name, divisor(name)) for name in self._sums}
        even = {name: self._even[name] / (divisor(name) or np.nan) for name in self._sums}
        for name in missing:
            values[name] = np.full((layers, heads), np.nan)
            even[name] = float("nan")
        return HeadProfile(values, even, self.sentences, self.tokens)


@dataclass(frozen=True)
class HeadProfile:
    """What each head does on average.

    Attributes:
        values: by name (L, N). Shares of attention: `TARGETS`, and `sep_to_sep`, that of [SEP] itself to [SEP].
            `entropy` and `entropy_of_cls` (of the map's [CLS] row), in nats; `distance`, the mean distance to what is
            attended to, in tokens. NaN where the vocabulary has no such token.
        even: the same of a head that attends to all tokens alike.
        sentences, tokens: how many of them.
    """

    values: dict[str, Floats]
    even: dict[str, float]
    sentences: int
    tokens: int

    def layer_means(self, name: str) -> list[float]:
        """The mean over the heads of each layer."""
        return [float(value) for value in self.values[name].mean(1)]

"""What the heads of a model attend to: their maps, and means of each head's attention.

Clark et al. 2019, "What Does BERT Look At?", arXiv:1906.04341, sections 3.1 to 3.3: attention to [CLS], [SEP],
punctuation, the token itself, the one before and the one after it, and the entropy of a head. As in the paper's text, a
share is a mean over all attending tokens, including the first and the last, which have only one neighbour. Three things
differ from the code published with the paper: punctuation is every word of signs, not only full stops and commas; the
entropy is that of the map itself, without smoothing; and all tokens have the same weight, whatever the length of their
sentence.

Siblings: head_distances.py (how similar two heads are), head_patterns.py (shapes of maps), head_syntax.py (words).

Shapes: B sequences of a batch, S its longest, n tokens of one sentence, L layers, N heads of a layer, A heads of all
layers, one layer after the other, C kinds of marked tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bertkit.arrays import BoolArray, Float64Array
from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.models.conversion.pruning import HeadNumbers
from bertkit.models.headed import HeadedModel
from bertkit.models.hook_points import of_layers, point_shapes
from bertkit.models.scoring.rules import reads_causally
from bertkit.probing.sentences import EncodedSentence, batches, packed
from bertkit.probing.states import recorded
from bertkit.text.tokenizer import Tokenizer
from bertkit.training.engine import Engine

PATTERN = "blocks.{n}.attn.hook_pattern"
GLOBAL_PATTERN = "blocks.{n}.attn.hook_global_pattern"
TARGETS = ("cls", "sep", "punctuation", "self", "previous", "next")
"""Targets that attention is measured to."""
_MARKED = TARGETS[:3]
_DIAGONALS = {"self": 0, "previous": -1, "next": 1}
_POOL = 512
_MOST_CELLS = 1 << 25
"""Maximum number of cells in all maps of a batch, unless a single sentence has more."""


def pattern_points(model: HeadedModel) -> tuple[str, ...]:
    """The hook point of each layer's maps.

    Raises:
        DataError: the family has no attention maps to record.
    """
    found = of_layers(point_shapes(model), PATTERN)
    if not found:
        kind = model.encoder.config.model_type
        raise DataError(
            f"a model of the family {kind} has no attention maps (no point {PATTERN.format(n=0)}); `bertkit probe"
            " points` lists what it has"
        )
    return found


def head_names(numbers: HeadNumbers) -> list[str]:
    """`layer-head` of all heads, both counted from 1 as in the papers; pruned heads keep their numbers."""
    return [f"{layer}-{head + 1}" for layer, heads in enumerate(numbers, 1) for head in heads]


def numbers_from_1(numbers: HeadNumbers) -> list[list[int]]:
    """The numbers of heads as probes write them, by layer."""
    return [[head + 1 for head in heads] for heads in numbers]


@dataclass(frozen=True, eq=False)
class Maps:
    """All attention maps of some sentences.

    Attributes:
        sentences: the sentences that were computed together.
        layers: one tensor per layer, (B, N, S, S), float32, queries first; rows and columns after a sentence's end are
            0.
    """

    sentences: tuple[EncodedSentence, ...]
    layers: tuple[Tensor, ...]

    def of(self, place: int) -> Tensor:
        """The maps of one of the sentences, (A, n, n)."""
        size = self.sentences[place].ids_T.size
        return torch.cat([layer[place, :, :size, :size] for layer in self.layers])


def attention_maps(model: HeadedModel, sentences: Iterable[EncodedSentence], engine: Engine) -> Iterator[Maps]:
    """The maps of all sentences in batches of similar length; one batch is in memory at a time.

    Args:
        model: is moved to the device and put in evaluation mode.
        sentences: any number; they are returned in a different order.
        engine: where to compute, in fp32, and the tokens computed at once, fewer if their maps are large; affects only
            speed and memory.

    Raises:
        DataError: the model has no maps to record, or they are not finite.
    """
    model = model.to(engine.device).eval()
    points, causal = pattern_points(model), reads_causally(model)
    heads = len(points) * int(getattr(model.encoder.config, "num_attention_heads", 1))
    for some in batches(sentences, engine.micro_batch_tokens, pool=_POOL):
        longest = max(each.ids_T.size for each in some)
        size = max(1, _MOST_CELLS // (heads * longest * longest))
        for first in range(0, len(some), size):
            part = some[first : first + size]
            batch = packed(part, causal=causal)
            yield Maps(part, tuple(each.float().cpu() for each in recorded_maps(model, batch, points)))


def recorded_maps(model: HeadedModel, batch: PackedBatch, points: Sequence[str]) -> list[Tensor]:
    """The maps at these points, (B, N, S, S) each, on the model's device.

    Longformer's global tokens attend by weights of their own, which have a point of their own; their rows come from it.

    Raises:
        DataError: they are not finite.
    """
    batch = model.encoder.with_global_tokens(batch, model.head_names)
    if batch.global_T is None or not batch.global_T.any():
        return recorded(model, batch, points)
    of_globals = [GLOBAL_PATTERN.format(n=number) for number in range(len(points))]
    values = recorded(model, batch, [*points, *of_globals])
    maps = [each.clone() for each in values[: len(points)]]
    is_global = torch.split(batch.global_T, batch.sequences.cu_seqlens_B1.diff().tolist())
    for maps_BNSS, rows_BNGS in zip(maps, values[len(points) :], strict=True):
        for own_NSS, rows_NGS, is_global_n in zip(maps_BNSS, rows_BNGS, is_global, strict=True):
            places = is_global_n.nonzero()[:, 0].to(own_NSS.device)
            own_NSS[:, places] = rows_NGS[:, : places.numel()]
    return maps


@dataclass(frozen=True, eq=False)
class SpecialTokens:
    """Finds the special tokens of a vocabulary in a sentence.

    Attributes:
        cls_id, sep_id: their ids; None if not in the vocabulary.
    """

    cls_id: int | None
    sep_id: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> SpecialTokens:
        has = tokenizer.roles
        return cls(tokenizer.cls_id if "cls" in has else None, tokenizer.sep_id if "sep" in has else None)

    def marks(self, sentence: EncodedSentence) -> BoolArray:
        """Which tokens are [CLS], [SEP] and punctuation, (n, C)."""
        marks = np.zeros((sentence.ids_T.size, len(_MARKED)), dtype=np.bool_)
        for column, token_id in enumerate((self.cls_id, self.sep_id)):
            if token_id is not None:
                marks[sentence.places(token_id), column] = True
        within = ~sentence.special_T
        marks[within, 2] = sentence.punctuation_W[sentence.word_T[within]]
        return marks


class HeadSums:
    """Sums over tokens of each head's attention; maps are added batch by batch, in any order.

    Args:
        special: finds the special tokens.

    Attributes:
        sentences, tokens: numbers added.
    """

    def __init__(self, special: SpecialTokens) -> None:
        self.special = special
        self.sentences = self.tokens = 0
        self._marked_C = torch.zeros(len(_MARKED))
        self._layers = 0
        # Sums of all heads, followed by those of a head that attends evenly to all tokens.
        self._sums: dict[str, Tensor] = {}

    def add(self, maps: Maps) -> None:
        """Add a batch."""
        longest = maps.layers[0].shape[-1]
        marks_BSC = torch.zeros(len(maps.sentences), longest, len(_MARKED))
        even_BNSS = torch.zeros(len(maps.sentences), 1, longest, longest, dtype=torch.float64)
        for place, sentence in enumerate(maps.sentences):
            size = sentence.ids_T.size
            marks_BSC[place, :size] = torch.from_numpy(self.special.marks(sentence)).float()
            even_BNSS[place, :, :size, :size] = 1 / size
            self.tokens += size
        self.sentences += len(maps.sentences)
        self._marked_C += marks_BSC.sum((0, 1))
        self._layers = len(maps.layers)
        parts = [_sums_of(maps_BNSS, marks_BSC) for maps_BNSS in (*maps.layers, even_BNSS)]
        for name in parts[0]:
            total = torch.cat([part[name] for part in parts])
            self._sums[name] = self._sums[name] + total if name in self._sums else total

    def profile(self) -> HeadProfile:
        """The means."""
        cls, sep, _ = self._marked_C.tolist()
        # Without [CLS] or [SEP] in the vocabulary, a mean is 0 / 0: NaN.
        counts = {
            "cls": self.tokens * (cls > 0),
            "sep": self.tokens * (sep > 0),
            "entropy_of_cls": cls,
            "sep_to_sep": sep,
        }
        means = {name: (sums / counts.get(name, self.tokens)).numpy() for name, sums in self._sums.items()}
        shape = (self._layers, -1)
        return HeadProfile(
            {name: mean[:-1].reshape(shape) for name, mean in means.items()},
            {name: float(mean[-1]) for name, mean in means.items()},
            self.sentences,
            self.tokens,
        )


def _sums_of(maps_BNSS: Tensor, marks_BSC: Tensor) -> dict[str, Tensor]:
    """Sums over the attending tokens of one layer's maps, (N,) each, float64."""
    position_S = torch.arange(maps_BNSS.shape[-1])
    distance_SS = (position_S[:, None] - position_S).abs().to(maps_BNSS.dtype)
    to_BNSC = maps_BNSS @ marks_BSC[:, None].to(maps_BNSS.dtype)
    entropy_BNS = -torch.xlogy(maps_BNSS, maps_BNSS).sum(-1)
    by_token = {name: to_BNSC[..., column] for column, name in enumerate(_MARKED)}
    by_token |= {
        "entropy": entropy_BNS,
        "entropy_of_cls": entropy_BNS * marks_BSC[:, None, :, 0],
        "sep_to_sep": by_token["sep"] * marks_BSC[:, None, :, 1],
        "distance": (maps_BNSS * distance_SS).sum(-1),
    }
    by_token |= {name: maps_BNSS.diagonal(offset, -2, -1) for name, offset in _DIAGONALS.items()}
    return {name: value.double().sum((0, 2)) for name, value in by_token.items()}


@dataclass(frozen=True)
class HeadProfile:
    """Each head's mean attention.

    Attributes:
        values: arrays (L, N) by name. Shares of attention: `TARGETS`, and `sep_to_sep`, that from [SEP] itself to
            [SEP]. `entropy` and `entropy_of_cls` (of the map's [CLS] row), in nats; `distance`, the mean distance to
            the attended tokens, in tokens. NaN if the token is not in the vocabulary.
        even: the same for a head that attends evenly to all tokens.
        sentences, tokens: their numbers.
    """

    values: dict[str, Float64Array]
    even: dict[str, float]
    sentences: int
    tokens: int

    def layer_means(self, name: str) -> list[float]:
        """The mean over the heads of each layer."""
        return [float(value) for value in self.values[name].mean(1)]

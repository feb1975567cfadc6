"""The training stream of several languages: the language of each sample, and the stream of each language.

Devlin et al. 2019, multilingual BERT: a language is drawn with its smoothed share; languages.py reads the corpus.
Languages are drawn without replacement from blocks of 65,536, in which each has its exact number of samples: the shares
are closer than with independent draws, and a sample's number alone determines its language.

Shapes: L languages, B samples, K samples of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.arrays import BoolArray, Float64Array, Int64Array
from bertkit.data.config import DataConfig
from bertkit.data.deduplication import kept_documents
from bertkit.data.lanes import LaneStream
from bertkit.data.languages import LANGUAGES, smoothed
from bertkit.data.layouts import Address, LaneLayout
from bertkit.data.layouts.base import Plan, Ranges
from bertkit.data.shards import TokenShards
from bertkit.data.split import range_tokens, split_documents
from bertkit.data.stream import SampleSpec, SampleStream
from bertkit.errors import DataError

BLOCK_SAMPLES = 1 << 16
_ADDRESS_BITS = 40
"""A language's number is added above this many bits of a sample's number, so languages have separate random draws."""


def training_and_held_out(
    data: DataConfig,
    shards: TokenShards,
    *,
    seed: int,
    stage: int,
    plans: Path | None,
    lanes: int = 1,
    sep_id: int = 0,
) -> tuple[SampleStream, SampleStream]:
    """A stage's streams of training and held-out samples, for all languages of the shards.

    Training uses the smoothed shares of `data.language_smoothing`. Documents of every language are held out,
    alternating between languages.

    Args:
        data: the stage's data settings.
        shards: the corpus.
        seed: the recipe's.
        stage: its number.
        plans: directory of the plans of training epochs.
        lanes: sequences per step, for a layout of lanes.
        sep_id: id of the separator that closes documents in lanes.

    Raises:
        DataError: there is too little text to hold any out, or several languages are to be read in lanes.
    """
    training = SampleSpec(seed, f"train/{stage}", data.layout, data.sequence_length, data.static_copies)
    held_out = SampleSpec(seed, f"held-out/{stage}", data.layout, data.sequence_length, 1)
    languages = shards.manifest.get(LANGUAGES)
    kept_D = kept_documents(shards, data.deduplicate, plans)
    if languages is None:
        training_N2, held_out_N2 = split_documents(
            shards,
            data.held_out,
            seed,
            least_tokens=data.held_out_tokens,
            whole=data.layout.keeps_documents,
            kept_D=kept_D,
        )
        if isinstance(data.layout, LaneLayout):
            return (
                LaneStream(training, shards, training_N2, lanes, sep_id),
                LaneStream.of_held_out(held_out, shards, held_out_N2, lanes, sep_id),
            )
        return SampleStream(training, shards, training_N2, plans), SampleStream(held_out, shards, held_out_N2, None)
    if isinstance(data.layout, LaneLayout):
        raise DataError(
            f"{shards.name}: has {len(languages)} languages, but data.layout {data.layout.choice!r} reads one text;"
            " choose another layout, or give the sources of one language"
        )
    least_tokens = math.ceil(data.held_out_tokens / len(languages))
    split = {
        name: _split_language(name, shards, data.held_out, seed, range(first, end), least_tokens, kept_D)
        for name, first, end in languages
    }
    tokens_L = np.array([sum(range_tokens(shards, part_N2) for part_N2 in parts) for parts in split.values()])
    shares_L = smoothed(tokens_L / tokens_L.sum(), data.language_smoothing)
    streams = (
        {
            name: SampleStream(replace(spec, scope=f"{spec.scope}/{name}"), shards, parts[which], where)
            for name, parts in split.items()
        }
        for which, (spec, where) in enumerate([(training, plans), (held_out, None)])
    )
    train, held = streams
    return (
        LanguageStream(training, shards, list(train.values()), quotas(shares_L, BLOCK_SAMPLES)),
        LanguageStream(held_out, shards, list(held.values()), np.ones(len(languages), np.int64)),
    )


def _split_language(
    name: str,
    shards: TokenShards,
    held_out: float,
    seed: int,
    documents: range,
    least_tokens: int,
    kept_D: BoolArray | None,
) -> tuple[Ranges, Ranges]:
    try:
        return split_documents(shards, held_out, seed, documents, least_tokens=least_tokens, kept_D=kept_D)
    except DataError as error:
        raise DataError(f"data.languages.{name}: {error}") from error


def quotas(shares_L: Float64Array, size: int) -> Int64Array:
    """Whole numbers that sum to `size`, as close to the shares as possible (largest remainders), each at least 1."""
    exact_L = shares_L * (size - len(shares_L))
    quota_L = exact_L.astype(np.int64)
    left = size - len(shares_L) - int(quota_L.sum())
    quota_L[np.argsort(quota_L - exact_L, kind="stable")[:left]] += 1
    return quota_L + 1


class LanguageStream(SampleStream):
    """The mixed samples of several languages.

    Args:
        spec: of the mixture; its draws decide a sample's language and corruption.
        shards: of all languages.
        streams: one per language.
        quota_L: the number of samples of each language in a block.
    """

    def __init__(
        self, spec: SampleSpec, shards: TokenShards, streams: Sequence[SampleStream], quota_L: Int64Array
    ) -> None:
        self.spec = spec
        self.shards = shards
        self.streams = tuple(streams)
        self.documents_N2 = np.concatenate([stream.documents_N2 for stream in streams])
        self.quota_L = quota_L
        self._languages_of_block = lru_cache(maxsize=2)(self._drawn)

    def __reduce__(self) -> tuple[Any, ...]:
        return LanguageStream, (self.spec, self.shards, self.streams, self.quota_L)

    @property
    def tokens(self) -> int:
        return sum(stream.tokens for stream in self.streams)

    def epoch_length(self, epoch: int) -> int:
        """Samples in an epoch of all languages."""
        return sum(stream.epoch_length(epoch) for stream in self.streams)

    def languages(self, first: int, count: int) -> Int64Array:
        """The number of each sample's language, (B,)."""
        return np.concatenate(
            [self._languages_of_block(block)[low:high] for block, low, high in self._parts(first, count)]
        )

    def rows(self, first: int, count: int) -> tuple[Plan, Address]:
        """Samples `first` to `first + count` as rows of their plans, with their addresses."""
        plans: list[Plan] = []
        epochs: list[Int64Array] = []
        numbers: list[Int64Array] = []
        places: list[Int64Array] = []
        for block, low, high in self._parts(first, count):
            language_K = self._languages_of_block(block)
            for language in np.unique(language_K[low:high]).tolist():
                place_B = np.flatnonzero(language_K[low:high] == language)
                before = block * int(self.quota_L[language]) + int((language_K[:low] == language).sum())
                plan, address = self.streams[language].rows(before, place_B.size)
                plans.append(plan)
                epochs.append(address.epoch_B)
                numbers.append(address.sample_B + (language << _ADDRESS_BITS))
                places.append(place_B + block * language_K.size + low)
        order_B = np.argsort(np.concatenate(places))
        address = Address(np.concatenate(epochs)[order_B], np.concatenate(numbers)[order_B])
        return np.concatenate(plans)[order_B], address

    def _parts(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """The stretch of the stream as (block, from, to)."""
        size = int(self.quota_L.sum())
        while count:
            block, low = divmod(first, size)
            high = min(size, low + count)
            yield block, low, high
            first, count = first + high - low, count - (high - low)

    def _drawn(self, block: int) -> Int64Array:
        """The language of each sample of a block, (K,): each language as often as its quota, in random order."""
        size = int(self.quota_L.sum())
        place_K = self.spec.draw.permuted("language", np.arange(size), size=size, epoch=block)
        return np.searchsorted(np.cumsum(self.quota_L), place_K, side="right").astype(np.int64)

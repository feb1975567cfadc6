"""Several languages in one corpus, the small ones read more often than their share.

Devlin et al. 2019, multilingual BERT (google-research/bert, multilingual.md, "Data Source and Sampling"): a language
with the share P of the text is drawn with a probability in proportion to P^S, S = 0.7, for the vocabulary and for
training alike; no token says which language a text is in.

The languages stand one after another in the same shards, and the manifest says which documents are whose. Which
language a sample has is drawn without replacement from blocks of 65,536, in which every language has its exact number:
the shares hold more closely than independent draws would have them, and a sample's number alone says what it is.

Shapes: L languages, B samples asked for, K samples of a block.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertkit.data.config import DataConfig
from bertkit.data.layouts import Address
from bertkit.data.layouts.base import Plan, Ranges
from bertkit.data.shards import TokenShards
from bertkit.data.stream import SampleSpec, SampleStream, split_documents
from bertkit.data.text_sample import TextSample
from bertkit.errors import DataError
from bertkit.progress import Progress, silent_progress
from bertkit.text.sources import Block, Corpus, Position, open_corpus

BLOCK_SAMPLES = 1 << 16
LANGUAGES = "languages"
"""The manifest's entry: name, first document and the one behind the last, of each language."""
_ADDRESS_BITS = 40
"""Samples of different languages draw apart: the language stands above the number of any sample."""

Integers = NDArray[np.int64]


def smoothed(shares_L: Sequence[float] | NDArray[np.float64], smoothing: float) -> NDArray[np.float64]:
    """P^S, normalised: with S = 1 the shares themselves, with 0 the same for all."""
    powers_L = np.asarray(shares_L, dtype=np.float64) ** smoothing
    return np.asarray(powers_L / powers_L.sum())


@dataclass(frozen=True)
class LanguageCorpus(Corpus):
    """The corpora of several languages, one after another; no block has text of two.

    Attributes:
        names: of the languages.
        ends: the reader behind each language's last.
        smoothing: S.
    """

    names: tuple[str, ...] = ()
    ends: tuple[int, ...] = ()
    smoothing: float = 0.7

    @property
    def fingerprint(self) -> str:
        record = [super().fingerprint, self.names, self.ends, self.smoothing]
        return hashlib.sha256(json.dumps(record).encode()).hexdigest()

    def blocks(self, start: Position | None = None) -> Iterator[Block]:
        at = start or Position()
        for end in self.ends:
            if at.reader < end:
                yield from self._up_to(end).blocks(at)
                at = Position(end)

    def language_before(self, position: Position) -> str:
        """The language of the block that ends at this position."""
        find = bisect_right if position.parts else bisect_left
        return self.names[find(self.ends, position.reader)]

    def sample_text(self, megabytes: float, progress: Progress | None = None) -> Iterator[str]:
        """Lines of documents drawn evenly from every language, of about so many megabytes in the smoothed shares.

        One pass. A language that has less text than its share asks for is repeated.

        Raises:
            DataError: a language has no text.
        """
        room = int(megabytes * 1e6)
        samples: list[TextSample] = []
        with (progress or silent_progress)("reading a sample", unit="characters") as meter:
            for first, end in pairwise((0, *self.ends)):
                samples.append(TextSample(room))
                for block in self._up_to(end).blocks(Position(first)):
                    for _, lines in block.parts:
                        samples[-1].add(lines)
                    meter.update(sum(sample.read for sample in samples))
                # Shares only fall as languages are added, so what is dropped here would not be wanted later.
                rooms = self._rooms(samples, room)
                for sample, allowed in zip(samples, rooms, strict=True):
                    sample.shrink(allowed)
        for sample, wanted in zip(samples, rooms, strict=True):
            lines = list(sample.lines())
            whole, rest = divmod(wanted, max(1, sample.size))
            yield from lines * whole
            for line in lines:
                if rest <= 0:
                    break
                yield line
                rest -= len(line)

    def check_texts(self, documents: Mapping[str, int]) -> None:
        """Raise DataError if a language has no document."""
        for name in self.names:
            if not documents.get(name):
                raise DataError(
                    f"data.languages.{name}: no text; give other sources, or leave the language out of data.languages"
                )

    def _rooms(self, samples: Sequence[TextSample], room: int) -> list[int]:
        """Characters wanted of each language, of the languages that were read so far."""
        read = [sample.read for sample in samples]
        self.check_texts({**dict.fromkeys(self.names, 1), **dict(zip(self.names, read, strict=False))})
        return [int(part) for part in smoothed(read, self.smoothing) * min(room, sum(read))]

    def _up_to(self, end: int) -> Corpus:
        return Corpus(self.readers[:end], self.options, self.contents[:end], self.sources)


def open_languages(data: DataConfig, *, cache: Path | None = None, offline: bool = False) -> LanguageCorpus:
    """The corpora of `data.languages` as one.

    Raises:
        UsageError, DataError: as `open_corpus`.
    """
    corpora = [open_corpus(sources, data.reading, cache=cache, offline=offline) for sources in data.languages.values()]
    return LanguageCorpus(
        readers=[reader for corpus in corpora for reader in corpus.readers],
        options=data.reading,
        contents=[content for corpus in corpora for content in corpus.contents],
        sources=tuple(source for corpus in corpora for source in corpus.sources),
        names=tuple(data.languages),
        ends=tuple(np.cumsum([len(corpus.readers) for corpus in corpora]).tolist()),
        smoothing=data.language_smoothing,
    )


def language_documents(names: Sequence[str], ends: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """The manifest's entry out of the number of documents up to each language's end; one that lacks it has none."""
    found, first = [], 0
    for name in names:
        end = ends.get(name, first)
        found.append((name, first, end))
        first = end
    return found


def training_and_held_out(
    data: DataConfig, shards: TokenShards, *, seed: int, stage: int, plans: Path | None
) -> tuple[SampleStream, SampleStream]:
    """A stage's two streams of samples: of all languages where the shards have several.

    Training has the smoothed shares of `data.language_smoothing`; held out are documents of every language, which come
    in turn.

    Args:
        data: the stage's.
        shards: the corpus.
        seed: the recipe's.
        stage: its number.
        plans: where plans of training epochs are kept.

    Raises:
        DataError: if too little text is there to hold any out.
    """
    training = SampleSpec(seed, f"train/{stage}", data.layout, data.sequence_length, data.static_copies)
    held_out = SampleSpec(seed, f"held-out/{stage}", data.layout, data.sequence_length, 1)
    languages = shards.manifest.get(LANGUAGES)
    if languages is None:
        training_N2, held_out_N2 = split_documents(shards, data.held_out, seed)
        return SampleStream(training, shards, training_N2, plans), SampleStream(held_out, shards, held_out_N2, None)
    split = {
        name: _split_language(name, shards, data.held_out, seed, range(first, end)) for name, first, end in languages
    }
    token_D1 = shards.segment_start_S1[shards.document_start_D1]
    tokens_L = [int(token_D1[end] - token_D1[first]) for _, first, end in languages]
    shares_L = smoothed(np.array(tokens_L) / sum(tokens_L), data.language_smoothing)
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
    name: str, shards: TokenShards, held_out: float, seed: int, documents: range
) -> tuple[Ranges, Ranges]:
    try:
        return split_documents(shards, held_out, seed, documents)
    except DataError as fault:
        raise DataError(f"data.languages.{name}: {fault}") from fault


def quotas(shares_L: NDArray[np.float64], size: int) -> Integers:
    """Whole numbers that sum to `size`, as near to the shares as can be (largest remainders), each at least 1."""
    exact_L = shares_L * (size - len(shares_L))
    quota_L = exact_L.astype(np.int64)
    left = size - len(shares_L) - int(quota_L.sum())
    quota_L[np.argsort(quota_L - exact_L, kind="stable")[:left]] += 1
    return quota_L + 1


class LanguageStream(SampleStream):
    """The samples of several languages, mixed.

    Args:
        spec: of the mixture; its draws decide which language a sample has, and its corruption.
        shards: of all languages.
        streams: of each language.
        quota_L: how many samples of each a block has.
    """

    def __init__(
        self, spec: SampleSpec, shards: TokenShards, streams: Sequence[SampleStream], quota_L: Integers
    ) -> None:
        self.spec = spec
        self.shards = shards
        self.streams = tuple(streams)
        self.quota_L = quota_L
        self._languages_of_block = lru_cache(maxsize=2)(self._drawn)

    def __reduce__(self) -> tuple[Any, ...]:
        return LanguageStream, (self.spec, self.shards, self.streams, self.quota_L)

    def epoch_length(self, epoch: int) -> int:
        """Samples in an epoch of every language."""
        return sum(stream.epoch_length(epoch) for stream in self.streams)

    def languages(self, first: int, count: int) -> Integers:
        """Which language each sample has, by number, (B,)."""
        return np.concatenate(
            [self._languages_of_block(block)[low:high] for block, low, high in self._parts(first, count)]
        )

    def rows(self, first: int, count: int) -> tuple[Plan, Address]:
        """Samples `first` to `first + count` as rows of their plans, with their addresses."""
        plans: list[Plan] = []
        epochs: list[Integers] = []
        numbers: list[Integers] = []
        places: list[Integers] = []
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

    def _drawn(self, block: int) -> Integers:
        """The language of each sample of a block, (K,): every one as often as its quota says, in random order."""
        size = int(self.quota_L.sum())
        place_K = self.spec.draw.permuted("language", np.arange(size), size=size, epoch=block)
        return np.searchsorted(np.cumsum(self.quota_L), place_K, side="right").astype(np.int64)

"""Several languages in one corpus; small languages are read more often than their share.

Devlin et al. 2019, multilingual BERT (google-research/bert, multilingual.md, "Data Source and Sampling"): a language
with share P of the text is drawn with a probability proportional to P^S, S = 0.7, both for the vocabulary and in
training; no token marks a text's language.

The languages follow one another in the same shards, and the manifest lists the documents of each. Sibling
language_stream.py draws from them; it needs torch, which preparing text does not.

Shapes: L languages.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from bertkit.arrays import Float64Array
from bertkit.errors import DataError
from bertkit.progress import Progress, silent_progress
from bertkit.text.corpus import Block, Corpus, Position, TextSample
from bertkit.text.sources import open_corpus

if TYPE_CHECKING:
    from bertkit.data.config import DataConfig

LANGUAGES = "languages"
"""The manifest's entry: for each language its name, first document, and the document after its last."""


def smoothed(shares_L: Sequence[float] | Float64Array, smoothing: float) -> Float64Array:
    """P^S, normalised: the shares themselves for S = 1, uniform for S = 0."""
    powers_L = np.asarray(shares_L, dtype=np.float64) ** smoothing
    return np.asarray(powers_L / powers_L.sum())


@dataclass(frozen=True)
class LanguageCorpus(Corpus):
    """The corpora of several languages, one after another; no block contains text of two languages.

    Attributes:
        names: of the languages.
        ends: for each language, the index after its last reader.
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

    def sample_text(self, megabytes: float, progress: Progress = silent_progress) -> Iterator[str]:
        """Lines of documents drawn evenly from every language, about this many megabytes in the smoothed shares.

        Reads the text once. A language with less text than its share is repeated.

        Raises:
            DataError: a language has no text.
        """
        room = int(megabytes * 1e6)
        samples: list[TextSample] = []
        with progress("reading a sample", unit="characters") as meter:
            for first, end in pairwise((0, *self.ends)):
                samples.append(TextSample(room))
                for block in self._up_to(end).blocks(Position(first)):
                    for _, lines in block.parts:
                        samples[-1].add(lines)
                    meter.update(sum(sample.read for sample in samples))
                rooms = self._rooms(samples, room)
                if sum(sample.read for sample in samples) >= room:
                    # From here on, shares only decrease as languages are added: nothing dropped is needed later.
                    for sample, allowed in zip(samples, rooms, strict=True):
                        sample.shrink(allowed)
        for sample, wanted in zip(samples, rooms, strict=True):
            sample.shrink(wanted)
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
                    f"data.languages.{name}: its sources contain no text; correct them, or remove the language"
                )

    def _rooms(self, samples: Sequence[TextSample], room: int) -> list[int]:
        """Characters to keep of each language read so far."""
        read = [sample.read for sample in samples]
        self.check_texts({**dict.fromkeys(self.names, 1), **dict(zip(self.names, read, strict=False))})
        # A share that is the whole language is not cut by rounding.
        return [int(part + 1e-6) for part in smoothed(read, self.smoothing) * min(room, sum(read))]

    def _up_to(self, end: int) -> Corpus:
        return Corpus(self.readers[:end], self.options, self.contents[:end], self.sources)


def open_languages(
    data: DataConfig,
    *,
    offline: bool = False,
    commits: Mapping[str, str] | None = None,
    progress: Progress = silent_progress,
) -> LanguageCorpus:
    """The corpora of `data.languages` as one.

    Raises:
        UsageError, DataError: as `open_corpus`.
    """
    corpora = [
        open_corpus(sources, data.reading, offline=offline, commits=commits, progress=progress)
        for sources in data.languages.values()
    ]
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
    """The manifest's entry, from the number of documents up to each language's end; a missing language has none."""
    found, first = [], 0
    for name in names:
        end = ends.get(name, first)
        found.append((name, first, end))
        first = end
    return found

"""The sentences of a probe: from text, or from a treebank that is cut into words, a fair draw in bounded memory.

Own design (contract: SOURCE). What carries annotations beyond words is read where it is needed, by the readers of
bertkit.tasks.readers and the like.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np

from bertkit.data.random import Draw
from bertkit.errors import DataError, UsageError
from bertkit.files import sha256_of
from bertkit.probing.sentences import Sentence
from bertkit.tasks.examples import TaggedExample
from bertkit.tasks.readers.columns import read_conllu
from bertkit.text.lines import COMPRESSIONS
from bertkit.text.sentences import split_sentences
from bertkit.text.sources import open_corpus

TREEBANK = ".conllu"
_KEYS_AT_ONCE = 1024


@dataclass(frozen=True)
class Texts:
    """The sentences that are looked at.

    Attributes:
        sentences: in the order of the sources.
        available: how many the sources hold, repeats included.
        repeats: how many of them were left out because they had been read before.
        hashes: of each source's content, by its name.
    """

    sentences: list[Sentence]
    available: int
    repeats: int
    hashes: dict[str, str]


def read_texts(
    sources: Sequence[str], *, most: int | None = None, seed: int = 0, unique: bool = False, offline: bool = False
) -> Texts:
    """Sentences of all sources, or a random choice of them; no more than the choice is held in memory.

    Args:
        sources: text (files, directories, globs, `hub:ORG/NAME`, `builtin:pydocs`), whose lines are split into
            sentences, and treebanks (`.conllu`), which have words.
        most: so many are drawn, each as probable as any other; all where None.
        seed: of the draw.
        unique: leave out what is written like an earlier sentence.
        offline: use the network for nothing.

    Raises:
        UsageError: no source, or of an unknown kind.
        DataError: a source is not there, damaged, or holds no sentence.
    """
    if not sources:
        raise UsageError("no text to look at: give --data SOURCE, such as a .txt file or a .conllu treebank")
    treebanks = [source for source in sources if is_treebank(source)]
    others = [source for source in sources if not is_treebank(source)]
    hashes = {source: sha256_of(_existing(source)) for source in treebanks}
    streams: list[Iterable[Sentence]] = [_treebank(Path(source)) for source in treebanks]
    if others:
        corpus = open_corpus(others, offline=offline)
        hashes |= {entry["name"]: entry["content"] for entry in corpus.describe()}
        streams.append(_sentences(corpus.documents()))
    counter = _Counter(each for stream in streams for each in stream)
    drawn = _drawn(counter.unique() if unique else counter, most, Draw(seed, "probe"))
    if not drawn:
        raise DataError(f"{', '.join(sources)}: holds no sentence")
    return Texts(drawn, counter.count, counter.repeats, hashes)


def is_treebank(source: str) -> bool:
    """Whether a source is a treebank in CoNLL-U, by its name."""
    path = Path(source)
    return (path.with_suffix("") if path.suffix in COMPRESSIONS else path).suffix == TREEBANK


class _Counter:
    """Sentences as they go by, counted."""

    def __init__(self, sentences: Iterable[Sentence]) -> None:
        self._sentences = sentences
        self.count = self.repeats = 0

    def __iter__(self) -> Iterator[Sentence]:
        for sentence in self._sentences:
            self.count += 1
            yield sentence

    def unique(self) -> Iterator[Sentence]:
        seen: set[int] = set()
        for sentence in self:
            key = hash(sentence.words or sentence.text)
            if key in seen:
                self.repeats += 1
                continue
            seen.add(key)
            yield sentence


def _drawn(sentences: Iterable[Sentence], most: int | None, draw: Draw) -> list[Sentence]:
    if most is None:
        return list(sentences)
    # Those with the smallest of one random number each are a uniform choice.
    least: list[tuple[float, int, Sentence]] = []
    for number, (key, sentence) in enumerate(zip(_keys(draw), sentences, strict=False)):
        if len(least) < most:
            heapq.heappush(least, (-key, -number, sentence))
        elif -key > least[0][0]:
            heapq.heapreplace(least, (-key, -number, sentence))
    return [sentence for _, _, sentence in sorted(least, key=lambda entry: -entry[1])]


def _keys(draw: Draw) -> Iterator[float]:
    """One random number each sentence, without end; computed by the thousand."""
    for first in count(0, _KEYS_AT_ONCE):
        yield from draw.uniform("sentence", sample=np.arange(first, first + _KEYS_AT_ONCE)).tolist()


def _sentences(documents: Iterable[list[str]]) -> Iterator[Sentence]:
    for number, lines in enumerate(documents, 1):
        within = 0
        for line in lines:
            for text in split_sentences(line):
                within += 1
                yield Sentence(f"document {number}, sentence {within}", text)


def _treebank(path: Path) -> Iterator[Sentence]:
    for example in read_conllu(path).examples:
        assert isinstance(example, TaggedExample)
        yield Sentence(example.id, words=example.words)


def _existing(source: str) -> Path:
    path = Path(source).expanduser()
    if not path.is_file():
        raise DataError(f"{source}: no such file")
    return path

"""The sentences of a probe, from text or from a treebank: all, or a uniform sample in bounded memory.

Contract: SOURCE. Annotations beyond words are read by the readers of bertkit.tasks.readers.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from pathlib import Path

from bertkit.data.random import Draw
from bertkit.errors import DataError, UsageError
from bertkit.files import sha256_of
from bertkit.probing.sentences import Sentence
from bertkit.tasks.examples import TaggedExample
from bertkit.tasks.readers.columns import read_conllu
from bertkit.text.lines import ending
from bertkit.text.sentences import split_sentences
from bertkit.text.sources import open_corpus

TREEBANK = ".conllu"


@dataclass(frozen=True)
class DrawnSentences:
    """The sentences of a probe.

    Attributes:
        sentences: the sentences, in the order of the sources.
        available: number of sentences in the sources, including repeats.
        repeats: number of sentences left out because they repeat an earlier one.
        hashes: hash of each source's content, by its name.
    """

    sentences: list[Sentence]
    available: int
    repeats: int
    hashes: dict[str, str]


def read_texts(
    sources: Sequence[str], *, most: int | None = None, seed: int = 0, unique: bool = False, offline: bool = False
) -> DrawnSentences:
    """Sentences of all sources, or a random sample of them; only the sample is kept in memory.

    Args:
        sources: text (files, directories, globs, `hub:ORG/NAME`, `builtin:pydocs`), which is split line by line into
            sentences, and treebanks (`.conllu`), which are already split into words.
        most: number of sentences to draw uniformly; all if None.
        seed: seed of the draw.
        unique: leave out repeated sentences.
        offline: do not use the network.

    Raises:
        UsageError: no source, or an unknown kind of source.
        DataError: a source is missing or damaged, or there are no sentences.
    """
    if not sources:
        raise UsageError("no text to probe: give --data SOURCE, such as a .txt file or a .conllu treebank")
    treebanks = list(dict.fromkeys(source for source in sources if is_treebank(source)))
    others = [source for source in sources if not is_treebank(source)]
    hashes = {source: sha256_of(existing(source)) for source in treebanks}
    streams: list[Iterable[Sentence]] = [_treebank(existing(source)) for source in treebanks]
    if others:
        corpus = open_corpus(others, offline=offline)
        hashes |= corpus.hashes
        streams.append(_sentences(corpus.documents()))
    available = repeats = 0
    seen: set[int] = set()

    def counted() -> Iterator[Sentence]:
        nonlocal available, repeats
        for sentence in chain.from_iterable(streams):
            available += 1
            if unique and (key := hash(sentence.words or sentence.text)) in seen:
                repeats += 1
                continue
            if unique:
                seen.add(key)
            yield sentence

    drawn = _drawn(counted(), most, Draw(seed, "probe"))
    if not drawn:
        raise DataError(f"{', '.join(sources)}: contains no sentences")
    return DrawnSentences(drawn, available, repeats, hashes)


def existing(source: str, *, option: str = "--data") -> Path:
    """The path of a file.

    Raises:
        DataError: no such file; suggests the closest name in the same directory.
    """
    path = Path(source).expanduser()
    if not path.is_file():
        beside = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        near = get_close_matches(path.name, beside, n=1)
        raise DataError(f"{option} {source}: no such file" + (f"; did you mean {near[0]}?" if near else ""))
    return path


def is_treebank(source: str) -> bool:
    """Whether a source's name is that of a CoNLL-U treebank."""
    return ending(Path(source)) == TREEBANK


def _drawn(sentences: Iterable[Sentence], most: int | None, draw: Draw) -> list[Sentence]:
    """A uniform sample in the original order: the sentences with the smallest random keys."""
    if most is None:
        return list(sentences)
    keyed = (
        (key, number, sentence)
        for number, (sentence, key) in enumerate(zip(sentences, draw.uniform_in_turn("sentence"), strict=False))
    )
    least = heapq.nsmallest(most, keyed, key=lambda entry: entry[:2])
    return [sentence for _, _, sentence in sorted(least, key=lambda entry: entry[1])]


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

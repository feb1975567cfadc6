"""Which words can replace one another: those of one part of speech, as tagged in a file or derived from the texts.

Tang et al. 2019, arXiv:1903.12136, section 3.3, take another word of the same part of speech, drawn by its frequency in
the training texts. A tagger would need another model. Instead, either every word has the tag that an annotated file
gives it most often, regardless of the sentence (a unigram tagger), or classes are derived from the texts alone, after
Schütze 1995, "Distributional part-of-speech tagging": words with similar neighbours on both sides form a class.

Quirks of the derived classes: only the most common words have one; classes are not parts of speech (weekdays may be
one); neighbours are compared by the square roots of their shares, which keeps frequent words from dominating, and
clustered by k-means; Schütze uses cosines and Buckshot.

Shapes: N words, C classes, F neighbours, R dimensions kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from bertkit.arrays import Float64Array, Int64Array
from bertkit.data.random import Draw
from bertkit.errors import DataError
from bertkit.tasks.augmentation.words import WordSplitText
from bertkit.tasks.readers.columns import CONLLU_FIELDS, UPOS, WORD
from bertkit.text.lines import read_lines

CLASSES = 50
"""About as many as the Penn Treebank has tags."""
KNOWN_WORDS = 5_000
NEIGHBOURS = 250
"""As in Schütze."""
LEAST_COUNT = 3
_DIMENSIONS = 50
_ROUNDS = 30


@dataclass(frozen=True)
class WordClass:
    """Words that can replace one another.

    Attributes:
        words: sorted.
        ends_N: cumulative sum of the words' counts.
    """

    words: tuple[str, ...]
    ends_N: Int64Array

    def another(self, word: str, share: float) -> str | None:
        """Another word of the class, drawn by frequency; None if there is no other.

        Args:
            word: one of the class.
            share: a uniform number from [0, 1).
        """
        at = bisect_left(self.words, word)
        before = int(self.ends_N[at - 1]) if at else 0
        own = int(self.ends_N[at]) - before
        rest = int(self.ends_N[-1]) - own
        if rest == 0:
            return None
        drawn = int(share * rest)
        # Skip the word's own interval.
        return self.words[int(np.searchsorted(self.ends_N, drawn + own * (drawn >= before), side="right"))]


class WordClasses:
    """The class of each word that has one.

    Args:
        class_of: a class's name by word.
        counts: how often each word occurs in the texts; a word that does not occur is in no class.
    """

    def __init__(self, class_of: Mapping[str, str], counts: Mapping[str, int]) -> None:
        members: dict[str, list[str]] = defaultdict(list)
        for word in sorted(counts):
            name = class_of.get(word, class_of.get(word.lower()))
            if name is not None:
                members[name].append(word)
        self._class_of: dict[str, WordClass] = {}
        for words in members.values():
            own = WordClass(tuple(words), np.cumsum([counts[word] for word in words]))
            self._class_of |= dict.fromkeys(words, own)

    def __len__(self) -> int:
        return len(self._class_of)

    def another(self, word: str, share: float) -> str | None:
        """Another word of the same class; None if there is none."""
        own = self._class_of.get(word)
        return None if own is None else own.another(word, share)


def count_words(texts: Iterable[str]) -> Counter[str]:
    """How often each word occurs."""
    return Counter(chain.from_iterable(WordSplitText.of(text).words for text in texts))


def read_tags(path: Path) -> dict[str, str]:
    """Each word's most frequent tag (the alphabetically first if tied); words are lowercased.

    Args:
        path: CoNLL-U (the universal tag is used), or lines of a word, a tab and its tag; blank lines and comments (#)
            are skipped.

    Raises:
        DataError: a line of another form, or no tagged word.
    """
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for number, line in enumerate(chain.from_iterable(read_lines(path)), start=1):
        fields = line.split("\t")
        if not line.strip() or (line.startswith("#") and len(fields) == 1):
            continue
        if len(fields) == CONLLU_FIELDS:
            # Ranges (1-2) and empty nodes (8.1) are not words.
            if fields[0].isdigit():
                counts[fields[WORD].lower()][fields[UPOS]] += 1
        elif len(fields) == 2:
            counts[fields[0].lower()][fields[1]] += 1
        else:
            raise DataError(
                f"{path}, line {number}: {len(fields)} fields; expected CoNLL-U's {CONLLU_FIELDS}, or a word, a tab"
                " and its tag"
            )
    if not counts:
        raise DataError(f"{path}: contains no tagged words")
    return {word: min(tags, key=lambda tag: (-tags[tag], tag)) for word, tags in counts.items()}


def learnt_classes(texts: Sequence[str]) -> dict[str, str]:
    """Classes of the most common words by their neighbours in these texts; the order of the texts does not matter.

    Returns:
        A class's number, as text, by word.
    """
    sentences = [WordSplitText.of(text).words for text in texts]
    counts = Counter(chain.from_iterable(sentences))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    words = [word for word in ranked[:KNOWN_WORDS] if counts[word] >= LEAST_COUNT]
    if len(words) <= CLASSES:
        return {}
    share_NF = _neighbour_shares(sentences, words, ranked[:NEIGHBOURS])
    left_NR, size_R, _ = np.linalg.svd(share_NF, full_matrices=False)
    kept = min(_DIMENSIONS, size_R.size)
    number_N = _k_means(left_NR[:, :kept] * size_R[:kept], CLASSES)
    return {word: str(number) for word, number in zip(words, number_N.tolist(), strict=True)}


def _neighbour_shares(
    sentences: Sequence[Sequence[str]], words: Sequence[str], neighbours: Sequence[str]
) -> Float64Array:
    """Square roots of the neighbours' shares to the left and to the right of each word, (N, 2 F + 4); the end of a text
    and all other words together count as one neighbour each."""
    column = {word: number for number, word in enumerate(neighbours)}
    other, end = len(column), len(column) + 1
    row = {word: number for number, word in enumerate(words)}
    count_N2F = np.zeros((len(words), 2, len(column) + 2))
    rows: list[int] = []
    left: list[int] = []
    right: list[int] = []
    for sentence in sentences:
        columns = [end, *(column.get(word, other) for word in sentence), end]
        for place, word in enumerate(sentence):
            number = row.get(word)
            if number is not None:
                rows.append(number)
                left.append(columns[place])
                right.append(columns[place + 2])
    for side, own in enumerate((left, right)):
        np.add.at(count_N2F[:, side], (np.array(rows), np.array(own)), 1.0)
    share_N2F = count_N2F / count_N2F.sum(axis=2, keepdims=True)
    return np.asarray(np.sqrt(share_N2F).reshape(len(words), -1))


def _k_means(point_NR: Float64Array, classes: int) -> Int64Array:
    """The class of each point: k-means, initialised as in k-means++ (Arthur and Vassilvitskii 2007)."""
    draw = Draw(0, "word-classes")
    centre_CR = point_NR[:1]
    distance_N = ((point_NR - centre_CR[0]) ** 2).sum(axis=1)
    for number in range(1, classes):
        ends_N = np.cumsum(distance_N)
        at = int(np.searchsorted(ends_N, float(draw.uniform("centre", position=number)) * ends_N[-1], side="right"))
        centre = point_NR[min(at, len(point_NR) - 1)]
        centre_CR = np.vstack([centre_CR, centre])
        distance_N = np.minimum(distance_N, ((point_NR - centre) ** 2).sum(axis=1))
    number_N = np.full(len(point_NR), -1)
    for _ in range(_ROUNDS):
        nearest_N = ((centre_CR**2).sum(axis=1) - 2 * point_NR @ centre_CR.T).argmin(axis=1)
        if (nearest_N == number_N).all():
            break
        number_N = nearest_N
        # A centre that lost all its points stays where it is.
        for number in np.unique(number_N):
            centre_CR[number] = point_NR[number_N == number].mean(axis=0)
    return np.asarray(number_N)

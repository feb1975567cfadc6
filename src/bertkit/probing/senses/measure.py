"""Word senses by nearest neighbours: are a word's vectors nearest to others with the same sense?

Wiedemann et al. 2019, "Does BERT make any sense?", arXiv:1909.10430: an occurrence gets the sense of the majority of
its k nearest training occurrences of the same word by cosine, on the concatenation of the last four layers. k is at
most the number of examples of the word's rarest sense. Of equally frequent senses, the one that reaches this frequency
first wins, counting from the nearest neighbour. A word without training examples has no answer, or with back-off, the
most frequent sense of its lemma.

Shapes: M test occurrences of a word, N training occurrences, D width, L layers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from bertkit.arrays import Float64Array


def cosines(tests: Sequence[Tensor], trains: Sequence[Tensor]) -> Float64Array:
    """Cosines of concatenated layers, (M, N), from (M, D) and (N, D) per layer; 0 for a zero vector."""
    dots_MN = reduce(torch.add, (a_MD.double() @ b_ND.double().T for a_MD, b_ND in zip(tests, trains, strict=True)))
    squares_M, squares_N = (
        reduce(torch.add, (each.double().square().sum(1) for each in side)) for side in (tests, trains)
    )
    lengths_MN = (squares_M[:, None] * squares_N[None, :]).sqrt()
    found: Float64Array = (dots_MN / lengths_MN.clamp(min=1e-300)).numpy()
    return found


def vote(senses: Sequence[str]) -> str:
    """The majority sense of the neighbours that vote, nearest first."""
    highest = max(Counter(senses).values())
    counts: Counter[str] = Counter()
    for sense in senses:
        counts[sense] += 1
        if counts[sense] == highest:
            break
    return sense


class FrequentSenses:
    """The back-off: each lemma's most frequent sense in the training data; the first of equally frequent ones.

    An example is the lemma, part of speech and sense of a training occurrence.
    """

    def __init__(self, examples: Iterable[tuple[str, str, str]]) -> None:
        self._counts: defaultdict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
        for lemma, pos, key in examples:
            self._counts[lemma, pos][key] += 1
            self._counts[(lemma,)][key] += 1

    def of(self, lemma: str, pos: str) -> str | None:
        """The sense of a lemma with this part of speech, else of the lemma; None if it does not occur."""
        counts = self._counts.get((lemma, pos)) or self._counts.get((lemma,))
        # most_common keeps the order of first occurrence among equals.
        return counts.most_common(1)[0][0] if counts else None


@dataclass(frozen=True)
class SenseScores:
    """Number of test words, of words with an answer, and of words with a correct answer."""

    instances: int
    attempted: int
    right: int

    @property
    def coverage(self) -> float:
        return self.attempted / self.instances if self.instances else float("nan")

    @property
    def precision(self) -> float:
        """Precision on words with an answer; called accuracy if words without examples are skipped."""
        return self.right / self.attempted if self.attempted else float("nan")

    @property
    def f1(self) -> float:
        """2PR / (P + R) with the recall over all words; equal to the accuracy if all have an answer."""
        return 2 * self.right / (self.attempted + self.instances) if self.instances else float("nan")


def sense_scores(gold: Sequence[Sequence[str]], answers: Sequence[str | None]) -> SenseScores:
    """Counts of a test set; an answer is correct if it is one of the gold senses."""
    attempted = [(keys, answer) for keys, answer in zip(gold, answers, strict=True) if answer is not None]
    return SenseScores(len(gold), len(attempted), sum(answer in keys for keys, answer in attempted))


def backed_off(answers: Sequence[str | None], others: Sequence[str | None]) -> list[str | None]:
    """The answers, replaced by the back-off's if there is none."""
    return [other if answer is None else answer for answer, other in zip(answers, others, strict=True)]


def left_out_purity(similarity_NN: Float64Array, senses: Sequence[str]) -> float:
    """The share of a word's occurrences whose nearest other occurrence has the same sense."""
    apart_NN = similarity_NN.copy()
    np.fill_diagonal(apart_NN, -np.inf)
    nearest_N = apart_NN.argmax(1).tolist()
    return float(np.mean([senses[number] == senses[near] for number, near in enumerate(nearest_N)]))


def knn_answers(
    tests: Mapping[str, Sequence[int]],
    trains: Mapping[str, Sequence[int]],
    tables: Sequence[tuple[Tensor, Tensor]],
    senses: Sequence[str],
    ks: Sequence[int],
    *,
    capped: bool = True,
) -> dict[int, list[str | None]]:
    """For each k, the answer of every test occurrence; None if its word has no training occurrence.

    Args:
        tests: rows of the test table by word; every row belongs to one word.
        trains: rows of the training table by word.
        tables: test and training states of each layer to concatenate.
        senses: senses of the training rows.
        ks: numbers of neighbours that vote.
        capped: whether at most as many vote as the word's rarest sense has examples, as in the paper.
    """
    answers: dict[int, list[str | None]] = {k: [None] * sum(map(len, tests.values())) for k in ks}
    for word, rows in tests.items():
        examples = trains.get(word, ())
        if not examples:
            continue
        similarity_MN = cosines(
            [test_MD[list(rows)] for test_MD, _ in tables], [train_ND[list(examples)] for _, train_ND in tables]
        )
        own = [senses[number] for number in examples]
        most = min(Counter(own).values()) if capped else len(own)
        # From nearest to furthest; ties in order of occurrence.
        nearest_MK = np.argsort(-similarity_MN, axis=1, kind="stable")[:, : min(most, max(ks))]
        for row, nearest_K in zip(rows, nearest_MK.tolist(), strict=True):
            near = [own[number] for number in nearest_K]
            for k in ks:
                answers[k][row] = vote(near[:k])
    return answers

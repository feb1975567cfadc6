"""Scores by class and confusion against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest

from bertkit.metrics.per_class import class_scores, confusion


def test_scores_equal_scikit_learns() -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    generator = np.random.default_rng(5)
    labels = ["a", "b", "c", "d"]
    gold = [str(generator.choice(labels[:3])) for _ in range(97)]
    guess = [str(generator.choice(labels)) for _ in range(97)]
    found = class_scores([frozenset({(each,)}) for each in guess], [frozenset({(each,)}) for each in gold])
    precision, recall, f1, count = sklearn.precision_recall_fscore_support(gold, guess, labels=labels, zero_division=0)
    for number, name in enumerate(labels):
        scores = found[name]
        assert scores["count"] == count[number]
        assert scores["precision"] == pytest.approx(precision[number])
        assert (scores["recall"] or 0.0) == pytest.approx(recall[number])
        assert scores["f1"] == pytest.approx(f1[number])
    assert found["d"]["recall"] is None
    assert list(found)[-1] == "d"
    assert confusion(guess, gold, labels) == sklearn.confusion_matrix(gold, guess, labels=labels).tolist()


def test_an_entity_counts_where_type_and_place_are_right() -> None:
    guess = [frozenset({("PER", 0, 2), ("LOC", 4, 5)}), frozenset()]
    gold = [frozenset({("PER", 0, 2), ("LOC", 4, 6)}), frozenset({("PER", 1, 2)})]
    found = class_scores(guess, gold)
    assert found["PER"] == {"count": 2, "predicted": 1, "precision": 1.0, "recall": 0.5, "f1": pytest.approx(2 / 3)}
    assert found["LOC"] == {"count": 1, "predicted": 1, "precision": 0.0, "recall": 0.0, "f1": 0.0}

"""Dev from one file: shares of every label, whole groups, the same rows for a seed, and errors."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bertkit.errors import UsageError
from bertkit.finetuning.splitting import duplicates, folds, held_out
from bertkit.tasks.examples import Answer, QuestionExample, SentenceExample, Split, TaggedExample, TextExample

LABELS = ["a"] * 61 + ["b"] * 27 + ["c"] * 12


def texts(labels: list[Any], groups: list[str] | None = None) -> Split:
    shuffled = np.random.default_rng(0).permutation(len(labels)).tolist()
    examples: list[Any] = [TextExample(str(k), f"t{k}", None, labels[i]) for k, i in enumerate(shuffled)]
    return Split(examples, source="mine.csv", groups=() if groups is None else tuple(groups[i] for i in shuffled))


def counts(split: Split, positions: Any) -> Counter[Any]:
    return Counter(split.examples[position].label for position in positions.tolist())  # type: ignore[union-attr]


def test_a_share_has_its_share_of_every_label() -> None:
    split = texts(LABELS)
    dev = held_out(split, 0.2, 0)
    assert len(dev) == 20
    assert counts(split, dev) == {"a": 12, "b": 6, "c": 2}, "61 / 5, 27 / 5 and 12 / 5, by largest remainders"
    assert dev.tolist() == sorted(set(dev.tolist()))


def test_the_seed_decides_the_rows_and_nothing_else_does() -> None:
    split = texts(LABELS)
    assert held_out(split, 0.2, 7).tolist() == held_out(texts(LABELS), 0.2, 7).tolist()
    assert held_out(split, 0.2, 7).tolist() != held_out(split, 0.2, 8).tolist()
    assert folds(split, 5, 7).tolist() == folds(texts(LABELS), 5, 7).tolist()
    assert folds(split, 5, 7).tolist() != folds(split, 5, 8).tolist()
    # Recorded runs depend on these rows: later versions must draw the same.
    assert held_out(split, 0.05, 0).tolist() == GOLDEN


GOLDEN = [9, 12, 44, 47, 88]


@pytest.mark.parametrize("count", [2, 5, 12])
def test_folds_are_as_large_and_as_stratified_as_scikit_learns(count: int) -> None:
    from sklearn.model_selection import StratifiedKFold

    split = texts(LABELS)
    fold_N = folds(split, count, 3)
    labels = [each.label for each in split.examples]  # type: ignore[union-attr]
    theirs = StratifiedKFold(count, shuffle=True, random_state=0).split(np.zeros(len(labels)), labels)
    expected = [Counter(labels[k] for k in dev) for _, dev in theirs]
    found = [counts(split, np.flatnonzero(fold_N == fold)) for fold in range(count)]
    for label in "abc":
        assert sorted(each[label] for each in found) == sorted(each[label] for each in expected)
    sizes = [sum(each.values()) for each in found]
    assert max(sizes) - min(sizes) <= 1
    assert sum(sizes) == len(labels)


def groups_of(sizes: list[int]) -> list[str]:
    return [f"g{number}" for number, size in enumerate(sizes) for _ in range(size)]


def test_a_group_is_never_on_both_sides() -> None:
    generator = np.random.default_rng(1)
    sizes = generator.integers(1, 9, 40).tolist()
    names = groups_of(sizes)
    labels = [str(each) for each in generator.choice(["x", "y"], len(names), p=[0.7, 0.3])]
    split = texts(labels, names)
    for seed in range(5):
        dev = set(held_out(split, 0.2, seed).tolist())
        sides: dict[str, set[bool]] = {}
        for position, group in enumerate(split.groups):
            sides.setdefault(group, set()).add(position in dev)
        assert all(len(each) == 1 for each in sides.values())
        assert abs(len(dev) / len(names) - 0.2) < 0.03
        shares = counts(split, np.array(sorted(dev)))
        assert abs(shares["x"] / len(dev) - 0.7) < 0.1


def test_folds_keep_groups_whole_and_labels_balanced_as_scikit_learns_do() -> None:
    from sklearn.model_selection import StratifiedGroupKFold

    generator = np.random.default_rng(2)
    names = groups_of(generator.integers(1, 9, 60).tolist())
    labels = [str(each) for each in generator.choice(["x", "y", "z"], len(names), p=[0.6, 0.3, 0.1])]
    split = texts(labels, names)
    fold_N = folds(split, 5, 0)
    assert all(len(set(fold_N[np.array(split.groups) == group].tolist())) == 1 for group in set(names))
    own = [each.label for each in split.examples]  # type: ignore[union-attr]
    theirs = np.empty(len(own), dtype=int)
    for fold, (_, dev) in enumerate(StratifiedGroupKFold(5).split(np.zeros(len(own)), own, split.groups)):
        theirs[dev] = fold
    assert spread(fold_N, own) <= spread(theirs, own) + 0.02


def test_groups_are_dealt_from_the_largest_each_into_the_smallest_fold_so_far() -> None:
    sizes = [9, 8, 7, 5, 3, 2, 1]
    split = texts(["x"] * sum(sizes), groups_of(sizes))
    fold_N = folds(split, 3, 0)
    of_group = {group: int(fold_N[k]) for k, group in enumerate(split.groups)}
    found = [sorted(Counter(split.groups)[group] for group in of_group if of_group[group] == fold) for fold in range(3)]
    assert sorted(found) == [[1, 2, 9], [3, 8], [5, 7]]


def test_a_dev_set_with_one_example_of_each_label_is_enough() -> None:
    split = texts(["a", "b", "c"] * 10)
    assert counts(split, held_out(split, 0.1, 0)) == {"a": 1, "b": 1, "c": 1}


def spread(fold_N: Any, labels: list[Any]) -> float:
    """The largest difference between a label's share of a fold and its share of all."""
    whole = Counter(labels)
    return max(
        abs(whole[label] / len(labels) - sum(labels[k] == label for k in np.flatnonzero(fold_N == fold)) / size)
        for fold in set(fold_N.tolist())
        for size in [int((fold_N == fold).sum())]
        for label in whole
    )


def test_documents_and_contexts_are_groups_by_themselves() -> None:
    tagged = Split([TaggedExample(str(k), ("w",), ("O",), k // 4) for k in range(40)], source="mine.conll")
    dev = held_out(tagged, 0.25, 0)
    assert len(dev) in (8, 12)
    assert all(count == 4 for count in Counter(position // 4 for position in dev.tolist()).values())
    asked = [QuestionExample(str(k), "q", f"context {k // 5}", (Answer("c", 0),)) for k in range(50)]
    fold_N = folds(Split([*asked], source="mine.json"), 5, 0)
    assert all(len(set(fold_N[k : k + 5].tolist())) == 1 for k in range(0, 50, 5))


def repeating(pairs: list[tuple[int, str]]) -> Split:
    """Examples by the number of their text and their label."""
    examples = [TextExample(str(k), f"t{text}", "same", label) for k, (text, label) in enumerate(pairs)]
    return Split([*examples], source="mine.csv")


def test_equal_texts_are_on_one_side_whatever_their_labels() -> None:
    generator = np.random.default_rng(5)
    numbers = generator.integers(80, size=200).tolist()
    split = repeating(list(zip(numbers, LABELS * 2, strict=True)))
    texts_N = np.array([each.text for each in split.examples])  # type: ignore[union-attr]
    assert duplicates(split) == 200 - len(set(texts_N)) > 80
    for seed in range(3):
        dev = held_out(split, 0.2, seed)
        assert not set(texts_N[dev]) & set(np.delete(texts_N, dev))
        assert abs(len(dev) - 40) <= 2
        assert dev.tolist() == held_out(split, 0.2, seed).tolist()
        fold_N = folds(split, 4, seed)
        assert all(len(set(fold_N[texts_N == text].tolist())) == 1 for text in set(texts_N))
    apart = held_out(split, 0.2, 0, together=False)
    assert set(texts_N[apart]) & set(np.delete(texts_N, apart))
    sentences = Split([SentenceExample(str(k), (f"t{k // 2}", "other"), 0.5) for k in range(40)], source="mine.csv")
    dev = held_out(sentences, 0.5, 0)
    assert dev[::2].tolist() == (dev[1::2] - 1).tolist(), "both of every pair of rows"


def test_texts_that_occur_once_are_split_as_they_always_were() -> None:
    split = repeating([(number, label) for number, label in enumerate(LABELS)])
    assert duplicates(split) == 0
    for seed in range(3):
        assert held_out(split, 0.2, seed).tolist() == held_out(split, 0.2, seed, together=False).tolist()
        assert folds(split, 4, seed).tolist() == folds(split, 4, seed, together=False).tolist()


def test_a_column_of_groups_decides_alone() -> None:
    split = texts(["a", "b"] * 20, [f"g{k // 4}" for k in range(40)])
    same = Split([replace(each, text="same") for each in split.examples], source="mine.csv", groups=split.groups)  # type: ignore[type-var]
    assert held_out(same, 0.3, 0).tolist() == held_out(split, 0.3, 0).tolist()
    assert duplicates(same) == 0


def test_scores_are_stratified_by_their_deciles() -> None:
    split = texts([float(k) for k in range(100)])
    scores = [split.examples[k].label for k in held_out(split, 0.2, 0).tolist()]  # type: ignore[union-attr]
    assert Counter(int(score) // 10 for score in scores) == dict.fromkeys(range(10), 2)  # type: ignore[arg-type]


def test_no_label_is_devs_alone() -> None:
    labels: list[Any] = ["a"] * 30 + ["b"] * 29 + ["rare"]
    for seed in range(20):
        split = texts(labels)
        train = np.setdiff1d(np.arange(60), held_out(split, 0.5, seed))
        assert set(counts(split, train)) == {"a", "b", "rare"}
    sets = texts([("x",), ("x", "y")] * 20 + [("only",)])
    for seed in range(20):
        train = np.setdiff1d(np.arange(41), held_out(sets, 0.5, seed))
        assert any("only" in labels for labels in counts(sets, train))


@pytest.mark.parametrize(
    ("labels", "share", "message"),
    [
        (["a", "b", "c"] * 10, 0.05, r"--split 0.05 .*: 2 of the 30 examples of mine.csv are fewer than its 3 labels"),
        ([f"{n}.5" for n in range(30)], 0.2, r"6 of .* 30 labels; .*; to predict numbers, give --kind regression$"),
        ([1.0, 2.0, 3.0], 0.1, "0 of the 3 examples of mine.csv are no example; hold out more, or give --dev FILE"),
    ],
)
def test_a_dev_smaller_than_its_classes_is_refused(labels: list[Any], share: float, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        held_out(texts(labels), share, 0)


def test_one_group_cannot_be_split() -> None:
    with pytest.raises(UsageError, match=r"the 1 groups of mine.csv cannot be split this way; .*another column"):
        held_out(texts(["a", "b"] * 10, ["g"] * 20), 0.2, 0)
    with pytest.raises(
        UsageError, match=r"the 1 different texts of mine.csv cannot be split this way; .*duplicates=apart"
    ):
        held_out(repeating([(0, "a")] * 20), 0.2, 0)


def test_folds_above_the_examples_or_groups_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--folds 7 .*: mine.csv has only 6 examples; use at most that many folds"):
        folds(texts(["a", "b"] * 3), 7, 0)
    with pytest.raises(UsageError, match=r"mine\.csv has only 3 groups"):
        folds(texts(["a", "b"] * 3, list("gghhii")), 4, 0)
    with pytest.raises(UsageError, match=r"mine\.csv has only 2 different texts"):
        folds(repeating([(0, "a"), (1, "b")] * 3), 4, 0)
    with pytest.raises(
        UsageError, match=r"all examples of 'rare' are in one fold, so its model would have none to train on"
    ):
        folds(texts(["a"] * 9 + ["rare"]), 5, 0)


def test_memory_does_not_grow_with_the_product_of_examples_and_sets_of_labels() -> None:
    # Tables of units and sets would take 128 and 32 MB.
    labels = [tuple(name for bit, name in enumerate("abcdefghijkl") if n >> bit & 1) for n in range(4000)]
    single, grouped = texts(labels), texts(labels, [str(number % 1000) for number in range(4000)])
    tracemalloc.start()
    try:
        sizes = [len(held_out(each, 0.5, 0)) for each in (single, grouped)]
        assert tracemalloc.get_traced_memory()[1] < 15_000_000
    finally:
        tracemalloc.stop()
    assert sizes == [2000, 2000]

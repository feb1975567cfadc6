"""Named layer maps equal the papers', and invalid ones are refused."""

from __future__ import annotations

import pytest

from bertkit.errors import UsageError
from bertkit.models.conversion.layer_choice import chosen_layers, layer_map


def test_maps_are_those_of_the_papers() -> None:
    tiny = layer_map("uniform", student=4, teacher=12)
    assert tiny == ((1, 3), (2, 6), (3, 9), (4, 12))
    assert layer_map("skip", student=6, teacher=12) == ((1, 2), (2, 4), (3, 6), (4, 8), (5, 10))
    assert layer_map("last", student=6, teacher=12) == ((1, 7), (2, 8), (3, 9), (4, 10), (5, 11))
    assert layer_map("first", student=3, teacher=6) == ((1, 1), (2, 2), (3, 3))
    assert layer_map("top", student=6, teacher=12) == ((6, 12),)
    assert layer_map("top", student=4, teacher=2) == ((4, 2),)
    assert layer_map([[0, 0], [2, 5]], student=2, teacher=5) == ((0, 0), (2, 5))


def test_choices_are_those_of_the_papers() -> None:
    assert chosen_layers("uniform", of=12, keep=6) == [0, 2, 4, 7, 9, 11]
    assert chosen_layers("first", of=12, keep=3) == [0, 1, 2]
    assert chosen_layers("last", of=12, keep=3) == [9, 10, 11]
    assert chosen_layers("skip", of=6, keep=3) == [1, 3, 5]
    assert chosen_layers([4, 0], of=5) == [4, 0]
    assert chosen_layers("uniform", of=7, keep=1) == [0]


@pytest.mark.parametrize("teacher", range(1, 14))
@pytest.mark.parametrize("name", ["uniform", "skip", "last", "first", "top"])
def test_a_named_map_is_ascending_and_stays_within_the_teacher(name: str, teacher: int) -> None:
    for student in range(2, teacher + 1):
        pairs = layer_map(name, student=student, teacher=teacher)  # type: ignore[arg-type]
        task_trainers, taught = zip(*pairs, strict=True)
        assert list(task_trainers) == sorted(set(task_trainers))
        assert list(taught) == sorted(set(taught))
        assert taught[0] >= 1
        assert taught[-1] <= teacher
        if name == "uniform":
            assert pairs[-1] == (student, teacher)


@pytest.mark.parametrize("teacher", range(1, 14))
@pytest.mark.parametrize("name", ["uniform", "skip", "last", "first"])
def test_a_named_choice_has_as_many_layers_as_asked_each_once(name: str, teacher: int) -> None:
    for keep in range(1, teacher + 1):
        found = chosen_layers(name, of=teacher, keep=keep)  # type: ignore[arg-type]
        assert len(found) == keep
        assert found == sorted(set(found))
        assert found[0] >= 0
        assert found[-1] < teacher


@pytest.mark.parametrize("pairs", [[[1, 13]], [[4, 1]], [[1]], [[-1, 2]], []])
def test_pairs_that_are_not_there_are_refused(pairs: list[list[int]]) -> None:
    with pytest.raises(UsageError, match="layers"):
        layer_map(pairs, student=3, teacher=12)


def test_a_student_deeper_than_its_teacher_is_refused() -> None:
    with pytest.raises(UsageError, match="which has fewer"):
        layer_map("uniform", student=6, teacher=4)


@pytest.mark.parametrize(("wanted", "keep"), [("first", 7), ("last", 0), ("uniform", None), ([0, 6], None), ([], None)])
def test_layers_that_are_not_there_are_refused(wanted: str | list[int], keep: int | None) -> None:
    with pytest.raises(UsageError, match="layers"):
        chosen_layers(wanted, of=6, keep=keep)  # type: ignore[arg-type]

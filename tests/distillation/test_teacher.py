"""A teacher's cached outputs equal its computed ones, in any batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bertkit.cache import RecordCache
from bertkit.data.batch import PackedBatch
from bertkit.distillation.activations import ActivationSpec
from bertkit.distillation.teacher import ItemLayout, TaskQuery, Teacher
from bertkit.distillation.teacher_cache import open_teacher_cache
from bertkit.errors import UsageError
from bertkit.models.headed import HeadedModel
from tests.probing.tiny_models import tiny_model, tiny_tokenizer

ITEMS = [[[5, 9, 11, 7]], [[8, 30], [8, 31, 32]], [[40, 41, 42, 43, 44]]]
"""Three examples, the second of two sequences."""


@pytest.fixture(scope="module")
def models() -> list[HeadedModel]:
    return [tiny_model(tiny_tokenizer(), seed=seed) for seed in (1, 2)]


def reading(numbers: Sequence[int]) -> TaskQuery:
    """A query for these items; each sequence has one row with a class per token, as for spans."""
    sequences = [sequence for number in numbers for sequence in ITEMS[number]]
    packed = PackedBatch.from_ids(sequences)
    lengths = [len(sequence) for sequence in sequences]

    def logits_of(model: HeadedModel, hidden_TD: Tensor) -> Tensor:
        rows = [part[:, 0] for part in hidden_TD.split(lengths)]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-torch.inf)

    counts = [len(ITEMS[number]) for number in numbers]
    return TaskQuery(packed, "masked_lm", logits_of, ItemLayout(counts, counts))


SPEC = ActivationSpec(logits=True, states=frozenset({0, 2}), summary_states=frozenset({1}))


def cache(directory: Path) -> RecordCache:
    return open_teacher_cache(directory, {"teacher": "t"}, max_bytes=1e6)


def test_what_is_remembered_equals_what_is_computed_in_any_batch(tmp_path: Path, models: list[HeadedModel]) -> None:
    plain = Teacher(models[:1], SPEC)
    keeping = Teacher(models[:1], SPEC, cache=cache(tmp_path / "s"))
    keeping.outputs(reading([0, 1, 2]))
    assert keeping.cache is not None
    assert len(keeping.cache) == 3
    keeping.models.clear()  # nothing may be computed from now on
    keeping.models.append(models[1])
    for numbers in ([2, 0], [1], [0, 1, 2]):
        wanted, found = plain.outputs(reading(numbers)), keeping.outputs(reading(numbers))
        torch.testing.assert_close(found.logits, wanted.logits)
        for layer in (0, 2):
            torch.testing.assert_close(found.states[layer], wanted.states[layer])
        torch.testing.assert_close(found.summary_states[1], wanted.summary_states[1])


def test_a_pass_that_keeps_gives_the_same_bits_as_one_that_remembers(tmp_path: Path, models: list[HeadedModel]) -> None:
    keeping = Teacher(models[:1], SPEC, cache=cache(tmp_path / "s"))
    first, second = keeping.outputs(reading([0, 1])), keeping.outputs(reading([0, 1]))
    assert torch.equal(first.logits, second.logits)
    assert torch.equal(first.states[2], second.states[2])


def test_the_size_that_is_foretold_is_the_size_that_is_kept(tmp_path: Path, models: list[HeadedModel]) -> None:
    keeping = Teacher(models[:1], SPEC, cache=cache(tmp_path / "s"))
    keeping.outputs(reading([0, 1, 2]))
    sizes = [(len(item), max(map(len, item)), sum(map(len, item))) for item in ITEMS]
    foretold = sum(
        keeping.item_bytes(tokens=tokens, sequences=rows, rows=rows, columns=classes) for rows, classes, tokens in sizes
    )
    assert keeping.cache is not None
    assert keeping.cache.size_bytes == foretold


def test_equal_sequences_asked_for_other_tokens_are_other_items() -> None:
    """The texts `ab c` and `a bc` have the same tokens, and two words each."""

    packed = PackedBatch.from_ids([[5, 6, 7], [5, 6, 7]])

    def keys(*marks: bool) -> list[bytes]:
        return ItemLayout([2, 2], [1, 1], torch.tensor(marks) if marks else None).keys(packed)

    one, other = keys(True, False, True, True, True, False)
    assert one != other
    assert keys(True, True, False, True, False, True) == [other, one]
    assert keys() not in ([one, other], [one, one])


def test_where_nothing_can_be_kept_the_teacher_is_asked_once_a_batch(tmp_path: Path, models: list[HeadedModel]) -> None:
    """While another process is writing, outputs are computed once and returned."""
    writing = cache(tmp_path / "s")
    asked: list[int] = []

    def of(numbers: Sequence[int]) -> TaskQuery:
        plain = reading(numbers)

        def logits_of(model: HeadedModel, hidden_TD: Tensor) -> Tensor:
            asked.append(len(numbers))
            return plain.logits_of(model, hidden_TD)

        return replace(plain, logits_of=logits_of)

    reader = Teacher(models[:1], SPEC, cache=cache(tmp_path / "s"))
    seen = [reader.outputs(of(numbers)).logits for numbers in ([0, 1], [2])]
    assert asked == [2, 1]
    assert len(writing) == 0
    torch.testing.assert_close(seen[1], Teacher(models[:1], SPEC).outputs(reading([2])).logits)


def test_several_teachers_act_by_the_mean_of_their_logits(models: list[HeadedModel]) -> None:
    spec = ActivationSpec(logits=True)
    both = Teacher(models, spec).outputs(reading([2, 0])).logits
    each = [Teacher([model], spec).outputs(reading([2, 0])).logits for model in models]
    torch.testing.assert_close(both, (each[0] + each[1]) / 2)
    with pytest.raises(UsageError, match="a single teacher"):
        Teacher(models, ActivationSpec(states=frozenset({1})))


def test_a_teacher_is_neither_trained_nor_dropped_out(models: list[HeadedModel]) -> None:
    teacher = Teacher([tiny_model(tiny_tokenizer(), seed=5).train()], SPEC)
    first, second = (teacher.outputs(reading([0, 2])) for _ in range(2))
    assert torch.equal(first.logits, second.logits)
    assert not first.logits_MK.requires_grad
    assert not any(parameter.requires_grad for parameter in teacher.models[0].parameters())

"""The catalogue of tasks: every entry is complete, and consistent with the heads, the readers and the Hub's copies."""

from __future__ import annotations

import pytest

from bertkit.errors import UsageError
from bertkit.models.heads import HEAD_KINDS
from bertkit.tasks.catalogue import GLUE, TASKS, TaskSpec, find_task
from bertkit.tasks.readers.load import READERS
from bertkit.tasks.spec import iob2

EVERY = [pytest.param(spec, id=name) for name, spec in TASKS.items()]


@pytest.mark.parametrize("spec", EVERY)
def test_an_entry_is_complete_and_consistent(spec: TaskSpec) -> None:
    assert spec.head in HEAD_KINDS
    assert spec.primary in spec.metrics
    assert spec.layout in READERS or set(spec.sources) == set(spec.splits)
    assert set(spec.scored) <= set(spec.splits) - {"train"}
    assert (spec.labels is not None) == (spec.kind in ("classification", "tagging"))
    assert spec.labels is None or len(set(spec.labels)) == len(spec.labels) >= 2
    assert spec.paper
    assert spec.settings.source
    assert spec.archive
    assert (spec.columns is not None) == (spec.layout == "glue")


@pytest.mark.parametrize("spec", EVERY)
def test_default_settings_lie_on_the_grid_of_their_paper(spec: TaskSpec) -> None:
    settings = spec.settings
    assert settings.learning_rate in (settings.learning_rates or (settings.learning_rate,))
    assert settings.batch_sequences in (settings.batch_grid or (settings.batch_sequences,))
    assert settings.epochs in (settings.epoch_grid or (settings.epochs,))


def test_the_tasks_that_are_promised_are_there() -> None:
    assert len(GLUE) == 9
    promised = {*GLUE, "ax", "snli", "sick-e", "sick-r", "imdb", "squad", "squad2", "swag", "race", "hellaswag"}
    assert promised | {"conll2003", "wnut17", "conll2000", "ud-pos"} <= set(TASKS)
    assert TASKS["mnli"].scored == ("dev", "dev_mm")


def test_label_orders_are_those_of_the_released_code() -> None:
    assert TASKS["mnli"].labels == TASKS["ax"].labels == ("contradiction", "entailment", "neutral")
    assert TASKS["qnli"].labels == TASKS["rte"].labels == ("entailment", "not_entailment")
    assert TASKS["cola"].labels == TASKS["wnli"].labels == ("0", "1")
    assert TASKS["mrpc"].positive == "1"
    assert TASKS["stsb"].labels is None


def test_papers_settings_are_kept_apart_for_the_two_squads() -> None:
    first, second = TASKS["squad"].settings, TASKS["squad2"].settings
    assert (first.learning_rate, first.epochs, first.batch_sequences) == (5e-5, 3, 32)
    assert (second.learning_rate, second.epochs, second.batch_sequences) == (5e-5, 2, 48)
    assert TASKS["squad"].max_length == 384


def test_iob2_has_both_tags_of_each_type() -> None:
    assert iob2(("PER", "ORG")) == ("O", "B-PER", "I-PER", "B-ORG", "I-ORG")
    assert len(TASKS["conll2003"].labels or ()) == 9
    assert len(TASKS["ud-pos"].labels or ()) == 17


@pytest.mark.parametrize(("typed", "name"), [("SST-2", "sst2"), ("sick_e", "sick-e"), ("CoNLL-2003", "conll2003")])
def test_a_task_is_found_in_any_spelling(typed: str, name: str) -> None:
    assert find_task(typed).name == name


def test_an_unknown_task_is_named_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"unknown task 'squat'; did you mean squad\?"):
        find_task("squat")
    with pytest.raises(UsageError, match="expected one of: cola, sst2"):
        find_task("zzzzzz")

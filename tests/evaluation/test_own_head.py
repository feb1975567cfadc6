"""Whether a head is the task's own depends on its run or the names of its labels, never on their number or order."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bertkit.errors import DataError
from bertkit.evaluation.own_head import head_use
from bertkit.evaluation.plan import TaskEvaluation
from bertkit.evaluation.run import EvalArguments, EvaluationResult
from bertkit.evaluation.tasks import evaluate_tasks
from bertkit.models.labels import Labels
from bertkit.tasks.catalogue import TASKS
from tests.overrides import parsed
from tests.tasks.tiny_glue import write_glue
from tests.tasks.tiny_task import write_model

CLASSIFIER = ("sequence_classification",)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_glue(tmp_path_factory.mktemp("own") / "glue")


def labelled(directory: Path, *names: str, **more: Any) -> Path:
    """A checkpoint with a classifier of these labels."""
    model = write_model(directory, heads=CLASSIFIER, labels=Labels(names))
    if more:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | more))
    return model


def evaluated(model: Path, data: Path, task: str, **fields: Any) -> EvaluationResult:
    request = EvalArguments(str(model), device="cpu", runs_root=model.parent / "runs")
    return evaluate_tasks(TaskEvaluation(task, (TASKS[task],), request, data_dir=data, **fields))


@pytest.mark.parametrize(
    ("task", "names", "more", "use"),
    [
        ("cola", ("unacceptable", "acceptable"), {}, "own"),
        ("cola", ("Acceptable", "Unacceptable"), {}, "own"),
        ("sst2", ("NEGATIVE", "POSITIVE"), {}, "own"),
        ("sst2", ("unacceptable", "acceptable"), {}, "new"),
        ("mnli", ("entailment", "neutral", "contradiction"), {}, "own"),
        ("rte", ("entailment", "neutral", "contradiction"), {}, "new"),
        ("rte", ("not_entailment", "entailment"), {}, "own"),
        ("rte", ("not_entailment", "entailment"), {"finetuning_task": "QNLI"}, "new"),
        ("sst2", ("0", "1"), {"finetuning_task": "sst-2"}, "own"),
        ("stsb", ("score",), {"problem_type": "regression"}, "own"),
        ("stsb", ("negative", "positive"), {}, "new"),
        ("squad", ("negative", "positive"), {}, "none"),
    ],
)
def test_a_head_is_the_tasks_where_its_labels_have_the_names(
    tmp_path: Path, task: str, names: tuple[str, ...], more: dict[str, Any], use: str
) -> None:
    assert head_use(labelled(tmp_path / "m", *names, **more), TASKS[task], "auto", name="m") == use


@pytest.mark.parametrize("names", [("LABEL_0", "LABEL_1"), ("0", "1"), ("yes", "no")])
def test_labels_that_say_nothing_are_refused_until_the_user_decides(tmp_path: Path, names: tuple[str, str]) -> None:
    model = labelled(tmp_path / "m", *names)
    with pytest.raises(DataError, match=rf"labels are {', '.join(names)}, so it is unclear.*--head new"):
        head_use(model, TASKS["sst2"], "auto", name="m")
    assert head_use(model, TASKS["sst2"], "new", name="m") == "new"
    assert head_use(model, TASKS["sst2"], "own", name="m") == "own"


def test_labels_that_several_tasks_share_are_taken_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert (
            head_use(labelled(tmp_path / "m", "entailment", "not_entailment"), TASKS["rte"], "auto", name="m") == "own"
        )
    assert "also of qnli, wnli" in caplog.text


def test_a_head_in_another_order_gives_the_same_answers(tmp_path: Path, data: Path) -> None:
    """The same classifier with its rows and their names reversed."""
    plain = labelled(tmp_path / "plain", "contradiction", "entailment", "neutral")
    turned = labelled(tmp_path / "turned", "Neutral", "Entailment", "Contradiction")
    tensors = load_file(plain / "model.safetensors")
    for name in ("classifier.weight", "classifier.bias"):
        tensors[name] = torch.flip(tensors[name], (0,)).contiguous()
    save_file(tensors, turned / "model.safetensors", metadata={"format": "pt"})
    first, second = (evaluated(model, data, "mnli") for model in (plain, turned))
    assert first.results["evaluated_as_is"] == ["mnli"]
    assert first.results["tasks"] == second.results["tasks"]
    said = [
        [json.loads(line) for line in (each.run.path / "predictions" / "mnli-dev.jsonl").read_text().splitlines()]
        for each in (first, second)
    ]
    assert [line["prediction"] for line in said[0]] == [line["prediction"] for line in said[1]]
    for one, other in zip(*said, strict=True):
        assert one["scores"] == pytest.approx(other["scores"], abs=1e-9)
    assert {line["prediction"] for line in said[0]} <= set(TASKS["mnli"].labels or ())
    assert len({line["prediction"] for line in said[0]}) > 1


def test_settings_that_a_models_own_head_leaves_unread_are_told(
    tmp_path: Path, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = labelled(tmp_path / "m", "not_entailment", "entailment")
    with caplog.at_level(logging.WARNING):
        evaluated(model, data, "rte")
        assert "no effect" not in caplog.text
        evaluated(model, data, "rte", overrides=tuple(parsed(["lr=1e-4"])))
    assert "settings and seeds of fine-tuning have no effect" in caplog.text


def test_names_of_the_hubs_copy_stand_for_the_official_ones(tmp_path: Path, data: Path) -> None:
    found = evaluated(labelled(tmp_path / "m", "acceptable", "unacceptable"), data, "cola")
    lines = (found.run.path / "predictions" / "cola-dev.jsonl").read_text().splitlines()
    assert list(json.loads(lines[0])["scores"]) == ["1", "0"]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("yes", "no"), "labels are yes, no, not entailment, not_entailment"),
        (("entailment", "not_entailment", "maybe"), "labels are entailment, not_entailment, maybe, not"),
        (("entailment",), "labels are entailment, not entailment, not_entailment"),
        (("LABEL_0", "LABEL_1"), "does not name the labels"),
        (("LABEL_0",), "its head is a regression"),
    ],
)
def test_a_head_of_other_labels_is_refused_even_where_the_user_wants_it(
    tmp_path: Path, data: Path, names: tuple[str, ...], told: str
) -> None:
    with pytest.raises(DataError, match=rf"{told}.*--head new"):
        evaluated(labelled(tmp_path / "m", *names), data, "rte", head="own")


def test_a_classifier_is_no_regression(tmp_path: Path, data: Path) -> None:
    with pytest.raises(DataError, match=r"has 2 outputs, stsb needs 1.*--head new"):
        evaluated(labelled(tmp_path / "m", "a", "b"), data, "stsb", head="own")


def test_a_new_head_in_place_of_the_old_one_is_fine_tuned(tmp_path: Path, data: Path) -> None:
    model = labelled(tmp_path / "m", "yes", "no")
    found = evaluated(model, data, "rte", head="new", overrides=parsed(("optimisation.max_steps=1",)))
    assert found.results["evaluated_as_is"] == []
    config = json.loads((Path(found.results["runs"]["rte"][0]["run"]) / "model" / "config.json").read_text())
    assert config["id2label"] == {"0": "entailment", "1": "not_entailment"}

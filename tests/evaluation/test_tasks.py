"""Evaluation of tasks other than sentence pairs: labelled test splits, and what they may lack."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from bertkit.errors import DataError
from bertkit.evaluation.plan import TaskEvaluation
from bertkit.evaluation.run import EvalArguments, EvaluationResult, MeasurementArguments
from bertkit.evaluation.score import score_file
from bertkit.evaluation.tasks import evaluate_tasks
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.run import finetune
from bertkit.inference.predict import Predictor
from bertkit.progress import silent_progress
from bertkit.tasks.catalogue import TASKS
from tests.overrides import parsed
from tests.tasks.tiny_glue import write_glue
from tests.tasks.tiny_task import GOOD, reviews, write_model

SETTINGS = ("lr=6e-3", "batch=5", "optimisation.max_steps=4")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def conll(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CoNLL-2003's three files, with positive words as persons."""
    directory = tmp_path_factory.mktemp("data")
    for seed, (name, count) in enumerate({"eng.train": 20, "eng.testa": 7, "eng.testb": 9}.items()):
        sentences = [
            "".join(f"{word} X Y {'I-PER' if word in GOOD else 'O'}\n" for word in text.split())
            for text, _ in reviews(count, seed)
        ]
        file = directory / "conll03" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("-DOCSTART- -X- O O\n\n" + "\n".join(sentences))
    return directory


def evaluated(task: str, data: Path, model: Path, root: Path, **fields: Any) -> EvaluationResult:
    request = EvalArguments(str(model), device="cpu", runs_root=root)
    given = {"data_dir": data, "overrides": parsed(SETTINGS), **fields}
    return evaluate_tasks(TaskEvaluation(task, (TASKS[task],), request, **given))


def test_a_labelled_test_split_is_scored_for_every_seed(conll: Path, base: Path, tmp_path: Path) -> None:
    found = evaluated("conll2003", conll, base, tmp_path, seeds=(0, 1))
    table = found.results["tasks"]["conll2003"]
    assert {"f1", "f1/test", "accuracy", "accuracy/test"} <= set(table)
    assert len(table["f1/test"]["seeds"]) == 2
    runs = found.results["runs"]["conll2003"]
    (best,) = [each for each in runs if each["predicts"]]
    assert best["scores"]["f1"] == max(each["scores"]["f1"] for each in runs)
    saved = found.run.path / "predictions"
    for split, file, suffix in (("dev", "eng.testa", ""), ("test", "eng.testb", "/test")):
        scored = score_file("conll2003", saved / f"conll2003-{split}.jsonl", conll / "conll03" / file)
        scores = {f"{name}{suffix}": each["mean"] for name, each in scored["tasks"]["conll2003"].items()}
        assert scores == {name: best["scores"][name] for name in scores}


def test_a_run_of_bertkit_finetune_is_not_repeated(conll: Path, base: Path, tmp_path: Path) -> None:
    request = FinetuneArguments(
        task="conll2003",
        model=str(base),
        data_dir=str(conll),
        overrides=parsed(SETTINGS),
        runs_root=tmp_path,
        seeds=(7,),
    )
    before = finetune(request, progress=silent_progress)
    found = evaluated("conll2003", conll, base, tmp_path, seeds=(7,))
    assert found.results["runs"]["conll2003"][0]["run"] == str(before.run.path.resolve())
    assert not (found.run.path / "runs").exists()
    again = evaluated("conll2003", conll, before.run.path, tmp_path)
    assert again.results["evaluated_as_is"] == ["conll2003"]
    first, second = (each.results["tasks"]["conll2003"] for each in (found, again))
    assert {name: each["mean"] for name, each in first.items()} == {name: each["mean"] for name, each in second.items()}


def test_what_is_missing_beside_dev_is_no_obstacle(
    conll: Path, base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "data" / "conll03").mkdir(parents=True)
    for name in ("eng.train", "eng.testa"):
        (tmp_path / "data" / "conll03" / name).write_text((conll / "conll03" / name).read_text())
    found = evaluated("conll2003", tmp_path / "data", base, tmp_path / "runs")
    assert set(found.results["tasks"]["conll2003"]) == {"f1", "precision", "recall", "accuracy"}
    assert "conll2003: test is not predicted" in caplog.text
    (tmp_path / "data" / "conll03" / "eng.testa").unlink()
    with pytest.raises(DataError, match="no dev split of conll2003"):
        evaluated("conll2003", tmp_path / "data", base, tmp_path / "runs")


def test_the_heads_of_a_run_on_several_tasks_are_evaluated_each_on_its_own(base: Path, tmp_path: Path) -> None:
    data = write_glue(tmp_path / "glue")
    request = FinetuneArguments(
        task=("rte", "wnli"),
        model=str(base),
        data_dir=str(data),
        overrides=parsed(("optimisation.max_steps=3", "engine.device=cpu")),
        run_dir=tmp_path / "both",
    )
    both = finetune(request, progress=silent_progress)
    for task in ("rte", "wnli"):
        found = evaluated(task, data, both.run.path, tmp_path / "runs")
        assert found.results["evaluated_as_is"] == [task]
        summary = found.results["tasks"][task]["accuracy"]
        assert summary["mean"] == both.results["tasks"][task]["accuracy"]["mean"]
    with pytest.raises(DataError, match=r"was trained on several tasks; name the head of one with .*model/rte"):
        Predictor.load(str(both.run.path), MeasurementArguments(device="cpu").engine())
    alone = Predictor.load(str(both.run.model / "wnli"), MeasurementArguments(device="cpu").engine())
    assert alone.task.labels.names == ("0", "1")


def test_fine_tuning_expects_a_new_head_and_other_tags_and_does_not_warn(
    conll: Path, base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a newly initialised head nor CoNLL-2003's IOB1 format causes a warning."""
    with caplog.at_level(logging.INFO):
        evaluated("conll2003", conll, base, tmp_path, overrides=parsed(("optimisation.max_steps=1",)))
    assert "IOB1 into IOB2" in caplog.text
    assert not [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def test_real_sentences_give_the_same_scores_by_all_ways(shared_data: Path, base: Path, tmp_path: Path) -> None:
    """With WNLI's own files, the run, the evaluation of its model and its saved predictions agree."""
    data = shared_data / "glue"
    found = evaluated("wnli", data, base, tmp_path, overrides=parsed(("optimisation.max_steps=2",)))
    mean = found.results["tasks"]["wnli"]["accuracy"]["mean"]
    lines = (found.run.path / "predictions" / "wnli-dev.jsonl").read_text().splitlines()
    assert len(lines) == 71
    assert {json.loads(line)["prediction"] for line in lines} <= {"0", "1"}
    saved = score_file("wnli", found.run.path / "predictions" / "wnli-dev.jsonl", data / "WNLI" / "dev.tsv")
    again = evaluated("wnli", data, Path(found.results["runs"]["wnli"][0]["run"]), tmp_path)
    assert saved["average"] == mean
    assert again.results["average"] == mean

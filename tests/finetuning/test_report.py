"""Diagnostics of a fine-tuning run: scores by class, confusion, calibration, thresholds, mistakes, figures."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bertkit
from bertkit.cli.finetune import print_scores
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.inputs import CustomTask
from bertkit.finetuning.report import MISTAKES, write_lines
from bertkit.finetuning.run import finetune
from bertkit.metrics.calibration import at_temperature, expected_calibration_error
from bertkit.progress import silent_progress
from bertkit.tasks.classification import TEMPERATURE, THRESHOLDS
from bertkit.training.run import FinishedRun
from tests.overrides import parsed
from tests.tasks.tiny_task import reviews, write_model, write_table

Command = Callable[..., Any]
SETTINGS = ["optimisation.schedule.peak=6e-3", "batch=16", "optimisation.epochs=2", "engine.device=cpu"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "base")


def trained(directory: Path, base: Path, rows: dict[str, list[tuple[str, object]]], kind: str) -> FinishedRun:
    files = {name: str(write_table(directory / f"{name}.csv", own)) for name, own in rows.items()}
    task = CustomTask.model_validate({"kind": kind, **files, "columns": {"text": "review", "label": "stars"}})
    arguments = FinetuneArguments(task=task, model=str(base), run_dir=directory / "run", overrides=parsed([*SETTINGS]))
    return finetune(arguments, progress=silent_progress)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def noisy(count: int, seed: int) -> list[tuple[str, object]]:
    """Reviews of which every fifth has the wrong label, so some mistakes are confident."""
    other = {"bad": "good", "good": "bad"}
    return [(text, other[label] if i % 5 == 0 else label) for i, (text, label) in enumerate(reviews(count, seed))]


@pytest.fixture(scope="module")
def reviewed(tmp_path_factory: pytest.TempPathFactory, base: Path) -> FinishedRun:
    rows = {"train": noisy(160, 1), "dev": noisy(117, 2)}
    return trained(tmp_path_factory.mktemp("reviews"), base, rows, "classification")


def test_classes_and_confusion_are_counts_of_the_predictions(reviewed: FinishedRun) -> None:
    (path,) = (reviewed.run.path / "predictions").glob("*.jsonl")
    saved = lines(path)
    pairs = Counter((row["label"], row["prediction"]) for row in saved)
    found = reviewed.results["confusion"]["dev"]
    for gold, row in zip(found["labels"], found["counts"], strict=True):
        assert row == [pairs[gold, guess] for guess in found["labels"]]
    scores = reviewed.results["classes"]["dev"]["good"]
    assert scores["count"] == sum(row["label"] == "good" for row in saved)
    assert scores["precision"] == pytest.approx(pairs["good", "good"] / scores["predicted"])
    assert saved[3]["text"] == noisy(117, 2)[3][0]


def test_the_temperature_is_kept_with_the_model_and_used(reviewed: FinishedRun) -> None:
    found = reviewed.results["calibration"]["dev"]
    config = json.loads((reviewed.run.path / "model" / "config.json").read_text())
    assert config[TEMPERATURE] == found["temperature"] == reviewed.results["tuned"][TEMPERATURE]
    (path,) = (reviewed.run.path / "predictions").glob("*.jsonl")
    saved = lines(path)
    names = reviewed.results["confusion"]["dev"]["labels"]
    after_IK = np.array([[row["scores"][name] for name in names] for row in saved])
    label_I = np.array([names.index(row["label"]) for row in saved])
    assert expected_calibration_error(after_IK, label_I) == pytest.approx(found["ece_at_temperature"])
    before_IK = at_temperature(after_IK, 1 / found["temperature"])
    assert expected_calibration_error(before_IK, label_I) == pytest.approx(found["ece"])
    model = bertkit.load(str(reviewed.run.path), device="cpu")
    again = model.predict([row["text"] for row in saved[:5]])
    for row, expected in zip(again, saved, strict=False):
        assert row["scores"] == pytest.approx(expected["scores"], abs=1e-6)


def test_mistakes_are_the_most_confident_ones_with_their_text(reviewed: FinishedRun) -> None:
    (path,) = (reviewed.run.path / "mistakes").glob("*.jsonl")
    wrong = lines(path)
    assert 0 < len(wrong) <= MISTAKES
    assert all(row["prediction"] != row["label"] and row["text"] for row in wrong)
    shares = [row["scores"][row["prediction"]] for row in wrong]
    assert shares == sorted(shares, reverse=True)


def test_few_examples_set_no_temperature(tmp_path: Path, base: Path) -> None:
    outcome = trained(tmp_path, base, {"train": noisy(40, 1), "dev": noisy(99, 2)}, "classification")
    assert "tuned" not in outcome.results
    assert "temperature" not in outcome.results["calibration"]["dev"]
    assert TEMPERATURE not in json.loads((outcome.run.path / "model" / "config.json").read_text())


def test_a_model_that_is_fine_tuned_again_does_not_keep_the_old_temperature(
    tmp_path: Path, reviewed: FinishedRun
) -> None:
    rows = {"train": reviews(40, 1, ("no", "yes")), "dev": reviews(20, 2, ("no", "yes"))}
    outcome = trained(tmp_path, reviewed.run.path, rows, "classification")  # type: ignore[arg-type]  # tuples of text
    assert TEMPERATURE not in json.loads((outcome.run.path / "model" / "config.json").read_text())


def test_thresholds_of_labels_are_tuned_stored_used_and_shown(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(count: int, seed: int) -> list[tuple[str, object]]:
        rare = np.random.default_rng(seed).random(count) < 0.2
        return [
            (text, " ".join([label, *(["rare"] if each else [])]))
            for (text, label), each in zip(reviews(count, seed), rare, strict=True)
        ]

    found = {"train": rows(160, 1), "dev": rows(120, 2)}
    files = {name: str(write_table(tmp_path / f"{name}.csv", own)) for name, own in found.items()}
    columns = {"text": "review", "label": "stars"}
    task = CustomTask.model_validate({"kind": "multi_label", **files, "columns": columns})
    arguments = FinetuneArguments(task=task, model=str(base), run_dir=tmp_path / "run", overrides=parsed(SETTINGS))
    outcome = finetune(arguments, progress=silent_progress)
    thresholds = json.loads((outcome.run.path / "model" / "config.json").read_text())[THRESHOLDS]
    (path,) = (outcome.run.path / "predictions").glob("*.jsonl")
    saved = lines(path)
    for row in saved:
        assert row["prediction"] == [name for name, share in row["scores"].items() if share >= thresholds[name]]
    last = outcome.results["last"]
    assert outcome.results["splits"]["dev"]["micro_f1"] != last["micro_f1"]
    print_scores(outcome)
    shown = ", ".join(f"{name} {threshold:.3g}" for name, threshold in thresholds.items())
    assert f"dev: scored with thresholds tuned on dev: {shown}\n" in capsys.readouterr().err
    model = bertkit.load(str(outcome.run.path), device="cpu")
    assert [row["prediction"] for row in model.predict([row["text"] for row in saved])] == [
        row["prediction"] for row in saved
    ]


def test_paths_below_the_working_directory_are_printed_relative_to_it_for_a_suite_as_for_a_run(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {name: str(write_table(tmp_path / f"{name}.csv", reviews(30, 1))) for name in ("train", "dev")}
    task = CustomTask.model_validate(
        {"kind": "classification", **files, "columns": {"text": "review", "label": "stars"}}
    )
    common = {"task": task, "model": str(base), "runs_root": Path("runs"), "overrides": parsed(["epochs=0.1"])}
    single = finetune(FinetuneArguments(**common), progress=silent_progress)
    suite = finetune(FinetuneArguments(**common, seeds=[0, 1]), progress=silent_progress)
    shown = []
    for outcome in (single, suite):
        print_scores(outcome)
        told = capsys.readouterr().err.splitlines()
        shown.append([line for line in told if line.startswith(("figures: ", "the most confident mistakes: "))])
    chosen = suite.results["chosen"]["run"]
    assert Path(chosen).is_absolute()
    assert all(f": {single.run.path}/" in line for line in shown[0])
    assert all(f": {Path(chosen).relative_to(tmp_path)}/" in line for line in shown[1])
    assert len(shown[0]) == len(shown[1]) == 2


def test_a_regression_starts_at_the_mean_of_its_labels(tmp_path: Path, base: Path) -> None:
    rows = [(text, 2.5 + number % 3) for number, (text, _) in enumerate(reviews(31, 1))]
    files = {name: str(write_table(tmp_path / f"{name}.csv", rows)) for name in ("train", "dev")}
    task = CustomTask.model_validate({"kind": "regression", **files, "columns": {"text": "review", "label": "stars"}})
    arguments = FinetuneArguments(task=task, model=str(base), run_dir=tmp_path / "run")
    recipe = arguments.requested()
    trainer = arguments.trainer(
        recipe, tuple(arguments.prepare(each) for each in recipe.alone), _RunDouble(tmp_path), None
    )
    bias = trainer.model.get_parameter("sequence_classification.output.bias")
    assert bias.item() == pytest.approx(np.mean([label for _, label in rows]), rel=1e-6)


class _RunDouble:
    """The part of a run directory that a trainer reads before it starts."""

    def __init__(self, path: Path) -> None:
        self.path = path


def test_the_command_prints_classes_and_mistakes_and_draws_figures(
    tmp_path: Path, base: Path, bertkit: Command
) -> None:
    for name, seed in (("train", 1), ("dev", 2)):
        write_table(tmp_path / f"{name}.csv", noisy(110, seed))
    columns = ["--text", "review", "--label", "stars", "--set", "optimisation.epochs=1"]
    files = ["--train", tmp_path / "train.csv", "--dev", tmp_path / "dev.csv"]
    done = bertkit("finetune", *files, *columns, "--model", base, "--run-dir", tmp_path / "run")
    assert done.code == 0, done.stderr
    assert "dev, by class" in done.stderr
    assert "calibration error" in done.stderr
    assert "mistake: predicted " in done.stderr
    confusion = json.loads((tmp_path / "run" / "results.json").read_text())["confusion"]["dev"]
    printed = done.stderr[done.stderr.index("dev, confusion") :].splitlines()[1:]
    assert printed[0].split() == ["label", "\\", "predicted", *confusion["labels"]]
    for line, name, counts in zip(printed[1:], confusion["labels"], confusion["counts"], strict=False):
        assert line.split() == [name, *map(str, counts)]
    written = {path.name for path in (tmp_path / "run" / "figures").iterdir()}
    assert written == {
        f"{stem}.{suffix}" for stem in ("learning-curve", "confusion-dev") for suffix in ("svg", "png", "csv")
    }


def test_rows_are_written_as_they_come_and_a_fault_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "predictions" / "task-dev.jsonl"
    write_lines(path, ({"id": str(n), "text": "ü", "score": score} for n, score in enumerate((0.5, float("nan")))))
    before = path.read_text(encoding="utf-8")
    assert before == '{"id": "0", "text": "ü", "score": 0.5}\n{"id": "1", "text": "ü", "score": null}\n'
    with pytest.raises(UnicodeEncodeError):
        write_lines(path, iter([{"id": "0"}, {"id": "\ud800"}]))
    assert path.read_text(encoding="utf-8") == before


def test_writing_many_rows_takes_the_memory_of_one(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        write_lines(tmp_path / "predictions" / "task-dev.jsonl", ({"text": "word " * 2000} for _ in range(1000)))
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()

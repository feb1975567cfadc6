"""Predictions of several processes have the bytes of one process's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertkit.errors import DataError
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.run import finetune
from bertkit.inference.predict import Predictor, _predict_job
from bertkit.progress import silent_progress
from bertkit.training.config import EngineConfig
from bertkit.training.engine import resolve_engine
from tests.overrides import parsed
from tests.tasks.tiny_kinds import write_kind
from tests.tasks.tiny_task import write_model

Command = Callable[..., Any]


def finetuned(directory: Path, kind: str) -> tuple[Path, Path]:
    """A model of that kind, and inputs for it."""
    task, inputs = write_kind(directory, kind)
    settings = ["optimisation.steps=1", "engine.device=cpu"]
    settings += ["span.max_query_tokens=8", "data.max_length=32"] if kind == "span" else []
    arguments = FinetuneArguments(
        task=task,
        model=str(write_model(directory / "base")),
        run_dir=directory / "run",
        overrides=parsed(settings),
        command=["x"],
    )
    finetune(arguments, progress=silent_progress)
    return directory / "run", inputs


@pytest.mark.parametrize("kind", ["tagging", "span"])
def test_the_lines_are_those_of_one_process(
    kind: str, tmp_path: Path, bertkit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("bertkit.cli.predict.PredictionJob.windows", {"first": 3, "largest": 4})
    run, inputs = finetuned(tmp_path, kind)
    alone = bertkit("predict", "--model", run, inputs)
    together = bertkit("predict", "--model", run, inputs, "--jobs", "2")
    assert alone.code == together.code == 0, together.stderr
    assert alone.stdout
    assert together.stdout == alone.stdout


def test_choosing_without_training_is_shared_too(tmp_path: Path, bertkit: Command) -> None:
    (tmp_path / "texts.txt").write_text("a fine cat\n\nthe poor film\n" * 50, encoding="utf-8")
    model = write_model(tmp_path / "base")
    words = ["predict", "--zero-shot", "--labels", "cat,film", "--model", model, tmp_path / "texts.txt"]
    alone, together = bertkit(*words), bertkit(*words, "--jobs", "2")
    assert alone.code == together.code == 0, together.stderr
    assert together.stdout == alone.stdout
    assert alone.stdout.count("null") == 50


def test_a_faulty_row_ends_the_command_with_its_place(tmp_path: Path, bertkit: Command) -> None:
    run, _ = finetuned(tmp_path, "classification")
    inputs = tmp_path / "inputs.jsonl"
    inputs.write_text('{"review": "a fine cat"}\n' * 70 + '{"other": 1}\n', encoding="utf-8")
    done = bertkit("predict", "--model", run, inputs, "--jobs", "2")
    assert done.code == 3
    assert "inputs.jsonl, line 71" in done.stderr


def test_another_model_under_the_same_path_is_refused(tmp_path: Path) -> None:
    run, _ = finetuned(tmp_path, "classification")
    engine = resolve_engine(EngineConfig(device="cpu"))
    predictor = Predictor.load(str(run), engine)
    assert predictor.loader is not None
    with pytest.raises(DataError, match="a worker found different weights"):
        _predict_job(predictor.loader, "0" * 64, [])

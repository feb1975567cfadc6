"""Run directories, checkpoints, models and token shards of version 0.1.0 give the same results as with that version.

The oracle is that version: next to each unfinished run, the archives contain the same command completed by it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bertkit.models.families.distilbert import DistilBertLayer
from bertkit.models.layers import PostNormLayer
from bertkit.recipe import old_keys
from tests.compatibility.previous_runs import unpack

Bertkit = Callable[..., Any]
UNFINISHED = {
    "bert": ("pretrain", "model"),
    "reviews": ("finetune", "runs/seed=1/model"),
    "distilbert": ("distill", "model"),
    "distil-task": ("distill", "model"),
}
"""Each unfinished run with its command and the model that completing it writes."""
FINISHED = ("bert", "reviews", "reviews/runs/seed=1", "distilbert", "distil-task", "eval-mlm", "contextuality")
TEXT = "The cat likes this funny film at night."


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runs of the previous version, next to their working directory and cache."""
    monkeypatch.setenv("BERTKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("BERTKIT_RUNS", str(tmp_path / "unfinished"))
    monkeypatch.chdir(tmp_path)
    return unpack(tmp_path)


@pytest.mark.parametrize("name", UNFINISHED)
def test_unfinished_run_ends_with_the_weights_that_the_previous_version_gave(
    name: str, folder: Path, bertkit: Bertkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The previous version had dropout after DistilBERT's attention, too: a fault. Everything else is the same.
    monkeypatch.setattr(DistilBertLayer, "dropout_before", PostNormLayer.dropout_before)
    command, model = UNFINISHED[name]
    outcome = bertkit(command, "--resume", f"unfinished/{name}", "--device", "cpu")
    assert outcome.code == 0, outcome.stderr
    resumed = load_file(folder / "unfinished" / name / model / "model.safetensors")
    wanted = load_file(folder / "finished" / name / model / "model.safetensors")
    assert resumed.keys() == wanted.keys()
    for tensor, values in wanted.items():
        # Not bit for bit: the archives were made on another processor, whose sums may round in a different order.
        assert torch.allclose(resumed[tensor], values, rtol=0, atol=1e-6), tensor
    results = [json.loads((folder / state / name / "results.json").read_text()) for state in ("unfinished", "finished")]
    assert results[0].keys() >= results[1].keys()
    assert bertkit("runs", "verify", f"unfinished/{name}").code == 0


def test_resumed_suite_keeps_the_run_that_the_previous_version_finished(folder: Path, bertkit: Bertkit) -> None:
    record = folder / "unfinished/reviews/runs/seed=0/run.json"
    before = record.read_text()
    assert bertkit("finetune", "--resume", "unfinished/reviews").code == 0
    assert record.read_text() == before


def test_new_suite_does_not_repeat_a_run_that_the_previous_version_finished(folder: Path, bertkit: Bertkit) -> None:
    (folder / "unfinished/reviews").rename(folder / "unfinished/before")
    suite = ("finetune", "unfinished/before/recipe.yaml", "--seeds", "0-0", "--grid", "lr=5e-3", "--run-dir", "new")
    assert bertkit(*suite).code == 0
    results = json.loads((folder / "new/results.json").read_text())
    assert results["chosen"]["run"] == str(folder / "unfinished/before/runs/seed=0")


def test_unfinished_run_is_found_by_its_recipe(folder: Path, bertkit: Bertkit) -> None:
    outcome = bertkit("pretrain", "unfinished/bert/recipe.yaml", "--resume", "--plan", "--json")
    assert outcome.code == 0, outcome.stderr
    outcome = bertkit("pretrain", "unfinished/bert/recipe.yaml", "--resume")
    assert outcome.code == 0, outcome.stderr
    assert Path(outcome.stdout.strip()).resolve() == folder / "unfinished/bert"


@pytest.mark.parametrize("name", FINISHED)
def test_finished_run_is_shown_and_verified(name: str, folder: Path, bertkit: Bertkit) -> None:
    shown = bertkit("runs", "show", f"finished/{name}", "--json")
    assert shown.code == 0, shown.stderr
    assert json.loads(shown.stdout)["status"] == "done"
    verified = bertkit("runs", "verify", f"finished/{name}")
    assert verified.code == 0, verified.stderr


def test_runs_of_both_states_are_listed(folder: Path, bertkit: Bertkit, monkeypatch: pytest.MonkeyPatch) -> None:
    def status(root: str) -> dict[str, str]:
        monkeypatch.setenv("BERTKIT_RUNS", str(folder / root))
        return {run["id"]: run["status"] for run in json.loads(bertkit("runs", "list", "--json").stdout)}

    assert status("unfinished") == dict.fromkeys(UNFINISHED, "stopped")
    assert status("finished") == dict.fromkeys((name for name in FINISHED if "/" not in name), "done")


@pytest.mark.parametrize("name", ["reviews", "distil-task"])
def test_task_model_predicts_what_the_previous_version_predicted(name: str, folder: Path, bertkit: Bertkit) -> None:
    run = folder / "finished" / name
    (saved,) = (run / "runs/seed=0" if name == "reviews" else run).glob("predictions/*-dev.jsonl")
    wanted = [json.loads(line) for line in saved.read_text().splitlines()]
    outcome = bertkit("predict", "reviews-dev.csv", "--model", f"finished/{name}", "--text", "review")
    assert outcome.code == 0, outcome.stderr
    found = [json.loads(line) for line in outcome.stdout.splitlines()]
    assert [each["prediction"] for each in found] == [each["prediction"] for each in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one["scores"] == pytest.approx(other["scores"], abs=1e-5)


@pytest.mark.parametrize("name", ["bert", "distilbert"])
def test_pretrained_model_fills_is_evaluated_and_is_exported(name: str, folder: Path, bertkit: Bertkit) -> None:
    filled = bertkit("fill", TEXT.replace("likes", "[MASK]"), "--model", f"finished/{name}", "--json")
    assert len(json.loads(filled.stdout)[0]["masks"]) == 1, filled.stderr
    text = ("--data", "text.txt", "--sequences", "8", "--pseudo-sequences", "2")
    evaluated = bertkit("eval", "mlm", "--model", f"finished/{name}", *text, "--json")
    assert evaluated.code == 0, evaluated.stderr
    if name == "bert":  # the same evaluation is in the archives
        found, (wanted,) = json.loads(evaluated.stdout), (folder / "finished/eval-mlm").glob("results.json")
        assert found["tasks"] == json.loads(wanted.read_text())["tasks"]
    exported = bertkit("export", f"finished/{name}", "--to", "exported")
    assert exported.code == 0, exported.stderr
    assert (folder / "exported/model.safetensors").exists()


def test_new_run_starts_from_a_model_of_the_previous_version(folder: Path, bertkit: Bertkit) -> None:
    outcome = bertkit(
        "finetune", "--model", "finished/distilbert", "--train", "reviews-train.csv", "--dev", "reviews-dev.csv",
        "--text", "review", "--label", "stars", "--max-steps", "1", "--set", "max_length=32",
    )  # fmt: skip
    assert outcome.code == 0, outcome.stderr


@pytest.mark.parametrize("name", ["bert", "reviews", "distilbert", "distil-task"])
def test_recorded_recipe_runs_as_a_new_one(name: str, folder: Path, bertkit: Bertkit) -> None:
    command = json.loads((folder / "finished" / name / "run.json").read_text())["kind"]
    old_keys._log_renamed.cache_clear()
    outcome = bertkit(command, f"finished/{name}/recipe.yaml", "--plan", "--json")
    assert outcome.code == 0, outcome.stderr
    assert json.loads(outcome.stdout)["steps"] in (4, 6)
    if name in ("reviews", "distil-task"):
        assert "optimisation.learning_rate is now optimisation.schedule.peak" in outcome.stderr

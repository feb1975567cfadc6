"""`runs diff` of runs that train on text: their settings, losses, and held-out figures if these are comparable."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertkit.errors import DataError, UsageError
from bertkit.evaluation.runs_diff import compare_runs
from bertkit.files import write_json
from bertkit.pretraining.arguments import PretrainArguments
from bertkit.pretraining.run import run_pretraining
from bertkit.progress import silent_progress
from bertkit.run.directory import RunDirectory
from tests.overrides import parsed
from tests.training.tiny_run import write_text

Bertkit = Callable[..., Any]
SMALL = (
    "model={family: bert, hidden_size: 20, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 24}",
    "tokenizer={type: wordpiece, vocab_size: 112, min_frequency: 1}",
    "data.sequence_length=32",
    "data.held_out=0.1",
    "optimisation.batch_sequences=5",
    "engine={device: cpu, evaluation_sequences: 8, log_every_steps: 2, pseudo_perplexity_sequences: 2, examples: []}",
)


class Place:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        write_text(directory / "text.txt")
        text = (directory / "text.txt").read_text()
        (directory / "domain.txt").write_text(text.replace("letter", "enzyme"))

    def run(self, name: str, *overrides: str, text: str = "text.txt", max_steps: int = 3) -> RunDirectory:
        """A pretraining run, trained once."""
        path = self.directory / name
        if not path.exists():
            request = PretrainArguments(
                "quickstart",
                overrides=parsed([*SMALL, *overrides]),
                sources=[str(self.directory / text)],
                run_dir=path,
                cache=self.directory / "cache",
                max_steps=max_steps,
                command=["test"],
            )
            run_pretraining(request, progress=silent_progress)
        return RunDirectory.open(path)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("pretraining"))


def compared(a: RunDirectory, b: RunDirectory, **options: Any) -> dict[str, Any]:
    (found,) = compare_runs(a, b, **options)["comparisons"]
    return found  # type: ignore[no-any-return]


def test_settings_losses_and_held_out_figures_are_side_by_side(place: Place, bertkit: Bertkit) -> None:
    a, b = place.run("short"), place.run("fast", "optimisation.schedule.peak=0.02")
    found = compared(a, b)
    assert found["recipe"] == [{"key": "optimisation.schedule.peak", "a": 0.004, "b": 0.02}]
    held_out = [json.loads((run.path / "results.json").read_text())["held_out"] for run in (a, b)]
    assert found["not_comparable"] == []
    assert found["difference"] == held_out[1]["loss"] - held_out[0]["loss"]
    assert found["interval"] is None
    assert found["scores"]["pseudo_perplexity"] == {
        side: held_out[k]["pseudo_perplexity"] for k, side in enumerate("ab")
    }
    assert found["training"]["steps"] == {"a": 3, "b": 3}
    lines = [json.loads(line) for line in a.metrics.read_text().splitlines()]
    assert found["training"]["loss"]["a"] == [line["loss"] for line in lines if "loss" in line][-1]
    other = compared(a, b, metric="accuracy/masked_lm")
    assert other["score_b"] == held_out[1]["accuracy/masked_lm"]
    outcome = bertkit("runs", "diff", a.path, b.path)
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout.startswith("held_out loss: ")
    assert "from A to B, without an interval" in outcome.stdout
    assert "optimisation.schedule.peak" in outcome.stderr


@pytest.mark.parametrize(
    ("name", "changes", "text", "reasons"),
    [
        ("domain", (), "domain.txt", ["data", "tokenizer"]),
        ("seed", ("seed=5",), "text.txt", ["seed"]),
        ("rate", ("objective.masked_lm.rate=0.3",), "text.txt", ["objective.masked_lm.rate"]),
        ("fewer", ("engine.evaluation_sequences=4",), "text.txt", ["held_out_text"]),
    ],
)
def test_figures_on_other_samples_or_masks_have_no_difference(
    place: Place, bertkit: Bertkit, name: str, changes: tuple[str, ...], text: str, reasons: list[str]
) -> None:
    a, b = place.run("short"), place.run(name, *changes, text=text)
    found = compared(a, b)
    assert found["not_comparable"] == reasons
    assert found["difference"] is None
    assert found["score_a"] != found["score_b"]
    if name == "domain":
        outcome = bertkit("runs", "diff", a.path, b.path)
        assert outcome.code == 0, outcome.stderr
        assert "on other held-out samples (data, tokenizer); `bertkit eval mlm`" in outcome.stdout


def test_the_same_text_in_another_file_is_the_same_text(place: Place) -> None:
    (place.directory / "copy.txt").write_text((place.directory / "text.txt").read_text())
    found = compared(place.run("short"), place.run("copy", text="copy.txt"))
    assert (found["not_comparable"], found["difference"]) == ([], 0)
    assert [each["key"] for each in found["recipe"]] == ["data.sources"]


def test_what_cannot_be_compared_is_refused(place: Place) -> None:
    run = place.run("short")
    with pytest.raises(UsageError, match="--metric f1: the runs have loss, "):
        compare_runs(run, run, metric="f1")
    with pytest.raises(UsageError, match="--task rte: runs that train on text have no tasks; leave it out"):
        compare_runs(run, run, task="rte")
    stopped = place.run("stopped")
    (stopped.path / "results.json").unlink()
    with pytest.raises(DataError, match=r"stopped: the run is not done .*no held-out figures"):
        compare_runs(run, stopped)
    evaluated = place.directory / "eval"
    evaluated.mkdir()
    write_json(evaluated / "run.json", run.record | {"kind": "eval", "recipe": "eval-mlm", "id": "eval"})
    with pytest.raises(DataError, match=r"short is a run of `bertkit pretrain`, .*eval of `bertkit eval mlm`"):
        compare_runs(run, RunDirectory.open(evaluated))

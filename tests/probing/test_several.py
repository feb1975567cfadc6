"""A probe of one model, applied to the checkpoints of a run: a run each, and one with the rows of all."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest

from bertkit.errors import UsageError
from bertkit.evaluation.several import draw_curve
from bertkit.probing.contextuality.run import ContextualitySettings, probe_contextuality
from bertkit.probing.effective_attention.run import EffectiveAttentionSettings, probe_effective_attention
from bertkit.probing.report import Finding, Report, Table
from bertkit.probing.run import ProbeArguments, ProbeResult, run_probe
from bertkit.probing.several import CURVES, probe_each
from tests.probing.request import request_for, write_sentences
from tests.probing.tiny_models import save_tiny, tiny_model, tiny_tokenizer, write_run

SETTINGS = ContextualitySettings(sentences=12)


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertkit.run.figure_files.save", lambda figure, stem: [])


@pytest.fixture
def request_all(tmp_path: Path) -> ProbeArguments:
    trained = write_run(tmp_path / "trained", [5, 20])
    text = write_sentences(tmp_path / "text.txt")
    return request_for(tmp_path, text, models=[f"{trained}@all"], fresh=False, run_dir=tmp_path / "all")


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_tables_are_those_of_each_checkpoint_with_its_steps(request_all: ProbeArguments) -> None:
    probed = probe_each(request_all, SETTINGS, probe_contextuality)
    assert probed.run is not None
    assert probed.run.path == request_all.run_dir
    summary = probed.results["summary"]
    assert len(summary["models"]) == len(summary["runs"]) == 2
    together = rows(probed.run.path / "tables" / "contextuality.csv")
    apart = [row for run in summary["runs"].values() for row in rows(Path(run) / "tables" / "contextuality.csv")]
    added = ("model", "step", "tokens")
    numbers = [{name: cell for name, cell in row.items() if name not in added} for row in together]
    assert [[float(cell or "nan") for cell in row.values()] for row in numbers] == [
        pytest.approx([float(cell or "nan") for cell in row.values()], nan_ok=True) for row in apart
    ]
    assert list(dict.fromkeys(tuple(row[name] for name in added) for row in together)) == [
        ("trained@5", "5", "50"),
        ("trained@20", "20", "200"),
    ]
    again = probe_each(request_all, SETTINGS, probe_contextuality)
    assert again.results["summary"] == summary


def test_a_model_given_twice_is_refused(request_all: ProbeArguments) -> None:
    request = ProbeArguments(models=[*request_all.models, request_all.models[0].replace("@all", "@5")])
    with pytest.raises(UsageError, match="@5 is given twice"):
        probe_each(request, SETTINGS, probe_contextuality)


def test_words_that_look_like_numbers_stay_words(tmp_path: Path) -> None:
    words = ["nan", "inf", "007", "1_000", "1e5", "٣", "-12", "12"]
    request = request_for(tmp_path, models=[str(tmp_path / name) for name in ("a", "b")], run_dir=tmp_path / "all")
    for name in ("a", "b"):
        save_tiny(tiny_model(tiny_tokenizer()), tiny_tokenizer(), tmp_path / name)

    def probe(own: ProbeArguments, settings: ContextualitySettings) -> ProbeResult:
        table = {"word": words, "value": [-0.5, 1e-05, math.nan, math.inf, 3, 0.1, None, 2.0]}
        report = Report({}, {}, [Finding("words", "Words.", table)])
        return run_probe(own, settings, [own.subject()], lambda: report, data={})

    probed = probe_each(request, SETTINGS, probe)
    assert probed.run is not None
    apart = [row for run in probed.results["summary"]["runs"].values() for row in rows(Path(run) / "tables/words.csv")]
    together = rows(probed.run.path / "tables" / "words.csv")
    assert [{"word": row["word"], "value": row["value"]} for row in together] == apart
    assert [row["word"] for row in together[: len(words)]] == [word if word != "-12" else "'-12" for word in words]


def test_a_column_of_the_probe_replaces_none_of_the_training(request_all: ProbeArguments) -> None:
    probed = probe_each(request_all, EffectiveAttentionSettings(texts=1, lengths=[12]), probe_effective_attention)
    assert probed.run is not None
    together = rows(probed.run.path / "tables" / "effective_attention.csv")
    assert [(row["step"], row["training_tokens"], row["tokens"]) for row in together] == [
        ("5", "50", "12"),
        ("20", "200", "12"),
    ]


def test_runs_of_the_same_name_have_rows_of_their_own(tmp_path: Path) -> None:
    models = [f"{write_run(tmp_path / each / 'run', [5])}@5" for each in ("one", "two")]
    request = request_for(tmp_path, write_sentences(tmp_path / "text.txt"), models=models, run_dir=tmp_path / "all")
    probed = probe_each(request, SETTINGS, probe_contextuality)
    assert probed.run is not None
    together = rows(probed.run.path / "tables" / "contextuality.csv")
    assert list(dict.fromkeys(row["model"] for row in together)) == models


def drawn(models: list[str], steps: list[int | None]) -> Any:
    table: Table = {
        "model": [model for model in models for _ in range(2)],
        "step": [step for step in steps for _ in range(2)],
        "task": ["pos"] * 4,
        "layer": [0, 1] * 2,
        "score": [0.1, 0.2, 0.3, None],
    }
    return draw_curve(CURVES["layers"], table).axes[0]


def test_curves_are_over_steps_of_one_run_or_over_models() -> None:
    axes = drawn(["run@5", "run@20"], [5, 20])
    assert [line.get_xdata().tolist() for line in axes.lines] == [[5, 20]] * 2
    assert axes.get_xlabel() == "training steps"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["layer 0", "layer 1"]
    axes = drawn(["a", "b"], [5, 20])
    assert [text.get_text() for text in axes.get_xticklabels()] == ["a", "b"]

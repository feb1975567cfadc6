"""The figures of a fine-tuned model can be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bertkit.evaluation import task_plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def test_scores_of_another_scale_have_a_panel_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = {"dev/pearson": 0.3, "dev/spearman": 0.2, "dev/mean_squared_error": 444.0}
    rows = [{"step": 20, "loss": 5.0}, {"step": 40, "loss": 4.0, **scores}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    drawn: list[Figure] = []

    def keep(figure: Figure, stem: Path) -> list[Path]:
        drawn.append(figure)
        return [stem]

    monkeypatch.setattr(task_plots, "save", keep)
    task_plots.draw_task_figures(tmp_path, {})
    panels = {axes.get_ylabel(): axes for axes in drawn[0].axes}
    assert list(panels) == ["training loss", "score", "dev/mean_squared_error"]
    assert [line.get_label() for line in panels["score"].lines] == ["dev/pearson", "dev/spearman"]
    assert all(tick == int(tick) for axes in panels.values() for tick in axes.get_xticks())


def test_a_label_may_be_named_like_a_column(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    task_plots.draw_task_figures(
        tmp_path, {"confusion": {"dev": {"labels": ["gold", "iron"], "counts": [[3, 1], [0, 2]]}}}
    )
    assert (tmp_path / "figures" / "confusion-dev.csv").read_text() == "gold,gold,iron\ngold,3,1\niron,0,2\n"


def test_a_single_training_loss_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 7, "loss": 0.6, "dev/accuracy": 0.9}) + "\n")
    drawn: list[Figure] = []
    monkeypatch.setattr(task_plots, "save", lambda figure, stem: drawn.append(figure) or [stem])
    task_plots.draw_task_figures(tmp_path, {})
    (line,) = drawn[0].axes[0].lines
    assert line.get_marker() == "o"

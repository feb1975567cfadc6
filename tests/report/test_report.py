"""`bertkit report`: one self-contained page with the contents of the runs, in which nothing from them is executed."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bertkit.report import gather
from bertkit.report.gather import ReportedRun
from bertkit.report.page import _points, page
from bertkit.run.directory import RunDirectory
from bertkit.run.metrics import MetricsLog

sys.path.insert(0, str(Path(__file__).parents[1] / "run"))
from making import finished_run, stopped_run

pytestmark = pytest.mark.usefixtures("drawn_figures")

Bertkit = Callable[..., Any]


class Page(HTMLParser):
    """Elements, their references, and the rows of tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.references: list[str] = []
        self.rows: list[list[str]] = []
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]
        self._in_cell = tag in ("td", "th")
        if tag == "tr":
            self.rows.append([])
        elif self._in_cell:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.rows[-1][-1] += data

    def row(self, name: str) -> list[str]:
        return next(row[1:] for row in self.rows if row and row[0] == name)


@pytest.fixture
def runs(tmp_path: Path) -> list[RunDirectory]:
    """Two runs of other recipes, the second of them stopped."""
    first, second = finished_run(tmp_path / "runs"), stopped_run(tmp_path / "runs", "electra")
    for run, rate in ((first, 0.15), (second, 0.4)):
        text = (
            run.recipe_yaml + f"objective: [masked_lm: {{rate: {rate}}}, next_sentence]\noptimisation: {{steps: 5}}\n"
        )
        (run.path / "recipe.yaml").write_text(text)
        with MetricsLog(run.metrics, start_step=99) as metrics:
            metrics.log(100, {"tokens": 9, "loss": 1.0})
            metrics.log(100, {"held_out/loss": 2.0})
    return [first, second]


def test_the_page_needs_nothing_but_itself(runs: list[RunDirectory], bertkit: Bertkit, tmp_path: Path) -> None:
    done = bertkit("report", *(run.path for run in runs), "--out", tmp_path / "sub" / "two.html")
    assert (done.code, done.stdout) == (0, f"{tmp_path / 'sub' / 'two.html'}\n")
    text = (tmp_path / "sub" / "two.html").read_text()
    found = Page(text)
    assert found.elements.isdisjoint({"script", "link", "iframe", "object", "form"})
    assert len(found.references) == 1, "the curves of both runs"
    assert all(each.startswith("data:image/svg+xml;base64,") for each in found.references)
    assert "default-src 'none'" in text


def test_runs_stand_side_by_side(runs: list[RunDirectory]) -> None:
    found = Page(page([ReportedRun.of(run) for run in runs], "Rates"))
    assert found.row("recipe") == ["bert-tiny", "electra"]
    assert found.row("held_out.loss") == ["1.5", ""]
    assert found.row("objective.masked_lm.rate") == ["0.15", "0.4"]
    keys = [row[0] for row in found.rows]
    assert "optimisation.steps" not in keys


def test_a_run_alone_has_its_page_in_its_directory_and_is_still_verified(bertkit: Bertkit, tmp_path: Path) -> None:
    run = finished_run(tmp_path / "runs")
    done = bertkit("report", run.path, "--json")
    assert json.loads(done.stdout) == {"report": str(run.path / "report.html"), "runs": [str(run.path)]}
    again = bertkit("report", run.path, tmp_path / "runs" / ".." / "runs" / run.id, "--json")
    assert again.stdout == done.stdout
    found = Page((run.path / "report.html").read_text())
    assert found.row("status") == ["done"]
    assert bertkit("runs", "verify", run.path).code == 0


def test_the_same_runs_give_the_same_bytes(runs: list[RunDirectory]) -> None:
    reported = [ReportedRun.of(run) for run in runs]
    assert page(reported) == page([ReportedRun.of(RunDirectory.open(run.path)) for run in runs])


def test_nothing_in_a_run_can_act(runs: list[RunDirectory]) -> None:
    run = runs[0]
    hostile = "<script>alert(1)</script>"
    (run.path / "recipe.yaml").write_text(run.recipe_yaml + f"title: '{hostile} \\u202e'\n")
    (run.path / "results.json").write_text(json.dumps({f"{hostile}&\u202e": 3.0}))
    (run.path / "summary.txt").write_text(f"{hostile}\u202e")
    (run.path / "figures").mkdir(exist_ok=True)
    (run.path / "figures" / f"{hostile[:8]}.svg").write_text(f"<svg>{hostile}</svg>")
    text = page([ReportedRun.of(run)], hostile)
    assert "script" not in Page(text).elements
    assert "\u202e" not in text


def test_what_is_damaged_or_too_large_is_left_out_and_told(
    bertkit: Bertkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished_run(tmp_path / "runs")
    (run.path / "results.json").write_text("{")
    with run.metrics.open("a") as file:
        file.write("nonsense\n")
    (run.path / "figures").mkdir()
    (run.path / "figures" / "huge.svg").write_text("<svg>" + 90 * " " + "</svg>")
    monkeypatch.setattr(gather, "MOST_FIGURE_BYTES", 64)
    done = bertkit("report", run.path)
    assert done.code == 0
    assert done.stderr.count("left out of the report") >= 2
    assert "huge.svg" in (run.path / "report.html").read_text()


def test_figures_over_seeds_have_their_spread_and_descriptions_are_no_results(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "runs")
    results = {
        "tasks": {
            "rte": {"accuracy": {"mean": 0.61234, "std": 0.0123, "seeds": [0.6, 0.62]}},
            "cola": {"matthews_correlation": {"mean": None, "std": None, "n": 0, "seeds": [None]}},
        },
        "held_out_text": {"tokens": 5},
        "average": None,
        "sound": True,
    }
    (run.path / "results.json").write_text(json.dumps(results))
    reported = ReportedRun.of(run)
    assert {name: each.in_words for name, each in reported.scores.items()} == {"tasks.rte.accuracy": "0.6123 ± 0.012"}


def test_counts_are_whole_numbers(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "runs")
    results = {"truncation": {"train": {"tokens": 69547}}, "held_out": {"perplexity": 66.2249}}
    (run.path / "results.json").write_text(json.dumps(results))
    assert [each.in_words for each in ReportedRun.of(run).scores.values()] == ["69,547", "66.22"]


def test_missing_runs_end_with_3_and_none_with_2(bertkit: Bertkit, tmp_path: Path) -> None:
    missing = bertkit("report", tmp_path / "nothing")
    assert missing.code == 3
    assert "no such run" in missing.stderr
    assert bertkit("report").code == 2


def test_the_commands_of_the_page_name_the_run(runs: list[RunDirectory]) -> None:
    text = page([ReportedRun.of(runs[0])])
    assert re.search(rf"bertkit runs replay {re.escape(str(runs[0].path))}\n", text)


def test_commands_can_be_pasted_whatever_the_directory_is_called(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "new place & more")
    command = next(each for each in ReportedRun.of(run).commands if "verify" in each)
    assert shlex.split(command) == ["bertkit", "runs", "verify", str(run.path)]


def test_the_models_scores_are_shown_and_other_figures_folded(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "runs")
    results = {"splits": {"dev": {"f1": 0.5}}, "tasks": {"mine": {"f1": 0.5}}, "labels": {"dev": {"good": 13}}}
    (run.path / "results.json").write_text(json.dumps(results))
    reported = ReportedRun.of(run)
    assert list(reported.main_scores) == ["splits.dev.f1"]
    before, _, folded = page([reported]).partition("<summary>2 further figures")
    assert "splits.dev.f1" in before
    assert "labels.dev.good" not in before
    assert "labels.dev.good" in folded


def test_a_long_curve_is_subsampled() -> None:
    for steps, shown in ((7, 7), (600, 600), (1199, 600), (100_001, 599)):
        run = SimpleNamespace(curve=[{"step": step, "loss": 1.0} for step in range(steps)])
        assert len(_points(run, "loss")[0]) == shown  # type: ignore[arg-type]  # nothing else is read


def test_many_runs_have_a_row_each_and_are_not_all_in_the_title(tmp_path: Path) -> None:
    runs = [ReportedRun.of(finished_run(tmp_path / "runs", f"run-{number}")) for number in range(7)]
    for number, run in enumerate(runs):
        object.__setattr__(run, "scores", {"splits.dev.f1": gather.ReportedScore(number / 10)})
    found = Page(page(runs))
    assert f"<title>{runs[0].name} and 6 more runs</title>" in page(runs)
    header = next(row for row in found.rows if "splits.dev.f1" in row)
    rows = found.rows[found.rows.index(header) + 1 :][:7]
    assert [row[header.index("splits.dev.f1")] for row in rows] == ["0", "0.1", "0.2", "0.3", "0.4", "0.5", "0.6"]

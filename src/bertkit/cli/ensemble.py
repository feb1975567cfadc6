"""`bertkit eval ensemble`: several finished runs of one task, averaged from what they saved.

Nothing here follows a paper. Sibling eval.py has the suites that ask a model; this asks none.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from bertkit.cli.common import RunDir, result, runs_root, story
from bertkit.cli.shared import Common, keep_log, with_options


@with_options
def ensemble(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="FinishedRun runs of one task; of a suite, all of its chosen setting."),
    ],
    run_dir: RunDir = None,
    *,
    common: Common,
) -> None:
    """Average the saved predictions of several runs, score them and write them: `bertkit eval ensemble RUN RUN RUN`"""
    from bertkit.evaluation.ensemble import EnsembleRequest, evaluate_ensemble
    from bertkit.run.find import find_run

    request = EnsembleRequest(
        runs=[find_run(name, runs_root()) for name in runs],
        runs_root=runs_root(),
        run_dir=run_dir,
        offline=common.offline,
        command=sys.argv,
        begun=keep_log,
    )
    evaluated = evaluate_ensemble(request)
    _tell(evaluated.results)
    document = {**evaluated.document, "run": evaluated.run.path, "runs": evaluated.results["runs"]}
    result(document if common.as_json else evaluated.run.path, as_json=common.as_json)


def _tell(results: dict[str, Any]) -> None:
    """The figures for people: the ensemble beside its runs."""
    rows: list[tuple[object, ...]] = []
    for task, table in results["tasks"].items():
        for metric, figure in table.items():
            alone = [each["scores"].get(metric) for each in results["runs"][task]]
            known = [score for score in alone if score is not None]
            least, most = (min(known), max(known)) if known else (None, None)
            rows.append((task, metric, _figure(figure["mean"]), _figure(least), _figure(most), len(alone)))
    story.table(("task", "metric", "ensemble", "worst run", "best run", "runs"), rows)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"

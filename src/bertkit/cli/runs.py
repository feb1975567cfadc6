"""`bertkit runs`: list, show, compare and verify runs.

Nothing here follows a paper. Sibling recipes.py does the same for recipes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from bertkit.cli.commands import CommandGroup
from bertkit.cli.console import console, figure, result
from bertkit.cli.options import Common, Output, RunName, option, runs_root
from bertkit.errors import DataError

if TYPE_CHECKING:
    from bertkit.run.directory import RunDirectory

SHOWN_RESULTS = 3
"""How many numbers of a run's results fit in its line of `runs list`."""


class Runs(CommandGroup):
    """List the runs, show one, compare two, or verify that a run's files are what it wrote."""

    table: ClassVar = {
        "list": "bertkit.cli.runs:list_runs",
        "show": "bertkit.cli.runs:show_run",
        "diff": "bertkit.cli.runs:diff",
        "verify": "bertkit.cli.runs:verify",
    }
    path = "bertkit runs"


def list_runs(*, common: Output) -> None:
    """List the runs under BERTKIT_RUNS (else runs/), the newest first: id, status, steps, start, results."""
    from bertkit.run.find import find_runs

    rows = [_row(run) for run in find_runs(runs_root())]
    if common.as_json:
        result(rows, as_json=True)
        return
    width = max((len(row["id"]) for row in rows), default=0)
    for row in rows:
        started = row["started"][:16].replace("T", " ")
        figures = _numbers(row["result"])
        result(f"{row['id']:{width}}  {row['status']:7}  {row['steps']:>9,}  {started}  {figures}".rstrip())
    console.info(f"{len(rows)} runs in {runs_root()}; `bertkit runs show RUN` shows one")


def show_run(run: RunName, *, common: Output) -> None:
    """Show a run: its command, status, newest metrics, results and checkpoints."""
    from bertkit.run.find import find_run

    found = find_run(run, runs_root())
    shown = _document(found)
    if common.as_json:
        result(shown, as_json=True)
        return
    record = shown["record"]
    console.table(("field", "value"), [*_summary(shown), *_flat("", record["fingerprints"])], title=found.id)
    for title in ("metrics", "results"):
        if shown[title]:
            console.table((title, "value"), _flat("", shown[title]))
    if len(record["attempts"]) > 1:
        attempts = [(a["started"], a.get("ended"), a["status"], a.get("exit_reason")) for a in record["attempts"]]
        console.table(("started", "ended", "status", "reason"), attempts, title="attempts")
    result(found.path)


def diff(
    a: RunName,
    b: RunName,
    task: Annotated[str | None, option("--task", metavar="TASK", help="This task only.")] = None,
    split: Annotated[str | None, option("--split", metavar="SPLIT", help="This split only.")] = None,
    metric: Annotated[
        str | None, option("--metric", metavar="NAME", help="In place of the task's primary metric.")
    ] = None,
    resamples: Annotated[int, typer.Option("--resamples", metavar="N", min=1, help="Of the bootstrap.")] = 10_000,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of the bootstrap.")] = 0,
    *,
    common: Common,
) -> None:
    """Compare two runs by their saved predictions: paired bootstrap, agreement, and how their recipes differ."""
    from bertkit.evaluation.runs_diff import compare_runs
    from bertkit.run.find import find_run

    first, second = (find_run(name, runs_root()) for name in (a, b))
    document = compare_runs(
        first, second, task=task, split=split, metric=metric, resamples=resamples, seed=seed, offline=common.offline
    )
    if common.as_json:
        result(document, as_json=True)
        return
    for each in document["comparisons"]:
        if each["recipe"]:
            differing = [(one["key"], one["a"], one["b"]) for one in each["recipe"]]
            console.table((f"{each['task']}: recipe", first.id, second.id), differing)
        rows = [(name, *(figure(pair[key]) for key in "ab")) for name, pair in each["scores"].items()]
        console.table((f"{each['task']} {each['split']}", first.id, second.id), rows)
        counts = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in each["agreement"].items())
        console.info(f"{each['examples']:,} examples: {counts}")
        low, high = each["interval"]
        result(
            f"{each['task']} {each['split']} {each['metric']}: {each['difference']:+.4f} from A to B,"
            f" {each['confidence']:.0%} interval {low:+.4f} to {high:+.4f}, p = {each['p_value']:.4f}"
        )


def verify(run: RunName, *, common: Output) -> None:
    """Check every file of a run against its recorded hash; exit code 5 where one is missing, truncated or altered."""
    from dataclasses import asdict

    from bertkit.run.find import find_run
    from bertkit.run.verify import verify_run

    report = verify_run(find_run(run, runs_root()).path)
    checks = [asdict(check) for check in report.checks]
    if common.as_json:
        result({"run": report.path, "ok": not report.errors, "checks": checks}, as_json=True)
    else:
        console.table(("part", "verdict", ""), [(c.name, c.verdict, c.detail) for c in report.checks])
    report.raise_for_errors()
    if not common.as_json:
        result(report.path)


def _row(run: RunDirectory) -> dict[str, Any]:
    record = run.record
    try:
        results = run.results
    except DataError as error:  # one damaged file does not hide the other runs
        console.warn(str(error))
        results = None
    return {
        "id": run.id,
        "kind": record["kind"],
        "recipe": record["recipe"],
        "status": run.status,
        "started": record["started"],
        "steps": run.steps,
        "result": results,
    }


def _document(run: RunDirectory) -> dict[str, Any]:
    """All that is known of a run, as `runs show --json` prints it; checkpoints are listed, not verified."""
    from bertkit.files import read_json
    from bertkit.run.directory import ENVIRONMENT
    from bertkit.run.metrics import last_metrics

    environment = run.path / ENVIRONMENT
    return {
        "run": run.path,
        "id": run.id,
        "status": run.status,
        "exit_reason": run.exit_reason,
        "steps": run.steps,
        "record": run.record,
        "environment": read_json(environment) if environment.exists() else None,
        "metrics": last_metrics(run.metrics),
        "results": run.results,
        "checkpoints": sorted(path.name for path in run.checkpoints.glob("step-*")),
    }


def _summary(shown: dict[str, Any]) -> list[tuple[str, object]]:
    record, environment = shown["record"], shown["environment"] or {}
    git = environment.get("git") or {}
    rows = [
        ("status", shown["status"]),
        ("reason", shown["exit_reason"]),
        ("kind", record["kind"]),
        ("recipe", record["recipe"]),
        ("command", " ".join(record["command"])),
        ("started", record["started"]),
        ("ended", record.get("ended")),
        ("steps", shown["steps"]),
        ("tokens", record.get("tokens")),
        ("seed", record.get("seed")),
        ("what-hash", record["what_hash"]),
        ("torch", (environment.get("packages") or {}).get("torch")),
        ("processor", (environment.get("cpu") or {}).get("model")),
        ("commit", f"{git['commit']}{' (with changes)' if git.get('dirty') else ''}" if git.get("commit") else None),
        ("checkpoints", ", ".join(shown["checkpoints"]) or None),
    ]
    return [(name, value) for name, value in rows if value is not None]


def _flat(prefix: str, value: Any) -> list[tuple[str, object]]:
    """A nested mapping as rows of dotted key and value."""
    if isinstance(value, dict):
        return [row for key, item in value.items() for row in _flat(f"{prefix}.{key}" if prefix else str(key), item)]
    return [(prefix, value)] if value is not None else []


def _numbers(results: dict[str, Any] | None) -> str:
    """The first numbers of a run's results, for one line."""
    numbers = [(k, v) for k, v in _flat("", results or {}) if isinstance(v, int | float) and not isinstance(v, bool)]
    return "  ".join(f"{name} {value:.4g}" for name, value in numbers[:SHOWN_RESULTS])

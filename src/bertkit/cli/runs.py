"""`bertkit runs`: list, show, compare, verify and replay runs, and free disk space.

Sibling recipes.py does the same for recipes.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from bertkit.cli.commands import CommandGroup
from bertkit.cli.console import confirm, console, figure, result, size
from bertkit.cli.degenerate import degenerate_lines
from bertkit.cli.options import Common, DryRun, OlderThan, Output, RunName, Yes, option, run_argument
from bertkit.errors import DataError, UsageError
from bertkit.run import runs_root
from bertkit.visible import number_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bertkit.run.directory import RunDirectory


class Runs(CommandGroup):
    """List, show, compare and verify runs, train a run again and compare it, or free disk space."""

    table: ClassVar = {
        "list": "bertkit.cli.runs:list_runs",
        "show": "bertkit.cli.runs:show_run",
        "diff": "bertkit.cli.runs:diff",
        "verify": "bertkit.cli.runs:verify",
        "replay": "bertkit.cli.runs:replay",
        "delete": "bertkit.cli.runs:delete",
        "prune": "bertkit.cli.runs:prune",
    }
    path = "bertkit runs"


def list_runs(*, common: Output) -> None:
    """List the runs in BERTKIT_RUNS (else in runs/), newest first: id, status, steps, start, main score."""
    from bertkit.run.find import find_runs

    rows = [_row(run) for run in find_runs(runs_root())]
    if common.as_json:
        result(rows, as_json=True)
        return
    lines = [("run", "status", "steps", "started", "score")] + [
        (row["id"], row["status"], f"{row['steps']:,}", _local(row["started"]), _score(row["result"])) for row in rows
    ]
    header, *shown = _fitted(lines, shutil.get_terminal_size().columns if sys.stdout.isatty() else None)
    if shown:
        console.info(header)
    for line in shown:
        result(line)
    console.info(f"{number_of(len(rows), 'run')} in {runs_root()}; `bertkit runs show RUN` shows one")


def show_run(run: RunName, *, common: Output) -> None:
    """Show a run: its command, status, latest metrics, results and checkpoints."""
    from bertkit.run.find import find_run

    found = find_run(run, runs_root())
    shown = _document(found)
    if common.as_json:
        result(shown, as_json=True)
        return
    record = shown["record"]
    console.table(("field", "value"), [*_summary(shown), *_flat("", record["fingerprints"])], title=found.id)
    hidden = ("degenerate", "looks", "evaluations")  # shown below; an older name of the next; a curve
    for title in ("metrics", "results"):
        if shown[title]:
            rows = _flat("", {key: value for key, value in shown[title].items() if key not in hidden})
            console.table((title, "value"), rows)
    for line in degenerate_lines(shown["results"] or {}):
        console.warn(line)
    if len(record["attempts"]) > 1:
        attempts = [(a["started"], a.get("ended"), a["status"], a.get("exit_reason")) for a in record["attempts"]]
        console.table(("started", "ended", "status", "reason"), attempts, title="attempts")
    result(found.path)


def diff(
    a: Annotated[str, run_argument("RUN-A")],
    b: Annotated[str, run_argument("RUN-B")],
    task: Annotated[
        str | None,
        option(
            "--task",
            metavar="TASK",
            help="Compare only this task; of minimal pairs, these paradigms, such as anaphor_*.",
        ),
    ] = None,
    split: Annotated[str | None, option("--split", metavar="SPLIT", help="Compare only this split.")] = None,
    metric: Annotated[
        str | None,
        option(
            "--metric",
            metavar="NAME",
            help="Metric to compare (default: the task's primary metric; of language models, all).",
        ),
    ] = None,
    resamples: Annotated[
        int, typer.Option("--resamples", metavar="N", min=1, help="Number of bootstrap resamples.")
    ] = 10_000,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of the bootstrap.")] = 0,
    *,
    common: Common,
) -> None:
    """Compare two runs by their saved predictions: paired bootstrap, agreement, and how their recipes differ.

    Two evaluations of language models are compared text by text (`eval mlm`, `lm`, `surprisal`) or pair by pair
    (`eval blimp`); two pretraining runs by their settings, losses and held-out figures.

    Examples:
    `bertkit runs diff RUN OTHER-RUN`
    `bertkit runs diff runs/mlm-before runs/mlm-after --metric pseudo_perplexity`
    """
    from bertkit.evaluation.runs_diff import compare_runs
    from bertkit.run.find import find_run

    first, second = (find_run(name, runs_root()) for name in (a, b))
    document = compare_runs(
        first, second, task=task, split=split, metric=metric, resamples=resamples, seed=seed, offline=common.offline
    )
    if common.as_json:
        result(document, as_json=True)
        return
    told = None
    for each in document["comparisons"]:
        name = " ".join(part for part in (each["task"], each["split"]) if part)
        if name != told:
            _tables(name, each, first.id, second.id)
            told = name
        if "agreement" in each:
            counts = ", ".join(f"{key.replace('_', ' ')} {count:,}" for key, count in each["agreement"].items())
            noun = "example" if each["split"] else "pair" if first.record["recipe"] == "eval-blimp" else "text"
            found = number_of(each["examples"], noun)
            console.info(f"{found}{'' if each['split'] else ', ' + each['metric']}: {counts}")
        result(f"{name} {each['metric']}: {_difference(each)}")


def _tables(name: str, comparison: dict[str, Any], *ids: str) -> None:
    """What the recipes do otherwise, what the training was, and all scores."""
    if comparison["recipe"]:
        differing = [(one["key"], _cell(one["a"]), _cell(one["b"])) for one in comparison["recipe"]]
        console.table((f"{comparison['task']}: recipe", *ids), differing)
    if "training" in comparison:
        rows = [(key, *(_cell(pair[side]) for side in "ab")) for key, pair in comparison["training"].items()]
        console.table(("training", *ids), rows)
    rows = [(key, *(figure(pair[side]) for side in "ab")) for key, pair in comparison["scores"].items()]
    console.table((name, *ids), rows)


def _difference(comparison: dict[str, Any]) -> str:
    """The difference of two runs in words, with its interval if it has one."""
    if comparison["difference"] is None:
        both = f"{figure(comparison['score_a'])} and {figure(comparison['score_b'])}"
        if not comparison["not_comparable"]:
            return both
        return (
            f"{both}, on other held-out samples ({', '.join(comparison['not_comparable'])}); `bertkit eval mlm` or `lm`"
            " evaluates both models on one text"
        )
    change = f"{comparison['difference']:+.4f} from A to B"
    if comparison["interval"] is None:
        return f"{change}, without an interval"
    low, high = comparison["interval"]
    return (
        f"{change}, {comparison['confidence']:.0%} interval {low:+.4f} to {high:+.4f}, p = {comparison['p_value']:.4f}"
    )


def verify(run: RunName, *, common: Output) -> None:
    """Check every file of a run against its recorded hash; exit code 5 if one is missing, truncated or altered."""
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


def replay(
    run: RunName,
    steps: Annotated[
        int | None,
        option("--steps", metavar="N", min=1, help="Number of updates to compare (default: all, and the model)."),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(
            "--tolerance",
            metavar="X",
            min=0,
            max=1,
            help="Maximum relative difference of a figure, e.g. on another machine; 0: everything is bit-identical,"
            " including the model.",
        ),
    ] = 0.0,
    run_dir: Annotated[
        Path | None,
        option("--run-dir", metavar="DIR", help="Directory to keep the repeated run in (default: it is deleted)."),
    ] = None,
    *,
    common: Common,
) -> None:
    """Train a run again from its own recipe and compare every figure and the model; exit code 5 if they differ.

    Examples:
    `bertkit runs replay bert-tiny-01234567`
    `bertkit runs replay RUN --steps 100`
    `bertkit runs replay RUN --tolerance 1e-3`
    """
    from dataclasses import asdict
    from tempfile import TemporaryDirectory

    from bertkit.errors import CheckError
    from bertkit.run.find import find_run
    from bertkit.training.interrupt import interrupted_by_signals
    from bertkit.training.replay_run import rerun

    found = find_run(run, runs_root())
    # A signal also ends the process that trains, and removes its directory.
    with TemporaryDirectory(prefix="bertkit-replay-") as temporary, interrupted_by_signals():
        directory = run_dir or Path(temporary) / found.id
        again = rerun(
            found, directory, steps=steps, tolerance=tolerance, offline=common.offline, progress=console.progress
        )
    if again.environment:
        console.table(("differs", "then", "now"), again.environment)
    if common.as_json:
        result({"run": found.path, "ok": again.same, **asdict(again), "replayed": run_dir}, as_json=True)
    if not again.same:
        raise CheckError(f"{found.path}: {again.in_words}")
    console.info(again.in_words)
    if not common.as_json:
        result(found.path)


def delete(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="RUN", show_default=False, help="Ids or directories of runs.")
    ] = None,
    status: Annotated[
        Literal["done", "stopped", "failed"] | None,
        option("--status", help="Delete every run with this status, instead of named runs."),
    ] = None,
    older_than: OlderThan = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    *,
    common: Output,
) -> None:
    """Delete runs with all their files: the named ones, or all with a given status.

    Examples:
    `bertkit runs delete bert-tiny-01234567`
    `bertkit runs delete --status failed --older-than 7`
    """
    from bertkit.files import bytes_in
    from bertkit.run.find import find_run, find_runs
    from bertkit.run.housekeeping import delete_run, is_older, require_unneeded

    if bool(runs) == (status is not None):
        raise UsageError("name the runs to delete, or give --status failed, stopped or done; see `bertkit runs list`")
    root = runs_root()
    named = [find_run(name, root) for name in runs or ()]
    found = list({run.path.resolve(): run for run in named}.values())  # a run may be named by its id and its path
    found = found or [run for run in find_runs(root) if run.status == status]
    chosen = [run for run in found if is_older(run, older_than)]
    require_unneeded(chosen, find_runs(root))

    def delete_chosen() -> None:
        for run in chosen:
            delete_run(run)

    sizes = {run.path: bytes_in(run.path) for run in chosen}
    _free(sizes, "runs", delete_chosen, dry_run=dry_run, yes=yes, as_json=common.as_json)


def prune(
    older_than: OlderThan = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    *,
    common: Output,
) -> None:
    """Delete the checkpoints of finished runs and of the runs in them; models, metrics and results are kept.

    `eval` and `probe` can then no longer read RUN@STEP.
    """
    from bertkit.run.checkpoint_removal import checkpoint_bytes
    from bertkit.run.find import find_runs
    from bertkit.run.housekeeping import delete_checkpoints, is_older, runs_below

    outer = [run for run in find_runs(runs_root()) if run.status == "done"]
    inner = [run for each in outer for run in runs_below(each.path) if run.status == "done"]
    sizes = {run: checkpoint_bytes(run.checkpoints) for run in (*outer, *inner) if is_older(run, older_than)}
    chosen = {run: taken for run, taken in sizes.items() if taken}

    def delete_chosen() -> None:
        for run in chosen:
            delete_checkpoints(run)

    places = {run.checkpoints: taken for run, taken in chosen.items()}
    what = "checkpoints of finished runs"
    _free(places, what, delete_chosen, dry_run=dry_run, yes=yes, as_json=common.as_json)


def _free(
    sizes: Mapping[Path, int], what: str, delete: Callable[[], None], *, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Show the directories that are to be deleted, ask for consent unless it is given, and delete them."""
    if sizes:
        console.table(("path", "size"), [(path, size(taken)) for path, taken in sizes.items()])
    total = f"{what}: {len(sizes):,}, {size(sum(sizes.values()))}"
    if sizes and not dry_run:
        confirm(f"delete {total}?", yes=yes)
        delete()
    if as_json:
        deleted = [{"path": path, "bytes": taken} for path, taken in sizes.items()]
        result({"dry_run": dry_run, "bytes": sum(sizes.values()), "paths": deleted}, as_json=True)
    else:
        result(f"{'would delete' if dry_run else 'deleted'} {total}")


def _local(moment: str) -> str:
    """A moment of a record in the local time zone, to the minute; unchanged if it is no date."""
    try:
        return f"{datetime.fromisoformat(moment).astimezone():%Y-%m-%d %H:%M}"
    except ValueError:
        return moment


def _row(run: RunDirectory) -> dict[str, Any]:
    record = run.record
    try:
        results = run.results
    except DataError as error:  # one damaged file must not hide the other runs
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
    """The full record of a run, as printed by `runs show --json`; checkpoints are listed, not verified."""
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
        ("command", _pasteable(record["command"])),
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


def _pasteable(command: Sequence[object]) -> str:
    """A recorded command as it can be pasted into a shell; `python -m bertkit` is recorded as the path of a module."""
    program, *words = map(str, command)
    return shlex.join([*(("python", "-m", "bertkit") if Path(program).name == "__main__.py" else (program,)), *words])


def _flat(prefix: str, value: Any) -> list[tuple[str, object]]:
    """Rows of dotted key and value from a nested mapping."""
    if isinstance(value, dict):
        return [row for key, item in value.items() for row in _flat(f"{prefix}.{key}" if prefix else str(key), item)]
    return [] if value is None or value == [] else [(prefix, _cell(value))]


def _cell(value: object) -> object:
    """A value as a cell: numbers with six digits, and only the length of a list of mappings."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if not isinstance(value, list):
        return value
    if any(isinstance(each, dict) for each in value):
        return f"{len(value):,} in all; --json shows them"
    return f"[{', '.join(str(_cell(each)) for each in value)}]"


def _score(results: dict[str, Any] | None) -> str:
    """The score shown in a run's line: a task's primary metric, a suite's average, or the held-out loss."""
    found = results or {}
    try:
        if "primary" in found:
            task, scores = next(iter(found["tasks"].items()))
            score = scores[found["primary"]]
            of = "folds" if "fold" in (found.get("chosen") or {}) else "seeds"
            spread = "" if score["std"] is None else f" ± {score['std']:.4f} ({score['n']} {of})"
            return f"{task} {found['primary']} {score['mean']:.4f}{spread}"
        if isinstance(found.get("average"), float):
            return f"average {found['average']:.4f}"
        return f"held-out loss {found['held_out']['loss']:.4g}"
    except (KeyError, TypeError, ValueError, StopIteration, AttributeError):
        return ""


def _fitted(rows: list[tuple[str, ...]], width: int | None) -> list[str]:
    """Rows of id, status, steps, start and score as aligned lines. Columns that do not fit the terminal are left out:
    first the start, then the steps, then the score."""
    columns = [0, 1, 2, 3, 4]
    widths = [max(len(row[column]) for row in rows) for column in columns]
    for leave_out in (3, 2, 4):
        if width is None or sum(widths[column] + 2 for column in columns) - 2 <= width:
            break
        columns.remove(leave_out)
    return [
        "  ".join(
            row[column].rjust(widths[column]) if column == 2 else row[column].ljust(widths[column])
            for column in columns
        ).rstrip()
        for row in rows
    ]

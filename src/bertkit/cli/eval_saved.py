"""`bertkit eval score`, `check` and `ensemble`: score, check and average saved predictions, without a model.

Siblings eval_suites.py and eval_tasks.py evaluate models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bertkit.cli.console import console, figure, result
from bertkit.cli.options import Output, Recording, RunDir
from bertkit.errors import CheckError, UsageError
from bertkit.files import shown_path
from bertkit.run import runs_root
from bertkit.visible import number_of


def score(
    task: Annotated[str, typer.Argument(metavar="TASK", help="Published task: rte, squad, conll2003, ...")],
    predictions: Annotated[
        Path,
        typer.Option(
            "--predictions",
            metavar="F",
            help="Predictions: JSON Lines with id and prediction, GLUE's .tsv with index and prediction, SQuAD's"
            " predictions.json, or CoNLL columns with the predicted tag last.",
        ),
    ],
    gold: Annotated[Path, typer.Option("--gold", metavar="F", help="The task's own file, with labels.")],
    split: Annotated[str, typer.Option("--split", metavar="SPLIT", help="Split of the gold file.")] = "dev",
    *,
    common: Output,
) -> None:
    """Score saved predictions, without a model: `bertkit eval score rte --predictions rte-dev.jsonl --gold dev.tsv`"""
    from bertkit.evaluation.score import score_file

    document = score_file(task, predictions, gold, split)
    if common.as_json:
        result(document, as_json=True)
        return
    (name, scores), *_ = document["tasks"].items()
    for metric, summary in scores.items():
        result(f"{name}  {metric}  {'undefined' if summary['mean'] is None else figure(summary['mean'])}")
    console.info(number_of(document["examples"], "example"))


def check(
    archive: Annotated[Path, typer.Argument(metavar="ZIP", help="GLUE submission.")],
    *,
    common: Output,
) -> None:
    """Validate a GLUE submission made by any tool: every error with file and line, and exit code 5 if there is one."""
    from bertkit.evaluation.submission import GLUE_FILES, check_submission

    errors = check_submission(archive)
    if common.as_json:
        result({"zip": archive, "ok": not errors, "faults": [each._asdict() for each in errors]}, as_json=True)
    if errors:
        lines = "".join(f"\n  {each}" for each in errors)
        raise CheckError(f"{archive}: {len(errors)} {'error' if len(errors) == 1 else 'errors'}:{lines}")
    if not common.as_json:
        result(f"{archive}: a complete submission of {len(GLUE_FILES)} files")


def ensemble(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN", help="Finished runs on one task; a suite stands for all runs of its chosen setting."
        ),
    ],
    run_dir: RunDir = None,
    *,
    common: Recording,
) -> None:
    """Average the saved predictions of several runs, score them and write them: `bertkit eval ensemble RUN RUN RUN`"""
    from bertkit.evaluation.ensemble import EnsembleArguments, evaluate_ensemble, members_of
    from bertkit.run.find import find_run

    found = [find_run(name, runs_root()) for name in runs]
    members = [member.path.resolve() for run in found for member in members_of(run)]
    if twice := next((path for path in members if members.count(path) > 1), None):
        raise UsageError(
            f"{shown_path(twice)}: is given twice, alone or in a suite, and would count double; name it once"
        )
    evaluated = evaluate_ensemble(EnsembleArguments(runs=found, **common.record_fields(run_dir)))
    _print_ensemble(evaluated.results)
    document = {**evaluated.document, "run": evaluated.run.path, "runs": evaluated.results["runs"]}
    result(document if common.as_json else evaluated.run.path, as_json=common.as_json)


def _print_ensemble(results: dict[str, Any]) -> None:
    """The ensemble next to its runs."""
    rows: list[tuple[object, ...]] = []
    for task, table in results["tasks"].items():
        splits = [name.rpartition("/")[2] for name in results["examples"] if name.rpartition("/")[0] == task]
        only = "" if any(split.startswith("dev") for split in splits) else f" ({splits[0]})"
        for metric, summary in table.items():
            alone = [each["scores"].get(metric) for each in results["runs"][task]]
            known = [value for value in alone if value is not None]
            least, most = (min(known), max(known)) if known else (None, None)
            rows.append((f"{task}{only}", metric, figure(summary["mean"]), figure(least), figure(most), len(alone)))
    console.table(("task", "metric", "ensemble", "worst run", "best run", "runs"), rows)

"""`bertkit replay-batch`: find the first non-finite value in an update of a run.

Sibling show_batch.py prints a batch; this command recomputes one that a run has saved.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertkit.cli.console import console, result
from bertkit.cli.options import Output, RunName
from bertkit.errors import CheckError, UsageError
from bertkit.run import runs_root

if TYPE_CHECKING:
    from bertkit.run.directory import RunDirectory
    from bertkit.training.trainer import Trainer


def replay_batch(
    run: RunName,
    step: Annotated[
        int | None,
        typer.Option(
            "--step",
            metavar="N",
            min=1,
            show_default=False,
            help="Update whose saved batch is replayed, if there are several (default: newest).",
        ),
    ] = None,
    *,
    common: Output,
) -> None:
    """Recompute the batch of an update with a non-finite loss or gradient, and name what becomes non-finite first.

    A run saves such a batch with its weights and random generators in RUN/nonfinite. Nothing there is changed. The exit
    code is 5 if everything is finite this time.
    """
    from bertkit.run.find import find_run
    from bertkit.training.replay_batch import replay, saved_batch

    found_run = find_run(run, runs_root())
    saved = saved_batch(found_run.path, step)
    found = replay(_trainer(found_run), saved)
    if common.as_json:
        result({"run": found_run.path, **found.to_json()}, as_json=True)
    else:
        console.table(("term", "loss"), [(name, value) for name, value in found.terms.items()])
        result(found.in_words())
    if found.finite:
        raise CheckError(f"{found_run.path}: {found.in_words()}")


def _trainer(run: RunDirectory) -> Trainer[Any]:
    """The run's trainer, as resuming would build it.

    Raises:
        UsageError: the run does not train.
        DataError: its data or models no longer exist.
    """
    from bertkit.recipe.resolve import kind_of, resolve_recipe
    from bertkit.run.directory import RECIPE

    tree = resolve_recipe(str(run.path / RECIPE))
    if run.record["kind"] not in ("pretrain", "finetune", "distill") or tree.child("static") is not None:
        raise UsageError(f"{run.path}: is a run of `bertkit {run.record['kind']}`, which trains nothing")
    kind, on_text = kind_of(tree), tree.child("objective") is not None
    if kind == "pretrain" or (kind == "distill" and on_text):
        return _trainer_on_text(run, kind)
    return _trainer_on_task(run, kind)


def _trainer_on_text(run: RunDirectory, kind: str) -> Trainer[Any]:
    from bertkit.data.shards import TokenShards
    from bertkit.distillation.text_arguments import DistillTextArguments
    from bertkit.pretraining.arguments import PretrainArguments, with_recorded_held_out
    from bertkit.pretraining.run import open_shards

    kinds = {"pretrain": PretrainArguments, "distill": DistillTextArguments}
    arguments: PretrainArguments = kinds[kind](runs_root=runs_root(), offline=True)
    recipe = with_recorded_held_out(arguments.recorded(run), run)
    shards = Path(str(run.record.get("shards", "")))
    found = (
        TokenShards.open(shards)
        if shards.is_dir()
        else open_shards(
            recipe, cache=arguments.cache, offline=True, progress=console.progress, commits=run.record.get("commits")
        )
    )
    return arguments.trainer(recipe, found, run)


def _trainer_on_task(run: RunDirectory, kind: str) -> Trainer[Any]:
    from bertkit.distillation.task_arguments import DistillArguments
    from bertkit.finetuning.arguments import FinetuneArguments
    from bertkit.finetuning.run import BEFORE

    kinds = {"finetune": FinetuneArguments, "distill": DistillArguments}
    arguments: FinetuneArguments = kinds[kind](runs_root=runs_root(), offline=True)
    recipe = arguments.recorded(run)
    before = run.path / "runs" / BEFORE / "model"
    if arguments.before(recipe) is not None and not before.is_dir():
        raise UsageError(f"{run.path}: started from the model of another run, which is not at {before}")
    start = before if arguments.before(recipe) is not None else None
    return arguments.trainer(recipe, [arguments.prepare(each) for each in recipe.alone], run, start)

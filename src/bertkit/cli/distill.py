"""`bertkit distill`: trains a smaller model from a teacher and a recipe.

A recipe with an `objective` distils on text, like `bertkit pretrain`; one with `static` computes a table of token
vectors; all others distil on a task, like `bertkit finetune`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from bertkit.cli.console import console, figure
from bertkit.cli.finetune import OwnData, Tasks, print_scores, task_overrides, warn_replaced
from bertkit.cli.generated_options import Options
from bertkit.cli.options import (
    Data,
    ParallelRunOptions,
    RecipeName,
    Resume,
    TaskHyperparameters,
    Training,
    given_flags,
    on_start_for,
    option,
    set_overrides,
)
from bertkit.cli.plans import print_plan
from bertkit.errors import UsageError
from bertkit.run import runs_root

if TYPE_CHECKING:
    from bertkit.run.stored import RunLocation
    from bertkit.training.run import FinishedRun

_OF_TRAINING = ("--seed", "--device", "--precision", "--nproc", "--max-steps", "--max-minutes", "--report-to")
"""Options that do not apply to tables of token vectors."""


@dataclass(frozen=True)
class Models(Options):
    """Teacher and student."""

    teacher: Annotated[
        list[str] | None,
        option(
            "--teacher",
            metavar="MODEL",
            help="Teacher: a Hub id, a model directory or a run directory. Repeatable: the mean of the teachers'"
            " logits is used.",
        ),
    ] = None
    student: Annotated[
        str | None, option("--student", metavar="MODEL", help="Model to train, instead of the recipe's student.")
    ] = None
    control: Annotated[
        bool, option("--control", metavar="", help="Train the same student without its teacher, for comparison.")
    ] = False


def distill(
    recipe: RecipeName = "",
    data: Data = None,
    resume: Resume = None,
    *,
    models: Models,
    hyperparameters: TaskHyperparameters,
    tasks: Tasks,
    side_by_side: ParallelRunOptions,
    own: OwnData,
    common: Training,
) -> None:
    """Distil or compress a model: train a small model to imitate a large one, on a task or on text.

    Examples:
    `bertkit distill distil-task --teacher RUN --task mrpc --data-dir glue`
    `bertkit distill distil-task --teacher RUN --task mrpc --control`
    `bertkit distill pkd --teacher M --task rte --seeds 0-4`
    `bertkit distill distilbert --teacher M --data my.txt`
    `bertkit distill prune-heads --teacher RUN --task mrpc --data-dir glue`
    `bertkit distill static-embeddings --teacher EMBEDDER`
    """
    with common.place(resume) as place:
        of_data = [*(["--task"] if tasks.names else []), *given_flags(own)]
        source, resume = _recipe_or_run(recipe, place.resume, [*given_flags(models), *of_data])
        way = _way_of(source)
        if way == "static":
            unfit = [flag for each in (tasks, own, hyperparameters, side_by_side) for flag in given_flags(each)]
            unfit += ["--data"] if data else []
            unfit += [flag for flag in given_flags(models) if flag != "--teacher"]
            _make_static(source, models, resume, unfit, common, place)
            return
        on_text = way == "text"
        epochs = ["--epochs"] if hyperparameters.epochs is not None else []
        of_tasks = [*(flag for each in (tasks, side_by_side, own) for flag in given_flags(each)), *epochs]
        misplaced = of_tasks if on_text else ["--data"] if data else []
        if misplaced:
            where = "text, but these options are for tasks" if on_text else "a task, but this option is for text"
            raise UsageError(f"{', '.join(misplaced)}: the recipe distils on {where}")
        shared: dict[str, Any] = {
            "recipe": recipe or None,
            "teachers": models.teacher or (),
            "student": models.student,
            "control": models.control,
            "resume": resume,
            **common.argument_fields(place),
        }
        if on_text:
            shared["overrides"] = [*hyperparameters.overrides, *common.overrides]
            _distil_on_text(shared, data or (), common, place)
        else:
            shared["overrides"] = [*hyperparameters.overrides, *side_by_side.overrides, *task_overrides(own, common)]
            _distil_on_task(shared | tasks.fields, tasks, own, common, place)


def _recipe_or_run(recipe: str, resume: str | None, given: Sequence[str]) -> tuple[str, str | None]:
    """The recipe's name or file, and the run to resume.

    Args:
        recipe, resume: as on the command line.
        given: the options for models and data.

    Raises:
        UsageError: neither is given, or models or data are given for a run, which has its own.
    """
    if recipe:
        return recipe, resume
    if resume is None:
        raise UsageError("give a RECIPE, such as distil-task; `bertkit recipes list` lists those of kind distill")
    from bertkit.run.find import run_to_resume

    run = run_to_resume(resume, runs_root(), "distill").path
    if given:
        raise UsageError(
            f"{', '.join(given)}: the resumed run has its own; leave it out, or also give the run's RECIPE"
        )
    return str(run / "recipe.yaml"), str(run)


def _way_of(recipe: str) -> Literal["text", "task", "static"]:
    """How a recipe distils: on text, on a task, or into a table of token vectors.

    Raises:
        UsageError: it is of another kind.
    """
    from bertkit.recipe.resolve import require_kind, resolve_recipe

    tree = resolve_recipe(recipe)
    require_kind(tree, recipe, "distill")
    if tree.child("objective") is not None:
        return "text"
    return "task" if tree.child("static") is None else "static"


def _make_static(
    recipe: str, models: Models, resume: str | None, unfit: Sequence[str], common: Training, place: RunLocation
) -> None:
    unfit = [*unfit, *(flag for flag in given_flags(common) if flag in _OF_TRAINING)]
    if unfit:
        raise UsageError(f"{', '.join(unfit)}: the recipe makes a table of token vectors and trains nothing")
    from bertkit.distillation.static_recipe import StaticArguments
    from bertkit.distillation.static_run import make_static, static_plan

    request = StaticArguments(
        recipe=recipe,
        teachers=models.teacher or (),
        overrides=set_overrides(common.settings),
        resume=resume,
        **common.argument_fields(place),
    )
    if common.plan:
        print_plan(static_plan(request), as_json=common.as_json)
        return
    finished = make_static(request, progress=console.progress, on_start=on_start_for(place))
    made = finished.results["static"]
    words = f", {made['words']:,} of them whole words" if made["words"] else ""
    console.info(
        f"{made['tokens']:,} rows{words}, {made['width']} wide: {made['variance_kept']:.0%} of the variance kept"
    )
    common.finish(place, finished.run, finished.results)


def _distil_on_text(shared: Mapping[str, Any], sources: Sequence[str], common: Training, place: RunLocation) -> None:
    from bertkit.cli.pretrain import print_held_out
    from bertkit.distillation.plan import distill_text_plan
    from bertkit.distillation.text_arguments import DistillTextArguments
    from bertkit.pretraining.run import run_pretraining

    request = DistillTextArguments(**shared, sources=sources, max_steps=common.max_steps)
    common.execute(
        place,
        request,
        plan=distill_text_plan,
        run=run_pretraining,
        show=lambda finished: print_held_out(finished.results),
    )


def _distil_on_task(
    shared: Mapping[str, Any], tasks: Tasks, own: OwnData, common: Training, place: RunLocation
) -> None:
    from bertkit.distillation.task_arguments import DistillArguments
    from bertkit.finetuning.plan import finetuning_plan
    from bertkit.finetuning.run import finetune

    request = DistillArguments(**shared, task=own.task_or(tasks.names), progress=console.progress)
    warn_replaced(request)

    def show(finished: FinishedRun) -> None:
        print_scores(finished)
        _print_teacher(finished.results)

    common.execute(place, request, plan=finetuning_plan, run=finetune, show=show)


def _print_teacher(results: Mapping[str, Any]) -> None:
    """Teacher and student side by side."""
    teacher, student = results["teacher"], results["student"]
    rows = []
    for split, scores in teacher["splits"].items():
        for name, score in scores.items():
            retained = results["retained"][split][name]
            rows.append((split, name, figure(score), "-" if retained is None else f"{retained:.1%}"))
    console.table(["split", "metric", "teacher", "retained by the student"], rows)
    parameters, teachers = student["parameters"], teacher["parameters"]
    times = f"{teachers / max(1, parameters):.1f} times fewer than"
    compared = "about as many as" if times.startswith("1.0 ") else times
    control = "control run, without the teacher: " if results["control"] else ""
    console.line(f"{control}{parameters:,} parameters, {compared} the teacher's {teachers:,}")

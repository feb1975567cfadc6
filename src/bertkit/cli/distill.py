"""`bertkit distill`: a teacher and a recipe in, a smaller model out.

Nothing here follows a paper. A recipe with an `objective` distils on text, like `bertkit pretrain`; any other on a
task, like `bertkit finetune`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from bertkit.cli.common import (
    Data,
    RecipeName,
    Resume,
    cache_root,
    command_app,
    option,
    runs_root,
    seed_numbers,
    story,
)
from bertkit.cli.finetune import DataDir, Grid, OwnData, Seeds, TaskNames, grid_values, task_names, tell_scores
from bertkit.cli.shared import Options, Training, as_overrides, keep_log, with_options
from bertkit.errors import UsageError

app = command_app()

Teacher = Annotated[
    list[str] | None,
    option(
        "--teacher",
        metavar="MODEL",
        help="Who is learnt from: a Hub id, a model or a run directory. Repeatable: the mean of their logits.",
    ),
]
Student = Annotated[
    str | None, option("--student", metavar="MODEL", help="A model that learns, in place of the recipe's student.")
]
Control = Annotated[
    bool, option("--control", metavar="", help="The same student without its teacher, to compare with.")
]


@dataclass(frozen=True)
class Lesson(Options):
    """Who learns from whom."""

    teacher: Teacher = None
    student: Student = None
    control: Control = False


@app.command()
@with_options
def distill(
    recipe: RecipeName = "",
    *,
    lesson: Lesson,
    task: TaskNames = None,
    data_dir: DataDir = None,
    data: Data = None,
    seeds: Seeds = None,
    grid: Grid = None,
    own: OwnData,
    resume: Resume = None,
    common: Training,
) -> None:
    """Distil or compress: let a small model learn from a large one, on a task or on text.

    Examples: `bertkit distill distil-task --teacher runs/mrpc --task mrpc --data-dir glue`, `bertkit distill pkd
    --teacher M --task rte --seeds 0-4`, the same with `--control`, `bertkit distill distilbert --teacher M --data
    my.txt`.
    """
    if recipe:
        resumed = None
    elif resume is not None:
        from bertkit.run.find import run_to_resume

        resumed = run_to_resume(resume, runs_root(), "distill")
        given = [f"--{name}" for name, value in vars(lesson).items() if value]
        if given:
            raise UsageError(
                f"{', '.join(given)}: the run that goes on has its own; leave it out, or give its RECIPE too"
            )
    else:
        raise UsageError("give a RECIPE, such as distil-task; `bertkit recipes list` shows those of kind distill")
    resume = resume if resumed is None else str(resumed.path)
    names = task_names(task)
    of_tasks = {"--task": names, "--data-dir": data_dir, "--seeds": seeds, "--grid": grid}
    of_tasks |= {f"--{name.replace('_', '-')}": value for name, value in vars(own).items()}
    on_text = _is_on_text(recipe if resumed is None else str(resumed.path / "recipe.yaml"))
    stray = [name for name, value in (of_tasks if on_text else {"--data": data}).items() if value]
    if stray:
        form = "on text, and these are of a task" if on_text else "on a task, and this is of text"
        raise UsageError(f"{', '.join(stray)}: the recipe distils {form}")
    shared: dict[str, Any] = {
        "recipe": recipe or None,
        "teachers": lesson.teacher or (),
        "student": lesson.student,
        "control": lesson.control,
        "resume": resume,
        "runs_root": runs_root(),
        "run_dir": common.run_dir,
        "cache": cache_root(),
        "offline": common.offline,
        "max_minutes": common.max_minutes,
        "command": sys.argv,
    }
    if on_text:
        _distil_on_text(shared, data or (), common)
        return
    shared |= {"data_dir": data_dir, "seeds": seed_numbers(seeds or None), "grid": grid_values(grid or ())}
    _distil_on_task(shared, names, own, common)


def _distil_on_text(shared: Mapping[str, Any], sources: Any, common: Training) -> None:
    from bertkit.cli.pretrain import tell_held_out
    from bertkit.distillation.text_arguments import DistillTextArguments
    from bertkit.distillation.text_plan import distill_text_plan
    from bertkit.pretraining.run import run_pretraining

    shorthand = {"seed": common.seed, "engine.device": common.device, "engine.precision": common.precision}
    overrides = [*(common.overrides or ()), *as_overrides(shorthand)]
    request = DistillTextArguments(**shared, sources=sources, overrides=overrides, max_steps=common.max_steps)
    if common.plan:
        common.finish_plan(distill_text_plan(request))
        return
    finished = run_pretraining(request, progress=story.progress, begun=keep_log)
    tell_held_out(finished.results)
    common.finish(finished.run, finished.results)


def _distil_on_task(shared: Mapping[str, Any], names: list[str], own: OwnData, common: Training) -> None:
    from bertkit.distillation.task_arguments import DistillArguments
    from bertkit.finetuning.plan import finetuning_plan
    from bertkit.finetuning.run import finetune

    shorthand = {
        "seed": common.seed,
        "engine.device": common.device,
        "engine.precision": common.precision,
        "optimisation.steps": common.max_steps,
        "data.predict": '["test"]' if own.test else None,
    }
    overrides = [*as_overrides(shorthand), *(common.overrides or ())]
    request = DistillArguments(**shared, task=own.task_or(names), overrides=overrides, progress=story.progress)
    if common.plan:
        common.finish_plan(finetuning_plan(request))
        return
    outcome = finetune(request, progress=story.progress, begun=keep_log)
    tell_scores(outcome)
    _tell_teacher(outcome.results)
    common.finish(outcome.run, outcome.results)


def _tell_teacher(results: Mapping[str, Any]) -> None:
    """The teacher beside the student, for people."""
    teacher, student = results["teacher"], results["student"]
    rows = [
        (split, name, _figure(score), _share(results["retained"][split][name]))
        for split, scores in teacher["splits"].items()
        for name, score in scores.items()
    ]
    story.table(["split", "metric", "teacher", "retained by the student"], rows)
    own, theirs = student["parameters"], teacher["parameters"]
    times = f"{theirs / max(1, own):.1f} times fewer than"
    compared = "about as many as" if times.startswith("1.0 ") else times
    control = "a control, without the teacher: " if results["control"] else ""
    story.line(f"{control}{own:,} parameters, {compared} the teacher's {theirs:,}")


def _is_on_text(recipe: str) -> bool:
    """Whether a recipe distils on text.

    Raises:
        UsageError: it is of another kind.
    """
    from bertkit.recipe.resolve import require_kind, resolve_recipe

    tree = resolve_recipe(recipe)
    require_kind(tree, recipe, "distill")
    return tree.child("objective") is not None


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"

"""`bertkit show-batch`: a training batch in readable form, coloured on a terminal. Marks give the same information
without colour.
"""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertkit.cli.console import console, result
from bertkit.cli.options import Common, Data, Seed, SetOption, set_overrides
from bertkit.errors import UsageError
from bertkit.run import runs_root
from bertkit.run.directory import RECIPE
from bertkit.visible import shell_word, visible

if TYPE_CHECKING:
    from rich.text import Text

    from bertkit.finetuning.arguments import FinetuneArguments
    from bertkit.pretraining.show_batch import ShownBatch, ShownSequence, ShownToken

STYLES = {
    "masked": "bold cyan",
    "replaced": "bold red",
    "kept": "bold green",
    "moved": "bold magenta",
    "predicted": "bold yellow",
}
"""By a token's change; every `change` of an objective has one."""


def show_batch(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE|RUN", help="Recipe (a file or a shipped name), or run directory.")
    ],
    step: Annotated[int, typer.Option("--step", metavar="N", min=1, help="Update whose batch is shown.")] = 1,
    sequences: Annotated[
        int, typer.Option("--sequences", metavar="N", min=1, help="Number of sequences of the batch to show.")
    ] = 4,
    data: Data = None,
    settings: SetOption = None,
    seed: Seed = None,
    *,
    common: Common,
) -> None:
    """Show what the model reads and what it has to predict: `bertkit show-batch bert-tiny --data my.txt --step 7`.

    For a recipe on a task, use --set instead of the options of `finetune` or `distill`: `bertkit show-batch distil-task
    --set task=mrpc --set data.directory=glue --set teacher=runs/mrpc`.
    """
    from bertkit.finetuning.show_batch import show_task_batch
    from bertkit.pretraining.arguments import PretrainArguments
    from bertkit.pretraining.show_batch import show_batch as batch_of
    from bertkit.recipe.resolve import overrides_of

    shared: dict[str, Any] = {
        "overrides": [*overrides_of({} if seed is None else {"seed": seed}), *set_overrides(settings)],
        "runs_root": runs_root(),
        "offline": common.offline,
    }
    arguments = _of_task(recipe, shared)
    recorded = Path(recipe) / RECIPE
    given = {"--data": data, "--set": settings, "--seed": None if seed is None else [seed]}
    if arguments is None and recorded.is_file() and (unread := [flag for flag, values in given.items() if values]):
        raise UsageError(
            f"{', '.join(unread)}: a run is shown with its own recipe and text; for others, give its recipe:"
            f" `bertkit show-batch {shell_word(recorded)}`"
        )
    if arguments is None:
        request = PretrainArguments(recipe=recipe, sources=data or (), **shared)
        batch = batch_of(request, step=step, sequences=sequences, progress=console.progress)
    elif data:
        raise UsageError("--data: this option is for text, but the recipe trains on a task")
    else:
        batch = show_task_batch(arguments, step=step, sequences=sequences)
    if common.as_json:
        result(batch.as_document(), as_json=True)
        return
    _print(batch)


def _of_task(recipe: str, shared: dict[str, Any]) -> FinetuneArguments | None:
    """The arguments of a recipe or run on a task; None for text."""
    from bertkit.distillation.task_arguments import DistillArguments
    from bertkit.finetuning.arguments import FinetuneArguments
    from bertkit.recipe.resolve import kind_of, resolve_recipe

    recorded = Path(recipe) / RECIPE
    name = str(recorded) if recorded.is_file() else recipe
    tree = resolve_recipe(name)
    if kind_of(tree) == "finetune":
        return FinetuneArguments(recipe=name, **shared)
    if tree.child("static") is not None:
        raise UsageError(f"{recipe}: makes a table of token vectors and trains nothing")
    if kind_of(tree) == "distill" and tree.child("objective") is None:
        return DistillArguments(recipe=name, progress=console.progress, **shared)
    return None


def _print(batch: ShownBatch) -> None:
    import rich.console

    # No soft wrapping if the output is not a terminal: then a sequence is one line.
    out = rich.console.Console(highlight=False, soft_wrap=True)
    stage = f", stage {batch.stage + 1} of {batch.stages}" if batch.stages > 1 else ""
    heading = f"{batch.recipe}, step {batch.step:,}{stage}: {len(batch.sequences)} of {batch.in_all:,} sequences"
    out.print(visible(heading), markup=False)
    for number, sequence in enumerate(batch.sequences, start=1):
        out.print()
        out.print(visible(_heading(number, sequence)), style="bold", markup=False)
        out.print(_line(sequence))


def _heading(number: int, sequence: ShownSequence) -> str:
    facts = [f"{len(sequence.tokens)} tokens", f"epoch {sequence.epoch}, sample {sequence.sample}"]
    names = {term: f" ({name})" for term, name in sequence.label_names.items()}
    facts += [f"{term} = {label:g}{names.get(term, '')}" for term, label in sequence.labels.items()]
    facts += ["left to right"] if sequence.causal else []
    return f"{number}: " + "; ".join(facts)


def _line(sequence: ShownSequence) -> Text:
    from rich.text import Text

    line = Text()
    nexts = [token.token for token in sequence.tokens[1:]] if sequence.causal else []
    for token, following in zip_longest(sequence.tokens, nexts):
        line.append(" " if len(line) else "")
        _append(line, token, following)
    return line


def _append(line: Text, token: ShownToken, following: str | None) -> None:
    """`token`, `[MASK](original)`, `token(replaced original)`, `token(kept)` or, if the text's token is only hidden
    from the states that predict it, `token(predicted)`; followed in braces by anything else that its state predicts.

    In a causal sequence a prediction of the next token is not shown.
    """
    if token.change is None:
        line.append(visible(token.token))
    else:
        plain = {"masked": token.original, "kept": "kept", "predicted": "predicted"}
        change = plain.get(token.change, f"{token.change} {token.original}")
        line.append(visible(f"{token.token}({change})"), style=STYLES[token.change])
    others = {term: target for term, target in token.predicts.items() if target != following}
    if others:
        shown = ", ".join(f"{term}: {target}" for term, target in others.items())
        line.append(visible(f"{{{shown}}}"), style="dim")

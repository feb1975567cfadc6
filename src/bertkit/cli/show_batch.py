"""`bertkit show-batch`: a training batch as a person reads it.

Nothing here follows a paper. In colour on a terminal; the marks say the same without it.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated

import typer

from bertkit.cli.common import (
    Data,
    Seed,
    SetOption,
    cache_root,
    command_app,
    result,
    runs_root,
    story,
)
from bertkit.cli.shared import Common, as_overrides, with_options

if TYPE_CHECKING:
    from rich.text import Text

    from bertkit.pretraining.show_batch import ShownBatch, ShownSequence, ShownToken

STYLES = {"masked": "bold cyan", "replaced": "bold red", "kept": "bold green", "moved": "bold magenta"}

app = command_app()


@app.command()
@with_options
def show_batch(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE|RUN", help="A recipe (file or shipped name), or a run directory.")
    ],
    step: Annotated[int, typer.Option("--step", metavar="N", min=1, help="The update whose batch is shown.")] = 1,
    sequences: Annotated[
        int, typer.Option("--sequences", metavar="N", min=1, help="Show so many sequences of the batch.")
    ] = 4,
    data: Data = None,
    overrides: SetOption = None,
    seed: Seed = None,
    *,
    common: Common,
) -> None:
    """Show what the model reads and what it has to predict: `bertkit show-batch bert-tiny --data my.txt --step 7`."""
    from bertkit.pretraining.arguments import PretrainArguments
    from bertkit.pretraining.show_batch import show_batch as batch_of

    request = PretrainArguments(
        recipe=recipe,
        overrides=[*(overrides or ()), *as_overrides({"seed": seed})],
        sources=data or (),
        runs_root=runs_root(),
        cache=cache_root(),
        offline=common.offline,
    )
    batch = batch_of(request, step=step, sequences=sequences, progress=story.progress)
    if common.as_json:
        result(batch.as_document(), as_json=True)
        return
    _print(batch)


def _print(batch: ShownBatch) -> None:
    from rich.console import Console

    # No soft wrapping where nobody looks: a sequence is one line then.
    console = Console(highlight=False, soft_wrap=True)
    stage = f", stage {batch.stage}" if batch.stage else ""
    console.print(f"{batch.recipe}, step {batch.step:,}{stage}: {len(batch.sequences)} of {batch.in_all:,} sequences")
    for number, sequence in enumerate(batch.sequences, start=1):
        console.print()
        console.print(_heading(number, sequence), style="bold", markup=False)
        console.print(_line(sequence))


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
    """`token`, `[MASK](original)`, `token(replaced original)`; behind it in braces what else its state predicts.

    In a causal sequence that is not written where it is the token that follows.
    """
    if token.change is None:
        line.append(token.token)
    else:
        said = {"masked": token.original, "kept": "kept"}.get(token.change, f"{token.change} {token.original}")
        line.append(f"{token.token}({said})", style=STYLES[token.change])
    others = {term: target for term, target in token.predicts.items() if target != following}
    if others:
        line.append("{" + ", ".join(f"{term}: {target}" for term, target in others.items()) + "}", style="dim")

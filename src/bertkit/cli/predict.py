"""`bertkit predict`: a fine-tuned model labels new text, line by line, in a pipeline.

Nothing here follows a paper. Sibling eval.py measures a model on examples whose labels are known.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bertkit.cli.common import Device, Model, command_app, model_or_default, option, result, story
from bertkit.cli.shared import Common, Options, with_options
from bertkit.progress import silent_progress

if TYPE_CHECKING:
    from bertkit.inference.predict import Predictor

app = command_app()

InputFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="[FILE]",
        show_default=False,
        help="Plain lines, .jsonl, .csv, .tsv or .parquet, also compressed; - or nothing: stdin.",
    ),
]
TextColumn = Annotated[
    str | None, option("--text", metavar="COL", help="Column of the text (default: as in the training data, or text).")
]
TextPairColumn = Annotated[
    str | None,
    option(
        "--text-pair", metavar="COL", help="Column of the second text (default: as in the training data, or text_pair)."
    ),
]
InputForm = Annotated[
    Literal["text", "jsonl", "csv", "tsv", "parquet"] | None,
    option("--format", help="What the input is (default: by the file's ending or the first line)."),
]
Top = Annotated[
    int | None, option("--top", metavar="K", min=1, help="The K greatest scores only (default: all labels).")
]
MaxLength = Annotated[
    int | None, option("--max-length", metavar="N", min=8, help="Tokens of a sequence (default: as trained).")
]
TokensAtOnce = Annotated[int | None, option("--batch-tokens", metavar="N", min=1, help="Tokens computed at once.")]


@dataclass(frozen=True)
class Input(Options):
    """How the input is read."""

    text: TextColumn = None
    text_pair: TextPairColumn = None
    form: InputForm = None


@app.command()
@with_options
def predict(
    file: InputFile = None,
    model: Model = None,
    *,
    reading: Input,
    top: Top = None,
    max_length: MaxLength = None,
    batch_tokens: TokensAtOnce = None,
    device: Device = None,
    common: Common,
) -> None:
    """Label new text with a fine-tuned model: one JSON object a line, in input order.

    Examples: `echo "a fine film" | bertkit predict --model RUN`, `bertkit predict --model RUN reviews.csv --text body`.
    """
    from bertkit.evaluation.run import MeasurementArguments
    from bertkit.inference.predict import Predictor
    from bertkit.inference.predict_input import check_there

    path = None if file is None or str(file) == "-" else file
    if path is not None:
        check_there(path)
    name = model_or_default(model)
    engine = MeasurementArguments(device=device or "auto", batch_tokens=batch_tokens).engine()
    predictor = Predictor.load(name, engine, max_length=max_length, offline=common.offline)
    _answer(predictor, name, path, reading, top)


def _answer(predictor: Predictor, name: str, path: Path | None, reading: Input, top: int | None) -> None:
    """Every line of the input answered on stdout, as it comes."""
    from bertkit.inference.predict import document_of
    from bertkit.inference.predict_input import examples_of, open_input

    columns = replace(predictor.columns, text=reading.text, text_pair=reading.text_pair)
    windows = {}
    if path is None and sys.stdin.isatty():
        story.info("reading lines from the terminal, each is answered at once; end with Ctrl-D")
        windows = {"first": 1, "largest": 1}
    rows = open_input(path, sys.stdin.buffer, reading.form, columns)
    blank = lines = 0
    # Where the answers themselves are on the screen, they show how far it is.
    display = silent_progress if sys.stdout.isatty() else story.progress
    with display("predictions", unit="examples") as meter:
        for example, prediction in predictor.stream(examples_of(rows, predictor.kind, columns), **windows):
            if not lines and columns.text_pairs and getattr(example, "text_pair", "") is None:
                story.warn(f"{name} was trained on pairs of texts, the input has one text a line; give --text-pair COL")
            lines += 1
            blank += example is None
            result(document_of(example, prediction, top=top), as_json=True)
            meter.update(lines)
    if blank:
        story.warn(f"{blank} of {lines} lines are blank; their prediction is null")
    if not lines:
        story.warn(f"{path or 'stdin'} holds nothing to predict")

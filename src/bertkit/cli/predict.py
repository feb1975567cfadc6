"""`bertkit predict`: a fine-tuned model labels new text, line by line, in a pipeline.

Nothing here follows a paper. Sibling eval.py measures a model on examples whose labels are known.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bertkit.cli.console import console, result
from bertkit.cli.generated_options import FromField, Options
from bertkit.cli.options import COMMON_PANEL, BatchTokens, Common, Device, Model, model_or_default, option
from bertkit.progress import silent_progress

if TYPE_CHECKING:
    from bertkit.inference.predict import Predictor
    from bertkit.tasks.readers.reading import TableReading

READING = "bertkit.tasks.readers.reading:TableReading"

InputFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="[FILE]",
        show_default=False,
        help="Plain lines, .jsonl, .csv, .tsv or .parquet, also compressed; - or nothing: stdin.",
    ),
]


@dataclass(frozen=True)
class Input(Options):
    """How the input is read."""

    text: Annotated[
        str | None,
        option("--text", metavar="COL", help="Column of the text (default: as in the training data, or text)."),
    ] = None
    text_pair: Annotated[
        str | None,
        option(
            "--text-pair",
            metavar="COL",
            help="Column of the second text (default: as in the training data, or text_pair).",
        ),
    ] = None
    format: Annotated[
        Literal["text", "jsonl", "csv", "tsv", "parquet"] | None,
        option("--format", help="Format of the input (default: by the file's ending or the first line)."),
    ] = None
    delimiter: Annotated[str | None, FromField(READING, "delimiter", "--delimiter CHAR")] = None
    encoding: Annotated[str | None, FromField(READING, "encoding", "--encoding NAME")] = None
    skip_bad_rows: Annotated[
        bool, option("--skip-bad-rows", metavar="", help="Predict null for rows that cannot be read, and count them.")
    ] = False

    @property
    def settings(self) -> TableReading:
        """The settings of reading.

        Raises:
            UsageError: a delimiter or an encoding that is none.
        """
        from bertkit.cli.options import recipe_overrides
        from bertkit.recipe.errors import validate
        from bertkit.recipe.resolve import Override, with_values
        from bertkit.recipe.tree import Located
        from bertkit.tasks.readers.reading import TableReading

        given = [*recipe_overrides(self), Override("skip_bad_rows", self.skip_bad_rows)]
        return validate(with_values(Located.of({}, "the options"), given), TableReading, what="the command line")


@dataclass(frozen=True)
class Streaming(Common):
    """Of a command whose result is a stream of lines."""

    as_json: Annotated[
        bool,
        option(
            "--json",
            metavar="",
            panel=COMMON_PANEL,
            help="No change: the predictions are JSON Lines, one object for each example. A failure prints one object"
            " too, with error and code, if no prediction came before.",
        ),
    ] = False


def predict(
    file: InputFile = None,
    model: Model = None,
    *,
    reading: Input,
    top: Annotated[
        int | None, option("--top", metavar="K", min=1, help="The K greatest scores only (default: all labels).")
    ] = None,
    max_length: Annotated[
        int | None,
        FromField("bertkit.finetuning.inputs:FinetuneData", "data.max_length"),
    ] = None,
    batch_tokens: BatchTokens = None,
    device: Device = None,
    common: Streaming,
) -> None:
    """Label new text with a fine-tuned model: JSON Lines, one object for each example, in input order.

    Examples:
    `echo "a fine film" | bertkit predict --model RUN`
    `bertkit predict --model RUN reviews.csv --text body`
    """
    from bertkit.evaluation.run import MeasurementArguments
    from bertkit.inference.predict import Predictor
    from bertkit.inference.predict_input import check_there

    path = None if file is None or str(file) == "-" else file
    if path is not None:
        check_there(path)
    name = model_or_default(model)
    engine = MeasurementArguments(
        device=device or "auto", batch_tokens=None if batch_tokens == "auto" else batch_tokens
    ).engine()
    predictor = Predictor.load(name, engine, max_length=max_length, offline=common.offline)
    _print_predictions(predictor, name, path, reading, top)


def _print_predictions(predictor: Predictor, name: str, path: Path | None, reading: Input, top: int | None) -> None:
    """The prediction of every line on stdout, as soon as it is made."""
    from bertkit.inference.predict import document_of
    from bertkit.inference.predict_input import examples_of, open_input
    from bertkit.tasks.readers.reading import LeftOut

    columns = replace(predictor.columns, text=reading.text, text_pair=reading.text_pair)
    windows = {}
    if path is None and sys.stdin.isatty():
        console.info("reading lines from the terminal; the prediction of each follows at once; end with Ctrl-D")
        windows = {"first": 1, "largest": 1}
    left_out = LeftOut(skip_bad=reading.skip_bad_rows)
    rows = open_input(path, sys.stdin.buffer, reading.format, columns, reading.settings, left_out)
    blank = lines = 0
    # On a terminal the predictions themselves show the progress.
    display = silent_progress if sys.stdout.isatty() else console.progress
    with display("predictions", unit="examples") as meter:
        for example, prediction in predictor.stream(examples_of(rows, predictor.kind, columns, left_out), **windows):
            if not lines and columns.text_pairs and getattr(example, "text_pair", "") is None:
                console.warn(
                    f"{name} was trained on pairs of texts, the input has one text a line; give --text-pair COL"
                )
            lines += 1
            blank += example is None
            result(document_of(example, prediction, top=top), as_json=True)
            meter.update(lines)
    if left_out.rows:
        first = left_out.rows[0]
        console.warn(
            f"{len(left_out.rows)} of {lines} rows cannot be read; their prediction is null; the first is"
            f" {first.place}: {first.reason}"
        )
    if blank := blank - len(left_out.rows):
        console.warn(f"{blank} of {lines} lines are blank; their prediction is null")
    if not lines:
        console.warn(f"{path or 'stdin'} has nothing to predict")

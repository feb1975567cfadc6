"""`bertkit predict`: a fine-tuned model labels new text, line by line, in a pipeline.

Nothing here follows a paper. Sibling eval.py measures a model on examples whose labels are known.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from bertkit.cli.common import (
    AsJson,
    Device,
    Model,
    Offline,
    Quiet,
    Verbose,
    command_app,
    model_or_default,
    result,
    story,
)

app = command_app()


@app.command()
def predict(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]",
            show_default=False,
            help="Plain lines, .jsonl, .csv, .tsv or .parquet, also compressed; - or nothing: stdin.",
        ),
    ] = None,
    model: Model = None,
    text: Annotated[
        str | None,
        typer.Option(
            "--text",
            metavar="COL",
            show_default=False,
            help="Column of the text (default: as in the training data, or text).",
        ),
    ] = None,
    text_pair: Annotated[
        str | None,
        typer.Option(
            "--text-pair",
            metavar="COL",
            show_default=False,
            help="Column of the second text (default: as in the training data, or text_pair).",
        ),
    ] = None,
    form: Annotated[
        Literal["text", "jsonl", "csv", "tsv", "parquet"] | None,
        typer.Option(
            "--format", show_default=False, help="What the input is (default: by the file's ending or the first line)."
        ),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(
            "--top", metavar="K", min=1, show_default=False, help="The K greatest scores only (default: all labels)."
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            "--max-length", metavar="N", min=8, show_default=False, help="Tokens of a sequence (default: as trained)."
        ),
    ] = None,
    batch_tokens: Annotated[
        int | None,
        typer.Option("--batch-tokens", metavar="N", min=1, show_default=False, help="Tokens computed at once."),
    ] = None,
    device: Device = None,
    offline: Offline = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Label new text with a fine-tuned model: one JSON object a line, in input order.

    Examples: `echo "a fine film" | bertkit predict --model RUN`, `bertkit predict --model RUN reviews.csv --text body`.
    """
    from dataclasses import replace

    from bertkit.jobs.evaluation import EvalRequest
    from bertkit.jobs.predict import Predictor, document_of
    from bertkit.jobs.predict_input import check_there, examples_of, open_input

    path = None if file is None or str(file) == "-" else file
    if path is not None:
        check_there(path)
    name = model_or_default(model)
    engine = EvalRequest(name, device=device or "auto", batch_tokens=batch_tokens).engine()
    predictor = Predictor.load(name, engine, max_length=max_length, offline=offline)
    columns = replace(predictor.columns, text=text, text_pair=text_pair)
    windows = {}
    if path is None and sys.stdin.isatty():
        story.info("reading lines from the terminal, each is answered at once; end with Ctrl-D")
        windows = {"first": 1, "largest": 1}
    rows = open_input(path, sys.stdin.buffer, form, columns)
    blank = lines = 0
    for example, prediction in predictor.stream(examples_of(rows, predictor.kind, columns), **windows):
        if not lines and columns.text_pairs and getattr(example, "text_pair", "") is None:
            story.warn(f"{name} was trained on pairs of texts, the input has one text a line; give --text-pair COL")
        lines += 1
        blank += example is None
        result(document_of(example, prediction, top=top), as_json=True)
    if blank:
        story.warn(f"{blank} of {lines} lines are blank; their prediction is null")
    if not lines:
        story.warn(f"{path or 'stdin'} holds nothing to predict")

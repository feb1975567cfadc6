"""`bertkit predict`: label new text with a fine-tuned model, line by line in a pipeline, or as a whole document.

Sibling eval_data.py evaluates a model on labelled examples.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bertkit.cli.console import console, result
from bertkit.cli.generated_options import FromField, Options
from bertkit.cli.options import (
    COMMON_PANEL,
    READING,
    BatchTokens,
    Common,
    Device,
    Model,
    ParallelRunOptions,
    batch_tokens_of,
    model_or_default,
    option,
    recipe_overrides,
    validated,
)
from bertkit.errors import UsageError
from bertkit.progress import silent_progress, with_total

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bertkit.inference.column_files import ColumnForm
    from bertkit.inference.documents import Item
    from bertkit.inference.predict import Predictor
    from bertkit.inference.predict_input import InputColumns
    from bertkit.jobs.settings import ExecutorSettings
    from bertkit.tasks.readers.read_options import SkippedRows, TableReadOptions
    from bertkit.training.engine import Engine


InputFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="FILE",
        show_default=False,
        help="Input: plain lines, .jsonl, .csv, .tsv, .parquet, .fasta, .conll or .conllu (for a tagger), .json"
        " (SQuAD), also compressed; hub:ORG/NAME[:CONFIG[:SPLIT]]; - or no FILE: stdin.",
    ),
]


@dataclass(frozen=True)
class Input(Options):
    """How the input is read."""

    text: Annotated[
        str | None,
        option("--text", metavar="COL", help="Column of the text (default: as in the training data, else text)."),
    ] = None
    text_pair: Annotated[
        str | None,
        option(
            "--text-pair",
            metavar="COL",
            help="Column of the second text (default: as in the training data, else text_pair).",
        ),
    ] = None
    format: Annotated[
        Literal["text", "document", "jsonl", "csv", "tsv", "parquet", "fasta", "conll", "conllu", "squad"] | None,
        option(
            "--format",
            help="Format of the input (default: by the file's extension or the first line). text: one text per line;"
            " document: the whole file is one text.",
        ),
    ] = None
    question: Annotated[
        str | None,
        option(
            "--question",
            metavar="Q",
            help="Question for a question-answering model, about a text file or about each row.",
        ),
    ] = None
    delimiter: Annotated[str | None, FromField(READING, "delimiter", "--delimiter CHAR")] = None
    encoding: Annotated[str | None, FromField(READING, "encoding", "--encoding NAME")] = None
    skip_bad_rows: Annotated[
        bool, option("--skip-bad-rows", metavar="", help="Predict null for rows that cannot be read, and count them.")
    ] = False

    @property
    def settings(self) -> TableReadOptions:
        """The reading settings.

        Raises:
            UsageError: an invalid delimiter or encoding.
        """
        from bertkit.recipe.resolve import Override
        from bertkit.tasks.readers.read_options import TableReadOptions

        return validated(TableReadOptions, [*recipe_overrides(self), Override("skip_bad_rows", self.skip_bad_rows)])


@dataclass(frozen=True)
class Streaming(Common):
    """Options of commands that print a stream of lines."""

    as_json: Annotated[
        bool,
        option(
            "--json",
            metavar="",
            panel=COMMON_PANEL,
            help="With --out, print one document: out, count. Without --out, no change: the predictions are JSON Lines,"
            " one object per example. A failure also prints one object, with error and code, unless a prediction was"
            " printed before.",
        ),
    ] = False


@dataclass(frozen=True)
class PredictionOutput(Options):
    """What is written of the predictions, and where."""

    top: Annotated[
        int | None,
        option(
            "--top",
            metavar="K",
            min=1,
            help="Show the K highest scores, or the K best answers (default: all labels, or 5 answers).",
        ),
    ] = None
    out: Annotated[
        Path | None,
        option(
            "--out",
            metavar="FILE",
            help="File to write the predictions to: .jsonl, .csv, .tsv or .parquet; .conll or .conllu for such input"
            " (default: stdout).",
        ),
    ] = None


@dataclass(frozen=True)
class ZeroShotLabels(Options):
    """Labels that no model was trained on."""

    zero_shot: Annotated[
        bool,
        option(
            "--zero-shot",
            metavar="",
            help="Choose among --labels without training: by natural language inference, or by text vectors.",
        ),
    ] = False
    labels: Annotated[str | None, option("--labels", metavar="A,B,C", help="With --zero-shot: the labels.")] = None
    template: Annotated[
        str | None,
        option(
            "--template",
            metavar="TEXT",
            help='With --zero-shot: a sentence with {} in place of the label, such as "It is about {}."',
        ),
    ] = None

    def predictor(self, model: str, engine: Engine, *, max_length: int | None, offline: bool) -> Predictor:
        """The model, for zero-shot labelling or with its own head.

        Raises:
            UsageError: options of one kind are given for the other.
        """
        from bertkit.inference.predict import Predictor
        from bertkit.inference.zero_shot import zero_shot

        if self.zero_shot:
            return zero_shot(
                model,
                (self.labels or "").split(","),
                engine,
                template=self.template,
                max_length=max_length,
                offline=offline,
            )
        if self.labels is not None or self.template is not None:
            raise UsageError("--labels and --template work only with --zero-shot")
        return Predictor.load(model, engine, max_length=max_length, offline=offline)


def predict(
    file: InputFile = None,
    model: Model = None,
    *,
    reading: Input,
    writing: PredictionOutput,
    max_length: Annotated[
        int | None,
        FromField("bertkit.finetuning.inputs:FinetuneData", "data.max_length"),
    ] = None,
    zero_shot: ZeroShotLabels,
    batch_tokens: BatchTokens = None,
    device: Device = None,
    side_by_side: ParallelRunOptions,
    common: Streaming,
) -> None:
    """Label new text with a fine-tuned model: JSON Lines, one object per example, in input order.

    A tagger finds the entities of plain text, with their character offsets; CoNLL columns are printed as columns with
    the predicted tag last (with --json as JSON). A question-answering model gives answers with their character offsets
    in the context.

    Examples:
    `echo "a fine film" | bertkit predict --model RUN`
    `bertkit predict --model RUN reviews.csv --text body --out labels.csv`
    `bertkit predict --zero-shot --labels sport,politics --model NLI-RUN news.txt`
    `bertkit predict --model TAGGER novel.txt --format document`
    `bertkit predict --model RUN reviews.csv --jobs 4`
    `bertkit predict --model SQUAD-RUN --question "Who wrote it?" report.txt`
    """
    from bertkit.evaluation.run import MeasurementArguments
    from bertkit.inference.predict_input import form_of, input_file
    from bertkit.inference.prediction_files import FORMS, prediction_form
    from bertkit.inference.vector_files import form_of_output, require_output

    path = None if file is None or str(file) == "-" else input_file(file, "test", offline=common.offline)
    if writing.out is not None:
        form_of_output(writing.out, FORMS)
        require_output(writing.out, path)
    name = model_or_default(model)
    engine = MeasurementArguments(device=device or "auto", batch_tokens=batch_tokens_of(batch_tokens)).engine()
    predictor = zero_shot.predictor(name, engine, max_length=max_length, offline=common.offline)
    if reading.question is not None and not reading.question.strip():
        raise UsageError("--question: is empty; write a question about the text")
    if reading.question is not None and predictor.kind != "span":
        raise UsageError(f"--question: {name} does not answer questions; it is a model for {predictor.kind}")
    if reading.text_pair is not None and (zero_shot.zero_shot or predictor.kind == "tagging"):
        raise UsageError(f"--text-pair {reading.text_pair}: one text per example is read here; leave it out")
    form = form_of(path, reading.format, predictor.kind)
    column = reading.text_pair or (reading.text if reading.text != "text" else None)
    if form == "squad" and reading.question is not None:
        raise UsageError(f"--question: {path} has its own questions; leave it out")
    if form in ("text", "document", "fasta", "conll", "conllu", "squad") and column is not None:
        option = "--text" if reading.text_pair is None else "--text-pair"
        raise UsageError(
            f"{option} {column}: the input is read as {form}, which has no columns to name; leave it out, or name the"
            " format of a table with --format"
        )
    written = None if writing.out is None else prediction_form(writing.out, predictor, form)
    in_columns = form in ("conll", "conllu") and (not common.as_json if written is None else written == form)
    if writing.top is not None and (in_columns or predictor.kind == "regression"):
        what = "columns have the best tag only" if in_columns else f"{name} predicts a number without scores"
        console.warn(f"--top has no effect: {what}")
    if reading.question is not None and form == "text":
        form = "document"
    work = PredictionJob(predictor, name, path, replace(reading, format=form), writing, side_by_side.settings)
    _write(work, in_columns=in_columns, as_json=common.as_json)


@dataclass(frozen=True)
class PredictionJob:
    """What is predicted, and how; `name` is the model's, `executor` is as for `documents`."""

    predictor: Predictor
    name: str
    path: Path | None
    reading: Input
    writing: PredictionOutput
    executor: ExecutorSettings

    @property
    def windows(self) -> dict[str, int]:
        """Number of inputs predicted together: one if they are typed, and answered on the terminal."""
        if self.path is not None or self.writing.out is not None or not sys.stdin.isatty():
            return {}
        console.info("reading lines from the terminal; each line's prediction is printed at once; end with Ctrl-D")
        return {"first": 1, "largest": 1}


def _write(work: PredictionJob, *, in_columns: bool, as_json: bool) -> None:
    """Write the predictions to stdout or a file; `as_json` is about what is printed if there is a file."""
    from bertkit.inference.prediction_files import columns_file, prediction_file
    from bertkit.training.interrupt import interrupted_by_signals

    out = work.writing.out
    if out is None and in_columns:
        _write_columns(work, partial(result, as_columns=True))
    elif out is None:
        _write_predictions(work, partial(result, as_json=True))
    else:
        with interrupted_by_signals():  # which would leave an unfinished file
            if in_columns:
                with columns_file(out) as write_line:
                    total = _write_columns(work, write_line)
            else:
                with prediction_file(out, work.predictor) as write:
                    total = _write_predictions(work, write)
        result({"out": str(out), "count": total} if as_json else out, as_json=as_json)


def _write_predictions(work: PredictionJob, write: Callable[[dict[str, Any]], Any]) -> int:
    """Write the prediction for every input as soon as it is computed; returns their number."""
    from bertkit.inference.documents import documents, is_blank
    from bertkit.inference.predict_input import rows_in
    from bertkit.tasks.readers.read_options import SkippedRows

    predictor, reading = work.predictor, work.reading
    columns = replace(predictor.columns, text=reading.text, text_pair=reading.text_pair, question=reading.question)
    left_out = SkippedRows(skip_bad=reading.skip_bad_rows)
    blank = lines = 0
    items = _items(predictor, work.path, reading, columns, left_out)
    # On a terminal the predictions themselves show the progress.
    progress = with_total(console.progress, rows_in(work.path, reading.format))
    display = silent_progress if work.writing.out is None and sys.stdout.isatty() else progress
    # A document is one example, however long; its sentences or paragraphs show how far the work is.
    in_parts = reading.format == "document"
    with display("predictions", unit="parts" if in_parts else "examples") as meter:
        parts = count(1)
        found = documents(
            predictor,
            items,
            top=work.writing.top,
            executor=work.executor,
            on_part=(lambda: meter.update(next(parts))) if in_parts else None,
            **work.windows,
        )
        for example, document in found:
            if not lines and columns.text_pairs and getattr(example, "text_pair", "") is None:
                console.warn(
                    f"{work.name} was trained on pairs of texts, but the input has one text per line; give --text-pair"
                    " COL"
                )
            if not lines and predictor.reads_single_texts and getattr(example, "text_pair", None) is not None:
                console.warn(
                    f"{work.name} was trained on single texts, but the input has pairs; rename the column text_pair, or"
                    " leave --text-pair out"
                )
            lines += 1
            blank += is_blank(example)
            write(document)
            if not in_parts:
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
        console.warn(f"{work.path or 'stdin'} has nothing to predict")
    return lines


def _items(
    predictor: Predictor, path: Path | None, reading: Input, columns: InputColumns, left_out: SkippedRows
) -> Iterable[Item]:
    """The inputs to predict."""
    from bertkit.inference.column_files import column_sentences
    from bertkit.inference.predict_input import examples_of, input_lines, open_input, questions_of

    form = reading.format
    if form == "conll" or form == "conllu":
        sentences = column_sentences(input_lines(path, sys.stdin.buffer, reading.settings), str(path or "stdin"), form)
        return (each.example for each in sentences if each.example is not None)
    if form == "squad":
        if reading.settings.encoding is not None:
            raise UsageError("--encoding: JSON is UTF-8; convert the file, or leave the option out")
        return questions_of(path)
    rows = open_input(path, sys.stdin.buffer, form, columns, reading.settings, left_out)
    return examples_of(rows, predictor.kind, columns, left_out)


def _write_columns(work: PredictionJob, write: Callable[[str], Any]) -> int:
    """Write the lines of a column file with their tags; returns the number of sentences."""
    from collections import deque

    from bertkit.inference.column_files import ColumnSentence, column_sentences
    from bertkit.inference.predict_input import input_lines

    waiting: deque[ColumnSentence] = deque()
    form: ColumnForm = "conllu" if work.reading.format == "conllu" else "conll"
    sentences = 0

    def examples() -> Iterable[Item | None]:
        lines = input_lines(work.path, sys.stdin.buffer, work.reading.settings)
        for sentence in column_sentences(lines, str(work.path or "stdin"), form):
            waiting.append(sentence)
            yield sentence.example

    for _, prediction in work.predictor.stream(examples(), executor=work.executor, **work.windows):  # type: ignore[arg-type]  # no raw text here
        sentences += prediction is not None
        for line in waiting.popleft().tagged([] if prediction is None else prediction.prediction):
            write(line)
    return sentences

"""`bertkit embed`: a vector for every text of a file.

Sibling search.py finds the texts that are nearest to a query.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bertkit.cli.console import console, result
from bertkit.cli.generated_options import FromField, Options, spelled
from bertkit.cli.options import (
    COMMON_PANEL,
    READING,
    BatchTokens,
    Common,
    Device,
    Model,
    ParallelRunOptions,
    Precision,
    batch_tokens_of,
    given_flags,
    model_or_default,
    option,
    recipe_overrides,
    validated,
)
from bertkit.errors import UsageError
from bertkit.inference.embed_settings import EmbedSettings
from bertkit.progress import Progress, silent_progress, with_total

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bertkit.inference.embed import AnyEmbedder, InputText
    from bertkit.inference.embedder import Embedder
    from bertkit.tasks.readers.delimited import RowsOrBad
    from bertkit.training.engine import Engine

    Documents = Callable[[list[InputText]], tuple[Any, Iterator[dict[str, Any]]]]
    """Computes a block: its vectors with counts of its texts, and one JSON document per text."""

TextFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="FILE",
        show_default=False,
        help="Texts: plain lines, .jsonl, .csv, .tsv, .parquet or .fasta, also compressed;"
        " hub:ORG/NAME[:CONFIG[:SPLIT]]; - or no FILE: stdin.",
    ),
]


@dataclass(frozen=True)
class TextReadOptions(Options):
    """How a file of texts is read."""

    text: Annotated[str | None, option("--text", metavar="COL", help="Column of the text (default: text).")] = None
    format: Annotated[
        Literal["text", "jsonl", "csv", "tsv", "parquet", "fasta"] | None,
        option("--format", help="Format of the input (default: by the file's extension or the first line)."),
    ] = None
    delimiter: Annotated[str | None, FromField(READING, "delimiter", "--delimiter CHAR")] = None
    encoding: Annotated[str | None, FromField(READING, "encoding", "--encoding NAME")] = None

    def texts(self, path: Path | None) -> Any:
        """The texts of a file, or of stdin if none is given: an iterator of `InputText`.

        Raises:
            UsageError: an invalid delimiter or encoding.
            DataError: no such file; an invalid row, once it is reached.
        """
        from bertkit.inference.embed import input_texts
        from bertkit.inference.predict_input import InputColumns, form_of

        columns = InputColumns(text=self.text, ids=("id", "_id"))  # `_id` as in BEIR's corpora
        form = form_of(path, self.format, "classification")
        return input_texts(self._rows(path, form, columns), columns)

    def progress(self, path: Path | None) -> Progress:
        """A display with the time left, if the number of texts is known before they are read."""
        from bertkit.inference.predict_input import form_of, rows_in

        return with_total(console.progress, rows_in(path, form_of(path, self.format, "classification")))

    def _rows(self, path: Path | None, form: Any, columns: Any) -> RowsOrBad:
        from bertkit.inference.predict_input import open_input
        from bertkit.tasks.readers.read_options import TableReadOptions

        reading = validated(TableReadOptions, recipe_overrides(self))
        return open_input(path, sys.stdin.buffer, form, columns, reading)


@dataclass(frozen=True)
class Computing(Options):
    """Where and how vectors are computed."""

    precision: Precision = None
    batch_tokens: BatchTokens = None
    device: Device = None

    def embedder(self, model: str, *, max_tokens: int | None, offline: bool) -> Embedder:
        """The embedding model.

        Raises:
            DataError: no such model, or a damaged one.
            UsageError: no such device, or more tokens than the model reads.
        """
        from bertkit.inference.embedder import Embedder
        from bertkit.models.bge_m3 import find_embedder

        directory = find_embedder(model, offline=offline)
        return Embedder.load(directory, self.engine(), name=model, max_tokens=max_tokens, offline=offline)

    def any_embedder(self, model: str, *, max_tokens: int | None, offline: bool) -> AnyEmbedder:
        """The same, or a model that computes a vector for each token (ColBERT)."""
        from bertkit.inference.token_embedder import TokenEmbedder
        from bertkit.models.bge_m3 import find_embedder
        from bertkit.models.sentence import is_token_encoder

        directory = find_embedder(model, offline=offline)
        if not is_token_encoder(directory):
            return self.embedder(model, max_tokens=max_tokens, offline=offline)
        return TokenEmbedder.load(directory, self.engine(), name=model, max_tokens=max_tokens, offline=offline)

    def engine(self) -> Engine:
        """The device, precision and batch size.

        Raises:
            UsageError: no such device.
        """
        from bertkit.training.engine import resolve_engine
        from bertkit.training.engine_config import EngineConfig

        return resolve_engine(
            EngineConfig(
                device=self.device or "auto",
                precision=self.precision or "auto",
                micro_batch_tokens=batch_tokens_of(self.batch_tokens) or "auto",
            )
        )


@dataclass(frozen=True)
class EmbedOutput(Common):
    """Options of commands that write lines or a file."""

    as_json: Annotated[
        bool,
        option(
            "--json",
            metavar="",
            panel=COMMON_PANEL,
            help="With --out, print one document: out, count, dim, dtype, cut. Without --out, no change: the vectors"
            " are JSON Lines.",
        ),
    ] = False


def embed(
    file: TextFile = None,
    model: Model = None,
    out: Annotated[
        Path | None,
        option(
            "--out",
            metavar="V",
            help="File to write the vectors to: .npy, .parquet or .arrow; sparse ones: .jsonl or .npz (default: JSON"
            " Lines on stdout).",
        ),
    ] = None,
    prompt_name: Annotated[
        str | None, option("--prompt-name", metavar="NAME", help="The model's own prompt of this name, such as query.")
    ] = None,
    *,
    reading: TextReadOptions,
    settings: Annotated[EmbedSettings, spelled(without=("normalise",), truncate="--truncate DIM")],
    normalise: Annotated[
        bool, option("--normalise", "--normalize", metavar="", help="Scale each vector to unit length.")
    ] = False,
    computing: Computing,
    side_by_side: ParallelRunOptions,
    common: EmbedOutput,
) -> None:
    """Embed every text of a file, in order: `bertkit embed --model M texts.txt --out vectors.npy`

    A text's vector is bit-identical whatever other texts the file contains. Files of any size are read in blocks; a
    stopped command continues when run again. An empty line counts as a text. A SPLADE model gives each text the weights
    of words, `{"id", "vector": {word: weight}}`.

    Examples:
    `echo "a fine film" | bertkit embed --model M`
    `bertkit embed --model M reviews.csv --text body --out reviews.parquet --normalise --dtype int8`
    `bertkit embed --model M questions.txt --prompt-name query --out questions.npy`
    """
    from bertkit.inference.predict_input import input_file
    from bertkit.inference.sparse_vectors import SPARSE_FORMS
    from bertkit.inference.vector_files import FORMS, form_of_output, require_output

    path = None if file is None or str(file) == "-" else input_file(file, offline=common.offline)
    if out is not None:
        form_of_output(out, {**FORMS, **SPARSE_FORMS})
        require_output(out, path)
    settings = settings.model_copy(update={"normalise": normalise})
    if prompt_name is not None and settings.prompt is not None:
        raise UsageError("--prompt-name and --prompt: give one of them")
    embedder = computing.embedder(model_or_default(model), max_tokens=settings.max_length, offline=common.offline)
    if prompt_name is not None:
        settings = settings.model_copy(update={"prompt": embedder.reading.named(prompt_name)})
    texts = reading.texts(path)
    if out is not None:
        form_of_output(out, SPARSE_FORMS if embedder.is_sparse else FORMS)
    if out is None:
        if flags := given_flags(side_by_side):
            raise UsageError(f"{', '.join(flags)}: give --out FILE too; vectors on stdout are computed by one process")
        _print_vectors(embedder, texts, settings, reading.progress(path), is_typed=path is None and sys.stdin.isatty())
        return
    from bertkit.inference.embed import embed_to_file

    named = {name: value for name, value in vars(reading).items() if value is not None}
    source = None if path is None else {"path": str(path.resolve()), **named}
    written = embed_to_file(
        embedder, texts, out, settings, source=source, executor=side_by_side.settings, progress=reading.progress(path)
    )
    _warn(written.count, written.cut, written.without_tokens, embedder.max_tokens, is_sparse=embedder.is_sparse)
    more: dict[str, Any] = {"windowed": written.windowed} if settings.long == "window" else {}
    if embedder.is_sparse:
        more = {"mean_words": written.entries / max(1, written.count)}
    document = {
        "out": str(out),
        "count": written.count,
        "dim": written.width,
        "dtype": settings.dtype,
        "cut": written.cut,
        **more,
    }
    result(document if common.as_json else out, as_json=common.as_json)


def _print_vectors(
    embedder: Embedder, texts: Any, settings: EmbedSettings, progress: Progress, *, is_typed: bool
) -> None:
    """JSON Lines on stdout."""
    from bertkit.inference.embed import FIRST_BLOCK, LARGEST_BLOCK, blocks_of

    documents_of = (_sparse_documents if embedder.is_sparse else _dense_documents)(embedder, settings)
    if is_typed:
        console.info("reading lines from the terminal; each line's vector is printed at once; end with Ctrl-D")
    count = cut = without = 0
    sizes = (1, 1) if is_typed else (FIRST_BLOCK, LARGEST_BLOCK)
    display = silent_progress if sys.stdout.isatty() else progress
    with display("vectors", unit="texts") as meter:
        for block in blocks_of(texts, first=sizes[0], largest=sizes[1]):
            embedded, documents = documents_of(block)
            for document in documents:
                result(document, as_json=True)
            count, cut = count + len(block), cut + embedded.cut
            without += embedded.without_tokens
            meter.update(count)
    _warn(count, cut, without, embedder.max_tokens, is_sparse=embedder.is_sparse)


def _dense_documents(embedder: Embedder, settings: EmbedSettings) -> Documents:
    from bertkit.inference.embed import embed_block
    from bertkit.inference.vector_types import as_numbers, check_width

    check_width(settings, embedder.width, embedder.name)

    def documents_of(block: list[InputText]) -> tuple[Any, Iterator[dict[str, Any]]]:
        embedded = embed_block(embedder, block, settings)
        rows = as_numbers(embedded.stored_NF, settings.dtype)
        return embedded, (
            # The shortest decimals that give the same float32.
            {"id": text.id, "embedding": list(map(float, row.astype("U"))) if row.dtype.kind == "f" else row.tolist()}
            for text, row in zip(block, rows, strict=True)
        )

    return documents_of


def _sparse_documents(embedder: Embedder, settings: EmbedSettings) -> Documents:
    from bertkit.inference.embed import embed_block
    from bertkit.inference.sparse_vectors import check_sparse_settings, sparse_documents, words_of_vocabulary

    check_sparse_settings(settings)
    words = words_of_vocabulary(embedder)

    def documents_of(block: list[InputText]) -> tuple[Any, Iterator[dict[str, Any]]]:
        embedded = embed_block(embedder, block, settings)
        return embedded, sparse_documents([text.id for text in block], embedded.stored_NF, words)

    return documents_of


def _warn(count: int, cut: int, without_tokens: int, most: int, *, is_sparse: bool) -> None:
    """Warnings about the texts."""
    if not count:
        console.warn("the input contains no text")
    if cut:
        remedy = "" if is_sparse else "; --long window reads them whole"
        console.warn(f"{cut:,} of {count:,} texts are longer than {most:,} tokens and were cut{remedy}")
    if without_tokens:
        console.warn(f"{without_tokens:,} of {count:,} texts contain no token; their vectors are zeros")

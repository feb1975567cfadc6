"""`bertkit search` and `bertkit mine-negatives`: semantic search in a corpus.

The papers are cited in bertkit.inference.search. Sibling embed.py writes the vectors themselves.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertkit.cli.console import console, figure, result
from bertkit.cli.embed import Computing, TextReadOptions
from bertkit.cli.generated_options import spelled
from bertkit.cli.options import (
    Common,
    Model,
    given_flags,
    model_or_default,
    option,
    recipe_overrides,
    validated,
)
from bertkit.errors import DataError, StoppedError, UsageError
from bertkit.inference.search.settings import IndexSettings, NegativeSettings, PairSettings, QuerySettings
from bertkit.visible import visible

if TYPE_CHECKING:
    from bertkit.inference.embed import AnyEmbedder
    from bertkit.inference.search.index import TextIndex
    from bertkit.inference.search.mining import LabelledPair
    from bertkit.settings import Settings
    from bertkit.tasks.readers.read_options import TableReadOptions

_SHOWN = 160
"""Number of characters of a hit's text shown in a table."""
_AS_FILE = "write it to a file, which can be read more than once"

IndexDirectory = Annotated[
    Path | None,
    option(
        "--index",
        metavar="DIR",
        help="Directory of the index: built there with --corpus, otherwise opened (default: a temporary index).",
    ),
]
Corpus = Annotated[
    Path | None,
    option(
        "--corpus",
        metavar="FILE",
        help="Texts to index: plain lines, .jsonl, .csv, .tsv, .parquet or hub:ORG/NAME[:CONFIG[:SPLIT]].",
    ),
]


def search(
    queries: Annotated[
        list[str] | None,
        typer.Argument(metavar="QUERY", show_default=False, help="Queries; - or none: one query per line of stdin."),
    ] = None,
    model: Model = None,
    index: IndexDirectory = None,
    corpus: Corpus = None,
    update: Annotated[
        bool,
        option(
            "--update",
            metavar="",
            help="Bring the index up to date with --corpus: only texts that it does not contain are embedded.",
        ),
    ] = False,
    pairs: Annotated[
        bool, option("--pairs", metavar="", help="Instead of answering queries, print the most similar pairs of texts.")
    ] = False,
    rerank: Annotated[
        str | None,
        option("--rerank", metavar="MODEL", help="Cross-encoder or ColBERT model that rescores the first hits."),
    ] = None,
    *,
    query_settings: Annotated[QuerySettings, spelled(where="--where FIELD=VALUE", panel="Search")],
    index_settings: Annotated[IndexSettings, spelled(truncate="--truncate DIM", panel="Index")],
    pair_settings: Annotated[PairSettings, spelled(panel="Pairs")],
    reading: TextReadOptions,
    computing: Computing,
    common: Common,
) -> None:
    """Find the texts nearest in meaning to each query: `bertkit search --model M --corpus texts.txt "a query"`

    With both --corpus and --index, the index is built and saved, and no query is needed. An index works only with the
    model that built it.

    Examples:
    `bertkit search --model M --corpus articles.jsonl --index articles-index`
    `bertkit search --corpus articles.jsonl --index articles-index --update`
    `bertkit search --index articles-index "how do birds navigate?" --hybrid`
    `bertkit search --index articles-index --where year=2020 "how do birds navigate?"`
    `bertkit search --index articles-index --rerank CROSS-ENCODER < questions.txt`
    `bertkit search --model M --corpus titles.txt --pairs --min-score 0.9`
    """
    if update and (corpus is None or index is None):
        raise UsageError("--update: works only with --corpus FILE and --index DIR")
    if pairs and (queries or rerank):
        raise UsageError("--pairs: compares the texts with each other; leave out queries and --rerank")
    if pairs and "top" in query_settings.model_fields_set:
        raise UsageError("--pairs: --top is the number of hits per query; --max-pairs limits the pairs")
    only_build = corpus is not None and index is not None and not queries and not pairs
    if pairs:
        _refuse_unread(query_settings, "queries, and --pairs has none", read=("probes",))
    else:
        _refuse_unread(pair_settings, "--pairs")
    if only_build:
        _refuse_unread(query_settings, unasked := "queries; without one, the index is only built")
        if rerank is not None:
            raise UsageError(f"--rerank: works only with {unasked}")
    elif rerank is None and "rerank_depth" in query_settings.model_fields_set:
        raise UsageError("--rerank-depth: works only with --rerank MODEL")
    if corpus is None and index is not None and (flags := given_flags(reading)):
        raise UsageError(f"{', '.join(flags)}: works only with --corpus; the index in {index} contains its texts")
    chosen = (model, index, corpus, index_settings, reading, computing, common)
    checked = _check_of_pairs(pair_settings) if pairs else None
    with opened(*chosen, update=update, check=checked) as (found, embedder):
        if query_settings.probes is not None and found.described["kind"] in ("exact", "sparse"):
            console.warn("--probes has no effect: the index compares every vector")
        if only_build:
            keys = ("count", "width", "kind", "cut", *(["tokens"] if found.is_by_token else []))
            described = {key: found.described[key] for key in keys}
            document = {"index": str(found.directory), **described}
            result(document if common.as_json else found.directory, as_json=common.as_json)
        elif pairs:
            _print_pairs(found, pair_settings, query_settings.probes, common)
        else:
            _answer(found, embedder, queries or ["-"], rerank, query_settings, computing, common)


def _refuse_unread(settings: Settings, reader: str, read: Collection[str] = ()) -> None:
    """Raise UsageError if settings are given that nothing reads; `reader` is what they work with."""
    given = [name for name in type(settings).model_fields if name in settings.model_fields_set and name not in read]
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(f"{flags}: {'works' if len(given) == 1 else 'work'} only with {reader}")


@contextmanager
def opened(
    model: str | None,
    index: Path | None,
    corpus: Path | None,
    settings: IndexSettings,
    reading: TextReadOptions,
    computing: Computing,
    common: Common,
    *,
    update: bool = False,
    check: Callable[[AnyEmbedder], None] | None = None,
) -> Iterator[tuple[TextIndex, AnyEmbedder]]:
    """The index chosen by the options, and the model of its vectors; `check` refuses a model before it reads the texts.

    Raises:
        UsageError: neither a corpus nor an index.
        DataError: invalid files, or an index of another model.
    """
    from bertkit.inference.predict_input import input_file
    from bertkit.inference.search.index import DESCRIPTION, TextIndex, build_index
    from bertkit.training.interrupt import interrupted_by_signals

    if corpus is None:
        if index is None:
            raise UsageError("give --corpus FILE with the texts to search, or --index DIR with an index of them")
        _refuse_unread(settings, f"--corpus; the index in {index} is built already")
        found = TextIndex.open(index)
        embedder = computing.any_embedder(
            model or str(found.described["model"]), max_tokens=found.settings.max_length, offline=common.offline
        )
        found.check_model(embedder)
        yield found, embedder
        return
    corpus = input_file(corpus, offline=common.offline, instead_of_pipe=_AS_FILE)
    if index is not None and (index / DESCRIPTION).is_file():
        present = TextIndex.open(index)
        model = model or str(present.described["model"])
        if update and not settings.model_fields_set:
            settings = present.settings
    embedder = computing.any_embedder(model_or_default(model), max_tokens=settings.max_length, offline=common.offline)
    if check is not None:
        check(embedder)
    with tempfile.TemporaryDirectory(prefix="bertkit-index-") as passing, interrupted_by_signals():
        directory = Path(passing) / "index" if index is None else index
        texts = reading.texts(corpus)
        read_as = {name: value for name, value in vars(reading).items() if value is not None}
        try:
            progress = reading.progress(corpus)
            found = build_index(
                directory, corpus, texts, embedder, settings, read_as=read_as, update=update, progress=progress
            )
        except StoppedError as stopped:
            if index is not None:
                raise
            raise StoppedError(stopped.reason, "a temporary index is not kept; give --index DIR") from stopped
        yield found, embedder


def _check_of_pairs(settings: PairSettings) -> Callable[[AnyEmbedder], None]:
    from bertkit.inference.search.mining import check_pairs

    return lambda embedder: check_pairs(embedder, embedder.name, settings)


def _print_pairs(index: TextIndex, settings: PairSettings, probes: int | None, common: Common) -> None:
    from bertkit.inference.search.mining import paraphrases

    pairs = paraphrases(index, settings, probes=probes, progress=console.progress)
    if common.as_json:
        result(pairs, as_json=True)
        return
    for pair in pairs:
        cells = (f"{pair['score']:.4f}", pair["text1"], pair["text2"])
        result("\t".join(map(visible, cells)), as_columns=True)


def _answer(
    index: TextIndex,
    embedder: AnyEmbedder,
    queries: list[str],
    rerank: str | None,
    settings: QuerySettings,
    computing: Computing,
    common: Common,
) -> None:
    """The hits of all queries: one document, or tables."""
    from bertkit.inference.search.query import load_reranker
    from bertkit.inference.search.query import search as hits_of

    reranker = None
    if rerank is not None:
        reranker = load_reranker(rerank, replace(computing, precision="fp32").engine(), offline=common.offline)
    documents: list[dict[str, Any]] = []
    at_once = 1 if queries == ["-"] and sys.stdin.isatty() else 256
    for block in _blocks_of_lines(queries, at_once):
        found = hits_of(index, embedder, block, settings, reranker=reranker)
        if common.as_json:
            documents += found
            continue
        for document in found:
            result(document["query"])
            for hit in document["hits"]:
                text = hit["text"] if len(hit["text"]) <= _SHOWN else f"{hit['text'][: _SHOWN - 3]}..."
                result(f"  {figure(hit['score'])}  {hit['id']}  {text}")
    if common.as_json:
        result(documents, as_json=True)


def _blocks_of_lines(queries: list[str], at_once: int) -> Iterator[list[str]]:
    """Queries in blocks; empty lines of stdin are skipped."""
    from bertkit.inference.predict_input import stdin_lines

    if queries != ["-"]:
        yield queries
        return
    if sys.stdin.isatty():
        console.info("reading queries from the terminal; each query's hits are printed at once; end with Ctrl-D")
    lines = (line for _, line in stdin_lines(sys.stdin.buffer) if line.strip())
    while block := list(islice(lines, at_once)):
        yield block


def mine_negatives(
    pairs: Annotated[
        Path,
        typer.Option(
            "--pairs", metavar="F", help="Table of pairs of texts that belong together: .csv, .tsv, .jsonl, .parquet."
        ),
    ],
    model: Model = None,
    out: Annotated[
        Path | None, option("--out", metavar="F", help="File of JSON Lines to write (default: stdout).")
    ] = None,
    columns: Annotated[str, typer.Option("--columns", metavar="A,B", help="Columns of --pairs.")] = "anchor,positive",
    index: IndexDirectory = None,
    corpus: Annotated[
        Path | None,
        option("--corpus", metavar="FILE", help="Texts to take negatives from (default: the pairs' positives)."),
    ] = None,
    *,
    settings: Annotated[NegativeSettings, spelled()],
    index_settings: Annotated[IndexSettings, spelled(truncate="--truncate DIM", panel="Index")],
    reading: TextReadOptions,
    computing: Computing,
    common: Common,
) -> None:
    """Find hard negatives for pairs: similar to the anchor but not the right answer:
    `bertkit mine-negatives --model M --pairs qa.jsonl`

    The result has one line per negative, with anchor, positive and negative. --text, --format, --delimiter and
    --encoding are those of --corpus; without it, the last two are those of --pairs.
    """
    from bertkit.files import replacing
    from bertkit.inference.predict_input import input_file
    from bertkit.inference.search.mining import check_negatives
    from bertkit.inference.vector_files import require_output
    from bertkit.tasks.readers.read_options import TableReadOptions

    pairs = input_file(pairs, offline=common.offline, instead_of_pipe=_AS_FILE)
    if out is not None:
        require_output(out, pairs, corpus)
    names = tuple(name.strip() for name in columns.split(","))
    if len(names) != 2 or not all(names):
        raise UsageError(f"--columns {columns}: expected two names, as in anchor,positive")
    if corpus is None and (reading.text is not None or reading.format is not None):
        raise UsageError("--text and --format: work only with --corpus; --columns names the columns of --pairs")
    read_as = validated(TableReadOptions, recipe_overrides(reading) if corpus is None else [])
    right: dict[str, set[str]] = {}
    for pair in _read_pairs(pairs, names, read_as):
        right.setdefault(pair.anchor, set()).add(pair.positive)
    with tempfile.TemporaryDirectory(prefix="bertkit-pairs-") as passing:
        if corpus is None and index is None:
            corpus, reading = _positives(right, Path(passing)), TextReadOptions(format="jsonl")
        chosen = (model, index, corpus, index_settings, reading, computing, common)
        with opened(*chosen, check=lambda embedder: check_negatives(embedder, settings)) as (found, embedder):
            lines = _negative_lines(found, embedder, _read_pairs(pairs, names, read_as), right, settings)
            if out is None:
                for line in lines:
                    result(line, as_json=True)
                return
            import json

            count = 0
            with replacing(out) as file:
                for line in lines:
                    file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
                    count += 1
    result({"out": str(out), "count": count} if common.as_json else out, as_json=common.as_json)


def _read_pairs(path: Path, columns: tuple[str, ...], reading: TableReadOptions) -> Iterator[LabelledPair]:
    from bertkit.inference.search.mining import LabelledPair
    from bertkit.tasks.readers.common import field, text_in
    from bertkit.tasks.readers.read_options import SkippedRows
    from bertkit.tasks.readers.table import rows_or_bad

    for where, row in rows_or_bad(path, reading, SkippedRows(skip_bad=False, hint="")):
        if row is None:
            continue
        anchor, positive = (text_in(field(row, name, where, "--columns"), f"{where}, {name}") for name in columns)
        yield LabelledPair(anchor, positive)


def _positives(right: dict[str, set[str]], directory: Path) -> Path:
    """All distinct positives as a corpus."""
    import json

    from bertkit.files import write_text

    texts = sorted({text for several in right.values() for text in several})
    if not texts:
        raise DataError("--pairs: the file contains no pairs")
    if len(texts) < 2:
        raise DataError("all pairs have the same positive; give --corpus FILE with other texts")
    path = directory / "positives.jsonl"
    write_text(path, "".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def _negative_lines(
    index: TextIndex,
    embedder: AnyEmbedder,
    pairs: Iterator[LabelledPair],
    right: dict[str, set[str]],
    settings: NegativeSettings,
) -> Iterator[dict[str, str]]:
    from bertkit.inference.search.mining import hard_negatives

    count = without = 0
    with console.progress("pairs", unit="pairs") as meter:
        for pair, negatives in hard_negatives(index, embedder, pairs, right, settings):
            count += 1
            without += not negatives
            for text, _ in negatives:
                yield {"anchor": pair.anchor, "positive": pair.positive, "negative": text}
            meter.update(count)
    if without:
        console.warn(
            f"{without:,} of {count:,} pairs have no negative within the limits; raise --depth or --max-score, or lower"
            " --margin, --relative-margin or --skip"
        )

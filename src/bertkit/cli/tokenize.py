"""`bertkit tokenize`: text to a tokenizer and memory-mapped token shards.

Nothing here follows a paper. The work is done in bertkit.data.prepare; `bertkit pretrain --data` does the same on its
own, or takes the directory that was made here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from bertkit.cli.common import AsJson, Offline, Quiet, Verbose, cache_root, command_app, result, story
from bertkit.errors import UsageError

app = command_app()

_TOKENIZER = "Tokenizer"
_READING = "Reading"


@app.command()
def tokenize(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Text: .txt, .jsonl, .csv, .parquet (also .gz, .zst, .xz, .bz2), directories or globs of them, "
            "hub:ORG/NAME[:CONFIG[:SPLIT]], builtin:pydocs.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where tokenizer and shards are written.", show_default=False)
    ],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="PATH-or-HUB-ID",
            help="Use this tokenizer: a directory, tokenizer.json, vocab.txt or Hub id.",
            show_default=False,
            rich_help_panel=_TOKENIZER,
        ),
    ] = None,
    train: Annotated[
        Literal["wordpiece", "bpe", "byte-bpe", "unigram"] | None,
        typer.Option(
            help="Learn a vocabulary of this kind from the text (wordpiece where left out).",
            show_default=False,
            rich_help_panel=_TOKENIZER,
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Entries of the learnt vocabulary (30,522 where left out).",
            show_default=False,
            rich_help_panel=_TOKENIZER,
        ),
    ] = None,
    lowercase: Annotated[
        bool | None,
        typer.Option(
            "--lowercase/--cased",
            help="Learn an uncased or a cased vocabulary (uncased where left out, but byte-bpe cased).",
            show_default=False,
            rich_help_panel=_TOKENIZER,
        ),
    ] = None,
    text_field: Annotated[
        str, typer.Option(metavar="NAME", help="Field of the text in records.", rich_help_panel=_READING)
    ] = "text",
    span_field: Annotated[
        list[str] | None,
        typer.Option(
            "--span-field",
            metavar="NAME",
            help="Field of spans annotated in the text, kept beside the tokens. Repeatable.",
            show_default=False,
            rich_help_panel=_READING,
        ),
    ] = None,
    documents: Annotated[
        Literal["blank-line", "wikitext", "line", "file"],
        typer.Option(help="What parts the documents of a text file.", rich_help_panel=_READING),
    ] = "blank-line",
    segments: Annotated[
        Literal["sentence", "line"],
        typer.Option(help="What a segment is, the unit of sentence pairs.", rich_help_panel=_READING),
    ] = "sentence",
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Processes (all cores where left out).", show_default=False),
    ] = None,
    offline: Offline = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Turn text into a tokenizer and token shards in DIR; an interrupted run goes on when it is started again."""
    if tokenizer is not None and (train, vocab_size, lowercase) != (None, None, None):
        raise UsageError("--tokenizer takes an existing vocabulary; leave out --train, --vocab-size and --lowercase")

    from bertkit.data.prepare import prepare_shards, prepared_description
    from bertkit.text.annotated import MOST_FIELDS
    from bertkit.text.sources import SourceOptions, open_corpus
    from bertkit.text.tokenizer import TokenizerConfig

    chosen = {"type": train, "vocab_size": vocab_size, "lowercase": lowercase, "path": tokenizer}
    config = TokenizerConfig.model_validate({name: value for name, value in chosen.items() if value is not None})
    fields = tuple(span_field or ())
    if len(fields) > MOST_FIELDS or len({text_field, *fields}) < 1 + len(fields):
        raise UsageError(f"--span-field: at most {MOST_FIELDS} different fields, none of them that of the text")
    reading = SourceOptions(text_field=text_field, span_fields=fields, documents=documents, segments=segments)
    corpus = open_corpus(sources, reading, cache=cache_root(), offline=offline)
    shards = prepare_shards(
        corpus, config, out, cache=cache_root(), workers=workers, progress=story.progress, offline=offline
    )
    if as_json:
        result(prepared_description(shards), as_json=True)
        return
    rows = [
        ("documents", shards.num_documents),
        ("segments", shards.num_segments),
        ("tokens", shards.tokens),
        ("vocabulary", shards.vocab_size),
    ]
    for field, fates in shards.manifest.get("spans", {}).items():
        rows.append((f"spans of {field}", fates["kept"]))
    story.table(("shards", "count"), rows)
    result(shards.directory)

"""`bertkit tokenize`: text to a tokenizer and memory-mapped token shards.

Nothing here follows a paper. The work is done in bertkit.data.prepare; `bertkit pretrain --data` does the same on its
own, or takes the directory that was made here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bertkit.cli.common import cache_root, command_app, option, result, story
from bertkit.cli.shared import Common, Options, with_options
from bertkit.errors import UsageError

if TYPE_CHECKING:
    from bertkit.data.shards import TokenShards
    from bertkit.text.sources import SourceOptions
    from bertkit.text.tokenizer import TokenizerConfig

app = command_app()


def _tokenizer(*names: str, help: str, **more: Any) -> Any:
    return option(*names, help=help, panel="Tokenizer", **more)


def _reading(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Reading", **more)


Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE...",
        help="Text: .txt, .jsonl, .csv, .parquet (also .gz, .zst, .xz, .bz2), directories or globs of them, "
        "hub:ORG/NAME[@REVISION][:CONFIG[:SPLIT]], builtin:pydocs.",
        show_default=False,
    ),
]
Out = Annotated[Path, option("--out", metavar="DIR", help="Where tokenizer and shards are written.")]
Existing = Annotated[
    str | None,
    _tokenizer(
        "--tokenizer",
        metavar="PATH-or-HUB-ID",
        help="Use this tokenizer: a directory, tokenizer.json, vocab.txt or Hub id.",
    ),
]
Train = Annotated[
    Literal["wordpiece", "bpe", "byte-bpe", "unigram"] | None,
    _tokenizer("--train", help="Learn a vocabulary of this kind from the text (wordpiece where left out)."),
]
VocabSize = Annotated[
    int | None,
    _tokenizer("--vocab-size", metavar="N", min=1, help="Entries of the learnt vocabulary (30,522 where left out)."),
]
Lowercase = Annotated[
    bool | None,
    _tokenizer(
        "--lowercase/--cased",
        help="Learn an uncased or a cased vocabulary (uncased where left out, but byte-bpe cased).",
    ),
]
TextField = Annotated[str, _reading("--text-field", metavar="NAME", help="Field of the text in records.")]
SpanField = Annotated[
    list[str] | None,
    _reading(
        "--span-field",
        metavar="NAME",
        help="Field of spans annotated in the text, kept beside the tokens. Repeatable.",
        show_default=False,
    ),
]
Documents = Annotated[
    Literal["blank-line", "wikitext", "line", "file"],
    _reading("--documents", help="What parts the documents of a text file."),
]
Segments = Annotated[
    Literal["sentence", "line"],
    _reading("--segments", help="What a segment is, the unit of sentence pairs."),
]
Workers = Annotated[int | None, option("--workers", metavar="N", min=1, help="Processes (all cores where left out).")]


@dataclass(frozen=True)
class Vocabulary(Options):
    """The vocabulary: one that there is, or how one is learnt."""

    tokenizer: Existing = None
    train: Train = None
    vocab_size: VocabSize = None
    lowercase: Lowercase = None

    def check(self) -> None:
        """Before anything heavy is imported.

        Raises:
            UsageError: both are asked for.
        """
        learnt = (self.train, self.vocab_size, self.lowercase) != (None, None, None)
        if self.tokenizer is not None and learnt:
            raise UsageError(
                "--tokenizer takes an existing vocabulary; leave out --train, --vocab-size and --lowercase"
            )

    def config(self) -> TokenizerConfig:
        """As the settings of a recipe have it; what is not given has its default."""
        from bertkit.text.tokenizer import TokenizerConfig

        chosen = {
            "type": self.train,
            "vocab_size": self.vocab_size,
            "lowercase": self.lowercase,
            "path": self.tokenizer,
        }
        return TokenizerConfig.model_validate({name: value for name, value in chosen.items() if value is not None})


@dataclass(frozen=True)
class Reading(Options):
    """How text is read."""

    text_field: TextField = "text"
    span_field: SpanField = None
    documents: Documents = "blank-line"
    segments: Segments = "sentence"

    def source_options(self) -> SourceOptions:
        """As `bertkit.text.sources` has it.

        Raises:
            UsageError: too many fields of spans, or one of them twice.
        """
        from bertkit.text.annotated import MOST_FIELDS
        from bertkit.text.sources import SourceOptions

        fields = tuple(self.span_field or ())
        if len(fields) > MOST_FIELDS or len({self.text_field, *fields}) < 1 + len(fields):
            raise UsageError(f"--span-field: at most {MOST_FIELDS} different fields, none of them that of the text")
        return SourceOptions(
            text_field=self.text_field, span_fields=fields, documents=self.documents, segments=self.segments
        )


@app.command()
@with_options
def tokenize(
    sources: Sources,
    out: Out,
    *,
    vocabulary: Vocabulary,
    reading: Reading,
    workers: Workers = None,
    common: Common,
) -> None:
    """Turn text into a tokenizer and token shards in DIR; an interrupted run goes on when it is started again."""
    vocabulary.check()

    from bertkit.data.prepare import prepare_shards, prepared_description
    from bertkit.text.sources import open_corpus

    config = vocabulary.config()
    cache, offline = cache_root(), common.offline
    corpus = open_corpus(sources, reading.source_options(), cache=cache, offline=offline)
    shards = prepare_shards(corpus, config, out, cache=cache, workers=workers, progress=story.progress, offline=offline)
    if common.as_json:
        result(prepared_description(shards), as_json=True)
        return
    _tell(shards)
    result(shards.directory)


def _tell(shards: TokenShards) -> None:
    """The figures for people."""
    rows = [
        ("documents", shards.num_documents),
        ("segments", shards.num_segments),
        ("tokens", shards.tokens),
        ("vocabulary", shards.vocab_size),
    ]
    for field, fates in shards.manifest.get("spans", {}).items():
        rows.append((f"spans of {field}", fates["kept"]))
    story.table(("shards", "count"), rows)

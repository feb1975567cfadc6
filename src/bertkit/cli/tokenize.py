"""`bertkit tokenize`: turn text into a tokenizer and memory-mapped token shards.

The work is done in bertkit.data.prepare; `bertkit pretrain --data` does the same or reads the directory written here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bertkit.cli.console import console, result
from bertkit.cli.generated_options import escaped, spelled
from bertkit.cli.options import Common, ExecutorName, option
from bertkit.errors import UsageError
from bertkit.files import cache_directory
from bertkit.jobs.settings import MOST_JOBS, ExecutorSettings
from bertkit.stores.url import StoreUrl, has_scheme
from bertkit.text.source_options import SourceOptions
from bertkit.text.tokenizer import TokenizerConfig

if TYPE_CHECKING:
    from bertkit.data.shards import TokenShards

Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE",
        help=escaped(
            "Text: .txt, .jsonl, .csv, .parquet, .fasta (also .gz, .zst, .xz, .bz2), directories or globs of them, any"
            " of these on a store (s3://BUCKET/TEXT/*.jsonl), hub:ORG/NAME[@REVISION][:CONFIG[:SPLIT]], builtin:pydocs."
        ),
        show_default=False,
    ),
]


def tokenize(
    sources: Sources,
    out: Annotated[
        str,
        option(
            "--out",
            metavar="DIR-or-URL",
            help="Directory to write the tokenizer and the shards to, or a location on a store (s3://BUCKET/SHARDS) to"
            " which they are uploaded when they are complete.",
        ),
    ],
    *,
    vocabulary: Annotated[
        TokenizerConfig,
        spelled(
            path="--tokenizer PATH-or-ID",
            type="--train",
            lowercase="--lowercase/--cased",
            strip_accents="--strip-accents/--keep-accents",
            panel="Tokenizer",
        ),
    ],
    reading: Annotated[
        SourceOptions,
        spelled(
            delimiter="--delimiter CHAR", encoding="--encoding NAME", span_fields="--span-field NAME", panel="Reading"
        ),
    ],
    workers: Annotated[
        int | None,
        option(
            "--workers",
            "--jobs",
            metavar="N",
            min=1,
            max=MOST_JOBS,
            help="Number of processes (default: one per core); with --executor ray, number of blocks that the cluster"
            " tokenises at a time (default: 1).",
        ),
    ] = None,
    executor: ExecutorName = None,
    common: Common,
) -> None:
    """Turn text into a tokenizer and token shards in DIR; after an interruption, the same command continues."""
    read = {"path", "add_tokens", *(("added_frequency", "sample_megabytes") if vocabulary.add_tokens else ())}
    if vocabulary.path is not None and vocabulary.model_fields_set - read:
        raise UsageError("--tokenizer takes an existing vocabulary; leave out the options for training one")

    from bertkit.data.prepare import prepare_shards, prepared_description
    from bertkit.data.stored_shards import store_shards
    from bertkit.stores.fetch import check_online
    from bertkit.text.sources import open_corpus

    cache, offline = cache_directory(), common.offline
    place = StoreUrl.parse(out) if has_scheme(out) else None
    if place is not None:
        check_online(place, offline)
    corpus = open_corpus(sources, reading, cache=cache, offline=offline, progress=console.progress)
    shards = prepare_shards(
        corpus,
        vocabulary,
        None if place is not None else Path(out),
        cache=cache,
        workers=workers,
        executor=ExecutorSettings(executor=executor or "local", jobs=workers or 1),
        progress=console.progress,
        offline=offline,
    )
    if place is not None:
        store_shards(shards, place, progress=console.progress)
    where = shards.directory if place is None else place
    if common.as_json:
        result(prepared_description(shards) | {"shards": str(where)}, as_json=True)
        return
    _print_counts(shards)
    result(str(where))


def _print_counts(shards: TokenShards) -> None:
    rows = [
        ("documents", shards.num_documents),
        ("segments", shards.num_segments),
        ("tokens", shards.tokens),
        ("vocabulary", shards.vocab_size),
    ]
    for field, counts in shards.manifest.get("spans", {}).items():
        rows.append((f"spans of {field}", counts["kept"]))
    console.table(("shards", "count"), rows)

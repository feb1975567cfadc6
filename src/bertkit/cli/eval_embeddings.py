"""`bertkit eval sts`, `pairs`, `triplets`, `clustering` and `retrieval`: evaluation of a model's sentence vectors.

The papers are cited in the suites. Sibling eval_suites.py has the suites that measure a model's predictions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertkit.cli.console import console, figure, interval
from bertkit.cli.generated_options import Options, spelled
from bertkit.cli.options import Measuring, Model, model_or_default, option
from bertkit.errors import UsageError
from bertkit.evaluation.embeddings.settings import ClusteringSettings, RetrievalSettings, StsSettings, VectorSettings
from bertkit.visible import number_of

if TYPE_CHECKING:
    from bertkit.evaluation.embeddings.run import VectorArguments
    from bertkit.evaluation.run import EvaluationResult


@dataclass(frozen=True)
class VectorEvaluationOptions(Options):
    """The model to measure."""

    model: Model = None
    word_vectors: Annotated[
        Path | None,
        option(
            "--word-vectors",
            metavar="FILE",
            help="Instead of a model, evaluate the mean of the vectors of a text's words, from a text file in GloVe's"
            " format.",
        ),
    ] = None

    def arguments(self, common: Measuring) -> VectorArguments:
        """The arguments of the suites.

        Raises:
            UsageError: both a model and word vectors are given.
        """
        from bertkit.evaluation.embeddings.run import VectorArguments

        if self.model is not None and self.word_vectors is not None:
            raise UsageError("--word-vectors: are evaluated instead of a model; leave out --model")
        name = str(self.word_vectors) if self.word_vectors is not None else model_or_default(self.model)
        return VectorArguments(model=name, word_vectors=self.word_vectors, **common.argument_fields())


def _columns(names: str | None, defaults: tuple[str, ...]) -> tuple[str, ...]:
    found = defaults if names is None else tuple(name.strip() for name in names.split(","))
    if len(found) != len(defaults) or not all(found):
        raise UsageError(f"--columns {names}: expected {len(defaults)} names, as in {','.join(defaults)}")
    return found


def _table(source: Path, common: Measuring) -> Path:
    """The table that `--data` names, fetched if it is on the Hub."""
    from bertkit.inference.predict_input import input_file

    return input_file(source, "test", offline=common.offline, instead_of_pipe="give a file")


def sts(
    data_dir: Annotated[
        Path | None,
        option("--data-dir", metavar="DIR", help="Directory with the published sets (layouts: docs/embeddings.md)."),
    ] = None,
    data: Annotated[
        Path | None,
        option(
            "--data",
            metavar="F",
            help="Instead of published sets, your own table: .csv, .tsv, .jsonl, .parquet or"
            " hub:ORG/NAME[:CONFIG[:SPLIT]].",
        ),
    ] = None,
    columns: Annotated[
        str | None, option("--columns", metavar="A,B,C", help="Columns of --data (default: sentence1,sentence2,score).")
    ] = None,
    *,
    measured: VectorEvaluationOptions,
    settings: Annotated[StsSettings, spelled(only="--only NAME")],
    common: Measuring,
) -> None:
    """Evaluate sentence similarity (STS12-16, STS-B, SICK-R): `bertkit eval sts --model M --data-dir D`

    Spearman and Pearson correlation between the cosine of two sentences and human scores, with 95% intervals over
    other pairs of the same kind. Nothing is trained.
    """
    from bertkit.evaluation.embeddings.sts import COLUMNS, evaluate_sts

    if (data_dir is None) == (data is None):
        raise UsageError("give --data-dir DIR with published sets, or --data F with a table of your own")
    if data is None and columns is not None:
        raise UsageError("--columns: names the columns of a table; give the table with --data")
    evaluated = evaluate_sts(
        measured.arguments(common),
        data_dir,
        None if data is None else _table(data, common),
        settings,
        columns=_columns(columns, COLUMNS),
        progress=console.progress,
    )
    _finish(evaluated, common, "pairs", "splits")


DataFile = Annotated[
    Path,
    typer.Option(
        "--data",
        metavar="F",
        help="Table: .csv, .tsv, .jsonl, .parquet or hub:ORG/NAME[:CONFIG[:SPLIT]].",
        show_default=False,
    ),
]


def pairs(
    data: DataFile,
    columns: Annotated[
        str | None, option("--columns", metavar="A,B,C", help="Columns of --data (default: sentence1,sentence2,label).")
    ] = None,
    *,
    measured: VectorEvaluationOptions,
    settings: Annotated[VectorSettings, spelled()],
    common: Measuring,
) -> None:
    """Score pairs labelled 1 (belong together) or 0: `bertkit eval pairs --model M --data pairs.csv`

    Reports the average precision of the cosine, and accuracy and F1 at the threshold that is best on these pairs.
    """
    from bertkit.evaluation.embeddings.pairs import PAIR_COLUMNS, evaluate_pairs

    evaluated = evaluate_pairs(
        measured.arguments(common), _table(data, common), settings, columns=_columns(columns, PAIR_COLUMNS)
    )
    _finish(evaluated, common, "pairs", "thresholds")


def triplets(
    data: DataFile,
    columns: Annotated[
        str | None, option("--columns", metavar="A,B,C", help="Columns of --data (default: anchor,positive,negative).")
    ] = None,
    *,
    measured: VectorEvaluationOptions,
    settings: Annotated[VectorSettings, spelled()],
    common: Measuring,
) -> None:
    """Measure how often the positive is nearer to the anchor than the negative:
    `bertkit eval triplets --model M --data triplets.csv`"""
    from bertkit.evaluation.embeddings.pairs import TRIPLET_COLUMNS, evaluate_triplets

    evaluated = evaluate_triplets(
        measured.arguments(common), _table(data, common), settings, columns=_columns(columns, TRIPLET_COLUMNS)
    )
    _finish(evaluated, common, "triplets", "ties")


def clustering(
    data: DataFile,
    columns: Annotated[
        str | None, option("--columns", metavar="A,B", help="Columns of --data (default: text,label).")
    ] = None,
    *,
    measured: VectorEvaluationOptions,
    settings: Annotated[ClusteringSettings, spelled()],
    common: Measuring,
) -> None:
    """Measure whether clusters of texts agree with their labels: `bertkit eval clustering --model M --data texts.csv`

    k-means with as many clusters as there are labels; reports the V-measure and the adjusted Rand index.
    """
    from bertkit.evaluation.embeddings.clustering import COLUMNS, evaluate_clustering

    evaluated = evaluate_clustering(
        measured.arguments(common),
        _table(data, common),
        settings,
        columns=_columns(columns, COLUMNS),
        progress=console.progress,
    )
    _finish(evaluated, common, "texts", "clusters")


_RENAMED = {"--query-prefix": "--query-prompt", "--document-prefix": "--document-prompt"}


def retrieval(
    data_dir: Annotated[
        Path,
        typer.Option(
            "--data-dir",
            metavar="DIR",
            help="Directory in BEIR's layout: corpus.jsonl, queries.jsonl, qrels/*.tsv.",
            show_default=False,
        ),
    ],
    *,
    measured: VectorEvaluationOptions,
    settings: Annotated[RetrievalSettings, spelled(cutoffs="--cutoffs N,N", old=_RENAMED)],
    common: Measuring,
) -> None:
    """Evaluate retrieval by nDCG@10, MRR@10 and recall: `bertkit eval retrieval --model M --data-dir scifact`

    The whole corpus is searched exactly, in blocks.
    """
    from bertkit.evaluation.embeddings.retrieval import evaluate_retrieval

    evaluated = evaluate_retrieval(measured.arguments(common), data_dir, settings, progress=console.progress)
    if words := evaluated.results.get("words"):
        console.info(
            f"words with a weight: {words['per_query']:.1f} per query, {words['per_document']:.1f} per document;"
            f" {words['flops']:.2f} products per query and document (FLOPS)"
        )
    _finish(evaluated, common, "queries", "documents", "words")


def _finish(evaluated: EvaluationResult, common: Measuring, *more: str) -> None:
    """The table, and the contract's document with further keys."""
    results = evaluated.results
    scores = [(task, name, found) for task, own in results["tasks"].items() for name, found in own.items()]
    spread = f"{results['confidence']:.0%} interval"
    if any("interval" in found for *_, found in scores):
        spreads = [interval(found.get("interval")) for *_, found in scores]
    else:
        spread, spreads = "standard deviation", [figure(found["std"]) for *_, found in scores]
    rows = [(task, name, figure(found["mean"]), own) for (task, name, found), own in zip(scores, spreads, strict=True)]
    console.table(["task", "metric", "score", spread], rows, title=f"{results['suite']}: {results['model']}")
    _print_notes(results["notes"])
    keys = (*more, "notes", "confidence")
    common.finish(evaluated.run, evaluated.document | {key: results[key] for key in keys if results.get(key)})


def _print_notes(notes: Mapping[str, Any]) -> None:
    if notes.get("texts_cut"):
        console.warn(f"{number_of(notes['texts_cut'], 'text')} cut to {notes['most_tokens']:,} tokens")
    if "words_known" in notes:
        console.info(f"{notes['words_known']:.1%} of the distinct words have a vector")
    if notes.get("texts_without_known_words"):
        console.warn(f"{number_of(notes['texts_without_known_words'], 'text')} without any known word; the cosine is 0")

"""Shared by the suites of sentence vectors: the run directory, and scores with intervals.

Efron and Tibshirani 1993, chapter 13, for the percentile interval (bertkit.metrics.statistics).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertkit.evaluation.embeddings.settings import VectorSettings
from bertkit.evaluation.embeddings.sources import VectorSource, model_source, word_source
from bertkit.evaluation.run import (
    EvalArguments,
    EvaluationResult,
    measure_or_reuse,
    single_score,
)
from bertkit.files import sha256_of
from bertkit.metrics.base import Additive, MeanOf
from bertkit.metrics.statistics import Score, bootstrap_interval
from bertkit.run.directory import RunDirectory, RunIdentity

CONFIDENCE = 0.95


@dataclass(frozen=True)
class VectorArguments(EvalArguments):
    """The arguments of these suites.

    Attributes:
        word_vectors: a file of word vectors to measure instead of a model.
    """

    word_vectors: Path | None = None


def vector_source(
    arguments: VectorArguments,
    settings: VectorSettings,
    texts: Callable[[], Iterable[str]],
    load: Callable[[str, VectorSettings, VectorArguments], VectorSource] = model_source,
) -> VectorSource:
    """The word vectors if they are given, which need all texts to encode; else the model."""
    if arguments.word_vectors is None:
        return load(arguments.model, settings, arguments)
    return word_source(arguments.word_vectors, settings, texts)


class Mean(MeanOf):
    """The mean of one number per example, given as the predictions."""

    name = "mean"

    def per_example(self, predictions: Any, references: Any) -> Any:
        return predictions


def with_interval(
    value: float | None, predictions: Sequence[Any], references: Sequence[Any], metric: Additive | Score
) -> dict[str, Any]:
    """A score as in results.json, with its interval over other examples of the same kind, or None."""
    interval = None if value is None else bootstrap_interval(predictions, references, metric, confidence=CONFIDENCE)
    return {**single_score(value), "interval": None if interval is None else list(interval)}


def mean_with_interval(values: Sequence[float]) -> dict[str, Any]:
    """The mean of one number per example, with its interval."""
    return with_interval(float(sum(values) / len(values)), values, values, Mean())


def measure(
    suite: str,
    source: VectorSource,
    settings: VectorSettings,
    arguments: VectorArguments,
    *,
    data: Mapping[str, str],
    compute: Callable[[], dict[str, Any]],
) -> EvaluationResult:
    """Write a run, or return the finished one.

    Args:
        suite: name of the suite.
        source: the source of the vectors.
        settings: the settings that affect the result.
        arguments: arguments of the run.
        data: hash of each file, by name.
        compute: returns results.json without suite, model and notes: `tasks`, `average` and others.
    """
    chosen = settings.model_dump(mode="json")
    fingerprints = {"model": source.fingerprint, "tokenizer": source.tokenizer, "data": "".join(sorted(data.values()))}
    identity = RunIdentity.of_measurement(
        "eval",
        suite,
        {"kind": "eval", "suite": suite, "model": source.name, "data": sorted(data), "settings": chosen},
        {"kind": "eval", "name": suite, "settings": chosen, **fingerprints},
        seed=0,
        command=arguments.command,
        fingerprints=fingerprints,
    )

    def contents(run: RunDirectory) -> dict[str, Any]:
        found = compute()
        return {"suite": suite, "model": source.name, **found, "notes": source.notes, "confidence": CONFIDENCE}

    return measure_or_reuse(identity, arguments, contents)


def measure_table(
    suite: str,
    arguments: VectorArguments,
    table: Path,
    settings: VectorSettings,
    texts: Sequence[str],
    compute: Callable[[VectorSource], dict[str, Any]],
) -> EvaluationResult:
    """`measure` on a user's own table, of which `texts` are all texts."""
    source = vector_source(arguments, settings, lambda: texts)
    data = {str(table): sha256_of(table)}
    return measure(suite, source, settings, arguments, data=data, compute=lambda: compute(source))

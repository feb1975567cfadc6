"""Statistics over runs: summary over seeds, detection of failed runs, and comparison of two models.

Failed runs: Devlin et al. 2019, BERT, arXiv:1810.04805, section 4.1 (some fine-tuning runs on small data fail);
Mosbach et al. 2021, arXiv:2006.04884, calls a run failed if its accuracy is at most the majority class's; here it may
also be up to one standard error above, sqrt(a (1 - a) / N) for accuracy a, which chance often reaches. Paired
bootstrap: Koehn 2004, EMNLP, and Berg-Kirkpatrick et al. 2012, EMNLP, with the p-value of the distribution shifted to
no difference. It resamples the examples of one test set; variation between seeds is shown by the summary.

Shapes: N examples, A models, K numbers per example of one, M of all, U distinct rows, R resamples.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import eq
from typing import Any

import numpy as np
from scipy.sparse import hstack, issparse
from scipy.special import stdtrit

from bertkit.arrays import Float64Array, Int64Array
from bertkit.errors import DataError, UsageError
from bertkit.metrics.base import Additive, check_aligned, log

DEVIATIONS_OF_95 = 1.959963984540054
"""Half-width, in standard deviations, of the central 95% of a normal distribution."""
_CELLS_AT_ONCE = 4_000_000
"""Number of counts drawn at once: 32 MB."""


def summarise(scores: Mapping[int, float | None]) -> dict[str, Any]:
    """One score over runs that differ by their seed: `{"mean", "std", "median", "n", "seeds": [score, ...]}`.

    `seeds` is in ascending order of the seeds, with None for scores that are not finite; the figures are computed over
    the `n` others. `std` is the sample standard deviation (divided by n - 1). Undefined figures are None.

    Raises:
        DataError: there is no run.
    """
    if not scores:
        raise DataError("no runs to summarise; expected the score of at least one seed")
    known = np.array([float(score) for score in scores.values() if score is not None and np.isfinite(score)])
    if absent := len(scores) - len(known):
        log.warning("%d of %d runs have no defined score; mean and median are over the others", absent, len(scores))
    ordered = [scores[seed] for seed in sorted(scores)]
    return {
        "mean": float(known.mean()) if len(known) else None,
        "std": float(known.std(ddof=1)) if len(known) > 1 else None,
        "median": float(np.median(known)) if len(known) else None,
        "n": len(known),
        "seeds": [float(score) if score is not None and np.isfinite(score) else None for score in ordered],
    }


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """The mean of n independent values with Student's t interval: mean -+ t s / sqrt(n), n - 1 degrees of freedom.

    Args:
        values: at least two, such as differences of two methods seed by seed.
        confidence: of the interval.

    Raises:
        DataError: there are fewer than two.
    """
    if len(values) < 2:
        raise DataError(f"an interval needs at least two values, found {len(values)}")
    found = np.asarray(values, dtype=np.float64)
    half = float(stdtrit(len(found) - 1, (1 + confidence) / 2) * found.std(ddof=1) / np.sqrt(len(found)))
    mean = float(found.mean())
    return mean, mean - half, mean + half


@dataclass(frozen=True)
class ConstantBaseline:
    """The baseline of always predicting one label.

    Attributes:
        label: the most common reference.
        metric: the score's name.
        score: of always predicting this label.
        standard_error: of the model's score; 0 if not known.
    """

    label: str
    metric: str
    score: float
    standard_error: float = 0.0


NO_BETTER = "the model does no better than always predicting"


def constant_baseline_warning(
    predictions: Sequence[Any], references: Sequence[Any], score: float | None, baseline: ConstantBaseline | None = None
) -> str | None:
    """A sentence that a model does no better than a constant prediction, and why; None if it does better.

    The conditions: all predictions are the same although the references differ (numbers: the same to six digits); the
    score is not above the baseline's by more than a standard error; the squared error of numbers is not below the
    variance of the references, which is the error of always predicting their mean; or the score is undefined.

    Args:
        predictions: labels, numbers or texts, one per example. For tags, those of all words in one list.
        references: likewise.
        score: the run's score; greater is better.
        baseline: of always predicting the most frequent label; None if that is meaningless.

    Raises:
        DataError: the lists are empty or of unequal length.
    """
    check_aligned(predictions, references)
    if _constant(predictions) and not _constant(references):
        return f"{NO_BETTER} {_shown(predictions[0])}: it predicts nothing else"
    if score is None or not np.isfinite(score):
        return "the model's score is undefined"
    if _constant(references):
        return None
    if _quantities(predictions):
        reference_N = np.asarray(references, dtype=float)
        error = float(np.square(np.asarray(predictions, dtype=float) - reference_N).mean())
        variance = float(reference_N.var())
        if error >= variance:
            mean = _shown(float(reference_N.mean()))
            return (
                f"{NO_BETTER} the mean, {mean}: its mean squared error {error:.4g} is not below the labels' variance,"
                f" {variance:.4g}"
            )
    if baseline is not None and score <= baseline.score + baseline.standard_error + 1e-12:
        error_too = f", standard error {baseline.standard_error:.4f}" if baseline.standard_error else ""
        return (
            f"{NO_BETTER} {_shown(baseline.label)}: {baseline.metric} {score:.4f}{error_too}, that of the commonest"
            f" label {baseline.score:.4f}"
        )
    return None


def most_common_baseline(
    predictions: Sequence[Any],
    references: Sequence[Any],
    metric: str,
    score: Callable[[list[Any], list[Any]], float | None],
) -> ConstantBaseline | None:
    """The baseline of always predicting the most common reference; None if its score is undefined.

    Args:
        predictions: the model's.
        references: one per prediction.
        metric: the score's name.
        score: of predictions and references.
    """
    label = Counter(references).most_common(1)[0][0]
    found = score([label] * len(references), list(references))
    if found is None:
        return None
    accuracy = sum(map(eq, predictions, references)) / len(references)
    error = math.sqrt(accuracy * (1 - accuracy) / len(references)) if metric == "accuracy" else 0.0
    return ConstantBaseline(str(label), metric, found, error)


def _quantities(values: Sequence[Any]) -> bool:
    """Whether these are the numbers of a regression. Whole numbers are labels, such as the index of a choice."""
    return all(isinstance(value, float | np.floating) for value in values)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float | np.floating) else repr(value)


def _constant(values: Sequence[Any]) -> bool:
    if _quantities(values):
        array = np.asarray(values, dtype=float)
        return bool(np.ptp(array) <= 1e-6 * max(1.0, float(np.abs(array).max())))
    return all(value == values[0] for value in values)


@dataclass(frozen=True)
class PairedBootstrap:
    """How model B differs from model A on the same examples.

    Attributes:
        score_a, score_b: the scores on all examples.
        difference: score_b - score_a.
        low, high: the percentile interval of the difference at `confidence`.
        p_value: two-sided, of the hypothesis that the models are equally good; at least 1 / (resamples + 1).
        resamples: number of resamples on which both scores are defined.
        undefined: number of resamples on which one is not; they are ignored.
    """

    score_a: float
    score_b: float
    difference: float
    low: float
    high: float
    confidence: float
    p_value: float
    resamples: int
    undefined: int


Score = Callable[[Sequence[Any], Sequence[Any]], float | None]


def paired_bootstrap(
    predictions_a: Sequence[Any],
    predictions_b: Sequence[Any],
    references: Sequence[Any],
    metric: Additive | Score,
    *,
    resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> PairedBootstrap:
    """Compare two models by resampling the examples, using the same resamples for both.

    Args:
        predictions_a: model A's, one item per example (for tagging a sentence's tags, for SQuAD a text).
        predictions_b: model B's.
        references: one item per example.
        metric: an `Additive` (all resamples at once, by totals), or any function of two lists to a score, called
            2 R times; None or NaN if undefined.
        resamples: R.
        confidence: of the interval.
        seed: the same seed gives the same figures.

    Raises:
        DataError: lists of unequal length, or a score that is undefined on all examples or on every resample.
        UsageError: a confidence outside (0, 1) or no resamples.
    """
    if not 0 < confidence < 1 or resamples < 1:
        raise UsageError(
            f"confidence {confidence} and {resamples} resamples; expected confidence in (0, 1) and at least 1"
        )
    check_aligned(predictions_a, references)
    check_aligned(predictions_b, references)
    generator = np.random.Generator(np.random.PCG64(seed))
    draw = _by_totals if isinstance(metric, Additive) else _by_calls
    whole_2, score_R2 = draw([predictions_a, predictions_b], references, metric, resamples, generator)  # type: ignore[arg-type]  # chosen by its type
    score_a, score_b = map(float, whole_2)
    if not np.isfinite(whole_2).all():
        raise DataError(f"the metric is undefined on all examples (A: {score_a}, B: {score_b}); nothing to compare")
    difference_R = score_R2[:, 1] - score_R2[:, 0]
    difference_R = difference_R[np.isfinite(difference_R)]
    if not len(difference_R):
        raise DataError(f"the metric is undefined on each of {resamples} resamples; use more examples")
    difference = score_b - score_a
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(difference_R, [tail, 100 - tail])
    # A resample with an equal difference must count despite rounding.
    as_far = np.abs(difference_R - difference) >= abs(difference) - 1e-12
    return PairedBootstrap(
        score_a=score_a,
        score_b=score_b,
        difference=difference,
        low=float(low),
        high=float(high),
        confidence=confidence,
        p_value=float((1 + as_far.sum()) / (1 + len(difference_R))),
        resamples=len(difference_R),
        undefined=resamples - len(difference_R),
    )


def bootstrap_interval(
    predictions: Sequence[Any],
    references: Sequence[Any],
    metric: Additive | Score,
    *,
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[float, float] | None:
    """The bootstrap percentile interval of a score over examples (Efron and Tibshirani 1993, chapter 13).

    Args:
        predictions, references: one item per example.
        metric: see `paired_bootstrap`; 10,000 resamples of an `Additive`, 1,000 of any other.
        confidence: of the interval.
        seed: the same seed gives the same figures.

    Returns:
        Its two ends; None if the score is undefined on every resample.

    Raises:
        DataError: lists of unequal length, or empty ones.
    """
    check_aligned(predictions, references)
    generator = np.random.Generator(np.random.PCG64(seed))
    if isinstance(metric, Additive):
        _, score_R1 = _by_totals([predictions], references, metric, 10_000, generator)
    else:
        _, score_R1 = _by_calls([predictions], references, metric, 1_000, generator)
    score_R = score_R1[np.isfinite(score_R1)]
    if not len(score_R):
        return None
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(score_R, [tail, 100 - tail])
    return float(low), float(high)


def _by_totals(
    predictions: Sequence[Sequence[Any]],
    references: Sequence[Any],
    metric: Additive,
    resamples: int,
    generator: np.random.Generator,
) -> tuple[Float64Array, Float64Array]:
    """Each model's score on all examples (A,) and on each resample (R, A), from the totals of rows.

    Equal rows are interchangeable, so a resample is a multinomial draw of how often each distinct row occurs; accuracy
    of two models has four of them for any number of examples. The widths of rows may differ: macro F1 averages over the
    classes that occur in the whole sample, for each model as when it is scored separately.
    """
    rows, times_U = metric.distinct_rows(predictions, references)
    row_UM = hstack(rows, format="csr") if issparse(rows[0]) else np.concatenate(rows, axis=1)
    ends, share_U = np.cumsum([row_UK.shape[1] for row_UK in rows])[:-1], times_U / times_U.sum()

    def scores(count_RU: Int64Array) -> Float64Array:
        total_RM = np.ascontiguousarray(count_RU @ row_UM)
        return np.stack([metric.value(total_RK) for total_RK in np.split(total_RM, ends, axis=1)], axis=1)

    at_once = max(1, _CELLS_AT_ONCE // len(times_U))
    parts = []
    for done in range(0, resamples, at_once):
        count_RU = generator.multinomial(len(references), share_U, size=min(at_once, resamples - done))
        parts.append(scores(count_RU))
    return scores(times_U[None])[0], np.concatenate(parts)


def _by_calls(
    predictions: Sequence[Sequence[Any]],
    references: Sequence[Any],
    metric: Score,
    resamples: int,
    generator: np.random.Generator,
) -> tuple[Float64Array, Float64Array]:
    """As `_by_totals`, by calling the metric on every resample."""

    def scores(index_N: Int64Array) -> list[float]:
        places = index_N.tolist()
        gold = [references[i] for i in places]
        values = [metric([own[i] for i in places], gold) for own in predictions]
        return [np.nan if value is None else float(value) for value in values]

    everything_N = np.arange(len(references))
    draws = [scores(generator.integers(len(references), size=len(references))) for _ in range(resamples)]
    return np.array(scores(everything_N)), np.array(draws)

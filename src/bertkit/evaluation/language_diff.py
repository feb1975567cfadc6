"""Compares two evaluations of language models text by text: `runs diff` of `eval mlm`, `lm` and `surprisal`.

Koehn 2004, EMNLP: the paired bootstrap, here over windows, documents or sentences, whose tokens stay together because
they are not independent. Figures per token compare models with one tokenizer; figures per byte or word compare any two
(Gao et al. 2020, arXiv:2101.00027, section 3.1). Siblings: pairs_diff.py compares minimal pairs, runs_diff.py
predictions of tasks.

Shapes: N texts, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from bertkit.arrays import Float64Array
from bertkit.errors import DataError, UsageError
from bertkit.evaluation import blimp, lm, mlm, surprisal
from bertkit.evaluation.text_sums import TextSums, read_sums
from bertkit.metrics.base import Additive, Values, ratio
from bertkit.metrics.statistics import paired_bootstrap
from bertkit.recipe.hashing import differences_document, differing_values
from bertkit.recipe.tree import read_tree
from bertkit.run.directory import RECIPE, RunDirectory


class TextFigure(Additive):
    """A figure of an evaluation, from the ratio of two sums over texts.

    Attributes:
        name: its key in results.json.
        part, whole: keys of the two sums in `TextSums`.
        of_ratio: the figure, from the ratio of the sums.
        higher_is_better: whether more is better.
    """

    def __init__(
        self,
        name: str,
        part: str,
        whole: str,
        of_ratio: Callable[[Float64Array], Any] = lambda found: found,
        *,
        higher_is_better: bool = False,
    ) -> None:
        self.name, self.part, self.whole = name, part, whole
        self.of_ratio, self.higher_is_better = of_ratio, higher_is_better

    @property
    def is_per_token(self) -> bool:
        """Whether it depends on how a tokenizer splits the text."""
        return self.whole in ("tokens", "masked")

    def rows(self, predictions: Values, references: Values) -> Float64Array:
        """Both sums of each text, (N, 2)."""
        return np.array([[each[self.part], each[self.whole]] for each in predictions], dtype=np.float64)

    def value(self, totals: Float64Array) -> Float64Array:
        with np.errstate(invalid="ignore", over="ignore"):
            return np.asarray(self.of_ratio(ratio(totals[..., 0], totals[..., 1])))


def _bits(nats: Float64Array) -> Float64Array:
    return nats / math.log(2)


_OF_LM = (
    TextFigure("bits_per_byte", "nats", "bytes", _bits),
    TextFigure("perplexity", "nats", "tokens", np.exp),
    TextFigure("loss", "nats", "tokens"),
)
FIGURES: Final[dict[str, tuple[TextFigure, ...]]] = {
    mlm.TASK: (
        TextFigure("accuracy", "right", "masked", higher_is_better=True),
        TextFigure("perplexity", "nats", "masked", np.exp),
        TextFigure("pseudo_perplexity", "pseudo_nats", "tokens", np.exp),
        TextFigure("pseudo_bits_per_byte", "pseudo_nats", "bytes", _bits),
    ),
    lm.TASK: _OF_LM,
    lm.BACKWARD: _OF_LM,
    surprisal.TASK: (
        TextFigure("bits_per_word", "nats", "words", _bits),
        TextFigure("perplexity", "nats", "tokens", np.exp),
        TextFigure("pseudo_perplexity", "nats", "tokens", np.exp),
    ),
}
"""The figures of each task that follow from sums over texts."""
_PER_BYTE = {"bytes", *(each.name for own in FIGURES.values() for each in own if not each.is_per_token)}
"""Keys of results.json that do not depend on the tokenizer."""
_MASKING = ("rate", "seed", "window_bytes")
"""Settings of `eval mlm` that decide which tokens are masked."""


def language_suite(run: RunDirectory) -> str | None:
    """The suite of an evaluation of a language model; None for any other run."""
    found = str(run.record["recipe"]).removeprefix("eval-")
    suites = (mlm.SUITE, lm.SUITE, surprisal.SUITE, blimp.SUITE)
    return found if run.record["kind"] == "eval" and found in suites else None


def compare_language(
    a: RunDirectory,
    b: RunDirectory,
    suite: str,
    *,
    task: str | None = None,
    split: str | None = None,
    metric: str | None = None,
    resamples: int = 10_000,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Compare two evaluations of one suite on the same text: one comparison per figure that both have.

    With different tokenizers, only figures per byte are compared.

    Args:
        a, b: the runs.
        suite: the suite of both.
        task: only this one, for models that read in both directions.
        split: must be None.
        metric: only this figure.
        resamples, seed: of the bootstrap.

    Raises:
        UsageError: no such figure, or one that cannot compare these models.
        DataError: a run is not done, or they measured different texts.
    """
    if split is not None:
        raise UsageError(f"--split {split}: `bertkit eval {suite}` has no splits; leave it out")
    results = [results_of(run) for run in (a, b)]
    prints = [run.record["fingerprints"] for run in (a, b)]
    if prints[0]["data"] != prints[1]["data"]:
        raise DataError(f"{a.path} and {b.path} measured different texts; evaluate both models on the same --data")
    same_tokenizer = prints[0]["tokenizer"] == prints[1]["tokenizer"]
    differing = differing_settings(a, b)
    changed = [(key, x, y) for key, x, y in differing if key.removeprefix("settings.") in _MASKING]
    if suite == mlm.SUITE and changed:
        raise DataError(
            f"{a.path} and {b.path} masked different tokens: "
            + ", ".join(f"{key.removeprefix('settings.')} {x} and {y}" for key, x, y in changed)
            + "; evaluate both models with the same settings"
        )
    rules = [run.results["protocol"]["rule"] for run in (a, b) if run.results is not None]
    if suite == surprisal.SUITE and rules[0] != rules[1]:
        raise DataError(
            f"{a.path} and {b.path} measured different quantities: the models were read by the rules {rules[0]} and"
            f" {rules[1]}; give both the same --rule if they can be read by it"
        )
    tasks = [name for name in results[0] if name in results[1] and task in (None, name)]
    if not tasks:
        had = ", ".join(results[0])
        raise DataError(f"nothing to compare{f' of {task}' if task else ''}: {a.path} has {had}")
    comparisons = []
    for name in tasks:
        first, second = results[0][name], results[1][name]
        fair = [key for key in first if key in second and (same_tokenizer or key in _PER_BYTE)]
        shared = {
            "scores": {key: {"a": first[key]["mean"], "b": second[key]["mean"]} for key in fair},
            "recipe": differences_document(differing),
        }
        comparisons += [
            _comparison((a, b), name, figure, resamples, seed) | shared
            for figure in _figures(name, first, second, metric, same_tokenizer=same_tokenizer)
        ]
    return comparisons


def results_of(run: RunDirectory) -> dict[str, Any]:
    """The scores of a finished evaluation, by task and metric.

    Raises:
        DataError: it is not done.
    """
    if run.results is None:
        raise DataError(f"{run.path}: the evaluation is not done ({run.status}); run the same command again")
    found: dict[str, Any] = run.results["tasks"]
    return found


def differing_settings(a: RunDirectory, b: RunDirectory) -> list[tuple[str, Any, Any]]:
    """The models, sources and settings that differ."""
    first, second = (read_tree(run.recipe_yaml, str(run.path / RECIPE)).plain() for run in (a, b))
    return differing_values(first, second)


def _figures(
    task: str, first: dict[str, Any], second: dict[str, Any], metric: str | None, *, same_tokenizer: bool
) -> list[TextFigure]:
    """The figures to compare."""
    both = [
        figure
        for figure in FIGURES[task]
        if all(results.get(figure.name, {}).get("mean") is not None for results in (first, second))
    ]
    fair = [figure for figure in both if same_tokenizer or not figure.is_per_token]
    if metric is not None:
        asked = [figure for figure in both if figure.name == metric]
        if not asked:
            raise UsageError(f"--metric {metric}: {task} has {', '.join(figure.name for figure in both)}")
        fair = [figure for figure in asked if figure in fair]
        if not fair:
            raise UsageError(f"--metric {metric}: is per token, but the models' tokenizers differ{remedy(task)}")
    if not fair:
        raise DataError(f"{task}: all figures are per token, but the models' tokenizers differ{remedy(task)}")
    return fair


def remedy(task: str) -> str:
    """The advice for models with different tokenizers."""
    if task == mlm.TASK:
        return "; evaluate them with `--window-bytes 300` and compare pseudo_bits_per_byte"
    return f"; compare {FIGURES[task][0].name}"


def _comparison(
    runs: tuple[RunDirectory, RunDirectory],
    task: str,
    figure: TextFigure,
    resamples: int,
    seed: int,
) -> dict[str, Any]:
    """Compare one figure. With a single text there is no interval."""
    a, b = ([each for each in read_sums(run, task) if {figure.part, figure.whole} <= each.keys()] for run in runs)
    _check_same(a, b, runs, figure)
    found = asdict(paired_bootstrap(a, b, a, figure, resamples=resamples, seed=seed))
    has_interval = len(a) > 1
    return {
        "task": task,
        "split": None,
        "examples": len(a),
        "metric": figure.name,
        **{key: found[key] for key in ("score_a", "score_b", "difference")},
        "interval": [found["low"], found["high"]] if has_interval else None,
        "confidence": found["confidence"],
        "p_value": found["p_value"] if has_interval else None,
        **{key: found[key] for key in ("resamples", "undefined")},
        "agreement": _agreement(a, b, figure),
    }


def _check_same(
    a: Sequence[TextSums], b: Sequence[TextSums], runs: tuple[RunDirectory, RunDirectory], figure: TextFigure
) -> None:
    """Check that both runs measured the same parts of the text."""
    if [(each["id"], each[figure.whole]) for each in a] != [(each["id"], each[figure.whole]) for each in b]:
        raise DataError(
            f"{figure.name}: {runs[0].path} and {runs[1].path} cut the text into different parts ({len(a)} and"
            f" {len(b)}); evaluate both models with the same settings, such as --sequence-length"
        )
    if not a:
        raise DataError(f"{figure.name}: {runs[0].path} has no sums of it by text; evaluate again")


def _agreement(a: Sequence[TextSums], b: Sequence[TextSums], figure: TextFigure) -> dict[str, int]:
    """On how many texts the runs are equal, and on how many each is better."""
    more = [np.sign(y[figure.part] - x[figure.part]) for x, y in zip(a, b, strict=True)]
    b_sign = 1 if figure.higher_is_better else -1
    return {"same": more.count(0), "a_better": more.count(-b_sign), "b_better": more.count(b_sign)}

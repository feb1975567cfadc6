"""Compares two models on the same minimal pairs: `runs diff` of `eval blimp`.

Koehn 2004, EMNLP: the paired bootstrap, here over pairs. Each pair is weighted so that paradigms count equally, as in
BLiMP's average (Warstadt et al. 2020, arXiv:1912.00582). Sibling language_diff.py compares sums over texts.

Shapes: N pairs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from bertkit.arrays import Float64Array
from bertkit.errors import DataError, UsageError
from bertkit.evaluation.blimp import NORMALISATIONS, SUITE
from bertkit.evaluation.language_diff import differing_settings, results_of
from bertkit.evaluation.text_sums import PREDICTIONS
from bertkit.json_input import parse_json
from bertkit.metrics.base import MeanOf, Values
from bertkit.metrics.statistics import paired_bootstrap
from bertkit.recipe.hashing import differences_document
from bertkit.run.directory import RunDirectory

METRIC = next(iter(NORMALISATIONS))
_CREDIT = {"good": 1.0, "tie": 0.5, "bad": 0.0}


class PairCredit(MeanOf):
    """The mean over paradigms of the share of pairs whose good sentence is preferred; a tie counts half."""

    name = METRIC

    def per_example(self, predictions: Values, references: Values) -> Float64Array:
        """Credits times weights; `references` are the weights, whose mean is 1."""
        return np.asarray(predictions, dtype=np.float64) * np.asarray(references, dtype=np.float64)


def compare_pairs(
    a: RunDirectory,
    b: RunDirectory,
    *,
    task: str | None = None,
    split: str | None = None,
    metric: str | None = None,
    resamples: int = 10_000,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Compare two evaluations of the same pairs, by the mean accuracy of the paradigms.

    Args:
        a, b: the runs.
        task: only these paradigms: a name, or a pattern such as `anaphor_*`.
        split: must be None.
        metric: must be `accuracy`, if given.
        resamples, seed: of the bootstrap.

    Raises:
        UsageError: another metric, a split, or no such paradigm.
        DataError: a run is not done, or they scored different pairs.
    """
    if split is not None:
        raise UsageError(f"--split {split}: `bertkit eval {SUITE}` has no splits; leave it out")
    if metric not in (None, METRIC):
        raise UsageError(f"--metric {metric}: minimal pairs are compared by {METRIC}; leave it out")
    results = [results_of(run) for run in (a, b)]
    (names_a, credit_a), (names_b, credit_b) = (_credits(run) for run in (a, b))
    if a.record["fingerprints"]["data"] != b.record["fingerprints"]["data"] or names_a != names_b:
        raise DataError(
            f"{a.path} and {b.path} scored different pairs; evaluate both models on the same --data-dir with the same"
            " --only, --pairs and --seed"
        )
    paradigms = [name for name in results[0] if task is None or fnmatchcase(name, task)]
    if not paradigms:
        near = get_close_matches(str(task), results[0], n=1) or list(results[0])[:1]
        raise UsageError(f"--task {task}: no paradigm has this name; for instance {near[0]}")
    size = Counter(paradigm for paradigm, _ in names_a if paradigm in paradigms)
    places = [place for place, (paradigm, _) in enumerate(names_a) if paradigm in size]
    weight_N = [len(places) / len(size) / size[names_a[place][0]] for place in places]
    first, second = ([own[place] for place in places] for own in (credit_a, credit_b))
    found = asdict(paired_bootstrap(first, second, weight_N, PairCredit(), resamples=resamples, seed=seed))
    sign = np.sign(np.subtract(second, first)).tolist()
    return [
        {
            "task": SUITE if task is None else task,
            "split": None,
            "examples": len(places),
            "metric": METRIC,
            **{key: found[key] for key in ("score_a", "score_b", "difference")},
            "interval": [found["low"], found["high"]],
            **{key: found[key] for key in ("confidence", "p_value", "resamples", "undefined")},
            "agreement": {"same": sign.count(0), "a_better": sign.count(-1), "b_better": sign.count(1)},
            "scores": {
                name: {s: own[name][METRIC]["mean"] for s, own in zip("ab", results, strict=True)} for name in paradigms
            },
            "recipe": differences_document(differing_settings(a, b)),
        }
    ]


def _credits(run: RunDirectory) -> tuple[list[tuple[str, str]], list[float]]:
    """The paradigm and id of each pair, and its credit.

    Raises:
        DataError: the file is missing or damaged.
    """
    path = run.path / PREDICTIONS / f"{SUITE}.jsonl"
    names, credit = [], []
    for number, line in enumerate(path.read_bytes().splitlines() if path.is_file() else (), start=1):
        row = parse_json(line, f"{path}, line {number}")
        if not isinstance(row, dict) or row.get("prediction") not in _CREDIT:
            raise DataError(f"{path}, line {number}: not the scores of a pair; restore the file or evaluate again")
        names.append((str(row.get("task")), str(row.get("id"))))
        credit.append(_CREDIT[row["prediction"]])
    if not names:
        raise DataError(f"{path}: is missing or empty; evaluate again")
    return names, credit

"""Compares two runs that train on text by their settings, losses and held-out figures: `runs diff` of `pretrain`.

Not from a paper. Held-out figures are only comparable on the same samples with the same masks. They have no interval,
because a run keeps no figures by text; sibling language_diff.py has one, on any text.
"""

from __future__ import annotations

from typing import Any

from bertkit.errors import DataError, UsageError
from bertkit.recipe.hashing import differences_document, differing_keys
from bertkit.recipe.resolve import load_any
from bertkit.run.directory import RECIPE, RunDirectory
from bertkit.run.metrics import read_metrics

HELD_OUT = "held_out"
_SAMPLES = ("tokens", "sequences", "predictions")
"""Keys of `held_out_text` in results.json that differ if the samples do."""
_ONLY_TRAINING = ("sources", "max_epochs", "max_words", "static_copies", "language_smoothing")
"""Keys of `data` that do not decide what is held out; that the sources have the same text is checked by its hash."""


def trains_on_text(run: RunDirectory) -> bool:
    """Whether this is a run of `pretrain`, or of `distill` on text that is done."""
    kind = run.record["kind"]
    return kind == "pretrain" or (kind == "distill" and HELD_OUT in (run.results or {}))


def compare_pretraining(a: RunDirectory, b: RunDirectory, metric: str | None = None) -> dict[str, Any]:
    """Compare two runs that train on text.

    Args:
        a, b: the runs.
        metric: the held-out figure that is compared (default: loss).

    Returns:
        As for predictions, without an interval. `training` has steps, tokens, FLOPs and the last training loss of both,
        and `not_comparable` what makes their held-out figures incomparable; `difference` is then None.

    Raises:
        UsageError: no such figure.
        DataError: a run is not done.
    """
    figures = [_held_out(run) for run in (a, b)]
    both = [name for name in figures[0] if name in figures[1]]
    metric = metric or "loss"
    if metric not in both:
        raise UsageError(f"--metric {metric}: the runs have {', '.join(both)}")
    differing = differing_keys(*(load_any(str(run.path / RECIPE)) for run in (a, b)))
    reasons = _reasons(a, b, [key for key, _, _ in differing])
    first, second = figures[0][metric], figures[1][metric]
    return {
        "task": HELD_OUT,
        "split": None,
        "examples": None if reasons else _results(a).get("held_out_text", {}).get("sequences"),
        "metric": metric,
        "score_a": first,
        "score_b": second,
        "difference": None if reasons or first is None or second is None else second - first,
        "interval": None,
        "p_value": None,
        "not_comparable": reasons,
        "scores": {name: {"a": figures[0][name], "b": figures[1][name]} for name in both},
        "training": _training(a, b),
        "recipe": differences_document(differing),
    }


def _results(run: RunDirectory) -> dict[str, Any]:
    if run.results is None:
        raise DataError(f"{run.path}: the run is not done ({run.status}), so it has no held-out figures to compare")
    return run.results


def _held_out(run: RunDirectory) -> dict[str, float | None]:
    return {
        name: value
        for name, value in _results(run)[HELD_OUT].items()
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    }


def _reasons(a: RunDirectory, b: RunDirectory, keys: list[str]) -> list[str]:
    """What makes the held-out figures incomparable: the text, the tokenizer, or a key that selects or masks samples."""
    prints = [run.record["fingerprints"] for run in (a, b)]
    found = [name for name in ("data", "tokenizer") if prints[0].get(name) != prints[1].get(name)]
    for key in keys:
        section, name, *_ = *key.split("."), ""
        if section in ("objective", "seed") or name == "stages" or (section == "data" and name not in _ONLY_TRAINING):
            found.append(key)
    samples = [_results(run).get("held_out_text") or {} for run in (a, b)]
    if not found and any(samples[0].get(name) != samples[1].get(name) for name in _SAMPLES):
        found.append("held_out_text")
    return found


def _training(a: RunDirectory, b: RunDirectory) -> dict[str, dict[str, Any]]:
    """Updates, tokens, FLOPs and the last logged training loss of both runs."""
    found = [
        {
            "steps": run.steps,
            **{name: run.record.get(name) for name in ("tokens", "flops")},
            "loss": next((line["loss"] for line in reversed(list(read_metrics(run.metrics))) if "loss" in line), None),
        }
        for run in (a, b)
    ]
    return {name: {"a": found[0][name], "b": found[1][name]} for name in found[0]}

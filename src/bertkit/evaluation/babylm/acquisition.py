"""Age of acquisition: does a model learn words in the same order as children?

Chang and Bergen 2022, TACL, doi:10.1162/tacl_a_00444: a word's surprisal in its contexts is measured with the models
that a run has kept. A sigmoid in the logarithm of the words read is fitted to it, and the word counts as learned where
the sigmoid is halfway from a random guess to its lowest surprisal. The children's age is where a sigmoid through the
shares of children who say the word (MacArthur-Bates inventories, Frank et al. 2017) reaches one half. The score is
Pearson's correlation of the two over the words that have both.

github.com/babylm-org/babylm-eval, strict/evaluation_pipeline/AoA_word and utils.py (AoAEvaluator) at commit 45fe2c1.
There the random guess is log2(300,000), in bits, while surprisals are in nats. That score is reported as `aoa`;
`aoa_own_vocabulary` uses the logarithm of the model's own vocabulary size, in nats, as the guess.

Shapes: P points of a word's curve (contexts by checkpoints), A ages.
"""

from __future__ import annotations

import csv
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import OptimizeWarning, curve_fit
from scipy.stats import pearsonr

from bertkit.arrays import Float64Array
from bertkit.errors import DataError
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.evaluation.run import (
    EvalArguments,
    EvaluationResult,
    measure_or_reuse,
    measurement_identity,
)
from bertkit.evaluation.settings import BabylmSettings
from bertkit.files import read_json, sha256_of
from bertkit.models.scoring.pseudo_likelihood import score_texts
from bertkit.models.scoring.rules import choose_rule
from bertkit.progress import Progress
from bertkit.run.directory import RunDirectory
from bertkit.tasks.readers.common import field, list_in, numbered_lines, text_in

CONTEXTS = "cdi_childes.json"
CHILDREN = "cdi_human.csv"
OFFICIAL_GUESS = math.log2(300_000)
"""Treated as nats there."""
LEAST_WORDS = 3
"""With fewer words that have both ages, there is no correlation."""
_STEPS = 1000
"""Maximum number of function evaluations per fit."""


@dataclass(frozen=True)
class WordContexts:
    """A word, and the texts that precede it."""

    word: str
    contexts: tuple[str, ...]


def read_contexts(path: Path) -> list[WordContexts]:
    """Read the challenge's `cdi_childes.json`; one-letter words are left out, as in the official code.

    Raises:
        DataError: the file has another format, or no words.
    """
    found = []
    for word, entries in read_json(path).items():
        where = f"{path}: {word}"
        contexts = tuple(text_in(field(entry, "context", where), where) for entry in list_in(entries, where))
        if len(word) > 1 and contexts:
            found.append(WordContexts(word, contexts))
    if not found:
        raise DataError(f"{path}: no word with a context; expected aoa/{CONTEXTS} of the challenge's evaluation_data")
    return found


def read_children(path: Path) -> dict[str, tuple[Float64Array, Float64Array]]:
    """Ages in months and shares of children who say the word, (A,) each, for each word of `cdi_human.csv`.

    Raises:
        DataError: a column is missing, or a cell is not a number.
    """
    rows = list(csv.DictReader(line for _, line in numbered_lines(path)))
    ages = [age for age in range(16, 31) if rows and str(age) in rows[0]]
    if not ages or "word" not in rows[0]:
        raise DataError(f"{path}: no column word, or none of ages 16 to 30; expected aoa/{CHILDREN}")
    found: dict[str, tuple[Float64Array, Float64Array]] = {}
    for line, row in enumerate(rows, 2):
        try:
            share_A = np.array([float(row[str(age)]) if row[str(age)] else math.nan for age in ages])
        except (TypeError, ValueError):
            raise DataError(f"{path}, line {line}: a share is not a number") from None
        known_A = np.isfinite(share_A)
        found.setdefault(row["word"], (np.array(ages, dtype=float)[known_A], share_A[known_A]))
    return found


def measure_surprisals(
    arguments: EvalArguments, words: Sequence[WordContexts], path: Path, settings: BabylmSettings, progress: Progress
) -> EvaluationResult:
    """The surprisal of each word in each of its contexts, in nats, as a separate run; a finished run is not repeated.

    results.json contains them under `surprisals`, by word.

    Raises:
        DataError: the model cannot score text, or a context is too long for it.
    """
    loaded = LoadedModel.load(arguments.model, offline=arguments.offline)
    rule = choose_rule(loaded.model, settings.rule, source=arguments.model)
    own = BabylmSettings(rule=settings.rule)
    identity = measurement_identity("eval", "babylm-aoa", [loaded], own, arguments, data={str(path): sha256_of(path)})

    def compute(run: RunDirectory) -> dict[str, Any]:
        engine = arguments.engine()
        before = [f"{context.strip()} " for each in words for context in each.contexts]
        targets = [each.word.strip() for each in words for _ in each.contexts]
        scores = score_texts(
            loaded.model,
            loaded.tokenizer,
            [context + target for context, target in zip(before, targets, strict=True)],
            rule=rule.name,
            starts=[len(context) for context in before],
            max_batch_tokens=engine.micro_batch_tokens,
            device=engine.device,
            progress=progress,
        )
        left = iter(scores)
        return {
            "suite": "babylm-aoa",
            "model": loaded.name,
            "tasks": {},
            "average": None,
            "vocabulary": loaded.model.encoder.vocab_size,
            "surprisals": {each.word: [-next(left).total for _ in each.contexts] for each in words},
        }

    return measure_or_reuse(identity, arguments, compute)


def official_document(
    name: str, measured: Mapping[str, tuple[int, EvaluationResult]], words: Sequence[WordContexts]
) -> Any:
    """The contents of AoA_word/surprisal.json.

    Args:
        name: name of the model.
        measured: words read and surprisals, by the checkpoint's official name.
        words: the words, with their contexts.
    """
    rows = [
        {
            "step": step,
            "word_count": read,
            "target_word": each.word,
            "context_id": number,
            "context": context,
            "surprisal": evaluated.results["surprisals"][each.word][number],
        }
        for step, (read, evaluated) in measured.items()
        for each in words
        for number, context in enumerate(each.contexts)
    ]
    count = len(measured)
    metadata = {"model_name": name, "use_bos_only": False, "total_steps": count, "completed_steps": count}
    return {"metadata": metadata, "results": rows}


def agreement(
    surprisals: Mapping[int, Mapping[str, Sequence[float]]],
    children: Mapping[str, tuple[Float64Array, Float64Array]],
    guess_nats: float,
) -> dict[str, Any]:
    """Pearson's correlation of the models' and children's ages.

    Args:
        surprisals: surprisals in nats, by words read, then by word.
        children: ages and shares by word.
        guess_nats: the surprisal of a random guess.

    Returns:
        `{"value": correlation or None, "words": number with both ages}`; officially 0 if the value is None.
    """
    pairs = []
    for word in next(iter(surprisals.values())):
        age = None if word not in children else child_age(*children[word])
        if age is None:
            continue
        points = [(read, nats) for read, own in surprisals.items() for nats in own[word]]
        read_P, nats_P = np.array(points, dtype=float).T
        learnt = model_age(read_P, nats_P, guess_nats)
        if learnt is not None:
            pairs.append((learnt, age))
    if len(pairs) < LEAST_WORDS:
        return {"value": None, "words": len(pairs)}
    value = float(pearsonr(*np.array(pairs).T).statistic)
    return {"value": value if math.isfinite(value) else None, "words": len(pairs)}


def child_age(age_A: Float64Array, share_A: Float64Array) -> float | None:
    """The age in months at which half of the children say the word, by a sigmoid; None if there is no such age."""
    if len(age_A) < 3:
        return None
    low, high = float(age_A[0]), float(age_A[-1])
    bounds = ([0, 0, low, -0.5], [2.0, 1.0, high, 0.5])
    found = _crossing(age_A, share_A, [1.0, 0.1, float(age_A.mean()), 0.0], 0.5, bounds)
    return found if found is not None and low <= found <= high else None


def model_age(read_P: Float64Array, nats_P: Float64Array, guess_nats: float) -> float | None:
    """The logarithm (base 10) of the words read at which surprisal is halfway from a guess to its lowest value."""
    if len(nats_P) < 3:
        return None
    least = float(nats_P.min())
    threshold = guess_nats - 0.5 * (guess_nats - least)
    log_P, rising_P = np.log10(read_P + 1), -nats_P
    start = [float(np.ptp(rising_P)), 1.0, float(log_P.mean()), float(rising_P.min())]
    found = _crossing(log_P, rising_P, start, -threshold)
    return found if found is not None and read_P[0] <= 10**found - 1 <= read_P[-1] else None


def _crossing(
    x_P: Float64Array, y_P: Float64Array, start: Sequence[float], level: float, bounds: Any = (-np.inf, np.inf)
) -> float | None:
    """Where a sigmoid a / (1 + exp(-b (x - c))) + d fitted to the points has this value; None if nowhere, or if there
    are fewer points than parameters."""
    if len(x_P) < len(start):
        return None
    with warnings.catch_warnings(), np.errstate(over="ignore"):
        warnings.simplefilter("ignore", OptimizeWarning)
        try:
            (a, b, c, d), _ = curve_fit(_sigmoid, x_P, y_P, p0=start, bounds=bounds, maxfev=_STEPS)
        except (RuntimeError, ValueError):  # no fit within the maximum steps, or none for these points
            return None
    if a <= 0 or b <= 0 or not d < level < a + d:
        return None
    return float(c - math.log(a / (level - d) - 1) / b)


def _sigmoid(x_P: Float64Array, a: float, b: float, c: float, d: float) -> Float64Array:
    return np.asarray(a / (1 + np.exp(-b * (x_P - c))) + d)

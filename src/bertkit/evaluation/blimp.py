"""BLiMP: does a model assign the grammatical sentence of a minimal pair a higher probability?

Warstadt et al. 2020, arXiv:1912.00582; masked models score by pseudo-log-likelihood, Salazar et al. 2020,
arXiv:1910.14659. models/scoring/pseudo_likelihood.py scores sentences, tasks/minimal_pairs.py reads pairs; this file
compares and averages scores.

A tie counts half; otherwise a model that gives all sentences the same score would always be right. The sum of
log-probabilities favours the sentence with fewer tokens, so the score of constant logits is reported for each paradigm.

Shapes: P pairs of a paradigm.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.arrays import Float64Array, Int64Array
from bertkit.errors import DataError
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.evaluation.run import (
    EvalArguments,
    EvaluationResult,
    measure_or_reuse,
    measurement_identity,
    single_score,
)
from bertkit.evaluation.settings import BlimpSettings
from bertkit.files import sha256_of
from bertkit.finetuning.report import write_lines
from bertkit.models.scoring.pseudo_likelihood import TextScore, score_texts
from bertkit.models.scoring.rules import choose_rule
from bertkit.progress import Progress, silent_progress
from bertkit.run.directory import RunDirectory
from bertkit.tables import write_csv
from bertkit.tasks.minimal_pairs import FIELD_SPELLINGS, MinimalPair, Paradigm, read_paradigms, select
from bertkit.training.engine import Engine
from bertkit.visible import number_of

SUITE = "blimp"
PAIRS_OF_BLIMP = 1000
PARADIGMS_OF_BLIMP = 67
NEAR_TIE = 1e-4
"""Differences below this many nats may have the opposite sign on another machine."""


@dataclass(frozen=True)
class Side:
    """The good or the bad sentences of a paradigm's pairs.

    Attributes:
        total_P: log-likelihoods, in nats.
        tokens_P: number of scored tokens.
        words_P: number of words, separated by white space.
    """

    total_P: Float64Array
    tokens_P: Int64Array
    words_P: Int64Array

    @classmethod
    def of(cls, scores: Sequence[TextScore]) -> Side:
        return cls(
            np.array([score.total for score in scores]),
            np.array([score.tokens for score in scores]),
            np.array([score.words for score in scores]),
        )

    def with_constant_logits(self) -> Side:
        """The same sentences if every token had the same probability; its value cancels."""
        return replace(self, total_P=-self.tokens_P.astype(np.float64))


NORMALISATIONS: dict[str, Callable[[Side], Float64Array]] = {
    "accuracy": lambda side: side.total_P,
    "accuracy_per_token": lambda side: side.total_P / side.tokens_P,
    "accuracy_per_word": lambda side: side.total_P / side.words_P,
}
"""What is compared: the sum of log-probabilities, or the sum divided by tokens or by words. BLiMP uses the first."""

REFERENCES = (
    {"model": "human", "accuracy": 0.886, "source": "Salazar et al. 2020, repository awslabs/mlm-scoring"},
    {"model": "RoBERTa-large", "accuracy": 0.865, "source": "Salazar et al. 2020, repository awslabs/mlm-scoring"},
    {"model": "GPT-2-345M", "accuracy": 0.826, "source": "Salazar et al. 2020, repository awslabs/mlm-scoring"},
    {"model": "LSTM", "accuracy": 0.698, "source": "Warstadt et al. 2020, repository alexwarstadt/blimp"},
    {"model": "n-gram", "accuracy": 0.612, "source": "Warstadt et al. 2020, repository alexwarstadt/blimp"},
)
"""Published averages over all pairs of all 67 paradigms."""


@dataclass(frozen=True)
class Outcome:
    """A paradigm's pairs with their scores."""

    paradigm: Paradigm
    good: Side
    bad: Side

    @property
    def pairs(self) -> int:
        return self.good.total_P.size

    def differences_P(self, name: str = "accuracy") -> Float64Array:
        """Good minus bad, in nats (per token or word), under one of the NORMALISATIONS."""
        return NORMALISATIONS[name](self.good) - NORMALISATIONS[name](self.bad)

    def accuracy(self, name: str = "accuracy") -> float:
        return share_preferred(self.differences_P(name))

    def constant_accuracy(self, name: str = "accuracy") -> float:
        """The accuracy of constant logits: prefers fewer tokens, ties if the numbers are equal."""
        sides = self.good.with_constant_logits(), self.bad.with_constant_logits()
        return Outcome(self.paradigm, *sides).accuracy(name)

    @property
    def ties(self) -> int:
        """Number of pairs with equal sums, including identical sentences."""
        return int((self.differences_P() == 0).sum())

    @property
    def near_ties(self) -> int:
        difference_P = np.abs(self.differences_P())
        return int(((difference_P > 0) & (difference_P < NEAR_TIE)).sum())

    @property
    def differing_lengths(self) -> float:
        """Share of pairs whose sentences have different numbers of tokens."""
        return float(np.mean(self.good.tokens_P != self.bad.tokens_P))


def share_preferred(difference_P: Float64Array) -> float:
    """Share of pairs whose good sentence scores higher; a tie counts half."""
    return float(np.mean((np.sign(difference_P) + 1) / 2))


def evaluate_blimp(
    arguments: EvalArguments, data: Path | None, settings: BlimpSettings, *, progress: Progress = silent_progress
) -> EvaluationResult:
    """Score all pairs and write the run: results.json, paradigms.csv, predictions/blimp.jsonl.

    Args:
        arguments: the model, and where to compute and write.
        data: BLiMP's directory, or any file or directory of minimal pairs in its format.
        settings: which pairs to score, and how.
        progress: the display.

    Raises:
        DataError: the data or the model is invalid, or the model cannot score text.
        UsageError: nothing matches `only`, the rule does not fit the model, or the run directory is taken.
    """
    paradigms = chosen_paradigms(data, settings)
    loaded = LoadedModel.load(arguments.model, offline=arguments.offline)
    choose_rule(loaded.model, settings.rule, source=arguments.model)  # fails before a run is created
    engine = arguments.engine()
    files = {str(path): sha256_of(path) for path in dict.fromkeys(paradigm.path for paradigm in paradigms)}
    identity = measurement_identity("eval", SUITE, [loaded], settings, arguments, data=files, seed=settings.seed)

    def compute(run: RunDirectory) -> dict[str, Any]:
        outcomes = score_paradigms(loaded, paradigms, settings, engine, progress)
        results = blimp_results(outcomes, loaded, settings)
        _write_predictions(run, outcomes)
        _write_table(run.path / "paradigms.csv", outcomes)
        return results

    return measure_or_reuse(identity, arguments, compute)


def score_paradigms(
    loaded: LoadedModel, paradigms: Sequence[Paradigm], settings: BlimpSettings, engine: Engine, progress: Progress
) -> list[Outcome]:
    """The paradigms' pairs with their scores, all scored in one pass.

    Raises:
        DataError: the model cannot score text.
        UsageError: the rule does not fit the model.
    """
    scores = iter(
        score_texts(
            loaded.model,
            loaded.tokenizer,
            [text for paradigm in paradigms for pair in paradigm.pairs for text in (pair.good, pair.bad)],
            rule=settings.rule,
            max_batch_tokens=engine.micro_batch_tokens,
            device=engine.device,
            progress=progress,
        )
    )
    own = [list(islice(scores, 2 * len(paradigm.pairs))) for paradigm in paradigms]
    return [Outcome(p, Side.of(some[::2]), Side.of(some[1::2])) for p, some in zip(paradigms, own, strict=True)]


def chosen_paradigms(data: Path | None, settings: BlimpSettings) -> list[Paradigm]:
    """The paradigms that the settings select from the data.

    Raises:
        DataError: no data, or invalid data.
        UsageError: nothing matches `only`.
    """
    if data is None:
        raise DataError(
            "no minimal pairs: give --data-dir DIR, the folder `data` of github.com/alexwarstadt/blimp, or any file or"
            " folder of JSON Lines with sentence_good and sentence_bad"
        )
    return drawn_pairs(select(read_paradigms(data), settings.only), settings)


def drawn_pairs(paradigms: Sequence[Paradigm], settings: BlimpSettings) -> list[Paradigm]:
    """The paradigms with the pairs that the settings ask for."""
    return [p if settings.pairs is None else p.drawn(settings.pairs, settings.seed) for p in paradigms]


def blimp_results(outcomes: Sequence[Outcome], loaded: LoadedModel, settings: BlimpSettings) -> dict[str, Any]:
    """The contents of results.json."""
    names = list(NORMALISATIONS)
    table = {outcome.paradigm.name: {name: outcome.accuracy(name) for name in names} for outcome in outcomes}
    averages = {name: _mean([row[name] for row in table.values()]) for name in names}
    identical = [f"{o.paradigm.name}/{pair}" for o in outcomes for pair in o.paradigm.identical]
    return {
        "suite": SUITE,
        "model": loaded.name,
        "average": averages["accuracy"],
        "standard_error": _standard_error([row["accuracy"] for row in table.values()], outcomes),
        "averages": averages,
        "constant_logits": {name: _mean([o.constant_accuracy(name) for o in outcomes]) for name in names},
        "by_field": _by(outcomes, table, lambda paradigm: paradigm.field),
        "by_linguistics_term": _by(outcomes, table, lambda paradigm: paradigm.term),
        "pairs": sum(o.pairs for o in outcomes),
        "paradigms": len(outcomes),
        "ties": sum(o.ties for o in outcomes),
        "near_ties": sum(o.near_ties for o in outcomes),
        "identical_pairs": identical,
        "differing_token_counts": _mean([o.differing_lengths for o in outcomes]),
        "protocol": _protocol(outcomes, loaded, settings),
        "tasks": {task: {name: single_score(value) for name, value in row.items()} for task, row in table.items()},
        "trained": loaded.training,
        "references": [dict(reference) for reference in REFERENCES] if _is_whole(outcomes) else [],
    }


def _protocol(outcomes: Sequence[Outcome], loaded: LoadedModel, settings: BlimpSettings) -> dict[str, Any]:
    """How the scores were computed."""
    rule = choose_rule(loaded.model, settings.rule)
    available = sum(o.paradigm.available for o in outcomes)
    pairs = sum(o.pairs for o in outcomes)
    drawn = "" if pairs == available else f", drawn with seed {settings.seed} (Philox, by paradigm)"
    return {
        "rule": rule.name,
        "statement": rule.statement,
        "special_tokens": "around the text, not scored",
        "first_token": "given, not scored" if rule(loaded.tokenizer).unscored_tokens else "scored",
        "compared": "sum of log-probabilities in nats; per_token divides by the scored tokens, per_word by words"
        " separated by white space",
        "temperature": 1.0,
        "dtype": "float32 model and log-softmax, float64 sums",
        "ties": "equal sums count one half, including identical sentences",
        "near_ties": f"pairs without a tie that differ by less than {NEAR_TIE} nats",
        "average": "unweighted mean over paradigms",
        "standard_error": "of the average, treating the pairs of a paradigm as a random sample of all possible pairs",
        "constant_logits": "accuracy of a model whose logits are all equal, determined by the number of tokens alone",
        "set": f"{'BLiMP in full' if _is_whole(outcomes) else 'a selection'}: {number_of(len(outcomes), 'paradigm')},"
        f" {pairs:,} of {number_of(available, 'pair')}{drawn}",
        "fields": f"spellings merged: {json.dumps(FIELD_SPELLINGS)}",
    }


def _is_whole(outcomes: Sequence[Outcome]) -> bool:
    return len(outcomes) == PARADIGMS_OF_BLIMP and all(o.pairs == PAIRS_OF_BLIMP for o in outcomes)


def _by(
    outcomes: Sequence[Outcome], table: Mapping[str, Mapping[str, float]], group_of: Callable[[Paradigm], str | None]
) -> dict[str, dict[str, Any]]:
    """Mean over the paradigms of each field or phenomenon."""
    members: dict[str, list[str]] = {}
    for outcome in outcomes:
        members.setdefault(group_of(outcome.paradigm) or "(not stated)", []).append(outcome.paradigm.name)
    return {
        group: {
            **{name: _mean([table[task][name] for task in tasks]) for name in NORMALISATIONS},
            "paradigms": len(tasks),
        }
        for group, tasks in sorted(members.items())
    }


def _standard_error(accuracies: Sequence[float], outcomes: Sequence[Outcome]) -> float | None:
    """Standard error of the mean over paradigms, treating pairs as a sample; None if a paradigm has a single pair."""
    counts = [outcome.pairs for outcome in outcomes]
    if min(counts) < 2:
        return None
    variances = [p * (1 - p) / (n - 1) for p, n in zip(accuracies, counts, strict=True)]
    return math.sqrt(math.fsum(variances)) / len(variances)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _write_predictions(run: RunDirectory, outcomes: Sequence[Outcome]) -> None:
    """One line per pair: both scores, and the preferred sentence."""
    numbered = [(outcome, *each) for outcome in outcomes for each in enumerate(outcome.paradigm.pairs)]
    write_lines(run.path / "predictions" / f"{SUITE}.jsonl", [_prediction(*each) for each in numbered])


def _prediction(outcome: Outcome, number: int, pair: MinimalPair) -> dict[str, Any]:
    good, bad = float(outcome.good.total_P[number]), float(outcome.bad.total_P[number])
    return {
        "task": outcome.paradigm.name,
        "id": pair.id,
        "prediction": "tie" if good == bad else "good" if good > bad else "bad",
        "good_nats": good,
        "bad_nats": bad,
        "good_tokens": int(outcome.good.tokens_P[number]),
        "bad_tokens": int(outcome.bad.tokens_P[number]),
    }


def _write_table(path: Path, outcomes: Sequence[Outcome]) -> None:
    columns = [
        *("task", "field", "linguistics_term", "pairs", *NORMALISATIONS),
        *(f"constant_logits_{name}" for name in NORMALISATIONS),
        *("ties", "near_ties", "identical", "differing_token_counts"),
    ]
    rows: list[list[Any]] = []
    for outcome in outcomes:
        paradigm = outcome.paradigm
        rows.append(
            [paradigm.name, paradigm.field, paradigm.term, outcome.pairs]
            + [outcome.accuracy(name) for name in NORMALISATIONS]
            + [outcome.constant_accuracy(name) for name in NORMALISATIONS]
            + [outcome.ties, outcome.near_ties, len(paradigm.identical), outcome.differing_lengths]
        )
    write_csv(path, columns, rows)

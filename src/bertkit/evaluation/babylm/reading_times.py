"""Reading times: how much of their variance a model's surprisal explains.

De Varda et al. 2023, Behavior Research Methods (205 English sentences with eye tracking and self-paced reading), as
scored by github.com/babylm-org/babylm-eval, strict/evaluation_pipeline/reading: a linear model of the reading time with
frequency, length and position of the word and their products as predictors, without and with the surprisal. The score
is the gain in R2 divided by the largest possible gain, which equals the squared partial correlation of time and
surprisal. Eye tracking is the mean over four times; self-paced reading also has the previous word among the predictors.

A masked model reads the text so far followed by three [MASK] and predicts the first (Samuel 2024, arXiv:2406.04823).
The surprisal of a word of several tokens is summed as in that code: each token is converted to text, appended without a
blank, and the text is tokenised again. A word is therefore never read with the blank before it.

Shapes: N words, K columns of a linear model, R resamples.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from bertkit.arrays import Float64Array, Int64Array
from bertkit.errors import DataError
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.models.scoring.rules import SCORING_RULES, LeftToRight, MaskedRule, ScoringRule, check_distribution
from bertkit.models.scoring.token_predictors import TokenPredictor
from bertkit.progress import Progress
from bertkit.tasks.readers.common import numbered_lines
from bertkit.text.tokenizer import Tokenizer
from bertkit.training.engine import Engine

EYE_TRACKING = ("RTfirstfix", "RTfirstpass", "RTgopast", "RTrightbound")
SELF_PACED = "self_paced_reading_time"
PREDICTORS = ("Subtlex_log10", "length", "context_length")
MASKS = 3
RESAMPLES = 1000
_TEXTS = ("item", "word", "prev_item", "prev_word")
_NUMBERS = (*EYE_TRACKING, SELF_PACED, *PREDICTORS, "prev_length")


@dataclass(frozen=True)
class ReadingWords:
    """The words of the file.

    Attributes:
        word: for each row, the text before the word, and the word.
        previous: the same for the previous word; None if the file has none.
        columns: times and predictors by name, (N,), NaN if a cell is empty.
    """

    word: list[tuple[str, str]]
    previous: list[tuple[str, str] | None]
    columns: dict[str, Float64Array]


@dataclass(frozen=True, slots=True)
class _Step:
    """One token to predict: the model's input, the position, and the target id."""

    ids: tuple[int, ...]
    position: int
    target: int


def read_reading(path: Path) -> ReadingWords:
    """Read the challenge's `reading_data.csv`, plain or compressed.

    Raises:
        DataError: a column is missing, a cell is not a number, or there are no rows.
    """
    rows = list(csv.DictReader(line for _, line in numbered_lines(path)))
    missing = [name for name in (*_TEXTS, *_NUMBERS) if not rows or name not in rows[0]]
    if missing:
        raise DataError(f"{path}: no column {missing[0]}; expected the reading_data.csv of BabyLM's evaluation_data")
    wordless = next((n for n, row in enumerate(rows, 2) if not row["word"]), None)
    if wordless is not None:
        raise DataError(f"{path}, line {wordless}: word is empty")
    columns = {
        name: np.array([_number(row[name], name, path, n) for n, row in enumerate(rows, 2)]) for name in _NUMBERS
    }
    # The one text "None" was lost when the file was created: pandas reads it as a missing value. The official
    # code restores it.
    word = [(row["item"] or "None", row["word"]) for row in rows]
    previous = [(row["prev_item"], row["prev_word"]) if row["prev_item"] else None for row in rows]
    return ReadingWords(word, previous, columns)


def surprisals(
    loaded: LoadedModel, words: ReadingWords, rule: str, engine: Engine, progress: Progress
) -> tuple[Float64Array, Float64Array]:
    """Surprisal in nats of each word, and of the previous word (NaN if there is none), (N,) each.

    Raises:
        DataError: the model has no distribution over words, or a text is too long for it.
    """
    kind = SCORING_RULES[rule]
    check_distribution(kind, source=loaded.name)
    scoring = kind(loaded.tokenizer)
    wanted = dict.fromkeys([*words.word, *(each for each in words.previous if each is not None)])
    steps_of = {each: list(_steps(loaded.tokenizer, scoring, *each)) for each in wanted}
    longest = max(len(step.ids) for steps in steps_of.values() for step in steps)
    if longest > loaded.model.encoder.max_tokens:
        raise DataError(
            f"{loaded.name}: reads at most {loaded.model.encoder.max_tokens} tokens, but a text of the reading times"
            f" has {longest}, including special tokens"
        )
    predict = scoring.predictor(loaded.model, device=engine.device)
    assert isinstance(predict, TokenPredictor)
    log_p = _log_p(predict, dict.fromkeys(step for steps in steps_of.values() for step in steps), engine, progress)
    nats = {each: -sum(log_p[step] for step in steps) for each, steps in steps_of.items()}
    previous_N = np.array([np.nan if each is None else nats[each] for each in words.previous])
    return np.array([nats[each] for each in words.word]), previous_N


def reading_gains(
    words: ReadingWords, surprisal_N: Float64Array, previous_N: Float64Array, seed: int
) -> dict[str, list[float]]:
    """The two scores with their 95% intervals: `{"eye_tracking": [score, low, high], "self_paced_reading": ...}`.

    Fractions, not percent. Intervals are percentiles over resamples of the words, the same words for all times.
    """
    columns = words.columns
    base_N3 = np.stack([columns[name] for name in PREDICTORS], axis=1)
    with_previous_N5 = np.column_stack([base_N3, columns["prev_length"], previous_N])
    generator = np.random.Generator(np.random.PCG64(seed))
    count = len(surprisal_N)
    count_RN = generator.multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    eye = [partial_r2(columns[name], base_N3, surprisal_N, count_RN) for name in EYE_TRACKING]
    paced = partial_r2(columns[SELF_PACED], with_previous_N5, surprisal_N, count_RN)
    mean_1R = np.mean(np.stack(eye), axis=0)
    return {"eye_tracking": _interval(mean_1R), "self_paced_reading": _interval(paced)}


def partial_r2(
    time_N: Float64Array, predictors_NK: Float64Array, surprisal_N: Float64Array, count_RN: Int64Array
) -> Float64Array:
    """(R2 with - R2 without) / (1 - R2 without) of least squares, (1 + R,): on all rows, then on each resample.

    The columns are those of `time ~ (a + b + c)**2` and an intercept; rows with an empty cell are left out. The result
    is the squared correlation of the residuals of time and surprisal after regression on the columns.
    """
    known_N = np.isfinite(np.column_stack([time_N, predictors_NK, surprisal_N])).all(axis=1)
    products = [predictors_NK[:, i] * predictors_NK[:, j] for i, j in combinations(range(predictors_NK.shape[1]), 2)]
    whole_NK = np.column_stack([predictors_NK, *products, surprisal_N, time_N])[known_N]
    # An orthonormal basis of all columns but the last two leaves the scores unchanged and makes G well conditioned. If
    # columns depend on each other (one is constant), it has fewer.
    spread_K = whole_NK.std(axis=0)
    scaled_NK = (whole_NK - whole_NK.mean(axis=0)) / np.where(spread_K > 0, spread_K, 1)
    found_NK, size_K, _ = np.linalg.svd(np.column_stack([np.ones(len(scaled_NK)), scaled_NK[:, :-2]]), False)
    basis_NK = found_NK[:, size_K > 1e-10 * size_K[0]]
    column_NK = np.column_stack([basis_NK * np.sqrt(len(basis_NK)), scaled_NK[:, -2:]])
    size = column_NK.shape[1]
    pairs_NP = (column_NK[:, :, None] * column_NK[:, None, :]).reshape(len(column_NK), -1)
    weight_RN = np.concatenate([np.ones((1, len(column_NK))), count_RN[:, known_N]])
    product_RKK = (weight_RN @ pairs_NP).reshape(-1, size, size)
    across_RK2 = product_RKK[:, :-2, -2:]
    # Residual variances and covariance of surprisal and time given the predictors, (R, 2, 2).
    rest_R22 = product_RKK[:, -2:, -2:] - across_RK2.transpose(0, 2, 1) @ (
        np.linalg.pinv(product_RKK[:, :-2, :-2], hermitian=True) @ across_RK2
    )
    greatest_R = rest_R22[:, 0, 0] * rest_R22[:, 1, 1]
    # A surprisal that is determined by the predictors explains nothing more.
    defined_R = rest_R22[:, 0, 0] > 1e-9 * product_RKK[:, -2, -2]
    found_R: Float64Array = np.where(defined_R, rest_R22[:, 0, 1] ** 2 / np.where(defined_R, greatest_R, 1), 0.0)
    return found_R


def _interval(value_R: Float64Array) -> list[float]:
    low, high = np.percentile(value_R[1:], [2.5, 97.5])
    return [float(value_R[0]), float(low), float(high)]


def _steps(tokenizer: Tokenizer, scoring: ScoringRule, context: str, word: str) -> Iterator[_Step]:
    """The predictions whose log-probabilities sum to the word's."""
    text = context
    for number, piece in enumerate(tokenizer.encode_batch([word])[0]):
        written = tokenizer.decode([piece])
        again = tokenizer.encode_batch([written])[0]
        yield _step(tokenizer, scoring, text, again[0] if number and again else piece)
        text += written


def _step(tokenizer: Tokenizer, scoring: ScoringRule, text: str, target: int) -> _Step:
    if isinstance(scoring, MaskedRule):
        inner = tokenizer.encode_batch([text + tokenizer.roles["mask"] * MASKS])[0]
        return _Step(tuple(scoring.read(inner)), len(inner) - MASKS + scoring.offset, target)
    assert isinstance(scoring, LeftToRight), "check_distribution refuses other rules"
    ids = (*scoring.before, *tokenizer.encode_batch([text])[0])
    return _Step(ids, len(ids) - 1, target)


def _log_p(predict: TokenPredictor, steps: dict[_Step, None], engine: Engine, progress: Progress) -> dict[_Step, float]:
    """The log-probability of each step's target, in nats; the longest texts first."""
    ordered = sorted(steps, key=lambda step: -len(step.ids))
    found: dict[_Step, float] = {}
    with progress("read", len(ordered), "words") as meter:
        while len(found) < len(ordered):
            at_once = max(1, engine.micro_batch_tokens // len(ordered[len(found)].ids))
            batch = ordered[len(found) : len(found) + at_once]
            first = np.cumsum([0, *(len(step.ids) for step in batch[:-1])])
            index_M = first + np.array([step.position for step in batch])
            target_M = np.array([step.target for step in batch])
            log_p_M = predict([step.ids for step in batch], index_M, target_M).log_p_M
            found.update(zip(batch, log_p_M.astype(np.float64).tolist(), strict=True))
            meter.update(len(found))
    return found


def _number(cell: str | None, name: str, path: Path, line: int) -> float:
    try:
        return float(cell) if cell else float("nan")
    except ValueError:
        raise DataError(f"{path}, line {line}: {name} is {cell!r}; expected a number") from None

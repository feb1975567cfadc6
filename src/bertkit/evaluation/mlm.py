"""Evaluates the prediction of masked tokens of a text: accuracy, perplexity, pseudo-perplexity.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 3.1 (a share of the tokens is masked at once) and Salazar et al.
2020, arXiv:1910.14659, section 2.3 (pseudo-perplexity: each token is masked on its own). Sibling held_out.py measures
these during training, with the recipe's own samples and masking. Here any model is measured on any text, always in the
same way, so that models with the same tokenizer can be compared.

Shapes: T tokens of a window, M predicted tokens.
"""

from __future__ import annotations

import heapq
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from bertkit.arrays import Int64Array
from bertkit.data.random import Draw
from bertkit.errors import DataError, UsageError
from bertkit.evaluation.loaded_model import LoadedModel, window_length
from bertkit.evaluation.run import (
    EvalArguments,
    EvaluationResult,
    finished_measurement,
    measure,
    measurement_identity,
    open_evaluation_text,
    single_score,
)
from bertkit.evaluation.settings import MIN_TOKENS, SPECIAL_TOKENS, MlmSettings
from bertkit.evaluation.text_sums import TextSums, perplexity, write_sums
from bertkit.models.scoring.pseudo_likelihood import score_ids
from bertkit.models.scoring.rules import MaskedRule, mask_rule
from bertkit.models.scoring.token_predictors import TokenPredictor
from bertkit.progress import Progress, silent_progress
from bertkit.run.directory import RunDirectory
from bertkit.text.corpus import Corpus
from bertkit.text.source_options import SourceOptions
from bertkit.text.tokenizer import Tokenizer
from bertkit.visible import number_of

SUITE = TASK = "mlm"
USUAL_LENGTH = 128
Piece = TypeVar("Piece")
_WORD = re.compile(r"\s*\S+")


@dataclass(frozen=True)
class Window:
    """A window of a document without special tokens.

    Attributes:
        number: index of the window in the whole text.
        ids_T: its tokens.
        bytes: UTF-8 bytes of its text if windows are cut by bytes; else 0.
    """

    number: int
    ids_T: Int64Array
    bytes: int = 0


def evaluate_mlm(
    arguments: EvalArguments, sources: Sequence[str], settings: MlmSettings, *, progress: Progress = silent_progress
) -> EvaluationResult:
    """Measure and write the run's results.json.

    Args:
        arguments: the model, and where to compute and write.
        sources: text: files, directories, globs, `hub:ORG/NAME`, `builtin:pydocs`.
        settings: how to cut and mask the text.
        progress: the display.

    Raises:
        DataError: invalid text or model, or the model does not predict masked tokens.
        UsageError: no source, or a window that is too long for the model.
    """
    corpus = open_evaluation_text(sources, arguments, SourceOptions(text_field=settings.text_field))
    loaded = LoadedModel.load(arguments.model, offline=arguments.offline)
    rule = mask_rule(loaded.model, source=arguments.model, otherwise="is measured by `bertkit eval lm`")
    scoring = rule(loaded.tokenizer)
    most = loaded.model.encoder.max_tokens
    length = settings.window_bytes or window_length(settings.sequence_length, USUAL_LENGTH, most)
    identity = measurement_identity(
        "eval", SUITE, [loaded], settings, arguments, data=corpus.hashes, seed=settings.seed
    )
    if (done := finished_measurement(identity, arguments)) is not None:
        return EvaluationResult(done, done.results or {})
    draw = Draw(settings.seed, SUITE)
    if settings.window_bytes is None:
        windows = drawn_windows(corpus, loaded.tokenizer, length - SPECIAL_TOKENS, settings.sequences, draw)
    else:
        windows = drawn_texts(corpus, loaded.tokenizer, length, settings.sequences, draw)
        _require_readable(windows, length, most - SPECIAL_TOKENS)
    engine = arguments.engine()
    predict = scoring.predictor(loaded.model, device=engine.device)

    def compute(run: RunDirectory) -> dict[str, Any]:
        figures, sums = masked_figures(
            predict, scoring, windows, draw, rate=settings.rate, max_batch_tokens=engine.micro_batch_tokens
        )
        scored = windows[: settings.pseudo_sequences]
        if scored:
            some = [window.ids_T.tolist() for window in scored]
            log_p = score_ids(
                predict, scoring, some, some, max_batch_tokens=engine.micro_batch_tokens, progress=progress
            )
            figures["pseudo_perplexity"] = perplexity(-float(np.concatenate(log_p).mean(dtype=np.float64)))
            if settings.window_bytes is not None:
                nats = -float(np.concatenate(log_p).sum(dtype=np.float64))
                figures["pseudo_bits_per_byte"] = nats / math.log(2) / sum(window.bytes for window in scored)
            for window, log_p_N in zip(scored, log_p, strict=True):
                sums[window.number]["pseudo_nats"] = -float(log_p_N.sum(dtype=np.float64))
        write_sums(run, TASK, [sums[window.number] for window in windows])
        protocol = _protocol(scoring, settings, length, windows, scored=len(scored))
        return {
            "suite": SUITE,
            "model": loaded.name,
            "average": figures["accuracy"],
            "tasks": {TASK: {name: single_score(value) for name, value in figures.items()}},
            "protocol": protocol,
            "trained": loaded.training,
        }

    return measure(identity, arguments, compute)


def drawn_windows(corpus: Corpus, tokenizer: Tokenizer, length: int, count: int, draw: Draw) -> list[Window]:
    """Windows of at most `length` tokens, drawn from the whole text in bounded memory, in random order.

    Raises:
        DataError: the text contains no window.
    """
    drawn = _drawn(_windows(corpus, tokenizer, length), count, draw)
    if not drawn:
        raise DataError(f"{', '.join(corpus.sources)}: no document of at least {MIN_TOKENS} tokens")
    return [Window(number, ids_T) for number, ids_T in drawn]


def drawn_texts(corpus: Corpus, tokenizer: Tokenizer, most_bytes: int, count: int, draw: Draw) -> list[Window]:
    """Windows of whole words with at most `most_bytes` bytes, drawn in the same way: the same text for every tokenizer.

    Raises:
        DataError: the text contains no word that short.
    """
    drawn = _drawn(_texts(corpus, most_bytes), count, draw)
    if not drawn:
        raise DataError(f"{', '.join(corpus.sources)}: no words of at most {most_bytes} bytes")
    return [Window(number, tokenizer.encode_plain([text])[0], len(text.encode())) for number, text in drawn]


def _drawn(pieces: Iterable[Piece], count: int, draw: Draw) -> list[tuple[int, Piece]]:
    """A uniform sample of `count` pieces with their numbers, in random order."""
    # The pieces with the smallest random keys are a uniform sample in random order.
    keyed = enumerate(zip(pieces, draw.uniform_in_turn("window"), strict=False))
    least = heapq.nsmallest(count, keyed, key=lambda entry: (entry[1][1], entry[0]))
    return [(number, piece) for number, (piece, _) in least]


def _windows(corpus: Corpus, tokenizer: Tokenizer, length: int) -> Iterator[Int64Array]:
    for lines in corpus.documents():
        ids_T, _ = tokenizer.encode_plain([" ".join(lines)])
        for first in range(0, ids_T.size, length):
            window_T = ids_T[first : first + length]
            if window_T.size >= min(MIN_TOKENS, length):
                yield window_T


def _texts(corpus: Corpus, most_bytes: int) -> Iterator[str]:
    """Documents split between words into parts that are as long as possible, without white space at the ends; words
    that are too long are left out."""
    for lines in corpus.documents():
        words: list[str] = []
        size = 0
        for word in _WORD.findall(" ".join(lines)):
            more = len(word.encode())
            if size + more > most_bytes:
                if words:
                    yield "".join(words).strip()
                word = word.lstrip()
                more = len(word.encode())
                words, size = [], 0
            if more <= most_bytes:
                words.append(word)
                size += more
        if words:
            yield "".join(words).strip()


def _require_readable(windows: Sequence[Window], most_bytes: int, most_tokens: int) -> None:
    longest = max(window.ids_T.size for window in windows)
    if longest > most_tokens:
        raise UsageError(
            f"--window-bytes {most_bytes}: a window has {longest} tokens, but the model reads at most {most_tokens}"
            f" plus [CLS] and [SEP]; give at most {max(16, most_bytes * most_tokens // longest)}"
        )


def masked_figures(
    predict: TokenPredictor,
    scoring: MaskedRule,
    windows: Sequence[Window],
    draw: Draw,
    *,
    rate: float,
    max_batch_tokens: int,
) -> tuple[dict[str, Any], dict[int, TextSums]]:
    """Accuracy, perplexity and the accuracy of the best constant guess, with a share of each window masked at once.

    Returns:
        The figures, and the sums of each window by its number.
    """
    log_p, is_first, targets = [], [], []
    sums: dict[int, TextSums] = {}
    for batch in _batches(windows, max_batch_tokens):
        ids, index_M, target_M, offset = [], [], [], 0
        for window in batch:
            masked = np.sort(chosen_tokens(window, draw, rate))
            ids_T = window.ids_T.copy()
            target_M.append(ids_T[masked])
            ids_T[masked] = scoring.tokenizer.mask_id
            index_M.append(offset + scoring.offset + masked)
            ids.append(scoring.read(ids_T.tolist()))
            offset += len(ids[-1])
        targets.append(np.concatenate(target_M))
        answers = predict(ids, np.concatenate(index_M), targets[-1])
        log_p.append(answers.log_p_M)
        is_first.append(answers.is_first_M)
        ends = np.cumsum([each.size for each in target_M])[:-1]
        parts = zip(batch, np.split(answers.log_p_M, ends), np.split(answers.is_first_M, ends), strict=True)
        for window, own_log_p_M, own_is_first_M in parts:
            sums[window.number] = {
                "id": window.number,
                "tokens": int(window.ids_T.size),
                **({"bytes": window.bytes} if window.bytes else {}),
                "masked": int(own_log_p_M.size),
                "right": int(own_is_first_M.sum()),
                "nats": -float(own_log_p_M.sum(dtype=np.float64)),
            }
    figures = {
        "accuracy": float(np.concatenate(is_first).mean()),
        "perplexity": perplexity(-float(np.concatenate(log_p).mean(dtype=np.float64))),
        "constant_accuracy": float(np.bincount(np.concatenate(targets)).max() / sum(map(len, targets))),
    }
    return figures, sums


def chosen_tokens(window: Window, draw: Draw, rate: float) -> Int64Array:
    """Positions of an exact share of the window's tokens, at least one."""
    key_T = draw.uniform("mask", sample=window.number, position=np.arange(window.ids_T.size))
    return np.argsort(key_T, kind="stable")[: max(1, round(rate * window.ids_T.size))]


def _batches(windows: Sequence[Window], max_batch_tokens: int) -> Iterator[list[Window]]:
    batch: list[Window] = []
    tokens = 0
    for window in sorted(windows, key=lambda window: (window.ids_T.size, window.number)):
        size = window.ids_T.size + SPECIAL_TOKENS
        if batch and tokens + size > max_batch_tokens:
            yield batch
            batch, tokens = [], 0
        batch.append(window)
        tokens += size
    yield batch


def _protocol(
    scoring: MaskedRule, settings: MlmSettings, length: int, windows: Sequence[Window], *, scored: int
) -> dict[str, Any]:
    unit = "tokens, [CLS] and [SEP] included" if settings.window_bytes is None else "bytes in whole words"
    return {
        "windows": f"{len(windows)} of at most {length} {unit}, none across documents, drawn with seed {settings.seed}"
        " (Philox)",
        "tokens": int(sum(window.ids_T.size for window in windows)),
        "rule": scoring.name,
        "statement": scoring.statement,
        "accuracy": f"{settings.rate:.0%} of a window's tokens masked at once, without random replacements",
        "perplexity": "exp of the mean negative log-probability per masked token; not comparable between tokenizers",
        "pseudo_perplexity": f"the same for every token of {number_of(scored, 'window')}, each masked alone (Salazar et"
        " al. 2020)",
        "pseudo_bits_per_byte": "with --window-bytes: summed negative log-probability of the same tokens in bits"
        " divided by the UTF-8 bytes of their text; comparable only between tokenizers that preserve the text, without"
        " lower-casing or unknown tokens",
        "constant_accuracy": "accuracy of always predicting the most frequent masked token",
        "dtype": "float32 model and log-softmax, float64 sums",
        "settings": json.loads(settings.model_dump_json()),
    }

"""Evaluates left-to-right prediction of a text: perplexity in a sliding window, and bits per byte.

Radford et al. 2019, GPT-2, section 3.1; windows as in the documentation of `transformers` ("Perplexity of fixed-length
models"): each window is `stride` tokens after the previous one and scores only the tokens that no earlier window
contains. Perplexity is per token, so it is not comparable between vocabularies; bits per byte are (Gao et al. 2020,
arXiv:2101.00027, section 3.1). Sibling mlm.py measures masked models.

Shapes: T tokens of a document, M scored tokens of a batch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from bertkit.arrays import Int64Array
from bertkit.errors import DataError, UsageError
from bertkit.evaluation.loaded_model import LoadedModel, window_length
from bertkit.evaluation.run import (
    EvalArguments,
    EvaluationResult,
    measure_or_reuse,
    measurement_identity,
    open_evaluation_text,
    single_score,
)
from bertkit.evaluation.settings import LmSettings
from bertkit.evaluation.text_sums import TextSums, perplexity, write_sums
from bertkit.generation.text import PromptTokens
from bertkit.models.headed import SCORING_RULE
from bertkit.models.scoring.rules import EncoderLeftToRight, LeftToRight, MaskedNextTokenScoring, choose_rule
from bertkit.models.scoring.token_predictors import RightToLeftPredictor, TokenPredictor
from bertkit.progress import Progress, silent_progress
from bertkit.run.directory import RunDirectory
from bertkit.text.corpus import Corpus
from bertkit.text.source_options import SourceOptions
from bertkit.text.tokenizer import Tokenizer
from bertkit.visible import number_of, shell_word

SUITE = TASK = "lm"
BACKWARD = "lm_backward"
"""The same from right to left, for models that read from both ends."""
LONGEST_USUAL_WINDOW = 1024


@dataclass(frozen=True)
class LmWindow:
    """A window of tokens.

    Attributes:
        ids: token ids, with the start token if there is one.
        first: position of the first scored token; all tokens after it are scored too.
    """

    ids: list[int]
    first: int


@dataclass(frozen=True)
class ScoredText:
    """Sums over a text, in nats, and over each of its documents.

    `bytes` counts the UTF-8 bytes of the scored documents.
    """

    nats: float
    tokens: int
    bytes: int
    given: int
    sums: list[TextSums]

    @property
    def documents(self) -> int:
        """The number of scored documents."""
        return len(self.sums)

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of the scored documents."""
        return self.nats / math.log(2) / self.bytes

    def figures(self) -> dict[str, float | None]:
        """Perplexity per token, bits per byte, loss, and what was counted."""
        mean = self.nats / self.tokens
        return {
            "perplexity": perplexity(mean),
            "bits_per_byte": self.bits_per_byte,
            "loss": mean,
            "tokens": float(self.tokens),
            "bytes": float(self.bytes),
        }


def evaluate_lm(
    arguments: EvalArguments, sources: Sequence[str], settings: LmSettings, *, progress: Progress = silent_progress
) -> EvaluationResult:
    """Measure and write the run's results.json.

    Args:
        arguments: the model, and where to compute and write.
        sources: text sources: files, directories, globs, `hub:ORG/NAME`, `builtin:pydocs`.
        settings: windows, and how the model reads.
        progress: the display.

    Raises:
        DataError: invalid text or model, or the model does not predict from left to right.
        UsageError: no source, a window that is too long for the model, or a stride longer than the window.
    """
    corpus = open_evaluation_text(sources, arguments, SourceOptions(text_field=settings.text_field))
    loaded = LoadedModel.load(arguments.model, offline=arguments.offline)
    rule = _rule(loaded, settings, arguments.model)
    length = window_length(settings.sequence_length, LONGEST_USUAL_WINDOW, loaded.model.encoder.max_tokens)
    stride = length // 2 if settings.stride is None else settings.stride
    if not 1 <= stride < length:
        raise UsageError(f"--stride {stride}: must be below the window's {length} tokens, or tokens would be skipped")
    engine = arguments.engine()
    identity = measurement_identity("eval", SUITE, [loaded], settings, arguments, data=corpus.hashes)

    def compute(run: RunDirectory) -> dict[str, Any]:
        starts = PromptTokens.of(loaded.model, loaded.tokenizer)
        predictors = {TASK: TokenPredictor(loaded.model, rule.head, causal=rule.causal, device=engine.device)}
        if loaded.model.encoder.config.reads_backward:
            predictors[BACKWARD] = RightToLeftPredictor(loaded.model, rule.head, device=engine.device)
        scores = {
            task: score_text(
                predict,
                corpus,
                starts,
                length=length,
                stride=stride,
                max_tokens=settings.max_tokens,
                max_batch_tokens=engine.micro_batch_tokens,
                backward=task == BACKWARD,
                progress=progress,
            )
            for task, predict in predictors.items()
        }
        scored = scores[TASK]
        for task, own in scores.items():
            write_sums(run, task, own.sums)
        return {
            "suite": SUITE,
            "model": loaded.name,
            "average": fmean(each.bits_per_byte for each in scores.values()),
            "tasks": {
                task: {name: single_score(value) for name, value in own.figures().items()}
                for task, own in scores.items()
            },
            "protocol": {
                "windows": f"{number_of(scored.documents, 'document')}, each in windows of at most {length} tokens with"
                f" a stride of {stride}; each token is scored once, with at least {length - stride} tokens before it if"
                f" the document has them; {number_of(scored.given, 'first token')} given, not scored",
                "rule": rule.statement
                + (f"; {BACKWARD}: from the tokens after it, with windows from the end" if BACKWARD in scores else ""),
                "perplexity": "exp of the mean negative log-probability per token; not comparable between tokenizers",
                "bits_per_byte": "summed negative log-probability in bits divided by the text's UTF-8 bytes, with the"
                " lines of a document joined by a space",
                "dtype": "float32 model and log-softmax, float64 sums",
                "settings": json.loads(settings.model_dump_json()),
            },
            "trained": loaded.training,
        }

    return measure_or_reuse(identity, arguments, compute)


def score_text(
    predict: TokenPredictor,
    corpus: Corpus,
    starts: PromptTokens,
    *,
    length: int,
    stride: int,
    max_tokens: int | None,
    max_batch_tokens: int,
    backward: bool = False,
    progress: Progress = silent_progress,
) -> ScoredText:
    """The log-likelihood of a text's documents.

    Args:
        predict: the model and its head.
        corpus: the text.
        starts: how texts start for the model: its `start_ids` begin every window; without them, its `lone_ids` begin
            the first window of a document.
        length, stride: length and stride of the windows.
        max_tokens: documents are read until this many tokens are scored; None for all.
        max_batch_tokens: tokens computed at once, at least one window.
        backward: read each document from its last token to its first.
        progress: the display, which counts scored tokens.

    Raises:
        DataError: there are no tokens to score.
    """
    start_ids, lone_ids = starts.start_ids, starts.lone_ids
    nats, tokens, size, given = 0.0, 0, 0, 0
    batch: list[tuple[LmWindow, TextSums]] = []
    sums: list[TextSums] = []

    def score() -> None:
        nonlocal nats, tokens
        index, target, offset = [], [], 0
        for window, _ in batch:
            index.append(np.arange(window.first, len(window.ids)) + offset - 1)
            target.append(np.array(window.ids[window.first :], dtype=np.int64))
            offset += len(window.ids)
        scores = predict([window.ids for window, _ in batch], np.concatenate(index), np.concatenate(target))
        parts = np.split(scores.log_p_M, np.cumsum([each.size for each in target])[:-1])
        for (_, document), part_M in zip(batch, parts, strict=True):
            document["tokens"] += int(part_M.size)
            document["nats"] -= float(part_M.sum(dtype=np.float64))
        nats -= float(scores.log_p_M.sum(dtype=np.float64))
        tokens += int(scores.log_p_M.size)
        batch.clear()
        meter.update(tokens)

    with progress("score", max_tokens, "tokens") as meter:
        for number, (text, ids_T) in enumerate(_documents(corpus, starts.tokenizer)):
            if max_tokens is not None and tokens >= max_tokens:
                break
            ids_T = ids_T[::-1] if backward else ids_T
            if (ids_T.size if start_ids else len(lone_ids) + ids_T.size - 1) <= 0:  # nothing is scored
                continue
            own_bytes = len(text.encode("utf-8", errors="surrogatepass"))
            sums.append({"id": number, "tokens": 0, "bytes": own_bytes, "nats": 0.0})
            size += own_bytes
            given += not (start_ids or lone_ids)
            for window in sliding_windows(ids_T, start_ids, lone_ids, length=length, stride=stride):
                if batch and sum(len(each.ids) for each, _ in batch) + len(window.ids) > max_batch_tokens:
                    score()
                batch.append((window, sums[-1]))
            if max_tokens is not None and batch:  # so that scoring ends with a whole document
                score()
        if batch:
            score()
    if not tokens:
        raise DataError(f"{', '.join(corpus.sources)}: no document with a token to score")
    return ScoredText(nats, tokens, size, given, sums)


def sliding_windows(
    ids_T: Int64Array, start_ids: Sequence[int], lone_ids: Sequence[int], *, length: int, stride: int
) -> Iterator[LmWindow]:
    """The windows of a document, one at a time because it may be long: every token is scored in one of them, except a
    first token with nothing before it."""
    row_T = ids_T if start_ids else np.concatenate([np.array(lone_ids, dtype=np.int64), ids_T])
    room = length - len(start_ids)
    done = 0 if start_ids else 1
    first = 0
    while done < len(row_T):
        end = min(first + room, len(row_T))
        yield LmWindow([*start_ids, *row_T[first:end].tolist()], len(start_ids) + done - first)
        done = end
        first += stride


def _documents(corpus: Corpus, tokenizer: Tokenizer) -> Iterator[tuple[str, Int64Array]]:
    for lines in corpus.documents():
        text = " ".join(lines)
        ids_T, _ = tokenizer.encode_plain([text])
        yield text, ids_T


def _rule(loaded: LoadedModel, settings: LmSettings, name: str) -> type[LeftToRight]:
    """How the model reads from left to right.

    Raises:
        DataError: it does not predict the next token.
    """
    recorded = loaded.model.extras.get(SCORING_RULE)
    chosen: str | None = settings.rule
    if chosen is None and "causal_lm" not in loaded.model.head_names and recorded == MaskedNextTokenScoring.name:
        chosen = EncoderLeftToRight.name  # the same states are trained to predict the next token, masked or not
    rule = choose_rule(loaded.model, chosen, source=name)
    if not issubclass(rule, LeftToRight):
        causally = (
            "; --rule encoder_left_to_right reads it with causal attention anyway"
            if EncoderLeftToRight.head in loaded.model.head_names and loaded.config.causal_attention
            else ""
        )
        raise DataError(
            f"{name}: was trained to predict tokens from both sides, not from left to right; `bertkit eval mlm --model"
            f" {shell_word(name)}` gives its pseudo-perplexity{causally}"
        )
    return rule

"""Extractive question answering: the span of a context that answers a question, or no answer (SQuAD 1.1 and 2.0).

Devlin et al. 2019, BERT, arXiv:1810.04805, sections 4.2 and 4.3, and the released run_squad.py: chunks of a long
context overlap, and a token counts in the chunk that shows the most context around it. In a chunk without the answer,
the target is [CLS]. The score of a span is the sum of two logits; the score of no answer is the smallest over all
chunks. The answer is cut out of the context by the character offsets of its tokens; the original aligns two
tokenisations.

Unlike in the released code, the softmax is over a chunk's own tokens only, since there is no padding.

Shapes: T packed tokens, B sequences, S longest sequence, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from bertkit.arrays import BoolArray, Int64Array
from bertkit.errors import DataError, UsageError
from bertkit.metrics.base import Scores
from bertkit.metrics.modules import local_metric
from bertkit.metrics.spans import apply_null_threshold, choose_null_threshold
from bertkit.models.headed import HeadedModel
from bertkit.models.labels import Labels
from bertkit.models.loss_sum import LossSum
from bertkit.settings import Settings
from bertkit.tasks.base import EncodedTokenCounts, Features, FeatureWriter, Prediction, Task, TaskBatch
from bertkit.tasks.encoding import SequenceEncoder, windows
from bertkit.tasks.examples import QuestionExample
from bertkit.text.sentences import without_space
from bertkit.text.word_split import whole_words

START, END = "start", "end"
_ITEM_FIELDS = ("id", "prediction_text")
THRESHOLD = "null_score_threshold"
"""The key of config.json for the tuned threshold."""


class SpanSettings(Settings):
    """How contexts are split and answers found; the defaults are those of the released code."""

    doc_stride: int = Field(
        128, ge=1, description="Tokens from the start of one chunk of a context to the start of the next."
    )
    max_query_tokens: int = Field(64, ge=1, description="Maximum question length in tokens; the rest is cut.")
    max_answer_tokens: int = Field(30, ge=1, description="Maximum answer length in tokens.")
    n_best: int = Field(20, ge=1, description="Number of most likely starts and of ends that are combined.")


@dataclass(frozen=True)
class ContextWindow:
    """The tokens of one chunk of a context.

    Attributes:
        example: number of the question.
        first: position in the sequence of the chunk's first context token.
        offsets: characters of the context that each of its tokens covers.
        has_most_context: for each token, whether no other chunk shows more context around it.
        null: position of [CLS].
    """

    example: int
    first: int
    offsets: list[tuple[int, int]]
    has_most_context: BoolArray
    null: int


@dataclass(frozen=True)
class Candidates:
    """Possible answers to a question.

    Attributes:
        scores: the sum of the two logits, by first character and end in the context.
        null: the score of no answer; None if the model was not trained on unanswerable questions.
    """

    scores: dict[tuple[int, int], float]
    null: float | None


class Span(Task):
    """A start and an end among the tokens of each chunk.

    Args:
        metrics: names of the scores that are reported.
        settings: see `SpanSettings`.
        may_be_impossible: whether some questions have no answer.
    """

    head: ClassVar[str] = "span"
    bytes_of_a_token: ClassVar[float] = 150.0
    metric_of: ClassVar[Mapping[str, str]] = dict.fromkeys(("f1", "exact_match", "exact"), "squad")
    tuned_keys: ClassVar[tuple[str, ...]] = (THRESHOLD,)
    gold_scores: ClassVar[Mapping[str, Any] | None] = {THRESHOLD: 0.0}

    def __init__(self, metrics: Sequence[str], settings: SpanSettings, *, may_be_impossible: bool) -> None:
        super().__init__(Labels.unnamed(), metrics)
        self.settings = settings
        self.may_be_impossible = may_be_impossible

    def encode(self, examples: Sequence[QuestionExample], encoder: SequenceEncoder) -> Features:
        limit = self.settings.max_query_tokens
        if encoder.room(2) - limit < 1:
            raise UsageError(
                f"span.max_query_tokens is {limit} and data.max_length is {encoder.max_tokens}, which leaves no room"
                " for a context; lower the former or raise the latter"
            )
        null_id = encoder.tokenizer.cls_id
        if null_id not in encoder.pair.fill([], [])[0]:
            raise DataError(
                "the model's tokenizer puts no [CLS] into a sequence, and its state stands for no answer; use another"
                " model for questions"
            )
        questions = encoder.ids_in_turn(example.question for example in examples)
        contexts = list(dict.fromkeys(example.context for example in examples))
        encodings = dict(zip(contexts, encoder.encodings(contexts), strict=True))
        writer = FeatureWriter()
        starts: list[int] = []
        ends: list[int] = []
        cut = dropped = answers_lost = 0
        for number, example in enumerate(examples):
            question, context = next(questions), encodings[example.context]
            query = question[:limit]
            cut += len(question) > limit
            dropped += len(question) - len(query)
            wanted = answer_tokens(example, context.offsets)
            found = False
            for chunk, sequence, types, begin in self._chunks(number, example, query, context, encoder):
                inside = wanted is not None and begin <= wanted[0] and wanted[1] < begin + len(chunk.offsets)
                found |= inside
                starts.append(chunk.first + wanted[0] - begin if inside and wanted else chunk.null)
                ends.append(chunk.first + wanted[1] - begin if inside and wanted else chunk.null)
                writer.add(sequence, types)
                writer.close(number)
                writer.extra.append(chunk)
            answers_lost += bool(example.answers) and not found
        labels = {START: np.asarray(starts, dtype=np.int64), END: np.asarray(ends, dtype=np.int64)}
        labelled = bool(examples) and all(example.answers or example.impossible for example in examples)
        account = EncodedTokenCounts(len(examples), 0, 0, cut, dropped, {"answers": answers_lost})
        return writer.finish(account, labels, labelled=labelled)

    def _chunks(
        self, number: int, example: QuestionExample, query: list[int], context: Any, encoder: SequenceEncoder
    ) -> list[tuple[ContextWindow, list[int], list[int], int]]:
        """The chunks of a context, each with its sequence, its token types and its first token in the context."""
        room = encoder.room(2) - len(query)
        cut = list(windows(context.ids, room, self.settings.doc_stride))
        most = most_context([(start, len(ids)) for start, ids in cut], len(context.ids))
        first = encoder.pair.before + len(query) + len(encoder.pair.frames[1])
        chunks = []
        for row, (start, ids) in enumerate(cut):
            sequence, types = encoder.sequence(query, ids, example=example.id)
            null = sequence.index(encoder.tokenizer.cls_id)
            offsets = context.offsets[start : start + len(ids)]
            chunk = ContextWindow(number, first, offsets, most[start : start + len(ids)] == row, null)
            chunks.append((chunk, sequence, types, start))
        return chunks

    def loss_of(self, logits: Tensor, batch: TaskBatch) -> LossSum:
        """The mean of the two cross-entropies, summed over chunks."""
        start_B, end_B = batch.example_labels[START], batch.example_labels[END]
        start_loss = functional.cross_entropy(logits[..., 0], start_B, reduction="sum")
        end_loss = functional.cross_entropy(logits[..., 1], end_B, reduction="sum")
        with torch.no_grad():
            best_B2 = logits.argmax(dim=1)
            correct = ((best_B2[:, 0] == start_B) & (best_B2[:, 1] == end_B)).sum()
        return LossSum((start_loss + end_loss) / 2, batch.num_examples, correct)

    def imitated(self, logits: Tensor, batch: TaskBatch) -> Tensor:
        """Two rows per chunk, the start and the end of the answer; the chunk's tokens are the classes, (2 B, S)."""
        return logits.transpose(1, 2).flatten(0, 1)

    def rows_of(self, batch: TaskBatch) -> list[int]:
        return [2] * batch.num_examples

    def logits(self, model: HeadedModel, hidden_TD: Tensor, batch: TaskBatch) -> Tensor:
        """(B, S, 2) in float32; minus infinity after the end of a sequence."""
        logits_T2 = model.token_logits(self.head, hidden_TD).float()
        sequences = batch.packed.sequences
        lengths_B = sequences.cu_seqlens_B1.diff().long()
        row_T = torch.repeat_interleave(lengths_B, output_size=batch.packed.num_tokens)
        logits_BS2 = logits_T2.new_full((lengths_B.numel(), sequences.max_length, 2), -torch.inf)
        return logits_BS2.index_put((row_T, batch.packed.positions_T), logits_T2)

    def decode(self, model: HeadedModel, hidden_TD: Tensor, batch: TaskBatch) -> list[NDArray[Any]]:
        """(tokens, 2) for each chunk."""
        logits_T2 = model.token_logits(self.head, hidden_TD).float().cpu().numpy()
        return np.split(logits_T2, batch.packed.sequences.cu_seqlens_B1.cpu().numpy()[1:-1])

    def predictions(
        self, examples: Sequence[QuestionExample], features: Features, outputs: Sequence[NDArray[Any]]
    ) -> list[Prediction]:
        """The best text for every question; if questions may have no answer, `scores.null_odds` is the score of no
        answer minus that of the text."""
        best: list[tuple[float, tuple[int, int]]] = [(-np.inf, (0, 0))] * len(examples)
        null = [np.inf] * len(examples)
        for chunk, logits_S2 in zip(features.extra, outputs, strict=True):
            null[chunk.example] = min(null[chunk.example], float(logits_S2[chunk.null].sum()))
            score, span = self._best_span(chunk, logits_S2)
            if span is not None and score > best[chunk.example][0]:
                best[chunk.example] = score, (chunk.offsets[span[0]][0], chunk.offsets[span[1]][1])
        return [
            self._decided(example, score, answer_place(example.context, *place), none)
            for example, (score, place), none in zip(examples, best, null, strict=True)
        ]

    def decided(self, example: QuestionExample, candidates: Candidates) -> Prediction:
        """As `predictions`, from candidates."""
        scores = candidates.scores
        best = min(scores, key=lambda place: (-scores[place], place), default=(0, 0))
        null = np.inf if candidates.null is None else candidates.null
        return self._decided(example, scores.get(best, -np.inf), best, null)

    def _decided(self, example: QuestionExample, score: float, place: tuple[int, int], null: float) -> Prediction:
        text = example.context[slice(*place)]
        if not self.may_be_impossible:
            return Prediction(example.id, text, {"score": score})
        odds = null - score if np.isfinite(score) else float(np.finfo(np.float32).max)
        return Prediction(example.id, "" if odds > 0 else text, {"score": score, "null_odds": odds, "text": text})

    def candidates(
        self, examples: Sequence[QuestionExample], features: Features, outputs: Sequence[NDArray[Any]]
    ) -> list[Candidates]:
        """The answers that each question may have, and the score of no answer. Arguments as in `predictions`.

        For each chunk these are the allowed spans of the `n_best` starts and ends, best first, without those that
        share a token with a better one.
        """
        found: list[dict[tuple[int, int], float]] = [{} for _ in examples]
        null = [np.inf] * len(examples)
        for chunk, logits_S2 in zip(features.extra, outputs, strict=True):
            null[chunk.example] = min(null[chunk.example], float(logits_S2[chunk.null].sum()))
            starts, ends, score = self._scored_spans(chunk, logits_S2)
            own, context = found[chunk.example], examples[chunk.example].context
            free = np.ones(len(chunk.offsets), dtype=np.bool_)
            for pair in np.argsort(-score, axis=None, kind="stable")[: int(np.isfinite(score).sum())].tolist():
                row, column = divmod(pair, score.shape[1])
                first, last = int(starts[row]), int(ends[column])
                if not free[first : last + 1].all():
                    continue
                free[first : last + 1] = False
                place = answer_place(context, chunk.offsets[first][0], chunk.offsets[last][1])
                if place[0] < place[1]:
                    own[place] = max(own.get(place, -np.inf), float(score[row, column]))
        return [
            Candidates(own, none if self.may_be_impossible else None) for own, none in zip(found, null, strict=True)
        ]

    def _scored_spans(
        self, chunk: ContextWindow, logits_S2: NDArray[Any]
    ) -> tuple[Int64Array, Int64Array, NDArray[Any]]:
        """The `n_best` starts and ends in the chunk's own tokens; each pair's score, minus infinity if not allowed."""
        own = logits_S2[chunk.first : chunk.first + len(chunk.offsets)]
        count = self.settings.n_best
        starts = np.argsort(-own[:, 0], kind="stable")[:count]
        ends = np.argsort(-own[:, 1], kind="stable")[:count]
        length = ends[None, :] - starts[:, None] + 1
        allowed = (length >= 1) & (length <= self.settings.max_answer_tokens) & chunk.has_most_context[starts][:, None]
        return starts, ends, np.where(allowed, own[starts, 0][:, None] + own[ends, 1][None, :], -np.inf)

    def _best_span(self, chunk: ContextWindow, logits_S2: NDArray[Any]) -> tuple[float, tuple[int, int] | None]:
        """The best of the allowed spans of the `n_best` starts and ends, in the chunk's own tokens."""
        starts, ends, score = self._scored_spans(chunk, logits_S2)
        if not np.isfinite(score).any():
            return -np.inf, None
        row, column = np.unravel_index(int(score.argmax()), score.shape)
        return float(score[row, column]), (int(starts[row]), int(ends[column]))

    def own_scores(self, predictions: list[Any], references: list[Any]) -> Scores:
        metric, fields = "squad_v2", [*_ITEM_FIELDS, "no_answer_probability"]
        if not self.may_be_impossible:
            metric, fields = "squad", [*_ITEM_FIELDS]
        items = [{field: item[field] for field in fields} for item in predictions]
        found = local_metric(metric).compute(predictions=items, references=references)
        # The script of version 2.0 uses another name for the same metric, and so does its task.
        exact = found["exact" if self.may_be_impossible else "exact_match"]
        own = {"f1": found["f1"], "exact": exact, "exact_match": exact}
        return {name: own[name] for name in self.metrics}

    def metric_inputs(
        self, predictions: Sequence[Prediction], examples: Sequence[QuestionExample]
    ) -> tuple[list[Any], list[Any]]:
        """Items in the form of SQuAD's metrics. If questions may have no answer, the threshold is the best one on these
        examples, unless the predictions carry a tuned one."""
        texts = {each.id: each.prediction for each in predictions}
        if self.may_be_impossible and not all(THRESHOLD in each.scores for each in predictions):
            texts = self._thresholded(predictions, self.tune(predictions, examples)[THRESHOLD])
        known = [example for example in examples if self.gold(example) is not None]
        # Which texts are empty is already decided: a probability of 0 turns no other one into "no answer".
        items = [{"id": each.id, "prediction_text": texts[each.id], "no_answer_probability": 0.0} for each in known]
        answers = [
            {
                "text": [answer.text for answer in each.answers],
                "answer_start": [answer.start for answer in each.answers],
            }
            for each in known
        ]
        return items, [{"id": each.id, "answers": own} for each, own in zip(known, answers, strict=True)]

    def gold(self, example: QuestionExample) -> Any:
        if example.answers:
            return example.answers[0].text
        return "" if example.impossible else None

    def comparable(
        self, predictions: Sequence[Prediction], examples: Sequence[QuestionExample]
    ) -> tuple[list[Any], list[Any]]:
        return super().metric_inputs(predictions, examples)

    def tune(self, predictions: Sequence[Prediction], examples: Sequence[QuestionExample]) -> dict[str, Any]:
        """The threshold on `null_odds` with the best F1."""
        if not self.may_be_impossible:
            return {}
        texts = {each.id: each.scores["text"] for each in predictions}
        odds = {each.id: each.scores["null_odds"] for each in predictions}
        threshold, _ = choose_null_threshold(texts, references_of(examples), odds)
        return {THRESHOLD: threshold}

    def final(self, predictions: Sequence[Prediction], tuned: Mapping[str, Any]) -> list[Prediction]:
        """The predictions at the tuned threshold."""
        if THRESHOLD not in tuned:
            return list(predictions)
        texts = self._thresholded(predictions, tuned[THRESHOLD])
        return [replace(each, prediction=texts[each.id], scores={**each.scores, **tuned}) for each in predictions]

    @staticmethod
    def _thresholded(predictions: Sequence[Prediction], threshold: float) -> dict[str, str]:
        texts = {each.id: each.scores["text"] for each in predictions}
        return apply_null_threshold(texts, {each.id: each.scores["null_odds"] for each in predictions}, threshold)


def answer_place(context: str, start: int, end: int) -> tuple[int, int]:
    """The characters of an answer: those of its tokens, extended to whole words, without surrounding white space."""
    return without_space(context, *whole_words(context, start, end))


def references_of(examples: Sequence[QuestionExample]) -> dict[str, list[str]]:
    """The accepted answers of every question whose answers are known."""
    known = [example for example in examples if example.answers or example.impossible]
    return {example.id: [answer.text for answer in example.answers] for example in known}


def answer_tokens(example: QuestionExample, offsets: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """The first and last token of the first accepted answer; None if there is none, or no token covers it."""
    if not example.answers:
        return None
    answer = example.answers[0]
    end = answer.start + len(answer.text)
    inside = [i for i, (first, last) in enumerate(offsets) if first < end and last > answer.start and last > first]
    return (inside[0], inside[-1]) if inside else None


def most_context(chunks: Sequence[tuple[int, int]], length: int) -> Int64Array:
    """For each token, the chunk (given by start and length) that shows the most context around it.

    The rule of run_squad.py: min(left, right) + 0.01 * chunk length, the first if equal.
    """
    best, greatest = np.zeros(max(1, length), dtype=np.int64), np.full(max(1, length), -1.0)
    for row, (start, size) in enumerate(chunks):
        place = np.arange(size)
        score = np.minimum(place, size - 1 - place) + 0.01 * size
        better = score > greatest[start : start + size]
        best[start : start + size][better], greatest[start : start + size][better] = row, score[better]
    return best

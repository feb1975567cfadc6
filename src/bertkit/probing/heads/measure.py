"""What heads are scored on: a task that the model was fine-tuned on, words of a text, or retrieval of its sentences.

Michel et al. 2019, arXiv:1905.10650, section 3.1, use the loss and the score of the model's own task (`TaskScore`). A
pretrained model predicts words (`WordLoss`): a masked-LM head predicts masked words, 15% at once as in training (Devlin
et al. 2019, arXiv:1810.04805, section 3.1), a causal head predicts every next word. A sentence embedder has neither
head, and retrieves the second half of a sentence by the first (`HalfRetrieval`, not from a paper, with the loss of
Henderson et al. 2017, arXiv:1705.00652). compression/head_importance.py gates the heads.

Shapes: T packed tokens, B sequences, I examples, M predicted tokens, D width, E width of a sentence's vector, C halves
to search.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bertkit.arrays import Int64Array
from bertkit.compression.head_importance import ExampleBatch, Measure
from bertkit.data.random import Draw
from bertkit.errors import DataError
from bertkit.metrics import LOWER_IS_BETTER
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.models.scoring.rules import MaskedRule, ScoringRule
from bertkit.models.sentence import SentenceModel
from bertkit.probing.sentences import EncodedSentence, batches, packed
from bertkit.tasks.base import Task
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.training.engine import Engine

_POOL = 512
_LEAST_WORDS = 8
_SCALE = 20.0


class WordLoss(Measure):
    """A sentence's loss is the sum over its predicted tokens, in nats; the score is the mean over all of them.

    Args:
        model: with the rule's head.
        sentences: encoded sentences.
        rule: which state predicts which token. Here a masking rule masks a share of the tokens at once.
        masking_rate: share of a sentence's tokens to mask, at least one token; special tokens are never masked.
        seed: seed of this choice.

    Raises:
        DataError: no token is predicted.
    """

    metric = "loss (nats per token)"
    higher_is_better = False

    def __init__(
        self,
        model: HeadedModel,
        sentences: Sequence[EncodedSentence],
        rule: ScoringRule,
        engine: Engine,
        *,
        masking_rate: float,
        seed: int,
    ) -> None:
        super().__init__(model, engine.device)
        self.rule, self.masking_rate = rule, masking_rate
        self._draw = Draw(seed, "probe-heads")
        self.examples = len(sentences)
        self._batches = [self._batch(some) for some in batches(sentences, engine.micro_batch_tokens, pool=_POOL)]
        self.predicted = sum(batch.content[1].numel() for batch in self._batches)
        if not self.predicted:
            raise DataError(f"the {len(sentences)} sentence(s) drawn have no token to predict; give longer ones")

    def loss(self, hidden_TD: Tensor, batch: ExampleBatch) -> Tensor:
        return self._loss_sum(hidden_TD, batch).sum

    def outputs(self, hidden_TD: Tensor, batch: ExampleBatch) -> tuple[float, int]:
        found = self._loss_sum(hidden_TD, batch)
        return float(found.sum), int(found.count)

    def score(self, outputs: Sequence[tuple[float, int]]) -> float:
        return math.fsum(loss for loss, _ in outputs) / sum(count for _, count in outputs)

    def _loss_sum(self, hidden_TD: Tensor, batch: ExampleBatch) -> LossSum:
        index_M, id_M = batch.content
        return LossSum.of_words(self.model.projection(self.rule.head, hidden_TD.index_select(0, index_M)), id_M)

    def _batch(self, sentences: Sequence[EncodedSentence]) -> ExampleBatch:
        index, ids, read, offset = [], [], [], 0
        for sentence in sentences:
            place_M = self._places(sentence)
            ids.append(sentence.ids_T[place_M])
            index.append(offset + place_M - self.rule.shifted)
            ids_T = sentence.ids_T.copy()
            if isinstance(self.rule, MaskedRule):
                ids_T[place_M] = self.rule.tokenizer.mask_id
            read.append(replace(sentence, ids_T=ids_T))
            offset += ids_T.size
        index_M, id_M = (torch.from_numpy(np.concatenate(each)).to(self.device) for each in (index, ids))
        batch = packed(read, causal=self.rule.causal).to(self.device)
        return ExampleBatch(batch, torch.arange(len(sentences), device=self.device), len(sentences), (index_M, id_M))

    def _places(self, sentence: EncodedSentence) -> Int64Array:
        """The predicted tokens, never special ones: every token with one before it, or a share of all."""
        place_N = np.flatnonzero(~sentence.special_T)
        if not isinstance(self.rule, MaskedRule):
            return place_N[place_N > 0]
        key_N = self._draw.uniform("mask", sample=sentence.number, position=place_N)
        return np.sort(place_N[np.argsort(key_N, kind="stable")[: max(1, round(self.masking_rate * place_N.size))]])


class HalfRetrieval(Measure):
    """Retrieves the second half of a sentence by the first; the score is the mean reciprocal rank by cosine, ties count
    half.

    The second halves are encoded once by the model with all heads, like an index; gates apply only to the queries. An
    example's loss, the cross-entropy of its own half at 20 times the cosine, therefore depends on no other query.

    Args:
        sentence_model: the encoder, its pooling and the layers after it.
        sentences: encoded sentences.

    Raises:
        DataError: fewer than two sentences are long enough.

    Attributes:
        too_short: sentences of fewer than 8 words, which are left out.
    """

    metric = "mean reciprocal rank"
    higher_is_better = True

    def __init__(self, sentence_model: SentenceModel, sentences: Sequence[EncodedSentence], engine: Engine) -> None:
        super().__init__(sentence_model.model, engine.device)
        tokens = engine.micro_batch_tokens
        self._sentence_model = sentence_model.to(engine.device).eval().requires_grad_(False)
        kept = [sentence for sentence in sentences if len(sentence.words) >= _LEAST_WORDS]
        self.examples, self.too_short = len(kept), len(sentences) - len(kept)
        if len(kept) < 2:
            raise DataError(
                f"{len(kept)} of {len(sentences)} sentences have {_LEAST_WORDS} words or more; at least two are needed;"
                " give more text"
            )
        place_of = {sentence.number: place for place, sentence in enumerate(kept)}
        first, second = ([halves(sentence)[which] for sentence in kept] for which in (0, 1))
        self._batches = [self._batch(some, place_of) for some in batches(first, tokens, pool=_POOL)]
        vectors: dict[int, Tensor] = {}
        with torch.inference_mode():
            for some in batches(second, tokens, pool=_POOL):
                batch = self._batch(some, place_of)
                found_BE = self._vectors(self.model(batch.packed), batch)
                vectors.update(zip(batch.content.tolist(), found_BE, strict=True))
        # Outside inference mode, so that autograd can use it.
        self._index_CE = torch.stack([vectors[place] for place in range(self.examples)]).clone()

    def loss(self, hidden_TD: Tensor, batch: ExampleBatch) -> Tensor:
        return functional.cross_entropy(_SCALE * self._cosines(hidden_TD, batch), batch.content, reduction="sum")

    def outputs(self, hidden_TD: Tensor, batch: ExampleBatch) -> list[float]:
        cosine_IC = self._cosines(hidden_TD, batch)
        own_I1 = cosine_IC.gather(1, batch.content[:, None])
        above_I, equal_I = (cosine_IC > own_I1).sum(1), (cosine_IC == own_I1).sum(1) - 1
        reciprocal: list[float] = (1 / (1 + above_I.double() + equal_I / 2)).tolist()
        return reciprocal

    def score(self, outputs: Sequence[list[float]]) -> float:
        return math.fsum(rank for some in outputs for rank in some) / self.examples

    def _cosines(self, hidden_TD: Tensor, batch: ExampleBatch) -> Tensor:
        return self._vectors(hidden_TD, batch) @ self._index_CE.T

    def _vectors(self, hidden_TD: Tensor, batch: ExampleBatch) -> Tensor:
        """Sentence vectors of unit length, (I, E)."""
        return functional.normalize(self._sentence_model.vectors(hidden_TD, batch.packed), dim=-1)

    def _batch(self, sentences: Sequence[EncodedSentence], place_of: Mapping[int, int]) -> ExampleBatch:
        places = torch.tensor([place_of[sentence.number] for sentence in sentences], device=self.device)
        items = torch.arange(len(sentences), device=self.device)
        return ExampleBatch(packed(sentences).to(self.device), items, len(sentences), places)


def halves(sentence: EncodedSentence) -> tuple[EncodedSentence, EncodedSentence]:
    """The first and the second half of a sentence's words, each with the special tokens around it."""
    cut = len(sentence.words) // 2
    begin, middle, end = sentence.spans_W2[0, 0], sentence.spans_W2[cut, 0], sentence.spans_W2[-1, 1]
    size, found = sentence.ids_T.size, []
    for words, (start, stop) in ((slice(0, cut), (begin, middle)), (slice(cut, None), (middle, end))):
        kept = np.r_[0:begin, start:stop, end:size]
        word_T = sentence.word_T[kept]
        found.append(
            replace(
                sentence,
                words=sentence.words[words],
                ids_T=sentence.ids_T[kept],
                types_T=sentence.types_T[kept],
                word_T=np.where(word_T < 0, -1, word_T - (words.start or 0)),
                spans_W2=sentence.spans_W2[words] - start + begin,
            )
        )
    return found[0], found[1]


class TaskScore(Measure):
    """A task's training loss, and its metric.

    Args:
        model: with the task's head.
        task: the task, with labels in the order of the model's outputs.
        encoder: encodes its sequences.
        examples: examples with labels.
        metric: the score, a name in the result of `task.score`.
        tuned: thresholds and similar, for tasks that tune their predictions.
    """

    def __init__(
        self,
        model: HeadedModel,
        task: Task,
        encoder: SequenceEncoder,
        examples: Sequence[Any],
        engine: Engine,
        *,
        metric: str,
        tuned: dict[str, Any],
    ) -> None:
        super().__init__(model, engine.device)
        self.task, self.metric, self._given, self._tuned = task, metric, list(examples), tuned
        self.higher_is_better = metric not in LOWER_IS_BETTER
        self._features = task.encode(self._given, encoder)
        self.examples = self._features.num_examples
        self.cut = self._features.account.examples_cut
        parts = self._features.cut(np.arange(self.examples), engine.micro_batch_tokens)
        self._batches = [self._batch(items) for items in parts]

    def _batch(self, items: Int64Array) -> ExampleBatch:
        batch = self._features.batch(items).to(self.device)
        return ExampleBatch(batch.packed, batch.example_B, items.size, (items, batch))

    def loss(self, hidden_TD: Tensor, batch: ExampleBatch) -> Tensor:
        return self.task.loss(self.model, hidden_TD, batch.content[1]).sum

    def outputs(self, hidden_TD: Tensor, batch: ExampleBatch) -> Any:
        items, task_batch = batch.content
        return items, self.task.decode(self.model, hidden_TD, task_batch)

    def score(self, outputs: Sequence[Any]) -> float:
        by_item = {item: output for items, found in outputs for item, output in zip(items.tolist(), found, strict=True)}
        in_order = [by_item[item] for item in range(self.examples)]
        predictions = self.task.final(self.task.predictions(self._given, self._features, in_order), self._tuned)
        value = self.task.score(predictions, self._given)[self.metric]
        return math.nan if value is None else float(value)

"""What heads are good for: a task that the model was fine-tuned on, the words of a text, or finding its sentences.

Michel et al. 2019, arXiv:1905.10650, section 3.1, take the loss and the score of the model's own task. A fine-tuned
model has its task's (`TaskAnswers`). One that is only pretrained is asked for words (`WordsOfText`): hidden ones of a
masked-LM head, 15% at once as in training (Devlin et al. 2019, arXiv:1810.04805, section 3.1), or every next one of a
causal head. A sentence embedder has neither, and is asked to find the second half of a sentence by the first
(`HalvesFound`, our own, by the loss of Henderson et al. 2017, arXiv:1705.00652). Sibling heads.py switches heads off.

Shapes: T packed tokens, B sequences, I examples, M predicted tokens, D width, E width of a sentence's vector, C halves
that are searched.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from bertkit.compression.head_importance import Asked, Measure
from bertkit.data.batch import PackedBatch
from bertkit.data.random import Draw
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.models.pseudo_likelihood import MaskedRule, ScoringRule
from bertkit.models.sentence import SentenceModel, pool
from bertkit.probing.sentences import EncodedSentence, batches
from bertkit.tasks.base import Task
from bertkit.tasks.encoding import SequenceEncoder

Int64s = NDArray[np.int64]
_POOL = 512
_LEAST_WORDS = 8
_SCALE = 20.0


class WordsOfText(Measure):
    """A sentence's loss is the sum over its asked-for tokens, in nats; the score is the mean over all of them.

    Args:
        model: with the head that the rule asks.
        sentences: as the model reads them.
        rule: which state answers for which token. Of the rules that mask, a share is masked here, all at once.
        rate: share of a sentence's tokens that is masked, at least one; special tokens never.
        seed: of the choice.
        max_batch_tokens: tokens computed at once; decides speed and memory alone.
        device: where to compute.
    """

    metric = "loss (nats per token)"
    higher_is_better = False

    def __init__(
        self,
        model: HeadedModel,
        sentences: Sequence[EncodedSentence],
        rule: ScoringRule,
        *,
        rate: float,
        seed: int,
        max_batch_tokens: int,
        device: torch.device,
    ) -> None:
        super().__init__(model, device)
        self.rule, self.rate = rule, rate
        self._draw = Draw(seed, "probe-heads")
        self.examples = len(sentences)
        self._batches = [self._asked(some) for some in batches(sentences, max_batch_tokens, pool=_POOL)]
        self.predicted = sum(asked.content[1].numel() for asked in self._batches)

    def batches(self) -> Sequence[Asked]:
        return self._batches

    def loss(self, hidden_TD: Tensor, asked: Asked) -> Tensor:
        return self._loss_sum(hidden_TD, asked).sum

    def answers(self, hidden_TD: Tensor, asked: Asked) -> Any:
        found = self._loss_sum(hidden_TD, asked)
        return float(found.sum), found.count

    def score(self, answers: Sequence[Any]) -> float:
        tokens = sum(int(count) for _, count in answers)
        return math.fsum(float(loss) for loss, _ in answers) / tokens

    def _loss_sum(self, hidden_TD: Tensor, asked: Asked) -> LossSum:
        index_M, id_M = asked.content
        return LossSum.of_words(self.model.projection(self.rule.head, hidden_TD.index_select(0, index_M)), id_M)

    def _asked(self, sentences: Sequence[EncodedSentence]) -> Asked:
        index, ids, read, offset = [], [], [], 0
        for sentence in sentences:
            place_M = self._places(sentence)
            ids.append(sentence.ids_T[place_M])
            index.append(offset + place_M - self.rule.asks_before)
            ids_T = sentence.ids_T.copy()
            if isinstance(self.rule, MaskedRule):
                ids_T[place_M] = self.rule.tokenizer.mask_id
            read.append(replace(sentence, ids_T=ids_T))
            offset += ids_T.size
        types = [sentence.types_T.tolist() for sentence in read]
        batch = PackedBatch.from_ids([s.ids_T.tolist() for s in read], types, causal=self.rule.causal).to(self.device)
        index_M, id_M = (torch.from_numpy(np.concatenate(each)).to(self.device) for each in (index, ids))
        items = torch.arange(len(sentences), device=self.device)
        return Asked(batch, items, len(sentences), (index_M, id_M))

    def _places(self, sentence: EncodedSentence) -> Int64s:
        """Tokens asked for, none of them special: every one that another stands before, or a share of all."""
        place_N = np.flatnonzero(~sentence.special_T)
        if not isinstance(self.rule, MaskedRule):
            return place_N[place_N > 0]
        key_N = self._draw.uniform("mask", sample=sentence.number, position=place_N)
        return np.sort(place_N[np.argsort(key_N, kind="stable")[: max(1, round(self.rate * place_N.size))]])


class HalvesFound(Measure):
    """Which second half belongs to a sentence's first? The score is the mean reciprocal rank by cosine, ties halved.

    The halves that are searched are encoded once, by the model with all of its heads, as an index is; gates are on what
    asks. So an example's loss, the cross-entropy of its own half at 20 times the cosine, depends on no other example.

    Args:
        sentence_model: the encoder, its pooling and what stands behind.
        sentences: as the model reads them.
        max_batch_tokens: tokens computed at once; decides speed and memory alone.
        device: where to compute.

    Attributes:
        too_short: sentences of fewer than 8 words, which are left out.
    """

    metric = "mean reciprocal rank"
    higher_is_better = True

    def __init__(
        self,
        sentence_model: SentenceModel,
        sentences: Sequence[EncodedSentence],
        *,
        max_batch_tokens: int,
        device: torch.device,
    ) -> None:
        super().__init__(sentence_model.model, device)
        self._sentence_model = sentence_model.to(device).eval().requires_grad_(False)
        kept = [sentence for sentence in sentences if len(sentence.words) >= _LEAST_WORDS]
        self.examples, self.too_short = len(kept), len(sentences) - len(kept)
        place_of = {sentence.number: place for place, sentence in enumerate(kept)}
        first, second = ([halves(sentence)[which] for sentence in kept] for which in (0, 1))
        self._batches = [self._asked(some, place_of) for some in batches(first, max_batch_tokens, pool=_POOL)]
        vectors: dict[int, Tensor] = {}
        with torch.inference_mode():
            for some in batches(second, max_batch_tokens, pool=_POOL):
                asked = self._asked(some, place_of)
                found_BE = self._vectors(self.model(asked.packed), asked)
                vectors.update(zip(asked.content.tolist(), found_BE, strict=True))
        # Out of inference mode, so that it can stand in a graph.
        self._index_CE = torch.stack([vectors[place] for place in range(self.examples)]).clone()

    def batches(self) -> Sequence[Asked]:
        return self._batches

    def loss(self, hidden_TD: Tensor, asked: Asked) -> Tensor:
        return functional.cross_entropy(_SCALE * self._cosines(hidden_TD, asked), asked.content, reduction="sum")

    def answers(self, hidden_TD: Tensor, asked: Asked) -> Any:
        cosine_IC = self._cosines(hidden_TD, asked)
        own_I1 = cosine_IC.gather(1, asked.content[:, None])
        above_I, equal_I = (cosine_IC > own_I1).sum(1), (cosine_IC == own_I1).sum(1) - 1
        return (1 / (1 + above_I.double() + equal_I / 2)).tolist()

    def score(self, answers: Sequence[Any]) -> float:
        return math.fsum(rank for some in answers for rank in some) / self.examples

    def _cosines(self, hidden_TD: Tensor, asked: Asked) -> Tensor:
        return self._vectors(hidden_TD, asked) @ self._index_CE.T

    def _vectors(self, hidden_TD: Tensor, asked: Asked) -> Tensor:
        """Of length one, (I, E)."""
        parts = [pool(mode, hidden_TD, asked.packed) for mode in self._sentence_model.pooling]
        return functional.normalize(self._sentence_model.after_pooling(torch.cat(parts, dim=-1)), dim=-1)

    def _asked(self, sentences: Sequence[EncodedSentence], place_of: Mapping[int, int]) -> Asked:
        ids, types = ([getattr(s, name).tolist() for s in sentences] for name in ("ids_T", "types_T"))
        places = torch.tensor([place_of[sentence.number] for sentence in sentences], device=self.device)
        items = torch.arange(len(sentences), device=self.device)
        return Asked(PackedBatch.from_ids(ids, types).to(self.device), items, len(sentences), places)


def halves(sentence: EncodedSentence) -> tuple[EncodedSentence, EncodedSentence]:
    """The first half of a sentence's words and the others, each with the special tokens around."""
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


class TaskAnswers(Measure):
    """The loss that a task is learnt by, and its metric.

    Args:
        model: with the task's head.
        task: with the labels in the order of the model's outputs.
        encoder: what lays out its sequences.
        examples: with labels.
        metric: the score, a name that `task.score` gives; higher is better, as of all metrics of tasks.
        tuned: what decides on no answer, where a task needs it.
        max_batch_tokens: tokens computed at once; decides speed and memory alone.
        device: where to compute.
    """

    higher_is_better = True

    def __init__(
        self,
        model: HeadedModel,
        task: Task,
        encoder: SequenceEncoder,
        examples: Sequence[Any],
        *,
        metric: str,
        tuned: dict[str, Any],
        max_batch_tokens: int,
        device: torch.device,
    ) -> None:
        super().__init__(model, device)
        self.task, self.metric, self._given, self._tuned = task, metric, list(examples), tuned
        self._features = task.encode(self._given, encoder)
        self.examples = self._features.num_items
        self.cut = self._features.account.examples_cut
        parts = self._features.cut(np.arange(self.examples), max_batch_tokens)
        self._batches = []
        for items in parts:
            batch = self._features.batch(items).to(device)
            self._batches.append(Asked(batch.packed, batch.item_B, items.size, (items, batch)))

    def batches(self) -> Sequence[Asked]:
        return self._batches

    def loss(self, hidden_TD: Tensor, asked: Asked) -> Tensor:
        return self.task.loss(self.model, hidden_TD, asked.content[1]).sum

    def answers(self, hidden_TD: Tensor, asked: Asked) -> Any:
        items, batch = asked.content
        return items, self.task.decode(self.model, hidden_TD, batch)

    def score(self, answers: Sequence[Any]) -> float:
        outputs = {item: output for items, found in answers for item, output in zip(items.tolist(), found, strict=True)}
        in_order = [outputs[item] for item in range(self.examples)]
        predictions = self.task.final(self.task.predictions(self._given, self._features, in_order), self._tuned)
        value = self.task.score(predictions, self._given)[self.metric]
        return math.nan if value is None else float(value)

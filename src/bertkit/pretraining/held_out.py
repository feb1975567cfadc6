"""Metrics on held-out text: loss, accuracy, the unigram baseline, pseudo-perplexity.

Salazar et al. 2020, arXiv:1910.14659, section 2.3 (pseudo-perplexity: tokens masked one at a time). `perplexity` here
is the exponential of the masked-LM loss at the recipe's own masking, which is cheaper, but a different quantity.

Shapes: T packed tokens, B sequences, M predicted tokens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertkit.data.batch import PackedBatch
from bertkit.data.duplicates import repeated_tokens
from bertkit.data.samples import Samples, Targets, Vocabulary
from bertkit.data.stream import SampleStream, corrupted
from bertkit.models.headed import HeadedModel
from bertkit.objectives.base import Objective
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.pretraining.loss_terms import ObjectiveTerms
from bertkit.progress import Progress, counted, silent_progress
from bertkit.training.engine import Engine
from bertkit.training.step import evaluate

log = logging.getLogger(__name__)

_MAX_EXPONENT = 700.0
_MOST_COMPARED_TOKENS = 100_000_000
"""In a larger text, held-out documents are not looked for in the training text, which takes 8 ns per token."""
_MASKED_IN_TURN = 64
"""Maximum number of tokens per sequence that pseudo-perplexity predicts: all of 512 would take eight times as long."""


_KNOWN_SHARE = 0.01
"""From this share of held-out text that is in the training text, a warning tells of it."""
INTERVAL_PREDICTIONS = 385
"""Number of predictions for a 95% interval of an accuracy of at most +-5 points (1.96^2 / (2 * 0.05)^2).
"""


@dataclass(frozen=True)
class HeldOutSize:
    """How much text the held-out metrics are based on.

    Attributes:
        tokens: tokens held out, of which an evaluation reads `sequences` samples.
        share: share of the text that is held out.
        sequences: samples read by an evaluation.
        predictions: masked words predicted in an evaluation, or predictions of the objective that makes most of them.
        has_accuracy: whether any predictions can be right or wrong; otherwise an evaluation has only losses.
        is_part: whether an evaluation leaves out some of its samples (`engine.evaluation_sequences`).
        in_train: share of the held-out tokens in documents that occur in the training text, too; None if the text is so
            large that this was not looked for.
    """

    tokens: int
    share: float
    sequences: int
    predictions: int
    has_accuracy: bool = True
    is_part: bool = False
    in_train: float | None = None

    @property
    def interval(self) -> float:
        """Half the width of the 95% interval of an accuracy of 0.5, the widest one (normal approximation, with
        independent predictions)."""
        return 1.96 * math.sqrt(0.25 / max(1, self.predictions))

    @property
    def suffices(self) -> bool:
        """Whether the interval of an accuracy, if there is one, is narrow enough to tell models apart."""
        return self.predictions >= INTERVAL_PREDICTIONS or not self.has_accuracy

    @property
    def in_words(self) -> str:
        """How much held-out text there is, and what that means for the metrics."""
        text = f"held-out text: {self.tokens:,} tokens ({self.share:.1%} of the text)"
        if not self.has_accuracy:
            return f"{text} in {self.sequences:,} sequences"
        interval = f"{100 * self.interval:.1f} points"
        remedy = "raise engine.evaluation_sequences" if self.is_part else "give more text, or raise data.held_out"
        rest = (
            f"an accuracy has a 95% interval of at most +-{interval}"
            if self.suffices
            else f"the 95% interval of an accuracy is up to +-{interval}, too wide to tell models apart; {remedy}"
        )
        return f"{text}, {self.predictions:,} predictions in {self.sequences:,} sequences; {rest}"

    @property
    def document(self) -> dict[str, Any]:
        """For results.json."""
        return {**vars(self), "interval": self.interval}

    @classmethod
    def of(cls, document: Mapping[str, Any] | None) -> HeldOutSize | None:
        """The size recorded in results.json; None for a run that did not record it."""
        if document is None:
            return None
        return cls(**{each.name: document[each.name] for each in fields(cls) if each.name in document})

    def report(self) -> None:
        """Log how much held-out text there is, as a warning if it is too little or known from training."""
        log.log(logging.INFO if self.suffices else logging.WARNING, "%s", self.in_words)
        if self.in_train is not None and self.in_train >= _KNOWN_SHARE:
            log.warning(
                "%.1f%% of the held-out text is in documents that occur in the training text, too: its figures are"
                " better than those of new text; --set data.deduplicate=true leaves repeated documents out",
                100 * self.in_train,
            )


@dataclass(frozen=True)
class HeldOut:
    """The held-out samples of one stage, the same for every evaluation.

    Attributes:
        samples: the samples before corruption.
        batches: the corrupted samples, in micro-batches.
    """

    samples: Samples
    batches: tuple[PackedBatch, ...]

    @classmethod
    def prepare(
        cls,
        stream: SampleStream,
        vocabulary: Vocabulary,
        objectives: Sequence[Objective],
        *,
        sequences: int,
        micro_batch_tokens: int,
    ) -> HeldOut:
        """The first `sequences` samples of the held-out stream, or as many as one pass has.

        Settings that change during the run have their final values, so that the metrics of all steps are comparable:
        GPT-BERT's released code also evaluates at its final masking rate (arXiv:2410.24159, pretraining/dataset.py).
        """
        count = min(sequences, stream.epoch_length(0))
        samples = stream.samples(0, count, vocabulary)
        masked = corrupted(samples, objectives, vocabulary, stream.spec.draw, progress=1.0)
        batches = tuple(PackedBatch.from_samples(part) for part in masked.split(micro_batch_tokens))
        return cls(samples, batches)

    def figures(
        self,
        model: HeadedModel,
        terms: ObjectiveTerms,
        engine: Engine,
        *,
        progress: Progress = silent_progress,
    ) -> dict[str, Any]:
        """Loss, and per term: loss, accuracy and the objective's other metrics, with perplexities where defined.

        `baseline/TERM` of a classification of sequences is the accuracy of always predicting the most frequent class.
        """
        batches = counted(self.batches, progress, "held-out text", unit="batches")
        with terms.without_carried_state():
            totals = evaluate(model, terms, batches, engine)
        figures: dict[str, Any] = {"loss": terms.total(totals)}
        for term, total in totals.items():
            figures[f"loss/{term}"] = total.mean
            if terms.has_accuracy(term):
                figures[f"accuracy/{term}"] = total.accuracy
        for objective in terms.objectives:
            total = totals[objective.term]
            figures |= objective.figures(total.counters, total.count)
            if objective.target == "class":
                label_B = torch.cat([batch.labels[objective.term] for batch in self.batches])
                figures[f"baseline/{objective.term}"] = int(label_B.bincount().max()) / len(label_B)
        for objective in terms.objectives:
            if not totals[objective.term].count:  # without predictions there is no perplexity
                continue
            perplexity = math.exp(min(totals[objective.term].mean, _MAX_EXPONENT))
            if objective.fills_masks:
                figures["perplexity"] = perplexity
            if objective.has_perplexity:
                figures[f"perplexity/{objective.term}"] = perplexity
        return figures

    def size(
        self,
        stream: SampleStream,
        training: SampleStream,
        objectives: Sequence[Objective],
        *,
        cache: Path | None = None,
    ) -> HeldOutSize:
        """How much held-out text there is.

        Args:
            stream: the stream from which it was prepared.
            training: of the training samples.
            objectives: of the stage; predictions are those of masked words, or of the objective that makes most.
            cache: where the documents' hashes are kept, if they are.
        """
        in_train = None
        if stream.shards.tokens <= _MOST_COMPARED_TOKENS:
            known = repeated_tokens(stream.shards, training.documents_N2, stream.documents_N2, cache)
            in_train = known / max(1, stream.tokens)
        filling = [each.term for each in objectives if each.fills_masks]
        terms = filling[:1] or {term for batch in self.batches for term in batch.targets}
        counts = (sum(len(batch.targets[term].id_M) for batch in self.batches) for term in terms)
        return HeldOutSize(
            tokens=stream.tokens,
            share=stream.tokens / stream.shards.tokens,
            sequences=sum(batch.num_sequences for batch in self.batches),
            predictions=max(counts, default=sum(batch.num_sequences for batch in self.batches)),
            has_accuracy=any(each.has_accuracy for each in objectives),
            is_part=len(self.samples.lengths_B) < stream.epoch_length(0),
            in_train=in_train,
        )

    def unigram_accuracy(self, term: str, token_counts_V: np.ndarray[Any, np.dtype[np.int64]]) -> float | None:
        """Accuracy of always predicting the most frequent token of the corpus, on an objective's targets; None if it
        has none, as when all samples are causal."""
        target_id_M = torch.cat([batch.targets[term].id_M for batch in self.batches])
        if not target_id_M.numel():
            return None
        return float((target_id_M == int(token_counts_V.argmax())).double().mean())

    def pseudo_perplexity(
        self,
        model: HeadedModel,
        vocabulary: Vocabulary,
        engine: Engine,
        *,
        sequences: int,
        progress: Progress = silent_progress,
    ) -> float:
        """exp of the mean negative log-likelihood of ordinary tokens, each masked on its own.

        In a long sequence, 64 evenly spaced tokens are predicted.
        """
        total, count = 0.0, 0
        terms = ObjectiveTerms([MaskedLM()])
        some = list(self.samples.split(1))[:sequences]
        for one in counted(some, progress, "pseudo-perplexity", unit="sequences"):
            copies = _each_token_masked(one, vocabulary)
            batches = [PackedBatch.from_samples(part) for part in copies.split(engine.micro_batch_tokens)]
            term = evaluate(model, terms, batches, engine)[MaskedLM.term]
            total, count = total + term.sum, count + term.count
        return math.exp(min(total / max(1, count), _MAX_EXPONENT))


def _each_token_masked(one: Samples, vocabulary: Vocabulary) -> Samples:
    """One copy of the sequence for each (or some) of its ordinary tokens, with that token masked."""
    position_M = np.flatnonzero(~one.special_T)
    if position_M.size > _MASKED_IN_TURN:
        position_M = position_M[np.arange(_MASKED_IN_TURN) * position_M.size // _MASKED_IN_TURN]
    length, copies = one.ids_T.size, position_M.size
    target_index_M = np.arange(copies) * length + position_M
    ids_T = np.tile(one.ids_T, copies)
    ids_T[target_index_M] = vocabulary.mask_id
    return Samples(
        ids_T=ids_T,
        token_types_T=np.tile(one.token_types_T, copies),
        special_T=np.tile(one.special_T, copies),
        cu_seqlens_B1=np.arange(copies + 1) * length,
        epoch_B=np.repeat(one.epoch_B, copies),
        sample_B=np.repeat(one.sample_B, copies),
        targets={MaskedLM.term: Targets(target_index_M, one.ids_T[position_M])},
    )

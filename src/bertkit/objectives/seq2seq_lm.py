"""Sequence to sequence: predict each token of a target from its source and the target's tokens before it.

Vaswani et al. 2017, arXiv:1706.03762, section 5.4, with the label smoothing of Szegedy et al. 2016, arXiv:1512.00567,
section 7: a share of the target's probability is spread evenly over all words. Sibling causal_lm.py has no source.

Quirk left: tensor2tensor spreads that share over the words other than the target, a factor of V / (V - 1).

Shapes: T packed tokens, B sequences, S tokens of a text, M predicted tokens, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from pydantic import Field
from torch import Tensor

from bertkit.arrays import Int64Array
from bertkit.data.batch import PackedBatch
from bertkit.data.config import DataConfig
from bertkit.data.layouts import DocSentences, ParallelText
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Targets, Vocabulary
from bertkit.models.encoder import EncoderConfig
from bertkit.models.encoder_decoder import SEQ2SEQ
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.objectives.base import Objective, TokenPrediction
from bertkit.objectives.capitalisation import Capitalisation
from bertkit.objectives.token_document import TokenDocument


@dataclass(frozen=True)
class Sides:
    """A source and a target without their special tokens.

    Attributes:
        source, target: ids.
        target_places: position in the corpus of each of the target's tokens; -1 if it has none.
    """

    source: Int64Array
    target: Int64Array
    target_places: Int64Array


class TargetPrediction(TokenPrediction):
    """An objective of a decoder: each token of the target except its first is predicted from the state before it."""

    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Label smoothing in training: share of a target's probability that is spread evenly over all"
        " words; the Transformer's is 0.1.",
    )

    has_perplexity: ClassVar[bool] = True

    @property
    def heads(self) -> tuple[str, ...]:
        return (SEQ2SEQ,)

    def errors(self, data: DataConfig, model: EncoderConfig) -> list[str]:
        if not model.is_encoder_decoder:
            return [
                f"objective.{self.term} needs an encoder-decoder, which model.family {model.model_type!r} is not; set"
                " model.family: transformer"
            ]
        return []

    def paired(self, samples: Samples, vocabulary: Vocabulary, sides: Sequence[Sides]) -> Samples:
        """Pairs in place of the texts of these samples, with special tokens around each side and targets marked."""
        cls_id, sep_id, outside = [vocabulary.cls_id], [vocabulary.sep_id], [-1]
        ids_T = np.concatenate(
            [part for each in sides for part in (cls_id, each.source, sep_id, cls_id, each.target, sep_id)]
        ).astype(np.int64)
        source_T = np.concatenate(
            [part for each in sides for part in ([-1] * (each.source.size + 3), each.target_places, outside)]
        ).astype(np.int64)
        decoder_start_B = np.array([each.source.size + 2 for each in sides])
        lengths_B = np.array([each.source.size + each.target.size + 4 for each in sides])
        cu_seqlens_B1 = np.concatenate([[0], np.cumsum(lengths_B)])
        special_T = np.zeros(ids_T.size, dtype=np.bool_)
        for first_B in (cu_seqlens_B1[:-1], cu_seqlens_B1[:-1] + decoder_start_B):
            special_T[first_B] = True
            special_T[first_B - 1] = True
        return self.with_decoder_targets(
            samples.with_changes(
                ids_T=ids_T,
                token_types_T=np.zeros_like(ids_T),
                special_T=special_T,
                cu_seqlens_B1=cu_seqlens_B1,
                source_T=source_T,
                decoder_start_B=decoder_start_B,
                spans_T=None,
            )
        )

    def with_decoder_targets(self, samples: Samples) -> Samples:
        """The samples with the targets on the decoder's side marked."""
        assert samples.decoder_start_B is not None
        index_M = np.flatnonzero(samples.position_T > samples.decoder_start_B[samples.sequence_T])
        return samples.with_targets(self.term, Targets(index_M - 1, samples.ids_T[index_M]))

    def loss(self, model: HeadedModel, hidden_TD: Tensor, batch: PackedBatch) -> LossSum:
        """Summed cross-entropy of the targets, in nats; in training against their smoothed distributions."""
        targets = batch.targets[self.term]
        projection = model.projection(SEQ2SEQ, hidden_TD.index_select(0, targets.index_M))
        z_loss, smoothing = (self.z_loss, self.label_smoothing) if model.training else (0.0, 0.0)
        return LossSum.of_words(projection, targets.id_M, z_loss=z_loss, label_smoothing=smoothing)


class DocumentRecovery(TargetPrediction):
    """An objective that recovers what was removed from a source, which is made from the text of one document."""

    def errors(self, data: DataConfig, model: EncoderConfig) -> list[str]:
        found = super().errors(data, model)
        if not isinstance(data.layout, DocSentences):
            found.append(
                f"objective.{self.term} needs the text of one document, but data.layout {data.layout.choice} gives"
                " other samples; set data.layout: {name: doc-sentences}"
            )
        return found

    def combination_errors(self, objectives: Sequence[Objective]) -> list[str]:
        others = [each for each in objectives if isinstance(each, DocumentRecovery | Capitalisation | TokenDocument)]
        return [
            f"objective.{self.term} turns each text into a source and a target, which objective.{each.term} cannot"
            " read; leave one of the two out"
            for each in others
            if each.term != self.term
        ]

    @abstractmethod
    def sides(
        self, ids_S: Int64Array, place_S: Int64Array, vocabulary: Vocabulary, draw: Draw, at: dict[str, Any]
    ) -> Sides:
        """The source and the target of one text.

        Args:
            ids_S: the text without its special tokens.
            place_S: position in the corpus of each token.
            vocabulary: of the tokenizer.
            draw: of the run.
            at: the sample's address.
        """

    def corrupt(self, samples: Samples, vocabulary: Vocabulary, draw: Draw) -> Samples:
        """Each sample as a source and a target."""
        assert samples.source_T is not None, "layouts tell where tokens stand"
        bounds, sides = samples.cu_seqlens_B1, []
        for row in range(samples.lengths_B.size):
            text = slice(bounds[row] + 1, bounds[row + 1] - 1)
            at = {"epoch": samples.epoch_B[row], "sample": samples.sample_B[row]}
            sides.append(self.sides(samples.ids_T[text], samples.source_T[text], vocabulary, draw, at))
        return self.paired(samples, vocabulary, sides)


class Seq2SeqLM(TargetPrediction):
    """Predict the target of each pair of parallel text."""

    term: ClassVar[str] = "seq2seq_lm"
    is_random: ClassVar[bool] = False

    def errors(self, data: DataConfig, model: EncoderConfig) -> list[str]:
        found = super().errors(data, model)
        if not isinstance(data.layout, ParallelText):
            found.append(
                f"objective.{self.term} needs pairs of source and target, but data.layout {data.layout.choice} has"
                " none; set data.layout: {name: parallel}"
            )
        return found

    def corrupt(self, samples: Samples, vocabulary: Vocabulary, draw: Draw) -> Samples:
        return self.with_decoder_targets(samples)

    def expected_count(self, length: int) -> float:
        """Half of the sample is the target."""
        return max(1.0, length / 2 - 1)

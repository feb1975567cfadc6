"""Causal language modelling: predict each token from those before it, in all or a share of the sequences.

Radford et al. 2018, GPT (no arXiv id), section 3.1, for all sequences; Devlin et al. 2019, BERT, arXiv:1810.04805,
section 5.1, for the left-to-right ablation; Charpentier and Samuel 2024, GPT-BERT, arXiv:2410.24159, section 2, for a
share of them along with the masked LM. Sibling of masked_lm.py, which does not change causal sequences.

Quirk left: GPT-BERT assigns the two kinds to ranks, so the mixture depends on the number of processes; here the kind is
drawn per sample, and the mixture is the same for any number of workers and ranks.

Shapes: T packed tokens, B sequences, M predicted tokens, V vocabulary, D width.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from bertkit.data.config import DataConfig
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Targets, Vocabulary
from bertkit.models.encoder import EncoderConfig
from bertkit.objectives.base import TokenPrediction


class CausalLM(TokenPrediction):
    """Predict every token of a causal sequence except the first, separators included, from the state before it."""

    share: float = Field(1.0, gt=0, le=1, description="Share of the sequences that are read only from left to right.")
    head: Literal["masked_lm", "causal_lm"] = Field(
        "masked_lm",
        description="Head that predicts: the masked-LM head, shared with that objective, or a causal family's own.",
    )

    term: ClassVar[str] = "causal_lm"
    rank: ClassVar[int] = -1
    has_perplexity: ClassVar[bool] = True

    @property
    def draws(self) -> bool:
        return self.share < 1

    @property
    def leaves_no_tokens(self) -> bool:
        return self.share == 1

    @property
    def heads(self) -> tuple[str, ...]:
        return (self.head,)

    @property
    def scoring_rule(self) -> str | None:
        """Left to right with an encoder's head; a causal family's own head needs no rule."""
        return "encoder_left_to_right" if self.head == "masked_lm" else None

    def errors(self, data: DataConfig, model: EncoderConfig) -> list[str]:
        if not model.causal_attention:
            return [
                f"objective.causal_lm cannot train model.family {model.model_type!r}, which has no causal attention;"
                " use another family, such as bert"
            ]
        if self.head not in model.all_heads():
            other = "causal_lm" if self.head == "masked_lm" else "masked_lm"
            return [f"objective.causal_lm.head: model.family {model.model_type!r} has no head {self.head}; set {other}"]
        return []

    def corrupt(self, samples: Samples, vocabulary: Vocabulary, draw: Draw) -> Samples:
        """Choose the causal sequences and mark the next token as the target of each of their states."""
        uniform_B = draw.uniform("causal/choose", epoch=samples.epoch_B, sample=samples.sample_B)
        causal_B = uniform_B < self.share
        predicted_T = causal_B[samples.sequence_T] & (samples.position_T > 0)
        index_M = np.flatnonzero(predicted_T)
        return samples.with_targets(self.term, Targets(index_M - 1, samples.ids_T[index_M]), causal_B=causal_B)

    def expected_count(self, length: int) -> float:
        return self.share * (length - 1)

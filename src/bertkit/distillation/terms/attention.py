"""Where the layers look: the term that compares attention maps.

TinyBERT (Jiao et al. 2019, arXiv:1909.10351, equation 7: scores) and MobileBERT (Sun et al. 2020, arXiv:2004.02984,
equation 3: probabilities). Padding has no cell, so it changes nothing; with scores every pair of tokens is a row, with
probabilities every query.

Shapes: B sequences, N heads, S longest sequence.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.distillation.losses import cells_of, pattern_divergence, score_squared_error
from bertkit.distillation.terms.base import Activations, ActivationSpec, LinearMaps, Sizes, Term, over_layers
from bertkit.errors import UsageError
from bertkit.models.layer_choice import MapName, Pairs, layer_map
from bertkit.models.loss_sum import LossSum


class Attention(Term):
    """The teacher's attention maps, head by head, added up over the pairs of layers."""

    term: ClassVar[str] = "attention"

    of: Literal["scores", "probabilities"] = Field(
        "scores", description="Squared error of the scores before the softmax, or KL of the probabilities behind it."
    )
    layers: MapName | tuple[tuple[int, int], ...] = Field(
        "uniform",
        description="Which of the student's layers learns from which of the teacher's: a name, or pairs counted from"
        " 1.",
    )

    def pairs(self, sizes: Sizes) -> Pairs:
        """The layers that are compared.

        Raises:
            UsageError: one of them is the embeddings, which attend to nothing.
        """
        found = layer_map(self.layers, student=sizes.student.layers, teacher=sizes.teacher.layers)
        if any(0 in pair for pair in found):
            raise UsageError(f"attention.layers: {self.layers}: layer 0 is the embeddings; attention begins with 1")
        return found

    def wants(self, sizes: Sizes) -> tuple[ActivationSpec, ActivationSpec]:
        heads = sizes.student.heads, sizes.teacher.heads
        if heads[0] != heads[1] or not heads[0]:
            raise UsageError(
                f"attention: the student has {heads[0]} heads a layer, the teacher {heads[1]}; maps are compared head"
                " by head: take a student with as many, or leave the term out"
            )
        pairs = self.pairs(sizes)
        return ActivationSpec(scores=frozenset(m for m, _ in pairs)), ActivationSpec(
            scores=frozenset(n for _, n in pairs)
        )

    def count(self, batch: PackedBatch, rows: int) -> int:
        if self.of == "probabilities":
            return batch.num_tokens
        return int((batch.sequences.cu_seqlens_B1.diff().long() ** 2).sum())

    def loss(self, student: Activations, teacher: Activations, sizes: Sizes, maps: LinearMaps) -> LossSum:
        lengths_B = student.lengths_B
        cell_BSS = cells_of(lengths_B, student.batch.sequences.max_length)

        def of_pair(m: int, n: int) -> Tensor:
            if self.of == "scores":
                return score_squared_error(student.scores[m], teacher.scores[n], cell_BSS)
            return pattern_divergence(student.scores[m], teacher.scores[n], lengths_B)

        return over_layers(of_pair, self.pairs(sizes))

    def table(self, sizes: Sizes) -> Pairs:
        return self.pairs(sizes)

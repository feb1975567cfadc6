"""The term that compares attention maps.

TinyBERT (Jiao et al. 2019, arXiv:1909.10351, equation 7: scores) and MobileBERT (Sun et al. 2020, arXiv:2004.02984,
equation 3: probabilities). Padding has no cells, so it changes nothing; keys that either model does not attend to, such
as later tokens in a causal model, are not compared. A row is a pair of tokens for scores, and a query for
probabilities.

Shapes: B sequences, N heads, S longest sequence.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.distillation.activations import ActivationSpec, AttentionMap
from bertkit.distillation.losses import cells_of, pattern_divergence, score_squared_error
from bertkit.distillation.terms.base import DistillationTerm, OutputPair, ShapePair
from bertkit.errors import UsageError
from bertkit.models.conversion.layer_choice import MapName, Pairs
from bertkit.models.loss_sum import LossSum


class Attention(DistillationTerm):
    """The teacher's attention maps, compared head by head and summed over the pairs of layers."""

    term: ClassVar[str] = "attention"

    of: Literal["scores", "probabilities"] = Field(
        "scores",
        description="scores: squared error of the scores before the softmax; probabilities: KL divergence of the"
        " probabilities after it.",
    )
    layers: MapName | tuple[tuple[int, int], ...] = Field(
        "uniform",
        description="Pairs of the student's and the teacher's layers to compare: a name, or pairs counted from 1.",
    )

    def specs(self, shapes: ShapePair) -> tuple[ActivationSpec, ActivationSpec]:
        heads, pruned = shapes.heads, bool(shapes.student.pruned or shapes.teacher.pruned)
        if not all(heads) or (heads[0] != heads[1] and not pruned):
            raise UsageError(
                f"attention: the student has {heads[0]} heads per layer, the teacher {heads[1]}, but maps are compared"
                " head by head; use a student with as many heads, or leave the term out"
            )
        pairs = self.layer_pairs(shapes)
        for layer, taught_by in pairs:
            heads = shapes.student.heads_in(layer), shapes.teacher.heads_in(taught_by)
            if heads[0] != heads[1]:
                raise UsageError(
                    f"attention: heads were pruned: the student's layer {layer} has {heads[0]}, the teacher's layer"
                    f" {taught_by} has {heads[1]}, but maps are compared head by head; choose other layers, use the"
                    " unpruned model, or leave the term out"
                )
        students, teachers = map(frozenset, zip(*pairs, strict=True))
        return ActivationSpec(scores=students), ActivationSpec(scores=teachers)

    def count(self, batch: PackedBatch, rows: int) -> int:
        if self.of == "probabilities":
            return batch.num_tokens
        return int((batch.sequences.cu_seqlens_B1.diff().long() ** 2).sum())

    def loss(self, pair: OutputPair) -> LossSum:
        cell_BSS = cells_of(pair.student.lengths_B, pair.student.batch.sequences.max_length)
        compare = score_squared_error if self.of == "scores" else pattern_divergence

        def rows(layer: int, own: AttentionMap, given: AttentionMap) -> Tensor:
            return compare(own.scores_BNSS, given.scores_BNSS, cell_BSS, own.seen_BSS & given.seen_BSS)

        return pair.over_layers(lambda recorded: recorded.maps, rows, self.layer_pairs(pair.shapes))

    def layer_pairs(self, shapes: ShapePair) -> Pairs:
        found = shapes.layer_pairs(self.layers, term=self.term)
        if any(0 in pair for pair in found):
            raise UsageError(f"attention.layers: {self.layers}: layer 0 is the embeddings; start from layer 1")
        return found

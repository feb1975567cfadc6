"""Masked and permuted language modelling: predict masked tokens in a random order, each from the text's other tokens,
the masked ones before it in that order, and the positions of those after it.

Song et al. 2020, MPNet, arXiv:2004.09297, section 2.2 (position compensation); streams and visibility as in
`make_query_and_content_mask` of the released masked_permutation_net.py. Sibling masked_lm.py chooses and replaces the
tokens; its targets do not see one another. Sibling permutation_lm.py does not tell the model that later targets exist.

The two streams have the same weights, so a sample is one sequence: the text, then a mask and a query for each target,
at the target's position. An order keeps apart what each token sees (`Samples.order_T4`):

    token                  attends to
    not predicted; mask    tokens that are not predicted, and all masks
    predicted, number i    tokens that are not predicted, predicted ones up to i, masks after i
    query, number i        tokens that are not predicted, predicted ones before i, masks from i on

Quirks left: the released code can also predict <s> and </s>, counts targets by the longest sequence of a batch, draws
no special token at random, and can add the loss of the masked LM at the masks (`--return-mlm`, off by default).

Shapes: T packed tokens before and U after the change, B sequences, M predicted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from bertkit.data.config import DataConfig
from bertkit.data.layouts import LaneLayout
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Targets, Vocabulary
from bertkit.data.shards import TokenShards
from bertkit.errors import UsageError
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.mpnet import PAD_ID
from bertkit.objectives.base import Objective
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.text.tokenizer import Tokenizer

_ALWAYS = np.iinfo(np.int64).max
"""A rank above all others."""


class MaskedPermutedLM(MaskedLM):
    """The masked LM's corruption and head; targets are predicted in a random order from all positions."""

    term: ClassVar[str] = "masked_permuted_lm"
    in_place: ClassVar[bool] = False
    learnt_by: ClassVar[str | None] = None

    def errors(self, data: DataConfig, model: EncoderConfig) -> list[str]:
        found = super().errors(data, model)
        if not model.reads_order:
            found.append(
                f"objective.{self.term}: model.family {model.model_type!r} does not read an order of its tokens; set"
                " model.family: mpnet"
            )
        if isinstance(data.layout, LaneLayout):
            found.append(
                f"objective.{self.term} makes samples longer, but those of data.layout {data.layout.choice} continue"
                " one another; use another layout, such as full-sentences"
            )
        return found

    def combination_errors(self, objectives: Sequence[Objective]) -> list[str]:
        return [
            f"objective.{each.term} needs ordinary samples, but those of objective.{self.term} contain each predicted"
            " token three times; leave one of the two out"
            for each in objectives
            if each.term != self.term
        ]

    def prepared(self, tokenizer: Tokenizer, shards: TokenShards) -> Self:
        prepared = super().prepared(tokenizer, shards)
        if tokenizer.pad_id != PAD_ID:
            raise UsageError(
                f"objective.{self.term}: the padding's id is {tokenizer.pad_id} in this vocabulary, but MPNet and its"
                f" class in transformers take token {PAD_ID} for padding; set tokenizer.pad_id: {PAD_ID}, or use an"
                " MPNet tokenizer"
            )
        return prepared

    def sample_tokens(self, length: int) -> float:
        """The text, and a mask and a query for each target."""
        return length + 2 * self.expected_count(length)

    def corrupt(self, samples: Samples, vocabulary: Vocabulary, draw: Draw) -> Samples:
        """Choose and replace the targets, draw their order, and append a mask and a query for each to its text."""
        masked = super().corrupt(samples, vocabulary, draw)
        targets = masked.targets[self.term]
        index_M = targets.index_M
        sequence_M = samples.sequence_T[index_M]
        count_B = np.bincount(sequence_M, minlength=samples.lengths_B.size)
        number_M = np.arange(index_M.size) - (np.cumsum(count_B) - count_B)[sequence_M]
        order_M = np.empty_like(index_M)
        order_M[np.lexsort((samples.uniform_T(draw, "permutation/order")[index_M], sequence_M))] = number_M

        cu_seqlens_B1 = np.concatenate([[0], np.cumsum(samples.lengths_B + 2 * count_B)])
        mask_M = (cu_seqlens_B1[:-1] + samples.lengths_B)[sequence_M] + number_M
        query_M = mask_M + count_B[sequence_M]
        text_T = cu_seqlens_B1[samples.sequence_T] + samples.position_T
        arranged_U = np.argsort(np.concatenate([text_T, mask_M, query_M]))

        def arranged(text_T: NDArray[Any], mask_M: NDArray[Any], query_M: NDArray[Any]) -> NDArray[Any]:
            return np.concatenate([text_T, mask_M, query_M])[arranged_U]

        rank_T = np.zeros_like(samples.ids_T)
        rank_T[index_M] = order_M + 1
        always_T, none_M, every_M = np.full_like(rank_T, _ALWAYS), np.zeros_like(order_M), np.ones_like(order_M)
        order = (
            arranged(samples.position_T, samples.position_T[index_M], samples.position_T[index_M]),
            arranged(rank_T, none_M, order_M),
            arranged(rank_T, none_M, none_M),
            arranged(always_T, order_M + 1, none_M),
        )
        kinds_T, replaced_M = samples.token_types_T, masked.ids_T[index_M]
        return samples.with_targets(
            self.term,
            Targets(query_M, targets.id_M),
            ids_T=arranged(samples.ids_T, replaced_M, replaced_M),
            token_types_T=arranged(kinds_T, kinds_T[index_M], kinds_T[index_M]),
            special_T=arranged(samples.special_T, every_M > 0, every_M > 0),
            cu_seqlens_B1=cu_seqlens_B1,
            source_T=None,
            spans_T=None,
            order_T4=np.stack(order, axis=1),
        )

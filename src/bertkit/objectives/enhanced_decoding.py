"""Enhanced decoding: reconstruct a text from the state of its first token, with little help from its own tokens.

Xiao et al. 2022, RetroMAE, arXiv:2205.12035, sections 3.2 and 3.3; as in data.py and modeling.py of staoxiao/RetroMAE.
The encoder reads the text with the masks of the masked LM, which is trained at the same time. A decoder of one layer
(models/enhanced_decoder.py) predicts every token of the text from the state of the first token and from the text's own
tokens, more of which are hidden, and others for each prediction. The first token's state must therefore represent the
whole text, as an embedder's does. Siblings: masked_lm.py; two_tower_cloze.py, which also predicts every token.

Quirks honoured: every token but the special ones is predicted, whether the encoder read it or a mask; a text has one
decoder mask per token, at most 256, and each prediction uses one of these at random, in addition hiding its own token;
special tokens are never hidden; the head is the masked LM's.
Quirks left: in the released code, the means are those of each process's micro-batch.

The decoders of DupMAE (Xiao et al. 2022, arXiv:2211.08769) and of BGE (FlagOpen/FlagEmbedding, research/old-examples)
read queries that went through the embeddings' norm: `query: normed`. DupMAE's second loss is bag_of_words.py.

Shapes: T packed tokens, B sequences, M predicted tokens, D width, C bytes with one bit for each mask; R masks of all
sequences, U tokens of R copies.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from bertkit.arrays import Int64Array
from bertkit.data.batch import PackedBatch
from bertkit.data.config import DataConfig
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Targets, Vocabulary
from bertkit.data.shards import TokenShards
from bertkit.models.encoder import EncoderConfig
from bertkit.models.enhanced_decoder import EnhancedDecoder, HiddenKeys
from bertkit.models.families.bert import NormedEmbeddings, segment_types
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.models.recorder import Scope
from bertkit.models.selective_encoder import LayeredEncoder
from bertkit.objectives.base import States
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.masking import Tokens, Words
from bertkit.objectives.masking.base import spread
from bertkit.objectives.schedule import Rate, rate_at
from bertkit.objectives.unmasked_text import UnmaskedText
from bertkit.text.tokenizer import Tokenizer

MASKS = 256
"""The largest number of different masks of a text."""

_TOKENS_AT_ONCE = 1024
"""Tokens of the texts for which all masks are drawn at a time: each is copied up to 256 times."""


class EnhancedDecoding(UnmaskedText):
    """Predict every token of the text by a decoder of one layer that reads the first token's state."""

    rate: Rate = Field(
        0.5, description="Share of a sequence's tokens that is hidden from each of the decoder's predictions."
    )
    units: Annotated[Tokens | Words, Field(discriminator="name")] = Field(
        default_factory=Words, description="Which tokens are hidden together: whole words, or single tokens (pieces)."
    )

    query: Literal["plain", "normed"] = Field(
        "plain",
        description="The decoder's queries. plain: the first token's state plus the position's embedding (RetroMAE);"
        " normed: these plus the segment's embedding, through the embeddings' norm and dropout (DupMAE, BGE).",
    )

    term: ClassVar[str] = "enhanced_decoding"
    states: ClassVar[States] = "targets"

    @property
    def heads(self) -> tuple[str, ...]:
        return (self.term, MaskedLM.term)

    def errors(self, data: DataConfig, model: EncoderConfig) -> list[str]:
        found = [f"objective.{self.term}.{each}" for each in self.units.errors(data)]
        if self.term not in model.all_heads():
            found.append(
                f"objective.{self.term} decodes with a layer of BERT and its position embeddings, which model.family"
                f" {model.model_type!r} does not have; use another family, such as bert or roberta"
            )
        return found

    def prepared(self, tokenizer: Tokenizer, shards: TokenShards) -> Self:
        return self.model_copy(update={"units": self.units.prepared(tokenizer, shards)})

    def corrupt(self, samples: Samples, vocabulary: Vocabulary, draw: Draw) -> Samples:
        """Mark all tokens as targets, with `columns` `hidden`, (M, C), the masks that hide the token, and `mask`, the
        number of the mask of its prediction; no token changes.

        Raises:
            UsageError: if no masked LM has chosen tokens.
        """
        text = self.unmasked(samples)
        # The decoder reads the state of the first token in place of the token, even if it is one of the text.
        index_M = np.flatnonzero(~samples.fixed_T & (samples.position_T > 0))
        mask_T = samples.uniform_T(draw, "decode/mask") * np.minimum(samples.lengths_B, MASKS)[samples.sequence_T]
        hidden_TC = np.concatenate([self._hidden(part, vocabulary, draw) for part in text.split(_TOKENS_AT_ONCE)])
        columns = {"hidden": hidden_TC[index_M], "mask": mask_T[index_M].astype(np.int64)}
        return samples.with_targets(self.term, Targets(index_M, text.ids_T[index_M], columns=columns))

    def _hidden(self, text: Samples, vocabulary: Vocabulary, draw: Draw) -> NDArray[np.uint8]:
        """The masks that hide each token, (T, C): bit k of its bytes, the lowest first, is mask k's."""
        copies, token_U, number_R = _copies(text, np.minimum(text.lengths_B, MASKS))
        ordinary_R = np.bincount(copies.sequence_T[~copies.fixed_T], minlength=copies.lengths_B.size)
        counts_R = np.minimum(self.units.counts_B(rate_at(self.rate, 0), copies.lengths_B, ordinary_R), ordinary_R)
        own_draw = Draw(draw.seed, f"{draw.scope}/decode")
        index_M = self.units.choose(copies, vocabulary, counts_R, own_draw).index_M
        hidden_TK = np.zeros((text.ids_T.size, MASKS), dtype=np.bool_)
        hidden_TK[token_U[index_M], number_R[copies.sequence_T[index_M]]] = True
        return np.packbits(hidden_TK, axis=1, bitorder="little")

    def expected_count(self, length: int) -> float:
        """All tokens but [CLS] and [SEP]."""
        return max(0.0, length - 2.0)

    def reads(self, model: HeadedModel, batch: PackedBatch) -> Tensor | None:
        return batch.first_token_B

    def expected_reads(self, model: HeadedModel, predictions: float) -> float | None:
        return 1.0

    def loss(self, model: HeadedModel, hidden_TD: Tensor, batch: PackedBatch) -> LossSum:
        """Summed cross-entropy of the text's tokens, in nats."""
        targets = batch.targets[self.term]
        index_M, hidden_MC, mask_M = targets.index_M, targets.columns["hidden"], targets.columns["mask"]
        decoder, encoder = model.get_submodule(self.term), model.encoder
        assert isinstance(decoder, EnhancedDecoder)
        assert isinstance(encoder, LayeredEncoder)
        text = replace(batch, ids_T=batch.ids_T.index_copy(0, index_M, targets.id_M))
        hidden_TC = hidden_MC.new_zeros(batch.num_tokens, hidden_MC.shape[1]).index_copy(0, index_M, hidden_MC)
        mask_T = mask_M.new_zeros(batch.num_tokens).index_copy(0, index_M, mask_M)
        vectors_BD = hidden_TD.index_select(0, batch.first_token_B)
        states_MD = decoder.decode(
            vectors_BD,
            self._query(encoder, vectors_BD, text),
            encoder.embed(text, Scope(None, "")),
            batch.sequences,
            HiddenKeys(batch.sequences, hidden_TC, mask_T),
            index_M,
        )
        return LossSum.of_words(model.projection(MaskedLM.term, states_MD), targets.id_M)

    def _query(self, encoder: LayeredEncoder, vectors_BD: Tensor, text: PackedBatch) -> Tensor:
        """The decoder's query at each token, (T, D)."""
        embeddings = encoder.embeddings
        assert isinstance(embeddings, NormedEmbeddings)
        lengths_B = text.sequences.cu_seqlens_B1.diff().long()
        text_T = torch.repeat_interleave(lengths_B, output_size=text.num_tokens)
        query_TD: Tensor = embeddings.position(embeddings.positions_T(text)) + vectors_BD.index_select(0, text_T)
        if self.query == "plain":
            return query_TD
        return encoder.dropout(
            embeddings.norm(query_TD + embeddings.token_type(segment_types(text, embeddings.token_type)))
        )


def _copies(text: Samples, copies_B: Int64Array) -> tuple[Samples, Int64Array, Int64Array]:
    """As many copies of each sequence, whose addresses differ by their epochs; each copied token's position in T, (U,);
    and each copy's number, (R,)."""
    number_R, sequence_R = spread(np.zeros_like(copies_B), copies_B)
    lengths_R = text.lengths_B[sequence_R]
    token_U, _ = spread(text.cu_seqlens_B1[sequence_R], lengths_R)
    copies = Samples(
        ids_T=text.ids_T[token_U],
        token_types_T=text.token_types_T[token_U],
        special_T=text.special_T[token_U],
        cu_seqlens_B1=np.concatenate([[0], np.cumsum(lengths_R)]),
        epoch_B=text.epoch_B[sequence_R] * MASKS + number_R,
        sample_B=text.sample_B[sequence_R],
        causal_B=None if text.causal_B is None else text.causal_B[sequence_R],
    )
    return copies, token_U, number_R

"""A decoder of one layer that reconstructs a text from its vector and, for each prediction, other tokens of the text.

Xiao et al. 2022, RetroMAE, arXiv:2205.12035, section 3.3 (enhanced decoding); as in the released enhancedDecoder.py and
modeling.py. It is a layer of BERT whose queries are the text's vector plus a position's embedding, and whose keys and
values are the vector, in place of the first token, and the embeddings of the text's other tokens. A query does not
attend to its own token, nor to those that a mask of its own hides. Sibling vector_decoder.py reads the vector alone.

Quirks honoured: the layer adds the query to its attention's output; keys are the encoder's embeddings, which are
computed a second time, with dropout of their own.

Shapes: T packed tokens, B sequences, M predicted tokens, D width; b sequences of one block, S its longest; C bytes with
one bit for each of K masks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bertkit.data.batch import AttentionBlock, PackedSequences
from bertkit.models.attention.rectangles import to_blocks
from bertkit.models.attention.self_attention import Bias, SelfAttention
from bertkit.models.layers import PostNormLayer
from bertkit.models.recorder import Scope


class HiddenKeys:
    """Bias of minus infinity where a query does not attend to a key.

    Args:
        sequences: of the batch.
        hidden_TC: uint8; bit k of a token's bytes, the lowest first, is set if mask k hides the token.
        mask_T: the mask of each query.
    """

    def __init__(self, sequences: PackedSequences, hidden_TC: Tensor, mask_T: Tensor) -> None:
        self._sequences = sequences
        self._hidden_TC = hidden_TC
        self._mask_T = mask_T

    def __call__(self, query_bNSH: Tensor, key_bNSH: Tensor, block: AttentionBlock) -> Tensor:
        """As a `Bias` of self_attention.py, (b, 1, S, S)."""
        number = next(n for n, each in enumerate(self._sequences.blocks) if each is block)
        hidden_bSC, mask_bS = (
            to_blocks(rows[:, None], self._sequences)[number][:, 0] for rows in (self._hidden_TC, self._mask_T)
        )
        bit_8 = 2 ** torch.arange(8, dtype=torch.uint8, device=hidden_bSC.device)
        hidden_bKS = (hidden_bSC[..., None] & bit_8).flatten(2).transpose(1, 2) > 0
        hidden_bSS = hidden_bKS.gather(1, mask_bS[..., None].expand(-1, -1, block.length))
        itself_SS = torch.eye(block.length, dtype=torch.bool, device=hidden_bSC.device)
        itself_SS[0, 0] = False  # nothing is predicted there, and every query attends to the vector
        return query_bNSH.new_zeros(hidden_bSS.shape).masked_fill_(hidden_bSS | itself_SS, -math.inf)[:, None]


class DecodingAttention(SelfAttention):
    """Attention whose keys and values are computed from other states than its queries."""

    def forward(  # type: ignore[override]  # it also reads keys and a bias
        self,
        hidden_TD: Tensor,
        sequences: PackedSequences,
        scope: Scope,
        index_M: Tensor | None = None,
        *,
        keys_TD: Tensor,
        bias: Bias,
    ) -> Tensor:
        """Queries (T, D) to (T, D), or to (M, D) of the tokens `index_M` alone."""
        query_TD, (key_TD, value_TD) = self.query(hidden_TD), self.projection((self.key, self.value), keys_TD)
        heads = (rows_TD.view(rows_TD.shape[0], self.heads, -1) for rows_TD in (query_TD, key_TD, value_TD))
        return self._to_output(self.mixing(sequences, scope, bias=bias)(*heads), index_M)


class EnhancedDecoder(nn.Module):
    """The decoder's own weights; the embeddings are the encoder's.

    Args:
        layer: a layer of BERT with `DecodingAttention`.
    """

    def __init__(self, layer: PostNormLayer) -> None:
        super().__init__()
        self.layer = layer

    def decode(
        self,
        vectors_BD: Tensor,
        query_TD: Tensor,
        embedded_TD: Tensor,
        sequences: PackedSequences,
        hidden: HiddenKeys,
        index_M: Tensor,
    ) -> Tensor:
        """The states that predict these tokens, (M, D).

        Args:
            vectors_BD: the texts' vectors.
            query_TD: each text's vector plus the embedding of each token's position.
            embedded_TD: the embeddings of the text's tokens, as the encoder's first layer would read them.
            sequences: of the text.
            hidden: the keys that queries do not attend to.
            index_M: the predicted tokens.
        """
        keys_TD = embedded_TD.index_copy(0, sequences.cu_seqlens_B1[:-1].long(), vectors_BD.to(embedded_TD.dtype))
        states_MD: Tensor = self.layer(query_TD, sequences, Scope(None, ""), index_M, keys_TD=keys_TD, bias=hidden)
        return states_MD

    def forward(self, vectors_MD: Tensor) -> Tensor:
        """What the layer makes of vectors alone, without positions and tokens, (M, D). It is defined for any state, for
        example to compare two models."""

        def attention(states_MD: Tensor) -> Tensor:
            return self.layer.attention.output(self.layer.attention.value(states_MD))

        return self.layer.around(vectors_MD, attention, Scope(None, ""))

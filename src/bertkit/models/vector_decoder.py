"""A decoder that reconstructs a text from one vector, with the layers of the encoder that computed the vector.

Wang et al. 2021, TSDAE, arXiv:2104.06979, section 3: embeddings, self-attention and feed-forward layers are the
encoder's own, used causally; each layer has a cross-attention whose only key is the vector. A softmax over one key is
1, so cross-attention is the projected value, and queries and keys have no influence. The released code has weights for
both, which never change. As there, the vocabulary head begins as the one of the initial model's checkpoint.

Shapes: T packed tokens of the texts to reconstruct, B texts, M predicted tokens, D width, N heads, H head width.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.errors import UsageError
from bertkit.models.encoder import TransformerConfig
from bertkit.models.families.bert import BertStack
from bertkit.models.families.bigbird import BigBirdAttention
from bertkit.models.files.hub import load_model
from bertkit.models.headed import HeadedModel
from bertkit.models.heads import HeadShape
from bertkit.models.layers import PostNormLayer
from bertkit.models.operators.dropout import Dropout, dropout
from bertkit.models.operators.matmul import Linear
from bertkit.models.operators.vocabulary import VocabularyHead, VocabularyProjection
from bertkit.models.recorder import Scope

_HEAD = "masked_lm"


class VectorAttention(nn.Module):
    """Cross-attention of every token to its text's vector, after self-attention, with a residual sum and a norm."""

    def __init__(self, width: int, heads: int, *, norm_eps: float, attention_dropout: float, hidden_dropout: float):
        super().__init__()
        self.heads, self.dropout_rate = heads, attention_dropout
        self.value = Linear(width, width)
        self.output = Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=norm_eps)
        self.dropout = Dropout(hidden_dropout)

    def forward(self, hidden_TD: Tensor, vectors_BD: Tensor, text_T: Tensor) -> Tensor:
        """(T, D); `text_T` is the text of each token."""
        value_TD = self.value(vectors_BD).index_select(0, text_T)
        one_TN = dropout(value_TD.new_ones(text_T.numel(), self.heads), self.dropout_rate, training=self.training)
        mixed_TD = (value_TD.view(text_T.numel(), self.heads, -1) * one_TN[..., None]).flatten(1)
        normed_TD: Tensor = self.norm(hidden_TD + self.dropout(self.output(mixed_TD)))
        return normed_TD


class VectorDecoder(nn.Module):
    """The decoder's own weights: the cross-attention of each layer, and a vocabulary head that is tied to the word
    embeddings.

    Args:
        model: the model whose encoder layers are used; they do not become submodules.

    Raises:
        UsageError: the family's layers are not BERT's, or it has no masked-LM head.
    """

    def __init__(self, model: HeadedModel) -> None:
        super().__init__()
        encoder, config = model.encoder, model.encoder.config
        fits = isinstance(encoder, BertStack) and all(map(_decodes, encoder.layers))
        plan = model.plans.get(_HEAD)
        if not fits or plan is None or not isinstance(config, TransformerConfig):
            raise UsageError(
                f"embedding.loss: tsdae decodes with BERT's layers, but {config.model_type!r} has others; use a family"
                " such as bert or roberta, or another loss, such as simcse"
            )
        self.cross = nn.ModuleList(
            VectorAttention(
                encoder.width,
                config.num_attention_heads,
                norm_eps=float(getattr(config, "layer_norm_eps", 1e-12)),
                attention_dropout=config.attention_probs_dropout_prob,
                hidden_dropout=config.hidden_dropout_prob,
            )
            for _ in range(config.num_hidden_layers)
        )
        self.head = plan.build(HeadShape(encoder.width, encoder.embedding_width, encoder.vocab_size, 1))
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=config.initializer_range)
                nn.init.zeros_(part.bias)

    def take_head_of(self, directory: Path) -> None:
        """Copy the masked-LM head of a checkpoint; if it has none, the head keeps its weights."""
        model, report = load_model(directory, heads=(_HEAD,), new=(_HEAD,), is_trained=True)
        names = model.hub_form().hub_names(model.state_dict())
        drawn = set(report.newly_initialised)
        if not any(name.startswith(f"{_HEAD}.") and hub_name in drawn for name, hub_name in names.items()):
            self.head.load_state_dict(model.get_submodule(_HEAD).state_dict())

    def forward(self, model: HeadedModel, vectors_BD: Tensor, batch: PackedBatch) -> VocabularyProjection:
        """The logits of each token's next token, (T, V), not yet computed.

        Args:
            model: the model passed to the constructor.
            vectors_BD: vectors of the texts.
            batch: the texts to reconstruct, without their last tokens; causal.
        """
        encoder, scope = model.encoder, Scope(None, "")
        assert isinstance(encoder, BertStack)
        lengths_B = batch.sequences.cu_seqlens_B1.diff().long()
        text_T = torch.repeat_interleave(lengths_B, output_size=batch.num_tokens)
        hidden_TD = encoder.embed(batch, scope)
        for layer, cross in zip(encoder.layers, self.cross, strict=True):
            assert isinstance(layer, PostNormLayer)
            attended_TD = layer.attention(hidden_TD, batch.sequences, scope)
            hidden_TD = layer.attention_norm(hidden_TD + layer.dropout_before(layer.attention_norm)(attended_TD))
            hidden_TD = cross(hidden_TD, vectors_BD, text_T)
            fed_TD = layer.feed_forward(hidden_TD, scope)
            hidden_TD = layer.feed_forward_norm(hidden_TD + layer.dropout(fed_TD))
        assert isinstance(self.head, VocabularyHead)
        return self.head.project(hidden_TD, encoder.word_embedding.weight)


def _decodes(layer: nn.Module) -> bool:
    """Whether it is a layer of BERT that can be read from left to right."""
    if not isinstance(layer, PostNormLayer):
        return False
    # Block-sparse attention has no causal form.
    return not (isinstance(layer.attention, BigBirdAttention) and layer.attention.is_sparse)

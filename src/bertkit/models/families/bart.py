"""BART: the Transformer with learnt positions, a norm on the embeddings, and GELU.

Lewis et al. 2019, arXiv:1910.13461, section 2.1; details as in fairseq's bart. It loads and saves `BartModel` and
`BartForConditionalGeneration`, and is trained on parallel text. Sibling transformer.py has the two stacks.

Quirk kept: the position table has two unread rows, which fairseq has for its padding.

Shapes: T packed tokens of one side, S source tokens, U target tokens, D width.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.models.families.transformer import NORM_EPS, STACK_NAMES, PostNormConfig, PostNormEncoderDecoder
from bertkit.models.layers import Activation
from bertkit.models.recorder import Scope
from bertkit.models.weights import Names

UNREAD_ROWS = 2


class BartConfig(PostNormConfig):
    """BART; defaults are the base model's."""

    family: Literal["bart"] = "bart"
    hidden_size: int = Field(768, ge=2, description="Width D of the hidden states.")
    num_attention_heads: int = Field(12, ge=1, description="Attention heads per encoder layer.")
    intermediate_size: int = Field(3072, ge=1, description="Width of the encoder's feed-forward layers.")
    hidden_act: Activation = Field("gelu", description="Activation of the feed-forward layers.")
    scale_embedding: bool = Field(
        False,
        description="Whether word embeddings are multiplied by the square root of the width before positions are"
        " added.",
    )

    classes: ClassVar[str] = "Bart"
    hub_ignored: ClassVar[tuple[str, ...]] = (*PostNormConfig.hub_ignored, "encoder.version", "decoder.version")

    def build(self, vocab_size: int, *, pad_id: int = 0) -> Bart:
        return Bart(self, vocab_size)

    def draw(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Normal, as in fairseq."""
        nn.init.normal_(parameter, std=self.initializer_range, generator=generator)


class LearntPositions(nn.Module):
    """Adds a learnt position to each word, and normalises the sum."""

    def __init__(self, config: BartConfig) -> None:
        super().__init__()
        self.position = nn.Embedding(config.max_position_embeddings + UNREAD_ROWS, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=NORM_EPS)

    def forward(self, word_TD: Tensor, positions_T: Tensor, scope: Scope) -> Tensor:
        """(T, D). Point: `hook_pos_embed`."""
        position_TD = scope.tap("hook_pos_embed", self.position(positions_T + UNREAD_ROWS))
        normed_TD: Tensor = self.norm(word_TD + position_TD)
        return normed_TD


class Bart(PostNormEncoderDecoder):
    """BART's two stacks."""

    hub_names: ClassVar[Names] = {
        **STACK_NAMES,
        "source_positions.position": "encoder.embed_positions",
        "source_positions.norm": "encoder.layernorm_embedding",
        "target_positions.position": "decoder.embed_positions",
        "target_positions.norm": "decoder.layernorm_embedding",
    }

    def __init__(self, config: BartConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        self.source_positions = LearntPositions(config)
        self.target_positions = LearntPositions(config)

    def embed_source(self, ids_T: Tensor, positions_T: Tensor, scope: Scope) -> Tensor:
        return self.dropout(self.source_positions(self.scaled_words(ids_T, scope), positions_T, scope))

    def embed_target(self, ids_T: Tensor, positions_T: Tensor, scope: Scope) -> Tensor:
        return self.dropout(self.target_positions(self.scaled_words(ids_T, scope), positions_T, scope))

"""A random GPT-2 for tests of decoding token by token."""

from __future__ import annotations

from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.headed import HeadedModel


def small_gpt2(vocabulary: int, *, positions: int, seed: int = 1) -> HeadedModel:
    """With the causal head, in evaluation mode."""
    config = Gpt2Config(
        hidden_size=36,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=50,
        max_position_embeddings=positions,
        initializer_range=0.2,
    )
    model = HeadedModel(config.build(vocabulary), ["causal_lm"])
    model.initialise(seed)
    return model.eval()

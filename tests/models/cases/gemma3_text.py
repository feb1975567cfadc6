"""Gemma 3 as EmbeddingGemma, which attends to both sides, and as a causal model; with windows on both sides of the
shortest sequences.

The oracle returns the states after its final norm instead of the last layer's.
"""

from __future__ import annotations

from tests.models.oracle import Case

_SIZES = {
    "hidden_size": 102,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 51,
    "max_position_embeddings": 19,
    "query_pre_attn_scalar": 61,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 111.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 77.0},
    },
}

CASES = [
    Case(
        "gemma3-bidirectional",
        "Gemma3TextConfig",
        {**_SIZES, "use_bidirectional_attention": True},
        {"sequence_classification": "Gemma3TextForSequenceClassification"},
        token_types=False,
        states=(1, None),
    ),
    Case(
        "gemma3-causal",
        "Gemma3TextConfig",
        {**_SIZES, "sliding_window": 5, "query_pre_attn_scalar": 7, "attention_bias": True},
        {
            "causal_lm": "Gemma3ForCausalLM",
            "sequence_classification": "Gemma3TextForSequenceClassification",
        },
        token_types=False,
        states=(1, None),
    ),
]

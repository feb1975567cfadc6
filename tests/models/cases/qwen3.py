"""Qwen3 with shared keys and values and heads of a width of their own.

The oracle returns the states after its final norm instead of the last layer's.
"""

from __future__ import annotations

from tests.models.oracle import Case

_SIZES = {
    "hidden_size": 35,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 51,
    "max_position_embeddings": 19,
    "pad_token_id": 5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 111.0},
}

CASES = [
    Case(
        "qwen3",
        "Qwen3Config",
        {**_SIZES, "tie_word_embeddings": True},
        {
            "causal_lm": "Qwen3ForCausalLM",
            "sequence_classification": "Qwen3ForSequenceClassification",
            "token_classification": "Qwen3ForTokenClassification",
        },
        pad_id=5,
        token_types=False,
        states=(1, None),
    ),
    Case(
        "qwen3-untied-biases",
        "Qwen3Config",
        {**_SIZES, "num_key_value_heads": 6, "attention_bias": True, "hidden_act": "gelu", "rms_norm_eps": 1e-3},
        {"causal_lm": "Qwen3ForCausalLM"},
        pad_id=5,
        token_types=False,
        states=(1, None),
    ),
]

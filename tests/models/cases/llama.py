"""Llama and Qwen2 with shared keys and values; qwen3.py has the heads that they have in common.

The oracle returns the states after its final norm instead of the last layer's.
"""

from __future__ import annotations

from tests.models.oracle import Case

_SIZES = {
    "hidden_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 51,
    "max_position_embeddings": 19,
    "pad_token_id": 5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 111.0},
}

CASES = [
    Case(
        "llama",
        "LlamaConfig",
        {**_SIZES, "head_dim": 8, "attention_bias": True, "mlp_bias": True},
        {"causal_lm": "LlamaForCausalLM"},
        pad_id=5,
        token_types=False,
        states=(1, None),
    ),
    Case(
        "qwen2",
        "Qwen2Config",
        {**_SIZES, "tie_word_embeddings": True},
        {"causal_lm": "Qwen2ForCausalLM"},
        pad_id=5,
        token_types=False,
        states=(1, None),
    ),
]

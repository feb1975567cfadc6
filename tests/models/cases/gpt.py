"""GPT and GPT-2; the class with two heads is in test_gpt.py because it needs the position of the last token."""

from __future__ import annotations

from tests.models.oracle import Case

_SIZES = {"n_embd": 35, "n_layer": 2, "n_head": 5, "n_positions": 19, "pad_token_id": 3}

CASES = [
    Case(
        "openai-gpt",
        "OpenAIGPTConfig",
        _SIZES,
        {
            "causal_lm": "OpenAIGPTLMHeadModel",
            "sequence_classification": "OpenAIGPTForSequenceClassification",
        },
        pad_id=3,
        token_types=False,
    ),
    Case(
        "openai-gpt-relu",
        "OpenAIGPTConfig",
        {**_SIZES, "afn": "relu", "layer_norm_epsilon": 1e-3},
        {"causal_lm": "OpenAIGPTLMHeadModel"},
        pad_id=3,
        token_types=False,
    ),
    # The Hub's class returns the states after its final norm instead of the last layer's.
    Case(
        "gpt2",
        "GPT2Config",
        {**_SIZES, "n_inner": 51},
        {
            "causal_lm": "GPT2LMHeadModel",
            "sequence_classification": "GPT2ForSequenceClassification",
            "token_classification": "GPT2ForTokenClassification",
            "span": "GPT2ForQuestionAnswering",
        },
        pad_id=3,
        token_types=False,
        states=(1, None),
    ),
    Case(
        "gpt2-scaled-by-layer",
        "GPT2Config",
        {**_SIZES, "scale_attn_by_inverse_layer_idx": True, "activation_function": "relu", "layer_norm_epsilon": 1e-3},
        {"causal_lm": "GPT2LMHeadModel"},
        pad_id=3,
        token_types=False,
        states=(1, None),
    ),
    Case(
        "gpt2-not-scaled",
        "GPT2Config",
        {**_SIZES, "scale_attn_weights": False},
        {"causal_lm": "GPT2LMHeadModel"},
        pad_id=3,
        token_types=False,
        states=(1, None),
    ),
]

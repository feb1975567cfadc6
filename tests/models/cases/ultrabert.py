"""UltraBERT with three layers, since the last of every three is global.

The oracle returns the states after its final norm instead of the last layer's.
"""

from __future__ import annotations

from tests.models.oracle import Case

_SIZES = {
    "hidden_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 51,
    "max_position_embeddings": 19,
    "prediction_head_size": 23,
    "sliding_window": 3,
}
_HEADS = {
    "masked_lm": "UltrabertForMaskedLM",
    "sequence_classification": "UltrabertForSequenceClassification",
    "token_classification": "UltrabertForTokenClassification",
    "span": "UltrabertForQuestionAnswering",
}

CASES = [
    Case("ultrabert", "UltrabertConfig", _SIZES, _HEADS, token_types=False, states=(1, 2, None)),
    Case(
        "ultrabert-tied-mean",
        "UltrabertConfig",
        {
            **_SIZES,
            "num_hidden_layers": 2,
            "num_key_value_heads": 6,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "classifier_pooling": "mean",
            "hidden_act": "gelu",
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 111.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 77.0},
            },
        },
        {head: _HEADS[head] for head in ("masked_lm", "sequence_classification")},
        token_types=False,
        states=(1, None),
    ),
]

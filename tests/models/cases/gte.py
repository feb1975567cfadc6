"""GTE with segment types, and without any and with divided positions."""

from __future__ import annotations

from tests.models.oracle import Case

_SIZES = {
    "hidden_size": 42,
    "num_hidden_layers": 2,
    "num_attention_heads": 7,
    "intermediate_size": 51,
    "max_position_embeddings": 19,
    "layer_norm_eps": 1e-3,
}
_HEADS = {
    "masked_lm": "GteForMaskedLM",
    "sequence_classification": "GteForSequenceClassification",
    "token_classification": "GteForTokenClassification",
}

CASES = [
    Case(
        "gte",
        "GteConfig",
        {**_SIZES, "type_vocab_size": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
        _HEADS,
        pad_id=1,
    ),
    Case(
        "gte-divided",
        "GteConfig",
        {
            **_SIZES,
            "type_vocab_size": 0,
            "hidden_act": "relu",
            "rope_parameters": {"rope_type": "linear", "rope_theta": 77.0, "factor": 1.7},
        },
        _HEADS,
        pad_id=1,
        token_types=False,
    ),
]

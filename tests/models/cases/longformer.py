"""Longformer with windows shorter than the longest sequence, so it is computed in chunks.

Without a global mask, the oracle requires three separators in every sequence for spans and choices: those heads and
masks are in test_longformer.py.
"""

from __future__ import annotations

from tests.models.oracle import Case

SIZES = {
    "hidden_size": 35,
    "num_hidden_layers": 2,
    "num_attention_heads": 7,
    "intermediate_size": 51,
    "max_position_embeddings": 21,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "attention_window": [4, 10],
}

CASES = [
    Case(
        "longformer",
        "LongformerConfig",
        SIZES,
        {
            "masked_lm": "LongformerForMaskedLM",
            "sequence_classification": "LongformerForSequenceClassification",
            "token_classification": "LongformerForTokenClassification",
        },
        pad_id=1,
    ),
    Case(
        "longformer-types",
        "LongformerConfig",
        {**SIZES, "type_vocab_size": 3, "attention_window": 6, "hidden_act": "gelu_new"},
        {"sequence_classification": "LongformerForSequenceClassification"},
        pad_id=1,
    ),
]

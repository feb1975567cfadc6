"""Nomic BERT, which has BERT's heads except for three that the Hub has no class for."""

from __future__ import annotations

from tests.models.oracle import Case

CASES = [
    Case(
        "nomic-bert",
        "NomicBertConfig",
        {
            "hidden_size": 42,
            "num_hidden_layers": 2,
            "num_attention_heads": 7,
            "intermediate_size": 51,
            "max_position_embeddings": 19,
            "type_vocab_size": 3,
            "layer_norm_eps": 1e-3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
        },
        {
            "masked_lm": "NomicBertForMaskedLM",
            "sequence_classification": "NomicBertForSequenceClassification",
            "token_classification": "NomicBertForTokenClassification",
        },
    )
]

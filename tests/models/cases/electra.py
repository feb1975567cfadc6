"""ELECTRA with and without a map between embeddings and layers."""

from __future__ import annotations

from tests.models.oracle import Case

_SIZES = {
    "embedding_size": 13,
    "hidden_size": 35,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "intermediate_size": 51,
    "max_position_embeddings": 19,
    "type_vocab_size": 3,
}

CASES = [
    Case(
        "electra",
        "ElectraConfig",
        _SIZES,
        {
            "masked_lm": "ElectraForMaskedLM",
            "replaced_token": "ElectraForPreTraining",
            "sequence_classification": "ElectraForSequenceClassification",
            "token_classification": "ElectraForTokenClassification",
            "span": "ElectraForQuestionAnswering",
            "multiple_choice": "ElectraForMultipleChoice",
        },
    ),
    Case(
        "electra-equal-widths",
        "ElectraConfig",
        {**_SIZES, "embedding_size": 35, "hidden_act": "relu"},
        {"masked_lm": "ElectraForMaskedLM", "replaced_token": "ElectraForPreTraining"},
    ),
]

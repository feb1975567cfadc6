"""ALBERT with one group, and with groups that do not divide the layers and inner layers."""

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
        "albert",
        "AlbertConfig",
        _SIZES,
        {
            "masked_lm": "AlbertForMaskedLM",
            "sequence_classification": "AlbertForSequenceClassification",
            "token_classification": "AlbertForTokenClassification",
            "span": "AlbertForQuestionAnswering",
            "multiple_choice": "AlbertForMultipleChoice",
        },
        ("AlbertForPreTraining", {"masked_lm": "prediction_logits", "sentence_order": "sop_logits"}),
    ),
    Case(
        "albert-groups",
        "AlbertConfig",
        {**_SIZES, "num_hidden_layers": 5, "num_hidden_groups": 3, "inner_group_num": 2, "hidden_act": "gelu"},
        {"masked_lm": "AlbertForMaskedLM"},
        states=tuple(range(1, 11)),
    ),
]

"""MPNet; the padding's id is always 1, and the position table has two rows more than the longest sequence."""

from __future__ import annotations

from tests.models.oracle import Case

_SIZES = {
    "hidden_size": 35,
    "num_hidden_layers": 2,
    "num_attention_heads": 7,
    "intermediate_size": 51,
    "max_position_embeddings": 21,
    "layer_norm_eps": 1e-5,
}

CASES = [
    Case(
        "mpnet",
        "MPNetConfig",
        _SIZES,
        {
            "masked_lm": "MPNetForMaskedLM",
            "sequence_classification": "MPNetForSequenceClassification",
            "token_classification": "MPNetForTokenClassification",
            "span": "MPNetForQuestionAnswering",
            "multiple_choice": "MPNetForMultipleChoice",
        },
        pad_id=1,
        token_types=False,
    ),
    Case(
        "mpnet-more-buckets",
        "MPNetConfig",
        {**_SIZES, "relative_attention_num_buckets": 37, "hidden_act": "relu"},
        {"masked_lm": "MPNetForMaskedLM"},
        pad_id=1,
        token_types=False,
    ),
]

"""XLNet; the query stream and the memory are in test_xlnet.py."""

from __future__ import annotations

from tests.models.oracle import Case

_SIZES = {"d_model": 30, "n_layer": 2, "n_head": 5, "d_inner": 51}

CASES = [
    Case(
        "xlnet",
        "XLNetConfig",
        _SIZES,
        {
            "permutation_lm": "XLNetLMHeadModel",
            "sequence_classification": "XLNetForSequenceClassification",
            "token_classification": "XLNetForTokenClassification",
            "span": "XLNetForQuestionAnsweringSimple",
            "multiple_choice": "XLNetForMultipleChoice",
        },
        unlimited=True,
        pad_id=5,
        pad_left=True,
        type_count=3,
    ),
    Case(
        "xlnet-clamped",
        "XLNetConfig",
        {**_SIZES, "clamp_len": 4, "ff_activation": "relu", "layer_norm_eps": 1e-3, "mem_len": None},
        {"permutation_lm": "XLNetLMHeadModel"},
        unlimited=True,
        pad_id=5,
        pad_left=True,
        type_count=3,
    ),
]

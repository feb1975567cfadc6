"""DeBERTa 1, 2 and 3.

With a convolution, the oracle's first state is the one after it.
"""

from __future__ import annotations

from tests.models.oracle import Case

_SIZES = {
    "hidden_size": 35,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "intermediate_size": 51,
    "max_position_embeddings": 19,
}
_VERSION_3 = {
    **_SIZES,
    "relative_attention": True,
    "position_buckets": 6,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
}
_VERSION_2 = {
    **_SIZES,
    "relative_attention": True,
    "max_relative_positions": 7,
    "pos_att_type": ["c2p"],
    "conv_kernel_size": 5,
    "conv_groups": 7,
    "conv_act": "gelu",
    "embedding_size": 21,
    "type_vocab_size": 3,
    "pooler_hidden_act": "tanh",
    "hidden_act": "gelu_new",
}
_MASKED_LM = {"masked_lm": "DebertaV2ForMaskedLM"}


def _heads(classes: str) -> dict[str, str]:
    return {
        "masked_lm": f"{classes}ForMaskedLM",
        "sequence_classification": f"{classes}ForSequenceClassification",
        "token_classification": f"{classes}ForTokenClassification",
        "span": f"{classes}ForQuestionAnswering",
    }


CASES = [
    Case(
        "deberta-3",
        "DebertaV2Config",
        _VERSION_3,
        {**_heads("DebertaV2"), "multiple_choice": "DebertaV2ForMultipleChoice"},
    ),
    Case(
        "deberta-2-convolution",
        "DebertaV2Config",
        _VERSION_2,
        {**_MASKED_LM, "sequence_classification": "DebertaV2ForSequenceClassification"},
        states=(None, 2),
    ),
    Case(
        "deberta-2-position-to-content",
        "DebertaV2Config",
        {**_SIZES, "relative_attention": True, "position_buckets": 4, "pos_att_type": ["p2c"], "legacy": False},
        _MASKED_LM,
    ),
    Case("deberta-2-absolute", "DebertaV2Config", {**_SIZES, "pos_att_type": ["c2p"], "legacy": False}, _MASKED_LM),
    Case(
        "deberta-1",
        "DebertaConfig",
        {**_SIZES, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False},
        _heads("Deberta"),
    ),
    Case(
        "deberta-1-near",
        "DebertaConfig",
        {
            **_SIZES,
            "relative_attention": True,
            "max_relative_positions": 7,
            "pos_att_type": ["c2p", "p2c"],
            "type_vocab_size": 3,
            "legacy": False,
        },
        {"masked_lm": "DebertaForMaskedLM"},
    ),
]

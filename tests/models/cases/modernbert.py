"""ModernBERT with four layers, since the first of every three is global.

The oracle returns the states after its final norm instead of the last layer's.
"""

from __future__ import annotations

from tests.models.oracle import Case

_SIZES = {
    "hidden_size": 42,
    "num_hidden_layers": 4,
    "num_attention_heads": 7,
    "intermediate_size": 51,
    "max_position_embeddings": 19,
    "local_attention": 6,
    "pad_token_id": 5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
_HEADS = {
    "masked_lm": "ModernBertForMaskedLM",
    "sequence_classification": "ModernBertForSequenceClassification",
    "token_classification": "ModernBertForTokenClassification",
    "span": "ModernBertForQuestionAnswering",
    "multiple_choice": "ModernBertForMultipleChoice",
}
_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 111.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 77.0},
}

CASES = [
    Case(
        "modernbert",
        "ModernBertConfig",
        _SIZES,
        _HEADS,
        pad_id=5,
        token_types=False,
        states=(1, 2, 3, None),
    ),
    Case(
        "modernbert-biases-mean",
        "ModernBertConfig",
        {
            **_SIZES,
            "num_hidden_layers": 2,
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "classifier_bias": True,
            "decoder_bias": False,
            "classifier_pooling": "mean",
            "classifier_activation": "relu",
            "hidden_activation": "silu",
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": _ROPE,
        },
        {head: _HEADS[head] for head in ("sequence_classification", "masked_lm", "multiple_choice")},
        pad_id=5,
        token_types=False,
        states=(1, None),
    ),
]

"""EuroBERT with shared keys and values, and the poolings of its classifier.

The oracle returns the states after its final norm instead of the last layer's.
"""

from __future__ import annotations

from tests.models.oracle import Case

_SIZES = {
    "hidden_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 51,
    "max_position_embeddings": 19,
    "pad_token_id": 5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "mask_token_id": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 111.0},
}
_HEADS = {
    "masked_lm": "EuroBertForMaskedLM",
    "sequence_classification": "EuroBertForSequenceClassification",
    "token_classification": "EuroBertForTokenClassification",
}

CASES = [
    Case("eurobert", "EuroBertConfig", _SIZES, _HEADS, pad_id=5, token_types=False, states=(1, None)),
    Case(
        "eurobert-tied-mean",
        "EuroBertConfig",
        {
            **_SIZES,
            "num_key_value_heads": 6,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "classifier_pooling": "mean",
            "hidden_act": "gelu",
        },
        {head: _HEADS[head] for head in ("masked_lm", "sequence_classification")},
        pad_id=5,
        token_types=False,
        states=(1, None),
    ),
    Case(
        "eurobert-biases-first",
        "EuroBertConfig",
        {**_SIZES, "mlp_bias": True, "classifier_pooling": "bos"},
        {head: _HEADS[head] for head in ("masked_lm", "sequence_classification")},
        pad_id=5,
        token_types=False,
        states=(1, None),
    ),
]

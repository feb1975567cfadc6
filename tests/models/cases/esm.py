"""ESM-2: token dropout of every sequence by its own share of masks, frequencies as stored, and no contact head.

The oracle returns the states after its final norm instead of the last layer's. Its class applies the scale of token
dropout to whole rows; id 4 is the mask, which the inputs contain.
"""

from __future__ import annotations

from tests.models.oracle import Case

_SIZES = {
    "hidden_size": 42,
    "num_hidden_layers": 2,
    "num_attention_heads": 7,
    "intermediate_size": 51,
    "max_position_embeddings": 19,
    "position_embedding_type": "rotary",
    "layer_norm_eps": 1e-3,
    "rope_theta": 77.0,
    "pad_token_id": 5,
    "mask_token_id": 4,
}
_HEADS = {
    "masked_lm": "EsmForMaskedLM",
    "sequence_classification": "EsmForSequenceClassification",
    "token_classification": "EsmForTokenClassification",
}
_LEFT_OUT = ("contact_head.regression.weight", "contact_head.regression.bias")

CASES = [
    Case(
        f"esm{name}",
        "EsmConfig",
        {**_SIZES, "token_dropout": token_dropout},
        heads,
        pad_id=5,
        token_types=False,
        states=(1, None),
        left_out=_LEFT_OUT,
    )
    for name, token_dropout, heads in (
        ("", True, _HEADS),
        ("-no-token-dropout", False, {"masked_lm": "EsmForMaskedLM"}),
    )
]

"""RoBERTa and its twins; the position table has two rows more than the longest sequence has tokens."""

from __future__ import annotations

from tests.models.oracle import Case

_SIZES = {
    "hidden_size": 35,
    "num_hidden_layers": 2,
    "num_attention_heads": 7,
    "intermediate_size": 51,
    "max_position_embeddings": 21,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}


def _heads(classes: str) -> dict[str, str]:
    return {
        "masked_lm": f"{classes}ForMaskedLM",
        "sequence_classification": f"{classes}ForSequenceClassification",
        "token_classification": f"{classes}ForTokenClassification",
        "span": f"{classes}ForQuestionAnswering",
        "multiple_choice": f"{classes}ForMultipleChoice",
    }


CASES = [
    Case("roberta", "RobertaConfig", _SIZES, _heads("Roberta"), pad_id=1),
    Case(
        "roberta-types-pad-4",
        "RobertaConfig",
        {**_SIZES, "type_vocab_size": 3, "pad_token_id": 4, "max_position_embeddings": 24, "hidden_act": "gelu_new"},
        {"masked_lm": "RobertaForMaskedLM"},
        pad_id=4,
    ),
    Case("xlm-roberta", "XLMRobertaConfig", _SIZES, _heads("XLMRoberta"), pad_id=1),
    Case("camembert", "CamembertConfig", _SIZES, _heads("Camembert"), pad_id=1),
    Case("data2vec-text", "Data2VecTextConfig", _SIZES, _heads("Data2VecText"), pad_id=1),
    # The Hub's classes return the states after their final norms instead of the last layer's.
    Case(
        "roberta-prelayernorm",
        "RobertaPreLayerNormConfig",
        _SIZES,
        _heads("RobertaPreLayerNorm"),
        pad_id=1,
        states=(1, None),
    ),
    Case("xlm-roberta-xl", "XLMRobertaXLConfig", _SIZES, _heads("XLMRobertaXL"), pad_id=1, states=(1, None)),
]

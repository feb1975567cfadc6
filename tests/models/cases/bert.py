"""BERT, its pre-norm twin and ERNIE."""

from __future__ import annotations

from tests.models.oracle import Case

_SIZES = {
    "hidden_size": 35,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "intermediate_size": 51,
    "max_position_embeddings": 19,
    "type_vocab_size": 3,
}


def _heads(classes: str) -> dict[str, str]:
    return {
        "masked_lm": f"{classes}ForMaskedLM",
        "next_sentence": f"{classes}ForNextSentencePrediction",
        "sequence_classification": f"{classes}ForSequenceClassification",
        "token_classification": f"{classes}ForTokenClassification",
        "span": f"{classes}ForQuestionAnswering",
        "multiple_choice": f"{classes}ForMultipleChoice",
    }


_JOINT = {"masked_lm": "prediction_logits", "next_sentence": "seq_relationship_logits"}

CASES = [
    Case("bert", "BertConfig", _SIZES, _heads("Bert"), ("BertForPreTraining", _JOINT)),
    Case(
        "bert-relu",
        "BertConfig",
        {**_SIZES, "hidden_act": "relu", "layer_norm_eps": 1e-3},
        {"masked_lm": "BertForMaskedLM"},
    ),
    # The Hub's class returns the states after its final norm instead of the last layer's.
    Case(
        "megatron-bert",
        "MegatronBertConfig",
        _SIZES,
        _heads("MegatronBert"),
        ("MegatronBertForPreTraining", _JOINT),
        states=(1, None),
    ),
    Case("ernie-1", "ErnieConfig", {**_SIZES, "hidden_act": "relu"}, _heads("Ernie"), ("ErnieForPreTraining", _JOINT)),
    Case(
        "ernie-2",
        "ErnieConfig",
        {**_SIZES, "use_task_id": True, "task_type_vocab_size": 5},
        {"masked_lm": "ErnieForMaskedLM"},
    ),
]

"""MobileBERT, its variants with and without bottlenecks, and its teacher's norms."""

from __future__ import annotations

from tests.models.oracle import Case

_SIZES = {
    "embedding_size": 13,
    "hidden_size": 33,
    "intra_bottleneck_size": 35,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "intermediate_size": 51,
    "num_feedforward_networks": 3,
    "max_position_embeddings": 19,
    "type_vocab_size": 3,
}
_MASKED_LM = {"masked_lm": "MobileBertForMaskedLM"}
_POOLED = {"sequence_classification": "MobileBertForSequenceClassification"}

CASES = [
    Case(
        "mobilebert",
        "MobileBertConfig",
        _SIZES,
        {
            "masked_lm": "MobileBertForMaskedLM",
            "next_sentence": "MobileBertForNextSentencePrediction",
            "sequence_classification": "MobileBertForSequenceClassification",
            "token_classification": "MobileBertForTokenClassification",
            "span": "MobileBertForQuestionAnswering",
            "multiple_choice": "MobileBertForMultipleChoice",
        },
        ("MobileBertForPreTraining", {"masked_lm": "prediction_logits", "next_sentence": "seq_relationship_logits"}),
        zero_pad_row=True,
    ),
    # As in the released models.
    Case(
        "mobilebert-no-pooler",
        "MobileBertConfig",
        {**_SIZES, "classifier_activation": False},
        _POOLED,
        zero_pad_row=True,
    ),
    Case(
        "mobilebert-layer-norm",
        "MobileBertConfig",
        {**_SIZES, "normalization_type": "layer_norm", "layer_norm_eps": 1e-2, "hidden_act": "gelu"},
        _MASKED_LM,
        zero_pad_row=True,
    ),
    Case(
        "mobilebert-narrow-attention",
        "MobileBertConfig",
        {**_SIZES, "use_bottleneck_attention": True, "num_feedforward_networks": 1, "trigram_input": False},
        _MASKED_LM,
    ),
    Case(
        "mobilebert-attention-without-bottleneck",
        "MobileBertConfig",
        {**_SIZES, "hidden_size": 35, "key_query_shared_bottleneck": False},
        _MASKED_LM,
        zero_pad_row=True,
    ),
    Case(
        "mobilebert-no-bottleneck",
        "MobileBertConfig",
        {**_SIZES, "hidden_size": 35, "use_bottleneck": False, "trigram_input": False, "embedding_size": 35},
        _POOLED,
    ),
]

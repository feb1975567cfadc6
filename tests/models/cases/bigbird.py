"""BigBird on sequences short enough to be attended in full; longer ones are in test_bigbird.py."""

from __future__ import annotations

from tests.models.oracle import Case

SIZES = {
    "hidden_size": 35,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "intermediate_size": 51,
    "max_position_embeddings": 19,
    "type_vocab_size": 3,
    # An id that occurs in no text; the oracle lets no span begin after it.
    "sep_token_id": 500,
}

CASES = [
    Case(
        "bigbird",
        "BigBirdConfig",
        SIZES,
        {
            "masked_lm": "BigBirdForMaskedLM",
            "sequence_classification": "BigBirdForSequenceClassification",
            "token_classification": "BigBirdForTokenClassification",
            "span": "BigBirdForQuestionAnswering",
            "multiple_choice": "BigBirdForMultipleChoice",
        },
        (
            "BigBirdForPreTraining",
            {"masked_lm": "prediction_logits", "next_sentence": "seq_relationship_logits"},
        ),
    ),
    Case(
        "bigbird-scaled-full",
        "BigBirdConfig",
        {
            **SIZES,
            "attention_type": "original_full",
            "rescale_embeddings": True,
            "use_bias": False,
            "hidden_act": "relu",
        },
        {"masked_lm": "BigBirdForMaskedLM"},
    ),
]

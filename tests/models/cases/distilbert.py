"""DistilBERT."""

from __future__ import annotations

from tests.models.oracle import Case

CASES = [
    Case(
        "distilbert",
        "DistilBertConfig",
        {"dim": 35, "n_layers": 2, "n_heads": 5, "hidden_dim": 51, "max_position_embeddings": 19},
        {
            "masked_lm": "DistilBertForMaskedLM",
            "sequence_classification": "DistilBertForSequenceClassification",
            "token_classification": "DistilBertForTokenClassification",
            "span": "DistilBertForQuestionAnswering",
            "multiple_choice": "DistilBertForMultipleChoice",
        },
        token_types=False,
    ),
]

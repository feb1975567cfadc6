"""The third Jina Embeddings, which have RoBERTa's heads; the Hub has no class for multiple choice."""

from __future__ import annotations

from tests.models.oracle import Case

CASES = [
    Case(
        "jina-embeddings-v3",
        "JinaEmbeddingsV3Config",
        {
            "hidden_size": 42,
            "num_hidden_layers": 2,
            "num_attention_heads": 7,
            "intermediate_size": 51,
            "max_position_embeddings": 19,
            "type_vocab_size": 3,
            "layer_norm_eps": 1e-3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
        },
        {
            "masked_lm": "JinaEmbeddingsV3ForMaskedLM",
            "sequence_classification": "JinaEmbeddingsV3ForSequenceClassification",
            "token_classification": "JinaEmbeddingsV3ForTokenClassification",
            "span": "JinaEmbeddingsV3ForQuestionAnswering",
        },
        pad_id=1,
    )
]

"""Outputs contain words of the vocabulary only."""

from __future__ import annotations

import pytest
import torch

from bertkit.generation.run import generate
from bertkit.generation.settings import GenerationSettings, Method
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.families.transformer import TransformerSeq2SeqConfig
from bertkit.models.headed import HeadedModel
from tests.probing.tiny_models import tiny_tokenizer

SIZES = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 20}


@pytest.mark.parametrize(
    ("config", "head", "methods"),
    [
        (BertConfig(**SIZES), "masked_lm", ("gibbs", "mask-predict")),
        (Gpt2Config(**SIZES), "causal_lm", ("sample", "beam")),
        (TransformerSeq2SeqConfig(**SIZES), "seq2seq_lm", ("sample", "beam")),
    ],
)
def test_rows_of_the_table_beyond_the_vocabulary_are_never_written(
    config: EncoderConfig, head: str, methods: tuple[Method, ...]
) -> None:
    """Tables are often padded to a round number of rows."""
    tokenizer = tiny_tokenizer()
    words = tokenizer.vocab_size
    model = HeadedModel(config.build(words + 2), [head])
    model.initialise(3)
    with torch.no_grad():  # one of the two has the largest logit everywhere
        large = model.encoder.word_embedding.weight[0] * 1000
        model.encoder.word_embedding.weight[words:] = torch.stack([large, -large])
    for method in methods:
        (found,) = generate(model.eval(), tokenizer, ["a b"], GenerationSettings(method=method, max_new_tokens=5))
        assert found["outputs"][0]["ids"]
        assert max(found["outputs"][0]["ids"]) < words

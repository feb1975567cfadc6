"""Masks are filled from the state that was trained to predict them."""

from __future__ import annotations

import pytest
import torch
from tests.tasks.tiny_task import tiny_tokenizer

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.models.families.bert import BertConfig
from bertkit.models.headed import SCORING_RULE, HeadedModel
from bertkit.models.scoring.fill_mask import fill_masks
from bertkit.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


def model_for(tokenizer: Tokenizer, rule: str | None = None) -> HeadedModel:
    config = BertConfig(hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=20)
    model = HeadedModel(config.build(tokenizer.vocab_size), ["masked_lm"])
    model.initialise(3)
    if rule is not None:
        model.extras[SCORING_RULE] = rule
    return model


@pytest.mark.parametrize(("rule", "place"), [(None, 0), ("masked_next_token", -1)])
def test_a_mask_is_filled_from_the_state_that_was_trained_to_predict_it(
    tokenizer: Tokenizer, rule: str | None, place: int
) -> None:
    model = model_for(tokenizer, rule).eval()
    ids = [tokenizer.cls_id, tokenizer.mask_id, *tokenizer.encode_batch(["a cat"])[0], tokenizer.sep_id]
    with torch.no_grad():
        hidden_TD = model(PackedBatch.from_ids([ids]))
        expected_V = torch.softmax(model.masked_lm_logits(hidden_TD[[1 + place]])[0], dim=-1)
    (filled,) = fill_masks(model, tokenizer, ["[MASK] a cat"], top=3)
    (candidates,) = filled["masks"]
    assert [each["id"] for each in candidates] == expected_V.topk(3).indices.tolist()
    assert candidates[0]["probability"] == pytest.approx(float(expected_V.max()), rel=1e-5)


def test_a_model_of_next_words_alone_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"only from left to right .*use one that was pretrained with masked_lm"):
        fill_masks(model_for(tokenizer, "encoder_left_to_right"), tokenizer, ["a [MASK]"])


def test_rows_of_the_table_beyond_the_vocabulary_are_no_candidates(tokenizer: Tokenizer) -> None:
    """Tables are often padded to a round number of rows."""
    config = BertConfig(hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=20)
    model = HeadedModel(config.build(tokenizer.vocab_size + 7), ["masked_lm"])
    model.initialise(3)
    model.get_submodule("masked_lm").bias.data[tokenizer.vocab_size :] = 3.0
    (filled,) = fill_masks(model.eval(), tokenizer, ["[MASK] a cat"], top=100_000)
    assert sorted(each["id"] for each in filled["masks"][0]) == list(range(tokenizer.vocab_size))

"""Scores of texts equal those of single copies through `transformers`, for any batch size and order."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.probing.tiny_models import (
    BERT,
    TEXTS,
    constant_model,
    save_tiny,
    tiny_causal_model,
    tiny_model,
    tiny_tokenizer,
)

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError, UsageError
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.longformer import LongformerConfig
from bertkit.models.families.xlnet import XlnetConfig
from bertkit.models.files.hub import load_model
from bertkit.models.headed import SCORING_RULE, HeadedModel
from bertkit.models.scoring import token_predictors
from bertkit.models.scoring.pseudo_likelihood import score_texts
from bertkit.models.scoring.rules import SCORING_RULES, choose_rule
from bertkit.objectives.base import Objective
from bertkit.objectives.causal_lm import CausalLM
from bertkit.objectives.forward import scoring_rule
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.masked_next_token import MaskedNextToken
from bertkit.objectives.sentence_relations import NextSentence
from bertkit.text.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")


def model_for(rule: str, tokenizer: Tokenizer) -> HeadedModel:
    """A random model whose config names the rule that it was trained for."""
    head = SCORING_RULES[rule].head
    if head == "causal_lm":
        model = tiny_causal_model(tokenizer)
    else:
        sizes = {key: value for key, value in BERT.items() if key != "max_position_embeddings"}
        config = XlnetConfig(**sizes) if head == "permutation_lm" else BertConfig(**BERT)
        model = tiny_model(tokenizer, config, heads=(head,))
    model.extras[SCORING_RULE] = rule
    return model


def one_copy_at_a_time(directory: Path, text: str, rule: str) -> list[float]:
    """The log-probability of each token, from a batch of one copy with `BertForMaskedLM`."""
    model = transformers.BertForMaskedLM.from_pretrained(directory).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    encoded = tokenizer(text)
    ids, words = encoded["input_ids"], encoded.word_ids()
    found = []
    for place in (i for i, word in enumerate(words) if word is not None):
        later = [j for j in range(place, len(ids)) if words[j] == words[place]]
        hidden = {"original": [place], "within_word_l2r": later}[rule]
        copy = [tokenizer.mask_token_id if j in hidden else i for j, i in enumerate(ids)]
        with torch.no_grad():
            logits = model(torch.tensor([copy])).logits[0, place]
        found.append(torch.log_softmax(logits, dim=-1)[ids[place]].item())
    return found


@pytest.mark.parametrize("rule", ["original", "within_word_l2r"])
def test_masked_scores_are_those_of_transformers_one_copy_at_a_time(rule: str, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    save_tiny(model, tokenizer, tmp_path)
    for text, score in zip(TEXTS, score_texts(model, tokenizer, TEXTS, rule=rule, max_batch_tokens=70), strict=True):
        expected = one_copy_at_a_time(tmp_path, text, rule)
        np.testing.assert_allclose(score.log_p_N, expected, atol=1e-5)
        assert score.total == pytest.approx(sum(expected), abs=1e-5)
        assert score.tokens == len(expected)
        assert score.words == len(text.split())


def test_causal_scores_are_those_of_transformers_with_a_token_in_front(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer("byte-bpe", 330)
    model = tiny_causal_model(tokenizer)
    save_tiny(model, tokenizer, tmp_path)
    oracle = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    for text, score in zip(TEXTS, score_texts(model, tokenizer, TEXTS, max_batch_tokens=31), strict=True):
        ids = torch.tensor([[tokenizer.cls_id, *tokenizer.encode_batch([text])[0]]])
        with torch.no_grad():
            log_p_NV = torch.log_softmax(oracle(ids).logits[0, :-1], dim=-1)
        expected = log_p_NV.gather(1, ids[0, 1:, None])[:, 0]
        np.testing.assert_allclose(score.log_p_N, expected, atol=1e-5)


def test_without_a_beginning_token_the_first_one_is_given() -> None:
    known = tiny_tokenizer("byte-bpe", 330)
    tokenizer = Tokenizer(known.backend, {"pad": "[PAD]"})
    model = tiny_causal_model(tokenizer)
    (score,) = score_texts(model, tokenizer, ["The value"])
    assert score.tokens == len(known.encode_batch(["The value"])[0]) - 1
    single = next(word for word in ("a", "The") if len(known.encode_batch([word])[0]) == 1)
    with pytest.raises(DataError, match="no token to score"):
        score_texts(model, tokenizer, [single])


@pytest.mark.parametrize("rule", SCORING_RULES)
def test_the_end_of_a_text_scores_what_it_does_in_the_whole_text(rule: str) -> None:
    tokenizer = tiny_tokenizer()
    model = model_for(rule, tokenizer)
    starts = [len(text) - length for text, length in zip(TEXTS, (9, 1, 4, 30, 3, 20), strict=True)]
    twice = [*TEXTS, *TEXTS]
    found = score_texts(model, tokenizer, twice, rule=rule, starts=[*starts, *[0] * len(TEXTS)], max_batch_tokens=90)
    whole = score_texts(model, tokenizer, TEXTS, rule=rule)
    for text, start, end, same, all_of_it in zip(TEXTS, starts, found, found[len(TEXTS) :], whole, strict=False):
        offsets = tokenizer.encodings_plain([text])[0].offsets
        kept = sum(stop > start for _, stop in offsets)
        assert 0 < kept == end.tokens < len(offsets)
        np.testing.assert_allclose(end.log_p_N, all_of_it.log_p_N[-kept:], atol=1e-5)
        np.testing.assert_allclose(same.log_p_N, all_of_it.log_p_N, atol=1e-5)
    with pytest.raises(DataError, match="no token to score"):
        score_texts(model, tokenizer, TEXTS[:1], rule=rule, starts=[len(TEXTS[0])])


@pytest.mark.parametrize("rule", SCORING_RULES)
def test_scores_do_not_depend_on_the_batch_or_the_order(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    model = model_for(rule, tokenizer)
    whole = score_texts(model, tokenizer, TEXTS, rule=rule)
    monkeypatch.setattr(token_predictors, "MAX_LOGITS", 3 * tokenizer.vocab_size)
    for tokens in (1, 23, 150):
        for some, all_at_once in zip(
            score_texts(model, tokenizer, TEXTS, rule=rule, max_batch_tokens=tokens), whole, strict=True
        ):
            np.testing.assert_allclose(some.log_p_N, all_at_once.log_p_N, atol=1e-5)
    forwards = [score.total for score in score_texts(model, tokenizer, TEXTS, rule=rule, max_batch_tokens=40)]
    backwards = [score.total for score in score_texts(model, tokenizer, TEXTS[::-1], rule=rule, max_batch_tokens=40)]
    assert backwards[::-1] == forwards


def test_a_batch_never_holds_more_than_its_tokens_or_one_copy() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    seen: list[int] = []
    model.encoder.get_submodule("embeddings").register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0].num_tokens)
    )
    long = " ".join(["a"] * 57)
    score_texts(model, tokenizer, [*TEXTS, long], max_batch_tokens=130)
    assert 118 in seen  # two copies of the long one
    assert max(seen) <= 130
    seen.clear()
    score_texts(model, tokenizer, [long], max_batch_tokens=7)
    assert seen == [59] * 57


def test_the_last_layer_is_computed_only_for_the_tokens_that_are_predicted() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    rows: list[list[int]] = [[] for _ in model.encoder.layers]
    for layer, own in zip(model.encoder.layers, rows, strict=True):
        layer.feed_forward.register_forward_pre_hook(lambda _, inputs, own=own: own.append(len(inputs[0])))
    (score,) = score_texts(model, tokenizer, ["a man"], max_batch_tokens=1000)
    copies = score.tokens
    assert rows[:-1] == [[copies * (copies + 2)]] * (len(rows) - 1)
    assert rows[-1] == [copies]


def test_the_two_masked_rules_differ_just_where_a_later_token_of_the_word_follows() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    text = TEXTS[2]
    original, l2r = (score_texts(model, tokenizer, [text], rule=rule)[0] for rule in ("original", "within_word_l2r"))
    words = tokenizer.backend.encode(text, add_special_tokens=False).word_ids
    last_of_word_N = [words[i + 1 : i + 2] != [words[i]] for i in range(len(words))]
    assert 0 < sum(last_of_word_N) < len(words)
    equal_N = np.isclose(original.log_p_N, l2r.log_p_N, atol=1e-6)
    assert equal_N.tolist() == last_of_word_N


@settings(max_examples=20)
@given(lengths=st.lists(st.integers(1, 25), min_size=1, max_size=3))
def test_constant_logits_give_every_text_the_same_score_per_token(lengths: list[int]) -> None:
    tokenizer = tiny_tokenizer()
    texts = [" ".join(["value"] * length) for length in lengths]
    for score in score_texts(constant_model(tokenizer), tokenizer, texts, max_batch_tokens=64):
        assert score.total / score.tokens == score.log_p_N[0]  # bit for bit, for any length
        assert score.log_p_N[0] == pytest.approx(-math.log(tokenizer.vocab_size), abs=1e-5)


def test_a_special_token_written_out_is_text() -> None:
    tokenizer = tiny_tokenizer()
    (score,) = score_texts(tiny_model(tokenizer), tokenizer, ["the [MASK] is"])
    ids, _ = tokenizer.encode_plain(["the [MASK] is"])
    assert score.tokens == ids.size > len(tokenizer.encode_batch(["the [MASK] is"])[0])


def test_texts_and_models_that_cannot_be_scored_are_refused_with_a_remedy() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    with pytest.raises(DataError, match=r"59 tokens and 2 special ones, but the model reads at most 60"):
        score_texts(model, tokenizer, [" ".join(["a"] * 59)])
    with pytest.raises(DataError, match="no token to score"):
        score_texts(model, tokenizer, ["\u200b"])
    diverged = tiny_model(tokenizer)
    torch.nn.init.constant_(diverged.encoder.word_embedding.weight, math.nan)
    with pytest.raises(DataError, match=r"not numbers \(NaN\)"):
        score_texts(diverged, tokenizer, TEXTS)
    with pytest.raises(UsageError, match="no scoring rule 'salazar'; one of: original, within_word_l2r"):
        score_texts(model, tokenizer, TEXTS, rule="salazar")
    with pytest.raises(DataError, match=r"no causal_lm head .* \(its heads are masked_lm\)"):
        score_texts(model, tokenizer, TEXTS, rule="left_to_right")
    longformer = LongformerConfig(**BERT, attention_window=4)  # its local attention looks both ways
    with pytest.raises(UsageError, match="family longformer cannot be read from left to right, as the rule encoder_"):
        choose_rule(tiny_model(tokenizer, longformer), "encoder_left_to_right")
    with pytest.raises(
        DataError, match=r"MINE: no masked_lm, causal_lm or permutation_lm head .* \(it has no heads\); use a model"
    ):
        choose_rule(tiny_model(tokenizer, heads=()), source="MINE")


def test_an_encoder_read_from_left_to_right_scores_each_prefix_alone() -> None:
    """Each token's probability equals that of the last state of a text that ends before it."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    for text in TEXTS[:3]:
        (score,) = score_texts(model, tokenizer, [text], rule="encoder_left_to_right")
        (ids,) = tokenizer.encode_batch([text])
        for place, token in enumerate(ids):
            prefix = PackedBatch.from_ids([[tokenizer.cls_id, *ids[:place]]], causal=True)
            log_p_V = model.masked_lm_logits(model(prefix)[-1:]).log_softmax(dim=-1)[0]
            assert float(score.log_p_N[place]) == pytest.approx(float(log_p_V[token]), abs=1e-5)


def test_masked_next_token_scores_are_those_of_one_copy_at_a_time_read_at_the_state_before(tmp_path: Path) -> None:
    """Against `BertForMaskedLM` on single copies, with its logits taken one position earlier."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    save_tiny(model, tokenizer, tmp_path)
    oracle = transformers.BertForMaskedLM.from_pretrained(tmp_path).eval()
    scores = score_texts(model, tokenizer, TEXTS, rule="masked_next_token", max_batch_tokens=70)
    for text, score in zip(TEXTS, scores, strict=True):
        ids = [tokenizer.cls_id, *tokenizer.encode_batch([text])[0], tokenizer.sep_id]
        expected = []
        for place in range(1, len(ids) - 1):
            copy = [tokenizer.mask_id if j == place else i for j, i in enumerate(ids)]
            with torch.no_grad():
                logits_V = oracle(torch.tensor([copy])).logits[0, place - 1]
            expected.append(float(logits_V.log_softmax(dim=-1)[ids[place]]))
        np.testing.assert_allclose(score.log_p_N, expected, atol=1e-5)
    in_place = score_texts(model, tokenizer, TEXTS, rule="original")
    assert all(abs(score.total - other.total) > 0.1 for score, other in zip(scores, in_place, strict=True))


@pytest.mark.parametrize(
    ("objectives", "rule"),
    [
        ((MaskedLM(), NextSentence()), "original"),
        ((MaskedLM(), CausalLM(share=0.5)), "original"),
        ((MaskedNextToken(), CausalLM(share=0.5)), "masked_next_token"),
        ((MaskedNextToken(),), "masked_next_token"),
        ((CausalLM(),), "encoder_left_to_right"),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(each.term for each in value),
)
def test_a_model_is_scored_as_it_was_trained_by_the_rule_in_its_directory(
    objectives: tuple[Objective, ...], rule: str, tmp_path: Path
) -> None:
    model = tiny_model(tiny_tokenizer())
    told = scoring_rule(objectives)
    if told is not None:
        model.extras[SCORING_RULE] = told
    save_tiny(model, tiny_tokenizer(), tmp_path)
    loaded, _ = load_model(tmp_path)
    assert choose_rule(loaded) is SCORING_RULES[rule]
    for name, other in SCORING_RULES.items():
        if other.head == "masked_lm" and SCORING_RULES[rule].shifted and not other.shifted:
            with pytest.raises(UsageError, match=f"the rule {name} reads each token from its own state; use {rule}"):
                choose_rule(loaded, name)
        elif other.head == "masked_lm":
            assert choose_rule(loaded, name) is other

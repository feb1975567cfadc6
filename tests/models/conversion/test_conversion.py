"""Continuing from a model: a new vocabulary on old weights, RoBERTa converted to a Longformer, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend

from bertkit.data.batch import PackedBatch
from bertkit.errors import UsageError
from bertkit.models.conversion.convert import (
    check_same_weights,
    converted,
    converted_config,
    vocabulary_axes,
    with_vocabulary,
)
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.bigbird import BigBirdConfig
from bertkit.models.families.fast_encoder import FastEncoderConfig
from bertkit.models.families.longformer import LongformerConfig
from bertkit.models.families.mobilebert import MobileBertConfig
from bertkit.models.families.roberta import RobertaConfig
from bertkit.models.families.transformer_xl import TransformerXlConfig
from bertkit.models.headed import HeadedModel
from bertkit.text.tokenizer import Tokenizer, TokenizerConfig
from bertkit.text.vocabulary import train_tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 15,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 22,
    "max_position_embeddings": 19,
}
GENERAL = "the cat reads a long list and the list keeps every letter of the reader's paper"
MEDICAL = "the enzyme binds the receptor and a reader of the list keeps every naïve protein bound"


def learnt(text: str, size: int = 80, kind: str = "wordpiece") -> Tokenizer:
    config = TokenizerConfig(type=kind, vocab_size=size, min_frequency=1)  # type: ignore[arg-type]  # one of its kinds
    return train_tokenizer(config, [text] * 3)


def random_model(config: EncoderConfig, tokenizer: Tokenizer, heads: tuple[str, ...] = ("masked_lm",)) -> HeadedModel:
    model = HeadedModel(config.build(tokenizer.vocab_size, pad_id=tokenizer.pad_id), heads)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def vocabulary(tokenizer: Tokenizer) -> dict[str, int]:
    return dict(tokenizer.backend.get_vocab())


def rows(model: HeadedModel, name: str) -> torch.Tensor:
    axis = vocabulary_axes(model.encoder.config, model.head_names)[name]
    return model.get_parameter(name).detach().movedim(axis, 0)


def test_the_same_vocabulary_changes_nothing() -> None:
    model = random_model(BertConfig(**SIZES), learnt(GENERAL))
    same, remade = with_vocabulary(model, learnt(GENERAL), learnt(GENERAL))
    assert same is model
    assert remade is None


@pytest.mark.parametrize("new_tokens", ["mean", "random"])
@pytest.mark.parametrize(
    "config", [BertConfig(**SIZES), MobileBertConfig(**SIZES, embedding_size=9, intra_bottleneck_size=9)]
)
def test_shared_pieces_keep_their_rows_to_the_bit_and_all_else_its_weights(
    config: EncoderConfig, new_tokens: Any
) -> None:
    old, new = learnt(GENERAL), learnt(MEDICAL, 97)
    model = random_model(config, old)
    remade, counts = with_vocabulary(model, old, new, new_tokens=new_tokens)
    shared = [(vocabulary(new)[piece], vocabulary(old)[piece]) for piece in vocabulary(new) if piece in vocabulary(old)]
    assert counts is not None
    assert counts.shared == len(shared) > 20
    assert counts.shared + counts.split + counts.drawn == remade.encoder.vocab_size == new.vocab_size
    assert (counts.split > 10) == (new_tokens == "mean")
    new_ids, old_ids = zip(*shared, strict=True)
    axes = vocabulary_axes(config, model.head_names)
    assert {"masked_lm.bias", "masked_lm.rest.weight"} & set(axes)
    for name, parameter in remade.named_parameters():
        if name in axes:
            assert torch.equal(rows(remade, name)[list(new_ids)], rows(model, name)[list(old_ids)])
        else:
            assert torch.equal(parameter, model.get_parameter(name))


def test_a_new_piece_begins_as_the_mean_of_what_the_old_tokenizer_cuts_it_into() -> None:
    old, new = learnt(GENERAL), learnt(MEDICAL, 97)
    model = random_model(BertConfig(**SIZES), old)
    remade, _ = with_vocabulary(model, old, new)
    words = [piece for piece in vocabulary(new) if not piece.startswith(("##", "[")) and piece not in vocabulary(old)]
    cuttable = 0
    for piece in words:
        parts = [part for part in old.encode_batch([piece])[0] if part != old.unk_id]
        cuttable += len(parts) > 1
        for name in ("encoder.embeddings.word.weight", "masked_lm.bias") if parts else ():
            torch.testing.assert_close(
                rows(remade, name)[vocabulary(new)[piece]], rows(model, name)[parts].mean(dim=0), rtol=0, atol=1e-7
            )
    assert cuttable > 5


def test_a_piece_that_continues_a_word_is_cut_as_one() -> None:
    """##ound is ##o ##u ##n ##d even if the old vocabulary has longer tokens, and never the letters that begin
    words."""
    old, new = learnt(GENERAL), learnt(MEDICAL, 97)
    model = random_model(BertConfig(**SIZES), old)
    remade, _ = with_vocabulary(model, old, new)
    checked = 0
    for piece in vocabulary(new):
        parts = greedy(piece, vocabulary(old)) if piece.startswith("##") else []
        if len(parts) > 1:
            for name in ("encoder.embeddings.word.weight", "masked_lm.bias"):
                found = rows(remade, name)[vocabulary(new)[piece]]
                torch.testing.assert_close(found, rows(model, name)[parts].mean(dim=0), rtol=0, atol=1e-7)
            checked += 1
    assert checked > 2


def greedy(piece: str, known: dict[str, int]) -> list[int]:
    """Longest known tokens first, all inside a word; nothing if a letter has none."""
    text, parts = piece.removeprefix("##"), []
    while text:
        end = next((end for end in range(len(text), 0, -1) if f"##{text[:end]}" in known), 0)
        if not end:
            return []
        parts.append(known[f"##{text[:end]}"])
        text = text[end:]
    return parts


def test_words_find_their_rows_across_kinds_of_vocabulary() -> None:
    old, new = learnt(GENERAL, 420, "byte-bpe"), learnt(GENERAL, 120)
    model = random_model(RobertaConfig(**SIZES), old)
    remade, _ = with_vocabulary(model, old, new)
    word, table = "encoder.embeddings.word.weight", rows(model, "encoder.embeddings.word.weight")
    for piece in ("cat", "list", "##s"):
        origin = piece.removeprefix("##") if piece.startswith("##") else f"Ġ{piece}"
        assert torch.equal(rows(remade, word)[vocabulary(new)[piece]], table[vocabulary(old)[origin]])
    for role in ("pad", "unk", "cls", "sep", "mask"):
        assert torch.equal(
            rows(remade, word)[vocabulary(new)[new.roles[role]]], table[vocabulary(old)[old.roles[role]]]
        )


def test_a_hashed_table_of_pairs_is_kept_only_with_the_numbers_of_its_words() -> None:
    sizes = {**SIZES, "hidden_size": 18, "num_attention_heads": 3}
    config = FastEncoderConfig.model_validate({n: v for n, v in sizes.items() if n in FastEncoderConfig.model_fields})
    old, other = learnt(GENERAL), learnt(MEDICAL, 97)
    model = random_model(config, old)
    appended = Tokenizer(Backend.from_str(old.backend.to_str()), old.roles)
    appended.backend.add_tokens(["receptor"])
    table = "encoder.pairs.weight"
    assert torch.equal(with_vocabulary(model, old, appended)[0].get_parameter(table), model.get_parameter(table))
    assert not with_vocabulary(model, old, other)[0].get_parameter(table).any()


def test_rows_that_are_drawn_anew_follow_the_familys_initialisation() -> None:
    old, new = learnt(GENERAL), learnt(MEDICAL, 97)
    model = random_model(BertConfig(**{**SIZES, "hidden_size": 99}), old)
    remade, _ = with_vocabulary(model, old, new, new_tokens="random", seed=3)
    anew = [number for piece, number in vocabulary(new).items() if piece not in vocabulary(old)]
    values = rows(remade, "encoder.embeddings.word.weight")[anew]
    # A normal distribution truncated at two standard deviations has 0.88 of its standard deviation.
    assert float(values.std()) == pytest.approx(0.02 * 0.88, rel=0.05)
    assert float(values.abs().max()) <= 0.04
    assert not rows(remade, "masked_lm.bias")[anew].any()


@torch.no_grad()
@pytest.mark.parametrize("cutoffs", [(15, 85), (85,), (15, 60)])
def test_entries_of_clusters_are_kept_only_if_there_are_as_many(cutoffs: tuple[int, ...]) -> None:
    """The larger vocabulary reaches a cluster more; with other numbers the entries are drawn, not broadcast."""
    old, new = learnt(GENERAL, 80), learnt(MEDICAL, 97)
    assert old.vocab_size < 85 < new.vocab_size
    sizes = {key: value for key, value in SIZES.items() if key != "max_position_embeddings"}
    config = TransformerXlConfig(**{**sizes, "hidden_size": 12}, cutoffs=cutoffs)
    for before, after in ((old, new), (new, old)):
        model = random_model(config, before, ("causal_lm",))
        remade, _ = with_vocabulary(model, before, after)
        weights, was = dict(remade.named_parameters()), dict(model.named_parameters())
        clusters = sum(each < after.vocab_size for each in cutoffs)
        name, bias = "causal_lm.cluster_weight", "causal_lm.cluster_bias"
        assert (len(weights[name]) if name in weights else 0) == clusters
        if cutoffs == (15, 60):
            assert torch.equal(weights[name], was[name])
            assert torch.equal(weights[bias], was[bias])
        elif clusters:
            assert 0 < float(weights[name].std()) < 0.05
            assert not weights[bias].any()


@torch.no_grad()
@pytest.mark.parametrize("config", [BertConfig(**SIZES), RobertaConfig(**SIZES)])
def test_text_of_shared_pieces_is_read_as_before(config: EncoderConfig) -> None:
    """Also for RoBERTa, which counts positions from the padding's id: that id changes here."""
    old, new = learnt(GENERAL), learnt(MEDICAL, 97)
    # The old vocabulary's padding is moved to another id, as in RoBERTa's.
    old = Tokenizer(old.backend, {**old.roles, "pad": "[UNK]", "unk": "[PAD]"})
    model = random_model(config, old)
    remade, _ = with_vocabulary(model, old, new)
    pieces = [piece for piece in vocabulary(new) if piece in vocabulary(old) and not piece.startswith("[")][:11]
    texts = [[tokenizer.id(piece) for piece in pieces] for tokenizer in (old, new)]
    before, after = (
        each(PackedBatch.from_ids([text, text[3:7]]))
        for each, text in zip((model, remade), texts, strict=True)  # type: ignore[arg-type]  # every piece is known
    )
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    logits, expected = remade.masked_lm_logits(after), model.masked_lm_logits(before)
    torch.testing.assert_close(logits[:, texts[1]], expected[:, texts[0]], rtol=1e-6, atol=1e-6)


def roberta_batch(lengths: tuple[int, ...]) -> PackedBatch:
    generator = np.random.default_rng(5)
    return PackedBatch.from_ids([generator.integers(4, 60, length).tolist() for length in lengths])


@torch.no_grad()
def test_a_converted_model_gives_robertas_states_where_the_window_holds_the_sequence() -> None:
    roberta = random_model(RobertaConfig(**{**SIZES, "max_position_embeddings": 42}), learnt(GENERAL))
    wanted = LongformerConfig(**{**SIZES, "max_position_embeddings": 130}, attention_window=(40, 42))
    config = converted_config(roberta.encoder.config, wanted)
    longformer = converted(roberta, config)
    assert longformer.encoder.config == config == wanted
    batch = roberta_batch((20, 7, 1))
    torch.testing.assert_close(longformer(batch), roberta(batch), rtol=1e-5, atol=1e-5)
    assert torch.equal(longformer.masked_lm_logits(roberta(batch)), roberta.masked_lm_logits(roberta(batch)))
    # All tokens are global: each attends to all through the copied projections, for any window.
    batch = roberta_batch((40, 33, 2))
    everywhere = replace(batch, global_T=torch.ones(batch.num_tokens, dtype=torch.bool))
    torch.testing.assert_close(longformer(everywhere), roberta(batch), rtol=1e-5, atol=1e-5)


def test_positions_begin_again_behind_the_last() -> None:
    tokenizer = learnt(GENERAL)  # its padding is 0: positions are rows 1 to 18 of 19
    roberta = random_model(RobertaConfig(**SIZES), tokenizer)
    longformer = converted(roberta, LongformerConfig(**{**SIZES, "max_position_embeddings": 50}, attention_window=6))
    old = roberta.get_parameter("encoder.embeddings.position.weight")
    new = longformer.get_parameter("encoder.embeddings.position.weight")
    assert torch.equal(new[:19], old)
    assert torch.equal(new[19:37], old[1:19])
    assert torch.equal(new[37:], old[1:14])


def test_what_has_no_weights_can_change_and_what_has_some_cannot() -> None:
    model = random_model(BertConfig(**SIZES), learnt(GENERAL), ("masked_lm", "next_sentence"))
    without_dropout = BertConfig(**SIZES, hidden_dropout_prob=0.0)
    changed = converted(model, without_dropout)
    assert changed.encoder.config == without_dropout
    assert changed.head_names == model.head_names
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in changed.state_dict().items())
    with pytest.raises(UsageError, match=r"num_hidden_layers 2 \(recipe: 3\)"):
        converted(model, BertConfig(**{**SIZES, "num_hidden_layers": 3}))
    with pytest.raises(UsageError, match=r"hidden_size 15 \(recipe: 18\)"):
        converted(model, BertConfig(**{**SIZES, "hidden_size": 18}))
    longer = BertConfig(**{**SIZES, "max_position_embeddings": 38})
    for check in (lambda: converted(model, longer), lambda: check_same_weights(model.encoder.config, longer)):
        with pytest.raises(UsageError, match=r"it has max_position_embeddings 19 \(recipe: 38\); set these"):
            check()
    check_same_weights(model.encoder.config, without_dropout)


def test_how_a_model_was_initialised_is_no_obstacle_to_a_conversion() -> None:
    found = BertConfig(**SIZES, initializer="normal")
    assert converted_config(found, BigBirdConfig()).model_dump()["hidden_size"] == 15


def test_a_conversion_that_is_not_known_names_those_that_are() -> None:
    with pytest.raises(UsageError, match=r"'bert'.*'longformer'.*roberta to longformer"):
        converted_config(BertConfig(**SIZES), LongformerConfig())
    with pytest.raises(UsageError, match=r"'longformer'.*'roberta'"):
        converted_config(LongformerConfig(), RobertaConfig())

"""Masked and permuted LM: what each token sees, and the loss of two streams computed one target at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from bertkit.data.batch import PackedBatch
from bertkit.data.config import DataConfig
from bertkit.data.layouts import FullSentences, ReusedSegments
from bertkit.data.random import Draw
from bertkit.data.samples import Samples
from bertkit.data.stream import corrupted
from bertkit.errors import UsageError
from bertkit.models.attention.distance_bias import distance_buckets
from bertkit.models.encoder import initialise
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.mpnet import MPNetConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.recorder import Recorder
from bertkit.objectives.forward import states
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.masked_permuted_lm import MaskedPermutedLM
from bertkit.objectives.sentence_relations import NextSentence
from bertkit.text.tokenizer import TokenizerConfig
from bertkit.text.vocabulary import train_tokenizer
from tests.objectives.worded import VOCABULARY, worded_samples

TERM = MaskedPermutedLM.term
CONFIG = MPNetConfig(
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=3,
    intermediate_size=40,
    max_position_embeddings=66,
    initializer_range=0.3,
)


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def permuted(samples: Samples, seed: int = 3, **settings: object) -> Samples:
    return corrupted(samples, [MaskedPermutedLM.model_validate(settings)], VOCABULARY, Draw(seed))


def model(**settings: object) -> HeadedModel:
    config = CONFIG.model_copy(update=settings)
    made = HeadedModel(config.build(VOCABULARY.size), ["masked_lm"])
    initialise(made, config, seed=1)
    return made


def parts(samples: Samples, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
    """Of one sequence: ids of the text, of the masks, and the positions of the targets as rows and in their order."""
    assert samples.order_T4 is not None
    first, end = samples.cu_seqlens_B1[number : number + 2].tolist()
    masks = len([index for index in samples.targets[TERM].index_M if first <= index < end])
    length = end - first - 2 * masks
    order_M = samples.order_T4[end - masks : end, 1]
    place_M = samples.order_T4[end - masks : end, 0]
    in_order = [int(place_M[order_M == number][0]) for number in range(masks)]
    return samples.ids_T[first : first + length], samples.ids_T[first + length : end - masks], place_M, in_order


@given(lengths=st.lists(st.integers(4, 60), min_size=1, max_size=5), seed=st.integers(0, 50))
def test_a_sample_is_the_text_with_a_mask_and_a_query_for_each_target(lengths: list[int], seed: int) -> None:
    """Targets and replacements are the masked LM's; masks and queries have the same ids and positions."""
    before = worded_samples(lengths, seed)
    after = permuted(before, seed, rate=0.3)
    masked = MaskedLM(rate=0.3).corrupt(before, VOCABULARY, Draw(seed))
    for number, length in enumerate(lengths):
        text, masks, place_M, in_order = parts(after, number)
        own = slice(*before.cu_seqlens_B1[number : number + 2].tolist())
        assert text.tolist() == before.ids_T[own].tolist()
        assert masks.tolist() == masked.ids_T[own][place_M].tolist()
        assert sorted(in_order) == place_M.tolist()
        assert len(text) == length
        end = after.cu_seqlens_B1[number + 1]
        assert after.ids_T[end - len(masks) : end].tolist() == masks.tolist()
        assert after.special_T[end - 2 * len(masks) : end].all()
    np.testing.assert_array_equal(after.targets[TERM].id_M, masked.targets["masked_lm"].id_M)


def test_every_order_of_the_targets_is_equally_likely() -> None:
    """24 orders of four targets, 6,000 draws: 250 each."""
    samples = permuted(worded_samples([20] * 6000), rate=0.2)
    assert samples.order_T4 is not None
    orders = samples.order_T4.reshape(6000, 28, 4)[:, -4:, 1]
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    assert len(counts) == 24
    assert 180 < counts.min() <= counts.max() < 320


def attended(
    layer: nn.Module, state_SD: Tensor, key_SD: Tensor, distance_SK: Tensor, table: nn.Embedding, seen_SK: Tensor
) -> Tensor:
    """A layer's output for these states, which attend to the keys that they see, (S, D)."""
    own = layer.attention
    rows = (own.query(state_SD), own.key(key_SD), own.value(key_SD))
    heads = [each.view(len(each), own.heads, -1).transpose(0, 1) for each in rows]
    bias_NSK = table(distance_buckets(distance_SK, buckets=32, furthest=128, both_sides=True)).permute(2, 0, 1)
    bias_NSK = bias_NSK.masked_fill(~seen_SK, -torch.inf)
    mixed_NSH = functional.scaled_dot_product_attention(*heads, attn_mask=bias_NSK)
    middle_SD = layer.attention_norm(state_SD + own.output(mixed_NSH.transpose(0, 1).flatten(1)))
    feed = layer.feed_forward
    normed_SD: Tensor = layer.feed_forward_norm(middle_SD + feed.outer(feed.activation(feed.inner(middle_SD))))
    return normed_SD


def two_streams(
    made: HeadedModel, text: np.ndarray, masks: np.ndarray, place_M: np.ndarray, in_order: list[int]
) -> Tensor:
    """Logits of the targets in their order, (M, V). The text is permuted, its targets last; the content stream has the
    text and the masks, the query stream the masks: figure 3 of the paper."""
    encoder, length, count = made.encoder, len(text), len(masks)
    rest = [place for place in range(length) if place not in in_order]
    mask_of = dict(zip(place_M.tolist(), masks.tolist(), strict=True))
    hidden = [mask_of[place] for place in in_order]
    place_K = torch.tensor([*rest, *in_order, *in_order])
    ids_K = torch.tensor([*text[rest], *text[in_order], *hidden])
    embeddings = encoder.embeddings
    content_KD = embeddings.norm(embeddings.word(ids_K) + embeddings.position(place_K + 2))
    query_MD = content_KD[length:]
    before = torch.ones(count, count).tril(-1).bool()  # targets before each one, without itself
    itself = torch.eye(count).bool()
    every, none = torch.ones(count, len(rest)).bool(), torch.zeros(count, count).bool()
    of_queries = torch.cat([every, before, ~before], dim=1)
    of_targets = torch.cat([every, before | itself, ~(before | itself)], dim=1)
    of_masks = torch.cat([every, none, ~none], dim=1)
    seen_KK = torch.cat([of_masks[:1].expand(len(rest), -1), of_targets, of_masks])
    distance_KK = place_K[None, :] - place_K[:, None]
    for layer in encoder.layers:
        query = attended(layer, query_MD, content_KD, distance_KK[length:], encoder.distance, of_queries)
        content_KD = attended(layer, content_KD, content_KD, distance_KK, encoder.distance, seen_KK)
        query_MD = query
    return made.masked_lm_logits(query_MD)


@pytest.mark.parametrize(("lengths", "rate"), [([17], 0.15), ([9, 23, 40, 12, 4], 0.2), ([31, 31], 0.5)])
def test_the_loss_is_that_of_two_streams(lengths: list[int], rate: float) -> None:
    """Loss and gradients, with sequences of unequal lengths in blocks."""
    samples = permuted(worded_samples(lengths), rate=rate)
    packed, plain = model(**NO_DROPOUT), model(**NO_DROPOUT)
    objective, batch = MaskedPermutedLM(rate=rate), PackedBatch.from_samples(samples)
    found = objective.loss(packed, states(packed, [objective], batch), batch)
    found.sum.backward()
    losses = []
    for number in range(len(lengths)):
        text, masks, place_M, in_order = parts(samples, number)
        logits_MV = two_streams(plain, text, masks, place_M, in_order)
        losses.append(functional.cross_entropy(logits_MV, torch.tensor(text[in_order]), reduction="sum"))
    torch.stack(losses).sum().backward()
    assert found.count == sum(len(parts(samples, number)[3]) for number in range(len(lengths)))
    assert found.sum.item() == pytest.approx(sum(each.item() for each in losses), rel=1e-5)
    for (name, one), (_, other) in zip(packed.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4, msg=name)


def test_a_single_target_is_that_of_the_masked_lm() -> None:
    """Without other targets, the query reads what a model of the masked text reads: no discrepancy when it is used."""
    before = worded_samples([6, 5, 7])
    samples = permuted(before, rate=0.1)
    masked = MaskedLM(rate=0.1).corrupt(before, VOCABULARY, Draw(3))
    made = model().eval()
    batch, plain = PackedBatch.from_samples(samples), PackedBatch.from_samples(masked)
    with torch.inference_mode():
        queries = made(batch)[batch.targets[TERM].index_M]
        torch.testing.assert_close(queries, made(plain)[plain.targets["masked_lm"].index_M], rtol=1e-5, atol=1e-5)


def test_a_query_sees_the_targets_before_it_and_no_others() -> None:
    samples = permuted(worded_samples([40]), rate=0.2)
    made = model().eval()
    order_M = samples.order_T4[samples.targets[TERM].index_M, 1]
    place_M = samples.order_T4[samples.targets[TERM].index_M, 0]
    with torch.inference_mode():
        known = made(PackedBatch.from_samples(samples))[samples.targets[TERM].index_M]
        for number, place in zip(order_M, place_M, strict=True):
            ids_T = samples.ids_T.copy()
            ids_T[place] = 5 + (ids_T[place] + 17) % 190
            changed = made(PackedBatch.from_samples(samples.with_changes(ids_T=ids_T)))[samples.targets[TERM].index_M]
            differs = ((changed - known).abs().amax(dim=1) > 1e-5).numpy()
            np.testing.assert_array_equal(differs, order_M > number)


def test_a_batch_can_be_split_anywhere_and_its_maps_recorded() -> None:
    samples = permuted(worded_samples([12, 30, 7, 30]), rate=0.2)
    made, whole = model().eval(), PackedBatch.from_samples(samples)
    with torch.inference_mode():
        one = made(whole)
        several = torch.cat([made(PackedBatch.from_samples(part)) for part in samples.split(40)])
        recorder = Recorder(["blocks.1.attn.hook_pattern"])
        recorded = made(whole, recorder)
    torch.testing.assert_close(several, one, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(recorded, one, rtol=1e-5, atol=1e-5)
    pattern_SS = recorder.kept["blocks.1.attn.hook_pattern"][2, 0]
    masks = int((samples.sequence_T == 2).sum()) - 7
    assert pattern_SS[:, 7 + masks // 2 :].max() == 0  # nothing attends to a query


def test_what_it_cannot_be_trained_with() -> None:
    objective = MaskedPermutedLM()
    (family,) = objective.errors(DataConfig(layout=FullSentences()), BertConfig())
    assert "set model.family: mpnet" in family
    lanes = DataConfig(layout=ReusedSegments(reused_tokens=8), sequence_length=32)
    assert any("use another layout" in each for each in objective.errors(lanes, CONFIG))
    assert not objective.errors(DataConfig(layout=FullSentences()), CONFIG)
    for other in (MaskedLM(), NextSentence()):
        (why,) = objective.combination_errors([objective, other])
        assert f"objective.{other.term} needs ordinary samples" in why


def test_a_vocabulary_has_the_padding_where_mpnet_expects_it() -> None:
    """[PAD] at 1 and [UNK] at 0 in every kind of trained vocabulary; otherwise the recipe is refused."""
    text = ["a word and another word, some more words"] * 9
    for kind in ("wordpiece", "bpe", "byte-bpe", "unigram"):
        made = train_tokenizer(TokenizerConfig(type=kind, vocab_size=300, pad_id=1), text)
        assert (made.pad_id, made.unk_id, made.cls_id) == (1, 0, 2)
        usual = train_tokenizer(TokenizerConfig(type=kind, vocab_size=300), text)
        assert made.encode_batch(["a word"]) == usual.encode_batch(["a word"])
        assert MaskedPermutedLM().prepared(made, None).mask_share == 0.8
    with pytest.raises(UsageError, match=r"set tokenizer\.pad_id: 1"):
        MaskedPermutedLM().prepared(train_tokenizer(TokenizerConfig(vocab_size=300), text), None)
    with pytest.raises(ValueError, match="pad_id: a vocabulary of words"):
        TokenizerConfig(type="word", pad_id=1)

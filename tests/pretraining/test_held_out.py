"""Held-out figures: pseudo-perplexity masks tokens one at a time, at evenly spaced positions in long sequences."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from bertkit.data.batch import PackedBatch
from bertkit.data.layouts import DocSentences, SegmentPair
from bertkit.data.stream import SampleSpec, SampleStream
from bertkit.models.families.bert import BertConfig
from bertkit.objectives.causal_lm import CausalLM
from bertkit.objectives.forward import pretraining_model
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.schedule import LinearRate
from bertkit.objectives.sentence_relations import SentenceOrder
from bertkit.pretraining.held_out import HeldOut
from bertkit.pretraining.loss_terms import ObjectiveTerms
from bertkit.training.config import EngineConfig
from bertkit.training.engine import resolve_engine
from tests.data.toy_corpus import random_documents, whole_documents, write_shards
from tests.data.toy_corpus import vocabulary as toy_vocabulary
from tests.objectives.worded import VOCABULARY, VOCABULARY_SIZE, worded_samples

LONG, SHORT, UNUSED = 151, 9, 20


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 30}
    config = BertConfig(**sizes, max_position_embeddings=LONG, initializer_range=0.5)
    built = pretraining_model(config, [MaskedLM()], VOCABULARY_SIZE, pad_id=0)
    built.initialise(3)
    return built.eval()


@torch.no_grad()
def log_likelihood(model: torch.nn.Module, ids: list[int], position: int) -> float:
    masked = [*ids[:position], VOCABULARY.mask_id, *ids[position + 1 :]]
    logits_V = model.masked_lm_logits(model(PackedBatch.from_ids([masked]))[position])
    return float(logits_V.log_softmax(-1)[ids[position]])


def test_pseudo_perplexity_masks_one_token_at_a_time_and_64_of_a_long_sequence(model: torch.nn.Module) -> None:
    samples = worded_samples([LONG, SHORT, UNUSED])
    held_out = HeldOut(samples, ())
    engine = resolve_engine(EngineConfig(device="cpu", precision="fp32", micro_batch_tokens=400))
    found = held_out.pseudo_perplexity(model, VOCABULARY, engine, sequences=2)
    masked_in_turn = []
    for one, count in zip(samples.split(1), (64, SHORT - 3), strict=False):
        ordinary = [position for position, special in enumerate(one.special_T) if not special]
        chosen = [ordinary[number * len(ordinary) // count] for number in range(count)]
        assert len(set(chosen)) == count
        masked_in_turn += [(one.ids_T.tolist(), position) for position in chosen]
    total = sum(log_likelihood(model, ids, position) for ids, position in masked_in_turn)
    expected = math.exp(-total / len(masked_in_turn))
    assert found == pytest.approx(expected, rel=1e-5)


def test_what_changes_along_the_run_is_evaluated_as_at_its_end(tmp_path: Path) -> None:
    """So that figures of early and late steps are comparable."""
    shards = write_shards(tmp_path, random_documents(60))
    spec = SampleSpec(3, "held-out/0", DocSentences(), 48, 1)
    counts = []
    for rate in (LinearRate(start=0.6, end=0.2), 0.2, 0.6):
        stream = SampleStream(spec, shards, whole_documents(shards), None)
        held_out = HeldOut.prepare(
            stream, toy_vocabulary(), [MaskedLM(rate=rate)], sequences=20, micro_batch_tokens=300
        )
        counts.append([batch.targets["masked_lm"].index_M.tolist() for batch in held_out.batches])
    assert counts[0] == counts[1] != counts[2]


@pytest.mark.parametrize(("share", "reported"), [(1e-9, False), (1.0, True)])
def test_a_perplexity_is_that_of_predictions(tmp_path: Path, share: float, reported: bool) -> None:
    objectives = [MaskedLM(), CausalLM(share=share)]
    shards = write_shards(tmp_path, random_documents(20))
    stream = SampleStream(SampleSpec(3, "held-out/0", DocSentences(), 48, 1), shards, whole_documents(shards), None)
    vocabulary = toy_vocabulary()
    held_out = HeldOut.prepare(stream, vocabulary, objectives, sequences=5, micro_batch_tokens=300)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 30}
    model = pretraining_model(BertConfig(**sizes), objectives, vocabulary.size, pad_id=0)
    engine = resolve_engine(EngineConfig(device="cpu", precision="fp32"))
    figures = held_out.figures(model, ObjectiveTerms(objectives), engine)
    assert ("perplexity/causal_lm" in figures) is reported
    assert "loss/causal_lm" in figures
    masked = {"perplexity": math.exp(figures["loss/masked_lm"])}  # every sequence is masked, or every one is causal
    assert figures.items() >= ({} if reported else masked).items()
    assert ("perplexity" in figures) is not reported


def test_the_number_of_predictions_is_that_of_masked_words_else_of_the_commonest_kind(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, random_documents(20))
    documents = whole_documents(shards)
    stream = SampleStream(SampleSpec(3, "held-out/0", SegmentPair(), 48, 1), shards, documents[:15], None)
    training = SampleStream(SampleSpec(3, "train/0", SegmentPair(), 48, 1), shards, documents[15:], None)
    found = {}
    for name, objectives in {
        "words": [MaskedLM(rate=0.1), CausalLM(share=0.5), SentenceOrder()],
        "next words": [CausalLM(share=1.0), SentenceOrder()],
        "relations": [SentenceOrder()],
    }.items():
        held_out = HeldOut.prepare(stream, toy_vocabulary(), objectives, sequences=20, micro_batch_tokens=300)
        size = held_out.size(stream, training, objectives)
        found[name] = (
            size.predictions,
            {
                term: sum(batch.targets[term].id_M.numel() for batch in held_out.batches)
                for term in held_out.batches[0].targets
            },
        )
    (words, of_term), (next_words, alone), (relations, none) = found.values()
    assert words == of_term["masked_lm"] < of_term["causal_lm"]
    assert next_words == alone["causal_lm"]
    assert (relations, none) == (20, {})


@pytest.mark.parametrize(("share", "reported"), [(1e-9, True), (1.0, False)])
def test_without_masked_words_there_is_no_unigram_baseline(tmp_path: Path, share: float, reported: bool) -> None:
    shards = write_shards(tmp_path, random_documents(20))
    stream = SampleStream(SampleSpec(3, "held-out/0", DocSentences(), 48, 1), shards, whole_documents(shards), None)
    objectives = [MaskedLM(), CausalLM(share=share)]
    held_out = HeldOut.prepare(stream, toy_vocabulary(), objectives, sequences=5, micro_batch_tokens=300)
    found = held_out.unigram_accuracy("masked_lm", shards.token_counts_V)
    assert (found is not None) is reported
    if reported:
        id_M = torch.cat([batch.targets["masked_lm"].id_M for batch in held_out.batches])
        one = int(id_M[0])  # each token of these documents occurs once
        assert held_out.unigram_accuracy("masked_lm", np.eye(one + 1, dtype=np.int64)[one]) == 1 / len(id_M)


def test_the_baseline_of_a_relation_is_the_share_of_its_commonest_label(tmp_path: Path) -> None:
    objectives = [MaskedLM(), SentenceOrder()]
    shards = write_shards(tmp_path, random_documents(40))
    layout = SegmentPair(random_partner_probability=0.3, swap_probability=0.5)
    stream = SampleStream(SampleSpec(3, "held-out/0", layout, 48, 1), shards, whole_documents(shards), None)
    held_out = HeldOut.prepare(stream, toy_vocabulary(), objectives, sequences=30, micro_batch_tokens=300)
    config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=30)
    model = pretraining_model(config, objectives, toy_vocabulary().size)
    engine = resolve_engine(EngineConfig(device="cpu", precision="fp32"))
    figures = held_out.figures(model.eval(), ObjectiveTerms(objectives), engine)
    ones = int(held_out.samples.labels["sentence_order"].sum())
    assert 15 < ones < 30
    assert figures["baseline/sentence_order"] == ones / 30
    assert "baseline/masked_lm" not in figures

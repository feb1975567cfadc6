"""Sequence to sequence: the tokens read and predicted, and the smoothed loss against torch's."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bertkit.data.batch import PackedBatch
from bertkit.data.config import DataConfig
from bertkit.data.layouts import Address, FullSentences, ParallelText
from bertkit.data.random import Draw
from bertkit.data.samples import Samples
from bertkit.data.split import split_documents
from bertkit.errors import DataError
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.transformer import TransformerSeq2SeqConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.operators.vocabulary import VocabularyProjection
from bertkit.objectives.seq2seq_lm import Seq2SeqLM
from bertkit.training.cost import step_flops
from tests.data.toy_corpus import CLS, SEP, vocabulary, whole_documents, write_shards

LAYOUT = ParallelText()
DRAW = Draw(0)


def samples(directory: Path, documents: list[list[int]], length: int = 64) -> Samples:
    shards = write_shards(directory, documents)
    plan = LAYOUT.plan(shards, whole_documents(shards), length, DRAW, 0)
    address = Address(np.zeros(len(plan), dtype=np.int64), np.arange(len(plan)))
    return LAYOUT.assemble(shards, plan, vocabulary(), address)


def test_a_pair_is_a_source_and_a_target_each_in_its_special_tokens(tmp_path: Path) -> None:
    made = samples(tmp_path, [[2, 3], [1, 1]])
    assert made.ids_T.tolist() == [CLS, 10, 11, SEP, CLS, 12, 13, 14, SEP, CLS, 15, SEP, CLS, 16, SEP]
    assert made.decoder_start_B is not None
    assert made.decoder_start_B.tolist() == [4, 3]
    assert made.side_position_T.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2]
    assert made.special_T.tolist() == [token in (CLS, SEP) for token in made.ids_T.tolist()]
    marked = Seq2SeqLM().corrupt(made, vocabulary(), DRAW)
    targets = marked.targets["seq2seq_lm"]
    assert targets.index_M.tolist() == [4, 5, 6, 7, 12, 13]
    assert targets.id_M.tolist() == [12, 13, 14, SEP, 16, SEP]
    parts = list(marked.split(9))
    assert [part.decoder_start_B.tolist() for part in parts if part.decoder_start_B is not None] == [[4], [3]]
    batch = PackedBatch.from_samples(marked)
    assert batch.pairs is not None
    assert [side.tolist() for side in batch.pairs.sides(batch.ids_T)] == [
        [CLS, 10, 11, SEP, CLS, 15, SEP],
        [CLS, 12, 13, 14, SEP, CLS, 16, SEP],
    ]


def test_long_pairs_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made = samples(tmp_path, [[2, 3], [9, 4], [3, 5]], length=12)
    assert made.lengths_B.tolist() == [9, 12]
    assert "1 of 3 pairs have more than 12 tokens together" in caplog.text


def test_documents_that_are_no_pairs_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="2 documents are no pairs, such as number 2"):
        samples(tmp_path, [[2, 3], [9], [3, 5, 1]])


def test_whole_pairs_are_held_out_of_a_few(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, [[2, 3]] * 20)
    training, held = split_documents(shards, 0.1, 0, least_tokens=10_000, whole=True)
    assert all((part[:, 1] - part[:, 0] == 2).all() for part in (training, held))
    assert len(training) + len(held) == 20
    assert 1 <= len(held) <= 5


def test_the_smoothed_loss_and_its_gradient_are_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    states, words = (torch.randn(size, 6, generator=generator).requires_grad_() for size in (11, 23))
    target = torch.randint(0, 23, (11,), generator=generator)
    loss, _ = VocabularyProjection(states, words, None).cross_entropy(
        target, label_smoothing=0.1, logit_bytes=23 * 4 * 3
    )
    loss.backward()
    ours = loss.detach(), states.grad, words.grad
    states.grad = words.grad = None
    expected = torch.nn.functional.cross_entropy(states @ words.t(), target, label_smoothing=0.1, reduction="sum")
    expected.backward()
    torch.testing.assert_close(ours, (expected.detach(), states.grad, words.grad))


def test_labels_are_smoothed_in_training_alone(tmp_path: Path) -> None:
    config = TransformerSeq2SeqConfig(
        hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, hidden_dropout_prob=0.0
    )
    model = HeadedModel(config.build(40), ("seq2seq_lm",))
    model.initialise(0)
    batch = PackedBatch.from_samples(Seq2SeqLM().corrupt(samples(tmp_path, [[2, 3], [1, 4]]), vocabulary(), DRAW))
    plain, smooth = Seq2SeqLM(), Seq2SeqLM(label_smoothing=0.2)
    hidden_TD = model(batch)
    of_eval = [each.loss(model.eval(), hidden_TD, batch).sum.item() for each in (plain, smooth)]
    of_training = [each.loss(model.train(), hidden_TD, batch).sum.item() for each in (plain, smooth)]
    assert of_eval[0] == of_eval[1] == of_training[0] != of_training[1]


def test_what_does_not_fit_is_told_with_a_remedy() -> None:
    pairs, text = DataConfig(layout=LAYOUT), DataConfig(layout=FullSentences())
    transformer = TransformerSeq2SeqConfig()
    assert not Seq2SeqLM().errors(pairs, transformer)
    (error,) = Seq2SeqLM().errors(pairs, BertConfig())
    assert "needs an encoder-decoder, which model.family 'bert' is not" in error
    (error,) = Seq2SeqLM().errors(text, transformer)
    assert "set data.layout: {name: parallel}" in error


def test_flops_are_those_of_the_products_that_are_computed() -> None:
    config = TransformerSeq2SeqConfig(
        hidden_size=24, num_hidden_layers=2, num_decoder_layers=3, num_attention_heads=4, intermediate_size=40
    )
    model = HeadedModel(config.build(50), ("seq2seq_lm",)).eval()
    model.initialise(0)
    batch = PackedBatch.from_pairs([[1] * 12] * 5, [[1] * 8] * 5)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model.token_logits("seq2seq_lm", model(batch)[:7])
    counted = step_flops(model, tokens=100, squared_lengths=5 * 20**2, predictions=7, sequences=5, source_share=0.6)
    assert counted == pytest.approx(3 * counter.get_total_flops())

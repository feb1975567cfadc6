"""The BiLSTM: torch's LSTM on each text alone, the paper's pair features, files, and exact sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bertkit.data.batch import PackedBatch
from bertkit.distillation.bilstm_student import BilstmStudent, new_bilstm, own_tokenizer
from bertkit.errors import DataError, UsageError
from bertkit.finetuning.methods.lora import Lora
from bertkit.models.families.bilstm import Bilstm, BilstmConfig
from bertkit.models.feature_lstm import FeatureLstmConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.hook_points import layer_points
from bertkit.models.labels import Labels
from bertkit.models.recorder import Recorder
from bertkit.probing.attention.measure import pattern_points
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.text.vocabulary import word_tokenizer
from bertkit.text.word_vectors import read_word_vectors

HEAD = "sequence_classification"
VOCABULARY = 37
WIDTH = 5
LENGTHS = (7, 1, 12, 7, 3)
TEXTS = ["the old man walks to the sea", "a film is a film", "nobody walks alone , and the sea is old"] * 3
MINILM_PARAMETERS = 22_713_216
"""The size of all-MiniLM-L6-v2: 30,522 words and 512 positions, width 384, six layers, a pooler."""


def bilstm(heads: tuple[str, ...] = (HEAD,), **settings: Any) -> HeadedModel:
    """Random weights, all different from zero."""
    sizes = {"embedding_size": 4, "lstm_width": WIDTH, "classifier_width": 6, "dropout": 0.0}
    config = BilstmConfig(**{**sizes, **settings})
    model = HeadedModel(config.build(VOCABULARY), heads, labels=Labels(("a", "b", "c")))
    model.initialise(seed=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(len(name)))
    return model.eval()


def rows(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, VOCABULARY, size=length).tolist() for length in lengths]


def pairs(first: list[list[int]], second: list[list[int]]) -> PackedBatch:
    types = [[0] * len(a) + [1] * len(b) for a, b in zip(first, second, strict=True)]
    return PackedBatch.from_ids([a + b for a, b in zip(first, second, strict=True)], types)


def plain_states(model: HeadedModel, ids: list[int]) -> tuple[Tensor, Tensor]:
    """All states of a text, and the last ones of each direction, by one `torch.nn.LSTM` of all layers."""
    encoder = model.encoder
    assert isinstance(encoder, Bilstm)
    config = encoder.config
    assert isinstance(config, BilstmConfig)
    oracle = nn.LSTM(config.embedding_size, config.lstm_width, config.lstm_layers, bidirectional=True)
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            kind, _, rest = name.rpartition("_l")
            number, _, reverse = rest.partition("_")
            own = f"{kind}_l0_{reverse}" if reverse else f"{kind}_l0"
            parameter.copy_(getattr(encoder.layers[int(number)], own))
        output, (last, _) = oracle(encoder.embeddings(torch.tensor(ids)))
    return output, torch.cat([last[-2], last[-1]])


def plain_logits(model: HeadedModel, read: Tensor) -> Tensor:
    head = model.get_submodule(HEAD)
    with torch.no_grad():
        hidden = functional.relu(functional.linear(read, head.dense.weight, head.dense.bias))
        return functional.linear(hidden, head.output.weight, head.output.bias)


def logits_of(model: HeadedModel, batch: PackedBatch) -> Tensor:
    with torch.no_grad():
        return model.logits(HEAD, model.states(HEAD, batch), batch)


@pytest.mark.parametrize("layers", [1, 3])
def test_single_texts_are_read_as_torch_reads_each_alone(layers: int) -> None:
    model = bilstm(lstm_layers=layers)
    own = [plain_states(model, ids) for ids in rows()]
    batch = PackedBatch.from_ids(rows())
    with torch.no_grad():
        states = model(batch)
    torch.testing.assert_close(states, torch.cat([every for every, _ in own]), rtol=1e-5, atol=1e-6)
    expected = torch.stack([plain_logits(model, last) for _, last in own])
    torch.testing.assert_close(logits_of(model, batch), expected, rtol=1e-5, atol=1e-6)


def test_pairs_are_compared_as_the_paper_has_it() -> None:
    model = bilstm(texts=2)
    first, second = rows(), rows((2, 9, 1, 6, 4), seed=1)
    expected = []
    for a, b in zip(first, second, strict=True):
        h1, h2 = plain_states(model, a)[1], plain_states(model, b)[1]
        expected.append(plain_logits(model, torch.cat([h1, h2, h1 * h2, (h1 - h2).abs()])))
    torch.testing.assert_close(logits_of(model, pairs(first, second)), torch.stack(expected), rtol=1e-5, atol=1e-6)


def test_swapping_the_texts_swaps_their_states_and_leaves_product_and_difference() -> None:
    model = bilstm(texts=2)
    first, second = rows(), rows((2, 9, 1, 6, 4), seed=1)
    with torch.no_grad():
        one, other = (
            model.summary(HEAD, model(batch), batch).unflatten(1, (4, 2 * WIDTH))
            for batch in (pairs(first, second), pairs(second, first))
        )
        same = pairs(first, first)
        alike = model.summary(HEAD, model(same), same).unflatten(1, (4, 2 * WIDTH))
    torch.testing.assert_close(one[:, [1, 0, 2, 3]], other, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(one[:, 0], one[:, 1])
    assert torch.equal(alike[:, 0], alike[:, 1])
    assert not alike[:, 3].any()


def test_a_single_text_among_pairs_has_nothing_beside_it() -> None:
    model = bilstm(texts=2)
    batch = PackedBatch.from_ids([[3, 4, 5, 6], [7, 8, 9], [1, 2]], [[0, 0, 1, 1], [0, 0, 0], [0, 1]])
    with torch.no_grad():
        read = model.summary(HEAD, model(batch), batch).unflatten(1, (4, 2 * WIDTH))
    _, alone = plain_states(model, [7, 8, 9])
    torch.testing.assert_close(read[1], torch.stack([alone, 0 * alone, 0 * alone, alone.abs()]))
    assert read[[0, 2], 1].abs().min() > 0


def test_read_as_one_text_a_pair_is_one_text() -> None:
    model, (ids,) = bilstm(texts=1), rows((9,))
    parted = PackedBatch.from_ids([ids], [[0] * 4 + [1] * 5])
    assert torch.equal(logits_of(model, parted), logits_of(model, PackedBatch.from_ids([ids])))


@pytest.mark.parametrize("texts", [1, 2])
def test_neighbours_and_order_in_a_batch_change_nothing(texts: int) -> None:
    model = bilstm(texts=texts)
    first, second = rows(), rows((2, 9, 1, 6, 4), seed=1)
    together = logits_of(model, pairs(first, second))
    alone = torch.cat([logits_of(model, pairs([a], [b])) for a, b in zip(first, second, strict=True)])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    backwards = logits_of(model, pairs(first[::-1], second[::-1]))
    torch.testing.assert_close(together, backwards.flip(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("texts", [1, 2])
def test_gradients_do_not_depend_on_how_a_batch_is_cut(texts: int) -> None:
    first, second = rows(), rows((2, 9, 1, 6, 4), seed=1)

    def gradients(cuts: list[slice]) -> dict[str, Tensor]:
        model = bilstm(texts=texts).train()
        for cut in cuts:
            batch = pairs(first[cut], second[cut])
            model.logits(HEAD, model(batch), batch).square().sum().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    whole, parts = gradients([slice(0, 5)]), gradients([slice(0, 2), slice(2, 3), slice(3, 5)])
    assert len(whole) == 1 + 8 + 4
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(("texts", "layers"), [(1, 1), (2, 1), (2, 2)])
def test_parameters_are_those_of_the_formula(texts: int, layers: int) -> None:
    words, embedding, width, dense, labels = 3000, 64, 100, 100, 2
    config = BilstmConfig(texts=texts, lstm_layers=layers)
    with torch.device("meta"):
        model = HeadedModel(config.build(words), (HEAD,), labels=Labels(("0", "1")))
    counted = sum(parameter.numel() for parameter in model.parameters())
    inputs = [embedding] + [2 * width] * (layers - 1)
    lstm = sum(2 * 4 * width * (each + width + 2) for each in inputs)
    read = 2 * width * (4 if texts == 2 else 1)
    assert counted == words * embedding + lstm + (read + 1) * dense + (dense + 1) * labels
    if layers == 1:
        assert counted == {1: 345_102, 2: 405_102}[texts]
        assert counted * 50 <= MINILM_PARAMETERS


@pytest.mark.parametrize("texts", [1, 2])
def test_what_is_saved_comes_back(texts: int, tmp_path: Path) -> None:
    model = bilstm(texts=texts, lstm_layers=2)
    save_model(model, None, tmp_path)
    again, report = load_model(tmp_path)
    assert again.head_names == (HEAD,)
    assert again.encoder.config == model.encoder.config
    assert not report.newly_initialised
    assert not report.unexpected
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    contents = json.loads((tmp_path / "config.json").read_text())
    assert contents["model_type"] == "bilstm"
    assert contents["architectures"] == ["BilstmForSequenceClassification"]


@pytest.mark.parametrize("head", ["sequence_classification", "token_classification", "multiple_choice"])
def test_every_head_finds_its_own_weights_again(head: str, tmp_path: Path) -> None:
    model = bilstm((head,))
    save_model(model, None, tmp_path)
    again, _ = load_model(tmp_path)
    batch = PackedBatch.from_ids(rows())
    with torch.no_grad():
        expected, found = (each.logits(head, each(batch), batch) for each in (model, again))
    assert again.head_names == (head,)
    assert torch.equal(expected, found)
    assert found.shape == {HEAD: (5, 3), "token_classification": (30, 3), "multiple_choice": (5, 1)}[head]


def test_heads_that_it_cannot_have_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"'bilstm' has no head for masked_lm; it has sequence_classification"):
        bilstm(("masked_lm",))
    with pytest.raises(ValueError, match="bilstm has no layers whose states could be read"):
        FeatureLstmConfig(base=BilstmConfig(), layers="last")


def test_its_points_are_the_embeddings_and_each_layers_states() -> None:
    model = bilstm(lstm_layers=2)
    recorder = Recorder(["hook_embed", "blocks.0.hook_lstm", "blocks.1.hook_lstm"])
    batch = PackedBatch.from_ids(rows())
    with torch.no_grad():
        last = model(batch, recorder)
    assert {name: tuple(kept.shape) for name, kept in recorder.kept.items()} == {
        "hook_embed": (30, 4),
        "blocks.0.hook_lstm": (30, 10),
        "blocks.1.hook_lstm": (30, 10),
    }
    assert torch.equal(recorder.kept["blocks.1.hook_lstm"], last)


def test_what_asks_for_layers_or_attention_is_told_that_there_is_none() -> None:
    for points, message in ((layer_points, "no hidden states"), (pattern_points, "no attention maps")):
        with pytest.raises(DataError, match=f"family bilstm has {message}"):
            points(bilstm())


@pytest.mark.parametrize("vocabulary", ["wordpiece", "words"])
def test_a_new_student_reads_texts_with_an_end_and_no_beginning(vocabulary: str, tmp_path: Path) -> None:
    student = BilstmStudent.model_validate({"vocabulary": vocabulary, "vocab_size": 60})
    directory = new_bilstm(TEXTS, student, tmp_path / "start", pairs=True)
    tokenizer = load_tokenizer(directory)
    encoder = SequenceEncoder(tokenizer, max_tokens=64)
    first, empty = encoder.ids(["The old sea", ""])
    assert encoder.sequence(first, example="a") == ([*first, tokenizer.sep_id], [0] * (len(first) + 1))
    ids, types = encoder.sequence(empty, first, example="b")
    assert ids == [tokenizer.sep_id, *first, tokenizer.sep_id]
    assert types == [0] + [1] * (len(first) + 1)
    model, _ = load_model(directory, heads=(HEAD,), new=(HEAD,))
    assert isinstance(model.encoder.config, BilstmConfig)
    assert model.encoder.config.texts == 2
    assert model.encoder.vocab_size == tokenizer.vocab_size <= 60


def test_equal_texts_and_seeds_give_equal_bytes(tmp_path: Path) -> None:
    student = BilstmStudent(vocab_size=60)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        new_bilstm(TEXTS, student, tmp_path / name, pairs=False, seed=seed)
    files = {name: {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "abc"}
    assert files["a"] == files["b"]
    assert {name for name in files["a"] if files["a"][name] != files["c"][name]} == {"model.safetensors"}


def test_a_vocabulary_of_words_has_the_commonest_and_no_parts() -> None:
    tokenizer = word_tokenizer(["b b b c c a a d", "b é"], 5 + 3)
    assert [tokenizer.token(number) for number in range(5, tokenizer.vocab_size)] == ["b", "a", "c"]
    ids, _ = tokenizer.encode_plain(["B bb a d c"])
    assert ids.tolist() == [5, tokenizer.unk_id, 6, tokenizer.unk_id, 7]
    with pytest.raises(UsageError, match="5 special tokens"):
        word_tokenizer(["a"], 5)
    with pytest.raises(DataError, match="no text"):
        word_tokenizer([" "], 9)


@pytest.mark.parametrize("header", ["", "4 3\n"])
def test_known_words_begin_with_their_vectors(header: str, tmp_path: Path) -> None:
    vectors = tmp_path / "vectors.txt"
    vectors.write_text(f"{header}sea 1 0.5 -2\nunseen 1 1 1\nold 0 0 3e-1\n[SEP] 9 9 9\n")
    settings = {"vocabulary": "words", "vocab_size": 60, "embedding_size": 3}
    plain = BilstmStudent.model_validate(settings)
    student = BilstmStudent.model_validate({**settings, "word_vectors": str(vectors)})
    without, _ = load_model(new_bilstm(TEXTS, plain, tmp_path / "without", pairs=False))
    start, _ = load_model(new_bilstm(TEXTS, student, tmp_path / "with", pairs=False))
    tokenizer = load_tokenizer(tmp_path / "with")
    table = without.encoder.word_embedding.weight.detach().clone()
    table[tokenizer.id("sea")] = torch.tensor([1, 0.5, -2])
    table[tokenizer.id("old")] = torch.tensor([0, 0, 0.3])
    assert torch.equal(start.encoder.word_embedding.weight, table)
    wide = BilstmStudent.model_validate({**settings, "embedding_size": 4, "word_vectors": str(vectors)})
    with pytest.raises(UsageError, match=r"embedding_size is 4, but the vectors in .* have 3 numbers"):
        new_bilstm(TEXTS, wide, tmp_path / "wide", pairs=False)


def test_faulty_word_vectors_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    for text, message in (
        ("sea 1 2\nold 1\n", "line 2: 2 fields, expected a word and 2 numbers"),
        ("sea 1 2\nold 1 x\n", "line 2: 'old'"),
        ("sea 1 nan\n", "not finite"),
        ("\n", "contains no word vectors"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            read_word_vectors(path)


def test_nearest_words_are_those_of_the_greatest_cosine(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    table = generator.normal(size=(40, 6)).astype(np.float32)
    path = tmp_path / "vectors.txt"
    path.write_text("".join(f"w{n} {' '.join(map(str, row))}\n" for n, row in enumerate(table.tolist())))
    vectors = read_word_vectors(path)
    unit = table / np.linalg.norm(table, axis=1, keepdims=True)
    order = np.argsort(-(unit @ unit[7]))
    assert vectors.nearest("w7", 5) == [f"w{n}" for n in order[1:6]]
    assert len(vectors.nearest("w7", 100)) == 39
    assert vectors.nearest("unknown", 5) == []
    assert read_word_vectors(path, most_words=3).words == ("w0", "w1", "w2")


def test_a_student_made_for_another_number_of_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"student\.texts is 1, but an example of the task has 2"):
        new_bilstm(TEXTS, BilstmStudent(texts=1, vocab_size=60), tmp_path / "start", pairs=True)
    assert not (tmp_path / "start").exists()


@pytest.mark.parametrize(("lowercase", "tokens"), [(True, ["the", "sea", "[SEP]"]), (False, ["The", "sea", "[SEP]"])])
@pytest.mark.parametrize("vocabulary", ["words", "wordpiece"])
def test_a_students_vocabulary_keeps_capitals_where_it_is_told_to(
    vocabulary: str, lowercase: bool, tokens: list[str]
) -> None:
    student = BilstmStudent(family="bilstm", vocabulary=vocabulary, vocab_size=200, lowercase=lowercase)
    tokenizer = own_tokenizer(["The sea", "the sea", "The old sea"] * 30, student)
    assert tokenizer.backend.encode("The sea").tokens == tokens


def test_a_model_without_linear_maps_has_none_to_adapt() -> None:
    with pytest.raises(UsageError, match=r"method\.targets: .* query or value; it has none, so use another method"):
        Lora().prepare(bilstm(), seed=0)

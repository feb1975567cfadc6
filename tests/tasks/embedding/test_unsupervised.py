"""Unsupervised losses: SimCSE's two passes, TSDAE's deletion, and its decoder as in sentence-transformers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bertkit.data.random import Draw
from bertkit.errors import UsageError
from bertkit.files import read_json, write_json
from bertkit.finetuning.loss_terms import TASK, TaskTerms
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.bigbird import BigBirdConfig
from bertkit.models.files.hub import load_model
from bertkit.models.headed import HeadedModel
from bertkit.models.vector_decoder import VectorAttention, VectorDecoder
from bertkit.tasks.base import Features
from bertkit.tasks.embedding.deletion import WHOLE, WORD, without_words
from bertkit.tasks.embedding.losses.multiple_negatives import MultipleNegativesLoss
from bertkit.tasks.embedding.losses.simcse import SimcseLoss
from bertkit.tasks.embedding.losses.tsdae import TsdaeLoss
from bertkit.tasks.embedding.task import MODULE, TEXT_NUMBER, Embedding, VectorForm
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.examples import SentenceExample
from bertkit.text.tokenizer_files import load_tokenizer
from tests.tasks.tiny_task import reviews, write_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("unsupervised") / "model", heads=("masked_lm",), dropout=0.1)


@pytest.fixture(scope="module")
def encoder(directory: Path) -> SequenceEncoder:
    return SequenceEncoder(load_tokenizer(directory), max_tokens=20)


def texts(count: int) -> list[SentenceExample]:
    return [SentenceExample(str(i), (text,)) for i, (text, _) in enumerate(reviews(count, 3))]


def model_of(directory: Path, task: Embedding) -> HeadedModel:
    model, _ = load_model(directory, heads=(task.head,), new=(task.head,))
    for name, module in task.modules(model, 0, directory).items():
        model.companions[name] = module
    return model


def corrupted(features: Features, share: float, epoch: int = 0) -> list[list[int]]:
    items = np.arange(features.num_examples)
    batch = without_words(features.batch(items), items, TsdaeLoss(deletion=share), Draw(4, "tsdae"), epoch)
    bounds = batch.packed.sequences.cu_seqlens_B1.tolist()
    ids = batch.packed.ids_T.tolist()
    return [ids[start:end] for start, end in pairwise(bounds)]


def test_simcse_reads_each_text_twice_under_two_dropouts(directory: Path, encoder: SequenceEncoder) -> None:
    task = Embedding(SimcseLoss(projection=False), ("spearman",), form=VectorForm(("cls",)))
    features = task.encode(texts(9), encoder)
    assert np.diff(features.example_starts_I1).tolist() == [2] * 9
    assert features.example_labels[TEXT_NUMBER].shape == (9, 2)
    batch = features.batch(np.arange(9))
    model = model_of(directory, task).train()
    torch.manual_seed(0)
    vectors = task.logits(model, model.states(task.head, batch.packed), batch)
    assert float((vectors[:, 0] - vectors[:, 1]).abs().max()) > 1e-3
    wanted = MultipleNegativesLoss().among(vectors, batch.example_labels[TEXT_NUMBER])
    torch.testing.assert_close(task.loss_with(model, vectors, batch).sum, wanted.sum)
    model.eval()
    calm = task.logits(model, model.states(task.head, batch.packed), batch)
    torch.testing.assert_close(calm[:, 0], calm[:, 1])


def test_simcse_warns_of_a_model_without_dropout(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = Embedding(SimcseLoss(), ("spearman",), form=VectorForm(("cls",)))
    model_of(directory, task)
    assert "dropout" not in caplog.text
    calm = write_model(tmp_path / "calm", dropout=0.0)
    settings = read_json(calm / "config.json")
    write_json(calm / "config.json", settings | {"attention_probs_dropout_prob": 0.1})
    model_of(calm, task)
    assert "dropout" not in caplog.text
    write_json(calm / "config.json", settings | {"classifier_dropout": 0.1})
    model_of(calm, task)
    assert "differ only by dropout" in caplog.text


def test_simcses_dense_layer_is_trained_and_dropped(directory: Path, encoder: SequenceEncoder) -> None:
    task = Embedding(SimcseLoss(), ("spearman",), form=VectorForm(("cls",)))
    model = model_of(directory, task)
    batch = task.encode(texts(5), encoder).batch(np.arange(5))
    TaskTerms(task).losses(model, batch)[TASK].sum.backward()
    gradient = model.get_parameter(f"companions.{MODULE}.0.weight").grad
    assert gradient is not None
    assert float(gradient.abs().sum()) > 0
    assert not any(MODULE in name for name in model.own_state_dict())


def test_simcses_dense_layer_is_drawn_like_berts_layers() -> None:
    """The code's class draws it in init_weights: normal with initializer_range, biases zero."""
    config = BertConfig(hidden_size=96, num_attention_heads=2, num_hidden_layers=1, initializer_range=0.3)
    model = HeadedModel(config.build(31))
    torch.manual_seed(0)
    module = SimcseLoss().module(96, 0, model)
    assert module is not None
    weight, bias = module.get_parameter("0.weight"), module.get_parameter("0.bias")
    assert float(weight.std()) == pytest.approx(0.3, rel=0.03)
    assert float(weight.abs().max()) > 3 * 0.3
    assert not bias.any()


def test_deletion_keeps_order_special_tokens_and_at_least_a_word(encoder: SequenceEncoder) -> None:
    features = Embedding(TsdaeLoss(), ("spearman",)).encode(texts(200), encoder)
    whole, left = corrupted(features, 0.0), corrupted(features, 0.6)
    for before, after in zip(whole, left, strict=True):
        assert after[0] == before[0]
        assert after[-1] == before[-1]
        rest = iter(before)
        assert all(token in rest for token in after), "in the order of the text"
        assert len(after) >= 3
    words = features.token_labels[WORD]
    kept = sum(map(len, left)) - 2 * len(left)
    assert kept / int((words >= 0).sum()) == pytest.approx(0.45, abs=0.06), "0.4, and more if one word must be kept"
    assert corrupted(features, 0.6) == left, "a function of the address"
    assert corrupted(features, 0.6, epoch=1) != left
    assert min(map(len, corrupted(features, 0.999))) == 3


def test_words_are_deleted_whole(encoder: SequenceEncoder) -> None:
    """A word of several tokens is kept or deleted as one."""
    example = SentenceExample("0", ("unknownword cat otherword",))
    features = Embedding(TsdaeLoss(), ("spearman",)).encode([example], encoder)
    words = features.token_labels[WORD].tolist()
    ids = features.ids_T.tolist()
    assert words[0] == words[-1] == -1
    assert words.count(0) > 1
    for epoch in range(20):
        (after,) = corrupted(features, 0.5, epoch)
        left = [w for w in (0, 1, 2) if all(i in after for i, own in zip(ids, words, strict=True) if own == w)]
        assert len(after) - 2 == sum(words.count(w) for w in left)


def test_each_token_but_the_first_is_predicted(directory: Path, encoder: SequenceEncoder) -> None:
    task = Embedding(TsdaeLoss(), ("spearman",))
    features = task.encode(texts(6), encoder)
    items = np.arange(6)
    batch = task.corrupted(features.batch(items), items, seed=1, epoch=0)
    assert batch.example_labels[WHOLE].shape[0] == 6
    model = model_of(directory, task).eval()
    found = TaskTerms(task).losses(model, batch)[TASK]
    assert found.count == task.count(batch) == features.ids_T.size - 6
    assert bool(torch.isfinite(found.sum))


def test_the_decoder_is_that_of_sentence_transformers(
    directory: Path, encoder: SequenceEncoder, tmp_path: Path
) -> None:
    """With equal cross-attention, value and gradient of its loss are those of its DenoisingAutoEncoderLoss, whose
    vocabulary head is the checkpoint's."""
    library = pytest.importorskip("sentence_transformers", reason="the oracle is a development dependency")
    from sentence_transformers.sentence_transformer import losses as oracle

    task = Embedding(TsdaeLoss(), ("spearman",), form=VectorForm(("cls",)))
    model = model_of(directory, task).eval()
    own = model.companions[MODULE]
    assert isinstance(own, VectorDecoder)
    transformer = library.sentence_transformer.modules.Transformer(str(directory))
    pooling = library.sentence_transformer.modules.Pooling(30, pooling_mode="cls")
    theirs = library.SentenceTransformer(modules=[transformer, pooling], device="cpu")
    loss = oracle.DenoisingAutoEncoderLoss(theirs, tie_encoder_decoder=True).eval()
    with torch.no_grad():
        for cross, layer in zip(own.cross, loss.decoder.bert.encoder.layer, strict=True):
            assert isinstance(cross, VectorAttention)
            layer.crossattention.self.value.load_state_dict(cross.value.state_dict())
            layer.crossattention.output.dense.load_state_dict(cross.output.state_dict())
            layer.crossattention.output.LayerNorm.load_state_dict(cross.norm.state_dict())
    examples = texts(7)
    items = np.arange(7)
    features = task.encode(examples, encoder)
    batch = task.corrupted(features.batch(items), items, seed=1, epoch=0)
    found = TaskTerms(task).losses(model, batch)[TASK]
    (found.sum / found.count).backward()

    def padded(rows: list[list[int]]) -> dict[str, torch.Tensor]:
        size = max(map(len, rows))
        pad = encoder.tokenizer.pad_id
        ids = torch.tensor([[*row, *[pad] * (size - len(row))] for row in rows])
        return {"input_ids": ids, "attention_mask": (ids != pad).long(), "token_type_ids": torch.zeros_like(ids)}

    bounds = batch.packed.sequences.cu_seqlens_B1.tolist()
    noisy = [batch.packed.ids_T.tolist()[start:end] for start, end in pairwise(bounds)]
    whole = [[token for token in row if token >= 0] for row in batch.example_labels[WHOLE].tolist()]
    value = loss([padded(noisy), padded(whole)], None)
    torch.testing.assert_close(found.sum / found.count, value.detach(), rtol=1e-5, atol=1e-5)
    value.backward()
    weight = loss.decoder.bert.encoder.layer[0].crossattention.self.value.weight
    torch.testing.assert_close(own.cross[0].get_parameter("value.weight").grad, weight.grad, rtol=1e-4, atol=1e-6)


def test_the_vocabulary_head_is_that_of_the_checkpoint_if_it_has_one(directory: Path, tmp_path: Path) -> None:
    task = Embedding(TsdaeLoss(), ("spearman",), form=VectorForm(("cls",)))
    model, _ = load_model(directory, heads=(task.head,), new=(task.head,))
    headless = write_model(tmp_path / "headless", heads=())
    drawn, own, without = (task.modules(model, 0, each)[MODULE].state_dict() for each in (None, directory, headless))
    file = load_file(directory / "model.safetensors")
    for name, hub_name in (("dense", "transform.dense"), ("norm", "transform.LayerNorm")):
        for leaf in ("weight", "bias"):
            assert torch.equal(own[f"head.{name}.{leaf}"], file[f"cls.predictions.{hub_name}.{leaf}"])
    assert torch.equal(own["head.bias"], file["cls.predictions.bias"])
    assert not torch.equal(own["head.dense.weight"], drawn["head.dense.weight"])
    assert all(torch.equal(own[name], drawn[name]) for name in own if not name.startswith("head."))
    assert all(torch.equal(without[name], drawn[name]) for name in drawn)


def test_tsdae_refuses_other_layers_and_several_vectors(directory: Path) -> None:
    task = Embedding(TsdaeLoss(), ("spearman",), form=VectorForm(("cls", "mean")))
    model, _ = load_model(directory, heads=(task.head,), new=(task.head,))
    with pytest.raises(UsageError, match="one vector of the encoder's width"):
        task.modules(model, 0)


def test_tsdae_refuses_attention_without_a_causal_form() -> None:
    """Its decoder would read the tokens that it predicts."""
    task = Embedding(TsdaeLoss(), ("spearman",))
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 20}
    for kind, fits in (("block_sparse", False), ("original_full", True)):
        config = BigBirdConfig.model_validate({**sizes, "attention_type": kind})
        model = HeadedModel(config.build(50), (task.head,))
        model.initialise(0)
        if fits:
            assert isinstance(task.modules(model, 0)[MODULE], VectorDecoder)
        else:
            with pytest.raises(UsageError, match="'big_bird' has others"):
                task.modules(model, 0)

"""Feature-based use: the states of BERT's table 7, an LSTM over packed sequences, and cached features."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError, UsageError
from bertkit.finetuning.methods.feature_store import FeatureStore, fill
from bertkit.finetuning.methods.features import FeatureBased
from bertkit.models.conversion.pruning import prune_heads, pruned_heads
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.bilstm import packed_lstm
from bertkit.models.feature_lstm import FeatureLstm, FeatureLstmConfig, LayerChoice, LayerMix
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.labels import Labels
from bertkit.models.recorder import Recorder
from bertkit.models.registry import FAMILIES
from bertkit.tasks.base import EncodedTokenCounts, Features, FeatureWriter
from bertkit.training.engine import Engine
from bertkit.training.method import Full, RunResources
from tests.models.oracle import VOCABULARY, Case, all_cases

SIZES = {
    "hidden_size": 12,
    "num_hidden_layers": 5,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 19,
    "hidden_act": "gelu",
}
LENGTHS = (7, 1, 12, 7, 3)
ENGINE = Engine(torch.device("cpu"), bf16=False, micro_batch_tokens=20, workers=0)
CHOICES = get_args(LayerChoice)
ONE_OF_EACH_FAMILY = list({case.config_class: case for case in reversed(all_cases())}.values())


def bert(**settings: Any) -> BertConfig:
    return BertConfig(**{**SIZES, **settings})


def reader(config: EncoderConfig, head: str = "token_classification", **settings: Any) -> HeadedModel:
    """Random weights, all different from zero, so each part matters."""
    whole = FeatureLstmConfig(base=config, **{"lstm_width": 5, "layers": "last", **settings})
    model = HeadedModel(whole.build(VOCABULARY, pad_id=1), (head,), labels=Labels(("a", "b", "c")))
    model.initialise(seed=2)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(0, 0.1, generator=generator))
    return model.eval()


def lstm_of(model: HeadedModel) -> FeatureLstm:
    assert isinstance(model.encoder, FeatureLstm)
    return model.encoder


def rows(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(2, VOCABULARY, size=length).tolist() for length in lengths]


def features_of(sequences: list[list[int]]) -> Features:
    writer = FeatureWriter()
    for number, ids in enumerate(sequences):
        writer.add(ids, [0] * len(ids))
        writer.close(number)
    return writer.finish(EncodedTokenCounts(len(sequences), 0, 0), labelled=False)


@pytest.mark.parametrize("layers", [1, 2])
def test_packed_sequences_equal_torchs_lstm_on_each_alone(layers: int) -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(4, 3, num_layers=layers, bidirectional=True)
    batch = PackedBatch.from_ids(rows())
    together = torch.randn(sum(LENGTHS), 4, requires_grad=True)
    alone = together.detach().clone().requires_grad_()
    ours = packed_lstm(lstm, together, batch.sequences.cu_seqlens_B1)
    theirs = torch.cat([lstm(part[:, None])[0][:, 0] for part in alone.split(LENGTHS)])
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    weights = torch.randn_like(ours)
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    torch.testing.assert_close(together.grad, alone.grad, rtol=1e-5, atol=1e-6)


def test_a_weighted_sum_with_equal_weights_is_the_mean() -> None:
    states_TND = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(1))
    mix = LayerMix(4)
    torch.testing.assert_close(mix(states_TND.flatten(1)), states_TND.mean(dim=1))
    with torch.no_grad():
        mix.weight.copy_(torch.tensor([0.0, 1e9, 0.0, 0.0]))
        mix.scale.fill_(2.0)
    torch.testing.assert_close(mix(states_TND.flatten(1)), 2 * states_TND[:, 1])


@pytest.mark.parametrize("choice", CHOICES)
def test_the_states_read_are_those_of_transformers(choice: LayerChoice, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = reader(bert(), layers=choice)
    base = HeadedModel(lstm_of(model).base)
    save_model(base, None, tmp_path)
    oracle = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        ours = lstm_of(model).features(PackedBatch.from_ids(rows()))
        states = [oracle(torch.tensor([ids]), output_hidden_states=True).hidden_states for ids in rows()]
    by_state = [torch.cat([own[number][0] for own in states]) for number in range(6)]
    expected = {
        "embeddings": by_state[:1],
        "second-to-last": by_state[4:5],
        "last": by_state[5:],
        "weighted-sum-last-four": by_state[2:],
        "concat-last-four": by_state[2:],
        "weighted-sum-all": by_state[1:],
        "weighted-sum-with-embeddings": by_state,
    }[choice]
    torch.testing.assert_close(ours, torch.cat(expected, dim=1), rtol=1e-5, atol=1e-5)
    width = 12 * len(expected) if choice.startswith("concat") else 12
    assert lstm_of(model).lstm.input_size == width


@pytest.mark.parametrize("case", ONE_OF_EACH_FAMILY, ids=str)
def test_every_family_can_be_read_and_comes_back_from_its_files(case: Case, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    contents = getattr(transformers, case.config_class)(**case.settings, vocab_size=VOCABULARY).to_dict()
    config = FAMILIES[contents["model_type"]].from_hub(contents)
    model = reader(config, layers="weighted-sum-all", lstm_width=3)
    save_model(model, None, tmp_path)
    again, report = load_model(tmp_path)
    assert not report.missing
    assert not report.unexpected
    assert again.head_names == model.head_names
    assert again.encoder.config == model.encoder.config
    batch = PackedBatch.from_ids(rows(lengths=(5, 2, 9)))
    with torch.no_grad():
        first, second = (each.logits("token_classification", each(batch), batch) for each in (model, again))
    assert torch.equal(first, second)
    assert first.std() > 1e-3


def test_heads_that_the_encoder_lacks_are_in_the_files(tmp_path: Path) -> None:
    start = HeadedModel(bert().build(VOCABULARY), ("token_classification",), labels=Labels(("a", "b")))
    start.initialise(seed=2)
    prune_heads(start, {1: [0, 2]})
    model = FeatureBased(layers="last", lstm_width=5).prepare(start, 3)
    save_model(model, None, tmp_path)
    again, _ = load_model(tmp_path)
    assert pruned_heads(lstm_of(again).base) == {1: (0, 2)}
    batch = PackedBatch.from_ids(rows())
    with torch.no_grad():
        assert torch.equal(again(batch), model(batch))


@pytest.mark.parametrize("head", ["sequence_classification", "token_classification", "span", "multiple_choice"])
def test_a_batch_gives_what_its_sequences_give_alone(head: str) -> None:
    model = reader(bert(), head, layers="concat-last-four")
    batch = PackedBatch.from_ids(rows())
    parts = [PackedBatch.from_ids([ids]) for ids in rows()]
    with torch.no_grad():
        together = model.logits(head, model(batch), batch)
        alone = torch.cat([model.logits(head, model(part), part) for part in parts])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    assert together.shape[0] == (sum(LENGTHS) if head in ("token_classification", "span") else len(LENGTHS))


def test_the_encoder_has_no_dropout_and_gets_no_gradient_while_the_lstm_learns() -> None:
    model = reader(bert(hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5), dropout=0.5)
    batch = PackedBatch.from_ids(rows())
    own = lstm_of(model)
    quiet = own.features(batch)
    model.train()
    assert torch.equal(own.features(batch), quiet)
    first, second = model(batch), model(batch)
    assert not torch.equal(first, second)
    first.sum().backward()
    got = {name for name, parameter in own.named_parameters() if parameter.grad is not None}
    assert got == {name for name, _ in own.named_parameters() if name.startswith("lstm.")}


def test_a_recorder_sees_the_encoder_and_its_edits_count() -> None:
    model = reader(bert(), layers="last")
    batch = PackedBatch.from_ids(rows())
    seen = Recorder(["blocks.1.hook_resid_post", "blocks.4.attn.hook_pattern", "features.hook_read"])
    with torch.no_grad():
        assert torch.allclose(model(batch, seen), model(batch), atol=1e-6)
        edited = model(batch, Recorder(edits={"hook_embed": torch.zeros_like}))
    assert seen.kept.keys() == seen.wanted
    assert not torch.allclose(edited, model(batch))
    words = Recorder(["hook_embed"])
    words_TD: list[Tensor] = []
    words.edits["hook_embed"] = lambda tensor: words_TD.append(tensor.requires_grad_()) or tensor  # type: ignore[func-returns-value]  # append gives None
    model(batch, words).sum().backward()
    assert next(model.encoder.parameters()).grad is not None


def test_computing_features_is_displayed(tmp_path: Path) -> None:
    shown: list[tuple[str, int | None, int]] = []

    @contextmanager
    def display(label: str, total: int | None = None, unit: str = "steps", start: int = 0) -> Iterator[Any]:
        yield SimpleNamespace(update=lambda done, note=None: shown.append((f"{label} ({unit})", total, done)))

    model = reader(bert())
    store = FeatureStore(tmp_path, lstm_of(model).features_width)
    fill(store, model, [features_of(rows())], RunResources(ENGINE, tmp_path, 1e9, display))
    assert shown == [("features of 30 tokens (batches)", 2, done) for done in (1, 2)]


def test_kept_features_equal_a_forward_pass(tmp_path: Path) -> None:
    model = reader(bert(), layers="concat-last-four")
    own = lstm_of(model)
    sequences = [*rows(), rows()[2], *rows(seed=1)]
    features = features_of(sequences)
    store = FeatureStore(tmp_path, own.features_width)
    fill(store, model, [features, features], RunResources(ENGINE, tmp_path, 1e9))
    distinct = {tuple(ids) for ids in sequences}
    assert store.size_bytes == sum(map(len, distinct)) * 48 * 4
    with torch.no_grad():
        for items in ([0], [4, 2, 9], list(range(len(sequences)))):
            batch = features.batch(np.asarray(items)).packed
            kept = store.get(batch)
            assert kept is not None
            torch.testing.assert_close(kept, own.features(batch), rtol=1e-5, atol=1e-6)
            plain = model(batch)
            own.store = store
            torch.testing.assert_close(model(batch), plain, rtol=1e-5, atol=1e-6)
            own.store = None
    assert store.get(PackedBatch.from_ids([[5, 6], sequences[0]])) is None
    assert not list(tmp_path.iterdir()), "the file has no name"
    store.close()


def test_kept_features_are_those_of_the_same_batch_to_the_bit(tmp_path: Path) -> None:
    """Features are computed in the same batches each time, so a resumed run reads the same bits."""
    model = reader(bert(), layers="weighted-sum-last-four")
    features = features_of(rows(lengths=(6, 6, 6)))
    tables = []
    for engine_tokens in (18, 18):
        store = FeatureStore(tmp_path, lstm_of(model).features_width)
        fill(store, model, [features], RunResources(Engine(ENGINE.device, False, engine_tokens, 0), tmp_path, 1e9))
        batch = features.batch(np.arange(3)).packed
        tables.append(store.get(batch))
    assert tables[0] is not None
    assert tables[1] is not None
    assert torch.equal(tables[0], tables[1])
    assert torch.equal(tables[0], lstm_of(model).features(batch))


def test_a_split_that_does_not_fit_is_computed_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = reader(bert())
    large, small = features_of(rows()), features_of(rows(seed=5, lengths=(2, 3)))
    store = FeatureStore(tmp_path, 12)
    fill(store, model, [large, small], RunResources(ENGINE, tmp_path, 10 * 12 * 4))
    assert "engine.feature_store_gb" in caplog.text
    assert store.size_bytes == 5 * 12 * 4
    assert store.get(large.batch(np.asarray([0])).packed) is None
    assert store.get(small.batch(np.asarray([1])).packed) is not None


def test_a_full_disk_is_logged_and_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = reader(bert())
    store = FeatureStore(tmp_path, 12)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bertkit.cache._write", full)
    fill(store, model, [features_of(rows())], RunResources(ENGINE, tmp_path, 1e9))
    assert "No space left on device" in caplog.text
    assert store.get(PackedBatch.from_ids(rows())) is None


def wrapped(model: HeadedModel, **settings: Any) -> HeadedModel:
    return FeatureBased(lstm_width=4, **settings).prepare(model, seed=7)


def plain_model(**settings: Any) -> HeadedModel:
    model = HeadedModel(bert(**settings).build(VOCABULARY), ("token_classification",))
    model.initialise(seed=1)
    return model


def test_only_what_is_above_the_encoder_is_trained_and_drawn() -> None:
    model = plain_model()
    before = {name: tensor.clone() for name, tensor in model.encoder.state_dict().items()}
    found = wrapped(model, layers="weighted-sum-all")
    method = FeatureBased()
    method.set_trained(found, epoch=0)
    trained = {name for name, parameter in found.named_parameters() if parameter.requires_grad}
    assert all(name.startswith(("encoder.lstm.", "encoder.mix.", "token_classification.")) for name in trained)
    assert len(trained) == len(list(found.parameters())) - len(before)
    base = lstm_of(found).base.state_dict()
    assert all(torch.equal(base[name], tensor) for name, tensor in before.items())
    other = wrapped(plain_model(), layers="weighted-sum-all")
    assert torch.equal(lstm_of(found).lstm.weight_hh_l1, lstm_of(other).lstm.weight_hh_l1)
    bound = 4**-0.5
    assert all(
        0.8 * bound < float(weight.detach().abs().max()) <= bound
        for name, weight in lstm_of(found).lstm.named_parameters()
        if name.startswith("weight")
    )


def test_a_model_of_the_same_settings_is_kept_and_others_start_from_its_encoder() -> None:
    first = wrapped(plain_model(), layers="last")
    assert wrapped(first, layers="last") is first
    other = wrapped(first, layers="embeddings")
    assert lstm_of(other).base is lstm_of(first).base
    with pytest.raises(UsageError, match=r"features of a frozen encoder.*method\.name=features"):
        Full().prepare(first, seed=0)


def test_settings_that_do_not_fit_the_encoder_are_refused(tmp_path: Path) -> None:
    for layers, choice, needed in (
        (3, "concat-last-four", 4),
        (1, "weighted-sum-last-four", 4),
        (1, "second-to-last", 2),
    ):
        messages = rf"method\.layers: {choice} needs {needed} layers; the encoder has {layers}"
        with pytest.raises(UsageError, match=messages):
            wrapped(plain_model(num_hidden_layers=layers), layers=choice)
    assert wrapped(plain_model(num_hidden_layers=1), layers="weighted-sum-all")
    save_model(reader(bert()), None, tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"model_type": "bert"', '"model_type": "mamba"'))
    with pytest.raises(DataError, match="base: expected the encoder's own settings"):
        load_model(tmp_path)

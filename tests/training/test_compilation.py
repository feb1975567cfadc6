"""Compiled layers against plain ones: torch.compile's traces, and one test of its compiler."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.errors import UsageError
from bertkit.kernels.gpu_attention import triton_attention_enabled
from bertkit.models.attention import varlen
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.bigbird import BigBirdConfig
from bertkit.models.families.eurobert import EuroBertConfig
from bertkit.models.families.modernbert import ModernBertConfig
from bertkit.models.families.mosaicbert import MosaicBertConfig
from bertkit.models.families.nomic_bert import NomicBertConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.recorder import Recorder
from bertkit.training import compilation
from bertkit.training.compilation import compile_layers
from bertkit.training.config import EngineConfig
from tests.kernels.dropped_attention import operators_on_a_processor

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}


def made_model(config: EncoderConfig) -> HeadedModel:
    model = HeadedModel(config.build(60), ["masked_lm"])
    model.initialise(0)
    return model.train()


def batch_of(*lengths: int) -> PackedBatch:
    return PackedBatch.from_ids([[5 + place % 50 for place in range(length)] for length in lengths])


BATCHES = [batch_of(9, 14, 6, 14), batch_of(7, 7), batch_of(3, 20, 11)]
"""Three rectangles, one without padding, and three again: other numbers of tokens and of blocks."""


def states_and_gradients(model: HeadedModel, batch: PackedBatch) -> list[Tensor]:
    torch.manual_seed(2)
    model.zero_grad()
    states_TD = model(batch)
    (states_TD * torch.linspace(-1, 1, states_TD.numel()).view(states_TD.shape)).sum().backward()
    return [states_TD.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """No graphs from or for other tests."""
    torch.compiler.reset()
    compilation._compiled.cache_clear()
    yield
    torch.compiler.reset()
    compilation._compiled.cache_clear()


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize(
    "config",
    [
        BertConfig(**SIZES),
        ModernBertConfig(**SIZES),
        EuroBertConfig(**SIZES, num_key_value_heads=1),
        NomicBertConfig(**SIZES),
        BigBirdConfig(**SIZES, block_size=2, num_random_blocks=1),
    ],
    ids=lambda config: config.family,
)
def test_one_traced_graph_serves_all_layers_and_numbers_of_tokens(
    config: EncoderConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal to the plain numbers, also with dropout, whose draws are the same on a CPU."""
    graphs = 0

    def counting(graph: Any, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    def compiled(forward: Callable[..., Any], backend: str) -> Any:
        return torch.compile(forward, dynamic=True, backend=counting)

    monkeypatch.setattr(compilation, "_compiled", cache(compiled))
    model = made_model(config)
    names = [name for name, _ in model.named_parameters()]
    plain = [states_and_gradients(model, batch) for batch in BATCHES]
    compile_layers(model, backend="counting")
    assert [name for name, _ in model.named_parameters()] == names
    found = [states_and_gradients(model, batch) for batch in BATCHES[:2]]
    before = graphs
    found.append(states_and_gradients(model, BATCHES[2]))
    assert 0 < graphs == before
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++, which is not here")
def test_compiled_layers_give_the_plain_states_and_gradients() -> None:
    model = made_model(BertConfig(**SIZES | {"num_hidden_layers": 1, "hidden_dropout_prob": 0.0}))
    plain = [states_and_gradients(model, batch) for batch in BATCHES[:2]]
    compile_layers(model)
    found = [states_and_gradients(model, batch) for batch in BATCHES[:2]]
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize(
    ("family", "dropout"), [(BertConfig, 0.0), (BertConfig, 0.1), (ModernBertConfig, 0.0)], ids=str
)
def test_a_layer_with_a_kernel_for_its_attention_is_one_graph(
    family: type[BertConfig | ModernBertConfig], dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel and its GPU are replaced by operators that any graph can contain."""

    def kernel(heads: varlen.Heads, sequences: Any, **options: Any) -> Tensor:
        query_TNH, key_TNH, value_TNH = heads
        assert options["dropout_rate"] == dropout
        return (query_TNH * key_TNH + value_TNH) / sequences.max_length

    def compiled(forward: Callable[..., Any], backend: str) -> Any:
        return torch.compile(forward, dynamic=True, backend=backend, fullgraph=True)

    monkeypatch.setattr(compilation, "_compiled", cache(compiled))
    monkeypatch.setattr(varlen, "has_kernels", lambda device: True)
    monkeypatch.setitem(varlen._gpus, None, varlen._Gpu(obstacle=None, runs_triton=False))
    monkeypatch.setattr(compilation, "detect_kernels", lambda device: None)
    monkeypatch.setattr(varlen, "packed_kernel", kernel)
    sizes = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": dropout}
    model = made_model(family.model_validate(sizes))
    exact = [states_and_gradients(model, batch) for batch in BATCHES]
    with torch.autocast("cpu", torch.bfloat16):
        plain = [states_and_gradients(model, batch) for batch in BATCHES]
        compile_layers(model, backend="aot_eager")
        found = [states_and_gradients(model, batch) for batch in BATCHES]
    assert all(states_TD.dtype == torch.float32 for states_TD, *_ in found)
    assert _error(found, exact) < 2 * _error(plain, exact) < 0.03


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize(("family", "dropout"), [(BertConfig, 0.0), (BertConfig, 0.2), (ModernBertConfig, 0.0)])
def test_the_triton_kernels_are_a_part_of_the_graph(
    family: type[BertConfig | ModernBertConfig], dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-in operators: on columns of one tensor, or on separate queries, keys and values."""

    def compiled(forward: Callable[..., Any], backend: str) -> Any:
        return torch.compile(forward, dynamic=True, backend=backend, fullgraph=True)

    monkeypatch.setattr(compilation, "_compiled", cache(compiled))
    sizes = {**SIZES, "hidden_size": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": dropout}
    model = made_model(family.model_validate(sizes))
    exact = [states_and_gradients(model, batch) for batch in BATCHES]
    monkeypatch.setattr(varlen, "has_kernels", lambda device: True)
    monkeypatch.setitem(varlen._gpus, None, varlen._Gpu(obstacle=None, runs_triton=True))
    monkeypatch.setattr(varlen, "_reported", set())
    monkeypatch.setattr(compilation, "detect_kernels", lambda device: None)
    with operators_on_a_processor(), triton_attention_enabled(wanted=True), torch.autocast("cpu", torch.bfloat16):
        plain = [states_and_gradients(model, batch) for batch in BATCHES]
        assert varlen._reported == {"Triton kernels for packed sequences"}
        compile_layers(model, backend="aot_eager")
        found = [states_and_gradients(model, batch) for batch in BATCHES]
    if not dropout:
        assert _error(plain, exact) < 0.015
    assert _error(found, plain) < 0.02, "the same draws"


def _error(found: list[list[Tensor]], exact: list[list[Tensor]]) -> float:
    """Error over all numbers together, relative to their norm."""
    ours, theirs = (torch.cat([each.flatten() for row in rows for each in row]) for rows in (found, exact))
    return float((ours - theirs).norm() / theirs.norm())


def test_passes_without_gradients_and_recorded_ones_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(*_: Any) -> Any:
        raise AssertionError("nothing is to be compiled")

    model = made_model(BertConfig(**SIZES))
    compile_layers(model, backend="aot_eager")
    monkeypatch.setattr(compilation, "_compiled", compiled)
    recorder = Recorder(["blocks.1.hook_resid_post"])
    assert torch.equal(model(BATCHES[0], recorder), recorder.kept["blocks.1.hook_resid_post"])
    with torch.no_grad():
        model.eval()(BATCHES[0])


def test_what_cannot_be_compiled_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"engine\.compile is true, but the layers of family mosaicbert"):
        compile_layers(made_model(MosaicBertConfig(**SIZES)))
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UsageError, match=r"C\+\+ compiler"):
        compile_layers(made_model(BertConfig(**SIZES)))
    with pytest.raises(ValidationError, match="set only one of them"):
        EngineConfig(compile=True, activation_checkpointing=True)

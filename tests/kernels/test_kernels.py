"""Compiled kernels compute the same values, gradients and random draws as torch's operators."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bertkit import native
from bertkit.data.batch import PackedBatch, PackedSequences
from bertkit.errors import UsageError
from bertkit.kernels import ops
from bertkit.kernels.loading import Kernels, activated, active, build, flags_for
from bertkit.models.attention.block_sparse import BlockPattern, attend_blocks
from bertkit.models.attention.self_attention import attend
from bertkit.models.attention.windows import sliding_window_attention
from bertkit.models.encoder import initialise
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.fast_encoder import FastEncoderConfig, Neighbours, rms_norm
from bertkit.models.operators.dropout import drawn, dropout
from bertkit.models.operators.gelu import gelu, gelu_by_tanh
from bertkit.models.operators.vocabulary import VocabularyProjection
from bertkit.models.recorder import Scope
from bertkit.native import CompilerError
from bertkit.training.compiled_kernels import use_kernels
from bertkit.training.config import EngineConfig
from bertkit.training.engine import resolve_engine

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    try:
        return Kernels(build(), frozenset(DTYPES))
    except CompilerError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_flags_of_x86_are_given_on_x86_only() -> None:
    """GCC for aarch64 fails on them, and the kernels would not be built."""
    assert [flag for flag in flags_for("aarch64") if flag.startswith("-m")] == ["-march=native"]
    assert set(flags_for("x86_64")) - set(flags_for("arm64")) == {"-mprefer-vector-width=512"}


def gradients(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return list(torch.autograd.grad(output, inputs, torch.randn(output.shape, generator=generator).to(output.dtype)))


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found.float(), expected.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype).requires_grad_()


@pytest.mark.parametrize("count", [1, 2, 1001])
def test_random_words_are_numpys(kernels: Kernels, count: int) -> None:
    for seed in (0, 7, 2**63 - 1):
        expected = np.random.SFC64(seed).random_raw(count).view(np.int64)
        assert np.array_equal(ops.random_words(kernels, seed, count).numpy(), expected)


@pytest.mark.parametrize("count", [0, 1, 4, 5, 4096])
def test_what_is_dropped_does_not_depend_on_the_kernels(kernels: Kernels, count: int) -> None:
    found = []
    for chosen in (kernels, None):
        torch.manual_seed(2)
        with activated(chosen):
            drop = drawn(count, 0.3)
        assert drop is not None
        found.append((drop.bits, torch.get_rng_state()))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", [gelu, gelu_by_tanh])
def test_gelu(kernels: Kernels, function: Any, dtype: torch.dtype) -> None:
    values = normal(37, 131, dtype=dtype)
    plain = function(values)
    with activated(kernels):
        compiled = function(values)
    assert_near(compiled, plain, dtype)
    assert_near(gradients(compiled, [values])[0], gradients(plain, [values])[0], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("lengths", [[5, 5, 5], [9, 2, 1]])
def test_attention_with_and_without_padding(
    kernels: Kernels, lengths: list[int], rate: float, dtype: torch.dtype
) -> None:
    sequences = PackedSequences.from_lengths(lengths)
    query, key, value = (normal(sum(lengths), 2, 6, dtype=dtype, seed=seed) for seed in range(3))
    outputs = []
    for chosen in (None, kernels):
        torch.manual_seed(3)
        with activated(chosen):
            outputs.append(attend(query, key, value, sequences, dropout_rate=rate, scope=Scope(None, "")))
    assert_near(outputs[1], outputs[0], dtype)
    inputs = [query, key, value]
    for found, expected in zip(gradients(outputs[1], inputs), gradients(outputs[0], inputs), strict=True):
        assert_near(found, expected, dtype)


@pytest.mark.parametrize("lengths", [[60], [41, 60, 57]])
def test_gathered_blocks_with_gaps_between_their_keys(kernels: Kernels, lengths: list[int]) -> None:
    """BigBird's slots: some are unused, and the last block of a sequence, which may be padded, is not the last slot."""
    pattern, sequences = BlockPattern(size=4, random=1, heads=2, layer=0), PackedSequences.from_lengths(lengths)
    heads = [normal(sum(lengths), 2, 6, dtype=torch.bfloat16, seed=seed) for seed in range(3)]
    outputs = []
    for chosen in (None, kernels):
        with activated(chosen):
            outputs.append(attend_blocks(*heads, sequences, pattern, scope=Scope(None, "")))
    assert_near(outputs[1], outputs[0], torch.bfloat16)
    for found, expected in zip(gradients(outputs[1], heads), gradients(outputs[0], heads), strict=True):
        assert_near(found, expected, torch.bfloat16)


def test_windows_of_one_token_on_either_side(kernels: Kernels) -> None:
    """Each chunk has one query, so that its mask has the shape of padding's, but the first one lacks the first key."""
    sequences = PackedSequences.from_lengths([9, 7, 4])
    heads = [normal(20, 2, 6, dtype=torch.bfloat16, seed=seed) for seed in range(3)]
    outputs = []
    for chosen in (None, kernels):
        with activated(chosen):
            outputs.append(
                sliding_window_attention(*heads, sequences, each_side=1, dropout_rate=0.0, scope=Scope(None, ""))
            )
    assert_near(outputs[1], outputs[0], torch.bfloat16)


@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_norm_of_a_residual_sum(kernels: Kernels, rate: float) -> None:
    residual, branch = normal(11, 24), normal(11, 24, dtype=torch.bfloat16, seed=1)
    norm = nn.LayerNorm(24, eps=1e-12)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    torch.manual_seed(7)
    plain = norm(residual + dropout(branch.float(), rate, training=True))  # which bf16 would round
    torch.manual_seed(7)
    drop = drawn(branch.numel(), rate)
    compiled = ops.residual_norm(kernels, residual, branch, norm.weight, norm.bias, epsilon=norm.eps, drop=drop)
    inputs = [residual, branch, norm.weight, norm.bias]
    torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=2e-5)
    for found, expected in zip(gradients(compiled, inputs), gradients(plain, inputs), strict=True):
        assert_near(found, expected, found.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(13, 24), (7, 3, 5), (0, 8)])
def test_norm_by_the_root_of_the_mean_square(kernels: Kernels, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    states = normal(*shape, dtype=dtype)
    plain = rms_norm(states, 1e-3)
    with activated(kernels):
        compiled = rms_norm(states, 1e-3)
    assert compiled.dtype == plain.dtype
    assert_near(compiled, plain, dtype)
    assert_near(gradients(compiled, [states])[0], gradients(plain, [states])[0], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("each_side", [1, 3])
@pytest.mark.parametrize("lengths", [[5, 1, 9, 2], [1], [70]])
def test_each_token_with_its_neighbours(
    kernels: Kernels, lengths: list[int], each_side: int, causal: bool, dtype: torch.dtype
) -> None:
    positions = torch.cat([torch.arange(length) for length in lengths])
    sequences = PackedSequences.from_lengths(lengths)
    if causal:
        sequences = replace(sequences, causal_B=np.array([number % 2 == 0 for number in range(len(lengths))]))
    near = Neighbours(positions, sequences, each_side)
    states, factors = normal(sum(lengths), 6, dtype=dtype), normal(2 * each_side, 6, seed=1)
    plain = near.mixed(states.float(), factors).to(dtype)  # bf16 would round after each neighbour
    with activated(kernels):
        compiled = near.mixed(states, factors)
    assert_near(compiled, plain, dtype)
    inputs = [states, factors]
    for found, expected in zip(gradients(compiled, inputs), gradients(plain, inputs), strict=True):
        assert_near(found, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("z_loss", "smoothing"), [(0.0, 0.0), (1e-2, 0.0), (0.0, 0.1)])
def test_cross_entropy_over_a_vocabulary(
    kernels: Kernels, z_loss: float, smoothing: float, weighted: bool, dtype: torch.dtype
) -> None:
    states, words, bias = normal(13, 8, dtype=dtype), normal(101, 8, dtype=dtype, seed=1), normal(101, dtype=dtype)
    ids = torch.arange(13) * 7 % 101
    ids[::3] = functional.linear(states, words, bias).argmax(dim=-1)[::3]
    weight = torch.linspace(0.1, 2.0, 13) if weighted else None
    exact = [each.detach().float().requires_grad_() for each in (states, words, bias)]
    settings = {"z_loss": z_loss, "weight_M": weight, "label_smoothing": smoothing, "logit_bytes": 2000}
    results = []
    for inputs, chosen in ((exact, None), ([states, words, bias], None), ([states, words, bias], kernels)):
        with activated(chosen):
            loss, right = VocabularyProjection(*inputs).cross_entropy(ids, **settings)
        results.append((loss, *torch.autograd.grad(loss, inputs), right))
    *_, right = results[0]
    assert right == results[1][-1] == results[2][-1] > 0
    for in_float32, plain, compiled in zip(*(each[:-1] for each in results), strict=True):
        size = float(in_float32.detach().norm())
        missed, plain_missed = (float((each.float() - in_float32).detach().norm()) for each in (compiled, plain))
        assert missed <= 1.5 * plain_missed + 1e-5 * size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_bias_of_the_words_is_added_in_float32(kernels: Kernels, dtype: torch.dtype, smoothing: float) -> None:
    logits, bias = normal(13, 101, dtype=dtype).detach(), normal(101, dtype=dtype, seed=1).detach()
    ids = torch.arange(13) * 7 % 101
    sums = (logits.float() + bias.float()).requires_grad_()
    expected = functional.cross_entropy(sums, ids, reduction="none", label_smoothing=smoothing)
    loss, correct = ops.cross_entropy(
        kernels, logits, ids, bias_V=bias, weight_m=None, z_loss=0.0, label_smoothing=smoothing, learning=True
    )
    torch.testing.assert_close(loss.float(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(correct, sums.argmax(dim=-1) == ids)
    assert_near(logits, torch.autograd.grad(expected.sum(), sums)[0].to(dtype), dtype)


def test_the_first_of_equal_logits_is_the_prediction(kernels: Kernels) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])
    _, correct = ops.cross_entropy(
        kernels,
        logits,
        torch.tensor([1, 2, 0]),
        bias_V=None,
        weight_m=None,
        z_loss=0.0,
        label_smoothing=0.0,
        learning=False,
    )
    assert correct.tolist() == [True, False, True]


def test_a_label_beyond_the_vocabulary_is_an_error(kernels: Kernels) -> None:
    for label in (-1, 3):
        with pytest.raises(IndexError, match="of 3 words"):
            ops.cross_entropy(
                kernels,
                torch.zeros(2, 3),
                torch.tensor([0, label]),
                bias_V=None,
                weight_m=None,
                z_loss=0.0,
                label_smoothing=0.0,
                learning=True,
            )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_so(kernels: Kernels, dtype: torch.dtype, bad: float) -> None:
    values = torch.full((3, 17), 0.5, dtype=dtype)
    values[1, 4] = bad
    plain = functional.gelu(values, approximate="tanh")
    assert torch.equal(ops.gelu(kernels, values, "tanh").isfinite(), plain.isfinite())
    scores = values.view(1, 1, 3, 17)
    softmax = ops.softmax_dropout(kernels, scores, None, None)
    assert not ops.rms_norm(kernels, values, 1e-5)[1].isfinite().all()
    assert torch.equal(softmax.isnan(), torch.softmax(scores, dim=-1).isnan())
    loss, _ = ops.cross_entropy(
        kernels, values.clone(), torch.zeros(3, dtype=torch.int64), bias_V=None, weight_m=None, z_loss=0.0,
        label_smoothing=0.0, learning=True,
    )  # fmt: skip
    assert loss.isfinite().tolist() == [True, not bad > 0 and not math.isnan(bad), True]


def test_the_number_of_threads_changes_no_bit(kernels: Kernels) -> None:
    outputs = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        residual, branch = normal(70, 24), normal(70, 24, dtype=torch.bfloat16)
        weight, bias = normal(24, seed=2), normal(24, seed=3)
        normed = ops.residual_norm(kernels, residual, branch, weight, bias, epsilon=1e-5, drop=None)
        scores = normal(3, 2, 5, 33, dtype=torch.bfloat16)
        softmax = ops.softmax_dropout(kernels, scores, torch.tensor([33, 7, 1]), None)
        near = Neighbours(torch.arange(70), PackedSequences.from_lengths([70]), 2)
        factors = normal(4, 24, seed=4)
        mixed = ops.neighbours(kernels, ops.rms_norm(kernels, residual, 1e-5), factors, near.inside_WT)
        found = [normed, softmax, *gradients(normed, [residual, branch, weight, bias]), *gradients(softmax, [scores])]
        found += [mixed, *gradients(mixed, [residual, factors])]
        outputs.append(found)
    for other in outputs[1:]:
        assert all(torch.equal(first, second) for first, second in zip(outputs[0], other, strict=True))


SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}


@pytest.mark.parametrize("lengths", [(11, 11, 11), (9, 2, 17)])
@pytest.mark.parametrize(
    "config", [BertConfig(**SMALL, hidden_act="gelu_new"), FastEncoderConfig(**SMALL, zero_outputs=False)]
)
def test_a_whole_model_trains_alike(kernels: Kernels, config: Any, lengths: tuple[int, ...]) -> None:
    """Closer to float32 than torch's operators, or equally close; with attention dropout only if torch's rectangles
    have as many cells as the kernel computes."""
    one_length = len(set(lengths)) == 1
    if not one_length and isinstance(config, BertConfig):
        config = config.model_copy(update={"attention_probs_dropout_prob": 0.0})
    encoder = config.build(60).train()
    initialise(encoder, config, seed=0)
    batch = PackedBatch.from_ids([list(range(5, 5 + length)) for length in lengths])
    parameters = [parameter for parameter in encoder.parameters() if parameter.requires_grad]

    def numbers(chosen: Kernels | None, *, bf16: bool) -> list[Tensor]:
        torch.manual_seed(1)
        with activated(chosen), torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            states = encoder(batch)
        found = torch.autograd.grad(states.square().sum(), parameters, allow_unused=True)
        return [states.detach(), *(each for each in found if each is not None)]

    exact = numbers(None, bf16=False)

    def error(found: list[Tensor]) -> float:
        ours, theirs = (torch.cat([each.flatten() for each in every]) for every in (found, exact))
        return float((ours - theirs).norm() / theirs.norm())

    assert error(numbers(kernels, bf16=True)) < 1.2 * error(numbers(None, bf16=True)) < 0.03


def test_settings_choose(kernels: Kernels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = {dtype: torch.zeros(2, dtype=dtype) for dtype in DTYPES}

    def used(**settings: Any) -> list[bool]:
        config = EngineConfig(device="cpu", **settings)
        with use_kernels(config, resolve_engine(config)):
            return [active(values[dtype]) is not None for dtype in DTYPES]

    assert used(precision="bf16") == [False, True]
    assert used(precision="fp32") == [False, False]
    assert used(precision="fp32", kernels="compiled") == [True, True]
    assert used(precision="bf16", kernels="torch") == [False, False]
    assert active(values[torch.bfloat16]) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert used(precision="bf16") == [False, False]
    with pytest.raises(UsageError, match=r"engine\.kernels is compiled: no C\+\+ compiler was found"):
        used(precision="fp32", kernels="compiled")


@pytest.mark.parametrize("version", ['echo "toy 1.0"', ":"], ids=["a version", "no version"])
def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str) -> None:
    failing = tmp_path / "c++"
    failing.write_text(f'#!/bin/sh\n[ "$1" = --version ] && {version} && exit 0\necho "no such option" >&2\nexit 1\n')
    failing.chmod(0o755)
    monkeypatch.setattr(native, "COMPILERS", (str(failing),))
    with pytest.raises(CompilerError, match="fails: no such option"):
        build(tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.so"))

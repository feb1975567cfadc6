"""The GPU attention kernels as far as they can be tested without a GPU; tests/gpu tests the rest."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bertkit.data.batch import PackedSequences
from bertkit.kernels import gpu_attention
from bertkit.kernels.gpu_attention import draw, drop_below, triton_attention_enabled
from bertkit.models.attention import varlen
from tests.kernels.dropped_attention import Case, kept_probabilities, operators_on_a_processor, plain_attention

CPU = torch.device("cpu")
CASE = Case(lengths=(5, 17, 1, 9), heads=3, width=32, dtype=torch.float32, window=(6, 2), rate=0.25)


@pytest.fixture
def stand_in() -> Iterator[None]:
    with operators_on_a_processor():
        yield


@pytest.mark.usefixtures("stand_in")
def test_the_operators_have_the_shapes_and_gradients_that_graphs_are_told() -> None:
    rows, bounds_B1, given = CASE.drawn(CPU)
    shared = (bounds_B1, max(CASE.lengths), *CASE.window, 0.2, CASE.rate)
    leaves = [each.detach().requires_grad_() for each in rows]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.bertkit.packed_attention.default, (*leaves, *shared), test_utils=checks)
    kept = torch.ops.bertkit.packed_attention(*(each.detach() for each in leaves), *shared)
    arguments = (kept[0], given, *kept[1:], *(each.detach() for each in leaves), *shared)
    torch.library.opcheck(torch.ops.bertkit.packed_attention_backward.default, arguments, test_utils=checks)
    joined = torch.stack(leaves, dim=1).detach().requires_grad_()
    shared = (bounds_B1, max(CASE.lengths), 0.2, CASE.rate)
    torch.library.opcheck(torch.ops.bertkit.joined_attention.default, (joined, *shared), test_utils=checks)


@pytest.mark.usefixtures("stand_in")
def test_each_input_gets_its_own_gradient() -> None:
    rows, bounds_B1, given = CASE.drawn(CPU)
    torch.manual_seed(3)
    mixed = gpu_attention.packed_attention(
        *rows, bounds_B1, max(CASE.lengths), window=CASE.window, scale=0.2, dropout_rate=CASE.rate
    )
    torch.manual_seed(3)
    drawn = draw(torch.empty(2 * sum(CASE.lengths) + CASE.heads, dtype=torch.int32))
    exact = plain_attention(rows, bounds_B1, drawn, CASE.window, 0.2, CASE.rate)
    torch.testing.assert_close(mixed, exact.float())
    found, expected = (torch.autograd.grad(each, rows, given.to(each.dtype)) for each in (mixed, exact))
    torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("stand_in")
def test_rows_side_by_side_are_read_as_those_apart() -> None:
    (query, key, value), bounds_B1, given = CASE.drawn(CPU)
    joined = torch.stack((query, key, value), dim=1).detach().requires_grad_()
    found = []
    for rows in ((joined,), (query, key, value)):
        torch.manual_seed(3)
        attended = gpu_attention.joined_attention if len(rows) == 1 else gpu_attention.packed_attention
        mixed = attended(*rows, bounds_B1, max(CASE.lengths), scale=0.2, dropout_rate=CASE.rate)
        gradients = torch.autograd.grad(mixed, rows, given)
        found.append((mixed, gradients[0] if len(rows) == 1 else torch.stack(gradients, dim=1)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("rate", [0.1, 0.25, 0.9])
def test_probabilities_are_dropped_at_the_rate_and_independently(rate: float) -> None:
    torch.manual_seed(5)
    heads, tokens = 4, 600
    drawn = draw(torch.empty(2 * tokens + heads, dtype=torch.int32))
    kept_NSS = kept_probabilities(drawn, tokens, heads, rate, 0, tokens)
    spread = (rate * (1 - rate)) ** 0.5
    centred = (kept_NSS.double() - (1 - rate)) / spread

    def is_zero(products: Tensor) -> None:
        assert abs(float(products.mean())) < 5 / products.numel() ** 0.5

    is_zero(centred)
    assert float(centred.mean(dim=(0, 2)).abs().max()) < 6 / (heads * tokens) ** 0.5, "of each query"
    assert float(centred.mean(dim=(0, 1)).abs().max()) < 6 / (heads * tokens) ** 0.5, "of each key"
    for shift in (1, 2, 7, 128):
        moved_key, moved_query = centred.roll(shift, dims=2), centred.roll(shift, dims=1)
        is_zero(centred * moved_key)
        is_zero(centred * moved_query)
        # Four products of two queries' and two keys' factors: the closest thing to a relation between them.
        is_zero(centred * moved_key * moved_query * moved_query.roll(shift, dims=2))
    for one, other in itertools.combinations(range(heads), 2):
        is_zero(centred[one] * centred[other])


def test_the_rates_limits() -> None:
    assert drop_below(0.0) == -(2**31)
    assert drop_below(0.5) == 0
    assert drop_below(1 - 2**-40) == 2**31 - 1


@pytest.mark.parametrize(
    ("width", "rate", "scale", "wanted", "expected"),
    [
        (64, 0.1, None, True, "own"),
        (32, 0.0, 0.3, True, "own"),
        (64, 0.1, None, False, "torch"),
        (48, 0.1, None, True, "torch"),
        (128, 0.1, None, True, "torch"),
        (64, 0.1, -1.0, True, "torch"),
        (64, 1.0, None, True, "torch"),
    ],
)
def test_the_kernel_is_chosen_by_run_and_heads(
    width: int, rate: float, scale: float | None, wanted: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def own(query: Tensor, *arguments: Any, **options: Any) -> Tensor:
        assert options == {"window": (-1, 0), "scale": scale or width**-0.5, "dropout_rate": rate}
        calls.append("own")
        return query

    def of_torch(query: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor]:
        calls.append("torch")
        return (query,)

    monkeypatch.setattr(gpu_attention, "packed_attention", own)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", of_torch)
    monkeypatch.setattr(varlen, "has_kernels", lambda device: True)
    monkeypatch.setitem(varlen._gpus, None, varlen._Gpu(obstacle=None, runs_triton=True))
    heads = [torch.zeros(9, 2, width, dtype=torch.bfloat16)] * 3
    sequences = PackedSequences.from_lengths([4, 5])
    with triton_attention_enabled(wanted):
        varlen.packed_kernel((heads[0], heads[1], heads[2]), sequences, window=(-1, 0), scale=scale, dropout_rate=rate)
    assert calls == [expected]


@pytest.mark.parametrize(
    ("capability", "hip", "triton", "fault", "expected"),
    [
        ((9, 0), None, True, None, True),
        ((10, 0), None, True, None, True),
        ((8, 9), None, True, None, False),
        ((9, 4), "6.2", True, None, False),
        ((9, 0), None, False, None, False),
        ((9, 0), None, True, RuntimeError("Failed to find C compiler.\nPlease specify it"), False),
    ],
    ids=["Hopper", "Blackwell", "Ada", "AMD", "no triton", "no compiler"],
)
def test_where_they_do_not_run_torchs_kernel_is_used(
    capability: tuple[int, int],
    hip: str | None,
    triton: bool,
    fault: Exception | None,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def tried_out(device: torch.device) -> None:
        if fault is not None:
            raise fault

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: nullcontext())
    monkeypatch.setattr(gpu_attention, "find_spec", lambda name: SimpleNamespace() if triton else None)
    monkeypatch.setattr(gpu_attention, "_try_out", tried_out)
    with caplog.at_level(logging.INFO):
        assert gpu_attention.is_available(torch.device("cuda", 0)) is expected
    assert ("Failed to find C compiler" in caplog.text) is (fault is not None)


@pytest.mark.usefixtures("stand_in")
def test_derivatives_in_forward_mode_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "has_kernels", lambda device: True)
    monkeypatch.setitem(varlen._gpus, None, varlen._Gpu(obstacle=None, runs_triton=True))
    rows = torch.randn(9, 3, 2, 32, dtype=torch.bfloat16)
    sequences = PackedSequences.from_lengths([4, 5])
    with triton_attention_enabled(True):
        assert varlen.attend_joined(rows, sequences, dropout_rate=0.0) is not None
        with torch.autograd.forward_ad.dual_level():
            assert varlen.attend_joined(rows, sequences, dropout_rate=0.0) is None


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed; it needs no GPU here")
def test_the_kernels_give_what_plain_operators_give_in_tritons_interpreter() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.interpreted_attention"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2e-3

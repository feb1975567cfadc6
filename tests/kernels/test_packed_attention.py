"""The kernel for attention of packed sequences against rectangles: values, gradients, dropout draws, threads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from bertkit.data.batch import PackedSequences
from bertkit.kernels import attention as kernel
from bertkit.kernels.loading import Kernels, activated, build
from bertkit.models.attention import projection, varlen
from bertkit.models.attention.projection import project_at_once
from bertkit.models.attention.self_attention import attend, attend_from_one, causal
from bertkit.models.attention.windows import sliding_window_attention
from bertkit.models.operators.matmul import Linear
from bertkit.models.recorder import Recorder, Scope
from bertkit.native import CompilerError

SCOPE = Scope(None, "")
EACH_SIDE = 5


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    try:
        found = Kernels(build(), frozenset([torch.bfloat16]))
    except CompilerError as error:
        pytest.skip(str(error))
    if not kernel.can_attend(found, *[torch.zeros(1, 1, 16, dtype=torch.bfloat16)] * 3):
        pytest.skip("needs a processor that multiplies pairs of bfloat16, without tiles")
    return found


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def drawn_heads(tokens: int, heads: int, width: int, *, side_by_side: bool = False) -> list[Tensor]:
    """Queries, keys and values; `side_by_side`: as columns of one product."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(tokens, 3, heads, width, generator=generator).bfloat16()
    parts = [rows[:, part] for part in range(3)]
    return [each.detach().requires_grad_() if side_by_side else each.clone().requires_grad_() for each in parts]


def attended(
    heads: list[Tensor], lengths: list[int], reads: str, rate: float = 0.0, scale: float | None = None
) -> Tensor:
    causal_B = np.arange(len(lengths)) % 2 == 0 if reads == "by sequence" else None
    sequences = PackedSequences.from_lengths(lengths, causal_B=causal_B)
    torch.manual_seed(3)
    if "window" in reads:
        reach = {"each_side": EACH_SIDE, "causal": reads == "window to the left", "scale": scale}
        return sliding_window_attention(*heads, sequences, dropout_rate=rate, scope=SCOPE, **reach)  # type: ignore[arg-type]  # of three types
    visible = causal if reads == "by position" else None
    return attend(*heads, sequences, dropout_rate=rate, scope=SCOPE, visible=visible, scale=scale)


def numbers(chosen: Kernels | None, heads: list[Tensor], *arguments: object) -> list[Tensor]:
    """Values, and gradients of all three inputs."""
    with activated(chosen):
        mixed_TNH = attended(heads, *arguments)  # type: ignore[arg-type]
    weight_TNH = torch.linspace(-1, 1, mixed_TNH.numel()).sin().view(mixed_TNH.shape)
    return [mixed_TNH.detach(), *torch.autograd.grad((mixed_TNH * weight_TNH).sum(), heads)]


def errors(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [
        float((own.float() - other.float()).norm() / other.float().norm())
        for own, other in zip(found, expected, strict=True)
    ]


@pytest.mark.parametrize("lengths", [[5, 17, 1, 9, 17, 49], [48], [97, 96]], ids=str)
@pytest.mark.parametrize(("heads", "width"), [(2, 64), (3, 16), (1, 80), (1, 128)])
@pytest.mark.parametrize("reads", ["all", "by position", "by sequence", "window", "window to the left"])
def test_the_kernel_is_nearer_to_float32_than_rectangles_or_as_near(
    kernels: Kernels, reads: str, heads: int, width: int, lengths: list[int]
) -> None:
    narrow = drawn_heads(sum(lengths), heads, width)
    wide = [each.detach().float().requires_grad_() for each in narrow]
    exact = numbers(None, wide, lengths, reads)
    by_kernel = errors(numbers(kernels, narrow, lengths, reads), exact)
    in_rectangles = errors(numbers(None, narrow, lengths, reads), exact)
    for own, other in zip(by_kernel, in_rectangles, strict=True):
        assert own < 1.1 * other < 0.02


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_the_same_probabilities_are_dropped_as_in_one_rectangle(kernels: Kernels, rate: float) -> None:
    heads, lengths = drawn_heads(4 * 31, 3, 32), [31] * 4
    found, expected = (numbers(chosen, heads, lengths, "all", rate, 0.2) for chosen in (kernels, None))
    assert max(errors(found, expected)) < 0.01
    kept = numbers(None, heads, lengths, "all", 0.0, 0.2)
    assert min(errors(kept, expected)) > 0.1, "dropped probabilities count"


def test_sequences_of_many_lengths_drop_their_share(kernels: Kernels) -> None:
    """With equal queries and values of one, a row's sum is the scaled share of kept probabilities: 1 on average."""
    lengths = [40, 3, 77, 12] * 20
    heads = [torch.zeros(sum(lengths), 4, 16, dtype=torch.bfloat16) for _ in range(2)]
    heads.append(torch.ones_like(heads[0]))
    with activated(kernels):
        mixed_TNH = attended([each.requires_grad_() for each in heads], lengths, "all", 0.25)
    mixed_TNH = mixed_TNH.detach()
    assert abs(float(mixed_TNH.mean()) - 1) < 0.01
    assert 0.05 < float(mixed_TNH.float().std()) < 0.3


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("lengths", [[13] * 3, [5, 17, 1, 50]], ids=str)
def test_one_query_a_sequence(kernels: Kernels, lengths: list[int], rate: float) -> None:
    """Only what a classifier's last layer needs; if lengths differ, rectangles draw another dropout."""
    _, key, value = drawn_heads(sum(lengths), 3, 32)
    query = drawn_heads(len(lengths), 3, 32)[0]
    sequences = PackedSequences.from_lengths(lengths)
    token_B = sequences.cu_seqlens_B1[:-1].long()

    def found(chosen: Kernels | None, heads: list[Tensor], rate: float) -> list[Tensor]:
        torch.manual_seed(3)
        with activated(chosen):
            mixed_BNH = attend_from_one(*heads, sequences, token_B, dropout_rate=rate)
        weight_BNH = torch.linspace(-1, 1, mixed_BNH.numel()).sin().view(mixed_BNH.shape)
        return [mixed_BNH.detach(), *torch.autograd.grad((mixed_BNH * weight_BNH).sum(), heads)]

    heads = [query, key, value]
    same_draws = len(set(lengths)) == 1
    exact = found(None, [each.detach().float().requires_grad_() for each in heads], rate if same_draws else 0.0)
    assert max(errors(found(kernels, heads, rate if same_draws else 0.0), exact)) < 0.02
    if rate and not same_draws:
        draws = torch.stack([found(kernels, [each * 1 for each in heads], rate)[0].float() for _ in range(2)])
        assert torch.equal(*draws)
        assert max(errors([draws[0]], [exact[0]])) > 0.05


def test_rows_of_one_product_are_read_where_they_lie(kernels: Kernels) -> None:
    lengths = [19, 4, 33]
    apart = drawn_heads(sum(lengths), 2, 32)
    together = drawn_heads(sum(lengths), 2, 32, side_by_side=True)
    assert not together[1].is_contiguous()
    found, expected = (numbers(kernels, heads, lengths, "all") for heads in (together, apart))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_columns_beside_each_other() -> None:
    rows_TF = torch.arange(60.0).view(5, 12)
    first, second, third = rows_TF.split([4, 2, 6], dim=1)
    whole = kernel.joined_columns([first, second, third])
    assert whole is not None
    assert torch.equal(whole, rows_TF)
    assert whole.data_ptr() == rows_TF.data_ptr()
    for parts in ([second, first, third], [first, second], [first, second, third[:4]], [first, second.clone(), third]):
        assert kernel.joined_columns(parts) is None
    assert kernel.joined_columns([rows_TF[:, :6].clone(), rows_TF[:, 6:].clone()]) is None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", [(32, 32, 32), (16, 48)], ids=str)
def test_one_product_for_queries_keys_and_values(kernels: Kernels, widths: tuple[int, ...], bias: bool) -> None:
    """Closer to float32 than separate products, or equally close; the gradient of the states is rounded once."""
    torch.manual_seed(0)
    maps = [Linear(24, width, bias=bias) for width in widths]
    states = torch.randn(61, 24, requires_grad=True)
    inputs = [states, *(weight for each in maps for weight in each.parameters())]

    def found(chosen: Kernels | None, *, bf16: bool) -> list[Tensor]:
        with activated(chosen), torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            columns = project_at_once(maps, states)
        assert (columns[0].stride(0) == sum(widths)) == (chosen is not None)
        total = torch.stack(
            [(each.float() * torch.linspace(-1, 1, each.numel()).sin().view_as(each)).sum() for each in columns]
        ).sum()
        return [*(each.detach() for each in columns), *torch.autograd.grad(total, inputs)]

    exact = found(None, bf16=False)
    by_one, by_each = (errors(found(chosen, bf16=True), exact) for chosen in (kernels, None))
    assert all(own < 1.05 * other < 0.02 for own, other in zip(by_one, by_each, strict=True))


def test_maps_that_somebody_watches_are_called(kernels: Kernels) -> None:
    maps = [Linear(24, 32) for _ in range(3)]
    called = []
    maps[1].register_forward_hook(lambda *_: called.append(1))
    with activated(kernels), torch.autocast("cpu", dtype=torch.bfloat16):
        project_at_once(maps, torch.randn(61, 24))
    assert called == [1]


def test_gradients_that_lie_beside_each_other_are_not_joined(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    maps = [Linear(24, 32) for _ in range(3)]
    states = torch.randn(61, 24, requires_grad=True)
    joined = []
    found = kernel.joined_columns
    monkeypatch.setattr(projection, "joined_columns", lambda parts: joined.append(found(parts)) or joined[-1])
    with activated(kernels), torch.autocast("cpu", dtype=torch.bfloat16):
        heads = [each.view(61, 2, 16) for each in project_at_once(maps, states)]
        attended(heads, [61], "all").float().square().sum().backward()
    assert [each is not None for each in joined] == [True]


def test_any_number_of_threads_gives_the_same_bits(kernels: Kernels) -> None:
    heads, lengths = drawn_heads(300, 3, 48), [100, 7, 60, 133]
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(numbers(kernels, heads, lengths, "all", 0.2))
    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(other, found[0], strict=True))


@pytest.mark.parametrize("obstacle", ["width", "float32", "recorded", "no instructions", "tiles"])
def test_what_the_kernel_cannot_do_goes_through_rectangles(
    kernels: Kernels, obstacle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(varlen, "packed_attention", lambda *arguments: calls.append(arguments) or arguments[1])
    if obstacle == "no instructions":
        monkeypatch.setattr(Kernels, "has", lambda *_: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: obstacle == "tiles")
    heads = drawn_heads(12, 2, 24 if obstacle == "width" else 32)
    if obstacle == "float32":
        heads = [each.detach().float() for each in heads]
    scope = Scope(Recorder(["hook_pattern"]), "") if obstacle == "recorded" else SCOPE
    sequences, found = PackedSequences.from_lengths([5, 7]), []
    for chosen in (kernels, None):
        with activated(chosen):
            found.append(attend(*heads, sequences, dropout_rate=0.0, scope=scope))
    assert calls == []
    torch.testing.assert_close(*found, rtol=0.02, atol=0.02)


def test_a_library_without_the_function_says_so(kernels: Kernels) -> None:
    assert kernels.has("attention", torch.bfloat16)
    assert not kernels.has("attention", torch.float32)

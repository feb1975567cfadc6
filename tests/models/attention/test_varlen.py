"""Attention through the kernel for packed sequences against rectangles. The kernel needs a GPU, so a plain loop over
the sequences replaces it here; tests/gpu tests the kernel itself."""

from __future__ import annotations

import inspect
import logging
from itertools import pairwise

import numpy as np
import pytest
import torch
from tests.models.attention_masks import sliding_window
from torch import Tensor

from bertkit.data.batch import PackedBatch, PackedSequences
from bertkit.models.attention import varlen
from bertkit.models.attention.self_attention import Bias, Visible, attend, causal
from bertkit.models.attention.windows import sliding_window_attention
from bertkit.models.encoder import initialise
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.families.modernbert import ModernBertConfig
from bertkit.models.recorder import Recorder, Scope

LENGTHS = [5, 17, 1, 9, 17, 12]
SCOPE = Scope(None, "")


def plain_kernel(
    query_TNH: Tensor,
    key_TNH: Tensor,
    value_TNH: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """torch's varlen_attn by its documentation, one sequence at a time."""
    assert cu_seq_q.dtype == torch.int32
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert max_q == max_k == int(cu_seq_q.diff().max())
    assert all(rows.stride(-1) == 1 for rows in (query_TNH, key_TNH, value_TNH))
    mixed = []
    for start, end in pairwise(cu_seq_q.tolist()):
        query, key, value = (rows_TNH[start:end].transpose(0, 1) for rows_TNH in (query_TNH, key_TNH, value_TNH))
        behind_SS = torch.arange(end - start) - torch.arange(end - start)[:, None]
        left, right = (end - start if side < 0 else side for side in window_size)
        scores_NSS = query @ key.transpose(1, 2) * (query.shape[-1] ** -0.5 if scale is None else scale)
        seen_SS = (behind_SS >= -left) & (behind_SS <= right)
        mixed.append(scores_NSS.masked_fill(~seen_SS, -torch.inf).softmax(-1) @ value)
    return torch.cat(mixed, dim=1).transpose(0, 1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace the kernel in any precision; returns the tokens of each call."""
    made: list[int] = []

    def kernel(
        query_TNH: Tensor, *arguments: Tensor | int, scale: float | None, window_size: tuple[int, int]
    ) -> Tensor:
        made.append(query_TNH.shape[0])
        return plain_kernel(query_TNH, *arguments, scale=scale, window_size=window_size)  # type: ignore[arg-type]

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    monkeypatch.setattr(varlen, "has_kernels", lambda device: True)
    monkeypatch.setattr(varlen, "_obstacle_of", lambda *heads: None)
    return made


def drawn_heads(*, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(sum(LENGTHS), 3, 8, generator=generator, requires_grad=True) for _ in range(3))
    return query, key, value


def same_in_both(mixed_TNH: Tensor, plain_TNH: Tensor, heads: tuple[Tensor, ...]) -> None:
    """Values, and gradients of all three inputs."""
    torch.testing.assert_close(mixed_TNH, plain_TNH)
    weight_TNH = torch.linspace(-1, 1, mixed_TNH.numel()).view(mixed_TNH.shape)
    own, plain = (torch.autograd.grad((each * weight_TNH).sum(), heads) for each in (mixed_TNH, plain_TNH))
    torch.testing.assert_close(own, plain)


def test_the_stand_in_has_the_parameters_of_torchs_kernel() -> None:
    from torch.nn.attention.varlen import varlen_attn

    theirs = inspect.signature(varlen_attn).parameters
    assert list(theirs)[3:7] == list(inspect.signature(plain_kernel).parameters)[3:7]
    assert {"scale", "window_size"} <= set(theirs)
    assert theirs["window_size"].default == (-1, -1)


@pytest.mark.parametrize("scale", [None, 0.4])
@pytest.mark.parametrize("reads", ["all", "by position", "by sequence"])
def test_the_kernel_gives_what_rectangles_give(
    reads: str, scale: float | None, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    causal_B = np.ones(len(LENGTHS), dtype=np.bool_) if reads == "by sequence" else None
    sequences = PackedSequences.from_lengths(LENGTHS, causal_B=causal_B)
    heads, visible = drawn_heads(), causal if reads == "by position" else None

    def attended() -> Tensor:
        return attend(*heads, sequences, dropout_rate=0.0, scope=SCOPE, visible=visible, scale=scale)

    mixed_TNH = attended()
    assert calls == [sum(LENGTHS)]
    monkeypatch.setattr(varlen, "has_kernels", lambda device: False)
    same_in_both(mixed_TNH, attended(), heads)


@pytest.mark.parametrize("from_the_left", [False, True])
def test_a_window_in_the_kernel_gives_what_chunks_give(
    from_the_left: bool, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    causal_B = np.ones(len(LENGTHS), dtype=np.bool_) if from_the_left else None
    sequences, heads = PackedSequences.from_lengths(LENGTHS, causal_B=causal_B), drawn_heads()

    def attended() -> Tensor:
        return sliding_window_attention(*heads, sequences, each_side=4, dropout_rate=0.0, scope=SCOPE)

    mixed_TNH = attended()
    assert calls == [sum(LENGTHS)]
    monkeypatch.setattr(varlen, "has_kernels", lambda device: False)
    same_in_both(mixed_TNH, attended(), heads)


@pytest.mark.parametrize(
    ("window", "visible", "expected"),
    [(None, None, (False, None, None)), (None, causal, (True, None, None)), (4, None, (False, 4, 4))],
)
def test_probabilities_are_dropped_out_in_the_operator_beneath_the_kernel(
    window: int | None,
    visible: Visible | None,
    expected: tuple[bool, int | None, int | None],
    calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[object, ...]] = []

    def operator(
        query_TNH: Tensor,
        key_TNH: Tensor,
        value_TNH: Tensor,
        cum_seq_q: Tensor,
        cum_seq_k: Tensor,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float | None,
        window_size_left: int | None,
        window_size_right: int | None,
    ) -> tuple[Tensor, ...]:
        assert cum_seq_q.tolist() == cum_seq_k.tolist() == [0, *np.cumsum(LENGTHS)]
        assert (max_q, max_k, return_debug_mask) == (17, 17, False)
        seen.append((dropout_p, scale, is_causal, window_size_left, window_size_right))
        return value_TNH, query_TNH, query_TNH, query_TNH, query_TNH

    schema = torch.ops.aten._flash_attention_forward.default._schema
    own = list(inspect.signature(operator).parameters)
    theirs = [argument.name for argument in schema.arguments]
    assert theirs[:10] == ["query", "key", "value", *own[3:10]]
    assert set(own[10:]) <= set(theirs[10:])
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", operator)
    query, key, value = drawn_heads()
    sequences = PackedSequences.from_lengths(LENGTHS)
    if window is None:
        mixed = attend(query, key, value, sequences, dropout_rate=0.1, scope=SCOPE, visible=visible, scale=0.3)
    else:
        mixed = sliding_window_attention(query, key, value, sequences, each_side=window, dropout_rate=0.1, scope=SCOPE)
    assert mixed is value
    assert seen == [(0.1, 0.3 if window is None else None, *expected)]
    assert calls == []


def no_bias(query: Tensor, key: Tensor, block: object) -> Tensor:
    return query.new_zeros(1, 1, 1, 1)


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("recorded", {"scope": Scope(Recorder(["hook_pattern"]), "")}),
        ("bias", {"bias": no_bias}),
        ("by position", {"visible": sliding_window(2)}),
        ("others are not", {"sequences": PackedSequences.from_lengths(LENGTHS, causal_B=np.arange(6) > 2)}),
    ],
)
def test_what_the_kernel_cannot_do_goes_through_rectangles_and_the_reason_is_logged_once(
    reason: str,
    changes: dict[str, float | Scope | Bias | PackedSequences],
    calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(varlen, "_reported", set())
    arguments = {"dropout_rate": 0.0, "scope": SCOPE, "sequences": PackedSequences.from_lengths(LENGTHS)} | changes
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            attend(*drawn_heads(), **arguments)  # type: ignore[arg-type]
    assert calls == []
    assert len(caplog.messages) == 1
    assert reason in caplog.messages[0]


@pytest.mark.parametrize(
    ("reason", "dtype", "width"), [("float32", torch.float32, 8), ("width 12", torch.bfloat16, 12)]
)
def test_heads_that_the_kernel_cannot_read_go_through_rectangles(
    reason: str, dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(varlen, "has_kernels", lambda device: True)
    monkeypatch.setattr(varlen, "_reported", set())
    heads = [torch.zeros(sum(LENGTHS), 2, width, dtype=dtype) for _ in range(3)]
    with caplog.at_level(logging.INFO):
        attend(*heads, PackedSequences.from_lengths(LENGTHS), dropout_rate=0.0, scope=SCOPE)
    assert len(caplog.messages) == 1
    assert reason in caplog.messages[0]


SIZES = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 32}


@pytest.mark.parametrize(
    "config",
    [
        BertConfig(**SIZES),
        Gpt2Config(**SIZES),
        ModernBertConfig(**SIZES, local_attention=8, global_attn_every_n_layers=2),
    ],
    ids=lambda config: config.family,
)
def test_states_and_gradients_of_a_model_are_the_same_through_the_kernel(
    config: BertConfig | Gpt2Config | ModernBertConfig, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = config.build(50).eval()
    initialise(encoder, config, seed=1)
    batch = PackedBatch.from_ids([[7 + place % 40 for place in range(length)] for length in LENGTHS])

    def states_and_gradients() -> tuple[Tensor, ...]:
        states_TD = encoder(batch)
        loss = (states_TD * torch.linspace(-1, 1, states_TD.numel()).view(states_TD.shape)).sum()
        gradients = torch.autograd.grad(loss, list(encoder.parameters()), allow_unused=True)
        return states_TD, *(each for each in gradients if each is not None)

    found = states_and_gradients()
    assert calls == [sum(LENGTHS)] * 3
    monkeypatch.setattr(varlen, "has_kernels", lambda device: False)
    torch.testing.assert_close(found, states_and_gradients(), rtol=1e-4, atol=1e-5)

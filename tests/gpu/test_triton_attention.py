"""The Triton kernels for attention of packed sequences against plain float64 operators, on Hopper or newer."""

from __future__ import annotations

import pytest
import torch

from bertkit.data.batch import PackedBatch
from bertkit.kernels import gpu_attention
from bertkit.kernels.gpu_attention import packed_attention, triton_attention_enabled
from bertkit.models.attention import varlen
from bertkit.models.encoder import initialise
from bertkit.models.families.bert import BertConfig
from tests.gpu.device import GPU, needs_gpu
from tests.kernels.dropped_attention import Case, plain_attention, relative_error

pytestmark = [
    needs_gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and not gpu_attention.is_available(GPU),
        reason="the GPU is older than Hopper, or has no triton",
    ),
]

CASES = [
    Case(),
    Case(rate=0.1),
    Case(width=32, rate=0.4),
    Case(dtype=torch.float16, rate=0.1),
    Case(window=(-1, 0), rate=0.1),
    Case(window=(-1, 0), width=32),
    Case(window=(16, 16), rate=0.2),
    Case(window=(3, 70)),
    Case(lengths=(300, 0, 1, 515, 0), rate=0.1),
    Case(lengths=(64, 128, 64), rate=0.1, heads=1),
    Case(lengths=(1, 1, 2), rate=0.5, heads=5),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_are_the_plain_ones(case: Case) -> None:
    rows, bounds_B1, given = case.drawn(GPU)
    scale = 0.7 * case.width**-0.5
    shared = (bounds_B1, max(case.lengths), *case.window, scale, case.rate)
    mixed, _, drawn = torch.ops.bertkit.packed_attention(*rows, *shared)
    exact = plain_attention(rows, bounds_B1, drawn, case.window, scale, case.rate)
    found, expected = (torch.autograd.grad(each, rows, given.to(each.dtype)) for each in (mixed, exact))
    rounding = 2**-7 if case.dtype == torch.bfloat16 else 2**-10
    for one, other in zip((mixed, *found), (exact, *expected), strict=True):
        assert relative_error(one, other) < rounding


def test_scores_far_from_zero_give_finite_gradients() -> None:
    """After the end of a sequence a score is 0, which may be hundreds above the log of the sum of exponentials."""
    case = Case(lengths=(70, 5, 129), heads=2)
    rows, bounds_B1, given = case.drawn(GPU)
    query, key, value = (each.detach().clone() for each in rows)
    key, query = key.abs() * 20, -query.abs() * 20
    leaves = [each.requires_grad_() for each in (query, key, value)]
    mixed = packed_attention(*leaves, bounds_B1, 129, scale=0.125, dropout_rate=0.1)
    assert all(each.isfinite().all() for each in (mixed, *torch.autograd.grad(mixed, leaves, given)))


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)])
def test_the_bits_of_values_and_gradients_do_not_change_from_time_to_time(window: tuple[int, int]) -> None:
    case = Case(lengths=(200, 77, 310, 512, 64) * 4, heads=12)
    rows, bounds_B1, given = case.drawn(GPU)

    def computed(seed: int) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(seed)
        mixed = packed_attention(*rows, bounds_B1, 512, window=window, scale=0.125, dropout_rate=0.1)
        return mixed.detach(), *torch.autograd.grad(mixed, rows, given, retain_graph=True)

    first = computed(1)
    for _ in range(4):
        assert all(map(torch.equal, first, computed(1)))
    assert not torch.equal(first[0], computed(2)[0])


def test_a_model_computes_with_it_where_the_run_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
    config = BertConfig(**sizes, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
    encoder = config.build(300)
    initialise(encoder, config, seed=1)
    encoder.to(GPU).train()
    batch = PackedBatch.from_ids([[7 + place % 200 for place in range(length)] for length in (5, 117, 1, 64)]).to(GPU)

    def states_and_gradient(wanted: bool) -> tuple[torch.Tensor, torch.Tensor]:
        with triton_attention_enabled(wanted), torch.autocast("cuda", torch.bfloat16):
            states_TD = encoder(batch).float()
        weight_TD = torch.linspace(-1, 1, states_TD.numel(), device=GPU).view(states_TD.shape)
        (gradient,) = torch.autograd.grad((states_TD * weight_TD).sum(), [encoder.word_embedding.weight])
        return states_TD.detach(), gradient

    monkeypatch.setattr(varlen, "_reported", set())
    found = states_and_gradient(True)
    assert varlen._reported == {"Triton kernels for packed sequences"}
    for one, other in zip(found, states_and_gradient(False), strict=True):
        assert relative_error(one, other) < 0.02

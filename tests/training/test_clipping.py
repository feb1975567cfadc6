"""Gradients by rows equal dense ones: same norm, same clipping, same weights after several updates."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.models.families.bert import BertConfig
from bertkit.models.headed import HeadedModel
from bertkit.training.clipping import RowClipping
from bertkit.training.optimizers import AdamWConfig

HEAD = "sequence_classification"
STEPS: list[list[list[list[int]]]] = [
    [[[1, 2, 3, 2], [7]], [[2, 2, 9]]],
    [[[30, 5], [1, 1, 8]]],
    [[[7, 6, 5], [4, 3, 2]]],
]
"""Micro-batches of each update with their sequences; words repeat within and between them."""


def model() -> HeadedModel:
    config = BertConfig(
        hidden_size=12,
        num_hidden_layers=1,
        num_attention_heads=3,
        intermediate_size=20,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.2,
    )
    made = HeadedModel(config.build(40), (HEAD,))
    made.initialise(seed=3)
    return made


def gradient(made: HeadedModel, parts: Sequence[Sequence[Sequence[int]]]) -> None:
    for part in parts:
        batch = PackedBatch.from_ids(part)
        made.logits(HEAD, made(batch), batch).square().sum().backward()


@pytest.mark.parametrize("max_norm", [0.05, 1e9, float("inf")])
def test_updates_equal_those_of_dense_gradients(max_norm: float) -> None:
    ours, theirs = model(), model()
    # The bias of keys has a gradient of rounding errors only, which a small eps would amplify.
    settings = AdamWConfig(weight_decay=0.1, eps=1e-3)
    left, right = settings.build(ours), settings.build(theirs)
    rows = RowClipping(ours, max_norm)
    for group in (*left.param_groups, *right.param_groups):
        group["lr"] = 0.01
    for parts in STEPS:
        gradient(ours, parts)
        gradient(theirs, parts)
        norm = rows.clip()
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        assert norm == pytest.approx(float(expected), rel=1e-5)
        for (name, our), their in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(our.grad, their.grad, rtol=1e-5, atol=1e-8, msg=name)
        left.step()
        right.step()
        rows.clear()
        left.zero_grad()
        right.zero_grad()
    for (name, our), their in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(our, their, rtol=1e-5, atol=1e-7, msg=name)


def test_the_table_is_one_tensor_all_along_and_empty_between_updates() -> None:
    made = model()
    rows = RowClipping(made, 1.0)
    table_VE = made.encoder.word_embedding.weight
    seen: list[Tensor] = []
    for parts in STEPS:
        gradient(made, parts)
        rows.clip()
        assert table_VE.grad is not None
        seen.append(table_VE.grad)
        words = sorted({word for part in parts for sequence in part for word in sequence})
        assert table_VE.grad.abs().sum(dim=1).nonzero().flatten().tolist() == words
        rows.clear()
        assert table_VE.grad is None
    assert len({each.data_ptr() for each in seen}) == 1
    assert not seen[0].any()


def test_a_table_that_is_not_trained_or_read_elsewhere_too_is_left_to_torch() -> None:
    frozen = model()
    frozen.encoder.word_embedding.weight.requires_grad_(False)
    rows = RowClipping(frozen, 1.0)
    gradient(frozen, STEPS[0])
    assert rows.clip() > 0
    assert frozen.encoder.word_embedding.weight.grad is None
    rows.clear()

    tied, plain = model(), model()
    rows = RowClipping(tied, 0.5)
    for made in (tied, plain):
        gradient(made, STEPS[0])
        made.encoder.word_embedding.weight.square().sum().backward()
    norm = rows.clip()
    assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)), rel=1e-5)
    table_VE = plain.encoder.word_embedding.weight
    torch.testing.assert_close(tied.encoder.word_embedding.weight.grad, table_VE.grad)

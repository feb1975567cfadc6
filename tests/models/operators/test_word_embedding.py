"""Sparse embedding gradients: torch's bits, even if the outputs are also held or modified elsewhere."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from tests.models.test_rows import INDEX_M, SEQUENCES, small
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.models.operators import word_embedding
from bertkit.models.operators.word_embedding import WordEmbedding, is_plain_embedding
from bertkit.models.registry import FAMILIES

ROWS, WIDTH = 37, 24


@pytest.fixture(autouse=True)
def small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_embedding, "LEAST_WEIGHTS", ROWS * WIDTH)


def both(seed: int = 0) -> tuple[WordEmbedding, nn.Embedding]:
    torch.manual_seed(seed)
    own = WordEmbedding(ROWS, WIDTH)
    other = nn.Embedding(ROWS, WIDTH)
    other.load_state_dict(own.state_dict())
    return own, other


def words(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(seed))


def read(table: nn.Embedding, ids: Tensor) -> Tensor:
    return (table(ids) * torch.linspace(-1, 1, WIDTH)).square().sum()


def gradient(table: nn.Embedding, ids: Tensor) -> Tensor:
    return torch.autograd.grad(read(table, ids), table.weight)[0]


def tied(table: nn.Embedding, seed: int = 0) -> Tensor:
    states = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed))
    return (states @ table.weight.t()).square().sum()


LOSSES: dict[str, Callable[[nn.Embedding, int], Tensor]] = {
    "head": lambda table, turn: read(table, words(11, seed=turn)) + tied(table, turn),
    "no head": lambda table, turn: read(table, words(11, seed=turn)),
    "read twice": lambda table, turn: read(table, words(11, seed=turn)) + read(table, words(3, 4, seed=turn + 1)),
    "read twice, head": lambda table, turn: (
        read(table, words(11, seed=turn)) + tied(table, turn) + read(table, words(2, seed=turn + 1))
    ),
    "no words": lambda table, turn: read(table, words(0)) + tied(table, turn),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_have_torchs_bits(loss: Callable[[nn.Embedding, int], Tensor], micro_batches: int) -> None:
    tables = both()
    for update in range(3):
        for table in tables:
            table.weight.grad = None
            for part in range(micro_batches):
                loss(table, update + 7 * part).backward()
            table.weight.grad.mul_(0.3)  # type: ignore[union-attr]  # as clipping does
        assert torch.equal(tables[0].weight.grad, tables[1].weight.grad)  # type: ignore[arg-type]


def test_the_same_memory_is_used_again() -> None:
    table, _ = both()
    found = set()
    for turn in range(4):
        table.weight.grad = None
        (read(table, words(11, seed=turn)) + tied(table)).backward()
        zeros_VE = table._zeros._zeros_VE
        assert zeros_VE is not None
        found.add(zeros_VE.data_ptr())
    assert len(found) == 1


def test_a_gradient_that_is_kept_stays_as_it_is() -> None:
    table, other = both()
    held: list[Tensor] = []
    for turn in range(3):
        found, expected = (gradient(each, words(9, seed=turn)) for each in (table, other))
        assert torch.equal(found, expected)
        held.append(found)
    for turn, found in enumerate(held):
        assert torch.equal(gradient(other, words(9, seed=turn)), found)


@pytest.mark.parametrize(
    "write", [lambda rows: rows.add_(1), lambda rows: rows[3:9].zero_(), lambda rows: rows.t().fill_(2)]
)
def test_what_others_write_into_a_gradient_is_cleared(write: Callable[[Tensor], Tensor]) -> None:
    table, other = both()
    for turn in range(3):
        found, expected = (gradient(each, words(9, seed=turn)) for each in (table, other))
        assert torch.equal(found, expected)
        write(found)
        del found


def test_a_view_of_a_gradient_that_is_kept_stays_as_it_is() -> None:
    table, other = both()
    view = gradient(table, words(9))[:, 2:5]
    before = view.clone()
    found, expected = (gradient(each, words(9, seed=1)) for each in (table, other))
    assert torch.equal(found, expected)
    assert torch.equal(view, before)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_the_tensor_of_the_words_may_be_written_to_before_the_next_pass(dtype: torch.dtype) -> None:
    table, other = both()
    ids = words(9).to(dtype)
    for turn in range(3):
        ids.copy_(words(9, seed=turn))
        for each in (table, other):
            each.weight.grad = None
            (read(each, ids) + tied(each)).backward()
        assert torch.equal(table.weight.grad, other.weight.grad)  # type: ignore[arg-type]


def test_the_default_type_of_new_tensors_is_not_that_of_the_zeros() -> None:
    table, other = both()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found, expected = (gradient(each, words(9)) for each in (table, other))
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(found, expected)


def test_second_derivatives() -> None:
    seconds = []
    for table in both():
        loss = (table(words(9)).sum(dim=1) ** 3).sum()
        (first,) = torch.autograd.grad(loss, table.weight, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), table.weight)[0])
    assert torch.equal(*seconds)


def test_a_copy_has_zeros_of_its_own() -> None:
    table, _ = both()
    (read(table, words(11)) + tied(table)).backward()
    for other in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        assert other._zeros._zeros_VE is None
        assert torch.equal(other.weight, table.weight)
        assert list(other.state_dict()) == ["weight"]


def test_the_table_may_change_between_the_passes() -> None:
    """As in torch, the backward pass needs only the token ids."""
    table, other = both()
    losses = [read(each, words(9)) for each in (table, other)]
    with torch.no_grad():
        for each in (table, other):
            each.weight.mul_(2)
    for loss in losses:
        loss.backward()
    assert torch.equal(table.weight.grad, other.weight.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("kept", ["small", "sparse", "frozen", "bfloat16", "no gradient"])
def test_elsewhere_it_is_torchs(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table, _ = both()
    assert table._keeps_zeros()
    if kept == "small":
        monkeypatch.setattr(word_embedding, "LEAST_WEIGHTS", ROWS * WIDTH + 1)
    elif kept == "sparse":
        table.sparse = True
    elif kept == "frozen":
        table.requires_grad_(False)
    elif kept == "bfloat16":
        table.bfloat16()
    with torch.set_grad_enabled(kept != "no gradient"):
        assert not table._keeps_zeros()
        assert "Lookup" not in type(table(words(4)).grad_fn).__name__


def test_is_plain() -> None:
    assert is_plain_embedding(WordEmbedding(3, 2))
    assert is_plain_embedding(nn.Embedding(3, 2))
    assert not is_plain_embedding(nn.Linear(3, 2))


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"elmo"}))  # read in lanes, and reads characters
def test_every_family_trains_to_the_same_bits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = PackedBatch.from_ids(SEQUENCES)
    found = []
    for least in (1, 1 << 40):
        monkeypatch.setattr(word_embedding, "LEAST_WEIGHTS", least)
        model = small(family)
        torch.manual_seed(1)
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            states = model.encoder.forward_tokens(batch, INDEX_M)
            (states.square().sum() + model.encoder.word_embedding.weight.square().sum()).backward()
        found.append([each.grad for each in model.parameters() if each.grad is not None])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))

"""MaxSim and the losses on it equal sentence-transformers', value and gradient, on texts of different lengths."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from bertkit.data.batch import PackedBatch
from bertkit.errors import UsageError
from bertkit.models import late_interaction as model
from bertkit.models.late_interaction import LateInteraction, all_scores, maxsim, padded
from bertkit.tasks.base import TaskBatch
from bertkit.tasks.classification import LABEL
from bertkit.tasks.embedding.late_interaction import SCORED, LateInteractionTask
from bertkit.tasks.embedding.losses.base import EmbeddingLoss, TextVectors
from bertkit.tasks.embedding.losses.cosent import CosentLoss
from bertkit.tasks.embedding.losses.kl_divergence import KlDivergenceLoss
from bertkit.tasks.embedding.losses.margin import MarginLoss
from bertkit.tasks.embedding.losses.multiple_negatives import MultipleNegativesLoss
from bertkit.tasks.embedding.task import TEXT_NUMBER

EXAMPLES, TEXTS, WIDTH = 5, 4, 6
MAXSIM = MultipleNegativesLoss(similarity="maxsim", scale=0.7, mask_duplicates=False)


def task_of(loss: EmbeddingLoss, **settings: Any) -> LateInteractionTask:
    return LateInteractionTask(loss, (), interaction=LateInteraction(), projected_width=WIDTH, **settings)


def drawn() -> tuple[TaskBatch, Tensor, list[Tensor]]:
    """A batch in which some tokens are not scored, the vectors of those that are, and those of each text."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(2, 9, (EXAMPLES * TEXTS,), generator=generator).tolist()
    scored_T = torch.rand(sum(lengths), generator=generator) < 0.7
    scored_T[np.cumsum([0, *lengths])[:-1]] = True
    packed = PackedBatch.from_ids([[1] * length for length in lengths])
    example_B = torch.arange(EXAMPLES).repeat_interleave(TEXTS)
    margins = torch.randn(EXAMPLES, TEXTS - 2, generator=generator)
    labels = {LABEL: margins, TEXT_NUMBER: torch.arange(EXAMPLES * TEXTS).view(EXAMPLES, TEXTS)}
    counts = [int(each.sum()) for each in scored_T.split(lengths)]
    vectors_ME = nn.functional.normalize(torch.randn(sum(counts), WIDTH, generator=generator), dim=-1)
    return TaskBatch(packed, example_B, labels, {SCORED: scored_T}), vectors_ME, list(vectors_ME.split(counts))


class TokensAsModel(nn.Module):
    """Returns given vectors instead of embedding texts, in the form that sentence-transformers' losses require."""

    def forward(self, features: dict[str, Tensor], **_: Any) -> dict[str, Tensor]:
        return dict(features)


def columns(texts: list[Tensor]) -> list[dict[str, Tensor]]:
    """The texts of each place in an example, padded."""
    found = []
    for place in range(TEXTS):
        own = texts[place::TEXTS]
        mask = pad_sequence([torch.ones(len(each), dtype=torch.bool) for each in own], batch_first=True)
        found.append({"token_embeddings": pad_sequence(own, batch_first=True), "attention_mask": mask})
    return found


@pytest.mark.parametrize("name", ["multiple_negatives", "margin", "kl_divergence"])
def test_losses_equal_the_oracles(name: str) -> None:
    pytest.importorskip("sentence_transformers", reason="the oracle is a development dependency")
    from sentence_transformers.multi_vector_encoder import losses as oracle

    batch, vectors_ME, texts = drawn()
    margins = batch.example_labels[LABEL]
    scores = torch.cat([torch.full((EXAMPLES, 1), 3.0), 3.0 - margins], dim=1)
    theirs, own, target = {
        "multiple_negatives": (oracle.MultiVectorMultipleNegativesRankingLoss, MAXSIM, None),
        "margin": (oracle.MultiVectorMarginMSELoss, MarginLoss(), margins),
        "kl_divergence": (oracle.MultiVectorDistillKLDivLoss, KlDivergenceLoss(temperature=2.0), scores),
    }[name]
    more: dict[str, Any] = {"multiple_negatives": {"scale": 0.7}, "kl_divergence": {"temperature": 2.0}}.get(name, {})
    rows = vectors_ME.clone().requires_grad_()
    ours = task_of(own).loss_of(rows, batch)  # type: ignore[arg-type]  # one of three losses
    leaf = vectors_ME.clone().requires_grad_()
    parts = leaf.split([len(each) for each in texts])
    expected = theirs(TokensAsModel(), **more)(columns(list(parts)), target)
    torch.testing.assert_close(ours.sum / ours.count, expected)
    gradients = torch.autograd.grad(ours.sum / ours.count, rows), torch.autograd.grad(expected, leaf)
    torch.testing.assert_close(*(each for (each,) in gradients))


def test_scores_in_blocks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    _, vectors_ME, texts = drawn()
    counts = torch.tensor([len(each) for each in texts])
    starts = counts.cumsum(0) - counts

    def scores_and_gradient() -> tuple[Tensor, Tensor]:
        rows = vectors_ME.clone().requires_grad_()
        query_IQE, _ = padded(rows, starts[:3], counts[:3])
        scores_IC = maxsim(query_IQE, *padded(rows, starts[3:], counts[3:]))
        return scores_IC.detach(), torch.autograd.grad(scores_IC.square().sum(), rows)[0]

    whole = scores_and_gradient()
    plain = [[(query @ text.T).max(dim=1).values.sum() for text in texts[3:]] for query in texts[:3]]
    torch.testing.assert_close(whole[0], torch.tensor(plain))
    monkeypatch.setattr(model, "_CELLS", 200)
    for once, again in zip(whole, scores_and_gradient(), strict=True):
        torch.testing.assert_close(once, again)
    arrays = [text.numpy() for text in texts]
    np.testing.assert_allclose(all_scores(arrays[:3], arrays[3:]), whole[0], rtol=1e-5)


def test_kl_divergence_of_vectors_is_that_of_their_dot_products() -> None:
    vectors = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(1))
    scores = torch.tensor([[2.0, 1.0], [0.5, 0.5], [1.0, 3.0], [0.0, 0.2]])
    found = KlDivergenceLoss().loss(TextVectors(vectors, scores[:, :1] - scores[:, 1:]))
    products = (vectors[:, :1] * vectors[:, 1:]).sum(dim=-1).log_softmax(dim=-1)
    expected = (scores.softmax(dim=-1) * (scores.log_softmax(dim=-1) - products)).sum()
    torch.testing.assert_close(found.sum, expected)


def test_symmetric_scores_find_each_positives_query() -> None:
    batch, vectors_ME, texts = drawn()
    loss = MultipleNegativesLoss(similarity="maxsim", scale=1.0, symmetric=True, mask_duplicates=False)
    ways = [
        task_of(each).loss_of(vectors_ME, batch).sum for each in (loss, loss.model_copy(update={"symmetric": False}))
    ]
    back = torch.tensor([[(q @ d.T).max(dim=1).values.sum() for q in texts[::TEXTS]] for d in texts[1::TEXTS]])
    expected = nn.functional.cross_entropy(back, torch.arange(EXAMPLES), reduction="sum")
    torch.testing.assert_close(2 * ways[0] - ways[1], expected)


def test_losses_on_vectors_are_refused() -> None:
    with pytest.raises(UsageError, match=r"embedding.loss: cosent reads one vector per text"):
        task_of(CosentLoss())


@pytest.mark.parametrize("lengths", [[5, 5], [5, 3, 9]])
@pytest.mark.parametrize("independent", [False, True])
def test_hidden_keys_are_left_out_of_the_blocks(lengths: list[int], independent: bool) -> None:
    keys = [length - 2 for length in lengths]
    ids = [list(range(length)) for length in lengths]
    sequences = PackedBatch.from_ids(ids, keys=keys, independent=independent).sequences
    assert sequences.hides_keys
    bounds = list(pairwise(sequences.cu_seqlens_B1.tolist()))
    found: dict[int, int] = {}
    assert sequences.gather_P is not None
    cells = iter(sequences.gather_P.tolist())
    for block in sequences.blocks:
        assert block.mask_b11S is not None
        for row in block.mask_b11S[:, 0, 0].tolist():
            seen = [token for token, is_key in zip((next(cells) for _ in row), row, strict=True) if is_key]
            number = next(n for n, (start, _) in enumerate(bounds) if start == seen[0])
            found[number] = len(seen)
    assert [found[number] for number in range(len(lengths))] == keys
    assert not PackedBatch.from_ids(ids, keys=lengths).sequences.hides_keys

"""Losses on vectors equal sentence-transformers', value and gradient, on random batches of odd sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bertkit.errors import UsageError
from bertkit.tasks.embedding.losses.angle import AngleLoss
from bertkit.tasks.embedding.losses.base import EmbeddingLoss, TextVectors
from bertkit.tasks.embedding.losses.contrastive import ContrastiveLoss, OnlineContrastiveLoss
from bertkit.tasks.embedding.losses.cosent import CosentLoss
from bertkit.tasks.embedding.losses.cosine import CosineLoss
from bertkit.tasks.embedding.losses.margin import MarginLoss
from bertkit.tasks.embedding.losses.matryoshka import Matryoshka
from bertkit.tasks.embedding.losses.multiple_negatives import MultipleNegativesLoss
from bertkit.tasks.embedding.losses.simcse import SimcseLoss
from bertkit.tasks.embedding.losses.softmax import SoftmaxLoss
from bertkit.tasks.embedding.losses.teacher_vectors import TeacherVectorLoss
from bertkit.tasks.embedding.losses.triplet import TripletLoss
from bertkit.tasks.embedding.losses.tsdae import TsdaeLoss

pytest.importorskip("sentence_transformers", reason="the oracle is a development dependency")
from sentence_transformers.sentence_transformer import losses as oracle
from sentence_transformers.sentence_transformer.losses.contrastive import SiameseDistanceMetric
from sentence_transformers.sentence_transformer.losses.triplet import TripletDistanceMetric

SIZES = [(1, 7), (2, 8), (13, 31), (33, 24)]
CLASSES = 3


class VectorsAsModel(nn.Module):
    """Returns given vectors instead of embedding texts, in the form that sentence-transformers' losses require."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.device = torch.device("cpu")

    def get_embedding_dimension(self) -> int:
        return self.width

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features["vectors"]}


def drawn(examples: int, texts: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(examples * 100 + texts)
    return torch.randn(examples, texts, width, generator=generator)


def scores(examples: int) -> Tensor:
    """Between 0 and 1, some of them equal."""
    return torch.randint(0, 6, (examples,), generator=torch.Generator().manual_seed(examples)) / 5


def marks(examples: int) -> Tensor:
    return torch.randint(0, 2, (examples,), generator=torch.Generator().manual_seed(examples)).float()


def value_and_gradient(loss: Callable[[Tensor], Tensor], vectors_IAE: Tensor) -> tuple[Tensor, Tensor]:
    vectors = vectors_IAE.clone().requires_grad_()
    value = loss(vectors)
    value.backward()
    assert vectors.grad is not None
    return value.detach(), vectors.grad


def own_loss(loss: EmbeddingLoss, target: Tensor | None, module: nn.Module | None = None) -> Callable[[Tensor], Tensor]:
    def value(vectors: Tensor) -> Tensor:
        examples, texts = vectors.shape[:2]
        found = loss.loss(TextVectors(vectors, target, torch.arange(examples * texts).view(examples, texts)), module)
        assert found.count == loss.count(examples)
        return found.sum / found.count

    return value


def their_loss(loss: nn.Module, target: Tensor | None) -> Callable[[Tensor], Tensor]:
    def value(vectors: Tensor) -> Tensor:
        found = loss([{"vectors": part} for part in vectors.unbind(dim=1)], target)
        assert isinstance(found, Tensor)
        return found

    return value


def assert_same_value_and_gradient(
    own: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor], vectors: Tensor
) -> None:
    for found, wanted in zip(value_and_gradient(own, vectors), value_and_gradient(theirs, vectors), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


Case = tuple[EmbeddingLoss, Callable[[Any], nn.Module], int, Callable[[int], Tensor | None]]
OF_TRIPLETS, OF_PAIRS = TripletDistanceMetric, SiameseDistanceMetric
CASES: dict[str, Case] = {
    "cosine": (CosineLoss(), oracle.CosineSimilarityLoss, 2, scores),
    "cosent": (CosentLoss(), oracle.CoSENTLoss, 2, scores),
    "cosent, scale 3": (CosentLoss(scale=3.0), lambda m: oracle.CoSENTLoss(m, scale=3.0), 2, scores),
    "angle": (AngleLoss(), oracle.AnglELoss, 2, scores),
    "contrastive": (ContrastiveLoss(), oracle.ContrastiveLoss, 2, marks),
    "contrastive, euclidean": (
        ContrastiveLoss(distance="euclidean", margin=6.0),
        lambda m: oracle.ContrastiveLoss(m, distance_metric=OF_PAIRS.EUCLIDEAN, margin=6.0),
        2,
        marks,
    ),
    "online contrastive": (OnlineContrastiveLoss(), oracle.OnlineContrastiveLoss, 2, marks),
    "online contrastive, euclidean": (  # a margin within which negatives are hard, too
        OnlineContrastiveLoss(distance="euclidean", margin=9.0),
        lambda m: oracle.OnlineContrastiveLoss(m, distance_metric=OF_PAIRS.EUCLIDEAN, margin=9.0),
        2,
        marks,
    ),
    "triplet": (TripletLoss(), oracle.TripletLoss, 3, lambda n: None),
    "triplet, cosine": (
        TripletLoss(distance="cosine", margin=0.4),
        lambda m: oracle.TripletLoss(m, distance_metric=OF_TRIPLETS.COSINE, triplet_margin=0.4),
        3,
        lambda n: None,
    ),
    "triplet, manhattan": (
        TripletLoss(distance="manhattan", margin=1.0),
        lambda m: oracle.TripletLoss(m, distance_metric=OF_TRIPLETS.MANHATTAN, triplet_margin=1.0),
        3,
        lambda n: None,
    ),
    "margin": (MarginLoss(), oracle.MarginMSELoss, 3, lambda n: scores(n)[:, None]),
    "margin, three negatives": (
        MarginLoss(),
        oracle.MarginMSELoss,
        5,
        lambda n: torch.arange(3.0 * n).view(n, 3) / n,
    ),
    "multiple negatives": (MultipleNegativesLoss(), oracle.MultipleNegativesRankingLoss, 2, lambda n: None),
    "multiple negatives, hard ones": (MultipleNegativesLoss(), oracle.MultipleNegativesRankingLoss, 4, lambda n: None),
    "multiple negatives, symmetric": (
        MultipleNegativesLoss(symmetric=True, scale=7.0),
        lambda m: oracle.MultipleNegativesSymmetricRankingLoss(m, scale=7.0),
        2,
        lambda n: None,
    ),
    "multiple negatives, symmetric, hard ones": (
        MultipleNegativesLoss(symmetric=True),
        oracle.MultipleNegativesSymmetricRankingLoss,
        3,
        lambda n: None,
    ),
}


@pytest.mark.parametrize(("examples", "width"), SIZES)
@pytest.mark.parametrize("case", CASES)
def test_the_loss_is_that_of_sentence_transformers(case: str, examples: int, width: int) -> None:
    own, make, texts, target = CASES[case]
    theirs = make(VectorsAsModel(width))
    wanted = target(examples)
    assert_same_value_and_gradient(own_loss(own, wanted), their_loss(theirs, wanted), drawn(examples, texts, width))


@pytest.mark.parametrize("case", CASES)
def test_a_batch_may_be_cut_unless_the_loss_compares_its_examples(case: str) -> None:
    own, _, texts, target = CASES[case]
    vectors, wanted = drawn(33, texts, 24), target(33)
    numbers = torch.arange(33 * texts).view(33, texts)
    whole, *parts = (
        own.loss(TextVectors(vectors[part], None if wanted is None else wanted[part], numbers[part])).sum
        for part in (slice(33), slice(13), slice(13, 33))
    )
    assert torch.allclose(whole, torch.stack(parts).sum(), rtol=1e-4) != own.compares_examples


@pytest.mark.parametrize(
    ("loss", "texts", "similarity"),
    [
        (CosineLoss(), 2, "cosine"),
        (CosentLoss(), 2, "cosine"),
        (AngleLoss(), 2, "cosine"),
        (MultipleNegativesLoss(), 2, "cosine"),
        (MultipleNegativesLoss(similarity="dot", scale=1.0), 2, "dot"),
        (MarginLoss(), 3, "dot"),
        (ContrastiveLoss(), 2, "cosine"),
        (TripletLoss(distance="cosine"), 3, "cosine"),
        (TripletLoss(), 3, None),
    ],
)
def test_a_model_is_marked_cosine_if_the_loss_ignores_the_lengths_of_vectors(
    loss: EmbeddingLoss, texts: int, similarity: str | None
) -> None:
    vectors, lengths = drawn(13, texts, 8), 0.5 + torch.rand(13, texts, 1, generator=torch.Generator().manual_seed(1))
    target = scores(13)[:, None] if texts == 3 else scores(13)
    plain, scaled = (own_loss(loss, target)(each) for each in (vectors, lengths * vectors))
    assert torch.allclose(plain, scaled, rtol=1e-4) == (similarity == "cosine")
    assert loss.compared_by == similarity


@pytest.mark.parametrize(("examples", "width"), SIZES)
@pytest.mark.parametrize(
    "parts", [("u", "v"), ("|u-v|",), ("u*v",), ("|u-v|", "u*v"), ("u", "v", "|u-v|"), ("u", "v", "|u-v|", "u*v")]
)
def test_softmax_of_every_concatenation_is_that_of_sentence_transformers(
    parts: tuple[Any, ...], examples: int, width: int
) -> None:
    own = SoftmaxLoss(parts=parts)
    module = own.module(width, CLASSES)
    theirs = oracle.SoftmaxLoss(
        VectorsAsModel(width),
        width,
        CLASSES,
        concatenation_sent_rep="u" in parts,
        concatenation_sent_difference="|u-v|" in parts,
        concatenation_sent_multiplication="u*v" in parts,
    )
    assert isinstance(module, nn.Linear)
    module.load_state_dict(theirs.classifier.state_dict())
    classes = torch.arange(examples) % CLASSES
    assert_same_value_and_gradient(
        own_loss(own, classes, module), their_loss(theirs, classes), drawn(examples, 2, width)
    )
    assert module.weight.grad is not None
    torch.testing.assert_close(module.weight.grad, theirs.classifier.weight.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("examples", "width"), SIZES)
@pytest.mark.parametrize("texts", [1, 2, 3])
def test_all_texts_of_an_example_are_taught_the_vector_of_its_first_as_by_sentence_transformers(
    texts: int, examples: int, width: int
) -> None:
    taught = drawn(examples, 7, width)[:, 0]
    theirs = oracle.MSELoss(VectorsAsModel(width))
    assert_same_value_and_gradient(
        own_loss(TeacherVectorLoss(), taught), their_loss(theirs, taught), drawn(examples, texts, width)
    )


@pytest.mark.parametrize("name", ["cosine", "cosent", "multiple negatives, hard ones", "triplet"])
@pytest.mark.parametrize("weights", [None, (1.0, 0.5, 0.0)])
def test_matryoshka_of_a_loss_is_that_of_sentence_transformers(name: str, weights: tuple[float, ...] | None) -> None:
    own, make, texts, target = CASES[name]
    widths = (24, 9, 2)
    settings = Matryoshka(widths=widths, weights=weights)
    model = VectorsAsModel(24)
    theirs = oracle.MatryoshkaLoss(model, make(model), list(widths), None if weights is None else list(weights))
    wanted = target(11)

    def value(vectors: Tensor) -> Tensor:
        numbers = torch.arange(11 * texts).view(11, texts)
        found = settings.loss(own, TextVectors(vectors, wanted, numbers), None)
        return found.sum / found.count

    assert_same_value_and_gradient(value, their_loss(theirs, wanted), drawn(11, texts, 24))


def test_matryoshka_refuses_what_it_cannot_cut() -> None:
    with pytest.raises(UsageError, match=r"widths: 48 is more than the vectors' width, 24"):
        Matryoshka(widths=(48, 3)).check(CosineLoss(), 24)
    for loss in (SoftmaxLoss(), SimcseLoss(), TsdaeLoss(), TeacherVectorLoss()):
        with pytest.raises(UsageError, match=f"{loss.name} needs whole vectors"):
            Matryoshka(widths=(24, 3)).check(loss, 24)
    assert Matryoshka.model_validate({"widths": (8, 1)}).widths == (8, 1)
    for widths in ((3, 24), (8, 8), (4, 0), (8, 4, 0)):
        with pytest.raises(ValueError, match="in decreasing order"):
            Matryoshka(widths=widths)


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_text_that_occurs_twice_is_no_negative_of_itself(symmetric: bool) -> None:
    """Against a loop: candidates equal to the anchor's text or its positive are excluded, others count each time."""
    vectors, scale = drawn(6, 3, 12), 20.0
    numbers = torch.tensor([[0, 1, 2], [3, 1, 4], [5, 0, 1], [0, 6, 7], [8, 9, 10], [8, 9, 0]])
    normal = nn.functional.normalize(vectors, dim=-1)
    candidates = [(normal[i, k], int(numbers[i, k]), i if k == 1 else -1) for k in (1, 2) for i in range(6)]
    anchors = [(normal[i, 0], int(numbers[i, 0]), i) for i in range(6)]

    def found(row: int, query: Tensor, among: list[tuple[Tensor, int, int]]) -> Tensor:
        own = {int(numbers[row, 0]), int(numbers[row, 1])}
        kept = [scale * query @ other for other, text, origin in among if origin == row or text not in own]
        (right,) = (scale * query @ other for other, _, origin in among if origin == row)
        return torch.logsumexp(torch.stack(kept), dim=0) - right

    wanted = sum(found(row, normal[row, 0], candidates) for row in range(6))
    if symmetric:
        wanted = (wanted + sum(found(row, normal[row, 1], anchors) for row in range(6))) / 2
    loss = MultipleNegativesLoss(symmetric=symmetric, scale=scale).among(vectors, numbers)
    torch.testing.assert_close(loss.sum, wanted)
    plain = MultipleNegativesLoss(symmetric=symmetric, scale=scale, mask_duplicates=False).among(vectors, numbers)
    assert float(plain.sum) > float(loss.sum)

"""Embedding: sequences and labels of texts, gradients in parts equal to the whole batch's, and evaluation of
vectors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from bertkit.errors import DataError, UsageError
from bertkit.finetuning.loss_terms import TASK, TaskTerms
from bertkit.models.files.hub import load_model
from bertkit.models.headed import HeadedModel
from bertkit.models.sentence import SentenceModel
from bertkit.tasks.base import Features
from bertkit.tasks.embedding.losses.angle import AngleLoss
from bertkit.tasks.embedding.losses.base import EmbeddingLoss
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
from bertkit.tasks.embedding.task import MODULE, TEXT_NUMBER, Embedding, VectorForm
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.examples import SentenceExample
from bertkit.text.tokenizer_files import load_tokenizer
from tests.tasks.tiny_task import reviews, write_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("embedding") / "model", dropout=0.1)


@pytest.fixture(scope="module")
def encoder(directory: Path) -> SequenceEncoder:
    return SequenceEncoder(load_tokenizer(directory), max_tokens=12)


def sentences(count: int, texts: int, seed: int = 1) -> list[SentenceExample]:
    """Texts of unequal length; scores between 0 and 5."""
    found = [text for text, _ in reviews(count * texts, seed)]
    return [
        SentenceExample(str(i), tuple(found[i * texts : (i + 1) * texts]), float(i % 6) if texts == 2 else None)
        for i in range(count)
    ]


def model_of(directory: Path, task: Embedding, *, training: bool) -> HeadedModel:
    model, _ = load_model(directory, heads=(task.head,), new=(task.head,))
    for name, module in task.modules(model, 0).items():
        model.companions[name] = module
    return model.train(training)


def gradients(model: HeadedModel) -> dict[str, torch.Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def whole_and_parts(
    directory: Path, loss: EmbeddingLoss, features: Features, *, training: bool, widths: Sequence[int] = ()
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float, float]:
    task = Embedding(loss, ("spearman",), matryoshka=Matryoshka(widths=tuple(widths)) if widths else None)
    items = np.arange(features.num_examples)
    parts = features.cut(items, 60)
    assert len(parts) > 3
    found = []
    for batch in (features.batch(np.concatenate(parts)), features.joined_batch(parts)):
        model = model_of(directory, task, training=training)
        torch.manual_seed(5)
        part = TaskTerms(task).losses(model, batch)[TASK]
        assert part.count == task.count(batch)
        part.sum.backward()
        found.append((gradients(model), float(part.sum.detach())))
    (plain, plain_loss), (cached, cached_loss) = found
    return plain, cached, plain_loss, cached_loss


@pytest.mark.parametrize(
    ("loss", "texts"),
    [(MultipleNegativesLoss(), 2), (MultipleNegativesLoss(symmetric=True), 3), (CosentLoss(), 2), (AngleLoss(), 2)],
)
def test_a_batch_of_512_in_parts_has_the_loss_and_the_gradient_of_the_whole(
    directory: Path, encoder: SequenceEncoder, loss: EmbeddingLoss, texts: int
) -> None:
    task = Embedding(loss, ("spearman",), largest_score=5.0)
    features = task.encode(sentences(512, texts), encoder)
    plain, cached, plain_loss, cached_loss = whole_and_parts(directory, loss, features, training=False)
    assert cached_loss == pytest.approx(plain_loss, rel=1e-5)
    assert plain.keys() == cached.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(cached[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max() + 1))


def test_matryoshka_of_a_batch_in_parts(directory: Path, encoder: SequenceEncoder) -> None:
    loss = MultipleNegativesLoss()
    features = Embedding(loss, ("spearman",)).encode(sentences(37, 2), encoder)
    plain, cached, plain_loss, cached_loss = whole_and_parts(
        directory, loss, features, training=False, widths=(30, 11, 2)
    )
    assert cached_loss == pytest.approx(plain_loss, rel=1e-5)
    for name, gradient in plain.items():
        torch.testing.assert_close(cached[name], gradient, rtol=1e-4, atol=1e-4)


def test_the_second_pass_over_a_part_draws_the_dropout_of_the_first(directory: Path, encoder: SequenceEncoder) -> None:
    """Parts that keep their states, under the same generator, have a bit-identical gradient."""
    task = Embedding(CosentLoss(), ("spearman",))
    features = task.encode(sentences(31, 2), encoder)
    batch = features.joined_batch(features.cut(np.arange(31), 60))
    cached, kept = (model_of(directory, task, training=True) for _ in range(2))
    torch.manual_seed(9)
    TaskTerms(task).losses(cached, batch)[TASK].sum.backward()
    torch.manual_seed(9)
    vectors = torch.cat([task.logits(kept, kept.states(task.head, part.packed), part) for part in batch.parts])
    task.loss_with(kept, vectors, batch).sum.backward()
    wanted = gradients(kept)
    assert wanted
    for name, gradient in gradients(cached).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-6, atol=1e-7)


def test_vectors_are_those_of_the_sentence_model(directory: Path, encoder: SequenceEncoder) -> None:
    modes = ("mean", "cls")
    task = Embedding(CosineLoss(), ("spearman",), form=VectorForm(tuple(modes), normalise=True), largest_score=5.0)
    features = task.encode(sentences(7, 2), encoder)
    batch = features.batch(np.arange(7))
    model = model_of(directory, task, training=False)
    with torch.no_grad():
        found = task.logits(model, model.states(task.head, batch.packed), batch)
        wanted = SentenceModel(model, modes)(batch.packed)
    assert found.shape == (7, 2, 60)
    torch.testing.assert_close(found.flatten(0, 1), torch.nn.functional.normalize(wanted, dim=-1))


def test_each_text_is_a_sequence_of_its_own_and_equal_texts_have_one_number(encoder: SequenceEncoder) -> None:
    examples = [SentenceExample("a", ("cat list", "word " * 40)), SentenceExample("b", ("word " * 40, "cat list"))]
    features = Embedding(MultipleNegativesLoss(), ("accuracy",)).encode(examples, encoder)
    assert np.diff(features.starts_S1).tolist() == [4, 12, 12, 4]
    assert features.example_labels[TEXT_NUMBER].tolist() == [[0, 1], [1, 0]]
    assert (features.account.examples_cut, features.account.tokens_dropped) == (2, 2 * (40 - 10))


def test_what_the_loss_reads_of_the_labels(encoder: SequenceEncoder) -> None:
    def labels(task: Embedding, examples: Sequence[SentenceExample]) -> list[object]:
        task.check_training(examples)
        found: list[object] = task.encode(examples, encoder).example_labels["label"].tolist()
        return found

    pairs = [("0", "no"), ("1", "yes"), ("2", "no")]
    named = [SentenceExample(i, ("cat", "list"), label) for i, label in pairs]
    assert labels(Embedding(SoftmaxLoss(), ("spearman",), classes=("yes", "no")), named) == [1, 0, 1]
    scored = [SentenceExample(str(i), ("cat", "list"), float(i)) for i in range(6)]
    assert labels(Embedding(CosineLoss(), ("spearman",), largest_score=5.0), scored) == pytest.approx(
        [0, 0.2, 0.4, 0.6, 0.8, 1]
    )
    assert labels(Embedding(CosentLoss(), ("spearman",)), scored) == [0, 1, 2, 3, 4, 5]
    margins = [
        SentenceExample("0", ("a", "b", "c", "d"), (3.0, 1.0, 2.5)),
        SentenceExample("1", ("a",) * 4, (2.0, 4.0)),
    ]
    assert labels(Embedding(MarginLoss(), ("accuracy",)), margins) == [[2.0, 0.5], [2.0, 4.0]]


def test_labels_that_a_loss_does_not_read_are_reported_if_they_differ(caplog: pytest.LogCaptureFixture) -> None:
    task = Embedding(MultipleNegativesLoss(), ("spearman",))
    task.check_training([SentenceExample(f"{score}", ("cat", "list"), score) for score in (1.0, 1.0)])
    task.check_training([SentenceExample("0", ("cat", "list")), SentenceExample("1", ("cat", "cats"))])
    assert not caplog.text
    task.check_training([SentenceExample(f"{score}", ("cat", "list"), score) for score in (0.5, 5.0)])
    assert "multiple_negatives does not read labels, so all 2 examples count as texts that belong" in caplog.text


def test_what_does_not_fit_a_loss_is_refused_with_the_remedy(encoder: SequenceEncoder) -> None:
    pair = [SentenceExample("x7", ("cat", "list"), 4.5)]
    with pytest.raises(DataError, match=r"example x7: the score 4.5 .* set embedding.largest_score"):
        Embedding(CosineLoss(), ("spearman",)).check_training(pair)
    with pytest.raises(UsageError, match=r"margin needs 3 or more texts per example, but there are 2; .* --negatives"):
        Embedding(MarginLoss(), ("spearman",)).check_training(pair)
    with pytest.raises(UsageError, match=r"cosent needs 2 texts per example, but there are 3"):
        Embedding(CosentLoss(), ("spearman",)).check_training([SentenceExample("0", ("cat", "list", "x"), 4.5)])
    with pytest.raises(UsageError, match=r"cosent needs a score for each example, but an example has none; .* --label"):
        Embedding(CosentLoss(), ("spearman",)).check_training([SentenceExample("0", ("cat", "list"))])
    with pytest.raises(UsageError, match=r"margin needs margins for each example, .* let a teacher compute them"):
        Embedding(MarginLoss(), ("spearman",)).check_training([SentenceExample("0", ("cat", "list", "x"))])
    with pytest.raises(DataError, match=r"example 1: has 1 texts, but the first example has 2"):
        Embedding(CosineLoss(), ("spearman",)).check_training([*pair, SentenceExample("1", ("cat",), 0.3)])
    with pytest.raises(DataError, match=r"example n: the label is 'high'; the loss needs a score"):
        Embedding(CosineLoss(), ("spearman",)).check_training([SentenceExample("n", ("a", "b"), "high")])
    with pytest.raises(UsageError, match=r"evaluated on pairs with a score.*--dev stsb"):
        Embedding(CosineLoss(), ("spearman",)).fitting_metrics([SentenceExample("n", ("a", "b"), "high")])


@pytest.mark.parametrize(
    ("loss", "fits"),
    [
        (SimcseLoss(), {1}),
        (TsdaeLoss(), {1}),
        (CosineLoss(), {2}),
        (TripletLoss(), {3}),
        (MarginLoss(), {3, 4}),
        (MultipleNegativesLoss(), {2, 3, 4}),
        (TeacherVectorLoss(), {1, 2, 3, 4}),
    ],
)
def test_a_loss_is_trained_on_examples_of_as_many_texts_as_its_formula_has(loss: EmbeddingLoss, fits: set[int]) -> None:
    task, accepted = Embedding(loss, ("spearman",), has_teacher=True), set()
    for count in (1, 2, 3, 4):
        with suppress(UsageError):
            task.check_training([SentenceExample("0", ("cat", "list", "words", "cats")[:count])])
            accepted.add(count)
    assert accepted == fits


def test_scored_pairs_are_ranked_by_their_cosines() -> None:
    examples = [SentenceExample(str(i), ("a", "b"), score) for i, score in enumerate((0.0, 5.0, 2.0))]
    vectors = [np.array([[1.0, 0.0], [np.cos(angle), np.sin(angle)]]) * (1 + angle) for angle in (1.5, 0.1, 0.9)]
    task = Embedding(CosineLoss(), ("spearman", "pearson"))
    found = task.predictions(examples, None, vectors)  # type: ignore[arg-type]  # not read
    assert [each.prediction for each in found] == pytest.approx([np.cos(1.5), np.cos(0.1), np.cos(0.9)])
    assert task.score(found, examples)["spearman"] == pytest.approx(1.0)


def test_triplets_and_pairs_are_right_where_the_positive_is_nearest() -> None:
    near, far = np.array([1.0, 0.1]), np.array([0.0, 1.0])
    anchor = np.array([2.0, 0.0])
    triplets = [SentenceExample(str(i), ("a", "p", "n")) for i in range(3)]
    task = Embedding(CosineLoss(), ("accuracy",))
    vectors = [np.stack(each) for each in ((anchor, near, far), (anchor, far, near), (anchor, near, near))]
    found = task.predictions(triplets, None, vectors)  # type: ignore[arg-type]  # not read
    assert [each.prediction for each in found] == ["positive", "negative 1", "negative 1"]
    assert task.score(found, triplets)["accuracy"] == pytest.approx(1 / 3)
    broken = task.predictions(triplets[:1], None, [np.full((3, 2), np.nan)])  # type: ignore[arg-type]  # not read
    assert broken[0].prediction == "negative 1", "vectors that are not numbers rank nothing"
    pairs = [SentenceExample(str(i), ("q", text)) for i, text in enumerate(("p", "n", "p"))]
    vectors = [np.stack(each) for each in ((anchor, near), (far, far), (anchor, near))]
    found = task.predictions(pairs, None, vectors)  # type: ignore[arg-type]  # not read
    assert task.score(found, pairs)["accuracy"] == 1.0, "an equal text is not a mistake"


def test_softmax_has_a_classifier_that_is_not_saved_with_the_model(directory: Path) -> None:
    task = Embedding(SoftmaxLoss(), ("spearman",), classes=("x", "y", "z"))
    model = model_of(directory, task, training=False)
    assert f"companions.{MODULE}.weight" in dict(model.named_parameters())
    assert not any(name.startswith("companions") for name in model.own_state_dict())

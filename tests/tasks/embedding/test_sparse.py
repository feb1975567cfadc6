"""Sparse vectors: the penalty is sentence-transformers', a batch in parts has the whole's gradient, and texts are
compared by the dot product."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from torch.nn import functional

from bertkit.errors import UsageError
from bertkit.finetuning.loss_terms import TASK, TaskTerms
from bertkit.models.sentence import SentenceModel
from bertkit.tasks.embedding.losses.base import EmbeddingLoss, TextVectors
from bertkit.tasks.embedding.losses.flops import Sparsity
from bertkit.tasks.embedding.losses.margin import MarginLoss
from bertkit.tasks.embedding.losses.matryoshka import Matryoshka
from bertkit.tasks.embedding.losses.multiple_negatives import MultipleNegativesLoss
from bertkit.tasks.embedding.losses.simcse import SimcseLoss
from bertkit.tasks.embedding.losses.teacher_vectors import TeacherVectorLoss
from bertkit.tasks.embedding.losses.tsdae import TsdaeLoss
from bertkit.tasks.embedding.similarity import predicted
from bertkit.tasks.embedding.sparse import SparseEmbedding
from bertkit.tasks.embedding.task import VectorForm
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.examples import SentenceExample
from bertkit.text.tokenizer_files import load_tokenizer
from tests.tasks.embedding.test_embedding import gradients, model_of, sentences
from tests.tasks.embedding.test_losses import VectorsAsModel, assert_same_value_and_gradient, own_loss
from tests.tasks.tiny_task import write_model

sparse_losses = pytest.importorskip("sentence_transformers.sparse_encoder.losses", reason="the oracle")

NEGATIVES = MultipleNegativesLoss(similarity="dot")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("sparse") / "model", dropout=0.0)


@pytest.fixture(scope="module")
def encoder(directory: Path) -> SequenceEncoder:
    return SequenceEncoder(load_tokenizer(directory), max_tokens=12)


SPLADE = VectorForm(pooling=("splade",))


def task_of(loss: EmbeddingLoss = NEGATIVES, sparsity: Sparsity | None = None) -> SparseEmbedding:
    return SparseEmbedding(loss, ("spearman",), form=SPLADE, sparsity=sparsity)


def vectors(examples: int, texts: int, words: int = 40) -> torch.Tensor:
    drawn = torch.randn(examples, texts, words, generator=torch.Generator().manual_seed(examples))
    return functional.relu(drawn)


@pytest.mark.parametrize("texts", [2, 4])
def test_dot_products_have_the_scale_1_and_the_loss_of_the_oracle(texts: int) -> None:
    assert (NEGATIVES.factor, MultipleNegativesLoss().factor) == (1.0, 20.0)
    assert MultipleNegativesLoss(similarity="dot", scale=3.0).factor == 3.0
    theirs = sparse_losses.SparseMultipleNegativesRankingLoss(VectorsAsModel(40)).compute_loss_from_embeddings
    assert_same_value_and_gradient(
        own_loss(NEGATIVES, None), lambda given: theirs(list(given.unbind(dim=1)), None), vectors(13, texts)
    )


def test_the_penalty_of_pairs_is_the_oracles_and_that_of_triplets_the_released_codes() -> None:
    weights = Sparsity(queries=0.3, documents=0.7)
    pairs_IAV = vectors(9, 2)
    flops = sparse_losses.FlopsLoss(VectorsAsModel(40)).compute_loss_from_embeddings
    wanted = 0.3 * flops(pairs_IAV[:, 0]) + 0.7 * flops(pairs_IAV[:, 1])
    torch.testing.assert_close(weights.penalty(pairs_IAV, 1.0), wanted)
    triplets_IAV = vectors(9, 3)
    query, positive, negative = ((part.mean(0) ** 2).sum() for part in triplets_IAV.unbind(1))
    torch.testing.assert_close(
        weights.penalty(triplets_IAV, 0.5), 0.5 * (0.3 * query + 0.7 * (positive + negative) / 2)
    )


def test_the_weights_grow_with_the_square_of_the_updates_number() -> None:
    weights = Sparsity(queries=1, documents=1, warmup_share=0.5)
    assert [weights.growth(step, 8) for step in range(6)] == [1 / 16, 4 / 16, 9 / 16, 1, 1, 1]
    assert Sparsity(queries=1, documents=1, warmup_share=0).growth(0, 8) == 1
    assert Sparsity(queries=1, documents=1).growth(0, 1) == 1


def test_a_batch_in_parts_has_the_loss_and_the_gradient_of_the_whole(directory: Path, encoder: SequenceEncoder) -> None:
    task = task_of(sparsity=Sparsity(queries=0.2, documents=0.1))
    task.begin_update(0, 4)
    features = task.encode(sentences(37, 3), encoder)
    parts = features.cut(np.arange(37), 60)
    assert len(parts) > 3
    found = []
    for batch in (features.batch(np.concatenate(parts)), features.joined_batch(parts)):
        model = model_of(directory, task, training=False)
        part = TaskTerms(task).losses(model, batch)[TASK]
        part.sum.backward()
        found.append((float(part.sum.detach()), gradients(model)))
    (plain, wanted), (cached, ours) = found
    assert cached == pytest.approx(plain, rel=1e-5)
    assert any(name.startswith("masked_lm.") for name in wanted)
    for name, gradient in wanted.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max() + 1))


def test_the_loss_is_its_mean_plus_the_penalty_that_has_grown_so_far(directory: Path, encoder: SequenceEncoder) -> None:
    weights = Sparsity(queries=0.2, documents=0.1, warmup_share=1.0)
    task, plain = task_of(MarginLoss(), weights), task_of(MarginLoss())
    examples = [SentenceExample(str(n), each.texts, (0.5,)) for n, each in enumerate(sentences(7, 3))]
    batch = task.encode(examples, encoder).batch(np.arange(7))
    model = model_of(directory, task, training=False)
    task.begin_update(1, 4)
    with torch.no_grad():
        vectors_IAV = task.logits(model, model.states(task.head, batch.packed), batch)
        without, found = (each.loss_with(model, vectors_IAV, batch) for each in (plain, task))
        torch.testing.assert_close(vectors_IAV.flatten(0, 1), SentenceModel(model, ("splade",))(batch.packed))
    assert (task.reads_whole_batch, plain.reads_whole_batch) == (True, False)
    penalty = 0.25 * weights.penalty(vectors_IAV, 1.0)
    torch.testing.assert_close(found.sum / found.count, without.sum / without.count + penalty)
    plainly = MarginLoss().loss(TextVectors(vectors_IAV, torch.full((7, 1), 0.5)))
    torch.testing.assert_close(without.sum, plainly.sum)


def test_texts_are_compared_by_the_dot_product() -> None:
    """The longer positive is nearest by the dot product, the shorter one by the cosine."""
    rows = {"a": [1.0, 0, 0], "long": [2.0, 2, 0], "short": [1.0, 0.1, 0], "b": [0, 0, 1.0], "of b": [0, 0, 3.0]}
    matrix = {name: np.array(row, dtype=np.float32) for name, row in rows.items()}

    def outputs(*examples: tuple[str, ...]) -> list[csr_matrix]:
        return [csr_matrix(np.stack([matrix[name] for name in names])) for names in examples]

    triplets = [SentenceExample("0", ("a", "long", "short"))]
    (found,) = predicted(triplets, outputs(*(each.texts for each in triplets)))
    assert (found.prediction, found.scores) == ("positive", pytest.approx([2.0, 1.0]))
    pairs = [SentenceExample("0", ("a", "long")), SentenceExample("1", ("b", "of b"))]
    assert [each.prediction for each in predicted(pairs, outputs(*(each.texts for each in pairs)))] == ["positive"] * 2
    scored = [SentenceExample("0", ("a", "long"), 3.0)]
    assert predicted(scored, outputs(("a", "long")))[0].prediction == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (SimcseLoss(), r"embedding.loss.projection"),
        (TsdaeLoss(), r"embedding.loss: tsdae is for dense vectors"),
        (TeacherVectorLoss(), r"embedding.loss: teacher_vectors is for dense vectors"),
    ],
)
def test_losses_of_dense_vectors_are_refused(loss: EmbeddingLoss, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        task_of(loss)


def test_matryoshka_is_refused() -> None:
    with pytest.raises(UsageError, match=r"embedding.matryoshka: is for dense vectors"):
        SparseEmbedding(NEGATIVES, ("spearman",), form=SPLADE, matryoshka=Matryoshka(widths=(20, 10)))

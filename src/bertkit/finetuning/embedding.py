"""Embedding as a fine-tuning task: its loss, pooling and metrics from recipe, data and model.

Reimers and Gurevych 2019, Sentence-BERT, arXiv:1908.10084. Sibling data.py builds the other kinds of tasks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bertkit.errors import DataError, UsageError
from bertkit.models.files.hub import heads_of
from bertkit.models.files.model_files import MODULES_FILE, encoder_directory
from bertkit.models.late_interaction import PUNCTUATION, LateInteraction, load_token_model, own_projection
from bertkit.models.sentence import (
    Dense,
    Normalise,
    is_embedder,
    is_of_colbert,
    is_token_encoder,
    read_pooling,
    stored_size,
)
from bertkit.models.similarity import read_similarity
from bertkit.models.splade import WORDS_HEAD, is_sparse, no_words_head
from bertkit.models.text_reading import VERSION_FILE, TextReading
from bertkit.tasks.catalogue import TaskSpec
from bertkit.tasks.embedding.late_interaction import LateInteractionTask
from bertkit.tasks.embedding.losses.cosine import CosineLoss
from bertkit.tasks.embedding.losses.multiple_negatives import MultipleNegativesLoss
from bertkit.tasks.embedding.losses.simcse import SimcseLoss
from bertkit.tasks.embedding.losses.softmax import SoftmaxLoss
from bertkit.tasks.embedding.settings import EmbeddingSettings
from bertkit.tasks.embedding.sparse import SparseEmbedding
from bertkit.tasks.embedding.task import Embedding, VectorForm, class_name
from bertkit.tasks.examples import SentenceExample

log = logging.getLogger(__name__)


def embedding_task(
    spec: TaskSpec, settings: EmbeddingSettings, examples: Sequence[SentenceExample], directory: Path
) -> Embedding:
    """The task with the loss, pooling and classes that follow from recipe, data and model.

    Args:
        spec: of the task.
        settings: of the recipe.
        examples: of train.
        directory: of the initial model.

    Raises:
        UsageError: loss and data do not fit together.
        DataError: invalid labels, or a sentence embedder with modules that cannot be trained here.
    """
    late = _late_interaction(spec, settings, directory)
    own = _own(directory) if late is None else VectorForm(normalise=True, reading=late["reading"])
    pooling, reading = own.pooling, own.reading
    if settings.pooling is not None:
        pooling = (settings.pooling,) if isinstance(settings.pooling, str) else settings.pooling
    sparse = is_sparse(pooling)
    if own.maps and (sparse or len(pooling) != len(own.pooling)):
        raise UsageError(
            "embedding.pooling: the model's Dense module reads vectors of another width; leave it out, or use only the"
            " model's encoder (a directory without modules.json)"
        )
    similarity = "maxsim" if late is not None else "dot" if sparse else own.similarity
    loss = settings.loss or default_loss(examples, similarity)
    if (sparse or late is not None) and isinstance(loss, MultipleNegativesLoss) and not isinstance(loss, SimcseLoss):
        loss = loss.of_similarity(similarity)
    if settings.loss is None:
        log.info("%s: embedding.loss is %s", spec.name, loss.name)
    if late is None and getattr(loss, "similarity", "") == "maxsim":
        raise UsageError(
            "embedding.loss.similarity: maxsim compares token vectors; set embedding.late_interaction={}, or another"
            " similarity"
        )
    if settings.query_prompt is not None or settings.document_prompt is not None:
        reading = replace(reading.with_roles(settings.query_prompt, settings.document_prompt), has_roles=True)
    elif late is None and reading.query_prompt != reading.document_prompt:
        log.info(
            "%s: the model has prompts for queries and documents, which training does not use; embedding.query_prompt"
            " and embedding.document_prompt set them",
            spec.name,
        )
    if not sparse and settings.sparsity is not None:
        raise UsageError("embedding.sparsity: is for sparse vectors; set embedding.pooling=splade, or leave it out")
    if sparse and settings.sparsity is None:
        log.warning(
            "%s: without embedding.sparsity={queries: W, documents: W}, vectors do not become sparse", spec.name
        )
    if sparse and WORDS_HEAD not in heads_of(directory):
        raise UsageError(f"embedding.pooling: {no_words_head(str(directory))}")
    classes = (
        sorted({class_name(each) for each in examples if each.label is not None}) if loss.wanted == "class" else []
    )
    kind: Any = partial(SparseEmbedding, sparsity=settings.sparsity) if sparse else Embedding
    if late is not None:
        named = {name: late[name] for name in ("interaction", "projected_width", "projection")}
        kind = partial(LateInteractionTask, **named)
    task: Embedding = kind(
        loss,
        spec.metrics,
        form=replace(
            own,
            pooling=tuple(pooling),
            kept=own.kept if sparse == is_sparse(own.pooling) else None,
            normalise=own.normalise if settings.normalise is None else settings.normalise,
            reading=reading,
        ),
        classes=classes,
        matryoshka=settings.matryoshka,
        largest_score=settings.largest_score or spec.largest_score or 1.0,
        has_teacher=settings.teacher is not None,
    )
    task.check_training(examples)
    return task


def default_loss(examples: Sequence[SentenceExample], similarity: str = "cosine") -> Any:
    """Softmax for classes, cosine for scores, otherwise multiple negatives by this similarity."""
    label = examples[0].label
    if isinstance(label, str):
        return SoftmaxLoss()
    if label is not None and len(examples[0].texts) == 2:
        return CosineLoss()
    return MultipleNegativesLoss(similarity=similarity)  # type: ignore[arg-type]  # one of its choices


def _late_interaction(spec: TaskSpec, settings: EmbeddingSettings, directory: Path) -> dict[str, Any] | None:
    """The `interaction`, `projected_width`, `projection` and `reading` of a task with a vector for each token; None for
    one with a vector for each text.

    Raises:
        UsageError: a setting does not fit.
        DataError: the model has modules that cannot be trained here.
    """
    root = directory if (directory / MODULES_FILE).is_file() or is_of_colbert(directory) else directory.parent
    has_modules = (root / MODULES_FILE).is_file() and encoder_directory(root) == directory
    is_own = is_token_encoder(root) and encoder_directory(root) == directory
    wanted = settings.late_interaction
    if wanted is None and (not is_own or settings.pooling is not None):
        return None
    for key in ("pooling", "normalise"):
        if getattr(settings, key) is not None:
            raise UsageError(
                f"embedding.{key}: has no effect with embedding.late_interaction, which has a vector of length one for"
                " each token; leave it out"
            )
    own = load_token_model(root) if is_own else None
    projection = None if own is None else own_projection(own, root)
    width = None if projection is None else projection.out_features
    reading = own.reading if own is not None else TextReading.of(root, directory) if has_modules else TextReading()
    if wanted is None:
        assert own is not None
        log.info("%s: a vector for each token, as in the model", spec.name)
        return {"interaction": own.interaction, "projected_width": width, "projection": projection, "reading": reading}
    expansion = "attended" if wanted.attend_to_expansion else "hidden"
    interaction = LateInteraction(
        wanted.query_length,
        None,
        expansion if wanted.expand_queries else None,  # type: ignore[arg-type]  # one of its choices
        PUNCTUATION if wanted.skip_punctuation else (),
    )
    return {
        "interaction": interaction,
        "projected_width": wanted.width,
        "projection": projection if width == wanted.width else None,
        "reading": reading,
    }


def _own(directory: Path) -> VectorForm:
    """How a model directory computes vectors.

    Raises:
        DataError: it has modules that cannot be trained here.
    """
    root = directory if (directory / MODULES_FILE).is_file() else directory.parent
    if not is_embedder(root) or encoder_directory(root) != directory:
        return VectorForm()
    pooling, others = read_pooling(root)
    maps = tuple(each for each in others if isinstance(each, Dense))
    if any(isinstance(each, Normalise) for each in others[: len(maps)]):
        raise DataError(
            f"{root / MODULES_FILE}: has a module Dense after Normalize, which cannot be trained here; use only its"
            " encoder (a directory without modules.json)"
        )
    version, reading = root / VERSION_FILE, TextReading.of(root, directory)
    sparse = is_sparse(pooling)
    similarity = read_similarity(version, sparse=sparse)
    kept = stored_size(version, sparse=sparse)
    return VectorForm(pooling, len(others) > len(maps), reading, similarity, kept, maps)


def evaluated_by(spec: TaskSpec, task: Embedding, examples: Sequence[Any]) -> TaskSpec:
    """Set the metrics of spec and task to those that fit the evaluated examples.

    Raises:
        UsageError: the examples cannot be evaluated.
    """
    metrics = task.fitting_metrics(examples)
    task.metrics = metrics
    return spec.model_copy(update={"metrics": metrics, "primary": metrics[0]})

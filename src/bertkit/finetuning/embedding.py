"""Embedding as a fine-tuning task: its loss, pooling and metrics from recipe, data and model.

Reimers and Gurevych 2019, Sentence-BERT, arXiv:1908.10084. Sibling data.py builds the other kinds of tasks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertkit.errors import DataError
from bertkit.models.files.model_files import MODULES_FILE, encoder_directory
from bertkit.models.sentence import PoolingMode, TextReading, is_embedder, read_pooling
from bertkit.tasks.catalogue import TaskSpec
from bertkit.tasks.embedding.losses.cosine import CosineLoss
from bertkit.tasks.embedding.losses.multiple_negatives import MultipleNegativesLoss
from bertkit.tasks.embedding.losses.softmax import SoftmaxLoss
from bertkit.tasks.embedding.settings import EmbeddingSettings
from bertkit.tasks.embedding.task import Embedding, class_name
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
    loss = settings.loss or default_loss(examples)
    if settings.loss is None:
        log.info("%s: embedding.loss is %s", spec.name, loss.name)
    pooling, normalise, reading = _own(directory)
    if settings.pooling is not None:
        pooling = (settings.pooling,) if isinstance(settings.pooling, str) else settings.pooling
    classes = (
        sorted({class_name(each) for each in examples if each.label is not None}) if loss.wanted == "class" else []
    )
    task = Embedding(
        loss,
        spec.metrics,
        pooling=pooling,
        normalise=normalise if settings.normalise is None else settings.normalise,
        classes=classes,
        matryoshka=settings.matryoshka,
        largest_score=settings.largest_score or spec.largest_score or 1.0,
        has_teacher=settings.teacher is not None,
        reading=reading,
    )
    task.check_training(examples)
    return task


def default_loss(examples: Sequence[SentenceExample]) -> Any:
    """Softmax for classes, cosine for scores, otherwise multiple negatives."""
    label = examples[0].label
    if isinstance(label, str):
        return SoftmaxLoss()
    return MultipleNegativesLoss() if label is None or len(examples[0].texts) != 2 else CosineLoss()


def _own(directory: Path) -> tuple[tuple[PoolingMode, ...], bool, TextReading]:
    """The pooling of a model directory, whether its vectors have length one, and what it does with a text first; for a
    plain encoder, the unnormalised mean, and nothing.

    Raises:
        DataError: it has modules that cannot be trained here.
    """
    root = directory if (directory / MODULES_FILE).is_file() else directory.parent
    if not is_embedder(root) or encoder_directory(root) != directory:
        return ("mean",), False, TextReading()
    pooling, others = read_pooling(root)
    foreign = [kind for kind in others if kind != "Normalize"]
    if foreign:
        raise DataError(
            f"{root / MODULES_FILE}: has a module {foreign[0]} after the pooling, which cannot be trained here; use"
            " only its encoder (a directory without modules.json)"
        )
    return pooling, bool(others), TextReading.of(root, directory)


def evaluated_by(spec: TaskSpec, task: Embedding, examples: Sequence[Any]) -> TaskSpec:
    """Set the metrics of spec and task to those that fit the evaluated examples.

    Raises:
        UsageError: the examples cannot be evaluated.
    """
    metrics = task.fitting_metrics(examples)
    task.metrics = metrics
    return spec.model_copy(update={"metrics": metrics, "primary": metrics[0]})

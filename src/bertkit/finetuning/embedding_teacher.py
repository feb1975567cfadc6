"""Targets from a teacher for an embedder: margins of a cross-encoder, or vectors of another embedder.

Hofstaetter et al. 2020, arXiv:2010.02666 (MarginMSE); Reimers and Gurevych 2020, arXiv:2004.09813 (vectors). The
teacher processes all training texts once, before the first step. Sibling of distillation/, where a teacher's logits
and states are compared with the student's in every step.

Shapes: I examples, A texts of each, E width of the vectors.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bertkit.arrays import Float32Array
from bertkit.errors import DataError, UsageError
from bertkit.finetuning.prediction import predict, prediction_batches
from bertkit.models.encoder import EncoderConfig
from bertkit.models.files.hub import load_model, read_config
from bertkit.models.files.model_files import encoder_directory, find_model, weights_hash
from bertkit.models.labels import Labels
from bertkit.models.sentence import load_sentence_model
from bertkit.tasks.base import Features
from bertkit.tasks.classification import LABEL, Regression, TextSettings
from bertkit.tasks.embedding.losses.cosine import CosineLoss
from bertkit.tasks.embedding.task import Embedding
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.examples import SentenceExample, TextExample
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.engine import Engine

log = logging.getLogger(__name__)

_ANY_VOCABULARY = 8


def taught(
    features: Features,
    examples: Sequence[SentenceExample],
    task: Embedding,
    *,
    teacher: str,
    config: EncoderConfig,
    max_tokens: int,
    engine: Engine,
    offline: bool,
) -> tuple[Features, str]:
    """The training features with the teacher's targets, and the hash of the teacher.

    Args:
        features: of the examples.
        examples: of train.
        task: its loss reads margins or vectors.
        teacher: a Hub id, a model or a run directory.
        config: of the student, whose vectors may be narrower: the teacher's are projected to principal components.
        max_tokens: of the longest sequence.
        engine: device and batch size.
        offline: use no network.

    Raises:
        UsageError: the loss uses no teacher, or the teacher has narrower vectors.
        DataError: the teacher of margins is not a cross-encoder.
    """
    wanted, name = task.objective.wanted, getattr(task.objective, "name", "")
    if wanted not in ("margins", "vectors"):
        raise UsageError(
            f"embedding.teacher: the loss {name} uses no teacher; choose margin or kl_divergence (teacher: a"
            " cross-encoder) or teacher_vectors (teacher: an embedder)"
        )
    directory = find_model(teacher, offline=offline)
    encoder_files = encoder_directory(directory)
    tokenizer = load_tokenizer(encoder_files, offline=offline)
    own, _ = read_config(encoder_files)
    encoder = SequenceEncoder(tokenizer, max_tokens=min(max_tokens, own.max_tokens), token_types=own.reads_token_types)
    log.info("computing targets of the teacher %s for %s examples", teacher, f"{len(examples):,}")
    if wanted == "margins":
        found = _margins(encoder_files, examples, encoder, engine)
    else:
        with torch.device("meta"):
            width = task.vector_width(config.build(_ANY_VOCABULARY))
        found = projected(_vectors(directory, examples, encoder, engine), width, teacher)
    labels = {**features.example_labels, LABEL: found}
    return replace(features, example_labels=labels), weights_hash(encoder_files)


def _margins(
    directory: Path, examples: Sequence[SentenceExample], encoder: SequenceEncoder, engine: Engine
) -> Float32Array:
    """A cross-encoder's output for the positive minus that for each negative, (I, A - 2)."""
    head = Regression.head
    labels = Labels.unnamed(1, "regression")
    model, report = load_model(directory, heads=(head,), labels=labels)
    if report.newly_initialised:
        raise DataError(
            f"{directory}: embedding.teacher has no head with one output; margins need a cross-encoder, such as the"
            " result of `bertkit finetune cross-encoder-stsb`"
        )
    task = Regression(labels, ("spearman",), TextSettings())
    pairs = [
        TextExample(f"{each.id}/{number}", each.texts[0], text)
        for each in examples
        for number, text in enumerate(each.texts[1:])
    ]
    features = task.encode(pairs, encoder)
    outputs = np.concatenate(predict(model.to(engine.device), task, features, engine, label="teacher"))
    score_IA = outputs.reshape(len(examples), -1)
    return np.asarray(score_IA[:, :1] - score_IA[:, 1:], dtype=np.float32)


@torch.inference_mode()
def _vectors(
    directory: Path, examples: Sequence[SentenceExample], encoder: SequenceEncoder, engine: Engine
) -> Float32Array:
    """The vector of each example's first text, (I, E), cut to the teacher's own maximum length."""
    model = load_sentence_model(directory).to(engine.device)
    encoder = encoder.shortened(min(encoder.max_tokens, model.max_tokens))
    first = [model.reading(each.texts[0]) for each in examples]
    features = Embedding(CosineLoss(), ("spearman",)).encode(
        [SentenceExample(each.id, (text,)) for each, text in zip(examples, first, strict=True)], encoder
    )
    found: dict[int, Float32Array] = {}
    for items in prediction_batches(features, engine.micro_batch_tokens):
        batch = features.batch(items).to(engine.device)
        found.update(zip(items.tolist(), model(batch.packed).cpu().numpy(), strict=True))
    return np.stack([found[item] for item in range(len(examples))])


def projected(vectors_IE: Float32Array, width: int, teacher: str) -> Float32Array:
    """The vectors projected to another width by their principal components, which best preserve dot products.

    Raises:
        UsageError: the vectors are narrower, or there are fewer of them than components.
    """
    if vectors_IE.shape[1] == width:
        return vectors_IE
    if min(vectors_IE.shape) < width:
        raise UsageError(
            f"embedding.teacher: {teacher} gives {vectors_IE.shape[0]} vectors of width {vectors_IE.shape[1]}, but the"
            f" student's have width {width}; use a teacher with vectors at least as wide, and at least as many examples"
        )
    # Not centred: a shift would change the cosines.
    _, vectors = np.linalg.eigh(vectors_IE.T.astype(np.float64) @ vectors_IE)
    return np.asarray(vectors_IE @ vectors[:, ::-1][:, :width], dtype=np.float32)

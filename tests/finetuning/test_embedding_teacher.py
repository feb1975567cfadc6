"""The vectors of an embedder that teaches another one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import bertkit
from bertkit.finetuning.embedding_teacher import _vectors, taught
from bertkit.models.families.elmo import ElmoConfig
from bertkit.models.sentence_files import write_sentence_files
from bertkit.tasks.classification import LABEL
from bertkit.tasks.embedding.losses.teacher_vectors import TeacherVectorLoss
from bertkit.tasks.embedding.task import Embedding
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.examples import SentenceExample
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.config import EngineConfig
from bertkit.training.engine import resolve_engine
from tests.tasks.tiny_task import write_model

TEXTS = ("fine cat list", "number")


def test_a_teacher_reads_its_own_prompt_before_each_text(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    write_sentence_files(model, width=30, pooling=("mean",), normalise=True, max_tokens=20)
    file = model / "config_sentence_transformers.json"
    settings = json.loads(file.read_text()) | {"prompts": {"topic": "the number "}, "default_prompt_name": "topic"}
    file.write_text(json.dumps(settings))
    examples = [SentenceExample(str(number), (text,)) for number, text in enumerate(TEXTS)]
    engine = resolve_engine(EngineConfig(device="cpu", precision="fp32"))
    found = _vectors(model, examples, SequenceEncoder(load_tokenizer(model), max_tokens=20), engine)
    np.testing.assert_allclose(found, bertkit.load(str(model)).encode(list(TEXTS)), atol=1e-6)


def test_a_teacher_cuts_texts_where_it_does_otherwise(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    write_sentence_files(model, width=30, pooling=("mean",), normalise=True, max_tokens=6)
    examples = [SentenceExample("0", ("fine cat list of words in a paper",))]
    engine = resolve_engine(EngineConfig(device="cpu", precision="fp32"))
    found = _vectors(model, examples, SequenceEncoder(load_tokenizer(model), max_tokens=20), engine)
    np.testing.assert_allclose(found, bertkit.load(str(model)).encode([examples[0].texts[0]]), atol=1e-6)


def test_vectors_are_projected_to_the_width_of_any_family(tmp_path: Path) -> None:
    """Of ELMo's settings, none is the width."""
    model = write_model(tmp_path / "model")
    examples = [SentenceExample(str(number), (text,)) for number, text in enumerate(TEXTS * 3)]
    task = Embedding(TeacherVectorLoss(), ("spearman",), has_teacher=True)
    features, _ = taught(
        task.encode(examples, SequenceEncoder(load_tokenizer(model), max_tokens=20)),
        examples,
        task,
        teacher=str(model),
        config=ElmoConfig(character_size=4, filters=((1, 6),), projection_size=2, lstm_width=5),
        max_tokens=20,
        engine=resolve_engine(EngineConfig(device="cpu", precision="fp32")),
        offline=True,
    )
    assert features.example_labels[LABEL].shape == (6, 4)

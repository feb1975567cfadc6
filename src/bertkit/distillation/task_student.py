"""The student of a recipe that distils on a task: where it comes from, its settings, and the model as it begins.

Sun et al. 2019, PKD, arXiv:1908.09355; Turc et al. 2019, arXiv:1908.08962; Tang et al. 2019, arXiv:1903.12136: layers
of the teacher, a small pretrained model, a BiLSTM. What a recipe says of them is recipe/student.py; sibling teachers.py
has those who teach.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from bertkit.distillation.bilstm_student import new_bilstm
from bertkit.distillation.student import as_distilbert, distilbert_config, drawn_anew, student_of
from bertkit.distillation.student_settings import GivenModel, NewModel, TeacherLayers
from bertkit.distillation.task_recipe import DistillRecipe
from bertkit.distillation.teachers import Teachers
from bertkit.errors import DataError, UsageError
from bertkit.files import sha256_of
from bertkit.finetuning.data import load_examples
from bertkit.finetuning.warm_start import head_directory
from bertkit.models.bilstm import BilstmStudent
from bertkit.models.encoder import EncoderConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.hub import read_config
from bertkit.models.layer_choice import chosen_layers
from bertkit.models.model_files import encoder_directory, find_model
from bertkit.models.quantised import QUANTISATION
from bertkit.tasks.examples import ChoiceExample, Example, QuestionExample, TaggedExample, TextExample


def student_directory(recipe: DistillRecipe, teachers: Teachers, *, cache: Path, offline: bool = False) -> Path:
    """Where the model lies that the student is made of, with the tokenizer that it reads with.

    Raises:
        DataError: it is quantised, and cannot be trained.
    """
    student = recipe.student
    if isinstance(student, GivenModel):
        directory = encoder_directory(find_model(student.model, offline=offline))
        name = student.model
    elif isinstance(student, BilstmStudent):
        return _new_bilstm(recipe, student, cache=cache, offline=offline)
    else:
        directory, name = teachers.directories[0], teachers.names[0]
    if (
        not isinstance(student, NewModel)
        and QUANTISATION in read_config(head_directory(directory, recipe.spec.name))[1]
    ):
        raise DataError(
            f"student: {name} is quantised, and whole numbers cannot be trained; take the model that it was made from"
        )
    return directory


def has_own_head(recipe: DistillRecipe) -> bool:
    """Whether the student may have a head of its own, learnt before, whose labels may stand in another order."""
    return isinstance(recipe.student, GivenModel) and not recipe.new_head


def student_config(recipe: DistillRecipe, found: EncoderConfig) -> EncoderConfig:
    """The settings of the student's encoder.

    Args:
        recipe: resolved.
        found: those of the model in `student_directory`.
    """
    student = recipe.student
    if isinstance(student, NewModel):
        return student.config
    if not isinstance(student, TeacherLayers):
        return found
    own = distilbert_config(found) if student.form == "distilbert" else found
    return own.model_copy(update={"num_hidden_layers": len(student_layers(student, found))})


def new_student(recipe: DistillRecipe, teacher: HeadedModel, *, seed: int) -> HeadedModel | None:
    """The student as it begins, made of its teacher; None where it is a model of its own.

    Raises:
        UsageError: a student that its teacher's layers do not make.
    """
    student = recipe.student
    if isinstance(student, NewModel):
        encoder = teacher.encoder
        pad_id = int(encoder.to_hub().get("pad_token_id", student.config.default_pad_id))
        new = HeadedModel(
            student.config.build(encoder.vocab_size, pad_id=pad_id), teacher.head_names, labels=teacher.labels
        )
        new.initialise(seed)
        return new
    if not isinstance(student, TeacherLayers):
        return None
    layers = student_layers(student, teacher.encoder.config)
    whole = student.layers == "all" and student.embeddings and student.head
    made = (
        copy.deepcopy(teacher)
        if whole
        else student_of(teacher, layers, embeddings=student.embeddings, head=student.head, seed=seed)
    )
    if student.form == "distilbert":
        made = as_distilbert(made, seed=seed)
    return drawn_anew(made, seed=seed) if student.init == "random" else made


def student_layers(student: TeacherLayers, teacher: EncoderConfig) -> list[int]:
    """Which of the teacher's layers, from 0.

    Raises:
        UsageError: a layer that is not there, or more than there are.
    """
    depth = int(teacher.model_dump().get("num_hidden_layers", 0))
    if student.layers == "all":
        return list(range(depth))
    keep = student.number or (max(1, depth // 2) if isinstance(student.layers, str) else None)
    if keep is not None and keep > depth:
        raise UsageError(f"student.number: {keep} layers of a teacher of {depth}; a student cannot be deeper")
    return chosen_layers(student.layers, of=depth, keep=keep)


def _new_bilstm(recipe: DistillRecipe, student: BilstmStudent, *, cache: Path, offline: bool) -> Path:
    """A BiLSTM that has learnt nothing yet, made once for the same texts, settings and seed."""
    examples = load_examples(recipe, "train", offline=offline).examples
    pairs = recipe.spec.kind == "choice" or any(isinstance(each, TextExample) and each.text_pair for each in examples)
    # A resolved recipe says how many texts there are; here the data do.
    settings = {name: getattr(student, name) for name in BilstmStudent.model_fields if name != "texts"}
    texts = [text for example in examples for text in _texts(example)]
    vectors = None if student.word_vectors is None else sha256_of(Path(student.word_vectors).expanduser())
    digest = hashlib.sha256(json.dumps([settings, vectors, pairs, recipe.seed]).encode())
    for text in texts:
        digest.update(f"{len(text)} {text}".encode("utf-8", "backslashreplace"))
    directory = cache / "students" / digest.hexdigest()[:32]
    if not (directory / "model.safetensors").is_file():
        # Under its name a directory is whole.
        writing = directory.with_name(f"{directory.name}.{os.getpid()}")
        new_bilstm(texts, BilstmStudent(**settings), writing, pairs=pairs, seed=recipe.seed)
        try:
            writing.rename(directory)
        except OSError as error:
            # Another process was first, with the same bytes.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            shutil.rmtree(writing)
    return directory


def _texts(example: Example) -> Iterable[str]:
    if isinstance(example, TextExample):
        return [text for text in (example.text, example.text_pair) if text]
    if isinstance(example, TaggedExample):
        return [" ".join(example.words)]
    if isinstance(example, QuestionExample):
        return [example.question, example.context]
    assert isinstance(example, ChoiceExample)
    return [text for text in (example.context, example.question, *example.endings) if text]

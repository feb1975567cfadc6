"""How a student is built and initialised: on a task from its recipe, on text from parts of its teacher.

Sun et al. 2019, PKD, arXiv:1908.09355, section 4.2 (the first layers of the pretrained model, not of the fine-tuned
teacher: run_student_patience.py loads them so); Sanh et al. 2019, DistilBERT,
arXiv:1910.01108, section 3, and its released extract_distilbert.py (one layer out of two, without segment types and
pooler); Turc et al. 2019, arXiv:1908.08962 (a small pretrained model). On text the student has its own configuration
and takes the teacher's parameters of the same name and shape. Siblings: models/conversion/pruning.py removes layers
from a model, bilstm_student.py builds the student that shares nothing with its teacher.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from bertkit.distillation.bilstm_student import cached_bilstm
from bertkit.distillation.student_settings import GivenModel, NewModel, TeacherLayers
from bertkit.distillation.task_recipe import DistillRecipe
from bertkit.distillation.teacher_files import TeacherFiles
from bertkit.errors import DataError, UsageError, below
from bertkit.finetuning.warm_start import head_directory
from bertkit.models.conversion.layer_choice import chosen_layers
from bertkit.models.conversion.pruning import keep_layers, pruned_heads, rebuilt, saved_heads, with_layers
from bertkit.models.encoder import LAYER_NAME, EncoderConfig, in_layer
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.bilstm import BilstmStudent
from bertkit.models.families.distilbert import DistilBertConfig
from bertkit.models.files.hub import read_config
from bertkit.models.files.model_files import CONFIG_FILE, encoder_directory, find_model
from bertkit.models.headed import HeadedModel
from bertkit.models.layers import NORMS
from bertkit.models.quantisation.quantised import QUANTISATION

log = logging.getLogger(__name__)


def student_directory(recipe: DistillRecipe, teacher: TeacherFiles, *, cache: Path, offline: bool = False) -> Path:
    """The directory of the model from which the student is made; it contains the student's tokenizer.

    Raises:
        DataError: it is quantised and cannot be trained.
    """
    student = recipe.student
    if isinstance(student, GivenModel):
        directory = encoder_directory(find_model(student.model, offline=offline))
        name = student.model
    elif isinstance(student, BilstmStudent):
        return cached_bilstm(recipe, student, cache=cache, offline=offline)
    elif isinstance(student, TeacherLayers) and student.of is not None:
        directory, name = encoder_directory(find_model(student.of, offline=offline)), student.of
    else:
        directory, name = teacher.directories[0], teacher.names[0]
    if (
        not isinstance(student, NewModel)
        and QUANTISATION in read_config(head_directory(directory, recipe.spec.name))[1]
    ):
        raise DataError(
            f"student: {name} is quantised, and quantised weights cannot be trained; use the model it was made from"
        )
    return directory


def student_config(recipe: DistillRecipe, found: EncoderConfig) -> EncoderConfig:
    """The settings of the student's encoder.

    Args:
        recipe: resolved.
        found: the settings of the model in `student_directory`.

    Raises:
        UsageError: its layers cannot be taken from that model.
    """
    student = recipe.student
    if isinstance(student, NewModel):
        return student.config
    if not isinstance(student, TeacherLayers):
        return found
    layers = student_layers(student, found)
    with below("student"):
        own = with_layers(found, layers)
    return distilbert_config(own) if student.form == "distilbert" else own


def student_heads(recipe: DistillRecipe, directory: Path) -> dict[int, tuple[int, ...]]:
    """The pruned heads of the student before its first step, by layer.

    Args:
        recipe: resolved.
        directory: from `student_directory`.
    """
    student = recipe.student
    if isinstance(student, NewModel):
        return {}
    config, contents = read_config(directory)
    pruned = saved_heads(contents, source=str(directory / CONFIG_FILE))
    if not isinstance(student, TeacherLayers):
        return pruned
    kept = student_layers(student, config)
    return {number: pruned[layer] for number, layer in enumerate(kept) if layer in pruned}


def new_student(recipe: DistillRecipe, teacher: HeadedModel, *, seed: int) -> HeadedModel | None:
    """The student before its first step, made from its teacher; None if it is a given model.

    Args:
        recipe: resolved.
        teacher: the teacher, or the model whose layers the recipe takes instead.
        seed: for initialising new weights.

    Raises:
        UsageError: the student cannot be made from its teacher's layers.
    """
    student = recipe.student
    if isinstance(student, NewModel):
        encoder = teacher.encoder
        recorded = encoder.to_hub().get("pad_token_id", teacher.extras.get("pad_token_id"))
        pad_id = student.config.default_pad_id if recorded is None else int(recorded)
        new = HeadedModel(
            student.config.build(encoder.vocab_size, pad_id=pad_id), teacher.head_names, labels=teacher.labels
        )
        new.initialise(seed)
        _copy_buffers(new, teacher)
        return new
    if not isinstance(student, TeacherLayers):
        return None
    layers = student_layers(student, teacher.encoder.config)
    whole = student.layers == "all" and student.embeddings and student.head
    made = (
        copy.deepcopy(teacher)
        if whole
        else from_teacher_layers(teacher, layers, embeddings=student.embeddings, head=student.head, seed=seed)
    )
    if student.form == "distilbert":
        made = as_distilbert(made, seed=seed)
    return reinitialised(made, seed=seed) if student.init == "random" else made


def student_layers(student: TeacherLayers, teacher: EncoderConfig) -> list[int]:
    """Which of the teacher's layers are kept, from 0.

    Raises:
        UsageError: a layer that does not exist, too many layers, or an order that does not ascend.
    """
    depth = int(teacher.model_dump().get("num_hidden_layers", 0))
    if student.layers == "all":
        return list(range(depth))
    keep = student.number or (max(1, depth // 2) if isinstance(student.layers, str) else None)
    if keep is not None and keep > depth:
        raise UsageError(f"student.number: {keep} layers, but the teacher has only {depth}; write a smaller number")
    with below("student"):
        found = chosen_layers(student.layers, of=depth, keep=keep)
    if found != sorted(set(found)):
        raise UsageError(f"student.layers: {found}; the teacher's layers keep their order: write each once, ascending")
    return found


def from_teacher_layers(
    teacher: HeadedModel, layers: Sequence[int], *, embeddings: bool = True, head: bool = True, seed: int = 0
) -> HeadedModel:
    """A model made of some of the teacher's layers, with its embeddings and heads or with new ones.

    Args:
        teacher: is not changed.
        layers: from 0, ascending.
        embeddings: whether to take what the first layer reads; otherwise it is randomly initialised.
        head: whether to take the heads and the pooler; otherwise they are randomly initialised.
        seed: for initialising new weights.

    Raises:
        UsageError: see `bertkit.models.conversion.pruning.keep_layers`.
    """
    with below("student"):
        student = keep_layers(teacher, layers)
    anew = {
        name
        for name in student.own_state_dict()
        if not LAYER_NAME.match(name) and not (embeddings if name.startswith("encoder.") else head)
    }
    if anew:
        student.initialise(seed, only=anew)
    return student


def as_distilbert(model: HeadedModel, *, seed: int = 0) -> HeadedModel:
    """A BERT as a DistilBERT: what both have is copied; segment types, pooler and heads that read a pooler are dropped.

    Args:
        model: is not changed.
        seed: for the heads that have another form in DistilBERT, which are randomly initialised.

    Raises:
        UsageError: the model is not a BERT.
    """
    own = [name for name in model.head_names if name in DistilBertConfig().all_heads()]
    smaller = rebuilt(model, distilbert_config(model.encoder.config), heads=own)
    # In this family, the keys for BERT's sizes in config.json have other names.
    config = model.encoder.config
    foreign = {*config.to_hub(), *config.hub_fixed}
    smaller.extras = {key: value for key, value in model.extras.items() if key not in foreign}
    source = dict(model.named_parameters())
    heads = {name.partition(".")[0] for name, _ in smaller.named_parameters()}
    alike = {head for head in heads if _is_copied(smaller, head, source)}
    with torch.no_grad():
        for name, parameter in smaller.named_parameters():
            if name.partition(".")[0] in alike:
                parameter.copy_(source[name])
    anew = {name for name in smaller.own_state_dict() if name.partition(".")[0] not in alike}
    smaller.initialise(seed, only=anew)
    if anew:
        log.info(
            "%s: randomly initialised, since DistilBERT has them in another form", ", ".join(sorted(heads - alike))
        )
    return smaller.train(model.training)


def distilbert_config(config: EncoderConfig) -> DistilBertConfig:
    """The settings of a DistilBERT of the same sizes.

    Raises:
        UsageError: the settings are not a BERT's.
    """
    if not isinstance(config, BertConfig) or config.model_type != BertConfig.model_type:
        raise UsageError(
            f"student.form: distilbert is BERT's layers without pooler and segment types, but the teacher is of the"
            f" family {config.model_type}; leave form out"
        )
    shared = (DistilBertConfig.model_fields.keys() & BertConfig.model_fields.keys()) - {"family"}
    return DistilBertConfig(**{name: getattr(config, name) for name in shared})


def reinitialised(model: HeadedModel, *, seed: int) -> HeadedModel:
    """The same shape with new weights."""
    new = rebuilt(model, model.encoder.config)
    new.initialise(seed)
    _copy_buffers(new, model)
    return new


@torch.no_grad()
def _copy_buffers(model: HeadedModel, source: HeadedModel) -> None:
    """Copy what belongs to the vocabulary and is not trained, such as the spelling of words in ELMo."""
    known = dict(source.named_buffers())
    for name, buffer in model.named_buffers():
        if name in known and known[name].shape == buffer.shape:
            buffer.copy_(known[name])


@torch.no_grad()
def init_from_teacher(
    student: HeadedModel,
    teacher: HeadedModel,
    *,
    layers: Sequence[int] | None,
    embeddings: bool = True,
    head: bool = True,
) -> None:
    """Copy parts of the teacher into the student; the rest of the student is unchanged.

    A norm is copied only from one of its own kind. In MobileBERT's checkpoints, a norm of the student has another name
    than one of its teacher (FakeLayerNorm, LayerNorm), so the norm of the student's embeddings starts at 1 and 0.

    Args:
        student: with its initial weights.
        teacher: is not changed.
        layers: the teacher's layers, from 0, one for each of the student's; None: none are copied.
        embeddings: whether to copy everything in the encoder that is not in a layer.
        head: whether to copy heads and pooler, as far as the teacher has them.

    Raises:
        UsageError: a parameter to be copied has no counterpart, or one of another shape.
    """
    source, own, theirs = dict(teacher.named_parameters()), dict(student.named_modules()), dict(teacher.named_modules())
    taken = 0
    for name, parameter in student.named_parameters():
        layer = LAYER_NAME.match(name)
        if layer is not None:
            if layers is None:
                continue
            origin, key = in_layer(name, layers.__getitem__), "layers"
            taken += 1
        elif name.startswith("encoder."):
            if not embeddings:
                continue
            origin, key = name, "embeddings"
        else:
            if not head or not any(each.startswith(f"{name.partition('.')[0]}.") for each in source):
                continue
            origin, key = name, "head"
        if _norms_differ(own[name.rpartition(".")[0]], theirs.get(origin.rpartition(".")[0])):
            continue
        found = source.get(origin)
        if found is None or found.shape != parameter.shape:
            has = "none" if found is None else f"one of shape {tuple(found.shape)}"
            instead = "give the student's model the teacher's widths"
            if key == "layers" and pruned_heads(teacher.encoder):
                instead = (
                    "use the teacher with zeros in place of its pruned heads:"
                    " `bertkit export TEACHER --to DIR`, then --teacher DIR"
                )
            drawn = f"write student.{key}: {'null' if key == 'layers' else 'false'} to initialise it randomly"
            raise UsageError(
                f"student.{key}: the student's {name} has shape {tuple(parameter.shape)}, but the teacher has {has};"
                f" {drawn}, or {instead}"
            )
        parameter.copy_(found)
    if layers is not None and not taken:
        raise UsageError(
            f"student.layers: a student of the family {student.encoder.config.model_type} has no layers to"
            " copy into; write student.layers: null"
        )


def _norms_differ(own: nn.Module, theirs: nn.Module | None) -> bool:
    """Whether one module is a norm and the other a special kind of it, such as one that only scales and shifts."""
    if not isinstance(own, NORMS) or not isinstance(theirs, NORMS) or type(own) is type(theirs):
        return False
    return isinstance(own, type(theirs)) or isinstance(theirs, type(own))


def _is_copied(smaller: HeadedModel, part: str, source: dict[str, torch.nn.Parameter]) -> bool:
    own = {name: each for name, each in smaller.named_parameters() if name.partition(".")[0] == part}
    return all(name in source and source[name].shape == each.shape for name, each in own.items())

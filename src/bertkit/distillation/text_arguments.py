"""The arguments of distillation on text: a student's pretraining beside its teacher, which the recipe must fit.

Sanh et al. 2019, DistilBERT, arXiv:1910.01108; Jiao et al. 2019, TinyBERT, arXiv:1909.10351, section 3.1; Sun et al.
2020, MobileBERT, arXiv:2004.02984, section 3.4; Zhao et al. 2019, arXiv:1909.11687v1. What the recipe leaves out is
taken from the teacher: its tokenizer, and its sizes at half its depth. Siblings text.py and, for a student with a
vocabulary of its own, small_vocabulary.py train.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast, get_args

from pydantic import BaseModel

from bertkit.data.shards import TokenShards
from bertkit.distillation.mixed_vocabulary import MixedVocabulary
from bertkit.distillation.objectives import distillation_objectives
from bertkit.distillation.shared_projections import teacher_objectives
from bertkit.distillation.small_vocabulary import MixedVocabularyTrainer, check_trained_teacher, vocabulary_overrides
from bertkit.distillation.student_settings import TO_BE_GIVEN
from bertkit.distillation.teacher_files import TeacherFiles
from bertkit.distillation.terms import ShapePair, check_single_teacher, specs_of
from bertkit.distillation.text import TextDistiller, copied_layers
from bertkit.distillation.text_recipe import DistillTextRecipe, with_phases
from bertkit.errors import DataError, UsageError
from bertkit.models.encoder import EncoderConfig
from bertkit.models.layer_choice import ChoiceName, chosen_layers
from bertkit.models.pruning import with_layers
from bertkit.pretraining.arguments import (
    PretrainArguments,
    completed,
    fitted,
    source_overrides,
    starting_from,
    warn_of_stages,
    with_longest,
)
from bertkit.pretraining.recipe import Recipe
from bertkit.pretraining.stages import stages_of
from bertkit.pretraining.trainer import Pretrainer
from bertkit.recipe.resolve import Override, load_as, resolve_recipe
from bertkit.recipe.tree import Located
from bertkit.run.directory import RunDirectory
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import load_tokenizer


@dataclass(frozen=True)
class DistillTextArguments(PretrainArguments):
    """The command line's arguments.

    Attributes:
        teachers: models to learn from; empty for the recipe's.
        student: a model that the student is initialised from, in place of the recipe's parts of the teacher.
        control: leave the teacher's terms out.
    """

    teachers: Sequence[str] = ()
    student: str | None = None
    control: bool = False

    schema: ClassVar[type[Recipe]] = DistillTextRecipe
    kind: ClassVar[str] = "distill"

    def requested(self) -> DistillTextRecipe:
        """The recipe with everything that the command line changes in it, checked against its teacher.

        Raises:
            UsageError: all errors at once.
            DataError: a model is not there, or the tokenizer is another.
        """
        tree = resolve_recipe(self.named, self.overrides)
        teacher = TeacherFiles.find(_teacher_names(self, tree), offline=self.offline)
        names = tuple(
            str(directory.resolve()) if Path(name).expanduser().exists() else name
            for name, directory in zip(teacher.names, teacher.directories, strict=True)
        )
        teacher = replace(teacher, names=names)
        of_student = _with_own_vocabulary if _has_own_vocabulary(tree) else _with_teachers_vocabulary
        ours = [Override("teacher", names if len(names) > 1 else names[0]), *of_student(self, tree, teacher)]
        if self.control:
            ours.append(Override("control", True))
        ours += source_overrides(self.sources)
        recipe = load_as(DistillTextRecipe, self.named, [*self.overrides, *ours])
        recipe = with_phases(recipe, ShapePair.from_configs(recipe.model, teacher.config))
        recipe = with_longest(recipe, self.overrides)
        warn_of_stages(recipe, self.overrides)
        done = completed(recipe, self.max_steps)
        assert isinstance(done, DistillTextRecipe)
        check_fit(done, teacher.config)
        return done

    def teacher_files(self, recipe: Recipe) -> TeacherFiles:
        """The teacher of a recipe.

        Raises:
            DataError: a model is not there, or the models do not fit each other.
        """
        assert isinstance(recipe, DistillTextRecipe)
        return TeacherFiles.find(recipe.teachers, offline=self.offline)

    def fingerprints(self, recipe: Recipe) -> dict[str, str | None]:
        return {**super().fingerprints(recipe), "teacher": self.teacher_files(recipe).fingerprint}

    def inherited(self, recipe: Recipe) -> Mapping[str, BaseModel]:
        own = super().inherited(recipe)
        return own or {"model": self.teacher_files(recipe).config}

    def trainer(self, recipe: Recipe, shards: TokenShards, run: RunDirectory) -> Pretrainer:
        recipe = fitted(recipe, shards, cache=self.cache)
        assert isinstance(recipe, DistillTextRecipe)
        teacher = self.teacher_files(recipe)
        if recipe.has_own_vocabulary:
            return MixedVocabularyTrainer(recipe, shards, run, cache=self.cache, teacher=teacher)
        check_tokenizer(load_tokenizer(shards.directory), teacher.tokenizer, source=" and ".join(recipe.teachers))
        return TextDistiller(recipe, shards, run, cache=self.cache, teacher=teacher)


def check_tokenizer(student: Tokenizer, teacher: Tokenizer, *, source: str) -> None:
    """Raise DataError if the two do not give the same tokens the same ids."""
    if student.backend.get_vocab() != teacher.backend.get_vocab() or student.roles != teacher.roles:
        raise DataError(
            f"{source}: the text is in another tokenizer's tokens ({student.vocab_size:,}, the teacher's has"
            f" {teacher.vocab_size:,}); a student reads what its teacher reads: leave `tokenizer` out of the recipe,"
            " and give text, not shards of another tokenizer"
        )


def check_fit(recipe: DistillTextRecipe, teacher: EncoderConfig) -> None:
    """Check a recipe against its teacher, as far as the two configurations show.

    Raises:
        UsageError: a term, the layers to copy, or the length of a sequence does not fit.
    """
    shapes = ShapePair.from_configs(recipe.model, teacher)
    copied_layers(recipe, shapes)
    for stage in stages_of(recipe):
        check_trained_teacher(recipe, stage.recipe, teacher)
        terms = [each.distilled for each in distillation_objectives(stage.recipe.objectives)]
        check_single_teacher(terms, len(recipe.teachers), key="objective")
        specs_of(terms, shapes)
        length = stage.recipe.data.sequence_length
        if length > teacher.max_tokens and (terms or teacher_objectives(stage.recipe.objectives)):
            raise UsageError(
                f"data.sequence_length ({length}) is above what the teacher reads ({teacher.max_tokens}); lower it"
            )


def _teacher_names(arguments: DistillTextArguments, tree: Located) -> list[str]:
    """The teachers that the command line names, or the recipe."""
    written = tree.child("teacher")
    recipes = TO_BE_GIVEN if written is None else written.plain()
    found = list(arguments.teachers) or (list(recipes) if isinstance(recipes, list | tuple) else [recipes])
    if not found or TO_BE_GIVEN in found or not all(isinstance(name, str) for name in found):
        raise UsageError(
            "teacher: the recipe learns from a model of yours; give --teacher MODEL, a model or run directory or a Hub"
            " id"
        )
    return found


def _tokenizer_override(tree: Located, teacher: TeacherFiles, *, offline: bool) -> list[Override]:
    """The teacher's tokenizer; one that is given must be no other, unless it is that of the recipe's own teacher.

    Raises:
        UsageError: it is to be learnt.
        DataError: it is another.
    """
    given, own, name = tree.child("tokenizer"), tree.child("teacher"), teacher.names[0]
    settings = None if given is None else given.plain()
    if isinstance(settings, dict) and settings:
        path = settings.get("path")
        if own is not None and path == own.plain():
            path = name
        if path is None:
            raise UsageError("tokenizer: a student reads what its teacher reads; leave `tokenizer` out of the recipe")
        if path != name:
            check_tokenizer(load_tokenizer(path, offline=offline), teacher.tokenizer, source=str(path))
    return [Override("tokenizer", {"path": name})]


def _with_teachers_vocabulary(arguments: DistillTextArguments, tree: Located, teacher: TeacherFiles) -> list[Override]:
    """Overrides: the student's first weights and sizes, and its teacher's tokenizer."""
    tokenizer = _tokenizer_override(tree, teacher, offline=arguments.offline)
    if arguments.student is None:
        return [*_model_override(tree, teacher.config, same_depth=False), *tokenizer]
    given = starting_from(replace(arguments, init=arguments.student))
    return [Override("student", None), *(each for each in given if each.key != "tokenizer"), *tokenizer]


def _with_own_vocabulary(arguments: DistillTextArguments, tree: Located, teacher: TeacherFiles) -> list[Override]:
    """Overrides: the student's first weights and sizes, and how its words are learnt where they are not its model's."""
    words = vocabulary_overrides(_mapping(tree, "tokenizer"), teacher.tokenizer, source=teacher.names[0])
    if arguments.student is None:
        return [*_model_override(tree, teacher.config, same_depth=True), *words]
    return [Override("student", None), *starting_from(replace(arguments, init=arguments.student))]


def _has_own_vocabulary(tree: Located) -> bool:
    """Whether a recipe, not checked yet, gives the student a vocabulary of its own."""
    objectives = tree.child("objective")
    listed = None if objectives is None else objectives.plain()
    return isinstance(listed, list) and any(
        each == MixedVocabulary.term or (isinstance(each, dict) and MixedVocabulary.term in each) for each in listed
    )


def _mapping(tree: Located, key: str) -> dict[str, Any]:
    """The value of a key, where it is a mapping; the schema refuses the rest."""
    given = tree.child(key)
    settings = None if given is None else given.plain()
    return settings if isinstance(settings, dict) else {}


def _model_override(tree: Located, teacher: EncoderConfig, *, same_depth: bool) -> list[Override]:
    """A model without a family is the teacher's with these settings, half as deep where its depth is not given.

    Args:
        same_depth: it has all the teacher's layers.
    """
    given = tree.child("model")
    settings = {} if given is None else given.plain()
    if not isinstance(settings, dict) or "family" in settings:
        return []
    whole = teacher.model_dump(mode="json")
    depth = whole.get("num_hidden_layers")
    if isinstance(depth, int) and not same_depth:
        kept = _layers_to_copy(tree, depth, settings.get("num_hidden_layers", max(1, depth // 2)))
        # Layers that are not there are reported later, with the recipe's other errors.
        whole = with_layers(teacher, kept).model_dump(mode="json") if kept else _of_any_depth(whole, depth)
    return [Override("model", {**whole, **settings})]


def _layers_to_copy(tree: Located, depth: int, keep: object) -> list[int] | None:
    """The teacher's layers that a recipe, not checked yet, has copied, or could have; None where there are no such
    layers."""
    layers = student.child("layers") if (student := tree.child("student")) is not None else None
    wanted = "first" if layers is None or layers.plain() is None else layers.plain()
    try:
        if isinstance(wanted, list):
            return chosen_layers(wanted, of=depth)
        if wanted in get_args(ChoiceName) and isinstance(keep, int):
            return chosen_layers(cast(ChoiceName, wanted), of=depth, keep=keep)
    except (UsageError, TypeError):
        pass
    return None


def _of_any_depth(settings: dict[str, Any], depth: int) -> dict[str, Any]:
    """Settings without those that are given layer by layer, half as deep."""
    rest = {name: value for name, value in settings.items() if not (isinstance(value, list) and len(value) == depth)}
    return {**rest, "num_hidden_layers": max(1, depth // 2)}

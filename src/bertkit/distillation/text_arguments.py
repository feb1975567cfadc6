"""The arguments of distillation on text: a student's pretraining with a teacher, which the recipe must fit.

Sanh et al. 2019, DistilBERT, arXiv:1910.01108; Jiao et al. 2019, TinyBERT, arXiv:1909.10351, section 3.1; Sun et al.
2020, MobileBERT, arXiv:2004.02984, section 3.4; Zhao et al. 2019, arXiv:1909.11687v1. Settings that the recipe leaves
out come from the teacher: its tokenizer, and its sizes at half its depth. The training is in siblings text.py and, for
a student with its own vocabulary, small_vocabulary.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast, get_args

from pydantic import BaseModel

from bertkit.data.shards import TokenShards
from bertkit.distillation.mixed_vocabulary import MixedVocabulary
from bertkit.distillation.objectives import WordObjective, distillation_objectives
from bertkit.distillation.shared_projections import teacher_objectives
from bertkit.distillation.small_vocabulary import MixedVocabularyTrainer, check_trained_teacher, vocabulary_overrides
from bertkit.distillation.student_settings import TO_BE_GIVEN
from bertkit.distillation.student_trainer import check_student_growth
from bertkit.distillation.teacher import WORDS_HEAD
from bertkit.distillation.teacher_files import TeacherFiles
from bertkit.distillation.terms import check_single_teacher, specs_of
from bertkit.distillation.text import TextDistiller, copied_layers, text_shapes
from bertkit.distillation.text_recipe import DistillTextRecipe, with_phases
from bertkit.errors import DataError, UsageError, below
from bertkit.models.conversion.layer_choice import ChoiceName, chosen_layers
from bertkit.models.conversion.pruning import with_layers
from bertkit.models.encoder import EncoderConfig
from bertkit.models.files.hub import heads_of
from bertkit.pretraining.arguments import (
    PretrainArguments,
    completed,
    fitted,
    init_overrides,
    source_overrides,
    warn_of_stages,
    with_max_length,
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
        teachers: teacher models; empty: the recipe's.
        student: a model from which the student is initialised, instead of the recipe's parts of the teacher.
        control: leave out the terms that need a teacher.
    """

    teachers: Sequence[str] = ()
    student: str | None = None
    control: bool = False

    schema: ClassVar[type[Recipe]] = DistillTextRecipe
    kind: ClassVar[str] = "distill"

    def requested(self) -> DistillTextRecipe:
        """The recipe with all changes of the command line, checked against its teacher.

        Raises:
            UsageError: all errors at once.
            DataError: a model does not exist, or the tokenizer differs.
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
        recipe = with_phases(recipe, text_shapes(recipe, teacher, offline=self.offline))
        recipe = with_max_length(recipe, self.overrides)
        warn_of_stages(recipe, self.overrides)
        done = completed(recipe, self.max_steps)
        assert isinstance(done, DistillTextRecipe)
        check_fit(done, teacher, offline=self.offline)
        return done

    def teacher_files(self, recipe: Recipe) -> TeacherFiles:
        """The teacher of a recipe.

        Raises:
            DataError: a model does not exist, or the models do not fit each other.
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
            f"{source}: the text was tokenised by another tokenizer than the teacher's ({student.vocab_size:,} tokens,"
            f" the teacher's has {teacher.vocab_size:,}), but student and teacher must read the same tokens; leave"
            " `tokenizer` out of the recipe, and give text, not shards of another tokenizer"
        )


def check_fit(recipe: DistillTextRecipe, teacher: TeacherFiles, *, offline: bool) -> None:
    """Check a recipe against its teacher, as far as the two config.json and the names of the weights allow.

    Raises:
        UsageError: a term, the layers to copy, or the length of a sequence does not fit.
        DataError: words are compared, but a teacher predicts none.
    """
    shapes = text_shapes(recipe, teacher, offline=offline)
    copied_layers(recipe, shapes)
    check_student_growth(recipe)
    for stage in stages_of(recipe):
        check_trained_teacher(recipe, stage.recipe, teacher.config)
        compared = distillation_objectives(stage.recipe.objectives)
        _check_word_heads([each.term for each in compared if isinstance(each, WordObjective)], teacher)
        terms = [each.distilled for each in compared]
        check_single_teacher(terms, len(recipe.teachers), key="objective")
        specs_of(terms, shapes, key="objective")
        length = stage.recipe.data.sequence_length
        if length > teacher.max_tokens and (terms or teacher_objectives(stage.recipe.objectives)):
            raise UsageError(
                f"data.sequence_length is {length}, but the teacher reads at most {teacher.max_tokens} tokens; lower it"
            )


def _check_word_heads(terms: Sequence[str], teacher: TeacherFiles) -> None:
    """Check that the teachers predict words, if there are terms that compare words.

    Raises:
        DataError: one does not.
    """
    for name, directory in zip(teacher.names, teacher.directories, strict=True):
        if terms and WORDS_HEAD not in (heads := heads_of(directory)):
            raise DataError(
                f"teacher: {name}: objective.{terms[0]} compares words, but this teacher has no masked-LM head (its"
                f" heads: {', '.join(heads) or 'none'}); use the pretrained model before fine-tuning, or leave the term"
                " out"
            )


def _teacher_names(arguments: DistillTextArguments, tree: Located) -> list[str]:
    """The teachers named on the command line, or else in the recipe."""
    recipes = _written(tree, "teacher")
    found = list(arguments.teachers) or (recipes if isinstance(recipes, list) else [recipes])
    if not found or TO_BE_GIVEN in found or not all(isinstance(name, str) for name in found):
        raise UsageError(
            "teacher: the recipe leaves the teacher to you; give --teacher MODEL, a model directory, a run directory or"
            " a Hub id"
        )
    return found


def _tokenizer_override(tree: Located, teacher: TeacherFiles, *, offline: bool) -> list[Override]:
    """The teacher's tokenizer; a given one must be the same, unless it is that of the recipe's own teacher.

    Raises:
        UsageError: the recipe trains a tokenizer.
        DataError: the given tokenizer is a different one.
    """
    settings, name = _written(tree, "tokenizer"), teacher.names[0]
    if isinstance(settings, dict) and settings:
        path = settings.get("path")
        if path is None:
            raise UsageError("tokenizer: a student uses its teacher's tokenizer; leave `tokenizer` out of the recipe")
        if path not in (name, _written(tree, "teacher")):
            check_tokenizer(load_tokenizer(path, offline=offline), teacher.tokenizer, source=str(path))
    return [Override("tokenizer", {"path": name})]


def _with_teachers_vocabulary(arguments: DistillTextArguments, tree: Located, teacher: TeacherFiles) -> list[Override]:
    """Overrides: the student's initial weights and sizes, and its teacher's tokenizer."""
    tokenizer = _tokenizer_override(tree, teacher, offline=arguments.offline)
    if arguments.student is None:
        return [*_model_override(tree, teacher.config, same_depth=False), *tokenizer]
    given = init_overrides(replace(arguments, init=arguments.student))
    return [Override("student", None), *(each for each in given if each.key != "tokenizer"), *tokenizer]


def _with_own_vocabulary(arguments: DistillTextArguments, tree: Located, teacher: TeacherFiles) -> list[Override]:
    """Overrides: the student's initial weights and sizes, and its vocabulary's training if its model has none."""
    given = _written(tree, "tokenizer")
    settings = given if isinstance(given, dict) else {}
    words = vocabulary_overrides(settings, teacher.tokenizer, source=teacher.names[0])
    if arguments.student is None:
        return [*_model_override(tree, teacher.config, same_depth=True), *words]
    return [Override("student", None), *init_overrides(replace(arguments, init=arguments.student))]


def _has_own_vocabulary(tree: Located) -> bool:
    """Whether a recipe that is not validated yet gives the student its own vocabulary."""
    listed = _written(tree, "objective")
    return isinstance(listed, list) and any(
        each == MixedVocabulary.term or (isinstance(each, dict) and MixedVocabulary.term in each) for each in listed
    )


def _written(tree: Located, key: str) -> Any:
    """What a recipe that is not validated yet has for a key; None if nothing."""
    return None if (found := tree.child(key)) is None else found.plain()


def _model_override(tree: Located, teacher: EncoderConfig, *, same_depth: bool) -> list[Override]:
    """Sizes for a model without a family: the teacher's, changed by these settings, half as deep if no depth is given.

    Args:
        same_depth: whether it has all the teacher's layers.
    """
    settings = {} if tree.child("model") is None else _written(tree, "model")
    if not isinstance(settings, dict) or "family" in settings:
        return []
    whole = teacher.model_dump(mode="json")
    depth = whole.get("num_hidden_layers")
    if isinstance(depth, int) and not same_depth:
        kept = _layers_to_copy(tree, depth, settings.get("num_hidden_layers", max(1, depth // 2)))
        # Layers that do not exist are reported later, with the recipe's other errors.
        with below("student"):
            whole = with_layers(teacher, kept).model_dump(mode="json") if kept else _of_any_depth(whole, depth)
    return [Override("model", {**whole, **settings})]


def _layers_to_copy(tree: Located, depth: int, keep: object) -> list[int] | None:
    """The teacher's layers that a recipe (not validated yet) copies or could copy; None if these layers do not
    exist."""
    student = tree.child("student")
    wanted = (None if student is None else _written(student, "layers")) or "first"
    try:
        if isinstance(wanted, list):
            return chosen_layers(wanted, of=depth)
        if wanted in get_args(ChoiceName) and isinstance(keep, int):
            return chosen_layers(cast(ChoiceName, wanted), of=depth, keep=keep)
    except (UsageError, TypeError):
        pass
    return None


def _of_any_depth(settings: dict[str, Any], depth: int) -> dict[str, Any]:
    """Settings at half the depth, without those that are given layer by layer."""
    rest = {name: value for name, value in settings.items() if not (isinstance(value, list) and len(value) == depth)}
    return {**rest, "num_hidden_layers": max(1, depth // 2)}

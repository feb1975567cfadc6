"""What a user asks of distillation on text, and what it comes to: a student's pretraining beside its teacher.

Sanh et al. 2019, DistilBERT, arXiv:1910.01108; Jiao et al. 2019, TinyBERT, arXiv:1909.10351, section 3.1; Sun et al.
2020, MobileBERT, arXiv:2004.02984, section 3.4; Zhao et al. 2019, arXiv:1909.11687v1. It is pretraining's request
(pretraining/request.py) with a teacher that the recipe must fit; pretraining/launch.py makes a run of it. Siblings
text_student.py and, for a student with a vocabulary of its own, small_vocabulary.py do the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast, get_args

from bertkit.data.shards import TokenShards
from bertkit.distillation.mixed_vocabulary import MixedVocabulary
from bertkit.distillation.objectives import distilled_among, wanted_of
from bertkit.distillation.small_vocabulary import (
    MixedVocabularyTrainer,
    check_dual,
    load_dual_teacher,
    vocabulary_overrides,
)
from bertkit.distillation.terms import Sizes
from bertkit.distillation.text_recipe import TO_BE_GIVEN, DistillTextRecipe, with_phases
from bertkit.distillation.text_trainer import TextDistillation, check_tokenizer, copied_layers, load_teacher
from bertkit.errors import UsageError
from bertkit.models.encoder import EncoderConfig
from bertkit.models.hub import find_model, read_config
from bertkit.models.layer_choice import ChoiceName, chosen_layers
from bertkit.models.model_files import encoder_directory, weights_hash
from bertkit.models.pruning import with_layers
from bertkit.pretraining.arguments import PretrainArguments, completed, source_overrides, starting_from
from bertkit.pretraining.recipe import Recipe
from bertkit.pretraining.stages import stages_of
from bertkit.pretraining.trainer import Pretrainer
from bertkit.recipe.resolve import Override, load_as, resolve_recipe
from bertkit.recipe.tree import Located
from bertkit.run.directory import RunDirectory
from bertkit.text.tokenizer_files import load_tokenizer


@dataclass(frozen=True)
class DistillTextArguments(PretrainArguments):
    """What the user asked for.

    Attributes:
        teachers: models; empty for the recipe's.
        student: a model that the student begins as, in place of the recipe's parts of the teacher.
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
            UsageError: all faults at once.
            DataError: a model or the tokenizer is at fault.
        """
        tree = resolve_recipe(self.named, self.overrides)
        teacher = _teacher_name(self, tree)
        directory = find_model(teacher, offline=self.offline)
        config, _ = read_config(encoder_directory(directory))
        name = str(directory.resolve()) if Path(teacher).expanduser().exists() else teacher
        beginning = _with_own_vocabulary if _has_own_vocabulary(tree) else _with_its_teachers_vocabulary
        ours = [Override("teacher", name), *beginning(self, tree, config, directory, name)]
        if self.control:
            ours.append(Override("control", True))
        ours += source_overrides(self.sources)
        recipe = load_as(DistillTextRecipe, self.named, [*self.overrides, *ours])
        sizes = Sizes.told_by(recipe.model, config)
        recipe = _completed(with_phases(recipe, sizes), self.max_steps)
        check_fit(recipe, config)
        return recipe

    def fingerprints(self, recipe: Recipe) -> dict[str, str | None]:
        assert isinstance(recipe, DistillTextRecipe)
        directory = encoder_directory(find_model(recipe.teacher, offline=self.offline))
        return {**super().fingerprints(recipe), "teacher": weights_hash(directory)}

    def trainer(self, recipe: Recipe, shards: TokenShards, run: RunDirectory) -> Pretrainer:
        assert isinstance(recipe, DistillTextRecipe)
        directory = find_model(recipe.teacher, offline=self.offline)
        if recipe.has_own_vocabulary:
            return MixedVocabularyTrainer(
                recipe,
                shards,
                run,
                cache=self.cache,
                teacher=load_dual_teacher(directory),
                teacher_tokenizer=load_tokenizer(directory),
            )
        check_tokenizer(load_tokenizer(shards.directory), load_tokenizer(directory), source=recipe.teacher)
        return TextDistillation(
            recipe,
            shards,
            run,
            cache=self.cache,
            teacher=load_teacher(recipe, directory),
            teacher_hash=weights_hash(encoder_directory(directory)),
        )


def check_fit(recipe: DistillTextRecipe, teacher: EncoderConfig) -> None:
    """Check a recipe against its teacher, as far as the two configurations tell.

    Raises:
        UsageError: a term, the layers to begin with, or the length of a sequence does not fit.
    """
    sizes = Sizes.told_by(recipe.model, teacher)
    copied_layers(recipe, sizes)
    check_dual(recipe, teacher)
    for stage in stages_of(recipe):
        wanted_of(stage.recipe.objectives, sizes)
        length = stage.recipe.data.sequence_length
        if length > teacher.max_tokens and distilled_among(stage.recipe.objectives):
            raise UsageError(
                f"data.sequence_length ({length}) is above what the teacher reads ({teacher.max_tokens}); lower it"
            )


def _completed(recipe: DistillTextRecipe, max_steps: int | None) -> DistillTextRecipe:
    done = completed(recipe, max_steps)
    assert isinstance(done, DistillTextRecipe)
    return done


def _teacher_name(request: DistillTextArguments, tree: Located) -> str:
    """The teacher that the command line names, or the recipe."""
    if len(request.teachers) > 1:
        raise UsageError(
            f"--teacher: {len(request.teachers)} teachers, and on text a student learns from one; several can teach"
            " on a task"
        )
    written = tree.child("teacher")
    found = request.teachers[0] if request.teachers else TO_BE_GIVEN if written is None else written.plain()
    if not isinstance(found, str) or found == TO_BE_GIVEN:
        raise UsageError(
            "teacher: the recipe learns from a model of yours; give --teacher MODEL, a model or run directory or a Hub"
            " id"
        )
    return found


def _tokenizer_override(tree: Located, name: str, directory: Path, *, offline: bool) -> list[Override]:
    """The teacher's tokenizer; one that is given must be no other, unless it is that of the recipe's own teacher.

    Raises:
        UsageError: it is to be learnt.
        DataError: it is another.
    """
    given, teacher = tree.child("tokenizer"), tree.child("teacher")
    settings = None if given is None else given.plain()
    if isinstance(settings, dict) and settings:
        path = settings.get("path")
        if teacher is not None and path == teacher.plain():
            path = name
        if path is None:
            raise UsageError("tokenizer: a student reads what its teacher reads; leave `tokenizer` out of the recipe")
        if path != name:
            check_tokenizer(load_tokenizer(path, offline=offline), load_tokenizer(directory), source=str(path))
    return [Override("tokenizer", {"path": name})]


def _with_its_teachers_vocabulary(
    request: DistillTextArguments, tree: Located, config: EncoderConfig, directory: Path, name: str
) -> list[Override]:
    """Overrides: what the student begins as, and its teacher's tokenizer."""
    tokenizer = _tokenizer_override(tree, name, directory, offline=request.offline)
    if request.student is None:
        return [*_model_override(tree, config, as_deep=False), *tokenizer]
    given = starting_from(replace(request, init=request.student))
    return [Override("student", None), *(each for each in given if each.key != "tokenizer"), *tokenizer]


def _with_own_vocabulary(
    request: DistillTextArguments, tree: Located, config: EncoderConfig, directory: Path, name: str
) -> list[Override]:
    """Overrides: what the student begins as, and how its words are learnt where they are not that model's."""
    words = vocabulary_overrides(_mapping(tree, "tokenizer"), load_tokenizer(directory), source=name)
    if request.student is None:
        return [*_model_override(tree, config, as_deep=True), *words]
    return [Override("student", None), *starting_from(replace(request, init=request.student))]


def _has_own_vocabulary(tree: Located) -> bool:
    """Whether a recipe, not checked yet, gives the student a vocabulary of its own."""
    objectives = tree.child("objective")
    listed = None if objectives is None else objectives.plain()
    return isinstance(listed, list) and any(
        each == MixedVocabulary.term or (isinstance(each, dict) and MixedVocabulary.term in each) for each in listed
    )


def _mapping(tree: Located, key: str) -> dict[str, Any]:
    """What stands under a key, where it is a mapping; the rest is for the schema to refuse."""
    given = tree.child(key)
    settings = None if given is None else given.plain()
    return settings if isinstance(settings, dict) else {}


def _model_override(tree: Located, teacher: EncoderConfig, *, as_deep: bool) -> list[Override]:
    """A model without a family is the teacher's with these settings, half as deep where nothing says how deep.

    Args:
        as_deep: it has all the teacher's layers.
    """
    given = tree.child("model")
    settings = {} if given is None else given.plain()
    if not isinstance(settings, dict) or "family" in settings:
        return []
    whole = teacher.model_dump(mode="json")
    depth = whole.get("num_hidden_layers")
    if isinstance(depth, int) and not as_deep:
        kept = _beginning_layers(tree, depth, settings.get("num_hidden_layers", max(1, depth // 2)))
        # Layers that are not there are told later, with the recipe's other faults.
        whole = with_layers(teacher, kept).model_dump(mode="json") if kept else _of_any_depth(whole, depth)
    return [Override("model", {**whole, **settings})]


def _beginning_layers(tree: Located, depth: int, keep: object) -> list[int] | None:
    """The teacher's layers that a recipe, not checked yet, has the student begin with, or could; None where there are
    no such layers."""
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
    """Settings without what is set layer by layer, half as deep."""
    rest = {name: value for name, value in settings.items() if not (isinstance(value, list) and len(value) == depth)}
    return {**rest, "num_hidden_layers": max(1, depth // 2)}

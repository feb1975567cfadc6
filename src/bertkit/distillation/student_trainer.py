"""What both trainers of students on text share: text.py has a fixed teacher, small_vocabulary.py one that is trained.

Not from a paper. The training loop is pretraining's; a student can have frozen parts, and grows between the stages of a
recipe only if no teacher teaches it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bertkit.data.shards import TokenShards
from bertkit.distillation.shared_projections import teacher_objectives
from bertkit.distillation.text_recipe import DistillTextRecipe
from bertkit.errors import UsageError
from bertkit.models.headed import HeadedModel
from bertkit.pretraining.growth import check_growth
from bertkit.pretraining.stage_run import StageRun
from bertkit.pretraining.stages import stages_of
from bertkit.pretraining.trainer import Pretrainer
from bertkit.run.directory import RunDirectory


class StudentTrainer(Pretrainer):
    """One run of a student.

    Args:
        recipe: resolved.
        shards: the corpus in the student's tokens.
        run: the run directory, whose lock the caller holds.
        cache: where epoch plans are cached.
    """

    def __init__(self, recipe: DistillTextRecipe, shards: TokenShards, run: RunDirectory, *, cache: Path) -> None:
        self.student_recipe = recipe
        super().__init__(recipe, shards, run, cache=cache)

    def _check_growth(self) -> None:
        check_student_growth(self.student_recipe)

    def parameter_rates(self, model: HeadedModel, stage_run: StageRun) -> dict[str, float]:
        frozen = _frozen_rates(model, self.student_recipe.frozen)
        return {name: rate * frozen[name] for name, rate in super().parameter_rates(model, stage_run).items()}


def check_student_growth(recipe: DistillTextRecipe) -> None:
    """Raise UsageError if the student grows, unless it is the control of one with its own vocabulary."""
    stages = stages_of(recipe)
    if len({stage.recipe.model for stage in stages}) == 1:
        return
    if teacher_objectives([objective for stage in stages for objective in stage.recipe.objectives]):
        raise UsageError(
            "optimisation.stages: a student cannot grow while its teacher is trained with it; leave"
            " model.num_hidden_layers out of the stages"
        )
    if not recipe.has_own_vocabulary:
        raise UsageError(
            "optimisation.stages: a student cannot grow during distillation, because the layers to compare would"
            " change; leave model.num_hidden_layers out of the stages"
        )
    check_growth(stages)


def _frozen_rates(model: HeadedModel, parts: Sequence[str]) -> dict[str, float]:
    """The factor of each parameter's learning rate: 0 in these parts of the encoder, 1 elsewhere.

    Raises:
        UsageError: a part does not exist.
    """
    parameters = [name for name, _ in model.encoder.named_parameters()]
    rates = {name: 1.0 for name, _ in model.named_parameters()}
    for part in parts:
        own = [name for name in parameters if name == part or name.startswith(f"{part}.")]
        if not own:
            known = sorted({".".join(name.split(".")[:2]) for name in parameters})
            raise UsageError(f"frozen: the student has no part {part!r}; its parts are {', '.join(known)}")
        rates |= {f"encoder.{name}": 0.0 for name in own}
    return rates

"""What distillation on text would cost, before it is begun: the document of `--plan`.

Nothing here follows a paper. It is pretraining's (pretraining/plan.py) and the teacher's part in it.
"""

from __future__ import annotations

from typing import Any

from bertkit.distillation.objectives import distilled_among, word_rows
from bertkit.distillation.small_vocabulary import lesson_rows, load_dual_teacher, teacher_costs
from bertkit.distillation.terms import Sizes
from bertkit.distillation.text_arguments import DistillTextArguments
from bertkit.distillation.text_loss_terms import teacher_flops
from bertkit.distillation.text_trainer import layer_rows, load_teacher
from bertkit.models.hub import find_model
from bertkit.pretraining.plan import pretraining_plan
from bertkit.pretraining.stages import stages_of
from bertkit.training.cost import count_parameters
from bertkit.training.plan import PlannedTeacher


def distill_text_plan(request: DistillTextArguments) -> dict[str, Any]:
    """Pretraining's document, and what the teacher adds to it."""
    recipe = request.requested()
    directory = find_model(recipe.teacher, offline=request.offline)
    own = recipe.has_own_vocabulary
    teacher = load_dual_teacher(directory) if own else load_teacher(recipe, directory)
    sizes = Sizes.told_by(recipe.model, teacher.encoder.config)
    training = teacher_costs(recipe, teacher)
    asking = training["flops"]
    for stage in stages_of(recipe):
        if not distilled_among(stage.recipe.objectives):
            continue
        length, sequences = stage.recipe.data.sequence_length, stage.recipe.optimisation.batch_sequences
        asking += (stage.end_step - stage.first_step) * teacher_flops(
            teacher,
            tokens=sequences * length,
            squared_lengths=sequences * length**2,
            rows=sequences * word_rows(stage.recipe.objectives, length),
            sequences=sequences,
        )
    planned = PlannedTeacher(
        recipe.teacher,
        count_parameters(teacher).total,
        asking,
        memory_bytes=training["memory_mb"] * 1e6,
        disk_bytes=training["disk_mb"] * 1e6,
    )
    plan = pretraining_plan(recipe, vocab_size=None if own else teacher.encoder.vocab_size, teacher=planned)
    rows = [*layer_rows(recipe, sizes), *lesson_rows(recipe)]
    return plan | {"layers": [dict(zip(("stage", "term", "weight", "compares"), row, strict=True)) for row in rows]}

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


def distill_text_plan(request: DistillTextArguments) -> dict[str, Any]:
    """Pretraining's document, and what the teacher adds to it."""
    recipe = request.requested()
    directory = find_model(recipe.teacher, offline=request.offline)
    own = recipe.has_own_vocabulary
    teacher = load_dual_teacher(directory) if own else load_teacher(recipe, directory)
    plan = pretraining_plan(recipe, vocab_size=None if own else teacher.encoder.vocab_size)
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
    learning = plan["flops"]
    rows = [*layer_rows(recipe, sizes), *lesson_rows(recipe)]
    return {
        **plan,
        "teacher": {"model": recipe.teacher, "parameters": count_parameters(teacher).total, "flops": asking},
        "flops": learning + asking,
        "memory_mb": plan["memory_mb"] + training["memory_mb"],
        "disk_mb": plan["disk_mb"] + training["disk_mb"],
        "seconds": plan["seconds"] * (learning + asking) / learning,
        "layers": [dict(zip(("stage", "term", "weight", "compares"), row, strict=True)) for row in rows],
    }

"""The cost of a run before it starts: the document of `--plan`, the same for every command that trains.

FLOPs as in cost.py. The time assumes 65% of the FLOP/s of a large matrix product measured here, which training reaches
where the matrices are large (docs/results.md); small models reach less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bertkit.recipe.hashing import what_hash
from bertkit.recipe.header import RecipeHeader
from bertkit.training.cost import REACHED_SHARE, ParameterCount, measured_peak_flops
from bertkit.training.engine import Engine


@dataclass(frozen=True)
class PlannedTeacher:
    """What a teacher adds to the cost of a run.

    Attributes:
        model: its name, or the names of several.
        parameters: of all of them.
        flops: of the whole run.
        memory_bytes, disk_bytes: where it trains beside its student.
    """

    model: str | list[str]
    parameters: int
    flops: float
    memory_bytes: float = 0.0
    disk_bytes: float = 0.0


def plan_document(
    recipe: RecipeHeader,
    engine: Engine,
    *,
    parameters: ParameterCount,
    steps: int,
    tokens: float,
    flops: float,
    memory_bytes: float,
    disk_bytes: float,
    teacher: PlannedTeacher | None = None,
) -> dict[str, Any]:
    """Parameters, steps, tokens, FLOPs, memory, disk and time.

    Args:
        recipe: resolved.
        engine: that computes.
        parameters: of what is trained.
        steps, tokens, flops: of all runs, without what a teacher computes.
        memory_bytes, disk_bytes: at most, without a teacher's.
        teacher: beside the student, if there is one.
    """
    document: dict[str, Any] = {
        "recipe": recipe.name,
        "what_hash": what_hash(recipe),
        "parameters": {"total": parameters.total, "backbone": parameters.backbone},
        "steps": steps,
        "tokens": int(tokens),
    }
    if teacher is not None:
        document["teacher"] = {"model": teacher.model, "parameters": teacher.parameters, "flops": teacher.flops}
        flops += teacher.flops
        memory_bytes += teacher.memory_bytes
        disk_bytes += teacher.disk_bytes
    rate = planned_rate(engine)
    costs = {"flops": flops, "memory_mb": memory_bytes / 1e6, "disk_mb": disk_bytes / 1e6, "seconds": flops / rate}
    return document | costs


def planned_rate(engine: Engine) -> float:
    """The FLOP/s with which times are estimated."""
    return measured_peak_flops(engine.device, bf16=engine.bf16) * REACHED_SHARE

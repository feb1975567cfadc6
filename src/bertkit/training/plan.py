"""The cost of a run before it starts: the document of `--plan`, the same for every command that trains.

FLOPs as in cost.py. The time assumes 65% of the FLOP/s of a large matrix product measured on this machine, which
training reaches if the matrices are large (docs/results.md); small models reach less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bertkit.training.cost import REACHED_SHARE, ParameterCount
from bertkit.training.engine import Engine
from bertkit.training.memory import MemoryTerms, peak_memory, program_memory
from bertkit.training.product_rate import measured_peak_flops


@dataclass(frozen=True)
class PlannedVocabulary:
    """The size of a vocabulary.

    Attributes:
        size: V.
        at_most: whether a text that is too small for it yields fewer entries, and so a smaller model.
    """

    size: int
    at_most: bool = False


@dataclass(frozen=True)
class PlannedTeacher:
    """What a teacher adds to the cost of a run.

    Attributes:
        model: its name, or the names of several.
        parameters: of all teachers.
        flops: of the whole run.
        memory: its terms, by their names next to the student's.
        disk_bytes: if it is trained with its student.
    """

    model: str | list[str]
    parameters: int
    flops: float
    memory: MemoryTerms = field(default_factory=dict)
    disk_bytes: float = 0.0


@dataclass(frozen=True)
class PlannedCost:
    """What a command's runs cost, without a teacher's share.

    Attributes:
        parameters: of what is trained.
        steps, tokens, flops: of all runs.
        memory: terms of the largest update.
        disk_bytes: the maximum.
        text_bytes: size of the sample on which a vocabulary is trained.
        optimizer_flops: of the optimiser's own matrix products, if it has any; not included in `flops`, which are the
            model's, as budgets and MFU count them.
    """

    parameters: ParameterCount
    steps: int
    tokens: float
    flops: float
    memory: Mapping[str, float]
    disk_bytes: float
    text_bytes: float = 0.0
    optimizer_flops: float = 0.0


def plan_document(
    engine: Engine,
    cost: PlannedCost,
    *,
    vocabulary: PlannedVocabulary | None = None,
    teacher: PlannedTeacher | None = None,
) -> dict[str, Any]:
    """Parameters, steps, tokens, FLOPs, memory, disk and time.

    Args:
        engine: the engine that computes.
        cost: of the runs.
        vocabulary: if its size depends on the text.
        teacher: the teacher next to the student, if there is one.
    """
    document: dict[str, Any] = {
        "parameters": {"total": cost.parameters.total, "backbone": cost.parameters.backbone},
        "steps": cost.steps,
        "tokens": int(cost.tokens),
    }
    flops, memory, disk_bytes = cost.flops, cost.memory, cost.disk_bytes
    if vocabulary is not None:
        document["vocabulary"] = {"size": vocabulary.size, "at_most": vocabulary.at_most}
    if teacher is not None:
        document["teacher"] = {"model": teacher.model, "parameters": teacher.parameters, "flops": teacher.flops}
        flops += teacher.flops
        memory = {**memory, **{f"teacher_{name}": value for name, value in teacher.memory.items()}}
        disk_bytes += teacher.disk_bytes
    terms = peak_memory(memory, program=program_memory(engine), text_bytes=cost.text_bytes)
    return document | {
        "flops": flops,
        "optimizer_flops": cost.optimizer_flops,
        "memory_mb": sum(terms.values()) / 1e6,
        "memory_terms_mb": {name: round(value / 1e6, 1) for name, value in terms.items()},
        "disk_mb": disk_bytes / 1e6,
        "seconds": (flops + cost.optimizer_flops) / planned_rate(engine),
    }


def planned_rate(engine: Engine) -> float:
    """The FLOP/s with which times are estimated."""
    return measured_peak_flops(engine.device, bf16=engine.bf16) * REACHED_SHARE

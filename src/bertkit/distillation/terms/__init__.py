"""The distillation terms by their name in a recipe; a new one needs a class and an entry here."""

from __future__ import annotations

from bertkit.distillation.terms.attention import Attention
from bertkit.distillation.terms.base import (
    PROJECTIONS,
    DistillationTerm,
    LinearProjections,
    OutputPair,
    ShapePair,
    add_projections,
    check_single_teacher,
    layer_terms,
    new_projections,
    projections_of,
    specs_of,
)
from bertkit.distillation.terms.logits import HardTargets, LogitError, LogitTerm, SoftTargets
from bertkit.distillation.terms.states import Cosine, EmbeddingStates, FeatureMaps, HiddenStates, Patience

LABELS = "labels"
"""The name of the task's own loss among the terms."""
TERMS: dict[str, type[DistillationTerm]] = {
    kind.term: kind
    for kind in (
        SoftTargets,
        HardTargets,
        LogitError,
        EmbeddingStates,
        HiddenStates,
        Attention,
        Cosine,
        Patience,
        FeatureMaps,
    )
}

__all__ = [
    "LABELS",
    "PROJECTIONS",
    "TERMS",
    "Attention",
    "Cosine",
    "DistillationTerm",
    "EmbeddingStates",
    "FeatureMaps",
    "HardTargets",
    "HiddenStates",
    "LinearProjections",
    "LogitError",
    "LogitTerm",
    "OutputPair",
    "Patience",
    "ShapePair",
    "SoftTargets",
    "add_projections",
    "check_single_teacher",
    "layer_terms",
    "new_projections",
    "projections_of",
    "specs_of",
]

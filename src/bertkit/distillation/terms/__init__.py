"""The terms of distillation by the name that a recipe gives them; a new one is one class and one entry here."""

from __future__ import annotations

from bertkit.distillation.terms.attention import Attention
from bertkit.distillation.terms.base import Activations, ActivationSpec, LinearMaps, Shape, Sizes, Term
from bertkit.distillation.terms.logits import HardTargets, LogitError, SoftTargets
from bertkit.distillation.terms.states import Cosine, EmbeddingStates, FeatureMaps, HiddenStates, Patience

TERMS: dict[str, type[Term]] = {
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
    "TERMS",
    "ActivationSpec",
    "Activations",
    "Attention",
    "Cosine",
    "EmbeddingStates",
    "FeatureMaps",
    "HardTargets",
    "HiddenStates",
    "LinearMaps",
    "LogitError",
    "Patience",
    "Shape",
    "Sizes",
    "SoftTargets",
    "Term",
]

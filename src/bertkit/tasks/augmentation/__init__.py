"""Augmentation of a task's examples for distillation, by the name that a recipe gives it; a new method is one file and
one entry."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bertkit.tasks.augmentation.base import Augmentation, Surroundings
from bertkit.tasks.augmentation.cache import augmented_examples
from bertkit.tasks.augmentation.masked_lm import MaskedLMWords
from bertkit.tasks.augmentation.masking import Masking

AnyAugmentation = Annotated[Masking | MaskedLMWords, Field(discriminator="name")]

AUGMENTATIONS: dict[str, type[Augmentation]] = {"masking": Masking, "masked_lm": MaskedLMWords}

__all__ = [
    "AUGMENTATIONS",
    "AnyAugmentation",
    "Augmentation",
    "MaskedLMWords",
    "Masking",
    "Surroundings",
    "augmented_examples",
]

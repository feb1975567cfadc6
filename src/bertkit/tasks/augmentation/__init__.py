"""Augmentation of a task's examples for distillation; a new method is one file, and a member of `AnyAugmentation`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bertkit.tasks.augmentation.base import Augmentation, AugmentationContext
from bertkit.tasks.augmentation.cache import augmented_examples
from bertkit.tasks.augmentation.masked_lm import MaskedLMWords
from bertkit.tasks.augmentation.masking import Masking

AnyAugmentation = Annotated[Masking | MaskedLMWords, Field(discriminator="name")]
"""By its name in recipes."""

__all__ = [
    "AnyAugmentation",
    "Augmentation",
    "AugmentationContext",
    "MaskedLMWords",
    "Masking",
    "augmented_examples",
]

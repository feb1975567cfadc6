"""Base of the augmentations: examples in, the same examples and altered copies of them out.

Tang et al. 2019, arXiv:1903.12136, section 3.3: a teacher can label any text, so the student sees more of its function
than the task's own examples show. One file per method; cache.py stores the results.

Random numbers depend only on the seed and the example's own texts (data/random.py): an example has the same copies
regardless of its position, the other examples and interruptions.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from bertkit.data.random import Draw
from bertkit.errors import DataError
from bertkit.files import sha256_of
from bertkit.settings import Settings, UnreadKey
from bertkit.tasks.examples import TextExample, parts_between_masks

Variant = tuple[str, str | None]
"""An example's altered texts."""


@dataclass(frozen=True)
class AugmentationContext:
    """The environment of an augmentation.

    Attributes:
        seed: of all draws.
        offline: use no network for models.
        device: of models.
    """

    seed: int = 0
    offline: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def draw(self) -> Draw:
        """The generator."""
        return Draw(self.seed, "augmentation")


class Augmenter(ABC):
    """A method with everything it needs loaded."""

    @abstractmethod
    def variants(self, examples: Sequence[TextExample]) -> list[list[Variant]]:
        """The copies of each example, in order; some may be equal to one another or to the example."""


class Augmentation(Settings, ABC):
    """How, and how often, examples are altered."""

    labels: Literal["kept", "none"] = Field(
        "none",
        description="kept: a copy keeps its example's label; none: it has no label, and the teacher's outputs are its"
        " labels.",
    )

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if getattr(recipe, "labels_weight", 1.0) == 0:
            yield UnreadKey("labels", "the student has no loss on labels", "give distillation.labels a weight")

    @abstractmethod
    def augmenter(self, examples: Sequence[TextExample], surroundings: AugmentationContext) -> Augmenter:
        """Load everything that the method needs.

        Args:
            examples: all of them, for methods that use statistics of the whole.

        Raises:
            DataError: a file or a model is invalid.
        """

    @abstractmethod
    def reads(self, *, offline: bool) -> dict[str, str]:
        """The sha256 of each file or model that is read, by the setting that names it."""

    def with_copies(self, examples: Sequence[TextExample], variants: Sequence[Sequence[Variant]]) -> list[TextExample]:
        """The examples in order, each followed by its copies.

        A copy's id is the example's, a slash and the copy's number from 1; a copy that is equal to its example or to
        one of its earlier copies is left out.
        """
        found = []
        for example, own in zip(examples, variants, strict=True):
            found.append(example)
            seen = {_content((example.text, example.text_pair))}
            label = example.label if self.labels == "kept" else None
            for number, variant in enumerate(own, start=1):
                content = _content(variant)
                if content in seen:
                    continue
                seen.add(content)
                text, pair = variant
                found.append(replace(example, id=f"{example.id}/{number}", text=text, text_pair=pair, label=label))
        return found


def _content(texts: Variant) -> tuple[tuple[str, ...] | None, ...]:
    """Content to compare by; a masked word differs from a literal `[MASK]` in the text."""
    return tuple(None if text is None else parts_between_masks(text) for text in texts)


def address(example: TextExample) -> int:
    """A 64-bit number from an example's texts, which determines its random draws."""
    content = f"{example.text}\0{'' if example.text_pair is None else example.text_pair}"
    return int.from_bytes(hashlib.sha256(content.encode("utf-8", "backslashreplace")).digest()[:8], "little")


def content_hash(path: str, setting: str) -> str:
    """sha256 (hex) of a file that a setting names.

    Raises:
        DataError: there is no such file.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"augmentation.{setting}: {path}: no such file")
    return sha256_of(file)


def settings_of(augmentation: Augmentation, read: Mapping[str, str]) -> dict[str, object]:
    """Everything except seed and example that determines the copies; files count by content, not by name."""
    return {**augmentation.model_dump(mode="json"), **read}

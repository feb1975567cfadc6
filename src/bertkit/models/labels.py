"""The labels of a classifier, in the order of its logits.

config.json of `transformers`: `id2label`, `label2id`, `num_labels`, `problem_type`. Orders differ between code bases
(MNLI alone has three), so the order is always taken from names, never assumed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from bertkit.errors import DataError

ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]

_UNNAMED = "LABEL_{}"
_DEFAULT_COUNT = 2
MOST_LABELS = 1 << 17


@dataclass(frozen=True)
class Labels:
    """Names of a classifier's outputs.

    Attributes:
        names: one per logit, in their order; LABEL_0, LABEL_1, ... if unnamed.
        problem_type: what the logits mean; None if the checkpoint does not specify it.
    """

    names: tuple[str, ...]
    problem_type: ProblemType | None = None

    @classmethod
    def unnamed(cls, count: int = _DEFAULT_COUNT, problem_type: ProblemType | None = None) -> Labels:
        """Labels without names; two is the default of the Hub's classes."""
        return cls(tuple(_UNNAMED.format(number) for number in range(count)), problem_type)

    @property
    def count(self) -> int:
        return len(self.names)

    @property
    def are_named(self) -> bool:
        return self.names != self.unnamed(self.count).names

    @property
    def is_regression(self) -> bool:
        """Whether the output is a number; so is a single one without a problem type, as in `transformers`."""
        return self.problem_type == "regression" or (self.problem_type is None and self.count == 1)

    @classmethod
    def from_hub(cls, contents: Mapping[str, Any]) -> Labels:
        """The labels in a config.json.

        Raises:
            ValueError: they are not numbered from 0 without gaps, two have the same name or number, or the problem type
                is unknown.
        """
        problem_type = contents.get("problem_type")
        if problem_type is not None and problem_type not in get_args(ProblemType):
            raise ValueError(f"problem_type is {problem_type!r}; known are {', '.join(get_args(ProblemType))}")
        key = "id2label" if contents.get("id2label") else "label2id"
        pairs = list((contents.get(key) or {}).items())
        named = pairs if key == "id2label" else [(number, name) for name, number in pairs]
        if not named:
            count = int(contents.get("num_labels", _DEFAULT_COUNT))
            if not 1 <= count <= MOST_LABELS:
                raise ValueError(f"num_labels is {count!r:.60}; expected 1 to {MOST_LABELS:,}")
            return cls.unnamed(count, problem_type)
        numbers, names = zip(*sorted((int(number), str(name)) for number, name in named), strict=True)
        if numbers != tuple(range(len(numbers))):
            raise ValueError(f"{key} must number the labels from 0 without gaps, found {list(numbers)!s:.80}")
        if repeated := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(
                f"id2label has {', '.join(repeated)!r:.80} more than once; give each label a name of its own"
            )
        return cls(names, problem_type)

    def to_hub(self) -> dict[str, Any]:
        """The labels as keys of config.json."""
        found: dict[str, Any] = {
            "id2label": {str(number): name for number, name in enumerate(self.names)},
            "label2id": {name: number for number, name in enumerate(self.names)},
        }
        return found if self.problem_type is None else {**found, "problem_type": self.problem_type}

    def order_of(self, wanted: Sequence[str], *, source: str, may_have_more: bool = False) -> tuple[int, ...]:
        """The logit number of each requested label; names are compared ignoring case, unless they are the same.

        Args:
            wanted: a task's labels.
            source: the checkpoint, for messages.
            may_have_more: whether the checkpoint may have further labels.

        Raises:
            DataError: the checkpoint is a regression, does not name its labels, or has different ones.
        """
        if self.is_regression and (self.problem_type or not self.are_named):
            raise DataError(
                f"{source}: its head is a regression, which returns a number and none of the labels"
                f" {', '.join(wanted)}; use a model that was fine-tuned on these labels"
            )
        if not self.are_named:
            raise DataError(
                f"{source}: config.json does not name the labels of the classifier (id2label is"
                f" {', '.join(self.names)}), so their order is unknown; name them there as {', '.join(wanted)}"
                " in the order of the logits"
            )
        exact = {name: number for number, name in enumerate(self.names)}
        here = {name.casefold(): number for number, name in enumerate(self.names)}
        for numbers, names in ((exact, tuple(wanted)), (here, tuple(map(str.casefold, wanted)))):
            are_distinct = len(numbers) == self.count and len(set(names)) == len(names)
            if are_distinct and (numbers.keys() >= set(names) if may_have_more else numbers.keys() == set(names)):
                return tuple(numbers[name] for name in names)
        raise DataError(f"{source}: the classifier's labels are {', '.join(self.names)}, not {', '.join(wanted)}")

"""The ids and the weights of a task's labels, by name.

Not from a paper. Balanced weights are those of scikit-learn's `class_weight="balanced"`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from bertkit.arrays import Float32Array, Int64Array
from bertkit.errors import DataError, UsageError
from bertkit.tasks.examples import TextExample


def label_ids(labelled: Sequence[tuple[str, str]], names: Sequence[str]) -> Int64Array:
    """The label id of each (example, label); an exact match takes precedence over one that differs in case.

    Raises:
        DataError: a label that is not in `names`.
    """
    number_of = _numbering(names)
    ids = []
    for example, label in labelled:
        number = number_of(label)
        if number is None:
            raise DataError(
                f"example {example}: the label {label!r} is not one of the task's {len(names)} labels"
                f" ({_some_of(names)}); correct the data, or add examples of it to the training file"
            )
        ids.append(number)
    return np.asarray(ids, dtype=np.int64)


def _numbering(names: Sequence[str]) -> Callable[[str], int | None]:
    """A function from a label to its id; an exact match takes precedence over one that differs in case."""
    exact = {name: number for number, name in enumerate(names)}
    folded = {name.casefold(): number for number, name in enumerate(names)}
    return lambda label: exact.get(label, folded.get(label.casefold()))


def _some_of(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")


def class_weights(
    wanted: Literal["balanced"] | Mapping[str, float] | None, examples: Sequence[TextExample], names: Sequence[str]
) -> Float32Array | None:
    """The weight of each label's loss.

    Raises:
        UsageError: a weight for a label that the task does not have.
    """
    if wanted is None:
        return None
    if wanted == "balanced":
        labels = {example.id: example.label for example in examples}
        each = {key: label if isinstance(label, tuple) else (str(label),) for key, label in labels.items()}
        ids = label_ids([(key, name) for key, own in each.items() for name in own], names)
        count_K = np.bincount(ids, minlength=len(names)).astype(np.float64)
        # A label that never occurs has no loss to weigh.
        weight_K = np.where(count_K > 0, ids.size / (len(names) * np.maximum(count_K, 1)), 1.0)
        return weight_K.astype(np.float32)
    weight_K = np.ones(len(names))
    number_of = _numbering(names)
    for name, weight in wanted.items():
        number = number_of(name)
        if number is None:
            raise UsageError(
                f"text.class_weights.{name}: not one of the task's {len(names)} labels ({_some_of(names)}); give"
                " weights of these"
            )
        weight_K[number] = weight
    return weight_K.astype(np.float32)

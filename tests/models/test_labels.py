"""The names of labels and their order, from both tables of a config.json."""

from __future__ import annotations

import pytest

from bertkit.errors import DataError
from bertkit.models.labels import Labels

LABELS = Labels(("contradiction", "neutral", "entailment"))


def test_label_orders_are_taken_from_names_only() -> None:
    assert LABELS.order_of(("Entailment", "neutral", "contradiction"), source="here") == (2, 1, 0)
    assert Labels(("us", "US", "no")).order_of(("US", "no", "us"), source="here") == (1, 2, 0)
    with pytest.raises(DataError, match="are contradiction, neutral, entailment, not yes, no"):
        LABELS.order_of(("yes", "no"), source="here")
    with pytest.raises(DataError, match=r"does not name the labels.*LABEL_0, LABEL_1, LABEL_2.*order is unknown"):
        Labels.unnamed(3).order_of(LABELS.names, source="here")


def test_labels_are_read_from_either_table() -> None:
    assert Labels.from_hub({"label2id": {"b": 1, "a": 0}}) == Labels(("a", "b"))
    assert Labels.from_hub({"id2label": {"1": "b", "0": "a"}}) == Labels(("a", "b"))
    assert Labels.from_hub({"num_labels": 1, "problem_type": "regression"}) == Labels(("LABEL_0",), "regression")
    assert Labels.from_hub(LABELS.to_hub()) == LABELS

"""Labels of a classifier: their order is found by name."""

from __future__ import annotations

import pytest

from bertkit.errors import DataError
from bertkit.models.labels import Labels

LABELS = Labels(("contradiction", "neutral", "entailment"))


def test_the_order_is_found_by_name_with_and_without_case() -> None:
    assert Labels(("No", "Yes")).order_of(["yes", "no"], source="M") == (1, 0)
    assert Labels(("no", "No")).order_of(["No", "no"], source="M") == (1, 0)


def test_both_tables_of_a_config_number_each_label_once() -> None:
    assert Labels.from_hub({"label2id": {"yes": 1, "no": 0}}).names == ("no", "yes")
    assert Labels.from_hub({"id2label": {"1": "yes", "0": "no"}, "label2id": {}}).names == ("no", "yes")
    for key, table in (("label2id", {"yes": 0, "no": 0}), ("label2id", {"no": 1}), ("id2label", {"0": "a", "00": "b"})):
        with pytest.raises(ValueError, match=f"{key} must number the labels from 0 without gaps"):
            Labels.from_hub({key: table})


def test_a_classifier_with_more_labels_that_differ_in_case_alone_is_refused() -> None:
    with pytest.raises(DataError, match="the classifier's labels are Yes, yes, no, not yes, no"):
        Labels(("Yes", "yes", "no")).order_of(["yes", "no"], source="M")


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

"""Labels of a classifier: their order is found by name."""

from __future__ import annotations

import pytest

from bertkit.errors import DataError
from bertkit.models.labels import Labels


def test_the_order_is_found_by_name_with_and_without_case() -> None:
    assert Labels(("No", "Yes")).order_of(["yes", "no"], source="M") == (1, 0)
    assert Labels(("no", "No")).order_of(["No", "no"], source="M") == (1, 0)


def test_a_classifier_with_more_labels_that_differ_in_case_alone_is_refused() -> None:
    with pytest.raises(DataError, match="the classifier's labels are Yes, yes, no, not yes, no"):
        Labels(("Yes", "yes", "no")).order_of(["yes", "no"], source="M")

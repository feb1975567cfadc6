"""Published compression: every row has its source, names map to methods, and the nearest student is chosen."""

from __future__ import annotations

import pytest

from bertkit.errors import UsageError
from bertkit.tasks.published_compression import COMPRESSIONS, METHODS, method_in, method_named, published_compression


def test_every_row_has_a_source_and_figures_that_can_be() -> None:
    assert len({row.title for row in COMPRESSIONS}) == len(COMPRESSIONS)
    for row in COMPRESSIONS:
        assert row.source
        assert row.against
        assert row.compression > 0
        assert 0.5 < row.retention < 1.1
        assert row.speed_up is None or row.speed_up > 0
    lecture = [row for row in COMPRESSIONS if "lecture" in row.source]
    assert {row.title for row in COMPRESSIONS} - {row.title for row in lecture} == {"TinyBERT, 6 layers"}


def test_a_paper_that_measured_no_speed_has_none() -> None:
    without = {row.method for row in COMPRESSIONS if row.speed_up is None}
    assert without == {"q8bert", "qbert", "theseus"}


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("distilbert", "distilbert"),
        ("DistilBERT-multilingual", "distilbert"),
        ("tinybert-general", "tinybert"),
        ("bert-of-theseus", "theseus"),
        ("pkd-3", "pkd"),
        ("pd", "pd"),
        ("bilstm-soft", "bilstm"),
        ("bert-pkd", "pkd"),
        ("bert-small", None),
        ("magnitude", None),
    ],
)
def test_the_name_of_a_recipe_begins_with_its_method(name: str, method: str | None) -> None:
    assert method_in(name) == method


def test_names_may_be_spelt_in_any_way_and_a_wrong_one_is_refused() -> None:
    assert [method_named(name) for name in ("Q-BERT", "q8bert", "BERT-of-Theseus")] == ["qbert", "q8bert", "theseus"]
    assert all(method_named(name) == name for name in METHODS)
    with pytest.raises(UsageError, match="did you mean mobilebert"):
        method_named("mobilbert")
    with pytest.raises(UsageError, match="one of: distilbert"):
        method_named("xyz")


def test_of_several_rows_the_nearest_student_is_taken() -> None:
    def title(method: str, layers: int | None, width: int | None) -> str:
        return published_compression(method, layers=layers, width=width).title

    assert [title("pkd", layers, 64) for layers in (2, 3, 6, 9)] == [
        *["BERT-PKD, 3 layers"] * 2,
        *["BERT-PKD, 6 layers"] * 2,
    ]
    assert [title("zhao", 12, width) for width in (48, 100, 192)] == [
        *["BERT-48, small vocabulary"] * 2,
        "BERT-192, small vocabulary",
    ]
    assert title("bilstm", None, None) == "BiLSTM-soft"
    assert title("albert", 12, 4096) == "ALBERT xxlarge"

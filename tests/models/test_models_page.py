"""docs/models.md agrees with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.models.oracle import all_cases
from tests.models.test_parameter_counts import SIZES, count

from bertkit.inference.export import onnx_graph
from bertkit.models.registry import FAMILIES
from bertkit.text.sentencepiece import SENTENCEPIECE_FILES

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")


def test_every_family_stands_there_with_its_heads() -> None:
    rows = dict(re.findall(r"^\| `([\w-]+)` \| ([a-z0-9_, ]+) \| `", PAGE, re.MULTILINE))
    heads = {family: ", ".join(config().heads()) for family, config in FAMILIES.items()}
    assert rows == heads, "docs/models.md: one row for each family, with its heads in order"


def test_every_family_has_an_oracle() -> None:
    transformers = pytest.importorskip("transformers")
    (others,) = re.findall(r"except for the rows (.*?)\. The tests", PAGE, re.DOTALL)
    compared = {getattr(transformers, case.config_class).model_type for case in all_cases()}
    assert FAMILIES.keys() - compared == set(re.findall(r"`([\w-]+)`", others)), (
        "write tests/models/cases/FAMILY.py, which names its classes of transformers; if there are none, compare it"
        " with another original in tests/models/families, and name it among the exceptions in docs/models.md"
    )


def test_no_difference_is_larger_than_what_the_tests_hold() -> None:
    differences = re.findall(r"\| (\d\.\de-\d\d)", PAGE)
    assert len(differences) == 3 * len(FAMILIES), (
        "docs/models.md: three differences for each family, printed by `python -m benchmarks.agreement`"
    )
    assert max(map(float, differences)) < 1e-5


def test_families_with_a_graph_are_listed() -> None:
    (listed,) = re.findall(r"It can be written for (.*?)\. The others", PAGE, re.DOTALL)
    assert set(re.findall(r"`([\w-]+)`", listed)) == set(onnx_graph.FAMILIES)


def test_parameters_are_those_that_are_counted() -> None:
    counted = dict(re.findall(r"^\| ([\w-]+) \| [\d.]* \| ([\d,]+) \|", PAGE, re.MULTILINE))
    assert set(counted) == set(SIZES)
    for name, size in SIZES.items():
        pooler = ("pooler",) if size.config.pooler_hub_name is not None else ()
        assert counted[name] == f"{count(size.config, size.vocabulary, pooler):,}", name


def test_tokenizer_files_are_listed() -> None:
    assert all(f"`{name}`" in PAGE for name in SENTENCEPIECE_FILES[:3])

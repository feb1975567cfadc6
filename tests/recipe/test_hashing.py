"""The hash covers everything that decides the result, and nothing else."""

from __future__ import annotations

import pytest
from small_schema import SmallRecipe

from bertkit.recipe.hashing import ABSENT, differing_keys, what_hash

TERMS = [{"masked_lm": {"rate": 0.15}}, {"next_sentence": {}}]


def recipe(**settings: object) -> SmallRecipe:
    return SmallRecipe.model_validate({"name": "x", "objective": TERMS} | settings, strict=False)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "y"},
        {"title": "another title"},
        {"arxiv": "1810.04805"},
        {"engine": {"micro_batch_tokens": 512}},
    ],
)
def test_header_and_engine_stay_out_of_the_hash(change: dict[str, object]) -> None:
    assert what_hash(recipe()) == what_hash(recipe(**change))
    assert differing_keys(recipe(), recipe(**change)) == []


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"seed": 1}, ("seed", 0, 1)),
        ({"sources": ["a"]}, ("sources", ["a.txt"], ["a"])),
        ({"scores": {"f": 0.5}}, ("scores.f", ABSENT, 0.5)),
        ({"model": {"heads": 6}}, ("model.heads", 12, 6)),
        ({"optimisation": {"optimizer": {"name": "adamw", "eps": 1e-8}}}, ("optimisation.optimizer.eps", 1e-6, 1e-8)),
    ],
)
def test_whatever_decides_the_result_changes_the_hash_and_is_named(
    change: dict[str, object], difference: tuple[object, ...]
) -> None:
    assert what_hash(recipe()) != what_hash(recipe(**change))
    assert difference in differing_keys(recipe(), recipe(**change))


def test_the_order_of_objectives_counts_and_is_named() -> None:
    swapped = recipe(objective=TERMS[::-1])
    assert what_hash(recipe()) != what_hash(swapped)
    assert differing_keys(recipe(), swapped)


def test_how_a_number_is_written_does_not_count() -> None:
    assert what_hash(recipe(scores={"f": 1})) == what_hash(recipe(scores={"f": 1.0}))


def test_the_hash_is_the_same_in_every_process_and_version() -> None:
    assert what_hash(SmallRecipe(name="x")) == "f1269f2c2323486474d8f4417069c1278cc50e0202e5f001195c611705187c5c"

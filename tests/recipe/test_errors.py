"""All errors of a recipe are reported at once, each with its position, key, value and remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Discriminator, Tag
from small_schema import Colour, SmallRecipe

from bertkit.errors import UsageError
from bertkit.recipe.errors import validate
from bertkit.recipe.resolve import Override, with_values
from bertkit.recipe.tree import read_tree
from bertkit.settings import Settings


def errors_of(text: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        validate(read_tree(f"name: x\n{text}", "r.yaml"), SmallRecipe)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("sed: 1", "r.yaml:2: sed: unknown key; did you mean seed?"),
        ("seed: one", 'r.yaml:2: seed: expected a whole number, got "one"'),
        ("seed: '1'", 'r.yaml:2: seed: expected a whole number, got "1"; remove the quotes'),
        ("seed: 1.0", "r.yaml:2: seed: expected a whole number, got 1.0; write 1"),
        ("seed: true", "r.yaml:2: seed: expected a whole number, got true"),
        ("arxiv: 1810.04805", "r.yaml:2: arxiv: expected text, got 1810.04805; put it in quotes"),
        ("dynamic: no", 'r.yaml:2: dynamic: expected true or false, got "no"; write false'),
        ("dynamic: 1", "r.yaml:2: dynamic: expected true or false, got 1"),
        ("colour: rde", 'r.yaml:2: colour: unknown value "rde"; did you mean red?'),
        ("sources: a.txt", 'r.yaml:2: sources: expected a list, got "a.txt"; write ["a.txt"]'),
        ("model: 3", "r.yaml:2: model: expected a mapping of keys to values, got 3"),
        ("model: {family: robreta}", 'r.yaml:2: model.family: unknown value "robreta"; did you mean roberta?'),
        ("model: {hidden_size: 10, heads: 3}", "r.yaml:2: model: hidden_size (10) must be a multiple of heads (3)"),
        ("engine: {micro_batch_tokens: 1.5}", "expected a whole number or 'auto', got 1.5"),
        ("optimisation: {steps: 0}", "optimisation.steps: expected a value greater than or equal to 1, got 0"),
        (
            "optimisation:\n  optimizer:\n    name: adam",
            'r.yaml:4: optimisation.optimizer.name: unknown name "adam"; did',
        ),
        ("optimisation: {optimizer: {betas: [1, 2]}}", "optimisation.optimizer: needs the key 'name'"),
        ("optimisation: {optimizer: {name: adamw, betas: [1]}}", "optimisation.optimizer.betas.1: is required"),
        ("optimisation: {optimizer: {name: adamw, trst: 1}}", "trst: unknown key; one of: name, betas, eps"),
        ("objective: [masked_lm: {rat: 1}]", "r.yaml:2: objective.masked_lm.rat: unknown key; did you mean rate?"),
        ("sources: []", "r.yaml:2: sources: expected at least 1 item, got []"),
        ("objective: [mask_lm: {}]", "r.yaml:2: objective.mask_lm: unknown key; did you mean masked_lm?"),
        ("objective: [masked_lm]", 'objective.0: expected a mapping of keys to values, got "masked_lm"'),
    ],
)
def test_an_error_reads_as_its_remedy(text: str, line: str) -> None:
    (only,) = errors_of(text)
    assert line in only


def test_numbers_are_among_the_choices_that_an_error_names() -> None:
    class Bits(Settings):
        bits: Literal[2, 4, "mixed"] = 2

    with pytest.raises(UsageError, match=r"bits: unknown value 5; one of: 2, 4, mixed$"):
        validate(read_tree("bits: 5", "r.yaml"), Bits)


def test_a_mapping_on_the_command_line_without_its_kind_hints_at_dotted_keys() -> None:
    tree = with_values(read_tree("name: x", "r.yaml"), [Override.parse("optimisation.optimizer={betas: [0, 1]}")])
    with pytest.raises(UsageError) as caught:
        validate(tree, SmallRecipe)
    assert str(caught.value).endswith(
        ": optimisation.optimizer: needs the key 'name', the name of its kind; this value replaces the whole mapping:"
        " to change one key of it, write --set 'optimisation.optimizer.betas=[0, 1]'"
    )


def test_a_key_of_a_missing_mapping_is_not_answered_with_itself() -> None:
    tree = with_values(read_tree("name: x", "r.yaml"), [Override.parse("optimisation.optimizer.betas=[0, 1]")])
    with pytest.raises(UsageError, match=r"needs the key 'name', the name of its kind$"):
        validate(tree, SmallRecipe)


def test_an_unknown_key_is_compared_with_the_keys_of_the_chosen_kind_alone() -> None:
    class Layers(Settings):
        layers: int = 2

    class Given(Settings):
        model: str

    def kind(value: object) -> str:
        return "<model>" if isinstance(value, dict) and "model" in value else "<layers>"

    class Student(Settings):
        student: Annotated[Annotated[Layers, Tag("<layers>")] | Annotated[Given, Tag("<model>")], Discriminator(kind)]

    for text, remedy in (("{mdel: x}", "one of: layers"), ("{model: x, layers: 1}", "one of: model")):
        with pytest.raises(UsageError, match=rf"unknown key; {remedy}$"):
            validate(read_tree(f"student: {text}", "r.yaml"), Student)


def test_keys_of_the_variant_that_the_command_line_replaces_come_with_what_removes_them() -> None:
    recipe = read_tree("name: x\noptimisation: {optimizer: {name: adamw, betas: [0, 1]}}", "r.yaml")
    with pytest.raises(UsageError) as caught:
        validate(with_values(recipe, [Override.parse("optimisation.optimizer.name=lamb")]), SmallRecipe)
    remedy = "--set 'optimisation.optimizer={name: lamb}'"
    assert f"betas: unknown key; one of: name, trust; {remedy} removes all keys of the former name" in str(caught.value)
    words = "optimisation.optimizer={name: lamb}"
    assert validate(with_values(recipe, [Override.parse(words)]), SmallRecipe).optimisation.optimizer.name == "lamb"


def test_every_error_is_reported_in_one_go() -> None:
    found = errors_of("sed: 1\nseed: x\nmodel: {family: brt, hiden_size: 3}\noptimisation:\n  peek: 1\n  steps: -1\n")
    assert len(found) == 6
    assert {line.split(": ")[0] for line in found} == {"r.yaml:2", "r.yaml:3", "r.yaml:4", "r.yaml:6", "r.yaml:7"}


def test_a_missing_key_is_named_with_the_mapping_it_misses_from() -> None:
    with pytest.raises(UsageError, match=r"name: is required"):
        validate(read_tree("seed: 1\n", "r.yaml"), SmallRecipe)


def test_long_values_are_cut() -> None:
    (only,) = errors_of(f"seed: {'x' * 500}")
    assert len(only) < 120


def test_json_conversions_are_the_only_ones() -> None:
    text = "name: x\nfolder: a/b\ncolour: blue\nscores: {f: 1}\noptimisation: {optimizer: {name: adamw, betas: [0, 1]}}"
    recipe = validate(read_tree(text, "r.yaml"), SmallRecipe)
    assert recipe.folder == Path("a/b")
    assert recipe.colour is Colour.BLUE
    assert recipe.scores == {"f": 1.0}
    assert recipe.optimisation.optimizer.betas == (0.0, 1.0)

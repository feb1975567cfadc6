"""A setting written by its name alone, or by the name that other libraries give it, is found in the recipe."""

from __future__ import annotations

import pytest

from bertkit.errors import UsageError
from bertkit.finetuning.recipe import FinetuneRecipe
from bertkit.pretraining.recipe import Recipe
from bertkit.recipe.other_names import OTHER_NAMES, keys_named
from bertkit.recipe.resolve import Override, load_any

ORDERS = ("next_sentence", "sentence_order", "sentence_structure")


@pytest.mark.parametrize(
    ("schema", "name", "keys"),
    [
        (Recipe, "steps", ["optimisation.steps"]),
        (Recipe, "weight_decay", ["optimisation.optimizer.weight_decay"]),
        (Recipe, "hidden_size", ["model.hidden_size"]),
        (Recipe, "vocab_size", ["tokenizer.vocab_size"]),
        (Recipe, "told_apart_by", [f"objective.{name}.told_apart_by" for name in ORDERS]),
        (Recipe, "tokenizer", ["tokenizer.path"]),
        (Recipe, "per_device_train_batch_size", ["optimisation.batch_sequences"]),
        (FinetuneRecipe, "num_train_epochs", ["optimisation.epochs"]),
        (FinetuneRecipe, "max_grad_norm", ["optimisation.optimizer.clip_norm"]),
        (FinetuneRecipe, "hidden_size", []),
        (FinetuneRecipe, "", []),
    ],
)
def test_a_name_leads_to_its_key(schema: type[Recipe | FinetuneRecipe], name: str, keys: list[str]) -> None:
    assert keys_named(schema, name) == keys


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_each_name_of_another_library_is_a_setting_here(name: str) -> None:
    assert any(keys_named(schema, name) for schema in (Recipe, FinetuneRecipe))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("steps", "steps: unknown key; did you mean optimisation.steps?"),
        ("engine.batch_size", "engine.batch_size: unknown key; did you mean optimisation.batch_sequences?"),
        ("optimisation.stepz", "optimisation.stepz: unknown key; did you mean steps?"),
    ],
)
def test_an_unknown_key_is_answered_with_the_place_of_the_setting(key: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_any("bert-tiny", [Override(key, 3, f"--set {key}=3")])
    assert str(caught.value).splitlines()[-1].endswith(message)

"""The real schema: objectives by name, a purely descriptive header, and a resolved form that loads back."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertkit.errors import UsageError
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.sentence_relations import NextSentence
from bertkit.pretraining.recipe import load_recipe
from bertkit.recipe.dump import dump_recipe
from bertkit.recipe.hashing import differing_keys, what_hash
from tests.overrides import parsed

TINY = """\
model: {family: bert, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 64}
objective: [masked_lm: {rate: 2e-1}, next_sentence]
optimisation: {}
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(TINY)
    return "tiny"


def test_objectives_come_by_name_in_the_order_written(tiny: str) -> None:
    assert load_recipe(tiny).objectives == (MaskedLM(rate=0.2), NextSentence())
    overridden = load_recipe(
        tiny, parsed(["objective.next_sentence.weight=0.5", "objective.masked_lm.max_predictions=20"])
    )
    assert overridden.objectives == (MaskedLM(rate=0.2, max_predictions=20), NextSentence(weight=0.5))


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ("[]", "objective: needs at least one objective of: backward_lm, bag_of_words, "),
        ("[masked]", "objective.0: unknown key; did you mean masked_lm?"),
        ("[{masked_lm: {}, next_sentence: {}}]", "objective.0: each item of the list is one objective"),
        ("[masked_lm, masked_lm]", "objective: masked_lm is listed twice"),
        ("[masked_lm: {rte: 0.1}]", "objective.masked_lm.rte: unknown key; did you mean rate?"),
        ("[masked_lm: {rate: 1.5}]", "objective.masked_lm.rate: expected a value less than 1, got 1.5"),
    ],
)
def test_a_wrong_objective_is_one_clear_fault(tiny: str, objective: str, message: str) -> None:
    with pytest.raises(UsageError) as fault:
        load_recipe(tiny, parsed([f"objective={objective}"]))
    assert message in str(fault.value)
    assert "the recipe has an error" in str(fault.value)


@pytest.mark.parametrize("name", ["masked_lm", "masked_diffusion", "word_order"])
def test_a_head_that_the_family_lacks_is_told_before_any_text_is_read(tiny: str, name: str) -> None:
    told = rf"objective\.{name}: model\.family 'xlnet' has no head for masked_lm; use another family, such as bert"
    with pytest.raises(UsageError, match=told):
        load_recipe(tiny, parsed(["model={family: xlnet}", f"objective=[{name}]"]))


def test_three_segments_need_as_many_embeddings(tiny: str) -> None:
    changes = ["data.layout.name=reused-segments", "objective=[masked_lm]", "optimisation.batch_sequences=4"]
    with pytest.raises(UsageError, match=r"three segments, .* but model\.type_vocab_size is 2; set it to 3"):
        load_recipe(tiny, parsed(changes))
    for enough in (1, 3):  # a single row is shared by all tokens
        load_recipe(tiny, parsed([*changes, f"model.type_vocab_size={enough}"]))


def test_a_resolved_recipe_loads_to_an_equal_one_of_equal_hash(tiny: str) -> None:
    recipe = load_recipe(tiny, parsed(["optimisation.steps=1e5", "data.sequence_length=64", "engine.workers=0"]))
    Path("recipe.yaml").write_text(dump_recipe(recipe))
    again = load_recipe("recipe.yaml")
    assert again == recipe
    assert again.name == "tiny"
    assert what_hash(again) == what_hash(recipe)


def test_engine_and_header_stay_out_of_the_hash_and_the_rest_is_named(tiny: str) -> None:
    recipe = load_recipe(tiny)
    same = load_recipe(
        tiny, parsed(["engine.device=cpu", "engine.micro_batch_tokens=512", "title=Another", "paper=Someone"])
    )
    other = load_recipe(tiny, parsed(["objective.masked_lm.rate=0.15", "seed=1"]))
    assert what_hash(same) == what_hash(recipe)
    assert differing_keys(recipe, other) == [("objective.masked_lm.rate", 0.2, 0.15), ("seed", 0, 1)]


def test_an_arxiv_id_must_be_quoted_text(tiny: str) -> None:
    with pytest.raises(UsageError, match=r"arxiv: expected text, got 1810\.04805; put it in quotes"):
        load_recipe(tiny, parsed(["arxiv=1810.04805"]))
    assert load_recipe(tiny, parsed(["arxiv='1810.04805'"])).arxiv == "1810.04805"

"""`extends` and `--set` combine as documented; a dumped recipe loads to an equal one; another command's is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_schema import AdamW, Lamb, SmallRecipe
from tests.overrides import parsed

from bertkit.distillation.task_recipe import load_distill_recipe
from bertkit.errors import UsageError
from bertkit.finetuning.recipe import load_finetune_recipe
from bertkit.pretraining.recipe import load_recipe
from bertkit.recipe.dump import dump_recipe
from bertkit.recipe.resolve import Override, load_as, resolve_recipe, with_overrides, with_values
from bertkit.recipe.tree import read_tree

BASE = """\
name: the-base
title: The base
seed: 7
sources: [a.txt, b.txt]
model: {family: bert, hidden_size: 768, heads: 12}
objective:
  - masked_lm: {rate: 0.15}
  - next_sentence: {}
optimisation:
  optimizer: {name: adamw, betas: [0.9, 0.98], eps: 1e-6}
  peak: 1e-4
  steps: 1e6
"""


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(BASE)


def load(text: str, *overrides: str) -> SmallRecipe:
    Path("mine.yaml").write_text(text)
    return load_as(SmallRecipe, "mine", parsed(overrides))


def error_of(text: str, *overrides: str) -> str:
    with pytest.raises(UsageError) as caught:
        load(text, *overrides)
    return str(caught.value)


def test_numbers_written_with_an_exponent_reach_the_settings() -> None:
    recipe = load_as(SmallRecipe, "base")
    assert recipe.optimisation.steps == 1_000_000
    assert recipe.optimisation.peak == 1e-4
    assert recipe.optimisation.optimizer == AdamW(betas=(0.9, 0.98), eps=1e-6)


def test_mappings_merge_and_lists_and_scalars_replace() -> None:
    recipe = load("extends: base\nsources: [c.txt]\nmodel: {family: roberta}\noptimisation: {peak: 2e-4}\n")
    assert recipe.sources == ["c.txt"]
    assert (recipe.model.family, recipe.model.hidden_size) == ("roberta", 768)
    assert (recipe.optimisation.peak, recipe.optimisation.steps) == (2e-4, 1_000_000)


def test_a_list_of_objectives_replaces_the_whole() -> None:
    recipe = load("extends: base\nobjective: [masked_lm: {rate: 0.2}]\n")
    assert [term.masked_lm.rate for term in recipe.objective] == [0.2]


def test_another_variant_by_name_starts_from_its_own_defaults() -> None:
    assert load("extends: base\noptimisation: {optimizer: {name: lamb}}\n").optimisation.optimizer == Lamb()
    same = load("extends: base\noptimisation: {optimizer: {name: adamw, eps: 1e-8}}\n").optimisation.optimizer
    assert same == AdamW(betas=(0.9, 0.98), eps=1e-8)


def test_null_takes_a_value_away() -> None:
    Path("base.yaml").write_text("arxiv: '1810.04805'\n")
    assert load("extends: base\narxiv: null\n").arxiv is None


def test_a_name_is_the_files_own_and_never_inherited() -> None:
    assert load("extends: base\n").name == "mine"
    assert load("extends: base\nname: other\n").name == "other"
    assert load("extends: base\n").title == "The base"


def test_a_chain_of_three_applies_in_order() -> None:
    Path("middle.yaml").write_text("extends: base\nseed: 8\ntitle: Middle\n")
    recipe = load("extends: middle.yaml\nseed: 9\n")
    assert (recipe.seed, recipe.title, recipe.optimisation.peak) == (9, "Middle", 1e-4)


def test_a_circle_of_extends_is_refused_and_shown() -> None:
    Path("a.yaml").write_text("extends: b\n")
    Path("b.yaml").write_text("extends: a\n")
    with pytest.raises(UsageError, match=r"circle: a\.yaml -> b\.yaml -> a\.yaml"):
        load_as(SmallRecipe, "a")


def test_a_missing_base_names_the_file_that_wants_it() -> None:
    assert error_of("extends: bse\n").startswith("mine.yaml: extends: 'bse': no such recipe")
    assert "did you mean 'base'?" in error_of("extends: bse\n")
    assert error_of("seed: 1\nextends: [base]\n").startswith("mine.yaml:2: extends: expected the name of one recipe")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "mine.yaml: a recipe is a mapping of keys to values; this is empty"),
        (b"# nothing\n", "this is empty"),
        (b"- a\n- b\n", "this is a list"),
        (b"just words\n", "this is a str"),
        (b"title: caf\xe9\n", "mine.yaml: not UTF-8 text (byte 10)"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(content: bytes, message: str) -> None:
    Path("mine.yaml").write_bytes(content)
    with pytest.raises(UsageError) as caught:
        load_as(SmallRecipe, "mine")
    assert message in str(caught.value)


def test_a_byte_order_mark_does_no_harm() -> None:
    Path("mine.yaml").write_bytes(b"\xef\xbb\xbfseed: 3\n")
    assert load_as(SmallRecipe, "mine").seed == 3


def test_set_reaches_every_kind_of_place() -> None:
    recipe = load(
        "extends: base\n",
        "objective.masked_lm.rate=0.2",
        "objective.1.next_sentence.weight=2",
        "optimisation.optimizer.betas.1=0.999",
        "optimisation.peak=3e-4",
        "sources=[x.txt, 'y=z.txt']",
        "engine.micro_batch_tokens=4096",
        "scores.new=1",
        "arxiv=",
    )
    assert recipe.objective[0].masked_lm.rate == 0.2
    assert recipe.objective[1].next_sentence.weight == 2.0
    assert recipe.optimisation.optimizer == AdamW(betas=(0.9, 0.999), eps=1e-6)
    assert recipe.optimisation.peak == 3e-4
    assert recipe.sources == ["x.txt", "y=z.txt"]
    assert recipe.engine.micro_batch_tokens == 4096
    assert recipe.scores == {"new": 1.0}
    assert recipe.arxiv is None


@pytest.mark.parametrize("sign", ["|", ">"])
def test_a_sign_that_would_begin_a_block_is_a_value(sign: str) -> None:
    assert Override.parse(f"task.reading.delimiter={sign}").value == sign


def test_a_later_set_wins_and_a_mapping_replaces_the_whole() -> None:
    recipe = load("extends: base\n", "seed=1", "seed=2", "optimisation.optimizer={name: lamb, trust: false}")
    assert recipe.seed == 2
    assert recipe.optimisation.optimizer == Lamb(trust=False)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("objective.maskd_lm.rate=1", "the list objective has no 'maskd_lm'; did you mean masked_lm?"),
        ("objective.2.masked_lm.rate=1", "the list objective has no '2'"),
        ("objective.masked_lm.rat=1", "objective.masked_lm.rat: unknown key; did you mean rate?"),
        ("modle.hidden_size=1", "modle: unknown key; did you mean model?"),
        ("model.hiden_size=1", "model.hiden_size: unknown key; did you mean hidden_size?"),
        ("model.size=1", "model.size: unknown key; did you mean hidden_size?"),
        ("seed=many", 'seed: expected a whole number, got "many"'),
        ("seed.x=1", "seed: expected a whole number"),
        ("seed=[1", "not valid YAML"),
        ("name=*x", "in quotes: --set \"name='...'\""),
        ("seed", "expected KEY=VALUE"),
        ("=1", "expected KEY=VALUE"),
        ("model..heads=1", "expected KEY=VALUE"),
    ],
)
def test_a_wrong_set_is_quoted_with_the_nearest_key(override: str, message: str) -> None:
    error = error_of("extends: base\n", override)
    assert f"--set {override}: " in error
    assert message in error


def test_resolving_keeps_the_line_of_the_file_that_gave_a_value() -> None:
    Path("mine.yaml").write_text("extends: base\n\nmodel: {heads: 5}\n")
    tree = resolve_recipe("mine")
    assert tree.child("seed").place == "base.yaml:3"
    assert tree.child("model").child("heads").place == "mine.yaml:3"
    assert tree.child("model").child("family").place == "base.yaml:5"


def test_overrides_of_a_loaded_recipe_are_those_of_the_file() -> None:
    overrides = ["seed=3", "objective.masked_lm.rate=0.2", "optimisation.optimizer.eps=1e-8"]
    recipe = load_as(SmallRecipe, "base")
    assert with_overrides(recipe, parsed(overrides)) == load_as(SmallRecipe, "base", parsed(overrides))
    assert with_overrides(recipe, []) == recipe
    with pytest.raises(UsageError, match=r"--set sed=3: sed: unknown key; did you mean seed\?"):
        with_overrides(recipe, parsed(["sed=3"]))


def test_a_key_of_thousands_of_parts_is_refused() -> None:
    message = error_of("extends: base\n", f"model.{'a.' * 3000}a=1")
    assert message.endswith("a key of 3,002 parts; recipes have at most 32 levels")


def test_an_error_repeats_a_long_override_in_part() -> None:
    override = f"sed={'3' * 200}"
    with pytest.raises(UsageError) as caught:
        load_as(SmallRecipe, "base", parsed([override]))
    assert f"--set {override[:60]}...: sed: unknown key" in str(caught.value)


TRICKY = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["1e6", "1e-4", "no", "null", "~", "", "0x10", "1_0", "12:30", "- a", "{", "#", " a ", "a: b", "\n", "é"]
    ),
)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=60)
@given(
    title=TRICKY,
    sources=st.lists(TRICKY, min_size=1, max_size=3),
    scores=st.dictionaries(TRICKY, NUMBERS, max_size=3),
    eps=NUMBERS,
)
def test_a_dumped_recipe_loads_to_an_equal_one(
    tmp_path_factory: pytest.TempPathFactory, title: str, sources: list[str], scores: dict[str, float], eps: float
) -> None:
    recipe = SmallRecipe(
        name="x", title=title, sources=sources, scores=scores, optimisation={"optimizer": {"name": "adamw", "eps": eps}}
    )
    path = tmp_path_factory.mktemp("dump") / "recipe.yaml"
    path.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_as(SmallRecipe, str(path)) == recipe
    assert dump_recipe(load_as(SmallRecipe, str(path))) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("run_by", "recipe", "told"),
    [
        (load_recipe, "rte-freelb", "of kind finetune, not pretrain: run it with `bertkit finetune rte-freelb`"),
        (load_recipe, "distilbert", "of kind distill, not pretrain: run it with `bertkit distill distilbert`"),
        (load_finetune_recipe, "bert", "of kind pretrain, not finetune: run it with `bertkit pretrain bert`"),
        (load_distill_recipe, "rte-freelb", "of kind finetune, not distill: run it with `bertkit finetune rte-freelb`"),
    ],
)
def test_a_recipe_of_another_kind_is_refused_with_the_command_that_runs_it(
    run_by: Callable[[str], object], recipe: str, told: str
) -> None:
    with pytest.raises(UsageError) as caught:
        run_by(recipe)
    assert str(caught.value) == f"{recipe} is a recipe {told}"


def test_an_option_is_not_undone_by_a_set_of_its_section() -> None:
    """`--lr 1e-4 --set optimisation.optimizer={name: lamb}`; two --set count in the order in which they are written."""
    tree = read_tree("name: x", "r.yaml")
    section = Override("optimisation", {"steps": 7}, "--set optimisation={steps: 7}")
    option = Override("optimisation.peak", 0.5, "--lr")
    found = with_values(tree, [option, section]).plain()
    assert found["optimisation"] == {"steps": 7, "peak": 0.5}
    earlier = Override("optimisation.peak", 0.5, "--set optimisation.peak=0.5")
    assert with_values(tree, [earlier, section]).plain()["optimisation"] == {"steps": 7}
    same = Override("optimisation.peak", 0.25, "--set optimisation.peak=0.25")
    assert with_values(tree, [option, same]).plain()["optimisation"] == {"peak": 0.25}


def test_an_arm_of_a_study_replaces_a_section_of_its_settings() -> None:
    """`set: {model.hidden_size: 64}` and in an arm `set: {model: {family: elmo}}`, which has no such key."""
    shared = Override("model.hidden_size", 64, "set.model.hidden_size")
    own = Override("model", {"family": "elmo"}, "arms.elmo.set.model")
    assert with_values(read_tree("name: x", "r.yaml"), [shared, own]).plain()["model"] == {"family": "elmo"}

"""Recipes that distil on a task: valid contents, messages about errors, and every shipped recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertkit.distillation.student_settings import GivenModel, NewModel, TeacherLayers
from bertkit.distillation.task_recipe import DistillRecipe, load_distill_recipe, recipe_before, resolved_distillation
from bertkit.errors import UsageError
from bertkit.finetuning.recipe import changed
from bertkit.recipe.dump import dump_recipe
from bertkit.recipe.find import shipped_directory
from bertkit.recipe.hashing import what_hash
from bertkit.recipe.resolve import load_any, shipped_headers
from tests.overrides import parsed

NAMES = [
    header["name"]
    for header in shipped_headers()
    if header["kind"] == "distill" and isinstance(load_any(header["name"]), DistillRecipe)
]
PLAIN = "kind: distill\ntask: rte\nteacher: /t\n"


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_recipe_opens_with_its_paper_and_command(name: str) -> None:
    text = (shipped_directory() / f"{name}.yaml").read_text(encoding="utf-8")
    comment = text[: text.index("\nkind:")]
    recipe = load_distill_recipe(name)
    assert comment.startswith("# ")
    assert f"bertkit distill {name} --teacher" in comment
    assert recipe.title
    assert recipe.paper
    assert recipe.arxiv is not None
    assert recipe.arxiv in comment


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_recipe_is_the_same_after_writing_and_reading(name: str, tmp_path: Path) -> None:
    recipe = changed(load_distill_recipe(name), parsed(["teacher=/t", "task=mrpc"]))
    if isinstance(recipe.student, GivenModel):
        recipe = recipe.model_copy(update={"student": GivenModel(model="/s")})
    if isinstance(recipe.student, TeacherLayers):
        recipe = recipe.model_copy(update={"student": recipe.student.model_copy(update={"of": None})})
    recipe = resolved_distillation(recipe)
    copy = write(tmp_path / "copy.yaml", dump_recipe(recipe))
    assert load_any(copy) == recipe
    assert resolved_distillation(recipe) == recipe
    before = recipe_before(recipe)
    assert (before is None) == (recipe.before is None)
    if before is not None:
        assert what_hash(before) != what_hash(recipe)
        assert not before.labels_weight
        assert before.terms


def test_pkd_has_the_papers_values_on_this_projects_scales() -> None:
    """The code's alpha of 0.7 is 0.7 / 2 for two labels, since the code also divides by the number of classes."""
    six, three = load_distill_recipe("pkd"), load_distill_recipe("pkd-3")
    for recipe in (six, three):
        soft, patience = sorted(recipe.terms, key=lambda term: term.term, reverse=True)
        assert (soft.weight, patience.weight, recipe.labels_weight) == (0.7 / 2, 100.0, 0.3)
        assert recipe.optimisation.epochs == 4
        assert recipe.optimisation.select == "best"  # nli_data_processing.py, find_eval_res_task_subdir
    assert six.student == TeacherLayers(layers="first", of="?")
    assert three.student == TeacherLayers(layers="first", number=3, of="?")


def test_tinybert_learns_from_the_inside_first_at_a_constant_rate() -> None:
    recipe = changed(load_distill_recipe("tinybert-task"), parsed(["before.set.epochs=50"]))
    before = recipe_before(recipe)
    assert before is not None
    assert [term.term for term in before.terms] == ["embeddings", "hidden_states", "attention"]
    assert (before.optimisation.epochs, before.optimisation.schedule.peak) == (50, 5e-5)
    assert (before.optimisation.schedule.name, before.optimisation.schedule.warmup_share) == ("constant", 0.0)
    assert [term.term for term in recipe.terms] == ["soft_targets"]
    assert (recipe.optimisation.epochs, recipe.optimisation.schedule.peak) == (3, 3e-5)
    assert before.augmentation == recipe.augmentation


def test_tinyberts_second_step_keeps_the_best_on_dev() -> None:
    recipe = load_distill_recipe("tinybert-task")
    before = recipe_before(recipe)
    assert before is not None
    found = [(each.optimisation.select, each.optimisation.evaluations_per_epoch) for each in (before, recipe)]
    assert found == [("last", 1), ("best", 20)]


def test_a_section_of_the_run_before_keeps_its_other_settings(tmp_path: Path) -> None:
    text = (
        PLAIN + "distillation: [labels]\noptimisation: {learning_rate: 0.001, epochs: 2}\nbefore: {set: {epochs: 7}}\n"
    )
    recipe = changed(
        load_distill_recipe(write(tmp_path / "r.yaml", text)),
        parsed(["before.set.optimisation.schedule=constant"]),
    )
    before = recipe_before(recipe)
    assert before is not None
    optimisation = before.optimisation
    assert (optimisation.schedule.peak, optimisation.epochs, optimisation.schedule.name) == (0.001, 7, "constant")
    recipe = changed(
        recipe,
        parsed(
            ["optimisation.schedule.warmup_share=0.3", "before={set: {}}", "before.set.optimisation.schedule.peak=2"]
        ),
    )
    before = recipe_before(recipe)
    assert before is not None
    assert (before.optimisation.schedule.peak, before.optimisation.schedule.warmup_share) == (2, 0.3)


def test_a_control_has_the_labels_alone_and_no_run_before_it() -> None:
    recipe = changed(load_distill_recipe("tinybert-task"), parsed(["control=true"]))
    assert recipe.terms == ()
    assert recipe.labels_weight == 1.0
    assert recipe_before(recipe) is None
    assert changed(load_distill_recipe("pkd"), parsed(["control=true"])).labels_weight == 1.0


@pytest.mark.parametrize(
    ("student", "kind"),
    [
        ("{layers: [0, 2]}", TeacherLayers),
        ("{number: 3, form: distilbert}", TeacherLayers),
        ("{model: some/model}", GivenModel),
        ("{config: {family: bert, hidden_size: 24}}", NewModel),
    ],
)
def test_the_keys_say_what_a_student_is(student: str, kind: type, tmp_path: Path) -> None:
    text = f"{PLAIN}student: {student}\ndistillation: [labels]\n"
    assert isinstance(load_distill_recipe(write(tmp_path / "r.yaml", text)).student, kind)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("distillation: [{labels: {weight: 0}}, {soft_targets: {weight: 0}}]", "the weights are all 0"),
        (
            "distillation: [{soft_targets: {temperature: 0}}]",
            "soft_targets.temperature: expected a value greater than 0",
        ),
        ("distillation: [{soft_targets: {temperature: -2.5}}]", "expected a value greater than 0, got -2.5"),
        ("distillation: []", "needs at least one term of: labels, soft_targets"),
        ("distillation: [labels, labels]", "labels is listed twice; a term counts once"),
        ("distillation: [{soft_target: {}}]", "did you mean soft_targets"),
        ("distillation: [{hidden_states: {layers: midle}}]", "distillation.hidden_states.layers: expected 'uniform'"),
        ("distillation: [labels]\nmodel: x", "write student: {model: ...}"),
        (
            "distillation: [labels]\nstudent: {layers: [0, 1], number: 2}",
            "number works only with a named choice of layers",
        ),
        ("distillation: [labels]\nstudent: {number: 0}", "student.number: expected a value greater than or equal to 1"),
        ("distillation: [labels]\nstudent: {config: {family: bert, hiden_size: 3}}", "did you mean hidden_size"),
        (
            "distillation: [labels]\nstudent: {layers: last, nmber: 2}",
            "student.nmber: unknown key; did you mean number",
        ),
        ("distillation: [labels]\nstudent: {config: {family: bert}, depth: 2}", "student.depth: unknown key"),
        ("distillation: [labels]\ntransfer: {file: x.csv}", "transfer: its examples have no labels"),
        ("distillation: [labels]\nteecher: x", "unknown key; did you mean teacher"),
        ("distillation: [labels]\nbefore: {set: {optimisation.epoch: 3}}", "did you mean epochs"),
        ("distillation: [labels]\ntask: [rte, mrpc]", "one task at a time, not on rte, mrpc"),
        ("distillation: [labels]\nmethod: {name: setfit}", "setfit trains on pairs of texts, without a teacher"),
        (
            "distillation: [labels, hidden_states]\nmethod: {name: frozen}",
            "method.name: frozen starts by training the head alone, but distillation.hidden_states compares layers",
        ),
        (
            "distillation: [patience]\nmethod: {name: gradual}",
            "gradual starts by training the head alone, but distillation.patience compares layers",
        ),
        ("distillation: [labels]\nteacher: '?'", "teacher: none is named"),
        ("distillation: [labels]\nstudent: {model: '?'}", "student.model: no model is named"),
    ],
)
def test_a_fault_is_told_with_its_key(lines: str, told: str, tmp_path: Path) -> None:
    keys = [line.partition(":")[0] for line in lines.splitlines()]
    plain = "".join(f"{line}\n" for line in PLAIN.splitlines() if line.partition(":")[0] not in keys)
    with pytest.raises(UsageError) as error:
        resolved_distillation(load_distill_recipe(write(tmp_path / "r.yaml", plain + lines)))
    assert told in str(error.value)
    assert error.value.exit_code == 2


@pytest.mark.parametrize("lines", ["[labels, patience]\nmethod: {name: gradual}", "[patience]\nmethod: {name: lora}"])
def test_layers_may_be_compared_where_a_gradient_reaches_them(lines: str, tmp_path: Path) -> None:
    assert load_distill_recipe(write(tmp_path / "r.yaml", f"{PLAIN}distillation: {lines}\n")).terms

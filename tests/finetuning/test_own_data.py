"""A user's own table from file to result: dev held out or in folds, labels counted, skipped rows listed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bertkit.errors import DataError, StoppedError, UsageError
from bertkit.files import sha256_of
from bertkit.finetuning import own_data
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.data import Preparation, _log_notes, build_task, load_examples, prepare
from bertkit.finetuning.inputs import SplitSettings
from bertkit.finetuning.label_counts import log_label_counts
from bertkit.finetuning.own_data import read_own_split, with_split_hash
from bertkit.finetuning.recipe import CustomTask, FinetuneRecipe
from bertkit.finetuning.run import finetune
from bertkit.finetuning.warm_start import recipe_of
from bertkit.models.families.bert import BertConfig
from bertkit.models.labels import Labels
from bertkit.progress import silent_progress
from bertkit.tasks.examples import Split, TextExample
from bertkit.tasks.readers import Columns, TableReadOptions
from bertkit.training.run import FinishedRun
from tests.overrides import parsed
from tests.tasks.tiny_kinds import write_kind
from tests.tasks.tiny_task import reviews, write_model, write_table
from tests.training.stopping import stopping_at

Bertkit = Callable[..., Any]
COLUMNS = Columns(text="review", label="stars")
SETTINGS = ("lr=6e-3", "epochs=2", "batch=9", "engine.device=cpu", "engine.precision=fp32")
COUNT = 60


class Place:
    """A model and one table."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = write_model(directory / "base")
        self.table = write_table(directory / "reviews.csv", reviews(COUNT, 1))

    def request(self, split: dict[str, Any], **fields: Any) -> FinetuneArguments:
        task = CustomTask(train=str(self.table), split=SplitSettings(**split), columns=COLUMNS)
        given = {"task": task, "model": str(self.model), "runs_root": self.directory / "runs", **fields}
        return FinetuneArguments(overrides=parsed(SETTINGS), **given)

    def run(self, split: dict[str, Any], **fields: Any) -> FinishedRun:
        return finetune(self.request(split, **fields), progress=silent_progress)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
def held_out(place: Place) -> FinishedRun:
    return place.run({"share": 0.2, "seed": 4}, run_dir=place.directory / "held-out")


def predicted(run: Path) -> list[str]:
    return [json.loads(line)["id"] for line in (run / "predictions" / "reviews-dev.jsonl").read_text().splitlines()]


def test_labels_and_repetitions_are_those_of_the_examples_that_are_trained_on(place: Place) -> None:
    """A transfer set takes the place of the training examples and has no labels."""

    class Transferred(Preparation):
        needs_labels = False

        def learnt_from(self, train: Split) -> Split:
            return replace(train, examples=[TextExample("0", "any text")])

    task = CustomTask(train=str(place.table), dev=str(place.table), columns=COLUMNS)
    recipe = place.request({"share": 0.2}, task=task).new_recipe()
    plain, transferred = prepare(recipe), prepare(recipe, preparation=Transferred())
    assert set(plain.label_counts) == {"train", "dev"}
    assert plain.in_train == {"dev": COUNT}
    assert set(transferred.label_counts) == {"dev"}
    assert not transferred.in_train


def test_a_share_of_the_file_is_dev_and_never_learnt_from(place: Place, held_out: FinishedRun) -> None:
    results = held_out.results
    assert results["examples"] == {"train": 48, "dev": 12}
    split = json.loads((held_out.run.path / "split" / "reviews.json").read_text())
    assert sorted([*split["train"], *split["dev"]], key=int) == [str(k) for k in range(COUNT)]
    assert predicted(held_out.run.path) == split["dev"]
    labels = [label for _, label in reviews(COUNT, 1)]
    for part in ("train", "dev"):
        counted = {name: sum(labels[int(k)] == name for k in split[part]) for name in ("bad", "good")}
        assert results["labels"][part] == counted
    assert abs(results["labels"]["dev"]["good"] - labels.count("good") / 5) < 1


def test_what_evaluates_the_run_later_reads_the_same_rows(place: Place, held_out: FinishedRun) -> None:
    recipe = recipe_of(held_out.run.model)
    assert recipe is not None
    assert [each.id for each in load_examples(recipe, "dev").examples] == predicted(held_out.run.path)
    assert isinstance(recipe.task, CustomTask)
    assert recipe.task.split is not None
    assert recipe.task.split.sha256 == sha256_of(place.table)


def test_a_run_records_that_equal_texts_are_together_and_older_runs_split_as_they_did(tmp_path: Path) -> None:
    rows = [(f"text {k % 20}", label) for k, (_, label) in enumerate(reviews(COUNT, 1))]
    table = write_table(tmp_path / "reviews.csv", rows)
    task = CustomTask(train=str(table), split=SplitSettings(share=0.2), columns=COLUMNS)
    recipe = with_split_hash(FinetuneRecipe(name="t", task=task, model="m"))
    assert isinstance(recipe.task, CustomTask)
    assert recipe.task.split is not None
    assert recipe.task.split.duplicates == "together"

    def texts(name: str, split: SplitSettings) -> list[str]:
        changed = task.model_copy(update={"split": split})
        return [str(getattr(each, "text", "")) for each in read_own_split(changed, name, str(table)).examples]

    recorded = recipe.task.split
    earlier = recorded.model_copy(update={"duplicates": None})  # the key did not exist
    assert texts("dev", recorded) == texts("dev", SplitSettings(share=0.2))
    assert not set(texts("dev", recorded)) & set(texts("train", recorded))
    assert set(texts("dev", earlier)) & set(texts("train", earlier))
    assert texts("dev", earlier) == texts("dev", SplitSettings(share=0.2, duplicates="apart"))


def test_duplicates_are_no_setting_where_documents_or_groups_are_split(bertkit: Bertkit, place: Place) -> None:
    words = ["finetune", "--train", place.table, "--split", "0.2", "--text", "review", "--label", "stars", "--plan"]
    words += ["--model", place.model, "--group", "stars", "--set", "task.split.duplicates=apart"]
    refused = bertkit(*words)
    assert refused.code == 2
    assert "task.split.duplicates" in refused.stderr
    assert "with columns.group is split by other units" in refused.stderr


def test_a_stopped_run_goes_on_with_the_same_split(place: Place, held_out: FinishedRun) -> None:
    run = place.directory / "stopped"
    with stopping_at(5), pytest.raises(StoppedError):
        place.run({"share": 0.2, "seed": 4}, run_dir=run)
    outcome = finetune(FinetuneArguments(resume=str(run)), progress=silent_progress)
    weights = "model.safetensors"
    assert sha256_of(outcome.run.model / weights) == sha256_of(held_out.run.model / weights)


def test_a_file_that_changed_since_it_was_split_is_refused(place: Place, tmp_path: Path) -> None:
    table = write_table(tmp_path / "reviews.csv", reviews(COUNT, 1))
    task = CustomTask(train=str(table), split=SplitSettings(share=0.2), columns=COLUMNS)
    run = tmp_path / "run"
    with stopping_at(2), pytest.raises(StoppedError):
        finetune(
            FinetuneArguments(overrides=parsed(SETTINGS), task=task, model=str(place.model), run_dir=run),
            progress=silent_progress,
        )
    write_table(table, reviews(COUNT + 1, 1))
    with pytest.raises(DataError, match=r"reviews.csv: has changed since it was split into train and dev"):
        finetune(FinetuneArguments(resume=str(run)), progress=silent_progress)


def test_every_example_is_dev_in_one_fold(place: Place) -> None:
    outcome = place.run({"folds": 3}, run_dir=place.directory / "folds", seeds=[5])
    runs = outcome.results["runs"]
    assert [each["fold"] for each in runs] == [0, 1, 2]
    assert [Path(each["run"]).name for each in runs] == [f"fold={k}-seed=5" for k in range(3)]
    dev = [set(predicted(Path(each["run"]))) for each in runs]
    assert sorted(int(k) for each in dev for k in each) == list(range(COUNT))
    scores = [each["scores"]["accuracy"] for each in runs]
    summary = outcome.results["tasks"]["reviews"]["accuracy"]
    mean = sum(scores) / 3
    assert summary["mean"] == pytest.approx(mean)
    assert summary["std"] == pytest.approx((sum((each - mean) ** 2 for each in scores) / 2) ** 0.5)
    assert (summary["n"], summary["seeds"]) == (3, scores)
    assert outcome.results["chosen"]["fold"] == scores.index(max(scores))
    recipe = recipe_of(outcome.run.model)
    assert recipe is not None
    own = {each.id for each in load_examples(recipe, "dev").examples}
    assert own == dev[outcome.results["chosen"]["fold"]], "the suite's model is evaluated on its own fold"


@pytest.mark.parametrize(
    ("split", "way"), [({"share": 0.2, "seed": 9}, "held_out"), ({"folds": 3, "seed": 9}, "folds")]
)
def test_a_file_is_split_once_for_train_dev_and_all_folds(
    place: Place, monkeypatch: pytest.MonkeyPatch, split: dict[str, Any], way: str
) -> None:
    calls: list[int] = []
    real = getattr(own_data, way)
    monkeypatch.setattr(own_data, way, lambda *args, **named: calls.append(1) or real(*args, **named))
    dev: list[str] = []
    for fold in range(split.get("folds", 1)):
        settings = SplitSettings(**split, **({"fold": fold} if way == "folds" else {}))
        task = CustomTask(train=str(place.table), split=settings, columns=COLUMNS)
        train, held = (read_own_split(task, name, str(place.table)).examples for name in ("train", "dev"))
        assert not {each.id for each in train} & {each.id for each in held}
        assert len(train) + len(held) == COUNT
        dev += [each.id for each in held]
    assert len(calls) == 1
    assert len(dev) == len(set(dev)) == (COUNT if way == "folds" else COUNT / 5)


def test_folds_and_seeds_and_settings_make_a_run_each(place: Place) -> None:
    from bertkit.finetuning.sweep import sweep_runs

    recipe = place.request({"folds": 2}).requested()
    names = [each.name for each in sweep_runs(recipe, [1, 2], {"lr": ["1e-3", "1e-4"]})]
    assert names == [
        f"lr={lr}-fold={fold}-seed={seed}" for lr in ("1e-3", "1e-4") for fold in (0, 1) for seed in (1, 2)
    ]
    with pytest.raises(UsageError, match=r"--grid task\.split\.fold: a cross-validation has one run per fold"):
        sweep_runs(recipe, [1], {"task.split.fold": ["0", "1"]})
    (one,) = sweep_runs(place.request({"folds": 2, "fold": 1}).requested(), [1], {})
    assert one.name == "seed=1", "a single fold is one run"


def test_the_recipe_of_a_task_with_two_files_keeps_its_hash(place: Place) -> None:
    """Runs of earlier versions have neither `split` nor `reading`."""
    task = CustomTask(train="a.csv", dev="b.csv", columns=COLUMNS)
    known = {"name", "kind", "train", "dev", "test", "columns", "labels", "metrics"}
    assert task.model_dump().keys() == known
    assert task.model_dump()["columns"].keys() == {"text", "text_pair", "label", "endings", "id", "separator"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "give a file to evaluate on .--dev FILE., or split the training file"),
        ({"dev": "d.csv", "split": {"share": 0.1}}, "not both"),
        ({"split": {"share": 0.1, "folds": 3}}, "expected either share"),
        ({"split": {}}, "expected either share"),
        ({"split": {"folds": 3, "fold": 3}}, "expected 0 to 2"),
        ({"dev": "d.csv", "columns": {"group": "author"}}, "only has an effect with --split or --folds"),
    ],
)
def test_what_makes_no_dev_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CustomTask.model_validate({"train": "t.csv", **fields})


def command(place: Place, table: Path, *words: str) -> list[str]:
    given = ["finetune", "--train", str(table), "--text", "review", "--label", "stars", "--model", str(place.model)]
    return [*given, "--lr", "6e-3", "--batch", "9", "--device", "cpu", *words]


def semicolons(path: Path) -> Path:
    """A table as written by a European spreadsheet, with labels missing and a bad row."""
    rows = [f'"{text} \u00e9t\u00e9";{label}' for text, label in reviews(40, 3)]
    rows[3:3] = ["no label;NaN", "none;", "too;many;fields"]
    path.write_bytes("\r\n".join(["review;stars", *rows, ""]).encode("cp1252"))
    return path


def test_the_command_line_reads_a_spreadsheets_export(place: Place, bertkit: Bertkit, tmp_path: Path) -> None:
    table = semicolons(tmp_path / "mine.csv")
    outcome = bertkit(*command(place, table, "--split", "0.2", "--plan"))
    assert outcome.code == 3
    assert "it seems to be Latin-1 (" in outcome.stderr
    words = command(place, table, "--split", "0.2", "--encoding", "cp1252")
    assert "3 fields, expected 2" in bertkit(*words, "--plan").stderr
    words += ["--skip-bad-rows", "--run-dir", str(tmp_path / "run")]
    plan = bertkit(*words, "--plan")
    assert plan.code == 0, plan.stderr
    assert "columns are separated by semicolons, not commas; the file is read accordingly" in plan.stderr
    assert "train skips" in plan.stdout
    assert "2 rows: no label" in plan.stdout
    done = bertkit(*words, "--epochs", "1", "--json")
    assert done.code == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    labels = [label for _, label in reviews(40, 3)]
    assert {name: sum(each[name] for each in results["labels"].values()) for name in ("bad", "good")} == {
        name: labels.count(name) for name in ("bad", "good")
    }
    assert results["notes"]["train"] == {"rows without a label (left out)": 2, "bad rows (left out)": 1}
    listed = (tmp_path / "run" / "skipped" / "mine-train.jsonl").read_text().splitlines()
    assert [json.loads(line)["place"].rpartition(", ")[2] for line in listed] == ["line 7", "line 5", "line 6"]
    assert "mine, train: 2 labels: " in done.stderr
    labelled = bertkit("predict", "--model", tmp_path / "run", table, "--encoding", "cp1252", "--skip-bad-rows")
    found = [json.loads(line) for line in labelled.stdout.splitlines()]
    assert len(found) == 43
    assert [each["prediction"] is None for each in found] == [number == 5 for number in range(43)]
    assert "1 of 43 rows cannot be read; their prediction is null" in labelled.stderr


def test_labels_that_differ_only_in_case_or_spaces_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    log_label_counts("mine", {"train": {"Very good": 3, "bad": 2, "very  good": 1}})
    (warning,) = caplog.messages
    assert warning == "mine: 'Very good', 'very  good' are different classes; if they mean the same, spell them alike"


def test_notes_on_reading_say_whether_the_places_are_all(caplog: pytest.LogCaptureFixture) -> None:
    notes, named = {"duplicate ids (renamed)": 11132, "bad rows": 1}, ("0", "1", "2")
    split = Split([], notes, {"duplicate ids (renamed)": named, "bad rows": ("line 7",)})
    _log_notes("ner", {"train": split})
    assert [each.getMessage() for each in caplog.records] == [
        "ner, train: duplicate ids (renamed): 11,132 (such as 0, 1, 2)",
        "ner, train: bad rows: 1 (line 7)",
    ]


def test_a_class_that_may_be_a_missing_label_is_asked_about(place: Place, bertkit: Bertkit, tmp_path: Path) -> None:
    rows = [(text, "NA" if number % 9 == 0 else label) for number, (text, label) in enumerate(reviews(COUNT, 3))]
    table = write_table(tmp_path / "mine.csv", rows)
    plan = bertkit(*command(place, table, "--split", "0.2", "--plan", "--json"))
    assert "'NA' is treated as a class, with 6 training examples" in plan.stderr
    assert set(json.loads(plan.stdout)["labels"]["train"]) == {"bad", "good", "NA"}
    plan = bertkit(*command(place, table, "--split", "0.2", "--plan", "--json", "--na", "NA"))
    document = json.loads(plan.stdout)
    assert set(document["labels"]["train"]) == {"bad", "good"}
    assert document["skipped"] == {"train": {"no label": 7}}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "--train: give --dev FILE too, .* or --split 0.1 to hold some out, or --folds 5"),
        (["--split", "0.01"], 2, "fewer than its 2 labels"),
        (["--folds", "61"], 2, "has only 59 different texts; use at most that many folds"),
        (["--split", "1.5"], 2, "less than 1"),
        (["--split", "0.1", "--delimiter", ";"], 3, "no ';' in the first line"),
        (["--split", "0.1", "--delimiter", "ab"], 2, "expected one character"),
        (["--split", "0.1", "--encoding", "latin-99"], 2, "is not an encoding that Python knows"),
        (["--split", "0.1", "--group", "author"], 3, "no column 'author'"),
        (["--split", "0.1", "--na", "good"], 3, "only one label, 'bad'"),
    ],
)
def test_what_does_not_fit_is_told(place: Place, bertkit: Bertkit, words: list[str], code: int, message: str) -> None:
    outcome = bertkit(*command(place, place.table, *words, "--plan"))
    assert outcome.code == code, outcome.stderr
    flat = " ".join(outcome.stderr.split())
    assert re.search(message, flat), flat
    assert "Traceback" not in flat


def test_dev_without_a_label_of_train_is_told(place: Place, bertkit: Bertkit, tmp_path: Path) -> None:
    dev = write_table(tmp_path / "dev.csv", [(text, "good") for text, _ in reviews(5, 3)])
    outcome = bertkit(*command(place, place.table, "--dev", str(dev), "--plan"))
    assert outcome.code == 0
    assert "dev: has no example of 'bad', which train has; its scores do not measure it" in " ".join(
        outcome.stderr.split()
    )


def test_a_task_in_yaml_takes_the_same_settings(place: Place, tmp_path: Path) -> None:
    semicolons(tmp_path / "mine.csv")
    task = tmp_path / "mine.yaml"
    task.write_text(
        "train: mine.csv\ncolumns: {text: review, label: stars}\nsplit: {share: 0.2}\n"
        "reading: {encoding: cp1252, skip_bad_rows: true}\n"
    )
    recipe = FinetuneArguments(task=str(task), model=str(place.model)).requested()
    assert isinstance(recipe.task, CustomTask)
    assert recipe.task.reading == TableReadOptions(encoding="cp1252", skip_bad_rows=True)
    assert len(load_examples(recipe, "train").examples) == 32


def test_several_tasks_take_no_folds(place: Place) -> None:
    tasks = [CustomTask(train=str(place.table), split=SplitSettings(folds=2), columns=COLUMNS), "rte"]
    with pytest.raises((UsageError, ValueError), match="folds work with one task"):
        FinetuneArguments(task=tasks, model=str(place.model), overrides=parsed(["seed=1"])).requested()


def test_distillation_takes_the_same_options(place: Place, bertkit: Bertkit, tmp_path: Path) -> None:
    teacher = write_model(tmp_path / "teacher", heads=("sequence_classification",), labels=Labels(("bad", "good")))
    table = semicolons(tmp_path / "mine.csv")
    words = ["distill", "distil-task", "--teacher", str(teacher), "--set", "student={layers: first, number: 1}"]
    words += ["--train", str(table), "--text", "review", "--label", "stars", "--folds", "2", "--device", "cpu"]
    words += ["--encoding", "cp1252", "--skip-bad-rows", "--epochs", "1", "--run-dir", str(tmp_path / "run")]
    done = bertkit(*words, "--json")
    assert done.code == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    runs = [json.loads((Path(each["run"]) / "results.json").read_text()) for each in results["runs"]]
    teachers = [each["teacher"]["splits"]["dev"]["accuracy"] for each in runs]
    assert results["teacher"]["splits"]["dev"]["accuracy"] == pytest.approx(sum(teachers) / 2)
    assert [sum(each["labels"]["dev"].values()) for each in runs] == [20, 20]


def trained_once(place: Place, task: CustomTask, directory: Path, *settings: str) -> dict[str, Any]:
    """The results of a run of one update."""
    overrides = parsed([*SETTINGS, "optimisation.steps=1", *settings])
    request = FinetuneArguments(task=task, model=str(place.model), overrides=overrides, run_dir=directory / "run")
    return finetune(request, progress=silent_progress).results


def test_questions_without_an_answer_may_be_in_dev_alone(place: Place, tmp_path: Path) -> None:
    task, _ = write_kind(tmp_path, "span")
    data = json.loads(Path(task.train).read_text())
    for page in data["data"]:
        page["paragraphs"] = [each for each in page["paragraphs"] if not each["qas"][0]["is_impossible"]]
    Path(task.train).write_text(json.dumps(data))
    found = trained_once(place, task, tmp_path, "span.max_query_tokens=9")
    assert set(found["splits"]["dev"]) == {"f1", "exact_match"}
    assert "null_score_threshold" in found["tuned"]


def test_a_label_of_which_no_example_is_drawn_is_known(place: Place, tmp_path: Path) -> None:
    rows = [*reviews(40, 1), ("the tensor", "rare")]
    files = [write_table(tmp_path / name, rows) for name in ("train.csv", "dev.csv")]
    task = CustomTask(train=str(files[0]), dev=str(files[1]), columns=COLUMNS)
    found = trained_once(place, task, tmp_path, "data.train_examples=9")
    assert set(found["labels"]["train"]) == {"bad", "good"}
    assert set(found["labels"]["dev"]) == {"bad", "good", "rare"}


def test_f1_is_of_the_same_label_in_whatever_order_a_model_has_its_outputs(place: Place, tmp_path: Path) -> None:
    own = CustomTask(train=str(place.table), dev=str(place.table), columns=COLUMNS, metrics=("accuracy", "f1"))
    recipe = FinetuneArguments(task=own, model="m").requested()
    for names in (("bad", "good"), ("good", "bad")):
        task = build_task(recipe, (), names, BertConfig(), {}, tmp_path)
        assert task.metric_options("f1") == {"positive": "good"}


@pytest.mark.parametrize(
    ("recipe", "given", "kind"),
    [
        ("colbert", {}, "embedding"),
        ("conll2003-features", {}, "tagging"),
        ("rte-freelb", {}, "classification"),
        (None, {}, "classification"),
        ("rte-freelb", {"kind": "regression"}, "regression"),
    ],
)
def test_files_have_the_kind_of_the_recipes_task_unless_one_is_given(
    tmp_path: Path, recipe: str | None, given: dict[str, Any], kind: str
) -> None:
    table = write_table(tmp_path / "reviews.csv", reviews(9, 1))
    task = CustomTask(train=str(table), dev=str(table), **given)
    requested = FinetuneArguments(recipe=recipe, task=task, model="m").requested()
    assert [spec.kind for spec in requested.specs] == [kind]

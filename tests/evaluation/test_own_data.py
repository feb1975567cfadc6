"""`bertkit eval RUN --data F`: the scores of a new file are those of its predictions, for every kind of task."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertkit.errors import DataError
from bertkit.evaluation.own_data import read_labelled, with_known_labels
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.inputs import CustomTask
from bertkit.finetuning.recipe import FinetuneRecipe, resolved
from bertkit.finetuning.run import finetune
from bertkit.metrics.classification import Accuracy
from bertkit.metrics.regression import mean_squared_error
from bertkit.metrics.statistics import bootstrap_interval
from bertkit.metrics.tagging import ChunkPrecision, ChunkRecall
from bertkit.progress import silent_progress
from bertkit.tasks.classification import TEMPERATURE
from bertkit.tasks.examples import TextExample
from bertkit.tasks.readers import Columns
from tests.evaluation.test_additional_metrics import script
from tests.overrides import parsed
from tests.tasks.tiny_kinds import DEV, KINDS, write_kind
from tests.tasks.tiny_task import reviews, write_model, write_table

Bertkit = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("own_directory")


class Trained:
    """Fine-tuned runs of each kind, trained on first use."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.base = write_model(directory / "base")
        self._made: dict[str, tuple[Path, Any]] = {}

    def of(self, kind: str) -> tuple[Path, Any]:
        """The run, and its task."""
        if kind not in self._made:
            task, _ = write_kind(self.directory, kind)
            extra = ["span.max_query_tokens=8", "data.max_length=32"] if kind == "span" else []
            request = FinetuneArguments(
                task=task,
                model=str(self.base),
                run_dir=self.directory / f"run-{kind}",
                overrides=parsed(["lr=6e-3", "batch=7", "optimisation.steps=5", "engine.device=cpu", *extra]),
            )
            self._made[kind] = finetune(request, progress=silent_progress).run.path, task
        return self._made[kind]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("own"))


def evaluated(bertkit: Bertkit, run: Path, data: Path, *words: str | Path) -> dict[str, Any]:
    outcome = bertkit("eval", run, "--data", data, "--json", *words)
    assert outcome.code == 0, outcome.stderr
    document: dict[str, Any] = json.loads(outcome.stdout)
    return document


@pytest.mark.parametrize("kind", KINDS)
def test_the_dev_file_has_the_scores_that_fine_tuning_saved(
    trained: Trained, bertkit: Bertkit, kind: str, tmp_path: Path
) -> None:
    """With the thresholds and the temperature stored with the model."""
    run, task = trained.of(kind)
    document = evaluated(bertkit, run, Path(task.dev), "--run-dir", tmp_path / "new")
    results = json.loads((run / "results.json").read_text())
    ours, saved = document["tasks"][kind], results["tasks"][kind]
    assert {name: each["mean"] for name, each in ours.items()} == {
        name: pytest.approx(each["mean"]) for name, each in saved.items()
    }
    assert document["examples"] == DEV
    for name, each in ours.items():
        if each["mean"] is not None and each["interval"] is not None:
            low, high = each["interval"]
            assert low <= each["mean"] <= high, name
    assert any(each["interval"] for each in ours.values())
    assert document["classes"]["data"] == results["classes"]["dev"] if "classes" in results else True
    assert document.get("confusion", {}).get("data") == results.get("confusion", {}).get("dev")
    if TEMPERATURE in results.get("tuned", {}):
        assert document["calibration"]["data"]["ece_at_temperature"] == pytest.approx(
            results["calibration"]["dev"]["ece_at_temperature"]
        )
    rows = (tmp_path / "new" / "predictions" / f"{kind}-data.jsonl").read_text().splitlines()
    kept = (run / "predictions" / f"{kind}-dev.jsonl").read_text().splitlines()
    assert [json.loads(row)["prediction"] for row in rows] == [json.loads(row)["prediction"] for row in kept]


def test_columns_may_have_other_names_and_labels_another_case(
    trained: Trained, bertkit: Bertkit, tmp_path: Path
) -> None:
    run, _ = trained.of("classification")
    rows = reviews(12, 9)
    plain = write_table(tmp_path / "a.csv", rows)
    other = write_table(tmp_path / "b.csv", [(text, label.upper()) for text, label in rows], ("body", "grade"))
    first = evaluated(bertkit, run, plain)
    second = evaluated(bertkit, run, other, "--text", "body", "--label", "grade")
    assert first["tasks"] == second["tasks"]
    shown = bertkit("eval", run, "--data", plain)
    assert "95% interval" in shown.stderr
    assert "by class" in shown.stderr
    assert Path(shown.stdout.strip()).is_dir()


def test_a_finished_evaluation_is_reused_unless_something_changed(
    trained: Trained, bertkit: Bertkit, tmp_path: Path
) -> None:
    source, _ = trained.of("classification")
    run = tmp_path / "run"
    shutil.copytree(source, run)
    plain = write_table(tmp_path / "a.csv", reviews(12, 9))

    def directory(*words: str | Path) -> Path:
        done = bertkit("eval", run, "--data", plain, *words)
        assert done.code == 0, done.stderr
        return Path(done.stdout.strip().splitlines()[-1])

    first = directory()
    assert directory() == first
    assert evaluated(bertkit, run, plain)["tasks"] == json.loads((first / "results.json").read_text())["tasks"]
    assert directory("--fresh") != first
    metric = ("--metric", script(tmp_path / "errors.py"))
    with_metric = directory(*metric)
    assert with_metric != first
    assert directory(*metric) == with_metric
    script(tmp_path / "errors.py", extra="wrong = []")
    assert directory(*metric) != with_metric
    config = json.loads((run / "model" / "config.json").read_text())
    (run / "model" / "config.json").write_text(json.dumps(config | {"layer_norm_eps": 1e-3}))
    changed_config = directory()
    assert changed_config != first
    write_table(plain, reviews(11, 9))
    assert directory() != changed_config


def test_a_file_of_another_form_is_read_as_told_and_bad_rows_are_listed(
    trained: Trained, bertkit: Bertkit, tmp_path: Path
) -> None:
    run, _ = trained.of("classification")
    rows = reviews(11, 9)
    plain = write_table(tmp_path / "a.csv", rows)
    lines = ["review|stars", *(f"{text}|{label}" for text, label in rows)]
    (tmp_path / "b.csv").write_text("\n".join([*lines[:5], "no label here", *lines[5:], "é|?"]), encoding="latin-1")
    options = (
        "--delimiter",
        "|",
        "--encoding",
        "latin-1",
        "--na",
        "?",
        "--skip-bad-rows",
        "--run-dir",
        tmp_path / "run",
    )
    found = evaluated(bertkit, run, tmp_path / "b.csv", *options)
    assert found["tasks"] == evaluated(bertkit, run, plain)["tasks"]
    assert sum(found["skipped"]["data"].values()) == 2
    listed = (tmp_path / "run" / "skipped" / "classification-data.jsonl").read_text().splitlines()
    assert [json.loads(line)["place"].rpartition(" ")[2] for line in listed] == ["6", "14"]
    refused = bertkit("eval", run, "--data", tmp_path / "b.csv", "--delimiter", "|", "--encoding", "latin-1")
    assert refused.code == 3
    assert "--skip-bad-rows" in refused.stderr
    assert bertkit("eval", run, "--data", plain, "--encoding", "no-such").code == 2


def test_what_the_file_lacks_is_told(trained: Trained, bertkit: Bertkit, tmp_path: Path) -> None:
    run, _ = trained.of("classification")
    rows = reviews(4, 9)
    unknown = write_table(tmp_path / "u.csv", [(text, "great") for text, _ in rows])
    texts = write_table(tmp_path / "x.csv", [("a", 30 * "long ")])
    unlabelled = write_table(tmp_path / "l.csv", [(text,) for text, _ in rows], ("review",))
    empty = write_table(tmp_path / "e.csv", [(text, "") for text, _ in rows])
    cases = [
        (3, "labels that", [run, "--data", unknown]),
        (3, "'great' (4 times, first in example 0)", [run, "--data", unknown]),
        (3, f": '{11 * 'long '}long (once, in example 0); it has", [run, "--data", texts]),
        (3, "name their column with --label", [run, "--data", texts]),
        (3, "no column 'stars'; there are: 'review'", [run, "--data", unlabelled]),
        (3, "4 of 4 examples have no label (such as 0)", [run, "--data", empty]),
        (3, "no such file", [run, "--data", tmp_path / "none.csv"]),
        (3, "has no task head", [trained.base, "--data", unknown]),
        (3, "does not exist", [tmp_path / "nowhere", "--data", unknown]),
        (2, "no suite named 'nowhere'", ["nowhere"]),
        (2, "--data", [run]),
    ]
    for code, told, words in cases:
        outcome = bertkit("eval", *words)
        assert outcome.code == code, (words, outcome.stderr)
        assert told in outcome.stderr, outcome.stderr
        assert outcome.stdout == ""
    tags = tmp_path / "t.conll"
    tags.write_text("a B-Q\nb I-Q\n")
    outcome = bertkit("eval", trained.of("tagging")[0], "--data", tags)
    assert outcome.code == 3
    assert "'B-Q' (once, in example" in outcome.stderr


def test_questions_without_an_answer_need_a_model_that_learnt_them(
    trained: Trained, bertkit: Bertkit, tmp_path: Path
) -> None:
    _, task = trained.of("span")
    whole = json.loads(Path(task.train).read_text())
    for article in whole["data"]:
        for paragraph in article["paragraphs"]:
            paragraph["qas"] = [each for each in paragraph["qas"] if not each["is_impossible"]]
    whole["data"] = [each for each in whole["data"] if each["paragraphs"][0]["qas"]]
    answered = tmp_path / "answered.json"
    answered.write_text(json.dumps(whole))
    request = FinetuneArguments(
        task=task.model_copy(update={"train": str(answered), "dev": str(answered)}),
        model=str(trained.base),
        run_dir=tmp_path / "run",
        overrides=parsed(
            ["optimisation.steps=1", "engine.device=cpu", "span.max_query_tokens=8", "data.max_length=32"]
        ),
    )
    plain = finetune(request, progress=silent_progress).run.path
    assert evaluated(bertkit, plain, answered)["tasks"]["span"]["f1"]["interval"] is not None
    refused = bertkit("eval", plain, "--data", task.dev)
    assert refused.code == 3
    assert "questions have no answer, but all questions that the model was trained on have one" in refused.stderr


def test_published_tasks_are_read_as_tables_by_their_usual_columns(tmp_path: Path) -> None:
    recipe = resolved(FinetuneRecipe(name="rte", task="rte", model="m"))
    table = write_table(tmp_path / "a.csv", [("x", "y", "entailment")], ("sentence1", "sentence2", "label"))
    official = tmp_path / "dev.tsv"
    official.write_text("index\tsentence1\tsentence2\tlabel\n0\tx\ty\tentailment\n")
    own = write_table(tmp_path / "b.csv", [("x", "y", "entailment")], ("left", "right", "gold"))
    expected = [TextExample("0", "x", "y", "entailment")]
    assert read_labelled(recipe, table, {}).examples == expected
    assert read_labelled(recipe, official, {}).examples == expected
    named = {"text": "left", "text_pair": "right", "label": "gold"}
    assert read_labelled(recipe, own, named).examples == expected


def test_a_file_without_the_ids_of_training_is_numbered(tmp_path: Path) -> None:
    task = CustomTask(train="t.csv", dev="d.csv", columns=Columns(id="key"))
    recipe = FinetuneRecipe(name="own", task=task, model="m")
    for header, ids in (("key,text,label", ["7"]), ("text,label", ["0"])):
        (tmp_path / "new.csv").write_text(f"{header}\n{'7,' * ('key' in header)}good,yes\n")
        assert [each.id for each in read_labelled(recipe, tmp_path / "new.csv", {}).examples] == ids


def test_intervals_are_percentiles_over_resamples() -> None:
    generator = np.random.default_rng(3)
    gold = generator.integers(2, size=200).tolist()
    guesses = [each if draw < 0.8 else 1 - each for each, draw in zip(gold, generator.random(200), strict=True)]
    interval = bootstrap_interval(guesses, gold, Accuracy())
    assert interval is not None
    accuracy = float(np.mean([a == b for a, b in zip(guesses, gold, strict=True)]))
    error = (accuracy * (1 - accuracy) / 200) ** 0.5  # the normal approximation
    assert interval == (
        pytest.approx(accuracy - 1.96 * error, abs=0.01),
        pytest.approx(accuracy + 1.96 * error, abs=0.01),
    )
    assert interval == bootstrap_interval(guesses, gold, Accuracy())
    by_calls = bootstrap_interval(
        [1.0, 2.0, 4.0], [1.0, 3.0, 3.0], lambda a, b: mean_squared_error(a, b)["mean_squared_error"]
    )
    assert by_calls == (0.0, 1.0)
    assert bootstrap_interval([1.0], [1.0], lambda a, b: None) is None


def test_precision_and_recall_of_chunks_can_be_resampled() -> None:
    predicted = [["B-X", "O", "B-Y"], ["O", "B-X", "O"]]
    gold = [["B-X", "O", "O"], ["B-Y", "B-X", "I-X"]]
    assert ChunkPrecision().score(predicted, gold) == pytest.approx(1 / 3)
    assert ChunkRecall().score(predicted, gold) == pytest.approx(1 / 3)
    assert ChunkRecall().score(predicted[:1], gold[:1]) == 1


def test_labels_of_another_case_are_the_models(trained: Trained) -> None:
    class Task:
        head = "sequence_classification"

        class labels:  # noqa: N801 - stands for an attribute
            names = ("Yes", "no")

    found = with_known_labels([TextExample("0", "a", None, "YES"), TextExample("1", "b", None, "no")], Task, "f", "m")  # type: ignore[arg-type]
    assert [each.label for each in found] == ["Yes", "no"]
    with pytest.raises(DataError, match="'maybe'"):
        with_known_labels([TextExample("0", "a", None, ("no", "maybe"))], Task, "f", "m")  # type: ignore[arg-type]

"""`bertkit eval glue`, `eval TASK`, `eval score` and `eval check`: measurements, submissions, refusals.

One evaluation of a narrow model on generated files of all nine tasks serves most tests; evaluating again reuses its
runs.
"""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.overrides import parsed
from tests.tasks.tiny_glue import TEST_ROWS, small_test_sets, write_glue
from tests.tasks.tiny_task import write_model
from tests.training.stopping import stopping_at

from bertkit.errors import StoppedError
from bertkit.evaluation.glue import AVERAGES, evaluate_glue, glue_tasks
from bertkit.evaluation.plan import TaskEvaluation
from bertkit.evaluation.run import EvalArguments, EvaluationResult
from bertkit.evaluation.score import score_file
from bertkit.evaluation.tasks import evaluate_tasks
from bertkit.tasks.catalogue import GLUE, TASKS, find_task
from bertkit.tasks.readers.find import find_files

Bertkit = Callable[..., Any]
SHORT = ("--max-steps", "1")


class Place:
    """A model and GLUE's folder, next to a folder for runs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.runs = directory / "runs"
        self.model = write_model(directory / "base")
        self.data = write_glue(directory / "glue")

    def evaluation(self, *tasks: str, **fields: Any) -> TaskEvaluation:
        root = fields.pop("runs", self.runs)
        request = EvalArguments(str(fields.pop("model", self.model)), device="cpu", runs_root=root)
        given = {"suite": tasks[0], "data_dir": self.data, "overrides": parsed(("optimisation.max_steps=1",)), **fields}
        return TaskEvaluation(tasks=tuple(find_task(name) for name in tasks), arguments=request, **given)

    @property
    def asked(self) -> tuple[str | Path, ...]:
        """The equivalent command-line arguments."""
        return ("--model", self.model, "--data-dir", self.data, *SHORT)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with pytest.MonkeyPatch.context() as patch:
        small_test_sets(patch)
        made = Place(tmp_path_factory.mktemp("eval"))
        patch.setenv("BERTKIT_RUNS", str(made.runs))
        yield made


@pytest.fixture(scope="module")
def whole(place: Place) -> EvaluationResult:
    """All nine tasks."""
    tasks = [spec.name for spec in glue_tasks()]
    return evaluate_glue(place.evaluation(*tasks, suite="glue", may_lack=True))


def predicted(run: Path, name: str) -> list[Any]:
    lines = (run / "predictions" / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line)["prediction"] for line in lines]


def test_the_document_is_the_contracts_and_its_average_the_papers(
    place: Place, whole: EvaluationResult, bertkit: Bertkit
) -> None:
    outcome = bertkit("eval", "glue", *place.asked, "--json")
    assert outcome.code == 0, outcome.stderr
    document = json.loads(outcome.stdout)
    assert document == json.loads(json.dumps({**document, **whole.document}))
    assert list(document)[:4] == ["suite", "model", "tasks", "average"]
    assert set(document["tasks"]) == {*GLUE, "mnli-mm"}
    means = {task: {name: each["mean"] for name, each in found.items()} for task, found in document["tasks"].items()}
    columns = [
        *(means[task]["accuracy"] for task in ("mnli", "mnli-mm", "qnli", "rte", "sst2")),
        *(means[task]["f1"] for task in ("mrpc", "qqp")),
        means["cola"]["matthews_correlation"],
        means["stsb"]["spearman"],
    ]
    assert document["average"] == pytest.approx(sum(columns) / 9)
    averages = document["averages"]
    assert averages["paper"]["value"] == document["average"]
    assert "wnli" not in averages["paper"]["over"]
    assert "wnli" in averages["server"]["over"]
    assert [len(averages[name]["over"]) for name in AVERAGES] == [9, 9, 8]
    both = (means["mnli"]["accuracy"] + means["mnli-mm"]["accuracy"]) / 2
    others = [means[task]["accuracy"] for task in ("qnli", "rte", "sst2", "wnli")]
    halves = [sum(means[task].values()) / 2 for task in ("mrpc", "qqp", "stsb")]
    server = [both, *others, *halves, means["cola"]["matthews_correlation"]]
    assert averages["server"]["value"] == pytest.approx(sum(server) / 9)
    assert "finished already" in outcome.stderr
    assert re.search(r"mnli-mm +accuracy +dev_mm", outcome.stderr)


def test_the_submission_holds_what_the_models_said_and_passes_the_check(
    whole: EvaluationResult, bertkit: Bertkit
) -> None:
    run = whole.run.path
    archive = run / "submission" / "submission.zip"
    checked = bertkit("eval", "check", archive)
    assert (checked.code, checked.stdout) == (0, f"{archive}: a complete submission of 11 files\n")
    with zipfile.ZipFile(archive) as opened:
        tables = {name: opened.read(name).decode().split("\n") for name in opened.namelist()}
    assert {name.removesuffix(".tsv"): len(table) - 2 for name, table in tables.items()} == TEST_ROWS
    assert {(table[0], table[-1]) for table in tables.values()} == {("index\tprediction", "")}
    said = {"RTE": "rte-test", "MNLI-mm": "mnli-test_mm", "AX": "ax-test", "CoLA": "cola-test"}
    for file, saved in said.items():
        assert tables[f"{file}.tsv"][1:-1] == [f"{i}\t{label}" for i, label in enumerate(predicted(run, saved))]
    scores = [float(row.split("\t")[1]) for row in tables["STS-B.tsv"][1:-1]]
    assert scores == pytest.approx([min(5.0, max(0.0, x)) for x in predicted(run, "stsb-test")], abs=5e-4)


def test_every_fault_of_a_submission_is_told_with_file_and_line(
    whole: EvaluationResult, bertkit: Bertkit, tmp_path: Path
) -> None:
    folder, faulty = whole.run.path / "submission", tmp_path / "faulty.zip"
    with zipfile.ZipFile(faulty, "w") as archive:
        for name in TEST_ROWS:
            text = (folder / f"{name}.tsv").read_text()
            if name == "RTE":
                text = text.replace("\n1\t", "\n1\tnot ", 1)
            if name == "STS-B":
                text = "\n".join(
                    f"{line.split()[0]}\tnan" if line.startswith("2\t") else line for line in text.split("\n")
                )
            if name != "AX":
                archive.writestr(f"{name}.tsv", text)
    outcome = bertkit("eval", "check", faulty)
    assert (outcome.code, outcome.stdout) == (5, "")
    assert [line.split(": ")[0].strip() for line in outcome.stderr.splitlines()[1:]] == [
        "AX.tsv",
        "STS-B.tsv:4",
        "RTE.tsv:3",
    ]
    told = bertkit("eval", "check", faulty, "--json")
    assert told.code == 5
    document = json.loads(told.stdout)
    assert (document["ok"], len(document["faults"])) == (False, 3)


@pytest.mark.parametrize("task", GLUE)
def test_scores_of_the_saved_predictions_are_those_of_the_results(
    place: Place, whole: EvaluationResult, task: str
) -> None:
    found = score_file(
        task, whole.run.path / "predictions" / f"{task}-dev.jsonl", find_files(TASKS[task], "dev", place.data)
    )
    scores = {name: each["mean"] for name, each in found["tasks"][task].items()}
    assert scores == {name: each["mean"] for name, each in whole.results["tasks"][task].items()}


def test_what_is_finished_is_not_repeated_and_a_seed_more_is_one_run(place: Place, whole: EvaluationResult) -> None:
    two = evaluate_glue(place.evaluation("rte", "wnli", suite="glue"))
    assert {task: [each["run"] for each in runs] for task, runs in two.results["runs"].items()} == {
        task: [each["run"] for each in whole.results["runs"][task]] for task in ("rte", "wnli")
    }
    seeds = evaluate_tasks(place.evaluation("rte", seeds=(0, 3)))
    first, second = seeds.results["runs"]["rte"]
    assert first["run"] == whole.results["runs"]["rte"][0]["run"]
    assert second["run"] == str((seeds.run.path / "runs" / "rte-seed=3").resolve())
    summary = seeds.results["tasks"]["rte"]["accuracy"]
    assert summary["seeds"] == [first["scores"]["accuracy"], second["scores"]["accuracy"]]
    assert summary["std"] is not None
    assert sum(each["predicts"] for each in (first, second)) == 1


def test_a_stopped_evaluation_goes_on_where_it_stood(place: Place) -> None:
    settings = {"overrides": parsed(("optimisation.max_steps=2", "batch=7")), "seeds": (1,)}
    wanted = place.evaluation("rte", runs=place.directory / "stopped", **settings)
    with stopping_at(1), pytest.raises(StoppedError, match=r"at step 1 of 2.*give the same command again"):
        evaluate_tasks(wanted)
    resumed = evaluate_tasks(wanted)
    assert len(list(wanted.arguments.runs_root.iterdir())) == 1
    straight = evaluate_tasks(place.evaluation("rte", runs=place.directory / "straight", **settings))
    assert resumed.results["tasks"] == straight.results["tasks"]
    assert predicted(resumed.run.path, "rte-dev") == predicted(straight.run.path, "rte-dev")


def test_tasks_without_data_are_left_out_of_the_suite_and_missed_by_name(
    place: Place, bertkit: Bertkit, tmp_path: Path
) -> None:
    shutil.copytree(place.data / "WNLI", tmp_path / "few" / "WNLI")
    (tmp_path / "few" / "WNLI" / "test.tsv").unlink()
    asked = ("--model", place.model, "--data-dir", tmp_path / "few", *SHORT)
    outcome = bertkit("eval", "glue", *asked, "--json")
    assert outcome.code == 0, outcome.stderr
    document = json.loads(outcome.stdout)
    assert set(document["left_out"]) == set(GLUE) - {"wnli"}
    assert document["submission"]["zip"] is None
    assert document["average"] is None
    assert document["averages"]["server"]["over"] == ["wnli"]
    for told in ("rte is left out", "wnli: test is not predicted", "no submission", "not comparable"):
        assert told in outcome.stderr
    named = bertkit("eval", "glue", "--tasks", "wnli,rte", *asked)
    assert (named.code, named.stdout) == (3, "")
    assert "no train split of rte" in named.stderr
    assert bertkit("eval", "rte", *asked).code == 3
    empty = bertkit("eval", "glue", "--model", place.model, "--data-dir", tmp_path, *SHORT)
    assert empty.code == 3
    assert "no task has its data" in empty.stderr
    assert all(f"  {name}: " in empty.stderr for name in GLUE)


def test_a_fine_tuned_run_is_evaluated_as_it_is(place: Place, whole: EvaluationResult, bertkit: Bertkit) -> None:
    member = Path(whole.results["runs"]["rte"][0]["run"])
    outcome = bertkit("eval", "RTE", "--model", member, "--data-dir", place.data, "--json")
    assert outcome.code == 0, outcome.stderr
    document = json.loads(outcome.stdout)
    assert document["evaluated_as_is"] == ["rte"]
    assert document["tasks"]["rte"]["accuracy"]["mean"] == whole.results["tasks"]["rte"]["accuracy"]["mean"]
    run = Path(document["run"])
    saved = [(path / "predictions" / "rte-dev.jsonl").read_bytes() for path in (run, member)]
    assert saved[0] == saved[1]
    assert not (run / "runs").exists()


def test_published_figures_stand_beside_with_their_split(
    place: Place, whole: EvaluationResult, bertkit: Bertkit
) -> None:
    outcome = bertkit("eval", "glue", *place.asked, "--published", "bert-base", "--json")
    document = json.loads(outcome.stdout)
    test, dev = document["published"]
    assert (test["split"], test["figures"]["rte"], dev["split"]) == ("test", {"accuracy": 0.664}, "dev")
    assert test["averages"] == {"paper": 0.796, "server": 0.783}
    assert "BERT base, test" in outcome.stderr
    assert "66.4" in outcome.stderr
    wrong = bertkit("eval", "glue", *place.asked, "--published", "bert-bse")
    assert (wrong.code, "did you mean bert-base?" in wrong.stderr) == (2, True)


def test_wrong_usage_is_told(place: Place, whole: EvaluationResult, bertkit: Bertkit) -> None:
    cases = [
        (2, "the tasks of GLUE are", ["glue", "--tasks", "squad"]),
        (2, "did you mean mrpc", ["glue", "--tasks", "mrcp"]),
        (2, "--seeds 4-0", ["rte", "--seeds", "4-0"]),
        (2, "--seeds", ["rte", "--seeds", ""]),
        (3, "has no head for classification", ["rte", "--head", "own"]),
        (2, "unknown key", ["rte", "--set", "optimisation.learnin_rate=1"]),
    ]
    for code, told, words in cases:
        outcome = bertkit("eval", *words, *place.asked)
        assert (outcome.code, outcome.stdout) == (code, ""), words
        assert told in outcome.stderr, outcome.stderr
        assert "Traceback" not in outcome.stderr


def test_score_tells_what_predictions_lack(
    place: Place, whole: EvaluationResult, bertkit: Bertkit, tmp_path: Path
) -> None:
    gold = place.data / "RTE" / "dev.tsv"
    lines = (whole.run.path / "predictions" / "rte-dev.jsonl").read_text().splitlines()
    other = json.dumps({"id": "0", "prediction": "entailed"})
    cases = {
        "1 of 12 examples have no prediction (such as 3)": [*lines[:3], *lines[4:]],
        "line 13: example '5' is predicted twice": [*lines, lines[5]],
        "1 predictions match no example (such as 77)": [*lines, json.dumps({"id": "77", "prediction": "entailment"})],
        "did you mean 'entailment'?": [other, *lines[1:]],
        "no field 'prediction'; there are: id": [json.dumps({"id": "0"}), *lines[1:]],
        "contains no predictions": [],
    }
    file = tmp_path / "said.jsonl"
    for told, content in cases.items():
        file.write_text("".join(f"{line}\n" for line in content))
        outcome = bertkit("eval", "score", "rte", "--predictions", file, "--gold", gold)
        assert (outcome.code, outcome.stdout) == (3, "")
        assert told in outcome.stderr, outcome.stderr
    unlabelled = bertkit(
        *("eval", "score", "rte", "--predictions", file, "--gold", place.data / "RTE" / "test.tsv", "--split", "test")
    )
    assert unlabelled.code == 3
    assert "has no labels" in unlabelled.stderr
    scores = (whole.run.path / "predictions" / "stsb-dev.jsonl").read_text().splitlines()
    file.write_text("\n".join(['{"id": "0", "prediction": NaN}', *scores[1:]]))
    outcome = bertkit("eval", "score", "stsb", "--predictions", file, "--gold", place.data / "STS-B" / "dev.tsv")
    assert outcome.code == 3
    assert "line 1: score nan, expected a finite number" in outcome.stderr


def test_score_reads_the_form_of_the_server(
    place: Place, whole: EvaluationResult, bertkit: Bertkit, tmp_path: Path
) -> None:
    said = predicted(whole.run.path, "rte-dev")
    file = tmp_path / "RTE.tsv"
    file.write_text("index\tprediction\n" + "".join(f"{i}\t{label}\n" for i, label in enumerate(said)))
    gold = place.data / "RTE" / "dev.tsv"
    outcome = bertkit("eval", "score", "rte", "--predictions", file, "--gold", gold, "--json")
    document = json.loads(outcome.stdout)
    assert document["average"] == whole.results["tasks"]["rte"]["accuracy"]["mean"]
    assert bertkit("eval", "score", "rte", "--predictions", file, "--gold", gold).stdout.startswith("rte  accuracy  0.")


def test_the_help_lists_every_task_with_the_catalogues_title(bertkit: Bertkit) -> None:
    shown = " ".join(bertkit("eval", "--help").stdout.replace("│", " ").split())
    for name, task in TASKS.items():
        assert (f" {name} {task.title}" in shown) == (name != "ax")
    assert "--head" in bertkit("eval", "sst-2", "--help").stdout

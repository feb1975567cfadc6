"""`bertkit eval speed`: tables on stderr, one document on stdout, and errors with a remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.probing.tiny_models import BERT, save_tiny, tiny_model, tiny_tokenizer, write_run

from bertkit.models.families.bert import BertConfig

QUICK = ("--batch-sizes", "2", "--lengths", "5,64", "--rounds", "1", "--threads", "1")


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models, one of which reads at most 64 tokens."""
    monkeypatch.chdir(tmp_path)
    tokenizer = tiny_tokenizer()
    save_tiny(tiny_model(tokenizer, BertConfig(**BERT | {"max_position_embeddings": 64})), tokenizer, Path("large"))
    save_tiny(tiny_model(tokenizer), tokenizer, Path("small"))


def test_the_json_document_is_the_contracts(bertkit) -> None:
    outcome = bertkit("eval", "speed", "--model", "large", "--model", "small", *QUICK, "--json")
    assert outcome.code == 0
    document = json.loads(outcome.stdout)
    assert {"suite", "model", "tasks", "average", "run", "threads", "compression", "pareto"} <= set(document)
    assert (document["suite"], document["model"], document["average"]) == ("speed", "large", None)
    assert list(document["tasks"]) == ["large", "small"]
    figure = document["tasks"]["small"]["ms_per_sentence/batch=2/length=5"]
    assert figure["mean"] == figure["seeds"][0] > 0
    assert document["tasks"]["large"]["speed_up/batch=2/length=64"]["mean"] == 1
    assert document["threads"] == 1
    assert document["pareto"]["against"] == "parameters"


def test_for_a_checkpoint_the_run_is_named(bertkit) -> None:
    write_run(Path("trained"), [5])
    outcome = bertkit("eval", "speed", "--model", "trained@5", *QUICK)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "--model trained@5: a checkpoint is the state of training" in outcome.stderr
    assert "give the run: --model trained\n" in outcome.stderr
    assert bertkit("eval", "speed", "--model", "trained", *QUICK).code == 0


def test_for_people_the_tables_are_on_stderr(bertkit) -> None:
    outcome = bertkit(
        *("eval", "speed", "--model", "large", "--model", "small", "--method", "small=tinybert"),
        *(*QUICK, "--run-dir", "here"),
    )
    assert (outcome.code, outcome.stdout) == (0, "here\n")
    for told in (
        "without embeddings",
        "reads at most 60 tokens",
        "1 thread of",
        "TinyBERT, 4 layers: overview of a lecture",
    ):
        assert told in outcome.stderr
    assert (Path("here") / "figures" / "pareto.svg").is_file()
    (row,) = (line.split() for line in outcome.stderr.splitlines() if line.startswith("small") and "TinyBERT" in line)
    assert row[-5:] == ["7.50", "96.0", "9.40", "BERT", "base"]
    assert row[4] == "-"  # it cannot read 64 tokens, which the table reports


def test_a_figure_of_scores_needs_scores(bertkit) -> None:
    outcome = bertkit("eval", "speed", "--model", "large", "--model", "small", *QUICK, "--against", "score")
    assert (outcome.code, "--against score: the models have no score on a common task" in outcome.stderr) == (2, True)


def test_one_model_is_enough_for_its_own_figures(bertkit) -> None:
    one = ("eval", "speed", "--model", "small", *QUICK[:2], "--lengths", "5", *QUICK[4:], "--clock", "processor")
    outcome = bertkit(*one)
    assert outcome.code == 0
    assert "processor time" in outcome.stderr
    assert "compression of" not in outcome.stderr
    results = json.loads((Path(outcome.stdout.strip()) / "results.json").read_text())
    assert [row["label"] for row in results["compression"]] == ["small"]


def test_faults_end_with_their_exit_codes(bertkit) -> None:
    cases = [
        (2, "Missing option '--model'", []),
        (3, "./nowhere: does not exist", ["--model", "small", "--model", "./nowhere"]),
        (2, "small is given twice", ["--model", "small", "--model", "small"]),
        (2, '--lengths: expected a whole number, got "many"', ["--model", "small", "--lengths", "32,many"]),
        (
            2,
            "--batch-sizes: expected a value greater than or equal to 1",
            ["--model", "small", "--batch-sizes", "0"],
        ),
        (2, "--threads", ["--model", "small", "--threads", "0"]),
        (2, "--method large=pkd: expected MODEL=METHOD", ["--model", "small", "--method", "large=pkd"]),
        (2, "give --threads 1 --device cpu", ["--model", "small", "--clock", "processor", "--threads", "2"]),
        (3, "no such run", ["--model", "small", "--results", "nowhere"]),
    ]
    for code, told, arguments in cases:
        outcome = bertkit("eval", "speed", *arguments)
        assert (outcome.code, outcome.stdout) == (code, ""), arguments
        assert told in outcome.stderr
        assert "Traceback" not in outcome.stderr
    assert not Path("runs").exists()  # an error leaves no run behind

"""`bertkit eval`: one JSON document or a run directory on stdout, the table on stderr, errors with their exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.probing.tiny_models import save_tiny, tiny_model, tiny_tokenizer

from bertkit.cli import eval_data
from bertkit.cli.eval import SUITES
from bertkit.cli.eval_suites import shown


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model and three minimal pairs."""
    monkeypatch.chdir(tmp_path)
    save_tiny(tiny_model(tiny_tokenizer()), tiny_tokenizer(), tmp_path / "model")
    rows = [("The reader tests.", "The reader test."), ("A file is.", "A file are."), ("The file", "The file")]
    lines = [json.dumps({"sentence_good": good, "sentence_bad": bad}) for good, bad in rows]
    Path("mine.jsonl").write_text("\n".join(lines))


def test_the_json_document_is_the_contracts(bertkit) -> None:
    outcome = bertkit("eval", "blimp", "--model", "model", "--data-dir", "mine.jsonl", "--json")
    assert outcome.code == 0
    document = json.loads(outcome.stdout)
    assert set(document) == {"suite", "model", "tasks", "average", "run"}
    assert (document["suite"], document["model"]) == ("blimp", "model")
    assert (Path(document["run"]) / "results.json").is_file()
    (task,) = document["tasks"].values()
    assert set(task) == {"accuracy", "accuracy_per_token", "accuracy_per_word"}
    figure = task["accuracy"]
    assert figure == {"mean": document["average"], "std": None, "seeds": [document["average"]]}
    assert 0.5 / 3 <= document["average"] <= 2.5 / 3


def test_for_people_stdout_ends_with_the_run_and_the_table_is_on_stderr(bertkit) -> None:
    outcome = bertkit("eval", "blimp", "--model", "model", "--data-dir", "mine.jsonl", "--run-dir", "here")
    assert (outcome.code, outcome.stdout) == (0, "here\n")
    assert (Path("here") / "results.json").is_file()
    for told in ("mine ", "mean of paradigms", "constant logits", "1 tie, counted half (1 of identical sentences)"):
        assert told in outcome.stderr


def test_the_model_may_come_from_the_environment(bertkit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERTKIT_MODEL", "model")
    outcome = bertkit(
        "eval", "blimp", "--data-dir", "mine.jsonl", "--rule", "within_word_l2r", "--pairs", "2", "--json"
    )
    assert json.loads(outcome.stdout)["model"] == "model"


def test_faults_end_with_their_exit_codes(bertkit) -> None:
    save_tiny(tiny_model(tiny_tokenizer(), heads=("pooler",)), tiny_tokenizer(), Path("headless"))
    Path("broken.jsonl").write_text('{"sentence_good": "A"')
    cases = [
        (
            3,
            "no masked_lm, causal_lm or permutation_lm head",
            ["blimp", "--model", "headless", "--data-dir", "mine.jsonl"],
        ),
        (3, "broken.jsonl, line 1", ["blimp", "--model", "model", "--data-dir", "broken.jsonl"]),
        (3, "give --data-dir DIR", ["blimp", "--model", "model"]),
        (3, "./nowhere: does not exist", ["blimp", "--model", "./nowhere", "--data-dir", "mine.jsonl"]),
        (2, "matches 'syntax'", ["blimp", "--model", "model", "--data-dir", "mine.jsonl", "--only", "syntax"]),
        (2, "--rule", ["blimp", "--model", "model", "--data-dir", "mine.jsonl", "--rule", "best"]),
        (2, "blimpp", ["blimpp", "--model", "model"]),
    ]
    for code, told, arguments in cases:
        outcome = bertkit("eval", *arguments)
        assert (outcome.code, outcome.stdout) == (code, ""), arguments
        assert told in outcome.stderr
        assert "Traceback" not in outcome.stderr


def test_mlm_takes_many_sources_and_prints_its_document(bertkit) -> None:
    for name in ("one", "two"):
        Path(f"{name}.txt").write_text("The reader tests the document and the number of the file.\n\n" * 3)
    arguments = ("eval", "mlm", "--model", "model", "--data", "one.txt", "two.txt", "--sequences", "4")
    document = json.loads(bertkit(*arguments, "--json").stdout)
    assert (document["suite"], set(document["tasks"])) == ("mlm", {"mlm"})
    figures = document["tasks"]["mlm"]
    assert set(figures) == {"accuracy", "perplexity", "constant_accuracy", "pseudo_perplexity"}
    assert figures["perplexity"]["mean"] > 1
    told = bertkit(*arguments).stderr
    assert "pseudo_perplexity" in told
    assert "\nwindows: 4 of at most " in told
    without = bertkit("eval", "mlm", "--model", "model")
    assert (without.code, without.stdout) == (2, "")
    assert "give --data SOURCE" in without.stderr


@pytest.mark.parametrize(
    ("figure", "text"), [(299_100.0, "299,100"), (12, "12"), (2837.42, "2,837.4"), (3.49461, "3.4946"), (None, "–")]
)
def test_a_count_is_shown_with_all_its_digits(figure: float | None, text: str) -> None:
    assert shown(figure) == text


def test_every_suite_has_help(bertkit) -> None:
    shown = bertkit("eval", "--help").stdout
    for suite in SUITES:
        assert suite in shown
        outcome = bertkit("eval", suite, "--help")
        assert outcome.code == 0
        assert "--model" in outcome.stdout


def test_a_table_of_many_classes_says_how_many_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    classes = {f"c{number}": {"count": 1, **dict.fromkeys(("precision", "recall", "f1"), 1.0)} for number in range(21)}
    eval_data._print({"tasks": {}, "data": "d", "examples": 21, "confidence": 0.95, "classes": {"t": classes}})
    assert "by class (the 20 most common of 21)" in capsys.readouterr().err

"""An evaluation of several models: a run each, and one with the tables and figures of all."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from bertkit.evaluation.several import Curve, draw_curve
from tests.probing.tiny_models import save_tiny, tiny_causal_model, tiny_model, tiny_tokenizer, write_run

TEXT = "The reader tests a document.\nThe numbers walked to the building.\n\nA value!\n"
PAIRS = (("binding", "The reader tests.", "The reader test."), ("islands", "A file is.", "A file are."))


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bertkit.run.figure_files.save", lambda figure, stem: [])
    write_run(tmp_path / "trained", [5, 20])
    Path("text.txt").write_text(TEXT)
    rows = [{"sentence_good": a, "sentence_bad": b, "linguistics_term": term} for term, a, b in PAIRS]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_tables_are_those_of_each_model_with_its_training(bertkit: Callable[..., Any]) -> None:
    command = ("eval", "surprisal", "--model", "trained@all", "--data", "text.txt", "--json")
    document = json.loads(bertkit(*command).stdout)
    models = document["models"]
    assert [(each["model"], each["step"], each["tokens"]) for each in models] == [
        ("trained@5", 5, 50),
        ("trained@20", 20, 200),
    ]
    for each in models:
        own = json.loads((Path(each["run"]) / "results.json").read_text())
        assert document["tasks"][each["name"]] == own["tasks"]["surprisal"]
        assert each["average"] == own["average"]
    together = rows(Path(document["run"]) / "tables" / "words.csv")
    apart = [(each, row) for each in models for row in rows(Path(each["run"]) / "tables" / "words.csv")]
    front = [(each["model"], str(each["step"]), str(each["tokens"])) for each, _ in apart]
    assert [(row.pop("model"), row.pop("step"), row.pop("training_tokens")) for row in together] == front
    assert together == [row for _, row in apart]
    again = bertkit(*command)
    assert json.loads(again.stdout) == document
    assert again.stderr.count("finished already") == 3
    (alone,) = json.loads(bertkit(*command[:3], "trained@5", *command[4:]).stdout)["tasks"]
    assert alone == "surprisal", "the document of one model is that of the suite"


def test_minimal_pairs_have_a_row_for_each_model_and_phenomenon(bertkit: Callable[..., Any]) -> None:
    save_tiny(tiny_causal_model(tiny_tokenizer()), tiny_tokenizer(), Path("causal"))
    command = ("eval", "blimp", "--model", "trained@all", "--model", "causal", "--data-dir", "pairs.jsonl")
    outcome = bertkit(*command, "--run-dir", "all")
    assert (outcome.code, outcome.stdout) == (0, "all\n")
    results = json.loads(Path("all/results.json").read_text())
    expected = []
    for each in results["models"]:
        own = json.loads((Path(each["run"]) / "results.json").read_text())
        figures = {key: found["mean"] for key, found in results["tasks"][each["name"]].items()}
        assert figures == own["averages"] | {"standard_error": own["standard_error"]}
        expected += [(each["model"], term, found["accuracy"]) for term, found in own["by_linguistics_term"].items()]
    found = rows(Path("all/tables/phenomena.csv"))
    assert [(row["model"], row["phenomenon"], float(row["accuracy"])) for row in found] == expected
    assert {row["model"] for row in found} == {"trained@5", "trained@20", "causal"}
    assert len(rows(Path("all/tables/paradigms.csv"))) == 3
    first, last = (results["models"][place]["run"] for place in (0, -1))
    assert f"`bertkit runs diff {first} {last}`" in outcome.stderr
    assert "\n2 pairs, accuracy: same " in bertkit("runs", "diff", first, last).stderr


def test_axes_of_a_text_are_named_by_their_figures(
    bertkit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr("bertkit.run.figure_files.save", lambda figure, stem: drawn.append(figure))
    bertkit("eval", "mlm", "--model", "trained@all", "--data", "text.txt")
    named = [axes.get_ylabel() for axes in drawn[-1].axes]
    assert named[:3] == ["accuracy", "perplexity", "pseudo perplexity"]


def test_figures_that_cannot_be_compared_are_named(bertkit: Callable[..., Any]) -> None:
    byte_bpe = tiny_tokenizer("byte-bpe", 300)
    save_tiny(tiny_causal_model(byte_bpe), byte_bpe, Path("causal"))
    save_tiny(tiny_model(byte_bpe), byte_bpe, Path("masked"))
    command = ("eval", "surprisal", "--data", "text.txt", "--json")
    both = json.loads(bertkit(*command, "--model", "trained", "--model", "causal").stdout)["warnings"]
    assert [told.partition(",")[0] for told in both] == [
        "the models are read by different rules (original",
        "the models' tokenizers differ",
    ]
    (told,) = json.loads(bertkit(*command, "--model", "trained", "--model", "masked").stdout)["warnings"]
    assert told.endswith("so pseudo_perplexity cannot be compared; compare bits_per_word")
    assert json.loads(bertkit(*command, "--model", "trained@all").stdout)["warnings"] == []


def test_a_model_given_twice_is_refused(bertkit: Callable[..., Any]) -> None:
    outcome = bertkit("eval", "mlm", "--model", "trained@all", "--model", "trained@5", "--data", "text.txt")
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "--model trained@5 is given twice" in outcome.stderr


def test_curves_are_over_words_if_they_were_counted() -> None:
    table = {
        "model": ["run@20", "run@1k"],
        "step": [20, 5],
        "words": [3000, 1000],
        "layer": [0, 0],
        "score": [0.3, 0.1],
    }
    axes = draw_curve(Curve("layers", "score", "score"), table).axes[0]
    assert axes.get_xlabel() == "words read"
    assert [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in axes.lines] == [
        ([1000, 3000], [0.1, 0.3])
    ]
    assert [line.get_linestyle() for line in axes.lines] == ["-"]
    axes = draw_curve(Curve("layers", "score", "score"), table | {"words": [None, 1000]}).axes[0]
    assert axes.get_xlabel() == "training steps"


def test_models_that_are_not_of_one_run_are_not_joined_by_a_line() -> None:
    table = {"model": ["run@20", "other"], "step": [20, 5], "layer": [0, 0], "score": [0.3, 0.1]}
    axes = draw_curve(Curve("layers", "score", "score"), table).axes[0]
    assert axes.get_xlabel() == "model"
    assert [line.get_linestyle() for line in axes.lines] == ["None"]

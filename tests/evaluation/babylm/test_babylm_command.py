"""`bertkit eval babylm`: the contract's document on stdout, missing tasks on stderr, errors with their exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.evaluation.babylm.babylm_files import write_evaluation_data
from tests.probing.tiny_models import save_tiny, tiny_model, tiny_tokenizer


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny(tiny_model(tiny_tokenizer()), tiny_tokenizer(), tmp_path / "model")
    write_evaluation_data(tmp_path / "evaluation_data")


def test_the_document_and_the_table_say_what_is_lacking(bertkit) -> None:
    chosen = ("--only", "blimp", "--only", "ewok", "--only", "wug_adj")
    outcome = bertkit("eval", "babylm", "--model", "model", "--data-dir", "evaluation_data", *chosen, "--json")
    assert outcome.code == 0, outcome.stderr
    document = json.loads(outcome.stdout)
    assert (document["suite"], document["model"], document["average"]) == ("babylm", "model", None)
    assert set(document["tasks"]) == {"blimp", "wug_adj"}
    figure = document["tasks"]["blimp"]["accuracy"]
    assert figure["seeds"] == [figure["mean"]]
    assert figure["interval"][0] <= figure["mean"] <= figure["interval"][1]
    assert document["averages"]["accuracy"]["over"] == ["blimp"]
    assert not document["submission"]["complete"]
    for told in (
        "ewok is left out: no ewok_filtered",
        "the mean is without blimp_supplement, ewok",
        "1 of 5 tasks",
        "71.29",  # of a baseline that is read like the model
    ):
        assert told in outcome.stderr


def test_mistakes_end_with_their_codes(bertkit) -> None:
    for code, told, arguments in [
        (3, "give --data-dir DIR", []),
        (3, "contains none of the full evaluation's files", ["--data-dir", "model"]),
        (3, "no such directory", ["--data-dir", "nowhere"]),
        (2, "--only", ["--data-dir", "evaluation_data", "--only", "glue"]),
        (2, "--items", ["--data-dir", "evaluation_data", "--items", "0"]),
    ]:
        outcome = bertkit("eval", "babylm", "--model", "model", *arguments)
        assert outcome.code == code
        assert told in outcome.stderr

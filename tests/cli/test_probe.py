"""`bertkit probe`: one JSON document or a run directory on stdout, findings on stderr, errors with exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from tests.probing.request import write_sentences
from tests.probing.tiny_models import save_tiny, tiny_model, tiny_tokenizer

from bertkit.cli.probe import KINDS


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model and a text."""
    monkeypatch.chdir(tmp_path)
    save_tiny(tiny_model(tiny_tokenizer()), tiny_tokenizer(), tmp_path / "tiny")
    write_sentences(tmp_path / "text.txt")


def test_the_json_document_is_the_contracts(bertkit) -> None:
    arguments = ("--model", "tiny", "--data", "text.txt", "--sentences", "40")
    for kind in ("contextuality", "similarity"):
        outcome = bertkit("probe", kind, *arguments, "--json", "-q")
        assert outcome.code == 0, outcome.stderr
        document = json.loads(outcome.stdout)
        assert list(document) == ["kind", "model", "run", "summary", "definitions"]
        assert (document["kind"], document["model"]) == (kind, "tiny")
        assert (Path(document["run"]) / "results.json").is_file()


def test_for_people_stdout_is_the_run_and_sentences_are_on_stderr(bertkit) -> None:
    outcome = bertkit(
        "probe", "contextuality", "--model", "tiny", "--data", "text.txt", "--run-dir", "here", "--word", "the"
    )
    assert (outcome.code, outcome.stdout) == (0, "here\n")
    for told in ("The self-similarity of a word in tiny", "A static vector explains", "n = 1 word,"):
        assert told in outcome.stderr
    assert (Path("here") / "summary.txt").read_text().splitlines()[0] in outcome.stderr


def test_points_are_lines_or_json_and_no_run(bertkit) -> None:
    lines = bertkit("probe", "points", "--model", "tiny").stdout.splitlines()
    assert lines[0].split()[:4] == ["hook_embed", "T", "x", "D"]
    document = json.loads(bertkit("probe", "points", "--model", "tiny", "--json").stdout)
    assert (document["kind"], document["run"]) == ("points", None)
    assert [each["name"] for each in document["summary"]["points"]] == [line.split()[0] for line in lines]
    assert not Path("runs").exists()


def test_faults_end_with_their_exit_codes(bertkit) -> None:
    text = ["--data", "text.txt"]
    cases = [
        (2, "did you mean `bertkit probe contextuality`?", ["contextuallity", "--model", "tiny"]),
        (2, "give --data SOURCE", ["contextuality", "--model", "tiny"]),
        (2, "this probe takes one model", ["points", "--model", "tiny", "--model", "./tiny"]),
        (3, "./nowhere: does not exist", ["similarity", "--model", "./nowhere", *text]),
        (3, "--word zebra: does not occur", ["contextuality", "--model", "tiny", *text, "--word", "zebra"]),
        (3, "nothing.txt", ["contextuality", "--model", "tiny", "--data", "nothing.txt"]),
        (2, "--min-contexts", ["contextuality", "--model", "tiny", *text, "--min-contexts", "1"]),
        (2, "--variance", ["similarity", "--model", "tiny", *text, "--variance", "0"]),
        (2, "given twice", ["similarity", "--model", "tiny", "--model", "tiny", *text]),
    ]
    for code, told, arguments in cases:
        outcome = bertkit("probe", *arguments)
        assert (outcome.code, outcome.stdout) == (code, ""), (arguments, outcome.stderr)
        assert told in outcome.stderr
        assert "Traceback" not in outcome.stderr


def test_every_kind_is_run_by_the_function_of_its_name_and_settings() -> None:
    for name, kind in KINDS.items():
        module, _, settings = kind.settings.partition(":")
        assert getattr(import_module(module), settings).kind == name
        assert callable(getattr(import_module(f"{module}.run"), f"probe_{name.replace('-', '_')}"))


@pytest.mark.parametrize("kind", KINDS)
def test_help_of_a_kind_imports_no_torch(kind: str) -> None:
    code = "import sys; from bertkit.cli.app import run; code = run(sys.argv[1:]); print(code, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, "probe", kind, "--help"], capture_output=True, text=True)
    assert f"bertkit probe {kind}" in " ".join(done.stdout.split()), done.stderr
    assert done.stdout.splitlines()[-1] == "0 False"


def test_every_kind_has_help(bertkit) -> None:
    shown = bertkit("probe", "--help").stdout
    for kind in KINDS:
        assert kind in shown
        assert f"bertkit probe {kind}" in " ".join(bertkit("probe", kind, "--help").stdout.split())

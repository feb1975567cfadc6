"""`bertkit export`: the directory on stdout, JSON on request, errors with their exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertkit.inference.export import export
from bertkit.models.families.bert import BertConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel

Command = Callable[..., Any]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    settings = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=9)
    made = HeadedModel(settings.build(41), ("masked_lm",))
    made.initialise(seed=1)
    save_model(made, None, tmp_path / "run" / "model")
    return tmp_path / "run"


def test_the_directory_is_the_result_and_the_difference_is_told(bertkit: Command, model: Path, tmp_path: Path) -> None:
    done = bertkit("export", model, "--to", tmp_path / "out")
    assert (done.code, done.stdout) == (0, f"{tmp_path / 'out'}\n")
    assert "largest difference from the source 0 (accepted 1e-05)" in done.stderr
    for word in ("loaded", "missing", "unexpected", "reinitialised", "tied"):
        assert word in done.stderr
    assert load_model(tmp_path / "out")[0].head_names == ("masked_lm",)


def test_json_is_one_document(bertkit: Command, model: Path, tmp_path: Path) -> None:
    done = bertkit("export", model, "--to", tmp_path / "out", "--json", "-q")
    assert bertkit("export", model, "--out", tmp_path / "out", "--json", "-q").stdout == done.stdout
    shown = json.loads(done.stdout)
    assert shown == {"to": str(tmp_path / "out"), **json.loads((tmp_path / "out" / "export.json").read_text())}
    assert shown["largest_difference"] == 0


def test_values_that_only_bertkit_uses_are_told(bertkit: Command, model: Path, tmp_path: Path) -> None:
    path = model / "model" / "config.json"
    tuned = {"label_thresholds": {"a": 0.2}, "temperature": 0.5}  # of a masked LM, which no temperature calibrates
    path.write_text(json.dumps({**json.loads(path.read_text()), **tuned}))
    shown = bertkit("export", model, "--to", tmp_path / "out").stderr
    assert "`label_thresholds` in config.json was tuned on dev and is used by bertkit only" in shown
    assert "temperature" not in shown
    assert "tuned on dev" not in bertkit("export", model, "--to", tmp_path / "small", "--format", "int8").stderr


def test_a_copy_that_differs_ends_with_code_5_and_leaves_nothing(
    bertkit: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(made: HeadedModel, tokenizer: None, directory: Path) -> None:
        made.get_parameter("masked_lm.bias").data += 1e-3
        save_model(made, tokenizer, directory)
        made.get_parameter("masked_lm.bias").data -= 1e-3

    monkeypatch.setattr(export, "save_model", faulty)
    done = bertkit("export", model, "--to", tmp_path / "out")
    assert (done.code, done.stdout) == (5, "")
    assert "masked_lm differs by 0.001" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["{model}", "--to", "{model}"], 2, "is, contains or is inside"),
        (["{model}", "--to", "{out}", "--format", "tensorflow"], 2, "'hf', 'int8', 'onnx'"),
        (["{model}"], 2, "--to"),
        (["{out}/absent", "--to", "{out}"], 3, "absent: does not exist"),
        (["no-such-model", "--to", "{out}", "--offline"], 3, "not in the local Hub cache"),
    ],
)
def test_faults_have_their_exit_codes_and_no_traceback(
    bertkit: Command, model: Path, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    done = bertkit("export", *[word.format(model=model, out=tmp_path / "out") for word in arguments])
    assert done.code == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["hf", "static"])
def test_the_working_directory_is_not_replaced(
    bertkit: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    (tmp_path / "empty" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "empty" / "inner")
    for to in (".", ".."):
        done = bertkit("export", model, "--to", to, "--format", form)
        assert (done.code, "is or contains the working directory" in done.stderr) == (2, True), done.stderr

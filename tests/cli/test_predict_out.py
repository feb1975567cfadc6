"""`bertkit predict --out`: a file contains what would be printed, and appears once it is complete."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from tests.cli.trained_kinds import Trained, lines_of
from tests.tasks.tiny_kinds import DEV, KINDS

from bertkit.inference import prediction_files

Bertkit = Callable[..., Any]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_contains_what_would_be_printed(trained: Trained, bertkit: Bertkit, tmp_path: Path, kind: str) -> None:
    run, inputs = trained.of(kind)
    printed = bertkit("predict", "--model", run, inputs).stdout
    out = tmp_path / "found.jsonl"
    out.write_text("of an earlier command")
    done = bertkit("predict", "--model", run, inputs, "--out", out, "--json")
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout) == {"out": str(out), "count": DEV}
    assert out.read_text() == printed
    assert [path.name for path in tmp_path.iterdir()] == ["found.jsonl"]


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_a_table_has_a_row_per_input_and_a_column_per_label(
    trained: Trained, piped: Bertkit, tmp_path: Path, ending: str
) -> None:
    out = tmp_path / f"found.{ending}"
    for kind in ("classification", "multi_label", "regression", "choice", "span"):
        run, inputs = trained.of(kind)
        blank = {"classification": '{"id": "-b", "review": " "}\n', "multi_label": '{"review": ""}\n'}.get(kind, "")
        content = inputs.read_text() + blank
        expected = lines_of(piped(content, "--model", run).stdout)
        done = piped(content, "--model", run, "--out", out)
        assert (done.code, done.stdout) == (0, f"{out}\n"), done.stderr
        for row, document in zip(rows_of(out), expected, strict=True):
            assert row["id"] == document["id"].replace("-b", "'-b")  # not read as a formula
            scores, prediction = document.get("scores", {}), document["prediction"]
            if prediction is None:
                assert not any(value for key, value in row.items() if key != "id")
            elif kind == "multi_label":
                assert row["prediction"] == "|".join(prediction)
            else:
                assert row["prediction"] == str(prediction)
            if kind in ("classification", "multi_label") and prediction is not None:
                assert {key: float(value) for key, value in row.items() if key.startswith("score/")} == {
                    f"score/{label}": share for label, share in scores.items()
                }
            if kind in ("choice", "span"):
                assert json.loads(row["scores"]) == scores
            if kind == "span":
                assert json.loads(row["answers"]) == document["answers"]
                assert float(row["no_answer"]) == document["no_answer"]
    run, _ = trained.of("classification")
    piped("the fine cat\n", "--model", run, "--top", "1", "--out", out)
    (best,) = rows_of(out)
    assert [bool(best["score/good"]), bool(best["score/bad"])] == [
        best["prediction"] == "good",
        best["prediction"] != "good",
    ]


def test_parquet_has_the_columns_of_a_table_with_their_types(
    trained: Trained, piped: Bertkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction_files, "_ROWS_AT_ONCE", 3)
    out, table = tmp_path / "found.parquet", tmp_path / "found.csv"
    for kind in ("classification", "multi_label", "regression", "choice", "span"):
        run, inputs = trained.of(kind)
        content = inputs.read_text() + ('{"id": "b", "review": " "}\n' if kind == "classification" else "")
        expected = lines_of(piped(content, "--model", run).stdout)
        assert piped(content, "--model", run, "--out", table).code == 0
        done = piped(content, "--model", run, "--out", out)
        assert (done.code, done.stdout) == (0, f"{out}\n"), done.stderr
        found = parquet.read_table(out).to_pylist()
        assert [list(row) for row in found] == [list(row) for row in rows_of(table)]
        for row, document in zip(found, expected, strict=True):
            assert (row["id"], row["prediction"]) == (document["id"], document["prediction"])
            if kind in ("classification", "multi_label"):
                shares = {key.removeprefix("score/"): row[key] for key in row if key.startswith("score/")}
                assert {key: share for key, share in shares.items() if share is not None} == document.get("scores", {})
            if kind in ("choice", "span"):
                assert json.loads(row["scores"]) == document["scores"]
            if kind == "span":
                assert json.loads(row["answers"]) == document["answers"]
                assert row["no_answer"] == document["no_answer"]


def test_columns_go_into_a_file_of_columns(trained: Trained, piped: Bertkit, tmp_path: Path) -> None:
    run, _ = trained.of("tagging")
    lines = "a\x1b\nfine\n\ncat\n"
    out = tmp_path / "found.conll"
    done = piped(lines, "--model", run, "--format", "conll", "--out", out, "--json")
    assert json.loads(done.stdout) == {"out": str(out), "count": 2}
    assert out.read_text() == "a\x1b O\nfine B-X\n\ncat O\n"
    objects = tmp_path / "found.jsonl"
    piped(lines, "--model", run, "--format", "conll", "--out", objects)
    assert objects.read_text() == piped(lines, "--model", run, "--format", "conll", "--json").stdout


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_read(
    trained: Trained, bertkit: Bertkit, tmp_path: Path
) -> None:
    run, inputs = trained.of("classification")
    own = tmp_path / "own.jsonl"
    own.write_bytes(inputs.read_bytes())
    tagger, _ = trained.of("tagging")
    for words, told in [
        ((inputs, "--model", run, "--out", tmp_path / "a.txt"), "its ending is none of .jsonl, .csv, .tsv"),
        ((inputs, "--model", run, "--out", tmp_path / "no" / "a.csv"), "does not exist; create it"),
        ((own, "--model", run, "--out", own), "is read by this command"),
        ((inputs, "--model", run, "--out", tmp_path / "a.conll"), "only input in columns"),
        ((inputs, "--model", tagger, "--out", tmp_path / "a.csv"), "do not fit into one row; write .jsonl"),
    ]:
        outcome = bertkit("predict", *words)
        assert (outcome.code, outcome.stdout) == (2, ""), outcome.stderr
        assert told in outcome.stderr
    assert own.read_bytes() == inputs.read_bytes()


class _Killing(io.BytesIO):
    """A pipe; the process that has read it to its end gets SIGTERM."""

    def readline(self, size: int | None = -1) -> bytes:
        line = super().readline(size)
        if not line:
            os.kill(os.getpid(), signal.SIGTERM)
        return line


def test_a_fault_or_a_signal_leaves_the_earlier_file(
    trained: Trained, bertkit: Bertkit, piped: Bertkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, inputs = trained.of("classification")
    out = tmp_path / "found.csv"
    out.write_text("earlier")
    faulty = piped(inputs.read_text() + '{"review": 3}\n', "--model", run, "--out", out)
    assert faulty.code == 3
    assert "line 12, review: found a number, expected text" in faulty.stderr
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(_Killing(b"the fine cat\n" * 100)))
    assert bertkit("predict", "--model", run, "--out", out).code == 130
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("found.csv", "earlier")]

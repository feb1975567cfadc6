"""Untrusted text cannot control the terminal, forge a line, or become a spreadsheet formula."""

from __future__ import annotations

import csv
import json
import logging
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertkit.cli.console import console, result
from bertkit.run.log_file import LogFile
from bertkit.tables import write_csv
from bertkit.visible import number_of, shell_word, visible, visible_json, visible_lines

HOSTILE = "a\x1b[2J\x1b]0;owned\x07\r\x9b31m\u202eb\nerror: forged\x7f\ud800"
RAW = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@given(st.text(st.characters(exclude_categories=()), max_size=30))
def test_no_control_is_left_and_plain_text_stays(text: str) -> None:
    shown = visible(text)
    assert not RAW.search(shown)
    assert "\n" not in shown
    assert visible(shown) == shown
    if text.isprintable() and not any(0xD800 <= ord(each) < 0xE000 for each in text):
        assert shown == text


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=30))
def test_json_with_escapes_is_of_the_same_value(text: str) -> None:
    shown = visible_json(json.dumps({"a": text}, ensure_ascii=False))
    assert json.loads(shown) == {"a": text}
    assert not RAW.search(shown)


@given(st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=30))
def test_a_path_in_a_command_can_be_copied(path: str) -> None:
    assert shlex.split(f"bertkit runs delete {shell_word(path)}") == ["bertkit", "runs", "delete", path]
    assert shell_word(Path("runs/tales-minilm/lr=3e-5")) == "runs/tales-minilm/lr=3e-5"


def test_a_line_that_a_message_brings_along_cannot_pass_for_a_message() -> None:
    assert visible_lines("a\nerror: forged\n  listed").split("\n") == ["a", "  error: forged", "  listed"]


def test_every_way_to_the_terminal_is_escaped(capfd: pytest.CaptureFixture[str]) -> None:
    console.open()
    try:
        console.error(f"no such file: {HOSTILE}")
        console.line(HOSTILE)
        console.table((HOSTILE, "b"), [(HOSTILE, 1)], title=HOSTILE)
        with console.progress(HOSTILE) as meter:
            meter.update(1, HOSTILE)
            console.line(meter.text())
        result(HOSTILE)
        result({"token": HOSTILE.replace("\ud800", "")}, as_json=True)
    finally:
        console.close()
    shown = capfd.readouterr()
    assert not RAW.search(shown.out + shown.err)
    assert not [line for line in (shown.out + shown.err).splitlines() if line.startswith("error: forged")]
    assert json.loads(shown.out.splitlines()[-1]) == {"token": HOSTILE.replace("\ud800", "")}


def test_the_log_of_a_run_is_escaped_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest sends a captured log between its processes, so it must be encodable text.
    monkeypatch.setattr(logging.getLogger("bertkit"), "propagate", False)
    log = LogFile(tmp_path / "log.txt")
    try:
        logging.getLogger("bertkit").warning("%s", HOSTILE)
    finally:
        log.detach()
    text = (tmp_path / "log.txt").read_text()
    assert "owned" in text
    assert not RAW.search(text)
    assert len([line for line in text.splitlines() if not line.startswith("  ")]) == 1


def test_fill_prints_tokens_and_text_with_escapes(
    bertkit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bertkit.models.scoring.fill_mask as fill_mask
    from tests.inference.test_export import small_model

    guesses = [{"token": HOSTILE, "text": HOSTILE, "id": 1, "probability": 0.5}]
    monkeypatch.setattr(fill_mask, "fill_masks", lambda *_, **__: [{"text": HOSTILE, "masks": [guesses]}])
    shown = bertkit("fill", "--model", small_model(tmp_path / "model"), "x")
    assert shown.code == 0
    assert len(shown.stdout.splitlines()) == 2
    assert not RAW.search(shown.stdout)


def test_an_error_shows_a_hostile_file_name_with_escapes(bertkit: Callable[..., Any], tmp_path: Path) -> None:
    shown = bertkit("recipes", "show", tmp_path / "a\x1b[2J\nerror: forged.yaml")
    assert shown.code == 2
    assert not RAW.search(shown.stderr)
    assert shown.stderr.count("\nerror:") == 0


def test_a_table_holds_no_formula(tmp_path: Path) -> None:
    rows = [["=cmd|' /C calc'!A0", "+1+1", "-x", "@SUM(A1)", "=", -1.5, None, "a=b"]]
    write_csv(tmp_path / "a.csv", list("abcdefgh"), rows)
    with (tmp_path / "a.csv").open(newline="") as file:
        _, read = csv.reader(file)
    assert read == ["'=cmd|' /C calc'!A0", "'+1+1", "'-x", "'@SUM(A1)", "=", "-1.5", "", "a=b"]


def test_one_thing_is_singular() -> None:
    assert [number_of(count, "pair") for count in (0, 1, 2, 1340)] == ["0 pairs", "1 pair", "2 pairs", "1,340 pairs"]

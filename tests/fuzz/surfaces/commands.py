"""Command lines."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st

from tests.fuzz.hostile import WORDS
from tests.fuzz.surfaces.base import Surface, run_command
from tests.fuzz.surfaces.readers import TABLE

PLANNED = ("pretrain", "finetune", "tune", "distill", "study")
ENDLESS = ("serve", "bench", "doctor")
"""Commands that do not end by themselves or take long."""


def command_lines(home: Path) -> Surface:
    """Arguments of `bertkit`: commands, existing options, and values of every kind."""
    from bertkit.cli.app import COMMANDS
    from tests.inference.test_export import small_model
    from tests.run.making import finished_run
    from tests.training.tiny_run import write_text

    home.mkdir()
    small_model(home / "model")
    write_text(home / "text.txt", documents=3)
    finished_run(home / "runs")
    (home / "table.csv").write_bytes(TABLE)
    (home / "empty").write_bytes(b"")
    commands = [name for name in COMMANDS if name not in ENDLESS]
    options = [
        "--json",
        "--set",
        "--seed",
        "--seeds",
        "--model",
        "--data",
        "--run-dir",
        "--resume",
        "--task",
        "--train",
        "--dev",
        "--text",
        "--label",
        "--out",
        "--to",
        "--format",
        "--top",
        "--teacher",
        "--max-steps",
        "--max-minutes",
        "--plan",
        "--help",
        "--device",
        "--precision",
        "--offline",
        "-q",
        "-v",
        "--step",
        "--grid",
        "--trials",
        "--from",
        "--tolerance",
        "--lr",
        "--epochs",
        "--batch",
        "--vocab-size",
        "--tokenizer",
        "--workers",
        "--method",
        "--predictions",
        "--gold",
        "--metric",
        "--init",
        "--dry-run",
        "--yes",
    ]
    values = st.sampled_from(WORDS) | st.sampled_from(
        [
            "model",
            "text.txt",
            "table.csv",
            "empty",
            "runs",
            "bert-tiny",
            "finetune",
            "mrpc",
            "glue",
            "mlm",
            "0-3",
            "1e9",
            "3",
            "list",
            "runs/bert-tiny-01234567",
            "show",
            "verify",
            "info",
            "me/it",
            "mine.yaml",
            "lr=1e-5..1e-4",
            "fill [MASK]",
            "a=b",
            "model.hidden_size=7",
            "missing",
            "wordpiece",
            "{}",
        ]
    )
    word = values | st.sampled_from(options) | st.text(max_size=5)

    def attack(words: list[str]) -> None:
        more = ["--plan", "--offline"] if words[0] in PLANNED else []
        run_command([*words, *more], home)

    inputs = st.tuples(st.sampled_from(commands), st.lists(word, max_size=6)).map(lambda drawn: [drawn[0], *drawn[1]])
    return Surface("command lines", inputs, attack, 3)

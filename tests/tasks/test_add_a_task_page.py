"""docs/add-a-task.md is followed exactly in a copy of the package: copying its blocks adds a task."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bertkit
from tests.tasks.tiny_task import reviews, write_model

PAGE = Path(__file__).parents[2] / "docs" / "add-a-task.md"
TEXT = PAGE.read_text(encoding="utf-8")
FILES = re.compile(r"^(Append to |Write |Add to )?`([\w./-]+)`[^\n]*:\n\n```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN_ALL = """
import shlex, sys
from bertkit.cli.app import run
sys.exit(max(run(shlex.split(line)[1:]) for line in sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with every block of the page in its place, a model, and files of SciTail's shape."""
    root, package = tmp_path_factory.mktemp("checkout"), Path(bertkit.__file__).parent
    shutil.copytree(package, root / "src" / "bertkit")
    for verb, name, text in FILES.findall(TEXT):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        if verb == "Append to ":
            path.write_text(before + text, encoding="utf-8")
        elif verb == "Add to ":
            new_import, new_row = text.strip("\n").split("\n\n")
            imports, registry = before.split("\nREADERS", 1)
            registry = registry.replace("\n}", f"\n{new_row}\n}}", 1)
            path.write_text(f"{imports.rstrip()}\n{new_import}\n\nREADERS{registry}", encoding="utf-8")
        else:
            path.write_text(text, encoding="utf-8")
    write_model(root / "MODEL")
    folder = root / "data" / "SciTail"
    folder.mkdir(parents=True)
    for seed, (split, count) in enumerate({"train": 24, "dev": 8, "test": 6}.items()):
        rows = [f"{text}\t{text}\t{label}\n" for text, label in reviews(count, seed, ("neutral", "entails"))]
        (folder / f"scitail_1.0_{split}.tsv").write_text("".join(rows))
    return root


def run(checkout: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    done = subprocess.run(
        [sys.executable, *command], cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_commands_of_the_page_work(checkout: Path) -> None:
    lines = [line for language, block in BLOCKS.findall(TEXT) if not language for line in block.splitlines()]
    assert len(lines) == 5
    lines = [f"{line} {'--json' if ' eval ' in line else '--quiet'}" for line in lines]
    assert "scitail" in run(checkout, "-c", RUN_ALL, *lines, "bertkit eval --help").rpartition("Usage:")[2]
    results = json.loads((checkout / "runs" / "recall" / "results.json").read_text())
    assert set(results["tasks"]["moods"]) == {"accuracy", "macro_f1", "recall_of_bad"}
    evaluation = next((checkout / "runs").glob("eval-scitail-*"))
    results = json.loads((evaluation / "results.json").read_text())
    assert set(results["tasks"]["scitail"]) == {"accuracy", "accuracy/test"}


def test_the_test_of_the_page_passes(checkout: Path) -> None:
    assert "2 passed" in run(checkout, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/tasks/test_scitail.py")

"""A recipe that names its text by a relative path gives a run that resumes from any directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.tiny_run import write_recipe


@pytest.mark.parametrize("key", ["sources: [own.txt]", "languages: {en: [own.txt]}"])
def test_a_stopped_run_is_resumed_from_another_directory(
    key: str, tmp_path: Path, bertkit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, text = write_recipe(tmp_path)
    text.rename(tmp_path / "own.txt")
    (tmp_path / "rel.yaml").write_text(f"extends: {base}\ndata: {{{key}}}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    stopped = bertkit("pretrain", "rel.yaml", "--run-dir", "run", "--max-minutes", "0", "-q")
    assert stopped.code == 75, stopped.stderr
    assert str(tmp_path / "own.txt") in (tmp_path / "run" / "recipe.yaml").read_text()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    resumed = bertkit("pretrain", "--resume", "../run", "-q")
    assert resumed.code == 0, resumed.stderr

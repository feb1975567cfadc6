"""The folder that the tests of one study share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.study.tiny_study import write_study


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the study, before it is run."""
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path)
    return tmp_path

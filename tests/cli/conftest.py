"""The command line with a text on stdin, and models for it, trained once."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.trained_kinds import Trained

Bertkit = Callable[..., Any]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("predict"))


@pytest.fixture
def piped(bertkit: Bertkit, monkeypatch: pytest.MonkeyPatch) -> Bertkit:
    """The command line with a text on stdin."""

    def call(text: str | bytes, *words: str | Path) -> Any:
        content = text if isinstance(text, bytes) else text.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        return bertkit("predict", *words)

    return call

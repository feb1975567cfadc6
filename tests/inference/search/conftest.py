"""A model, a corpus of reviews and its index, which the tests of this folder search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bertkit.inference.embed import InputText
from bertkit.inference.embedder import Embedder
from bertkit.inference.search.index import TextIndex, build_index
from bertkit.inference.search.settings import IndexSettings
from tests.inference.test_independent_batches import engine
from tests.tasks.tiny_task import reviews, write_model

TEXTS = list(dict.fromkeys(text for text, _ in reviews(120, seed=5)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "texts.jsonl"
    path.write_text("".join(json.dumps({"id": f"t{n}", "text": text}) + "\n" for n, text in enumerate(TEXTS)))
    return path


def texts() -> Any:
    return (InputText(f"t{number}", text, "") for number, text in enumerate(TEXTS))


@pytest.fixture(scope="module")
def embedder(model: Path) -> Embedder:
    return Embedder.load(model, engine(), name="base")


@pytest.fixture(scope="module")
def built(embedder: Embedder, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> TextIndex:
    return build_index(tmp_path_factory.mktemp("index") / "i", corpus, texts(), embedder, IndexSettings())

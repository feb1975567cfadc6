"""A teacher, its tables and recipes for the tests of distillation on a task; each test file has its own."""

from __future__ import annotations

import pytest

from bertkit.training.run import FinishedRun
from tests.distillation.task_place import ALL_TERMS, Place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("distill"))


@pytest.fixture(scope="module")
def logits_only(place: Place) -> str:
    return place.recipe("logits", " [labels, {soft_targets: {temperature: 2.0}}]")


@pytest.fixture(scope="module")
def every_term(place: Place) -> str:
    return place.recipe("terms", ALL_TERMS)


@pytest.fixture(scope="module")
def finished(place: Place, logits_only: str) -> FinishedRun:
    return place.run(logits_only, run_dir=place.directory / "finished")

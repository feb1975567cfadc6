"""Every surface, fuzzed for a few seconds; `make fuzz` runs for an hour.

Inputs found by long runs are kept in corpus.py and tried first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz.attack import limited, tried
from tests.fuzz.corpus import CORPUS
from tests.fuzz.surfaces import Surface, made_surfaces

FEW = settings(
    max_examples=12,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def surfaces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Surface]]:
    home: Path = tmp_path_factory.mktemp("fuzz") / "home"
    made = {surface.name: surface for surface in made_surfaces(home)}  # including all imports, which are not limited
    with limited():
        yield made


def assert_withstands(surface: Surface) -> None:
    @given(surface.inputs)
    @FEW
    def attacked(drawn: object) -> None:
        assert tried(surface, drawn) is None

    attacked()


def test_no_input_ends_in_a_traceback(surfaces: dict[str, Surface]) -> None:
    for surface in surfaces.values():
        assert_withstands(surface)


@pytest.mark.parametrize(("name", "drawn"), CORPUS)
def test_what_was_found_once_is_refused(surfaces: dict[str, Surface], name: str, drawn: object) -> None:
    assert tried(surfaces[name], drawn) is None

"""Each method of `bertkit generate` says which settings it reads."""

from __future__ import annotations

from typing import get_args

from bertkit.generation.settings import _READS, USUAL_ITERATIONS, Method


def test_every_method_has_its_settings_and_usual_iterations_if_it_reads_them() -> None:
    assert _READS.keys() == set(get_args(Method))
    assert {name for name, reads in _READS.items() if "iterations" in reads} == USUAL_ITERATIONS.keys()

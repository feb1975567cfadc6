"""The files of a run directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st

from bertkit.errors import BertkitError
from tests.fuzz.hostile import damaged_bytes, damaged_json, json_bytes
from tests.fuzz.surfaces.base import Surface, run_command, written


def runs(home: Path) -> list[Surface]:
    """The files of a finished run, damaged one at a time."""
    from bertkit.run.checkpoint import load_newest_checkpoint
    from bertkit.run.directory import RunDirectory
    from bertkit.run.find import find_runs
    from bertkit.run.verify import verify_run
    from bertkit.training.clock import RunClock
    from bertkit.training.divergence import DivergenceRecord
    from tests.run.making import finished_run

    home.mkdir()
    run = finished_run(home).path
    (run / "divergence.jsonl").write_text(
        '{"step": 2, "event": "skipped"}\n{"step": 3, "event": "rolled_back", "to": 1, "rate_factor": 0.5}\n'
    )
    names = [
        "run.json",
        "results.json",
        "metrics.jsonl",
        "environment.json",
        "files.json",
        "recipe.yaml",
        "model/config.json",
    ]
    names += ["checkpoints/latest", "checkpoints/step-00000005/manifest.json", "checkpoints/step-00000005/state.json"]
    names += ["checkpoints/step-00000005/model.safetensors", "divergence.jsonl"]
    whole = {name: (run / name).read_bytes() for name in names}

    def look() -> None:
        for found in find_runs(home):
            _ = found.status, found.steps, found.exit_reason, found.results
        _answered(lambda: verify_run(run))
        _answered(lambda: load_newest_checkpoint(RunDirectory.open(run).checkpoints))
        _answered(lambda: DivergenceRecord(run / "divergence.jsonl").rate_factor(3))
        run_command(["runs", "list", "--json"], home)
        run_command(["runs", "show", str(run), "--json"], home)

    def attack(drawn: tuple[str, bytes]) -> None:
        name, content = drawn
        try:
            (run / name).write_bytes(content)
            _answered(look)
        finally:
            (run / name).write_bytes(whole[name])
            (run / "divergence.jsonl").write_bytes(whole["divergence.jsonl"])

    def damaged_value(name: str) -> st.SearchStrategy[tuple[str, bytes]]:
        return damaged_json(json.loads(whole[name])).map(lambda value: (name, json_bytes(value)))

    def damaged_text(name: str) -> st.SearchStrategy[tuple[str, bytes]]:
        return damaged_bytes(whole[name]).map(lambda content: (name, content))

    def times(content: bytes) -> None:
        RunClock(written(home / "times.tsv", content), 1.0, lambda share: share).close()

    of_json = [name for name in names if name.endswith(".json")]
    return [
        Surface("run directories", st.sampled_from(names).flatmap(damaged_text), attack),
        Surface("run directories, damaged values", st.sampled_from(of_json).flatmap(damaged_value), attack),
        Surface("times of a run", damaged_bytes(b"0.0\t0.1\n1.5\t0.05\n2.5\t0.01\n"), times),
    ]


def _answered(read: Callable[[], object]) -> None:
    try:
        read()
    except BertkitError:
        return

"""Train a run again from its own recipe, and compare the results: `bertkit runs replay`.

Not from a paper (contract: `runs replay`). Another process trains in a directory of its own, with as many threads as
the run had; its metrics are compared line by line as they are written, then its model. Siblings: replay_batch.py
recomputes one saved batch, run/verify.py checks hashes and computes nothing.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from bertkit.errors import BertkitError, CheckError, DataError, UsageError
from bertkit.files import names_in, read_json, sha256_of
from bertkit.hub import pinning
from bertkit.progress import Progress, ProgressMeter, silent_progress
from bertkit.run.directory import ENVIRONMENT, RECIPE, RECORD, RunDirectory
from bertkit.run.find import run_of_suite
from bertkit.run.metrics import MACHINE_FIGURES, METRICS_FILE, read_metrics
from bertkit.run.trackers import leaves
from bertkit.training.clock import TIMES_FILE
from bertkit.training.divergence import DIVERGENCE_FILE, read_roll_backs
from bertkit.training.run import MODEL_COMMITS

TRAINING = ("pretrain", "finetune", "distill")
"""The commands whose runs can be trained again."""

_ARITHMETIC = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "CUBLAS_WORKSPACE_CONFIG")
"""Environment variables that change the last bits of a product."""
_ENVIRONMENT = ("bertkit", "python", "packages", "platform", "cpu", "threads", "gpus")
"""Keys of environment.json that can change a result."""
_POLL_SECONDS = 0.3
_ENDING_SECONDS = 60.0
_ERRORS: dict[int, type[BertkitError]] = {each.exit_code: each for each in (UsageError, DataError)}


@dataclass(frozen=True)
class Difference:
    """A figure that differs; None if one side does not have it."""

    step: int
    name: str
    before: Any
    again: Any


@dataclass
class MetricsComparison:
    """Metrics of a run next to those of its repetition.

    Attributes:
        lines: the run's lines of the updates that are compared.
        tolerance: largest relative difference at which two figures count as the same; 0: bit-identical.
        compared: how many lines have been compared.
        figures: how many figures they contained.
        difference: the first difference.
    """

    lines: Sequence[Mapping[str, Any]]
    tolerance: float = 0.0
    compared: int = 0
    figures: int = 0
    difference: Difference | None = None

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to compare."""
        return self.difference is not None or self.compared == len(self.lines)

    @property
    def step(self) -> int:
        """The last update for which all figures were compared."""
        return int(self.lines[self.compared - 1]["step"]) if self.compared else 0

    def take(self, again: Sequence[Mapping[str, Any]]) -> None:
        """Compare the lines that the repetition has written since the last call; `again` contains all of its lines."""
        for line in again[self.compared : len(self.lines)]:
            before = self.lines[self.compared]
            names = [name for name in {**before, **line} if name not in MACHINE_FIGURES]
            differing = (name for name in names if not self._same(before.get(name), line.get(name)))
            name = next(differing, None)
            if name is not None:
                self.difference = Difference(int(before["step"]), name, before.get(name), line.get(name))
                return
            self.compared += 1
            self.figures += len(names)

    def _same(self, before: Any, again: Any) -> bool:
        if self.tolerance and isinstance(before, float) and isinstance(again, float):
            return math.isclose(before, again, rel_tol=self.tolerance)
        return bool(before == again)


def final_metrics(
    lines: Sequence[Mapping[str, Any]],
    made: Sequence[Mapping[str, Any]],
    expected: Sequence[Mapping[str, Any]] = (),
) -> list[Mapping[str, Any]]:
    """The metrics of an unfinished run that no roll-back will replace.

    Args:
        lines: its metrics so far.
        made: its roll-backs so far, as in divergence.jsonl.
        expected: all roll-backs of the run that it repeats.
    """
    newest = lines[-1]["step"] if lines else 0
    # A roll-back is recorded before the lines that it replaces are dropped, and none of these reaches its step.
    open_ones = [each for each in (*made[-1:], *expected[len(made) :]) if newest < each["step"]]
    return [line for line in lines if all(line["step"] <= each["to"] for each in open_ones)]


@dataclass(frozen=True)
class Rerun:
    """The result of a repetition.

    Attributes:
        steps: the last update that was compared.
        figures: number of compared figures in the metrics.
        difference: the first differing figure, if there is one.
        files: differing files of the finished model and its predictions; None if they were not compared.
        environment: what has changed since the run was trained: key, then, now.
    """

    steps: int
    figures: int
    difference: Difference | None
    files: tuple[str, ...] | None
    environment: tuple[tuple[str, Any, Any], ...] = field(default=())

    @property
    def same(self) -> bool:
        return self.difference is None and not self.files

    @property
    def in_words(self) -> str:
        """One sentence for people."""
        if self.difference is not None:
            each = self.difference
            same = f"the {self.figures} figures before it are the same"
            return f"step {each.step}: {each.name} was {each.before} and is {each.again}; {same}"
        if self.files:
            return f"all {self.figures} figures are the same, but {', '.join(self.files)} differ"
        model = "" if self.files is None else ", the model and its predictions"
        return f"the same up to step {self.steps}: {self.figures} figures{model}"


def rerun(
    run: RunDirectory,
    directory: Path,
    *,
    steps: int | None = None,
    tolerance: float = 0.0,
    offline: bool = False,
    progress: Progress = silent_progress,
) -> Rerun:
    """Train a run again in another directory, up to the last update that is compared.

    Args:
        run: of `pretrain`, `finetune` or `distill`; a stopped run is compared as far as it got.
        directory: where to train; must not exist or be empty.
        steps: compare this many updates; None: all, and the model.
        tolerance: see MetricsComparison.
        offline: do not use the network.
        progress: the display, which counts compared updates. What the other process shows is about its own directory,
            so it is not shown.

    Raises:
        UsageError: the run trains nothing, or is a suite; there is nothing to compare; the directory is not empty.
        DataError: its text, its examples or its models have changed.
        CheckError: the repetition did not get as far.
    """
    _check(run)
    if directory.is_file() or (directory.is_dir() and names_in(directory)):
        raise UsageError(f"{directory}: is not empty; name a new directory for the repeated run")
    comparison = MetricsComparison(_lines(run, steps), tolerance)
    options = ["--fresh", "--json", "-q", "--run-dir", str(directory), *(["--offline"] if offline else [])]
    if "report_to" in run.recipe_yaml:
        options += ["--set", "engine.report_to=[]"]
    if (run.path / TIMES_FILE).is_file():
        # Quoted, because the value is YAML: a path may contain `: ` or ` #`.
        options += ["--set", f"engine.follow_times={json.dumps(str(run.path.resolve()), ensure_ascii=False)}"]
    command = [sys.executable, "-m", "bertkit", run.record["kind"], str(run.path / RECIPE), *options]
    compares_files = steps is None and run.status == "done"
    with _output() as printed, _output() as shown:
        process = subprocess.Popen(command, stdout=printed, stderr=shown, env=_environment(run))
        try:
            with progress(f"{run.id} again", total=int(comparison.lines[-1]["step"])) as meter:
                code = _followed(process, comparison, run, directory, meter, to_the_end=compares_files)
        finally:
            _end(process)
        if code not in (None, 0) or not comparison.is_complete:
            raise _failure(run, comparison, code, _read(printed), _read(shown))
    files = tuple(_differing_files(run, directory)) if compares_files and not tolerance else None
    if comparison.difference is not None:
        files = None
    changes = tuple(_changes(run.path, directory))
    return Rerun(comparison.step, comparison.figures, comparison.difference, files, changes)


def _output() -> IO[str]:
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


def _read(output: IO[str]) -> str:
    output.seek(0)
    return output.read()


def _check(run: RunDirectory) -> None:
    kind = run.record["kind"]
    if kind not in TRAINING:
        raise UsageError(f"{run.path}: is a run of `bertkit {kind}`, which trains nothing; name a training run")
    inner = (run.results or {}).get("runs", ())
    if inner:
        first = run_of_suite(run.path, inner[0]["run"])
        raise UsageError(f"{run.path}: consists of {len(inner)} runs; replay one of them, such as {first}")


def _lines(run: RunDirectory, steps: int | None) -> list[Mapping[str, Any]]:
    lines: list[Mapping[str, Any]] = list(read_metrics(run.metrics))
    if run.record["status"] in ("running", "stopped"):
        lines = final_metrics(lines, read_roll_backs(run.path / DIVERGENCE_FILE))
    chosen = [line for line in lines if steps is None or line["step"] <= steps]
    if not chosen:
        first = f"; the first are of step {lines[0]['step']}: give --steps {lines[0]['step']} or more" if lines else ""
        raise UsageError(f"{run.metrics}: has no figures to compare{first}")
    return chosen


def _environment(run: RunDirectory) -> dict[str, str]:
    """This process's environment variables, with the run's values for those that change last bits, and its commits."""
    path = run.path / ENVIRONMENT
    recorded = read_json(path) if path.exists() else {}
    variables = recorded.get("variables", {})
    found = {name: value for name, value in os.environ.items() if name not in _ARITHMETIC}
    found |= {name: str(variables[name]) for name in _ARITHMETIC if name in variables}
    record = run.record
    found |= pinning(datasets=record.get("commits") or {}, models=record.get(MODEL_COMMITS) or {})
    if threads := recorded.get("threads", {}).get("intra_op"):
        found["OMP_NUM_THREADS"] = str(threads)
    return found


def _followed(
    process: subprocess.Popen[bytes],
    comparison: MetricsComparison,
    run: RunDirectory,
    directory: Path,
    meter: ProgressMeter,
    *,
    to_the_end: bool,
) -> int | None:
    """Compare while the process trains; returns its exit code, None if it is no longer needed."""
    checked = False
    roll_backs = read_roll_backs(run.path / DIVERGENCE_FILE)
    while True:
        code = process.poll()  # before reading, so that nothing is missed
        if not checked and (directory / RECORD).is_file():
            checked = True
            _check_inputs(run, RunDirectory.open(directory))
        if (directory / METRICS_FILE).is_file():
            comparison.take(_lines_so_far(directory, roll_backs, ended=code is not None))
            meter.update(comparison.step)
        if comparison.difference is not None or (comparison.is_complete and not to_the_end):
            return None
        if code is not None:
            return code
        time.sleep(_POLL_SECONDS)


def _lines_so_far(
    directory: Path, expected: Sequence[Mapping[str, Any]], *, ended: bool
) -> Sequence[Mapping[str, Any]]:
    """The metrics of the repetition that will not be replaced; `expected` are the roll-backs of the run."""
    made = read_roll_backs(directory / DIVERGENCE_FILE)
    lines = list(read_metrics(directory / METRICS_FILE))
    if ended:
        return lines
    # If it rolled back between the two reads, the lines may be of either pass.
    unchanged = made == read_roll_backs(directory / DIVERGENCE_FILE)
    return final_metrics(lines, made, expected) if unchanged else ()


def _check_inputs(run: RunDirectory, again: RunDirectory) -> None:
    before, now = run.record["fingerprints"], again.record["fingerprints"]
    changed = [name for name in before if before[name] != now.get(name)]
    if changed:
        raise DataError(f"{run.path}: {' and '.join(f'the {name}' for name in changed)} changed since; restore it")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop a training process; it can write a checkpoint first, for at most a minute."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _failure(
    run: RunDirectory, comparison: MetricsComparison, code: int | None, printed: str, shown: str
) -> BertkitError:
    """What ended the process: its error, or else the last line that it has shown."""
    try:
        message = str(json.loads(printed)["error"])
    except (ValueError, KeyError, TypeError):
        message = "it wrote fewer figures than the run" if code in (None, 0) else f"exit code {code}"
        message = ": ".join([message, *shown.strip().splitlines()[-1:]])
    kind = _ERRORS.get(code or 0, CheckError)
    return kind(f"{run.path}: the repetition only got to step {comparison.step}: {message}")


def _differing_files(run: RunDirectory, directory: Path) -> Iterator[str]:
    """Files of the model and of the predictions that are not the same."""
    for folder in ("model", "predictions"):
        for path in sorted(each for each in (run.path / folder).rglob("*") if each.is_file()):
            name = path.relative_to(run.path)
            again = directory / name
            if not again.is_file() or sha256_of(again) != sha256_of(path):
                yield name.as_posix()


def _changes(path: Path, directory: Path) -> Iterator[tuple[str, Any, Any]]:
    """Differences between both runs' records of code, packages and machine."""
    then, now = (read_json(each / RECORD).get("code_sha256") for each in (path, directory))
    if then != now:
        yield "code_sha256", then, now
    if not ((path / ENVIRONMENT).exists() and (directory / ENVIRONMENT).exists()):
        return
    recorded = (read_json(each / ENVIRONMENT) for each in (path, directory))
    before, here = (dict(leaves({name: each.get(name) for name in _ENVIRONMENT}, ".")) for each in recorded)
    for key in dict.fromkeys([*before, *here]):
        if before.get(key) != here.get(key):
            yield key, before.get(key), here.get(key)

"""Runs `bertkit study`: chooses each arm's settings, scores arms on fresh seeds, writes results, report, figures.

Contract: the run directory. A study is a run directory:

    RUN/recipe.yaml          the resolved study
    RUN/costs.json           measured cost of a step for each arm's settings
    RUN/runs/NAME/           the pretraining runs
    RUN/measured/NAME/       their measurements, one run directory each, and scores.json
    RUN/results.json, report.md, figures/
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from bertkit.errors import StoppedError, UsageError
from bertkit.files import read_json, write_json, write_text
from bertkit.pretraining.arguments import source_overrides
from bertkit.progress import Progress
from bertkit.recipe.find import SUFFIXES, find_recipe, shipped_directory
from bertkit.run.directory import RECIPE, RunDirectory
from bertkit.run.trackers import require_trackers
from bertkit.study.context import StudyContext
from bertkit.study.planned import PlannedStudy
from bertkit.study.plots import draw_figures
from bertkit.study.report import report
from bertkit.study.runner import StudyRunner
from bertkit.study.settings import KIND, Study, changed_study, load_study
from bertkit.training.interrupt import interrupted_by_signals
from bertkit.training.run import (
    COMMITS,
    MODEL_COMMITS,
    FinishedRun,
    OnStart,
    RunArguments,
    deadline_after,
    finished_of,
    identity_of,
    note_commits,
    require_unchanged,
    resumed_recipe,
    run_of,
)
from bertkit.visible import shell_word

COSTS = "costs.json"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StudyArguments(RunArguments[Study]):
    """The command line of a study.

    Attributes:
        sources: text to pretrain on instead of the study's; empty for the study's own.
        data_dir: the start of relative paths of measures; the working directory if None.
        arms: the arms to compare; empty for all.
    """

    sources: Sequence[str] = ()
    data_dir: str | None = None
    arms: Sequence[str] = ()

    kind: ClassVar[str] = KIND

    def requested(self) -> Study:
        if self.recipe is None:
            raise self.unnamed("give a study FILE, such as the shipped `objectives`, or --resume RUN")
        study = load_study(self.recipe, self.overrides, arms=self.arms)
        return located(study, find_recipe(self.recipe), self.sources, Path(self.data_dir or ".").expanduser())

    def recorded(self, run: RunDirectory) -> Study:
        return load_study(str(run.path / RECIPE))

    def changed(self, recorded: Study) -> Study:
        if self.arms:
            raise UsageError("--arms: the resumed study has its own arms; leave it out, or also give the study's FILE")
        if self.data_dir is not None:
            log.warning("--data-dir has no effect: the resumed study has the full paths of its measures")
        changed = changed_study(recorded, self.overrides)
        return changed.model_copy(update={"set": changed.set | _of_sources(self.sources)})


def _located_recipe(recipe: str, file: Path) -> str:
    """The name of a shipped recipe, or a path: next to the study's file, else as for any command."""
    names = [recipe, *(f"{recipe}{suffix}" for suffix in SUFFIXES)]
    beside = [file.parent / name for name in names if name.endswith(SUFFIXES)]
    base = next((path for path in beside if path.is_file()), None) or find_recipe(recipe)
    return base.stem if base.parent == shipped_directory() else str(base.absolute())


def _of_sources(sources: Sequence[str]) -> dict[str, Any]:
    """The settings of all arms that replace their text; none without sources."""
    return {override.key: override.value for override in source_overrides(sources)}


def located(study: Study, file: Path, sources: Sequence[str], folder: Path) -> Study:
    """The study with full paths, so that its record can be run from anywhere.

    Args:
        study: the study as written.
        file: the study's file.
        sources: text to use instead of its own; empty for its own.
        folder: the start of relative paths of measures.
    """
    common = study.set | _of_sources(sources)
    measures = {name: measure.located(folder) for name, measure in study.measures.items()}
    arms = {
        name: arm if arm.recipe is None else arm.model_copy(update={"recipe": _located_recipe(arm.recipe, file)})
        for name, arm in study.arms.items()
    }
    recipe = _located_recipe(study.recipe, file)
    return study.model_copy(update={"recipe": recipe, "set": common, "arms": arms, "measures": measures})


def run_study(arguments: StudyArguments, *, progress: Progress, on_start: OnStart = lambda run: None) -> FinishedRun:
    """Start or resume a study and run it to the end; a finished one is not repeated.

    Args:
        arguments: the command-line arguments.
        progress: the display.
        on_start: called with each run's directory before its work starts.

    Raises:
        UsageError, DataError: the study or its data are invalid.
        StoppedError: a signal or the time limit came first.
    """
    run = None if arguments.resume is None else run_of(arguments)
    study = arguments.requested() if run is None else resumed_recipe(arguments, run)
    if run is not None and run.status == "done" and run.results is not None:
        log.info("%s is already done", run.path)
        return FinishedRun(run, run.results, (run,))
    require_trackers(study.engine.report_to, arguments.run_dir if run is None else run.path)
    planned = PlannedStudy(study, arguments.cache, arguments.offline)
    planned.check()
    fingerprints = planned.fingerprints(progress)
    identity = identity_of(arguments, study, fingerprints)
    if run is None and (finished := finished_of(arguments, study, identity)):
        return finished
    known = {} if run is None or not (run.path / COSTS).is_file() else read_json(run.path / COSTS)
    costs = planned.costs(known, progress)
    for study_run in planned.runs():
        planned.recipe(study_run, planned.steps(study_run, costs))
    if run is None:
        run = RunDirectory.create(arguments.runs_root, identity, arguments.run_dir)
    require_unchanged(run, fingerprints)
    deadline = deadline_after(arguments.max_minutes)
    log.info("run directory %s", run.path)
    on_start(run)
    started = time.monotonic()
    with run.recording(arguments.command):
        run.write_environment()
        write_json(run.path / COSTS, costs)
        note_commits(run)
        if commits := planned.commits() | (run.record.get(COMMITS) or {}):
            run.update(**{COMMITS: commits})
        context = StudyContext(
            study,
            run.path,
            arguments.cache,
            arguments.command,
            arguments.offline,
            deadline,
            commits,
            run.record.get(MODEL_COMMITS) or {},
        )
        context.pin()
        try:
            with interrupted_by_signals():
                results = StudyRunner(planned, context, costs, progress, on_start).results()
                write_report(run.path, study, results)
        except KeyboardInterrupt as interrupt:
            remedy = f"continue with `bertkit study --resume {shell_word(run.path)}`"
            raise StoppedError("interrupted", remedy) from interrupt
        run.write_results(results)
        totals = {key: sum(each[key] or 0 for each in results["runs"]) for key in ("steps", "tokens", "flops")}
        run.update(seconds=round(time.monotonic() - started, 1), **totals)
    return FinishedRun(run, results, (run,))


def write_report(directory: Path, study: Study, results: Mapping[str, Any]) -> None:
    """Write report.md and figures."""
    drawn = draw_figures(directory / "figures", study, results)
    write_text(directory / "report.md", report(study, results, [path.name for path in drawn]))

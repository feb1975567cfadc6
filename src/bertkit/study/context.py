"""Executes one run of a study: pretrains, computes every measure, and deletes the weights.

The scores of a finished run are in `measured/NAME/scores.json`; a run with this file is not repeated. A run whose
training diverges counts as finished: it has no scores, and is never chosen.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bertkit.errors import DivergedError, StoppedError
from bertkit.files import read_json, write_json
from bertkit.hub import pin_datasets, pin_models
from bertkit.jobs.manifest import hashes
from bertkit.pretraining.arguments import PretrainArguments
from bertkit.pretraining.run import run_pretraining
from bertkit.progress import Progress, silent_progress
from bertkit.recipe.resolve import Override
from bertkit.run.directory import RECORD, RunDirectory
from bertkit.run.housekeeping import free_parts
from bertkit.study.measurer import Measurer
from bertkit.study.settings import SCORES, Study
from bertkit.study.study_runs import StudyRun, pretrain_arguments, pretrain_recipe
from bertkit.training.run import OnStart, deadline_after
from bertkit.training.run_jobs import minutes_until

RUNS, MEASURED = "runs", "measured"


@dataclass(frozen=True)
class StudyContext:
    """Where and how the runs of a study are trained and measured.

    Attributes:
        study: resolved.
        directory: directory of the study's run.
        cache: the cache root.
        command: the command line, for the records.
        offline: do not use the network.
        deadline: time on the monotonic clock; None for no limit.
        commits, model_commits: of the Hub's data sets and models, which all runs read.
    """

    study: Study
    directory: Path
    cache: Path
    command: Sequence[str]
    offline: bool
    deadline: float | None = None
    commits: Mapping[str, str] = field(default_factory=dict)
    model_commits: Mapping[str, str] = field(default_factory=dict)

    def pin(self) -> None:
        """Make this process read the study's commits."""
        pin_datasets(self.commits)
        pin_models(self.model_commits)

    def minutes_left(self) -> float | None:
        """Minutes until the deadline; None if there is none."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic()) / 60

    def measures_of(self, study_run: StudyRun) -> list[str]:
        """The measures to compute for a run; for a candidate, only those that decide."""
        if study_run.candidate is None or self.study.choose is None:
            return list(self.study.measures)
        return self.study.choose.names

    def run_of(self, study_run: StudyRun) -> Path:
        """The directory of the pretraining run."""
        return self.directory / RUNS / study_run.name

    def scores_file(self, study_run: StudyRun) -> Path:
        """The file with the scores of a finished run."""
        return self.directory / MEASURED / study_run.name / SCORES

    def scores_of(self, study_run: StudyRun) -> dict[str, Any] | None:
        """The contents of scores.json; None before the run is finished."""
        file = self.scores_file(study_run)
        return read_json(file) if file.is_file() else None

    def carry_out(
        self, study_run: StudyRun, steps: int, *, progress: Progress, on_start: OnStart = lambda run: None
    ) -> None:
        """Train and measure a run, or resume it.

        Raises:
            StoppedError: a signal or the time limit came first; a checkpoint is saved.
            UsageError, DataError: see `run_pretraining` and `Measurer.measure`.
        """
        started = time.monotonic()
        directory = self.directory / MEASURED / study_run.name
        directory.mkdir(parents=True, exist_ok=True)
        keep = self.study.engine.keep
        more = [] if keep == "checkpoints" else [Override("engine.keep_checkpoints", 0, "engine.keep")]
        if report_to := self.study.engine.report_to:
            more.append(Override("engine.report_to", list(report_to), "engine.report_to"))
        arguments = pretrain_arguments(self.study, study_run, steps, cache=self.cache, offline=self.offline, more=more)
        recipe = pretrain_recipe(arguments, study_run.arm)
        document: dict[str, Any] = {
            "arm": study_run.arm,
            "seed": study_run.seed,
            "setting": dict(study_run.setting),
            "steps": steps,
            "tokens": None,
            "flops": None,
            "diverged": None,
            "answers": {},
        }
        try:
            run = self._pretrained(study_run, arguments, progress, on_start)
        except DivergedError as error:
            document["diverged"] = str(error)
        else:
            trained = time.monotonic()
            document |= {key: run.record.get(key) for key in ("tokens", "flops")}
            document["training_seconds"] = round(trained - started, 1)
            measurer = Measurer(directory, self.command, progress, self.offline, self.minutes_left)
            for name in self.measures_of(study_run):
                if self.minutes_left() == 0:
                    raise StoppedError(f"stopped by the time limit before the measure {name} of {study_run.name}")
                answer = measurer.measure(name, self.study.measures[name], run, recipe)
                document["answers"][name] = answer.document()
            document["measuring_seconds"] = round(time.monotonic() - trained, 1)
        write_json(directory / SCORES, document)
        self.free(study_run)

    def _pretrained(
        self, study_run: StudyRun, arguments: PretrainArguments, progress: Progress, on_start: OnStart
    ) -> RunDirectory:
        place = self.run_of(study_run)
        place.parent.mkdir(parents=True, exist_ok=True)
        common: dict[str, Any] = {
            "cache": self.cache,
            "offline": self.offline,
            "command": self.command,
            "max_minutes": self.minutes_left(),
        }
        if (place / RECORD).is_file():
            arguments = PretrainArguments(resume=str(place), **common)
        else:
            arguments = PretrainArguments(arguments.recipe, arguments.overrides, run_dir=place, **common)
        return run_pretraining(arguments, progress=progress, on_start=on_start).run

    def free(self, study_run: StudyRun) -> None:
        """Delete the weights of a finished run that the study does not keep, as far as they are still there."""
        keep = self.study.engine.keep
        if keep == "checkpoints":
            return
        measured = self.directory / MEASURED / study_run.name
        for path in measured.glob("*/model"):
            _free_part(path)
        for path in measured.glob("*/checkpoints"):  # of a fine-tuning that diverged
            shutil.rmtree(path, ignore_errors=True)
        run = self.run_of(study_run)
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
        if keep == "scores" or study_run.candidate is not None:
            weights = [path for name in ("config.json", "model*.safetensors") for path in run.rglob(name)]
            for part in sorted({path.relative_to(run).parts[0] for path in weights}):
                _free_part(run / part)


def carry_out_job(context: StudyContext, study_run: StudyRun, steps: int, moment: float | None) -> dict[str, str]:
    """`StudyContext.carry_out` on a worker, up to a moment of `until`; returns the hash of its outputs."""
    here = replace(context, deadline=deadline_after(minutes_until(moment)))
    here.pin()
    here.carry_out(study_run, steps, progress=silent_progress)
    return hashes([here.scores_file(study_run)])


def _free_part(directory: Path) -> None:
    """Delete a part of a run; a directory that is in no run is simply removed."""
    if (directory.parent / RECORD).is_file():
        free_parts(RunDirectory.open(directory.parent), [directory.name])
    else:
        shutil.rmtree(directory)

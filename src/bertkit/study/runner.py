"""Executes the runs of a study, in sequence or in parallel, and computes its results.

The order is: all candidates, the choice, then the scored runs seed by seed, so that an interrupted study has scores for
every arm.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from bertkit.errors import StoppedError
from bertkit.jobs.job import Job
from bertkit.progress import Progress
from bertkit.study.context import StudyContext, carry_out_job
from bertkit.study.planned import PlannedStudy
from bertkit.study.results import ChosenSetting, choose, study_results
from bertkit.study.study_runs import StudyRun, candidates_of
from bertkit.training.run import OnStart
from bertkit.training.run_jobs import run_jobs, until
from bertkit.visible import shell_word

log = logging.getLogger(__name__)


class StudyRunner:
    """All runs of one study.

    Args:
        planned: the study.
        context: trains and measures its runs.
        costs: result of `PlannedStudy.costs`.
        progress: the display.
        on_start: called with the directory of each run before its training starts.
    """

    def __init__(
        self,
        planned: PlannedStudy,
        context: StudyContext,
        costs: Mapping[str, Any],
        progress: Progress,
        on_start: OnStart,
    ) -> None:
        self.planned, self.context, self.costs = planned, context, costs
        self.progress, self.on_start, self.engine = progress, on_start, planned.study.engine
        self.runs = planned.runs()

    def results(self) -> dict[str, Any]:
        """Execute the unfinished runs and return the contents of results.json.

        Raises:
            StoppedError: a signal or the time limit came first; the message states how to continue.
        """
        study = self.planned.study
        candidates = [study_run for study_run in self.runs if study_run.candidate is not None]
        self._carry_out(candidates)
        chosen = {arm: self._chosen(arm) for arm in study.arms}
        for arm, own in chosen.items():
            if own.setting:
                log.info("%s: chosen %s", arm, own.shown)
            elif own.setting is None:
                log.warning("%s: no candidate has a score to choose by; the arm is left out", arm)
        found = {arm: own.setting for arm, own in chosen.items() if own.setting is not None}
        self.runs = self.planned.runs(found)
        scored = [study_run for study_run in self.runs if study_run.candidate is None]
        self._carry_out(scored)
        return study_results(study, chosen, [self._document(study_run) for study_run in scored])

    def _chosen(self, arm: str) -> ChosenSetting:
        study = self.planned.study
        return choose(study, arm, [self._document(study_run) for study_run in candidates_of(study, arm)])

    def _document(self, study_run: StudyRun) -> dict[str, Any]:
        """The scores of a finished run, with its directory."""
        document = self.context.scores_of(study_run)
        assert document is not None
        return {**document, "run": str(self.context.run_of(study_run).relative_to(self.context.directory))}

    def _carry_out(self, study_runs: Sequence[StudyRun]) -> None:
        """Train and measure the unfinished runs."""
        left: list[tuple[StudyRun, int]] = []
        for study_run in study_runs:
            if self.context.scores_of(study_run) is None:
                left.append((study_run, self.planned.steps(study_run, self.costs)))
            else:
                self.context.free(study_run)  # in case the study was killed in between
        try:
            if self.engine.is_parallel:
                minutes, directory = self.context.minutes_left(), self.context.directory
                run_jobs(self.engine, self._jobs(left), directory, minutes_left=minutes)
                return
            for study_run, steps in left:
                if self.context.minutes_left() == 0:
                    raise StoppedError("stopped by the time limit between two runs")
                self._announce(study_run, steps)
                self.context.carry_out(study_run, steps, progress=self.progress, on_start=self.on_start)
        except StoppedError as stopped:
            remedy = f"continue with `bertkit study --resume {shell_word(self.context.directory)}`"
            raise StoppedError(stopped.reason, remedy) from stopped

    def _jobs(self, left: Sequence[tuple[StudyRun, int]]) -> Iterator[Job]:
        for study_run, steps in left:
            self._announce(study_run, steps)
            moment = until(self.context.minutes_left())
            yield Job(study_run.name, partial(carry_out_job, self.context, study_run, steps, moment))

    def _announce(self, study_run: StudyRun, steps: int) -> None:
        number = self.runs.index(study_run) + 1
        log.info("run %d of %d: %s, %s steps%s", number, len(self.runs), study_run.shown, f"{steps:,}", self._left())

    def _left(self) -> str:
        """`, 2.5 h left`, estimated from the finished runs; empty before the first."""
        done = [(study_run, scores) for study_run in self.runs if (scores := self.context.scores_of(study_run))]
        timed = [(study_run, scores) for study_run, scores in done if "measuring_seconds" in scores]
        if not timed:
            return ""
        training = sum(scores["training_seconds"] for _, scores in timed) / sum(
            study_run.share for study_run, _ in timed
        )
        measured = sum(len(self.context.measures_of(study_run)) for study_run, _ in timed)
        measuring = sum(scores["measuring_seconds"] for _, scores in timed) / measured
        names = {study_run.name for study_run, _ in done}
        rest = [study_run for study_run in self.runs if study_run.name not in names]
        left = sum(
            study_run.share * training + len(self.context.measures_of(study_run)) * measuring for study_run in rest
        )
        return f", {_duration(left / self.engine.jobs)} left"


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{seconds / 60:.0f} min"

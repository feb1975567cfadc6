"""The pieces of a study, carried out one after another or some at a time, and its results.

Own design. The order is: all candidates, the choice, then the scored runs seed by seed, so that a study that is broken
off has something of every arm.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from bertkit.errors import StoppedError
from bertkit.progress import Progress
from bertkit.study.jobs import carry_out_together
from bertkit.study.piece_run import Workplace
from bertkit.study.pieces import Piece, candidates_of
from bertkit.study.planned import PlannedStudy
from bertkit.study.results import Chosen, choose, study_results
from bertkit.training.run import Begun

log = logging.getLogger(__name__)


class StudyWork:
    """All pieces of one study.

    Args:
        planned: the study.
        workplace: where its pieces are carried out.
        costs: of `PlannedStudy.costs`.
        progress: the display.
        begun: called with the directory of each run before its training starts.
        jobs: pieces at a time.
    """

    def __init__(
        self,
        planned: PlannedStudy,
        workplace: Workplace,
        costs: Mapping[str, Any],
        progress: Progress,
        begun: Begun,
        jobs: int = 1,
    ) -> None:
        self.planned, self.workplace, self.costs = planned, workplace, costs
        self.progress, self.begun, self.jobs = progress, begun, jobs
        self.pieces = planned.pieces()

    def results(self) -> dict[str, Any]:
        """Carry out what is not finished; the contents of results.json.

        Raises:
            StoppedError: a signal or the time limit came first; the message says how to go on.
        """
        study = self.planned.study
        candidates = [piece for piece in self.pieces if piece.candidate is not None]
        self._carry_out(candidates)
        chosen = {arm: self._chosen(arm) for arm in study.arms}
        for arm, own in chosen.items():
            if own.setting:
                log.info("%s: chosen %s", arm, own.shown)
            elif own.setting is None:
                log.warning("%s: no candidate has a score to be chosen by; the arm is left out", arm)
        found = {arm: own.setting for arm, own in chosen.items() if own.setting is not None}
        self.pieces = self.planned.pieces(found)
        scored = [piece for piece in self.pieces if piece.candidate is None]
        self._carry_out(scored)
        return study_results(study, chosen, [self._document(piece) for piece in scored])

    def _chosen(self, arm: str) -> Chosen:
        study = self.planned.study
        return choose(study, arm, [self._document(piece) for piece in candidates_of(study, arm)])

    def _document(self, piece: Piece) -> dict[str, Any]:
        """What is known of a finished piece, with its directory."""
        document = self._scores(piece)
        assert document is not None
        return {**document, "run": str(self.workplace.run_of(piece).relative_to(self.workplace.directory))}

    def _carry_out(self, pieces: Sequence[Piece]) -> None:
        """Those that are not finished."""
        left = [(piece, self.planned.steps(piece, self.costs)) for piece in pieces if self._scores(piece) is None]
        try:
            if self.jobs > 1:
                carry_out_together(self.workplace, left, self.jobs, self._announce)
                return
            for piece, steps in left:
                if self.workplace.minutes_left() == 0:
                    raise StoppedError("stopped by the time limit between two runs")
                self._announce(piece, steps)
                self.workplace.carry_out(piece, steps, progress=self.progress, begun=self.begun)
        except StoppedError as stopped:
            remedy = f"go on with `bertkit study --resume {self.workplace.directory}`"
            raise StoppedError(stopped.reason, remedy) from stopped

    def _scores(self, piece: Piece) -> dict[str, Any] | None:
        return self.workplace.scores_of(piece)

    def _announce(self, piece: Piece, steps: int) -> None:
        number = self.pieces.index(piece) + 1
        log.info("run %d of %d: %s, %s steps%s", number, len(self.pieces), piece.shown, f"{steps:,}", self._left())

    def _left(self) -> str:
        """`, 2.5 h left`, judged by the pieces that are done; nothing before there is one."""
        done = [(piece, scores) for piece in self.pieces if (scores := self._scores(piece))]
        timed = [(piece, scores) for piece, scores in done if "measuring_seconds" in scores]
        if not timed:
            return ""
        training = sum(scores["training_seconds"] for _, scores in timed) / sum(piece.share for piece, _ in timed)
        asked = sum(len(self.workplace.asked(piece)) for piece, _ in timed)
        measuring = sum(scores["measuring_seconds"] for _, scores in timed) / asked
        names = {piece.name for piece, _ in done}
        rest = [piece for piece in self.pieces if piece.name not in names]
        left = sum(piece.share * training + len(self.workplace.asked(piece)) * measuring for piece in rest)
        return f", {_duration(left / self.jobs)} left"


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{seconds / 60:.0f} min"

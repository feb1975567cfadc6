"""One piece of a study: pretrained, asked every measure, and its disk freed.

Own design. What is known of a finished piece is one file, `measured/NAME/scores.json`; a piece that has it is not
repeated. A run whose training diverges is a finished piece, too: it has no scores, and is never chosen.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertkit.errors import DivergedError
from bertkit.files import read_json, write_json
from bertkit.pretraining.arguments import PretrainArguments
from bertkit.pretraining.run import run_pretraining
from bertkit.progress import Progress
from bertkit.recipe.resolve import Override
from bertkit.run.directory import RECORD, RunDirectory
from bertkit.study.measuring import Asking
from bertkit.study.pieces import Piece, piece_arguments, piece_recipe
from bertkit.study.settings import Study
from bertkit.training.run import Begun

RUNS, MEASURED, SCORES = "runs", "measured", "scores.json"


@dataclass(frozen=True)
class Workplace:
    """Where and how the pieces of a study are carried out.

    Attributes:
        study: resolved.
        directory: of the study's run.
        cache: the cache's root.
        command: the command line, for the records.
        offline: use no network.
        deadline: on the monotonic clock; None: no limit.
    """

    study: Study
    directory: Path
    cache: Path
    command: Sequence[str]
    offline: bool
    deadline: float | None = None

    def minutes_left(self) -> float | None:
        """Until the deadline; None where there is none."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic()) / 60

    def asked(self, piece: Piece) -> list[str]:
        """The measures that a piece is asked: of a candidate those that decide alone."""
        if piece.candidate is None or self.study.choose is None:
            return list(self.study.measures)
        return self.study.choose.names

    def run_of(self, piece: Piece) -> Path:
        """The directory of a piece's pretraining run."""
        return self.directory / RUNS / piece.name

    def scores_of(self, piece: Piece) -> dict[str, Any] | None:
        """What is known of a finished piece; None before it is finished."""
        file = self.directory / MEASURED / piece.name / SCORES
        return read_json(file) if file.is_file() else None

    def carry_out(self, piece: Piece, steps: int, *, progress: Progress, begun: Begun = lambda run: None) -> None:
        """Train and measure a piece, or go on with it.

        Raises:
            StoppedError: a signal or the time limit came first; a checkpoint is saved.
            UsageError, DataError: see `run_pretraining` and `Asking.ask`.
        """
        started = time.monotonic()
        directory = self.directory / MEASURED / piece.name
        directory.mkdir(parents=True, exist_ok=True)
        keep = self.study.engine.keep
        more = [] if keep == "checkpoints" else [Override("engine.keep_checkpoints", 0, "engine.keep")]
        arguments = piece_arguments(self.study, piece, steps, cache=self.cache, offline=self.offline, more=more)
        recipe = piece_recipe(arguments, piece.arm)
        document: dict[str, Any] = {
            "arm": piece.arm,
            "seed": piece.seed,
            "setting": dict(piece.setting),
            "steps": steps,
            "tokens": None,
            "diverged": None,
            "answers": {},
        }
        try:
            run = self._pretrained(piece, arguments, progress, begun)
        except DivergedError as error:
            document["diverged"] = str(error)
        else:
            trained = time.monotonic()
            document |= {"tokens": run.record["tokens"], "training_seconds": round(trained - started, 1)}
            asking = Asking(directory, self.command, progress, self.offline, self.minutes_left)
            for name in self.asked(piece):
                answer = asking.ask(name, self.study.measure(name), run, recipe)
                document["answers"][name] = answer.document()
            document["measuring_seconds"] = round(time.monotonic() - trained, 1)
        write_json(directory / SCORES, document)
        self._free(piece)

    def _pretrained(self, piece: Piece, arguments: PretrainArguments, progress: Progress, begun: Begun) -> RunDirectory:
        place = self.run_of(piece)
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
        return run_pretraining(arguments, progress=progress, begun=begun).run

    def _free(self, piece: Piece) -> None:
        """Delete the weights that the study does not keep."""
        keep = self.study.engine.keep
        if keep == "checkpoints":
            return
        for path in (self.directory / MEASURED / piece.name).glob("*/model"):
            shutil.rmtree(path)
        run = self.run_of(piece)
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
        if keep == "scores" or piece.candidate is not None:
            for path in run.glob("*/config.json"):
                shutil.rmtree(path.parent)

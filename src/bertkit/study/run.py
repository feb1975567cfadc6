"""Run `bertkit study`: choose each arm's settings, score it on fresh seeds, and write results, report and figures.

Own design (contract: the run directory). A study is a run directory:

    RUN/recipe.yaml          the study, resolved
    RUN/costs.json           measured cost of a step of each arm's settings
    RUN/runs/PIECE/          a pretraining run each
    RUN/measured/PIECE/      its measurements, a run directory each, and scores.json
    RUN/results.json, report.md, figures/
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from bertkit.errors import StoppedError, UsageError
from bertkit.files import read_json, write_json, write_text
from bertkit.pretraining.arguments import source_overrides
from bertkit.pretraining.recipe import Recipe
from bertkit.pretraining.run import open_shards
from bertkit.progress import Progress
from bertkit.recipe.find import find_recipe, shipped_directory
from bertkit.recipe.hashing import what_hash
from bertkit.run.directory import RECIPE, RunDirectory
from bertkit.study.budget import StepCost, cost_key, step_cost
from bertkit.study.check import check_asked, check_measures, check_recipes
from bertkit.study.piece_run import Workplace
from bertkit.study.pieces import Piece, candidates_of, piece_arguments, piece_recipe, scored_of, settings_of
from bertkit.study.results import Chosen, choose, study_results
from bertkit.study.settings import KIND, Study, changed_study, load_study
from bertkit.training.run import (
    Begun,
    FinishedRun,
    RunArguments,
    deadline_after,
    identity_of,
    require_unchanged,
    resumed_recipe,
    run_of,
)

COSTS = "costs.json"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StudyArguments(RunArguments[Study]):
    """The command line of a study.

    Attributes:
        sources: text to pretrain on, in place of the study's; empty for its own.
        data_dir: where relative paths of measures start; None: the working directory.
        arms: those to compare; empty for all.
    """

    sources: Sequence[str] = ()
    data_dir: str | None = None
    arms: Sequence[str] = ()

    kind: ClassVar[str] = KIND

    def requested(self) -> Study:
        if self.recipe is None:
            raise UsageError("give a study FILE, such as `objectives`, which ships, or --resume RUN")
        study = load_study(self.recipe, self.overrides, arms=self.arms)
        return located(study, self.sources, Path(self.data_dir or ".").expanduser())

    def recorded(self, run: RunDirectory) -> Study:
        return load_study(str(run.path / RECIPE))

    def changed(self, recorded: Study) -> Study:
        return changed_study(recorded, self.overrides)


def located(study: Study, sources: Sequence[str], folder: Path) -> Study:
    """The study with full paths, so that its record can be carried out from anywhere."""
    base = find_recipe(study.recipe)
    recipe = base.stem if base.parent == shipped_directory() else str(base.absolute())
    common = study.set | {override.key: override.value for override in source_overrides(sources)}
    measures = {name: measure.located(folder) for name, measure in study.measures.items()}
    return study.model_copy(update={"recipe": recipe, "set": common, "measures": measures})


@dataclass(frozen=True)
class PlannedStudy:
    """A study whose every recipe is loaded and checked.

    Attributes:
        study: resolved.
        cache: the cache's root.
        offline: use no network.
    """

    study: Study
    cache: Path
    offline: bool

    @cached_property
    def recipes(self) -> dict[str, list[tuple[dict[str, Any], Recipe]]]:
        """Each arm's settings with the recipe that they make, at the recipe's own steps and the first seed."""
        return {
            arm: [(setting, self.recipe(Piece(arm, setting, self.study.seeds[0]), None)) for setting in settings]
            for arm in self.study.arms
            for settings in [settings_of(self.study, arm)]
        }

    def recipe(self, piece: Piece, steps: int | None) -> Recipe:
        """Of a piece."""
        return piece_recipe(
            piece_arguments(self.study, piece, steps, cache=self.cache, offline=self.offline), piece.arm
        )

    def check(self) -> None:
        """Refuse what the first step would be too late for.

        Raises:
            UsageError, DataError: see check.py.
        """
        check_recipes(self.study, self.recipes)
        check_asked(self.study, {arm: own[0][1] for arm, own in self.recipes.items()})
        check_measures(self.study, offline=self.offline)

    def pieces(self, chosen: Mapping[str, Mapping[str, Any]] | None = None) -> list[Piece]:
        """All runs; the scored ones are of the chosen settings, or of an arm's first where nothing is chosen yet.

        Args:
            chosen: each arm's settings, of arms that have a choice.
        """
        arms = list(self.study.arms)
        settings = {arm: own[0][0] for arm, own in self.recipes.items()} if chosen is None else chosen
        candidates = [piece for arm in arms for piece in candidates_of(self.study, arm)]
        # Seed by seed, so that a study that is broken off has something of every arm.
        scored = [
            scored_of(self.study, arm, settings[arm])[n]
            for n in range(len(self.study.seeds))
            for arm in arms
            if arm in settings
        ]
        return [*candidates, *scored]

    def fingerprints(self, progress: Progress) -> dict[str, str | None]:
        """Of the text of all arms, and of all recipes that may be run."""
        recipes = [recipe for own in self.recipes.values() for _, recipe in own]
        corpora: dict[str, str] = {}
        for recipe in recipes:
            key = _text_key(recipe)
            if key not in corpora:
                shards = open_shards(recipe, cache=self.cache, offline=self.offline, progress=progress)
                corpora[key] = shards.fingerprint
        return {"data": _joint(corpora.values()), "recipe": _joint(map(what_hash, recipes))}

    def costs(self, known: Mapping[str, Any], progress: Progress) -> dict[str, dict[str, float]]:
        """The cost of a step of every recipe, by its `cost_key`, measured where it is not known."""
        found = dict(known)
        recipes = {cost_key(recipe): recipe for own in self.recipes.values() for _, recipe in own}
        with progress("cost of a step", len(recipes), "settings") as meter:
            for done, (key, recipe) in enumerate(recipes.items(), start=1):
                if key not in found:
                    shards = open_shards(recipe, cache=self.cache, offline=self.offline, progress=progress)
                    found[key] = vars(step_cost(recipe, shards, cache=self.cache))
                meter.update(done)
        return found

    def steps(self, piece: Piece, costs: Mapping[str, Any]) -> int:
        """Updates of a piece."""
        recipe = next(recipe for setting, recipe in self.recipes[piece.arm] if setting == dict(piece.setting))
        return StepCost(**costs[cost_key(recipe)]).steps(self.study.budget, piece.share)


def run_study(arguments: StudyArguments, *, progress: Progress, begun: Begun = lambda run: None) -> FinishedRun:
    """Start or resume a study and carry it out to its end.

    Args:
        arguments: of the command line.
        progress: the display.
        begun: called with each run's directory before its work starts.

    Raises:
        UsageError, DataError: the study or its data are at fault.
        StoppedError: a signal or the time limit came first.
    """
    run = None if arguments.resume is None else run_of(arguments)
    study = arguments.requested() if run is None else resumed_recipe(arguments, run)
    if run is not None and (finished := FinishedRun.done(run)):
        return finished
    planned = PlannedStudy(study, arguments.cache, arguments.offline)
    planned.check()
    fingerprints = planned.fingerprints(progress)
    known = {} if run is None or not (run.path / COSTS).is_file() else read_json(run.path / COSTS)
    costs = planned.costs(known, progress)
    for piece in planned.pieces():
        planned.recipe(piece, planned.steps(piece, costs))
    if run is None:
        identity = identity_of(arguments, study, fingerprints)
        run = RunDirectory.create(arguments.runs_root, identity, arguments.run_dir)
    require_unchanged(run, fingerprints)
    workplace = Workplace(
        study,
        run.path,
        arguments.cache,
        arguments.command,
        arguments.offline,
        deadline_after(arguments.max_minutes),
    )
    log.info("run directory %s", run.path)
    begun(run)
    started = time.monotonic()
    with run.recording(arguments.command):
        run.write_environment()
        write_json(run.path / COSTS, costs)
        results = _Work(planned, workplace, costs, progress, begun).results()
        write_report(run.path, study, results)
        run.write_results(results)
        totals = {key: sum(each[key] or 0 for each in results["runs"]) for key in ("steps", "tokens")}
        run.update(seconds=round(time.monotonic() - started, 1), **totals)
    return FinishedRun(run, results, (run,))


class _Work:
    """Carries out the pieces of a study one after another."""

    def __init__(
        self,
        planned: PlannedStudy,
        workplace: Workplace,
        costs: Mapping[str, Any],
        progress: Progress,
        begun: Begun,
    ) -> None:
        self.planned, self.workplace, self.costs = planned, workplace, costs
        self.progress, self.begun = progress, begun
        self.pieces = planned.pieces()

    def results(self) -> dict[str, Any]:
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
        document = self.workplace.scores_of(piece)
        assert document is not None
        return {**document, "run": str(self.workplace.run_of(piece).relative_to(self.workplace.directory))}

    def _carry_out(self, pieces: Sequence[Piece]) -> None:
        remedy = f"go on with `bertkit study --resume {self.workplace.directory}`"
        for piece in pieces:
            if self.workplace.scores_of(piece) is not None:
                continue
            if self.workplace.minutes_left() == 0:
                raise StoppedError("stopped by the time limit between two runs", remedy)
            steps = self.planned.steps(piece, self.costs)
            number = self.pieces.index(piece) + 1
            log.info("run %d of %d: %s, %s steps%s", number, len(self.pieces), piece.shown, f"{steps:,}", self._left())
            try:
                self.workplace.carry_out(piece, steps, progress=self.progress, begun=self.begun)
            except StoppedError as stopped:
                raise StoppedError(stopped.reason, remedy) from stopped
            except KeyboardInterrupt as interrupt:
                raise StoppedError(f"interrupted in {piece.name}", remedy) from interrupt

    def _left(self) -> str:
        """`, 2.5 h left`, judged by the pieces that are done; nothing before there is one."""
        done = [(piece, scores) for piece in self.pieces if (scores := self.workplace.scores_of(piece))]
        timed = [(piece, scores) for piece, scores in done if "measuring_seconds" in scores]
        if not timed:
            return ""
        training = sum(scores["training_seconds"] for _, scores in timed) / sum(piece.share for piece, _ in timed)
        measuring = sum(scores["measuring_seconds"] for _, scores in timed) / len(timed)
        names = {piece.name for piece, _ in done}
        left = sum(piece.share * training + measuring for piece in self.pieces if piece.name not in names)
        return f", {_duration(left)} left"


def write_report(directory: Path, study: Study, results: Mapping[str, Any]) -> None:
    """The results for people: report.md, and figures."""
    from bertkit.study.figures import draw_figures
    from bertkit.study.report import report

    drawn = draw_figures(directory / "figures", study, results)
    write_text(directory / "report.md", report(study, results, [path.name for path in drawn]))


def _text_key(recipe: Recipe) -> str:
    """Of the recipes with the same shards."""
    data = recipe.data.model_dump(mode="json", include={"sources", "languages", "reading", "language_smoothing"})
    return json.dumps([data, recipe.tokenizer.model_dump(mode="json")], sort_keys=True)


def _joint(hashes: Any) -> str:
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{seconds / 60:.0f} min"

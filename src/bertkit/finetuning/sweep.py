"""The runs of a fine-tuning suite, and the choice of the best when they are done.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 4.1 and appendix A.3: several seeds, and a grid to choose from on
dev. Sibling run.py trains them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bertkit.errors import UsageError
from bertkit.files import json_sha256
from bertkit.finetuning.inputs import CustomTask
from bertkit.finetuning.recipe import FinetuneRecipe, changed
from bertkit.finetuning.search import MOST_RUNS, settings_of
from bertkit.finetuning.trainer import seed_summaries
from bertkit.metrics import signed_score
from bertkit.recipe.resolve import Override
from bertkit.run.directory import RunDirectory

_LONGEST_SETTING = 200
"""Bytes of a setting in a directory's name, of which file systems allow 255; a longer one is replaced by its hash."""


@dataclass(frozen=True)
class SweepRun:
    """One run of a suite: its recipe, its value for each key of the grid, and its cross-validation fold."""

    recipe: FinetuneRecipe
    setting: Mapping[str, str]
    fold: int | None = None

    @property
    def name(self) -> str:
        """Its directory below the suite's."""
        setting = "-".join(f"{key}={value}" for key, value in self.setting.items()).replace("/", "_")
        if len(setting.encode()) > _LONGEST_SETTING:
            setting = f"setting={json_sha256(dict(self.setting))[:16]}"
        parts = [setting] if setting else []
        parts += [] if self.fold is None else [f"fold={self.fold}"]
        return "-".join([*parts, f"seed={self.recipe.seed}"])


_EXAMPLES = ("task.train", "task.dev", "task.test", "task.split.", "task.columns.", "task.reading.")
"""Beginnings of keys that decide which examples are trained on and evaluated."""


def sweep_runs(
    recipe: FinetuneRecipe, seeds: Sequence[int], grid: Mapping[str, Sequence[str]], trials: int | None = None
) -> list[SweepRun]:
    """The runs of a suite: every setting, each with every fold and every seed.

    Args:
        recipe: of all of them.
        seeds: the first one is also used to draw `trials`.
        grid, trials: see `settings_of`.

    Raises:
        UsageError: an invalid value, a key that the suite itself sets for each run, or more than `MOST_RUNS` runs.
    """
    if "seed" in grid:
        raise UsageError(
            f"--grid seed={','.join(grid['seed'])}: every setting has the same seeds; give them with --seeds"
        )
    if "task.split.fold" in grid and folds_of(recipe) != [None]:
        raise UsageError("--grid task.split.fold: a cross-validation has one run per fold anyway; leave it out")
    if others := sorted(key for key in grid if key.startswith(_EXAMPLES) and key != "task.split.fold"):
        raise UsageError(
            f"--grid {others[0]}: the settings of a suite are compared on the same examples; give it with --set, in one"
            " command per value"
        )
    settings = settings_of(grid, trials, seed=seeds[0])
    count = len(settings) * len(seeds)
    if count > MOST_RUNS:
        raise UsageError(f"--grid and --seeds make {count:,} runs, more than {MOST_RUNS:,}; try fewer values")
    found = []
    for setting in settings:
        given = [Override.parse(f"{key}={value}", option="--grid") for key, value in setting.items()]
        with_setting = changed(recipe, given)
        for fold in folds_of(recipe):
            of_fold = [] if fold is None else [Override("task.split.fold", fold)]
            found += [
                SweepRun(changed(with_setting, [Override("seed", seed), *of_fold]), setting, fold) for seed in seeds
            ]
    return found


def folds_of(recipe: FinetuneRecipe) -> list[int | None]:
    """The folds with one run each; [None] without cross-validation."""
    task = recipe.task
    if not isinstance(task, CustomTask) or task.split is None or not task.split.is_suite:
        return [None]
    return list(range(task.split.folds or 0))


def suite_results(
    finished: Sequence[tuple[SweepRun, RunDirectory]], primary: Mapping[str, str], split: str
) -> dict[str, Any]:
    """The contents of a suite's results.json: every run, each setting over the seeds, and the choice.

    The chosen setting has the best mean of the primary metric on `split` (over the tasks, if there are several); the
    first one if tied. Its best run is chosen, in a cross-validation that of the best fold.

    Args:
        finished: the runs.
        primary: metric of each task.
        split: the split whose scores decide.
    """
    settings: dict[str, list[tuple[SweepRun, RunDirectory, dict[str, Any]]]] = {}
    for sweep_run, run in finished:
        results = run.results
        assert results is not None
        settings.setdefault(json.dumps(dict(sweep_run.setting)), []).append((sweep_run, run, results))
    tables = {setting: _tables(runs) for setting, runs in settings.items()}
    is_one = len(primary) == 1

    def only(by_task: Mapping[str, Any]) -> Any:
        """The only task's value, or all of them."""
        return next(iter(by_task.values())) if is_one else dict(by_task)

    chosen = max(tables, key=lambda name: _mean([(m, tables[name][t][m]["mean"]) for t, m in primary.items()]))
    best = max(settings[chosen], key=lambda each: _mean([(m, _seed_scores(each[2])[t][m]) for t, m in primary.items()]))
    first = settings[chosen][0][2]
    named = next(iter(primary.values())) if is_one else " and ".join(f"{t} {m}" for t, m in primary.items())
    return {
        "tasks": tables[chosen],
        "primary": only(primary),
        "chosen": {
            "setting": json.loads(chosen),
            "by": f"mean {named} on {split}",
            "run": str(best[1].path.resolve()),
            "seed": best[0].recipe.seed,
            **({} if best[0].fold is None else {"fold": best[0].fold}),
        },
        "settings": [{"setting": json.loads(setting), "scores": only(table)} for setting, table in tables.items()],
        "runs": [
            {
                "run": str(run.path.resolve()),
                "seed": sweep_run.recipe.seed,
                "setting": dict(sweep_run.setting),
                **({} if sweep_run.fold is None else {"fold": sweep_run.fold}),
                "scores": only(_seed_scores(results)),
                "degenerate": results["degenerate"],
            }
            for runs in settings.values()
            for sweep_run, run, results in runs
        ],
        "degenerate": sum(results["degenerate"] is not None for runs in settings.values() for *_, results in runs),
        **{key: first[key] for key in ("truncation", "labels", "in_train", "skipped") if key in first},
    }


def _tables(runs: Sequence[tuple[SweepRun, RunDirectory, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Each task's scores over the seeds; in a cross-validation over its runs, ordered by fold and seed."""
    seeds = {
        sweep_run.recipe.seed if sweep_run.fold is None else number: _seed_scores(results)
        for number, (sweep_run, _, results) in enumerate(runs)
    }
    tasks = next(iter(seeds.values()))
    return {task: seed_summaries({seed: scores[task] for seed, scores in seeds.items()}) for task in tasks}


def _seed_scores(results: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """A single run's scores by task and name."""
    return {
        task: {name: summary["seeds"][0] for name, summary in scores.items()}
        for task, scores in results["tasks"].items()
    }


def _mean(scores: Sequence[tuple[str, float | None]]) -> float:
    """The mean over tasks, given each one's primary metric and score; greater is better."""
    return sum(signed_score(name, score) for name, score in scores) / len(scores)

"""What a model has learned at which point: scores each model that a run has kept on BabyLM's fast samples.

Charpentier et al. 2025, arXiv:2502.10645: models are scored after each million words up to ten, then after each ten
million. `engine.models_at_words` (pretraining/words.py) keeps these models. Sibling run.py scores one model; here each
model has its own run, so that a stopped comparison repeats nothing.

github.com/babylm-org/babylm-eval, strict/evaluation_pipeline/collate_preds.py: submissions contain each checkpoint's
share of correct answers in each subset, in the order of the checkpoints, and the script looks for predictions in
folders named `chck_1M`, `chck_2M`, ...
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bertkit.errors import DataError, UsageError
from bertkit.evaluation.babylm.acquisition import (
    CHILDREN,
    CONTEXTS,
    OFFICIAL_GUESS,
    agreement,
    measure_surprisals,
    official_document,
    read_children,
    read_contexts,
)
from bertkit.evaluation.babylm.run import evaluate_babylm
from bertkit.evaluation.babylm.submission import BACKENDS, FAST_SIZES, FOLDER
from bertkit.evaluation.babylm.tasks import places_of
from bertkit.evaluation.loaded_model import saved_at_words, short_name
from bertkit.evaluation.run import EvalArguments, EvaluationResult, measure_or_reuse
from bertkit.evaluation.settings import BabylmSettings
from bertkit.files import write_text
from bertkit.pretraining.words import FOLDER as MODELS
from bertkit.pretraining.words import milestone_name
from bertkit.progress import Progress, silent_progress
from bertkit.run.directory import RECORD, RunDirectory, RunIdentity

SUITE = "babylm-checkpoints"
AOA = "aoa"
OFFICIAL_MARKS = (*(million * 1_000_000 for million in range(1, 11)), *(ten * 10_000_000 for ten in range(2, 11)))
"""Words read at the checkpoints that the leaderboard accepts for strict-small."""


def kept_models(run: str) -> dict[int, Path]:
    """The models that a run has kept, by words read, in ascending order.

    Raises:
        UsageError: it is not a run directory.
        DataError: it has kept none.
    """
    path = Path(run)
    if not (path / RECORD).is_file():
        raise UsageError(f"--checkpoints: {run} is not a run directory; give the run of `bertkit pretrain`")
    found = saved_at_words(path)
    if not found:
        remedy = "train with --set engine.models_at_words=[1000000, 2000000]"
        raise DataError(f"{path / MODELS}: the run has kept no models at given numbers of words; {remedy}")
    return found


def evaluate_checkpoints(
    arguments: EvalArguments, data: Path | None, settings: BabylmSettings, *, progress: Progress = silent_progress
) -> EvaluationResult:
    """Score each model that the run has kept, and write what the leaderboard accepts for checkpoints.

    Args:
        arguments: the run, and where to compute and write.
        data: the challenge's `evaluation_data`, or a folder with its fast parts.
        settings: which parts to score, and how; the sample has to be the fast one.
        progress: the display.

    Raises:
        UsageError: the model is not a run, or the sample is the full one.
        DataError: the run has kept no models; or as for `evaluate_babylm`.
    """
    if settings.sample != "fast":
        raise UsageError("--checkpoints needs --sample fast, as officially; the full sets are for the final model")
    models = kept_models(arguments.model)
    scored = {
        words: evaluate_babylm(
            replace(arguments, model=str(model), run_dir=None, fresh=False), data, settings, progress=progress
        )
        for words, model in models.items()
    }
    folder = None if settings.only else find_acquisition(data)
    ages = None if folder is None else _acquisition(arguments, folder, models, settings, progress)
    done_runs = [*scored.values(), *(() if ages is None else ages.measured.values())]
    identity = _identity(arguments, settings, done_runs)

    def compute(run: RunDirectory) -> dict[str, Any]:
        last = list(scored.values())[-1].results
        left_out = {task: reason for task, reason in last["left_out"].items() if task not in (AOA, "glue")}
        if ages is None and not settings.only:
            left_out[AOA] = f"no aoa/{CONTEXTS} in {data} or in its full_eval"
        return {
            "suite": SUITE,
            "model": arguments.model,
            "tasks": last["tasks"],
            "average": None,
            "checkpoints": [
                {"words": words, "tasks": each.results["tasks"], "run": str(each.run.path)}
                for words, each in scored.items()
            ],
            "aoa": None if ages is None else ages.figures,
            "left_out": left_out,
            "warnings": last["warnings"],
            "protocol": last["protocol"],
            "submission": _write_submission(run.path, short_name(arguments.model), scored, ages),
        }

    return measure_or_reuse(identity, arguments, compute)


def find_acquisition(data: Path | None) -> Path | None:
    """The folder with words in context and children's shares; None if it does not exist."""
    found = [] if data is None else [place / AOA for place in places_of(data)]
    return next((each for each in found if (each / CONTEXTS).is_file() and (each / CHILDREN).is_file()), None)


@dataclass(frozen=True)
class Ages:
    """The results of the age of acquisition.

    Attributes:
        measured: surprisals by words read.
        figures: the correlations with children's ages.
        document: the leaderboard's document.
    """

    measured: dict[int, EvaluationResult]
    figures: dict[str, Any]
    document: Any


def _acquisition(
    arguments: EvalArguments, folder: Path, models: Mapping[int, Path], settings: BabylmSettings, progress: Progress
) -> Ages:
    words, children = read_contexts(folder / CONTEXTS), read_children(folder / CHILDREN)
    measured = {}
    for read, model in models.items():
        own = replace(arguments, model=str(model), run_dir=None, fresh=False)
        measured[read] = measure_surprisals(own, words, folder / CONTEXTS, settings, progress)
    by_read = {read: each.results["surprisals"] for read, each in measured.items()}
    vocabulary = math.log(next(iter(measured.values())).results["vocabulary"])
    figures = {
        AOA: agreement(by_read, children, OFFICIAL_GUESS),
        "aoa_own_vocabulary": agreement(by_read, children, vocabulary),
        "definition": "Pearson's correlation between the logarithm of the number of training words at which a word"
        " counts as acquired and the age at which half of the children say it",
    }
    by_name = {_revision(read): (read, each) for read, each in measured.items()}
    return Ages(measured, figures, official_document(short_name(arguments.model), by_name, words))


def _revision(words: int) -> str:
    """The name of a checkpoint in the official scripts."""
    return f"chck_{milestone_name(words)}"


def _identity(arguments: EvalArguments, settings: BabylmSettings, scored: Sequence[EvaluationResult]) -> RunIdentity:
    chosen = settings.model_dump(mode="json")
    hashes = [each.run.record["what_hash"] for each in scored]
    return RunIdentity.of_measurement(
        "eval",
        SUITE,
        {"kind": "eval", "suite": SUITE, "models": [arguments.model], "settings": chosen},
        {"kind": "eval", "name": SUITE, "settings": chosen, "runs": hashes},
        seed=settings.seed,
        command=arguments.command,
        fingerprints=dict(scored[-1].run.record["fingerprints"]),
    )


def official_shares(results: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """What the leaderboard accepts for a checkpoint, by task: shares by subset, correlations, gains."""
    found: dict[str, dict[str, float | None]] = {}
    for task, metrics in results["tasks"].items():
        if "accuracy" in metrics:
            found[task] = {name: each["accuracy"] for name, each in results["subsets"][task].items()}
        elif "spearman" in metrics:
            found[task] = {task: metrics["spearman"]["mean"]}
        else:
            found[task] = {"spr": metrics["self_paced_reading"]["mean"], "rt": metrics["eye_tracking"]["mean"]}
    return found


def _write_submission(
    run: Path, name: str, scored: Mapping[int, EvaluationResult], ages: Ages | None
) -> dict[str, Any] | None:
    """Write predictions by checkpoint and the document of their shares; None if no official backend scores this way."""
    first = next(iter(scored.values())).results
    backend = BACKENDS.get(first["protocol"]["rule"])
    if backend is None:
        return None
    root = Path(FOLDER) / name
    for words, each in scored.items():
        (own,) = each.run.path.joinpath(FOLDER).glob("*/main")
        shutil.copytree(own, run / root / _revision(words), dirs_exist_ok=True)
    shares = [official_shares(each.results) for each in scored.values()]
    document = {task: [each[task] for each in shares] for task in shares[0]}
    file = root / f"fast_scores_{backend}.json"
    write_text(run / file, json.dumps({"fast_eval_results": document}) + "\n")
    if ages is not None:
        place = run / root / "main" / "zero_shot" / backend / "AoA_word"
        place.mkdir(parents=True, exist_ok=True)
        write_text(place / "surprisal.json", json.dumps(ages.document) + "\n")
    missing = {} if ages is not None else {AOA: "not scored"}
    missing |= {
        task: f"{first['items'].get(task, 0)} items; the leaderboard requires {size}"
        for task, size in FAST_SIZES.items()
        if first["items"].get(task, 0) != size
    }
    lacking = [milestone_name(words) for words in OFFICIAL_MARKS if words not in scored]
    if lacking:
        missing["checkpoints"] = f"without {', '.join(lacking)}"
    return {"file": str(file), "complete": not missing, "missing": missing}

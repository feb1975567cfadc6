"""`bertkit eval babylm`: every task of the BabyLM evaluation whose files are available, in one run.

The challenge: Charpentier et al. 2025, arXiv:2502.10645. Scores are counted as in the official pipeline
(github.com/babylm-org/babylm-eval, strict/), and also with ties made harmless; all in single precision.
models/scoring/rules.py scores texts. To add another way of scoring, such as that of a masked diffusion model, add a
rule there, and its official name to submission.BACKENDS.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertkit.errors import DataError, UsageError
from bertkit.evaluation.babylm.glue import GlueScores, finetune_glue, glue_files, glue_plan
from bertkit.evaluation.babylm.items import (
    COUNTS,
    ScoredItem,
    SubsetScore,
    accuracy,
    answer,
    by_subset,
    drawn,
    weights_of,
)
from bertkit.evaluation.babylm.published import BASELINES
from bertkit.evaluation.babylm.reading_times import read_reading, reading_gains, surprisals
from bertkit.evaluation.babylm.submission import (
    BACKENDS,
    choice_predictions,
    first_share,
    reading_predictions,
    write_fast_predictions,
    write_submission,
)
from bertkit.evaluation.babylm.tasks import NOT_SCORED, TASKS, BabylmTask, find_tasks
from bertkit.evaluation.blimp import NEAR_TIE
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.evaluation.run import (
    EvalArguments,
    EvaluationResult,
    finished_measurement,
    measure,
    measurement_identity,
    single_score,
)
from bertkit.evaluation.settings import BabylmSettings
from bertkit.files import sha256_of
from bertkit.finetuning.report import write_lines
from bertkit.metrics.regression import spearman_value
from bertkit.metrics.statistics import bootstrap_interval
from bertkit.models.headed import SCORING_RULE
from bertkit.models.scoring.rules import ScoringRule, choose_rule
from bertkit.progress import Progress, silent_progress
from bertkit.run.directory import RunDirectory
from bertkit.tables import write_csv
from bertkit.training.engine import Engine

SUITE = "babylm"
AVERAGED = ("blimp", "blimp_supplement", "ewok", "entity_tracking", "comps")
"""The tasks over whose accuracies the average is taken."""


@dataclass
class BabylmScores:
    """The results by task.

    Attributes:
        tasks: metrics of the contract, each with its interval.
        subsets: scores of each task's subsets.
        items: number of scored items of each task.
        parts: predictions for the leaderboard.
        left_out: why other tasks have no score.
        finetuned: the fine-tuned part, if requested.
    """

    tasks: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    subsets: dict[str, dict[str, SubsetScore]] = field(default_factory=dict)
    items: dict[str, int] = field(default_factory=dict)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    finetuned: GlueScores | None = None


def evaluate_babylm(
    arguments: EvalArguments, data: Path | None, settings: BabylmSettings, *, progress: Progress = silent_progress
) -> EvaluationResult:
    """Score the available parts and write the run: results.json, subsets.csv, predictions/TASK.jsonl and submission/.

    Args:
        arguments: the model, and where to compute and write.
        data: the challenge's `evaluation_data`, or a folder with its parts.
        settings: which parts to score, and how.
        progress: the display.

    Raises:
        DataError: no data, invalid data, or a model that cannot score text.
        UsageError: the rule does not fit the model, or the run directory is taken.
    """
    opened = _Opened.of(arguments, data, settings)
    loaded, rule, found = opened.loaded, opened.rule, opened.found
    engine = arguments.engine()
    read = [file for path in found.values() for file in _files(path)]
    files = {str(file): sha256_of(file) for file in (*read, *opened.tuned)}
    identity = measurement_identity("eval", SUITE, [loaded], settings, arguments, data=files, seed=settings.seed)
    if (done := finished_measurement(identity, arguments)) is not None:
        return EvaluationResult(done, done.results or {})
    # The longest part goes first; it continues where it was stopped.
    finetuned = None
    if settings.finetune:
        finetuned = finetune_glue(arguments, data, settings.finetune, settings.finetune_steps, progress)

    def compute(run: RunDirectory) -> dict[str, Any]:
        measured = BabylmScores(left_out=opened.left_out, finetuned=finetuned)
        for task in TASKS:
            if task.name in found:
                _measure(run, task, found[task.name], loaded, rule, settings, engine, measured, progress)
        if not measured.tasks:
            raise DataError("; ".join(dict.fromkeys(measured.left_out.values())))
        return _results(run, loaded, rule, settings, measured)

    return measure(identity, arguments, compute)


def babylm_plan(arguments: EvalArguments, data: Path | None, settings: BabylmSettings) -> dict[str, Any]:
    """The cost of the fine-tuned part before it starts, as `evaluation_plan` gives it; the other parts are not counted.

    Raises:
        UsageError: nothing is fine-tuned.
        DataError, UsageError: as for `evaluate_babylm`.
    """
    if not settings.finetune:
        raise UsageError("--plan: only fine-tuning is planned; add --finetune TASK, or leave --plan out")
    _Opened.of(arguments, data, settings)
    return glue_plan(arguments, data, settings.finetune, settings.finetune_steps) | {"suite": SUITE}


@dataclass(frozen=True)
class _Opened:
    """The model and the data of an evaluation.

    Attributes:
        loaded: the model.
        rule: how it scores a text.
        found: the data of each task that can be scored.
        left_out: why others cannot.
        tuned: the files of the tasks to fine-tune.
    """

    loaded: LoadedModel
    rule: type[ScoringRule]
    found: dict[str, Path]
    left_out: dict[str, str]
    tuned: list[Path]

    @classmethod
    def of(cls, arguments: EvalArguments, data: Path | None, settings: BabylmSettings) -> _Opened:
        """Raises:
        DataError, UsageError: see `evaluate_babylm`.
        """
        if settings.finetune and settings.sample != "full":
            raise UsageError("--finetune needs --sample full: checkpoints are not fine-tuned; leave one of them out")
        tuned = glue_files(data, settings.finetune) if settings.finetune else []
        found, left_out = find_tasks(data, settings.sample, settings.only)
        loaded = LoadedModel.load(arguments.model, offline=arguments.offline)
        return cls(loaded, choose_rule(loaded.model, settings.rule, source=arguments.model), found, left_out, tuned)


def _measure(
    run: RunDirectory,
    task: BabylmTask,
    path: Path,
    loaded: LoadedModel,
    rule: type[ScoringRule],
    settings: BabylmSettings,
    engine: Engine,
    measured: BabylmScores,
    progress: Progress,
) -> None:
    """Score one task; it is left out, with the reason, if the model cannot read its texts."""
    if task.read is None:
        words = read_reading(path)
        try:
            surprisal_N, previous_N = surprisals(loaded, words, rule.name, engine, progress)
        except DataError as error:
            measured.left_out[task.name] = str(error)
            return
        gains = reading_gains(words, surprisal_N, previous_N, settings.seed)
        measured.tasks[task.name] = {
            name: single_score(value) | {"interval": interval} for name, (value, *interval) in gains.items()
        }
        measured.items[task.name] = len(surprisal_N)
        measured.parts[task.name] = reading_predictions(surprisal_N, previous_N)
        return
    choices = drawn(task.read(path), settings.items, settings.seed)
    try:
        answered = answer(loaded, choices, rule.name, engine, progress)
    except DataError as error:
        measured.left_out[task.name] = str(error)
        return
    subsets = {name: SubsetScore.of(own) for name, own in by_subset(answered).items()}
    measured.tasks[task.name] = correlations(answered, settings.seed) if task.correlates else accuracies(task, subsets)
    measured.subsets[task.name] = subsets
    measured.items[task.name] = len(answered)
    measured.parts[task.name] = choice_predictions(task, answered)
    _write_predictions(run, task.name, answered)


def accuracies(task: BabylmTask, subsets: Mapping[str, SubsetScore]) -> dict[str, dict[str, Any]]:
    """A task's accuracy under each way of counting ties."""
    weights = weights_of(subsets, task.groups)
    found = {count: accuracy(subsets, weights, count) for count in COUNTS}
    return {count: single_score(value) | {"interval": interval} for count, (value, interval) in found.items()}


def correlations(answered: Sequence[ScoredItem], seed: int) -> dict[str, dict[str, Any]]:
    """Spearman's rho of the model's and people's shares for the first text; undefined if either is constant.

    `spearman` ranks the shares in single precision like the official code, so many round to 0 or 1 and tie;
    `spearman_unrounded` ranks their logits, in double precision.
    """
    human = [math.nan if each.choice.human is None else each.choice.human for each in answered]
    shares = {"spearman": [first_share(each) for each in answered], "spearman_unrounded": [_logit(a) for a in answered]}
    found = {}
    for name, model in shares.items():
        value = spearman_value(model, human) if len(human) > 1 else math.nan
        interval = bootstrap_interval(model, human, spearman_value, seed=seed) if math.isfinite(value) else None
        found[name] = single_score(value if math.isfinite(value) else None) | {
            "interval": None if interval is None else list(interval)
        }
    return found


def _logit(answered: ScoredItem) -> float:
    """Log-odds of the first text against the others."""
    first, *others = answered.log_p
    top = max(others)
    return first - top - math.log(math.fsum(math.exp(each - top) for each in others))


def rule_warning(loaded: LoadedModel, rule: type[ScoringRule]) -> str | None:
    """A warning if, by its config.json and its head, the model was not trained for this rule; else None."""
    trained = loaded.model.extras.get(SCORING_RULE)
    usual = choose_rule(loaded.model, None, source=loaded.name).name
    masked = {"original", "within_word_l2r"}
    if rule.name == usual or {rule.name, usual} <= masked:
        return None
    why = f"its config.json names {trained}" if trained else f"{usual} is the default for its head"
    return (
        f"{loaded.name} is scored by the rule {rule.name}, but {why}; unless it was also trained for {rule.name}, the"
        " scores are not meaningful"
    )


def average_of(values: Mapping[str, float]) -> dict[str, Any]:
    """The mean accuracy over the available tasks of AVERAGED, with the names of the missing ones."""
    over = [name for name in AVERAGED if name in values]
    return {
        "value": math.fsum(values[name] for name in over) / len(over) if over else None,
        "over": over,
        "lacking": [name for name in AVERAGED if name not in values],
        "definition": "mean accuracy of BLiMP, its supplement, EWoK, entity tracking and COMPS, as in the official"
        " pipeline",
    }


def _results(
    run: RunDirectory, loaded: LoadedModel, rule: type[ScoringRule], settings: BabylmSettings, measured: BabylmScores
) -> dict[str, Any]:
    """The contents of results.json; also writes subsets.csv and the submission."""
    rows = [
        (task, name, subset.items, *(subset.shares[count] for count in COUNTS), subset.ties, subset.near_ties)
        for task, own in measured.subsets.items()
        for name, subset in own.items()
    ]
    write_csv(run.path / "subsets.csv", ("task", "subset", "items", *COUNTS, "ties", "near_ties"), rows)
    values = {task: row[COUNTS[0]]["mean"] for task, row in measured.tasks.items() if COUNTS[0] in row}
    average = average_of(values)
    warnings = [text for text in (rule_warning(loaded, rule),) if text is not None]
    backend = BACKENDS.get(rule.name)
    if backend is None:
        warnings.append(f"the official pipeline has no backend for the rule {rule.name}, so no submission is written")
    submission = None
    if backend is not None and settings.sample == "full":
        glue = {} if measured.finetuned is None else measured.finetuned.predictions
        submission = write_submission(run.path, loaded.label or "model", backend, measured.parts, glue)
    if backend is not None and settings.sample == "fast":
        write_fast_predictions(run.path, loaded.label or "model", backend, measured.parts)
    return {
        "suite": SUITE,
        "model": loaded.name,
        "average": None if average["lacking"] else average["value"],
        "averages": {"accuracy": average},
        "tasks": measured.tasks | ({} if measured.finetuned is None else measured.finetuned.tasks),
        "subsets": {
            task: {
                name: {"items": subset.items, **subset.shares, "ties": subset.ties, "near_ties": subset.near_ties}
                for name, subset in own.items()
            }
            for task, own in measured.subsets.items()
        },
        "items": measured.items,
        "left_out": measured.left_out | _not_scored(measured, settings),
        "finetuned": None if measured.finetuned is None else _finetuned_document(measured.finetuned),
        "warnings": warnings,
        "submission": submission,
        "protocol": _protocol(rule, settings),
        "trained": loaded.training,
        "references": [dict(row) for row in BASELINES] if settings.sample == "full" and settings.items is None else [],
    }


def _not_scored(measured: BabylmScores, settings: BabylmSettings) -> dict[str, str]:
    """Why parts of the official score are missing that scoring a single model does not give."""
    if measured.finetuned is not None:
        return {**measured.finetuned.left_out, "aoa": NOT_SCORED["aoa"]}
    return {} if settings.only else NOT_SCORED


def _finetuned_document(finetuned: GlueScores) -> dict[str, Any]:
    return {
        "run": finetuned.run,
        "average": finetuned.average,
        "over": list(finetuned.tasks),
        "degenerate": finetuned.degenerate,
        "definition": "mean over the seven tasks of F1 (MRPC, QQP) or accuracy (others), from the best epoch on dev, as"
        " in the official pipeline",
    }


def _protocol(rule: type[ScoringRule], settings: BabylmSettings) -> dict[str, Any]:
    """How the scores were computed."""
    return {
        "rule": rule.name,
        "statement": rule.statement,
        "official_backend": BACKENDS.get(rule.name),
        "sample": settings.sample,
        "items": "all" if settings.items is None else f"at most {settings.items} of each subset, seed {settings.seed}",
        "compared": "sum of log-probabilities of the tokens of the completion, in nats",
        "temperature": 1.0,
        "dtype": "float32 model and log-softmax, float64 sums",
        "accuracy": "as in the official pipeline: the right text has the highest score; a tie counts as right",
        "accuracy_ties_shared": "1/m if the right text is one of m texts with the highest score",
        "accuracy_ties_wrong": "a tie counts as wrong",
        "near_ties": f"items without a tie whose best two texts differ by less than {NEAR_TIE} nats",
        "entity_tracking": "mean over numbers of operations in each of the three files, then over the files",
        "reading": "gain in R2 as a share of the largest possible gain, which is the squared partial correlation",
        "interval": "95%; accuracies: normal approximation, items sampled within subsets; others: bootstrap, 1,000"
        " resamples",
    }


def _write_predictions(run: RunDirectory, task: str, answered: Sequence[ScoredItem]) -> None:
    """Write one line per item: the scores of its texts, and the number of the chosen one."""
    counts = Counter[str]()
    rows = []
    for each in answered:
        subset = each.choice.subset
        chosen = {"prediction": each.chosen, "tied": each.tied, "nats": list(each.log_p)}
        rows.append({"task": task, "subset": subset, "id": f"{subset}_{counts[subset]}", **chosen})
        counts[subset] += 1
    write_lines(run.path / "predictions" / f"{task}.jsonl", rows)


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())

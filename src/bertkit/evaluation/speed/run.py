"""`bertkit eval speed`: size and speed of models, with their scores.

timing.py measures times, record.py finds the scores, results.py assembles the results and report.py displays them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bertkit.errors import UsageError
from bertkit.evaluation.run import EvaluationResult, MeasurementArguments, measure, measurement_identity
from bertkit.evaluation.settings import SpeedSettings
from bertkit.evaluation.speed.report import write_report
from bertkit.evaluation.speed.results import SUITE, common_tasks, speed_results
from bertkit.evaluation.speed.stopwatch import processor_share, threads
from bertkit.evaluation.speed.timing import load_timed_models, time_models
from bertkit.files import read_json
from bertkit.progress import Progress, silent_progress
from bertkit.run.directory import ENVIRONMENT, RunDirectory


def evaluate_speed(
    arguments: MeasurementArguments,
    settings: SpeedSettings,
    *,
    results: Sequence[str] = (),
    methods: Sequence[str] = (),
    progress: Progress = silent_progress,
) -> EvaluationResult:
    """Time the models and write the run: results.json, tables/, figures/.

    Args:
        arguments: where to compute and write.
        settings: which models, and what to time.
        results: runs with scores of the models, see `scores_by_model`.
        methods: which method produced which model, see `methods_by_model`.
        progress: the display.

    Raises:
        DataError: a model or a run is invalid.
        UsageError: a model is given twice, or the options contradict each other.
    """
    twice = {name for name in settings.models if settings.models.count(name) > 1}
    if twice:
        raise UsageError(f"--model {min(twice)} is given twice; name different models")
    engine = arguments.engine()
    if settings.clock == "processor" and (settings.threads != 1 or engine.device.type != "cpu"):
        raise UsageError("--clock processor sums the CPU time of all threads; give --threads 1 --device cpu")
    timed_models = load_timed_models(settings, arguments, results, methods)
    if settings.against == "score" and not common_tasks(timed_models):
        raise UsageError("--against score: the models have no score on a common task; name runs with --results")
    with threads(settings.threads) as count:
        loaded = [each.loaded for each in timed_models]
        identity = measurement_identity("eval", SUITE, loaded, settings, arguments, data={}, seed=settings.seed)

        def compute(run: RunDirectory) -> dict[str, Any]:
            share_since_now = processor_share()
            timings = time_models(timed_models, settings, engine.device, progress)
            share = share_since_now()
            found = speed_results(timed_models, timings, settings, threads=count, device=engine.device)
            found |= {"machine": _machine(run), "processor_share": share}
            write_report(run.path, found)
            return found

        return measure(identity, arguments, compute)  # never a finished one: times are only valid now


def _machine(run: RunDirectory) -> dict[str, Any]:
    environment = read_json(run.path / ENVIRONMENT)
    return {
        "cpu": environment["cpu"]["model"],
        "usable_cores": environment["cpu"]["usable"],
        "gpus": [gpu["name"] for gpu in environment["gpus"]],
        "torch": environment["packages"]["torch"],
    }

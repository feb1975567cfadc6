"""Computes one measure of one finished run: a score, as by the commands `eval`, `probe` and `finetune`.

Each measurement has its own run directory below the study's. Finished measurements are not repeated; interrupted ones
start over, except fine-tuning, which resumes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertkit.errors import DivergedError
from bertkit.evaluation.blimp import evaluate_blimp
from bertkit.evaluation.mlm import evaluate_mlm
from bertkit.evaluation.run import EvalArguments
from bertkit.evaluation.settings import BlimpSettings, MlmSettings
from bertkit.files import read_json, write_json
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.run import finetune
from bertkit.pretraining.recipe import Recipe
from bertkit.probing.layers import LayersSettings
from bertkit.probing.layers.run import layer_scores
from bertkit.probing.run import ProbeArguments
from bertkit.progress import Progress
from bertkit.recipe.resolve import Override
from bertkit.run.directory import RECORD, RESULTS, RunDirectory
from bertkit.study.check import finetune_arguments, masked_lm_companion, not_measurable
from bertkit.study.measure_settings import (
    BlimpMeasure,
    FinetuneMeasure,
    HeldOutMeasure,
    LayersMeasure,
    MeasureSettings,
    MlmMeasure,
)


@dataclass(frozen=True)
class MeasureResult:
    """One measure of one run.

    Attributes:
        score: the score; None if the measure is not defined for the run.
        reason: why it is not defined.
        of: the companion model that was evaluated instead of the model.
        more: additional values.
    """

    score: float | None
    reason: str | None = None
    of: str | None = None
    more: dict[str, Any] | None = None

    def document(self) -> dict[str, Any]:
        """The result as JSON data, without fields that are None."""
        found = {"score": self.score, "reason": self.reason, "of": self.of, "more": self.more}
        return {key: value for key, value in found.items() if value is not None or key == "score"}


@dataclass(frozen=True)
class Measurer:
    """Computes measures.

    Attributes:
        directory: directory of the run's measurements.
        command: the command line, for the record.
        progress: the display.
        offline: use no network.
        minutes_left: returns the time left for fine-tuning; None for no limit.
    """

    directory: Path
    command: Sequence[str]
    progress: Progress
    offline: bool
    minutes_left: Callable[[], float | None] = lambda: None

    def measure(self, name: str, measure: MeasureSettings, run: RunDirectory, recipe: Recipe) -> MeasureResult:
        """Compute a measure of a finished pretraining run.

        Args:
            name: name of the measure.
            measure: its settings.
            run: the run, with its model.
            recipe: recipe of the run.

        Raises:
            UsageError, DataError: the measure's data are missing or invalid.
            StoppedError: a signal stopped the fine-tuning.
        """
        reason = not_measurable(measure, recipe)
        if reason is not None:
            return MeasureResult(None, reason)
        place = self.directory / name
        if isinstance(measure, HeldOutMeasure):
            return _held_out(measure, run)
        if isinstance(measure, FinetuneMeasure):
            return self._finetuned(measure, run, recipe, place)
        if isinstance(measure, LayersMeasure):
            return self._layers(measure, run, recipe, place)
        of = masked_lm_companion(recipe)
        model = run.path if of is None else run.path / of
        arguments = EvalArguments(
            str(model), device=recipe.engine.device, run_dir=place, offline=self.offline, command=self.command
        )
        if isinstance(measure, MlmMeasure):
            mlm = MlmSettings(
                sequences=measure.sequences,
                sequence_length=measure.sequence_length,
                window_bytes=measure.window_bytes,
                rate=measure.rate,
                pseudo_sequences=measure.pseudo_sequences,
            )
            data, metric = measure.data, measure.metric
            results = _once(place, lambda: evaluate_mlm(arguments, data, mlm, progress=self.progress))
            score = results["tasks"]["mlm"][metric]["mean"]
            too_large = f"its {metric.replace('_', ' ')} is too large for a floating-point number"
            return MeasureResult(score, too_large if score is None else None, of=of)
        assert isinstance(measure, BlimpMeasure)
        blimp = BlimpSettings(pairs=measure.pairs, only=measure.only)
        pairs = Path(measure.directory)
        results = _once(place, lambda: evaluate_blimp(arguments, pairs, blimp, progress=self.progress))
        return MeasureResult(results["average"], of=of)

    def _layers(self, measure: LayersMeasure, run: RunDirectory, recipe: Recipe, place: Path) -> MeasureResult:
        """The best layer's score, excluding the embeddings (layer 0)."""
        settings = LayersSettings(
            tasks=[measure.task], sentences=measure.sentences, test_sentences=measure.test_sentences
        )
        request = ProbeArguments(
            models=[str(run.path)],
            data=[measure.data],
            test_data=[] if measure.test_data is None else [measure.test_data],
            device=recipe.engine.device,
            run_dir=place,
            offline=self.offline,
            command=self.command,
            progress=self.progress,
        )
        place.mkdir(parents=True, exist_ok=True)
        file = place / RESULTS
        if not file.is_file():
            ((_, scores),) = layer_scores(request, settings).items()
            write_json(file, {"score": scores})
        scores = read_json(file)["score"]
        best = max(range(1, len(scores)), key=scores.__getitem__)
        return MeasureResult(scores[best], more={"layer": best})

    def _finetuned(self, measure: FinetuneMeasure, run: RunDirectory, recipe: Recipe, place: Path) -> MeasureResult:
        common: dict[str, Any] = {"command": self.command, "offline": self.offline, "max_minutes": self.minutes_left()}
        if (place / RECORD).is_file():
            arguments = FinetuneArguments(resume=str(place), **common)
        else:
            shutil.rmtree(place, ignore_errors=True)
            device = Override("engine.device", recipe.engine.device, "the study")
            arguments = finetune_arguments(
                measure, str(run.path), overrides=[device], seeds=[recipe.seed], run_dir=place, **common
            )
        try:
            results = finetune(arguments, progress=self.progress).results
        except DivergedError as error:
            return MeasureResult(None, str(error))
        ((_, scores),) = results["tasks"].items()
        metric = measure.metric or results["primary"]
        score = scores[metric]["mean"]
        reason = "its score is undefined, as where every prediction is the same" if score is None else None
        return MeasureResult(score, reason, more={"metric": metric})


def _held_out(measure: HeldOutMeasure, run: RunDirectory) -> MeasureResult:
    assert run.results is not None
    held_out = run.results["held_out"]
    found = next((metric for metric in measure.metrics if held_out.get(metric) is not None), None)
    if found is None:
        return MeasureResult(None, f"the run has no {' or '.join(measure.metrics)}")
    return MeasureResult(held_out[found], more={"metric": found})


def _once(place: Path, evaluate: Callable[[], Any]) -> dict[str, Any]:
    """The results of an evaluation; a finished evaluation is not repeated."""
    done = (place / RECORD).is_file() and read_json(place / RECORD)["status"] == "done"
    if not done or not (place / RESULTS).is_file():
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        evaluate()
    return read_json(place / RESULTS)

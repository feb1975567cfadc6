"""`probe layers`: linear probes of every layer on annotated files, with controls, codes and mixes.

Tenney et al. 2019, arXiv:1905.05950; files and tasks are in data.py, probes in measure.py. Sibling structure/ probes
for trees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bertkit.arrays import Float64Array
from bertkit.data.random import Draw
from bertkit.errors import UsageError
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.models.hook_points import layer_points
from bertkit.probing import LEAST_SENTENCES
from bertkit.probing.annotated import (
    align,
    check_aligned,
    check_store,
    hashes_of,
    kept_states,
    train_and_test,
    width_of,
)
from bertkit.probing.layers import LayersSettings
from bertkit.probing.layers.data import (
    LayerTask,
    Pair,
    check_tasks,
    chosen_tasks,
    layer_task,
    read_labelled,
    task_of_file,
)
from bertkit.probing.layers.measure import (
    Items,
    LinearProbe,
    accuracy,
    accuracy_interval,
    control_labels,
    online_code,
    warn_of_unconverged,
)
from bertkit.probing.layers.report import DEFINITIONS, LayerScore, LayersScores, TaskResult
from bertkit.probing.report import Report
from bertkit.probing.run import ProbeArguments, ProbeResult, left_out, run_probe
from bertkit.probing.sentence_sources import existing
from bertkit.probing.sentences import TextEncoder
from bertkit.probing.state_store import StateStore
from bertkit.progress import ProgressMeter, silent_progress


@dataclass(frozen=True)
class AnnotatedFile:
    """A file prepared for probes: sentences for training, then those for testing, and its tasks."""

    pairs: Sequence[Pair]
    train: int
    tasks: Sequence[LayerTask]

    def words(self, sentences: int | None = None) -> int:
        """The number of words of the first `sentences` sentences; of all if None."""
        return sum(len(sentence.words) for sentence, _ in self.pairs[:sentences])


@dataclass(frozen=True)
class LayersInput:
    """The model with the hook points of its layers, and the files, encoded for it, with hashes of their content."""

    subject: LoadedModel
    points: Sequence[str]
    encoder: TextEncoder
    files: Sequence[AnnotatedFile]
    hashes: Mapping[str, str]

    @classmethod
    def of(cls, request: ProbeArguments, settings: LayersSettings) -> LayersInput:
        """Read the data of a probe, which are annotated."""
        subject = request.subject()
        paths = [existing(source) for source in request.data]
        test_paths = [existing(source, option="--test-data") for source in request.test_data]
        points = layer_points(subject.model)
        encoder = TextEncoder.of(subject.model, subject.tokenizer)
        files = read_files(paths, test_paths, settings, encoder)
        words = max(each.words() for each in files)
        check_store(len(points), words, width_of(subject.model, points), request.store_gb)
        return cls(subject, points, encoder, files, hashes_of(paths, test_paths))


def probe_layers(request: ProbeArguments, settings: LayersSettings) -> ProbeResult:
    """Train on annotated files, test on one further file for each or on a held-out fifth of each, and write a run.

    Raises:
        UsageError: no data, not one test file per data file, an unknown task, or too much disk space.
        DataError: invalid model or files, or too few sentences.
    """
    if not request.data:
        raise UsageError("no annotated data: give --data FILE, such as a .conllu treebank or CoNLL-2003's eng.train")
    if request.test_data and len(request.test_data) != len(request.data):
        raise UsageError(
            f"--test-data names {len(request.test_data)} files, but --data {len(request.data)}; give one for each"
        )
    inputs = LayersInput.of(request, settings)

    def measure() -> Report:
        total = sum((6 * len(inputs.points) - 1) * len(file.tasks) for file in inputs.files)
        with request.progress("probes", total, "probes") as meter:
            measurement = _Measurement(request, settings, inputs, meter)
            results = [result for file in inputs.files for result in measurement.of(file)]
        scores = LayersScores(inputs.subject.label, results)
        warn_of_unconverged(measurement.unconverged, measurement.probes, settings.fit)
        unconverged = {"unconverged_probes": measurement.unconverged} if measurement.unconverged else {}
        summary = scores.summary() | unconverged | {"left_out": left_out(inputs.encoder.notes)}
        return Report(summary, DEFINITIONS, scores.findings())

    return run_probe(request, settings, [inputs.subject], measure, data=inputs.hashes)


def layer_scores(request: ProbeArguments, settings: LayersSettings) -> dict[str, list[float]]:
    """Each task's score by layer, the embeddings first: conlleval's F1 for chunks, else accuracy.

    Uses the same probes on the same sentences as `probe_layers`, without controls, codes and mixes, which is a sixth of
    the work: for comparisons of many models, as in a study. Nothing is written except temporary states.

    Raises:
        UsageError, DataError: see `probe_layers`.
    """
    inputs = LayersInput.of(request, settings)
    with silent_progress("probes") as meter:
        measurement = _Measurement(request, settings, inputs, meter)
        found = {name: scores for file in inputs.files for name, scores in measurement.plain_scores(file).items()}
    warn_of_unconverged(measurement.unconverged, measurement.probes, settings.fit)
    return found


def read_files(
    paths: Sequence[Path], test_paths: Sequence[Path], settings: LayersSettings, encoder: TextEncoder
) -> list[AnnotatedFile]:
    """The files with their tasks, the sentences for training and testing drawn by the settings' seed."""
    read = [read_labelled(path) for path in paths]
    tested = [read_labelled(test, task_of_file(path)) for path, test in zip(paths, test_paths, strict=False)]
    available = [name for sentences in read for name in dict.fromkeys(n for each in sentences for n in each.targets)]
    check_tasks(settings.tasks, list(dict.fromkeys(available)))
    stems = [path.name.partition(".")[0] for path in paths]
    files = []
    for number, (path, sentences) in enumerate(zip(paths, read, strict=True)):
        names = chosen_tasks(sentences, settings.tasks)
        if not names:
            continue
        draw = Draw(settings.seed, f"{settings.kind}/{number}")
        others = tested[number] if tested else None
        chosen, held_out = train_and_test(sentences, others, settings.sentences, settings.test_sentences, draw)
        train, test = align(encoder, chosen), align(encoder, held_out)
        check_aligned(train, encoder, str(path), LEAST_SENTENCES)
        check_aligned(test, encoder, str(test_paths[number] if test_paths else path), 1)
        stem = stems[number] if stems.count(stems[number]) == 1 else f"{stems[number]} {number + 1}"
        tasks = []
        for name in names:
            title = name if available.count(name) == 1 else f"{name} ({stem})"
            source = " and ".join(map(str, (path, *test_paths[number : number + 1])))
            tasks.append(layer_task(name, train, test, title=title, source=source))
        files.append(AnnotatedFile([*train, *test], len(train), tasks))
    return files


class _Measurement:
    """Fits all probes and counts them, and those that did not converge; those of codes are not counted."""

    def __init__(
        self, request: ProbeArguments, settings: LayersSettings, inputs: LayersInput, meter: ProgressMeter
    ) -> None:
        self.request, self.settings, self.inputs, self._meter = request, settings, inputs, meter
        self._done = self.probes = self.unconverged = 0

    def plain_scores(self, file: AnnotatedFile) -> dict[str, list[float]]:
        """The score of every layer's probe alone, by task."""
        with self._states(self.inputs.subject, file) as store:
            return {
                task.name: [
                    task.score(self._probe(store, [number], task, task.train).predict(task.test))
                    for number in range(store.layers)
                ]
                for task in file.tasks
            }

    def of(self, file: AnnotatedFile) -> list[TaskResult]:
        """The results of all tasks of a file."""
        with self._states(self.inputs.subject, file) as store:
            found = [self._model(store, task) for task in file.tasks]
        with self._states(self.inputs.subject.random_twin(self.settings.seed), file) as store:
            return [replace(each, random=self._scores(store, each.task)) for each in found]

    def _states(self, subject: LoadedModel, file: AnnotatedFile) -> StateStore:
        store = kept_states(self.request, subject, [encoded for _, encoded in file.pairs], self.inputs.points)
        store.standardise(file.words(file.train))
        return store

    def _count(self) -> None:
        self._done += 1
        self._meter.update(self._done)

    def _draw(self, task: LayerTask) -> Draw:
        return Draw(self.settings.seed, f"{self.settings.kind}/{task.name}")

    def _probe(self, store: StateStore, layers: Sequence[int], task: LayerTask, train: Items) -> LinearProbe:
        tables = [store.layer(number) for number in layers]
        probe = LinearProbe(tables, train.spans_NP2.shape[1], len(task.labels), self.settings.fit).fit(train)
        self._count()
        self.probes += 1
        self.unconverged += not probe.is_converged
        return probe

    def _scores(self, store: StateStore, task: LayerTask) -> list[LayerScore]:
        """Score and code of every layer."""
        order_N = np.argsort(self._draw(task).uniform("order", sample=np.arange(len(task.train))), kind="stable")
        scores = []
        for number in range(store.layers):
            predicted_N = self._probe(store, [number], task, task.train).predict(task.test)
            code = online_code([store.layer(number)], task.train, len(task.labels), self.settings.fit, order_N)
            self._count()
            labels_N = task.test.label_N
            interval = accuracy_interval(labels_N, predicted_N, task.test_sentence_N)
            scores.append(LayerScore(accuracy(labels_N, predicted_N), task.chunk_f1(predicted_N), code, interval))
        return scores

    def _model(self, store: StateStore, task: LayerTask) -> TaskResult:
        scores = self._scores(store, task)
        control_accuracy, seen = self._controls(store, task)
        cumulative = [scores[0].score]
        weights_L: Float64Array = np.ones(1)
        for top in range(1, store.layers):
            probe = self._probe(store, range(top + 1), task, task.train)
            cumulative.append(task.score(probe.predict(task.test)))
            weights_L = probe.mix_weights
        return TaskResult(task, scores, control_accuracy, seen, weights_L, cumulative)

    def _controls(self, store: StateStore, task: LayerTask) -> tuple[list[float], float]:
        """Accuracy of every layer's probe on the control task, and the share of test words seen in training."""
        draw, known = self._draw(task), dict[str, int]()
        train = replace(task.train, label_N=control_labels(task.train.keys, task.train.label_N, draw, known))
        seen = frozenset(known)
        test_N = control_labels(task.test.keys, task.train.label_N, draw, known)
        probes = [self._probe(store, [number], task, train) for number in range(store.layers)]
        accuracies = [accuracy(test_N, probe.predict(task.test)) for probe in probes]
        return accuracies, sum(key in seen for key in task.test.keys) / len(task.test)

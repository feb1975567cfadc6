"""`probe layers`: what each layer knows of labels on words and spans, with every control, as tables and figures.

Tenney et al. 2019, arXiv:1905.05950; the probes are in probes/layers.py, files and tasks in layer_data.py, tables
and figures in layer_report.py. Sibling structure.py asks for trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from pydantic import Field

from bertkit.data.random import Draw
from bertkit.errors import UsageError
from bertkit.evaluation.loaded_model import ProbedModel
from bertkit.metrics.tagging import conlleval_spans
from bertkit.models.recorder import layer_points
from bertkit.probing.annotated import (
    STORE_GB,
    align,
    check_aligned,
    check_store,
    existing,
    hashes_of,
    kept_states,
    train_and_test,
    width_of,
)
from bertkit.probing.layers.data import LayerTask, Pair, check_asked, chosen_tasks, layer_task, read_labelled
from bertkit.probing.layers.measure import (
    Floats,
    Int64s,
    Items,
    LinearProbe,
    ProbeFit,
    control_labels,
    online_code,
)
from bertkit.probing.layers.report import DEFINITIONS, LayersReport
from bertkit.probing.layers.results import Controlled, LayerScore, Mixed, TaskResult
from bertkit.probing.run import Analysis, Probed, ProbeRequest, carry_out, left_out
from bertkit.probing.sentences import TextEncoder
from bertkit.probing.state_store import StateStore
from bertkit.progress import ProgressMeter
from bertkit.settings import Settings

KIND = "layers"
_LEAST = 10
"""Sentences that a probe is trained on at least."""


class LayersSettings(Settings):
    """What decides the result, beside model and data."""

    tasks: list[str] = Field(default_factory=list, description="Those asked for; empty: all but types of given spans.")
    sentences: int = Field(1000, ge=_LEAST, description="Sentences of each file to train on.")
    test_sentences: int = Field(500, ge=1, description="Sentences of each file to test on.")
    fit: ProbeFit = Field(default_factory=ProbeFit, description="Of the probes.")
    seed: int = Field(0, ge=0, description="Of draws, control labels, the code's order and the random model.")


@dataclass(frozen=True)
class Material:
    """One file, ready for probes.

    Attributes:
        source: its name.
        pairs: sentences for training, then those for testing.
        train: how many of them are for training.
        tasks: its tasks.
    """

    source: str
    pairs: Sequence[Pair]
    train: int
    tasks: Sequence[LayerTask]

    @property
    def train_rows(self) -> int:
        return sum(len(sentence.words) for sentence, _ in self.pairs[: self.train])

    @property
    def rows(self) -> int:
        return sum(len(sentence.words) for sentence, _ in self.pairs)


def probe_layers(
    request: ProbeRequest, settings: LayersSettings, *, test_data: Sequence[str] = (), store_gb: float = STORE_GB
) -> Probed:
    """Train, measure and write a run.

    Args:
        request: its data are annotated files to train on.
        settings: all that decides the result.
        test_data: for each file another one of its kind that scores are of; a fifth of each where there are none.
        store_gb: disk that states may take.

    Raises:
        UsageError: no data, files for testing that are not one for each, an unknown task, or too much disk.
        DataError: model or files at fault, or too few sentences.
    """
    subject = request.subject()
    if not request.data:
        raise UsageError("no annotated data: give --data FILE, such as a .conllu treebank or CoNLL-2003's eng.train")
    if test_data and len(test_data) != len(request.data):
        raise UsageError(f"--test-data names {len(test_data)} files and --data {len(request.data)}; give one for each")
    paths = [existing(source) for source in request.data]
    test_paths = [existing(source, option="--test-data") for source in test_data]
    points = layer_points(subject.model)
    encoder = TextEncoder.of(subject.model, subject.tokenizer)
    materials = _materials(paths, test_paths, settings, encoder)
    check_store(len(points), max(each.rows for each in materials), width_of(subject.model, points), store_gb)

    def analyse() -> Analysis:
        results = _Measuring(request, settings, subject, points).of(materials)
        report = LayersReport(subject.label, settings.fit, results)
        return Analysis({**report.summary(), "left_out": left_out(encoder.notes)}, DEFINITIONS, report.findings())

    return carry_out(KIND, settings, request, [subject], analyse, data=hashes_of(paths, test_paths), seed=settings.seed)


def _materials(
    paths: Sequence[Path], test_paths: Sequence[Path], settings: LayersSettings, encoder: TextEncoder
) -> list[Material]:
    read = [read_labelled(path) for path in paths]
    tested = [read_labelled(path) for path in test_paths]
    available = [name for sentences in read for name in dict.fromkeys(n for each in sentences for n in each.targets)]
    check_asked(settings.tasks, list(dict.fromkeys(available)))
    materials = []
    for number, (path, sentences) in enumerate(zip(paths, read, strict=True)):
        names = chosen_tasks(sentences, settings.tasks)
        if not names:
            continue
        draw = Draw(settings.seed, f"{KIND}/{number}")
        others = tested[number] if tested else None
        chosen, held_out = train_and_test(sentences, others, settings.sentences, settings.test_sentences, draw)
        train, test = align(encoder, chosen), align(encoder, held_out)
        check_aligned(train, encoder, str(path), _LEAST)
        check_aligned(test, encoder, str(test_paths[number] if test_paths else path), 1)
        tasks = []
        for name in names:
            title = name if available.count(name) == 1 else f"{name} ({path.name.partition('.')[0]})"
            tasks.append(layer_task(name, train, test, title=title, source=str(path)))
        materials.append(Material(str(path), [*train, *test], len(train), tasks))
    return materials


class _Measuring:
    """Fits every probe, counting them."""

    def __init__(
        self, request: ProbeRequest, settings: LayersSettings, subject: ProbedModel, points: Sequence[str]
    ) -> None:
        self.request, self.settings, self.subject, self.points = request, settings, subject, points
        self._done = 0

    def of(self, materials: Sequence[Material]) -> list[TaskResult]:
        """The results of all tasks of all files."""
        layers = len(self.points)
        results: list[TaskResult] = []
        total = sum(6 * layers - 1 for material in materials for _ in material.tasks)
        with self.request.progress("probes", total, "probes") as meter:
            for material in materials:
                with self._states(self.subject, material) as store:
                    found = [self._model(store, task, meter) for task in material.tasks]
                with self._states(self.subject.random_twin(self.settings.seed), material) as store:
                    for task, result in zip(material.tasks, found, strict=True):
                        results.append(replace(result, random=self._scores(store, task, meter)))
        return results

    def _states(self, subject: ProbedModel, material: Material) -> StateStore:
        store = kept_states(self.request, subject, [encoded for _, encoded in material.pairs], self.points)
        store.standardise(material.train_rows)
        return store

    def _count(self, meter: ProgressMeter) -> None:
        self._done += 1
        meter.update(self._done)

    def _probe(self, store: StateStore, layers: Sequence[int], task: LayerTask, train: Items) -> LinearProbe:
        tables = [store.layer(number) for number in layers]
        return LinearProbe(tables, train.spans_NP2.shape[1], len(task.labels), self.settings.fit).fit(train)

    def _scores(self, store: StateStore, task: LayerTask, meter: ProgressMeter) -> list[LayerScore]:
        """Of every layer: score and code."""
        draw = Draw(self.settings.seed, f"{KIND}/{task.name}")
        order_N = np.argsort(draw.uniform("order", sample=np.arange(len(task.train))), kind="stable")
        scores = []
        for number in range(store.layers):
            predicted_N = self._probe(store, [number], task, task.train).predict(task.test)
            self._count(meter)
            code = online_code([store.layer(number)], task.train, len(task.labels), self.settings.fit, order_N)
            self._count(meter)
            scores.append(LayerScore(accuracy(task.test.label_N, predicted_N), chunk_f1(task, predicted_N), code))
        return scores

    def _model(self, store: StateStore, task: LayerTask, meter: ProgressMeter) -> TaskResult:
        scores = self._scores(store, task, meter)
        controls = self._controls(store, task, meter)
        cumulative = [scores[0].score]
        weights_L: Floats = np.ones(1)
        mix_accuracy = scores[0].accuracy
        for top in range(1, store.layers):
            probe = self._probe(store, range(top + 1), task, task.train)
            self._count(meter)
            predicted_N = probe.predict(task.test)
            mix_accuracy = accuracy(task.test.label_N, predicted_N)
            f1 = chunk_f1(task, predicted_N)
            cumulative.append(mix_accuracy if f1 is None else f1)
            weights_L = probe.mix_weights
        counts = np.bincount(task.train.label_N, minlength=len(task.labels))
        return TaskResult(
            task=task.name,
            labels=len(task.labels),
            train_items=len(task.train),
            test_items=len(task.test),
            majority=float((task.test.label_N == int(counts.argmax())).mean()),
            layers=scores,
            control=controls,
            mix=Mixed(weights_L, cumulative, mix_accuracy),
        )

    def _controls(self, store: StateStore, task: LayerTask, meter: ProgressMeter) -> Controlled:
        """Accuracy of every layer's probe on the control task."""
        draw = Draw(self.settings.seed, f"{KIND}/{task.name}")
        known: dict[str, int] = {}
        train = task.train.labelled(control_labels(task.train.keys, task.train.label_N, draw, known))
        seen = frozenset(known)
        test_N: Int64s = control_labels(task.test.keys, task.train.label_N, draw, known)
        accuracies = []
        for number in range(store.layers):
            probe = self._probe(store, [number], task, train)
            accuracies.append(accuracy(test_N, probe.predict(task.test)))
            self._count(meter)
        return Controlled(accuracies, sum(key in seen for key in task.test.keys) / len(task.test))


def accuracy(label_N: Int64s, predicted_N: Int64s) -> float:
    """The share of items that are right; a label that training did not have is always missed."""
    return float((label_N == predicted_N).mean())


def chunk_f1(task: LayerTask, predicted_N: Int64s) -> float | None:
    """conlleval's F1 over the chunks of the test sentences; None for a task without chunks."""
    if not task.test_words:
        return None
    right = found = gold = first = 0
    for words in task.test_words:
        rows = slice(first, first + words)
        own = set(conlleval_spans(task.test_names[rows]))
        guess = set(conlleval_spans([task.labels[number] for number in predicted_N[rows].tolist()]))
        right, found, gold, first = right + len(own & guess), found + len(guess), gold + len(own), first + words
    return 2 * right / (found + gold) if found + gold else 0.0

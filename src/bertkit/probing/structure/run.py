"""`probe structure`: structural probes of every layer on a treebank, their controls, and a sweep of ranks.

Hewitt and Manning 2019, NAACL; probes and scores are in measure.py. Sibling layers/ probes for labels; this probes for
geometry.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from bertkit.arrays import Float64Array
from bertkit.data.random import Draw
from bertkit.errors import DataError, UsageError
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
from bertkit.probing.report import Report
from bertkit.probing.run import ProbeArguments, ProbeResult, left_out, run_probe
from bertkit.probing.sentence_sources import existing, is_treebank
from bertkit.probing.sentences import EncodedSentence, TextEncoder
from bertkit.probing.state_store import StateStore
from bertkit.probing.structure import StructureSettings
from bertkit.probing.structure.measure import (
    Form,
    GoldTree,
    StructuralProbe,
    Treebank,
    depth_scores,
    distance_scores,
    train,
)
from bertkit.probing.structure.report import DEFINITIONS, LayerScores, StructureScores, best_layer
from bertkit.probing.structure.trees import spanning_tree
from bertkit.progress import ProgressMeter
from bertkit.tasks.readers.trees import TreeExample, read_trees

_HELD_OUT = 0.1


@dataclass(frozen=True)
class TreebankSplits:
    """The sentences with their trees: those for training, those that decide when to stop, those for testing."""

    pairs: Sequence[tuple[TreeExample, EncodedSentence]]
    trees: Sequence[GoldTree]
    train: int
    held_out: int

    @property
    def test(self) -> list[tuple[TreeExample, GoldTree]]:
        pairs = zip(self.pairs, self.trees, strict=True)
        return [(example, tree) for (example, _), tree in pairs][self.train + self.held_out :]

    @property
    def sentences(self) -> list[EncodedSentence]:
        return [encoded for _, encoded in self.pairs]

    def layer(self, store: StateStore, number: int) -> list[Treebank]:
        """The three parts, with the states of one layer."""
        states = torch.split(store.layer(number).clone(), np.diff(store.offsets_S1).tolist())
        ends = (0, self.train, self.train + self.held_out, len(self.pairs))
        return [Treebank(states[a:b], self.trees[a:b]) for a, b in pairwise(ends)]


def probe_structure(request: ProbeArguments, settings: StructureSettings) -> ProbeResult:
    """Train on a treebank, test on another one or on a held-out fifth, and write a run.

    Raises:
        UsageError: not exactly one treebank, several for testing, several models, or states that exceed the disk limit.
        DataError: invalid model or treebank: a sentence whose heads do not form a tree, or too few sentences.
    """
    subject = request.subject()
    if len(request.data) != 1 or not is_treebank(request.data[0]):
        given = ", ".join(request.data) or "nothing"
        raise UsageError(f"this probe trains on one treebank: give --data FILE.conllu (given: {given})")
    if len(request.test_data) > 1:
        raise UsageError(f"this probe is tested on one treebank: --test-data names {', '.join(request.test_data)}")
    train_paths = [existing(request.data[0])]
    test_paths = [existing(source, option="--test-data") for source in request.test_data]
    points = layer_points(subject.model)
    width = width_of(subject.model, points)
    greatest = max([settings.rank, *settings.ranks])
    if greatest > width:
        raise UsageError(f"--rank {greatest}: the rank can be at most the model's width, {width}")
    bank, encoder = _bank(subject, settings, train_paths[0], *test_paths)
    rows = sum(len(encoded.words) for encoded in bank.sentences)
    # The states of the model and of the same architecture with random weights are stored side by side.
    check_store(2 * len(points), rows, width, request.store_gb)

    def measure() -> Report:
        scores = _measure(request, settings, subject, points, bank)
        return Report(scores.summary() | {"left_out": left_out(encoder.notes)}, DEFINITIONS, scores.findings())

    return run_probe(request, settings, [subject], measure, data=hashes_of(train_paths, test_paths))


def _bank(
    subject: LoadedModel, settings: StructureSettings, path: Path, test_path: Path | None = None
) -> tuple[TreebankSplits, TextEncoder]:
    examples = read_trees(path)
    others = None if test_path is None else read_trees(test_path)
    draw = Draw(settings.seed, settings.kind)
    chosen, tested = train_and_test(examples, others, settings.sentences, settings.test_sentences, draw)
    encoder = TextEncoder.of(subject.model, subject.tokenizer)
    train_pairs = align(encoder, chosen)
    check_aligned(train_pairs, encoder, str(path), LEAST_SENTENCES)
    test_pairs = align(encoder, tested)
    check_aligned(test_pairs, encoder, str(test_path or path), 1)
    # Drawn sentences are in the file's order, in which neighbours are similar; the held-out tenth is spread over all.
    held_out = max(1, round(_HELD_OUT * len(train_pairs)))
    order = np.argsort(draw.uniform("stop", sample=np.arange(len(train_pairs))), kind="stable").tolist()
    pairs = [*(train_pairs[number] for number in order), *test_pairs]
    trees = [GoldTree.of(example.heads, np.array([tag != "PUNCT" for tag in example.tags])) for example, _ in pairs]
    if not any(tree.edges for tree in trees[len(train_pairs) :]):
        raise DataError(
            f"{test_path or path}: no edge between words other than punctuation in {len(test_pairs)} test sentence(s);"
            " raise --test-sentences"
        )
    return TreebankSplits(pairs, trees, len(train_pairs) - held_out, held_out), encoder


def _measure(
    request: ProbeArguments,
    settings: StructureSettings,
    subject: LoadedModel,
    points: Sequence[str],
    bank: TreebankSplits,
) -> StructureScores:
    ranks = sorted(set(settings.ranks or _powers(settings.rank)))
    test_trees = [tree for _, tree in bank.test]
    layers, random, predicted = [], [], []
    total = 4 * len(points) + len(set(ranks) - {settings.rank})
    with ExitStack() as stack:
        store, random_store = (
            stack.enter_context(kept_states(request, model, bank.sentences, points))
            for model in (subject, subject.random_twin(settings.seed))
        )
        trainer = _Trainer(settings, stack.enter_context(request.progress("probes", total, "probes")))
        for number in range(len(points)):
            scores, distances = trainer.layer(bank.layer(store, number))
            layers.append(scores)
            predicted.append(distances)
            random.append(trainer.layer(bank.layer(random_store, number))[0])
        best = best_layer(layers)
        parts = bank.layer(store, best)
        by_rank = {
            rank: layers[best].distance
            if rank == settings.rank
            else distance_scores(test_trees, trainer.probe("distance", parts, rank).predict(parts[2].states))
            for rank in ranks
        }
    found = [spanning_tree(each, tree.counted_W) for tree, each in zip(test_trees, predicted[best], strict=True)]
    train_sentences = bank.train + bank.held_out
    return StructureScores(subject.label, settings.rank, train_sentences, bank.test, layers, random, by_rank, found)


class _Trainer:
    """Trains probes and counts them."""

    def __init__(self, settings: StructureSettings, meter: ProgressMeter) -> None:
        self._settings, self._meter = settings, meter
        self._done = 0

    def probe(self, form: Form, parts: Sequence[Treebank], rank: int) -> StructuralProbe:
        draw = Draw(self._settings.seed, f"{self._settings.kind}/{form}")
        trained = train(form, parts[0], parts[1], rank=rank, draw=draw, settings=self._settings.training)
        self._done += 1
        self._meter.update(self._done)
        return trained

    def layer(self, parts: Sequence[Treebank]) -> tuple[LayerScores, list[Float64Array]]:
        """The scores of a layer's two probes, and the predicted distances in the test sentences."""
        distance, depth = (self.probe(form, parts, self._settings.rank) for form in ("distance", "depth"))
        test = parts[2]
        predicted = distance.predict(test.states)
        depths = depth_scores(test.trees, depth.predict(test.states))
        return LayerScores(distance_scores(test.trees, predicted), depths, distance.held_out_loss), predicted


def _powers(most: int) -> list[int]:
    """1, 2, 4, ... and the maximum itself."""
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]

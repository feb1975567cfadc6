"""`probe structure`: a treebank to structural probes of every layer, their controls, a sweep of ranks, and pictures.

Hewitt and Manning 2019, NAACL; the probes and measures are in probes/structure.py. Sibling layers.py asks for
labels where this asks for geometry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import Field

from bertkit.data.random import Draw
from bertkit.errors import UsageError
from bertkit.evaluation.figures import layer_ticks, lines, new_figure, plain
from bertkit.evaluation.loaded_model import ProbedModel
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
from bertkit.probing.run import Analysis, Finding, Probed, ProbeRequest, carry_out, left_out
from bertkit.probing.sentence_sources import is_treebank
from bertkit.probing.sentences import EncodedSentence, TextEncoder
from bertkit.probing.state_store import StateStore
from bertkit.probing.structure.measure import (
    DepthScores,
    DistanceScores,
    Floats,
    Form,
    GoldTree,
    ProbeTraining,
    StructuralProbe,
    Treebank,
    chain_scores,
    depth_scores,
    distance_scores,
    kept_words,
    position_scores,
    predictions,
    train,
)
from bertkit.probing.structure.trees import Edge, spanning_tree
from bertkit.progress import ProgressMeter
from bertkit.settings import Settings
from bertkit.tasks.readers.trees import TreeExample, read_trees

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KIND = "structure"
_LEAST = 10
"""Sentences that a probe is trained on at least."""
_HELD_OUT = 0.1
_DRAWN_TREES = 3
_DRAWN_LENGTHS = range(6, 15)
"""Words of a sentence whose trees are drawn."""


class StructureSettings(Settings):
    """What decides the result, beside model and treebank."""

    sentences: int = Field(2000, ge=_LEAST, description="Sentences trained on; a tenth of them decides when to stop.")
    test_sentences: int = Field(500, ge=1, description="Sentences that scores are of.")
    rank: int = Field(64, ge=1, description="Of the probes of all layers; at most the model's width.")
    ranks: list[int] = Field(
        default_factory=list, description="Ranks of the best layer's distance probe; empty: powers of two to `rank`."
    )
    training: ProbeTraining = Field(default_factory=ProbeTraining, description="How each probe is trained.")
    seed: int = Field(0, ge=0, description="Of all choices, and of the random model.")


DEFINITIONS = {
    "distance": "d_B(h_i, h_j)^2 = ||B(h_i - h_j)||^2, trained to be the number of edges between two words of the"
    " dependency tree (Hewitt and Manning 2019, section 2.2); the loss is the mean absolute difference over all W^2"
    " ordered pairs of a sentence",
    "depth": "||B h_i||^2, trained to be the number of edges to the root (section 2.3); mean absolute difference",
    "uuas": "share of the gold trees' edges, words tagged PUNCT left out, that are in the minimum spanning trees of the"
    " predicted distances; over all edges of all sentences (micro)",
    "dspr": "Spearman's correlation of predicted and true distances of each word to all words of its sentence (itself"
    " included, as in the published code), averaged over the words of sentences of one length, then over the lengths"
    " from 5 to 50",
    "root_accuracy": "share of sentences in which the word of least predicted depth, PUNCT left out, is the root",
    "nspr": "Spearman's correlation of predicted and true depths of a sentence's words, averaged by length (5 to 50)",
    "layer": "0 is what the first layer reads, l what comes out of layer l; a word is the mean of its pieces' states,"
    " divided by one number a layer, the root mean square of the training words' states",
    "training": "Adam; the rate cut by ten after every epoch without gain on the held-out tenth, which also decides"
    " which epoch's B is kept",
    "random": "the same architecture with weights drawn anew, and a probe trained on its states in the same way",
    "adjacent": "baseline without a model: every word tied to the next; DSpr of the distance in the sentence, depth by"
    " the place in the sentence (the first word is the root)",
}


@dataclass(frozen=True)
class Bank:
    """What all layers have in common: sentences, encoded, with their trees; those for testing stand at the end.

    Attributes:
        pairs: trees as they were read, and sentences as the model reads them.
        trees: what probes are to learn.
        train: how many are trained on.
        held_out: how many decide when to stop.
    """

    pairs: Sequence[tuple[TreeExample, EncodedSentence]]
    trees: Sequence[GoldTree]
    train: int
    held_out: int

    @property
    def test_trees(self) -> Sequence[GoldTree]:
        return self.trees[self.train + self.held_out :]

    @property
    def sentences(self) -> list[EncodedSentence]:
        return [encoded for _, encoded in self.pairs]

    def layer(self, store: StateStore, number: int) -> tuple[Treebank, Treebank, Treebank]:
        """For training, for stopping and for testing."""
        table_WD = store.layer(number).clone()
        states = torch.split(table_WD, np.diff(store.offsets_S1).tolist())
        ends = (0, self.train, self.train + self.held_out, len(self.pairs))
        parts = [Treebank(states[a:b], self.trees[a:b]) for a, b in pairwise(ends)]
        return parts[0], parts[1], parts[2]


@dataclass(frozen=True)
class LayerScores:
    """One layer's probes.

    Attributes:
        distance, depth: of its two probes.
        held_out_loss: of the distance probe.
    """

    distance: DistanceScores
    depth: DepthScores
    held_out_loss: float


@dataclass
class Found:
    """Everything that was measured.

    Attributes:
        layers: the model's.
        random: the random model's.
        best: the layer of the least held-out loss.
        ranks: scores of that layer's distance probe by its rank.
        trees: spanning trees of the best layer's probe, one a test sentence.
    """

    layers: list[LayerScores] = field(default_factory=list)
    random: list[LayerScores] = field(default_factory=list)
    best: int = 0
    ranks: dict[int, DistanceScores] = field(default_factory=dict)
    trees: list[list[Edge]] = field(default_factory=list)


def probe_structure(
    request: ProbeRequest, settings: StructureSettings, *, test_data: str | None = None, store_gb: float = STORE_GB
) -> Probed:
    """Train, measure and write a run.

    Args:
        request: its data is one treebank to train on.
        settings: all that decides the result.
        test_data: the treebank that scores are of; a fifth of the other one where None.
        store_gb: disk that states may take.

    Raises:
        UsageError: no treebank or several, several models, or states that take more disk than allowed.
        DataError: model or treebank at fault: a sentence whose heads are no tree, or too few sentences.
    """
    subject = request.subject()
    if len(request.data) != 1 or not is_treebank(request.data[0]):
        given = ", ".join(request.data) or "nothing"
        raise UsageError(f"this probe learns from one treebank: give --data FILE.conllu (given: {given})")
    train_path = existing(request.data[0])
    test_path = None if test_data is None else existing(test_data, option="--test-data")
    points = layer_points(subject.model)
    width = width_of(subject.model, points)
    greatest = max([settings.rank, *settings.ranks])
    if greatest > width:
        raise UsageError(f"--rank {greatest}: a rank is at most the model's width, {width}")
    bank, encoder = _bank(subject, settings, request, test_data)
    rows = sum(len(encoded.words) for encoded in bank.sentences)
    # The model's states and those of its random twin are kept side by side.
    check_store(2 * len(points), rows, width, store_gb)

    def analyse() -> Analysis:
        found = _measure(request, settings, subject, points, bank)
        report = _Report(subject, settings, bank, found)
        notes = {"left_out": left_out(encoder.notes)}
        return Analysis({**report.summary(), **notes}, DEFINITIONS, report.findings())

    data = hashes_of([train_path], [] if test_path is None else [test_path])
    return carry_out(KIND, settings, request, [subject], analyse, data=data, seed=settings.seed)


def _bank(
    subject: ProbedModel, settings: StructureSettings, request: ProbeRequest, test_data: str | None
) -> tuple[Bank, TextEncoder]:
    examples = read_trees(existing(request.data[0]))
    others = None if test_data is None else read_trees(existing(test_data, option="--test-data"))
    draw = Draw(settings.seed, KIND)
    chosen, tested = train_and_test(examples, others, settings.sentences, settings.test_sentences, draw)
    encoder = TextEncoder.of(subject.model, subject.tokenizer)
    train_pairs = align(encoder, chosen)
    check_aligned(train_pairs, encoder, request.data[0], _LEAST)
    test_pairs = align(encoder, tested)
    check_aligned(test_pairs, encoder, test_data or request.data[0], 1)
    # Chosen sentences stand in the file's order, where neighbours are alike; a tenth from all over decides.
    held_out = max(1, round(_HELD_OUT * len(train_pairs)))
    order = np.argsort(draw.uniform("stop", sample=np.arange(len(train_pairs))), kind="stable").tolist()
    pairs = [*(train_pairs[number] for number in order), *test_pairs]
    trees = [GoldTree.of(example.heads, kept_words(example.tags)) for example, _ in pairs]
    return Bank(pairs, trees, len(train_pairs) - held_out, held_out), encoder


def _measure(
    request: ProbeRequest, settings: StructureSettings, subject: ProbedModel, points: Sequence[str], bank: Bank
) -> Found:
    found = Found()
    ranks = settings.ranks or _powers(settings.rank)

    def store_of(one: ProbedModel) -> StateStore:
        return kept_states(request, one, bank.sentences, points)

    total = 4 * len(points) + len(set(ranks) - {settings.rank})
    with ExitStack() as stack:
        store = stack.enter_context(store_of(subject))
        other = stack.enter_context(store_of(subject.random_twin(settings.seed)))
        trainer = _Trainer(settings, bank, stack.enter_context(request.progress("probes", total, "probes")))
        distances: list[list[Floats]] = []
        for number in range(len(points)):
            scores, predicted = trainer.layer(store, number)
            found.layers.append(scores)
            distances.append(predicted)
            found.random.append(trainer.layer(other, number)[0])
        found.best = min(range(len(points)), key=lambda number: found.layers[number].held_out_loss)
        banks = bank.layer(store, found.best)
        known = {settings.rank: found.layers[found.best].distance}
        for rank in sorted(set(ranks)):
            found.ranks[rank] = known.get(rank) or distance_scores(
                bank.test_trees, predictions(trainer.probe("distance", banks, rank), banks[2])
            )
        found.trees = [
            spanning_tree(each, tree.counted_W)
            for tree, each in zip(bank.test_trees, distances[found.best], strict=True)
        ]
    return found


class _Trainer:
    """Trains probes, and counts them."""

    def __init__(self, settings: StructureSettings, bank: Bank, meter: ProgressMeter) -> None:
        self._settings, self._bank, self._meter = settings, bank, meter
        self._done = 0

    def probe(self, form: Form, banks: tuple[Treebank, Treebank, Treebank], rank: int) -> StructuralProbe:
        draw = Draw(self._settings.seed, f"{KIND}/{form}")
        trained = train(form, banks[0], banks[1], rank=rank, draw=draw, settings=self._settings.training)
        self._done += 1
        self._meter.update(self._done)
        return trained

    def layer(self, store: StateStore, number: int) -> tuple[LayerScores, list[Floats]]:
        """A layer's two probes; and the distances that it predicts in the test sentences."""
        banks = self._bank.layer(store, number)
        distance = self.probe("distance", banks, self._settings.rank)
        depth = self.probe("depth", banks, self._settings.rank)
        trees = self._bank.test_trees
        predicted = predictions(distance, banks[2])
        depths = depth_scores(trees, predictions(depth, banks[2]))
        return LayerScores(distance_scores(trees, predicted), depths, distance.held_out_loss), predicted


def _powers(most: int) -> list[int]:
    """1, 2, 4, ... and the greatest itself."""
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]


class _Report:
    """What was measured, as a summary, tables, figures and sentences."""

    def __init__(self, subject: ProbedModel, settings: StructureSettings, bank: Bank, found: Found) -> None:
        self.subject, self.settings, self.bank, self.found = subject, settings, bank, found
        self.chain, self.position = chain_scores(bank.test_trees), position_scores(bank.test_trees)
        self.counts = (
            f"{bank.train + bank.held_out:,} sentences to learn from, n = {len(bank.test_trees):,} for testing"
            f" with {self.chain.edges:,} edges"
        )
        self.by_layer: dict[str, list[float]] = {}
        for prefix, scores in (("", found.layers), ("random_", found.random)):
            self.by_layer[f"{prefix}uuas"] = [each.distance.uuas for each in scores]
            self.by_layer[f"{prefix}dspr"] = [each.distance.spearman for each in scores]
            self.by_layer[f"{prefix}root_accuracy"] = [each.depth.root_accuracy for each in scores]
            self.by_layer[f"{prefix}nspr"] = [each.depth.spearman for each in scores]

    def summary(self) -> Mapping[str, Any]:
        return {
            "train_sentences": self.bank.train + self.bank.held_out,
            "test_sentences": len(self.bank.test_trees),
            "test_edges": self.chain.edges,
            "rank": self.settings.rank,
            "layers": list(range(len(self.found.layers))),
            **self.by_layer,
            "best_layer": self.found.best,
            "adjacent": {
                "uuas": self.chain.uuas,
                "dspr": self.chain.spearman,
                "root_accuracy": self.position.root_accuracy,
                "nspr": self.position.spearman,
            },
            "uuas_by_rank": {str(rank): scores.uuas for rank, scores in self.found.ranks.items()},
            "dspr_by_rank": {str(rank): scores.spearman for rank, scores in self.found.ranks.items()},
        }

    def findings(self) -> list[Finding]:
        return [self._layers(), self._ranks(), self._trees()]

    def _layers(self) -> Finding:
        table, best = self.by_layer, self.found.best
        top = int(np.argmax(table["uuas"]))
        sentence = (
            f"Structural probe of rank {self.settings.rank} on {self.subject.label}: UUAS is highest in layer {top}"
            f" ({table['uuas'][top]:.1%}; layer 0 {table['uuas'][0]:.1%}, last layer {table['uuas'][-1]:.1%}, random"
            f" weights at most {max(table['random_uuas']):.1%}, adjacent words {self.chain.uuas:.1%}), DSpr"
            f" {max(table['dspr']):.3f}; depth probes find {max(table['root_accuracy']):.1%} of the roots (layer"
            f" {int(np.argmax(table['root_accuracy']))}; layer 0 {table['root_accuracy'][0]:.1%}); the least held-out"
            f" loss is layer {best}'s ({self.counts})."
        )
        rows = [[layer, *(values[layer] for values in table.values())] for layer in range(len(self.found.layers))]
        return Finding("structure", sentence, ["layer", *table], rows, self._draw_layers)

    def _draw_layers(self) -> Figure:
        title = f"{self.subject.label}: structural probes of rank {self.settings.rank}\n({self.counts})"
        figure, (distance, depth) = new_figure(title, panels=2, width=11, height=4.4)
        layers = range(len(self.found.layers))
        for axes, names, levels in (
            (distance, ("uuas", "dspr"), (self.chain.uuas, self.chain.spearman)),
            (depth, ("root_accuracy", "nspr"), (self.position.root_accuracy, self.position.spearman)),
        ):
            shown = {"uuas": "UUAS", "dspr": "DSpr", "root_accuracy": "root accuracy", "nspr": "NSpr"}
            series: dict[str, Sequence[float]] = {shown[name]: self.by_layer[name] for name in names}
            series |= {f"{shown[name]}, random": self.by_layer[f"random_{name}"] for name in names}
            baseline = "adjacent words" if axes is distance else "by position"
            for name, level, dash in zip(names, levels, ("-", ":"), strict=True):
                axes.axhline(level, color="0.6", linestyle=dash, linewidth=1, label=f"{shown[name]}, {baseline}")
            lines(axes, layers, series)
            layer_ticks(axes, len(self.found.layers))
            axes.set_ylim(0, 1)
        plain(distance, x="layer (0: embeddings)", y="share of edges (UUAS); correlation (DSpr)", title="distance")
        plain(depth, x="layer (0: embeddings)", y="share of sentences; correlation (NSpr)", title="depth")
        return figure

    def _ranks(self) -> Finding:
        ranks = self.found.ranks
        top = max(scores.uuas for scores in ranks.values())
        enough = next(rank for rank, scores in ranks.items() if scores.uuas >= 0.98 * top)
        sentence = (
            f"Rank of the distance probe on layer {self.found.best} of {self.subject.label}: UUAS is"
            f" {ranks[min(ranks)].uuas:.1%} at rank {min(ranks)} and {ranks[max(ranks)].uuas:.1%} at rank {max(ranks)};"
            f" rank {enough} is the first within 2 % of the best ({self.counts})."
        )
        rows = [[rank, scores.uuas, scores.spearman] for rank, scores in ranks.items()]
        return Finding("ranks", sentence, ["rank", "uuas", "dspr"], rows, self._draw_ranks)

    def _draw_ranks(self) -> Figure:
        ranks = self.found.ranks
        title = f"{self.subject.label}, layer {self.found.best}: rank of the distance probe\n({self.counts})"
        figure, axes = new_figure(title, width=6)
        series = {
            "UUAS": [scores.uuas for scores in ranks.values()],
            "DSpr": [scores.spearman for scores in ranks.values()],
        }
        axes.set_xscale("log", base=2)
        lines(axes, list(ranks), series)
        axes.set_xticks(list(ranks), [str(rank) for rank in ranks])
        axes.minorticks_off()
        plain(axes, x="rank of B (logarithmic)", y="share of edges; correlation")
        return figure

    def _trees(self) -> Finding:
        rows: list[list[object]] = []
        test = self.bank.pairs[self.bank.train + self.bank.held_out :]
        whole = with_edges = 0
        for (example, _), tree, found in zip(test, self.bank.test_trees, self.found.trees, strict=True):
            with_edges += bool(tree.edges)
            whole += bool(tree.edges) and set(tree.edges) <= set(found)
            for kind, edges in (("gold", tree.edges), ("predicted", found)):
                rows += [[example.id, kind, a + 1, b + 1, example.words[a], example.words[b]] for a, b in edges]
        sentence = (
            f"Minimum spanning trees of layer {self.found.best} of {self.subject.label}: {whole:,} of"
            f" {with_edges:,} sentences with an edge have every edge right, punctuation left out."
        )
        columns = ["sentence", "tree", "word", "other_word", "word_form", "other_form"]
        return Finding("trees", sentence, columns, rows, self._draw_trees)

    def _draw_trees(self) -> Figure:
        test = self.bank.pairs[self.bank.train + self.bank.held_out :]
        fitting = [number for number, (example, _) in enumerate(test) if len(example.words) in _DRAWN_LENGTHS]
        chosen = (fitting or list(range(len(test))))[:_DRAWN_TREES]
        title = (
            f"{self.subject.label}, layer {self.found.best}: trees of the first {len(chosen)} test sentences of"
            f" {_DRAWN_LENGTHS.start} to {_DRAWN_LENGTHS.stop - 1} words\n"
            "(above: gold; below: minimum spanning tree of the predicted distances, dashed where wrong)"
        )
        figure, panels = new_figure(title, rows=len(chosen), width=9, height=2.3 * len(chosen) + 0.6)
        for axes, number in zip(np.atleast_1d(panels), chosen, strict=True):
            gold = set(self.bank.test_trees[number].edges)
            _draw_tree(axes, test[number][0].words, gold, self.found.trees[number])
        return figure


def _draw_tree(axes: Axes, words: Sequence[str], gold: set[Edge], found: Sequence[Edge]) -> None:
    """Words in a row, the gold tree's arcs above them and the others below, dashed where they are not in it."""
    from matplotlib.patches import Arc

    places = np.concatenate([[0.0], np.cumsum([0.5 * len(word) + 1.2 for word in words])])
    centres = [(a + b) / 2 for a, b in pairwise(places)]
    for word, centre in zip(words, centres, strict=True):
        axes.text(centre, 0, word, ha="center", va="center", fontsize="small")
    tallest = 1.0
    for side, edges in ((1, sorted(gold)), (-1, found)):
        for a, b in edges:
            height = 0.9 + 0.55 * (b - a) ** 0.8
            tallest = max(tallest, height)
            middle, across = (centres[a] + centres[b]) / 2, centres[b] - centres[a]
            style = "-" if side > 0 or (a, b) in gold else (0, (3, 2))
            angles = {"theta1": 0, "theta2": 180} if side > 0 else {"theta1": 180, "theta2": 360}
            axes.add_patch(Arc((middle, 0.55 * side), across, 2 * height, **angles, linestyle=style, linewidth=1.1))
    axes.set_xlim(0, places[-1])
    axes.set_ylim(-tallest - 0.8, tallest + 0.8)
    axes.axis("off")

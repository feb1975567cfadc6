"""`probe attribution`: what of each input token is in a hidden state, whether it can be told from it, and what a
prediction rests on.

Brunner et al. 2020, arXiv:1908.04211, sections 2 and 4, for hidden states (probes/attribution.py, identifiability.py);
predictions are explained by explanation.py, the sibling.

Shapes: L layers without the embeddings, n tokens of a sentence, T of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from bertkit.data.batch import PackedBatch
from bertkit.data.random import Draw
from bertkit.errors import DataError, UsageError
from bertkit.evaluation.figures import DASHES, MARKERS, SHADES, layer_ticks, lines, new_figure, plain
from bertkit.evaluation.loaded_model import ProbedModel
from bertkit.models.recorder import layer_points, point_shapes
from bertkit.probing.attribution import explanation_run as explanation
from bertkit.probing.attribution.identifiability import MAPS, identifiability, token_states
from bertkit.probing.attribution.measure import (
    FARTHEST,
    GROUPS,
    OFFSETS,
    Contributions,
    contributions,
    directions,
    squared_norms,
)
from bertkit.probing.run import Analysis, Finding, Probed, ProbeRequest, carry_out, left_out
from bertkit.probing.sentences import EncodedSentence, TextEncoder
from bertkit.settings import Settings
from bertkit.training.engine import Engine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KIND = "attribution"
_TRAIN_SHARE = 0.85
_LEAST_SENTENCES = 10


class AttributionSettings(Settings):
    """What decides the result, beside models and text."""

    sentences: int = Field(
        30, ge=0, description="Sentences whose Jacobians are taken, drawn at random from the text; costly."
    )
    directions: int = Field(
        8, ge=1, description="Random directions by which a Jacobian's norm is estimated; exact from the width on."
    )
    identify_sentences: int = Field(
        500, ge=0, description="Sentences by which it is learnt to tell a token from its state; 0 leaves that out."
    )
    epochs: int = Field(10, ge=1, description="Passes over them, of the perceptron.")
    texts: list[str] = Field(default_factory=list, description="Texts whose predictions are explained.")
    target: str | None = Field(None, description="What is explained of the texts; the most probable word or class.")
    methods: list[str] = Field(default_factory=list, description="Methods of explanation; empty: all.")
    baseline: Literal["mask", "pad", "zero"] = Field("mask", description="What stands for words in the baseline.")
    steps: int = Field(50, ge=1, description="Points of the path of integrated gradients.")
    seed: int = Field(0, ge=0, description="Of all choices.")


DEFINITIONS = {
    "contribution": "norm of the Jacobian of a token's state by an input token's embedding, as a share of all input"
    " tokens' (Brunner et al. 2020, section 4). Variant: Frobenius norm of the full Jacobian, by forward-mode"
    " differentiation along random orthonormal directions, exact with as many as there are dimensions. Input: what the"
    " first layer reads",
    "own_share": "contribution of a token's own input to its state; all tokens count, special ones too",
    "led_by_others": "share of states to which another token contributes most",
    "by_offset": "mean contribution of one input token that stands so many tokens behind (+) or before (-) the state's",
    "by_distance": "mean contribution of all input tokens at these distances together; the groups sum to 1",
    "identifiability": f"share of tokens of other sentences ({1 - _TRAIN_SHARE:.0%} of them) whose input is, of the"
    " inputs of their own sentence, nearest by cosine to their state (`nearest`), to a linear map of it (least squares)"
    " or to a perceptron's output (`mlp`), both learnt by the squared error; equal inputs, of a repeated word in"
    " families whose inputs hold no position, count as one",
    "chance": "mean of 1/n over the test sentences' tokens",
    "dtype": "float32 model, float64 sums",
    **explanation.DEFINITIONS,
}


def probe_attribution(request: ProbeRequest, settings: AttributionSettings) -> Probed:
    """Measure and write a run.

    Raises:
        UsageError: neither text nor data, several models, no such method or target, a text without its mask.
        DataError: text or model at fault, or too few sentences to learn from.
    """
    subject = request.subject()
    methods = explanation.wanted_methods(settings.methods)
    questions = [explanation.make_question(subject, text, settings.target) for text in settings.texts]
    if settings.target is not None and not questions:
        raise UsageError(f"--target {settings.target}: give the --text whose prediction is explained")
    if not request.data and not questions:
        raise UsageError("nothing to look at: give --data SOURCE, or --text with a prediction to explain")
    material = _Material.read(request, settings, subject) if request.data else None

    def analyse() -> Analysis:
        engine = request.engine()
        summary: dict[str, Any] = {}
        findings: list[Finding] = []
        if material is not None:
            report = _Report(subject, settings, material, request, engine)
            summary |= report.summary() | {"left_out": material.left_out}
            findings += report.findings()
        explained = [
            explanation.explain(subject, each, methods, baseline=settings.baseline, steps=settings.steps, engine=engine)
            for each in questions
        ]
        summary["predictions"] = [explanation.summary_of(each) for each in explained]
        findings += [explanation.finding_of(each, subject.label, n) for n, each in enumerate(explained, 1)]
        return Analysis(summary, DEFINITIONS, findings)

    hashes = {} if material is None else material.hashes
    return carry_out(KIND, settings, request, [subject], analyse, data=hashes, seed=settings.seed)


@dataclass(frozen=True)
class _Material:
    """The sentences: those whose Jacobians are taken, and those from which it is learnt."""

    few: Sequence[EncodedSentence]
    many: Sequence[EncodedSentence]
    hashes: dict[str, str]
    left_out: dict[str, Any]

    @classmethod
    def read(cls, request: ProbeRequest, settings: AttributionSettings, subject: ProbedModel) -> _Material:
        layer_points(subject.model)
        most = max(settings.sentences, settings.identify_sentences)
        if not most:
            raise UsageError("--sentences 0 and --identify-sentences 0 leave nothing to do with --data")
        texts = request.texts(most=most, seed=settings.seed)
        encoder = TextEncoder.of(subject.model, subject.tokenizer)
        every = list(encoder.encode(texts.sentences))
        order = np.argsort(Draw(settings.seed, KIND).uniform("sentence", sample=np.arange(len(every))), kind="stable")
        few = [every[number] for number in order[: settings.sentences].tolist()]
        many = [every[number] for number in order[: settings.identify_sentences].tolist()]
        if not every or (settings.identify_sentences and len(many) < _LEAST_SENTENCES):
            raise DataError(
                f"{', '.join(request.data)}: {len(every)} sentences that the model can read, expected at least"
                f" {_LEAST_SENTENCES}; give more text, or --identify-sentences 0"
            )
        return cls(few, many, texts.hashes, left_out(encoder.notes))


class _Report:
    """What was measured of hidden states."""

    def __init__(
        self,
        subject: ProbedModel,
        settings: AttributionSettings,
        material: _Material,
        request: ProbeRequest,
        engine: Engine,
    ) -> None:
        self.subject, self.settings = subject, settings
        self.points = layer_points(subject.model)
        self.gathered = self._jacobians(material.few, request, engine) if material.few else None
        self.sentences = len(material.few)
        self.found: dict[str, list[float]] = {}
        self.chance = float("nan")
        self.learnt = self.tested = 0
        if material.many:
            self._identify(material.many, request, engine)

    def _jacobians(self, sentences: Sequence[EncodedSentence], request: ProbeRequest, engine: Engine) -> Contributions:
        settings = self.settings
        model = self.subject.model.to(engine.device).eval()
        shapes = point_shapes(model, PackedBatch.from_ids([[0, 0]]).to(engine.device))
        width = shapes[self.points[0]][-1]
        gathered = Contributions()
        with request.progress("Jacobians", len(sentences), "sentences") as meter:
            for number, sentence in enumerate(sentences):
                along = directions(width, settings.directions, seed=settings.seed, sentence=sentence.number)
                squares = squared_norms(
                    model,
                    sentence,
                    self.points,
                    along,
                    max_batch_tokens=engine.micro_batch_tokens,
                    device=engine.device,
                )
                gathered.add(contributions(squares))
                meter.update(number + 1)
        return gathered

    def _identify(self, sentences: Sequence[EncodedSentence], request: ProbeRequest, engine: Engine) -> None:
        states = token_states(
            self.subject.model,
            sentences,
            max_batch_tokens=engine.micro_batch_tokens,
            device=engine.device,
            progress=request.progress,
        )
        cut = round(_TRAIN_SHARE * len(sentences))
        train, test = states.of(range(cut)), states.of(range(cut, len(sentences)))
        self.found = identifiability(
            train, test, epochs=self.settings.epochs, seed=self.settings.seed, progress=request.progress
        )
        _, sizes = np.unique(test.sentence_T, return_counts=True)
        self.chance = sizes.size / float(sizes.sum())
        self.learnt, self.tested = train.sentence_T.size, test.sentence_T.size

    def summary(self) -> dict[str, Any]:
        gathered = self.gathered
        summary: dict[str, Any] = {"layers": list(range(len(self.points)))}
        if gathered is not None:
            own_LT = gathered.own_LT
            summary |= {
                "sentences": self.sentences,
                "tokens": gathered.tokens,
                "directions": self.settings.directions,
                "own_share": {
                    "median": np.median(own_LT, axis=1),
                    "mean": own_LT.mean(1),
                    "quartiles": np.quantile(own_LT, [0.25, 0.75], axis=1).T,
                },
                "led_by_others": gathered.led_by_others_L,
                "by_offset": {"offsets": list(OFFSETS), "contribution": gathered.offset_means},
                "by_distance": {"distances": [name for name, *_ in GROUPS], "contribution": gathered.group_means},
            }
        if self.found:
            summary["identifiability"] = {
                **self.found,
                "chance": self.chance,
                "train_tokens": self.learnt,
                "test_tokens": self.tested,
            }
        return summary

    def findings(self) -> list[Finding]:
        found = [self._own(), self._context()] if self.gathered is not None else []
        return [*found, self._identifiability()] if self.found else found

    @property
    def counts(self) -> str:
        assert self.gathered is not None
        return f"n = {self.sentences:,} sentences, {self.gathered.tokens:,} tokens"

    def _own(self) -> Finding:
        gathered = self.gathered
        assert gathered is not None
        own_LT, led = gathered.own_LT, gathered.led_by_others_L
        medians = np.median(own_LT, axis=1)
        below = next((layer + 1 for layer, median in enumerate(medians) if median < 1 / 2), None)
        where = "stays above one half in all layers" if below is None else f"is below one half from layer {below} on"
        sentence = (
            f"Own-token share in {self.subject.label}: a token's own input has a median share of {medians[0]:.1%} in"
            f" its state of layer 1 and {medians[-1]:.1%} in layer {len(medians)}, and {where}; another token"
            f" contributes most to {led[-1]:.1%} of the last layer's states, at most to {led.max():.1%} (layer"
            f" {int(led.argmax()) + 1}; Jacobians by {self.settings.directions} directions; {self.counts})."
        )
        quartiles = np.quantile(own_LT, [0.05, 0.25, 0.5, 0.75, 0.95], axis=1).T
        columns = ["layer", "mean", "5%", "25%", "median", "75%", "95%", "led_by_others"]
        rows = [[layer + 1, own_LT[layer].mean(), *quartiles[layer], led[layer]] for layer in range(own_LT.shape[0])]
        return Finding("own_share", sentence, columns, rows, self._draw_own)

    def _draw_own(self) -> Figure:
        gathered = self.gathered
        assert gathered is not None
        figure, (shares, led) = new_figure(
            f"{self.subject.label}: what of a token is in its state ({self.counts})", panels=2
        )
        layers = list(range(1, len(self.points)))
        shares.boxplot(
            list(gathered.own_LT),
            positions=layers,
            widths=0.6,
            whis=(5, 95),
            showfliers=False,
            medianprops={"color": "black", "linewidth": 1.6},
        )
        shares.axhline(0.5, color="0.5", linestyle=":")
        plain(shares, x="layer", y="contribution of the own input (share)", title="whiskers: 5% and 95% of tokens")
        shares.set_ylim(0, 1)
        lines(led, layers, {"states": gathered.led_by_others_L.tolist()})
        plain(led, x="layer", y="share of states", title="another token contributes most")
        led.set_ylim(-0.03, 1.03)
        for axes in (shares, led):
            axes.set_xticks(layers, [str(layer) for layer in layers])
        return figure

    def _context(self) -> Finding:
        gathered = self.gathered
        assert gathered is not None
        first, last = gathered.group_means[0], gathered.group_means[-1]
        parts = ", ".join(
            f"{name} {before:.1%} and {after:.1%}"
            for (name, *_), before, after in zip(GROUPS, first, last, strict=True)
        )
        sentence = (
            f"Context in {self.subject.label}: inputs at these distances contribute together, in layer 1 and in layer"
            f" {gathered.group_means.shape[0]}: {parts} ({self.counts})."
        )
        columns = [
            "layer",
            *(f"offset {offset:+d}" for offset in OFFSETS),
            *(f"distance {name}" for name, *_ in GROUPS),
        ]
        rows = [
            [layer + 1, *(None if np.isnan(value) else value for value in offsets), *groups]
            for layer, (offsets, groups) in enumerate(zip(gathered.offset_means, gathered.group_means, strict=True))
        ]
        return Finding("context", sentence, columns, rows, self._draw_context)

    def _draw_context(self) -> Figure:
        gathered = self.gathered
        assert gathered is not None
        figure, (by_offset, by_distance) = new_figure(
            f"{self.subject.label}: where contributions come from ({self.counts})", panels=2, width=10.4, height=4.2
        )
        layers = gathered.offset_means.shape[0]
        shown = sorted({*np.linspace(0, layers - 1, min(layers, 4)).round().astype(int).tolist()})
        for place, layer in enumerate(shown):
            by_offset.plot(
                OFFSETS,
                gathered.offset_means[layer],
                label=f"layer {layer + 1}",
                color=SHADES[place % len(SHADES)],
                linestyle=DASHES[place % len(DASHES)],
                marker=MARKERS[place % len(MARKERS)],
                markersize=4,
            )
        by_offset.set_yscale("log")
        by_offset.set_xticks(range(-FARTHEST, FARTHEST + 1, 2))
        by_offset.legend(frameon=False, fontsize="small")
        plain(by_offset, x="place of the input, seen from the state (tokens)", y="contribution of one token (share)")
        numbers = list(range(1, layers + 1))
        series = {
            f"distance {name}": gathered.group_means[:, place].tolist() for place, (name, *_) in enumerate(GROUPS)
        }
        lines(
            by_distance, numbers, {name.replace("distance itself", "the token itself"): v for name, v in series.items()}
        )
        plain(by_distance, x="layer", y="contribution of all together (share)")
        by_distance.set_xticks(numbers if layers <= 13 else numbers[::2])
        by_distance.set_ylim(bottom=0)
        return figure

    def _identifiability(self) -> Finding:
        last = len(self.points) - 1
        parts = ", ".join(f"{self.found[name][-1]:.1%} ({name})" for name in MAPS)
        sentence = (
            f"Token identifiability in {self.subject.label}: from layer {last} {parts} of the tokens are told from the"
            f" others of their sentence, from layer 1 {self.found['nearest'][1]:.1%}, {self.found['linear'][1]:.1%} and"
            f" {self.found['mlp'][1]:.1%} (chance {self.chance:.1%}; learnt on {self.learnt:,} tokens, n ="
            f" {self.tested:,} tokens of other sentences)."
        )
        rows = [
            [layer, *(None if np.isnan(self.found[name][layer]) else self.found[name][layer] for name in MAPS)]
            for layer in range(last + 1)
        ]
        return Finding("identifiability", sentence, ["layer", *MAPS], rows, self._draw_identifiability)

    def _draw_identifiability(self) -> Figure:
        figure, axes = new_figure(
            f"{self.subject.label}: token identifiability (n = {self.tested:,} tokens)", width=5.6, height=3.8
        )
        lines(axes, range(len(self.points)), {name: list(self.found[name]) for name in MAPS})
        axes.axhline(self.chance, color="0.5", linestyle=":")
        axes.annotate("chance", (0, self.chance), textcoords="offset points", xytext=(0, 3), fontsize="small")
        plain(axes, x="layer (0: embeddings)", y="share of tokens identified")
        layer_ticks(axes, len(self.points))
        axes.set_ylim(0, 1.03)
        return figure

"""`probe effective-attention`: how much of an attention map makes no difference, by length, layer and kind of token.

Brunner et al. 2020, arXiv:1908.04211, section 3 and figures 1 to 3; the projection is in probes/effective_attention.py.
The texts are drawn sentences put one behind the other and cut to given lengths, for few sentences are longer than a
head is wide; they are no running text. Sibling attention.py takes maps as they are.

Shapes: L layers, N heads of a layer, G lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from bertkit.errors import DataError, UsageError
from bertkit.evaluation.figures import heat_map, lines, new_figure, plain
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.probing.attention.measure import Columns, pattern_points
from bertkit.probing.effective_attention.measure import LayerAttention, correlations, layer_attention, output_maps
from bertkit.probing.run import Analysis, Finding, Probed, ProbeRequest, carry_out, left_out
from bertkit.probing.sentences import EncodedSentence, Sentence, TextEncoder
from bertkit.settings import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KIND = "effective-attention"
KINDS_OF_TOKENS = ("cls", "sep", "punctuation", "words")
LABELS = {"cls": "[CLS]", "sep": "[SEP]", "punctuation": "punctuation", "words": "other words"}
LENGTHS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
Floats = NDArray[np.float64]
_EXAMPLE_TOKENS = 48
"""The longest text that is drawn as a map."""
_DARKEST = 0.3
"""Attention that is drawn black."""


class EffectiveAttentionSettings(Settings):
    """What decides the result, beside model and text."""

    sentences: int = Field(1000, ge=1, description="Sentences, drawn at random from the text, that texts are made of.")
    texts: int = Field(20, ge=1, description="Texts of each length.")
    lengths: list[int] = Field(
        default_factory=list, description="Lengths in tokens; empty: a row of lengths up to what the model reads."
    )
    seed: int = Field(0, ge=0, description="Of the draw.")


DEFINITIONS = {
    "effective": "A U U^T with U the left singular vectors of T = V W_O (a head's values, bias included, behind its"
    " slice of the output projection) whose singular value is above max(n, H) * eps * the greatest, in float64"
    " (Brunner et al. 2020, section 3.2); A_eff T = A T",
    "correlation": "Pearson's, of a head's raw and effective attention over all n^2 cells of a text; mean over heads"
    " and texts",
    "attention_to": "mean over attending tokens, heads and texts of the attention to [CLS], to [SEP], to words of"
    " punctuation and to all other tokens; effective attention may be negative and need not add up to 1",
    "rank": "of T; with full rank the least of n and of the head's width",
    "text": "sentences one behind the other, cut at words so that the text has the length or a few tokens less",
    "dtype": "float32 model, float64 decomposition",
}


def probe_effective_attention(request: ProbeRequest, settings: EffectiveAttentionSettings) -> Probed:
    """Measure and write a run.

    Raises:
        UsageError: no data, several models, or lengths that the model does not read.
        DataError: text or model at fault, or too little text.
    """
    subject = request.subject()
    layers = len(pattern_points(subject.model))
    width = output_maps(subject.model, layers)[0].shape[1]
    lengths = wanted_lengths(settings.lengths, subject)
    texts = request.texts(most=settings.sentences, seed=settings.seed)
    encoder = TextEncoder.of(subject.model, subject.tokenizer)
    sentences = list(encoder.encode(texts.sentences))
    made = make_texts(sentences, encoder, lengths, settings.texts)
    if not made:
        raise DataError(
            f"{', '.join(request.data)}: not enough text for {settings.texts} texts of {lengths[0]} tokens; give more,"
            " or lower --texts"
        )

    def analyse() -> Analysis:
        engine = request.engine()
        tally = Tally(subject, width)
        flat = [(length, text) for length, some in made.items() for text in some]
        with request.progress("effective attention", len(flat), "texts") as meter:
            stream = layer_attention(subject.model, [text for _, text in flat], device=engine.device)
            for number, (text, found) in enumerate(stream):
                tally.add(flat[number][0], text, found)
                meter.update(number + 1)
        summary = tally.summary() | {
            "lengths_without_enough_text": [length for length in lengths if length not in made],
            "left_out": left_out(encoder.notes),
        }
        return Analysis(summary, DEFINITIONS, tally.findings())

    return carry_out(KIND, settings, request, [subject], analyse, data=texts.hashes, seed=settings.seed)


def wanted_lengths(asked: Sequence[int], subject: LoadedModel) -> list[int]:
    """The lengths in ascending order.

    Raises:
        UsageError: one is beyond what the model reads, or leaves no room for words.
    """
    most = subject.config.max_tokens
    if not asked:
        return [length for length in LENGTHS if length <= most]
    for length in asked:
        if not 4 <= length <= most:
            raise UsageError(f"--length {length}: expected 4 to {most} tokens, which is what the model reads")
    return sorted(set(asked))


def make_texts(
    sentences: Sequence[EncodedSentence], encoder: TextEncoder, lengths: Sequence[int], each: int
) -> dict[int, list[EncodedSentence]]:
    """Texts of each length, as far as the words go; each length begins with the first word again.

    Args:
        sentences: what they are made of, in this order.
        encoder: of the model.
        lengths: in tokens, special tokens included.
        each: how many of each; a length for which there are not as many words is left out.
    """
    words = [
        (word, int(end - start))
        for sentence in sentences
        for word, (start, end) in zip(sentence.words, sentence.spans_W2.tolist(), strict=True)
    ]
    special = int(sentences[0].special_T.sum()) if sentences else 0
    made: dict[int, list[EncodedSentence]] = {}
    for length in lengths:
        parts, place = list[Sentence](), 0
        while len(parts) < each:
            start, room = place, length - special
            while place < len(words) and words[place][1] <= room:
                room -= words[place][1]
                place += 1
            if place == len(words):
                break
            if place == start:
                place += 1
                continue
            text = tuple(word for word, _ in words[start:place])
            parts.append(Sentence(f"text {len(parts) + 1} of {length} tokens", words=text))
        if len(parts) == each:
            made[length] = list(encoder.encode(parts))
    return {length: some for length, some in made.items() if some}


@dataclass
class Tally:
    """What comes to be known text by text.

    Attributes:
        subject: the model.
        width: of a head.
        correlation: by length, of every text (L, N).
        rank: by length, of every text the mean over heads and layers.
        shares: by length, of every text (2, L, kinds of tokens): raw, effective.
        example: the shortest text longer than a head is wide, and its maps in the layer and head that differ most.
    """

    subject: LoadedModel
    width: int
    correlation: dict[int, list[Floats]] = field(default_factory=dict)
    rank: dict[int, list[float]] = field(default_factory=dict)
    shares: dict[int, list[Floats]] = field(default_factory=dict)
    example: tuple[EncodedSentence, int, int, Floats, Floats] | None = None

    def add(self, length: int, text: EncodedSentence, layers: Sequence[LayerAttention]) -> None:
        """One more text."""
        by_head_LN = torch.stack([correlations(layer) for layer in layers]).numpy()
        self.correlation.setdefault(length, []).append(by_head_LN)
        self.rank.setdefault(length, []).append(float(np.mean([float(each.rank_N.double().mean()) for each in layers])))
        self.shares.setdefault(length, []).append(self._shares(text, layers))
        if self.example is None and self.width < text.ids_T.size <= max(_EXAMPLE_TOKENS, self.width + 16):
            layer, head = divmod(int(np.nanargmin(by_head_LN)), by_head_LN.shape[1])
            maps = layers[layer]
            self.example = (text, layer, head, maps.raw_Nnn[head].numpy(), maps.effective_Nnn[head].numpy())

    def _shares(self, text: EncodedSentence, layers: Sequence[LayerAttention]) -> Floats:
        marks = Columns.of(self.subject.tokenizer).marks(text)
        kinds = torch.from_numpy(np.concatenate([marks, ~marks.any(1, keepdims=True)], axis=1)).double()
        return torch.stack(
            [
                torch.stack([(maps @ kinds).mean((0, 1)) for maps in (each.raw_Nnn, each.effective_Nnn)])
                for each in layers
            ],
            dim=1,
        ).numpy()

    @property
    def lengths(self) -> list[int]:
        return sorted(self.correlation)

    @property
    def count(self) -> int:
        return sum(map(len, self.correlation.values()))

    def by_layer(self, length: int) -> Floats:
        """Mean correlation of each layer, (L,)."""
        found: Floats = np.nanmean(np.stack(self.correlation[length]), axis=(0, 2))
        return found

    def attention_to(self) -> tuple[list[int], Floats]:
        """Mean raw and effective attention to each kind of token, (2, L, kinds), of texts longer than a head is wide,
        and their lengths; of all texts where none is."""
        long = [length for length in self.lengths if length > self.width] or self.lengths
        found: Floats = np.mean([share for length in long for share in self.shares[length]], axis=0)
        return long, found

    def summary(self) -> dict[str, Any]:
        long, (raw_LK, effective_LK) = self.attention_to()
        return {
            "texts": self.count,
            "head_width": self.width,
            "lengths": self.lengths,
            "correlation": [self.by_layer(length) for length in self.lengths],
            "mean_correlation": [float(np.mean(self.by_layer(length))) for length in self.lengths],
            "mean_rank": [float(np.mean(self.rank[length])) for length in self.lengths],
            "attention_to": {
                "lengths": long,
                "kinds": list(KINDS_OF_TOKENS),
                "raw": raw_LK,
                "effective": effective_LK,
            },
        }

    def findings(self) -> list[Finding]:
        return [self._by_length(), self._by_kind(), *self._example()]

    def _by_length(self) -> Finding:
        means = {length: float(np.mean(self.by_layer(length))) for length in self.lengths}
        shortest, longest = self.lengths[0], self.lengths[-1]
        layers = self.by_layer(longest)
        least = int(np.argmin(layers))
        sentence = (
            f"Raw and effective attention of {self.subject.label} correlate by {means[shortest]:.3f} at {shortest}"
            f" tokens and {means[longest]:.3f} at {longest}, where T has a mean rank of"
            f" {np.mean(self.rank[longest]):.0f} (heads are {self.width} wide); least in layer {least + 1}"
            f" ({layers[least]:.3f}; n = {len(self.correlation[longest])} texts of each length, all heads)."
        )
        columns = ["tokens", "texts", "mean_rank", *(f"layer_{n + 1}" for n in range(layers.size))]
        rows = [
            [length, len(self.correlation[length]), np.mean(self.rank[length]), *self.by_layer(length)]
            for length in self.lengths
        ]
        return Finding("effective_attention", sentence, columns, rows, self._draw_lengths)

    def _draw_lengths(self) -> Figure:
        figure, axes = new_figure(
            f"{self.subject.label}: raw and effective attention\n(n = {len(self.correlation[self.lengths[0]])} texts of"
            " each length, mean over heads)",
            width=6.6,
            height=4.2,
        )
        layers = self.by_layer(self.lengths[0]).size
        shown = sorted({*np.linspace(0, layers - 1, min(layers, 6)).round().astype(int).tolist()})
        series = {f"layer {n + 1}": [float(self.by_layer(length)[n]) for length in self.lengths] for n in shown}
        lines(axes, self.lengths, series)
        axes.axvline(self.width, color="0.5", linestyle=":")
        axes.annotate(
            f"head width {self.width}", (self.width, 0.02), xycoords=("data", "axes fraction"), fontsize="small"
        )
        axes.set_xscale("log", base=2)
        axes.set_xticks(self.lengths, [str(length) for length in self.lengths])
        axes.minorticks_off()
        plain(axes, x="length (tokens)", y="correlation (Pearson)")
        axes.set_ylim(top=1.03)
        return figure

    def _by_kind(self) -> Finding:
        long, (raw_LK, effective_LK) = self.attention_to()
        texts = sum(len(self.shares[length]) for length in long)
        parts = ", ".join(
            f"{LABELS[name]} {raw_LK[:, place].mean():.2f} and {effective_LK[:, place].mean():.2f}"
            for place, name in enumerate(KINDS_OF_TOKENS)
            if raw_LK[:, place].any()
        )
        sentence = (
            f"Raw and effective attention of {self.subject.label} in texts of {long[0]} to {long[-1]} tokens, mean over"
            f" layers: {parts} (n = {texts} texts)."
        )
        rows = [
            [layer + 1, name, raw_LK[layer, place], effective_LK[layer, place]]
            for layer in range(raw_LK.shape[0])
            for place, name in enumerate(KINDS_OF_TOKENS)
        ]
        return Finding("attention_to", sentence, ["layer", "to", "raw", "effective"], rows, self._draw_kinds)

    def _draw_kinds(self) -> Figure:
        long, (raw_LK, effective_LK) = self.attention_to()
        kinds = [place for place in range(len(KINDS_OF_TOKENS)) if raw_LK[:, place].any()]
        figure, axes = new_figure(
            f"{self.subject.label}: attention to kinds of tokens, texts of {long[0]} to {long[-1]} tokens"
            f" (n = {sum(len(self.shares[length]) for length in long)})",
            panels=len(kinds),
            width=3.1 * len(kinds),
            height=3.2,
        )
        layers = list(range(1, raw_LK.shape[0] + 1))
        for axis, place in zip(np.ravel(axes), kinds, strict=True):
            series = {"raw": raw_LK[:, place].tolist(), "effective": effective_LK[:, place].tolist()}
            lines(axis, layers, series)
            plain(axis, x="layer", y="attention (share)", title=f"to {LABELS[KINDS_OF_TOKENS[place]]}")
            axis.set_xticks(layers if len(layers) <= 13 else layers[::2])
            low, high = axis.get_ylim()
            axis.set_ylim(min(0.0, low), high)
            if axis is not np.ravel(axes)[0]:
                axis.get_legend().remove()
        return figure

    def _example(self) -> list[Finding]:
        if self.example is None:
            return []
        text, layer, head, raw_nn, effective_nn = self.example
        sentence = (
            f"An example: head {layer + 1}-{head + 1} of {self.subject.label} on a text of {text.ids_T.size} tokens has"
            f" raw attention of {raw_nn.min():.2f} to {raw_nn.max():.2f} and effective attention of"
            f" {effective_nn.min():.2f} to {effective_nn.max():.2f}."
        )
        tokens = [self.subject.tokenizer.token(int(i)) for i in text.ids_T]
        rows = [
            [query + 1, tokens[query], key + 1, tokens[key], raw_nn[query, key], effective_nn[query, key]]
            for query in range(len(tokens))
            for key in range(len(tokens))
        ]
        columns = ["query", "query_token", "key", "key_token", "raw", "effective"]
        return [Finding("effective_example", sentence, columns, rows, self._draw_example)]

    def _draw_example(self) -> Figure:
        assert self.example is not None
        text, layer, head, raw_nn, effective_nn = self.example
        tokens = [self.subject.tokenizer.token(int(i)) for i in text.ids_T]
        figure, axes = new_figure(
            f"{self.subject.label}: head {layer + 1}-{head + 1}, {len(tokens)} tokens", panels=2, width=12, height=6.2
        )
        for axis, values, title in zip(axes, (raw_nn, effective_nn), ("raw", "effective"), strict=True):
            image = heat_map(axis, values, rows=tokens, columns=tokens, high=_DARKEST, numbers="")
            axis.tick_params(axis="x", rotation=90)
            axis.tick_params(labelsize=6)
            axis.set_title(title, fontsize="medium")
        figure.colorbar(image, ax=list(axes), shrink=0.8, label=f"attention (below 0 white, from {_DARKEST} on black)")
        return figure

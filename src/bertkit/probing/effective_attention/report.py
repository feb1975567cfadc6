"""Findings of `probe effective-attention`: raw and effective attention by length and by kind of token, and an example.

Figures after Brunner et al. 2020, arXiv:1908.04211, figures 1 to 3.

Shapes: L layers, N heads of a layer, K kinds of tokens, n tokens of a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bertkit.arrays import Float64Array
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.evaluation.plots import heat_map, layer_ticks, lines, new_figure, plain
from bertkit.models.conversion.pruning import head_numbers
from bertkit.probing.attention.measure import SpecialTokens, head_names
from bertkit.probing.effective_attention.measure import LayerAttention, correlations
from bertkit.probing.report import Finding, Table, table_of
from bertkit.probing.sentences import EncodedSentence
from bertkit.visible import number_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS = {"cls": "[CLS]", "sep": "[SEP]", "punctuation": "punctuation", "words": "other words"}
"""Kinds of tokens."""
_EXAMPLE_TOKENS = 48
"""Length of the longest text that is drawn as a map."""
_DARKEST = 0.3
"""Attention from which on cells are black."""

DEFINITIONS = {
    "effective": "A U U^T, with U the left singular vectors of T = V W_O (a head's values, bias included, after its"
    " slice of the output projection) whose singular value exceeds max(n, H) * eps * the largest one, in float64"
    " (Brunner et al. 2020, section 3.2); A_eff T = A T",
    "correlation": "Pearson's correlation of a head's raw and effective attention over all n^2 cells of a text; mean"
    " over heads and texts",
    "attention_to": "attention to [CLS], to [SEP], to words of punctuation and to all other tokens, mean over attending"
    " tokens, heads and texts; effective attention can be negative and need not sum to 1",
    "rank": "rank of T; full rank is the smaller of n and the head width",
    "text": "consecutive sentences, cut at a word boundary so that the text has the requested length or a few tokens"
    " fewer",
    "dtype": "float32 model, float64 decomposition",
}


@dataclass(frozen=True)
class TextResult:
    """Raw and effective attention of one text.

    Attributes:
        length: target length of the text, in tokens.
        correlation_LN: correlation of raw and effective attention.
        rank: mean over heads and layers.
        shares_2LK: raw and effective attention to each kind of token.
    """

    length: int
    correlation_LN: Float64Array
    rank: float
    shares_2LK: Float64Array

    @classmethod
    def of(
        cls, length: int, text: EncodedSentence, layers: Sequence[LayerAttention], special: SpecialTokens
    ) -> TextResult:
        marks = special.marks(text)
        kinds_nK = torch.from_numpy(np.concatenate([marks, ~marks.any(1, keepdims=True)], axis=1)).double()
        shares = [
            torch.stack([(maps @ kinds_nK).mean((0, 1)) for maps in (each.raw_Nnn, each.effective_Nnn)])
            for each in layers
        ]
        return cls(
            length,
            torch.stack([correlations(layer) for layer in layers]).numpy(),
            float(np.mean([float(each.rank_N.double().mean()) for each in layers])),
            torch.stack(shares, dim=1).numpy(),
        )


@dataclass(frozen=True)
class ExampleMaps:
    """The head, as layer-head, in which raw and effective attention of a text differ most, with both maps."""

    tokens: Sequence[str]
    head: str
    raw_nn: Float64Array
    effective_nn: Float64Array

    @classmethod
    def of(
        cls, subject: LoadedModel, width: int, text: EncodedSentence, layers: Sequence[LayerAttention]
    ) -> ExampleMaps | None:
        """None if the text is no longer than the head width or too long for a figure, or no map has an effect."""
        if not width < text.ids_T.size <= max(_EXAMPLE_TOKENS, width + 16):
            return None
        correlation_LN = torch.stack([correlations(each) for each in layers]).numpy()
        if np.isnan(correlation_LN).all():
            return None
        layer, head = divmod(place := int(np.nanargmin(correlation_LN)), correlation_LN.shape[1])
        maps = (layers[layer].raw_Nnn[head].numpy(), layers[layer].effective_Nnn[head].numpy())
        depth, heads = correlation_LN.shape
        name = head_names(head_numbers(subject.model.encoder, layers=depth, heads=heads))[place]
        return cls([subject.tokenizer.token(int(i)) for i in text.ids_T], name, *maps)


def effective_report(
    label: str, width: int, results: Sequence[TextResult], example: ExampleMaps | None
) -> tuple[dict[str, Any], list[Finding]]:
    """Summary and findings.

    Args:
        width: head width.
        results: one per text.
        example: maps to draw; None for no figure.
    """
    by_length: dict[int, list[TextResult]] = {}
    for each in results:
        by_length.setdefault(each.length, []).append(each)
    lengths = sorted(by_length)
    layers_GL = [_mean_by_layer([each.correlation_LN for each in by_length[length]]) for length in lengths]
    ranks = [float(np.mean([each.rank for each in by_length[length]])) for length in lengths]
    # Texts longer than the head width, or all texts if there are none.
    long = [length for length in lengths if length > width] or lengths
    shares_2LK: Float64Array = np.mean([each.shares_2LK for length in long for each in by_length[length]], axis=0)
    summary = {
        "texts": len(results),
        "head_width": width,
        "lengths": lengths,
        "correlation": layers_GL,
        "mean_correlation": [float(np.mean(each)) for each in layers_GL],
        "mean_rank": ranks,
        "attention_to": {"lengths": long, "kinds": list(LABELS), "raw": shares_2LK[0], "effective": shares_2LK[1]},
    }
    counts = [len(by_length[length]) for length in lengths]
    findings = [
        _by_length(label, width, lengths, counts, layers_GL, ranks),
        _by_kind(label, long, sum(len(by_length[length]) for length in long), shares_2LK),
    ]
    return summary, findings if example is None else [*findings, _example(label, example)]


def _mean_by_layer(correlations_LN: Sequence[Float64Array]) -> Float64Array:
    """Mean over texts and heads, (L,); NaN in a layer in which no correlation is defined."""
    stacked_XLN = np.stack(correlations_LN)
    count_L = (~np.isnan(stacked_XLN)).sum((0, 2))
    mean_L: Float64Array = np.full(count_L.shape, np.nan)
    np.divide(np.nansum(stacked_XLN, (0, 2)), count_L, out=mean_L, where=count_L > 0)
    return mean_L


def _by_length(
    label: str,
    width: int,
    lengths: Sequence[int],
    counts: Sequence[int],
    layers_GL: Sequence[Float64Array],
    ranks: Sequence[float],
) -> Finding:
    least = int(np.argmin(layers_GL[-1]))
    sentence = (
        f"Raw and effective attention of {label} have a correlation of {np.mean(layers_GL[-1]):.3f} at {lengths[-1]}"
        f" tokens and of {np.mean(layers_GL[0]):.3f} at {lengths[0]} tokens. At {lengths[-1]} tokens T has a mean rank"
        f" of {ranks[-1]:.0f} (head width {width}), and layer {least + 1} has the lowest correlation"
        f" ({layers_GL[-1][least]:.3f}; n = {number_of(counts[-1], 'text')} of each length, all heads)."
    )
    table = {
        "tokens": lengths,
        "texts": counts,
        "mean_rank": ranks,
        **{f"layer_{number}": column for number, column in enumerate(np.transpose(layers_GL), 1)},
    }
    title = (
        f"{label}: raw and effective attention\n(n = {number_of(counts[0], 'text')} of each length, mean over heads)"
    )
    return Finding("effective_attention", sentence, table, partial(_draw_lengths, title, width))


def _draw_lengths(title: str, width: int, table: Table) -> Figure:
    figure, axes = new_figure(title, width=6.6, height=4.2)
    layers = len(table) - 3
    shown = sorted({*np.linspace(1, layers, min(layers, 6)).round().astype(int).tolist()})
    lines(axes, table["tokens"], {f"layer {number}": table[f"layer_{number}"] for number in shown})
    axes.axvline(width, color="0.5", linestyle=":")
    axes.annotate(f"head width {width}", (width, 0.02), xycoords=("data", "axes fraction"), fontsize="small")
    axes.set_xscale("log", base=2)
    axes.set_xticks(table["tokens"], [str(length) for length in table["tokens"]])
    axes.minorticks_off()
    plain(axes, x="length (tokens)", y="correlation (Pearson)")
    axes.set_ylim(top=1.03)
    return figure


def _by_kind(label: str, lengths: Sequence[int], texts: int, shares_2LK: Float64Array) -> Finding:
    raw_K, effective_K = shares_2LK.mean(1)
    present = shares_2LK[0].any(0)
    parts = ", ".join(
        f"{name} {raw:.2f} and {effective:.2f}"
        for name, raw, effective, there in zip(LABELS.values(), raw_K, effective_K, present, strict=True)
        if there
    )
    where = f"texts of {lengths[0]} to {lengths[-1]} tokens"
    most = list(LABELS.values())[int(np.abs(raw_K - effective_K).argmax())]
    sentence = (
        f"Raw and effective attention of {label} differ most on {most}. Means over layers, in {where}: {parts} (n ="
        f" {number_of(texts, 'text')})."
    )
    rows = [
        [layer + 1, name, *shares_2LK[:, layer, place]]
        for layer in range(shares_2LK.shape[1])
        for place, name in enumerate(LABELS)
    ]
    table = table_of(["layer", "to", "raw", "effective"], rows)
    title = f"{label}: attention to kinds of tokens, {where} (n = {texts})"
    return Finding("attention_to", sentence, table, partial(_draw_kinds, title))


def _draw_kinds(title: str, table: Table) -> Figure:
    raw_LK, effective_LK = (np.reshape(table[name], (-1, len(LABELS))) for name in ("raw", "effective"))
    kinds = np.flatnonzero(raw_LK.any(0)).tolist()
    figure, axes = new_figure(title, panels=len(kinds), width=3.1 * len(kinds), height=3.2)
    layers = range(1, len(raw_LK) + 1)
    for place, (axis, kind) in enumerate(zip(np.ravel(axes), kinds, strict=True)):
        lines(axis, layers, {"raw": raw_LK[:, kind].tolist(), "effective": effective_LK[:, kind].tolist()})
        plain(axis, x="layer", y="attention (share)", title=f"to {list(LABELS.values())[kind]}")
        layer_ticks(axis, len(layers), first=1)
        low, high = axis.get_ylim()
        axis.set_ylim(min(0.0, low), high)
        if place:
            axis.get_legend().remove()
    return figure


def _example(label: str, example: ExampleMaps) -> Finding:
    tokens, raw_nn, effective_nn = example.tokens, example.raw_nn, example.effective_nn
    head = f"head {example.head}"
    sentence = (
        f"Example: {head} of {label} on a text of {len(tokens)} tokens has raw attention from {raw_nn.min():.2f} to"
        f" {raw_nn.max():.2f} and effective attention from {effective_nn.min():.2f} to {effective_nn.max():.2f}."
    )
    query, key = (place.ravel().tolist() for place in np.indices(raw_nn.shape))
    table = {
        "query": [place + 1 for place in query],
        "query_token": [tokens[place] for place in query],
        "key": [place + 1 for place in key],
        "key_token": [tokens[place] for place in key],
        "raw": raw_nn.ravel(),
        "effective": effective_nn.ravel(),
    }
    return Finding(
        "effective_example", sentence, table, partial(_draw_example, f"{label}: {head}, {len(tokens)} tokens")
    )


def _draw_example(title: str, table: Table) -> Figure:
    tokens = table["key_token"][: table["key"][-1]]
    figure, axes = new_figure(title, panels=2, width=12, height=6.2)
    for axis, name in zip(axes, ("raw", "effective"), strict=True):
        maps_nn = np.reshape(table[name], (len(tokens), -1))
        image = heat_map(axis, maps_nn, rows=tokens, columns=tokens, high=_DARKEST, numbers="")
        axis.tick_params(axis="x", rotation=90)
        axis.tick_params(labelsize=6)
        axis.set_title(name, fontsize="medium")
    figure.colorbar(image, ax=list(axes), shrink=0.8, label=f"attention (white below 0, black from {_DARKEST})")
    return figure

"""Findings of `probe attribution`: shares of inputs in states, token identifiability, explained predictions.

Figures after Brunner et al. 2020, arXiv:1908.04211, figures 1, 4 and 5.

Shapes: L layers without the embeddings, T tokens of all sentences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from bertkit.arrays import Float64Array
from bertkit.evaluation.plots import layer_ticks, lines, new_figure, plain
from bertkit.probing.attribution.explanations import GRADIENT_METHODS, ROLLOUT
from bertkit.probing.attribution.identifiability import MAPS
from bertkit.probing.attribution.measure import FARTHEST, GROUPS, OFFSETS, Contributions
from bertkit.probing.attribution.predictions import Explanation
from bertkit.probing.report import Finding, Table
from bertkit.visible import number_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRAIN_SHARE = 0.85
"""Share of the sentences for token identifiability that is used for training."""
_QUANTILES = {"5%": 0.05, "25%": 0.25, "median": 0.5, "75%": 0.75, "95%": 0.95}

DEFINITIONS = {
    "contribution": "norm of the Jacobian of a token's state with respect to an input token's embedding, divided by the"
    " sum over all input tokens (Brunner et al. 2020, section 4). Variant: Frobenius norm of the full Jacobian,"
    " computed by forward-mode differentiation along random orthonormal directions; exact if there are as many"
    " directions as dimensions. The input is what the first layer reads",
    "own_share": "contribution of a token's own input to its state; all tokens count, including special tokens",
    "led_by_others": "share of states whose largest contribution comes from another token",
    "by_offset": "mean contribution of a single input token that many tokens after (+) or before (-) the state's token",
    "by_distance": "mean total contribution of all input tokens at these distances; the groups sum to 1",
    "identifiability": f"share of tokens of held-out sentences ({1 - TRAIN_SHARE:.0%} of the sentences) whose own"
    " input, of all inputs of their sentence, is nearest by cosine to their state (`nearest`), to a linear map of it"
    " (least squares) or to the output of a perceptron (`mlp`); both maps are trained on the squared error. Repeated"
    " words have equal inputs in families whose inputs contain no position, and count as one",
    "chance": "mean of 1/n over the tokens of the test sentences",
    "dtype": "float32 model, float64 sums",
    "prediction": "probability of the target at the text's one mask, or of a class (if no target is given: the most"
    " probable one), by a softmax over the classes, or a sigmoid if several can apply; for a regression, its output",
    "integrated_gradients": "(x - x0) times the mean gradient of the prediction on the line from the baseline x0 to the"
    " word embeddings x, summed over dimensions, with Gauss-Legendre quadrature (Sundararajan et al. 2017); `gap` is"
    " the difference between their sum and F(x) - F(x0). In the baseline every token of the text is replaced by the"
    " mask, the padding or a vector of zeros; special tokens and the predicted mask are kept",
    "input_x_gradient": "x times the gradient at x, summed over dimensions",
    "saliency": "Euclidean norm of the gradient",
    "attention_rollout": "product over layers of (A + I) / 2, with A the mean of the heads' maps (Abnar and Zuidema"
    " 2020): the row of the token that the head reads, or the mean of the rows if it reads the mean of all states;"
    " without a head, the row of the first token, or of the last one if the model reads from left to right",
}


@dataclass(frozen=True)
class Identifiability:
    """Token identifiability by layer.

    Attributes:
        shares: share of identified test tokens, by map and layer, the embeddings first.
        chance: accuracy of a random guess.
        train_tokens, test_tokens: their numbers.
    """

    shares: dict[str, list[float]]
    chance: float
    train_tokens: int
    test_tokens: int


def contribution_results(
    label: str, gathered: Contributions, sentences: int, directions: int
) -> tuple[dict[str, Any], list[Finding]]:
    """Summary and findings of the Jacobians.

    Args:
        gathered: the shares of all sentences.
        sentences: number of sentences.
        directions: number of directions used to estimate the Jacobians.
    """
    own_LT, led_L, groups = gathered.own_LT, gathered.led_by_others_L, gathered.group_means
    summary = {
        "sentences": sentences,
        "tokens": gathered.tokens,
        "directions": directions,
        "own_share": {
            "median": np.median(own_LT, axis=1),
            "mean": own_LT.mean(1),
            "quartiles": np.quantile(own_LT, [0.25, 0.75], axis=1).T,
        },
        "led_by_others": led_L,
        "by_offset": {"offsets": list(OFFSETS), "contribution": gathered.offset_means},
        "by_distance": {"distances": [name for name, *_ in GROUPS], "contribution": groups},
    }
    counts = f"n = {number_of(sentences, 'sentence')}, {number_of(gathered.tokens, 'token')}"
    medians, last = np.median(own_LT, axis=1), len(own_LT)
    below = next((layer + 1 for layer, median in enumerate(medians) if median < 1 / 2), None)
    where = "stays above one half in all layers" if below is None else f"first falls below one half in layer {below}"
    own_sentence = (
        f"In layer {last} of {label} a token's own input contributes a median of {medians[-1]:.1%} to its state. The"
        f" share is {medians[0]:.1%} in layer 1 and {where}; another token contributes most to {led_L[-1]:.1%} of the"
        f" last layer's states, with a maximum of {led_L.max():.1%} in layer {int(led_L.argmax()) + 1} (Jacobians along"
        f" {directions} directions; {counts})."
    )
    layers = range(1, last + 1)
    own_table = {
        "layer": layers,
        "mean": own_LT.mean(1),
        **dict(zip(_QUANTILES, np.quantile(own_LT, [*_QUANTILES.values()], axis=1), strict=True)),
        "led_by_others": led_L,
    }
    parts = ", ".join(
        f"{name} {first:.1%} and {final:.1%}" for (name, *_), first, final in zip(GROUPS, *groups[[0, -1]], strict=True)
    )
    context_sentence = (
        f"Other tokens contribute {1 - groups[-1, 0]:.1%} to a state of {label} in layer {last}. Total contribution by"
        f" distance, in layer 1 and in layer {last}: {parts} ({counts})."
    )
    context_table = {
        "layer": layers,
        **{f"offset {offset:+d}": column for offset, column in zip(OFFSETS, gathered.offset_means.T, strict=True)},
        **{f"distance {name}": column for (name, *_), column in zip(GROUPS, groups.T, strict=True)},
    }
    own_title = f"{label}: contribution of a token's own input to its state ({counts})"
    context_title = f"{label}: contributions by distance ({counts})"
    return summary, [
        Finding("own_share", own_sentence, own_table, partial(_draw_own, own_title)),
        Finding("context", context_sentence, context_table, partial(_draw_context, context_title)),
    ]


def _draw_own(title: str, table: Table) -> Figure:
    figure, (shares, led) = new_figure(title, panels=2)
    keys = dict(zip(("whislo", "q1", "med", "q3", "whishi"), _QUANTILES, strict=True))
    boxes = [{key: table[column][row] for key, column in keys.items()} for row in range(len(table["layer"]))]
    median = {"color": "black", "linewidth": 1.6}
    shares.bxp(boxes, positions=list(table["layer"]), widths=0.6, showfliers=False, medianprops=median)
    shares.axhline(0.5, color="0.5", linestyle=":")
    plain(shares, x="layer", y="contribution of own input (share)", title="whiskers: 5% and 95% of tokens")
    shares.set_ylim(0, 1)
    lines(led, table["layer"], {"states": table["led_by_others"]})
    plain(led, x="layer", y="share of states", title="another token contributes most")
    led.set_ylim(-0.03, 1.03)
    for axes in (shares, led):
        axes.set_xticks(table["layer"], [str(layer) for layer in table["layer"]])
    return figure


def _draw_context(title: str, table: Table) -> Figure:
    figure, (by_offset, by_distance) = new_figure(title, panels=2, width=10.4, height=4.2)
    layers = len(table["layer"])
    shown = sorted({*np.linspace(0, layers - 1, min(layers, 4)).round().astype(int).tolist()})
    by_layer = {f"layer {row + 1}": [table[f"offset {offset:+d}"][row] for offset in OFFSETS] for row in shown}
    lines(by_offset, OFFSETS, by_layer)
    by_offset.set_yscale("log")
    by_offset.set_xticks(range(-FARTHEST, FARTHEST + 1, 2))
    plain(by_offset, x="position of the input relative to the state (tokens)", y="contribution of one token (share)")
    series = {name: values for name, values in table.items() if name.startswith("distance")}
    lines(by_distance, table["layer"], {_distance_label(name): values for name, values in series.items()})
    plain(by_distance, x="layer", y="total contribution (share)")
    layer_ticks(by_distance, layers, first=1)
    by_distance.set_ylim(bottom=0)
    return figure


def _distance_label(column: str) -> str:
    return column.replace("distance itself", "the token itself")


def identifiability_results(label: str, found: Identifiability) -> tuple[dict[str, Any], Finding]:
    """Summary and finding of token identifiability."""
    shares, last = found.shares, len(found.shares["mlp"]) - 1
    parts = ", ".join(f"{shares[name][-1]:.1%} ({name})" for name in MAPS)
    sentence = (
        f"A linear map identifies {shares['linear'][-1]:.1%} of the tokens of a sentence from their states in layer"
        f" {last} of {label}. Identified from that layer: {parts}; from layer 1: {shares['nearest'][1]:.1%},"
        f" {shares['linear'][1]:.1%} and {shares['mlp'][1]:.1%} (chance {found.chance:.1%}; trained on"
        f" {found.train_tokens:,} tokens, n = {found.test_tokens:,} tokens of other sentences)."
    )
    table = {"layer": range(last + 1), **{name: shares[name] for name in MAPS}}
    title = f"{label}: token identifiability (n = {found.test_tokens:,} tokens)"
    summary = {
        **shares,
        "chance": found.chance,
        "train_tokens": found.train_tokens,
        "test_tokens": found.test_tokens,
    }
    return summary, Finding("identifiability", sentence, table, partial(_draw_identifiability, title, found.chance))


def _draw_identifiability(title: str, chance: float, table: Table) -> Figure:
    figure, axes = new_figure(title, width=5.6, height=3.8)
    lines(axes, table["layer"], {name: table[name] for name in MAPS})
    axes.axhline(chance, color="0.5", linestyle=":")
    axes.annotate("chance", (0, chance), textcoords="offset points", xytext=(0, 3), fontsize="small")
    plain(axes, x="layer (0: embeddings)", y="share of tokens identified")
    layer_ticks(axes, len(table["layer"]))
    axes.set_ylim(0, 1.03)
    return figure


def prediction_summary(explanation: Explanation) -> dict[str, Any]:
    """One explained prediction, for the summary."""
    question = explanation.question
    return {
        "text": question.written,
        "tokens": list(question.tokens),
        "head": question.head,
        "read_token": question.read,
        "target": explanation.target,
        "prediction": explanation.score,
        "baseline_prediction": explanation.baseline_score,
        "gap": explanation.gap,
        "methods": explanation.values,
    }


def prediction_finding(label: str, number: int, explanation: Explanation) -> Finding:
    """Table, figure and sentence of one explained prediction."""
    tokens, values = explanation.question.tokens, explanation.values
    prediction, heading = "is explained by its attention alone", "attention rollout"
    needed = f" ({', '.join(GRADIENT_METHODS)} need a head)"
    if explanation.score is not None and explanation.is_probability:
        prediction = f"predicts {explanation.target!r} with a probability of {explanation.score:.3f}"
        heading, needed = f"probability of {explanation.target!r}: {explanation.score:.3f}", ""
    elif explanation.score is not None:
        prediction = f"has the output {explanation.score:.3f} for {explanation.target!r}"
        heading, needed = f"output for {explanation.target!r}: {explanation.score:.3f}", ""
    strongest = "; ".join(
        f"{name}: {', '.join(repr(tokens[place]) for place in _greatest(values[name]))}" for name in values
    )
    completeness = ""
    if explanation.gap is not None:
        completeness = f"; integrated gradients sum to F(x) - F(x0) within {abs(explanation.gap):.1e}"
    return Finding(
        f"prediction-{number}",
        f"On {explanation.question.written!r} {label} {prediction}. Tokens with the largest attributions:"
        f" {strongest}{completeness}{needed}.",
        {"place": range(1, len(tokens) + 1), "token": tokens, **values},
        partial(
            _draw_prediction,
            f"{label}: {heading} (n = 1 text of {len(tokens)} tokens)",
            "probability" if explanation.is_probability else "output",
        ),
    )


def _greatest(values_n: Float64Array) -> Sequence[int]:
    order: list[int] = np.argsort(-np.abs(values_n), kind="stable")[:3].tolist()
    return order


def _draw_prediction(title: str, unit_of_score: str, table: Table) -> Figure:
    tokens, methods = table["token"], list(table)[2:]
    figure, axes = new_figure(
        title, panels=len(methods), width=2.6 * len(methods) + 1.2, height=0.24 * len(tokens) + 1.3
    )
    heights = np.arange(len(tokens), 0, -1)
    for column, (axis, name) in enumerate(zip(np.ravel(axes), methods, strict=True)):
        shades = ["0.25" if value >= 0 else "white" for value in table[name]]
        axis.barh(heights, table[name], color=shades, edgecolor="0.25", linewidth=0.8)
        axis.axvline(0, color="0.3", linewidth=0.8)
        axis.set_yticks(heights, tokens if column == 0 else [""] * len(tokens))
        unit = {ROLLOUT: "share", "integrated_gradients": unit_of_score}.get(name, "gradient")
        plain(axis, x=unit, y="", title=name)
    return figure

"""Findings of `probe attention`: a table, a figure and a sentence for each measure, and the summary.

Figures after Clark et al. 2019, arXiv:1906.04341, figures 2, 4 and 6 and table 1, and Kovaleva et al. 2019,
arXiv:1908.08593, figure 2.

Shapes: L layers, N heads of a layer, A heads of all layers, P patterns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from bertkit.arrays import Float64Array, Int64Array
from bertkit.evaluation.plots import MARKERS, layer_ticks, legend_below, new_figure, plain
from bertkit.models.conversion.pruning import HeadNumbers
from bertkit.probing.attention.head_distances import plane, within_and_between
from bertkit.probing.attention.head_patterns import PATTERNS
from bertkit.probing.attention.head_syntax import DIRECTIONS, FARTHEST, RelationScore
from bertkit.probing.attention.measure import HeadProfile, head_names, numbers_from_1
from bertkit.probing.report import Finding, Table
from bertkit.visible import number_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOSTLY = 0.5
"""A head attends mostly to a target if the target gets at least this share of its attention."""
BROAD = 0.9
"""A head is broad if its entropy is at least this share of that of even attention."""
NAMES = {
    "cls": "[CLS]",
    "sep": "[SEP]",
    "punctuation": "punctuation",
    "self": "itself",
    "previous": "previous token",
    "next": "next token",
}
"""Readable names of targets."""
_HATCHES = ("", "///", "xxx", "...", "")
_SHADES = ("0.15", "0.95", "0.6", "0.8", "0.45")
_EVEN = "even"

DEFINITIONS = {
    "head": "layer-head, both counted from 1 as in Clark et al. 2019: 2-3 is `blocks.1.attn.hook_pattern`, head 2;"
    " heads of a pruned model have their numbers in the whole model (`head_numbers`); `method.heads` counts from 0",
    "share": "attention to [CLS], [SEP], words of punctuation, the token itself, the previous token and the next token:"
    " mean over all attending tokens, including the first and the last (Clark et al. 2019, section 3); tokens of all"
    " sentences have the same weight",
    "entropy": "entropy of a token's attention in nats, mean over tokens; `even` is the mean of ln n, the entropy of a"
    " head that attends equally to all n tokens. Not smoothed, unlike the code published with the paper",
    "distance": "mean distance from a token to the tokens that it attends to, in tokens",
    "divergence": "Jensen-Shannon divergence between two heads' attention in nats, from 0 to ln 2, mean over tokens"
    " (the paper takes the sum); the map is its metric multidimensional scaling (SMACOF from the classical solution)",
    "pattern": "shape of the map of a sentence pair, by a rule on three shares: v, the attention to special tokens; d,"
    " the attention to ordinary tokens at most 1 away; s, the part of the attention among ordinary tokens that stays"
    " within the same sentence. If v + d >= 1/2: vertical or diagonal if v or d alone is at least 4/5 of the sum, else"
    " both. Otherwise: block if s >= 3/4, else heterogeneous. Kovaleva et al. 2019 used a convolutional network trained"
    " on some 400 hand-sorted maps",
    "dependencies": "accuracy of predicting a word's syntactic head as the word with the most attention, in both"
    " directions, for words that have a head. Attention to a word is the sum over its tokens, attention from a word the"
    " mean; special tokens and the word itself are excluded. The best head is chosen on the same sentences (Clark et"
    f" al. 2019, table 1). Baseline: the best fixed offset from -{FARTHEST} to {FARTHEST} for the relation, chosen in"
    " the same way. `all` excludes punctuation; subtypes count as their relation, except nmod:poss",
    "random": "the same choice among the heads of the same architecture with random weights",
    "dtype": "float32 maps, float64 sums",
}


@dataclass(frozen=True)
class PatternCounts:
    """How often each head's maps had each shape.

    Attributes:
        counts_AP: number of maps by head and by shape in `PATTERNS`.
        pairs: number of classified pairs.
        too_long: number of pairs too long for the model.
    """

    counts_AP: Int64Array
    pairs: int
    too_long: int


@dataclass(frozen=True)
class AttentionResults:
    """All measurements.

    Attributes:
        numbers: the heads by layer.
        profile: each head's mean attention.
        divergence_AA: mean divergence of every two heads, in nats.
        divergence_tokens: number of tokens it is averaged over.
        patterns: shapes of maps; None if no pair was classified.
        relations: accuracy of heads as parsers; empty without trees.
        random: the same for random weights.
    """

    numbers: HeadNumbers
    profile: HeadProfile
    divergence_AA: Float64Array
    divergence_tokens: int
    patterns: PatternCounts | None
    relations: Sequence[RelationScore]
    random: Sequence[RelationScore]


def attention_report(label: str, results: AttentionResults) -> tuple[dict[str, Any], list[Finding]]:
    """Summary and findings.

    Args:
        results: all measurements.
    """
    profile = results.profile
    layers, heads = profile.values["self"].shape
    names = head_names(results.numbers)
    counts = f"n = {number_of(profile.sentences, 'sentence')}, {number_of(profile.tokens, 'token')}"
    mostly_A = _mostly(profile)
    points_A2, stress = plane(results.divergence_AA)
    within, between = within_and_between(results.divergence_AA, np.repeat(np.arange(layers), heads))
    targets = _targets(label, counts, profile, names, mostly_A)
    findings = [
        targets,
        _entropy(label, counts, profile, targets.table),
        _distances(label, results, names, mostly_A, points_A2, (within, between, stress)),
    ]
    shapes = None
    if results.patterns is not None:
        findings.append(_patterns(label, results.patterns, names))
        shapes = {
            "pairs": results.patterns.pairs,
            "pairs_too_long": results.patterns.too_long,
            **dict(zip(PATTERNS, _pattern_shares(results.patterns), strict=True)),
        }
    if results.relations:
        findings.append(_dependencies(label, counts, results.relations, results.random, names))
    summary = {
        "sentences": profile.sentences,
        "tokens": profile.tokens,
        "layers": layers,
        "heads": heads,
        "head_numbers": numbers_from_1(results.numbers),
        "by_layer": {name: profile.layer_means(name) for name in profile.values},
        "by_head": profile.values,
        "even": profile.even,
        "mostly": {name: mostly_A.count(name) for name in sorted(set(mostly_A))},
        "divergence": {
            "tokens": results.divergence_tokens,
            "within_layers": within,
            "between_layers": between,
            "stress": stress,
        },
        "patterns": shapes,
        "dependencies": [_relation(row, names) for row in results.relations] or None,
        "dependencies_of_random_weights": [_relation(row, names) for row in results.random] or None,
    }
    return summary, findings


def _known_targets(values: Table | dict[str, Float64Array]) -> list[str]:
    """Targets that the vocabulary has."""
    return [name for name in NAMES if not np.isnan(np.asarray(values[name], dtype=float)).all()]


def _mostly(profile: HeadProfile) -> list[str]:
    """What each head mostly attends to; `broad` if to everything, `other` if none of these applies."""
    values = {name: profile.values[name].ravel() for name in _known_targets(profile.values)}
    found = []
    for number, entropy in enumerate(profile.values["entropy"].ravel()):
        name = max(values, key=lambda name: values[name][number])
        broad = "broad" if entropy >= BROAD * profile.even["entropy"] else "other"
        found.append(NAMES[name] if values[name][number] >= MOSTLY else broad)
    return found


# Attention to targets, and its breadth


def _targets(label: str, counts: str, profile: HeadProfile, names: Sequence[str], mostly_A: Sequence[str]) -> Finding:
    best = []
    for name in _known_targets(profile.values):
        values_A = profile.values[name].ravel()
        number = int(values_A.argmax())
        best.append(f"{NAMES[name]} {values_A[number]:.0%} (head {names[number]})")
    sentence = (
        f"{sum(name in NAMES.values() for name in mostly_A)} of {len(mostly_A)} heads of {label} give at least half of"
        f" their attention to one target. Largest share per target: {', '.join(best)} ({counts})."
    )
    table = {
        "head": [*names, _EVEN],
        **{
            f"{name} (nats)" if "entropy" in name else name: [*values_LN.ravel(), profile.even[name]]
            for name, values_LN in profile.values.items()
        },
        "mostly": [*mostly_A, ""],
    }
    return Finding("attention", sentence, table, partial(_draw_targets, f"{label}: what heads attend to ({counts})"))


def _draw_targets(title: str, table: Table) -> Figure:
    targets = _known_targets(table)
    rows = -(-len(targets) // 3)
    figure, axes = new_figure(title, panels=3, rows=rows, width=11, height=2.9 * rows)
    flat = np.ravel(axes)
    for axis, name in zip(flat, targets, strict=False):
        _dots(axis, table, name)
        plain(axis, x="layer", y="share of attention", title=f"to {NAMES[name]}")
        axis.set_ylim(-0.03, 1.03)
    for axis in flat[len(targets) :]:
        axis.set_visible(False)
    legend_below(figure, flat[0])
    return figure


def _dots(axes: Axes, table: Table, column: str) -> None:
    """A dot per head, the layer's mean, and even attention, from the table of `_targets`."""
    layer_A = [int(name.partition("-")[0]) for name in table["head"][:-1]]
    *values_A, even = table[column]
    layers = np.arange(1, layer_A[-1] + 1)
    axes.plot(layer_A, values_A, "o", color="0.6", markersize=3.5, label="head")
    means_L = np.reshape(values_A, (layers.size, -1)).mean(1)
    axes.plot(layers, means_L, "-s", color="black", markersize=4.5, label="mean of the layer")
    axes.axhline(even, color="0.3", linestyle=":", label="even attention")
    layer_ticks(axes, layers.size, first=1)


def _entropy(label: str, counts: str, profile: HeadProfile, by_head: Table) -> Finding:
    entropy_LN, distance_LN = profile.values["entropy"], profile.values["distance"]
    by_layer = profile.layer_means("entropy")
    widest = int(np.argmax(by_layer))
    sentence = (
        f"Attention of {label} is broadest in layer {widest + 1}, with a mean entropy of {by_layer[widest]:.2f} nats."
        f" Layer 1 has {by_layer[0]:.2f}, layer {len(by_layer)} {by_layer[-1]:.2f}, even attention"
        f" {profile.even['entropy']:.2f}; heads range from {entropy_LN.min():.2f} to {entropy_LN.max():.2f}; the mean"
        f" distance to attended tokens is {distance_LN.min():.1f} to {distance_LN.max():.1f} tokens (even:"
        f" {profile.even['distance']:.1f}; {counts})."
    )
    shown = ("entropy", "entropy_of_cls", "distance")
    table = {
        "layer": range(1, len(by_layer) + 1),
        **{name: profile.layer_means(name) for name in shown},
        **{f"even_{name}": [profile.even[name]] * len(by_layer) for name in shown},
    }
    # The dots are heads, the rows of attention.csv; their means are this table's.
    return Finding(
        "entropy", sentence, table, lambda _: _draw_breadth(f"{label}: breadth of attention ({counts})", by_head)
    )


def _draw_breadth(title: str, by_head: Table) -> Figure:
    panels = [
        ("entropy (nats)", "entropy (nats)", "of all tokens' attention"),
        ("entropy_of_cls (nats)", "entropy (nats)", "of [CLS]'s attention"),
        ("distance", "mean distance (tokens)", "of attended tokens"),
    ]
    panels = [panel for panel in panels if not np.isnan(by_head[panel[0]]).all()]
    figure, axes = new_figure(title, panels=len(panels), width=3.7 * len(panels), height=3.1)
    for axis, (column, label, heading) in zip(np.ravel(axes), panels, strict=True):
        _dots(axis, by_head, column)
        plain(axis, x="layer", y=label, title=heading)
        axis.set_ylim(bottom=0)
    legend_below(figure, np.ravel(axes)[0])
    return figure


# Which heads are alike


def _distances(
    label: str,
    results: AttentionResults,
    names: Sequence[str],
    mostly_A: Sequence[str],
    points_A2: Float64Array,
    means: tuple[float, float, float],
) -> Finding:
    within, between, stress = means
    count = f"n = {results.divergence_tokens:,} tokens"
    compared = f"(ln 2 = 0.693 is the maximum; {count}; stress of the plane {stress:.2f})."
    if np.isnan([within, between]).all():
        sentence = f"{label} has a single head, which cannot be compared with others."
    elif np.isnan([within, between]).any():
        where = "one layer" if np.isnan(between) else "different layers"
        sentence = (
            f"The heads of {label}, all of {where}, have a mean Jensen-Shannon divergence of"
            f" {np.nanmax([within, between]):.3f} nats {compared}"
        )
    else:
        sentence = (
            f"Heads of the same layer of {label} are {'more' if within < between else 'no more'} similar than heads of"
            f" different layers. Their mean Jensen-Shannon divergence is {within:.3f} nats within layers and"
            f" {between:.3f} between layers {compared}"
        )
    table = {
        "head": names,
        "x": points_A2[:, 0],
        "y": points_A2[:, 1],
        "mostly": mostly_A,
        **{f"to {name} (nats)": column for name, column in zip(names, results.divergence_AA.T, strict=True)},
    }
    title = f"{label}: heads by Jensen-Shannon divergence (metric scaling, stress {stress:.2f}, {count})"
    return Finding("head_distances", sentence, table, partial(_draw_distances, title))


def _draw_distances(title: str, table: Table) -> Figure:
    figure, (by_layer, by_target) = new_figure(title, panels=2, width=10.5, height=4.9)
    points_A2 = np.stack([table["x"], table["y"]], axis=1)
    layer_A = [int(name.partition("-")[0]) for name in table["head"]]
    for (x, y), layer in zip(points_A2.tolist(), layer_A, strict=True):
        shade = str(0.65 * (1 - layer / layer_A[-1]))
        by_layer.text(x, y, str(layer), ha="center", va="center", fontsize=8, color=shade)
    plain(by_layer, x="nats", y="nats", title="numbers are layers")
    shown = [name for name in (*NAMES.values(), "broad", "other") if name in table["mostly"]]
    for place, name in enumerate(shown):
        members = np.array(table["mostly"]) == name
        by_target.plot(
            *points_A2[members].T,
            "x" if name == "other" else MARKERS[place % len(MARKERS)],
            color="black" if place % 2 == 0 else "0.45",
            fillstyle="full" if place % 3 != 1 else "none",
            markersize=6,
            linestyle="none",
            label=f"{name} ({members.sum()})",
        )
    plain(by_target, x="nats", y="nats", title="at least half of the attention goes to")
    by_target.legend(frameon=False, fontsize="small")
    low, high = points_A2.min(0) - 0.03, points_A2.max(0) + 0.03
    for axes in (by_layer, by_target):
        axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]))
    return figure


# Shapes of maps


def _pattern_shares(patterns: PatternCounts) -> list[float]:
    shares: list[float] = (patterns.counts_AP.sum(0) / patterns.counts_AP.sum()).tolist()
    return shares


def _patterns(label: str, patterns: PatternCounts, names: Sequence[str]) -> Finding:
    shares = dict(zip(PATTERNS, _pattern_shares(patterns), strict=True))
    count = f"n = {patterns.counts_AP.sum():,} maps of {patterns.pairs} pairs of sentences"
    parts = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    sentence = (
        f"The most frequent shape of the attention maps of {label} is {max(shares, key=lambda name: shares[name])}. The"
        f" shares, by a rule instead of the paper's classifier, are {parts} ({count})."
    )
    table = {
        "head": names,
        **dict(zip(PATTERNS, patterns.counts_AP.T / patterns.pairs, strict=True)),
        "most_frequent": [PATTERNS[place] for place in patterns.counts_AP.argmax(1)],
    }
    return Finding(
        "patterns", sentence, table, partial(_draw_patterns, f"{label}: shapes of attention maps by rule\n({count})")
    )


def _draw_patterns(title: str, table: Table) -> Figure:
    figure, axes = new_figure(title, width=6.4, height=3.6)
    layers = int(table["head"][-1].partition("-")[0])
    bottom_L = np.zeros(layers)
    for name, shade, hatch in zip(PATTERNS, _SHADES, _HATCHES, strict=True):
        share_L = np.reshape(table[name], (layers, -1)).mean(1)
        axes.bar(
            range(1, layers + 1),
            share_L,
            0.8,
            bottom=bottom_L,
            label=name,
            color=shade,
            hatch=hatch,
            edgecolor="0.2",
            linewidth=0.6,
        )
        bottom_L = bottom_L + share_L
    plain(axes, x="layer", y="share of maps")
    layer_ticks(axes, layers, first=1)
    axes.set_ylim(0, 1)
    axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


# Heads as parsers


def _relation(row: RelationScore, names: Sequence[str]) -> dict[str, Any]:
    return {
        "relation": row.name,
        "words": row.count,
        "head": names[row.head],
        "direction": DIRECTIONS[row.direction],
        "accuracy": row.accuracy,
        "offset": row.offset,
        "offset_accuracy": row.offset_accuracy,
    }


def _dependencies(
    label: str, counts: str, scores: Sequence[RelationScore], random: Sequence[RelationScore], names: Sequence[str]
) -> Finding:
    control = {row.name: row.accuracy for row in random}
    everything, *relations = scores
    better = sum(row.accuracy > row.offset_accuracy for row in relations)
    ahead = sorted(relations, key=lambda row: row.offset_accuracy - row.accuracy)[:3]
    examples = ", ".join(
        f"{row.name} {row.accuracy:.0%} (head {names[row.head]}, offset {row.offset:+d}: {row.offset_accuracy:.0%})"
        for row in ahead
    )
    by_relation = (
        f"For {better} of {len(relations)} relations a head of {label} finds the syntactic head more often than the"
        f" best fixed offset. Largest margins: {examples}."
        if relations
        else f"No single relation has enough words to score the heads of {label} on it."
    )
    sentence = (
        f"{by_relation} Over all relations the best head finds {everything.accuracy:.0%}, the best offset"
        f" {everything.offset_accuracy:.0%}, the best head with random weights {control[everything.name]:.0%} (n ="
        f" {everything.count:,} words; heads and offsets chosen on the same words)."
    )
    rows = [_relation(row, names) | {"random_accuracy": control[row.name]} for row in scores]
    table = {column: [row[column] for row in rows] for column in rows[0]}
    title = f"{label}: finding the syntactic head ({counts})"
    return Finding("dependencies", sentence, table, partial(_draw_dependencies, title))


def _draw_dependencies(title: str, table: Table) -> Figure:
    shown = {name: list(column)[:30] for name, column in table.items()}
    rows = len(shown["relation"])
    figure, axes = new_figure(title, width=7.2, height=0.27 * rows + 1.4)
    heights = list(range(rows, 0, -1))
    axes.hlines(heights, shown["offset_accuracy"], shown["accuracy"], color="0.8", zorder=1)
    axes.plot(shown["random_accuracy"], heights, "x", color="0.5", label="best head, random weights")
    axes.plot(shown["offset_accuracy"], heights, "s", color="0.5", label="best fixed offset")
    axes.plot(shown["accuracy"], heights, "o", color="black", label="best head")
    labels = zip(*(shown[name] for name in ("relation", "words", "head", "offset")), strict=True)
    axes.set_yticks(heights, [f"{name} ({words:,})  {head} | {offset:+d}" for name, words, head, offset in labels])
    axes.set_xlim(0, 1)
    plain(axes, x="share of words whose syntactic head is found", y="relation (words)\nbest head | best offset")
    axes.legend(frameon=False, fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    return figure

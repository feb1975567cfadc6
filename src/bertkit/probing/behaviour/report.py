"""The report of `probe behaviour`: measures and items of diagnostics, and minimal pairs by phenomenon.

Measures after Ettinger 2020, arXiv:1907.13528, and Warstadt et al. 2020, arXiv:1912.00582. Sibling measure.py scores
blanks; evaluation/blimp.py scores pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from bertkit.evaluation.blimp import Outcome
from bertkit.evaluation.plots import MARKERS, new_figure, plain
from bertkit.probing.behaviour.measure import SENSITIVITY, DiagnosticScores, accuracy, preference
from bertkit.probing.report import Finding, Table, table_of
from bertkit.text.tokenizer import Tokenizer
from bertkit.visible import number_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFINITIONS = {
    "accuracy_at_k": "share of blanks with an expected word among the k most probable tokens (Ettinger 2020); if"
    " several words are expected, one is enough, and of a phrase the first word counts. Only words of one token can"
    " count; blanks without such a word are left out and counted (blanks_of_more_pieces)",
    "sensitivity": "share of items whose good completion is more probable than each bad one. CPRAG: the expected word"
    " against both inappropriate ones; ROLE: the target after its own context against the reversed one; NEG: the true"
    " word against the false one, reported separately for affirmative and negative contexts",
    "sensitivity_by_margin": "the same, but the good completion must be more probable by more than the margin",
    "log_p": "in nats; for a word of one token, its log-probability in the blank; for a word of several tokens, the sum"
    " over its tokens by blank_rule: within_word_l2r predicts each with the later ones masked (Kauf and Ivanova 2023),"
    " masked_next_token and query_stream with it alone masked; sensitivity_one_piece leaves out items with such words",
    "blank": "[MASK] after the context, then the ending (settings.ending, by default a full stop), then [SEP]; for"
    " left-to-right models, the next token",
    "ties": "a tie with n others counts 1/(n+1), so a tie of two counts one half; if tokens of equal probability"
    " straddle the border of the top k, each counts the share of them that fits",
    "interval": "95%, Wilson 1927",
    "chance": "one over the number of completions compared; for accuracy, k over the size of the vocabulary",
    "minimal_pairs": "as in `bertkit eval blimp`: the (pseudo-)log-likelihood of the good sentence exceeds that of the"
    " bad one; sums in nats, a tie counts one half; constant_logits is the accuracy that the number of tokens alone"
    " would give",
}


def diagnostic_summary(diagnostics: Sequence[DiagnosticScores]) -> dict[str, Any]:
    """By diagnostic, measure and condition."""
    return {
        scores.diagnostic.name: {
            "items": len(scores.diagnostic.comparisons),
            "measures": {
                "/".join(part for part in (each.measure, each.condition, each.group) if part): {
                    "value": each.value,
                    "interval": each.interval,
                    "n": len(each.credits),
                    "ties": each.ties,
                    "chance": each.chance,
                }
                for each in scores.proportions
            },
            "blanks_of_more_pieces": scores.unscored_blanks,
            "unreadable": {"count": len(scores.unreadable), "such_as": scores.unreadable[:3]},
        }
        for scores in diagnostics
    }


def diagnostic_findings(
    label: str, diagnostics: Sequence[DiagnosticScores], tokenizer: Tokenizer, top: Sequence[int]
) -> list[Finding]:
    """A table of measures with its figure, and a table of items."""
    rows = [
        [
            *(scores.diagnostic.name, each.measure, each.condition, each.group),
            *(each.value, *(each.interval or (None, None)), each.chance, len(each.credits), each.ties),
        ]
        for scores in diagnostics
        for each in scores.proportions
    ]
    columns = ["diagnostic", "measure", "condition", "group", "share", "low_95", "high_95", "chance", "n", "ties"]
    measured = "; ".join(_in_words(scores, max(top)) for scores in diagnostics)
    lost = sum(len(scores.unreadable) for scores in diagnostics)
    left = f" {lost} completions that the model cannot encode are left out." if lost else ""
    sentence = f"Scores of {label} on the diagnostics (Ettinger 2020): {measured}.{left}"
    items = [row for scores in diagnostics for row in _items(scores, tokenizer)]
    item_columns = ["diagnostic", "item", "condition", "group", "context", "good", "good_log_p_nats", "good_pieces"]
    item_columns += ["bad_context", "best_bad", "bad_log_p_nats", "bad_pieces", "credit", "most_probable"]
    return [
        Finding("diagnostics", sentence, table_of(columns, rows), lambda table: _draw_diagnostics(label, table, top)),
        Finding(
            "diagnostic_items",
            f"The table lists {len(items)} comparisons of completions.",
            table_of(item_columns, items),
        ),
    ]


def _in_words(scores: DiagnosticScores, k: int) -> str:
    parts = []
    for condition in scores.conditions:
        sensitivity, right = scores.find(SENSITIVITY, condition), scores.find(accuracy(k), condition)
        name = f" {condition}" if condition else ""
        parts.append(
            f"sensitivity{name} {_percent(sensitivity.value)} (n = {len(sensitivity.credits)}), expected word in the"
            f" top {k} {_percent(right.value)} (n = {len(right.credits)})"
        )
    return f"{scores.diagnostic.name} {', '.join(parts)}"


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{value:.0%}"


def _items(scores: DiagnosticScores, tokenizer: Tokenizer) -> list[list[object]]:
    """One row per comparison: the good completion, and the most probable bad one."""
    rows: list[list[object]] = []
    for each, (first, *others) in scores.comparisons.items():
        best, bad = max(zip(others, each.completions[1:], strict=True), key=lambda pair: pair[0].log_p)
        good, credit = each.completions[0], preference(first.log_p, [other.log_p for other in others])
        row: list[object] = [scores.diagnostic.name, each.item, each.condition, each.group]
        row += [good.context, good.word, first.log_p, first.tokens, bad.context, bad.word, best.log_p, best.tokens]
        rows.append([*row, credit, " ".join(tokenizer.token(number) for number in first.top)])
    return rows


def _draw_diagnostics(label: str, table: Table, top: Sequence[int]) -> Figure:
    names = {SENSITIVITY: "sensitivity", **{accuracy(k): f"accuracy, top {k}" for k in top}}
    rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    rows = [row for row in rows if not row["group"] and row["measure"] in names]
    items = list(dict.fromkeys((row["diagnostic"], row["condition"]) for row in rows))
    figure, axes = new_figure(
        f"{label}: cloze diagnostics (Ettinger 2020), 95% intervals",
        width=6.6,
        height=0.27 * len(names) * len(items) + 1.6,
    )
    base_of = {item: (len(items) - number) * (len(names) + 1) for number, item in enumerate(items)}
    markers = dict(zip(names, cycle(MARKERS), strict=False))
    for row in rows:
        if row["share"] is None:
            continue
        height = base_of[row["diagnostic"], row["condition"]] - list(names).index(row["measure"])
        axes.plot([row["low_95"], row["high_95"]], [height, height], color="0.6", linewidth=1)
        axes.plot([row["share"]], [height], markers[row["measure"]], color="black", markersize=5)
        axes.plot([row["chance"]] * 2, [height - 0.4, height + 0.4], color="black", linestyle=":", linewidth=1)
        axes.text(1.03, height, f"n = {row['n']}", va="center", fontsize="x-small")
    for measure, name in names.items():
        axes.plot([], [], markers[measure], color="black", markersize=5, label=name)
    axes.plot([], [], color="black", linestyle=":", linewidth=1, label="chance")
    axes.set_yticks(
        [base - (len(names) - 1) / 2 for base in base_of.values()],
        [" ".join(part for part in item if part) for item in items],
    )
    axes.set_xlim(-0.02, 1.0)
    plain(axes, x="share of items", y="")
    figure.legend(frameon=False, fontsize="small", loc="outside lower center", ncols=2)
    return figure


def pair_findings(label: str, outcomes: Sequence[Outcome], results: Mapping[str, Any]) -> list[Finding]:
    """Accuracy by phenomenon with its figure, and by paradigm."""
    by_phenomenon = _by_phenomenon(outcomes)
    (best, most), (worst, least) = by_phenomenon[0][:2], by_phenomenon[-1][:2]
    sentence = (
        f"{label} prefers the good sentence in {results['average']:.1%} of minimal pairs, most often in {best}"
        f" ({most:.1%}), least often in {worst} ({least:.1%}). The average is the mean over"
        f" {number_of(results['paradigms'], 'paradigm')} (n = {number_of(results['pairs'], 'pair')},"
        f" {number_of(results['ties'], 'tie')} counted half); constant logits would give"
        f" {results['constant_logits']['accuracy']:.1%}. Scored with {results['protocol']['statement']}."
    )
    paradigms = [
        [o.paradigm.name, o.paradigm.field, o.paradigm.term, o.pairs, o.accuracy(), o.constant_accuracy(), o.ties]
        for o in outcomes
    ]
    title = (
        f"{label}: minimal pairs by phenomenon\n"
        f"(mean of paradigms {results['average']:.3f}, n = {number_of(results['pairs'], 'pair')})"
    )
    return [
        Finding(
            "minimal_pairs",
            sentence,
            table_of(["phenomenon", "accuracy", "constant_logits", "paradigms", "pairs"], by_phenomenon),
            lambda table: _draw_pairs(title, table),
        ),
        Finding(
            "minimal_pair_paradigms",
            f"The table lists {number_of(len(paradigms), 'paradigm')}.",
            table_of(["paradigm", "field", "phenomenon", "pairs", "accuracy", "constant_logits", "ties"], paradigms),
        ),
    ]


def _by_phenomenon(outcomes: Sequence[Outcome]) -> list[tuple[str, float, float, int, int]]:
    """Per phenomenon: name (the paradigm's if the file names none), mean accuracy and that of constant logits, number
    of paradigms and of pairs; sorted by accuracy."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.paradigm.term or outcome.paradigm.name, []).append(outcome)
    found = [
        (
            name,
            sum(o.accuracy() for o in own) / len(own),
            sum(o.constant_accuracy() for o in own) / len(own),
            len(own),
            sum(o.pairs for o in own),
        )
        for name, own in groups.items()
    ]
    return sorted(found, key=lambda row: -row[1])


def _draw_pairs(title: str, table: Table) -> Figure:
    count = len(table["phenomenon"])
    figure, axes = new_figure(title, width=6.4, height=0.27 * count + 1.7)
    heights = list(range(count, 0, -1))
    axes.barh(heights, table["accuracy"], height=0.7, color="0.8", edgecolor="black", linewidth=0.6)
    axes.plot(table["constant_logits"], heights, "D", color="black", markersize=4, label="constant logits")
    axes.axvline(0.5, color="black", linestyle=":", linewidth=1, label="chance")
    named = zip(table["phenomenon"], table["paradigms"], strict=True)
    axes.set_yticks(heights, [f"{name} ({paradigms})" for name, paradigms in named])
    axes.set_xlim(0, 1)
    plain(axes, x="share of pairs with the good sentence preferred", y="phenomenon (paradigms)")
    figure.legend(frameon=False, fontsize="small", loc="outside lower center", ncols=2)
    return figure

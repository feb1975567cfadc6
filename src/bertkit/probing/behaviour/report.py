"""What `probe behaviour` has scored, as a summary, tables, figures and sentences.

Measures after Ettinger 2020, arXiv:1907.13528, and Warstadt et al. 2020, arXiv:1912.00582. Sibling
behaviour.py scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bertkit.evaluation.blimp import Outcome
from bertkit.evaluation.figures import MARKERS, new_figure, plain
from bertkit.probing.behaviour.measure import Filled, among_top, clear_preference, preference, wilson
from bertkit.probing.run import Finding
from bertkit.tasks.diagnostics import Cloze, Comparison, Completion, Diagnostic
from bertkit.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SENSITIVITY, ONE_PIECE, BY_MARGIN = "sensitivity", "sensitivity_one_piece", "sensitivity_by_margin"
_ALL = ""
Credited = tuple[Comparison | Cloze, float]
"""An item, and what it counts."""


@dataclass(frozen=True)
class Share:
    """One figure of a diagnostic.

    Attributes:
        measure: its name.
        condition, group: of the items; all where empty.
        credits: of each item, from 0 to 1.
        chance: what an indifferent model has.
    """

    measure: str
    condition: str
    group: str
    credits: tuple[float, ...]
    chance: float

    @property
    def value(self) -> float | None:
        """None where there is no item."""
        return sum(self.credits) / len(self.credits) if self.credits else None

    @property
    def interval(self) -> tuple[float, float] | None:
        return wilson(sum(self.credits), len(self.credits)) if self.credits else None

    @property
    def ties(self) -> int:
        """Items that are neither right nor wrong."""
        return sum(0 < credit < 1 for credit in self.credits)

    def to_json(self) -> dict[str, Any]:
        """As it stands in a summary."""
        return {
            "value": self.value,
            "interval": self.interval,
            "n": len(self.credits),
            "ties": self.ties,
            "chance": self.chance,
        }


@dataclass(frozen=True)
class Judged:
    """A diagnostic with its figures.

    Attributes:
        diagnostic: what was asked.
        shares: all figures, those of all items before those of groups.
        items: rows of the table of items, one a comparison.
        unreadable: completions that the model cannot read; their items count for nothing.
        more_pieces: blanks whose expected words all have several pieces.
    """

    diagnostic: Diagnostic
    shares: tuple[Share, ...]
    items: tuple[tuple[object, ...], ...]
    unreadable: tuple[str, ...]
    more_pieces: int

    def find(self, measure: str, condition: str = "") -> Share:
        """The figure of all items of a condition."""
        return next(s for s in self.shares if (s.measure, s.condition, s.group) == (measure, condition, _ALL))

    @property
    def conditions(self) -> list[str]:
        return list(dict.fromkeys(each.condition for each in self.diagnostic.comparisons))


def accuracy(k: int) -> str:
    """The name of the accuracy of the k most probable."""
    return f"accuracy_at_{k}"


def judge(
    diagnostic: Diagnostic,
    filled: Mapping[Completion, Filled | None],
    tokenizer: Tokenizer,
    *,
    top: Sequence[int],
    margin: float,
) -> Judged:
    """What the model's answers come to.

    Args:
        diagnostic: what was asked.
        filled: the answer to each completion.
        tokenizer: names the most probable tokens.
        top: k of the accuracies.
        margin: of a clear preference.
    """
    read = [each for each in diagnostic.comparisons if all(filled[c] is not None for c in each.completions)]
    one_piece = [each for each in read if all(_known(filled[c]).pieces == 1 for c in each.completions)]
    single = {each: [f for c in each.expected if (f := filled[c]) and f.pieces == 1] for each in diagnostic.clozes}
    blanks = [each for each in diagnostic.clozes if single[each]]

    def log_p(each: Comparison) -> tuple[float, list[float]]:
        first, *others = (_known(filled[completion]).log_p for completion in each.completions)
        return first, others

    def top_credit(each: Cloze, k: int) -> float:
        return max(among_top(one.above, one.equal, k) for one in single[each])

    parts = [
        (condition, group)
        for condition in dict.fromkeys(each.condition for each in diagnostic.comparisons)
        for group in (_ALL, *sorted({e.group for e in diagnostic.comparisons if e.condition == condition} - {_ALL}))
    ]
    chance = 1 / len(diagnostic.comparisons[0].completions)
    shares = [
        *_shares(SENSITIVITY, parts, [(each, preference(*log_p(each))) for each in read], chance),
        *_shares(ONE_PIECE, parts, [(each, preference(*log_p(each))) for each in one_piece], chance),
        *_shares(BY_MARGIN, parts, [(each, clear_preference(*log_p(each), margin)) for each in read], 0.0),
    ]
    for k in top:
        shares += _shares(
            accuracy(k), parts, [(each, top_credit(each, k)) for each in blanks], k / tokenizer.vocab_size
        )
    return Judged(
        diagnostic,
        tuple(shares),
        tuple(_item(each, filled, tokenizer) for each in read),
        tuple(f"{c.context} {c.word}" for c, each in filled.items() if each is None),
        len(diagnostic.clozes) - len(blanks),
    )


def _known(filled: Filled | None) -> Filled:
    assert filled is not None
    return filled


def _shares(
    measure: str, parts: Sequence[tuple[str, str]], credited: Sequence[Credited], chance: float
) -> Iterator[Share]:
    """Of each condition, and of each of its groups."""
    for condition, group in parts:
        own = [credit for each, credit in credited if each.condition == condition and group in (_ALL, each.group)]
        yield Share(measure, condition, group, tuple(own), chance)


def _item(each: Comparison, filled: Mapping[Completion, Filled | None], tokenizer: Tokenizer) -> tuple[object, ...]:
    answers = [_known(filled[completion]) for completion in each.completions]
    first, *others = answers
    best = max(range(len(others)), key=lambda number: others[number].log_p)
    other = each.completions[1 + best]
    credit = preference(first.log_p, [one.log_p for one in others])
    words = " ".join(tokenizer.token(number) for number in first.top)
    preferred = each.completions[0]
    return (
        *(each.item, each.condition, each.group, preferred.context, preferred.word, first.log_p, first.pieces),
        *(other.context, other.word, others[best].log_p, others[best].pieces, credit, words),
    )


ITEM_COLUMNS = (
    *("diagnostic", "item", "condition", "group", "context", "good", "good_log_p_nats", "good_pieces"),
    *("bad_context", "best_bad", "bad_log_p_nats", "bad_pieces", "credit", "most_probable"),
)


def diagnostic_summary(judged: Sequence[Judged]) -> dict[str, Any]:
    """By diagnostic, measure and condition."""
    found: dict[str, Any] = {}
    for each in judged:
        measures: dict[str, Any] = {}
        for share in each.shares:
            name = "/".join(part for part in (share.measure, share.condition, share.group) if part)
            measures[name] = share.to_json()
        found[each.diagnostic.name] = {
            "items": len(each.diagnostic.comparisons),
            "measures": measures,
            "blanks_of_more_pieces": each.more_pieces,
            "unreadable": {"count": len(each.unreadable), "such_as": each.unreadable[:3]},
        }
    return found


def diagnostic_findings(label: str, judged: Sequence[Judged], top: Sequence[int]) -> list[Finding]:
    """A table of figures, drawn; and one of items."""
    rows = [
        [
            *(each.diagnostic.name, s.measure, s.condition, s.group),
            *(s.value, *(s.interval or (None, None)), s.chance, len(s.credits), s.ties),
        ]
        for each in judged
        for s in each.shares
    ]
    columns = ["diagnostic", "measure", "condition", "group", "share", "low_95", "high_95", "chance", "n", "ties"]
    told = "; ".join(_told(each, max(top)) for each in judged)
    items = [[each.diagnostic.name, *row] for each in judged for row in each.items]
    lost = sum(len(each.unreadable) for each in judged)
    left = f"; {lost} completions that the model cannot read are left out" if lost else ""
    return [
        Finding(
            "diagnostics",
            f"Diagnostics of {label} (Ettinger 2020; Wilson intervals are in the table): {told}{left}.",
            columns,
            rows,
            lambda: _draw_diagnostics(label, judged, top),
        ),
        Finding(
            "diagnostic_items",
            f"{len(items)} comparisons of completions are listed one by one.",
            ITEM_COLUMNS,
            items,
        ),
    ]


def _told(each: Judged, k: int) -> str:
    parts = []
    for condition in each.conditions:
        sensitivity, right = each.find(SENSITIVITY, condition), each.find(accuracy(k), condition)
        name = f" {condition}" if condition else ""
        parts.append(
            f"{_percent(sensitivity.value)} sensitive{name} (n = {len(sensitivity.credits)}), expected word in the top"
            f" {k} {_percent(right.value)} (n = {len(right.credits)})"
        )
    return f"{each.diagnostic.name} {', '.join(parts)}"


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{value:.0%}"


def _draw_diagnostics(label: str, judged: Sequence[Judged], top: Sequence[int]) -> Figure:
    names = {SENSITIVITY: "sensitivity", **{accuracy(k): f"accuracy, top {k}" for k in top}}
    rows = [(each, condition) for each in judged for condition in each.conditions]
    figure, axes = new_figure(
        f"{label}: diagnostics with a blank (Ettinger 2020), 95% intervals",
        width=6.6,
        height=0.27 * len(names) * len(rows) + 1.6,
    )
    ticks, labels = [], []
    for number, (each, condition) in enumerate(rows):
        base = (len(rows) - number) * (len(names) + 1)
        ticks.append(base - (len(names) - 1) / 2)
        labels.append(" ".join(part for part in (each.diagnostic.name, condition) if part))
        for place, measure in enumerate(names):
            share = each.find(measure, condition)
            if share.interval is None or share.value is None:
                continue
            height, (low, high) = base - place, share.interval
            axes.plot([low, high], [height, height], color="0.6", linewidth=1)
            axes.plot([share.value], [height], MARKERS[place], color="black", markersize=5)
            axes.plot([share.chance] * 2, [height - 0.4, height + 0.4], color="black", linestyle=":", linewidth=1)
            axes.text(1.03, height, f"n = {len(share.credits)}", va="center", fontsize="x-small")
    for place, name in enumerate(names.values()):
        axes.plot([], [], MARKERS[place], color="black", markersize=5, label=name)
    axes.plot([], [], color="black", linestyle=":", linewidth=1, label="chance")
    axes.set_yticks(ticks, labels)
    axes.set_xlim(-0.02, 1.0)
    plain(axes, x="share of items", y="")
    figure.legend(frameon=False, fontsize="small", loc="outside lower center", ncols=2)
    return figure


def pair_findings(label: str, outcomes: Sequence[Outcome], results: Mapping[str, Any]) -> list[Finding]:
    """Accuracy by phenomenon, drawn; and by paradigm."""
    by_term = _by_term(outcomes)
    protocol = results["protocol"]
    best, worst = max(by_term, key=lambda row: row.accuracy), min(by_term, key=lambda row: row.accuracy)
    sentence = (
        f"Minimal pairs: {label} prefers the good sentence in {results['average']:.1%} (mean of"
        f" {results['paradigms']} paradigms, n = {results['pairs']:,} pairs, {results['ties']} ties count half;"
        f" constant logits: {results['constant_logits']['accuracy']:.1%}), most in {best.name}"
        f" ({best.accuracy:.1%}), least in {worst.name} ({worst.accuracy:.1%}); scored with {protocol['statement']}."
    )
    rows = [[row.name, row.accuracy, row.constant, row.paradigms, row.pairs] for row in by_term]
    columns = ["phenomenon", "accuracy", "constant_logits", "paradigms", "pairs"]
    paradigms = [
        [o.paradigm.name, o.paradigm.field, o.paradigm.term, o.pairs, o.accuracy(), o.constant_accuracy(), o.ties]
        for o in outcomes
    ]
    return [
        Finding("minimal_pairs", sentence, columns, rows, lambda: _draw_pairs(label, by_term, results)),
        Finding(
            "minimal_pair_paradigms",
            f"The {len(paradigms)} paradigms are listed one by one.",
            ["paradigm", "field", "phenomenon", "pairs", "accuracy", "constant_logits", "ties"],
            paradigms,
        ),
    ]


@dataclass(frozen=True)
class _Phenomenon:
    """Means over the paradigms of a phenomenon."""

    name: str
    accuracy: float
    constant: float
    paradigms: int
    pairs: int


def _by_term(outcomes: Sequence[Outcome]) -> list[_Phenomenon]:
    """By phenomenon, the paradigm where the file names none; sorted by accuracy."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.paradigm.term or outcome.paradigm.name, []).append(outcome)
    found = [
        _Phenomenon(
            name,
            sum(o.accuracy() for o in own) / len(own),
            sum(o.constant_accuracy() for o in own) / len(own),
            len(own),
            sum(o.pairs for o in own),
        )
        for name, own in groups.items()
    ]
    return sorted(found, key=lambda row: -row.accuracy)


def _draw_pairs(label: str, rows: Sequence[_Phenomenon], results: Mapping[str, Any]) -> Figure:
    figure, axes = new_figure(
        f"{label}: minimal pairs by phenomenon\n"
        f"(mean of paradigms {results['average']:.3f}, n = {results['pairs']:,} pairs)",
        width=6.4,
        height=0.27 * len(rows) + 1.7,
    )
    heights = list(range(len(rows), 0, -1))
    axes.barh(heights, [row.accuracy for row in rows], height=0.7, color="0.8", edgecolor="black", linewidth=0.6)
    axes.plot([row.constant for row in rows], heights, "D", color="black", markersize=4, label="constant logits")
    axes.axvline(0.5, color="black", linestyle=":", linewidth=1, label="chance")
    axes.set_yticks(heights, [f"{row.name} ({row.paradigms})" for row in rows])
    axes.set_xlim(0, 1)
    plain(axes, x="share of pairs whose good sentence is preferred", y="phenomenon (paradigms)")
    figure.legend(frameon=False, fontsize="small", loc="outside lower center", ncols=2)
    return figure

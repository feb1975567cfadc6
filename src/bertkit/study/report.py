"""A study's results as Markdown: chosen settings, scores over seeds, differences, and a verdict for each claim.

Accuracies and correlations are in percent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bertkit.study.curves import mean_of
from bertkit.study.plots import factor, label
from bertkit.study.settings import Study
from bertkit.study.study_runs import short_key, shown_setting

NONE = "–"


def report(study: Study, results: Mapping[str, Any], images: Sequence[str]) -> str:
    """The text of report.md.

    Args:
        study: resolved.
        results: result of `study_results`.
        images: file names of the figures.
    """
    parts = [f"# {study.title or study.name}", _setup(study, results)]
    if study.choose is not None:
        parts += ["## Chosen settings", _choice(study, results)]
    parts += ["## Scores", _scores(study, results), _missing(results)]
    if "curves" in results:
        parts += ["## Scores by FLOPs", _curves(results)]
    if len(study.seeds) > 1 and results["differences"]:
        parts += ["## Differences", _differences(study, results)]
    if results["claims"]:
        parts += ["## Claims", _claims(study, results)]
    parts += [f"![{name}](figures/{name})" for name in images if name.endswith(".png")]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(f"{cell}".replace("|", "\\|") for cell in line) + " |" for line in lines)


def _setup(study: Study, results: Mapping[str, Any]) -> str:
    ((unit, amount),) = results["budget"].items()
    others = [f"{arm} {own.budget_share:g} times as much" for arm, own in study.arms.items() if own.budget_share != 1]
    own_recipes = [f"`{own.recipe}` for {arm}" for arm, own in study.arms.items() if own.recipe is not None]
    recipes = ", ".join([f"`{study.recipe}`", *own_recipes])
    text = (
        f"Recipe {recipes}, {amount:.3g} {'training FLOPs' if unit == 'flops' else unit} per run"
        + (f" ({', '.join(others)})" if others else "")
        + f", seeds {', '.join(map(str, study.seeds))}."
    )
    if study.choose is None:
        return text
    counts = {arm: len(own["candidates"]) for arm, own in results["choice"].items()}
    usual = min(counts.values())
    more = [f"{arm} {count}" for arm, count in counts.items() if count != usual]
    return (
        f"{text} Each arm's settings were chosen by {' and '.join(study.choose.names)} among {usual} candidates"
        + (f" ({', '.join(more)}, with additional keys)" if more else "")
        + f", with {study.choose.budget_share:g} of the budget and seed {study.choose.seed}."
    )


def _choice(study: Study, results: Mapping[str, Any]) -> str:
    assert study.choose is not None
    scale = factor(study.measures[study.choose.names[0]].higher)
    rows = []
    for arm, own in results["choice"].items():
        tried = "; ".join(
            f"{shown_setting(each['setting']).rstrip(', ')}: {_number(each['score'], scale)}"
            for each in own["candidates"]
        )
        chosen = "none has a score" if own["setting"] is None else shown_setting(own["setting"]).rstrip(", ")
        edge = f" (at the edge: {', '.join(map(short_key, own['at_edge']))})" if own["at_edge"] else ""
        rows.append([arm, f"{chosen}{edge}", tried])
    return table(["arm", "chosen", "score of each candidate" + (" (x 100)" if scale > 1 else "")], rows)


def _scores(study: Study, results: Mapping[str, Any]) -> str:
    rows = []
    for arm, own in results["scores"].items():
        runs = [run for run in results["runs"] if run["arm"] == arm]
        steps = f"{runs[0]['steps']:,}" if runs else NONE
        read, computed = mean_of(runs, "tokens"), mean_of(runs, "flops")
        tokens = NONE if read is None else f"{read / 1e6:.2f} M"
        flops = NONE if computed is None else f"{computed:.3g}"
        cells = [_summary(own[name], factor(measure.higher)) for name, measure in study.measures.items()]
        rows.append([arm, sum(run["tokens"] is not None for run in runs), steps, tokens, flops, *cells])
    titles = list(map(label, results["measures"].values()))
    return table(["arm", "seeds", "steps", "tokens", "FLOPs", *titles], rows)


def _curves(results: Mapping[str, Any]) -> str:
    """Each frontier with its power law, and how many times as many FLOPs the baseline's frontier needs."""
    rows = []
    for name, frontiers in results["curves"].items():
        about = results["measures"][name]
        for frontier, own in frontiers.items():
            law = own["law"]
            fit = NONE if law is None else f"({law['scale']:.3g} / FLOPs)^{law['exponent']:.4f}"
            ratio = NONE if own["ratio"] is None else f"{own['ratio']:.2f}"
            rows.append([about["title"], frontier, len(own["points"]), ", ".join(own["best"]), fit, ratio])
    columns = ["measure", "frontier", "arms", "best at equal or lower cost", "power law", "baseline FLOPs / own FLOPs"]
    return table(columns, rows)


def _missing(results: Mapping[str, Any]) -> str:
    """Why a field is empty, or which companion model was evaluated instead, once per arm and reason."""
    notes: dict[str, None] = {}
    for run in results["runs"]:
        if run["diverged"]:
            notes[f"{run['arm']}, seed {run['seed']}: {run['diverged']}"] = None
        for name, answer in run["answers"].items():
            if answer["score"] is None:
                notes[f"{run['arm']}, {name}: {answer.get('reason', 'undefined')}"] = None
            elif "of" in answer:
                notes[f"{run['arm']}, {name}: computed with its {answer['of']}"] = None
    return "\n".join(f"- {note}" for note in notes)


def _differences(study: Study, results: Mapping[str, Any]) -> str:
    rows = [
        [arm, *(_interval(own[name], factor(measure.higher)) for name, measure in study.measures.items())]
        for arm, own in results["differences"].items()
    ]
    titles = list(map(label, results["measures"].values()))
    text = (
        f"Arm minus {results['baseline']}, paired by seed, with the 95% t interval of the mean. Each interval is for a"
        " single comparison; about one in twenty misses the true difference by chance."
    )
    return f"{text}\n\n{table(['arm', *titles], rows)}"


def _claims(study: Study, results: Mapping[str, Any]) -> str:
    rows = []
    for claim in results["claims"]:
        names = [claim["measure"]] if isinstance(claim["measure"], str) else claim["measure"]
        scale = factor(study.measures[names[0]].higher)
        found = _interval(claim["difference"], scale)
        margin = f" (margin {scale * claim['margin']:g})" if claim["margin"] else ""
        margin += f" ({100 * claim['confidence']:g}% interval)" if claim.get("confidence", 0.95) != 0.95 else ""
        unit = " (x 100)" if scale > 1 else ""
        compared = f"{claim['arm']} {claim['expects']} than {claim['against']} in {' and '.join(names)}{unit}{margin}"
        reason = f": {claim['reason']}" if claim.get("reason") else ""
        rows.append([with_source(claim), compared, found, f"**{claim['verdict']}**{reason}"])
    return table(["claim", "comparison", "difference", "verdict"], rows)


def with_source(claim: Mapping[str, Any]) -> str:
    """A claim in words, with its source if it has one."""
    return f"{claim['claim']} ({claim['source']})" if claim["source"] else str(claim["claim"])


def _number(value: float | None, scale: float) -> str:
    return NONE if value is None else f"{scale * value:.{1 if scale > 1 else 3}f}"


def _summary(summary: Mapping[str, Any] | None, scale: float) -> str:
    if summary is None:
        return NONE
    spread = f" ± {_number(summary['std'], scale)}" if summary["std"] is not None else ""
    return f"{_number(summary['mean'], scale)}{spread}"


def _interval(found: Mapping[str, Any], scale: float) -> str:
    if found["mean"] is None:
        return NONE
    mean, low, high = (f"{scale * found[key]:+.{1 if scale > 1 else 3}f}" for key in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"

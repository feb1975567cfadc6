"""`bertkit eval blimp`, `mlm`, `lm`, `surprisal` and `translation`: suites that measure a model without fine-tuning.

The papers are cited in the suites. Sibling eval_tasks.py has the tasks for which a model may be fine-tuned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from bertkit.cli.console import console
from bertkit.cli.eval_tasks import eval_arguments
from bertkit.cli.generated_options import spelled
from bertkit.cli.options import Measuring, Model, option
from bertkit.evaluation.settings import BlimpSettings, LmSettings, MlmSettings, SurprisalSettings, TranslationSettings

MOST_ROWS = 24
"""Up to this many paradigms have one row each; more are shown by phenomenon. paradigms.csv has them all."""


HeldOutText = Annotated[
    list[str] | None,
    option(
        "--data",
        metavar="SOURCE...",
        help="Text that the model was not trained on: files, directories, globs, hub:ORG/NAME or builtin:pydocs.",
    ),
]


def blimp(
    model: Model = None,
    data_dir: Annotated[
        Path | None,
        option(
            "--data-dir",
            metavar="PATH",
            help="BLiMP's directory, or any file (.jsonl, .csv, .tsv) or directory of .jsonl files with sentence_good"
            " and sentence_bad.",
        ),
    ] = None,
    *,
    settings: Annotated[BlimpSettings, spelled(only="--only NAME")],
    common: Measuring,
) -> None:
    """Score minimal pairs, by how often the grammatical sentence is preferred:
    `bertkit eval blimp --model RUN --data-dir D`"""
    from bertkit.evaluation.blimp import evaluate_blimp

    evaluated = evaluate_blimp(eval_arguments(model, common), data_dir, settings, progress=console.progress)
    _print_blimp(evaluated.results)
    common.finish(evaluated.run, evaluated.document)


def mlm(
    model: Model = None,
    data: HeldOutText = None,
    *,
    settings: Annotated[MlmSettings, spelled(rate="--masking-rate SHARE")],
    common: Measuring,
) -> None:
    """Predict masked words of a text (accuracy, perplexity, pseudo-perplexity):
    `bertkit eval mlm --model RUN --data new.txt`"""
    from bertkit.evaluation.mlm import evaluate_mlm

    evaluated = evaluate_mlm(eval_arguments(model, common), data or (), settings, progress=console.progress)
    _print_mlm(evaluated.results)
    common.finish(evaluated.run, evaluated.document)


def lm(
    model: Model = None,
    data: HeldOutText = None,
    *,
    settings: LmSettings,
    common: Measuring,
) -> None:
    """Measure perplexity and bits per byte of a causal model: `bertkit eval lm --model RUN --data new.txt`

    For a model that reads in both directions separately, such as ELMo, both directions are scored.
    """
    from bertkit.evaluation.lm import BACKWARD, evaluate_lm

    evaluated = evaluate_lm(eval_arguments(model, common), data or (), settings, progress=console.progress)
    for task, figures in evaluated.results["tasks"].items():
        rows = [(name, shown(each["mean"])) for name, each in figures.items()]
        title = "from right to left" if task == BACKWARD else None
        console.table((evaluated.results["model"], ""), rows, title=title)
    console.info(evaluated.results["protocol"]["windows"])
    common.finish(evaluated.run, evaluated.document)


def surprisal(
    model: Model = None,
    data: Annotated[
        list[str] | None,
        option(
            "--data",
            metavar="SOURCE...",
            help="Sentences, one per line or record; blank lines separate documents.",
        ),
    ] = None,
    *,
    settings: SurprisalSettings,
    common: Measuring,
) -> None:
    """Write the surprisal of every word and sentence as CSV:
    `bertkit eval surprisal --model RUN --data sentences.txt`"""
    from bertkit.evaluation.surprisal import TABLES, evaluate_surprisal

    evaluated = evaluate_surprisal(eval_arguments(model, common), data or (), settings, progress=console.progress)
    figures = evaluated.results["tasks"]["surprisal"]
    rows = [(name, shown(each["mean"])) for name, each in figures.items()]
    console.table((evaluated.results["model"], ""), rows)
    console.info(f"{evaluated.results['protocol']['statement']}; {evaluated.results['protocol']['words']}")
    console.info(f"{evaluated.run.path / TABLES}: words.csv, sentences.csv")
    common.finish(evaluated.run, evaluated.document)


def translation(
    model: Model = None,
    data: Annotated[
        list[str] | None,
        option(
            "--data",
            metavar="SOURCE...",
            help="Parallel text: a .tsv (source, tab, target), .jsonl, two text files with the same number of lines,"
            " or hub:ORG/NAME.",
        ),
    ] = None,
    *,
    settings: TranslationSettings,
    common: Measuring,
) -> None:
    """Measure BLEU of an encoder-decoder on parallel text: `bertkit eval translation --model RUN --data test.tsv`"""
    from bertkit.evaluation.translation import evaluate_translation

    evaluated = evaluate_translation(eval_arguments(model, common), data or (), settings, progress=console.progress)
    rows = [(name, f"{100 * each['mean']:.2f}") for name, each in evaluated.results["tasks"]["translation"].items()]
    console.table((evaluated.results["model"], "percent"), rows)
    console.info(f"{evaluated.results['protocol']['bleu']}; {evaluated.results['protocol']['search']}")
    common.finish(evaluated.run, evaluated.document)


def shown(figure: float | None) -> str:
    """A count with all its digits, another figure with five."""
    if figure is None:
        return "–"
    return f"{figure:,.0f}" if float(figure).is_integer() else f"{figure:,.5g}"


def _print_blimp(results: dict[str, Any]) -> None:
    columns = ("accuracy", "accuracy_per_token", "accuracy_per_word")
    if results["paradigms"] <= MOST_ROWS:
        kind = "paradigm"
        rows = [(task, *(_share(row[name]["mean"]) for name in columns)) for task, row in results["tasks"].items()]
    else:
        kind = "phenomenon"
        groups = results["by_linguistics_term"].items()
        rows = [(f"{term} ({row['paradigms']})", *(_share(row[name]) for name in columns)) for term, row in groups]
    rows.append(("mean of paradigms", *(_share(results["averages"][name]) for name in columns)))
    rows.append(("constant logits", *(_share(results["constant_logits"][name]) for name in columns)))
    console.table(
        (kind, "sum", "per token", "per word"), rows, title=f"{results['model']}: {results['protocol']['set']}"
    )
    error = results["standard_error"]
    console.info(
        f"scored with {results['protocol']['statement']}; standard error"
        f" {'unknown' if error is None else f'{error:.2%}'};"
        f" {results['ties']} ties count half ({len(results['identical_pairs'])} pairs are identical),"
        f" {results['near_ties']} near-ties; {results['differing_token_counts']:.1%} of the pairs differ in their"
        " number of tokens; there the sum favours the shorter sentence"
    )
    for reference in results["references"]:
        console.info(f"  published: {reference['model']} {reference['accuracy']:.1%} ({reference['source']})")


def _print_mlm(results: dict[str, Any]) -> None:
    rows = []
    for name, figure in results["tasks"]["mlm"].items():
        value = figure["mean"]
        rows.append((name, _share(value) if name.endswith("accuracy") else "-" if value is None else f"{value:.4g}"))
    console.table((results["model"], ""), rows)
    console.info(f"windows: {results['protocol']['windows']}; {results['protocol']['accuracy']}")


def _share(value: float) -> str:
    return f"{value:.1%}"

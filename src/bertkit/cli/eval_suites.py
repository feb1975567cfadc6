"""`bertkit eval blimp`, `mlm`, `lm`, `surprisal` and `translation`: suites that measure a model without fine-tuning.

The papers are cited in the suites. Sibling eval_tasks.py has the tasks for which a model may be fine-tuned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bertkit.cli.console import console
from bertkit.cli.eval_tasks import eval_arguments
from bertkit.cli.generated_options import spelled
from bertkit.cli.options import Measuring, Model, model_or_default, option
from bertkit.cli.probe import Models
from bertkit.evaluation.settings import BlimpSettings, LmSettings, MlmSettings, SurprisalSettings, TranslationSettings
from bertkit.visible import number_of, shell_word

if TYPE_CHECKING:
    from bertkit.evaluation.run import EvaluationResult
    from bertkit.settings import Settings

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
    model: Models = None,
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

    _evaluate(evaluate_blimp, model, data_dir, settings, common, _print_blimp)


def mlm(
    model: Models = None,
    data: HeldOutText = None,
    *,
    settings: Annotated[MlmSettings, spelled(rate="--masking-rate SHARE")],
    common: Measuring,
) -> None:
    """Predict masked words of a text (accuracy, perplexity, pseudo-perplexity):
    `bertkit eval mlm --model RUN --data new.txt`"""
    from bertkit.evaluation.mlm import evaluate_mlm

    _evaluate(evaluate_mlm, model, data or (), settings, common, _print_mlm)


def lm(
    model: Models = None,
    data: HeldOutText = None,
    *,
    settings: LmSettings,
    common: Measuring,
) -> None:
    """Measure perplexity and bits per byte of a causal model: `bertkit eval lm --model RUN --data new.txt`

    For a model that reads in both directions separately, such as ELMo, both directions are scored.
    """
    from bertkit.evaluation.lm import evaluate_lm

    _evaluate(evaluate_lm, model, data or (), settings, common, _print_lm)


def surprisal(
    model: Models = None,
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
    from bertkit.evaluation.surprisal import evaluate_surprisal

    _evaluate(evaluate_surprisal, model, data or (), settings, common, _print_surprisal)


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


def _evaluate(
    suite: Callable[..., EvaluationResult],
    models: list[str] | None,
    data: Path | Sequence[str] | None,
    settings: Settings,
    common: Measuring,
    print_one: Callable[[EvaluationResult], None],
) -> None:
    """Evaluate and print a model, or several and their main figures."""
    from bertkit.evaluation.several import evaluate_each

    names = models or [model_or_default(None)]
    evaluated = evaluate_each(
        eval_arguments(names[0], common),
        names,
        settings,
        lambda arguments: suite(arguments, data, settings, progress=console.progress),
    )
    several = evaluated.results.get("models")
    if several is None:
        print_one(evaluated)
        common.finish(evaluated.run, evaluated.document)
        return
    _print_models(evaluated.results)
    first, last = (shell_word(several[place]["run"]) for place in (0, -1))
    console.info(f"compare two of them item by item: `bertkit runs diff {first} {last}`")
    warnings = evaluated.results["warnings"]
    common.finish(evaluated.run, evaluated.document | {"models": several, "warnings": warnings})


def _print_models(results: dict[str, Any]) -> None:
    """A row of figures for each model."""
    rows, models = list(results["tasks"].values()), results["models"]
    training = {"step": "step", "words": "words read"}
    trained = [name for name in training if any(each.get(name) is not None for each in models)]
    figures = list(dict.fromkeys(name for row in rows for name in row))
    cells = [
        [each["model"], *(shown(each.get(name)) for name in trained)]
        + [_figure(name, row[name]["mean"]) if name in row else "–" for name in figures]
        for each, row in zip(models, rows, strict=True)
    ]
    console.table(("model", *(training[name] for name in trained), *figures), cells)
    for warning in results["warnings"]:
        console.warn(warning)


def _figure(name: str, value: float | None) -> str:
    is_share = "accuracy" in name or name == "standard_error"
    return _share(value) if is_share and value is not None else shown(value)


def shown(figure: float | None) -> str:
    """A count with all its digits, another figure with five."""
    if figure is None:
        return "–"
    return f"{figure:,.0f}" if float(figure).is_integer() else f"{figure:,.5g}"


def _print_blimp(evaluated: EvaluationResult) -> None:
    results = evaluated.results
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
    ties, near_ties = number_of(results["ties"], "tie"), number_of(results["near_ties"], "near-tie")
    console.info(
        f"scored with {results['protocol']['statement']}; standard error"
        f" {'unknown' if error is None else f'{error:.2%}'};"
        f" {ties}, counted half ({len(results['identical_pairs'])} of identical sentences), {near_ties};"
        f" {results['differing_token_counts']:.1%} of the pairs differ in their"
        " number of tokens; there the sum favours the shorter sentence"
    )
    for reference in results["references"]:
        console.info(f"  published: {reference['model']} {reference['accuracy']:.1%} ({reference['source']})")


def _print_lm(evaluated: EvaluationResult) -> None:
    from bertkit.evaluation.lm import BACKWARD

    results = evaluated.results
    for task, figures in results["tasks"].items():
        rows = [(name, shown(each["mean"])) for name, each in figures.items()]
        console.table((results["model"], ""), rows, title="from right to left" if task == BACKWARD else None)
    console.info(results["protocol"]["windows"])


def _print_surprisal(evaluated: EvaluationResult) -> None:
    from bertkit.evaluation.surprisal import TABLES

    results = evaluated.results
    rows = [(name, shown(each["mean"])) for name, each in results["tasks"]["surprisal"].items()]
    console.table((results["model"], ""), rows)
    console.info(f"{results['protocol']['statement']}; {results['protocol']['words']}")
    console.info(f"{evaluated.run.path / TABLES}: words.csv, sentences.csv")


def _print_mlm(evaluated: EvaluationResult) -> None:
    results = evaluated.results
    rows = []
    for name, figure in results["tasks"]["mlm"].items():
        value = figure["mean"]
        rows.append((name, _share(value) if name.endswith("accuracy") else "-" if value is None else f"{value:.4g}"))
    console.table((results["model"], ""), rows)
    console.info(f"windows: {results['protocol']['windows']}; {results['protocol']['accuracy']}")


def _share(value: float) -> str:
    return f"{value:.1%}"

"""`bertkit eval`: what a model is worth, suite by suite.

Nothing here follows a paper. Each suite is a subcommand with options of its own; the work is a job's. To add one, write
its function here or in a module beside this one, and enter it in SUITES. The published tasks are suites too
(tasks.py); `score`, `check` and `ensemble` (ensemble.py) need no model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bertkit.cli.common import Model, option, result, story
from bertkit.cli.ensemble import ensemble
from bertkit.cli.eval_speed import speed
from bertkit.cli.eval_tasks import SuiteGroup, eval_arguments, glue
from bertkit.cli.shared import Computing, Telling, with_options
from bertkit.errors import CheckError

MOST_ROWS = 24
"""Paradigms are shown one by one up to so many, else by phenomenon; paradigms.csv has them all."""


@with_options
def blimp(
    model: Model = None,
    data_dir: Annotated[
        Path | None,
        option(
            "--data-dir",
            metavar="PATH",
            help="BLiMP's folder, or any file or folder of JSON Lines with sentence_good and sentence_bad.",
        ),
    ] = None,
    rule: Annotated[
        Literal["original", "within_word_l2r", "masked_next_token", "left_to_right", "encoder_left_to_right"] | None,
        option(
            "--rule",
            help="Mask each token alone, or with the later pieces of its word, or read from left to right"
            " (default: as config.json says, else original with a masked-LM head and left_to_right without).",
        ),
    ] = None,
    pairs: Annotated[
        int | None, option("--pairs", metavar="N", min=1, help="N random pairs of each paradigm (default: all).")
    ] = None,
    only: Annotated[
        list[str] | None,
        option("--only", metavar="NAME", help="A paradigm, field or phenomenon, or a pattern (anaphor_*). Repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Of the draw of pairs.")] = 0,
    *,
    common: Computing,
) -> None:
    """Minimal pairs: how often is the grammatical sentence preferred? `bertkit eval blimp --model RUN --data-dir D`"""
    from bertkit.evaluation.blimp import BlimpSettings, evaluate_blimp

    settings = BlimpSettings(rule=rule, pairs=pairs, only=only or [], seed=seed)
    evaluated = evaluate_blimp(eval_arguments(model, common), data_dir, settings, progress=story.progress)
    _tell_blimp(evaluated.results)
    common.finish(evaluated.run, evaluated.document)


@with_options
def mlm(
    model: Model = None,
    data: Annotated[
        list[str] | None,
        option(
            "--data",
            metavar="SOURCE...",
            help="Text that the model was not trained on: files, directories, globs, hub:ORG/NAME or builtin:pydocs.",
        ),
    ] = None,
    sequences: Annotated[
        int, typer.Option("--sequences", metavar="N", min=1, help="Windows of text, drawn at random.")
    ] = 512,
    pseudo_sequences: Annotated[
        int,
        typer.Option("--pseudo-sequences", metavar="N", min=0, help="Windows scored with each token masked in turn."),
    ] = 16,
    sequence_length: Annotated[
        int | None,
        option(
            "--sequence-length", metavar="N", min=10, help="Tokens of a window (default: 128, or what the model reads)."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Of the draws of windows and masks.")] = 0,
    *,
    common: Computing,
) -> None:
    """Masked words of a text: accuracy, perplexity, pseudo-perplexity: `bertkit eval mlm --model RUN --data new.txt`"""
    from bertkit.evaluation.mlm import MlmSettings, evaluate_mlm

    settings = MlmSettings(
        sequence_length=sequence_length, sequences=sequences, pseudo_sequences=pseudo_sequences, seed=seed
    )
    evaluated = evaluate_mlm(eval_arguments(model, common), data or (), settings, progress=story.progress)
    _tell_mlm(evaluated.results)
    common.finish(evaluated.run, evaluated.document)


@with_options
def score(
    task: Annotated[str, typer.Argument(metavar="TASK", help="A published task: rte, squad, conll2003, ...")],
    predictions: Annotated[
        Path,
        typer.Option(
            "--predictions",
            metavar="F",
            help="JSON Lines of id and prediction, GLUE's index and prediction (.tsv), SQuAD's predictions.json, or"
            " CoNLL columns with the predicted tag last.",
        ),
    ],
    gold: Annotated[Path, typer.Option("--gold", metavar="F", help="The task's own file, with labels.")],
    split: Annotated[str, typer.Option("--split", metavar="SPLIT", help="Which split the gold file is.")] = "dev",
    *,
    common: Telling,
) -> None:
    """Score saved predictions, without a model: `bertkit eval score rte --predictions rte-dev.jsonl --gold dev.tsv`"""
    from bertkit.evaluation.score import score_file

    document = score_file(task, predictions, gold, split)
    if common.as_json:
        result(document, as_json=True)
        return
    (name, scores), *_ = document["tasks"].items()
    for metric, figure in scores.items():
        value = figure["mean"]
        result(f"{name}  {metric}  {'undefined' if value is None else f'{value:.4f}'}")
    story.info(f"{document['examples']:,} examples")


@with_options
def check(
    archive: Annotated[Path, typer.Argument(metavar="ZIP", help="A GLUE submission.")],
    *,
    common: Telling,
) -> None:
    """Validate a GLUE submission, whoever made it; exit code 5 and every fault with file and line where it is none."""
    from bertkit.tasks.submission import GLUE_FILES, check_submission

    faults = check_submission(archive)
    if common.as_json:
        result({"zip": archive, "ok": not faults, "faults": [fault._asdict() for fault in faults]}, as_json=True)
    if faults:
        lines = "".join(f"\n  {fault}" for fault in faults)
        raise CheckError(f"{archive}: {len(faults)} {'fault' if len(faults) == 1 else 'faults'}:{lines}")
    if not common.as_json:
        result(f"{archive}: a complete submission of {len(GLUE_FILES)} files")


SUITES: dict[str, Callable[..., None]] = {"glue": glue, "blimp": blimp, "mlm": mlm, "speed": speed}
"""Each suite's name on the command line and its command; published tasks are in `eval_tasks.task_titles`."""

app = typer.Typer(
    help="Evaluate a model; each suite has options of its own: `bertkit eval SUITE --help`.",
    cls=SuiteGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_commands: dict[str, Callable[..., None]] = {**SUITES, "score": score, "check": check, "ensemble": ensemble}
for _name, _command in _commands.items():
    app.command(_name)(_command)


def _tell_blimp(results: dict[str, Any]) -> None:
    """The figures for people."""
    columns = ("accuracy", "accuracy_per_token", "accuracy_per_word")
    if results["paradigms"] <= MOST_ROWS:
        kind = "paradigm"
        rows = [(task, *(_percent(row[name]["mean"]) for name in columns)) for task, row in results["tasks"].items()]
    else:
        kind = "phenomenon"
        groups = results["by_linguistics_term"].items()
        rows = [(f"{term} ({row['paradigms']})", *(_percent(row[name]) for name in columns)) for term, row in groups]
    rows.append(("mean of paradigms", *(_percent(results["averages"][name]) for name in columns)))
    rows.append(("constant logits", *(_percent(results["constant_logits"][name]) for name in columns)))
    story.table((kind, "sum", "per token", "per word"), rows, title=f"{results['model']}: {results['protocol']['set']}")
    error = results["standard_error"]
    story.info(
        f"scored with {results['protocol']['statement']}; standard error"
        f" {'unknown' if error is None else f'{error:.2%}'};"
        f" {results['ties']} ties count half ({len(results['identical_pairs'])} pairs are identical),"
        f" {results['near_ties']} near-ties; {results['differing_token_counts']:.1%} of the pairs differ in their"
        " number of tokens, where the sum favours the shorter sentence"
    )
    for reference in results["references"]:
        story.info(f"  published: {reference['model']} {reference['accuracy']:.1%} ({reference['source']})")


def _tell_mlm(results: dict[str, Any]) -> None:
    """The figures for people."""
    rows = []
    for name, figure in results["tasks"]["mlm"].items():
        value = figure["mean"]
        rows.append((name, _percent(value) if name.endswith("accuracy") else "-" if value is None else f"{value:.4g}"))
    story.table((results["model"], ""), rows)
    story.info(f"{results['protocol']['windows']}; {results['protocol']['accuracy']}")


def _percent(share: float) -> str:
    return f"{share:.1%}"

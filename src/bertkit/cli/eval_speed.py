"""`bertkit eval speed`: parameters, multiply-adds, megabytes and milliseconds of models, beside their scores.

Nothing here follows a paper. Sibling of eval.py's suites; it compares models, and so takes several.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from bertkit.cli.common import Device, RunDir, option, result, runs_root, story
from bertkit.cli.shared import Common, keep_log, with_options
from bertkit.errors import UsageError

_BUSY = 0.9
"""A process that computes and has less of a processor than this shares it with others."""


@dataclass(frozen=True)
class Timed(Common):
    """What is said of the models besides, and where it computes and writes; there is no choice of how much is computed
    at once, for that is what is measured."""

    results: Annotated[
        list[str] | None,
        option(
            "--results",
            metavar="[MODEL=]RUN",
            help="A run with scores of one of the models, beside those of a MODEL that is a run itself. Repeatable.",
        ),
    ] = None
    methods: Annotated[
        list[str] | None,
        option(
            "--method",
            metavar="MODEL=METHOD",
            help="Whose published row stands beside a model: distilbert, tinybert, ... or none (default: as its run"
            " says, else by family and size). Repeatable.",
        ),
    ] = None
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Of the draw of tokens.")] = 0
    run_dir: RunDir = None
    device: Device = None


@with_options
def speed(
    models: Annotated[
        list[str] | None,
        option(
            "--model",
            metavar="MODEL",
            help="A Hub id, a model or a run directory. Repeatable; the first is what the others are compared with.",
        ),
    ] = None,
    batch_sizes: Annotated[
        str, typer.Option("--batch-sizes", metavar="N,N", help="Sentences computed at once.")
    ] = "1,32",
    lengths: Annotated[
        str, typer.Option("--lengths", metavar="N,N", help="Tokens of a sentence, special ones included.")
    ] = "32,128,512",
    threads: Annotated[
        int | None, option("--threads", metavar="N", min=1, help="Threads (default: as torch finds them).")
    ] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", metavar="N", min=1, help="Rounds in which every model is timed once.")
    ] = 7,
    clock: Annotated[
        Literal["wall", "processor"],
        typer.Option(
            "--clock",
            help="Time that passes; or processor time of one thread, for a machine that is busy with other things.",
        ),
    ] = "wall",
    *,
    common: Timed,
) -> None:
    """Size and speed beside the scores: `bertkit eval speed --model TEACHER --model STUDENT --threads 1`

    Tokens are random, text is not cut into pieces here; models are timed in turn, in one process.
    """
    if not models:
        raise UsageError("no models: give --model MODEL, once for each model; the first is the reference")
    batches, tokens = _numbers("--batch-sizes", batch_sizes), _numbers("--lengths", lengths)

    from bertkit.evaluation.run import MeasurementArguments
    from bertkit.evaluation.speed.run import evaluate_speed
    from bertkit.evaluation.speed.timing import SpeedSettings

    request = MeasurementArguments(
        device=common.device or "auto",
        runs_root=runs_root(),
        run_dir=common.run_dir,
        offline=common.offline,
        command=sys.argv,
        begun=keep_log,
    )
    settings = SpeedSettings(
        models=models,
        batch_sizes=batches,
        lengths=tokens,
        threads=threads,
        clock=clock,
        rounds=repeats,
        seed=common.seed,
    )
    results, methods = common.results or (), common.methods or ()
    evaluated = evaluate_speed(request, settings, results=results, methods=methods, progress=story.progress)
    _tell(evaluated.results)
    story.info(f"everything is in {evaluated.run.path}")
    told = ("threads", "device", "machine", "processor_share", "compression", "pareto")
    more = {key: evaluated.results[key] for key in told}
    document = {**evaluated.document, "run": evaluated.run.path, **more}
    result(document if common.as_json else evaluated.run.path, as_json=common.as_json)


def _numbers(option: str, text: str) -> list[int]:
    """`1,32` as numbers, each once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"{option} {text}: expected whole numbers from 1, parted by commas, such as 1,32")
    return list(dict.fromkeys(map(int, parts)))


def _tell(results: Mapping[str, Any]) -> None:
    """The tables for people: the models, their times, and the compression table."""
    machine, threads = results["machine"], results["threads"]
    where = f"{threads} {'thread' if threads == 1 else 'threads'} of {machine['cpu']}"
    if results["device"] != "cpu":
        where = ", ".join(machine["gpus"])
    if results["settings"]["clock"] == "processor":
        where += ", processor time"
    _tell_models(results)
    _tell_times(results, where)
    _tell_compression(results)
    share = results["processor_share"]
    if results["device"] == "cpu" and results["settings"]["clock"] == "wall" and share < _BUSY:
        story.warn(
            f"the machine is busy: this process had {share:.0%} of one processor, so that times are too long and ratios"
            " rough; repeat it when nothing else runs, or with --clock processor --threads 1"
        )
    asked = {model["asked"] for model in results["models"]}
    if len(asked) > 1:
        story.warn(
            f"not all models are asked for the same ({', '.join(sorted(asked))}): a head that reads one token spares"
            " most of the last layer"
        )


def _tell_models(results: Mapping[str, Any]) -> None:
    lengths = results["settings"]["lengths"]
    tasks = list(dict.fromkeys(task for model in results["models"] for task in model["scores"]))
    columns = ["model", "asked", "parameters", "outside tables", "MB"]
    columns += [f"multiply-adds, {length}" for length in lengths] + [f"{task} %" for task in tasks]
    rows = []
    for model in results["models"]:
        counts = [model["multiply_adds"].get(str(length)) for length in lengths]
        scores = [model["scores"].get(task) for task in tasks]
        rows.append(
            [model["label"], model["asked"]]
            + [_millions(model["parameters"]), _millions(model["parameters_without_embeddings"])]
            + [f"{model['disk_mb']:.1f}"]
            + [_millions(count) for count in counts]
            + ["-" if score is None else f"{100 * score['value']:.1f}" for score in scores]
        )
    _table(columns, rows, title=f"size, beside {results['models'][0]['label']}", text_columns=2)


def _tell_times(results: Mapping[str, Any], where: str) -> None:
    columns = ["batch", "tokens", "model", "ms a sentence", "quartiles", "sentences/s", "x the first"]
    rows = []
    for cell in results["cells"]:
        place = [f"{cell['batch']}", f"{cell['length']}", cell["model"]]
        if "reason" in cell:
            rows.append([*place, "-", cell["reason"], "-", "-"])
            continue
        spread = f"{_brief(cell['ms_lower_quartile'])} to {_brief(cell['ms_upper_quartile'])}"
        rate, ratio = _brief(cell["sentences_per_second"]), _times(cell["speed_up"])
        rows.append([*place, _brief(cell["ms_per_sentence"]), spread, rate, ratio])
    _table(columns, rows, title=f"time: median of {results['settings']['rounds']} rounds on {where}", text_columns=3)


def _tell_compression(results: Mapping[str, Any]) -> None:
    columns = ["model", "size x", "parameters x", "kept %", "speed x"]
    columns += ["published", "size x", "kept %", "speed x", "against"]
    rows, sources = [], {}
    for row in results["compression"][1:]:
        ours = [_times(row["size"]), _times(row["parameters"]), _share(row["retention"]), _times(row["speed_up"])]
        published = row["published"]
        if published is None:
            rows.append([row["label"], *ours, *["-"] * 5])
            continue
        sources[published["title"]] = published
        theirs = [_times(published["compression"]), _share(published["retention"]), _times(published["speed_up"])]
        rows.append([row["label"], *ours, published["title"], *theirs, published["against"]])
    if not rows:
        return
    at = results["compression"][0]["measured_at"].replace("/", ", ").replace("=", " ")
    first = results["models"][0]["label"]
    _table(columns, rows, title=f"compression of {first} (speed at {at}), and what is published", text_columns=1)
    for title, row in sources.items():
        story.info(f"{title}: {row['source']}{'; ' + row['note'] if row['note'] else ''}")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str, text_columns: int) -> None:
    """A table whose columns behind the first ones are figures, to the right."""
    widths = [max(len(row[number]) for row in [columns, *rows]) for number in range(len(columns))]
    aligned = [
        [cell if number < text_columns else cell.rjust(widths[number]) for number, cell in enumerate(row)]
        for row in [columns, *rows]
    ]
    story.table(aligned[0], aligned[1:], title=title)


def _millions(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:,.2f} M" if count < 1e9 else f"{count / 1e9:,.2f} G"


def _brief(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"

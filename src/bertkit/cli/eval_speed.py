"""`bertkit eval speed`: parameters, multiply-adds, megabytes and milliseconds of models, next to their scores.

Unlike the other suites it compares several models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from bertkit.cli.console import brief, console, percent
from bertkit.cli.generated_options import spelled
from bertkit.cli.options import Device, Recording, RunDir, option
from bertkit.evaluation.settings import SpeedSettings
from bertkit.visible import number_of

_BUSY = 0.9
"""If a computing process gets less than this share of a processor, others are using it, too."""

Results = Annotated[
    list[str] | None,
    option(
        "--results",
        metavar="[MODEL=]RUN",
        help="Run with scores of one of the models; a MODEL that is a run already has scores. Repeatable.",
    ),
]
Methods = Annotated[
    list[str] | None,
    option(
        "--method",
        metavar="MODEL=METHOD",
        help="Method whose published figures are shown next to a model's: distilbert, tinybert, ... or none (default:"
        " by the model's run, else by its family and size). Repeatable.",
    ),
]


def speed(
    *,
    settings: Annotated[
        SpeedSettings,
        spelled(
            models="--model MODEL",
            batch_sizes="--batch-sizes N,N",
            lengths="--lengths N,N",
            old={"--repeats": "--rounds"},
        ),
    ],
    results: Results = None,
    methods: Methods = None,
    run_dir: RunDir = None,
    device: Device = None,
    common: Recording,
) -> None:
    """Measure size and speed, next to scores: `bertkit eval speed --model TEACHER --model STUDENT --threads 1`

    Inputs are random tokens, so the tokenizer's time is not measured. Models are timed alternately, in one process.
    """
    from bertkit.evaluation.run import MeasurementArguments
    from bertkit.evaluation.speed.run import evaluate_speed

    request = MeasurementArguments(device=device or "auto", **common.record_fields(run_dir))
    evaluated = evaluate_speed(
        request, settings, results=results or (), methods=methods or (), progress=console.progress
    )
    _print(evaluated.results)
    more = ("threads", "device", "machine", "processor_share", "compression", "pareto")
    common.finish(evaluated.run, evaluated.document | {key: evaluated.results[key] for key in more})


def _print(results: Mapping[str, Any]) -> None:
    """The tables: the models, their times, and the compression."""
    machine, threads = results["machine"], results["threads"]
    where = f"{number_of(threads, 'thread')} of {machine['cpu']}"
    if results["device"] != "cpu":
        where = ", ".join(machine["gpus"])
    if results["settings"]["clock"] == "processor":
        where += ", processor time"
    _print_models(results)
    _print_times(results, where)
    _print_compression(results)
    share = results["processor_share"]
    if results["device"] == "cpu" and results["settings"]["clock"] == "wall" and share < _BUSY:
        console.warn(
            f"the machine is busy: this process had {share:.0%} of one processor, so times are too long and ratios"
            " imprecise; repeat when nothing else runs, or with --clock processor --threads 1"
        )
    outputs = {model["asked"] for model in results["models"]}
    if len(outputs) > 1:
        console.warn(
            f"the models compute different outputs ({', '.join(sorted(outputs))}): a head that reads one token skips"
            " most of the last layer"
        )


def _print_models(results: Mapping[str, Any]) -> None:
    lengths = results["settings"]["lengths"]
    tasks = list(dict.fromkeys(task for model in results["models"] for task in model["scores"]))
    columns = ["model", "output", "parameters", "without embeddings", "MB"]
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
            + [percent(score and score["value"]) for score in scores]
        )
    _table(columns, rows, title=f"size, compared with {results['models'][0]['label']}", text_columns=2)


def _print_times(results: Mapping[str, Any], where: str) -> None:
    columns = ["batch", "tokens", "model", "ms per sentence", "quartiles", "sentences/s", "speed x"]
    rows = []
    for cell in results["cells"]:
        place = [f"{cell['batch']}", f"{cell['length']}", cell["model"]]
        if "reason" in cell:
            rows.append([*place, "-", cell["reason"], "-", "-"])
            continue
        spread = f"{brief(cell['ms_lower_quartile'])} to {brief(cell['ms_upper_quartile'])}"
        per_second, ratio = brief(cell["sentences_per_second"]), _times(cell["speed_up"])
        rows.append([*place, brief(cell["ms_per_sentence"]), spread, per_second, ratio])
    _table(
        columns,
        rows,
        title=f"time: median of {number_of(results['settings']['rounds'], 'round')} on {where}",
        text_columns=3,
    )


def _print_compression(results: Mapping[str, Any]) -> None:
    columns = ["model", "size x", "parameters x", "kept %", "speed x"]
    columns += ["published", "size x", "kept %", "speed x", "against"]
    rows, sources = [], {}
    for row in results["compression"][1:]:
        ours = [_times(row["size"]), _times(row["parameters"]), percent(row["retention"]), _times(row["speed_up"])]
        published = row["published"]
        if published is None:
            rows.append([row["label"], *ours, *["-"] * 5])
            continue
        sources[published["title"]] = published
        theirs = [_times(published["compression"]), percent(published["retention"]), _times(published["speed_up"])]
        rows.append([row["label"], *ours, published["title"], *theirs, published["against"]])
    if not rows:
        return
    at = results["compression"][0]["measured_at"].replace("/", ", ").replace("=", " ")
    first = results["models"][0]["label"]
    _table(columns, rows, title=f"compression of {first} (speed at {at}), and what is published", text_columns=1)
    for title, row in sources.items():
        console.info(f"{title}: {row['source']}{'; ' + row['note'] if row['note'] else ''}")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str, text_columns: int) -> None:
    """A table with numbers, right-aligned, in the columns after the first ones."""
    widths = [max(len(row[number]) for row in [columns, *rows]) for number in range(len(columns))]
    aligned = [
        [cell if number < text_columns else cell.rjust(widths[number]) for number, cell in enumerate(row)]
        for row in [columns, *rows]
    ]
    console.table(aligned[0], aligned[1:], title=title)


def _millions(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:,.2f} M" if count < 1e9 else f"{count / 1e9:,.2f} G"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 10 else f"{value:.0f}"

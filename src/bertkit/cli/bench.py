"""`bertkit bench`: the speed of this machine, compared with other libraries and its own limits.

The work is done in bertkit.bench; sibling eval_speed.py compares models, not libraries.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Annotated, Any

import typer

from bertkit.bench.settings import Benchmark, BenchSettings
from bertkit.cli.console import brief, console, percent, result
from bertkit.cli.generated_options import spelled
from bertkit.cli.options import Common, Device, Precision, option
from bertkit.visible import number_of

SHOWN_SHARE = 0.01
"""Kinds of work with less than this share of the time are not shown."""


def bench(
    benchmarks: Annotated[
        list[Benchmark] | None,
        typer.Argument(metavar="BENCHMARK", show_default=False, help="Benchmark to run (default: all)."),
    ] = None,
    data: Annotated[
        list[str] | None,
        option(
            "--data",
            metavar="SOURCE...",
            help="Text for all but generate and startup: files, directories, globs, hub:ORG/NAME (default:"
            " builtin:pydocs).",
        ),
    ] = None,
    peers: Annotated[
        bool, option("--peers/--no-peers", metavar="", help="Also time other libraries, if they are installed.")
    ] = True,
    *,
    settings: Annotated[
        BenchSettings, spelled(without=("data", "peers"), model="--model MODEL", tokenizer="--tokenizer PATH-or-HUB-ID")
    ],
    precision: Precision = None,
    device: Device = None,
    common: Common,
) -> None:
    """Measure speed, compared with other libraries and the machine's limits: `bertkit bench pretrain --size base`

    All libraries are timed alternately, round by round, so a slowdown of the machine affects all of them. The ratio is
    that of the medians, shown with the lowest and the highest ratio of a single round.

    Examples:
    `bertkit bench startup --rounds 20`
    `bertkit bench generate --precision bf16`
    `bertkit bench embed --model MODEL --data texts.txt --json`
    """
    from bertkit.bench.run import run_benchmarks
    from bertkit.training.engine_config import EngineConfig

    model = settings.model or os.environ.get("BERTKIT_MODEL") or None
    given = {"peers": peers, "model": model, **({"data": data} if data else {})}
    config = EngineConfig(device=device or "auto", precision=precision or "auto")
    names = list(dict.fromkeys(benchmarks or Benchmark))
    with redirect_stdout(sys.stderr):  # other libraries may print
        document = run_benchmarks(
            names,
            settings.model_copy(update=given),
            config,
            console.progress,
            generation_bf16=precision is not None,
            offline=common.offline,
        )
    _show(document)
    if common.as_json:
        result(document, as_json=True)
        return
    for name, found in document["benchmarks"].items():
        result(_line(name, found))


def _show(document: Mapping[str, Any]) -> None:
    """The tables: times and ratios of each benchmark, its breakdown by operator, and the machine."""
    for name, found in document["benchmarks"].items():
        _show_sides(name, found)
        parts = [(kind, f"{percent(share)} %") for kind, share in found["time"].items() if share >= SHOWN_SHARE]
        if parts:
            title = f"{name}: time of {next(iter(found['sides']))} by kind of work"
            console.table(("work", "share of time"), parts, title=title)
        for side, reason in found["left_out"].items():
            console.info(f"{side} is left out: {reason}")
    _show_machine(document["machine"])


def _show_sides(name: str, found: Mapping[str, Any]) -> None:
    unit = found["unit"]
    rows = []
    for side, speed in found["sides"].items():
        ratio = found["ratios"].get(side)
        rows.append(
            (
                side,
                brief(speed["per_s"]),
                f"{brief(speed['lowest_per_s'])} to {brief(speed['highest_per_s'])}",
                f"{1000 * speed['seconds']:,.1f}",
                "" if ratio is None else f"{ratio['ratio']:.2f}",
                "" if ratio is None else f"{ratio['lowest']:.2f} to {ratio['highest']:.2f}",
            )
        )
    columns = (name, f"{unit}/s", "range over rounds", "ms", "ratio", "range over rounds")
    about = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in found["about"].items())
    console.table(columns, rows, title=f"{name}: median of {found['rounds']} rounds, {about}")


def _show_machine(machine: Mapping[str, Any]) -> None:
    rows = [
        (
            f"products {precision}",
            f"{rates['best']:,.1f} GFLOP/s",
            f"{rates['median']:,.1f}",
            f"{rates['best_known']:,.1f}",
        )
        for precision, rates in machine["product_gflops"].items()
    ]
    copies = machine["copy_gb_per_s"]
    rows.append(("copy", f"{copies['best']:,.1f} GB/s", f"{copies['median']:,.1f}", ""))
    threads = f", {number_of(machine['threads'], 'thread')}" if machine["device"] == "cpu" else ""
    console.table(("machine", "best", "median", "best ever"), rows, title=f"{machine['processor']}{threads}")
    if machine["busy"]:
        console.warn(
            "the machine is busy: most of its matrix products were slower than the best, so speeds are too low and"
            " ratios imprecise; repeat the benchmark when nothing else runs"
        )


def _line(name: str, found: Mapping[str, Any]) -> str:
    """A benchmark's result in one line."""
    own, speed = next(iter(found["sides"].items()))
    parts = [f"{name}: {own} {brief(speed['per_s'])} {found['unit']}/s"]
    parts += [
        f"{ratio['ratio']:.2f} times as fast as {side} ({ratio['lowest']:.2f} to {ratio['highest']:.2f})"
        for side, ratio in found["ratios"].items()
    ]
    if "mfu" in found:
        parts.append(f"{percent(found['mfu'])} % of the matrix-product rate")
    return ", ".join(parts)

"""Cost of an update by batch size, length, width and depth: tokens/s, share of the matrix-product rate, peak memory.

    python -m benchmarks.growth --out growth [--precision bf16] [--axes batch,length]

Each point is a run of `bertkit pretrain` in a separate process; its first log line is skipped. All points of an axis
have the same recipe except for that axis. Writes growth.csv and growth.svg, and prints the table.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RECIPE = """
title: one point of a curve
tokenizer: {vocab_size: 8192, min_frequency: 1}
data: {layout: {name: full-sentences}, sequence_length: 128, static_copies: null}
model: {family: bert, hidden_size: 256, num_hidden_layers: 4, num_attention_heads: 4, intermediate_size: 1024}
objective: [masked_lm]
optimisation:
  optimizer: {name: adamw}
  schedule: {name: linear, peak: 1.0e-4, warmup_steps: 10}
  batch_sequences: 32
  steps: 100
engine: {device: cpu, evaluate_every_steps: 100000, save_every_steps: 100000, pseudo_perplexity_sequences: 0,
         evaluation_sequences: 1, keep_checkpoints: 0}
"""
TOKENS = 8192
"""Tokens of an update, unless the batch is the axis."""
AXES: dict[str, list[int]] = {
    "batch": [4, 8, 16, 32, 64, 128, 256],
    "length": [64, 128, 256, 512, 1024, 2048, 4096, 8192],
    "width": [128, 256, 512, 768, 1024],
    "depth": [2, 4, 8, 12, 24],
}
TITLES = {"batch": "sequences of 128 tokens", "length": "tokens of a sequence", "width": "width", "depth": "layers"}


def settings(axis: str, value: int) -> dict[str, Any]:
    """The overrides of a point."""
    if axis == "batch":
        return {"optimisation.batch_sequences": value}
    own: dict[str, Any] = {"optimisation.batch_sequences": TOKENS // 128}
    if axis == "length":
        own = {
            "optimisation.batch_sequences": TOKENS // value,
            "data.sequence_length": value,
            "model.max_position_embeddings": value,
        }
    elif axis == "width":
        own |= {"model.hidden_size": value, "model.intermediate_size": 4 * value}
        own |= {"model.num_attention_heads": value // 64}
    else:
        own |= {"model.num_hidden_layers": value}
    return own


def measured(directory: Path, axis: str, value: int, arguments: argparse.Namespace) -> dict[str, float]:
    """The medians of a run's log lines."""
    run = directory / f"{axis}-{value}"
    every = max(1, arguments.steps // 6)
    own = {**settings(axis, value), "engine.log_every_steps": every}
    words = ["pretrain", str(directory / "recipe.yaml"), "--data", arguments.data, "--run-dir", str(run), "-q"]
    words += ["--max-steps", str(arguments.steps), "--precision", arguments.precision]
    words += [part for key, each in own.items() for part in ("--set", f"{key}={each}")]
    subprocess.run([sys.executable, "-m", "bertkit", *words], check=True, env=os.environ.copy())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    trained = [line for line in lines if "tokens_per_s" in line][1:]
    found = {key: statistics.median(line[key] for line in trained) for key in ("tokens_per_s", "mfu")}
    return {**found, "peak_memory_mb": max(line["peak_memory_mb"] for line in trained)}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Tokens/s against each axis, both on log scales."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    axes = list(dict.fromkeys(row["axis"] for row in rows))
    figure, panels = pyplot.subplots(1, len(axes), figsize=(3.2 * len(axes), 3.2), sharey=True, squeeze=False)
    for panel, axis in zip(panels[0], axes, strict=True):
        own = [row for row in rows if row["axis"] == axis]
        values = [row["value"] for row in own]
        panel.plot(values, [row["tokens_per_s"] for row in own], marker="o")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(values, [str(value) for value in values], rotation=45)
        panel.set_xlabel(TITLES[axis])
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("tokens/s")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", default=",".join(AXES))
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--data", default="builtin:pydocs")
    parser.add_argument("--out", type=Path, default=Path("growth"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
        for axis in arguments.axes.split(","):
            for value in AXES[axis]:
                row = {"axis": axis, "value": value, **measured(Path(temporary), axis, value, arguments)}
                rows.append(row)
                print(
                    f"{axis:>6} {value:>6}  {row['tokens_per_s']:>9,.0f} tokens/s  {100 * row['mfu']:5.1f} % of the"
                    f" product rate  {row['peak_memory_mb']:>7,.0f} MB",
                    flush=True,
                )
    with (arguments.out / "growth.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, arguments.out / "growth.svg")


if __name__ == "__main__":
    main()

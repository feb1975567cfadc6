"""Two ranks of one thread against one rank of two threads: tokens per second, alternating, and the ratio of medians.

Pretraining 256 x 4, length 128, without dropout so that losses are comparable, too. On an idle machine, from the
checkout:

    python -m benchmarks.ranks_speed --rounds 5 --steps 60 [--precision bf16] [--shard]

Two ranks should reach a ratio of 0.95 or more. With --shard, a third form gathers the weights in each pass.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RECIPE = """
title: two ranks against two threads
tokenizer: {vocab_size: 8192, min_frequency: 1}
data: {layout: {name: full-sentences}, sequence_length: 128}
model: {family: bert, hidden_size: 256, num_hidden_layers: 4, num_attention_heads: 4, intermediate_size: 1024,
        hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0}
objective: [masked_lm]
optimisation:
  optimizer: {name: adamw}
  schedule: {name: linear, peak: 1.0e-4, warmup_steps: 10}
  batch_sequences: 64
  steps: 60
engine:
  device: cpu
  log_every_steps: 10
  evaluate_every_steps: 100000
  save_every_steps: 100000
  pseudo_perplexity_sequences: 0
"""
SKIPPED_LINES = 1
"""Skipped updates of each run: the first ones compile products and fill caches."""


FORMS = {"one": (1, False), "two": (2, False), "sharded": (2, True)}
"""Ranks, and whether weights and moments are sharded over them."""


def measured(
    directory: Path, name: str, form: tuple[int, bool], arguments: argparse.Namespace
) -> tuple[float, list[float]]:
    """Median tokens per second of a run, and its logged losses."""
    run, (ranks, shard) = directory / name, form
    words = ["pretrain", str(directory / "recipe.yaml"), "--data", arguments.data, "--run-dir", str(run), "--fresh"]
    words += ["--nproc", str(ranks), "--max-steps", str(arguments.steps), "--precision", arguments.precision, "-q"]
    words += ["--set", "engine.shard=true"] if shard else []
    threads = {"OMP_NUM_THREADS": str(2 // ranks)}
    subprocess.run([sys.executable, "-m", "bertkit", *words], env={**os.environ, **threads}, check=True)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    trained = [line for line in lines if "tokens_per_s" in line]
    return statistics.median(line["tokens_per_s"] for line in trained[SKIPPED_LINES:]), [
        line["loss"] for line in trained
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--data", default="builtin:pydocs")
    parser.add_argument("--shard", action="store_true", help="two ranks with engine.shard, too")
    arguments = parser.parse_args()
    forms = {name: form for name, form in FORMS.items() if arguments.shard or not form[1]}
    speeds: dict[str, list[float]] = {name: [] for name in forms}
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        (directory / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
        for number in range(arguments.rounds):
            for name in forms if number % 2 == 0 else reversed(forms):
                speed, losses[name] = measured(directory, f"{name}-{number}", forms[name], arguments)
                speeds[name].append(speed)
    medians = {name: statistics.median(own) for name, own in speeds.items()}
    for name, (ranks, _) in forms.items():
        shown = ", ".join(f"{each:,.0f}" for each in speeds[name])
        print(f"{name}: {ranks} rank(s) x {2 // ranks} thread(s): {medians[name]:,.0f} tokens/s ({shown})")
    for name, base in (("two", "one"), ("sharded", "two")):
        if name in forms:
            difference = max(abs(a - b) for a, b in zip(losses[name], losses[base], strict=True))
            ratio = medians[name] / medians[base]
            print(f"{name} / {base}: {ratio:.3f}; losses differ by at most {difference:.2g}")


if __name__ == "__main__":
    main()

"""One of two ranks is killed by SIGKILL and another number of ranks continues; losses are compared with an undisturbed
run.

    python -m benchmarks.killed_ranks [--times 10] [--data builtin:pydocs] [--shard]

Each time a new run of two ranks starts, one of them (alternately the first and the second) is killed soon after the
first checkpoint, and `--resume` continues with 1, 4 or 3 ranks, in fp32 without dropout. Prints the largest difference
of any logged loss.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

RECIPE = """
title: a rank is killed
tokenizer: {vocab_size: 4096, min_frequency: 1}
data: {layout: {name: full-sentences}, sequence_length: 96}
model: {family: bert, hidden_size: 128, num_hidden_layers: 3, num_attention_heads: 4, intermediate_size: 384,
        hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0}
objective: [masked_lm]
optimisation:
  optimizer: {name: adamw}
  schedule: {name: linear, peak: 5.0e-4, warmup_steps: 5}
  batch_sequences: 31
  steps: 40
engine: {device: cpu, precision: fp32, log_every_steps: 2, evaluate_every_steps: 100000, save_every_steps: 3,
         pseudo_perplexity_sequences: 0}
"""
GOES_ON_BY = (1, 4, 3)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def command(ranks: int, *words: str) -> list[str]:
    return [sys.executable, "-m", "bertkit", "pretrain", *words, "--nproc", str(ranks), "-q"]


def losses(run: Path) -> dict[int, float]:
    """Losses by step."""
    path = run / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {line["step"]: line["loss"] for line in map(json.loads, lines) if "loss" in line}


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The training processes started by torchrun's agent, in order."""
    found = [child for child in psutil.Process(process.pid).children(recursive=True) if "RANK" in child.environ()]
    return sorted(found, key=lambda child: int(child.environ()["RANK"]))


def killed(begin: list[str], run: Path, victim: int, delay: float) -> int:
    """Start a run and kill a rank after its first checkpoint; returns the exit code."""
    process = subprocess.Popen(begin, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
    while not list(run.glob("checkpoints/*")) and process.poll() is None:
        time.sleep(0.1)
    time.sleep(delay)
    if process.poll() is None:
        os.kill(ranks_of(process)[victim].pid, signal.SIGKILL)
    return process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--data", default="builtin:pydocs")
    parser.add_argument("--shard", action="store_true", help="weights and moments spread over the ranks")
    arguments = parser.parse_args()
    generator, worst = random.Random(4), 0.0
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        (directory / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
        words = [str(directory / "recipe.yaml"), "--data", arguments.data]
        words += ["--set", "engine.shard=true"] if arguments.shard else []
        plain = directory / "undisturbed"
        subprocess.run(
            command(1, *words, "--run-dir", str(plain)), env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL
        )
        expected = losses(plain)
        for number in range(arguments.times):
            run, ranks = directory / str(number), GOES_ON_BY[number % len(GOES_ON_BY)]
            begin = command(2, *words, "--run-dir", str(run))
            code = killed(begin, run, number % 2, generator.uniform(0, 1.5))
            reached = max(losses(run), default=0)
            subprocess.run(command(ranks, "--resume", str(run)), env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
            found = losses(run)
            difference = max(abs(found[step] - loss) for step, loss in expected.items())
            worst = max(worst, difference)
            print(
                f"rank {number % 2} killed, exit code {code}, step {reached} logged; went on by {ranks}:"
                f" losses differ by at most {difference:.2g}",
                flush=True,
            )
    print(f"largest difference: {worst:.2g}")


if __name__ == "__main__":
    main()

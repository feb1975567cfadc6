"""DistilBERT's ablation at small scale: each of its three losses left out, and random initial weights.

Sanh et al. 2019, arXiv:1910.01108, table 4, whose figures are differences of the GLUE score (no ce -2.96, no cos -1.46,
no mlm -0.31, random weights -3.69). Here the student has half of a small teacher's layers, all arms take the same steps
over the same batches, and what is compared is the masked LM on held-out text. `control` is the student without its
teacher, which begins with the teacher's layers; an arm without the masked LM's loss still has it measured.

    python -m benchmarks.distilbert_ablation train full 0 --teacher MODEL --data TEXT --out DIR
    python -m benchmarks.distilbert_ablation table --out DIR           table into DIR and onto the screen

A step of 16 sequences of 128 tokens takes about 1.2 CPU seconds beside a teacher of 4 layers of 256 with 8,192 words
(`control` 0.3), so that the 1,000 steps of an arm take about 21 minutes. What was broken off goes on; what is finished
is not repeated. DIR/ARM-SEED is the run.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertkit.distillation.text_arguments import DistillTextArguments
from bertkit.pretraining.run import run_pretraining
from bertkit.progress import silent_progress
from bertkit.recipe.resolve import Override

COMMON = [
    # A model without a family is the teacher's with fewer layers; a recipe's list gives way to a name of layers.
    *("model={}", "student.layers=uniform", "frozen=[]"),
    *("data.layout={name: doc-sentences}", "data.sequence_length=128", "optimisation.batch_sequences=16"),
    # Every token is as likely to be masked, so that the accuracies compare with those of other runs.
    "objective.masked_lm.units={name: pieces}",
    *("engine.log_every_steps=25", "engine.evaluate_every_steps=250", "engine.evaluation_sequences=512"),
    *("engine.pseudo_perplexity_sequences=0", "engine.examples=[]"),
]
ARMS = {
    "full": [],
    "no ce": ["objective.soft_targets.weight=0"],
    "no mlm": ["objective.masked_lm.weight=0"],
    "no cos": ["objective.cosine.weight=0"],
    "random": ["student=null"],
    "control": ["control=true"],
}
"""What is left out, in a recipe's words."""
PUBLISHED = {"full": 0.0, "no ce": -2.96, "no mlm": -0.31, "no cos": -1.46, "random": -3.69}
"""Differences of the GLUE score in the paper's table 4."""
COLUMNS = ("accuracy/masked_lm", "loss/masked_lm")


def main() -> None:
    options = arguments()
    if options.command == "train":
        train(options)
    else:
        table(options.out)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("train", "table"):
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, required=True)
        if name == "train":
            command.add_argument("arm", choices=ARMS)
            command.add_argument("seed", type=int)
            command.add_argument("--teacher", required=True)
            command.add_argument("--data", nargs="+", required=True)
            command.add_argument("--steps", type=int, default=1000)
    return parser.parse_args()


def train(options: argparse.Namespace) -> None:
    """One arm with one seed, or go on with it."""
    run = options.out / f"{options.arm.replace(' ', '-')}-{options.seed}"
    command = ["distilbert_ablation", options.arm, str(options.seed)]
    if (run / "run.json").is_file():
        request = DistillTextArguments(None, resume=str(run), command=command)
    else:
        length = [f"optimisation.steps={options.steps}", f"optimisation.schedule.warmup_steps={options.steps // 20}"]
        request = DistillTextArguments(
            "distilbert",
            [Override.parse(each) for each in (*COMMON, *length, *ARMS[options.arm], f"seed={options.seed}")],
            sources=options.data,
            teachers=[options.teacher],
            run_dir=run,
            command=command,
        )
    run_pretraining(request, progress=silent_progress)
    minutes = resource.getrusage(resource.RUSAGE_SELF).ru_utime / 60
    print(f"{run}: {minutes:.1f} CPU minutes", flush=True)


def table(out: Path) -> None:
    """Every arm's mean and standard deviation over its seeds, beside the full loss and the teacher."""
    results: dict[str, list[dict[str, Any]]] = {
        arm: [json.loads(path.read_text()) for path in sorted(out.glob(f"{arm.replace(' ', '-')}-*/results.json"))]
        for arm in ARMS
    }
    finished = {arm: found for arm, found in results.items() if found}
    lines = [
        "| arm | seeds | held-out accuracy | beside full | held-out loss | the paper's GLUE, beside full |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    full = _figures(finished.get("full", []), COLUMNS[0])
    for arm, found in finished.items():
        accuracies, losses = (_figures(found, column) for column in COLUMNS)
        beside = f"{100 * (statistics.mean(accuracies) - statistics.mean(full)):+.2f}" if full else ""
        published = f"{PUBLISHED[arm]:+.2f}" if arm in PUBLISHED else ""
        lines.append(
            f"| {arm} | {len(found)} | {_spread(accuracies, 100)}% | {beside} | {_spread(losses)} | {published} |"
        )
    if finished:
        teacher = next(iter(finished.values()))[0]["teacher"]["held_out"]
        accuracy, loss = (teacher[column] for column in COLUMNS)
        lines.append(f"| the teacher | | {100 * accuracy:.2f}% | | {loss:.3f} | |")
    text = "\n".join(lines) + "\n"
    (out / "table.md").write_text(text, encoding="utf-8")
    print(text, end="")


def _figures(found: Sequence[dict[str, Any]], column: str) -> list[float]:
    return [float(each["held_out"][column]) for each in found]


def _spread(values: Sequence[float], factor: float = 1.0) -> str:
    deviation = f" ± {factor * statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{factor * statistics.mean(values):.{2 if factor > 1 else 3}f}{deviation}"


if __name__ == "__main__":
    main()

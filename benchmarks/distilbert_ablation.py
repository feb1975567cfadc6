"""DistilBERT's ablation at small scale: each of its three losses left out, and random initial weights.

Sanh et al. 2019, arXiv:1910.01108, table 4, whose figures are differences of the GLUE score (no ce -2.96, no cos -1.46,
no mlm -0.31, random weights -3.69). Here the student has half the layers of a small teacher, all arms run the same
steps on the same batches, and the masked LM on held-out text is compared. `control` is the student trained without a
teacher but initialised from its layers; the masked-LM loss is also measured in arms that do not train on it.

    python -m benchmarks.distilbert_ablation train full 0 --teacher MODEL --data TEXT --out DIR
    python -m benchmarks.distilbert_ablation table --out DIR           table into DIR and onto the screen

A step of 16 sequences of 128 tokens takes about 1.2 CPU seconds with a teacher of 4 layers of width 256 and 8,192
tokens (`control` 0.3), so the 1,000 steps of an arm take about 21 minutes. Interrupted runs continue; finished runs are
not repeated. DIR/ARM-SEED is the run.
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
    # The student is the teacher's family with fewer layers; a named choice of layers replaces the recipe's list.
    *("model={}", "student.layers=uniform", "frozen=[]"),
    *("data.layout={name: doc-sentences}", "data.sequence_length=128", "optimisation.batch_sequences=16"),
    # All tokens have the same masking probability, so accuracies are comparable with those of other runs.
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
"""The ablated part, as recipe keys."""
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
    """Train or resume one arm with one seed."""
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
    """Every arm's mean and standard deviation over its seeds, next to the full loss and the teacher."""
    results: dict[str, list[dict[str, Any]]] = {
        arm: [json.loads(path.read_text()) for path in sorted(out.glob(f"{arm.replace(' ', '-')}-*/results.json"))]
        for arm in ARMS
    }
    finished = {arm: found for arm, found in results.items() if found}
    lines = [
        "| arm | seeds | held-out accuracy | minus full | held-out loss | the paper's GLUE, minus full |",
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

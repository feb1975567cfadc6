"""Compare `bertkit eval glue --plan` with the evaluation: examples, updates, tokens, FLOPs and time of each task.

    python -m benchmarks.evaluation_plan --data DATA --model MODEL --out FOLDER [--tasks cola,mrpc,wnli] [--steps 40]

DATA is the folder of GLUE's official files, MODEL a model without a head for the tasks. The evaluation trains here,
with one thread. Time is processor time of the updates, which other processes hardly affect; the plan's is what it
expects of an idle machine. A table in Markdown is printed.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

HEADER = ["task", "examples", "updates", "tokens", "planned", "FLOPs", "planned", "processor s", "planned", "ratio"]


def timed_updates() -> Counter[str]:
    """The processor seconds of all later updates, by the name of their recipe's task."""
    from bertkit.training.trainer import Trainer

    seconds: Counter[str] = Counter()
    take_step = Trainer.take_step

    def timed(self: Trainer[Any], batches: Any) -> Any:
        started = time.process_time()
        outcome = take_step(self, batches)
        seconds[self.recipe.task] += time.process_time() - started  # type: ignore[assignment,attr-defined]
        return outcome

    Trainer.take_step = timed  # type: ignore[method-assign]  # nothing but a clock
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "model", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--tasks", default="cola,mrpc,wnli")
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"

    from bertkit.evaluation.cost import evaluation_plan
    from bertkit.evaluation.glue import SUITE, glue_tasks
    from bertkit.evaluation.plan import TaskEvaluation
    from bertkit.evaluation.run import EvalArguments
    from bertkit.evaluation.tasks import evaluate_tasks
    from bertkit.recipe.resolve import Override
    from bertkit.run.directory import RunDirectory

    arguments = EvalArguments(str(given.model), device="cpu", runs_root=given.out, fresh=True, offline=True)
    tasks = glue_tasks(given.tasks.split(","))
    steps = (Override("optimisation.steps", given.steps),)
    evaluation = TaskEvaluation(SUITE, tasks, arguments, data_dir=given.data, overrides=steps)
    plan = evaluation_plan(evaluation)
    seconds = timed_updates()
    results = evaluate_tasks(evaluation).results  # without the test splits, which are not part of the plan
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}", flush=True)
    for task, planned in plan["tasks"].items():
        (member,) = results["runs"][task]
        run = RunDirectory.open(Path(member["run"]))
        assert run.results is not None
        examples = {split: each["examples"] for split, each in run.results["truncation"].items()}
        if (examples, run.record["steps"]) != (planned["examples"], planned["steps"]):
            raise SystemExit(f"{task}: {examples} and {run.record['steps']} updates, planned {planned}")
        row = [
            *(task, f"{examples['train']:,}", f"{planned['steps']:,}"),
            *(f"{run.record['tokens']:,}", f"{planned['tokens']:,}"),
            *(f"{run.record['flops']:.3g}", f"{planned['flops']:.3g}"),
            *(f"{seconds[task]:.1f}", f"{planned['seconds']:.1f}", f"{planned['seconds'] / seconds[task]:.2f}"),
        ]
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()

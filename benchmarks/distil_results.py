"""Half the layers with and without their teacher: all-MiniLM-L6-v2 fine-tuned on a task, its student, several seeds.

The student has three of the teacher's six layers, its embeddings and its head. In every arm it is trained with the same
learning rate, epochs and batch size as its teacher; only the training signal differs:

    alone      the labels (`--control`)
    teacher    labels and soft targets: recipes/distil-task.yaml unchanged
    layers     also the states after the teacher's layers: TinyBERT's map, no trained projection
    pkd        recipes/pkd.yaml with its terms, the student's layers as here
    lstm-alone, lstm-teacher    a BiLSTM with a vocabulary of 3,000 words, trained on labels or on the teacher's logits

    python -m benchmarks.distil_results train SETTING ARM --teacher RUN --tasks DATA --out DIR
    python -m benchmarks.distil_results table --teacher RUN... --out DIR

DATA is a folder with GLUE's official files; RUN a finished `bertkit finetune` of the task. Interrupted runs continue;
finished runs are not repeated. DIR/SETTING-ARM is the suite of all seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertkit.distillation.task_arguments import DistillArguments
from bertkit.files import read_json
from bertkit.finetuning.run import finetune
from bertkit.progress import silent_progress
from bertkit.recipe.resolve import Override

SEEDS = (0, 1, 2)
_HIDDEN = {"hidden_states": {"weight": 1.0, "layers": "uniform"}}
_TERMS = [{"labels": {"weight": 0.5}}, {"soft_targets": {"weight": 0.5, "temperature": 2.0}}]
_STUDENT = ["student={layers: uniform, number: 3}"]
_LSTM = [
    "student={family: bilstm, vocabulary: words}",
    *("lr=1e-3", "batch=64", "epochs=3", "warmup=0.05"),
]
ARMS: dict[str, tuple[str, bool, list[str]]] = {
    "alone": ("distil-task", True, _STUDENT),
    "teacher": ("distil-task", False, _STUDENT),
    "layers": ("distil-task", False, [*_STUDENT, f"distillation={json.dumps([*_TERMS, _HIDDEN])}"]),
    "pkd": ("pkd", False, _STUDENT),
    "lstm-alone": ("distil-task", True, _LSTM),
    "lstm-teacher": ("distil-task", False, [*_LSTM, 'distillation=[{"logit_error": {}}]']),
}
"""Recipe, whether it is the control, and overrides."""
SETTINGS: dict[str, tuple[str, list[str]]] = {
    "mrpc": ("mrpc", ["epochs=3", "batch=16"]),
    "rte": ("rte", ["epochs=3", "batch=16"]),
    "sst2": ("sst2", ["epochs=1", "batch=32", "data.train_examples=20000"]),
    "sst2-few": ("sst2", ["epochs=4", "batch=32", "data.train_examples=5000"]),
}
"""Tasks and how their examples are read, as in benchmarks/finetune_results.py, whose runs are the teachers. SST-2 uses
a different subset of the examples for each seed: the same number of passes over many examples, or more passes over
few."""
_COMMON = ["lr=5e-5", "warmup=0.1", "optimisation.weight_decay=0.01", "optimisation.select=last", "data.max_length=128"]


def train(setting: str, arm: str, *, teacher: Path, tasks: Path, out: Path) -> dict[str, Any]:
    """The results of an arm over all seeds."""
    recipe, control, overrides = ARMS[arm]
    task, reading = SETTINGS[setting]
    directory = out / f"{setting}-{arm}"
    begun = (directory / "run.json").exists()
    request = DistillArguments(
        recipe=recipe,
        teachers=[str(teacher)],
        task=[task],
        data_dir=str(tasks / "glue"),
        overrides=[Override.parse(text) for text in [*_COMMON, *reading, *overrides]],
        seeds=() if begun else SEEDS,
        control=control,
        resume=str(directory) if begun else None,
        runs_root=out,
        run_dir=directory,
        progress=silent_progress,
    )
    return finetune(request, progress=silent_progress).results


def table(teachers: Sequence[Path], out: Path) -> str:
    """A Markdown row per arm: mean and spread over the seeds, and the share of the teacher's score."""
    lines = ["| task | trained on | score | seeds | of the teacher's |", "|---|---|---|---|---|"]
    for teacher in teachers:
        own = read_json(teacher / "results.json")
        (task,) = own["tasks"]
        primary = own["primary"]
        reference = own["tasks"][task][primary]["mean"]
        lines.append(f"| {task} | the teacher itself, {primary} | {100 * reference:.1f} | 1 | 100% |")
        for setting in (name for name, (of, _) in SETTINGS.items() if of == task):
            for arm in ARMS:
                path = out / f"{setting}-{arm}" / "results.json"
                if not path.exists():
                    continue
                summary = read_json(path)["tasks"][task][primary]
                spread = "" if summary["std"] is None else f" ± {100 * summary['std']:.1f}"
                share = summary["mean"] / reference
                lines.append(
                    f"| {setting} | {arm} | {100 * summary['mean']:.1f}{spread} | {summary['n']} | {share:.1%} |"
                )
    return "\n".join(lines)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "table"])
    parser.add_argument("setting", nargs="?", choices=list(SETTINGS))
    parser.add_argument("arm", nargs="?", choices=list(ARMS))
    parser.add_argument("--teacher", type=Path, nargs="+", required=True, help="the teacher's run; of several tasks")
    parser.add_argument("--tasks", type=Path, help="folder with glue/")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if given.what == "table":
        print(table(given.teacher, given.out))
        return
    results = train(given.setting, given.arm, teacher=given.teacher[0], tasks=given.tasks, out=given.out)
    print(json.dumps(results["tasks"], indent=2))


if __name__ == "__main__":
    main()

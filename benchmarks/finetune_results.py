"""Fine-tuning results of bertkit and `transformers`: all-MiniLM-L6-v2 on a task, dev scores over several seeds per
side.

Both use the same model, data, learning rate, schedule, epochs, batch size, dropout, weight decay, clipping and maximum
length. Each draws its own head, order and dropout from the seed, because two programs are compared and not two streams
of random numbers. The two means over seeds should therefore differ by no more than their standard errors. The peer's
loop is in finetune_peer.py. SQuAD 2.0 is part of the official dev set, split by article; both tune the no-answer
threshold on dev. Scores are those of the last epoch.

    python -m benchmarks.finetune_results bertkit rte 0 --tasks DATA --out DIR
    python -m benchmarks.finetune_results transformers rte 0 --tasks DATA --out DIR
    python -m benchmarks.finetune_results table --out DIR

DATA is a folder with `glue/`, `conll2003/` and `squad/`. Interrupted runs continue (the peer from its last finished
epoch); finished runs are not repeated. OUT/SIDE-TASK-SEED.json contains the scores, the CPU seconds of the whole unit
(null if it was interrupted) and the settings.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.finetune_peer import Loop, LoopSettings, PeerClassification, PeerSpan, PeerTagging, PeerTask, minilm

from bertkit.files import write_json
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.inputs import CustomTask
from bertkit.finetuning.recipe import own_spec
from bertkit.finetuning.run import finetune
from bertkit.metrics.base import Scores
from bertkit.progress import silent_progress
from bertkit.recipe.resolve import Override
from bertkit.tasks.catalogue import find_task
from bertkit.tasks.readers import Columns, label_names, load_split, read_own
from bertkit.tasks.spec import TaskSpec

SIDES = ("bertkit", "transformers")


@dataclass(frozen=True)
class Settings:
    """Arguments of both sides."""

    epochs: int
    batch_sequences: int = 32
    learning_rate: float = 5e-5
    max_length: int = 128
    warmup_share: float = 0.1
    weight_decay: float = 0.01


TASKS = {
    "cola": Settings(epochs=3),
    "sst2": Settings(epochs=1),
    "mrpc": Settings(epochs=3, batch_sequences=16),
    "stsb": Settings(epochs=3, batch_sequences=16),
    "rte": Settings(epochs=3, batch_sequences=16),
    "wnli": Settings(epochs=3, batch_sequences=16),
    "conll2003": Settings(epochs=2),
    "squad2part": Settings(epochs=2, batch_sequences=16, max_length=256),
}
"""Settings that are feasible on a CPU. The learning rate is the upper end of BERT's grid because such a small model
trains slowly."""


@dataclass(frozen=True)
class Unit:
    """One unit of work."""

    side: str
    task: str
    seed: int
    tasks: Path
    out: Path
    bf16: bool

    @property
    def name(self) -> str:
        return f"{self.side}-{self.task}-{self.seed}"

    @property
    def settings(self) -> Settings:
        return TASKS[self.task]

    @property
    def given(self) -> str | CustomTask:
        """The task's overrides for bertkit."""
        if self.task != "squad2part":
            return self.task
        squad = self.tasks / "squad"
        files: dict[str, Any] = {split: str(squad / f"squad2-part-{split}.json") for split in ("train", "dev")}
        return CustomTask(name=self.task, kind="span", **files)

    @property
    def data_dir(self) -> str:
        return str(self.tasks if self.task == "conll2003" else self.tasks / "glue")

    @property
    def spec(self) -> TaskSpec:
        return own_spec(self.given) if isinstance(self.given, CustomTask) else find_task(self.given)

    def examples(self, split: str) -> list[Any]:
        if isinstance(self.given, CustomTask):
            return read_own(Path(self.spec.splits[split][0]), "span", Columns()).examples
        return load_split(self.spec, split, self.data_dir).examples


def bertkit_scores(unit: Unit) -> tuple[Scores, bool]:
    """Dev scores of bertkit, and whether the run had been started before."""
    settings = unit.settings
    run_dir = unit.out / unit.name
    overrides = [
        f"lr={settings.learning_rate}",
        f"epochs={settings.epochs}",
        f"batch={settings.batch_sequences}",
        f"warmup={settings.warmup_share}",
        f"optimisation.weight_decay={settings.weight_decay}",
        f"max_length={settings.max_length}",
        "optimisation.select=last",
        "engine.device=cpu",
        f"engine.precision={'bf16' if unit.bf16 else 'fp32'}",
        "engine.save_every_steps=200",
    ]
    begun = (run_dir / "run.json").exists()
    if begun:
        request = FinetuneArguments(resume=str(run_dir))
    else:
        request = FinetuneArguments(
            task=unit.given,
            model=str(minilm()),
            data_dir=unit.data_dir,
            overrides=[Override.parse(text) for text in overrides],
            seeds=(unit.seed,),
            run_dir=run_dir,
        )
    outcome = finetune(request, progress=silent_progress)
    return outcome.results["splits"]["dev"], begun


def peer_task(unit: Unit, train: list[Any], dev: list[Any]) -> PeerTask:
    """The task for the peer."""
    spec, length = unit.spec, unit.settings.max_length
    if spec.kind == "span":
        return PeerSpan.of(spec, minilm(), length)
    if spec.kind == "tagging":
        return PeerTagging.of(spec, minilm(), length, spec.labels or label_names(train, {"dev": dev}))
    return PeerClassification.of(spec, minilm(), length)


def peer_scores(unit: Unit) -> tuple[Scores, bool]:
    """Dev scores of a plain loop, and whether it had been started before."""
    settings = unit.settings
    train, dev = unit.examples("train"), unit.examples("dev")
    torch.manual_seed(unit.seed)
    task = peer_task(unit, train, dev)
    features = task.features(train)
    batches = -(-len(features) // settings.batch_sequences)
    rates = {name: getattr(settings, name) for name in ("learning_rate", "warmup_share", "weight_decay")}
    loop = Loop(task.build(), LoopSettings(**rates, steps=batches * settings.epochs, bf16=unit.bf16))
    saved = unit.out / f"{unit.name}.pt"
    first = _restore(loop, saved)
    for epoch in range(first, settings.epochs):
        order = np.random.default_rng([unit.seed, epoch]).permutation(len(features))
        for number in range(batches):
            places = order[number * settings.batch_sequences : (number + 1) * settings.batch_sequences]
            loop.step(task.batch([features[i] for i in places]), epoch * batches + number)
        _save(loop, saved, epoch + 1)
    scores = task.score(loop, dev, task.features(dev))
    saved.unlink()
    return scores, first > 0


def _save(loop: Loop, path: Path, epoch: int) -> None:
    state = {"model": loop.model.state_dict(), "optimizer": loop.optimizer.state_dict()}
    torch.save({**state, "random": torch.get_rng_state(), "epoch": epoch}, path.with_suffix(".writing"))
    os.replace(path.with_suffix(".writing"), path)


def _restore(loop: Loop, path: Path) -> int:
    """The number of finished epochs."""
    if not path.exists():
        return 0
    state = torch.load(path)
    loop.model.load_state_dict(state["model"])
    loop.optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    return int(state["epoch"])


def run(unit: Unit) -> None:
    """Run it, unless it is finished."""
    path = unit.out / f"{unit.name}.json"
    if path.exists():
        print(f"{path} is there already")
        return
    unit.out.mkdir(parents=True, exist_ok=True)
    scores, resumed = (bertkit_scores if unit.side == "bertkit" else peer_scores)(unit)
    document = {
        "side": unit.side,
        "task": unit.task,
        "seed": unit.seed,
        "dev": scores,
        "cpu_seconds": None if resumed else round(time.process_time(), 1),
        "threads": torch.get_num_threads(),
        "precision": "bf16" if unit.bf16 else "fp32",
        "settings": asdict(unit.settings),
    }
    write_json(path, document)
    print(json.dumps(document))


def table(out: Path) -> str:
    """A Markdown table: each metric's mean and standard deviation over the seeds of both sides, in percent."""
    found = [json.loads(path.read_text()) for path in sorted(out.glob("*-*-*.json"))]
    lines = ["| task | metric | bertkit | transformers | difference | CPU minutes |", "|---|---|---|---|---|---|"]
    for task in TASKS:
        ours, theirs = ([each for each in found if (each["side"], each["task"]) == (side, task)] for side in SIDES)
        if not ours or not theirs:
            continue
        minutes = " / ".join(_minutes(side) for side in (ours, theirs))
        for metric in ours[0]["dev"]:
            left, right = (_percent(side, metric) for side in (ours, theirs))
            gap = f"{statistics.mean(left) - statistics.mean(right):+.1f}" if left and right else "-"
            lines.append(f"| {task} | {metric} | {_summary(left)} | {_summary(right)} | {gap} | {minutes} |")
    return "\n".join(lines)


def _minutes(units: Sequence[dict[str, Any]]) -> str:
    """CPU minutes of a unit that ran without interruption, everything included."""
    seconds = [each["cpu_seconds"] for each in units if each["cpu_seconds"] is not None]
    return f"{statistics.mean(seconds) / 60:.1f}" if seconds else "-"


def _percent(units: Sequence[dict[str, Any]], metric: str) -> list[float]:
    """The scores that are defined."""
    return [100 * each["dev"][metric] for each in units if each["dev"][metric] is not None]


def _summary(values: Sequence[float]) -> str:
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread} ({len(values)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("side", choices=[*SIDES, "table"])
    parser.add_argument("task", nargs="?", choices=list(TASKS))
    parser.add_argument("seed", nargs="?", type=int, default=0)
    parser.add_argument("--tasks", type=Path, help="folder of the data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--bf16", action="store_true", help="matrix products in bf16, on both sides; else fp32")
    options = parser.parse_args()
    if options.side == "table":
        print(table(options.out))
        return
    if options.task is None or options.tasks is None:
        parser.error("give TASK and --tasks")
    run(Unit(options.side, options.task, options.seed, options.tasks, options.out, options.bf16))


if __name__ == "__main__":
    main()

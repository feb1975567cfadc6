"""The commands to disturb, all small: how each is started and resumed, and the hash that identifies its result."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bertkit.files import read_json

TINY = [
    "optimisation.steps=7", "optimisation.schedule.warmup_steps=2", "engine.save_every_steps=2",
    "engine.evaluate_every_steps=4", "engine.pseudo_perplexity_sequences=0", "engine.examples=[]",
]  # fmt: skip
SMALL_TASK = ["epochs=1", "batch=9", "engine.save_every_steps=2", "engine.log_every_steps=1", "engine.device=cpu"]


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        name: its name.
        start: its arguments for a given output directory.
        resume: its arguments to resume a run, in another directory if one is given; None: same as start.
        result: the hash of its outputs.
    """

    name: str
    start: Callable[[Path], list[str]]
    resume: Callable[[Path, Path | None], list[str]] | None
    result: Callable[[Path], str]

    def goes_on(self, out: Path, elsewhere: Path | None = None) -> list[str]:
        """The arguments after a fault: resume if there is a run, otherwise the same command again."""
        if self.resume is not None and (out / "run.json").is_file():
            return self.resume(out, elsewhere)
        return self.start(elsewhere or out)


def _weights(out: Path) -> str:
    return hashlib.sha256((out / "model" / "model.safetensors").read_bytes()).hexdigest()


def _shards(out: Path) -> str:
    return repr(sorted((name, each["sha256"]) for name, each in read_json(out / "manifest.json")["files"].items()))


def made_commands(home: Path) -> dict[str, Command]:
    """The commands by name; their input is written into `home`, which exists."""
    from tests.distillation.task_place import HEAD, LABELS
    from tests.distillation.tiny_teacher import write_classroom
    from tests.tasks.tiny_task import reviews, write_model, write_table
    from tests.training.tiny_run import write_recipe

    text_home = home / "text"
    text_home.mkdir(parents=True)
    recipe, text = write_recipe(text_home)
    classroom = write_classroom(home)
    base, teacher = write_model(home / "base"), write_model(home / "teacher-of-task", heads=(HEAD,), labels=LABELS)
    train, dev = (write_table(home / f"{name}.csv", reviews(38 - 19 * n, n)) for n, name in enumerate(("train", "dev")))
    student = home / "student-of-task.yaml"
    student.write_text(
        "kind: distill\nstudent: {layers: last, number: 1}\ndistillation:\n- labels: {weight: 0.3}\n"
        "- soft_targets: {weight: 0.7, temperature: 3.0}\n",
        encoding="utf-8",
    )
    table = ["--train", train, "--dev", dev, "--text", "review", "--label", "stars"]

    def words(command: str, *first: object, settings: list[str]) -> Callable[[Path], list[str]]:
        sets = [word for setting in settings for word in ("--set", setting)]
        return lambda out: [command, *map(str, first), "--run-dir", str(out), "--offline", *sets]

    def resumes(command: str) -> Callable[[Path, Path | None], list[str]]:
        def resume(out: Path, elsewhere: Path | None) -> list[str]:
            return [command, "--resume", str(out), "--offline", *(["--run-dir", str(elsewhere)] if elsewhere else [])]

        return resume

    starts = {
        "pretrain": words("pretrain", recipe, "--data", text, settings=TINY),
        "finetune": words("finetune", *table, "--model", base, settings=SMALL_TASK),
        "distill on text": words(
            "distill", classroom.recipe, "--teacher", classroom.teacher, "--data", classroom.text,
            settings=["optimisation.steps=7", "teacher_store={top_k: 4}"],
        ),
        "distill on a task": words("distill", student, "--teacher", teacher, *table, settings=SMALL_TASK),
    }  # fmt: skip
    commands = {name: Command(name, start, resumes(start(home)[0]), _weights) for name, start in starts.items()}
    tokenize = ["tokenize", str(text), "--train", "wordpiece", "--vocab-size", "120", "--offline", "--workers", "1"]
    commands["tokenize"] = Command("tokenize", lambda out: [*tokenize, "--out", str(out)], None, _shards)
    return commands

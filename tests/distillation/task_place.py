"""An untrained teacher and two tables, for tests of distillation on a task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bertkit.distillation.task_arguments import DistillArguments
from bertkit.finetuning.recipe import CustomTask
from bertkit.finetuning.run import finetune
from bertkit.models.labels import Labels
from bertkit.progress import silent_progress
from bertkit.tasks.readers import Columns
from bertkit.training.run import FinishedRun
from tests.overrides import parsed
from tests.tasks.tiny_task import reviews, write_model, write_table

COLUMNS = Columns(text="review", label="stars")
SETTINGS = ("lr=3e-3", "epochs=2", "batch=7", "engine.device=cpu", "engine.precision=fp32", "engine.log_every_steps=1")
TRAIN, DEV = 38, 17
LABELS = Labels(("bad", "good"), "single_label_classification")
HEAD = "sequence_classification"

ALL_TERMS = """
- labels: {weight: 0.3}
- soft_targets: {weight: 0.7, temperature: 3.0}
- hidden_states: {weight: 2.0, layers: [[0, 0], [1, 2]]}
- patience: {weight: 5.0, layers: [[1, 1]]}
- attention: {weight: 0.5, layers: [[1, 2]]}
"""


class Place:
    """An untrained teacher of two layers, two tables, and a folder for runs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.teacher = write_model(directory / "teacher", heads=(HEAD,), labels=LABELS, dropout=0.1)
        self.calm = write_model(directory / "calm", heads=(HEAD,), labels=LABELS, dropout=0.0)
        self.train = write_table(directory / "train.csv", reviews(TRAIN, 1))
        self.dev = write_table(directory / "dev.csv", reviews(DEV, 2))

    @property
    def task(self) -> CustomTask:
        return CustomTask(name="mood", train=str(self.train), dev=str(self.dev), columns=COLUMNS)

    def recipe(self, name: str, distillation: str, more: str = "student: {layers: last, number: 1}") -> str:
        path = self.directory / f"{name}.yaml"
        path.write_text(f"kind: distill\n{more}\ndistillation:{distillation}\n", encoding="utf-8")
        return str(path)

    def request(self, recipe: str, *overrides: str, **fields: Any) -> DistillArguments:
        given = {
            "recipe": recipe,
            "task": self.task,
            "teachers": [str(self.teacher)],
            "runs_root": self.directory / "runs",
            "cache": self.directory / "cache",
            # A single run is always trained; otherwise it would be compared with itself.
            "fresh": not {"seeds", "grid", "resume"} & fields.keys(),
            **fields,
        }
        return DistillArguments(overrides=parsed([*SETTINGS, *overrides]), **given)

    def run(self, recipe: str, *overrides: str, **fields: Any) -> FinishedRun:
        return finetune(self.request(recipe, *overrides, **fields), progress=silent_progress)

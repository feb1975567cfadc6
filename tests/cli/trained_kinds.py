"""Fine-tuned runs of each kind of task, for the tests of `bertkit predict`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.overrides import parsed
from tests.tasks.tiny_kinds import write_kind
from tests.tasks.tiny_task import write_model

from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.run import finetune
from bertkit.progress import silent_progress

EXTRA = {
    "tagging": ["optimisation.max_steps=42", "optimisation.epochs=14"],  # until the model finds some
    "span": ["span.max_query_tokens=8", "data.max_length=32"],
    "pair": ["engine.precision=bf16"],  # for training; saved dev predictions are computed in fp32, as in `predict`
}


class Trained:
    """Fine-tuned runs of each kind, trained on first use."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.base = write_model(directory / "base")
        self._made: dict[str, tuple[Path, Path]] = {}

    def of(self, kind: str) -> tuple[Path, Path]:
        """The run, and its dev file without labels."""
        if kind not in self._made:
            task, inputs = write_kind(self.directory, kind)
            extra = EXTRA.get(kind, [])
            request = FinetuneArguments(
                task=task,
                model=str(self.base),
                run_dir=self.directory / f"run-{kind}",
                overrides=parsed(["lr=6e-3", "batch=7", "optimisation.max_steps=5", "engine.device=cpu", *extra]),
            )
            self._made[kind] = finetune(request, progress=silent_progress).run.path, inputs
        return self._made[kind]

    def saved(self, kind: str) -> list[Any]:
        """The dev predictions written by fine-tuning, without gold labels and texts."""
        lines = lines_of((self.of(kind)[0] / "predictions" / f"{kind}-dev.jsonl").read_text())
        return [{key: line[key] for key in ("id", "prediction", "scores") if key in line} for line in lines]


def lines_of(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]

"""Compare fine-tuning with a plain `transformers` loop step by step: the losses, then both sides' predictions on dev.

Both start from the same checkpoint and head, use the same batches and learning rates, and compute in fp32 without
dropout. One packs its sequences, the other pads them; only the order of float sums should differ.

    python -m benchmarks.finetune_oracle --tasks DATA          200 steps of 16 RTE pairs of at most 128 tokens

tests/finetuning/test_finetune_oracle.py runs it with smaller batches.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.finetune_peer import Loop, LoopSettings, PeerClassification, minilm
from numpy.typing import NDArray

from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.run import finetune
from bertkit.finetuning.task_order import EpochOrder
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.labels import Labels
from bertkit.progress import silent_progress
from bertkit.recipe.resolve import Override
from bertkit.tasks.catalogue import find_task
from bertkit.tasks.readers import load_split
from bertkit.text.tokenizer_files import load_tokenizer

_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")


@dataclass(frozen=True)
class Comparison:
    """bertkit's and the peer's results: one loss per step, one label per dev example."""

    losses: tuple[list[float], list[float]]
    labels: tuple[list[str], list[str]]
    probabilities: tuple[list[list[float]], list[list[float]]]

    @property
    def largest_loss_difference(self) -> float:
        """The difference relative to the peer's."""
        return max(abs(a - b) / b for a, b in zip(*self.losses, strict=True))


def starting_point(source: Path, labels: tuple[str, ...], directory: Path) -> Path:
    """A copy of a model without dropout and with a head."""
    calm = directory / "calm"
    shutil.copytree(source, calm)
    config = json.loads((calm / "config.json").read_text())
    (calm / "config.json").write_text(json.dumps(config | dict.fromkeys(_DROPOUTS, 0.0)))
    model, report = load_model(calm, heads=("sequence_classification",), labels=Labels(labels))
    hub_names = model.hub_form().hub_names(model.state_dict())
    model.initialise(0, only={name for name, hub_name in hub_names.items() if hub_name in report.newly_initialised})
    save_model(model, load_tokenizer(calm), directory / "start")
    return directory / "start"


def compare(task: str, tasks: Path, *, batch: int, max_length: int, steps: int, directory: Path) -> Comparison:
    """Train both sides.

    Args:
        task: a GLUE classification task.
        tasks: GLUE's folder.
        batch: sequences per update.
        max_length: tokens of the longest sequence.
        steps: updates.
        directory: an empty directory for model and run.
    """
    spec = find_task(task)
    assert spec.labels is not None
    start = starting_point(minilm(), spec.labels, directory)
    rate = 5e-5
    settings = (f"lr={rate}", f"batch={batch}", f"max_length={max_length}", f"optimisation.max_steps={steps}")
    engine = ("engine.device=cpu", "engine.precision=fp32", "engine.log_every_steps=1", "epochs=1000")
    request = FinetuneArguments(
        task=task,
        model=str(start),
        data_dir=str(tasks),
        overrides=[
            Override.parse(text) for text in [*settings, *engine, "optimisation.evaluations_per_epoch=1", "warmup=0.1"]
        ],
        run_dir=directory / "run",
    )
    ours = finetune(request, progress=silent_progress).run
    lines = [json.loads(line) for line in ours.metrics.read_text().splitlines()]
    said = [json.loads(line) for line in (ours.path / "predictions" / f"{task}-dev.jsonl").read_text().splitlines()]

    peer = PeerClassification.of(spec, start, max_length)
    splits: list[list[Any]] = [load_split(spec, split, str(tasks)).examples for split in ("train", "dev")]
    train, dev = splits
    features = peer.features(train)
    loop = Loop(peer.build(), LoopSettings(rate, steps))
    order = EpochOrder(len(features), batch, seed=0)
    losses = [loop.step(peer.batch([features[i] for i in order.items(step)]), step) for step in range(steps)]
    logits: NDArray[np.float32] = np.stack(peer.predict(loop, peer.features(dev)))
    # Saved probabilities use the temperature fitted on dev.
    temperature = (ours.results or {}).get("tuned", {}).get("temperature", 1.0)
    probabilities = torch.softmax(torch.from_numpy(logits) / temperature, dim=-1).tolist()
    return Comparison(
        ([line["loss"] for line in lines if "loss" in line], losses),
        ([line["prediction"] for line in said], [spec.labels[int(each.argmax())] for each in logits]),
        ([[line["scores"][name] for name in spec.labels] for line in said], probabilities),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=Path, required=True, help="folder that holds glue/")
    parser.add_argument("--task", default="rte")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = compare(
            options.task,
            options.tasks / "glue",
            batch=options.batch,
            max_length=options.max_length,
            steps=options.steps,
            directory=Path(directory),
        )
    ours, theirs = torch.tensor(found.probabilities[0]), torch.tensor(found.probabilities[1])
    document = {
        "steps": len(found.losses[0]),
        "first_loss": found.losses[0][0],
        "last_loss": found.losses[0][-1],
        "largest_loss_difference": found.largest_loss_difference,
        "dev_examples": len(found.labels[0]),
        "dev_labels_that_differ": sum(a != b for a, b in zip(*found.labels, strict=True)),
        "largest_probability_difference": float((ours - theirs).abs().max()),
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()

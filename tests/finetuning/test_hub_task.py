"""Fine-tuning on a task of the Hub, with its own clients and a small server that changes and goes away."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.hub_server import STOPPED, Hub, bertkit, commit_of, serving
from tests.tasks.tiny_task import reviews, write_model

CARD = b"""---
configs:
- config_name: rte
  data_files:
  - split: train
    path: rte/train-*
  - split: validation
    path: rte/validation-*
---
"""


def parquet(rows: int, seed: int) -> bytes:
    """RTE's columns: a review, its first word, and a label by its mood."""
    texts = reviews(rows, seed)
    table = {
        "sentence1": [text for text, _ in texts],
        "sentence2": [text.split()[0] for text, _ in texts],
        "label": ["entailment" if label == "good" else "not_entailment" for _, label in texts],
        "idx": list(range(rows)),
    }
    written = io.BytesIO()
    pq.write_table(pa.table(table), written)
    return written.getvalue()


def test_a_resumed_run_reads_the_task_at_the_commit_that_it_began_with(tmp_path: Path) -> None:
    files = {"README.md": CARD, "rte/train-0.parquet": parquet(20, 1), "rte/validation-0.parquet": parquet(9, 2)}
    model = write_model(tmp_path / "model")
    moved, alone = tmp_path / "moved", tmp_path / "alone"
    words = ("finetune", "--task", "rte", "--model", model, "--batch", 7, "--epochs", 1, "--lr", 1e-3, "--run-dir")

    def record(run: Path) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((run / "run.json").read_text(encoding="utf-8"))
        return found

    hub = Hub({"datasets/nyu-mll/glue@main": files})
    with serving(hub):
        assert bertkit(tmp_path, hub.url, *words, moved, "--max-minutes", 0) == STOPPED
        assert record(moved)["commits"] == {"nyu-mll/glue": commit_of(files)}
        shutil.copytree(moved, alone)
        newer = {**files, "rte/train-0.parquet": parquet(20, 3)}
        hub.files = {"datasets/nyu-mll/glue@main": newer, "datasets/nyu-mll/glue@before": files}
        shutil.rmtree(tmp_path / "hf")
        assert bertkit(tmp_path, hub.url, "finetune", "--resume", moved) == 0
    # The Hub is gone, and the cache has what was read.
    assert bertkit(tmp_path, hub.url, "finetune", "--resume", alone) == 0
    assert record(moved)["fingerprints"] == record(alone)["fingerprints"]
    assert record(moved)["commits"] == {"nyu-mll/glue": commit_of(files)}

"""Runs on text of the Hub, with its own clients and a small server that changes and goes away."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from bertkit.models.families.bert import BertConfig
from tests.hub_server import STOPPED, Hub, bertkit, commit_of, serving
from tests.training.tiny_run import RECIPE, write_model, write_text


def weights(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


def test_a_resumed_run_reads_the_commit_that_it_began_with(tmp_path: Path) -> None:
    """Uninterrupted; resumed after the text has changed and its shards are lost; resumed after the Hub is gone."""
    (tmp_path / "tiny.yaml").write_text(RECIPE, encoding="utf-8")
    text = write_text(tmp_path / "text.txt").read_text(encoding="utf-8").strip()
    rows = [json.dumps({"text": document}) + "\n" for document in text.split("\n\n")]
    files = {"README.md": b"# Text\n", "train.jsonl": "".join(rows).encode()}
    run = ("pretrain", tmp_path / "tiny.yaml", "--max-steps", 6, "--data")
    straight, moved, alone = (tmp_path / name for name in ("straight", "moved", "alone"))
    hub = Hub({"datasets/org/text@main": files})
    with serving(hub):
        assert bertkit(tmp_path, hub.url, *run, "hub:org/text", "--run-dir", straight) == 0
        # Its shards are in the cache, made from the same commit by another name.
        named = (*run, "hub:org/text@main", "--run-dir", moved)
        assert bertkit(tmp_path, hub.url, *named, "--max-minutes", 0) == STOPPED
        shutil.copytree(moved, alone)
        record = json.loads((moved / "run.json").read_text(encoding="utf-8"))
        assert record["commits"] == {"org/text@main": commit_of(files)}
        hub.files = {
            "datasets/org/text@main": {**files, "train.jsonl": "".join(rows[3:]).encode()},
            "datasets/org/text@before": files,
        }
        shutil.rmtree(tmp_path / "cache")
        assert bertkit(tmp_path, hub.url, "pretrain", "--resume", moved) == 0
    assert bertkit(tmp_path, hub.url, "pretrain", "--resume", alone) == 0
    assert weights(moved) == weights(alone) == weights(straight)


def test_replay_and_resume_read_the_commits_of_text_and_model_that_the_run_read(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(RECIPE, encoding="utf-8")
    text = write_text(tmp_path / "text.txt")
    rows = [json.dumps({"text": part}) + "\n" for part in text.read_text(encoding="utf-8").strip().split("\n\n")]
    files = {"README.md": b"# Text\n", "train.jsonl": "".join(rows).encode()}
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 40, "max_position_embeddings": 40}
    config = BertConfig(num_hidden_layers=1, **sizes)
    one, other = (write_model(config, text, tmp_path / f"model-{seed}", seed=seed) for seed in (1, 2))
    model, newer = ({path.name: path.read_bytes() for path in each.iterdir()} for each in (one, other))
    hub = Hub({"datasets/org/text@main": files, "org/model@main": model})
    run, stopped = tmp_path / "run", tmp_path / "stopped"
    with serving(hub):
        words = ("pretrain", tmp_path / "tiny.yaml", "--max-steps", 4, "--data", "hub:org/text")
        words = (*words, "--init", "org/model@main", "--run-dir")
        assert bertkit(tmp_path, hub.url, *words, run) == 0
        assert bertkit(tmp_path, hub.url, *words, stopped, "--fresh", "--max-minutes", 0) == STOPPED
        record = json.loads((run / "run.json").read_text(encoding="utf-8"))
        assert record["model_commits"] == {"org/model@main": commit_of(model)}
        moved = {**files, "train.jsonl": "".join(rows[3:]).encode()}
        hub.files = {"datasets/org/text@main": moved, "org/model@main": newer}
        hub.files |= {"datasets/org/text@before": files, "org/model@before": model}
        shutil.rmtree(tmp_path / "cache")
        shutil.rmtree(tmp_path / "hf")
        assert bertkit(tmp_path, hub.url, "runs", "replay", run) == 0
        assert bertkit(tmp_path, hub.url, "pretrain", "--resume", stopped) == 0
    assert weights(stopped) == weights(run)

"""`--train hub:ORG/NAME`: a user's own data from the Hub, with its own clients and a small server."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest

from bertkit.errors import DataError, UsageError
from bertkit.finetuning.inputs import CustomTask, SplitSettings
from bertkit.finetuning.recipe import own_spec
from bertkit.tasks.readers.hub_table import HubTable, _with_names
from tests.hub_server import STOPPED, Hub, bertkit, commit_of, serving
from tests.tasks.tiny_task import reviews, write_model

LABELS = ["bad", "good", "unused"]


def parquet(rows: int, seed: int) -> bytes:
    """Reviews with numbered labels, as most data sets of the Hub have them; the first has no label."""
    texts = reviews(rows, seed)
    numbers = [-1, *(LABELS.index(label) for _, label in texts[1:])]
    table = {"review": [text for text, _ in texts], "stars": numbers}
    features = datasets.Features({"review": datasets.Value("string"), "stars": datasets.ClassLabel(names=LABELS)})
    written = io.BytesIO()
    datasets.Dataset.from_dict(table, features=features).to_parquet(written)
    return written.getvalue()


FILES = {"data/train-0.parquet": parquet(24, 1), "data/validation-0.parquet": parquet(9, 2)}


def record(run: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / name).read_text(encoding="utf-8"))
    return found


def test_a_run_reads_its_data_at_one_commit_and_goes_on_without_the_hub(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    data = ("--train", "hub:some/reviews", "--split", "0.3", "--test", "hub:some/reviews::validation")
    words = ("finetune", *data, "--text", "review", "--label", "stars")
    words = (*words, "--model", str(model), "--batch", "7", "--epochs", "1", "--lr", "1e-3", "--run-dir")
    moved, alone = tmp_path / "moved", tmp_path / "alone"
    hub = Hub({"datasets/some/reviews@main": FILES})
    with serving(hub):
        assert bertkit(tmp_path, hub.url, *words, moved, "--max-minutes", 0) == STOPPED
        assert record(moved, "run.json")["commits"] == {"some/reviews": commit_of(FILES)}
        shutil.copytree(moved, alone)
        newer = {**FILES, "data/train-0.parquet": parquet(24, 3)}
        hub.files = {"datasets/some/reviews@main": newer, "datasets/some/reviews@before": FILES}
        shutil.rmtree(tmp_path / "hf")
        shutil.rmtree(tmp_path / "cache" / "tables")
        assert bertkit(tmp_path, hub.url, "finetune", "--resume", moved) == 0
    assert bertkit(tmp_path, hub.url, "finetune", "--resume", alone) == 0, "the cache has what was read"
    assert record(moved, "run.json")["fingerprints"] == record(alone, "run.json")["fingerprints"]
    assert (moved / "model" / "model.safetensors").read_bytes() == (alone / "model" / "model.safetensors").read_bytes()
    config = record(moved, "model/config.json")
    assert list(config["label2id"]) == ["bad", "good"]
    results = record(moved, "results.json")
    assert list(results["tasks"]) == ["reviews"]
    assert "hub:some/reviews" in (moved / "recipe.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("source", "split", "table"),
    [
        ("hub:some/reviews", "train", HubTable("some/reviews", None, "train")),
        ("hub:some/reviews", "dev", HubTable("some/reviews", None, "validation")),
        ("hub:some/reviews@v2:en", "test", HubTable("some/reviews@v2", "en", "test")),
        ("hub:some/reviews:en:extra", "dev", HubTable("some/reviews", "en", "extra")),
        ("hub:some/reviews::extra", "dev", HubTable("some/reviews", None, "extra")),
    ],
)
def test_a_source_names_a_data_set_and_perhaps_its_configuration_and_split(
    source: str, split: str, table: HubTable
) -> None:
    assert HubTable.parse(source, split) == table


@pytest.mark.parametrize("source", ["hub:", "hub::en", "hub:a/b:c:d:e"])
def test_another_form_is_refused(source: str) -> None:
    with pytest.raises(UsageError, match=r"expected hub:ORG/NAME\[@REVISION\]\[:CONFIG\[:SPLIT\]\]"):
        HubTable.parse(source, "train")


def test_numbered_labels_and_tags_become_names_and_minus_one_no_label() -> None:
    table = datasets.Dataset.from_dict({"label": [1, -1, 0], "tags": [[0, 2], [], [1]], "n": [0, 1, 2]})
    names = {"label": LABELS, "tags": ["O", "B-PER", "I-PER"]}
    found = _with_names(table.with_format("arrow")[:], names, "here")
    assert found.to_pydict() == {
        "label": ["good", None, "bad"],
        "tags": [["O", "I-PER"], [], ["B-PER"]],
        "n": [0, 1, 2],
    }
    with pytest.raises(DataError, match="here: label: label 1, expected a number from 0 to 0"):
        _with_names(table.with_format("arrow")[:], {"label": ["bad"]}, "here")


def test_the_task_is_named_after_the_data_set() -> None:
    def name(source: str) -> str:
        return own_spec(CustomTask(train=source, split=SplitSettings(share=0.1))).name

    assert name("hub:some/reviews") == "reviews"
    assert name("hub:some/reviews@0123456789abcdef:en:train") == "reviews-en"


def test_a_data_set_is_never_taken_for_a_published_task_of_its_name() -> None:
    task = CustomTask(kind="embedding", train="hub:some/pairs", dev="hub:mteb/stsb")
    assert task.dev_task is None

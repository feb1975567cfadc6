"""Fine-tuning from a fine-tuned model keeps the encoder bit for bit, and the head if the labels' names are the
task's."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bertkit.errors import DataError
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.data import Prepared, prepare
from bertkit.finetuning.recipe import CustomTask
from bertkit.finetuning.run import finetune
from bertkit.finetuning.task_trainer import TaskTrainer
from bertkit.models.files.hub import load_model
from bertkit.models.labels import Labels
from bertkit.progress import silent_progress
from bertkit.tasks.readers import Columns
from bertkit.training.run import FinishedRun
from tests.overrides import parsed
from tests.tasks.tiny_task import BAD, GOOD, reviews, write_model, write_table

Bertkit = Callable[..., Any]
THREE = ("contradiction", "entailment", "neutral")
SHORT = ("lr=6e-3", "batch=7", "optimisation.max_steps=4", "engine.device=cpu", "engine.precision=fp32")


def relation(text: str) -> str:
    words = text.split()
    return THREE[0] if BAD[0] in words else THREE[1] if set(GOOD) & set(words) else THREE[2]


class Place:
    """A model, and a run on a task of three labels that started from it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = write_model(directory / "base")
        self.nli = self.task("nli", [(text, relation(text)) for text, _ in reviews(40, 1)])
        self.intermediate = self.run(self.nli, self.model)

    def task(self, name: str, rows: list[Any], **fields: Any) -> CustomTask:
        files = {
            split: str(write_table(self.directory / f"{name}-{split}.csv", part))
            for split, part in {"train": rows[:-12], "dev": rows[-12:]}.items()
        }
        return CustomTask(name=name, **files, columns=Columns(text="review", label="stars"), **fields)

    def request(self, task: CustomTask, model: Path, *overrides: str, **fields: Any) -> FinetuneArguments:
        runs = self.directory / "runs"
        return FinetuneArguments(
            task=task, model=str(model), overrides=parsed([*SHORT, *overrides]), runs_root=runs, **fields
        )

    def run(self, task: CustomTask, model: Path, *overrides: str, **fields: Any) -> FinishedRun:
        return finetune(self.request(task, model, *overrides, **fields), progress=silent_progress)

    def start(self, task: CustomTask, model: Path, *overrides: str) -> tuple[Prepared, dict[str, Tensor]]:
        """The weights of a fine-tuning run before its first step."""
        recipe = self.request(task, model, *overrides).requested()
        prepared = prepare(recipe)
        return prepared, TaskTrainer(recipe, prepared, seed=0).model.state_dict()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("stilts"))


def same(a: dict[str, Tensor], b: dict[str, Tensor], part: str) -> bool:
    names = [name for name in a if name.startswith(part)]
    assert names
    return all(torch.equal(a[name], b[name]) for name in names)


def test_two_labels_start_from_three_with_the_encoder_to_the_bit_and_a_new_head(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    rte = place.task("rte-like", [(text, {"bad": "entailment"}.get(y, "not_entailment")) for text, y in reviews(30, 2)])
    learnt, _ = load_model(place.intermediate.run.model)
    with caplog.at_level(logging.INFO):
        prepared, begun = place.start(rte, place.intermediate.run.path)
    assert "keeping the encoder of the run on nli; the head for rte-like is new" in caplog.text
    assert "its labels were contradiction, entailment, neutral" in caplog.text
    assert prepared.new_head
    assert same(begun, learnt.state_dict(), "encoder.")
    assert same(begun, learnt.state_dict(), "pooler.")
    _, fresh = place.start(rte, place.model)
    assert begun["sequence_classification.output.weight"].shape == (2, 30)
    assert same(begun, fresh, "sequence_classification.")  # initialised from the seed for any starting model
    outcome = place.run(rte, place.intermediate.run.path)
    assert json.loads((outcome.run.model / "config.json").read_text())["label2id"].keys() == {
        "entailment",
        "not_entailment",
    }


def test_a_head_with_labels_of_the_same_names_is_kept_in_its_order(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    turned = {"contradiction": "Neutral", "neutral": "Contradiction", "entailment": "Entailment"}
    other = place.task("other-nli", [(text, turned[relation(text)]) for text, _ in reviews(30, 3)])
    with caplog.at_level(logging.INFO):
        prepared, begun = place.start(other, place.intermediate.run.path)
    assert "keeping encoder and head of the run on nli" in caplog.text
    assert not prepared.new_head
    assert prepared.task.labels.names == ("Contradiction", "Entailment", "Neutral")
    learnt, _ = load_model(place.intermediate.run.model)
    assert all(torch.equal(tensor, learnt.state_dict()[name]) for name, tensor in begun.items())
    again, _ = place.start(other, place.intermediate.run.path, "new_head=true")
    assert again.new_head


@pytest.mark.parametrize("kind", ["classification", "tagging"])
def test_of_a_head_with_more_labels_the_outputs_of_the_tasks_own_are_kept(
    kind: str, place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a checkpoint from elsewhere; as a recogniser of three kinds of entities for texts with two of them."""
    tagged = [([*text.split(), label], ["O" for _ in text.split()] + [f"B-{label}"]) for text, label in reviews(30, 5)]
    head = {"classification": "sequence_classification", "tagging": "token_classification"}[kind]
    names = ("O", "B-good", "I-good", "B-X", "I-X", "B-bad", "I-bad") if kind == "tagging" else ("good", "fair", "bad")
    other = write_model(tmp_path / "other", heads=(head,), labels=Labels(names))
    task = place.task("two", reviews(30, 9))
    if kind == "tagging":
        path = tmp_path / "tags.jsonl"
        path.write_text("".join(f"{json.dumps({'words': words, 'tags': tags})}\n" for words, tags in tagged))
        columns = Columns(text="words", label="tags")
        task = CustomTask(name="tags", kind="tagging", train=str(path), dev=str(path), columns=columns)
    with caplog.at_level(logging.INFO):
        prepared, begun = place.start(task, other)
    left_out, rows = ("B-X, I-X", [0, 1, 2, 5, 6]) if kind == "tagging" else ("fair", [0, 2])
    assert f"the task has no labels {left_out}: the head's outputs for them are left out" in caplog.text
    assert prepared.task.labels.names == tuple(names[row] for row in rows)
    whole = load_model(other)[0].state_dict()
    for name, weight in begun.items():
        expected = whole[name][rows] if name.startswith(f"{head}.output.") else whole[name]
        assert torch.equal(weight, expected), name
    _, drawn = place.start(task, other, "new_head=true")
    assert not torch.equal(drawn[f"{head}.output.weight"], begun[f"{head}.output.weight"])


def test_a_run_on_more_labels_gives_its_head_to_a_task_with_fewer(place: Place) -> None:
    fewer = place.task("fewer", [(text, relation(text)) for text, _ in reviews(60, 3) if relation(text) != THREE[1]])
    prepared, begun = place.start(fewer, place.intermediate.run.path)
    assert not prepared.new_head
    learnt = load_model(place.intermediate.run.model)[0].state_dict()
    assert torch.equal(
        begun["sequence_classification.output.bias"], learnt["sequence_classification.output.bias"][[0, 2]]
    )
    assert place.run(fewer, place.intermediate.run.path).results["splits"]["dev"]


def test_a_number_starts_from_three_labels_and_labels_from_a_number(place: Place) -> None:
    similar = place.task("similar", [(text, float(y == "good")) for text, y in reviews(30, 4)], kind="regression")
    prepared, begun = place.start(similar, place.intermediate.run.path)
    assert prepared.new_head
    assert begun["sequence_classification.output.weight"].shape == (1, 30)
    back = place.run(similar, place.intermediate.run.path)
    labelled, _ = place.start(place.nli, back.run.path)
    assert labelled.new_head


def test_numbers_as_labels_say_nothing_of_another_task(place: Place) -> None:
    def numbered(name: str, seed: int) -> CustomTask:
        return place.task(name, [(text, int(label == "good")) for text, label in reviews(30, seed)])

    first = place.run(numbered("acceptable", 5), place.model)
    other, _ = place.start(numbered("paraphrase", 6), first.run.path)
    assert other.new_head
    same_task, _ = place.start(numbered("acceptable", 7), first.run.path)
    assert not same_task.new_head


def test_another_kind_of_head_is_drawn_whatever_the_labels(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    lines = [
        {"words": text.split(), "tags": ["B-X" if w in GOOD else "O" for w in text.split()]}
        for text, _ in reviews(20, 8)
    ]
    path = place.directory / "tags.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    columns = Columns(text="words", label="tags")
    tags = CustomTask(name="tags", kind="tagging", train=str(path), dev=str(path), columns=columns)
    with caplog.at_level(logging.INFO):
        _, begun = place.start(tags, place.intermediate.run.path)
    assert "keeping the encoder of the run on nli; the head for tags is new" in caplog.text
    learnt, _ = load_model(place.intermediate.run.model)
    assert same(begun, learnt.state_dict(), "encoder.")


def test_a_checkpoint_that_no_run_vouches_for_is_still_refused(place: Place, tmp_path: Path) -> None:
    """Its labels have no names, so the user must request a new head."""
    other = write_model(tmp_path / "other", heads=("sequence_classification",), labels=Labels(THREE))
    two = place.task("two", reviews(30, 9))
    with pytest.raises(DataError, match=r"labels are contradiction, entailment, neutral, not bad, good.*--new-head"):
        place.start(two, other)


def test_config_json_names_the_published_task_learnt_last(shared_data: Path, bertkit: Bertkit, tmp_path: Path) -> None:
    """The two commands of the documentation, on real files and a tiny model: MNLI's part, then RTE from its run."""
    model = write_model(tmp_path / "base")
    nli = tmp_path / "nli.yaml"
    parts = {split: shared_data / "nli" / f"mnli-part-{split}.jsonl" for split in ("train", "dev")}
    columns = "columns: {text: premise, text_pair: hypothesis, label: label}\n"
    nli.write_text(f"train: {parts['dev']}\ndev: {parts['dev']}\n{columns}")
    small = ["--max-steps", "2", "--set", "data.train_examples=40", "--set", "engine.device=cpu"]
    small += ["--set", "max_length=24", "--set", "engine.precision=fp32"]
    first, second = tmp_path / "nli", tmp_path / "rte"
    done = bertkit("finetune", "--task", nli, "--model", model, "--run-dir", first, *small)
    assert done.code == 0, done.stderr
    data = ["--data-dir", shared_data / "glue"]
    done = bertkit("finetune", "--task", "rte", *data, "--model", first, "--run-dir", second, *small)
    assert done.code == 0, done.stderr
    assert "keeping the encoder of the run on nli; the head for rte is new" in done.stderr
    configs = [json.loads((run / "model" / "config.json").read_text()) for run in (first, second)]
    assert [sorted(config["label2id"]) for config in configs] == [list(THREE), ["entailment", "not_entailment"]]
    assert [config.get("finetuning_task") for config in configs] == [None, "rte"]

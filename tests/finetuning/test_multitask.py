"""Several tasks with one encoder: each step trains one task, with its own head, as in `transformers`; resuming."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertkit.errors import DataError, StoppedError, UsageError
from bertkit.files import sha256_of
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.multitask import task_seed
from bertkit.finetuning.recipe import CustomTask, FinetuneRecipe, changed, resolved
from bertkit.finetuning.run import finetune
from bertkit.finetuning.task_order import EpochOrder, TaskOrder
from bertkit.finetuning.warm_start import recipe_of
from bertkit.inference.predict import Predictor
from bertkit.models.files.hub import load_model
from bertkit.models.labels import Labels
from bertkit.progress import silent_progress
from bertkit.tasks.examples import TextExample
from bertkit.tasks.readers import Columns
from bertkit.training.config import EngineConfig
from bertkit.training.engine import resolve_engine
from bertkit.training.run import FinishedRun
from tests.overrides import parsed
from tests.tasks.tiny_task import BAD, GOOD, reviews, write_model, write_table
from tests.training.stopping import stopping_at

Bertkit = Callable[..., Any]
SETTINGS = ("lr=6e-3", "epochs=4", "batch=7", "engine.device=cpu", "engine.precision=fp32", "engine.log_every_steps=2")
MOODS, WORTHS, TAGS, DEV = 45, 31, 26, 18


def worth(text: str) -> float:
    """The sentiment of the deciding word, as a number."""
    return next(number / 2 for number, word in enumerate((BAD[1], BAD[0], *GOOD)) if word in text.split())


class Place:
    """A model and the files of three tasks: a sentence's sentiment, a number for it, its positive words."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = write_model(directory / "base")
        self.calm = write_model(directory / "calm", dropout=0.0)
        columns = Columns(text="review", label="stars")
        self.mood = CustomTask(name="mood", **self.tables("mood", reviews(MOODS + DEV, 1)), columns=columns)
        worths = [(text, worth(text)) for text, _ in reviews(WORTHS + DEV, 2)]
        self.worth = CustomTask(name="worth", kind="regression", **self.tables("worth", worths), columns=columns)
        words = [text.split() for text, _ in reviews(TAGS + DEV, 3)]
        lines = [{"words": own, "tags": ["B-X" if word in GOOD else "O" for word in own]} for own in words]
        files = {"train": lines[:TAGS], "dev": lines[TAGS:]}
        for split, part in files.items():
            (directory / f"tags-{split}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in part))
        named = {split: str(directory / f"tags-{split}.jsonl") for split in files}
        self.tags = CustomTask(name="tags", kind="tagging", **named, columns=Columns(text="words", label="tags"))

    def tables(self, name: str, rows: list[Any]) -> dict[str, str]:
        files = {"train": rows[:-DEV], "dev": rows[-DEV:]}
        return {split: str(write_table(self.directory / f"{name}-{split}.csv", part)) for split, part in files.items()}

    def run(self, *overrides: str, **fields: Any) -> FinishedRun:
        tasks = [self.mood, self.worth, self.tags]
        # A single run is always trained; otherwise bits would be compared with themselves.
        alone = not {"seeds", "grid", "resume"} & fields.keys()
        given = {
            "task": tasks,
            "model": str(self.model),
            "runs_root": self.directory / "runs",
            "fresh": alone,
            **fields,
        }
        return finetune(FinetuneArguments(overrides=parsed([*SETTINGS, *overrides]), **given), progress=silent_progress)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("multitask"))


@pytest.fixture(scope="module")
def finished(place: Place) -> FinishedRun:
    return place.run(run_dir=place.directory / "finished")


def bytes_of(directory: Path) -> dict[str, str]:
    return {path.relative_to(directory).as_posix(): sha256_of(path) for path in directory.rglob("*") if path.is_file()}


def orders() -> tuple[EpochOrder, ...]:
    return EpochOrder(45, 7, seed=4), EpochOrder(31, 7, seed=5), EpochOrder(5, 7, seed=6)


def test_an_epoch_has_every_batch_of_every_task_once_and_mixes_them_anew() -> None:
    order = TaskOrder(orders(), seed=2)
    assert order.steps_by_task == (7, 5, 1)
    assert order.steps_per_epoch == 13
    mixed = [[order.task(13 * epoch + step) for step in range(13)] for epoch in range(3)]
    assert [Counter(tasks) for tasks in mixed] == [{0: 7, 1: 5, 2: 1}] * 3
    assert len({tuple(tasks) for tasks in mixed}) == 3
    for epoch in range(3):
        steps = range(13 * epoch, 13 * epoch + 13)
        for task, own in enumerate(orders()):
            taken = [order.items(step).tolist() for step in steps if order.task(step) == task]
            in_turn = range(epoch * own.steps_per_epoch, (epoch + 1) * own.steps_per_epoch)
            assert taken == [own.items(step).tolist() for step in in_turn]
            assert sorted(item for items in taken for item in items) == list(range(own.num_examples))


def test_a_task_alone_has_its_own_order() -> None:
    (alone, *_) = orders()
    order = TaskOrder((alone,), seed=9)
    assert order.steps_per_epoch == alone.steps_per_epoch
    assert all((order.items(step) == alone.items(step)).all() for step in range(17))


@pytest.mark.parametrize(("smoothing", "counts"), [(1.0, (7, 5, 1)), (0.5, (6, 5, 2)), (0.0, (5, 4, 4))])
def test_smoothing_evens_out_how_often_tasks_come(smoothing: float, counts: tuple[int, ...]) -> None:
    order = TaskOrder(orders(), seed=2, smoothing=smoothing)
    assert order.steps_by_task == counts
    assert Counter(order.task(step) for step in range(13)) == dict(enumerate(counts))
    # The batches of a task left over from an epoch come first in the next one: nothing is lost over seven epochs.
    taken = Counter(tuple(order.items(step)) for step in range(7 * 13) if order.task(step) == 0)
    assert set(taken) >= {tuple(orders()[0].items(step)) for step in range(7 * counts[0])}


def test_one_task_in_a_list_is_ordinary_fine_tuning_to_the_bit(place: Place) -> None:
    short = "optimisation.max_steps=9"
    ordinary, listed = place.run(short, task=place.mood), place.run(short, task=[place.mood])
    assert bytes_of(ordinary.run.model) == bytes_of(listed.run.model)
    assert ordinary.results == listed.results


def test_all_tasks_are_learnt_and_each_has_its_results(finished: FinishedRun) -> None:
    results = finished.results
    assert {task: list(scores) for task, scores in results["tasks"].items()} == {
        "mood": ["accuracy", "macro_f1"],
        "worth": ["pearson", "spearman", "mean_squared_error"],
        "tags": ["f1", "precision", "recall", "accuracy"],
    }
    assert results["primary"] == {"mood": "accuracy", "worth": "pearson", "tags": "f1"}
    assert results["splits"].keys() == {"mood/dev", "worth/dev", "tags/dev"}
    assert results["splits"]["mood/dev"]["accuracy"] > 0.9
    assert results["splits"]["worth/dev"]["pearson"] > 0.7
    assert results["splits"]["tags/dev"]["f1"] > 0.9
    assert results["tasks"]["mood"]["accuracy"]["seeds"] == [results["splits"]["mood/dev"]["accuracy"]]
    assert results["examples"] == {
        f"{task}/{split}": count
        for task, learnt in (("mood", MOODS), ("worth", WORTHS), ("tags", TAGS))
        for split, count in (("train", learnt), ("dev", DEV))
    }
    assert results["degenerate"] is None
    assert finished.run.record["steps"] == 4 * (7 + 5 + 4)
    files = sorted(path.name for path in (finished.run.path / "predictions").iterdir())
    assert files == ["mood-dev.jsonl", "tags-dev.jsonl", "worth-dev.jsonl"]
    lines = [json.loads(line) for line in finished.run.metrics.read_text().splitlines()]
    looked = [line for line in lines if "worth/dev/pearson" in line]
    assert [line["step"] for line in looked] == [16, 32, 48, 64]


def test_the_best_evaluation_is_that_of_the_best_mean(place: Place) -> None:
    results = place.run("optimisation.select=best", "epochs=2", "optimisation.evaluations_per_epoch=3").results
    means = [
        np.mean([each["scores"][f"{task}/dev"][metric] for task, metric in results["primary"].items()])
        for each in results["evaluations"]
    ]
    assert len(means) == 6
    assert results["selected"]["step"] == results["evaluations"][int(np.argmax(means))]["step"]
    assert results["best"].keys() == {"step", "epoch", "mood/accuracy", "worth/pearson", "tags/f1"}


def test_each_head_is_a_whole_model_of_transformers_with_the_same_predictions(finished: FinishedRun) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(finished.run.model / "mood")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(finished.run.model / "mood").eval()
    assert model.config.id2label == {0: "bad", 1: "good"}
    texts = [text for text, _ in reviews(MOODS + DEV, 1)][-DEV:]
    with torch.no_grad():
        logits = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
    lines = (finished.run.path / "predictions" / "mood-dev.jsonl").read_text().splitlines()
    predicted = [json.loads(line) for line in lines]
    probabilities = [[line["scores"]["bad"], line["scores"]["good"]] for line in predicted]
    np.testing.assert_allclose(probabilities, torch.softmax(logits, -1).numpy(), atol=1e-5)
    tagger = transformers.AutoModelForTokenClassification.from_pretrained(finished.run.model / "tags")
    shared = transformers.AutoModel.from_pretrained(finished.run.model)
    assert type(shared).__name__ == "BertModel"
    for encoder in (model.bert, tagger.bert):
        for name, parameter in encoder.named_parameters():
            assert torch.equal(parameter, shared.get_parameter(name))


def test_each_head_predicts_and_is_trained_further_from_its_directory(place: Place, finished: FinishedRun) -> None:
    engine = resolve_engine(EngineConfig(device="cpu", precision="fp32"))
    predictor = Predictor.load(str(finished.run.model / "mood"), engine)
    assert predictor.kind == "classification"
    rows = reviews(MOODS + DEV, 1)[-DEV:]
    predicted = predictor([TextExample(str(n), text, None, None) for n, (text, _) in enumerate(rows)])
    lines = (finished.run.path / "predictions" / "mood-dev.jsonl").read_text().splitlines()
    assert [each.prediction for each in predicted] == [json.loads(line)["prediction"] for line in lines]
    alone = recipe_of(finished.run.model / "worth")
    assert alone is not None
    assert alone.spec.name == "worth"
    assert alone.data.max_length == 256
    with pytest.raises(DataError, match=r"several tasks.*name the head of one"):
        Predictor.load(str(finished.run.path), engine)
    again = place.run("optimisation.max_steps=1", "lr=1e-12", task=place.worth, model=str(finished.run.path))
    assert again.results["splits"]["dev"] == pytest.approx(finished.results["splits"]["worth/dev"], abs=1e-6)


def test_a_head_that_has_had_no_step_is_as_it_was_drawn(place: Place) -> None:
    """Weight decay and Adam's moments do not change it, either."""
    outcome = place.run("optimisation.max_steps=1", "optimisation.weight_decay=0.5")
    first = outcome.run.model
    drawn = {}
    plans = {"mood": (0, "sequence_classification", 2), "worth": (1, "sequence_classification", 1)}
    plans["tags"] = (2, "token_classification", 3)
    for name, (number, head, count) in plans.items():
        model, _ = load_model(place.model, heads=(head,), labels=Labels.unnamed(count))
        weight = f"{head}.output.weight"
        model.initialise(task_seed(0, number, name), only={weight})
        own, _ = load_model(first / name)
        drawn[name] = torch.equal(model.state_dict()[weight], own.state_dict()[weight])
    assert sorted(drawn.values()) == [False, True, True]


def test_twenty_steps_equal_a_plain_loop_of_transformers(place: Place) -> None:
    """Two classes of `transformers` on one encoder, torch's own AdamW over both, each batch with its own head."""
    transformers = pytest.importorskip("transformers")
    outcome = place.run(
        *("lr=3e-3", "optimisation.max_steps=20", "engine.log_every_steps=1"),
        task=[place.mood, place.worth],
        model=str(place.calm),
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(place.calm)
    models = [
        transformers.AutoModelForSequenceClassification.from_pretrained(place.calm, num_labels=count)
        for count in (2, 1)
    ]
    models[1].bert = models[0].bert
    for number, (model, name) in enumerate(zip(models, ("mood", "worth"), strict=True)):
        ours, _ = load_model(place.calm, heads=("sequence_classification",), labels=Labels.unnamed(2 - number))
        ours.initialise(task_seed(0, number, name), only={"sequence_classification.output.weight"})
        if number:  # a regression starts at the mean of its labels
            means = [worth(text) for text, _ in reviews(WORTHS + DEV, 2)[:WORTHS]]
            torch.nn.init.constant_(ours.get_parameter("sequence_classification.output.bias"), float(np.mean(means)))
        model.classifier.load_state_dict(ours.get_submodule("sequence_classification").output.state_dict())
    named = dict([pair for model in models for pair in model.train().named_parameters()][::-1])
    parameters = {id(p): (n, p) for model in models for n, p in model.named_parameters()}.values()
    assert len(list(parameters)) == len(named) + 2
    decayed = [p for n, p in parameters if "LayerNorm" not in n and not n.endswith("bias")]
    kept = [p for n, p in parameters if "LayerNorm" in n or n.endswith("bias")]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": kept, "weight_decay": 0.0}], lr=0.0, eps=1e-6
    )
    rows: list[list[tuple[str, Any]]] = [
        [(text, ("bad", "good").index(label)) for text, label in reviews(MOODS + DEV, 1)[:MOODS]],
        [(text, worth(text)) for text, _ in reviews(WORTHS + DEV, 2)[:WORTHS]],
    ]
    order = TaskOrder((EpochOrder(MOODS, 7, 0), EpochOrder(WORTHS, 7, task_seed(0, 1, "worth"))), seed=0)
    losses = []
    for step in range(20):
        task = order.task(step)
        batch = [rows[task][i] for i in order.items(step)]
        encoded = tokenizer([text for text, _ in batch], padding=True, return_tensors="pt")
        loss = models[task](**encoded, labels=torch.tensor([label for _, label in batch])).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for _, p in parameters if p.grad is not None], 1.0)
        rate = 3e-3 * ((step + 1) / 3 if step < 2 else (20 - step) / 18)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert {order.task(step) for step in range(20)} == {0, 1}
    lines = [json.loads(line) for line in outcome.run.metrics.read_text().splitlines()]
    np.testing.assert_allclose([line["loss"] for line in lines if "loss" in line], losses, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("step", [5, 33])
def test_a_stopped_run_ends_with_the_same_bytes(place: Place, finished: FinishedRun, step: int) -> None:
    run_dir = place.directory / f"stopped-{step}"
    with stopping_at(step), pytest.raises(StoppedError, match=rf"at step {step} "):
        place.run(run_dir=run_dir)
    resumed = finetune(FinetuneArguments(resume=str(run_dir)), progress=silent_progress)
    assert bytes_of(resumed.run.model) == bytes_of(finished.run.model)
    assert bytes_of(resumed.run.path / "predictions") == bytes_of(finished.run.path / "predictions")
    assert resumed.results == finished.results


@pytest.mark.parametrize("method", ["{name: lora, rank: 3}", "{name: frozen}"])
def test_methods_share_the_encoder_too(place: Place, method: str) -> None:
    from safetensors.torch import load_file

    outcome = place.run(f"method={method}", "optimisation.max_steps=6")
    before, after = (load_file(path / "model.safetensors") for path in (place.model, outcome.run.model))
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    layers = {name.rsplit(".", 2)[-2] for name in moved if ".encoder." in name}
    assert layers == ({"query", "value"} if "lora" in method else set())


def test_features_of_a_frozen_encoder_serve_all_tasks(place: Place) -> None:
    method = "method={name: features, layers: last, lstm_width: 9, lstm_layers: 1}"
    outcome = place.run(method, "optimisation.max_steps=6")
    readers = [load_model(outcome.run.model / name)[0].encoder.state_dict() for name in ("mood", "worth", "tags")]
    assert all(torch.equal(tensor, other[name]) for other in readers for name, tensor in readers[0].items())
    predictor = Predictor.load(str(outcome.run.model / "tags"), resolve_engine(EngineConfig(device="cpu")))
    assert predictor.kind == "tagging"


def test_a_suite_chooses_by_the_mean_over_the_tasks(place: Place) -> None:
    suite = place.run(task=[place.mood, place.worth], seeds=[0, 1], grid={"epochs": ["0.1", "4"]})
    assert suite.results["chosen"]["setting"] == {"epochs": "4"}
    assert suite.results["chosen"]["by"] == "mean mood accuracy and worth pearson on dev"
    assert suite.results["tasks"].keys() == {"mood", "worth"}
    assert len(suite.results["tasks"]["worth"]["pearson"]["seeds"]) == 2
    assert (suite.run.model / "worth" / "config.json").is_file()
    assert suite.results["runs"][0]["scores"].keys() == {"mood", "worth"}


def test_each_task_has_its_own_length_and_the_run_the_settings_of_mt_dnn() -> None:
    recipe = resolved(FinetuneRecipe(name="x", task=("rte", "squad"), model="m"))
    assert [each.data.max_length for each in recipe.alone] == [128, 384]
    assert [each.spec.name for each in recipe.alone] == ["rte", "squad"]
    assert [each.text is None for each in recipe.alone] == [False, True]
    optimisation = recipe.optimisation
    assert (optimisation.schedule.peak, optimisation.epochs, optimisation.batch_sequences) == (5e-5, 5, 32)
    assert changed(FinetuneRecipe(name="x"), parsed(["task=[rte]"])).task == "rte"
    with pytest.raises(UsageError, match="rte occurs in the list more than once"):
        changed(recipe, parsed(["task=[rte, squad, RTE]"]))
    with pytest.raises(UsageError, match="at least one task"):
        changed(recipe, parsed(["task=[]"]))
    with pytest.raises(UsageError, match="did you mean mrpc"):
        changed(recipe, parsed(["task=[rte, mrcp]"]))
    with pytest.raises(UsageError, match=r"choice: settings of another kind.*'span' and 'text'"):
        changed(recipe, parsed(["choice={}"]))


def test_the_command_line_takes_several_tasks(place: Place, bertkit: Bertkit, tmp_path: Path) -> None:
    for name in ("mood", "worth"):
        kind = "kind: regression\n" if name == "worth" else ""
        files = f"train: {name}-train.csv\ndev: {name}-dev.csv\n"
        text = f"name: {name}\n{kind}{files}columns: {{text: review, label: stars}}\n"
        (place.directory / f"{name}.yaml").write_text(text)
    tasks = [place.directory / f"{name}.yaml" for name in ("mood", "worth")]
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    run, other = tmp_path / "run", tmp_path / "other"
    common = ["--model", place.model, "--max-steps", "5", *settings]
    done = bertkit("finetune", "--task", f"{tasks[0]},{tasks[1]}", "--run-dir", run, *common, "--json")
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["results"]["tasks"].keys() == {"mood", "worth"}
    assert "pearson" in done.stderr
    assert bertkit("runs", "verify", run).code == 0
    again = bertkit("finetune", "--task", tasks[0], "--task", tasks[1], "--run-dir", other, *common)
    assert again.code == 0, again.stderr
    assert bytes_of(run / "model") == bytes_of(other / "model")
    planned = bertkit("finetune", run / "recipe.yaml", "--set", "optimisation.max_steps=null", "--plan", "--json")
    assert json.loads(planned.stdout)["steps"] == 4 * (7 + 5)

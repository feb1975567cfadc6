"""Fine-tuning from table to model equals `transformers` for any micro-batch, and is bit-identical after a stop."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertkit.errors import DataError, StoppedError, UsageError
from bertkit.files import sha256_of
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.plan import finetuning_plan
from bertkit.finetuning.recipe import CustomTask, FinetuneRecipe, changed
from bertkit.finetuning.run import finetune
from bertkit.finetuning.task_order import EpochOrder, TaskOrder
from bertkit.models.files.hub import find_model
from bertkit.models.labels import Labels
from bertkit.progress import silent_progress
from bertkit.tasks.readers import Columns
from bertkit.training.run import FinishedRun
from tests.overrides import parsed
from tests.tasks.tiny_task import BAD, GOOD, reviews, write_model, write_table
from tests.training.stopping import stopping_at

Bertkit = Callable[..., Any]
COLUMNS = Columns(text="review", label="stars")
SETTINGS = ("lr=6e-3", "epochs=5", "batch=7", "engine.device=cpu", "engine.precision=fp32", "engine.log_every_steps=2")
TRAIN, DEV = 45, 24


class Place:
    """A model, two tables, and a folder for runs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = write_model(directory / "base")
        self.calm = write_model(directory / "calm", dropout=0.0)
        self.train = write_table(directory / "train.csv", reviews(TRAIN, 1))
        self.dev = write_table(directory / "dev.csv", reviews(DEV, 2))

    def request(self, *overrides: str, **fields: Any) -> FinetuneArguments:
        task = CustomTask(train=str(self.train), dev=str(self.dev), columns=COLUMNS)
        # A single run is always trained; otherwise bits would be compared with themselves.
        alone = not {"seeds", "grid", "resume"} & fields.keys()
        given = {"task": task, "model": str(self.model), "runs_root": self.directory / "runs", "fresh": alone, **fields}
        return FinetuneArguments(overrides=parsed([*SETTINGS, *overrides]), **given)

    def run(self, *overrides: str, **fields: Any) -> FinishedRun:
        return finetune(self.request(*overrides, **fields), progress=silent_progress)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("finetune"))


@pytest.fixture(scope="module")
def finished(place: Place) -> FinishedRun:
    return place.run(run_dir=place.directory / "finished")


def weights(outcome: FinishedRun) -> str:
    return sha256_of(outcome.run.model / "model.safetensors")


def stopped(place: Place, step: int, *overrides: str, **fields: Any) -> None:
    with stopping_at(step), pytest.raises(StoppedError, match=rf"at step {step} .* finetune --resume"):
        place.run(*overrides, **fields)


def test_it_learns_what_the_words_say(finished: FinishedRun) -> None:
    results = finished.results
    assert results["splits"]["dev"]["accuracy"] > 0.9
    assert results["degenerate"] is None
    assert results["tasks"]["stars"]["accuracy"]["seeds"] == [results["splits"]["dev"]["accuracy"]]
    assert [each["epoch"] for each in results["evaluations"]] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert results["looks"] == results["evaluations"], "the key's name up to version 0.1"
    assert results["examples"] == {"train": TRAIN, "dev": DEV}
    assert finished.run.record["steps"] == 35
    lines = [json.loads(line) for line in finished.run.metrics.read_text().splitlines()]
    assert lines[-2]["loss"] < 0.5 * lines[0]["loss"]
    assert {"tokens", "lr", "loss", "grad_norm", "tokens_per_s", "mfu", "input_stall"} <= lines[0].keys()


def test_the_result_is_a_model_of_transformers_with_the_same_predictions(finished: FinishedRun) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(finished.run.model).eval()
    assert model.config.id2label == {0: "bad", 1: "good"}
    assert model.config.problem_type == "single_label_classification"
    tokenizer = transformers.AutoTokenizer.from_pretrained(finished.run.model)
    texts = [text for text, _ in reviews(DEV, 2)]
    with torch.no_grad():
        logits = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
    lines = (finished.run.path / "predictions" / "stars-dev.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    probabilities = [[line["scores"]["bad"], line["scores"]["good"]] for line in found]
    np.testing.assert_allclose(probabilities, torch.softmax(logits, -1).numpy(), atol=1e-5)
    assert [line["prediction"] for line in found] == [("bad", "good")[i] for i in logits.argmax(-1).tolist()]
    assert [line["id"] for line in found] == [str(number) for number in range(DEV)]


def test_twenty_steps_equal_a_plain_loop_of_transformers(place: Place) -> None:
    """The same batches and learning rates, torch's own AdamW on padded rows, no dropout."""
    transformers = pytest.importorskip("transformers")
    outcome = place.run(
        *("lr=3e-3", "optimisation.max_steps=20", "engine.log_every_steps=1"),
        model=str(place.calm),
        run_dir=place.directory / "twenty",
    )
    torch.manual_seed(0)
    ours = transformers.AutoModelForSequenceClassification.from_pretrained(outcome.run.model)
    oracle = transformers.AutoModelForSequenceClassification.from_pretrained(place.calm, num_labels=2)
    from bertkit.models.files.hub import load_model

    head, _ = load_model(place.calm, heads=("sequence_classification",), labels=Labels(("bad", "good")))
    head.initialise(0, only={name for name in head.state_dict() if name.startswith("sequence_classification.")})
    oracle.classifier.load_state_dict(head.get_submodule("sequence_classification").output.state_dict())
    tokenizer = transformers.AutoTokenizer.from_pretrained(place.calm)
    decayed = [p for n, p in oracle.named_parameters() if "LayerNorm" not in n and not n.endswith("bias")]
    kept = [p for n, p in oracle.named_parameters() if "LayerNorm" in n or n.endswith("bias")]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": kept, "weight_decay": 0.0}], lr=0.0, eps=1e-6
    )
    rows, order, losses = reviews(TRAIN, 1), EpochOrder(TRAIN, 7, seed=0), []
    for step in range(20):
        batch = [rows[i] for i in order.items(step)]
        encoded = tokenizer([text for text, _ in batch], padding=True, return_tensors="pt")
        loss = oracle.train()(**encoded, labels=torch.tensor([("bad", "good").index(label) for _, label in batch])).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(oracle.parameters(), 1.0)
        rate = 3e-3 * ((step + 1) / 3 if step < 2 else (20 - step) / 18)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    lines = [json.loads(line) for line in outcome.run.metrics.read_text().splitlines()]
    np.testing.assert_allclose([line["loss"] for line in lines if "loss" in line], losses, rtol=1e-5, atol=1e-5)
    dev = tokenizer([text for text, _ in reviews(DEV, 2)], padding=True, return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(**dev).logits, oracle.eval()(**dev).logits, rtol=1e-5, atol=1e-5)


def test_the_micro_batch_changes_nothing_but_rounding(place: Place) -> None:
    losses = []
    for tokens in (4096, 23):
        outcome = place.run(f"engine.micro_batch_tokens={tokens}", "epochs=1", model=str(place.calm))
        losses.append([json.loads(line).get("loss", 0.0) for line in outcome.run.metrics.read_text().splitlines()])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


def test_two_runs_write_the_same_bytes_and_a_seed_others(place: Place, finished: FinishedRun) -> None:
    assert weights(place.run()) == weights(finished)
    short = "optimisation.max_steps=3"
    assert weights(place.run(short, seeds=[5])) != weights(place.run(short, seeds=[6]))


@pytest.mark.parametrize("step", [3, 24])
def test_a_stopped_run_ends_with_the_same_bytes(place: Place, finished: FinishedRun, step: int) -> None:
    run_dir = place.directory / f"stopped-{step}"
    stopped(place, step, run_dir=run_dir)
    resumed = place.run(resume=str(run_dir))
    assert weights(resumed) == weights(finished)
    assert resumed.results == finished.results
    assert sha256_of(resumed.run.path / "predictions" / "stars-dev.jsonl") == sha256_of(
        finished.run.path / "predictions" / "stars-dev.jsonl"
    )
    assert not list(resumed.run.checkpoints.glob("*"))


def test_the_best_evaluation_survives_a_stop(place: Place) -> None:
    """With a patience of one evaluation, a learning rate that ruins the model stops the run early and restores earlier
    weights."""
    harmful = ("lr=0.03", "epochs=6", "optimisation.early_stopping=1", "optimisation.schedule=constant")
    straight = place.run(*harmful)
    results = straight.results
    assert results["selected"]["by"] == "best"
    assert results["selected"]["step"] == results["best"]["step"]
    assert results["splits"]["dev"]["accuracy"] == results["best"]["accuracy"]
    assert results["stopped_early"]
    assert (
        len(results["evaluations"])
        == 1 + [each["step"] for each in results["evaluations"]].index(results["best"]["step"]) + 1
    )
    run_dir = place.directory / "best-stopped"
    stopped(place, results["best"]["step"] + 2, *harmful, run_dir=run_dir)
    assert weights(finetune(FinetuneArguments(resume=str(run_dir)), progress=silent_progress)) == weights(straight)


def test_a_resume_that_decides_otherwise_is_refused(place: Place) -> None:
    run_dir = place.directory / "refused"
    stopped(place, 2, run_dir=run_dir)
    with pytest.raises(UsageError, match=r"optimisation\.schedule\.peak: the run has 0\.006, now 0\.001"):
        place.run("lr=1e-3", resume=str(run_dir))
    with pytest.raises(UsageError, match=r"optimisation\.steps: the run has null, now 100"):
        place.run("optimisation.steps=100", resume=str(run_dir))


def test_labels_of_a_checkpoint_are_matched_by_name(place: Place, finished: FinishedRun) -> None:
    """A model with its outputs in another order keeps that order and predicts correctly from the first step."""
    turned = write_model(place.directory / "turned", heads=("sequence_classification",), labels=Labels(("Good", "Bad")))
    outcome = place.run("optimisation.max_steps=1", model=str(turned))
    config = json.loads((outcome.run.model / "config.json").read_text())
    assert config["id2label"] == {"0": "good", "1": "bad"}
    again = place.run("optimisation.max_steps=1", "lr=1e-12", model=str(finished.run.path))
    assert again.results["splits"]["dev"] == finished.results["splits"]["dev"]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (Labels.unnamed(2), "does not name the labels"),
        (Labels.unnamed(1, "regression"), "its head is a regression.*none of the labels bad, good"),
        (Labels(("yes", "no")), "labels are yes, no, not bad, good"),
        (Labels(("bad",)), "labels are bad, not bad, good"),
    ],
)
def test_labels_that_cannot_be_matched_are_refused(place: Place, labels: Labels, message: str, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", heads=("sequence_classification",), labels=labels)
    with pytest.raises(DataError, match=message) as caught:
        place.run(model=str(other))
    assert "--new-head" in str(caught.value)
    assert place.run("new_head=true", "optimisation.max_steps=1", model=str(other)).results["splits"]["dev"]


def test_what_no_recipe_names_is_named_after_its_tasks_and_its_model(place: Place) -> None:
    def name(*overrides: str, **fields: Any) -> str:
        return place.request(*overrides, **fields).requested().name

    assert name() == "stars-base"
    assert name("task.name=mood") == "mood-base"
    assert name(f"model={place.calm}") == "stars-calm"
    assert name(task=["mrpc", "rte"]) == "mrpc+rte-base"
    assert name("name=first-try") == "first-try"
    assert name(task="mrpc", model=None, default_model="someone/tiny") == "mrpc-tiny"


def test_a_label_of_dev_that_train_lacks_is_refused(place: Place, tmp_path: Path) -> None:
    dev = write_table(tmp_path / "dev.csv", [*reviews(3, 2), ("the cat", "awful")])
    task = CustomTask(train=str(place.train), dev=str(dev), columns=COLUMNS)
    with pytest.raises(DataError, match=r"'awful'.*train has 'bad', 'good'"):
        place.run(task=task)


def test_seeds_are_summarised_and_not_repeated(place: Place, finished: FinishedRun) -> None:
    suite = place.run(seeds=[0, 1, 2], run_dir=place.directory / "runs" / "seeds")
    summary = suite.results["tasks"]["stars"]["accuracy"]
    scores = [run.results["splits"]["dev"]["accuracy"] for run in suite.runs if run.results]
    assert summary["seeds"] == scores
    assert summary["mean"] == pytest.approx(np.mean(scores))
    assert summary["std"] == pytest.approx(np.std(scores, ddof=1))
    assert summary["median"] == pytest.approx(np.median(scores))
    assert len({weights(FinishedRun(run, {}, ())) for run in suite.runs}) == 3
    assert sha256_of(suite.run.model / "model.safetensors") in {weights(FinishedRun(run, {}, ())) for run in suite.runs}
    more = place.run(seeds=[1, 3])
    assert more.runs[0].path == suite.runs[1].path
    assert more.runs[1].path.is_relative_to(more.run.path)


def test_a_grid_is_chosen_from_on_dev_and_the_choice_recorded(place: Place) -> None:
    grid = {"lr": ["1e-9", "6e-3"], "epochs": ["1", "5"]}
    run_dir = place.directory / "runs" / "grid"
    stopped(place, 3, grid=grid, run_dir=run_dir)
    suite = finetune(
        FinetuneArguments(resume=str(run_dir), runs_root=place.directory / "runs"), progress=silent_progress
    )
    assert len(suite.runs) == 4
    chosen = suite.results["chosen"]
    assert chosen["setting"] == {"lr": "6e-3", "epochs": "5"}
    best = max(each["scores"]["accuracy"]["mean"] for each in suite.results["settings"])
    assert suite.results["tasks"]["stars"]["accuracy"]["mean"] == best
    assert Path(chosen["run"]).is_dir()
    assert suite.results["degenerate"] >= 1
    with pytest.raises(UsageError, match=r"--grid lr=fast: optimisation\.schedule\.peak: expected a number"):
        place.run(grid={"lr": ["fast"]})
    with pytest.raises(UsageError, match=r"--grid seed=1,2: .* give them with --seeds"):
        place.run(grid={"seed": ["1", "2"]})


@pytest.mark.parametrize("method", ["{name: frozen}", "{name: gradual}", "{name: lora, rank: 3}"])
def test_a_method_trains_its_parameters_alone(
    place: Place, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And LoRA's updates, as an adapter, give the trained model."""
    from safetensors.torch import load_file

    outcome = place.run(f"method={method}", "optimisation.max_steps=8")
    before = load_file(place.model / "model.safetensors")
    after = load_file(outcome.run.model / "model.safetensors")
    changed_names = {name for name in before.keys() & after.keys() if not torch.equal(before[name], after[name])}
    encoder = {name for name in changed_names if ".encoder." in name or ".embeddings." in name}
    assert {"bert.pooler.dense.weight"} <= changed_names
    head = {"classifier.weight", "classifier.bias"}
    assert set(after) == {name for name in before if name.startswith("bert.")} | head
    if "frozen" in method:
        assert not encoder
    elif "gradual" in method:
        assert encoder
        assert all(".layer.1." in name for name in encoder)
    else:
        assert {name.rsplit(".", 2)[-2] for name in encoder} == {"query", "value"}
        assert all(torch.linalg.matrix_rank(after[name] - before[name], atol=1e-5) <= 3 for name in encoder)
        monkeypatch.setenv("BERTKIT_CACHE", str(tmp_path / "cache"))
        merged = load_file(find_model(str(outcome.run.model / "adapter")) / "model.safetensors")
        assert all(torch.equal(merged[name], tensor) for name, tensor in after.items())
    assert (outcome.run.model / "adapter").exists() == ("lora" in method)
    memory = [finetuning_plan(place.request(each))["memory_mb"] for each in (f"method={method}", "method={name: full}")]
    assert memory[0] < memory[1] or "gradual" in method, "what is never trained has no gradients and moments"


def test_the_rate_decays_from_layer_to_layer(place: Place) -> None:
    """With plain Adam steps the first update of a weight is its learning rate, so the updates show the rates."""
    from safetensors.torch import load_file

    outcome = place.run(
        "optimisation.max_steps=1", "layer_decay=0.5", "optimisation.weight_decay=0", "optimisation.warmup_share=0"
    )
    before = load_file(place.model / "model.safetensors")
    after = load_file(outcome.run.model / "model.safetensors")

    def moved(name: str) -> float:
        return float((before[name] - after[name]).abs().max())

    expected = {
        "bert.pooler.dense.weight": 6e-3,
        "bert.encoder.layer.1.output.dense.weight": 3e-3,
        "bert.encoder.layer.0.output.dense.weight": 1.5e-3,
        "bert.embeddings.word_embeddings.weight": 0.75e-3,
    }
    assert {name: moved(name) for name in expected} == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("method", "part"), [("full", "layers.1"), ("lora", "*.down_RD"), ("features, layers: last", "lstm")]
)
def test_a_plan_refuses_the_groups_that_a_run_refuses(place: Place, method: str, part: str) -> None:
    groups = "optimisation.groups=[{{parameters: ['{}', companions.loss], rate: 0.5}}, {{parameters: {}, rate: 0.1}}]"
    finetuning_plan(place.request(f"method={{name: {method}}}", groups.format(part, "sequence_classification")))
    with pytest.raises(UsageError, match=r"groups\.1\.parameters: the model has no parameter or part called 'layer'"):
        finetuning_plan(place.request(f"method={{name: {method}}}", groups.format(part, "layer")))


def test_groups_are_multiplied_onto_the_decay_and_freeze(place: Place) -> None:
    from safetensors.torch import load_file

    outcome = place.run(
        "optimisation.steps=1",
        "layer_decay=0.5",
        "optimisation.optimizer.weight_decay=0.5",
        "optimisation.schedule.warmup_share=0",
        "optimisation.groups=[{parameters: embeddings, rate: 0}, {parameters: layers.0, rate: 0.1}]",
    )
    before = load_file(place.model / "model.safetensors")
    after = load_file(outcome.run.model / "model.safetensors")
    for name in before:
        if name.startswith("bert.embeddings."):
            assert torch.equal(before[name], after[name]), name
    bias = "bert.encoder.layer.0.output.dense.bias"  # no weight decay
    assert float((after[bias] - before[bias]).abs().max()) == pytest.approx(6e-3 * 0.25 * 0.1, rel=0.02)


def other_kind(place: Place, directory: Path, kind: str) -> CustomTask:
    """A user's own files of a kind that is not read from a table of texts; the label follows from the words."""
    rows = reviews(TRAIN + DEV, 3)
    if kind == "tagging":
        lines = [
            {"words": text.split(), "tags": ["B-X" if w in GOOD else "O" for w in text.split()]} for text, _ in rows
        ]
        files = [("".join(f"{json.dumps(line)}\n" for line in part)) for part in (lines[:TRAIN], lines[TRAIN:])]
    elif kind == "choice":
        lines = [{"text": "the cat", "endings": [" ".join(GOOD), " ".join(BAD)], "label": i % 2} for i in range(TRAIN)]
        for line in lines:
            line["endings"] = line["endings"][:: 1 if line["label"] else -1]
        files = ["".join(f"{json.dumps(line)}\n" for line in part) for part in (lines[:-DEV], lines[-DEV:])]
    else:
        files = [json.dumps(squad_of(part)) for part in (rows[:TRAIN], rows[TRAIN:])]
    ending = "json" if kind == "span" else "jsonl"
    paths = [directory / f"{kind}-{split}.{ending}" for split in ("train", "dev")]
    for path, text in zip(paths, files, strict=True):
        path.write_text(text, encoding="utf-8")
    columns = Columns(text="words", label="tags") if kind == "tagging" else Columns()
    return CustomTask(kind=kind, train=str(paths[0]), dev=str(paths[1]), columns=columns)


def squad_of(rows: list[tuple[str, str]]) -> dict[str, Any]:
    """The question is which word shows sentiment; it has no answer for negative words."""
    paragraphs = []
    for number, (context, label) in enumerate(rows):
        mood = next(word for word in context.split() if word in GOOD + BAD)
        answers = [{"text": mood, "answer_start": context.index(mood)}] if label == "good" else []
        asked = {"id": str(number), "question": "what is it ?", "answers": answers, "is_impossible": not answers}
        paragraphs.append({"context": context, "qas": [asked]})
    return {"version": "v2.0", "data": [{"title": "x", "paragraphs": paragraphs}]}


@pytest.mark.parametrize(
    ("kind", "architecture", "primary"),
    [
        ("tagging", "BertForTokenClassification", "f1"),
        ("span", "BertForQuestionAnswering", "f1"),
        ("choice", "BertForMultipleChoice", "accuracy"),
    ],
)
def test_every_kind_learns_and_writes_a_model_that_predicts_the_same_again(
    place: Place, tmp_path: Path, kind: str, architecture: str, primary: str
) -> None:
    extra = ["span.max_query_tokens=8", "data.max_length=32"] if kind == "span" else []
    task = other_kind(place, tmp_path, kind)
    outcome = place.run("epochs=10", *extra, task=task)
    scores = outcome.results["splits"]["dev"]
    assert scores[primary] > 0.8
    config = json.loads((outcome.run.model / "config.json").read_text())
    assert config["architectures"] == [architecture]
    assert ("null_score_threshold" in config) == (kind == "span")
    again = place.run("optimisation.max_steps=1", "lr=1e-12", *extra, task=task, model=str(outcome.run.path))
    assert again.results["splits"]["dev"] == scores
    name = f"{kind}-dev.jsonl"
    lines = [json.loads(line) for line in (again.run.path / "predictions" / name).read_text().splitlines()]
    assert len(lines) == DEV
    assert {"id", "prediction"} <= lines[0].keys()


def test_an_epoch_takes_every_example_once_and_another_order_next_time() -> None:
    order = EpochOrder(23, 7, seed=4)
    assert order.steps_per_epoch == 4
    epochs = [np.concatenate([order.items(4 * epoch + step) for step in range(4)]).tolist() for epoch in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(23))] * 2
    assert epochs[0] != epochs[1]
    alone = TaskOrder((order,), seed=4)
    assert alone.steps(2.5, None) == 10
    assert alone.steps(2.5, 3) == 3


def test_errors_of_a_recipe_are_all_reported_at_once() -> None:
    recipe = FinetuneRecipe(name="x", task="mrpc")
    with pytest.raises(UsageError, match=r"(?s)schedule\.peak.*epochs") as caught:
        changed(recipe, parsed(["lr=-1", "epochs=none"]))
    assert "did you mean" not in str(caught.value)
    with pytest.raises(UsageError, match="mrpc"):
        changed(recipe, parsed(["task=mrcp"]))


def test_the_command_line_gives_the_document_of_the_contract(place: Place, bertkit: Bertkit, tmp_path: Path) -> None:
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    data = ["--train", place.train, "--dev", place.dev, "--text", "review", "--label", "stars"]
    run = tmp_path / "run"
    done = bertkit("finetune", *data, "--model", place.model, "--run-dir", run, "--max-steps", "4", *settings, "--json")
    assert done.code == 0, done.stderr
    document = json.loads(done.stdout)
    assert {key: document[key] for key in ("run", "status", "steps")} == {
        "run": str(run),
        "status": "done",
        "steps": 4,
    }
    assert document["results"]["splits"]["dev"].keys() == {"accuracy", "macro_f1"}
    assert "accuracy" in done.stderr
    again = bertkit("finetune", run / "recipe.yaml", "--run-dir", tmp_path / "again")
    assert again.stdout.splitlines()[-1] == str(tmp_path / "again")
    assert (run / "model" / "model.safetensors").read_bytes() == (
        tmp_path / "again" / "model" / "model.safetensors"
    ).read_bytes()
    planned = bertkit("finetune", run / "recipe.yaml", "--seeds", "0-2", "--plan", "--json")
    assert json.loads(planned.stdout)["steps"] == 12
    assert bertkit("runs", "verify", run).code == 0
    assert bertkit("runs", "replay", run).code == 0


def test_a_task_in_yaml_names_files_beside_it(place: Place, tmp_path: Path) -> None:
    task = place.directory / "stars.yaml"
    task.write_text("train: train.csv\ndev: dev.csv\ntest: dev.csv\ncolumns: {text: review, label: stars}\n")
    outcome = place.run('data.predict=["test"]', "optimisation.max_steps=2", task=str(task))
    assert outcome.results["tasks"].keys() == {"stars"}
    assert outcome.results["splits"].keys() == {"dev", "test"}
    files = [path.name for path in sorted((outcome.run.path / "predictions").iterdir())]
    assert files == ["stars-dev.jsonl", "stars-test.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ([], "give a RECIPE, --task TASK"),
        (["--task", "ax"], "ax cannot be fine-tuned on"),
        (["--task", "mrcp"], "did you mean mrpc"),
        (["--text", "review"], "--text: works only with --train FILE"),
        (["--task", "mrpc", "--seeds", "4-0"], "--seeds 4-0"),
        (["--task", "mrpc", "--grid", "lr"], "--grid lr: expected KEY=VALUE"),
        (["--train", "t.csv"], "give --dev FILE too"),
        (["--task", "mrpc", "--method", "setfi"], '--method setfi: method.name: unknown name "setfi"; did you mean'),
    ],
)
def test_wrong_usage_is_reported_without_a_traceback(bertkit: Bertkit, arguments: list[str], messages: str) -> None:
    done = bertkit("finetune", *arguments)
    assert done.code == 2
    assert messages in done.stderr
    assert not done.stdout

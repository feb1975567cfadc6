"""Fine-tuning of pruned models: the probes' ranking, permanent zeros, identical bytes after a stop."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertkit.compression import pruning as method
from bertkit.compression.head_importance import (
    Heads,
    Measure,
    head_importance,
    least_important_first,
    normalised_by_layer,
)
from bertkit.compression.pruning import RECORD, Pruned
from bertkit.compression.pruning_order import TrainingLoss, heads_to_prune
from bertkit.errors import UsageError
from bertkit.evaluation.run import MeasurementArguments
from bertkit.files import sha256_of
from bertkit.finetuning.data import prepare
from bertkit.finetuning.task_trainer import TaskTrainer
from bertkit.inference.predict import Predictor
from bertkit.models.conversion.pruning import keep_layers, prunable_maps, pruned_heads, sparsity
from bertkit.models.files.hub import load_model
from bertkit.models.headed import HeadedModel
from bertkit.probing.heads.measure import TaskScore
from bertkit.run.verify import verify_run
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.examples import TextExample
from bertkit.training.config import EngineConfig
from bertkit.training.engine import resolve_engine
from bertkit.training.method import RunResources, TrainingData
from bertkit.training.run import FinishedRun
from tests.finetuning.test_finetune import DEV, TRAIN, Place, stopped, weights
from tests.finetuning.test_multitask import MOODS
from tests.finetuning.test_multitask import Place as Tasks
from tests.tasks.tiny_task import reviews

Bertkit = Callable[..., Any]
BOTH = "method={name: pruned, heads: 0.34, magnitude: 0.45, magnitude_every_steps: 3}"
A_HEAD = 3 * 10 * 31 + 10 * 30
"""Parameters of one of three heads of a model of width 30."""
ENGINE = resolve_engine(EngineConfig(device="cpu", precision="fp32"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("pruned"))


@pytest.fixture(scope="module")
def finished(place: Place) -> FinishedRun:
    return place.run(BOTH, run_dir=place.directory / "finished")


@pytest.fixture
def task_trainer(place: Place) -> TaskTrainer:
    recipe = place.request().requested()
    return TaskTrainer(recipe, prepare(recipe), seed=0)


def data_of(task_trainer: TaskTrainer, directory: Path | None = None) -> TrainingData:
    return TrainingData(task_trainer.task, task_trainer.prepared.train.features, ENGINE, directory)


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def importance(measure: Measure) -> np.ndarray[Any, Any]:
    return head_importance(measure, Heads.of(measure.model))


def test_importance_is_that_of_the_probes_on_the_same_examples(task_trainer: TaskTrainer) -> None:
    prepared = task_trainer.prepared
    ours = TrainingLoss(task_trainer.model, data_of(task_trainer), np.arange(TRAIN))
    theirs = TaskScore(
        task_trainer.model,
        task_trainer.task,
        SequenceEncoder(prepared.tokenizer, max_tokens=40, token_types=True),
        prepared.train.examples,
        MeasurementArguments(device="cpu", batch_tokens=64).engine(),
        metric="accuracy",
        tuned={},
    )
    found, wanted = importance(ours), importance(theirs)
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    order = least_important_first(normalised_by_layer(wanted)).tolist()
    model = Pruned(heads=2).prepare(task_trainer.model, 0, data_of(task_trainer))
    gone = [3 * layer + head for layer, heads in pruned_heads(model.encoder).items() for head in heads]
    assert sorted(gone) == sorted(order[:2])
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_the_best_head_of_a_layer_is_kept_whatever_the_others_importance() -> None:
    importance_LN = np.asarray([[0.1, 0.2, 0.3, 0.0], [0.9, 0.8, 0.7, 0.6]])
    present_LN = np.ones((2, 4))
    assert heads_to_prune(importance_LN, present_LN, 3) == {0: [0, 1, 3]}
    assert heads_to_prune(importance_LN, present_LN, 4) == {0: [0, 1, 3], 1: [3]}
    present_LN[0, [0, 3]] = 0
    assert heads_to_prune(importance_LN, present_LN, 2) == {0: [1], 1: [3]}


def test_results_name_the_removed_heads_and_the_model_lacks_them(finished: FinishedRun, place: Place) -> None:
    results = finished.results
    found = results["pruned"]
    assert found == json.loads((finished.run.path / RECORD).read_text()) | {"magnitude": found["magnitude"]}
    gone = sum(map(len, found["heads"].values()))
    assert gone == round(0.34 * 6) == 2
    assert found["parameters_before"] - found["parameters"] == gone * A_HEAD
    assert np.shape(found["importance"]) == (2, 3)
    assert found["examples"] == TRAIN
    assert found["layers_kept"] == [0, 1]
    model, report = load_model(finished.run.model)
    assert not [*report.missing, *report.unexpected]
    assert sum(parameter.numel() for parameter in model.parameters()) == found["parameters"]
    assert {str(layer): list(heads) for layer, heads in pruned_heads(model.encoder).items()} == found["heads"]
    zeros, of = sparsity(model)
    assert (zeros, of) == (found["magnitude"]["zeros"], found["magnitude"]["of"])
    for name, part in prunable_maps(model).items():
        assert int((part.weight == 0).sum()) == round(0.45 * part.weight.numel()), name
    assert results["splits"]["dev"]["accuracy"] > 0.6
    assert not verify_run(finished.run.path).errors


def test_its_model_is_read_again_and_predicts_the_same(finished: FinishedRun) -> None:
    predictor = Predictor.load(str(finished.run.path), ENGINE)
    examples = [TextExample(str(i), text, None, None) for i, (text, _) in enumerate(reviews(DEV, 2))]
    predicted = json_lines(finished.run.path / "predictions" / "stars-dev.jsonl")
    assert [each.prediction for each in predictor(examples)] == [each["prediction"] for each in predicted]


@pytest.mark.parametrize("step", [2, 24])
def test_a_stopped_run_ends_with_the_same_bytes_and_measures_no_second_time(
    place: Place, finished: FinishedRun, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    run_dir = place.directory / f"stopped-{step}"
    stopped(place, step, BOTH, run_dir=run_dir)
    with monkeypatch.context() as patch:
        patch.delattr(method, "head_importance")
        resumed = place.run(BOTH, resume=str(run_dir))
    assert weights(resumed) == weights(finished)
    assert resumed.results == finished.results
    assert sha256_of(run_dir / RECORD) == sha256_of(finished.run.path / RECORD)


def test_a_pruned_model_is_pruned_further_and_heads_keep_their_numbers(place: Place, finished: FinishedRun) -> None:
    again = place.run("method={name: pruned, heads: 1}", "optimisation.max_steps=1", model=str(finished.run.path))
    before, after = (load_model(run.run.model)[0].encoder for run in (finished, again))
    gone, now = ({(n, h) for n, hs in pruned_heads(each).items() for h in hs} for each in (before, after))
    assert gone < now
    assert len(now) == 3
    assert again.results["pruned"]["heads_gone_before"] == 2
    assert again.results["pruned"]["parameters_before"] - again.results["pruned"]["parameters"] == A_HEAD


def test_its_model_is_trained_further_by_another_method(place: Place, finished: FinishedRun) -> None:
    again = place.run("optimisation.max_steps=1", model=str(finished.run.path))
    encoders = [load_model(each.run.model)[0].encoder for each in (finished, again)]
    assert pruned_heads(encoders[0]) == pruned_heads(encoders[1]) != {}


def test_several_tasks_lack_the_same_heads(tmp_path: Path) -> None:
    tasks = Tasks(tmp_path)
    outcome = tasks.run("method={name: pruned, heads: 2}", "optimisation.max_steps=3")
    found = outcome.results["pruned"]
    assert found["examples"] == MOODS, "importance is measured on the first task"
    lacked = [pruned_heads(load_model(outcome.run.model / name)[0].encoder) for name in ("mood", "worth", "tags")]
    assert lacked[0] == lacked[1] == lacked[2]
    assert sum(map(len, lacked[0].values())) == 2


@torch.no_grad()
def test_layers_are_those_of_the_model_that_it_starts_from(
    task_trainer: TaskTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = keep_layers(task_trainer.model, [1]).state_dict()
    with caplog.at_level(logging.INFO):
        found = Pruned(layers="last", keep=1).prepare(task_trainer.model, seed=0)
    assert found.state_dict().keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.state_dict().items())
    assert "layers removed: 0; kept: 1" in caplog.text
    halved = Pruned(layers="first").prepare(task_trainer.model, seed=0)
    assert halved.encoder.config.num_hidden_layers == 1  # type: ignore[attr-defined]  # BERT's


def test_heads_have_the_numbers_of_the_layers_before_any_is_taken_out(task_trainer: TaskTrainer) -> None:
    chosen = Pruned(layers=(1,), heads={1: (2,)}).prepare(task_trainer.model, seed=0)
    assert pruned_heads(chosen.encoder) == {0: (2,)}
    with pytest.raises(UsageError, match=r"method\.heads: layer 0 does not exist; the layers are 1"):
        Pruned(layers=(1,), heads={0: (2,)}).prepare(task_trainer.model, seed=0)


def test_zeros_stay_zeros_however_the_optimiser_moves(task_trainer: TaskTrainer, tmp_path: Path) -> None:
    """Earlier momentum would move a weight that has become 0; its gradient is 0 from then on."""
    settings = Pruned(magnitude=0.5, magnitude_ramp=1.0, magnitude_every_steps=2)
    model = settings.prepare(task_trainer.model, 0, data_of(task_trainer))
    maps = prunable_maps(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    batch = task_trainer.prepared.train.features.batch(np.arange(7))
    seen: list[int] = []
    gone = {name: torch.zeros_like(part.weight, dtype=torch.bool) for name, part in maps.items()}
    with settings.session(model, [], RunResources(ENGINE, tmp_path, 0.0)):
        for step in range(1, 7):
            optimizer.zero_grad()
            hidden_TD = model.states(task_trainer.task.head, batch.packed)
            task_trainer.task.loss(model, hidden_TD, batch).sum.backward()
            for name, part in maps.items():
                assert part.weight.grad is not None
                assert not part.weight.grad[gone[name]].any(), name
            optimizer.step()
            settings.after_update(model, step, 6)
            for name, part in maps.items():
                assert not part.weight[gone[name]].any(), name
                gone[name] = part.weight == 0
            seen.append(sparsity(model)[0])
    shares = [0.0, 0.5 * (1 - (2 / 3) ** 3), 0.5 * (1 - (2 / 3) ** 3), 0.5 * (1 - (1 / 3) ** 3)]
    counts = [sum(round(share * part.weight.numel()) for part in maps.values()) for share in shares]
    assert seen[:4] == counts
    assert seen[4] == seen[3] < seen[5] == sum(round(0.5 * part.weight.numel()) for part in maps.values())
    assert not any("kept" in name for name, _ in model.named_buffers())


def test_zeros_that_are_there_at_once_stay_where_they_are(place: Place) -> None:
    at_once = "method={name: pruned, magnitude: 0.6, magnitude_ramp: 0.0}"
    outcome = place.run(at_once, "optimisation.max_steps=4")
    before, after = (load_model(path, heads=())[0] for path in (place.model, outcome.run.model))
    for (name, old), new in zip(prunable_maps(before).items(), prunable_maps(after).values(), strict=True):
        smallest = old.weight.abs().flatten().argsort()[: round(0.6 * old.weight.numel())]
        assert not new.weight.flatten()[smallest].any(), name
        assert int((new.weight == 0).sum()) == smallest.numel(), name
    assert outcome.results["pruned"]["magnitude"]["share"] == pytest.approx(0.6, abs=1e-3)


@pytest.mark.parametrize("ramp", [0.0, 0.5])
def test_the_growing_share_of_zeros_is_logged(
    task_trainer: TaskTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture, ramp: float
) -> None:
    settings = Pruned(magnitude=0.5, magnitude_ramp=ramp, magnitude_every_steps=1 if ramp else 10)
    model = task_trainer.model
    with (
        caplog.at_level(logging.INFO, method.__name__),
        settings.session(model, [], RunResources(ENGINE, tmp_path, 0.0)),
    ):
        for step in range(1, 81):
            settings.after_update(model, step, 80)
    zeros, weights = sparsity(model)
    updates = [int(line.split()[1][:-1]) for line in caplog.messages]
    assert updates == [0] if ramp == 0 else 5 < len(updates) <= 10 and updates[-1] == 40
    assert caplog.messages[-1] == (
        f"update {updates[-1]}: 50.0% of the weights of 12 linear maps are 0: {zeros:,} of {weights:,}"
    )


def test_a_best_evaluation_before_the_share_had_grown_is_logged(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    grows = "method={name: pruned, magnitude: 0.9, magnitude_ramp: 1.0}"
    outcome = place.run(grows, "epochs=4", "optimisation.select=best", "optimisation.early_stopping=4")
    warned = "the best evaluation was before the share had fully grown" in caplog.text
    share = outcome.results["pruned"]["magnitude"]["share"]
    assert warned == (share < 0.899)
    assert outcome.results["selected"]["step"] == 28 or warned


def test_fewer_examples_are_drawn_by_the_seed(task_trainer: TaskTrainer) -> None:
    settings = Pruned(heads=1, examples=9)
    first, again, other = (settings._items(TRAIN, seed).tolist() for seed in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) == 9
    assert settings._items(5, 1).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ("{name: pruned}", "nothing is pruned; give heads, layers or magnitude"),
        ("{name: pruned, heads: 1.5}", "a share is above 0 and below 1"),
        ("{name: pruned, heads: 0}", "expected at least one head"),
        ("{name: pruned, heads: 5}", "method.heads: 5 of 6 heads are 5; each of 2 layers keeps one, so at most 4"),
        ("{name: pruned, heads: 0.9}", "method.heads: 0.9 of 6 heads are 5"),
        ("{name: pruned, heads: {0: [0, 1, 2]}}", "layer 0 would have none of its 3 heads left"),
        ("{name: pruned, heads: {0: [7]}}", "method.heads: layer 0 has no head 7"),
        ("{name: pruned, heads: {4: [0]}}", "method.heads: layer 4 does not exist; the layers are 0, 1"),
        ("{name: pruned, layers: [0, 2]}", "method.layers"),
        (
            "{name: pruned, layers: [1, 0]}",
            "method.layers: [1, 0] of 2; expected numbers from 0 to 1 in ascending order",
        ),
        ("{name: pruned, layers: frist, keep: 1}", "'first', 'last', 'uniform' or 'skip'"),
        ("{name: pruned, layers: last, keep: 3}", "from 1 to 2, found 3"),
        ("{name: pruned, layers: [0], keep: 1}", "keep works only with"),
        ("{name: pruned, magnitude: 1.0}", "less than 1"),
    ],
)
def test_what_cannot_be_removed_is_refused_with_exit_code_2(
    bertkit: Bertkit, place: Place, tmp_path: Path, settings: str, warned: str
) -> None:
    data = ("--train", place.train, "--dev", place.dev, "--text", "review", "--label", "stars")
    words = ["finetune", *data, "--model", place.model, "--max-steps", "1", "--set", f"method={settings}"]
    for more in (("--plan",), ("--run-dir", tmp_path / "run")):
        done = bertkit(*words, *more)
        assert done.code == 2, done.stderr
        assert warned in " ".join(done.stderr.split())


def test_zeros_of_an_average_are_refused_and_that_of_removed_heads_is_not(place: Place) -> None:
    place.request("method={name: pruned, heads: 2}", "optimisation.ema=0.9").requested()
    with pytest.raises(UsageError, match=r"method: pruned sets weights to 0 .*; leave optimisation\.ema out"):
        place.request("method={name: pruned, magnitude: 0.4}", "optimisation.ema=0.9").requested()


def test_importance_without_data_is_refused(task_trainer: TaskTrainer) -> None:
    model: HeadedModel = task_trainer.model
    with pytest.raises(UsageError, match="importance needs training examples"):
        Pruned(heads=0.5).prepare(model, seed=0)

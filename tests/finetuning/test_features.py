"""Runs on features of a frozen encoder, and on perturbed words: trained parts, cached features, resuming, reloading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bertkit.errors import StoppedError, UsageError
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.plan import finetuning_plan
from bertkit.finetuning.run import finetune
from bertkit.inference.predict import Predictor
from bertkit.models.families.bert import BertStack
from bertkit.models.feature_lstm import FeatureLstm
from bertkit.models.files.hub import load_model
from bertkit.progress import silent_progress
from bertkit.tasks.examples import TaggedExample
from bertkit.training.config import EngineConfig
from bertkit.training.engine import resolve_engine
from bertkit.training.run import FinishedRun
from tests.finetuning.test_finetune import DEV, Place, other_kind, weights
from tests.training.stopping import stopping_at

FEATURES = "method={name: features, layers: weighted-sum-all, lstm_width: 11, dropout: 0.0}"
SETTINGS = ("lr=3e-2", "epochs=8")
FREELB = "method={name: freelb, step_size: 0.01, epsilon: 0.03}"
"""A ball much smaller than the word vectors, because the label depends on one word."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("features"))


@pytest.fixture(scope="module")
def tagged(place: Place) -> FinishedRun:
    """A tagger on features."""
    task = other_kind(place, place.directory, "tagging")
    return place.run(FEATURES, *SETTINGS, task=task, run_dir=place.directory / "tagged")


def encoder_weights(model: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    found = load_file(model / "model.safetensors")
    skipped = ("pooler", "cls.")
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in found.items()
        if name.startswith(f"{prefix}bert.") and not any(part in name for part in skipped)
    }


def dev_probabilities(outcome: FinishedRun) -> list[list[float]]:
    lines = json_lines(outcome.run.path / "predictions" / "stars-dev.jsonl")
    return [list(line["scores"].values()) for line in lines]


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_tagger_learns_on_features_and_the_encoder_stays_as_it_is_to_the_bit(
    place: Place, tagged: FinishedRun
) -> None:
    assert tagged.results["splits"]["dev"]["f1"] > 0.8
    before, after = encoder_weights(place.model), encoder_weights(tagged.run.model, "features.")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    mix = load_file(tagged.run.model / "model.safetensors")["features.mix.weight"]
    assert mix.abs().max() > 0, "the weights of the layers are trained"


def test_a_plan_counts_the_lstm_and_the_encoders_one_pass(place: Place, tagged: FinishedRun) -> None:
    task = other_kind(place, place.directory, "tagging")
    kept, unkept = (
        finetuning_plan(place.request(FEATURES, *SETTINGS, f"engine.feature_store_gb={limit}", task=task))
        for limit in (1, 0)
    )
    assert kept["parameters"]["total"] == sum(each.numel() for each in load_model(tagged.run.model)[0].parameters())
    once = kept["flops"] - tagged.run.record["flops"]
    assert unkept["flops"] - tagged.run.record["flops"] == pytest.approx(8 * once)
    plain = finetuning_plan(place.request(*SETTINGS, task=task))
    assert once == pytest.approx(plain["flops"] / 8 / 3, rel=0.02), "but for the head"


def test_its_model_is_read_again_and_predicts_the_same(tagged: FinishedRun) -> None:
    config = json.loads((tagged.run.model / "config.json").read_text())
    assert config["model_type"] == "feature-lstm"
    assert config["architectures"] == ["FeatureLstmForTokenClassification"]
    assert config["base"]["model_type"] == "bert"
    model, report = load_model(tagged.run.model)
    assert isinstance(model.encoder, FeatureLstm)
    assert not report.newly_initialised
    predictor = Predictor.load(str(tagged.run.path), resolve_engine(EngineConfig(device="cpu", precision="fp32")))
    predicted = json_lines(tagged.run.path / "predictions" / "tagging-dev.jsonl")
    dev = json_lines(tagged.run.path.parent / "tagging-dev.jsonl")
    examples = [TaggedExample(str(i), tuple(line["words"]), None, i) for i, line in enumerate(dev)]
    assert len(examples) == DEV
    assert [list(each.prediction) for each in predictor(examples)] == [each["prediction"] for each in predicted]


def test_its_model_is_trained_further_by_this_method_alone(place: Place, tagged: FinishedRun) -> None:
    task = other_kind(place, place.directory, "tagging")
    still = ("optimisation.max_steps=1", "lr=1e-12")
    again = place.run(FEATURES, *still, task=task, model=str(tagged.run.path))
    assert again.results["splits"]["dev"] == tagged.results["splits"]["dev"]
    with pytest.raises(UsageError, match=r"method\.name=features"):
        place.run(*still, task=task, model=str(tagged.run.path))


def test_kept_features_change_nothing_but_rounding_and_are_computed_once(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    found: dict[str, tuple[int, list[list[float]]]] = {}
    plain = BertStack.forward

    def counted(self: BertStack, *arguments: object, **named: object) -> torch.Tensor:
        passes.append(1)
        return plain(self, *arguments, **named)  # type: ignore[arg-type]  # handed on as they come

    monkeypatch.setattr(BertStack, "forward", counted)
    for gigabytes in ("1.0", "0.0"):
        passes.clear()
        outcome = place.run(FEATURES, "lr=3e-2", f"engine.feature_store_gb={gigabytes}")
        assert outcome.results["splits"]["dev"]["accuracy"] > 0.8
        found[gigabytes] = len(passes), dev_probabilities(outcome)
    assert found["1.0"][0] == 2, "one micro-batch of train and one of dev"
    assert found["0.0"][0] == 40, "35 updates and 5 evaluations on dev"
    np.testing.assert_allclose(found["1.0"][1], found["0.0"][1], atol=1e-3)


@pytest.mark.parametrize("method", [FEATURES, FREELB])
def test_a_stopped_run_ends_with_the_same_bytes(place: Place, method: str, tmp_path: Path) -> None:
    settings = (method, "optimisation.max_steps=11", "engine.micro_batch_tokens=40")
    straight = place.run(*settings, run_dir=tmp_path / "straight")
    with stopping_at(8), pytest.raises(StoppedError, match="at step 8"):
        place.run(*settings, run_dir=tmp_path / "stopped")
    resumed = finetune(FinetuneArguments(resume=str(tmp_path / "stopped")), progress=silent_progress)
    assert weights(resumed) == weights(straight)
    assert resumed.results == straight.results


def test_one_pass_of_freelb_from_the_words_themselves_is_a_plain_run_to_the_bit(place: Place) -> None:
    steps = "optimisation.max_steps=9"
    plain = place.run(steps)
    freelb = place.run(steps, "method={name: freelb, ascent_steps: 1, start: 0.0}")
    assert weights(freelb) == weights(plain)
    moved = place.run(steps, "method={name: freelb, ascent_steps: 2}")
    assert weights(moved) != weights(plain)


def test_freelb_learns_and_leaves_a_plain_model(place: Place) -> None:
    outcome = place.run(FREELB, "epochs=6")
    assert outcome.results["splits"]["dev"]["accuracy"] > 0.9
    config = json.loads((outcome.run.model / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]


def test_nothing_is_left_beside_the_run(tagged: FinishedRun) -> None:
    names = {path.name for path in tagged.run.path.iterdir()}
    assert names <= {
        *("recipe.yaml", "run.json", "environment.json", "metrics.jsonl", "log.txt", "tensorboard", "model"),
        *("results.json", "predictions", "mistakes", "checkpoints", ".lock", "files.json"),
    }

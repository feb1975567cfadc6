"""Models as measurements and probes load them: checkpoints of runs, random controls, and their labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError, UsageError
from bertkit.evaluation.loaded_model import each_name, load_models, short_name
from bertkit.models.conversion.pruning import prune_heads, pruned_heads
from bertkit.models.families.elmo import ElmoConfig
from bertkit.models.families.roberta import RobertaConfig
from bertkit.models.files.hub import save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.scoring.rules import SCORING_RULE, EncoderLeftToRight, reads_causally
from bertkit.pretraining.recipe import load_recipe
from bertkit.recipe.dump import dump_recipe
from bertkit.recipe.resolve import Override
from bertkit.run.checkpoint import save_checkpoint
from bertkit.run.directory import RunDirectory, RunIdentity
from tests.probing.request import request_for
from tests.probing.tiny_models import BERT, save_tiny, tiny_model, tiny_tokenizer, write_run


def test_checkpoints_of_a_run_are_models(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [100, 300])
    first, second = load_models([f"{run}@all"])
    assert [each.label for each in (first, second)] == ["run@100", "run@300"]
    assert first.training == {"run": "run", "steps": 100, "tokens": 1000}
    for subject, step in ((first, 100), (second, 300)):
        expected = tiny_model(tiny_tokenizer(), seed=step)
        for name, parameter in expected.named_parameters():
            assert torch.equal(dict(subject.model.named_parameters())[name], parameter)
        assert subject.model.head_names == ("masked_lm",)
    (finished,) = load_models([str(run)])
    assert all(torch.equal(a, b) for a, b in zip(finished.model.parameters(), second.model.parameters(), strict=True))
    with pytest.raises(DataError, match=r"no such checkpoint; the run has kept steps 100, 300"):
        load_models([f"{run}@200"])


def test_models_saved_by_words_are_models_and_words_are_known(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [100, 300])
    for number, name in enumerate(("2k", "1k")):
        save_tiny(tiny_model(tiny_tokenizer(), seed=number), tiny_tokenizer(), run / "models" / name)
    (run / "run.json").write_text(json.dumps(json.loads((run / "run.json").read_text()) | {"words": 3000}))
    logged = [{"step": step, "words": 10 * step} for step in (50, 150, 250)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in logged))
    assert each_name([f"{run}@words", f"{run}@all"]) == [f"{run}@{each}" for each in ("1k", "2k", 100, 300)]
    models = load_models([f"{run}@words", f"{run}@all"])
    assert [(each.label, (each.training or {}).get("words")) for each in models] == [
        ("run@1k", 1000),
        ("run@2k", 2000),
        ("run@100", 1000),
        ("run@300", None),
    ], "between logged steps, words grow in proportion; after the last one they are not known"
    expected = tiny_model(tiny_tokenizer(), seed=1)
    assert all(torch.equal(a, b) for a, b in zip(models[0].model.parameters(), expected.parameters(), strict=True))
    with pytest.raises(DataError, match=r"models of 1k, 2k words, or write @words for all"):
        load_models([f"{run}@2M"])
    with pytest.raises(DataError, match=r"models of no words \(train with engine\.models_at_words\)"):
        each_name([f"{write_run(tmp_path / 'other', [100])}@words"])


def test_checkpoints_of_a_run_without_tokenizer_say_what_to_do(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [100], finished=False)
    with pytest.raises(DataError, match="bertkit pretrain --resume"):
        load_models([f"{run}@100"])


def test_a_random_twin_has_the_same_shapes_and_other_weights(tmp_path: Path) -> None:
    subject = request_for(tmp_path).subject()
    twin, again, other = subject.random_twin(), subject.random_twin(), subject.random_twin(seed=1)
    assert twin.model.head_names == subject.model.head_names
    for name, parameter in subject.model.named_parameters():
        ours = dict(twin.model.named_parameters())[name]
        assert ours.shape == parameter.shape
        assert torch.equal(ours, dict(again.model.named_parameters())[name])
        if name.endswith("query.weight"):
            assert not torch.equal(ours, parameter)
            assert not torch.equal(ours, dict(other.model.named_parameters())[name])


def test_a_random_twin_reads_in_the_models_direction_and_has_its_heads(tmp_path: Path) -> None:
    model = tiny_model(tiny_tokenizer())
    model.extras[SCORING_RULE] = EncoderLeftToRight.name
    prune_heads(model, {0: [0], 1: [1]})
    twin = request_for(tmp_path, model=model).subject().random_twin()
    assert reads_causally(twin.model)
    assert pruned_heads(twin.model.encoder) == {0: (0,), 1: (1,)}
    shapes = {name: parameter.shape for name, parameter in twin.model.named_parameters()}
    assert shapes == {name: parameter.shape for name, parameter in model.named_parameters()}


def elmo() -> HeadedModel:
    tokenizer = tiny_tokenizer()
    sizes: dict[str, Any] = {"character_size": 4, "filters": ((1, 4), (2, 5)), "projection_size": 6, "lstm_width": 8}
    model = tiny_model(tokenizer, ElmoConfig(**sizes, highway_layers=1, max_characters=12), ("causal_lm",))
    model.encoder.read_vocabulary(tokenizer)
    return model


def test_words_of_a_random_elmo_are_spelled_like_those_of_the_model(tmp_path: Path) -> None:
    (subject,) = load_models([str(save_tiny(elmo(), tiny_tokenizer(), tmp_path / "elmo"))])
    with torch.no_grad():
        states_TD = subject.random_twin().model(PackedBatch.from_ids([[10], [11], [50], [77]]))
    assert states_TD.std(dim=0).max() > 1e-5, "different words have different states"


@pytest.mark.parametrize("kind", ["roberta", "elmo", "pruned"])
def test_a_checkpoint_computes_what_its_model_does(tmp_path: Path, kind: str) -> None:
    """Also if positions are counted from the padding's id, words are composed of characters, or heads are pruned."""
    tokenizer = tiny_tokenizer()
    model = elmo() if kind == "elmo" else tiny_model(tokenizer, RobertaConfig(**BERT))
    if kind == "pruned":
        prune_heads(model, {1: [0]})
    model.extras["scoring_rule"] = "left_to_right"
    values = {"model": model.encoder.config.model_dump(), "data.sequence_length": 40}
    name = "elmo-small" if kind == "elmo" else "quickstart"
    recipe = load_recipe(name, [Override(key, value) for key, value in values.items()])
    identity = RunIdentity("pretrain", "tiny", dump_recipe(recipe), "0" * 64, 0, ["x"])
    run = RunDirectory.create(tmp_path / "run", identity, tmp_path)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    save_checkpoint(run.checkpoints, 100, {"weights": weights}, {"step": 100, "tokens": 1000}, keep=9)
    save_model(model, tokenizer, run.model)
    (found,) = load_models([f"{run.path}@100"])
    batch = PackedBatch.from_ids([[2, 9, 1, 30, 3], [2, 40, 3]])
    with torch.no_grad():
        assert torch.equal(found.model(batch), model(batch))
    assert found.model.extras["scoring_rule"] == "left_to_right"


def test_models_are_named_shortly_and_apart(tmp_path: Path) -> None:
    names = ["ORG/bert-tiny", "runs/quick-1/model", "runs/quick-1", "./x/", "/a/b"]
    assert [short_name(name) for name in names] == ["bert-tiny", "quick-1", "quick-1", "x", "b"]
    for place in ("one", "two"):
        save_tiny(tiny_model(tiny_tokenizer(), seed=len(place)), tiny_tokenizer(), tmp_path / place / "model")
        save_tiny(tiny_model(tiny_tokenizer(), seed=1), tiny_tokenizer(), tmp_path / place / "x")
    subjects = load_models([str(tmp_path / "one/x"), str(tmp_path / "two/x")])
    assert [each.label for each in subjects] == [str(tmp_path / "one/x"), str(tmp_path / "two/x")]
    with pytest.raises(UsageError, match="given twice"):
        load_models([str(tmp_path / "one/x")] * 2)
    with pytest.raises(UsageError, match="this probe takes one model"):
        request_for(tmp_path, models=[str(tmp_path / "one/x"), str(tmp_path / "two/x")]).subject()

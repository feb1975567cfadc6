"""Runs that continue from a model: with its vocabulary or a new one, converted, resumed, and refused."""

from __future__ import annotations

import json
import logging
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from bertkit.data.language_stream import training_and_held_out
from bertkit.data.shards import TokenShards
from bertkit.errors import DataError, StoppedError, UsageError
from bertkit.models.conversion.pruning import prune_heads
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.roberta import RobertaConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.pretraining.arguments import PretrainArguments, fitted, shortened, warn_of_stages, with_max_length
from bertkit.pretraining.plan import pretraining_plan
from bertkit.pretraining.recipe import load_recipe
from bertkit.pretraining.run import run_pretraining
from bertkit.pretraining.stages import stages_of
from bertkit.progress import silent_progress
from bertkit.recipe.resolve import Override
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.run import FinishedRun
from tests.overrides import parsed
from tests.training.tiny_run import write_model, write_text

SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 130,
}
SMALL = [
    "data.sequence_length=32",
    "data.held_out=0.05",
    "optimisation.batch_sequences=5",
    "engine={device: cpu, evaluation_sequences: 4, pseudo_perplexity_sequences: 0}",
]
NEW_VOCABULARY = "tokenizer={type: wordpiece, vocab_size: 112, min_frequency: 1}"
WORDS = "bert.embeddings.word_embeddings.weight"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("continuing")
    general = write_text(directory / "general.txt")
    domain = (directory / "general.txt").read_text().replace("letter", "enzyme").replace("reads", "binds")
    (directory / "text.txt").write_text(domain)
    write_model(BertConfig(**SIZES), general, directory / "bert")
    write_model(RobertaConfig(**SIZES), general, directory / "roberta")
    return directory


def request(
    home: Path, init: str | None, *overrides: str, recipe: str = "domain-adapt", run: str = "run", **more: Any
) -> PretrainArguments:
    return PretrainArguments(
        recipe,
        overrides=parsed([*SMALL, *overrides]),
        sources=[str(home / "text.txt")],
        init=None if init is None else str(home / init),
        run_dir=home / run,
        cache=home / "cache",
        command=["test"],
        **{"max_steps": 3, **more},
    )


def trained(wanted: PretrainArguments) -> FinishedRun:
    return run_pretraining(wanted, progress=silent_progress)


def test_a_recipe_without_its_model_is_refused_with_the_option_that_gives_one(home: Path) -> None:
    with pytest.raises(UsageError, match=r"domain-adapt.*--init MODEL"):
        request(home, None).requested()


def test_a_model_is_pretrained_further_with_its_own_tokenizer(home: Path) -> None:
    recipe = request(home, "bert").requested()
    assert recipe.model == BertConfig(**SIZES)
    assert recipe.tokenizer.path == str(home / "bert")
    finished = trained(request(home, "bert", run="own"))
    before, after = (load_file(path / "model.safetensors") for path in (home / "bert", finished.run.model))
    assert before[WORDS].shape == after[WORDS].shape
    assert load_tokenizer(finished.run.model).fingerprint == load_tokenizer(home / "bert").fingerprint


@pytest.mark.parametrize("new_pieces", ["mean", "random"])
def test_a_new_vocabulary_is_learnt_logged_and_starts_with_the_shared_rows(
    home: Path, new_pieces: str, caplog: pytest.LogCaptureFixture
) -> None:
    frozen = "optimisation.schedule={name: constant, peak: 1.0e-12}"
    with caplog.at_level(logging.INFO, logger="bertkit"):
        wanted = request(home, "bert", NEW_VOCABULARY, frozen, f"new_pieces={new_pieces}", run=new_pieces)
        finished = trained(wanted)
    old, new = load_tokenizer(home / "bert"), load_tokenizer(finished.run.model)
    assert new.vocab_size == 112 != old.vocab_size
    (expected,) = [record.getMessage() for record in caplog.records if "new vocabulary of" in record.getMessage()]
    pieces = new.backend.get_vocab()
    known = [piece for piece in pieces if old.id(piece) is not None]
    assert f"112 tokens: {len(known)} are" in expected
    assert len(pieces) > len(known) > 50
    before, after = (load_file(path / "model.safetensors")[WORDS] for path in (home / "bert", finished.run.model))
    new_rows, old_rows = after[[pieces[piece] for piece in known]], before[[old.id(piece) for piece in known]]
    assert float((new_rows - old_rows).abs().max()) < 1e-9
    if new_pieces == "mean":
        words = [piece for piece in pieces if old.id(piece) is None and not piece.startswith("##")]
        word = next(piece for piece in words if old.unk_id not in old.encode_batch([piece])[0])
        mean = before[old.encode_batch([word])[0]].mean(dim=0)
        assert float((after[pieces[word]] - mean).abs().max()) < 1e-8


def test_a_recipe_of_ones_own_may_name_the_vocabulary(home: Path) -> None:
    path = home / "science.yaml"
    path.write_text(f"extends: domain-adapt\n{NEW_VOCABULARY.replace('=', ': ')}\n")
    recipe = request(home, "bert", recipe=str(path)).requested()
    assert (recipe.tokenizer.path, recipe.tokenizer.vocab_size) == (None, 112)
    # A recipe that starts from scratch trains its vocabulary for itself, not for a given model.
    assert request(home, "bert", recipe="bert").requested().tokenizer.path == str(home / "bert")


BIAS = "cls.predictions.bias"
FROZEN = "optimisation.schedule={name: constant, peak: 1.0e-12}"
ADDED = ["tokenizer.add_tokens=3", "tokenizer.added_frequency=1"]


def adding(home: Path, *overrides: str, **more: Any) -> PretrainArguments:
    """A request on a text with words that the model's vocabulary splits."""
    text = (home / "text.txt").read_text()
    (home / "words.txt").write_text(f"{text}\n" + "a slow breath needs another lathe\n\n" * 9)
    return replace(request(home, "bert", *overrides, **more), sources=[str(home / "words.txt")])


def test_added_words_start_as_the_mean_of_their_tokens_and_all_old_rows_stay(home: Path) -> None:
    wanted = adding(home, FROZEN, *ADDED, run="added")
    assert wanted.requested().tokenizer.path == str(home / "bert")
    finished = trained(wanted)
    old, new = load_tokenizer(home / "bert"), load_tokenizer(finished.run.model)
    assert new.vocab_size == old.vocab_size + 3
    before, after = (load_file(path / "model.safetensors") for path in (home / "bert", finished.run.model))
    hub = AutoTokenizer.from_pretrained(str(finished.run.model))
    for name in (WORDS, BIAS):
        assert float((after[name][: old.vocab_size] - before[name][: old.vocab_size]).abs().max()) < 1e-9
        for number in range(old.vocab_size, new.vocab_size):
            word = new.token(number)
            parts = old.encode_batch([word])[0]
            assert len(parts) > 1
            assert hub(word, add_special_tokens=False)["input_ids"] == [number]
            assert float((after[name][number] - before[name][parts].mean(dim=0)).abs().max()) < 1e-8
    assert finished.results["held_out"]["loss"] > 0


def test_a_run_with_added_words_is_stopped_and_resumed_by_its_own_recipe(home: Path) -> None:
    straight = trained(adding(home, *ADDED, run="added-straight")).run
    with pytest.raises(StoppedError):
        trained(adding(home, *ADDED, run="added-stopped", max_minutes=0))
    resume = PretrainArguments(None, resume=str(home / "added-stopped"), cache=home / "cache", command=["test"])
    resumed = trained(resume).run
    weights = [(run.model / "model.safetensors").read_bytes() for run in (straight, resumed)]
    assert weights[0] == weights[1]


def test_more_words_than_the_text_has_are_refused_before_a_run_is_made(home: Path) -> None:
    with pytest.raises(DataError, match=r"10,000 new words are requested, but the text has"):
        trained(request(home, "bert", "tokenizer.add_tokens=10000", run="too-many"))
    with pytest.raises(DataError, match=r"10,000 new words are requested, but the text has"):
        pretraining_plan(request(home, "bert", "tokenizer.add_tokens=10000").requested())
    assert not (home / "too-many").exists()
    with pytest.raises(UsageError, match=r"add_tokens: extends an existing vocabulary"):
        request(home, None, "tokenizer.add_tokens=5", recipe="bert").requested()


def test_the_steps_are_those_that_so_many_passes_over_the_text_take(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        finished = trained(request(home, "bert", run="passes", max_steps=None))
    assert f"3 passes over the text: {finished.run.record['steps']} steps of 5 sequences" in caplog.text
    assert "instead of" not in caplog.text  # the recipe's steps are only a limit
    recipe = request(home, "bert", max_steps=None).requested()
    shards = TokenShards.open(Path(finished.run.record["shards"]))
    training, _ = training_and_held_out(recipe.data, shards, seed=recipe.seed, stage=0, plans=None)
    assert finished.run.record["steps"] == math.ceil(3 * training.epoch_length(0) / 5)
    # The command line takes precedence over the recipe's passes.
    assert request(home, "bert", "optimisation.steps=7", max_steps=None).requested().optimisation.passes is None
    plan = pretraining_plan(recipe)
    assert plan["steps_estimated"]
    assert plan["text_passes"] == pytest.approx(3, rel=0.2)
    assert plan["steps"] == pytest.approx(finished.run.record["steps"], rel=0.2)
    assert plan["parameters"]["total"] == pretraining_plan(recipe, vocab_size=shards.vocab_size)["parameters"]["total"]
    with caplog.at_level("INFO"):
        assert fitted(shortened(recipe, 2), shards, cache=home / "cache").optimisation.steps == 2
    assert f"{finished.run.record['steps']} steps of 5 sequences; --max-steps or optimisation.steps: 2" in caplog.text


def test_a_plan_counts_a_pruned_model_without_its_heads(home: Path) -> None:
    model, _ = load_model(home / "bert")
    whole = sum(weight.numel() for weight in model.parameters())
    prune_heads(model, {1: [0, 2]})
    save_model(model, load_tokenizer(home / "bert"), home / "pruned")
    plans = [pretraining_plan(request(home, init).requested()) for init in ("bert", "pruned")]
    assert plans[0]["parameters"]["total"] - plans[1]["parameters"]["total"] == 2 * (3 * 8 * 25 + 8 * 24)
    assert plans[0]["flops"] > plans[1]["flops"]
    assert sum(weight.numel() for weight in model.parameters()) == whole - 2 * (3 * 8 * 25 + 8 * 24)


def test_passes_do_not_go_with_stages(home: Path) -> None:
    with pytest.raises(UsageError, match=r"passes: a run in stages needs a number of steps"):
        request(home, "bert", "optimisation.stages=[{share: 1.0}]").requested()


def test_stopped_and_resumed_a_new_vocabulary_gives_the_model_of_the_straight_run(home: Path) -> None:
    straight = trained(request(home, "bert", NEW_VOCABULARY, run="straight")).run
    with pytest.raises(StoppedError):
        trained(request(home, "bert", NEW_VOCABULARY, run="stopped", max_minutes=0))
    resumed = trained(PretrainArguments(None, resume=str(home / "stopped"), cache=home / "cache", command=["test"])).run
    weights = [(run.model / "model.safetensors").read_bytes() for run in (straight, resumed)]
    assert weights[0] == weights[1]


def test_a_model_that_changed_since_the_run_began_is_noticed(home: Path) -> None:
    shutil.copytree(home / "bert", home / "passing")
    with pytest.raises(StoppedError):
        trained(request(home, "passing", run="begun", max_minutes=0))
    weights = home / "passing" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\x3f")
    with pytest.raises(DataError, match="model has changed since the run began; restore the original"):
        trained(PretrainArguments(None, resume=str(home / "begun"), cache=home / "cache", command=["test"]))


def test_roberta_is_converted_to_a_longformer_with_its_own_sizes(home: Path) -> None:
    window, positions = "model.attention_window=6", "model.max_position_embeddings=200"
    wanted = request(home, "roberta", window, positions, "data.sequence_length=150", recipe="longformer", run="long")
    recipe = wanted.requested()
    assert recipe.model.model_dump() | {"family": "longformer", **SIZES, "max_position_embeddings": 200} == (
        recipe.model.model_dump()
    )
    finished = trained(wanted)
    config = json.loads((finished.run.model / "config.json").read_text())
    assert (config["model_type"], config["max_position_embeddings"]) == ("longformer", 200)
    assert config["attention_window"] in (6, [6, 6])
    # A masked LM does not train the global projections; the released code copies the ordinary ones again at the end.
    before, after = (load_file(path / "model.safetensors") for path in (home / "roberta", finished.run.model))
    of_globals = [name for name in after if "_global." in name]
    assert len(of_globals) == 2 * 3 * 2
    for name in of_globals:
        ordinary = name.replace("_global", "")
        assert after[name].equal(after[ordinary])
        assert not after[name].equal(before[ordinary.replace("longformer", "roberta")])


def test_a_model_of_another_family_is_refused_with_the_conversions_there_are(home: Path) -> None:
    with pytest.raises(UsageError, match=r"'bert'.*'longformer'.*known conversions.*roberta to longformer"):
        request(home, "bert", recipe="longformer").requested()
    with pytest.raises(UsageError, match=r"'roberta'.*'bert'.*domain-adapt"):
        request(home, "roberta", recipe="bert").requested()
    assert request(home, "roberta").requested().model == RobertaConfig(**SIZES)


def test_the_command_line_goes_before_the_model_that_is_given(home: Path) -> None:
    recipe = request(home, "bert", "model.hidden_dropout_prob=0.25").requested()
    assert recipe.model == BertConfig(**SIZES, hidden_dropout_prob=0.25)
    with pytest.raises(UsageError, match=r"init: .*num_hidden_layers 2 \(recipe: 3\)"):
        trained(request(home, "bert", "model.num_hidden_layers=3", run="deeper"))


def test_stages_with_their_own_schedule_warm_up_in_proportion() -> None:
    recipe = shortened(load_recipe("bert-stacking"), 400)
    assert [stage.end_step - stage.first_step for stage in stages_of(recipe)] == [50, 70, 280]
    schedules = [stage.recipe.optimisation.schedule for stage in stages_of(recipe)]
    assert [schedule.warmup_steps for schedule in schedules] == [10, 0, 0]
    assert [schedule.peak for schedule in schedules] == [8e-4, 5.5e-4, 3e-4]
    first, second, third = stages_of(recipe)
    assert second.learning_rate(50) == pytest.approx(5.5e-4)
    assert third.learning_rate(120) == pytest.approx(3e-4)
    assert first.learning_rate(49) > 5.5e-4 > second.learning_rate(119) > 3e-4 > third.learning_rate(399) > 0


def test_a_much_shorter_run_keeps_the_length_of_a_stages_schedule_positive() -> None:
    stage = {"share": 1, "set": {"optimisation.schedule": {"name": "linear", "peak": 1e-3, "total_steps": 900}}}
    recipe = load_recipe("bert-tiny", [Override("optimisation.stages", [stage])])
    (found,) = stages_of(shortened(recipe, 100))
    assert found.recipe.optimisation.schedule.total_steps == 1


def test_a_much_shorter_run_keeps_the_warm_up_that_a_stages_schedule_needs() -> None:
    schedule = {"name": "inverse-sqrt", "peak": 1e-3, "warmup_steps": 10}
    stages = [{"share": 0.5, "set": {}}, {"share": 0.5, "set": {"optimisation.schedule": schedule}}]
    recipe = load_recipe("bert-tiny", [Override("optimisation.stages", stages)])
    _, second = stages_of(shortened(recipe, 4))
    assert second.recipe.optimisation.schedule.warmup_steps == 1


def test_sequences_are_no_longer_than_the_initial_model_reads(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    wanted = replace(request(home, "bert"), overrides=[])
    assert wanted.requested().data.sequence_length == SIZES["max_position_embeddings"]
    assert "instead of 512: the maximum of the initial model" in caplog.text
    caplog.clear()
    with pytest.raises(UsageError, match="exceeds the model's maximum"):
        replace(wanted, overrides=[Override("max_length", 512, "--max-length")]).requested()
    assert "the maximum of the initial model" not in caplog.text


def test_a_relative_tokenizer_is_recorded_by_its_full_path(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    recipe = request(home, None, "tokenizer.path=bert", recipe="bert").requested()
    assert recipe.tokenizer.path == str(home / "bert")


def test_a_length_that_the_stages_take_on_is_no_cause_for_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    overrides = parsed(["data.sequence_length=64"])
    recipe = with_max_length(load_recipe("bert-tiny", overrides), overrides)
    warn_of_stages(recipe, overrides)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]

"""Pretraining through the command line: its outputs, loading by other tools, and messages about mistakes."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.tiny_run import write_recipe, write_text

Bertkit = Callable[..., Any]
SENTENCE = "The cat reads a [MASK]."


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A directory with a recipe, its text and a finished run."""
    from bertkit.pretraining.arguments import PretrainArguments
    from bertkit.pretraining.run import run_pretraining
    from bertkit.progress import silent_progress

    directory = tmp_path_factory.mktemp("pretrain")
    recipe, text = write_recipe(directory)
    request = PretrainArguments(
        str(recipe), sources=[str(text)], run_dir=directory / "run", cache=directory / "cache", command=["test"]
    )
    return directory, run_pretraining(request, progress=silent_progress).results


def test_transformers_loads_the_result_and_gives_the_same_logits(finished: tuple[Path, dict[str, Any]]) -> None:
    transformers = pytest.importorskip("transformers")
    from bertkit.data.batch import PackedBatch
    from bertkit.models.files.hub import load_model

    directory, _ = finished
    model_directory = directory / "run" / "model"
    oracle, report = transformers.AutoModelForPreTraining.from_pretrained(model_directory, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_directory)
    encoded = tokenizer("The cat reads a list.", "A word holds [MASK].", return_tensors="pt")
    expected = oracle.eval()(**encoded)
    model, _ = load_model(model_directory)
    batch = PackedBatch.from_ids(encoded["input_ids"].tolist(), encoded["token_type_ids"].tolist())
    hidden_TD = model.eval()(batch)
    torch.testing.assert_close(model.masked_lm_logits(hidden_TD), expected.prediction_logits[0], rtol=1e-5, atol=1e-5)
    pair_logits_B2 = model.sequence_logits("next_sentence", hidden_TD[batch.first_token_B])
    torch.testing.assert_close(pair_logits_B2, expected.seq_relationship_logits, rtol=1e-5, atol=1e-5)


def test_it_learns_and_reports_the_baseline(finished: tuple[Path, dict[str, Any]]) -> None:
    directory, results = finished
    held_out = results["held_out"]
    assert results["held_out_text"]["predictions"] > 50
    assert held_out["accuracy/masked_lm"] >= 0.9 * held_out["accuracy/unigram"] > 0
    entries = json.loads((directory / "run" / "model" / "config.json").read_text())["vocab_size"]
    assert 1 < held_out["perplexity"] < entries / 5  # an untrained model has a perplexity of its vocabulary size
    assert held_out["perplexity"] == pytest.approx(np.exp(held_out["loss/masked_lm"]))
    assert 1 < held_out["pseudo_perplexity"] < 300
    lines = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    training = [line for line in lines if "loss" in line]
    assert [line["step"] for line in training] == list(range(4, 61, 4))
    wanted = {
        "tokens",
        "lr",
        "grad_norm",
        "tokens_per_s",
        "target_tokens_per_s",
        "mfu",
        "input_stall",
        "peak_memory_mb",
    }
    assert all(wanted | {"loss/masked_lm", "loss/next_sentence"} <= line.keys() for line in training)
    assert training[-1]["loss"] < 0.75 * training[0]["loss"]
    assert any((directory / "run" / "tensorboard").iterdir())


def test_the_curves_are_drawn_from_the_table_beside_them(finished: tuple[Path, dict[str, Any]]) -> None:
    figures = finished[0] / "run" / "figures"
    table = list(csv.DictReader((figures / "curves.csv").open()))
    assert [int(row["step"]) for row in table if row["loss"]] == list(range(4, 61, 4))
    assert float(table[-1]["held_out/accuracy/masked_lm"]) == finished[1]["held_out"]["accuracy/masked_lm"]
    assert (figures / "curves.svg").read_text().startswith("<?xml")
    assert (figures / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_stages_change_the_length_where_their_share_ends(finished: tuple[Path, dict[str, Any]]) -> None:
    directory, _ = finished
    lines = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    tokens = {line["step"]: line["tokens"] for line in lines if "tokens" in line}
    per_step = {step: (tokens[step] - tokens[step - 4]) / 4 / 9 for step in tokens if step - 4 in tokens}
    assert max(mean for step, mean in per_step.items() if step <= 42) <= 24
    assert np.mean([mean for step, mean in per_step.items() if step > 44]) > 24


def test_the_recorded_recipe_gives_the_same_model(finished: tuple[Path, dict[str, Any]], bertkit: Bertkit) -> None:
    directory, _ = finished
    done = bertkit("pretrain", directory / "run" / "recipe.yaml", "--run-dir", directory / "again", "--json", "-q")
    assert done.code == 0
    document = json.loads(done.stdout)
    assert {key: document[key] for key in ("run", "status", "steps")} == {
        "run": str(directory / "again"),
        "status": "done",
        "steps": 60,
    }
    weights = [(directory / run / "model" / "model.safetensors").read_bytes() for run in ("run", "again")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    "engine",
    [
        ["engine.micro_batch_tokens=33"],
        ["engine.workers=2"],
        ["engine.log_every_steps=7", "engine.save_every_steps=11"],
    ],
)
def test_the_engine_changes_the_loss_by_rounding_alone(
    finished: tuple[Path, dict[str, Any]], bertkit: Bertkit, engine: list[str], tmp_path: Path
) -> None:
    """Dropout draws numbers in sequence, so it is off if micro-batches differ."""
    directory, _ = finished
    settings = ["--set", "model.hidden_dropout_prob=0", "--set", "model.attention_probs_dropout_prob=0"]
    losses = []
    for number, changes in enumerate(([], engine)):
        more = [word for change in changes for word in ("--set", change)]
        run = tmp_path / str(number)
        done = bertkit("pretrain", directory / "run" / "recipe.yaml", "--run-dir", run, "-q", *settings, *more)
        assert done.code == 0, done.stderr
        losses.append(json.loads((run / "results.json").read_text())["held_out"]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    if "workers" in engine[0] or "log_every" in engine[0]:
        assert losses[0] == losses[1]


def test_fill_prints_words_with_probabilities(finished: tuple[Path, dict[str, Any]], bertkit: Bertkit) -> None:
    directory, results = finished
    done = bertkit("fill", "--model", directory / "run", "--json", SENTENCE, "[MASK] cat [MASK] a list.")
    assert done.code == 0
    first, second = json.loads(done.stdout)
    assert [len(text["masks"]) for text in (first, second)] == [1, 2]
    for guesses in (*first["masks"], *second["masks"]):
        probabilities = [guess["probability"] for guess in guesses]
        assert len(guesses) == 5
        assert probabilities == sorted(probabilities, reverse=True)
        assert sum(probabilities) <= 1 + 1e-6
    plain = bertkit("fill", "--model", directory / "run", "--top", "2", SENTENCE)
    assert plain.stdout.splitlines()[0] == SENTENCE
    assert plain.stdout.count("%") == 2
    assert results["examples"][0]["masks"]


def test_fill_names_what_is_wrong(finished: tuple[Path, dict[str, Any]], bertkit: Bertkit, tmp_path: Path) -> None:
    directory, _ = finished
    no_mask = bertkit("fill", "--model", directory / "run", "No mask here.")
    assert (no_mask.code, "[MASK]" in no_mask.stderr) == (3, True)
    too_long = bertkit("fill", "--model", directory / "run", "[MASK] " + "cat " * 50)
    assert (too_long.code, "at most 40" in too_long.stderr) == (3, True)
    nowhere = bertkit("fill", "--model", tmp_path / "nowhere", SENTENCE)
    assert (nowhere.code, str(tmp_path / "nowhere") in nowhere.stderr) == (3, True)


def test_continuing_from_a_model_starts_where_it_ended(
    finished: tuple[Path, dict[str, Any]], bertkit: Bertkit, tmp_path: Path
) -> None:
    directory, results = finished
    text = write_text(tmp_path / "other.txt", seed=0)
    more = ["--set", "optimisation.schedule.peak=1e-9", "--max-steps", "4"]
    done = bertkit(
        "pretrain",
        directory / "tiny.yaml",
        "--data",
        text,
        "--init",
        directory / "run",
        "--run-dir",
        tmp_path / "on",
        *more,
    )
    assert done.code == 0, done.stderr
    continued = json.loads((tmp_path / "on" / "results.json").read_text())["held_out"]
    assert continued["loss"] == pytest.approx(results["held_out"]["loss"], rel=1e-4)


def test_shards_are_used_as_they_are(finished: tuple[Path, dict[str, Any]], bertkit: Bertkit, tmp_path: Path) -> None:
    directory, _ = finished
    (shards,) = (directory / "cache" / "shards").iterdir()
    done = bertkit("pretrain", directory / "tiny.yaml", "--data", shards, "--run-dir", tmp_path / "run", "-q")
    assert done.code == 0, done.stderr
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in (directory / "run", tmp_path / "run")]
    assert weights[0] == weights[1]


def test_plan_costs_nothing_and_names_everything(
    bertkit: Bertkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = bertkit("pretrain", "bert", "--plan", "--json")
    assert done.code == 0
    plan = json.loads(done.stdout)
    assert plan["parameters"] == {"total": 110_106_428, "backbone": 109_482_240}
    assert plan["steps"] == 1_000_000
    assert plan["tokens"] == 900_000 * 256 * 128 + 100_000 * 256 * 512
    # Six times the multiplying parameters times the tokens, within the attention's and the head's share.
    assert 0.9 < plan["flops"] / (6 * 85e6 * plan["tokens"]) < 1.3
    assert plan["vocabulary"] == {"size": 30_522, "at_most": True}
    assert all(plan[key] > 0 for key in ("memory_mb", "disk_mb", "seconds"))
    assert plan["optimizer_flops"] == 0
    messages = bertkit("pretrain", "bert", "--plan").stdout.splitlines()
    assert "parameters  at most 110,106,428 (109,482,240 without heads)" in messages
    assert re.fullmatch(r"time here   \d+ d \d+ h", messages[-1])
    assert list(tmp_path.iterdir()) == []


def test_the_plan_of_muon_counts_its_products_beside_the_models(bertkit: Bertkit) -> None:
    plans = [
        json.loads(bertkit("pretrain", "fast-encoder", "--data", "builtin:pydocs", "--plan", "--json", *more).stdout)
        for more in ([], ["--set", "optimisation.optimizer={name: adamw}"])
    ]
    # Five iterations on four layers: four maps of 64 x 64, and two of 64 x 256.
    square, wide = 6 * 64**3, 4 * 64**2 * 256 + 2 * 64**3
    assert plans[0]["optimizer_flops"] == plans[0]["steps"] * 4 * 5 * (4 * square + 2 * wide)
    assert plans[1]["optimizer_flops"] == 0
    assert plans[0]["flops"] == plans[1]["flops"]


BAD = [
    (["--set", "optimisation.stpes=5"], 2, ["optimisation.stpes", "steps"]),
    (["--set", "model.hidden_size=25"], 2, ["hidden_size", "25", "num_attention_heads"]),
    (["--set", "data.sequence_length=500"], 2, ["data.sequence_length", "500", "40"]),
    (["--set", "data.layout={name: doc-sentences}"], 2, ["next_sentence", "doc-sentences"]),
    (["--set", "optimisation.steps=many"], 2, ["optimisation.steps", "many"]),
    (["--set", "optimisation.batch_sequences=100000"], 3, ["100000", "batch_sequences"]),
    (["--set", "tokenizer.vocab_size=4"], 2, ["vocab_size", "4"]),
    (["--device", "cuda"], 2, ["cuda", "--device cpu"]),
    (["--resume", "nowhere"], 3, ["nowhere"]),
]


@pytest.mark.parametrize(("words", "code", "messages"), BAD, ids=[" ".join(words) for words, _, _ in BAD])
def test_a_mistake_is_named_with_its_remedy(
    words: list[str], code: int, messages: list[str], bertkit: Bertkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    monkeypatch.chdir(tmp_path)
    recipe, text = write_recipe(tmp_path)
    done = bertkit("pretrain", recipe, "--data", text, *words)
    assert done.code == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert all(word in done.stderr for word in messages), done.stderr


def test_resuming_with_another_result_in_mind_is_refused_key_by_key(
    finished: tuple[Path, dict[str, Any]], bertkit: Bertkit, tmp_path: Path
) -> None:
    directory, _ = finished
    stopped = bertkit(
        "pretrain", directory / "run" / "recipe.yaml", "--run-dir", tmp_path / "run", "--max-minutes", "0.0001", "-q"
    )
    assert stopped.code == 75
    more = ["--set", "optimisation.schedule.peak=0.5", "--seed", "7", "--set", "engine.log_every_steps=9"]
    refused = bertkit("pretrain", "--resume", tmp_path / "run", *more)
    assert refused.code == 2
    assert "optimisation.schedule.peak: the run has 0.002, now 0.5" in refused.stderr
    assert "seed: the run has 0, now 7" in refused.stderr
    assert "log_every" not in refused.stderr


def test_resuming_on_changed_text_is_refused(bertkit: Bertkit, tmp_path: Path) -> None:
    recipe, text = write_recipe(tmp_path)
    run = tmp_path / "run"
    assert bertkit("pretrain", recipe, "--data", text, "--run-dir", run, "--max-minutes", "0.0001").code == 75
    write_text(text, seed=1)
    refused = bertkit("pretrain", "--resume", run)
    assert refused.code == 3
    assert "the data has changed" in refused.stderr


def test_a_diverged_run_ends_with_exit_code_4(bertkit: Bertkit, tmp_path: Path) -> None:
    recipe, text = write_recipe(tmp_path)
    words = [
        "--set",
        "optimisation.schedule={name: constant, peak: 1.0e+30}",
        "--set",
        "optimisation.max_nonfinite_steps=1",
    ]
    done = bertkit("pretrain", recipe, "--data", text, "--run-dir", tmp_path / "run", *words)
    assert done.code == 4, done.stderr
    assert "optimisation.schedule.peak" in done.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"


def test_a_damaged_checkpoint_is_named_and_the_older_one_used(bertkit: Bertkit, tmp_path: Path) -> None:
    recipe, text = write_recipe(tmp_path)
    words = ["pretrain", recipe, "--data", text, "--set", "engine.keep_checkpoints=all"]
    assert bertkit(*words, "--run-dir", tmp_path / "straight").code == 0
    run = tmp_path / "run"
    assert bertkit(*words, "--run-dir", run).code == 0
    for newer in sorted((run / "checkpoints").glob("step-*"))[7:]:
        file = newer / "optimizer.safetensors"
        file.write_bytes(file.read_bytes()[:-9])
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"status": "stopped"}))
    done = bertkit("pretrain", "--resume", run)
    assert done.code == 0, done.stderr
    assert "optimizer.safetensors" in done.stderr
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("run", "straight")]
    assert weights[0] == weights[1]

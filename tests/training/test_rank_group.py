"""Several processes compute the same as one: losses, masks and results, also after one of them was killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from bertkit.data.stream import StepBatches
from bertkit.pretraining.arguments import PretrainArguments
from bertkit.pretraining.run import open_shards, run_pretraining
from bertkit.pretraining.stage_run import StageRun
from bertkit.pretraining.stages import stages_of
from bertkit.progress import silent_progress
from bertkit.run.metrics import MACHINE_FIGURES, read_metrics
from bertkit.run.verify import verify_run
from bertkit.text.tokenizer_files import load_tokenizer
from tests.training.tiny_run import RECIPE, write_text

SECONDS = 900
"""Time for processes to end on a shared machine."""
COUNTS = ("steps", "tokens", "flops")
WITHOUT_DROPOUT = (
    RECIPE.replace("  max_position_embeddings: 40\n", "  max_position_embeddings: 40\n  hidden_dropout_prob: 0.0\n"
    "  attention_probs_dropout_prob: 0.0\n")
    .replace("  steps: 60\n", "  steps: 20\n")
    .replace("log_every_steps: 4", "log_every_steps: 1")
    .replace("device: cpu", "device: cpu\n  precision: fp32")
)  # fmt: skip


def environments(count: int) -> list[dict[str, str]]:
    """As torchrun sets it for each rank."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    shared = {**os.environ, "WORLD_SIZE": str(count), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def test_what_the_ranks_tell_one_another(tmp_path: Path) -> None:
    script = [sys.executable, "-m", "tests.training.rank_script", str(tmp_path)]
    processes = [subprocess.Popen(script, env=environment) for environment in environments(3)]
    assert [process.wait(timeout=SECONDS) for process in processes] == [0, 0, 0]
    seen = [json.loads((tmp_path / f"seen-{rank}.json").read_text(encoding="utf-8")) for rank in range(3)]
    assert seen[0].pop("order") == []
    assert all(each.pop("order")[0] == "turn-0" for each in seen[1:])
    assert seen[0] == seen[1] == seen[2], "all ranks know the same"
    assert seen[0]["told"] == {"by": 0}
    assert seen[0]["failed"] == "the first rank cannot read it"
    assert "rank 2 (process" in seen[0]["refused"]
    assert "recipe.seed: 0, there 1" in seen[0]["refused"]
    assert "data" not in seen[0]["refused"].partition("the same as")[2].partition(";")[0]
    assert seen[0]["counts"] == [3, 30]
    assert seen[0]["stops"]
    assert seen[0]["gathered"] == [0, 2, 4]
    assert seen[0]["seconds"] == 100.5
    table = [[2.0, 2.0], [2.0, 2.0], [2.0, 2.0], [0.0, 0.0]]
    assert seen[0]["gradients"] == [
        [[3.0, 3.0], [5.0, 7.0], None, None, table],
        [[6.0, 6.0], None, None, None, table],
    ]


OBJECTIVES = {
    "pairs": "[masked_lm: {max_predictions: 4}, next_sentence]",
    "generator": "[masked_lm, replaced_token]",
    "spans": "[masked_lm: {units: {name: spans}}, span_boundary]",
    "decoded": "[masked_lm, enhanced_decoding, bag_of_words]",
    "order": "[masked_lm, word_order]",
    "random": "[random_token_detection]",
}


@pytest.mark.parametrize("objectives", OBJECTIVES)
def test_the_ranks_shares_are_the_batch_of_one_process(objectives: str, tmp_path: Path) -> None:
    text = RECIPE.replace("[masked_lm: {max_predictions: 4}, next_sentence]", OBJECTIVES[objectives])
    if objectives != "pairs":
        text = text.replace("{name: segment-pair}", "{name: full-sentences}")
    (tmp_path / "tiny.yaml").write_text(text, encoding="utf-8")
    source = write_text(tmp_path / "text.txt", documents=20)
    arguments = PretrainArguments(recipe=str(tmp_path / "tiny.yaml"), sources=[str(source)], cache=tmp_path / "cache")
    recipe = arguments.requested()
    shards = open_shards(recipe, cache=tmp_path / "cache", offline=True, progress=silent_progress)
    tokenizer = load_tokenizer(shards.directory)
    batches = StageRun(stages_of(recipe)[0], shards, tokenizer, cache=tmp_path / "cache").batches
    for step, count in [(0, 2), (3, 4), (5, 20)]:  # nine sequences: some of twenty ranks have none
        assert_same_samples(batches, step, count)


def assert_same_samples(batches: StepBatches, step: int, count: int) -> None:
    whole = batches.samples(step)
    batches.rank_count = count
    shares = []
    for batches.rank in range(count):
        share = batches.share(step)
        shares += [] if share is None else [share]
    for name in ("ids_T", "token_types_T", "lengths_B", "sample_B"):
        assert np.array_equal(np.concatenate([getattr(each, name) for each in shares]), getattr(whole, name)), name
    for term, targets in whole.targets.items():
        assert np.array_equal(np.concatenate([each.targets[term].id_M for each in shares]), targets.id_M), term
    for name, label_B in whole.labels.items():
        assert np.array_equal(np.concatenate([each.labels[name] for each in shares]), label_B), name


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a recipe, its text, and a run by one process."""
    directory = tmp_path_factory.mktemp("ranks")
    (directory / "tiny.yaml").write_text(WITHOUT_DROPOUT, encoding="utf-8")
    write_text(directory / "text.txt")
    run_pretraining(
        PretrainArguments(
            recipe=str(directory / "tiny.yaml"),
            sources=[str(directory / "text.txt")],
            cache=directory / "cache",
            run_dir=directory / "alone",
        ),
        progress=silent_progress,
    )
    return directory


def command(directory: Path, run: str, *more: str) -> list[str]:
    recipe, text = str(directory / "tiny.yaml"), str(directory / "text.txt")
    own = [sys.executable, "-m", "bertkit", "pretrain", recipe, "--data", text, "--run-dir", str(directory / run)]
    return [*own, *more]


def started(words: Sequence[str], directory: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words,
        env={**os.environ, **environment, "BERTKIT_CACHE": str(directory / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def logged(run: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in line.items() if key not in MACHINE_FIGURES}
        for line in read_metrics(run / "metrics.jsonl")
    ]


def assert_same_losses(run: Path, other: Path) -> None:
    lines, others = logged(run), logged(other)
    assert [line.keys() for line in lines] == [line.keys() for line in others]
    for line, expected in zip(lines, others, strict=True):
        assert line == pytest.approx(expected, rel=1e-5, abs=1e-5)


def rank_process(launcher: int, rank: int) -> psutil.Process:
    """The process that the launcher started as this rank."""
    children = psutil.Process(launcher).children(recursive=True)
    return next(each for each in children if each.environ().get("RANK") == str(rank) and "bertkit" in each.cmdline())


def kill_in_training(process: subprocess.Popen[str], run: Path, rank: int) -> psutil.Process:
    """Kill a rank after a few updates; returns its former process."""
    metrics = run / "metrics.jsonl"
    until = time.monotonic() + SECONDS
    while not (metrics.exists() and len(metrics.read_bytes().splitlines()) > 4) and time.monotonic() < until:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    killed = rank_process(process.pid, rank)
    killed.send_signal(signal.SIGKILL)
    return killed


def test_a_killed_rank_ends_all_with_a_checkpoint_and_one_process_goes_on_to_the_same_losses(alone: Path) -> None:
    run = alone / "killed"
    process = started(command(alone, "killed", "--nproc", "2", "--json"), alone)
    killed = kill_in_training(process, run, rank=1)
    stdout, stderr = process.communicate(timeout=SECONDS)
    assert process.returncode == 75, stderr
    assert f"rank 1 (process {killed.pid}" in stderr
    assert "checkpoint saved" in stderr
    assert json.loads(stdout)["code"] == 75
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    assert (record["status"], record["ranks"]) == ("stopped", 2)
    assert (run / "checkpoints" / "latest").read_text(encoding="utf-8").strip() == f"step-{record['steps']:08d}"
    run_pretraining(
        PretrainArguments(resume=str(run), cache=alone / "cache", overrides=one_rank()), progress=silent_progress
    )
    assert_same_losses(run, alone / "alone")
    results = [json.loads((each / "results.json").read_text(encoding="utf-8")) for each in (run, alone / "alone")]
    assert results[0]["held_out"] == pytest.approx(results[1]["held_out"], rel=1e-4)


def test_torchrun_starts_the_ranks_again_after_one_was_killed_and_the_run_ends_as_an_undisturbed_one(
    alone: Path,
) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*torchrun, "--max-restarts", "2", *command(alone, "again")[1:]]
    process = started(words, alone)
    kill_in_training(process, alone / "again", rank=0)
    _, stderr = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, stderr
    assert "resuming from" in stderr
    assert_same_losses(alone / "again", alone / "alone")


def test_a_sharded_run_of_which_a_rank_was_killed_goes_on_from_its_newest_checkpoint_to_the_same_model(
    alone: Path,
) -> None:
    run = alone / "sharded"
    process = started(command(alone, "sharded", "--nproc", "2", "--set", "engine.shard=true"), alone)
    kill_in_training(process, run, rank=1)
    _, stderr = process.communicate(timeout=SECONDS)
    assert process.returncode == 75, stderr
    assert "checkpoint saved" not in stderr, "the killed rank stored a part of the state"
    newest = (run / "checkpoints" / "latest").read_text(encoding="utf-8").strip()
    assert int(newest.removeprefix("step-")) % 3 == 0, "a checkpoint is written every three steps"
    resume = [
        sys.executable,
        "-m",
        "bertkit",
        "pretrain",
        "--resume",
        str(run),
        "--nproc",
        "2",
        "--set",
        "engine.shard=true",
    ]
    _, stderr = started(resume, alone).communicate(timeout=SECONDS)
    assert f"resuming from {run / 'checkpoints' / newest}" in stderr
    assert_same_losses(run, alone / "alone")
    ours, theirs = (load_file(each / "model" / "model.safetensors") for each in (run, alone / "alone"))
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], each, rtol=1e-4, atol=1e-5) for name, each in theirs.items())
    results = [json.loads((each / "results.json").read_text(encoding="utf-8")) for each in (run, alone / "alone")]
    assert results[0]["held_out"] == pytest.approx(results[1]["held_out"], rel=1e-4)
    assert not verify_run(run).errors


def one_rank() -> list[Any]:
    from bertkit.recipe.resolve import Override

    return [Override("engine.ranks", 1)]


def test_two_ranks_make_the_run_of_one_and_one_that_differs_is_refused_before_the_first_step(alone: Path) -> None:
    process = started(command(alone, "two", "--nproc", "2"), alone)
    seeds = ["0", "1"]
    differing = [
        started([*command(alone, "differing"), "--seed", seed], alone, **{
            name: value for name, value in environment.items() if name not in os.environ or os.environ[name] != value
        })
        for seed, environment in zip(seeds, environments(2), strict=True)
    ]  # fmt: skip
    stdout, stderr = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, stderr
    assert stdout == f"{alone / 'two'}\n", "only the first rank prints a result"
    assert_same_losses(alone / "two", alone / "alone")
    assert (alone / "two" / "model" / "model.safetensors").exists()
    counts = [[json.loads((alone / run / "run.json").read_text())[key] for key in COUNTS] for run in ("two", "alone")]
    assert counts[0] == counts[1]
    stories = [each.communicate(timeout=SECONDS)[1] for each in differing]
    assert [each.returncode for each in differing] == [2, 2], stories
    assert "recipe.seed: 0, there 1" in stories[0]
    assert not (alone / "differing").exists()

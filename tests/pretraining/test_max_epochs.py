"""A limit of epochs: a run with more steps is refused before its first one; an expected number fits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertkit.data.prepare import prepare_shards
from bertkit.errors import DataError
from bertkit.pretraining.recipe import load_recipe
from bertkit.pretraining.stage_run import check_epochs
from bertkit.pretraining.trainer import Pretrainer
from bertkit.progress import silent_progress
from bertkit.run.directory import RunDirectory
from bertkit.text.sources import open_corpus
from tests.overrides import parsed
from tests.training.tiny_run import write_recipe


def test_a_run_beyond_the_limit_is_refused_and_one_of_the_steps_that_fit_is_made(
    tmp_path: Path, bertkit: Callable[..., Any]
) -> None:
    recipe, text = write_recipe(tmp_path)
    limited = ["pretrain", recipe, "--data", text, "-q", "--set", "data.max_epochs=0.7"]
    refused = bertkit(*limited, "--run-dir", tmp_path / "refused")
    assert refused.code == 3
    found = re.search(
        rf"{re.escape(str(text))}: 60 steps would read the text ([\d.]+) times, but data\.max_epochs allows only 0\.7;"
        r" give --max-steps (\d+)",
        " ".join(refused.stderr.split()),
    )
    assert found is not None, refused.stderr
    fits = int(found[2])
    assert fits == pytest.approx(60 * 0.7 / float(found[1]), abs=1.1)
    assert not (tmp_path / "refused" / "metrics.jsonl").exists()
    done = bertkit(*limited, "--run-dir", tmp_path / "done", "--max-steps", str(fits))
    assert done.code == 0, done.stderr
    assert json.loads((tmp_path / "done" / "run.json").read_text())["steps"] == fits


def test_a_text_that_is_too_short_is_named_and_not_its_shards_in_the_cache(
    tmp_path: Path, bertkit: Callable[..., Any]
) -> None:
    recipe, text = write_recipe(tmp_path)
    short = tmp_path / "short.txt"
    short.write_text("\n\n".join(text.read_text().split("\n\n")[:3]))
    refused = bertkit("pretrain", recipe, "--data", short, "-q", "--run-dir", tmp_path / "refused")
    assert refused.code == 3
    assert re.search(
        rf"error: {re.escape(str(short))}: (the text gives|.* too few)", " ".join(refused.stderr.split())
    ), refused.stderr


def test_epochs_are_counted_over_all_stages_each_with_its_own_batch(tmp_path: Path) -> None:
    path, text = write_recipe(tmp_path)
    stages = [
        {"share": 0.4, "set": {"optimisation.batch_sequences": 3, "data.sequence_length": 16}},
        {"share": 0.6, "set": {"optimisation.batch_sequences": 7}},
    ]
    recipe = load_recipe(str(path), parsed([f"optimisation.stages={json.dumps(stages)}"]))
    cache = tmp_path / "cache"
    shards = prepare_shards(open_corpus([str(text)]), recipe.tokenizer, None, cache=cache, progress=silent_progress)
    runs = Pretrainer(recipe, shards, RunDirectory(tmp_path / "none", {}), cache=cache).stages
    first, second = (each.batches.stream.epoch_length(0) for each in runs)
    epochs = 24 * 3 / first + 36 * 7 / second

    def check(limit: float) -> None:
        check_epochs(limit, recipe.optimisation, runs)

    check(epochs * 1.001)
    with pytest.raises(DataError, match=r"--max-steps 59 or less, or give more text"):
        check(epochs * 0.999)
    with pytest.raises(DataError, match=r"allows only 0\.01; give more text"):
        check(0.01)

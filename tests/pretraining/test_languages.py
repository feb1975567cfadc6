"""A run over several languages: its shards and vocabulary, resuming, show-batch, and overrides on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bertkit.data.languages import LANGUAGES
from bertkit.data.shards import TokenShards
from bertkit.errors import StoppedError, UsageError
from bertkit.pretraining.arguments import PretrainArguments
from bertkit.pretraining.recipe import load_recipe
from bertkit.pretraining.run import run_pretraining
from bertkit.pretraining.stage_run import StageRun
from bertkit.pretraining.stages import stages_of
from bertkit.progress import silent_progress
from bertkit.text.tokenizer_files import load_tokenizer
from tests.overrides import parsed
from tests.training.tiny_run import write_text

SMALL = [
    "model={family: bert, hidden_size: 24, num_hidden_layers: 1, num_attention_heads: 3, intermediate_size: 40}",
    "tokenizer.vocab_size=150",
    "tokenizer.min_frequency=1",
    "data.sequence_length=40",
    "data.held_out=0.05",
    "optimisation.batch_sequences=5",
    "optimisation.stages=[]",
    "engine={device: cpu, evaluation_sequences: 6, pseudo_perplexity_sequences: 0}",
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("languages-run")
    write_text(directory / "en.txt", documents=150)
    german = (directory / "en.txt").read_text().replace("The", "Der").replace("reads", "liest")
    (directory / "de.txt").write_text("\n\n".join(german.split("\n\n")[:60]))
    return directory


def request(home: Path, run: str, **more: Any) -> PretrainArguments:
    languages = {name: [str(home / f"{name}.txt")] for name in ("en", "de")}
    defaults: dict[str, Any] = {
        "recipe": "mbert",
        "overrides": parsed([*SMALL, f"data.languages={json.dumps(languages)}"]),
        "run_dir": home / run,
        "cache": home / "cache",
        "max_steps": 4,
        "command": ["test"],
    }
    return PretrainArguments(**{**defaults, **more})


def test_stopped_and_resumed_a_run_over_languages_ends_with_the_same_model(home: Path) -> None:
    straight = run_pretraining(request(home, "straight"), progress=silent_progress).run
    shards = TokenShards.open(straight.record["shards"])
    assert [name for name, *_ in shards.manifest[LANGUAGES]] == ["en", "de"]
    with pytest.raises(StoppedError):
        run_pretraining(request(home, "stopped", max_minutes=0), progress=silent_progress)
    again = PretrainArguments(None, resume=str(home / "stopped"), cache=home / "cache", command=["test"])
    resumed = run_pretraining(again, progress=silent_progress).run
    weights = [(run.model / "model.safetensors").read_bytes() for run in (straight, resumed)]
    assert weights[0] == weights[1]
    # The batches that are shown are those of the training.
    recipe = load_recipe(str(straight.path / "recipe.yaml"))
    (stage,) = stages_of(recipe)
    tokenizer = load_tokenizer(shards.directory)
    batches = StageRun(stage, shards, tokenizer, cache=home / "cache").batches
    texts = [tokenizer.decode(one.ids_T.tolist()) for step in range(4) for one in batches.samples(step).split(1)]
    german = ["Der" in text or "liest" in text for text in texts]
    assert 3 < sum(german) < 17
    assert not any("The " in text for text, is_german in zip(texts, german, strict=True) if is_german)


def test_text_of_the_command_line_stands_in_place_of_the_languages(home: Path) -> None:
    recipe = request(home, "one", sources=[str(home / "en.txt")]).requested()
    assert recipe.data.languages == {}
    assert recipe.data.sources == [str(home / "en.txt")]


@pytest.mark.parametrize(
    "change", [{"data.sources": ["other.txt"]}, {"data.languages": {"fr": ["fr.txt"]}}, {"data.held_out": 0.5}]
)
def test_stages_read_the_same_text(home: Path, change: dict[str, Any]) -> None:
    stages = [{"share": 0.5}, {"share": 0.5, "set": change}]
    overrides = [*SMALL, f"optimisation.stages={json.dumps(stages)}"]
    with pytest.raises(UsageError, match=rf"stages\.1\.set: {next(iter(change))} cannot change.*--init"):
        request(home, "stages", overrides=parsed(overrides)).requested()

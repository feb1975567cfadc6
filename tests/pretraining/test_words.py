"""Words read by a run: counted between white space, limited, and the points at which its model is saved."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace as Fake
from typing import Any

import pytest

from bertkit.errors import DataError, StoppedError, UsageError
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.files import sha256_of
from bertkit.pretraining.arguments import PretrainArguments
from bertkit.pretraining.run import run_pretraining
from bertkit.pretraining.words import WordsRead, count_words, milestone_name, words_of_milestone
from bertkit.progress import silent_progress
from bertkit.run.directory import RunDirectory
from bertkit.text.sources import open_corpus
from tests.overrides import parsed
from tests.training.stopping import stopping_at
from tests.training.tiny_run import write_text

RECIPE = """
title: a run for tests
tokenizer: {vocab_size: 300, min_frequency: 1}
data: {layout: {name: full-sentences}, sequence_length: 24, held_out: 0.05, held_out_tokens: 0, max_epochs: 3}
model: {family: bert, hidden_size: 24, num_hidden_layers: 1, num_attention_heads: 3, intermediate_size: 40,
        max_position_embeddings: 40}
objective: [masked_lm]
optimisation:
  optimizer: {name: adamw}
  schedule: {name: linear, peak: 2.0e-3, warmup_share: 0.1}
  ema: 0.9
  batch_sequences: 8
  steps: 1000
  passes: 3
engine: {device: cpu, log_every_steps: 1, save_every_steps: 4, evaluate_every_steps: 100, evaluation_sequences: 4,
         pseudo_perplexity_sequences: 0, models_at_words: [500, 1000, 1500, 6800, 100000]}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("words")
    (directory / "words.yaml").write_text(RECIPE, encoding="utf-8")
    write_text(directory / "text.txt")
    return directory


def arguments(home: Path, run: str, *settings: str, source: str = "text.txt", resume: bool = False) -> Any:
    return PretrainArguments(
        None if resume else str(home / "words.yaml"),
        sources=[] if resume else [str(home / source)],
        overrides=parsed(list(settings)),
        run_dir=None if resume else home / run,
        resume=str(home / run) if resume else None,
        cache=home / "cache",
        command=["test"],
    )


def trained(home: Path, run: str, *settings: str, resume: bool = False) -> RunDirectory:
    return run_pretraining(arguments(home, run, *settings, resume=resume), progress=silent_progress).run


@pytest.fixture(scope="module")
def straight(home: Path) -> RunDirectory:
    return trained(home, "straight")


def kept(run: RunDirectory) -> dict[str, str]:
    return {path.parent.name: sha256_of(path) for path in run.path.glob("models/*/model.safetensors")}


def test_words_are_those_between_white_space_in_any_file(tmp_path: Path) -> None:
    (tmp_path / "a.train").write_text("*MOT:\tyou don't  say so .\n\n= = = Title = = =\n", encoding="utf-8")
    with lzma.open(tmp_path / "b.train.txt.xz", "wt", encoding="utf-8") as file:
        file.write("Elle a vu l'été.\n")
    assert count_words(open_corpus([str(tmp_path)], cache=tmp_path / "cache"), silent_progress) == 6 + 7 + 4


def test_models_are_kept_at_their_words_and_the_record_has_how_many_were_read(
    home: Path, straight: RunDirectory
) -> None:
    text = len((home / "text.txt").read_text().split())
    found = json.loads((straight.path / "results.json").read_text())["words"]
    assert found["text"] == text == straight.record["words"]
    # Three passes over all except the held-out documents.
    assert 0.9 * 3 * text * 0.95 < found["read"] <= 3 * text * 0.97
    assert found["not_reached"] == [100_000]
    assert [each["words"] for each in found["models"]] == [500, 1000, 1500, 6800]
    for each in found["models"][:3]:
        assert each["words"] <= each["read"] < each["words"] * 1.3
    # At the end nine tenths of the mark have been read, so the last model counts for it.
    assert found["models"][3]["step"] == straight.record["steps"]
    assert 0.9 * 6800 <= found["models"][3]["read"] < 6800
    lines = [json.loads(line) for line in (straight.path / "metrics.jsonl").read_text().splitlines()]
    words = {line["step"]: line["words"] for line in lines if "words" in line}
    assert {each["step"]: each["read"] for each in found["models"]}.items() <= words.items()
    assert set(kept(straight)) == {"500", "1k", "1500", "6800"}
    assert len(set(kept(straight).values())) == 4
    assert kept(straight)["6800"] == sha256_of(straight.model / "model.safetensors")
    assert LoadedModel.load(str(straight.path / "models" / "1k")).model.head_names == ("masked_lm",)


def words_of_two_stages() -> WordsRead:
    """Ten words an update, then twenty: half of the text's 400 words are held out, and a pass has 100 sequences."""

    def stage(first: int, end: int, batch: int) -> Any:
        steps = Fake(first_step=first, end_step=end, sequences=lambda low, high: batch * (high - low))
        stream = Fake(tokens=500, shards=Fake(tokens=1000), epoch_length=lambda epoch: 100)
        return Fake(stage=steps, batches=Fake(stream=stream))

    return WordsRead([stage(0, 10, 5), stage(10, 20, 10)], text_words=400, steps=20)


def test_words_add_up_over_stages_without_held_out_text() -> None:
    read = words_of_two_stages()
    assert [read.before(step) for step in (0, 1, 10, 11, 20)] == [0, 10, 100, 120, 300]


def test_a_mark_is_saved_once_by_the_first_update_that_reaches_it() -> None:
    read, marks = words_of_two_stages(), [9, 10, 11, 100, 101, 120, 299, 320, 340]
    due = {mark: step for step in range(1, 21) for mark in read.due(step, marks)}
    assert due == read.steps_of(marks) == {9: 1, 10: 1, 11: 2, 100: 10, 101: 11, 120: 11, 299: 20, 320: 20}
    assert sum(len(read.due(step, marks)) for step in range(1, 21)) == len(due)


def test_a_resumed_run_keeps_the_same_models_to_the_bit(home: Path, straight: RunDirectory) -> None:
    with stopping_at(6), pytest.raises(StoppedError):
        trained(home, "resumed")
    with stopping_at(7), pytest.raises(StoppedError):
        trained(home, "resumed", resume=True)
    again = trained(home, "resumed", resume=True)
    assert kept(again) == kept(straight)
    assert again.results == straight.results


def test_keeping_models_changes_nothing(home: Path, straight: RunDirectory) -> None:
    without = trained(home, "without", "engine.models_at_words=[]")
    assert sha256_of(without.model / "model.safetensors") == sha256_of(straight.model / "model.safetensors")
    assert without.record["what_hash"] == straight.record["what_hash"]
    assert "words" not in without.record
    assert not (without.path / "models").exists()


def test_more_words_than_allowed_are_told_before_anything_is_made(home: Path) -> None:
    words = len((home / "text.txt").read_text().split())
    with pytest.raises(
        DataError, match=rf"{words:,} words separated by white space, {words - 1000:,} more than data.max"
    ):
        run_pretraining(arguments(home, "long", "data.max_words=1000"), progress=silent_progress)
    assert not (home / "long").exists()


def test_ten_passes_fit_the_limit_of_ten_and_more_are_refused(home: Path) -> None:
    with pytest.raises(DataError, match=r"data.max_epochs allows only 2"):
        run_pretraining(arguments(home, "more", "data.max_epochs=2"), progress=silent_progress)
    assert not (home / "more").exists()


def test_words_of_token_shards_cannot_be_counted(home: Path, straight: RunDirectory) -> None:
    shards = Path(straight.record["shards"])
    with pytest.raises(UsageError, match=r"engine\.models_at_words: .* contains tokens, whose words cannot be counted"):
        run_pretraining(arguments(home, "shards", source=str(shards)), progress=silent_progress)


def test_other_files_than_expected_are_told(tmp_path: Path, bertkit: Callable[..., Any]) -> None:
    (tmp_path / "words.yaml").write_text(RECIPE, encoding="utf-8")
    folder = tmp_path / "train_10M"
    folder.mkdir()
    for name in ("childes.train", "novels.train.txt"):
        write_text(folder / name, seed=len(name))
    files = "engine.expected_files=[childes, gutenberg]"
    command = ("pretrain", tmp_path / "words.yaml", "--data", folder, "--run-dir", tmp_path / "run", "--max-steps", "2")
    outcome = bertkit(*command, "--set", files)
    assert outcome.code == 0, outcome.stderr
    told = " ".join(outcome.stderr.split())
    assert "it has novels.train.txt and lacks gutenberg" in told


def test_marks_ascend(home: Path) -> None:
    with pytest.raises(UsageError, match="models_at_words must be in ascending order"):
        arguments(home, "bad", "engine.models_at_words=[2000, 1000]").new_recipe()


@pytest.mark.parametrize(("words", "name"), [(1_000_000, "1M"), (250_000, "250k"), (999, "999"), (1_500_000, "1500k")])
def test_a_mark_has_a_short_name(words: int, name: str) -> None:
    assert milestone_name(words) == name
    assert words_of_milestone(name) == words


@pytest.mark.parametrize("name", ["", "M", "1G", "latest", "-1k", "1.5M", "\N{SUPERSCRIPT TWO}k"])
def test_other_directories_are_no_marks(name: str) -> None:
    assert words_of_milestone(name) is None

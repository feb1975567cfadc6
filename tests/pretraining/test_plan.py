"""The operations of `--plan`, compared with those that a run counts on its batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertkit.data.batch import PackedBatch
from bertkit.data.random import Draw
from bertkit.data.samples import Samples
from bertkit.data.stream import corrupted
from bertkit.objectives.forward import pretraining_model
from bertkit.pretraining.plan import pretraining_plan
from bertkit.pretraining.recipe import load_recipe
from bertkit.training import plan
from bertkit.training.cost import training_flops
from tests.data.toy_corpus import vocabulary, write_shards
from tests.overrides import parsed

SEQUENCES, LENGTH, STEPS = 6, 40, 5
RECIPE = """
title: a run for tests
data: {layout: {name: segment-pair}, sequence_length: 40}
model: {family: FAMILY, hidden_size: 24, num_hidden_layers: 2, num_attention_heads: 3, intermediate_size: 40,
        max_position_embeddings: 40}
objective: OBJECTIVE
optimisation:
  optimizer: {name: adamw}
  schedule: {name: constant, peak: 1.0e-3}
  batch_sequences: 6
  steps: 5
engine: {device: cpu}
"""


def full_sequences(words: int) -> Samples:
    """A batch of sequences of the full length."""
    known = vocabulary(words)
    ids_BS = np.random.default_rng(4).integers(10, known.size, (SEQUENCES, LENGTH))
    ids_BS[:, 0], ids_BS[:, -1] = known.cls_id, known.sep_id
    ids_T = ids_BS.ravel()
    return Samples(
        ids_T=ids_T,
        token_types_T=np.zeros_like(ids_T),
        special_T=(ids_T == known.cls_id) | (ids_T == known.sep_id),
        cu_seqlens_B1=np.arange(SEQUENCES + 1) * LENGTH,
        epoch_B=np.zeros(SEQUENCES, dtype=np.int64),
        sample_B=np.arange(SEQUENCES),
    )


@pytest.mark.parametrize(
    ("family", "objective"),
    [
        ("bert", "[masked_lm, next_sentence]"),
        ("bert", "[masked_lm]"),
        ("modernbert", "[masked_lm]"),
        ("electra", "[masked_lm, replaced_token: {generator_size: 1.0, tie: embeddings}]"),
    ],
)
def test_full_sequences_cost_what_is_planned(
    family: str, objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A masked LM reads a seventh of the last layer's states, so most of that layer is not computed."""
    monkeypatch.setattr(plan, "measured_peak_flops", lambda device, bf16: 1e12)
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("FAMILY", family).replace("OBJECTIVE", objective), encoding="utf-8")
    recipe, known = load_recipe(str(path)), vocabulary(90)
    with torch.device("meta"):
        model = pretraining_model(recipe.model, recipe.objectives, known.size)
    masked = corrupted(full_sequences(90), recipe.objectives, known, Draw(1, "test"), progress=0.0)
    flops = training_flops(model, [PackedBatch.from_samples(masked)], recipe.objectives)
    assert pretraining_plan(recipe, vocab_size=known.size)["flops"] == pytest.approx(STEPS * flops, rel=1e-12)


def test_a_plan_without_the_network_fetches_no_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path, [[30, 40]])
    offline = []

    def directory(source: str, **settings: Any) -> Path:
        offline.append(settings.get("offline", False))
        return Path(source)

    monkeypatch.setattr("bertkit.pretraining.planned_text.shards_directory", directory)
    document = pretraining_plan(load_recipe("bert-tiny", parsed([f"data.sources=[{tmp_path}]"])), offline=True)
    assert document["text_passes"] > 0
    assert set(offline) == {True}


def test_token_shards_beside_text_are_refused_in_the_words_of_the_run(
    bertkit: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "shards").mkdir()
    for name in ("manifest.json", "tokenizer.json"):
        (tmp_path / "shards" / name).write_text("{}")
    (tmp_path / "text.txt").write_text("one line of text\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.replace("FAMILY", "bert").replace("OBJECTIVE", "[masked_lm]"), encoding="utf-8")
    words = ["pretrain", recipe, "--data", tmp_path / "text.txt", "--data", tmp_path / "shards"]
    planned, trained = bertkit(*words, "--plan"), bertkit(*words, "--run-dir", tmp_path / "run")
    assert (planned.code, trained.code) == (2, 2)
    assert "is a directory of token shards, which cannot be read as text or combined with other" in planned.stderr
    assert planned.stderr.splitlines()[-1] == trained.stderr.splitlines()[-1]


def planned(bertkit: Callable[..., Any], tmp_path: Path, *more: object) -> tuple[dict[str, Any], str]:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.replace("FAMILY", "bert").replace("OBJECTIVE", "[masked_lm]"), encoding="utf-8")
    found = bertkit("pretrain", recipe, *more, "--plan", "--json")
    assert found.code == 0, found.stderr
    return json.loads(found.stdout), " ".join(found.stderr.split())


def test_files_of_a_directory_or_a_glob_are_counted_like_named_ones(
    bertkit: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(f"the dog number {number} sleeps\n" * 40)
    (folder / "notes.md").write_text("no text\n")
    ways = [[folder], [folder / "*.txt"], [folder / f"{number}.txt" for number in range(3)], [folder, folder / "0.txt"]]
    plans = [planned(bertkit, tmp_path, "--data", *way)[0] for way in ways]
    assert plans[0]["text_passes"] == pytest.approx(1.41, rel=0.01), "a pass has 19 pairs, without the held-out tenth"
    assert {plan["text_passes"] for plan in plans} == {plans[0]["text_passes"]}
    assert {plan["vocabulary"]["at_most"] for plan in plans} == {False}


def test_metadata_of_json_lines_are_not_counted_as_text(
    bertkit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bertkit.pretraining.planned_text._COUNTED_BYTES", 2_000)
    documents = [f"the dog number {number} sleeps" for number in range(400)]
    (tmp_path / "text.txt").write_text("\n\n".join(documents))
    rows = [json.dumps({"url": "x" * (50 + len(text)), "text": text}) for text in documents]
    (tmp_path / "text.jsonl").write_text("\n".join(rows))
    plain, records = (planned(bertkit, tmp_path, "--data", tmp_path / f"text.{form}")[0] for form in ("txt", "jsonl"))
    assert records["text_passes"] == pytest.approx(plain["text_passes"], rel=0.1)


def test_a_text_that_is_not_there_is_told_and_the_rest_is_planned(bertkit: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("one line\n")
    plan, told = planned(bertkit, tmp_path, "--data", tmp_path / "text.txt")
    assert "text_passes" not in plan
    assert "text.txt: no such file or directory; did you mean" in told
    assert "the plan is made without the text" in told


def test_a_run_that_its_limit_of_passes_would_refuse_is_told_with_the_steps_that_fit(
    bertkit: Callable[..., Any], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the dog sleeps\n\n" * 20)
    more = ("--data", text, "--set", "data.max_epochs=1")
    plan, told = planned(bertkit, tmp_path, *more)
    fitting = int(STEPS / plan["text_passes"])
    assert f"but data.max_epochs allows only 1: the run would be refused; give --max-steps {fitting} or less" in told
    assert "max_epochs" not in planned(bertkit, tmp_path, *more, "--max-steps", str(fitting))[1]


@pytest.mark.parametrize("layout", ["doc-sentences", "segment-pair", "packed-documents", "full-sentences"])
def test_sequences_have_the_lengths_of_the_text(
    layout: str, bertkit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents of 3 to 30 words make sequences far shorter than 40 tokens, unless the layout joins them."""
    monkeypatch.setattr(plan, "measured_peak_flops", lambda device, bf16: 1e12)
    texts = [" ".join(["the dog sleeps", *["in the house"] * (number % 10)]) for number in range(300)]
    (tmp_path / "text.txt").write_text("\n\n".join(texts) + "\n")
    more = ("--data", tmp_path / "text.txt", "--set", f"data.layout={{name: {layout}}}")
    document = planned(bertkit, tmp_path, *more)[0]
    run = tmp_path / "run"
    done = bertkit("pretrain", tmp_path / "recipe.yaml", *more, "--run-dir", run)
    assert done.code == 0, done.stderr
    record = json.loads((run / "run.json").read_text())
    assert document["tokens"] == pytest.approx(record["tokens"], rel=0.1)
    assert document["flops"] == pytest.approx(record["flops"], rel=0.1)
    assert (document["mean_sequence_tokens"] < 20) == (layout == "doc-sentences")


def test_more_steps_than_the_recipe_has_are_told(bertkit: Callable[..., Any], tmp_path: Path) -> None:
    plan, told = planned(bertkit, tmp_path, "--max-steps", STEPS + 1)
    assert plan["steps"] == STEPS
    assert (
        "--max-steps 6: the run has 5 steps (optimisation.steps); for a longer run, --set optimisation.steps=6" in told
    )

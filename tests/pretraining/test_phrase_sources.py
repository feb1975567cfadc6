"""The source of a run's phrases is part of its recipe: a lexicon by its content, annotated spans with the corpus."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertkit.errors import DataError, StoppedError
from bertkit.files import sha256_of
from bertkit.pretraining.arguments import PretrainArguments, with_file_hashes
from bertkit.pretraining.recipe import load_recipe
from bertkit.pretraining.run import run_pretraining
from bertkit.pretraining.stages import stages_of
from bertkit.progress import silent_progress
from bertkit.recipe.hashing import what_hash
from tests.overrides import parsed
from tests.training.tiny_run import NOUNS, VERBS, write_text

Bertkit = Callable[..., Any]
KEY = "objective.masked_lm.units.lexicon_sha256"
RECIPE = """
title: phrases for tests
tokenizer: {vocab_size: 300, min_frequency: 1}
data: {layout: {name: doc-sentences}, sequence_length: 32, held_out: 0.05}
model: {family: bert, hidden_size: 24, num_hidden_layers: 1, num_attention_heads: 3, intermediate_size: 40,
        max_position_embeddings: 40}
objective: [masked_lm: {rate: 0.3, units: {name: phrases, phrase_rate: 0.5, lexicon: LEXICON}}]
optimisation: {schedule: {name: linear, peak: 1.0e-3, warmup_steps: 1}, batch_sequences: 5, steps: 3}
engine: {device: cpu, evaluation_sequences: 4, pseudo_perplexity_sequences: 0}
"""


@pytest.fixture
def lexicon(tmp_path: Path) -> Path:
    """A lexicon next to a recipe that names it, and a text."""
    path = tmp_path / "names.txt"
    path.write_text("the cat reads\na tensor\n", encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("LEXICON", str(path)), encoding="utf-8")
    write_text(tmp_path / "text.txt")
    return path


def request(home: Path, **changes: Any) -> PretrainArguments:
    defaults = {
        "recipe": str(home / "recipe.yaml"),
        "sources": [str(home / "text.txt")],
        "run_dir": home / "run",
        "cache": home / "cache",
        "command": ["test"],
    }
    return PretrainArguments(**{**defaults, **changes})


def test_a_changed_lexicon_is_refused_under_resume_and_named(lexicon: Path, tmp_path: Path, bertkit: Bertkit) -> None:
    with pytest.raises(StoppedError):
        run_pretraining(request(tmp_path, max_minutes=0), progress=silent_progress)
    recorded = load_recipe(str(tmp_path / "run" / "recipe.yaml"))
    assert recorded.objectives[0].model_dump()["units"]["lexicon_sha256"] == sha256_of(lexicon)
    before = lexicon.read_text()
    recipe = [tmp_path / "recipe.yaml", "--data", tmp_path / "text.txt"]
    for content in (before + "a number\n", None):
        lexicon.unlink() if content is None else lexicon.write_text(content, encoding="utf-8")
        for words in (["pretrain", "--resume", tmp_path / "run"], ["pretrain", *recipe, "--resume", tmp_path / "run"]):
            done = bertkit(*words)
            assert done.code == 2, done.stderr
            assert f"{KEY}: the run has '" in done.stderr
            assert "Traceback" not in done.stderr
    lexicon.write_text(before, encoding="utf-8")
    done = bertkit("pretrain", "--resume", tmp_path / "run", "-q")
    assert done.code == 0, done.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "done"


def test_the_content_of_a_lexicon_decides_the_hash_and_its_path_is_checked_against_it(
    lexicon: Path, tmp_path: Path
) -> None:
    first = request(tmp_path).requested()
    assert what_hash(first) == what_hash(request(tmp_path).requested())
    lexicon.write_text("a tensor\n", encoding="utf-8")
    second = request(tmp_path).requested()
    assert what_hash(first) != what_hash(second)
    assert with_file_hashes(first) == first
    assert with_file_hashes(first, recompute=True) == second
    pinned = f"{KEY}={sha256_of(tmp_path / 'text.txt')}"
    with pytest.raises(DataError, match=r"names\.txt: the lexicon is not the recipe's.*set lexicon_sha256 to null"):
        run_pretraining(request(tmp_path, overrides=parsed([pinned])), progress=silent_progress)


def test_a_stage_s_lexicon_has_its_hash_too(lexicon: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("a list\n", encoding="utf-8")
    dotted = f"{{share: 0.4, set: {{objective.masked_lm.units.lexicon: {other}}}}}"
    whole = f"{{share: 0.3, set: {{objective.masked_lm.units: {{name: phrases, lexicon: {other}}}}}}}"
    none = "{share: 0.3, set: {objective.masked_lm.units: {name: words}}}"
    recipe = request(tmp_path, overrides=parsed([f"optimisation.stages=[{dotted}, {whole}, {none}]"])).requested()
    units = [stage.recipe.objectives[0].model_dump()["units"] for stage in stages_of(recipe)]
    assert [each.get("lexicon_sha256") for each in units] == [sha256_of(other), sha256_of(other), None]
    assert recipe.objectives[0].model_dump()["units"]["lexicon_sha256"] == sha256_of(lexicon)


def write_annotated(path: Path) -> Path:
    """Generated sentences with their verb phrase annotated, and a span that matches nothing."""
    records = []
    for number in range(60):
        sentences = [
            f"The {NOUNS[(number + k) % 10]} {VERBS[(number * k) % 6]} a {NOUNS[(number * 3 + k) % 10]}."
            for k in range(5)
        ]
        text, spans, at = "  ".join(sentences), [], 0
        for sentence in sentences:
            start = text.index(sentence, at) + sentence.index(" ", 4) + 1
            at = text.index(sentence, at) + len(sentence)
            spans.append([start, at - 1])
        records.append({"text": text, "verbs": [*spans, [at - len(sentences[-1]) - 1, at - len(sentences[-1])]]})
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return path


def test_a_run_hides_annotated_spans_and_a_changed_annotation_is_noticed(
    lexicon: Path, tmp_path: Path, bertkit: Bertkit
) -> None:
    corpus = write_annotated(tmp_path / "corpus.jsonl")
    words = ["pretrain", tmp_path / "recipe.yaml", "--data", corpus, "--run-dir", tmp_path / "run"]
    words += ["--set", "data.reading.span_fields=[verbs]", "--max-minutes", "0"]
    words += ["--set", "objective.masked_lm.units={name: annotated, field: verbs, phrase_rate: 1.0}"]
    done = bertkit(*words)
    assert done.code == 75, done.stderr
    assert "verbs: 300 of 360 annotated spans are kept; left out: 60 match no token" in done.stderr
    shown = bertkit("show-batch", tmp_path / "run", "--step", "1", "--json")
    assert shown.code == 0, shown.stderr
    first = corpus.read_text()
    corpus.write_text(first.replace('"verbs": [[', '"verbs": [[0, 3], [', 1), encoding="utf-8")
    done = bertkit("pretrain", "--resume", tmp_path / "run", "-q")
    assert done.code == 3, done.stderr
    assert "the data has changed since the run began" in done.stderr
    corpus.write_text(first, encoding="utf-8")
    done = bertkit("pretrain", "--resume", tmp_path / "run", "-q")
    assert done.code == 0, done.stderr


def test_annotated_units_without_a_field_are_a_fault_of_the_recipe(lexicon: Path, bertkit: Bertkit) -> None:
    home = lexicon.parent
    units = ["--set", "objective.masked_lm.units={name: annotated, field: verbs}"]
    done = bertkit("pretrain", home / "recipe.yaml", "--data", write_annotated(home / "corpus.jsonl"), *units)
    assert done.code == 2
    assert "units.field is 'verbs', but data.reading.span_fields has none" in done.stderr
    done = bertkit(
        *("pretrain", home / "recipe.yaml", "--data", home / "text.txt", *units),
        *("--set", "data.reading.span_fields=[verbs]"),
    )
    assert done.code == 2
    assert "text.txt cannot contain spans" in done.stderr

"""Pretraining on a short text holds out enough for evaluation, reports how much, and warns if it is too little."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertkit.pretraining.held_out import INTERVAL_PREDICTIONS, HeldOutSize
from tests.training.tiny_run import NOUNS, VERBS, write_recipe

Bertkit = Callable[..., Any]
FEW_STEPS = ("--max-steps", "4", "--set", "engine.evaluation_sequences=512")


def write_novel(path: Path, paragraphs: int) -> Path:
    """Paragraphs of one to four sentences, as in a book, one document per paragraph."""
    generator = np.random.default_rng(1)

    def sentence() -> str:
        return f"The {generator.choice(NOUNS)} {generator.choice(VERBS)} the {generator.choice(NOUNS)}."

    texts = [" ".join(sentence() for _ in range(generator.integers(1, 5))) for _ in range(paragraphs)]
    path.write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    return path


def pretrained(bertkit: Bertkit, home: Path, text: Path, *more: str) -> tuple[dict[str, Any], str]:
    home.mkdir(exist_ok=True)
    recipe, _ = write_recipe(home)
    done = bertkit("pretrain", recipe, "--data", text, "--run-dir", home / "run", "--json", *FEW_STEPS, *more)
    assert done.code == 0, done.stderr
    return json.loads(done.stdout)["results"], done.stderr


def test_one_novel_holds_out_a_tenth_and_says_how_much(bertkit: Bertkit, tmp_path: Path) -> None:
    """By documents alone these are 2 or 3 paragraphs of 265."""
    results, shown = pretrained(
        bertkit, tmp_path, write_novel(tmp_path / "novel.txt", 265), "--set", "data.held_out=0.01"
    )
    text = results["held_out_text"]
    assert 0.1 <= text["share"] < 0.11
    assert text["sequences"] >= 20
    said = f"warning: held-out text: {text['tokens']:,} tokens ({text['share']:.1%} of the text)"
    assert shown.count(said) == 2  # before the training, and next to the figures
    assert f"up to +-{100 * text['interval']:.1f} points" in shown
    assert "give more text, or raise data.held_out" in shown


def test_enough_text_is_told_without_a_warning(bertkit: Bertkit, tmp_path: Path) -> None:
    results, shown = pretrained(bertkit, tmp_path, write_novel(tmp_path / "novel.txt", 2000))
    text = results["held_out_text"]
    assert text["predictions"] >= INTERVAL_PREDICTIONS
    assert "warning: held-out" not in shown
    assert f"held-out text: {text['tokens']:,} tokens (" in shown


def test_where_an_evaluation_reads_few_of_the_held_out_samples_that_limit_is_named(
    bertkit: Bertkit, tmp_path: Path
) -> None:
    novel = write_novel(tmp_path / "novel.txt", 2000)
    results, shown = pretrained(bertkit, tmp_path, novel, "--set", "engine.evaluation_sequences=20")
    assert results["held_out_text"]["sequences"] == 20
    assert results["held_out_text"]["is_part"] is True
    assert shown.count("too wide to tell models apart; raise engine.evaluation_sequences") == 2
    assert "give more text" not in shown


@pytest.mark.parametrize(("predictions", "half_width"), [(385, 0.05), (2401, 0.02), (1, 0.98)])
def test_the_interval_is_the_normal_approximation_at_one_half(predictions: int, half_width: float) -> None:
    size = HeldOutSize(tokens=1, share=0.1, sequences=1, predictions=predictions)
    assert size.interval == pytest.approx(half_width, abs=1e-4)


def test_a_run_of_an_earlier_version_goes_on_with_the_text_that_it_held_out(bertkit: Bertkit, tmp_path: Path) -> None:
    """Its record has no minimum: text that it was trained on must not become held-out text."""
    recipe, text = write_recipe(tmp_path)
    words = ("pretrain", recipe, "--data", text, *FEW_STEPS)
    by_documents = (*words, "--set", "data.held_out_tokens=0")
    assert bertkit(*by_documents, "--run-dir", tmp_path / "straight").code == 0
    expected = json.loads((tmp_path / "straight" / "results.json").read_text())
    run = tmp_path / "old"
    assert bertkit(*words, "--run-dir", run, "--max-minutes", "0").code == 75
    record = json.loads((run / "run.json").read_text())
    assert record.pop("held_out") == {"least_tokens": 10_000}
    (run / "run.json").write_text(json.dumps(record))
    assert bertkit("pretrain", "--resume", run).code == 0
    found = json.loads((run / "results.json").read_text())
    assert found["held_out_text"] == expected["held_out_text"]
    assert found["held_out_text"]["share"] < 0.1


def test_held_out_documents_that_are_also_trained_on_are_told_and_left_out_on_request(
    bertkit: Bertkit, tmp_path: Path
) -> None:
    novel = write_novel(tmp_path / "novel.txt", 500)
    novel.write_text(novel.read_text(encoding="utf-8") + "\n" + novel.read_text(encoding="utf-8"), encoding="utf-8")
    results, shown = pretrained(bertkit, tmp_path / "twice", novel)
    known = results["held_out_text"]["in_train"]
    assert known > 0.5
    assert f"warning: {100 * known:.1f}% of the held-out text is in documents that occur in the training text" in shown
    assert "duplicates" not in results
    results, shown = pretrained(bertkit, tmp_path / "once", novel, "--set", "data.deduplicate=true")
    assert results["held_out_text"]["in_train"] == 0
    assert results["duplicates"]["documents"] >= 500
    assert results["duplicates"]["share"] >= 0.5
    assert f"data.deduplicate: {results['duplicates']['documents']:,} documents" in shown
    assert "occur in the training text" not in shown
    nearly, shown = pretrained(bertkit, tmp_path / "nearly", novel, "--set", "data.deduplicate=0.5")
    assert nearly["duplicates"]["documents"] >= results["duplicates"]["documents"]
    assert (results["duplicates"]["similarity"], nearly["duplicates"]["similarity"]) == (1, 0.5)
    assert "0.5 similar to an earlier one" in shown

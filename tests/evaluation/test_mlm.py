"""Masked words of a text: figures follow from single predictions for any batch; windows are drawn fairly."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertkit.data.batch import PackedBatch
from bertkit.data.random import Draw
from bertkit.errors import DataError, UsageError
from bertkit.evaluation.mlm import Window, chosen_tokens, drawn_texts, drawn_windows, evaluate_mlm
from bertkit.evaluation.run import EvalArguments
from bertkit.evaluation.settings import MlmSettings
from bertkit.models.headed import SCORING_RULE, HeadedModel
from bertkit.run.verify import verify_run
from bertkit.text.sources import open_corpus
from bertkit.text.tokenizer import Tokenizer, TokenizerConfig
from bertkit.text.vocabulary import train_tokenizer
from tests.probing.tiny_models import constant_model, save_tiny, tiny_causal_model, tiny_model, tiny_tokenizer
from tests.text.corpora import english


def write_documents(directory: Path) -> Path:
    """Seven documents of one to thirteen sentences."""
    sentences = english(49, seed=2)
    documents = ["\n".join(sentences[n * n : (n + 1) * (n + 1)]) for n in range(7)]
    path = directory / "text.txt"
    path.write_text("\n\n".join(documents), encoding="utf-8")
    return path


def byte_tokenizer() -> Tokenizer:
    """A small vocabulary of bytes, which preserves every text."""
    settings = TokenizerConfig(type="byte-bpe", vocab_size=300, lowercase=False)
    return train_tokenizer(settings, english(49, seed=2))


def evaluate(tmp_path: Path, model: HeadedModel, *, batch: int = 300, **settings: Any) -> tuple[Path, dict[str, Any]]:
    if not (tmp_path / "model").exists():
        save_tiny(model, tiny_tokenizer(), tmp_path / "model")
    request = EvalArguments(
        model=str(tmp_path / "model"),
        device="cpu",
        batch_tokens=batch,
        runs_root=tmp_path / "runs",
        command=["x"],
        fresh=True,
    )
    done = evaluate_mlm(request, [str(write_documents(tmp_path))], MlmSettings(**settings))
    return done.run.path, done.results


def means(results: dict[str, Any]) -> dict[str, float]:
    return {name: figure["mean"] for name, figure in results["tasks"]["mlm"].items()}


@pytest.mark.parametrize(("rule", "first"), [("original", 1), ("masked_next_token", 0)])
def test_figures_follow_from_single_predictions(rule: str, first: int, tmp_path: Path) -> None:
    """Each predicted from the state that the model was trained to use: the token's own, or the one before."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    if rule != "original":
        model.extras[SCORING_RULE] = rule
    _, results = evaluate(tmp_path, model, sequence_length=31, sequences=9, pseudo_sequences=3, seed=6)
    draw = Draw(6, "mlm")
    windows = drawn_windows(open_corpus([str(tmp_path / "text.txt")]), tokenizer, 29, 9, draw)
    assert len(windows) == 9

    def log_p_NV(ids_T: np.ndarray[Any, Any]) -> torch.Tensor:
        whole = [tokenizer.cls_id, *ids_T.tolist(), tokenizer.sep_id]
        with torch.no_grad():
            hidden_ND = model(PackedBatch.from_ids([whole]))[first : first + ids_T.size]
            return torch.log_softmax(model.token_logits("masked_lm", hidden_ND), dim=-1)

    log_p, right, alone = [], [], []
    for number, window in enumerate(windows):
        masked = chosen_tokens(window, draw, 0.15)
        hidden = window.ids_T.copy()
        hidden[masked] = tokenizer.mask_id
        answers = log_p_NV(hidden)
        for place in masked:
            log_p.append(answers[place, window.ids_T[place]].item())
            right.append(answers[place].argmax().item() == window.ids_T[place])
        for place in range(window.ids_T.size if number < 3 else 0):
            hidden = window.ids_T.copy()
            hidden[place] = tokenizer.mask_id
            alone.append(log_p_NV(hidden)[place, window.ids_T[place]].item())
    expected = {
        "accuracy": np.mean(right),
        "perplexity": math.exp(-np.mean(log_p)),
        "pseudo_perplexity": math.exp(-np.mean(alone)),
    }
    found = means(results)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert results["average"] == found["accuracy"]


def test_constant_logits_have_the_perplexity_of_the_vocabularys_size(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    _, results = evaluate(tmp_path, constant_model(tokenizer), sequences=5, pseudo_sequences=2)
    found = means(results)
    assert found["perplexity"] == pytest.approx(tokenizer.vocab_size, rel=1e-5)
    assert found["pseudo_perplexity"] == pytest.approx(tokenizer.vocab_size, rel=1e-5)
    assert 0 < found["constant_accuracy"] < 1


def test_figures_do_not_depend_on_the_batch_and_the_run_verifies(tmp_path: Path) -> None:
    model = tiny_model(tiny_tokenizer())
    run, small = evaluate(tmp_path, model, batch=1, sequences=7, pseudo_sequences=2)
    other, large = evaluate(tmp_path, model, batch=900, sequences=7, pseudo_sequences=2)
    assert means(small) == pytest.approx(means(large), rel=1e-5)
    assert other.name == f"{run.name}-2"  # the same result by name
    assert small == json.loads((run / "results.json").read_text())
    assert not verify_run(run).errors


def test_windows_do_not_cross_documents_and_more_of_them_are_the_same_and_others(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    corpus = open_corpus([str(write_documents(tmp_path))])
    documents = [tokenizer.encode_plain([" ".join(lines)])[0].tolist() for lines in corpus.documents()]
    whole = drawn_windows(corpus, tokenizer, 29, 10_000, Draw(0))
    parts = [ids[first : first + 29] for ids in documents for first in range(0, len(ids), 29)]
    assert [w.ids_T.tolist() for w in sorted(whole, key=lambda w: w.number)] == [p for p in parts if len(p) >= 8]
    numbers = [[w.number for w in drawn_windows(corpus, tokenizer, 29, count, Draw(0))] for count in (3, 8)]
    assert numbers[0] == numbers[1][:3] == [w.number for w in whole][:3]
    assert numbers[0] != sorted(numbers[0]) or numbers[0] != [0, 1, 2]


def test_windows_by_bytes_are_the_same_text_for_every_tokenizer(tmp_path: Path) -> None:
    corpus = open_corpus([str(write_documents(tmp_path))])
    whole = drawn_texts(corpus, tiny_tokenizer(), 90, 10_000, Draw(0))
    others = drawn_texts(corpus, byte_tokenizer(), 90, 10_000, Draw(0))
    assert [(w.number, w.bytes) for w in whole] == [(w.number, w.bytes) for w in others]
    assert [w.ids_T.size for w in whole] != [w.ids_T.size for w in others]
    assert all(16 < w.bytes <= 90 for w in whole)
    text = " ".join(" ".join(lines) for lines in corpus.documents())
    parts = [byte_tokenizer().decode(w.ids_T.tolist()).strip() for w in sorted(others, key=lambda w: w.number)]
    assert " ".join(parts) == text, "windows contain the whole text and are cut at white space"
    assert [w.number for w in drawn_texts(corpus, tiny_tokenizer(), 90, 5, Draw(0))] == [w.number for w in whole[:5]]


def test_a_word_longer_than_a_window_is_left_out_and_tabs_stay(tmp_path: Path) -> None:
    long = "x" * 31
    (tmp_path / "text.txt").write_text(f"{long} one\ttwo {long}three {long} four é\n\n{long}\n", encoding="utf-8")
    corpus = open_corpus([str(tmp_path / "text.txt")])
    tokenizer = byte_tokenizer()
    windows = sorted(drawn_texts(corpus, tokenizer, 16, 9, Draw(0)), key=lambda w: w.number)
    assert [tokenizer.decode(w.ids_T.tolist()).strip() for w in windows] == ["one\ttwo", "four é"]
    assert [w.bytes for w in windows] == [7, 7]
    (tmp_path / "full.txt").write_text("abcdefg hijklmno pqr")
    full = drawn_texts(open_corpus([str(tmp_path / "full.txt")]), tokenizer, 16, 9, Draw(0))
    assert sorted(w.bytes for w in full) == [3, 16], "a window of exactly the limit is full"
    (tmp_path / "none.txt").write_text(long)
    none = open_corpus([str(tmp_path / "none.txt")])
    with pytest.raises(DataError, match="no words of at most 16 bytes"):
        drawn_texts(none, tokenizer, 16, 9, Draw(0))


def test_bits_per_byte_of_constant_logits_follow_from_the_vocabularys_size(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    model = constant_model(tokenizer)
    _, results = evaluate(tmp_path, model, window_bytes=60, sequences=5, pseudo_sequences=3)
    draw = Draw(0, "mlm")
    scored = drawn_texts(open_corpus([str(tmp_path / "text.txt")]), tokenizer, 60, 5, draw)[:3]
    tokens, size = sum(w.ids_T.size for w in scored), sum(w.bytes for w in scored)
    expected = tokens * math.log2(tokenizer.vocab_size) / size
    assert means(results)["pseudo_bits_per_byte"] == pytest.approx(expected, rel=1e-5)
    _, tokenwise = evaluate(tmp_path, model, sequences=5, pseudo_sequences=3)
    assert "pseudo_bits_per_byte" not in means(tokenwise), "the bytes of a window cut by tokens are unknown"


def test_an_exact_share_of_a_window_is_masked_and_at_least_one_token() -> None:
    for size, count in ((1, 1), (3, 1), (20, 3), (117, 18)):
        chosen = chosen_tokens(Window(3, np.arange(size)), Draw(1), 0.15)
        assert len(set(chosen.tolist())) == chosen.size == count
        assert set(chosen.tolist()) <= set(range(size))


def test_a_finished_run_is_used_without_reading_the_text_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tiny_model(tiny_tokenizer()), tiny_tokenizer(), tmp_path / "model")
    request = EvalArguments(model=str(tmp_path / "model"), device="cpu", runs_root=tmp_path / "runs")
    text, settings = [str(write_documents(tmp_path))], MlmSettings(sequences=2, pseudo_sequences=0)
    first = evaluate_mlm(request, text, settings)
    monkeypatch.setattr("bertkit.evaluation.mlm.drawn_windows", lambda *given: pytest.fail("the text was cut again"))
    assert evaluate_mlm(request, text, settings).run.path == first.run.path


def test_faults_are_found_before_there_is_a_run(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(UsageError, match="--sequence-length 61: the model reads at most 60 tokens"):
        evaluate(tmp_path, tiny_model(tokenizer), sequence_length=61)
    with pytest.raises(UsageError, match=r"--window-bytes 900: a window has \d+ tokens, .* at most 58 plus"):
        evaluate(tmp_path, tiny_model(tokenizer), window_bytes=900)
    with pytest.raises(ValueError, match="give one of them"):
        MlmSettings(sequence_length=20, window_bytes=90)
    (tmp_path / "short.txt").write_text("a b")
    request = EvalArguments(model=str(tmp_path / "model"), runs_root=tmp_path / "runs")
    with pytest.raises(DataError, match=r"short.txt: no document of at least 8 tokens"):
        evaluate_mlm(request, [str(tmp_path / "short.txt")], MlmSettings())
    save_tiny(tiny_model(tokenizer, heads=("pooler",)), tokenizer, tmp_path / "headless")
    with pytest.raises(DataError, match="headless has no head that fills in masks"):
        evaluate_mlm(EvalArguments(model=str(tmp_path / "headless")), [str(tmp_path / "text.txt")], MlmSettings())
    save_tiny(tiny_causal_model(tokenizer), tokenizer, tmp_path / "causal")
    with pytest.raises(DataError, match=r"pretrained with masked_lm or permutation_lm; this one is measured by .* lm`"):
        evaluate_mlm(EvalArguments(model=str(tmp_path / "causal")), [str(tmp_path / "text.txt")], MlmSettings())
    assert not (tmp_path / "runs").exists()

"""`eval surprisal`: the surprisal of a word is the sum over its tokens, by `transformers` and by a plain loop."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, GPT2LMHeadModel

from bertkit.cli.app import run
from bertkit.errors import DataError
from bertkit.evaluation.runs_diff import compare_runs
from bertkit.evaluation.surprisal import Line, lines_of, word_scores
from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.scoring.pseudo_likelihood import TextScore, score_texts
from bertkit.run.directory import RunDirectory
from bertkit.text.tokenizer import Tokenizer
from tests.probing.tiny_models import GPT2, save_tiny, tiny_causal_model, tiny_model, tiny_tokenizer

SENTENCES = ["The readers' document -- tests walked!", "A  value in the\tbuilding.", "Modelable numbers walked."]
TEXT = "\n\n".join(["\n".join(SENTENCES[:2]), SENTENCES[2]])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("surprisal")
    tokenizer = tiny_tokenizer()
    save_tiny(tiny_causal_model(tokenizer), tokenizer, directory / "causal")
    save_tiny(tiny_model(tokenizer), tokenizer, directory / "masked")
    (directory / "text.txt").write_text(TEXT, encoding="utf-8")
    return directory


def evaluated(place: Path, out: Path, *arguments: object) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    data = () if "--data" in arguments else ("--data", place / "text.txt")
    command = ["eval", "surprisal", "-q", "--run-dir", out, *data, *arguments]
    assert run([str(each) for each in command]) == 0
    names = ("words", "sentences")
    words, sentences = (list(csv.DictReader((out / "tables" / f"{name}.csv").open())) for name in names)
    return words, sentences


@torch.no_grad()
def token_bits(model: Any, tokenizer: Tokenizer, text: str) -> list[tuple[int, float]]:
    """The end of each token of a text, and its surprisal in bits, by `transformers`."""
    encoding = tokenizer.encodings_plain([text])[0]
    ids, bits = list(encoding.ids), []
    for place, token in enumerate(ids):
        if isinstance(model, GPT2LMHeadModel):
            row, at = [tokenizer.cls_id, *ids[:place]], place
        else:
            row = [tokenizer.cls_id, *ids[:place], tokenizer.mask_id, *ids[place + 1 :], tokenizer.sep_id]
            at = place + 1
        logits = model(input_ids=torch.tensor([row])).logits[0, at]
        bits.append(-float(torch.log_softmax(logits.double(), dim=-1)[token]) / math.log(2))
    return [(end, value) for (_, end), value in zip(encoding.offsets, bits, strict=True)]


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_words_have_the_sums_of_transformers(place: Path, tmp_path: Path, kind: str) -> None:
    words, sentences = evaluated(place, tmp_path / "run", "--model", place / kind)
    loader = GPT2LMHeadModel if kind == "causal" else AutoModelForMaskedLM
    model, tokenizer = loader.from_pretrained(place / kind).eval(), tiny_tokenizer()
    rows = iter(words)
    for number, (sentence, row) in enumerate(zip(SENTENCES, sentences, strict=True), start=1):
        text = " ".join(sentence.split())
        tokens = token_bits(model, tokenizer, text)
        for position, word in enumerate(re.finditer(r"\S+", text), start=1):
            own = [value for end, value in tokens if word.start() < end <= word.end()]
            found = next(rows)
            place_of = {"document": str(1 + number // 3), "sentence": str(number), "position": str(position)}
            assert place_of.items() <= found.items()
            assert (found["word"].removeprefix("'"), found["tokens"]) == (word.group(), str(len(own)))
            assert float(found["surprisal_bits"]) == pytest.approx(sum(own), rel=1e-4)
        assert float(row["surprisal_bits"]) == pytest.approx(sum(value for _, value in tokens), rel=1e-4)
        assert row["text"] == text
    assert not list(rows)
    figures = json.loads((tmp_path / "run" / "results.json").read_text())["tasks"]["surprisal"]
    total, count = (sum(float(row[name]) for row in sentences) for name in ("surprisal_bits", "tokens"))
    name = "perplexity" if kind == "causal" else "pseudo_perplexity"
    assert figures[name]["mean"] == pytest.approx(2 ** (total / count))
    assert figures["bits_per_word"]["mean"] == pytest.approx(total / len(words))


def test_context_is_read_but_not_scored(place: Path, tmp_path: Path) -> None:
    words, _ = evaluated(place, tmp_path / "run", "--model", place / "causal", "--context-lines", 3)
    tokenizer, model = tiny_tokenizer(), GPT2LMHeadModel.from_pretrained(place / "causal").eval()
    first, second = (" ".join(each.split()) for each in SENTENCES[:2])
    tokens = token_bits(model, tokenizer, f"{first} {second}")
    expected = [value for end, value in tokens if end > len(first) + 1]
    own = [float(row["surprisal_bits"]) for row in words if row["sentence"] == "2"]
    assert sum(own) == pytest.approx(sum(expected), rel=1e-4)
    alone, _ = evaluated(place, tmp_path / "alone", "--model", place / "causal")
    changed = {row["sentence"] for row, other in zip(words, alone, strict=True) if row != other}
    assert changed == {"2"}


def test_context_is_shortened_to_what_the_model_reads() -> None:
    tokenizer = tiny_tokenizer()
    lines = ["A value", "the reader", "a document", "the number"]
    size = len(tokenizer.encode_plain([" ".join(lines[1:])])[0])
    found = list(lines_of([lines], tokenizer, 9, size))
    assert found[3].text == " ".join(lines[1:])
    assert list(lines_of([lines], tokenizer, 9, size - 1))[3].text == " ".join(lines[2:])
    assert list(lines_of([lines], tokenizer, 1, size))[3].text == " ".join(lines[2:])
    assert all(line.sentence == text for line, text in zip(found, lines, strict=True))


def test_a_first_token_that_is_given_has_no_surprisal() -> None:
    tokenizer = tiny_tokenizer()
    roles = {role: token for role, token in tokenizer.roles.items() if role != "cls"}
    bare = Tokenizer(tokenizer.backend, roles)
    model = tiny_model(bare, Gpt2Config(**GPT2), ("causal_lm",))
    for text, tokens in (("The reader tests", 1), ("Modelable reader tests", 2)):
        line = Line(1, text)
        (score,) = score_texts(model, bare, [line.text])
        words = word_scores(line, bare.encodings_plain([line.text])[0], score, bare.unk_id)
        assert words[0].tokens >= tokens
        assert score.tokens == sum(word.tokens for word in words) - 1
        assert [word.bits is None for word in words] == [True, False, False]


def test_a_token_counts_for_the_word_of_its_last_character_and_a_blank_for_the_next_word() -> None:
    """Of "ab c d " the tokens "ab", " ", "c " and "d ", as in vocabularies whose tokens end in a blank."""
    encoding = SimpleNamespace(ids=[5, 6, 7, 8], offsets=[(0, 2), (2, 3), (3, 5), (5, 7)])
    score = TextScore(-np.array([1, 2, 4, 8], dtype=np.float32), 3)
    words = word_scores(Line(1, "ab c d "), encoding, score, 7)  # type: ignore[arg-type]  # all that it reads
    assert [(word.word, word.tokens, word.unknown) for word in words] == [("ab", 1, 0), ("c", 1, 0), ("d", 2, 1)]
    assert [word.bits for word in words] == pytest.approx([bits / math.log(2) for bits in (1, 2, 12)])


def test_unknown_words_are_counted_and_columns_named(place: Path, tmp_path: Path) -> None:
    table = tmp_path / "items.csv"
    table.write_text("item,sentence\na,The reader ☃ tests\n", encoding="utf-8")
    words, sentences = evaluated(
        place, tmp_path / "run", "--model", place / "masked", "--data", table, "--text-field", "sentence"
    )
    assert [row["unknown"] for row in words] == ["0", "0", "1", "0"]
    assert sentences[0]["words"] == "4"


def test_runs_diff_compares_sentences_scored_by_one_rule(place: Path, tmp_path: Path) -> None:
    for kind in ("causal", "masked"):
        evaluated(place, tmp_path / kind, "--model", place / kind)
    evaluated(place, tmp_path / "other", "--model", place / "causal", "--context-lines", 1)
    causal, masked, other = (RunDirectory.open(tmp_path / name) for name in ("causal", "masked", "other"))
    found = {each["metric"]: each for each in compare_runs(causal, other, resamples=50)["comparisons"]}
    assert list(found) == ["bits_per_word", "perplexity"]
    assert found["bits_per_word"]["agreement"]["same"] == 2
    with pytest.raises(DataError, match="by the rules left_to_right and original"):
        compare_runs(causal, masked)

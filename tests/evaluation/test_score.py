"""Saved predictions in every form that official scripts write, scored without a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from seqeval.metrics import f1_score

from bertkit.errors import DataError, UsageError
from bertkit.evaluation.score import score_file

SENTENCES = [
    (["Anna", "lives", "in", "New", "York"], ["I-PER", "O", "O", "I-LOC", "I-LOC"]),
    (["Bert", "Ltd", "sells", "maps"], ["I-ORG", "I-ORG", "O", "O"]),
]
SAID = [["B-PER", "O", "O", "B-LOC", "O"], ["B-ORG", "I-ORG", "O", "B-MISC"]]
GOLD = [["B-PER", "O", "O", "B-LOC", "I-LOC"], ["B-ORG", "I-ORG", "O", "O"]]


def questions(answers: dict[str, list[str]]) -> dict[str, Any]:
    """SQuAD 2.0's JSON; a question without answers is impossible."""
    context = "Anna lives in New York ."
    asked = [
        {
            "id": name,
            "question": "who ?",
            "answers": [{"text": text, "answer_start": context.index(text)} for text in texts],
            "is_impossible": not texts,
        }
        for name, texts in answers.items()
    ]
    return {"version": "v2.0", "data": [{"title": "x", "paragraphs": [{"context": context, "qas": asked}]}]}


@pytest.fixture
def tagged(tmp_path: Path) -> Path:
    rows = "\n\n".join("\n".join(f"{w} X Y {t}" for w, t in zip(*pair, strict=True)) for pair in SENTENCES)
    file = tmp_path / "eng.testa"
    file.write_text(f"-DOCSTART- -X- O O\n\n{rows}\n")
    return file


@pytest.mark.parametrize("form", ["columns", "objects"])
def test_tags_are_scored_as_seqeval_does_in_both_forms(tagged: Path, tmp_path: Path, form: str) -> None:
    said = tmp_path / ("said.txt" if form == "columns" else "said.jsonl")
    if form == "columns":
        rows = [[f"{w} {g} {t}" for w, g, t in zip(SENTENCES[i][0], GOLD[i], SAID[i], strict=True)] for i in range(2)]
        said.write_text("-DOCSTART- -X- O O\n\n" + "\n\n".join("\n".join(each) for each in rows) + "\n")
    else:
        said.write_text("".join(json.dumps({"prediction": tags}) + "\n" for tags in SAID))
    found = score_file("conll2003", said, tagged)["tasks"]["conll2003"]
    assert found["f1"]["mean"] == pytest.approx(f1_score(GOLD, SAID))
    assert found["accuracy"]["mean"] == pytest.approx(7 / 9)


def test_every_word_needs_a_tag(tagged: Path, tmp_path: Path) -> None:
    said = tmp_path / "said.jsonl"
    said.write_text("".join(json.dumps({"prediction": tags[:4]}) + "\n" for tags in SAID))
    with pytest.raises(DataError, match="sentence 0 has 5 words and 4 predicted tags"):
        score_file("conll2003", said, tagged)
    said.write_text(json.dumps({"prediction": [1, 2]}))
    with pytest.raises(DataError, match=r"line 1: prediction .*expected a list of tags"):
        score_file("conll2003", said, tagged)


def test_answers_are_scored_from_predictions_json(tmp_path: Path) -> None:
    gold, said = tmp_path / "dev-v1.1.json", tmp_path / "predictions.json"
    gold.write_text(json.dumps(questions({"a": ["New York"], "b": ["Anna", "Anna lives"]})))
    said.write_text(json.dumps({"a": "the York", "b": "anna"}))
    found = score_file("squad", said, gold)["tasks"]["squad"]
    assert found["exact_match"]["mean"] == 0.5
    assert found["f1"]["mean"] == pytest.approx((2 / 3 + 1) / 2)
    said.write_text(json.dumps({"a": "York"}))
    with pytest.raises(DataError, match=r"1 of 2 examples have no prediction \(such as b\)"):
        score_file("squad", said, gold)
    said.write_text(json.dumps({"a": "York", "b": None}))
    with pytest.raises(DataError, match="b: prediction None, expected text"):
        score_file("squad", said, gold)


def test_choices_are_numbers_of_endings(tmp_path: Path) -> None:
    gold, said = tmp_path / "hellaswag_val.jsonl", tmp_path / "said.jsonl"
    rows = [{"ind": i, "ctx_a": "a", "ctx_b": "b", "ctx": "a b", "endings": list("wxyz"), "label": i} for i in range(3)]
    gold.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def score(*choices: object) -> float:
        lines = [json.dumps({"id": str(i), "prediction": choice}) for i, choice in enumerate(choices)]
        said.write_text("\n".join(lines))
        return float(score_file("hellaswag", said, gold)["average"])

    assert score(0, 1, 3) == pytest.approx(2 / 3)
    with pytest.raises(DataError, match="has 4 endings, numbered from 0, and the predicted one is 4"):
        score(0, 1, 4)
    with pytest.raises(DataError, match="line 2: prediction 'B', expected the number of an ending"):
        score(0, "B", 1)


def test_vectors_are_not_scored_from_predictions(tmp_path: Path) -> None:
    for name in ("said.jsonl", "gold.tsv"):
        (tmp_path / name).write_text('{"prediction": 0.5}\n')
    with pytest.raises(UsageError, match=r"sts-embedding: trains vectors.*`bertkit eval sts`"):
        score_file("sts-embedding", tmp_path / "said.jsonl", tmp_path / "gold.tsv")


def test_a_form_that_is_not_known_is_told(tmp_path: Path) -> None:
    gold, said = tmp_path / "dev.tsv", tmp_path / "said.csv"
    gold.write_text("index\tsentence1\tsentence2\tlabel\n0\ta\tb\tentailment\n")
    said.write_text("id,label\n0,entailment\n")
    with pytest.raises(DataError, match=r"said.csv, line 1: 'id,label'; expected GLUE's header 'index\\tprediction'"):
        score_file("rte", said, gold)
    said.write_text("index\tprediction\n0\tentailment\textra\n")
    with pytest.raises(DataError, match="line 2: 3 fields"):
        score_file("rte", said, gold)
    with pytest.raises(DataError, match="no such file"):
        score_file("rte", tmp_path / "none.jsonl", gold)
    with pytest.raises(UsageError, match="did you mean rte"):
        score_file("rtte", said, gold)

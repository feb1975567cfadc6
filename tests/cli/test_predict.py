"""`bertkit predict` reproduces the predictions saved by fine-tuning for every kind of task, streams, and locates
errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.cli.trained_kinds import Trained, lines_of
from tests.tasks.tiny_kinds import DEV, KINDS
from tests.tasks.tiny_task import reviews

from bertkit.evaluation.run import MeasurementArguments
from bertkit.inference.documents import documents
from bertkit.inference.entities import RawText
from bertkit.inference.predict import FIRST_WINDOW, Predictor, windows_of
from bertkit.tasks.examples import TaggedExample, TextExample

Bertkit = Callable[..., Any]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_predicts_what_its_fine_tuning_saved(trained: Trained, bertkit: Bertkit, kind: str) -> None:
    run, inputs = trained.of(kind)
    outcome = bertkit("predict", "--model", run, inputs)
    assert outcome.code == 0, outcome.stderr
    found = lines_of(outcome.stdout)
    words = [line.pop("words", None) for line in found]
    answers = [line.pop("answers", None) for line in found]
    no_answer = [line.pop("no_answer", None) for line in found]
    assert found == trained.saved(kind)
    assert all((each is not None) == (kind == "span") for each in (*answers, *no_answer))
    assert len(found) == DEV
    assert all((each is not None) == (kind == "tagging") for each in words)
    assert "warning" not in outcome.stderr


def test_lines_do_not_depend_on_the_batch_but_for_rounding(trained: Trained, bertkit: Bertkit) -> None:
    run, inputs = trained.of("classification")
    runs = [
        lines_of(bertkit("predict", "--model", run, inputs, "--batch-tokens", n).stdout) for n in ("1", "17", "4096")
    ]
    for other in runs[1:]:
        assert [line["prediction"] for line in other] == [line["prediction"] for line in runs[0]]
        scores = [[line["scores"]["good"] for line in lines] for lines in (runs[0], other)]
        np.testing.assert_allclose(*scores, atol=1e-6)


def test_every_form_of_input_says_the_same(trained: Trained, piped: Bertkit, tmp_path: Path) -> None:
    run, _ = trained.of("classification")
    texts = [text for text, _ in reviews(5, 9)]
    plain = piped("".join(f"{text}\n" for text in texts), "--model", run)
    assert plain.code == 0, plain.stderr
    objects = "".join(json.dumps({"text": text, "other": 1}) + "\n" for text in texts)
    table = "n,body\n" + "".join(f'{i},"{text}"\n' for i, text in enumerate(texts))
    tabs = table.replace(",", "\t").replace('"', "")
    assert piped(objects, "--model", run, "-").stdout == plain.stdout
    assert piped(table, "--model", run, "--text", "body").stdout == plain.stdout
    assert piped(tabs, "--model", run, "--text", "body").stdout == plain.stdout
    file = tmp_path / "texts.tsv"
    file.write_text(tabs)
    assert piped("", file, "--model", run, "--text", "body").stdout == plain.stdout
    assert piped(table.replace("\n", "\r\n"), "--model", run, "--text", "body").stdout == plain.stdout
    assert [line["id"] for line in lines_of(plain.stdout)] == ["0", "1", "2", "3", "4"]


def test_a_blank_line_is_answered_by_null_so_that_lines_stay_together(trained: Trained, piped: Bertkit) -> None:
    outcome = piped("the cat\n\n  \nfine list\n", "--model", trained.of("classification")[0])
    found = lines_of(outcome.stdout)
    assert [line["prediction"] is None for line in found] == [False, True, True, False]
    assert "2 of 4 lines are blank" in outcome.stderr
    empty = piped("", "--model", trained.of("classification")[0])
    assert (empty.code, empty.stdout) == (0, "")
    assert "stdin has nothing to predict" in empty.stderr


@pytest.mark.parametrize("kind", ["classification", "tagging"])
@pytest.mark.parametrize("content", ["", " \n\n"])
def test_an_empty_document_has_no_prediction(
    trained: Trained, piped: Bertkit, tmp_path: Path, kind: str, content: str
) -> None:
    path = tmp_path / "empty.txt"
    path.write_text(content)
    outcome = piped("", path, "--format", "document", "--model", trained.of(kind)[0])
    assert outcome.code == 0, outcome.stderr
    (found,) = lines_of(outcome.stdout)
    assert not any(value for key, value in found.items() if key not in ("id", "text"))
    assert "blank" in outcome.stderr


def test_top_keeps_the_greatest_scores_first(trained: Trained, piped: Bertkit) -> None:
    run, _ = trained.of("classification")
    (line,) = lines_of(piped("the fine cat\n", "--model", run, "--top", "1").stdout)
    (whole,) = lines_of(piped("the fine cat\n", "--model", run).stdout)
    assert line["scores"] == {whole["prediction"]: max(whole["scores"].values())}


def test_top_of_a_choice_maps_the_best_endings_to_their_scores(trained: Trained, bertkit: Bertkit) -> None:
    run, inputs = trained.of("choice")
    for whole, best in zip(
        lines_of(bertkit("predict", "--model", run, inputs).stdout),
        lines_of(bertkit("predict", "--model", run, inputs, "--top", "2").stdout),
        strict=True,
    ):
        order = sorted(range(3), key=lambda number: -whole["scores"][number])[:2]
        assert list(best["scores"].items()) == [(str(number), whole["scores"][number]) for number in order]
        assert order[0] == whole["prediction"] == best["prediction"]


def test_top_without_effect_is_told(trained: Trained, piped: Bertkit) -> None:
    number = piped("a cat\n", "--model", trained.of("regression")[0], "--top", "1")
    columns = piped("a O\n", "--model", trained.of("tagging")[0], "--format", "conll", "--top", "1")
    assert (number.code, columns.code) == (0, 0)
    assert "--top has no effect: " in number.stderr
    assert "--top has no effect: columns have the best tag only" in columns.stderr


def test_a_tagger_finds_words_itself_in_text(trained: Trained, piped: Bertkit, tmp_path: Path) -> None:
    """A text's own words get the same tags as given words, and an entity is a character range of the text."""
    run, _ = trained.of("tagging")
    text = "the fine cat, (warm) list."
    (found,) = lines_of(piped(text + "\n", "--model", run).stdout)
    words = ["the", "fine", "cat", ",", "(", "warm", ")", "list", "."]
    (given,) = lines_of(piped(json.dumps({"words": words}), "--model", run).stdout)
    assert (found["id"], found["text"]) == ("0", text)
    spans = [word for word, tag in zip(words, given["prediction"], strict=True) if tag != "O"]
    assert [each["text"] for each in found["entities"]] == spans == ["fine", "warm"]
    for each in found["entities"]:
        assert text[each["start"] : each["end"]] == each["text"]
        _, *inside = given["scores"]["probabilities"][words.index(each["text"])]
        assert each["score"] == pytest.approx(sum(inside), abs=1e-5)
    (first,) = lines_of(piped(text + "\n", "--model", run, "--top", "1").stdout)
    assert first["entities"][0]["scores"] == {"X": first["entities"][0]["score"]}
    (top,) = lines_of(piped(json.dumps({"words": words}), "--model", run, "--top", "1").stdout)
    assert [list(each) for each in top["scores"]] == [[tag] for tag in given["prediction"]]
    file = tmp_path / "document.txt"
    file.write_bytes(b"the fine cat\r\n\r\n the warm list\n")
    (whole,) = lines_of(piped("", file, "--model", run, "--format", "document").stdout)
    assert whole["text"] == "the fine cat\r\n\r\n the warm list\n"
    assert [whole["text"][each["start"] : each["end"]] for each in whole["entities"]] == ["fine", "warm"]
    (pipe,) = lines_of(piped(file.read_bytes(), "--model", run, "--format", "document").stdout)
    assert pipe == whole
    blank = piped("fine\n\n", "--model", run)
    assert lines_of(blank.stdout)[1] == {"id": "1", "prediction": None, "entities": []}
    assert "1 of 2 lines are blank" in blank.stderr


def test_each_sentence_of_a_document_counts_as_progress(trained: Trained) -> None:
    predictor = Predictor.load(str(trained.of("tagging")[0]), MeasurementArguments(device="cpu").engine())
    parts = count()
    text = RawText("0", "the fine cat. A warm list.\n\na cold word")
    (found,) = documents(predictor, [text], on_part=lambda: next(parts))
    assert found[1]["entities"]
    assert next(parts) == 3


def test_columns_come_out_as_columns(trained: Trained, piped: Bertkit, tmp_path: Path) -> None:
    run, _ = trained.of("tagging")
    text = "-DOCSTART- -X- O\n\nthe DT O\nfine JJ O\n\ncat NN O\n"
    file = tmp_path / "words.conll"
    file.write_text(text)
    tagged = "-DOCSTART- -X- O O\n\nthe DT O O\nfine JJ O B-X\n\ncat NN O O\n"
    assert piped("", file, "--model", run).stdout == tagged
    assert piped(text, "--model", run, "--format", "conll").stdout == tagged
    tabs = piped(text.replace(" ", "\t"), "--model", run, "--format", "conll")
    assert tabs.stdout == tagged.replace(" ", "\t")
    rows = lines_of(piped("", file, "--model", run, "--json").stdout)
    assert [(row["id"], row["words"], row["prediction"]) for row in rows] == [
        ("0", ["the", "fine"], ["O", "B-X"]),
        ("1", ["cat"], ["O"]),
    ]
    named = piped("", file, "--model", run, "--text", "word")
    assert (named.code, "--text word: the input is read as conll" in named.stderr) == (2, True), named.stderr
    refused = piped("", file, "--model", trained.of("classification")[0])
    assert refused.code == 2
    assert "conll is for tagging models, this model is for classification" in refused.stderr
    ragged = piped("a O\nb\n", "--model", run, "--format", "conll")
    assert ragged.code == 3
    assert "stdin, line 2: 1 columns ('b'), expected 2" in ragged.stderr


def test_conllu_comes_out_as_conllu(trained: Trained, piped: Bertkit) -> None:
    def lines(*tags: str) -> str:
        words = enumerate(zip(("the", "fine\x1b", "cat"), tags, strict=True), start=1)
        return "".join("\t".join([str(n), word, "_", tag, *"______"]) + "\n" for n, (word, tag) in words) + "\n"

    found = piped(lines("_", "_", "_"), "--model", trained.of("tagging")[0], "--format", "conllu")
    assert found.stdout == lines("O", "B-X", "O").replace("\x1b", "\\x1b"), found.stderr


def test_documents_of_a_file_are_not_divided(trained: Trained) -> None:
    """A tagger that reads documents puts all sentences of a document into one window."""
    predictor = Predictor.load(str(trained.of("tagging")[0]), MeasurementArguments(device="cpu").engine())
    settings = predictor.task.settings.model_copy(update={"context": "document"})  # type: ignore[attr-defined]
    predictor.task.settings = settings  # type: ignore[attr-defined]
    sentences = [TaggedExample(str(i), ("fine", "cat"), None, i // 5) for i in range(20)]
    read: list[int] = []
    stream = predictor.stream((read.append(i) or each for i, each in enumerate(sentences)), first=2, largest=2)  # type: ignore[func-returns-value]
    next(stream)
    assert len(read) == 6  # the first document, and the sentence of the next one that ends it
    whole = predictor(sentences)
    assert [found for _, found in predictor.stream(sentences, first=2, largest=2)] == whole


def test_a_typed_line_is_answered_before_the_next_is_read(trained: Trained) -> None:
    predictor = Predictor.load(str(trained.of("tagging")[0]), MeasurementArguments(device="cpu").engine())
    settings = predictor.task.settings.model_copy(update={"context": "document"})  # type: ignore[attr-defined]
    predictor.task.settings = settings  # type: ignore[attr-defined]
    lines = [RawText(str(number), text) for number, text in enumerate(["the fine cat.", "", "A warm list."])]
    read: list[str] = []
    typed = (read.append(each.id) or each for each in lines)  # type: ignore[func-returns-value]
    found = []
    for number, (_, document) in enumerate(documents(predictor, typed, first=1, largest=1), start=1):
        assert len(read) == number
        found.append(document)
    assert [each["id"] for each in found] == ["0", "1", "2"]
    assert found == [document for _, document in documents(predictor, lines)]


def test_a_question_is_asked_of_a_file_of_text(trained: Trained, piped: Bertkit, tmp_path: Path) -> None:
    run, inputs = trained.of("span")
    (row, *_) = lines_of(inputs.read_text())
    (expected, *_) = lines_of(piped("", inputs, "--model", run).stdout)
    file = tmp_path / "context.txt"
    file.write_text(row["context"])
    (found,) = lines_of(piped("", file, "--model", run, "--question", row["question"]).stdout)
    assert found["answers"][0] == {**expected["answers"][0], "score": pytest.approx(expected["answers"][0]["score"])}
    assert found["no_answer"] == pytest.approx(expected["no_answer"])
    assert piped(row["context"], "--model", run, "--question", row["question"], "-").stdout.strip()
    long = f"{row['context']}\n\n" * 30
    file.write_text(long)
    (answer,) = lines_of(piped("", file, "--model", run, "--question", row["question"], "--top", "3").stdout)
    assert len(answer["answers"]) == 3
    assert all(long[each["start"] : each["end"]] == each["text"] for each in answer["answers"])
    assert len({each["text"] for each in answer["answers"]}) == 3
    table = json.dumps({"context": row["context"], "other": 1}) + "\n"
    (asked,) = lines_of(piped(table, "--model", run, "--question", row["question"]).stdout)
    assert [each["text"] for each in asked["answers"]] == [each["text"] for each in found["answers"]]
    squad = json.dumps({"data": [{"paragraphs": [{"context": row["context"], "qas": [row]}]}]})
    (tmp_path / "questions.json").write_text(squad)
    (official,) = lines_of(piped("", tmp_path / "questions.json", "--model", run).stdout)
    assert official["id"] == row["id"]
    assert [each["text"] for each in official["answers"]] == [each["text"] for each in expected["answers"]]
    both = piped("", tmp_path / "questions.json", "--model", run, "--question", "who?")
    assert (both.code, "has its own questions" in both.stderr) == (2, True), both.stderr
    refused = piped("a\n", "--model", trained.of("tagging")[0], "--question", "who?")
    assert refused.code == 2
    assert "--question: " in refused.stderr
    assert "does not answer questions; it is a model for tagging" in refused.stderr
    unset = piped("", file, "--model", run, "--question", " ")
    assert (unset.code, "--question: is empty" in unset.stderr) == (2, True), unset.stderr


def test_a_reader_who_leaves_ends_it_without_a_word(trained: Trained) -> None:
    run, _ = trained.of("classification")
    command = [sys.executable, "-m", "bertkit", "predict", "--model", str(run)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write(b"the fine cat\n" * 5000)
    process.stdin.close()
    first = process.stdout.readline()
    process.stdout.close()
    told = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 141
    assert json.loads(first)["id"] == "0"
    assert told == b""


def test_no_more_is_read_than_the_next_answers_need(trained: Trained) -> None:
    """An endless stream gets answers, in windows that grow up to a limit."""
    predictor = Predictor.load(str(trained.of("classification")[0]), MeasurementArguments(device="cpu").engine())
    read: list[int] = []

    def endless() -> Iterator[TextExample]:
        for number in count():
            read.append(number)
            yield TextExample(str(number), "the fine cat")

    answers = list(islice(predictor.stream(endless()), 3))
    assert [prediction.id for _, prediction in answers if prediction] == ["0", "1", "2"]
    assert len(read) == FIRST_WINDOW
    assert [len(window) for window in windows_of(range(100), 5, 20)] == [5, 10, 20, 20, 20, 20, 5]
    assert [len(window) for window in windows_of(["x" * 3_000_000] * 3, 64)] == [2, 1]


@pytest.mark.parametrize(
    ("text", "words", "told"),
    [
        ('{"txet": "a"}\n', [], "stdin, line 1: no column 'text'; there are: 'txet'; did you mean 'txet'?"),
        ('{"body": "a"}\n', [], "stdin, line 1: no column 'text'; there are: 'body'; name it with --text\n"),
        ('{"text": "a"}\n{"text": 3}\n', [], "stdin, line 2, text: found a number, expected text"),
        ('{"text": "a"}\n{"text"\n', [], "stdin, line 2, column"),
        ("body,n\na\n", ["--text", "body"], "stdin, line 2: 1 fields, expected 2"),
        ("body,n\n", ["--text", "boody", "--format", "csv"], ""),
        ("body,n\na,1\n", ["--text", "boody"], "did you mean 'body'?"),
        ("a,a\nx,y\n", ["--text", "a"], "stdin, line 1: the column 'a' occurs twice"),
        (b"fine\n\xff\n", [], "stdin, line 2: not valid UTF-8 at byte 0"),
    ],
)
def test_faults_of_the_input_are_told_with_their_line(
    trained: Trained, piped: Bertkit, text: str | bytes, words: list[str], told: str
) -> None:
    outcome = piped(text, "--model", trained.of("classification")[0], *words)
    assert outcome.code == (3 if told else 0)
    assert told in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_faults_of_model_and_usage_are_told(trained: Trained, bertkit: Bertkit, piped: Bertkit, tmp_path: Path) -> None:
    run, inputs = trained.of("classification")
    headless = piped("a\n", "--model", trained.base)
    assert (headless.code, headless.stdout) == (3, "")
    assert "has no task head (architectures: BertForPreTraining)" in headless.stderr
    assert "bertkit finetune --task TASK" in headless.stderr
    config = json.loads((Path(trained.base) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["BertForMyTask"]}))
    foreign = piped("a\n", "--model", tmp_path)
    assert foreign.code == 3
    assert "the class BertForMyTask in config.json (architectures) is not known" in foreign.stderr
    assert "BertForSequenceClassification" in foreign.stderr
    document = ["--format", "document"]
    cases = [
        (3, "did you mean", [inputs.with_name("classification-inputs.jsonl"), "--model", run]),
        (3, "is a directory; name a file in it", [tmp_path.parent, "--model", run]),
        (3, "is a model, not a file of texts; give it with --model", [tmp_path]),
        (3, "is a model, not a file of texts; give it with --model", [run]),
        (2, "for example `bertkit predict --model RUN reviews.csv", [run, inputs]),
        (2, "--max-length 99: ", ["-", "--model", run, "--max-length", "99"]),
        (2, "--format parquet", ["-", "--model", run, "--format", "parquet"]),
        (2, "--text body: the input is read as document", ["-", "--model", run, "--text", "body", *document]),
        (
            2,
            "--delimiter: stdin is read as text, which has no",
            ["--format", "text", "--model", run, "--delimiter", ";"],
        ),
        (3, "./nowhere: does not exist", ["-", "--model", "./nowhere"]),
        (2, "--text-pair b: one text per", ["-", "--model", trained.of("tagging")[0], "--text-pair", "b"]),
        (
            2,
            "--text-pair b: one text per",
            ["-", "--model", trained.base, "--zero-shot", "--labels", "cat,list", "--text-pair", "b"],
        ),
    ]
    for code, told, words in cases:
        outcome = piped("a\n", *words)
        assert (outcome.code, outcome.stdout) == (code, ""), words
        assert told in outcome.stderr, outcome.stderr
    question = piped("a\n", "--model", trained.of("span")[0])
    assert question.code == 3
    assert "no column 'question'; ask one question of every text with --question" in question.stderr
    single = piped("the cat\n", "--model", trained.of("pair")[0])
    assert single.code == 0
    assert "was trained on pairs of texts" in single.stderr
    pair = piped('{"text": "the cat", "text_pair": "a"}\n', "--model", run)
    assert (pair.code, "was trained on single texts" in pair.stderr) == (0, True)
    cut = piped("cat " * 60 + "\n", "--model", run)
    assert "1 of 1 examples were cut to 40 tokens" in cut.stderr


def test_outputs_that_are_not_finite_are_no_prediction(trained: Trained, piped: Bertkit, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    run, _ = trained.of("classification")
    for file in (run / "model").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["classifier.bias"] = torch.full_like(tensors["classifier.bias"], torch.nan)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    outcome = piped("the cat\n", "--model", tmp_path)
    assert (outcome.code, outcome.stdout) == (3, "")
    assert "not finite numbers" in outcome.stderr
    assert "example 0" in outcome.stderr

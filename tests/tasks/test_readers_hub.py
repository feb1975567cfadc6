"""Tasks from the Hub: the library's numbered labels become the official names. No test uses the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import ClassLabel, Dataset, Features, Sequence, Value

from bertkit.errors import DataError
from bertkit.tasks.catalogue import TASKS
from bertkit.tasks.examples import Answer, ChoiceExample, Example, QuestionExample, TaggedExample, TextExample
from bertkit.tasks.readers import load_split
from bertkit.tasks.readers.hub import examples_of, read_hub
from bertkit.tasks.readers.nli import NO_MAJORITY


def rows(columns: dict[str, list[Any]], **features: Any) -> Dataset:
    """A data set of these columns; the types of columns without a feature are inferred."""
    made = Dataset.from_dict({name: values for name, values in columns.items() if name not in features})
    inferred = Features({**made.features, **features})
    return Dataset.from_dict(columns, features=inferred)


def read(name: str, split: str, data: Dataset) -> list[Example]:
    return examples_of(data, TASKS[name], split, source="hub:test").examples


def pairs(labels: list[int], names: list[str], first: str, second: str) -> Dataset:
    texts = [f"t{k}" for k in range(len(labels))]
    columns = {first: texts, second: texts, "label": labels, "idx": list(range(len(labels)))}
    return rows(columns, label=ClassLabel(names=names))


@pytest.mark.parametrize(
    ("task", "names", "columns", "expected"),
    [
        ("mnli", ["entailment", "neutral", "contradiction"], ("premise", "hypothesis"), None),
        ("rte", ["entailment", "not_entailment"], ("sentence1", "sentence2"), None),
        ("wnli", ["not_entailment", "entailment"], ("sentence1", "sentence2"), ["0", "1"]),
        ("mrpc", ["not_equivalent", "equivalent"], ("sentence1", "sentence2"), ["0", "1"]),
        ("qqp", ["not_duplicate", "duplicate"], ("question1", "question2"), ["0", "1"]),
    ],
)
def test_numbers_become_the_official_names(
    task: str, names: list[str], columns: tuple[str, str], expected: list[str] | None
) -> None:
    examples = read(task, "dev", pairs(list(range(len(names))), names, *columns))
    assert [each.label for each in examples] == (expected or names)  # type: ignore[union-attr]
    assert examples[0] == TextExample("0", "t0", "t0", (expected or names)[0])


def test_single_sentences_have_no_second_text() -> None:
    data = rows(
        {"sentence": ["a", "b"], "label": [1, 0], "idx": [0, 1]}, label=ClassLabel(names=["unacceptable", "acceptable"])
    )
    assert read("cola", "dev", data) == [TextExample("0", "a", None, "1"), TextExample("1", "b", None, "0")]


def test_minus_one_is_no_label_in_a_test_split() -> None:
    data = pairs([-1, -1], ["entailment", "not_entailment"], "question", "sentence")
    assert [each.label for each in read("qnli", "test", data)] == [None, None]  # type: ignore[union-attr]
    scores = rows({"sentence1": ["a"], "sentence2": ["b"], "label": [-1.0], "idx": [0]})
    assert read("stsb", "test", scores) == [TextExample("0", "a", "b", None)]


def test_snlis_pairs_without_a_majority_are_dropped_in_every_split() -> None:
    data = pairs([0, -1], ["entailment", "neutral", "contradiction"], "premise", "hypothesis")
    for split in ("train", "test"):
        found = examples_of(data, TASKS["snli"], split, source="hub:test")
        assert len(found.examples) == 1
        assert found.notes == {NO_MAJORITY: 1}


def test_scores_are_numbers_and_checked() -> None:
    columns = {"sentence1": ["a", "c"], "sentence2": ["b", "d"], "idx": [0, 1]}
    assert read("stsb", "dev", rows({**columns, "label": [0.0, 4.25]}))[1] == TextExample("1", "c", "d", 4.25)
    with pytest.raises(DataError, match="row 1: score nan, expected a finite number"):
        read("stsb", "dev", rows({**columns, "label": [0.0, float("nan")]}))


def test_the_copy_of_squad_2_has_impossible_questions_as_empty_answers() -> None:
    answers = [{"text": ["Ada"], "answer_start": [0]}, {"text": [], "answer_start": []}]
    data = rows(
        {"id": ["a", "b"], "question": ["Who?", "Why?"], "context": ["Ada.", "Ada."], "answers": answers},
        answers={"text": Sequence(Value("string")), "answer_start": Sequence(Value("int32"))},
    )
    assert read("squad2", "dev", data) == [
        QuestionExample("a", "Who?", "Ada.", (Answer("Ada", 0),)),
        QuestionExample("b", "Why?", "Ada.", (), impossible=True),
    ]


def test_tags_are_named_and_sentences_stand_alone() -> None:
    tags = ClassLabel(names=["O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC"])
    data = rows(
        {"id": ["0", "1"], "tokens": [["EU", "rose"], ["Peter"]], "ner_tags": [[3, 0], [1]]}, ner_tags=Sequence(tags)
    )
    assert read("conll2003", "dev", data) == [
        TaggedExample("0", ("EU", "rose"), ("B-ORG", "O"), 0),
        TaggedExample("1", ("Peter",), ("B-PER",), 1),
    ]


def test_choices_of_swag_hellaswag_and_race() -> None:
    swag = rows(
        {"sent1": ["A."], "sent2": ["He"], **{f"ending{k}": [f"e{k}"] for k in range(4)}, "label": [2]},
        label=ClassLabel(names=["0", "1", "2", "3"]),
    )
    assert read("swag", "dev", swag) == [ChoiceExample("0", "A.", "He", ("e0", "e1", "e2", "e3"), 2)]
    hellaswag = rows({"ind": [4], "ctx_a": ["A."], "ctx_b": ["he"], "endings": [["a", "b"]], "label": ["1"]})
    assert read("hellaswag", "dev", hellaswag) == [ChoiceExample("4", "A.", "he", ("a", "b"), 1)]
    race = rows(
        {"example_id": ["high1.txt"], "article": ["T."], "question": ["Q?"], "options": [["a", "b"]], "answer": ["B"]}
    )
    assert read("race", "dev", race) == [ChoiceExample("high1-0", "T.", "Q?", ("a", "b"), 1)]


def test_a_column_that_is_not_there_is_named() -> None:
    with pytest.raises(DataError, match=r"hub:test: no column 'sentence1'; there are: .*; did you mean 'sentence'"):
        read("rte", "dev", rows({"sentence": ["a"], "label": [0]}))


def test_a_directory_of_parquet_is_read_by_the_library_itself(tmp_path: Path) -> None:
    directory = tmp_path / "sick"
    directory.mkdir()
    columns = {"id": ["17"], "sentence_A": ["a"], "sentence_B": ["b"], "label": [2], "relatedness_score": [3.5]}
    names = ClassLabel(names=["entailment", "neutral", "contradiction"])
    rows(columns, label=names).to_parquet(str(directory / "validation.parquet"))
    hub = TASKS["sick-e"].hub, TASKS["sick-r"].hub
    copies = {
        name: TASKS[name].model_copy(update={"hub": copy.model_copy(update={"id": str(directory)})})
        for name, copy in zip(("sick-e", "sick-r"), hub, strict=True)
        if copy is not None
    }
    assert read_hub(copies["sick-e"], "dev").examples == [TextExample("17", "a", "b", "contradiction")]
    assert read_hub(copies["sick-r"], "dev").examples == [TextExample("17", "a", "b", 3.5)]


def test_offline_without_a_cached_copy_says_what_to_do() -> None:
    before = datasets.config.HF_HUB_OFFLINE
    with pytest.raises(DataError, match=r"hub:nyu-mll/glue, rte, train: .*not in the local cache.*--data-dir"):
        load_split("rte", "train", offline=True)
    assert before == datasets.config.HF_HUB_OFFLINE


def test_a_task_that_is_not_on_the_hub_asks_for_its_files() -> None:
    with pytest.raises(DataError, match="codah cannot be read from the Hub; give its files with --data-dir"):
        load_split("codah", "dev", offline=True)

"""The real files: published counts, and known rows."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from seqeval.metrics.sequence_labeling import get_entities  # type: ignore[import-untyped]

from bertkit.tasks.catalogue import find_task
from bertkit.tasks.examples import ChoiceExample, QuestionExample, Split, TaggedExample, TextExample
from bertkit.tasks.readers import Columns, label_names, read_own
from bertkit.tasks.readers import load_split as read_split


@cache
def load_split(name: str, split: str, directory: Path) -> Split:
    """A split, read once for all tests; only the list itself can be changed by accident."""
    return read_split(name, split, directory)


COUNTS = {
    "cola": (8551, 1043, 1063),
    "mrpc": (3668, 408, 1725),
    "stsb": (5749, 1500, 1379),
    "rte": (2490, 277, 3000),
    "wnli": (635, 71, 146),
    "sst2": (67349, 872, 1821),
    "qnli": (None, 5463, 5463),
    "ax": (None, None, 1104),
    "conll2003": (14041, 3250, 3453),
    "conll2000": (8936, None, 2012),
    "ud-pos": (12544, 2001, 2077),
}


@pytest.mark.parametrize("name", COUNTS)
def test_every_row_of_the_official_files_is_read(shared_data: Path, name: str) -> None:
    """No row is dropped or invented."""
    for split, count in zip(("train", "dev", "test"), COUNTS[name], strict=True):
        if count is None:
            continue
        found = load_split(name, split, shared_data)
        assert len(found.examples) == count
        assert len({example.id for example in found.examples}) == count
        assert not any("dropped" in note or "duplicate" in note for note in found.notes)


def test_glues_unlabelled_tests_have_no_labels_and_its_dev_sets_have_all(shared_data: Path) -> None:
    for name in ("cola", "mrpc", "stsb", "wnli"):
        test = load_split(name, "test", shared_data).examples
        assert {example.label for example in test if isinstance(example, TextExample)} == {None}
    labels = Counter(example.label for example in load_split("mrpc", "dev", shared_data).examples)  # type: ignore[union-attr]
    assert labels == {"1": 279, "0": 129}
    assert label_names(load_split("rte", "train", shared_data).examples) == find_task("rte").labels


def test_known_rows_of_glue(shared_data: Path) -> None:
    cola = load_split("cola", "dev", shared_data).examples[0]
    assert cola == TextExample("0", "The sailors rode the breeze clear of the rocks.", None, "1")
    stsb = load_split("stsb", "dev", shared_data).examples[0]
    first, second = "A man with a hard hat is dancing.", "A man wearing a hard hat is dancing."
    assert stsb == TextExample("0", first, second, 5.0)
    mrpc = load_split("mrpc", "dev", shared_data).examples[0]
    assert isinstance(mrpc, TextExample)
    assert (mrpc.text_pair or "").startswith('" The foodservice pie business')
    rows = [each for each in load_split("sst2", "train", shared_data).examples if isinstance(each, TextExample)]
    assert rows[0].text.strip() == "hide new secretions from the parental units"


def test_conll_2003_has_its_published_documents_and_entities(shared_data: Path) -> None:
    """Tjong Kim Sang and De Meulder 2003, tables 1 and 2: articles, tokens and entities of the training file."""
    train = [each for each in load_split("conll2003", "train", shared_data).examples if isinstance(each, TaggedExample)]
    assert train[0].words[:3] == ("EU", "rejects", "German")
    assert (train[0].tags or ())[:3] == ("B-ORG", "O", "B-MISC")
    assert train[-1].document + 1 == 946
    assert sum(len(each.words) for each in train) == 203621
    entities = Counter(kind for each in train for kind, _, _ in get_entities(list(each.tags or ())))
    assert entities == {"LOC": 7140, "MISC": 3438, "ORG": 6321, "PER": 6600}


def test_chunks_of_conll_2000_are_iob2_already(shared_data: Path) -> None:
    test = load_split("conll2000", "test", shared_data)
    assert test.notes == {}
    tags = {tag for each in test.examples if isinstance(each, TaggedExample) for tag in each.tags or ()}
    assert tags <= set(find_task("conll2000").labels or ())


def test_ud_has_documents_and_all_seventeen_parts_of_speech(shared_data: Path) -> None:
    dev = [each for each in load_split("ud-pos", "dev", shared_data).examples if isinstance(each, TaggedExample)]
    assert dev[0].words == ("From", "the", "AP", "comes", "this", "story", ":")
    assert dev[-1].document + 1 == 318
    assert {tag for each in dev for tag in each.tags or ()} == set(find_task("ud-pos").labels or ())


@pytest.mark.parametrize(
    ("name", "count", "impossible"),
    [("xquad-en-v1.1", 1190, 0), ("squad2-part-train", 4449, 2342), ("squad2-part-dev", 1629, 826)],
)
def test_squad_files_keep_every_question_and_answer(shared_data: Path, name: str, count: int, impossible: int) -> None:
    found = read_own(shared_data / "squad" / f"{name}.json", "span")
    questions = [each for each in found.examples if isinstance(each, QuestionExample)]
    assert len(questions) == count
    assert sum(each.impossible for each in questions) == impossible
    assert all(bool(each.answers) != each.impossible for each in questions)
    assert found.notes == {}


def test_choices_of_codah_and_race(shared_data: Path) -> None:
    codah = [load_split("codah", split, shared_data).examples for split in ("train", "dev")]
    assert sum(map(len, codah)) == 2776
    race = [load_split("race", split, shared_data / "choice").examples for split in ("train", "dev")]
    passages = [{each.context for each in half if isinstance(each, ChoiceExample)} for half in race]
    assert [len(half) for half in passages] == [400, 150]
    assert all(each.label is not None for half in race for each in half if isinstance(each, ChoiceExample))


def test_a_part_of_mnli_is_read_as_a_users_own_table(shared_data: Path) -> None:
    columns = Columns(text="premise", text_pair="hypothesis", id="idx")
    train, dev = (
        read_own(shared_data / "nli" / f"mnli-part-{split}.jsonl", "classification", columns)
        for split in ("train", "dev")
    )
    assert (len(train.examples), len(dev.examples)) == (7991, 893)
    assert label_names(train.examples, {"dev": dev.examples}) == find_task("mnli").labels

"""Tagged sentences: columns, documents, and IOB1 turned into IOB2."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from seqeval.metrics.sequence_labeling import get_entities  # type: ignore[import-untyped]

from bertkit.errors import DataError
from bertkit.tasks.examples import TaggedExample
from bertkit.tasks.readers import load_split, read_own
from bertkit.tasks.readers.columns import NOT_IOB2, to_iob2

IOB_TAGS = st.lists(st.sampled_from(["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]), max_size=9)


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@given(IOB_TAGS)
def test_turning_into_iob2_keeps_every_chunk(tags: list[str]) -> None:
    assert get_entities(list(to_iob2(tags))) == get_entities(tags)


@given(IOB_TAGS)
def test_iob2_stays_as_it_is(tags: list[str]) -> None:
    converted = to_iob2(tags)
    assert to_iob2(converted) == converted
    for before, tag in zip(("O", *converted), converted, strict=False):
        assert not tag.startswith("I-") or before[1:] == tag[1:]


def test_iob1_writes_b_only_between_touching_chunks_of_one_type() -> None:
    assert to_iob2(["I-ORG", "I-ORG", "B-ORG", "O", "I-PER", "I-LOC"]) == (
        "B-ORG",
        "I-ORG",
        "B-ORG",
        "O",
        "B-PER",
        "B-LOC",
    )


CONLL2003 = """-DOCSTART- -X- -X- O

EU NNP I-NP I-ORG
rejects VBZ I-VP O

Peter NNP I-NP I-PER
Blackburn NNP I-NP I-PER

-DOCSTART- -X- -X- O

BRUSSELS NNP I-NP I-LOC
"""


def test_conll_2003_numbers_documents_and_takes_the_last_column(tmp_path: Path) -> None:
    written(tmp_path / "CoNLL-2003" / "eng.testa", CONLL2003)
    found = load_split("conll2003", "dev", tmp_path)
    assert found.examples == [
        TaggedExample("0", ("EU", "rejects"), ("B-ORG", "O"), 0),
        TaggedExample("1", ("Peter", "Blackburn"), ("B-PER", "I-PER"), 0),
        TaggedExample("2", ("BRUSSELS",), ("B-LOC",), 1),
    ]
    assert found.notes == {NOT_IOB2: 3}


def test_wnut_parts_columns_by_tabs_and_sentences_by_lines_of_white_space(tmp_path: Path) -> None:
    written(tmp_path / "wnut17" / "emerging.dev.conll", "@x\tO\nNew\u00a0York\tB-location\n\t\n\t\nand 1\tO\n\n")
    assert load_split("wnut17", "dev", tmp_path).examples == [
        TaggedExample("0", ("@x", "New\u00a0York"), ("O", "B-location"), 0),
        TaggedExample("1", ("and 1",), ("O",), 1),
    ]


def test_sentences_without_document_marks_are_documents_of_their_own(tmp_path: Path) -> None:
    written(tmp_path / "conll2000" / "test.txt", "He PRP B-NP\nran VBD B-VP\n\nAnd CC O\n")
    assert [each.document for each in load_split("conll2000", "test", tmp_path).examples] == [0, 1]  # type: ignore[union-attr]


def test_a_line_of_another_width_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "mine.txt", "He PRP O\nran O\n")
    with pytest.raises(DataError, match=r"mine\.txt, line 2: 2 columns \('ran O'\), expected 3"):
        read_own(path, "tagging")


def test_an_unknown_tag_is_named_with_its_line(tmp_path: Path) -> None:
    written(tmp_path / "conll2003" / "eng.train", "-DOCSTART- -X- O O\n\na b c O\nEU NNP I-NP I-GPE\n")
    with pytest.raises(DataError, match=r"eng\.train, line 4: label 'B-GPE', expected one of 'O', 'B-PER'"):
        load_split("conll2003", "train", tmp_path)


CONLLU = """# newdoc id = first
# sent_id = a-1
# text = I don't.
1\tI\tI\tPRON\tPRP\t_\t3\tnsubj\t_\t_
2-3\tdon't\t_\t_\t_\t_\t_\t_\t_\t_
2\tdo\tdo\tAUX\tVBP\t_\t0\troot\t_\t_
3\tn't\tnot\tPART\tRB\t_\t2\tadvmod\t_\t_
3.1\tgo\tgo\tVERB\tVB\t_\t_\t_\t_\t_

# newdoc id = second
# sent_id = b-1
1\tYes\tyes\tINTJ\tUH\t_\t0\troot\t_\t_
"""


def test_conllu_reads_syntactic_words_and_their_universal_parts_of_speech(tmp_path: Path) -> None:
    written(tmp_path / "UD_English-EWT" / "en_ewt-ud-dev.conllu", CONLLU)
    assert load_split("ud-pos", "dev", tmp_path).examples == [
        TaggedExample("a-1", ("I", "do", "n't"), ("PRON", "AUX", "PART"), 0),
        TaggedExample("b-1", ("Yes",), ("INTJ",), 1),
    ]


def test_conllu_needs_ten_fields_and_known_parts_of_speech(tmp_path: Path) -> None:
    path = written(tmp_path / "ud-pos" / "x-ud-train.conllu", "1\tYes\tyes\tINTJ\n")
    with pytest.raises(DataError, match="line 1: 4 fields, expected CoNLL-U's 10"):
        load_split("ud-pos", "train", tmp_path)
    written(path, "1\tYes\tyes\tUH\tUH\t_\t0\troot\t_\t_\n")
    with pytest.raises(DataError, match="line 1: label 'UH'"):
        load_split("ud-pos", "train", tmp_path)


def test_two_treebanks_in_one_folder_are_not_guessed_between(tmp_path: Path) -> None:
    for name in ("en_ewt", "en_gum"):
        written(tmp_path / "ud-pos" / f"{name}-ud-train.conllu", CONLLU)
    with pytest.raises(DataError, match=r"several files match .*: en_ewt-ud-train\.conllu, en_gum-ud-train\.conllu"):
        load_split("ud-pos", "train", tmp_path)


def test_a_users_words_and_tags_come_as_json_lines(tmp_path: Path) -> None:
    path = written(
        tmp_path / "mine.jsonl",
        '{"id": "s1", "words": ["Ada", "wrote"], "tags": ["I-PER", "O"], "document": "d1"}\n'
        '{"id": "s1", "tokens": ["Well"], "ner_tags": ["O"], "document": "d1"}\n'
        '{"text": "London", "words": ["London"], "tags": ["B-LOC"], "document": "d2"}\n',
    )
    found = read_own(path, "tagging")
    assert found.examples == [
        TaggedExample("s1", ("Ada", "wrote"), ("B-PER", "O"), 0),
        TaggedExample("s1#2", ("Well",), ("O",), 0),
        TaggedExample("2", ("London",), ("B-LOC",), 1),
    ]
    assert found.notes == {NOT_IOB2: 1, "duplicate ids (renamed)": 1}


def test_words_and_tags_of_different_number_are_named(tmp_path: Path) -> None:
    path = written(tmp_path / "mine.jsonl", '{"words": ["Ada", "wrote"], "tags": ["O"]}\n')
    with pytest.raises(DataError, match="line 1: 2 words and 1 tags; expected one tag per word"):
        read_own(path, "tagging")


def test_words_alone_are_sentences_without_tags(tmp_path: Path) -> None:
    path = written(tmp_path / "mine.txt", "He\nran\n\nAnd\n")
    assert read_own(path, "tagging").examples == [
        TaggedExample("0", ("He", "ran"), None, 0),
        TaggedExample("1", ("And",), None, 1),
    ]


def test_parts_of_speech_that_look_a_little_like_chunks_are_left_alone(tmp_path: Path) -> None:
    path = written(tmp_path / "mine.txt", "He I-X\nran S-X\nfar I-Y\n")
    assert read_own(path, "tagging").examples[0] == TaggedExample("0", ("He", "ran", "far"), ("I-X", "S-X", "I-Y"), 0)

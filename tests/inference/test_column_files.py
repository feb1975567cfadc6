"""Column files: every line is returned unchanged, with the predicted tag after each word."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertkit.errors import DataError
from bertkit.inference.column_files import ColumnForm, column_sentences
from bertkit.tasks.readers.columns import read_conll, read_conllu


def tagged(text: str, form: ColumnForm = "conll") -> str:
    lines = enumerate(text.splitlines(), start=1)
    found = []
    for sentence in column_sentences(lines, "f", form):
        words = sentence.example.words if sentence.example else ()
        found += sentence.tagged([f"T{len(word)}" for word in words])
    return "".join(f"{line}\n" for line in found)


def test_the_tag_is_the_last_column_in_the_same_layout() -> None:
    text = "-DOCSTART- -X- O\n\nEU NNP B-ORG\nrejects VBZ O\n\n\nPeter NNP B-PER\n"
    expected = "-DOCSTART- -X- O O\n\nEU NNP B-ORG T2\nrejects VBZ O T7\n\n\nPeter NNP B-PER T5\n"
    assert tagged(text) == expected
    assert tagged("EU\tB-ORG\nis\tO\n") == "EU\tB-ORG\tT2\nis\tO\tT2\n"
    assert tagged("EU\nis\n\n") == "EU T2\nis T2\n\n"
    assert tagged("\n") == "\n"
    assert tagged("") == ""


def test_conllu_has_a_column_for_it() -> None:
    def row(number: str, word: str, upos: str) -> str:
        return "\t".join([number, word, word, upos, *["_"] * 6])

    text = "\n".join(
        ["# newdoc", "# text = don't go", row("1-2", "don't", "_"), row("1", "do", "X"), row("2", "n't", "X"), ""]
    )
    assert tagged(text + "\n", "conllu") == text.replace("do\tX", "do\tT2").replace("n't\tX", "n't\tT3") + "\n"


@pytest.mark.parametrize("marked", [True, False])
def test_sentences_are_those_of_the_reader(tmp_path: Path, marked: bool) -> None:
    start = "-DOCSTART- O\n\n" if marked else ""
    text = f"{start}a O\nb O\n\nc O\n\n{start}d O\n"
    (tmp_path / "a.conll").write_text(text)
    read = read_conll(tmp_path / "a.conll").examples
    lines = enumerate(text.splitlines(), start=1)
    found = [each.example for each in column_sentences(lines, "f", "conll") if each.example]
    assert [(each.id, each.words, each.document) for each in found] == [(e.id, e.words, e.document) for e in read]


def test_real_files_are_read_alike(shared_data: Path) -> None:
    for name, form, reader in (
        ("conll2003/eng.testb", "conll", read_conll),
        ("ud-english-ewt/en_ewt-ud-dev.conllu", "conllu", read_conllu),
    ):
        path = shared_data / name
        if not path.is_file():
            continue
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        sentences = list(column_sentences(enumerate(lines, start=1), "f", form))  # type: ignore[arg-type]
        found = [(each.example.words, each.example.document) for each in sentences if each.example]
        assert found == [(each.words, each.document) for each in reader(path).examples]
        assert [line for each in sentences for line in each.lines] == lines


def test_a_line_of_other_columns_is_told() -> None:
    with pytest.raises(DataError, match=r"f, line 2: 1 columns \('b'\), expected 2"):
        list(column_sentences(enumerate(["a O", "b"], start=1), "f", "conll"))

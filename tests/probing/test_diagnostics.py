"""Ettinger's diagnostics: the columns determine a file's kind, articles fit the word, errors are located."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertkit.errors import DataError
from bertkit.probing.behaviour.diagnostics import Completion, diagnostic_files, read_diagnostic

CPRAG = "item\tcontext_s1\tcontext_s2\texpected\twithin_category\tbetween_category\tconstraint\n"
ROLE = "item\tcontext\texpected\texp_cloze\ttarget\ttgt_cloze\n"
NEG = "item\tcontext_aff\tcontext_neg\ttarget_aff\ttarget_neg\n"


def write(directory: Path, name: str, content: str) -> Path:
    path = directory / name
    path.write_text(content, encoding="utf-8")
    return path


def test_the_expected_word_is_compared_with_both_others(tmp_path: Path) -> None:
    path = write(tmp_path, "C.tsv", CPRAG + '0\tHe said "go.\tThen he\tleft\tran\tsang\tH\n\n')
    found = read_diagnostic(path)
    (comparison,), (cloze,) = found.comparisons, found.clozes
    assert comparison.completions == tuple(Completion('He said "go. Then he', w) for w in ("left", "ran", "sang"))
    assert (comparison.group, cloze.expected) == ("H", comparison.completions[:1])


def test_good_roles_are_compared_with_reversed_ones(tmp_path: Path) -> None:
    rows = "7-b\twhich waitress the customer had \tmet with|seen|met\t.1\tserved by\t0\n"
    rows += "7-a\twhich customer the waitress had \tserved\t.5\tserved\t.5\n"
    found = read_diagnostic(write(tmp_path, "R.tsv", ROLE + rows))
    (comparison,) = found.comparisons
    assert [each.word for each in comparison.completions] == ["served", "served"]
    assert comparison.completions[0].context == "which customer the waitress had"
    assert [[each.word for each in cloze.expected] for cloze in found.clozes] == [["met", "seen"], ["served"]]


def test_only_the_first_word_of_an_expected_phrase_is_in_the_blank(shared_data: Path) -> None:
    found = read_diagnostic(shared_data / "lm-diagnostics" / "datasets" / "ROLE-88" / "ROLE-88.tsv")
    assert all(" " not in each.word for cloze in found.clozes for each in cloze.expected)


def test_true_words_are_compared_with_false_ones_behind_their_own_articles(tmp_path: Path) -> None:
    path = write(tmp_path, "N.tsv", NEG + "0\tAn ant is (a|an)\tAn ant is not (a|an)\tinsect\tvegetable\n")
    affirmative, negative = read_diagnostic(path).comparisons
    assert affirmative.completions == (Completion("An ant is an", "insect"), Completion("An ant is a", "vegetable"))
    assert negative.completions == (
        Completion("An ant is not a", "vegetable"),
        Completion("An ant is not an", "insect"),
    )
    assert [affirmative.condition, negative.condition] == ["affirmative", "negative"]


def test_files_of_other_columns_are_passed_over_in_a_folder_and_refused_alone(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    mine = write(tmp_path / "below", "N.tsv", NEG + "0\tA\tB\tc\td\n")
    other = write(tmp_path, "other.tsv", "item\ttext\n0\tx\n")
    assert diagnostic_files(tmp_path) == [mine]
    with pytest.raises(DataError, match=r"other.tsv: the columns are item, text; expected those of CPRAG"):
        read_diagnostic(other)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (NEG, "contains no items"),
        (NEG + "0\tA\tB\tc\n", "line 2: no target_neg"),
        (NEG + "0\tA\tB\tc\td\n\n1\tA\t \tc\td\n", "line 4: no context_neg"),
        (ROLE + "7\tx\ty\t1\tz\t1\n", "item '7'; expected a number with -a"),
        (ROLE + "7-a\tx\ty\t1\tz\t1\n", "item 7 has only one order"),
    ],
)
def test_a_fault_is_named(content: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read_diagnostic(write(tmp_path, "x.tsv", content))


def test_the_released_files_are_read_whole(shared_data: Path) -> None:
    found = {path.stem: read_diagnostic(path) for path in diagnostic_files(shared_data / "lm-diagnostics")}
    counts = {name: (len(each.comparisons), len(each.clozes)) for name, each in found.items()}
    expected = {"CPRAG-102": (34, 34), "NEG-136-NAT": (32, 32), "NEG-136-SIMP": (36, 36), "ROLE-88": (44, 88)}
    assert counts == expected
    contexts = [c.context for each in found.values() for item in each.comparisons for c in item.completions]
    assert not any("|" in context for context in contexts)

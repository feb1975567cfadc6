"""Minimal pairs in BLiMP's format: valid records, errors with positions, and drawn pairs."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bertkit.errors import DataError, UsageError
from bertkit.tasks.minimal_pairs import read_paradigms, select


def pair(good: str = "She sees herself.", bad: str = "She sees himself.", **more: Any) -> dict[str, Any]:
    return {"sentence_good": good, "sentence_bad": bad, **more}


def write(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_file_without_uid_goes_by_its_name_and_blank_lines_are_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path / "hypernym.jsonl", "\ufeff" + json.dumps(pair()), "", pair("A b.", "A c.", pairID="x7"))
    (paradigm,) = read_paradigms(path)
    assert (paradigm.name, paradigm.field, paradigm.term) == ("hypernym", None, None)
    assert [(p.id, p.good, p.bad) for p in paradigm.pairs] == [
        ("0", "She sees herself.", "She sees himself."),
        ("x7", "A b.", "A c."),
    ]


@pytest.mark.parametrize(("ending", "between"), [(".csv", ";"), (".csv", ","), (".tsv", "\t")])
def test_a_table_holds_the_same_pairs(tmp_path: Path, ending: str, between: str) -> None:
    rows = [pair("A b.", 'She says "c".', UID="one"), pair("D e.", "F g.", UID="two")]
    path = tmp_path / f"pairs{ending}"
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), delimiter=between)
        table.writeheader()
        table.writerows(rows)
    found = [replace(each, path=path) for each in read_paradigms(write(tmp_path / "pairs.jsonl", *rows))]
    assert read_paradigms(path) == found
    packed = tmp_path / f"pairs{ending}.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert [each.pairs for each in read_paradigms(packed)] == [each.pairs for each in found]
    path.write_text(f"sentence_good{between}sentence_badd\nA{between}B\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"no 'sentence_bad' .it has 'sentence_badd'."):
        read_paradigms(path)


def test_a_file_may_hold_several_paradigms(tmp_path: Path) -> None:
    path = write(tmp_path / "all.jsonl", pair(UID="one"), pair(UID="two"), pair(UID="one"))
    assert [(p.name, len(p.pairs)) for p in read_paradigms(path)] == [("one", 2), ("two", 1)]


@pytest.mark.parametrize("below", ["", "data", "blimp"])
def test_files_are_found_in_the_usual_folders(below: str, tmp_path: Path) -> None:
    for name in ("b", "a"):
        write(tmp_path / below / f"{name}.jsonl", pair())
    assert [paradigm.name for paradigm in read_paradigms(tmp_path)] == ["a", "b"]


def test_the_two_spellings_of_a_field_are_one(tmp_path: Path) -> None:
    for name, field in (("a", "syntax/semantics"), ("b", "syntax_semantics"), ("c", "syntax")):
        write(tmp_path / f"{name}.jsonl", pair(field=field))
    assert [p.field for p in read_paradigms(tmp_path)] == ["syntax_semantics", "syntax_semantics", "syntax"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"sentence_good": "A b."', r"p.jsonl, line 2, column \d+: not valid JSON"),
        ("[1]", "p.jsonl, line 2: expected a JSON object, found a list"),
        ({"sentence_good": "A b.", "sentence_badd": "A c."}, "line 2: no 'sentence_bad' .it has 'sentence_badd'."),
        (pair(bad=""), "line 2: sentence_bad is empty"),
        (pair(good="  "), "line 2: sentence_good is empty"),
        ({"sentence_good": 3, "sentence_bad": "A."}, "line 2: sentence_good is 3; expected text"),
        (pair(UID=["x"]), r"line 2: UID is \['x'\]; expected text"),
    ],
)
def test_a_faulty_line_is_named(line: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read_paradigms(write(tmp_path / "p.jsonl", pair(), line, pair()))


def test_a_byte_that_is_not_utf8_is_located(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", pair())
    path.write_bytes(path.read_bytes() + b'{"sentence_good": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"p.jsonl: not valid UTF-8 at byte offset 98 .*convert the file to UTF-8"):
        read_paradigms(path)


def test_no_files_no_pairs_and_doubled_paradigms_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere: no such file or directory; expected minimal pairs"):
        read_paradigms(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"no .jsonl file in this directory"):
        read_paradigms(tmp_path)
    with pytest.raises(DataError, match=r"empty.jsonl: contains no pairs"):
        read_paradigms(write(tmp_path / "empty" / "empty.jsonl", ""))
    for name in ("a", "b"):
        write(tmp_path / "twice" / f"{name}.jsonl", pair(UID="same"))
    with pytest.raises(DataError, match=r"b.jsonl: the paradigm 'same' is also in .*a.jsonl"):
        read_paradigms(tmp_path / "twice")


def test_more_pairs_are_the_same_ones_and_others_in_the_order_of_the_file(tmp_path: Path) -> None:
    (whole,) = read_paradigms(write(tmp_path / "p.jsonl", *(pair(bad=f"She {n}.") for n in range(41))))
    numbers = [[int(p.id) for p in whole.drawn(count, seed=3).pairs] for count in (5, 17, 41, 90)]
    assert [len(drawn) for drawn in numbers] == [5, 17, 41, 41]
    assert all(drawn == sorted(drawn) for drawn in numbers)
    assert all(set(few) < set(more) for few, more in itertools.pairwise(numbers[:3]))
    assert numbers[0] != list(range(5))
    assert numbers[0] != [int(p.id) for p in whole.drawn(5, seed=4).pairs]
    assert whole.drawn(5, seed=3).available == 41


def test_paradigms_are_chosen_by_name_field_or_phenomenon(tmp_path: Path) -> None:
    write(tmp_path / "anaphor_gender.jsonl", pair(field="morphology", linguistics_term="anaphor_agreement"))
    write(tmp_path / "wh_island.jsonl", pair(field="syntax", linguistics_term="island_effects"))
    write(tmp_path / "passive.jsonl", pair(field="syntax", linguistics_term="argument_structure"))
    paradigms = read_paradigms(tmp_path)

    def chosen(*patterns: str) -> list[str]:
        return [paradigm.name for paradigm in select(paradigms, patterns)]

    assert chosen() == ["anaphor_gender", "passive", "wh_island"]
    assert chosen("syntax") == ["passive", "wh_island"]
    assert chosen("wh_*", "anaphor_agreement") == ["anaphor_gender", "wh_island"]
    with pytest.raises(UsageError, match="matches 'syntaxx'; did you mean 'syntax'"):
        chosen("passive", "syntaxx")


def test_blimp_is_read_whole(shared_data: Path) -> None:
    paradigms = read_paradigms(shared_data)
    assert len(paradigms) == 67
    assert {len(paradigm.pairs) for paradigm in paradigms} == {1000}
    assert {p.field for p in paradigms} == {"syntax", "morphology", "syntax_semantics", "semantics"}
    assert len({p.term for p in paradigms}) == 13
    identical = {p.name: p.identical for p in paradigms if p.identical}
    assert identical == {
        "passive_1": ("324", "810"),
        "principle_A_case_2": ("105", "287", "372", "816", "967"),
    }

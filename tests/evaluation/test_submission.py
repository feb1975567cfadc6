"""Files for the GLUE server: the bytes it expects, and a checker that names every error by file and line."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.errors import DataError
from bertkit.evaluation.glue import TEST_SPLITS
from bertkit.evaluation.submission import (
    GLUE_FILES,
    GlueFile,
    check_submission,
    glue_file,
    glue_tsv,
    glue_zip,
    submission_errors,
    write_glue_submission,
)
from bertkit.tasks.catalogue import GLUE, TASKS

SHORT = GlueFile("RTE", 3, ("entailment", "not_entailment"))
SCORES = GlueFile("STS-B", 9, None)


def predictions_of(file: GlueFile) -> list[str | float]:
    """A full column of predictions that cycles through the labels."""
    if file.labels is None:
        return [index % 51 / 10 for index in range(file.rows)]
    return [file.labels[index % len(file.labels)] for index in range(file.rows)]


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return {file.file: glue_tsv(file, predictions_of(file)) for file in GLUE_FILES.values()}


def test_a_file_is_header_index_and_label_to_the_byte() -> None:
    text = glue_tsv(SHORT, ["entailment", "not_entailment", "entailment"])
    assert text == "index\tprediction\n0\tentailment\n1\tnot_entailment\n2\tentailment\n"


def test_scores_have_three_decimals_between_0_and_5() -> None:
    values = [2.0, -0.0, -3.2, -0.0001, 5.0004, 17.0, 4.9996, 0.0625, np.float32(3.14159)]
    assert glue_tsv(SCORES, values).split("\n")[1:-1] == [
        f"{index}\t{score}"
        for index, score in enumerate(["2.000", "0.000", "0.000", "0.000", "5.000", "5.000", "5.000", "0.062", "3.142"])
    ]


@settings(max_examples=40)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=9, max_size=9))
def test_any_finite_score_is_written_in_range(values: list[float]) -> None:
    for value, line in zip(values, glue_tsv(SCORES, values).split("\n")[1:-1], strict=True):
        written = line.split("\t")[1]
        assert len(written) == 5
        assert float(written) == pytest.approx(min(5, max(0, value)), abs=5.1e-4)


def test_the_eleven_files_have_the_names_sizes_and_labels_of_the_benchmark() -> None:
    assert {file.file: file.rows for file in GLUE_FILES.values()} == {
        "CoLA.tsv": 1063,
        "SST-2.tsv": 1821,
        "MRPC.tsv": 1725,
        "STS-B.tsv": 1379,
        "MNLI-m.tsv": 9796,
        "MNLI-mm.tsv": 9847,
        "QNLI.tsv": 5463,
        "QQP.tsv": 390965,
        "RTE.tsv": 3000,
        "WNLI.tsv": 146,
        "AX.tsv": 1104,
    }
    assert GLUE_FILES["WNLI"].labels == ("0", "1")
    assert GLUE_FILES["QNLI"].labels == ("entailment", "not_entailment")
    assert GLUE_FILES["AX"].labels == ("contradiction", "entailment", "neutral")


def test_sizes_are_those_of_the_test_files(shared_data: Path) -> None:
    for name in ("CoLA", "SST-2", "MRPC", "STS-B", "RTE", "WNLI", "QNLI"):
        lines = (shared_data / "glue" / name / "test.tsv").read_bytes().removesuffix(b"\n").split(b"\n")
        assert len(lines) - 1 == GLUE_FILES[name].rows, name


def test_tasks_find_their_files_by_the_catalogues_names() -> None:
    files = [glue_file(task, split) for task in (*GLUE, "ax") for split in TASKS[task].splits if split in TEST_SPLITS]
    assert sorted(file.name for file in files) == sorted(GLUE_FILES)
    assert (glue_file("mnli", "test").name, glue_file("mnli", "test_mm").name) == ("MNLI-m", "MNLI-mm")
    assert (glue_file("stsb", "test").name, glue_file("sst2", "test").name) == ("STS-B", "SST-2")


@pytest.mark.parametrize(
    ("file", "values", "words"),
    [
        (SHORT, ["entailment"] * 2, "RTE.tsv: 2 predictions, but the test set has 3 examples"),
        (SHORT, ["entailment", "neutral", "entailment"], "RTE.tsv, index 1: label 'neutral'"),
        (SHORT, ["entailment", "entailment", 1], "index 2: label 1; .* map them to names"),
        (SCORES, [1.0] * 8 + [float("nan")], "STS-B.tsv, index 8: the score is nan"),
        (SCORES, ["high"] + [1.0] * 8, "index 0: the score is 'high'"),
    ],
)
def test_what_the_server_would_refuse_is_refused_here(file: GlueFile, values: list[str | float], words: str) -> None:
    with pytest.raises(DataError, match=words):
        glue_tsv(file, values)


def test_equal_predictions_give_equal_bytes_in_any_order() -> None:
    small = {"RTE.tsv": "index\tprediction\n0\tentailment\n", "CoLA.tsv": "index\tprediction\n0\t1\n"}
    packed = glue_zip(small)
    assert packed == glue_zip(dict(reversed(small.items())))
    assert hashlib.sha256(packed).hexdigest() == GOLDEN_ZIP
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        assert archive.namelist() == ["CoLA.tsv", "RTE.tsv"]
        assert {member.date_time for member in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert archive.read("CoLA.tsv") == b"index\tprediction\n0\t1\n"


GOLDEN_ZIP = "2db8bc315b222c6d76aab802a4471dc223208d261c7131bcceec8327b737b5a3"


def test_a_written_submission_passes_the_check_and_is_written_the_same_again(tmp_path: Path) -> None:
    columns = {name: predictions_of(file) for name, file in GLUE_FILES.items()}
    path = write_glue_submission(tmp_path / "submission", columns)
    assert check_submission(path) == []
    assert sorted(each.name for each in path.parent.iterdir()) == sorted(
        [*(file.file for file in GLUE_FILES.values()), "submission.zip"]
    )
    assert (path.parent / "WNLI.tsv").read_bytes().startswith(b"index\tprediction\n0\t0\n1\t1\n2\t0\n")
    again = write_glue_submission(tmp_path / "again", dict(reversed(columns.items())))
    assert again.read_bytes() == path.read_bytes()


def test_a_refused_submission_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        write_glue_submission(tmp_path / "submission", {"WNLI": ["0"] * 146, "CoLA": ["1"]})
    assert list(tmp_path.iterdir()) == []


def pack(path: Path, members: dict[str, str | bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


Change = Callable[[str], str | bytes]


def replacing(old: str, new: str) -> Change:
    return lambda text: text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("name", "change", "faults"),
    [
        ("WNLI", replacing("\t", ","), ["1: the header is 'index,prediction'; expected 'index\\tprediction'"]),
        ("WNLI", lambda text: "\ufeff" + text, ["1: the header is '\\ufeffindex"]),
        ("WNLI", lambda text: "", ["1: the header is nothing", "2: there are 0 rows"]),
        ("WNLI", replacing("\n7\t1\n", "\n7\t2\n"), ["9: unknown label '2'; expected one of 0, 1"]),
        ("WNLI", replacing("\n7\t1\n8", "\n8\t1\n7"), ["9: the index is '8'; expected 7", "10: the index is '7'"]),
        ("WNLI", replacing("\n7\t1\n", "\n7 1\n"), ["9: '7 1' is not an index, a tab and a prediction"]),
        ("WNLI", replacing("\n7\t1\n", "\n7\t1\t0.9\n"), ["9: '7\\t1\\t0.9' is not an index"]),
        ("WNLI", replacing("145\t1\n", ""), ["147: there are 145 rows after the header, but the test set has 146"]),
        ("WNLI", replacing("145\t1\n", "\n"), ["147: is blank"]),
        ("WNLI", lambda text: text + "146\t0\n", ["148: there are 147 rows"]),
        ("WNLI", lambda text: text.encode() + b"\xff\xfe", ["148: is not UTF-8"]),
        ("STS-B", replacing("\n3\t0.300", "\n3\t5.001"), ["5: the score is '5.001'; expected a number from 0 to 5"]),
        ("STS-B", replacing("\n3\t0.300", "\n3\tnan"), ["5: the score is 'nan'"]),
        ("STS-B", replacing("\n3\t0.300", "\n3\t0_3"), ["5: the score is '0_3'"]),
        ("STS-B", replacing("\n3\t0.300", "\n3\t-0.1"), ["5: the score is '-0.1'"]),
        ("MNLI-m", replacing("\n1\tentailment", "\n1\t0"), ["3: unknown label '0'"]),
        ("RTE", replacing("\n1\tnot_entailment", "\n1\tneutral"), ["3: unknown label 'neutral'"]),
    ],
)
def test_a_fault_inside_a_file_is_named_by_file_and_line(
    texts: dict[str, str], tmp_path: Path, name: str, change: Change, faults: list[str]
) -> None:
    file = f"{name}.tsv"
    changed = change(texts[file])
    assert changed != texts[file]
    found = [str(each) for each in check_submission(pack(tmp_path / "s.zip", {file: changed}))]
    inside = [each for each in found if "is missing" not in each]
    assert len(found) - len(inside) == 10
    assert len(inside) == len(faults)
    assert all(each.startswith(f"{file}:{start}") for each, start in zip(inside, faults, strict=True))


def test_a_file_without_its_header_is_told_from_the_first_line_on(texts: dict[str, str], tmp_path: Path) -> None:
    path = pack(tmp_path / "s.zip", {"WNLI.tsv": texts["WNLI.tsv"].split("\n", 1)[1]})
    first, second, *_ = (str(each) for each in check_submission(path) if each.line)
    assert first.startswith("WNLI.tsv:1: the header is '0\\t0'")
    assert second.startswith("WNLI.tsv:2: the index is '1'; expected 0")


def test_lines_may_end_in_carriage_returns(texts: dict[str, str], tmp_path: Path) -> None:
    small = {name: text.replace("\n", "\r\n") for name, text in texts.items() if name != "QQP.tsv"}
    assert [str(each) for each in check_submission(pack(tmp_path / "s.zip", small))] == ["QQP.tsv: is missing"]


def test_many_faults_of_one_file_are_cut_short(texts: dict[str, str], tmp_path: Path) -> None:
    wrong = texts["AX.tsv"].replace("neutral", "2")
    found = [each for each in check_submission(pack(tmp_path / "s.zip", {"AX.tsv": wrong})) if each.file == "AX.tsv"]
    assert len(found) == 21
    assert str(found[-1]) == "AX.tsv: has 348 more errors"


def test_missing_moved_doubled_and_foreign_files_are_named(texts: dict[str, str], tmp_path: Path) -> None:
    members: dict[str, str | bytes] = {name: text for name, text in texts.items() if name not in ("QQP.tsv", "AX.tsv")}
    members |= {"glue/AX.tsv": texts["AX.tsv"], "MNLI.tsv": "x", "__MACOSX/._CoLA.tsv": "x"}
    path = pack(tmp_path / "s.zip", members)
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("WNLI.tsv", texts["WNLI.tsv"])
    assert [str(each) for each in check_submission(path)] == [
        "QQP.tsv: is missing",
        "WNLI.tsv: occurs 2 times; expected once",
        "AX.tsv: is missing; glue/AX.tsv is in a folder, but the zip must be flat",
        "MNLI.tsv: does not belong in a submission; did you mean MNLI-m.tsv?",
        "__MACOSX/._CoLA.tsv: does not belong in a submission, which is a flat zip",
    ]


def test_what_is_no_zip_is_a_fault_and_what_is_not_there_an_error(tmp_path: Path) -> None:
    (tmp_path / "s.zip").write_text("index\tprediction\n")
    (fault,) = check_submission(tmp_path / "s.zip")
    assert str(fault).startswith("s.zip: is not a zip")
    with pytest.raises(DataError, match=r"none\.zip: cannot be read"):
        check_submission(tmp_path / "none.zip")


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(0, 255), st.booleans())
def test_a_damaged_zip_never_breaks_the_check(place: int, byte: int, cut: bool) -> None:
    packed = bytearray(glue_zip({"WNLI.tsv": "index\tprediction\n0\t0\n", "RTE.tsv": "index\tprediction\n"}))
    place %= len(packed)
    packed[place] ^= byte
    damaged = bytes(packed[:place] if cut else packed)
    found = submission_errors(damaged, "s.zip")
    assert found
    assert all(str(fault) for fault in found)

"""GLUE submissions: write and check the files that the server accepts.

Wang et al. 2019, arXiv:1804.07461, and the benchmark's FAQ. Files are built as text or bytes; equal predictions give
equal files. Only `write_glue_submission` and `check_submission` use the disk. tasks/readers/ read gold files.
"""

from __future__ import annotations

import io
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from bertkit.errors import DataError
from bertkit.files import write_bytes, write_text
from bertkit.visible import number_of

HEADER = "index\tprediction"
_LONGEST_MEMBER = 64 * 1024 * 1024
_ERRORS_PER_FILE = 20
_DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, RuntimeError, EOFError, ValueError)
"""What zipfile raises for a damaged or encrypted zip."""
_STAMP = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip can store, used for every member so that equal predictions give equal bytes."""

_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]{1,3})?")

_BINARY = ("0", "1")
_INFERENCE = ("entailment", "not_entailment")
_THREE_WAY = ("contradiction", "entailment", "neutral")


@dataclass(frozen=True)
class GlueFile:
    """One file of a submission: its name without .tsv, the size of the test set, and the labels (None for scores)."""

    name: str
    rows: int
    labels: tuple[str, ...] | None

    @property
    def file(self) -> str:
        return f"{self.name}.tsv"


GLUE_FILES: dict[str, GlueFile] = {
    each.name: each
    for each in (
        GlueFile("CoLA", 1063, _BINARY),
        GlueFile("SST-2", 1821, _BINARY),
        GlueFile("MRPC", 1725, _BINARY),
        GlueFile("STS-B", 1379, None),
        GlueFile("MNLI-m", 9796, _THREE_WAY),
        GlueFile("MNLI-mm", 9847, _THREE_WAY),
        GlueFile("QNLI", 5463, _INFERENCE),
        GlueFile("QQP", 390965, _BINARY),
        GlueFile("RTE", 3000, _INFERENCE),
        GlueFile("WNLI", 146, _BINARY),
        GlueFile("AX", 1104, _THREE_WAY),
    )
}
"""The eleven files in the benchmark's order."""

_MNLI = {"test": "MNLI-m", "test_mm": "MNLI-mm"}


def glue_file(task: str, split: str) -> GlueFile:
    """The file for the predictions of a task's test split, by the catalogue's names (`mnli` and `test_mm`)."""
    if task == "mnli":
        return GLUE_FILES[_MNLI[split]]
    return next(file for name, file in GLUE_FILES.items() if name.lower().replace("-", "") == task)


def glue_tsv(file: GlueFile, predictions: Sequence[str | float]) -> str:
    """The file's text: the header, then index and prediction of each test example in the order of the test file.

    Args:
        file: which file, of GLUE_FILES.
        predictions: label names, exactly as the file needs them, or (STS-B) scores, which are cut to [0, 5] and
            written with three decimals.

    Raises:
        DataError: the number of rows differs from the test set, a label is not one of the task's, or a score is not
            a finite number.
    """
    if len(predictions) != file.rows:
        raise DataError(
            f"{file.file}: {number_of(len(predictions), 'prediction')}, but the test set has {file.rows} examples; give"
            " one for each"
        )
    lines = [HEADER, *(f"{index}\t{_glue_value(file, index, each)}" for index, each in enumerate(predictions))]
    return "\n".join(lines) + "\n"


def _glue_value(file: GlueFile, index: int, prediction: str | float) -> str:
    if file.labels is not None:
        if prediction in file.labels:
            return str(prediction)
        raise DataError(
            f"{file.file}, index {index}: label {prediction!r}; expected one of {', '.join(file.labels)}, as text "
            "(label ids differ between libraries: map them to names first)"
        )
    try:
        score = float(prediction)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise DataError(f"{file.file}, index {index}: the score is {prediction!r}; expected a finite number")
    return f"{min(5.0, max(0.0, score)) + 0.0:.3f}"


def glue_zip(texts: Mapping[str, str]) -> bytes:
    """A flat zip of files by name ("CoLA.tsv"), in the benchmark's order; equal texts give equal bytes."""
    order = {file.file: place for place, file in enumerate(GLUE_FILES.values())}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in sorted(texts, key=order.__getitem__):
            member = zipfile.ZipInfo(name, date_time=_STAMP)
            member.compress_type = zipfile.ZIP_STORED  # deflate's output differs between versions of zlib
            member.create_system = 3  # Unix, on every system
            member.external_attr = 0o644 << 16
            archive.writestr(member, texts[name].encode("utf-8"))
    return packed.getvalue()


def write_glue_submission(directory: Path, predictions: Mapping[str, Sequence[str | float]]) -> Path:
    """Write `NAME.tsv` for each of the given files, and submission.zip of them; returns the path of the zip.

    Args:
        directory: created if missing.
        predictions: by file name without .tsv, as in GLUE_FILES. The server takes a zip of all eleven; fewer are
            written all the same, and `check_submission` lists what is missing.

    Raises:
        DataError: as `glue_tsv`; nothing is written in that case.
    """
    texts = {GLUE_FILES[name].file: glue_tsv(GLUE_FILES[name], values) for name, values in predictions.items()}
    packed = glue_zip(texts)
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_text(directory / name, text)
    path = directory / "submission.zip"
    write_bytes(path, packed)
    return path


class SubmissionError(NamedTuple):
    """What is wrong at one place in a submission; `line` counts from 1 and is None for a whole file."""

    file: str
    line: int | None
    message: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.message}"


def check_submission(zip_path: Path) -> list[SubmissionError]:
    """`submission_errors` of a file on disk.

    Raises:
        DataError: the file is missing or cannot be read.
    """
    try:
        packed = zip_path.read_bytes()
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{zip_path}: cannot be read ({reason}); expected the zip of a GLUE submission") from error
    return submission_errors(packed, zip_path.name)


def submission_errors(packed: bytes, name: str) -> list[SubmissionError]:
    """All errors of a GLUE submission, at most twenty per file; empty if it can be submitted.

    It checks the eleven names (flat, each once, nothing else), the header, the number of rows, the order of indices,
    and each label or score. Lines may end in CR LF, as Python's csv module writes them.

    Args:
        packed: the zip's bytes.
        name: the name under which errors of the zip itself are reported.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            return [*_member_errors(archive.infolist()), *_content_errors(archive)]
    except _DAMAGE as error:
        return [SubmissionError(name, None, f"is not a zip ({error}); expected a zip of {len(GLUE_FILES)} .tsv files")]


def _member_errors(members: Sequence[zipfile.ZipInfo]) -> Iterator[SubmissionError]:
    expected = [file.file for file in GLUE_FILES.values()]
    names = [member.filename for member in members]
    for name in expected:
        if name not in names:
            inside = next((each for each in names if each.endswith(f"/{name}")), None)
            moved = f"; {inside} is in a folder, but the zip must be flat" if inside else ""
            yield SubmissionError(name, None, f"is missing{moved}")
        elif names.count(name) > 1:
            yield SubmissionError(name, None, f"occurs {names.count(name)} times; expected once")
    for name in dict.fromkeys(names):
        if "/" in name and name.rpartition("/")[2] not in expected:
            yield SubmissionError(name, None, "does not belong in a submission, which is a flat zip")
        elif "/" not in name and name not in expected:
            yield SubmissionError(name, None, f"does not belong in a submission{_nearest(name, expected)}")


def _content_errors(archive: zipfile.ZipFile) -> Iterator[SubmissionError]:
    members = {member.filename: member for member in archive.infolist()}
    for file in GLUE_FILES.values():
        if (member := members.get(file.file)) is None:
            continue
        if member.file_size > _LONGEST_MEMBER:
            yield SubmissionError(
                file.file, None, f"is {member.file_size} bytes long; expected at most {_LONGEST_MEMBER}"
            )
            continue
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            yield SubmissionError(
                file.file, None, "is compressed by another method than deflate; use deflate, or no compression"
            )
            continue
        try:
            content = archive.read(member)
        except _DAMAGE as error:
            yield SubmissionError(file.file, None, f"cannot be unpacked ({error})")
            continue
        found = list(_line_errors(file, content))
        yield from found[:_ERRORS_PER_FILE]
        if len(found) > _ERRORS_PER_FILE:
            yield SubmissionError(file.file, None, f"has {len(found) - _ERRORS_PER_FILE} more errors")


def _line_errors(file: GlueFile, content: bytes) -> Iterator[SubmissionError]:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        yield SubmissionError(file.file, line, "is not UTF-8")
        return
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    if lines[-1] == "":
        lines.pop()
    if not lines or lines[0] != HEADER:
        found = repr(lines[0][:60]) if lines else "nothing"
        yield SubmissionError(file.file, 1, f"the header is {found}; expected {HEADER!r}, with a tab")
    rows = lines[1:]
    for index, row in enumerate(rows[: file.rows]):
        if message := _row_error(file, index, row):
            yield SubmissionError(file.file, index + 2, message)
    if len(rows) != file.rows:
        line = min(len(rows), file.rows) + 2
        yield SubmissionError(
            file.file, line, f"there are {len(rows)} rows after the header, but the test set has {file.rows}"
        )


def _row_error(file: GlueFile, index: int, row: str) -> str | None:
    fields = row.split("\t")
    if len(fields) != 2:
        return f"{row[:60]!r} is not an index, a tab and a prediction" if row.strip() else "is blank"
    if fields[0] != str(index):
        return f"the index is {fields[0][:20]!r}; expected {index} (from 0, in the order of the test file)"
    if file.labels is not None:
        if fields[1] in file.labels:
            return None
        return f"unknown label {fields[1][:60]!r}; expected one of {', '.join(file.labels)}"
    score = float(fields[1]) if _NUMBER.fullmatch(fields[1]) else math.nan
    return None if 0 <= score <= 5 else f"the score is {fields[1][:60]!r}; expected a number from 0 to 5"


def _nearest(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; expected one of {', '.join(known)}"

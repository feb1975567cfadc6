"""Readers of text take bounded memory and time, for any file and any expansion.

Bombs are a few kilobytes that expand to some megabytes, against lowered bounds; nothing outside of tmp_path is opened,
and blocking files are opened by a reader that refuses them.
"""

from __future__ import annotations

import bz2
import gc
import gzip
import io
import lzma
import os
import socket
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertkit.errors import BertkitError, DataError
from bertkit.files import open_regular, read_json_file, sha256_of
from bertkit.inference import predict_input
from bertkit.inference.predict_input import require_input_file, stdin_lines
from bertkit.recipe.resolve import resolve_recipe
from bertkit.tasks.readers.common import json_file, json_rows
from bertkit.tasks.readers.table import table_rows
from bertkit.text import lines
from bertkit.text.lines import COMPRESSIONS, read_bytes, read_lines
from bertkit.text.sources import open_corpus

EXPANDED = 8 << 20


def packed_with(suffix: str, content: bytes) -> bytes:
    import pyarrow

    if suffix == ".zst":
        return pyarrow.Codec("zstd").compress(content, asbytes=True)
    return {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}[suffix](content)


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_a_compressed_file_is_read_in_pieces_however_much_it_expands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(lines, "CHUNK_BYTES", 1 << 16)
    path = tmp_path / f"bomb.txt{suffix}"
    path.write_bytes(packed_with(suffix, b"a" * EXPANDED))
    assert path.stat().st_size < EXPANDED / 500
    sizes = [len(chunk) for chunk in read_bytes(path)]
    assert sum(sizes) == EXPANDED
    assert max(sizes) <= 1 << 16


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_reading_stops_where_a_line_gets_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    monkeypatch.setattr(lines, "CHUNK_BYTES", 1 << 16)
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / f"bomb.txt{suffix}"
    path.write_bytes(packed_with(suffix, b"a" * EXPANDED))
    read = 0

    def counted(found: Path) -> Any:
        nonlocal read
        for chunk in read_bytes(found):
            read += len(chunk)
            yield chunk

    monkeypatch.setattr(lines, "read_bytes", counted)
    with pytest.raises(DataError, match="longer than 1 MiB; put line ends"):
        list(read_lines(path))
    assert read < 2 << 20


MEASURED = """
import resource, sys
from pathlib import Path
import pyarrow
from bertkit.text.lines import read_bytes
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
list(read_bytes(Path(sys.argv[2])))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
read = sum(map(len, read_bytes(Path(sys.argv[1]))))
print(read >> 20, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before >> 10)
"""


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_memory_stays_flat_while_a_small_file_expands_a_thousand_times(tmp_path: Path, suffix: str) -> None:
    part = packed_with(suffix, b"a\n" * (EXPANDED // 2))
    (tmp_path / f"small.txt{suffix}").write_bytes(packed_with(suffix, b"a\n"))
    (tmp_path / f"bomb.txt{suffix}").write_bytes(part * 16)
    command = [sys.executable, "-c", MEASURED, f"bomb.txt{suffix}", f"small.txt{suffix}"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True).stdout
    expanded, grown = map(int, shown.split())
    assert expanded == 16 * (EXPANDED >> 20)
    assert grown < 48


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_a_damaged_file_leaves_no_memory_behind(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"damaged.txt{suffix}"
    path.write_bytes(packed_with(suffix, b"some lines\n" * 90)[:-5])
    tracemalloc.start()
    try:
        for _ in range(4):
            with pytest.raises(DataError, match="damaged or truncated"):
                list(read_bytes(path))
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < lines.CHUNK_BYTES
    finally:
        tracemalloc.stop()


def test_an_xz_file_may_have_streams_and_padding(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.xz"
    path.write_bytes(lzma.compress(b"one\n") + bytes(8) + lzma.compress(b"two\n") + bytes(4))
    assert [line for part in read_lines(path) for line in part] == ["one", "two"]
    path.write_bytes(lzma.compress(b"one\n") + b"garbage")
    with pytest.raises(DataError, match=r"damaged or truncated \.xz"):
        list(read_lines(path))


def test_the_dictionary_of_an_xz_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt.xz"
    path.write_bytes(lzma.compress(b"text\n", preset=6))
    monkeypatch.setattr(lines, "MAX_XZ_BYTES", 1 << 20)
    with pytest.raises(DataError, match=r"needs more than 1 MiB to decompress|damaged or truncated"):
        list(read_lines(path))


def test_a_line_of_a_pipe_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict_input, "MAX_LINE_BYTES", 1 << 20)
    assert list(stdin_lines(io.BytesIO(b"a\nb"))) == [(1, "a"), (2, "b")]
    with pytest.raises(DataError, match="line 2: longer than 1 MiB"):
        list(stdin_lines(io.BytesIO(b"a\n" + b"b" * (1 << 21))))


@pytest.fixture(params=["fifo", "socket", "directory"])
def no_file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files that would block or never end when read; devices are refused by the same test of the type."""
    path = tmp_path / "odd.jsonl"
    if request.param == "fifo":
        os.mkfifo(path)
    elif request.param == "socket":
        monkeypatch.chdir(tmp_path)  # the path of a socket has at most 107 bytes
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    else:
        path.mkdir()
    return path


READERS: dict[str, Callable[[Path], Any]] = {
    "bytes": lambda path: list(read_bytes(path)),
    "sha256": sha256_of,
    "json": read_json_file,
    "json lines": lambda path: list(json_rows(path)),
    "one json": json_file,
    "table": lambda path: list(table_rows(path)),
    "recipe": lambda path: resolve_recipe(str(path.rename(path.with_suffix(".yaml")))),
    "predict": require_input_file,
    "open": open_regular,
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS.keys())
def test_only_regular_files_are_read(no_file: Path, reader: Callable[[Path], Any]) -> None:
    with pytest.raises(BertkitError, match=r"not a regular file|is a (pipe|directory)|no such file"):
        reader(no_file)


def test_a_corpus_is_made_of_regular_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    (tmp_path / "link.txt").symlink_to("a.txt")
    for name in ("a.txt", "link.txt"):
        with pytest.raises(DataError, match="not a regular file but a pipe"):
            open_corpus([str(tmp_path / name)], cache=tmp_path / "cache")
    (tmp_path / "b.txt").write_text("text")
    assert [reader.name for reader in open_corpus([str(tmp_path)], cache=tmp_path / "cache").readers] == [
        str(tmp_path / "b.txt")
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"id,text\n1,a\rb\n2,c\n", "not valid CSV"),
        (b'id,text\n1,"a\n', "not valid CSV"),
        (b"id,text\n1,a,b\n", "line 2 has 3 fields, expected 2"),
        (b"id,text\n1\n", "line 2 has 1 fields, expected 2"),
    ],
)
def test_csv_of_another_form_is_an_error_of_the_data(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(open_corpus([str(tmp_path / "a.csv")], cache=tmp_path / "cache").documents())


@pytest.mark.parametrize("suffix", ["", *COMPRESSIONS])
def test_csv_is_read_compressed_or_not(tmp_path: Path, suffix: str) -> None:
    content = b'id,text\n1,"a, ""b"""\n\n2,007\n3,"c\nd"\n4,NA\n'
    (tmp_path / f"a.csv{suffix}").write_bytes(packed_with(suffix, content) if suffix else content)
    corpus = open_corpus([str(tmp_path / f"a.csv{suffix}")], cache=tmp_path / "cache")
    assert list(corpus.documents()) == [['a, "b"'], ["007"], ["c", "d"], ["NA"]]
    if suffix:
        (tmp_path / f"a.csv{suffix}").write_bytes(packed_with(suffix, content * 9)[:-9])
        with pytest.raises(DataError, match="damaged or truncated"):
            list(open_corpus([str(tmp_path / f"a.csv{suffix}")], cache=tmp_path / "cache").documents())

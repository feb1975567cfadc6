"""Files that are replaced as a whole."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import bertkit
from bertkit.arrays import save_array
from bertkit.errors import DataError
from bertkit.files import (
    atomic_directory,
    earlier_version,
    fsync_path,
    one_at_a_time,
    open_text_to_write,
    open_to_write,
    replacing,
    sha256_of,
    write_text,
)
from bertkit.models.files.model_files import find_model
from tests.limits import largest_file


def test_an_error_names_the_file_and_not_the_temporary_one(tmp_path: Path) -> None:
    wanted = tmp_path / "missing" / "page.html"
    with pytest.raises(FileNotFoundError) as caught:
        write_text(wanted, "")
    assert caught.value.filename == str(wanted)


def test_an_error_of_an_open_file_names_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    wanted = tmp_path / "a.bin"
    with pytest.raises(OSError, match="Stale file handle") as writing, replacing(wanted):
        refused()
    wanted.write_bytes(b"x")
    monkeypatch.setattr(hashlib, "file_digest", refused)
    with pytest.raises(OSError, match="Stale file handle") as reading:
        sha256_of(wanted)
    assert [caught.value.filename for caught in (writing, reading)] == [str(wanted)] * 2


def test_a_full_disk_is_reported_with_the_file_and_what_it_needs() -> None:
    full = Path("/dev/full")
    with pytest.raises(OSError, match="No space left") as bytes_, open_to_write(full) as file:
        file.write(b"12345")
    with pytest.raises(OSError, match="No space left") as text, open_text_to_write(full, "ab") as lines:
        lines.write("é\n")
    with pytest.raises(OSError, match="No space left") as array, open_to_write(full) as file:
        save_array(file, np.zeros(2000))
    for caught, needed in ((bytes_, "5"), (text, "3"), (array, "128")):
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(full))
        assert caught.value.__notes__ == [f"it needs {needed} bytes or more"]


def test_what_was_there_stays_and_the_error_says_so(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("old")
    with pytest.raises(OSError, match="File too large") as caught, largest_file(1 << 16):
        write_text(page, "x" * (1 << 17))
    assert caught.value.filename == str(page)
    assert caught.value.__notes__ == ["it needs 131,072 bytes or more", "the file that was there is unchanged"]
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("page.html", "old")]


def test_a_directory_that_could_not_be_written_is_named_as_it_was_asked_for(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match="File too large") as caught,
        largest_file(1 << 16),
        atomic_directory(tmp_path / "out") as staging,
    ):
        write_text(staging / "a.json", "x" * (1 << 17))
    assert caught.value.filename == str(tmp_path / "out" / "a.json")
    assert caught.value.__notes__ == ["it needs 131,072 bytes or more", "nothing was written"]
    assert not list(tmp_path.iterdir())


_KILLED = """
import os, signal, sys
from pathlib import Path
from bertkit.files import atomic_directory

def renamed(path, to, rename=Path.rename):
    done = rename(path, to)
    if to.name.endswith(".old"):
        os.kill(os.getpid(), signal.SIGKILL)
    return done

Path.rename = renamed
with atomic_directory(Path(sys.argv[1])) as staging:
    (staging / "a").write_text("half")
    if sys.argv[2] == "while writing":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("moment", ["while writing", "between the renames"])
def test_after_a_kill_the_earlier_directory_is_found_and_nothing_stays_behind(tmp_path: Path, moment: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "a").write_text("old")
    done = subprocess.run([sys.executable, "-c", _KILLED, out, moment], check=False)
    assert done.returncode == -signal.SIGKILL
    earlier = earlier_version(out)
    assert (earlier is None) == out.exists() == (moment == "while writing")
    assert ((earlier or out) / "a").read_text() == "old"
    if earlier is not None:
        with pytest.raises(DataError, match=re.escape(f"its earlier version is {earlier}: rename that")):
            find_model(str(out))
    with pytest.raises(KeyError), atomic_directory(out):
        raise KeyError
    assert (out / "a").read_text() == "old"
    with atomic_directory(out) as staging:
        (staging / "a").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "a").read_text() == "new"


def test_a_link_is_replaced_and_not_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "kept")
    with atomic_directory(tmp_path / "out") as staging:
        (staging / "a").write_text("new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "out"]
    assert not (tmp_path / "out").is_symlink()
    assert not list((tmp_path / "kept").iterdir())


_OPENED = re.compile(r"""open\([^)\n]*["'][wax]b?["']|\.write_text\(|\.write_bytes\(|\.tofile\(|\bnp\.save""")


def test_files_are_opened_so_that_a_full_disk_names_them() -> None:
    """By `open_to_write` or what uses it, except for locks, the file of a bug, and temporary files of no value."""
    source = Path(bertkit.__file__).parent
    lines = {
        f"{path.relative_to(source)}: {line.strip()}"
        for path in source.rglob("*.py")
        for line in path.read_text().splitlines()
        if _OPENED.search(line) and "open_to_write(" not in line
    }
    assert sorted({line.partition(":")[0] for line in lines}) == [
        *("arrays.py", "bench/tokenize.py", "cli/app.py", "cli/console.py", "cli/launch.py", "doctor.py", "files.py")
    ], lines


def test_two_writers_with_one_process_id_do_not_disturb_each_other(tmp_path: Path) -> None:
    """As in two containers that share a cache."""
    wanted, both_write = tmp_path / "plan", threading.Barrier(2)
    failed: list[BaseException] = []

    def write(text: bytes) -> None:
        try:
            with replacing(wanted) as file:
                file.write(text)
                both_write.wait(10)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(text * 1000,)) for text in (b"a", b"b")]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failed
    assert wanted.read_bytes() in (b"a" * 1000, b"b" * 1000)
    assert list(tmp_path.iterdir()) == [wanted]


def test_a_directory_that_cannot_be_synced_is_no_error_but_a_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path / "a", "x")

    def refused(descriptor: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", refused)
    fsync_path(tmp_path)
    with pytest.raises(OSError, match="Invalid argument"):
        fsync_path(tmp_path / "a")


def test_one_process_at_a_time_unless_the_file_system_has_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    order: list[str] = []
    is_held, may_end = threading.Event(), threading.Event()

    def first() -> None:
        with one_at_a_time(tmp_path / "lock", tmp_path / "shards"):
            is_held.set()
            may_end.wait(10)
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    is_held.wait(10)
    with caplog.at_level(logging.INFO, logger="bertkit"):
        threading.Timer(0.05, may_end.set).start()
        with one_at_a_time(tmp_path / "lock", tmp_path / "shards"):
            order.append("second")
    thread.join()
    assert order == ["first", "second"]
    assert "waiting for it" in caplog.text

    def refused(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refused)
    with one_at_a_time(tmp_path / "lock", tmp_path / "shards"):
        order.append("without")
    assert "this file system has no locks ([Errno 38] Function not implemented)" in caplog.text

"""Records on disk: read back unchanged, robust to crashes and damage, and bound to one identity."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from bertkit import cache as module
from bertkit.cache import RecordCache, cache_file, identity_hash
from bertkit.errors import DataError

IDENTITY = {"model": "a", "data": "b"}
KEYS = [bytes([number]) * 16 for number in range(4)]


def opened(directory: Path, identity: dict[str, str] = IDENTITY, max_bytes: float = 1e6) -> RecordCache:
    return RecordCache.open(directory, identity, what="outputs", max_bytes=max_bytes)


def filled(directory: Path) -> None:
    cache = opened(directory)
    for number, key in enumerate(KEYS[:3]):
        cache.add(key, bytes([number]) * (10 + number))
    cache.close()


def test_records_come_back_in_the_order_asked_for_and_only_if_all_are_there(tmp_path: Path) -> None:
    filled(tmp_path / "c")
    cache = opened(tmp_path / "c")
    assert cache.get([KEYS[2], KEYS[0]]) == [b"\2" * 12, b"\0" * 10]
    assert cache.get([KEYS[0], KEYS[3]]) is None
    assert (len(cache), cache.size_bytes, KEYS[1] in cache, KEYS[3] in cache) == (3, 33, True, False)


@pytest.mark.parametrize(("file", "cut"), [("values.bin", 1), ("index.bin", 5), ("values.bin", 13)])
def test_what_a_crash_cut_off_is_dropped_and_the_rest_stays(tmp_path: Path, file: str, cut: int) -> None:
    filled(tmp_path / "c")
    path = tmp_path / "c" / file
    path.write_bytes(path.read_bytes()[:-cut])
    cache = opened(tmp_path / "c")
    assert cache.get(KEYS[:1]) == [b"\0" * 10]
    assert cache.get(KEYS[2:3]) is None
    cache.add(KEYS[2], b"anew")
    cache.close()
    assert opened(tmp_path / "c").get([KEYS[0], KEYS[2]]) == [b"\0" * 10, b"anew"]


def test_a_damaged_record_is_missing_until_it_is_added_again(tmp_path: Path) -> None:
    filled(tmp_path / "c")
    path = tmp_path / "c" / "values.bin"
    content = bytearray(path.read_bytes())
    content[12] ^= 1
    path.write_bytes(content)
    cache = opened(tmp_path / "c")
    assert cache.get(KEYS[1:2]) is None
    cache.add(KEYS[1], b"anew")
    cache.close()
    assert opened(tmp_path / "c").get(KEYS[:2]) == [b"\0" * 10, b"anew"]


def test_one_process_writes_and_what_does_not_fit_is_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = opened(tmp_path / "c", max_bytes=5), opened(tmp_path / "c")
    second.add(KEYS[0], b"12")
    assert (first.is_writer, second.is_writer, len(second)) == (True, False, 0)
    first.add(KEYS[0], b"1234")
    first.add(KEYS[1], b"56")
    first.add(KEYS[2], b"7")
    assert (len(first), first.is_full) == (2, True)
    assert caplog.text.count("no more outputs are kept") == 1


def test_without_locks_only_a_temporary_cache_keeps_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on Lustre or NFS, depending on how it is mounted."""
    filled(tmp_path / "c")

    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    shared = opened(tmp_path / "c")
    shared.add(KEYS[3], b"new")
    assert shared.get(KEYS[:1]) == [b"\0" * 10]
    assert (shared.is_writer, KEYS[3] in shared) == (False, False)
    assert "has no locks" in caplog.text
    assert "no more outputs are kept there; set BERTKIT_CACHE" in caplog.text
    own = shared.private_copy(tmp_path)
    own.add(KEYS[3], b"new")
    assert own.get([KEYS[0], KEYS[3]]) == [b"\0" * 10, b"new"]


def test_a_directory_belongs_to_one_identity(tmp_path: Path) -> None:
    filled(tmp_path / "c")
    with pytest.raises(DataError, match="model 'a', not 'other'"):
        opened(tmp_path / "c", {**IDENTITY, "model": "other"})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(DataError, match="contains other files than outputs"):
        opened(tmp_path / "full")


def test_a_temporary_cache_has_no_name(tmp_path: Path) -> None:
    cache = RecordCache.temporary(tmp_path, what="features", max_bytes=1e6)
    cache.add(KEYS[0], b"1")
    assert cache.get(KEYS[:1]) == [b"1"]
    assert not list(tmp_path.iterdir())


def test_addresses_depend_on_the_content_of_the_identity_alone(tmp_path: Path) -> None:
    assert identity_hash({"a": 1, "b": 2}) == identity_hash({"b": 2, "a": 1}) != identity_hash({"a": 1, "b": 3})
    assert cache_file(tmp_path, "plans", [1], ".npy").parent == tmp_path / "plans"


def test_two_processes_that_make_a_cache_at_once_have_the_same_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one finds no cache, and another's incomplete one a moment later."""
    write, others = module.write_json, []

    def write_after_the_other(path: Path, value: object) -> None:
        write(path, value)
        with monkeypatch.context() as inner:
            inner.setattr(module, "write_json", write)
            inner.setattr("bertkit.cache.os.getpid", lambda: 1)
            others.append(opened(tmp_path / "c"))
            others[0].add(KEYS[0], b"first")

    monkeypatch.setattr(module, "write_json", write_after_the_other)
    late = opened(tmp_path / "c")
    assert others[0].is_writer
    assert not late.is_writer
    assert late.get(KEYS[:1]) == [b"first"]
    assert [path.name for path in tmp_path.iterdir()] == ["c"]

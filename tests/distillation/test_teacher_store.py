"""A teacher's answers on disk: what was kept comes back to the bit, and what a crash or a bit flip spoils does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bertkit.distillation import teacher_store as module
from bertkit.distillation.teacher_store import TeacherStore
from bertkit.errors import DataError

IDENTITY = {"teacher": "a", "data": "b"}


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def values(number: int) -> np.ndarray:
    return np.random.default_rng(number).normal(size=3 + number % 4).astype(np.float32)


def filled(directory: Path, count: int = 5) -> TeacherStore:
    store = TeacherStore.open(directory, IDENTITY, max_bytes=1e6)
    for number in range(count):
        store.add(key(number), 1, 3, values(number))
    return store


def test_what_was_kept_comes_back_to_the_bit_in_any_order(tmp_path: Path) -> None:
    filled(tmp_path / "s").close()
    again = TeacherStore.open(tmp_path / "s", IDENTITY, max_bytes=1e6)
    found = again.get([key(3), key(0), key(4)])
    assert found is not None
    assert [each.values.tolist() for each in found] == [values(n).tolist() for n in (3, 0, 4)]
    assert (found[0].rows, found[0].classes) == (1, 3)
    assert again.get([key(0), key(9)]) is None


@pytest.mark.parametrize("cut", ["values.bin", "index.bin"])
@pytest.mark.parametrize("lost", [1, 17, 40, 41])
def test_a_tail_that_was_cut_off_is_dropped_and_can_be_kept_again(tmp_path: Path, cut: str, lost: int) -> None:
    filled(tmp_path / "s").close()
    file = tmp_path / "s" / cut
    file.write_bytes(file.read_bytes()[:-lost])
    again = TeacherStore.open(tmp_path / "s", IDENTITY, max_bytes=1e6)
    kept = len(again)
    assert 0 < kept < 5
    assert all(key(number) in again for number in range(kept))
    for number in range(5):
        again.add(key(number), 1, 3, values(number))
    found = again.get([key(number) for number in range(5)])
    assert found is not None
    assert [each.values.tolist() for each in found] == [values(n).tolist() for n in range(5)]


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    filled(tmp_path / "s").close()
    file = tmp_path / "s" / "values.bin"
    raw = bytearray(file.read_bytes())
    raw[1] ^= 4
    file.write_bytes(raw)
    again = TeacherStore.open(tmp_path / "s", IDENTITY, max_bytes=1e6)
    assert again.get([key(0)]) is None
    assert again.get([key(1)]) is not None
    again.add(key(0), 1, 3, values(0))
    again.add(key(9), 1, 3, values(9))
    again.close()
    mended = TeacherStore.open(tmp_path / "s", IDENTITY, max_bytes=1e6)
    found = mended.get([key(number) for number in (0, 1, 2, 3, 4, 9)])
    assert found is not None, "what was computed anew stands behind all that was there"
    assert [each.values.tolist() for each in found] == [values(n).tolist() for n in (0, 1, 2, 3, 4, 9)]


def test_no_more_is_kept_than_allowed(tmp_path: Path) -> None:
    store = TeacherStore.open(tmp_path / "s", IDENTITY, max_bytes=40)
    for number in range(9):
        store.add(key(number), 1, 3, values(number))
    assert 0 < store.size_bytes <= 40
    assert (tmp_path / "s" / "values.bin").stat().st_size == store.size_bytes


def test_answers_of_another_teacher_are_refused(tmp_path: Path) -> None:
    filled(tmp_path / "s").close()
    with pytest.raises(DataError, match=r"another teacher.*teacher 'a', not 'z'"):
        TeacherStore.open(tmp_path / "s", {"teacher": "z", "data": "b"}, max_bytes=1e6)
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "thesis.txt").write_text("mine")
    with pytest.raises(DataError, match="other files"):
        TeacherStore.open(tmp_path / "t", IDENTITY, max_bytes=1e6)


def test_two_processes_that_make_a_store_at_once_have_the_same_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one finds no store, and another's half-made one a moment later."""
    write, others = module.write_json, []

    def write_after_the_other(path: Path, value: object) -> None:
        write(path, value)
        with monkeypatch.context() as inner:
            inner.setattr(module, "write_json", write)
            inner.setattr("bertkit.distillation.teacher_store.os.getpid", lambda: 1)
            others.append(filled(tmp_path / "s", 2))

    monkeypatch.setattr(module, "write_json", write_after_the_other)
    late = TeacherStore.open(tmp_path / "s", IDENTITY, max_bytes=1e6)
    assert others[0].is_writer
    assert not late.is_writer
    assert late.get([key(0), key(1)]) is not None
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_one_process_writes_and_others_read(tmp_path: Path) -> None:
    writer = filled(tmp_path / "s")
    reader = TeacherStore.open(tmp_path / "s", IDENTITY, max_bytes=1e6)
    assert writer.is_writer
    assert not reader.is_writer
    reader.add(key(7), 1, 3, values(7))
    assert key(7) not in reader
    assert reader.get([key(2)]) is not None

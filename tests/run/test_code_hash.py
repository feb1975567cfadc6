"""The hash of the code covers everything that decides a run's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertkit import code_hash


@pytest.mark.parametrize("name", ["a.py", "tables/b.yaml", "kernels/c.cpp", "kernels/d.h"])
def test_every_kind_of_source_file_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(code_hash, "_PACKAGE", tmp_path)
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    found = set()
    for content in ("one", "two"):
        file.write_text(content, encoding="utf-8")
        found.add(code_hash.code_sha256.__wrapped__())
    file.rename(file.with_name(f"other{file.suffix}"))
    found.add(code_hash.code_sha256.__wrapped__())
    file.with_name("notes.txt").write_text("not code", encoding="utf-8")
    found.add(code_hash.code_sha256.__wrapped__())
    assert len(found) == 3


def test_the_code_of_a_part_is_that_of_its_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_hash, "_PACKAGE", tmp_path)
    for name in ("data/layouts/a.py", "data/random.py", "data/randomness.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one", encoding="utf-8")

    def digest() -> str:
        return code_hash.code_sha256.__wrapped__("data/layouts", "data/random.py")

    before = digest()
    (tmp_path / "data/randomness.py").write_text("two", encoding="utf-8")
    assert digest() == before
    for name in ("data/layouts/a.py", "data/random.py"):
        (tmp_path / name).write_text("two", encoding="utf-8")
        assert digest() != before
        before = digest()


def test_the_package_has_such_files() -> None:
    suffixes = {path.suffix for path in code_hash._PACKAGE.rglob("*") if path.is_file()}
    assert set(code_hash._SUFFIXES) <= suffixes

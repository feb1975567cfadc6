"""The hash of the code covers all that decides a run's numbers."""

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


def test_the_package_has_such_files() -> None:
    suffixes = {path.suffix for path in code_hash._PACKAGE.rglob("*") if path.is_file()}
    assert set(code_hash._SUFFIXES) <= suffixes

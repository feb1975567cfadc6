"""Files that are replaced as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertkit.files import write_text


def test_an_error_names_the_file_and_not_the_temporary_one(tmp_path: Path) -> None:
    wanted = tmp_path / "missing" / "page.html"
    with pytest.raises(FileNotFoundError) as caught:
        write_text(wanted, "")
    assert caught.value.filename == str(wanted)

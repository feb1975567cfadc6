"""Unpacks runs written by version 0.1.0 into a folder; previous/README.md explains how they were made."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

from bertkit.files import sha256_of, write_json

ARCHIVES = Path(__file__).parent / "previous"
PLACEHOLDER = b"@FOLDER@"
"""Placeholder in the archives for the folder of the runs, because a run records absolute paths."""
_TEXT = (".json", ".jsonl", ".yaml", ".txt", ".csv")


def unpack(folder: Path) -> Path:
    """Unpack all archives, with every recorded path, and the hashes of files containing one, rewritten for `folder`."""
    for archive in sorted(ARCHIVES.glob("*.tar.xz")):
        with tarfile.open(archive) as files:
            files.extractall(folder, filter="data")
    for path in folder.rglob("*"):
        if path.suffix in _TEXT and path.is_file():
            path.write_bytes(path.read_bytes().replace(PLACEHOLDER, str(folder).encode()))
    for path in folder.rglob("run.json"):
        record = json.loads(path.read_text())
        for key, name in (("recipe_sha256", "recipe.yaml"), ("results_sha256", "results.json")):
            if key in record:
                record[key] = sha256_of(path.with_name(name))
        write_json(path, record)
    return folder

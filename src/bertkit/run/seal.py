"""The seal of a run: sizes and hashes of all files that it wrote; for growing files, of the part written so far.

Not from a paper (contract: `bertkit runs verify`). Files that only grow are sealed by their first bytes at each
checkpoint, so that a killed run has a seal, too; all others when the run ends. Files with hashes recorded elsewhere are
left out: model and recipe (in run.json) and checkpoints (in their manifests). Sibling verify.py compares.

    files.json   {"format": 1, "whole": true, "files": {"log.txt": {"bytes": 9, "sha256": H}}, "links": {}, "runs": [],
                  "sha256": H}

A JSON file that contains its own hash has exactly one valid form: any other byte is damage. Imports only the standard
library.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from bertkit.errors import DataError
from bertkit.files import finite, open_regular, read_json, write_text

SEAL: Final = "files.json"
OWN_HASH: Final = "sha256"
FORMAT = 1

_GROWING = ("log.txt", "metrics.jsonl", "divergence.jsonl", "times.tsv")
_GROWING_FOLDER = "tensorboard/"
_HASHED_ELSEWHERE = ("run.json", "recipe.yaml", SEAL, ".lock")
_PIECE = 1 << 20

log = logging.getLogger(__name__)


def grows(name: str) -> bool:
    """Whether a run only appends to the file with this name (relative to the run's directory)."""
    return name in _GROWING or name.startswith(_GROWING_FOLDER)


def write_self_hashed(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object together with its hash; others cannot read the file."""
    write_text(path, _with_hash(value), private=True)


def self_hash_error(path: Path, value: Mapping[str, Any]) -> str | None:
    """What is wrong with a file by `write_self_hashed` that contains this value; None if it is unchanged."""
    without = {key: item for key, item in value.items() if key != OWN_HASH}
    try:
        if OWN_HASH in value and path.read_bytes() == _with_hash(without).encode():
            return None
    except (OSError, ValueError) as error:
        return f"{path}: cannot be read ({error})"
    return f"{path}: does not match the hash that it contains (altered)"


def _with_hash(value: Mapping[str, Any]) -> str:
    canonical = json.dumps(finite(dict(value)), sort_keys=True, ensure_ascii=True)
    whole = {**value, OWN_HASH: hashlib.sha256(canonical.encode()).hexdigest()}
    return json.dumps(finite(whole), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


class RunSeal:
    """Writes the seal of a run's directory.

    Args:
        run: the directory, whose lock the caller holds.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._prefixes: dict[str, tuple[int, hashlib._Hash]] = {}

    def open(self) -> None:
        """A run begins or continues: clear the seal, because files may be rewritten."""
        self._write({}, whole=False)

    def growing(self) -> None:
        """Seal the current content of the growing files."""
        self._write({name: self._prefix(name) for name in self._names() if grows(name)}, whole=False)

    def forget(self) -> None:
        """Growing files were cut: read them again from the beginning."""
        self._prefixes.clear()

    def close(self) -> None:
        """Seal all files; if the disk refuses, a warning is logged and the last seal is kept."""
        try:
            self._write({name: _entry(self._run / name) for name in self._names()}, whole=True)
        except (OSError, DataError) as error:
            log.warning("the files of %s could not be sealed (%s); `runs verify` will report this", self._run, error)

    def _write(self, files: Mapping[str, Any], *, whole: bool) -> None:
        links = {name: os.readlink(self._run / name) for name in _links(self._run)} if whole else {}
        runs = [path.relative_to(self._run).as_posix() for path in runs_within(self._run)] if whole else []
        value = {"format": FORMAT, "whole": whole, "files": dict(files), "links": links, "runs": runs}
        write_self_hashed(self._run / SEAL, value)

    def _names(self) -> list[str]:
        return [name for name in file_names(self._run) if not hashed_elsewhere(name)]

    def _prefix(self, name: str) -> dict[str, Any]:
        """Size and hash of all bytes up to now; only those since the last call are read."""
        size, digest = self._prefixes.get(name, (0, hashlib.sha256()))
        with open_regular(self._run / name) as file:
            file.seek(size)
            while piece := file.read(_PIECE):
                digest.update(piece)
                size += len(piece)
        self._prefixes[name] = size, digest
        return {"bytes": size, OWN_HASH: digest.hexdigest()}


def hashed_elsewhere(name: str) -> bool:
    """Whether the hash of a file is recorded elsewhere than in the seal, or the file is only temporary."""
    parts = Path(name).parts
    if parts[0] == "checkpoints" and len(parts) == 3:
        return parts[2] != "manifest.json"
    is_temporary = name.endswith(".tmp") or "writing" in parts[0] or parts[0].endswith(".deleting")
    return name in _HASHED_ELSEWHERE or parts[0] == "model" or is_temporary


def file_names(run: Path) -> list[str]:
    """The regular files of a run, relative to its directory, in order; without those of inner runs."""
    found: list[str] = []
    for folder, folders, names in os.walk(run):
        folders[:] = sorted(each for each in folders if not (Path(folder, each) / "run.json").is_file())
        found += [os.path.relpath(os.path.join(folder, name), run) for name in names if _is_file(Path(folder, name))]
    return sorted(found)


def runs_within(run: Path) -> Iterator[Path]:
    """The runs in the directory of a run, such as those of a suite."""
    for folder, folders, _ in os.walk(run):
        inner = sorted(each for each in folders if (Path(folder, each) / "run.json").is_file())
        yield from (Path(folder, each) for each in inner)
        folders[:] = sorted(set(folders) - set(inner))


def read_seal(run: Path) -> dict[str, Any] | None:
    """The seal of a run; None if it has none.

    Raises:
        DataError: the seal is damaged.
    """
    path = run / SEAL
    if not os.path.lexists(path):
        return None
    value = read_json(path)
    error = self_hash_error(path, value)
    if error is not None:
        raise DataError(error)
    return value


def _links(run: Path) -> list[str]:
    return sorted(each.name for each in run.iterdir() if each.is_symlink())


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _entry(path: Path) -> dict[str, Any]:
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), OWN_HASH: digest}


def prefix_error(path: Path, entry: Any, *, may_be_longer: bool) -> str | None:
    """How a file differs from its entry in the seal; None if it is unchanged."""
    try:
        with open_regular(path) as file:
            size, wanted = os.fstat(file.fileno()).st_size, int(entry["bytes"])
            if size < wanted or (size > wanted and not may_be_longer):
                return f"{path}: {size:,} bytes, but {wanted:,} were sealed (truncated or altered)"
            digest, left = hashlib.sha256(), wanted
            while left and (piece := file.read(min(left, _PIECE))):
                digest.update(piece)
                left -= len(piece)
    except FileNotFoundError:
        return f"{path}: missing"
    except (OSError, DataError) as error:
        return f"{path}: cannot be read ({error})"
    return None if digest.hexdigest() == entry[OWN_HASH] else f"{path}: its sha256 is not the sealed one (altered)"

"""The identity of the code that a run was made with: a hash of the package's own files.

Not from a paper. A version number does not change when a checkout is edited, and a commit does not cover edits that are
not committed.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).parent
_SUFFIXES = (".py", ".yaml", ".cpp", ".h")


@cache
def code_sha256(*parts: str) -> str:
    """sha256 over names and contents of the package's source files (including C++) and tables, as they are at the first
    call.

    Args:
        parts: files and folders of the package, such as `data/layouts`; none: all of it.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in _PACKAGE.rglob("*") if path.suffix in _SUFFIXES and path.is_file()):
        name = path.relative_to(_PACKAGE).as_posix()
        if parts and not any(name == part or name.startswith(f"{part}/") for part in parts):
            continue
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()

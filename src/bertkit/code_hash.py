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
def code_sha256() -> str:
    """sha256 over names and contents of the package's source files (including C++) and tables, as they are at the first
    call."""
    digest = hashlib.sha256()
    for path in sorted(path for path in _PACKAGE.rglob("*") if path.suffix in _SUFFIXES and path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(_PACKAGE).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()

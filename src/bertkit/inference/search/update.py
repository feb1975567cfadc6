"""An index brought up to date with its corpus: texts that it contains keep their vectors, only others are embedded.

Not from a paper. The new index is built next to the old one and then takes its place. On a CPU a vector does not depend
on the texts that it is computed with, so the files are those of an index built anew, byte for byte. Sibling index.py
builds both.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np


class IndexedVectors:
    """The vectors of an index by text: a `KnownVectors`, with 16 bytes in memory for each text.

    Attributes:
        found: number of texts whose vectors were found.
    """

    def __init__(self, texts: Iterable[str], text_at: Callable[[int], str], vectors_NE: Any) -> None:
        """`texts` has the text of each vector, in order; `text_at` returns one of them again; the vectors are an array
        or a sparse matrix."""
        self.found = 0
        self._text_at = text_at
        self._vectors_NE = vectors_NE
        hash_N = np.fromiter(map(_hash, texts), dtype=np.uint64, count=vectors_NE.shape[0])
        self._order_N = np.argsort(hash_N, kind="stable")
        self._hash_N = hash_N[self._order_N]

    def __call__(self, text: str) -> Any:
        hashed = np.uint64(_hash(text))
        first, last = (int(np.searchsorted(self._hash_N, hashed, side)) for side in ("left", "right"))
        for row in map(int, self._order_N[first:last]):
            if self._text_at(row) == text:  # two texts can have one hash
                self.found += 1
                return self._vectors_NE[row]
        return None


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


@contextmanager
def replacing_directory(directory: Path) -> Iterator[Path]:
    """A directory next to this one, to be filled within the context, which then takes its place.

    If the context is left by an exception, the new directory stays as it is and is the one given next time.
    """
    new, old = _beside(directory)
    yield new
    replaced = directory.resolve()
    replaced.rename(old)
    new.rename(replaced)
    shutil.rmtree(old)


def recover(directory: Path) -> None:
    """Finish what a kill within `replacing_directory` left: the old directory is back in its place, or deleted."""
    _, old = _beside(directory)
    if not old.is_dir():
        return
    if directory.exists():
        shutil.rmtree(old)
    else:
        old.rename(directory.resolve())


def _beside(directory: Path) -> tuple[Path, Path]:
    """Where the new directory is built, and where the old one is put."""
    replaced = directory.resolve()
    new, old = (replaced.with_name(f".{replaced.name}.{what}") for what in ("updating", "replaced"))
    return new, old


def only_the_corpus_changed(differing: Sequence[str]) -> bool:
    """Whether an index that differs in these entries can be updated."""
    return not set(differing) - {"corpus", "reading"}

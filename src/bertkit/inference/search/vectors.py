"""Nearest neighbours by cosine, with FAISS: all vectors, cells around centres, or a graph.

Douze et al. 2024, The FAISS library, arXiv:2401.08281; Jégou et al. 2011 (inverted files); Malkov and Yashunin 2018,
HNSW, arXiv:1603.09320. Vectors have length one, so that their product is the cosine. They are read from a .npy file
through a memory map, in blocks: FAISS's own copy is what the memory needs.

Shapes: N vectors, E width, Q queries, K hits.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertkit.errors import DataError, UsageError
from bertkit.inference.search.settings import EXACT_UP_TO, IndexKind
from bertkit.progress import Progress, silent_progress

log = logging.getLogger(__name__)

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

_BLOCK = 65_536
_TRAINING_VECTORS = 40
"""For each cell's centre; FAISS asks for at least 39."""
_GRAPH_LINKS = 32
_GRAPH_CANDIDATES = 80
"""At which the graph is built."""
DEFAULT_PROBES = 64


def faiss() -> Any:
    """The library.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import faiss as library  # here, for it is an extra
    except ImportError as error:
        raise UsageError("search needs FAISS: pip install 'bertkit[search]'") from error
    return library


def kind_for(kind: str, count: int) -> IndexKind:
    """The kind of index; `auto` decides by the number of vectors."""
    if kind == "auto":
        return "exact" if count <= EXACT_UP_TO else "ivf"
    return kind  # type: ignore[return-value]  # the other values of the setting


def cells_for(count: int) -> int:
    """Centres of an inverted file: about 4 sqrt(N), a power of two."""
    return int(2 ** max(0, round(math.log2(4 * math.sqrt(max(1, count))))))


def build(vectors_NE: Floats, kind: IndexKind, *, progress: Progress = silent_progress) -> Any:
    """A FAISS index of these vectors, added in blocks.

    Args:
        vectors_NE: of length one; may be a memory map.
        kind: of the index.
        progress: the display.

    Raises:
        UsageError: fewer vectors than cells are trained with.
    """
    library = faiss()
    count, width = vectors_NE.shape
    if kind == "exact":
        index = library.IndexFlatIP(width)
    elif kind == "hnsw":
        index = library.IndexHNSWFlat(width, _GRAPH_LINKS, library.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = _GRAPH_CANDIDATES
    else:
        cells = min(cells_for(count), count // _TRAINING_VECTORS)
        if cells < 1:
            raise UsageError(f"--kind ivf: needs {_TRAINING_VECTORS} texts or more, there are {count}; take exact")
        index = library.IndexIVFFlat(library.IndexFlatIP(width), width, cells, library.METRIC_INNER_PRODUCT)
        # Evenly over the whole: a corpus is often sorted.
        chosen = np.linspace(0, count - 1, min(count, _TRAINING_VECTORS * cells)).astype(np.int64)
        log.info("finding %s centres of %s vectors", f"{cells:,}", f"{chosen.size:,}")
        index.train(np.ascontiguousarray(vectors_NE[chosen]))
    with progress("index", total=count, unit="vectors") as meter:
        for first in range(0, count, _BLOCK):
            block = np.ascontiguousarray(vectors_NE[first : first + _BLOCK], dtype=np.float32)
            index.add(block)
            meter.update(first + len(block))
    return index


def write(index: Any, path: Path) -> None:
    """Write an index."""
    faiss().write_index(index, str(path))


def read(path: Path, *, count: int, width: int) -> Any:
    """Read an index of so many vectors.

    Raises:
        DataError: it is damaged, or of other vectors.
    """
    try:
        index = faiss().read_index(str(path))
    except RuntimeError as error:
        raise DataError(
            f"{path}: cannot be read as an index of FAISS; delete the directory and build it anew"
        ) from error
    if (index.ntotal, index.d) != (count, width):
        raise DataError(
            f"{path}: holds {index.ntotal:,} vectors of {index.d} numbers, the texts beside it have {count:,} of"
            f" {width}; delete the directory and build it anew"
        )
    return index


def set_probes(index: Any, probes: int | None) -> None:
    """How many cells or candidates a query visits, where the index has any."""
    if hasattr(index, "nprobe"):
        index.nprobe = min(probes or DEFAULT_PROBES, index.nlist)
    elif hasattr(index, "hnsw"):
        index.hnsw.efSearch = probes or DEFAULT_PROBES


def nearest(index: Any, query_QE: Floats, count: int) -> tuple[Floats, Ints]:
    """Cosines and numbers of the nearest vectors, (Q, K), the nearest first; -1 where an index found fewer."""
    count = min(count, int(index.ntotal))
    if hasattr(index, "hnsw"):
        index.hnsw.efSearch = max(index.hnsw.efSearch, count)
    score_QK, number_QK = index.search(np.ascontiguousarray(query_QE, dtype=np.float32), count)
    return score_QK, number_QK

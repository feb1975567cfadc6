"""Nearest neighbours by the inner product, with FAISS: over all vectors, over cells around centres, or along a graph.

Douze et al. 2024, The FAISS library, arXiv:2401.08281; Jégou et al. 2011 (inverted files); Malkov and Yashunin 2018,
HNSW, arXiv:1603.09320. If vectors have unit length, their product is the cosine. They are read in blocks from a
memory-mapped .npy file: memory is needed only for FAISS's own copy.

Shapes: N vectors, E width, Q queries, K hits.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.arrays import Float32Array, Int64Array
from bertkit.errors import DataError, UsageError
from bertkit.files import replacing
from bertkit.inference.search.settings import EXACT_UP_TO, IndexKind
from bertkit.progress import Progress, silent_progress

log = logging.getLogger(__name__)


_BLOCK = 65_536
_TRAINING_VECTORS = 40
"""Training vectors per cell centre; FAISS recommends at least 39."""
_GRAPH_LINKS = 32
_GRAPH_CANDIDATES = 80
"""Search depth while the graph is built."""
DEFAULT_PROBES = 64


def faiss() -> Any:
    """The FAISS library.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import faiss as library  # imported here because it is an extra
    except ImportError as error:
        raise UsageError("search needs FAISS: pip install 'bertkit[search]'") from error
    return library


def kind_for(kind: str, count: int) -> IndexKind:
    """The kind of index; `auto` chooses by the number of vectors."""
    if kind == "auto":
        return "exact" if count <= EXACT_UP_TO else "ivf"
    return kind  # type: ignore[return-value]  # the other values of the setting


def cells_for(count: int) -> int:
    """Number of centres of an inverted file: about 4 sqrt(N), a power of two."""
    return int(2 ** max(0, round(math.log2(4 * math.sqrt(max(1, count))))))


def training_cells(count: int) -> int:
    """Number of centres, for which there must be enough vectors.

    Raises:
        UsageError: there are too few vectors.
    """
    cells = min(cells_for(count), count // _TRAINING_VECTORS)
    if cells < 1:
        raise UsageError(f"--kind ivf: needs {_TRAINING_VECTORS} texts or more, there are {count}; give --kind exact")
    return cells


def training_rows(count: int, cells: int) -> Int64Array:
    """The vectors from which the centres are computed: evenly over the whole corpus, which is often sorted."""
    rows = np.linspace(0, count - 1, min(count, _TRAINING_VECTORS * cells)).astype(np.int64)
    log.info("finding %s centres of %s vectors", f"{cells:,}", f"{rows.size:,}")
    return rows


def build(vectors_NE: Float32Array, kind: IndexKind, *, progress: Progress = silent_progress) -> Any:
    """A FAISS index of these vectors, added in blocks.

    Args:
        vectors_NE: may be a memory map.
        kind: of the index.
        progress: the display.

    Raises:
        UsageError: fewer vectors than are needed to train the cells.
    """
    library = faiss()
    count, width = vectors_NE.shape
    if kind == "exact":
        index = library.IndexFlatIP(width)
    elif kind == "hnsw":
        index = library.IndexHNSWFlat(width, _GRAPH_LINKS, library.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = _GRAPH_CANDIDATES
    else:
        cells = training_cells(count)
        index = library.IndexIVFFlat(library.IndexFlatIP(width), width, cells, library.METRIC_INNER_PRODUCT)
        index.train(np.ascontiguousarray(vectors_NE[training_rows(count, cells)]))
    with progress("index", total=count, unit="vectors") as meter:
        for first in range(0, count, _BLOCK):
            block = np.ascontiguousarray(vectors_NE[first : first + _BLOCK], dtype=np.float32)
            index.add(block)
            meter.update(first + len(block))
    return index


def write(index: Any, path: Path) -> None:
    """Write an index."""
    with replacing(path) as file:
        faiss().write_index(index, faiss().PyCallbackIOWriter(file.write))


def read(path: Path, *, count: int, width: int) -> Any:
    """Read an index of `count` vectors of `width` numbers.

    Raises:
        DataError: it is damaged, or contains other vectors.
    """
    try:
        index = faiss().read_index(str(path))
    except RuntimeError as error:
        raise DataError(
            f"{path}: cannot be read as a FAISS index; delete the directory and build the index again"
        ) from error
    if (index.ntotal, index.d) != (count, width):
        raise DataError(
            f"{path}: contains {index.ntotal:,} vectors of {index.d} numbers, but the texts next to it have {count:,}"
            f" of {width}; delete the directory and build the index again"
        )
    return index


def set_probes(index: Any, probes: int | None) -> None:
    """Set how many cells or candidates each query visits, if the index has any."""
    if hasattr(index, "nprobe"):
        # With 64 of 1,024 cells, a tenth of the nearest sentences of real questions are not found.
        default = getattr(index, "default_probes", max(DEFAULT_PROBES, index.nlist // 4))
        index.nprobe = min(probes or default, index.nlist)
    elif hasattr(index, "hnsw"):
        index.hnsw.efSearch = probes or DEFAULT_PROBES


def nearest(index: Any, query_QE: Any, count: int) -> tuple[Float32Array, Int64Array]:
    """Products (for a `TokenIndex` scores) and numbers of the nearest vectors, (Q, K),
    nearest first; -1 if the index found fewer."""
    count = min(count, int(index.ntotal))
    if hasattr(index, "hnsw"):
        index.hnsw.efSearch = max(index.hnsw.efSearch, count)
    if isinstance(query_QE, np.ndarray):
        query_QE = np.ascontiguousarray(query_QE, dtype=np.float32)
    score_QK, number_QK = index.search(query_QE, count)
    return score_QK, number_QK

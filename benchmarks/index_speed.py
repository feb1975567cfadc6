"""Build time, memory, recall@10 against exact search and queries per second of each kind of index on a million vectors.

    python -m benchmarks.index_speed --vectors sentences.npy [--count 1000000] [--kinds exact ivf hnsw]

The vectors are derived from real ones (`bertkit embed --normalise --out sentences.npy`): each is a unit-length random
mixture of two of them and noise. They are therefore distributed like sentence vectors, in any number. Queries are
further mixtures of this kind.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.inference.search import vectors
from bertkit.inference.vector_types import normalised

_BLOCK = 65_536


def derived(real_NE: Any, count: int, seed: int) -> Any:
    """Mixtures of two real vectors with a tenth of noise."""
    generator = np.random.default_rng(seed)
    found = np.empty((count, real_NE.shape[1]), dtype=np.float32)
    for first in range(0, count, _BLOCK):
        size = min(_BLOCK, count - first)
        one, two = generator.integers(len(real_NE), size=(2, size))
        share = generator.random((size, 1), dtype=np.float32)
        noise = generator.standard_normal((size, real_NE.shape[1]), dtype=np.float32) * (
            0.3 / np.sqrt(real_NE.shape[1])
        )
        found[first : first + size] = normalised(share * real_NE[one] + (1 - share) * real_NE[two] + noise)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vectors", type=Path, required=True)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--kinds", nargs="*", default=["exact", "ivf", "hnsw"])
    parser.add_argument("--probes", type=int, nargs="*", default=[16, 64, 256])
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    vectors.faiss().omp_set_num_threads(arguments.threads)
    real = normalised(np.load(arguments.vectors))
    corpus, queries = derived(real, arguments.count, 1), derived(real, arguments.queries, 2)
    exact = vectors.build(corpus, "exact")
    _, expected = vectors.nearest(exact, queries, 10)
    for kind in arguments.kinds:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        wall, processor = time.perf_counter(), time.process_time()
        index = exact if kind == "exact" else vectors.build(corpus, kind)
        built = {
            "kind": kind,
            "count": arguments.count,
            "build_seconds": round(time.perf_counter() - wall, 1),
            "build_processor_seconds": round(time.process_time() - processor, 1),
            # The next line makes a copy of the index.
            "peak_grew_by_mb": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3),
            "index_mb": round(len(vectors.faiss().serialize_index(index)) / 1e6),
        }
        for probes in [0] if kind == "exact" else arguments.probes:
            vectors.set_probes(index, probes or None)
            wall, processor = time.perf_counter(), time.process_time()
            _, found = vectors.nearest(index, queries, 10)
            taken, worked = time.perf_counter() - wall, time.process_time() - processor
            hits = [len(set(a) & set(b)) / 10 for a, b in zip(found.tolist(), expected.tolist(), strict=True)]
            row = {
                **built,
                "probes": probes,
                "recall@10": round(float(np.mean(hits)), 4),
                "queries_per_second": round(len(queries) / taken, 1),
                "queries_per_processor_second": round(len(queries) / worked, 1),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

"""Limits the number of compiled matrix products that a process caches.

Not from a paper. oneDNN compiles a product, in bfloat16 and on some processors in float32, for its exact shape. Batches
of whole sequences differ in their number of tokens. If compiled kernels are used, rows are padded so that few shapes
remain (models/row_blocks.py); otherwise most shapes never occur again.
"""

from __future__ import annotations

import os

CACHED_PRIMITIVES = 192
"""Matrix products that oneDNN caches in compiled form. An update of a dozen layers needs about forty, one per shape,
and batches with six different numbers of rows four times as many. The default is 1024: if lengths differ from batch to
batch and rows are not padded, most are never used again, and a run grows by a gigabyte."""
_CACHE_SETTINGS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""The environment variables of oneDNN and of torch's own cache in front of it."""


def limit_primitive_cache() -> None:
    """Let oneDNN cache `CACHED_PRIMITIVES` compiled products, unless the environment overrides it.

    Effective before the first matrix product of a process. Results are bit-identical.
    """
    for name in _CACHE_SETTINGS:
        os.environ.setdefault(name, str(CACHED_PRIMITIVES))

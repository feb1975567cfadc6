"""Memory that a process on a CPU keeps: freed blocks for the next step, and few compiled matrix products.

Not from a paper. The GNU C library returns large blocks to the system when they are freed, and gets new ones page by
page, each of which the system fills with zeros: in an update of BERT at 256 x 4, up to 40,000 page faults, a tenth of
its time. A step needs the same memory as the one before it, so the peak is unchanged.

oneDNN compiles a product, in bfloat16 and on some processors in float32, for its exact shape. Batches of whole
sequences differ in their number of tokens. If compiled kernels are used, rows are padded so that few shapes remain
(models/operators/row_blocks.py); otherwise most shapes never occur again.
"""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""
_LARGEST_KEPT = 1 << 28
"""A block with more bytes is returned to the system as soon as it is freed."""
_LARGEST_KEPT_BEFORE_2_35 = 1 << 25
"""The highest threshold that the GNU C library accepted before version 2.35 (HEAP_MAX_SIZE / 2 on 64 bits)."""
_NEVER = 2**31 - 1

CACHED_PRIMITIVES = 192
"""Matrix products that oneDNN caches in compiled form. An update of a dozen layers needs about forty, one per shape,
and batches with six different numbers of rows four times as many. The default is 1024: if lengths differ from batch to
batch and rows are not padded, most are never used again, and a run grows by a gigabyte."""
_CACHE_SETTINGS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""The environment variables of oneDNN and of torch's own cache in front of it."""


def keep_freed_memory() -> None:
    """Let this process keep freed memory from here on; results are unchanged. No effect without the GNU C library."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # Any setting also stops the library from raising the first threshold itself: refused, it would stay at 128 kB.
        if not mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT):
            mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT_BEFORE_2_35)
        mallopt(_TRIM_THRESHOLD, _NEVER)


def limit_primitive_cache() -> None:
    """Let oneDNN cache `CACHED_PRIMITIVES` compiled products, unless the environment overrides it.

    Effective before the first matrix product of a process. Results are bit-identical.
    """
    for name in _CACHE_SETTINGS:
        os.environ.setdefault(name, str(CACHED_PRIMITIVES))

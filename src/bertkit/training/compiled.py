"""How many compiled matrix products a process keeps.

Nothing here follows a paper. oneDNN compiles a product, of bfloat16 and on some processors of float32, for its exact
shape. Batches of whole sequences have another number of tokens each; where compiled kernels are used, rows are padded
so that few shapes are left (models/row_blocks.py), else most of them never come again.
"""

from __future__ import annotations

import os

CACHED_PRIMITIVES = 192
"""Matrix products that oneDNN keeps compiled. An update of a dozen layers needs about forty, one for each shape, and
batches of six numbers of rows four times as many. Left alone it keeps 1024: where lengths differ from batch to batch
and rows are not padded, most are never used again, and a run grows by a gigabyte."""
_CACHE_SETTINGS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Of oneDNN, and of torch's own cache in front of it."""


def bound_compiled_products() -> None:
    """Let oneDNN keep `CACHED_PRIMITIVES` compiled products, unless the environment overrides it.

    Effective before the first matrix product of a process. Results stay the same to the bit.
    """
    for name in _CACHE_SETTINGS:
        os.environ.setdefault(name, str(CACHED_PRIMITIVES))

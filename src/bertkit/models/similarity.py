"""How the vectors of texts are compared: the similarity that sentence-transformers stores with a model.

Format of `sentence-transformers`, `similarity_fn_name` in config_sentence_transformers.json. Sibling sentence.py reads
the rest of its directories.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

from bertkit.files import read_json

log = logging.getLogger(__name__)

Similarity = Literal["cosine", "dot"]


def read_similarity(file: Path, *, sparse: bool = False) -> Similarity:
    """The similarity in a config_sentence_transformers.json, by default the cosine; a warning if it is neither this nor
    the dot product. Sparse vectors are always compared by the dot product."""
    usual: Similarity = "dot" if sparse else "cosine"
    name = (read_json(file) if file.is_file() else {}).get("similarity_fn_name") or usual
    if name == "dot":
        return "dot"
    if name != usual:
        log.warning("%s: similarity_fn_name is %r, which is not supported; it is read as %r", file, name, usual)
    return usual

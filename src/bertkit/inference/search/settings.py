"""Settings of an index and of a search in it.

Own design. A file of its own, without torch and FAISS, because command-line options are generated from it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bertkit.settings import Settings

IndexKind = Literal["exact", "ivf", "hnsw"]
EXACT_UP_TO = 100_000
"""Vectors up to which `auto` searches all of them: a query then takes some milliseconds."""


class IndexSettings(Settings):
    """How a corpus is indexed."""

    kind: Literal["auto", "exact", "ivf", "hnsw"] = Field(
        "auto",
        description=f"exact: every vector is compared; ivf: those of the nearest cells; hnsw: along a graph, the"
        f" fastest and the slowest to build; auto: exact up to {EXACT_UP_TO:,} texts, then ivf.",
    )
    truncate: int | None = Field(
        None, ge=1, description="Keep this many of a vector's first numbers, as of a Matryoshka model (default: all)."
    )
    long: Literal["error", "cut", "window"] = Field(
        "cut", description="Texts longer than the model reads: an error, cut, or the mean over windows."
    )
    max_length: int | None = Field(
        None, ge=8, description="Tokens of the longest sequence, special tokens included (default: the model's)."
    )


class QuerySettings(Settings):
    """How an index is searched."""

    top: int = Field(10, ge=1, description="Hits of a query.")
    hybrid: bool = Field(False, description="Join the ranking with BM25's, by reciprocal ranks.")
    probes: int | None = Field(
        None,
        ge=1,
        description="Cells (ivf) or candidates (hnsw) that a query visits; more find more and take longer (default:"
        " 64).",
    )
    rerank_depth: int = Field(100, ge=1, description="Hits that a cross-encoder scores anew.")


class PairSettings(Settings):
    """How paraphrases are mined."""

    neighbours: int = Field(20, ge=1, description="Nearest texts that each text is compared with.")
    max_pairs: int = Field(10_000, ge=1, description="Pairs that are kept, the most similar ones.")
    min_score: float = Field(0.0, ge=-1, le=1, description="Smallest cosine of a pair.")


class NegativeSettings(Settings):
    """How hard negatives are mined."""

    negatives: int = Field(1, ge=1, description="Negatives of each pair.")
    skip: int = Field(0, ge=0, description="Nearest texts that are left out, since they may be right, too.")
    depth: int = Field(50, ge=1, description="Nearest texts that negatives are taken from.")
    max_score: float = Field(1.0, ge=-1, le=1, description="Largest cosine of anchor and negative.")
    margin: float = Field(
        0.0, ge=-2, le=2, description="How much nearer to the anchor the positive has to be than a negative."
    )

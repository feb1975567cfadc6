"""Settings of an index and of a search in it.

Not from a paper. A separate file without torch and FAISS, because command-line options are generated from it.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from bertkit.inference.embed_settings import EmbedSettings
from bertkit.settings import Settings

IndexKind = Literal["exact", "ivf", "hnsw"]
EXACT_UP_TO = 100_000
"""Number of vectors up to which `auto` searches all of them: a query then takes a few milliseconds."""


class IndexSettings(Settings):
    """How a corpus is indexed."""

    kind: Literal["auto", "exact", "ivf", "hnsw"] = Field(
        "auto",
        description=f"Kind of index. exact: compares every vector; ivf: those of the nearest cells; hnsw: searches"
        f" along a graph, fastest to search and slowest to build; auto: exact up to {EXACT_UP_TO:,} texts, then ivf.",
    )
    dtype: Literal["float32", "int8"] = Field(
        "float32",
        description="Number format of the vectors of tokens (ColBERT) on disk: float32; or int8, a quarter of the size,"
        " each vector scaled by its own largest number.",
    )
    truncate: int | None = Field(
        None, ge=1, description="Keep only the first DIM numbers of each vector, for Matryoshka models (default: all)."
    )
    long: Literal["error", "cut", "window"] = Field(
        "cut",
        description="How to treat texts longer than the model's maximum: error, cut, or window (the mean over"
        " windows).",
    )
    max_length: int | None = Field(
        None, ge=8, description="Maximum sequence length in tokens, including special tokens (default: the model's)."
    )
    query_prompt: str | None = Field(
        None, description="Text to put before each query, such as 'query: ' (default: the model's prompt for queries)."
    )
    document_prompt: str | None = Field(
        None, description="Text to put before each text of the corpus (default: the model's prompt for documents)."
    )

    later_fields: ClassVar[frozenset[str]] = frozenset({"query_prompt", "document_prompt", "dtype"})


def embed_settings(settings: IndexSettings, similarity: str = "cosine") -> EmbedSettings:
    """The settings with which the vectors of an index are computed; those compared by the dot product are not
    scaled."""
    return EmbedSettings(
        dtype=settings.dtype,
        truncate=settings.truncate,
        long=settings.long,
        max_length=settings.max_length,
        normalise=similarity != "dot",
        prompt=settings.document_prompt,
    )


class QuerySettings(Settings):
    """How an index is searched."""

    top: int = Field(10, ge=1, description="Number of hits per query.")
    hybrid: bool = Field(False, description="Combine the ranking with BM25's by reciprocal rank fusion.")
    probes: int | None = Field(
        None,
        ge=1,
        description="Cells (ivf) or candidates (hnsw) that each query, or each of its token vectors, visits; more find"
        " more and take longer (default: a quarter of the cells, at least 64; 64 candidates; 8 cells per token"
        " vector).",
    )
    where: list[str] = Field(
        default_factory=list,
        description="FIELD=VALUE: search only the texts whose row has this value in this field; with several, all of"
        " them. All such texts are compared, in any kind of index.",
    )
    rerank_depth: int = Field(100, ge=1, description="Number of hits that the model of --rerank rescores.")


class PairSettings(Settings):
    """How paraphrases are mined."""

    neighbours: int = Field(20, ge=1, description="Number of nearest texts that each text is compared with.")
    max_pairs: int = Field(10_000, ge=1, description="Maximum number of pairs; the most similar ones are kept.")
    min_score: float = Field(0.0, description="Minimum score of a pair, as in a search.")


class NegativeSettings(Settings):
    """How hard negatives are mined."""

    negatives: int = Field(1, ge=1, description="Negatives per pair.")
    skip: int = Field(0, ge=0, description="Number of nearest texts to skip, since they may also be right.")
    depth: int = Field(50, ge=1, description="Number of nearest texts from which negatives are taken.")
    max_score: float | None = Field(
        None,
        description="Maximum score of anchor and negative: cosine or dot product, of token vectors MaxSim (default: no"
        " limit).",
    )
    margin: float = Field(
        0.0,
        description="Minimum difference between the anchor's score with the positive and with a negative.",
    )
    relative_margin: float | None = Field(
        None,
        ge=0,
        le=1,
        description="The same as a share of the positive's score: with 0.05, a negative has at most 95% of it"
        " (default: none).",
    )

"""Settings of the suites that measure sentence vectors: what determines a result, apart from model and data.

They are separate from the suites and do not import torch, because command-line options are generated from them.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from bertkit.settings import Settings

STS_SETS = ("sts12", "sts13", "sts14", "sts15", "sts16", "stsb", "sickr")


class VectorSettings(Settings):
    """How texts become vectors."""

    max_length: int | None = Field(
        None, ge=8, description="Maximum sequence length in tokens, including special tokens (default: the model's)."
    )
    weighting: Literal["average", "idf"] = Field(
        "average",
        description="With word vectors, how a text's words are averaged: plainly, or weighted by the inverse"
        " frequency of each word in the texts of the evaluation.",
    )


class StsSettings(VectorSettings):
    """What `bertkit eval sts` scores."""

    only: list[str] = Field(
        default_factory=list, description=f"Set to evaluate: {', '.join(STS_SETS)} (default: all in --data-dir)."
    )
    split: Literal["auto", "train", "dev", "test"] = Field(
        "auto", description="Split of STS-B and SICK-R; auto: test if it has scores, else dev."
    )


class ClusteringSettings(VectorSettings):
    """What `bertkit eval clustering` scores."""

    starts: int = Field(
        10, ge=1, le=1000, description="Runs of k-means from other centres; scores are the mean over them."
    )


class RetrievalSettings(VectorSettings):
    """What `bertkit eval retrieval` scores."""

    split: str = Field("test", description="Name of the qrels file, without .tsv.")
    similarity: Literal["cosine", "dot", "maxsim"] | None = Field(
        None,
        description="Similarity by which documents are ranked (default: the model's own, cosine if it names none; dot"
        " for sparse vectors, maxsim for token vectors).",
    )
    cutoffs: list[int] = Field([1, 10, 100], min_length=1, description="Ranks at which recall is measured.")
    query_prompt: str | None = Field(
        None, description="Text to put before each query, such as 'query: ' (default: the model's prompt for queries)."
    )
    document_prompt: str | None = Field(
        None, description="Text to put before each document (default: the model's prompt for documents)."
    )

    later_fields: ClassVar[frozenset[str]] = frozenset({"query_prompt", "document_prompt"})

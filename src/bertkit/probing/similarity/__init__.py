"""`probe similarity`: CKA (Kornblith et al. 2019, arXiv:1905.00414) and SVCCA (Raghu et al. 2017, arXiv:1706.05806)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from bertkit.probing import ProbeSettings


class SimilaritySettings(ProbeSettings):
    """Compare layers, models and checkpoints by CKA and SVCCA:
    `bertkit probe similarity --model A --model B --data t.txt`"""

    kind: ClassVar[str] = "similarity"
    compares_models: ClassVar[bool] = True

    sentences: int = Field(
        1000, ge=1, description="Number of sentences, drawn at random from the text; repeated sentences are left out."
    )
    words: int = Field(5000, ge=2, description="Number of words drawn from the sentences, the same for all models.")
    variance: float = Field(0.99, gt=0, le=1, description="Share of each layer's variance that SVCCA keeps, by SVD.")

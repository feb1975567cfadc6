"""TSDAE: a text is reconstructed from the vector of its undeleted words.

Wang et al. 2021, TSDAE, arXiv:2104.06979, section 3: 60% of the words are deleted, the rest is embedded, and a decoder
that shares the encoder's layers (models/vector_decoder.py) predicts each token of the whole text from those
before it and the vector. The deleted words are redrawn in every epoch.

As in the released DenoisingAutoEncoderLoss.py, the vocabulary head begins as that of the masked language model in the
initial model's directory; if there is none, it is newly initialised.

Shapes: I examples, S longest text, E width of the vectors.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.errors import UsageError
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.models.vector_decoder import VectorDecoder
from bertkit.tasks.embedding.losses.base import EmbeddingLoss, TextVectors

NO_TOKEN = -1


class TsdaeLoss(EmbeddingLoss):
    """Cross-entropy of every token of a text, given those before it and the vector of the undeleted words."""

    name: Literal["tsdae"] = "tsdae"
    deletion: float = Field(
        0.6, ge=0, lt=1, description="Share of the words that is deleted; at least one word is kept."
    )

    has_accuracy: ClassVar[bool] = True
    texts: ClassVar[tuple[int, int | None]] = (1, 1)
    rebuilds_text: ClassVar[bool] = True
    of_parts: ClassVar[bool] = False

    def module(self, width: int, labels: int, model: HeadedModel | None = None) -> nn.Module:
        assert model is not None
        if width != model.encoder.width:
            raise UsageError("embedding.pooling: tsdae decodes from one vector of the encoder's width; name one mode")
        return VectorDecoder(model)

    def take_weights_of(self, directory: Path, module: nn.Module) -> None:
        assert isinstance(module, VectorDecoder)
        module.take_head_of(directory)

    def loss(self, batch: TextVectors, module: nn.Module | None = None) -> LossSum:
        assert isinstance(module, VectorDecoder)
        assert batch.model is not None
        assert batch.whole_IS is not None
        texts = _texts(batch.whole_IS)
        packed = PackedBatch.from_ids([text[:-1] for text in texts], causal=True).to(batch.vectors_IAE.device)
        target_M = torch.tensor([token for text in texts for token in text[1:]], device=batch.vectors_IAE.device)
        return LossSum.of_words(module(batch.model, batch.vectors_IAE[:, 0], packed), target_M)


def _texts(whole_IS: Tensor) -> list[list[int]]:
    """The tokens of each text."""
    ends = (whole_IS != NO_TOKEN).sum(dim=1).tolist()
    return [row[:end] for row, end in zip(whole_IS.tolist(), ends, strict=True)]


def predicted_tokens(whole_IS: Tensor) -> int:
    """How many tokens are predicted: all but the first of each text."""
    return int((whole_IS[:, 1:] != NO_TOKEN).sum())

"""An encoder with the heads that its objectives ask for, under the names of the Hub's pretraining classes.

Devlin et al. 2019, BERT, arXiv:1810.04805, appendix A.2. What is built depends on the objectives alone: a masked-LM
head, a pooler with a next-sentence classifier, or both.

Shapes: T packed tokens, B sequences, M predicted tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.errors import UsageError
from bertkit.models.encoder import BertLikeConfig, Encoder, initialise
from bertkit.models.heads import MaskedLMHead, Pooler
from bertkit.models.recorder import Recorder


class PretrainingModel(nn.Module):
    """An encoder and its pretraining heads.

    Args:
        encoder: any family's.
        heads: `masked_lm`, `next_sentence` or both.
    """

    known_heads: ClassVar[tuple[str, ...]] = ("masked_lm", "next_sentence")
    hub_names: ClassVar[dict[str, str]] = {
        "masked_lm.dense": "cls.predictions.transform.dense",
        "masked_lm.norm": "cls.predictions.transform.LayerNorm",
        "masked_lm": "cls.predictions",
        "next_sentence": "cls.seq_relationship",
    }

    def __init__(self, encoder: Encoder, heads: Collection[str]) -> None:
        super().__init__()
        config = encoder.config
        unknown = sorted(set(heads) - set(self.known_heads))
        if unknown or not isinstance(config, BertLikeConfig):
            raise UsageError(
                f"model.family {config.model_type!r} has no pretraining head for {unknown or sorted(heads)}"
            )
        self.encoder = encoder
        self.head_names = tuple(name for name in self.known_heads if name in heads)
        if "masked_lm" in heads:
            self.masked_lm = MaskedLMHead(
                encoder.width,
                encoder.vocab_size,
                activation=config.hidden_act,
                norm_eps=config.layer_norm_eps,
            )
        if "next_sentence" in heads:
            self.pooler = Pooler(encoder.width)
            self.next_sentence = nn.Linear(encoder.width, 2)

    def initialise(self, seed: int) -> None:
        """Draw all weights anew, by the encoder's initialisation."""
        assert isinstance(self.encoder.config, BertLikeConfig)
        initialise(self, std=self.encoder.config.initializer_range, seed=seed)

    def forward(self, batch: PackedBatch, recorder: Recorder | None = None) -> Tensor:
        """Hidden states, (T, D)."""
        hidden_TD: Tensor = self.encoder(batch, recorder)
        return hidden_TD

    def masked_lm_logits(self, hidden_MD: Tensor) -> Tensor:
        """(M, D) to (M, V)."""
        logits_MV: Tensor = self.masked_lm(hidden_MD, self.encoder.word_embedding.weight)
        return logits_MV

    def next_sentence_logits(self, first_BD: Tensor) -> Tensor:
        """States of the first tokens, (B, D), to (B, 2)."""
        logits_B2: Tensor = self.next_sentence(self.pooler(first_BD))
        return logits_B2

"""ERNIE 1.0 and 2.0 as on the Hub: BERT with a task embedding.

Sun et al. 2019, arXiv:1904.09223 and arXiv:1907.12412, section 3.2 and figure 3; class and names as in `transformers`'
Ernie. Differs from bert.py in the optional task-type embedding. Fine-tuning may use any of its rows; here it is row 0.

Shapes: T packed tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.models.encoder import BertLikeConfig, ClassifierDropout
from bertkit.models.families.bert import POST_NORM_NAMES, PRETRAINING, BertStack, Embeddings, bert_heads, bert_layers
from bertkit.models.heads import HeadPlan
from bertkit.models.layers import PostNormLayer
from bertkit.models.recorder import Scope
from bertkit.models.weights import Names
from bertkit.settings import UnreadKey


class ErnieConfig(BertLikeConfig):
    """ERNIE; the released Chinese 1.0 has ReLU, 513 positions and 18,000 tokens."""

    family: Literal["ernie"] = "ernie"
    use_task_id: bool = Field(False, description="Whether there is a task embedding (ERNIE 2.0).")
    task_type_vocab_size: int = Field(3, ge=1, description="Number of rows of the task embedding.")
    classifier_dropout: ClassifierDropout = None

    hub_prefix: ClassVar[str] = "ernie"
    classes: ClassVar[str] = "Ernie"
    joint_architectures: ClassVar[Mapping[frozenset[str], str]] = {PRETRAINING: "ErnieForPreTraining"}
    pooler_hub_name: ClassVar[str | None] = "ernie.pooler.dense"

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if not self.use_task_id:
            yield UnreadKey("task_type_vocab_size", "model.use_task_id is false: there is no task embedding")

    def build(self, vocab_size: int, *, pad_id: int = 0) -> Ernie:
        return Ernie(self, vocab_size)

    def heads(self) -> dict[str, HeadPlan]:
        return bert_heads(self)


class ErnieEmbeddings(Embeddings):
    """BERT's sum plus the task's row, normalised."""

    def __init__(self, config: ErnieConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        if config.use_task_id:
            self.task_type = nn.Embedding(config.task_type_vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, batch: PackedBatch, scope: Scope) -> Tensor:
        summed_TD = super().forward(batch, scope)
        if hasattr(self, "task_type"):
            summed_TD = summed_TD + self.task_type(torch.zeros_like(batch.token_types_T))
        normed_TD: Tensor = self.norm(summed_TD)
        return normed_TD


class Ernie(BertStack):
    """ERNIE's encoder."""

    hub_names: ClassVar[Names] = {**POST_NORM_NAMES, "embeddings.task_type": "embeddings.task_type_embeddings"}

    def __init__(self, config: ErnieConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        self.embeddings = ErnieEmbeddings(config, vocab_size)
        self.layers = bert_layers(PostNormLayer, config, norm_eps=config.layer_norm_eps)

"""BigBird: BERT with block-sparse attention for long documents.

Zaheer et al. 2020, arXiv:2007.14062, section 2; details as in google-research/bigbird (core/attention.py, the internal
construction, whose global tokens are the first and the last block) and in the Hub's class. attention/block_sparse.py
defines which blocks attend to which.

Quirks: dropout on the embeddings precedes their norm, and block-sparse attention has no dropout on its probabilities.
The released code draws random blocks according to the padded length; here they depend on the sequence's own length, so
a layer's blocks differ from the released code's, as they do there between lengths. In evaluation, all random blocks of
the Hub's class are the first block, which then counts several times; here they are the same as in training.

Shapes: T packed tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch, PackedSequences
from bertkit.models.attention.block_sparse import BlockPattern, attend_blocks
from bertkit.models.attention.self_attention import SelfAttention
from bertkit.models.encoder import BertLikeConfig, ClassifierDropout
from bertkit.models.families.bert import (
    POST_NORM_NAMES,
    PRETRAINING,
    BertStack,
    Embeddings,
    bert_heads,
    bert_layer,
    segment_types,
)
from bertkit.models.heads import HeadPlan, classifier_plan, dense_classifier_plan
from bertkit.models.layers import Activation, FeedForward, PostNormLayer
from bertkit.models.operators.dropout import Dropout
from bertkit.models.operators.eager import eager
from bertkit.models.operators.matmul import Linear
from bertkit.models.recorder import Scope
from bertkit.models.weights import Names
from bertkit.text.tokenizer import Tokenizer


class BigBirdConfig(BertLikeConfig):
    """BigBird; defaults are the base model's."""

    family: Literal["big_bird"] = "big_bird"
    hidden_act: Activation = Field("gelu_new", description="Activation of the feed-forward layers and of the heads.")
    max_position_embeddings: int = Field(4096, ge=1, description="Maximum sequence length in tokens.")
    attention_probs_dropout_prob: float = Field(
        0.1, ge=0, lt=1, description="Dropout on attention probabilities if attention_type is original_full."
    )
    attention_type: Literal["block_sparse", "original_full"] = Field(
        "block_sparse",
        description="block_sparse: block-sparse attention; original_full: every token attends to every token.",
    )
    block_size: int = Field(64, ge=1, description="Block size of block-sparse attention in tokens.")
    num_random_blocks: int = Field(
        3, ge=0, description="Number of random blocks that each block attends to in addition to its neighbours."
    )
    rescale_embeddings: bool = Field(
        False, description="Whether word embeddings are multiplied by the square root of the width."
    )
    use_bias: bool = Field(True, description="Whether the projections to queries, keys and values have a bias.")
    classifier_dropout: ClassifierDropout = None

    hub_prefix: ClassVar[str] = "bert"
    classes: ClassVar[str] = "BigBird"
    joint_architectures: ClassVar[Mapping[frozenset[str], str]] = {PRETRAINING: "BigBirdForPreTraining"}
    pooler_hub_name: ClassVar[str | None] = "bert.pooler"
    causal_attention: ClassVar[bool] = False

    def build(self, vocab_size: int, *, pad_id: int = 0) -> BigBird:
        return BigBird(self, vocab_size)

    def special_tokens(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """The separator: the Hub's class for spans rules out answers in the question, which ends there."""
        return {"sep_token_id": tokenizer.sep_id} if "sep" in tokenizer.roles else {}

    def heads(self) -> dict[str, HeadPlan]:
        dropout = self.task_dropout
        heads = bert_heads(self)
        # The Hub has no class with only the sentence head.
        heads["next_sentence"] = replace(heads["next_sentence"], architecture=None)
        heads["multiple_choice"] = classifier_plan(
            "BigBirdForMultipleChoice", dropout_rate=self.hidden_dropout_prob, outputs=1, pooled=True
        )
        heads["sequence_classification"] = dense_classifier_plan(
            "BigBirdForSequenceClassification",
            activation=self.hidden_act,
            dropout_rate=dropout,
            input_dropout_rate=dropout,
        )
        heads["span"] = HeadPlan(
            "BigBirdForQuestionAnswering",
            lambda shape: BigBirdSpanHead(self),
            {
                "feed_forward.inner": "qa_classifier.intermediate.dense",
                "feed_forward.outer": "qa_classifier.output.dense",
                "norm": "qa_classifier.output.LayerNorm",
                "output": "qa_classifier.qa_outputs",
            },
        )
        # All of the Hub's classes except the one for spans have a pooler.
        return {
            name: plan if plan.pooled or name == "span" else replace(plan, keeps_pooler=True)
            for name, plan in heads.items()
        }


class BigBirdSpanHead(nn.Module):
    """A feed-forward layer with its residual and norm, then the two scores of a span."""

    def __init__(self, config: BigBirdConfig) -> None:
        super().__init__()
        self.input_dropout = Dropout(config.hidden_dropout_prob)
        self.feed_forward = FeedForward(config.hidden_size, config.intermediate_size, config.hidden_act)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.output = Linear(config.hidden_size, 2)

    def forward(self, states_MD: Tensor) -> Tensor:
        """(M, D) to (M, 2)."""
        fed_MD = self.feed_forward(self.input_dropout(states_MD), Scope(None, ""))
        return self.output(self.norm(states_MD + self.dropout(fed_MD)))


class BigBirdEmbeddings(Embeddings):
    """The sum of word, position and segment-type embeddings, then dropout and norm."""

    def __init__(self, config: BigBirdConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        self.scale = config.hidden_size**0.5 if config.rescale_embeddings else 1.0
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.norm = nn.LayerNorm(self.width, eps=config.layer_norm_eps)

    def forward(self, batch: PackedBatch, scope: Scope) -> Tensor:
        """(T, D). Points, each (T, D): `hook_embed`, `hook_pos_embed`, `hook_token_type_embed`."""
        word_TD = scope.tap("hook_embed", self.word(batch.ids_T) * self.scale)
        position_TD = scope.tap("hook_pos_embed", self.position(batch.positions_T))
        token_type_TD = scope.tap("hook_token_type_embed", self.token_type(segment_types(batch, self.token_type)))
        normed_TD: Tensor = self.norm(self.dropout(word_TD + token_type_TD + position_TD))
        return normed_TD


class BigBirdAttention(SelfAttention):
    """Block-sparse or full attention."""

    def __init__(self, config: BigBirdConfig, layer: int) -> None:
        width, heads = config.hidden_size, config.num_attention_heads
        is_sparse = config.attention_type == "block_sparse"
        super().__init__(width, heads, dropout_rate=0.0 if is_sparse else config.attention_probs_dropout_prob)
        for name in ("query", "key", "value"):
            setattr(self, name, Linear(width, width, bias=config.use_bias))
        self.pattern = BlockPattern(config.block_size, config.num_random_blocks, heads, layer)
        self.is_sparse = is_sparse
        self.pruning_obstacle = "the random blocks of a head depend on its number" if is_sparse else None

    def keys_per_query(self, length: float) -> float:
        return self.pattern.keys_per_query(length) if self.is_sparse else length

    def mix(
        self, query_TNH: Tensor, key_TNH: Tensor, value_TNH: Tensor, sequences: PackedSequences, scope: Scope
    ) -> Tensor:
        if self.is_sparse:
            return eager(attend_blocks)(query_TNH, key_TNH, value_TNH, sequences, self.pattern, scope=scope)
        return super().mix(query_TNH, key_TNH, value_TNH, sequences, scope)


class BigBird(BertStack):
    """BigBird's encoder."""

    hub_names: ClassVar[Names] = POST_NORM_NAMES

    def __init__(self, config: BigBirdConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        self.embeddings = BigBirdEmbeddings(config, vocab_size)
        self.layers = nn.ModuleList(
            bert_layer(PostNormLayer, BigBirdAttention(config, number), config, norm_eps=config.layer_norm_eps)
            for number in range(config.num_hidden_layers)
        )

    def embed(self, batch: PackedBatch, scope: Scope) -> Tensor:
        """The input of the first layer, (T, D); the embeddings apply dropout themselves."""
        hidden_TD: Tensor = self.embeddings(batch, scope)
        return hidden_TD

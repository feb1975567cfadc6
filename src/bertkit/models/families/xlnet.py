"""XLNet: pretrained to predict tokens in a random order, each from those before it in that order.

Yang et al. 2019, arXiv:1906.08237, sections 2 and 3 and table 7; details as in zihangdai/xlnet. Two streams run through
the same layers: the content stream contains each token, the query stream a target's position but not its content. A
memory keeps states of earlier text. Tasks use only the content stream, and a classifier reads the last token.

Quirks: there is one dropout rate for everything, as in the Hub's class, while the released code has a separate one for
the probabilities. `bi_data` is a property of the batch here, not of the configuration, since it describes pretraining
data.

Shapes: T packed tokens, B sequences, M predicted tokens, D width, V vocabulary, K keys of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.data.layouts import LaneLayout
from bertkit.models.attention.relative_attention import (
    Pairs,
    PermutationOrder,
    RelativeAttention,
    pair_blocks,
    records_maps,
    require_even_width,
    waves,
)
from bertkit.models.attention.segment_memory import check_memory, layer_name, remembered
from bertkit.models.encoder import Encoder, EncoderConfig
from bertkit.models.families.transformer_xl import HUB_KEYS, RelativeLayer
from bertkit.models.heads import HeadPlan, TiedVocabularyHead, classifier_plan, dense_classifier_plan
from bertkit.models.layers import Activation
from bertkit.models.operators.dropout import Dropout
from bertkit.models.operators.word_embedding import WordEmbedding
from bertkit.models.recorder import Recorder, Scope
from bertkit.models.weights import Names, TensorLayout
from bertkit.settings import UnreadKey

_ATTENTION = "layer.{n}.rel_attn"
_PROJECTIONS = {"query": "q", "key": "k", "value": "v", "relative": "r", "output": "o"}

PERMUTATION = "permutation_lm"
"""The head of the query stream, and the targets in a batch that it predicts."""


class XlnetConfig(EncoderConfig):
    """XLNet; defaults are those of the base model."""

    family: Literal["xlnet"] = "xlnet"
    hidden_size: int = Field(768, ge=2, description="Width D of the hidden states; must be even.")
    num_hidden_layers: int = Field(12, ge=1, description="Number of layers.")
    num_attention_heads: int = Field(12, ge=1, description="Attention heads per layer; must divide hidden_size.")
    intermediate_size: int = Field(3072, ge=1, description="Width of the feed-forward layer.")
    hidden_act: Activation = Field("gelu", description="Activation of the feed-forward layers.")
    hidden_dropout_prob: float = Field(
        0.1, ge=0, lt=1, description="Dropout everywhere, including on attention probabilities."
    )
    summary_last_dropout: float = Field(0.1, ge=0, lt=1, description="Dropout before a sequence classifier.")
    layer_norm_eps: float = Field(1e-12, gt=0, description="Epsilon added to the variance in layer normalisation.")
    initializer_range: float = Field(0.02, gt=0, description="Standard deviation of initial weights.")
    clamp_len: int = Field(
        -1, description="Maximum relative distance; larger ones are clamped to it. Zero or less: no limit."
    )
    mem_len: int | None = Field(
        None,
        ge=0,
        description="Length of the memory in tokens; null or 0: all previous tokens, and no memory in training.",
    )
    reuse_len: int | None = Field(
        None,
        ge=0,
        description="Number of tokens at the start of each sequence that go into the memory; null or 0: all.",
    )

    hub_prefix: ClassVar[str] = "transformer"
    causal_attention: ClassVar[bool] = False
    classes: ClassVar[str] = "XLNet"
    default_pad_id: ClassVar[int] = 5
    hub_keys: ClassVar[Mapping[str, str]] = {**HUB_KEYS, "hidden_act": "ff_activation"}
    hub_defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "mem_len": 512,
    }
    hub_fixed: ClassVar[Mapping[str, Any]] = {
        **EncoderConfig.hub_fixed,
        "attn_type": "bi",
        "bi_data": False,
        "untie_r": True,
    }
    hub_fixed_by_head: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        head: {"summary_type": "last", "summary_use_proj": True, "summary_activation": "tanh"}
        for head in ("sequence_classification", "multiple_choice")
    }

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        layout = getattr(getattr(recipe, "data", None), "layout", None)
        if not isinstance(layout, LaneLayout):
            why = "training reads each batch without a memory of earlier ones"
            yield UnreadKey("mem_len", why, "set data.layout.name: reused-segments")
        yield UnreadKey("reuse_len", "training reads data.layout.reused_tokens instead", "set that key")

    @property
    def reads_token_types(self) -> bool:
        return True

    def model_post_init(self, _context: Any) -> None:
        require_even_width(self.hidden_size, self.num_attention_heads)

    @classmethod
    def from_hub(cls, contents: Mapping[str, Any]) -> Self:
        config = super().from_hub(contents)
        width = config.hidden_size // config.num_attention_heads
        if (contents.get("d_head") or width) != width:
            raise ValueError(f"d_head is {contents['d_head']!r}; only d_model / n_head, {width}, is supported")
        return config

    def build(self, vocab_size: int, *, pad_id: int = 0) -> Xlnet:
        return Xlnet(self, vocab_size)

    def draw(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """As in the released code: normal, but for `mask_emb`, which has TensorFlow's default (Glorot and Bengio 2010,
        uniform, for one input)."""
        if name.endswith("mask_emb"):
            edge = (6 / (1 + self.hidden_size)) ** 0.5
            nn.init.uniform_(parameter, -edge, edge, generator=generator)
        else:
            nn.init.normal_(parameter, std=self.initializer_range, generator=generator)

    def heads(self) -> dict[str, HeadPlan]:
        def summarised(architecture: str, outputs: int | None) -> HeadPlan:
            return dense_classifier_plan(
                architecture,
                activation="tanh",
                dropout_rate=self.summary_last_dropout,
                hub=("sequence_summary.summary", "logits_proj"),
                outputs=outputs,
                summary="last",
            )

        return {
            PERMUTATION: HeadPlan(
                "XLNetLMHeadModel",
                lambda shape: TiedVocabularyHead(shape.vocab_size),
                {"": "lm_loss"},
                decoder="lm_loss",
            ),
            "sequence_classification": summarised("XLNetForSequenceClassification", None),
            "token_classification": classifier_plan("XLNetForTokenClassification", dropout_rate=0.0),
            "span": classifier_plan("XLNetForQuestionAnsweringSimple", dropout_rate=0.0, hub="qa_outputs", outputs=2),
            "multiple_choice": summarised("XLNetForMultipleChoice", 1),
        }


@dataclass(frozen=True)
class Streams:
    """The output of the last layer, and the inputs of all.

    Attributes:
        content_TD: states that include their own token.
        query_MD: states of the batch's targets that do not include them; None without an order.
        inputs_TD: inputs of the content stream, one per layer, for `remembered`.
    """

    content_TD: Tensor
    query_MD: Tensor | None
    inputs_TD: tuple[Tensor, ...]


class XlnetLayer(RelativeLayer):
    """A layer of two streams, which share the weights."""

    def forward(
        self, content_TD: Tensor, query_MD: Tensor | None, views: Views, memory_BKD: Tensor | None, scope: Scope
    ) -> tuple[Tensor, Tensor | None]:
        """Apply the layer to both streams. Points as in BERT's layers; the query stream's are below `query_stream.`."""
        content_TD = scope.tap("hook_resid_pre", content_TD)
        within = scope.within("attn.")
        keys = self.attention.keys(content_TD, views.content, memory_BKD, within)
        attended_TD = self.attention(content_TD, keys, views.content, within)
        if query_MD is not None and views.query is not None:
            scope_g = scope.within("query_stream.")
            query_MD = scope_g.tap("hook_resid_pre", query_MD)
            attended_MD = self.attention(
                query_MD, keys, views.query, scope_g.within("attn."), tokens_M=views.target_index_M
            )
            query_MD = self.finish(query_MD, attended_MD, scope_g)
        return self.finish(content_TD, attended_TD, scope), query_MD


@dataclass(frozen=True)
class Views:
    """The pairs that each stream attends to, and the positions of the query stream's targets."""

    content: Pairs
    query: Pairs | None
    target_index_M: Tensor | None


class Xlnet(Encoder):
    """XLNet's encoder."""

    config: XlnetConfig
    word_module: ClassVar[str] = "word"
    hub_names: ClassVar[Names] = {
        "": "",
        "word": "word_embedding",
        "layers.{n}.attention": _ATTENTION,
        **{f"layers.{{n}}.attention.{here}": f"{_ATTENTION}.{hub}" for here, hub in _PROJECTIONS.items()},
        "layers.{n}.attention_norm": f"{_ATTENTION}.layer_norm",
        "layers.{n}.feed_forward.inner": "layer.{n}.ff.layer_1",
        "layers.{n}.feed_forward.outer": "layer.{n}.ff.layer_2",
        "layers.{n}.feed_forward_norm": "layer.{n}.ff.layer_norm",
    }

    def __init__(self, config: XlnetConfig, vocab_size: int) -> None:
        super().__init__(config, width=config.hidden_size, vocab_size=vocab_size)
        self.word = WordEmbedding(vocab_size, config.hidden_size)
        self.mask_emb = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        rate = config.hidden_dropout_prob
        self.layers = nn.ModuleList(
            XlnetLayer(RelativeAttention(self.width, config.num_attention_heads, dropout_rate=rate), config)
            for _ in range(config.num_hidden_layers)
        )
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, batch: PackedBatch, recorder: Recorder | None = None) -> Tensor:
        """The content stream, (T, D); for a batch with an order, the query stream at its targets. Points: `hook_embed`,
        and those of each layer below `blocks.N.`."""
        return self.forward_carried(batch, None, recorder)[0]

    def forward_carried(
        self, batch: PackedBatch, state: Mapping[str, Tensor] | None, recorder: Recorder | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Like `forward`; the state is the memory of each layer, (B, memory, D)."""
        order = None if batch.ranks_T2 is None else PermutationOrder(batch.ranks_T2[:, 0], batch.ranks_T2[:, 1])
        memory = None if state is None else [state[layer_name(n)] for n in range(len(self.layers))]
        streams = self.streams(
            batch,
            order=order,
            memory=memory,
            direction_B=None if batch.lanes is None else batch.lanes.reversed_B.long(),
            recorder=recorder,
        )
        hidden_TD = streams.content_TD
        if streams.query_MD is not None:
            hidden_TD = hidden_TD.index_copy(0, batch.targets[PERMUTATION].index_M, streams.query_MD)
        if batch.lanes is None or not self.config.mem_len:
            return hidden_TD, {}
        reused, kept = batch.lanes.reused_tokens, self.config.mem_len
        return hidden_TD, remembered(streams.inputs_TD, batch, memory, reused=reused, kept=kept)

    def streams(
        self,
        batch: PackedBatch,
        *,
        order: PermutationOrder | None = None,
        memory: Sequence[Tensor] | None = None,
        direction_B: Tensor | None = None,
        recorder: Recorder | None = None,
    ) -> Streams:
        """Both streams.

        Args:
            batch: must have targets if there is an order.
            order: determines what each token attends to; without one, all attend to all, and there is no query stream.
            memory: for each layer, states before each sequence's first token, (B, memory, D), in segment 0; see
                `remembered`.
            direction_B: int64, 1 for sequences read from right to left, whose distances have the opposite sign; None:
                no such sequences.
            recorder: records the points.

        Raises:
            ValueError: with a memory, the sequences differ in length, or are not as many as the memory's.
        """
        if memory is not None:
            check_memory(batch, memory)
        scope = Scope(recorder, "")
        memory_length = 0 if memory is None else memory[0].shape[1]
        views = self._views(batch, order, direction_B, memory_length, scope)
        content_TD = self.dropout(scope.tap("hook_embed", self.word(batch.ids_T)))
        query_MD = None
        if order is not None:
            query_MD = self.dropout(self.mask_emb[0].expand(batch.targets[PERMUTATION].count, -1))
        inputs = []
        for number, layer in enumerate(self.layers):
            inputs.append(content_TD)
            memory_BKD = None if memory is None else memory[number]
            content_TD, query_MD = layer(content_TD, query_MD, views, memory_BKD, scope.within(f"blocks.{number}."))
        query_MD = None if query_MD is None else self.dropout(query_MD)
        return Streams(self.dropout(content_TD), query_MD, tuple(inputs))

    def _views(
        self,
        batch: PackedBatch,
        order: PermutationOrder | None,
        direction_B: Tensor | None,
        memory_length: int,
        scope: Scope,
    ) -> Views:
        watched = records_maps(scope, self.config.num_hidden_layers, ("", "query_stream."))
        sequences = batch.sequences.as_one_block() if watched else batch.sequences
        waves_CPD = self.dropout(
            waves(
                self.width,
                keys=memory_length + sequences.max_length,
                queries=sequences.max_length,
                clamp=self.config.clamp_len,
                directions=1 if direction_B is None else 2,
                device=batch.ids_T.device,
            ).to(self.mask_emb.dtype)
        )

        def pairs(*, sees_itself: bool) -> Pairs:
            blocks = pair_blocks(
                sequences, batch.token_types_T, order, memory_length=memory_length, sees_itself=sees_itself
            )
            return Pairs(batch.num_tokens, sequences, blocks, waves_CPD, direction_B, memory_length)

        query = None if order is None else pairs(sees_itself=False)
        target_index_M = None if order is None else batch.targets[PERMUTATION].index_M
        return Views(pairs(sees_itself=True), query, target_index_M)

    def tensor_layouts(self) -> Sequence[TensorLayout]:
        """All projections on the Hub are (D, N, H), from states to heads, including the output projection."""
        shape = (self.width, self.config.num_attention_heads, -1)
        return [
            TensorLayout(
                f"{_ATTENTION}.{hub}",
                (f"{_ATTENTION}.{hub}.weight",),
                (lambda whole: (whole.flatten(1),)) if here == "output" else (lambda whole: (whole.flatten(1).t(),)),
                (lambda parts: parts[0].view(shape))
                if here == "output"
                else (lambda parts: parts[0].t().reshape(shape)),
            )
            for here, hub in _PROJECTIONS.items()
        ]

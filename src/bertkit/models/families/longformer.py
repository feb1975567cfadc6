"""Longformer: RoBERTa with windowed attention, and global tokens that attend to all tokens and all attend to.

Beltagy et al. 2020, arXiv:2004.05150, sections 3.1 and 5; details as in the Hub's class. Global tokens have their own
query, key and value maps; tokens that attend to them use the ordinary ones. Global tokens are those of
`PackedBatch.global_T`, or depend on the heads, as in the Hub's classes: the first token for a sequence classifier, the
question (up to the first separator) for a span, the choice (after the pair of separators) for multiple choice, and none
for a language model.

Shapes: T packed tokens, D width, V vocabulary, N heads, H head width, G global tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch, PackedSequences
from bertkit.models.attention.rectangles import from_blocks, to_blocks
from bertkit.models.attention.self_attention import SelfAttention, attend_explicitly
from bertkit.models.attention.windows import GlobalTokens, keys_in_window, recorded, sliding_window_attention
from bertkit.models.families.bert import LAYER_NAMES, POST_NORM_NAMES, bert_layer
from bertkit.models.families.roberta import PADDED_TABLES, RobertaEmbeddings, RobertaLikeConfig
from bertkit.models.layers import PostNorm
from bertkit.models.operators.dropout import Dropout
from bertkit.models.operators.matmul import Linear
from bertkit.models.recorder import Scope
from bertkit.models.selective_encoder import LayeredEncoder
from bertkit.models.weights import Names
from bertkit.text.tokenizer import Tokenizer

_SELF = LAYER_NAMES["layers.{n}.attention.query"].removesuffix("query")
_PROJECTIONS = ("query", "key", "value")


class LongformerConfig(RobertaLikeConfig):
    """Longformer; defaults are those of the base model."""

    family: Literal["longformer"] = "longformer"
    max_position_embeddings: int = Field(
        4098, ge=3, description="Rows of the position table: the maximum sequence length plus the padding id plus one."
    )
    attention_window: int | tuple[int, ...] = Field(
        512, description="Attention window in tokens, half of it on either side: one for all layers, or one per layer."
    )
    sep_token_id: int | None = Field(
        2, description="Id of the separator, which delimits questions and choices; null: there is none."
    )

    classes: ClassVar[str] = "Longformer"
    hub_prefix: ClassVar[str] = "longformer"
    causal_attention: ClassVar[bool] = False
    pooler_hub_name: ClassVar[str | None] = "longformer.pooler.dense"

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if len(self.windows) != self.num_hidden_layers:
            raise ValueError(
                f"attention_window names {len(self.windows)} layers, but num_hidden_layers is {self.num_hidden_layers}"
            )
        faulty = [window for window in self.windows if window < 2 or window % 2]
        if faulty:
            raise ValueError(f"attention_window has {faulty[0]}; a window must be even and at least 2")

    @property
    def windows(self) -> tuple[int, ...]:
        """Each layer's window in tokens."""
        window = self.attention_window
        return (window,) * self.num_hidden_layers if isinstance(window, int) else window

    def build(self, vocab_size: int, *, pad_id: int = 1) -> Longformer:
        return Longformer(self, vocab_size, pad_id=pad_id)


class LongformerAttention(SelfAttention):
    """Attention to nearby tokens and to global tokens."""

    def __init__(self, config: LongformerConfig, window: int) -> None:
        width = config.hidden_size
        super().__init__(width, config.num_attention_heads, dropout_rate=config.attention_probs_dropout_prob)
        self.each_side = window // 2
        self.query_global = Linear(width, width)
        self.key_global = Linear(width, width)
        self.value_global = Linear(width, width)

    def keys_per_query(self, length: float) -> float:
        return keys_in_window(length, self.each_side)

    def forward(  # type: ignore[override]  # it also reads the global tokens
        self,
        hidden_TD: Tensor,
        sequences: PackedSequences,
        scope: Scope,
        index_M: Tensor | None = None,
        *,
        tokens: GlobalTokens | None,
    ) -> Tensor:
        """(T, D) to (T, D), or to (M, D) for the tokens `index_M` alone. Points: those of `project`, `hook_attn_scores`
        and `hook_pattern` as in `attend` (their rows of global tokens are not used), and `hook_global_pattern`,
        (B, N, G, S)."""
        rate = self.dropout_rate if self.training else 0.0

        def mix(query_TNH: Tensor, key_TNH: Tensor, value_TNH: Tensor) -> Tensor:
            near_TNH = sliding_window_attention(
                query_TNH,
                key_TNH,
                value_TNH,
                sequences,
                each_side=self.each_side,
                dropout_rate=rate,
                scope=scope,
                tokens=tokens,
            )
            return near_TNH if tokens is None else self._see_all(near_TNH, hidden_TD, sequences, tokens, scope)

        return self.project(hidden_TD, mix, scope, index_M)

    def _see_all(
        self, near_TNH: Tensor, hidden_TD: Tensor, sequences: PackedSequences, tokens: GlobalTokens, scope: Scope
    ) -> Tensor:
        """Replace the global tokens' local attention outputs with their global ones."""
        if recorded(scope):
            sequences = sequences.as_one_block()
        rate = self.dropout_rate if self.training else 0.0
        scale = near_TNH.shape[-1] ** -0.5

        def project(linear: nn.Linear) -> list[Tensor]:
            return to_blocks(linear(hidden_TD).view(near_TNH.shape), sequences)

        seen = []
        for near, query, key, value, block, marks in zip(
            to_blocks(near_TNH, sequences),
            project(self.query_global),
            project(self.key_global),
            project(self.value_global),
            sequences.blocks,
            tokens.by_block(sequences),
            strict=True,
        ):
            scores_bNGS = (marks.pick(query) * scale) @ key.transpose(-1, -2)
            without_padding = replace(block, mask_b11S=None)
            points = _Renamed(scope)
            mixed = attend_explicitly(scores_bNGS, value, block.mask_b11S, without_padding, rate, points)
            seen.append(marks.put(near, mixed))
        return from_blocks(seen, sequences)


class _Renamed(Scope):
    """A scope that records global tokens' probabilities as a separate point."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope.recorder, scope.prefix)

    def needs(self, point: str) -> bool:
        return point == "hook_pattern" and super().needs("hook_global_pattern")

    def tap(self, point: str, tensor: Tensor) -> Tensor:
        return super().tap("hook_global_pattern", tensor) if point == "hook_pattern" else tensor


class Longformer(LayeredEncoder):
    """Longformer's encoder."""

    config: LongformerConfig
    embeddings: RobertaEmbeddings
    padded_tables: ClassVar[tuple[str, ...]] = PADDED_TABLES
    hub_names: ClassVar[Names] = {
        **POST_NORM_NAMES,
        **{f"layers.{{n}}.attention.{name}_global": f"{_SELF}{name}_global" for name in _PROJECTIONS},
    }

    def __init__(self, config: LongformerConfig, vocab_size: int, *, pad_id: int) -> None:
        super().__init__(config.counted_from(pad_id), width=config.hidden_size, vocab_size=vocab_size)
        self.sep_token_id = config.sep_token_id
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.embeddings = RobertaEmbeddings(config, vocab_size, pad_id=pad_id)
        self.layers = nn.ModuleList(
            bert_layer(PostNorm, LongformerAttention(config, window), config, norm_eps=config.layer_norm_eps)
            for window in config.windows
        )

    def to_hub(self) -> dict[str, Any]:
        return {**super().to_hub(), "pad_token_id": self.embeddings.pad_id, "sep_token_id": self.sep_token_id}

    def read_vocabulary(self, tokenizer: Tokenizer) -> None:
        if "sep" in tokenizer.roles:
            self.sep_token_id = tokenizer.sep_id

    def with_global_tokens(self, batch: PackedBatch, heads: Sequence[str]) -> PackedBatch:
        """The batch with the global tokens of all heads, unless it already has its own."""
        if batch.global_T is not None:
            return batch
        rules = self._rules
        wanted = [rules[head](batch) for head in heads if head in rules]
        return replace(batch, global_T=torch.stack(wanted).any(dim=0)) if wanted else batch

    @property
    def _rules(self) -> dict[str, Callable[[PackedBatch], Tensor]]:
        return {"sequence_classification": _first, "span": self._question, "multiple_choice": self._choice}

    def untrained_copies(self, heads: Sequence[str]) -> Names:
        """Global projections, which a masked LM does not use. The released notebook (allenai/longformer,
        scripts/convert_model_to_long.ipynb) copies the ordinary ones to them again after pretraining."""
        if any(head in self._rules for head in heads):
            return {}
        names = [f"layers.{n}.attention.{name}" for n in range(len(self.layers)) for name in _PROJECTIONS]
        pairs = {f"{name}_global": name for name in names}
        return {name: origin for name, origin in pairs.items() if _are_equal(self, name, origin)}

    def _separators_before(self, batch: PackedBatch) -> Tensor:
        """The number of separators before each token in its sequence, (T,)."""
        separator = -1 if self.sep_token_id is None else self.sep_token_id
        is_separator_T = (batch.ids_T == separator).long()
        before_T = is_separator_T.cumsum(0) - is_separator_T
        first_T = torch.arange(batch.num_tokens, device=batch.ids_T.device) - batch.positions_T
        return before_T - before_T[first_T]

    def _question(self, batch: PackedBatch) -> Tensor:
        return (self._separators_before(batch) == 0) & (batch.ids_T != self.sep_token_id)

    def _choice(self, batch: PackedBatch) -> Tensor:
        """Tokens after the first separator and the token that follows it, which is the second separator."""
        before_T = self._separators_before(batch)
        behind_T = before_T.roll(1) > 0
        return behind_T & (batch.positions_T > 1)

    def layer_inputs(self, batch: PackedBatch) -> Sequence[Mapping[str, GlobalTokens | None]]:
        tokens = None
        if batch.global_T is not None and bool(batch.global_T.any()):
            tokens = GlobalTokens(batch.global_T, batch.sequences)
        return [{"tokens": tokens}] * len(self.layers)

    @torch.no_grad()
    def finish_initialisation(self) -> None:
        """Also set global projections to the ordinary ones: section 5."""
        super().finish_initialisation()
        for layer in self.layers:
            for name in _PROJECTIONS:
                own, ordinary = (
                    layer.get_submodule(f"attention.{name}_global"),
                    layer.get_submodule(f"attention.{name}"),
                )
                own.load_state_dict(ordinary.state_dict())


def _are_equal(module: nn.Module, first: str, second: str) -> bool:
    pairs = zip(module.get_submodule(first).parameters(), module.get_submodule(second).parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def _first(batch: PackedBatch) -> Tensor:
    return batch.positions_T == 0

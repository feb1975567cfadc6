"""An encoder for small budgets: parts that improve the loss of a model of few layers at a given training cost.

No single paper: each part was published for another model, and was kept if it lowered the loss at equal training FLOPs
(docs/speedrun.md has the trials). The base is a pre-norm Transformer without biases and with norms without weights,
rotary positions (Su et al. 2021, arXiv:2104.09864), normalised queries and keys (Henry et al. 2020, arXiv:2010.04245),
and a squared ReLU (So et al. 2021, Primer, arXiv:2109.08668). Additions as in the speedrun of GPT-2
(github.com/KellerJordan/modded-nanogpt): projections to the residual stream start at zero, later layers read the
outputs of earlier ones as in a U-net, every layer reads the embeddings, and values may have their own embeddings.
Attention's input is mixed with its neighbours (depthwise convolution: Primer; Allen-Zhu 2025, canon layers). Pairs of
neighbouring tokens have rows in one hashed table (Svenstrup et al. 2017, arXiv:1709.03933).

Shapes: T packed tokens, D width, F width of the feed-forward layer, N heads, H head width, M selected tokens, B
sequences, V vocabulary, K outputs, W neighbours on either side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from bertkit.data.batch import PackedBatch, PackedSequences
from bertkit.kernels import ops
from bertkit.kernels.loading import in_use
from bertkit.models.attention.rotary import RotaryTable, require_even_heads
from bertkit.models.attention.self_attention import SelfAttention
from bertkit.models.encoder import TransformerConfig
from bertkit.models.heads import HeadPlan, HeadShape, classifier_plan
from bertkit.models.layers import Activation, DroppedFeedForward
from bertkit.models.operators.dropout import Dropout
from bertkit.models.operators.gelu import gelu
from bertkit.models.operators.matmul import Linear
from bertkit.models.operators.vocabulary import VocabularyHead, VocabularyProjection
from bertkit.models.operators.word_embedding import WordEmbedding
from bertkit.models.recorder import Scope
from bertkit.models.selective_encoder import SelectiveEncoder
from bertkit.models.weights import Names
from bertkit.settings import UnreadKey

_PAIRS = ((-1, 0), (0, 1))
"""Offsets of the two tokens in each pair that a token looks up."""
_FACTORS = (1_000_003, 7_919, 131_071)
"""Primes that spread pairs over the rows."""


class FastEncoderConfig(TransformerConfig):
    """A small encoder; defaults are those of the recipe `fast-encoder`."""

    family: Literal["fast-encoder"] = "fast-encoder"
    hidden_size: int = Field(256, ge=1, description="Width D of the hidden states.")
    num_hidden_layers: int = Field(4, ge=1, description="Number of layers.")
    num_attention_heads: int = Field(4, ge=1, description="Attention heads per layer; must divide hidden_size.")
    intermediate_size: int = Field(1024, ge=1, description="Width of the feed-forward layer.")
    hidden_dropout_prob: float = Field(0.0, ge=0, lt=1, description="Dropout on sub-layer outputs.")
    attention_probs_dropout_prob: float = Field(0.0, ge=0, lt=1, description="Dropout on attention probabilities.")
    hidden_act: Activation = Field("relu2", description="Activation of the feed-forward layers.")
    norm_eps: float = Field(1e-5, gt=0, description="Epsilon added to the mean square in RMS normalisation.")
    rope_theta: float = Field(10_000.0, gt=0, description="Base theta of the rotary positions.")
    query_key_norm: bool = Field(True, description="Whether queries and keys are normalised.")
    zero_outputs: bool = Field(
        True, description="Whether the projections that add to the residual stream are initialised to zero."
    )
    skips: bool = Field(
        False, description="Whether layers in the second half also read the outputs of layers in the first half."
    )
    embedding_skip: bool = Field(False, description="Whether every layer also reads the embeddings.")
    value_embeddings: int = Field(
        0,
        ge=0,
        description="Number of layers at either end whose attention values have an embedding of each token added.",
    )
    pair_rows: int = Field(
        16_384, ge=0, description="Rows of the hashed embedding table of pairs of neighbouring tokens; 0: no table."
    )
    neighbours: int = Field(
        2, ge=0, le=64, description="Number of tokens on either side that are mixed into attention's input."
    )
    head_transform: bool = Field(
        True, description="Whether the masked-LM head has a layer before the vocabulary projection."
    )
    head_norm_weights: bool = Field(
        False, description="Whether the norm of the masked-LM head has weights, as optimisation.tuned_width requires."
    )
    classifier_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before a task's classifier.")

    hub_prefix: ClassVar[str] = "model"
    classes: ClassVar[str] = "FastEncoder"
    draws_by_fan_in: ClassVar[bool] = True
    later_fields: ClassVar[frozenset[str]] = frozenset({"head_norm_weights"})

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        require_even_heads(self.hidden_size, self.num_attention_heads)
        if 2 * self.value_embeddings > self.num_hidden_layers:
            raise ValueError(
                f"value_embeddings is {self.value_embeddings} layers at either end, but there are only"
                f" {self.num_hidden_layers} layers"
            )

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if not self.head_transform:
            yield UnreadKey("head_norm_weights", "head_transform is false: there is no norm", "set head_transform")

    def build(self, vocab_size: int, *, pad_id: int = 0) -> FastEncoder:
        return FastEncoder(self, vocab_size)

    def draw(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Linear maps uniform within sqrt(3 / inputs), a deviation of 1 / sqrt(inputs); embeddings normal."""
        adds = name.endswith(("attention.output.weight", "feed_forward.outer.weight"))
        if name.endswith((".skip_weights", ".near", "pairs.weight")) or (adds and self.zero_outputs):
            parameter.zero_()
        elif name.endswith(".residual"):
            parameter.copy_(torch.tensor([1.0, 0.0])[:, None].expand_as(parameter))
        elif name.endswith(".value_weights"):
            parameter.fill_(0.5)
        elif name.endswith("word.weight") or ".values." in name:
            parameter.normal_(std=self.initializer_range, generator=generator)
        else:
            edge = math.sqrt(3 / parameter.shape[-1])
            parameter.uniform_(-edge, edge, generator=generator)

    def heads(self) -> dict[str, HeadPlan]:
        def classifier(name: str, hub: str, outputs: int | None = None) -> HeadPlan:
            return classifier_plan(
                f"FastEncoderFor{name}", dropout_rate=self.classifier_dropout, hub=hub, outputs=outputs
            )

        return {
            "masked_lm": HeadPlan(
                "FastEncoderForMaskedLM",
                lambda shape: FastMaskedLM(self, shape),
                {"dense": "head.dense", "norm": "head.norm", "": "decoder"},
                decoder="decoder",
            ),
            "sequence_classification": classifier("SequenceClassification", "classifier"),
            "token_classification": classifier("TokenClassification", "token_classifier"),
            "span": classifier("QuestionAnswering", "span_classifier", 2),
            "multiple_choice": classifier("MultipleChoice", "choice_classifier", 1),
        }


def rms_norm(states: Tensor, eps: float) -> Tensor:
    """States divided by their root mean square along the last dimension; no weights."""
    kernels = in_use(states)
    if kernels is not None:
        return ops.rms_norm(kernels, states, eps)
    return functional.rms_norm(states, (states.shape[-1],), eps=eps)


class FastMaskedLM(VocabularyHead):
    """A linear map, GELU and norm, then the transposed word embedding and a bias."""

    norm_remedy: ClassVar[str] = "; add --set model.head_norm_weights=true --set model.head_transform=true"

    def __init__(self, config: FastEncoderConfig, shape: HeadShape) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size, bias=False) if config.head_transform else None
        has_weights = config.head_transform and config.head_norm_weights
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps) if has_weights else None
        self.eps = config.norm_eps
        self.bias = nn.Parameter(torch.zeros(shape.vocab_size))

    @property
    def norm_weight(self) -> nn.Parameter | None:
        return None if self.norm is None else self.norm.weight

    def project(self, hidden_MD: Tensor, word_embedding_VE: Tensor) -> VocabularyProjection:
        if self.dense is not None:
            hidden_MD = gelu(self.dense(hidden_MD))
            hidden_MD = rms_norm(hidden_MD, self.eps)
            if self.norm is not None:
                hidden_MD = hidden_MD * self.norm.weight.to(hidden_MD.dtype)
        return VocabularyProjection(hidden_MD, word_embedding_VE, self.bias)


class Neighbours:
    """The neighbours of each token in its own sequence; in causal sequences only those before it."""

    def __init__(self, positions_T: Tensor, sequences: PackedSequences, each_side: int) -> None:
        self.inside: dict[int, Tensor] = {}
        seen_T = positions_T
        if sequences.causal_B is not None:
            causal_B = torch.from_numpy(sequences.causal_B).to(positions_T.device)
            lengths_B = sequences.cu_seqlens_B1.diff().long()
            causal_T = causal_B.repeat_interleave(lengths_B, output_size=len(positions_T))
            seen_T = positions_T.masked_fill(causal_T, 0)  # like a first token, which is behind no other
        for shift in range(1, each_side + 1):
            before_T = positions_T >= shift
            behind_T = torch.zeros_like(before_T)
            behind_T[:-shift] = (seen_T >= shift)[shift:]
            self.inside[-shift], self.inside[shift] = before_T[:, None], behind_T[:, None]

    def shifted(self, states_TX: Tensor, shift: int) -> Tensor:
        """For each token the state `shift` tokens later, zero if that is in another sequence: (T, X)."""
        rolled_TX = torch.roll(states_TX, -shift, 0)
        return torch.where(self.inside[shift], rolled_TX, rolled_TX.new_zeros(()))

    @cached_property
    def inside_WT(self) -> Tensor:
        """Whether each token has each neighbour, in the order of `mixed`: from the farthest before it on."""
        return torch.stack([self.inside[shift][:, 0] for shift in sorted(self.inside)])

    def mixed(self, states_TD: Tensor, near_WD: Tensor) -> Tensor:
        """Each state plus its neighbours' states times their factors: (T, D)."""
        kernels, each_side = in_use(states_TD), len(near_WD) // 2
        if kernels is not None:
            return ops.neighbours(kernels, states_TD, near_WD.float(), self.inside_WT)
        mixed_TD = states_TD
        for row, shift in enumerate((*range(-each_side, 0), *range(1, each_side + 1))):
            mixed_TD = torch.addcmul(mixed_TD, self.shifted(states_TD, shift), near_WD[row].to(states_TD.dtype))
        return mixed_TD


def pair_rows(ids_T: Tensor, near: Neighbours, rows: int) -> list[Tensor]:
    """For each pair the table row of each token, (T,): a hash, in which places outside the sequence count as 0."""
    first, apart, second = _FACTORS
    number_T1 = ids_T[:, None] + 1
    at = {0: number_T1, -1: near.shifted(number_T1, -1), 1: near.shifted(number_T1, 1)}
    return [
        ((at[left] * first + kind * apart) ^ (at[right] * second)).flatten() % rows
        for kind, (left, right) in enumerate(_PAIRS)
    ]


class FastAttention(SelfAttention):
    """Attention with normalised and rotated queries and keys; values may have an embedding of their token added."""

    def __init__(self, config: FastEncoderConfig, *, has_values: bool) -> None:
        width = config.hidden_size
        super().__init__(width, config.num_attention_heads, dropout_rate=config.attention_probs_dropout_prob)
        for name in ("query", "key", "value", "output"):
            setattr(self, name, Linear(width, width, bias=False))
        self.eps = config.norm_eps if config.query_key_norm else None
        self.value_weights = nn.Parameter(torch.empty(2)) if has_values else None
        self.pruning_obstacle = "its value_embeddings hold those of all heads together" if has_values else None

    def turned(
        self,
        hidden_TD: Tensor,
        sequences: PackedSequences,
        rotary: RotaryTable,
        embedding_TD: Tensor | None,
        scope: Scope,
        index_M: Tensor | None,
    ) -> Tensor:
        """(T, D) to (T, D), or (M, D) of these tokens alone. Points: those of `project`; queries and keys are those
        before norm and rotation, values those that are mixed.

        Args:
            embedding_TD: each token's embedding that is added to its value.
        """
        rows = self.projection((self.query, self.key, self.value), hidden_TD)
        query_TNH, key_TNH, value_TNH = (each.view(hidden_TD.shape[0], self.heads, -1) for each in rows)
        query_TNH, key_TNH = scope.tap("hook_q", query_TNH), scope.tap("hook_k", key_TNH)
        if embedding_TD is not None and self.value_weights is not None:
            own, added = self.value_weights.to(value_TNH.dtype)
            value_TNH = own * value_TNH + added * embedding_TD.to(value_TNH.dtype).view(value_TNH.shape)
        value_TNH = scope.tap("hook_v", value_TNH)
        if self.eps is not None:
            query_TNH, key_TNH = rms_norm(query_TNH, self.eps), rms_norm(key_TNH, self.eps)
        query_TNH, key_TNH = rotary.turn(query_TNH), rotary.turn(key_TNH)
        mixed_TNH = self.mix(query_TNH, key_TNH, value_TNH, sequences, scope)
        return self._to_output(scope.tap("hook_z", mixed_TNH), index_M)


class FastLayer(nn.Module):
    """Attention and feed-forward layer, each after a norm.

    Attributes:
        residual: factors of the residual stream and of the embeddings, (2, D).
        skip_weights: factors of the earlier layer's output, (D).
        near: factors of the neighbours, (2 W, D).
    """

    def __init__(self, config: FastEncoderConfig, *, has_skip: bool, has_values: bool) -> None:
        super().__init__()
        width = config.hidden_size
        self.attention = FastAttention(config, has_values=has_values)
        self.feed_forward = DroppedFeedForward(
            width, config.intermediate_size, config.hidden_act, dropout_rate=0.0, bias=False
        )
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.eps = config.norm_eps
        self.residual = nn.Parameter(torch.empty(2, width)) if config.embedding_skip else None
        self.skip_weights = nn.Parameter(torch.empty(width)) if has_skip else None
        self.near = nn.Parameter(torch.empty(2 * config.neighbours, width)) if config.neighbours else None


class FastEncoder(SelectiveEncoder):
    """The encoder: embeddings and layers."""

    config: FastEncoderConfig
    word_module: ClassVar[str] = "word"
    layers_run_once: ClassVar[bool] = False
    recomputes_layers: ClassVar[bool] = False  # inputs that a layer reads from others are computed between their parts
    hashed_tables: ClassVar[tuple[str, ...]] = ("pairs.weight",)

    hub_names: ClassVar[Names] = {
        name: name
        for name in (
            "word",
            "pairs",
            "values.{n}",
            "layers.{n}",
            "layers.{n}.attention",
            *(f"layers.{{n}}.attention.{part}" for part in ("query", "key", "value", "output")),
            "layers.{n}.feed_forward.inner",
            "layers.{n}.feed_forward.outer",
        )
    }

    def __init__(self, config: FastEncoderConfig, vocab_size: int) -> None:
        super().__init__(config, width=config.hidden_size, vocab_size=vocab_size)
        width, layers, ends = config.hidden_size, config.num_hidden_layers, config.value_embeddings
        self.word = WordEmbedding(vocab_size, width)
        self.pairs = nn.Embedding(config.pair_rows, width) if config.pair_rows else None
        self.values = nn.ModuleList(nn.Embedding(vocab_size, width) for _ in range(ends))
        self.layers = nn.ModuleList(
            FastLayer(
                config,
                has_skip=config.skips and number >= (layers + 1) // 2,
                has_values=number < ends or number >= layers - ends,
            )
            for number in range(layers)
        )
        self.head_width = width // config.num_attention_heads

    def _embedded(self, batch: PackedBatch, near: Neighbours, scope: Scope) -> Tensor:
        """(T, D). Point: `hook_embed`, only the words."""
        embedded_TD = scope.tap("hook_embed", self.word(batch.ids_T))
        if self.pairs is not None:
            for row_T in pair_rows(batch.ids_T, near, self.config.pair_rows):
                embedded_TD = embedded_TD + self.pairs(row_T)
        return rms_norm(embedded_TD, self.config.norm_eps)

    def through(self, batch: PackedBatch, scope: Scope, index_M: Tensor | None = None) -> Tensor:
        """As in the base class. Points: `hook_embed`, `blocks.N.` with each layer's, and `ln_final.hook_normalized`."""
        settings, layers = self.config, len(self.layers)
        rotary = RotaryTable(batch.positions_T, self.head_width, settings.rope_theta)
        near = Neighbours(batch.positions_T, batch.sequences, max(1, settings.neighbours))
        hidden_TD = first_TD = self._embedded(batch, near, scope)
        outputs: list[Tensor] = []
        ends = len(self.values)
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, FastLayer)
            within = scope.within(f"blocks.{number}.")
            hidden_TD = within.tap("hook_resid_pre", hidden_TD)
            if number == 0:
                first_TD = hidden_TD
            if layer.residual is not None:
                hidden_TD = layer.residual[0] * hidden_TD + layer.residual[1] * first_TD
            if layer.skip_weights is not None:
                hidden_TD = hidden_TD + layer.skip_weights * outputs[layers - 1 - number]
            table = number if number < ends else ends - layers + number if number >= layers - ends else None
            embedding_TD = None if table is None else self.values[table](batch.ids_T)
            asked_M = index_M if number == layers - 1 else None
            read_TD = rms_norm(hidden_TD, layer.eps)
            if layer.near is not None:
                read_TD = near.mixed(read_TD, layer.near)
            attended_TD = layer.attention.turned(
                read_TD, batch.sequences, rotary, embedding_TD, within.within("attn."), asked_M
            )
            hidden_TD = hidden_TD if asked_M is None else hidden_TD.index_select(0, asked_M)
            hidden_TD = hidden_TD + layer.dropout(within.tap("hook_attn_out", attended_TD))
            hidden_TD = within.tap("hook_resid_mid", hidden_TD)
            fed_TD = layer.feed_forward(rms_norm(hidden_TD, layer.eps), within.within("mlp."))
            hidden_TD = within.tap("hook_resid_post", hidden_TD + layer.dropout(within.tap("hook_mlp_out", fed_TD)))
            outputs.append(hidden_TD)
        return scope.tap("ln_final.hook_normalized", rms_norm(hidden_TD, settings.norm_eps))

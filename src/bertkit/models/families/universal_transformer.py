"""The Universal Transformer: an encoder-decoder that applies one layer repeatedly, for as many steps as a token needs.

Dehghani et al. 2019, arXiv:1807.03819, sections 2.1 and 2.2; details as in universal_transformer_util.py of
tensor2tensor. Before each application the position and the step number are added to the states. With adaptive halting
(Graves 2016, arXiv:1603.08983) a token halts when its halting probabilities add up to one; its final state is the
weighted sum of the states of its steps. Sibling transformer.py has a separate layer for each step;
objectives/pondering.py is the loss term that penalises steps.

Choices where paper and code differ: norms precede the sub-layers, as in the code; in the paper's formulas they follow
them. A halted token's state continues to be updated, and others attend to the updated state, as in the code and the
paper's appendix; according to section 2.2 it is copied. Positions have the paper's wavelengths; the code's are slightly
longer.

Shapes: T packed tokens of one side, S source tokens, U target tokens, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedSequences
from bertkit.models.attention.cross_attention import EncodedSource
from bertkit.models.attention.key_value_cache import CachedSequences
from bertkit.models.attention.self_attention import SelfAttention
from bertkit.models.encoder import require_whole_heads
from bertkit.models.encoder_decoder import (
    CROSS_PARTS,
    LAYER_PARTS,
    EncoderDecoderConfig,
    PreNormDecoderLayer,
    StackedEncoderDecoder,
    WordTable,
    decoder_layer,
)
from bertkit.models.families.bert import bert_layer
from bertkit.models.families.transformer import sinusoids
from bertkit.models.layers import Activation, DroppedFeedForward, PreNormLayer
from bertkit.models.operators.dropout import Dropout
from bertkit.models.operators.matmul import Linear
from bertkit.models.recorder import Recorder, Scope
from bertkit.models.weights import Names
from bertkit.settings import UnreadKey

_NORM_EPS = 1e-6


class UniversalTransformerConfig(EncoderDecoderConfig):
    """The Universal Transformer; defaults are those of the base model, without halting."""

    family: Literal["universal-transformer"] = "universal-transformer"
    hidden_size: int = Field(1024, ge=2, description="Width D of the hidden states.")
    num_hidden_layers: int = Field(
        6, ge=1, description="Number of times that the encoder's layer is applied; with halting, the maximum."
    )
    num_decoder_layers: int | None = Field(None, ge=1, description="The same for the decoder; null: as in the encoder.")
    num_attention_heads: int = Field(16, ge=1, description="Heads per attention layer.")
    intermediate_size: int = Field(4096, ge=1, description="Width of the feed-forward layers.")
    attention_probs_dropout_prob: float = Field(0.1, ge=0, lt=1, description="Dropout on attention probabilities.")
    activation_dropout_prob: float = Field(
        0.1, ge=0, lt=1, description="Dropout after the activation of the feed-forward layers."
    )
    max_position_embeddings: int = Field(
        1024, ge=1, description="Maximum length of the source, and of the target, in tokens."
    )
    hidden_act: Activation = Field("relu", description="Activation of the feed-forward layers.")
    step_signal: Literal["learned", "sinusoid"] = Field(
        "learned",
        description="Embedding of the step number that is added: learned, as in the released code; or sinusoid, as"
        " in the paper.",
    )
    halting: bool = Field(
        False, description="Whether each token halts when its halting probabilities add up to one (Graves 2016)."
    )
    halting_epsilon: float = Field(0.01, gt=0, lt=1, description="A token halts when its sum exceeds one minus this.")
    halting_bias: float = Field(
        1.0, description="Initial bias of the log-odds of halting; a higher bias gives fewer steps."
    )

    hub_prefix: ClassVar[str] = "model"
    classes: ClassVar[str] = "UniversalTransformer"

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if not self.halting:
            for key in ("halting_epsilon", "halting_bias"):
                yield UnreadKey(key, "model.halting is false", "write model.halting: true")

    def model_post_init(self, _context: Any) -> None:
        require_whole_heads(self.hidden_size, self.num_attention_heads)
        if self.hidden_size % 2:
            raise ValueError(f"hidden_size ({self.hidden_size}) must be even: positions are sines and cosines")

    def build(self, vocab_size: int, *, pad_id: int = 0) -> UniversalTransformer:
        return UniversalTransformer(self, vocab_size)

    def draw(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Embeddings: normal with standard deviation 1 / sqrt(width); linear maps: uniform (Glorot and Bengio 2010)."""
        if name.endswith(("embeddings.word.weight", ".signal.weight")):
            nn.init.normal_(parameter, std=self.hidden_size**-0.5, generator=generator)
        else:
            nn.init.xavier_uniform_(parameter, generator=generator)


class Recurrence(nn.Module):
    """Applies a layer repeatedly to the states of one side.

    Args:
        config: settings of the model.
        steps: maximum number of applications.
    """

    def __init__(self, config: UniversalTransformerConfig, steps: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.steps = steps
        self.width = width
        self.positions = config.max_position_embeddings
        self.threshold = 1 - config.halting_epsilon
        self.signal = nn.Embedding(steps, width) if config.step_signal == "learned" else None
        self.halting = Linear(width, 1) if config.halting else None

    def forward(
        self,
        state_TD: Tensor,
        positions_T: Tensor,
        apply: Callable[[Tensor, int], Tensor],
        *,
        all_steps: bool,
        scope: Scope,
    ) -> tuple[Tensor, Tensor | None]:
        """The last states, (T, D), and, with halting, the sum of each token's steps and remainder, (T,).

        Args:
            state_TD: input of the first step.
            positions_T: positions of the tokens.
            apply: the layer, a function of the states and the step number.
            all_steps: take all steps even if every token has halted, because later tokens need the keys of each step.
            scope: scope of the side. Point: `blocks.N.hook_halting`, (T,), probability of halting before step N.
        """
        if self.halting is None:
            for step in range(self.steps):
                state_TD = apply(self._signalled(state_TD, positions_T, step), step)
            return state_TD, None
        mixed_TD = torch.zeros_like(state_TD)
        sum_T = state_TD.new_zeros(state_TD.shape[0], dtype=torch.float32)
        remainder_T, updates_T = torch.zeros_like(sum_T), torch.zeros_like(sum_T)
        running_T = torch.ones_like(sum_T, dtype=torch.bool)
        for step in range(self.steps):
            if not all_steps and not bool(running_T.any()):
                break
            state_TD = self._signalled(state_TD, positions_T, step)
            chance_T = torch.sigmoid(self.halting(state_TD).squeeze(-1).float())
            chance_T = scope.tap(f"blocks.{step}.hook_halting", chance_T)
            halts_T = running_T & (sum_T + chance_T > self.threshold)
            goes_on_T = running_T & ~halts_T
            weight_T = torch.where(halts_T, 1 - sum_T, chance_T * goes_on_T)
            remainder_T = remainder_T + (1 - sum_T) * halts_T
            updates_T = updates_T + running_T
            sum_T = sum_T + chance_T * goes_on_T
            running_T = goes_on_T
            state_TD = apply(state_TD, step)
            mixed_TD = torch.lerp(mixed_TD, state_TD.to(mixed_TD.dtype), weight_T[:, None].to(mixed_TD.dtype))
        return mixed_TD, updates_T + remainder_T

    def _signalled(self, state_TD: Tensor, positions_T: Tensor, step: int) -> Tensor:
        """The states plus the embeddings of their positions and of the step number."""
        position_TD = sinusoids(self.positions, self.width, state_TD.device).index_select(0, positions_T)
        if self.signal is None:
            step_D = sinusoids(self.steps, self.width, state_TD.device)[step]
        else:
            step_D = self.signal.weight[step] * math.sqrt(self.width)
        return state_TD + position_TD + step_D


class UniversalTransformer(StackedEncoderDecoder):
    """Both sides, each with one layer; N in the points `blocks.N.` counts its applications."""

    config: UniversalTransformerConfig
    layers_run_once: ClassVar[bool] = False
    hub_names: ClassVar[Names] = {
        "embeddings.word": "shared",
        **{
            f"{here}.0.{part}": f"{there}.layer.{part}"
            for here, there, own in (("layers", "encoder", ()), ("decoder_layers", "decoder", CROSS_PARTS))
            for part in (*LAYER_PARTS, *own)
        },
        **{
            f"{side}_{here}": f"{there}.{here}"
            for side, there in (("source", "encoder"), ("target", "decoder"))
            for here in ("recurrence.signal", "recurrence.halting", "norm")
        },
    }

    def __init__(self, config: UniversalTransformerConfig, vocab_size: int) -> None:
        super().__init__(config, width=config.hidden_size, vocab_size=vocab_size)
        self.embeddings: nn.Module = WordTable(vocab_size, config.hidden_size)
        self.dropout = Dropout(config.hidden_dropout_prob)
        rate = config.attention_probs_dropout_prob
        attention = SelfAttention(config.hidden_size, config.num_attention_heads, dropout_rate=rate)
        fed = partial(DroppedFeedForward, dropout_rate=config.activation_dropout_prob)
        self.layers = nn.ModuleList([bert_layer(PreNormLayer, attention, config, norm_eps=_NORM_EPS, feed_forward=fed)])
        self.decoder_layers = nn.ModuleList(
            [decoder_layer(PreNormDecoderLayer, config, norm_eps=_NORM_EPS, feed_forward=fed)]
        )
        self.source_recurrence = Recurrence(config, config.num_hidden_layers)
        self.target_recurrence = Recurrence(config, config.decoder_layer_count)
        self.source_norm = nn.LayerNorm(config.hidden_size, eps=_NORM_EPS)
        self.target_norm = nn.LayerNorm(config.hidden_size, eps=_NORM_EPS)
        self._pondered: dict[str, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A copy contains the model without the results of its last pass.
        return {**self.__dict__, "_pondered": {}}

    @property
    def source_layers(self) -> Sequence[nn.Module]:
        return [self.layers[0]] * self.config.num_hidden_layers

    @property
    def target_layers(self) -> Sequence[nn.Module]:
        return [self.decoder_layers[0]] * self.config.decoder_layer_count

    def executed_modules(self) -> Iterator[nn.Module]:
        """Yields layers as often as they are applied."""
        yield self.embeddings
        yield from self.source_layers
        yield from self.target_layers

    def take_pondering(self) -> Tensor | None:
        """Steps plus remainder of each token in the last pass, (T,), source first; None if already taken."""
        parts = [self._pondered[side] for side in ("source", "target") if side in self._pondered]
        self._pondered = {}
        return torch.cat(parts) if parts else None

    def encode(
        self, ids_S: Tensor, positions_S: Tensor, source: PackedSequences, recorder: Recorder | None = None
    ) -> Tensor:
        scope = Scope(recorder, "")
        (layer,) = self.layers

        def apply(state_SD: Tensor, step: int) -> Tensor:
            applied: Tensor = layer(state_SD, source, scope.within(f"blocks.{step}."))
            return applied

        self._pondered = {}
        hidden_SD, pondered_S = self.source_recurrence(
            self.embed_source(ids_S, positions_S, scope), positions_S, apply, all_steps=False, scope=scope
        )
        if pondered_S is not None:
            self._pondered["source"] = pondered_S
        return self.finish_source(hidden_SD, scope)

    def decode(
        self,
        ids_U: Tensor,
        positions_U: Tensor,
        target: PackedSequences,
        source: EncodedSource,
        recorder: Recorder | None = None,
    ) -> Tensor:
        scope = Scope(recorder, "decoder.")
        (layer,) = self.decoder_layers

        def apply(state_UD: Tensor, step: int) -> Tensor:
            applied: Tensor = layer(state_UD, target, source, 0, scope.within(f"blocks.{step}."))
            return applied

        hidden_UD, pondered_U = self.target_recurrence(
            self.embed_target(ids_U, positions_U, scope),
            positions_U,
            apply,
            all_steps=isinstance(target, CachedSequences),
            scope=scope,
        )
        if pondered_U is not None:
            self._pondered["target"] = pondered_U
        return self.finish_target(hidden_UD, scope)

    def embed_source(self, ids_T: Tensor, positions_T: Tensor, scope: Scope) -> Tensor:
        """(T, D), without positions, which each step adds. Point: `hook_embed`."""
        word_TD = self.word_embedding(ids_T) * math.sqrt(self.width)
        return self.dropout(scope.tap("hook_embed", word_TD))

    embed_target = embed_source

    def finish_source(self, hidden_SD: Tensor, scope: Scope) -> Tensor:
        return scope.tap("ln_final.hook_normalized", self.source_norm(hidden_SD))

    def finish_target(self, hidden_UD: Tensor, scope: Scope) -> Tensor:
        return scope.tap("ln_final.hook_normalized", self.target_norm(hidden_UD))

    @torch.no_grad()
    def finish_initialisation(self) -> None:
        for side in (self.source_recurrence, self.target_recurrence):
            if side.halting is not None:
                side.halting.bias.fill_(self.config.halting_bias)

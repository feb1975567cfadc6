"""DeBERTa 2 and 3: bucketed distances, shared projections for contents and positions, and a convolution.

He et al. 2021, arXiv:2006.03654. Version 2 of the paper's code adds buckets that grow with the logarithm of the
distance, a convolution parallel to the first layer and shared projections for contents and positions. Version 3 (He et
al. 2021, arXiv:2111.09543) is the same model trained as a discriminator. Sibling deberta.py is version 1.

Shapes: T packed tokens, D width, b sequences of one block, S its longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedSequences
from bertkit.models.attention.disentangled import DisentangledAttention, SeparatePositions, SharedPositions
from bertkit.models.attention.rectangles import from_blocks, to_blocks
from bertkit.models.families.deberta import SELF, Deberta, DebertaLikeConfig
from bertkit.models.heads import HeadPlan, classifier_plan
from bertkit.models.layers import ACTIVATIONS, Activation
from bertkit.models.operators.dropout import Dropout
from bertkit.models.weights import Names, TensorLayout
from bertkit.settings import UnreadKey


class DebertaV2Config(DebertaLikeConfig):
    """Versions 2 and 3; defaults are version 3's base model's."""

    family: Literal["deberta-v2"] = "deberta-v2"
    position_buckets: int = Field(
        256,
        description="Number of distance buckets to either side, of which the outer half grow in size; less than 1:"
        " no buckets.",
    )
    share_att_key: bool = Field(True, description="Whether positions use the same projections as the contents.")
    norm_rel_ebd: Literal["none", "layer_norm"] = Field(
        "layer_norm", description="Normalisation of the table of relative positions."
    )
    conv_kernel_size: int = Field(
        0, ge=0, description="Kernel size in tokens of the convolution parallel to the first layer; 0: no convolution."
    )
    conv_groups: int = Field(1, ge=1, description="Number of channel groups of the convolution.")
    conv_act: Activation = Field("tanh", description="Activation of the convolution.")

    causal_attention: ClassVar[bool] = False  # its convolution reads later tokens
    classes: ClassVar[str] = "DebertaV2"
    hub_defaults: ClassVar[Mapping[str, Any]] = {
        **DebertaLikeConfig.hub_defaults,
        "hidden_size": 1536,
        "num_hidden_layers": 24,
        "num_attention_heads": 24,
        "intermediate_size": 6144,
        "position_buckets": -1,
        "share_att_key": False,
        "norm_rel_ebd": "none",
    }

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.conv_kernel_size and not self.conv_kernel_size % 2:
            raise ValueError(f"conv_kernel_size ({self.conv_kernel_size}) must be odd, or 0 for no convolution")
        if self.conv_kernel_size and self.hidden_size % self.conv_groups:
            raise ValueError(f"conv_groups ({self.conv_groups}) must divide hidden_size ({self.hidden_size})")
        if self.relative_attention and self.position_buckets == 1:
            raise ValueError("position_buckets is 1; expected at least 2, or 0 for no buckets")

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        yield from super().unread_keys(recipe)
        if self.relative_attention and not self.pos_att_type:
            yield UnreadKey("share_att_key", "model.pos_att_type is empty: no score reads a position")
        if not self.conv_kernel_size:
            why = "model.conv_kernel_size is 0: there is no convolution"
            yield UnreadKey("conv_groups", why, "give conv_kernel_size an odd number")
            yield UnreadKey("conv_act", why, "give conv_kernel_size an odd number")

    @property
    def span(self) -> int:
        return self.position_buckets if self.position_buckets > 0 else self.furthest

    def bucket(self, distance: Tensor) -> Tensor:
        """One distance per bucket for half of the buckets, then buckets that grow up to the furthest distance: He et
        al. 2021, version 2's code."""
        middle = self.position_buckets // 2
        if self.position_buckets < 1:
            return distance
        # Single precision and this order of operations determine on which side of a boundary a distance falls.
        reach = torch.log(torch.tensor((self.furthest - 1) / middle))
        share = torch.log(distance.abs().clamp(min=middle) / middle) / reach
        grown = (torch.ceil(share * (middle - 1)) + middle).long()
        return torch.where(distance.abs() <= middle, distance, grown * distance.sign())

    def build(self, vocab_size: int, *, pad_id: int = 0) -> DebertaV2:
        return DebertaV2(self, vocab_size)

    def heads(self) -> dict[str, HeadPlan]:
        dropout = self.hidden_dropout_prob if self.cls_dropout is None else self.cls_dropout
        choice = classifier_plan("DebertaV2ForMultipleChoice", dropout_rate=dropout, outputs=1, pooled=True)
        return {**super().heads(), "multiple_choice": choice}


class Convolution(nn.Module):
    """norm(x + activation(convolution(e))) over neighbouring tokens: He et al. 2021, version 2's code."""

    def __init__(self, config: DebertaV2Config) -> None:
        super().__init__()
        width, kernel = config.hidden_size, config.conv_kernel_size
        self.convolution = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=config.conv_groups)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.activation = ACTIVATIONS[config.conv_act]
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)

    def forward(self, embedded_TD: Tensor, hidden_TD: Tensor, sequences: PackedSequences) -> Tensor:
        """From the first layer's input and output, each (T, D), to (T, D)."""
        near = []
        for rows_b1SD, block in zip(to_blocks(embedded_TD[:, None], sequences), sequences.blocks, strict=True):
            if block.mask_b11S is not None:
                rows_b1SD = rows_b1SD * block.mask_b11S.transpose(-1, -2)
            near.append(self.convolution(rows_b1SD[:, 0].transpose(1, 2)).transpose(1, 2)[:, None])
        near_TD = from_blocks(near, sequences)[:, 0]
        normed_TD: Tensor = self.norm(hidden_TD + self.activation(self.dropout(near_TD)))
        return normed_TD


class DebertaV2(Deberta):
    """The encoder of versions 2 and 3."""

    hub_names: ClassVar[Names] = {
        **Deberta.hub_names,
        "distance_norm": "encoder.LayerNorm",
        "convolution.convolution": "encoder.conv.conv",
        "convolution.norm": "encoder.conv.LayerNorm",
        **{f"layers.{{n}}.attention.{name}": f"{SELF}{name}_proj" for name in ("query", "key", "value")},
        "layers.{n}.attention.position_key": SELF + "pos_key_proj",
        "layers.{n}.attention.position_query": SELF + "pos_query_proj",
    }

    def __init__(self, config: DebertaV2Config, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        if config.norm_rel_ebd == "layer_norm":
            self.distance_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.convolution = Convolution(config) if config.conv_kernel_size else None

    def attention_kind(self, config: Any) -> type[DisentangledAttention]:
        return SharedPositions if config.share_att_key else SeparatePositions

    def tensor_layouts(self) -> list[TensorLayout]:
        return []

    def behind_first(self, embedded_TD: Tensor, hidden_TD: Tensor, sequences: PackedSequences) -> Tensor:
        """The convolution, if there is one, over the input of the first layer."""
        return hidden_TD if self.convolution is None else self.convolution(embedded_TD, hidden_TD, sequences)

"""Qwen3: Llama's layers with norms of queries and keys.

Yang et al. 2025, arXiv:2505.09388, section 2; details as in the Hub's class. Zhang et al. 2025, arXiv:2506.05176, train
it as a sentence encoder (Qwen3-Embedding), whose vectors are the states of the last token, which closes every text.
Siblings: llama.py, with Qwen2; gemma3_text.py, which normalises queries and keys, too.

Windows (`use_sliding_window`), which no published model of this family has, are not supported, nor is attention to both
sides, which the code of some checkpoints has.

Shapes: H head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import nn

from bertkit.models.attention.self_attention import SelfAttention
from bertkit.models.families.llama import LlamaLikeConfig
from bertkit.models.families.rotary_decoder import NormedHeadsAttention, decoder_attention


class Qwen3Config(LlamaLikeConfig):
    """Qwen3; defaults have BERT base's sizes."""

    family: Literal["qwen3"] = "qwen3"
    rope_theta: float = Field(1_000_000.0, gt=0, description="Base theta of the rotary positions.")
    attention_bias: bool = Field(False, description="Whether the linear maps of attention have a bias.")

    classes: ClassVar[str] = "Qwen3"
    hub_defaults: ClassVar[Mapping[str, Any]] = {**LlamaLikeConfig.hub_defaults, "head_dim": 128}

    def attention(self) -> SelfAttention:
        norm = partial(nn.RMSNorm, eps=self.norm_eps)
        settings: dict[str, Any] = {"bias": self.attention_bias, "each_side": None, "causal": True}
        return decoder_attention(self, partial(NormedHeadsAttention, norm=norm), **settings)

"""A second implementation of NeoBERT, one sequence at a time and without packing: the oracle of its tests.

Weights are read by their names in the published checkpoints. Le Breton et al. 2025, arXiv:2502.19587; rotations as
products of complex numbers, of which neighbouring dimensions are the two parts.

Shapes: S positions, D width, N heads, H head width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from bertkit.models.families.neobert import NeoBertConfig

Weights = Mapping[str, Tensor]


def norm(weight_D: Tensor, states: Tensor, eps: float) -> Tensor:
    return states / (states.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight_D


def turned(rows_SH: Tensor) -> Tensor:
    """Each pair (2i, 2i + 1) as a complex number, turned by position / 10,000^(2i / H)."""
    length, width = rows_SH.shape
    pair = torch.arange(width // 2, dtype=rows_SH.dtype)
    angle_Sp = torch.arange(length, dtype=rows_SH.dtype)[:, None] / 10_000.0 ** (2 * pair / width)
    numbers_Sp = torch.complex(rows_SH[:, ::2].contiguous(), rows_SH[:, 1::2].contiguous())
    product_Sp = numbers_Sp * torch.polar(torch.ones_like(angle_Sp), angle_Sp)
    return torch.view_as_real(product_Sp).flatten(1)


def attention(weights: Weights, name: str, states_SD: Tensor, heads: int) -> Tensor:
    rows = (states_SD @ weights[f"{name}.qkv.weight"].t()).unflatten(-1, (heads, -1))
    mixed = []
    for head in range(heads):
        query, key, value = rows[:, head].chunk(3, dim=-1)
        scores = turned(query) @ turned(key).t() / math.sqrt(query.shape[-1])
        mixed.append(torch.softmax(scores, dim=-1) @ value)
    return torch.cat(mixed, dim=-1) @ weights[f"{name}.wo.weight"].t()


def feed_forward(weights: Weights, name: str, states_SD: Tensor) -> Tensor:
    gate, other = (states_SD @ weights[f"{name}.ffn.w12.weight"].t()).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * other) @ weights[f"{name}.ffn.w3.weight"].t()


def hidden_states(weights: Weights, ids_S: Tensor, config: NeoBertConfig) -> list[Tensor]:
    """The embeddings, the states after each layer, and those after the last norm, each (S, D)."""
    eps = config.norm_eps
    found = [weights["model.encoder.weight"][ids_S]]
    for layer in range(config.num_hidden_layers):
        name, states = f"model.transformer_encoder.{layer}", found[-1]
        normed = norm(weights[f"{name}.attention_norm.weight"], states, eps)
        states = states + attention(weights, name, normed, config.num_attention_heads)
        normed = norm(weights[f"{name}.ffn_norm.weight"], states, eps)
        found.append(states + feed_forward(weights, name, normed))
    return [*found, norm(weights["model.layer_norm.weight"], found[-1], eps)]


def logits(weights: Weights, states_SD: Tensor) -> Tensor:
    """(S, V)."""
    return states_SD @ weights["decoder.weight"].t() + weights["decoder.bias"]


def class_logits(weights: Weights, states_SD: Tensor) -> Tensor:
    """(K)."""
    dense = torch.tanh(states_SD[0] @ weights["dense.weight"].t() + weights["dense.bias"])
    return dense @ weights["classifier.weight"].t() + weights["classifier.bias"]

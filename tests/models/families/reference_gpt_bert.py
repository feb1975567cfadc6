"""A second implementation of GPT-BERT from its paper's equations, in the padded layout: the oracle of its tests.

Weights are read by their names in the published checkpoints. Charpentier and Samuel 2024, arXiv:2410.24159, section 2;
Samuel et al. 2023, arXiv:2303.09859, section 2.1; He et al. 2021, arXiv:2006.03654, equations 2 to 4.

Shapes: B sequences, S positions, D width, N heads, H head width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from bertkit.models.families.gpt_bert import GptBertConfig

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Padded:
    """Sequences of unequal lengths with zeros after them."""

    ids_BS: Tensor
    real_BS: Tensor
    visible_BSS: Tensor

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], causal: Sequence[bool]) -> Padded:
        longest = max(map(len, rows))
        ids_BS = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
        real_BS = torch.tensor([[place < len(row) for place in range(longest)] for row in rows])
        visible = torch.zeros(len(rows), longest, longest, dtype=torch.bool)
        for number, (row, is_causal) in enumerate(zip(rows, causal, strict=True)):
            for query in range(len(row)):
                for key in range(query + 1 if is_causal else len(row)):
                    visible[number, query, key] = True
        return cls(ids_BS, real_BS, visible)


def bucket(distance: int, buckets: int, longest: int) -> int:
    """Distances up to half of the buckets have their own bucket; larger ones share buckets by the logarithm of the
    distance."""
    half = buckets // 2
    if abs(distance) <= half:
        return distance
    share = math.log(abs(distance) / half) / math.log((longest - 1) / half)
    # A value that is a whole number of steps except for rounding is taken as that number.
    steps = math.ceil(round(share * (half - 1), 5))
    return int(math.copysign(half + steps, distance))


def norm(states: Tensor, eps: float) -> Tensor:
    centred = states - states.mean(dim=-1, keepdim=True)
    return centred / (centred.square().mean(dim=-1, keepdim=True) + eps).sqrt()


def split(weights: Weights, name: str, states: Tensor) -> tuple[Tensor, Tensor]:
    """The two halves of a linear map's output."""
    both = states @ weights[f"{name}.weight"].t() + weights[f"{name}.bias"]
    first, second = both.chunk(2, dim=-1)
    return first, second


def attention(weights: Weights, layer: int, states_BSD: Tensor, padded: Padded, config: GptBertConfig) -> Tensor:
    name = f"model.attention_layers.{layer}"
    heads, eps = config.num_attention_heads, config.layer_norm_eps
    length = states_BSD.shape[1]
    normed = norm(states_BSD, eps)
    table = norm(weights["model.embedding.relative_embedding"], eps)
    table = table * weights["model.embedding.relative_layer_norm.weight"]
    table = table + weights["model.embedding.relative_layer_norm.bias"]
    size, longest = config.position_bucket_size, config.max_position_embeddings
    row_SS = torch.tensor([[bucket(i - j, size, longest) + size - 1 for j in range(length)] for i in range(length)])

    def by_head(tensor: Tensor) -> Tensor:
        return tensor.unflatten(-1, (heads, -1))

    query, key = (by_head(each) for each in split(weights, f"{name}.in_proj_qk", normed))
    query_at, key_at = (by_head(each[row_SS]) for each in split(weights, f"{name}.in_proj_qk", table))
    value, gate = split(weights, f"{name}.in_proj_vg", normed)
    scores = torch.einsum("binh,bjnh->bnij", query, key)
    scores = scores + torch.einsum("binh,ijnh->bnij", query, key_at)
    scores = scores + torch.einsum("bjnh,ijnh->bnij", key, query_at)
    scores = scores / math.sqrt(3 * config.hidden_size / heads)
    hidden = ~padded.visible_BSS[:, None]
    pattern = torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1).nan_to_num(0)
    mixed = torch.einsum("bnij,bjnh->binh", pattern, by_head(value)).flatten(2)
    gated = norm(mixed * functional.gelu(gate), eps)
    return gated @ weights[f"{name}.out_proj.weight"].t() + weights[f"{name}.out_proj.bias"]


def feed_forward(weights: Weights, layer: int, states_BSD: Tensor, eps: float) -> Tensor:
    name = f"model.mlp_layers.{layer}.mlp"
    value, gate = (norm(states_BSD, eps) @ weights[f"{name}.1.weight"].t()).chunk(2, dim=-1)
    tanh = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    return norm(value * tanh, eps) @ weights[f"{name}.4.weight"].t()


def hidden_states(weights: Weights, padded: Padded, config: GptBertConfig) -> list[Tensor]:
    """The embeddings and the states after each layer, each (B, S, D)."""
    eps = config.layer_norm_eps
    states = norm(weights["model.embedding.word_embedding.weight"][padded.ids_BS], eps)
    outputs, found = [states], [states]
    for layer in range(config.num_hidden_layers):
        for part in range(2):
            added = (
                feed_forward(weights, layer, states, eps) if part else attention(weights, layer, states, padded, config)
            )
            outputs.append(states + added)
            factors = weights[f"model.dwa_modules.alphas.{2 * layer + part}"]
            states = torch.einsum("s,sbld->bld", factors, torch.stack(outputs))
        found.append(states)
    return found


def logits(weights: Weights, states_BSD: Tensor, eps: float) -> Tensor:
    """(B, S, V)."""
    dense = norm(states_BSD, eps) @ weights["lm_head.nonlinearity.1.weight"].t()
    dense = norm(functional.gelu(dense + weights["lm_head.nonlinearity.1.bias"]), eps)
    return dense @ weights["model.embedding.word_embedding.weight"].t() + weights["lm_head.nonlinearity.5.bias"]


def mean_loss(logits_MV: Tensor, id_M: Tensor, z_loss: float) -> Tensor:
    """Mean cross-entropy, and the mean squared logarithm of the softmax's denominator times its factor."""
    denominator_M = logits_MV.exp().sum(dim=-1)
    label_M = logits_MV[torch.arange(id_M.numel()), id_M]
    return (denominator_M.log() - label_M).mean() + z_loss * denominator_M.log().square().mean()

"""A second implementation of the fast encoder, one sequence at a time and without packing: the oracle of its tests.

Weights are read by their names in the file. The parts are described in docs/speedrun.md.

Shapes: S positions, D width, N heads, H head width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from bertkit.models.families.fast_encoder import FastEncoderConfig

Weights = Mapping[str, Tensor]


def norm(states: Tensor, eps: float) -> Tensor:
    return states / (states.square().mean(dim=-1, keepdim=True) + eps).sqrt()


def turned(states_SH: Tensor, theta: float) -> Tensor:
    """Rotate each pair (i, i + H/2) by the position times the pair's frequency."""
    length, width = states_SH.shape
    rows = []
    for position in range(length):
        row = torch.empty_like(states_SH[0])
        for pair in range(width // 2):
            angle = position * theta ** (-2 * pair / width)
            first, second = states_SH[position, pair], states_SH[position, pair + width // 2]
            row[pair] = first * math.cos(angle) - second * math.sin(angle)
            row[pair + width // 2] = second * math.cos(angle) + first * math.sin(angle)
        rows.append(row)
    return torch.stack(rows)


def with_neighbours(states_SD: Tensor, near_WD: Tensor) -> Tensor:
    """Rows of factors: the tokens before, nearest last, then those after."""
    length, each_side = len(states_SD), len(near_WD) // 2
    shifts = [*range(-each_side, 0), *range(1, each_side + 1)]
    rows = []
    for position in range(length):
        row = states_SD[position]
        for factor, shift in zip(near_WD, shifts, strict=True):
            if 0 <= position + shift < length:
                row = row + factor * states_SD[position + shift]
        rows.append(row)
    return torch.stack(rows)


def attention(weights: Weights, layer: int, states_SD: Tensor, ids_S: Tensor, config: FastEncoderConfig) -> Tensor:
    name, heads = f"model.layers.{layer}.attention", config.num_attention_heads
    query, key, value = (
        (states_SD @ weights[f"{name}.{part}.weight"].t()).unflatten(-1, (heads, -1))
        for part in ("query", "key", "value")
    )
    ends, layers = config.value_embeddings, config.num_hidden_layers
    table = layer if layer < ends else layer - (layers - ends) if layer >= layers - ends else None
    if table is not None:
        own, added = weights[f"{name}.value_weights"]
        value = own * value + added * weights[f"model.values.{table}.weight"][ids_S].view(value.shape)
    mixed = []
    for head in range(heads):
        first, second = query[:, head], key[:, head]
        if config.query_key_norm:
            first, second = norm(first, config.norm_eps), norm(second, config.norm_eps)
        first, second = turned(first, config.rope_theta), turned(second, config.rope_theta)
        scores = first @ second.t() / math.sqrt(query.shape[-1])
        mixed.append(torch.softmax(scores, dim=-1) @ value[:, head])
    return torch.cat(mixed, dim=-1) @ weights[f"{name}.output.weight"].t()


def embedded(weights: Weights, ids_S: Tensor, config: FastEncoderConfig) -> Tensor:
    """Words, plus a row for the pair of each token with the previous one and with the next one."""
    padded = [0, *(ids_S + 1).tolist(), 0]
    rows = []
    for place, word in enumerate(ids_S, start=1):
        row = weights["model.word.weight"][word]
        if config.pair_rows:
            before, own, behind = padded[place - 1 : place + 2]
            for number, (left, right) in enumerate([(before, own), (own, behind)]):
                place_in_table = ((left * 1_000_003 + number * 7_919) ^ (right * 131_071)) % config.pair_rows
                row = row + weights["model.pairs.weight"][place_in_table]
        rows.append(row)
    return torch.stack(rows)


def hidden_states(weights: Weights, ids_S: Tensor, config: FastEncoderConfig) -> list[Tensor]:
    """The input of each layer, and the states after the last norm, each (S, D)."""
    eps, layers = config.norm_eps, config.num_hidden_layers
    first = norm(embedded(weights, ids_S, config), eps)
    states, found, outputs = first, [], []
    for layer in range(layers):
        name = f"model.layers.{layer}"
        found.append(states)
        if config.embedding_skip:
            kept, first_share = weights[f"{name}.residual"]
            states = kept * states + first_share * first
        if config.skips and layer >= (layers + 1) // 2:
            states = states + weights[f"{name}.skip_weights"] * outputs[layers - 1 - layer]
        read = norm(states, eps)
        if config.neighbours:
            read = with_neighbours(read, weights[f"{name}.near"])
        states = states + attention(weights, layer, read, ids_S, config)
        inner = (norm(states, eps) @ weights[f"{name}.feed_forward.inner.weight"].t()).clamp(min=0) ** 2
        states = states + inner @ weights[f"{name}.feed_forward.outer.weight"].t()
        outputs.append(states)
    return [*found, norm(states, eps)]


def logits(weights: Weights, states_SD: Tensor, config: FastEncoderConfig) -> Tensor:
    """(S, V)."""
    active = states_SD
    if config.head_transform:
        dense = states_SD @ weights["head.dense.weight"].t()
        active = norm(dense * 0.5 * (1 + torch.erf(dense / math.sqrt(2))), config.norm_eps)
        if config.head_norm_weights:
            active = active * weights["head.norm.weight"]
    return active @ weights["model.word.weight"].t() + weights["decoder.bias"]

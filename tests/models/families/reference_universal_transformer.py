"""A second implementation of the Universal Transformer, the oracle of its tests, one pair at a time and, with halting,
one token after another. Dehghani et al. 2019, arXiv:1807.03819, section 2 and appendix C; Graves 2016,
arXiv:1603.08983, equations 5 to 8.

Weights are read by their names in the file.

Shapes: S source positions, U target positions, Q queries, K keys, D width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from bertkit.models.families.universal_transformer import UniversalTransformerConfig

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Read:
    """States of a side, and each token's steps and remainder."""

    states_SD: Tensor
    steps: list[int]
    remainders: list[Tensor]


def wave(position: int, width: int) -> Tensor:
    """Sines of a number, then its cosines."""
    angles = [position / 10000 ** (2 * i / width) for i in range(width // 2)]
    return torch.tensor([*map(math.sin, angles), *map(math.cos, angles)])


def norm(weights: Weights, name: str, states_SD: Tensor) -> Tensor:
    return functional.layer_norm(
        states_SD, states_SD.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-6
    )


def linear(weights: Weights, name: str, states_SD: Tensor) -> Tensor:
    return states_SD @ weights[f"{name}.weight"].t() + weights[f"{name}.bias"]


def attention(weights: Weights, name: str, query_QD: Tensor, key_KD: Tensor, heads: int, *, causal: bool) -> Tensor:
    query, key, value = (
        linear(weights, f"{name}.{part}", states).unflatten(-1, (heads, -1)).transpose(0, 1)
        for part, states in (("query", query_QD), ("key", key_KD), ("value", key_KD))
    )
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    mixed = (scores.softmax(dim=-1) @ value).transpose(0, 1).flatten(1)
    return linear(weights, f"{name}.output", mixed)


def applied(
    weights: Weights, side: str, states_SD: Tensor, encoded_SD: Tensor | None, config: UniversalTransformerConfig
) -> Tensor:
    """The layer, applied once."""
    name, heads = f"model.{side}.layer", config.num_attention_heads
    read = norm(weights, f"{name}.attention_norm", states_SD)
    states_SD = states_SD + attention(weights, f"{name}.attention", read, read, heads, causal=encoded_SD is not None)
    if encoded_SD is not None:
        read = norm(weights, f"{name}.cross_attention_norm", states_SD)
        states_SD = states_SD + attention(weights, f"{name}.cross_attention", read, encoded_SD, heads, causal=False)
    read = norm(weights, f"{name}.feed_forward_norm", states_SD)
    inner = linear(weights, f"{name}.feed_forward.inner", read).relu()
    return states_SD + linear(weights, f"{name}.feed_forward.outer", inner)


def side(
    weights: Weights,
    name: str,
    ids: Sequence[int],
    encoded_SD: Tensor | None,
    config: UniversalTransformerConfig,
    steps: int,
) -> Read:
    """One side's states: all tokens are computed for all steps, and halting determines how the steps are mixed."""
    width = config.hidden_size
    states_SD = torch.stack([weights["model.shared.weight"][token] * math.sqrt(width) for token in ids])
    history, chances = [], []
    for step in range(steps):
        if config.step_signal == "learned":
            number_D = weights[f"model.{name}.recurrence.signal.weight"][step] * math.sqrt(width)
        else:
            number_D = wave(step, width)
        states_SD = torch.stack([row + wave(place, width) + number_D for place, row in enumerate(states_SD)])
        if config.halting:
            chances.append(torch.sigmoid(linear(weights, f"model.{name}.recurrence.halting", states_SD))[:, 0])
        states_SD = applied(weights, name, states_SD, encoded_SD, config)
        history.append(states_SD)
    final = f"model.{name}.norm"
    if not config.halting:
        return Read(norm(weights, final, states_SD), [steps] * len(ids), [torch.zeros(())] * len(ids))
    rows, taken, remainders = [], [], []
    for token in range(len(ids)):
        mixed_D, total, remainder = torch.zeros(width), torch.zeros(()), torch.zeros(())
        for step in range(steps):
            chance = chances[step][token]
            halts = bool(total + chance > 1 - config.halting_epsilon)
            weight = 1 - total if halts else chance
            mixed_D = weight * history[step][token] + (1 - weight) * mixed_D
            if halts:
                remainder = 1 - total
                break
            total = total + chance
        rows.append(mixed_D)
        taken.append(step + 1)
        remainders.append(remainder)
    return Read(norm(weights, final, torch.stack(rows)), taken, remainders)


def pair(
    weights: Weights, source: Sequence[int], target: Sequence[int], config: UniversalTransformerConfig
) -> tuple[Read, Read]:
    """Both sides of one pair."""
    encoded = side(weights, "encoder", source, None, config, config.num_hidden_layers)
    decoded = side(weights, "decoder", target, encoded.states_SD, config, config.decoder_layer_count)
    return encoded, decoded

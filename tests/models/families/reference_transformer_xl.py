"""A second implementation of Transformer-XL from the paper's equations, one query and one key at a time.

Dai et al. 2019, arXiv:1901.02860, section 3.3: the score of query i and key j is q_i k_j + q_i W R_(i-j) + u k_j + v W
R_(i-j), in loops and without the shift of rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional


def wave(distance: int, width: int) -> Tensor:
    angles = [distance / 10000 ** (2 * pair / width) for pair in range(width // 2)]
    return torch.tensor([math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles])


def attended(
    hidden_SD: Tensor, memory_KD: Tensor, weights: Mapping[str, Tensor], u_NH: Tensor, v_NH: Tensor, clamp: int
) -> Tensor:
    """The attention of one sequence, (S, D), before the residual connection."""
    heads, head_width = u_NH.shape
    width = hidden_SD.shape[1]
    all_KD = torch.cat([memory_KD, hidden_SD])
    query, key, value = (
        functional.linear(states, weights[f"attention.{name}.weight"]).view(-1, heads, head_width)
        for states, name in ((hidden_SD, "query"), (all_KD, "key"), (all_KD, "value"))
    )
    rows = []
    for i in range(len(hidden_SD)):
        outputs = []
        for head in range(heads):
            scores = []
            place = len(memory_KD) + i
            for j in range(place + 1):
                distance = place - j if clamp <= 0 else min(place - j, clamp)
                relative = functional.linear(wave(distance, width), weights["attention.relative.weight"])
                relative_H = relative.view(heads, head_width)[head]
                q = query[i, head]
                terms = q @ key[j, head] + q @ relative_H + u_NH[head] @ key[j, head] + v_NH[head] @ relative_H
                scores.append(terms / math.sqrt(head_width))
            shares = torch.softmax(torch.stack(scores), dim=0)
            outputs.append(sum(share * value[j, head] for j, share in enumerate(shares)))
        rows.append(torch.cat(outputs))
    return functional.linear(torch.stack(rows), weights["attention.output.weight"])


def states(
    ids_S: Tensor, memory: list[Tensor], weights: Mapping[str, Tensor], layers: int, eps: float, clamp: int = 0
) -> tuple[Tensor, list[Tensor]]:
    """The last layer's states of one sequence, (S, D), and each layer's input."""
    hidden_SD = weights["word.weight"][ids_S]
    hidden_SD = hidden_SD * math.sqrt(hidden_SD.shape[1])
    inputs = []
    for number in range(layers):
        own = {
            name.removeprefix(f"layers.{number}."): value
            for name, value in weights.items()
            if name.startswith(f"layers.{number}.")
        }
        inputs.append(hidden_SD)

        def norm(states: Tensor, name: str, own: Mapping[str, Tensor] = own) -> Tensor:
            mean, variance = states.mean(-1, keepdim=True), states.var(-1, keepdim=True, unbiased=False)
            return (states - mean) / (variance + eps).sqrt() * own[f"{name}.weight"] + own[f"{name}.bias"]

        mixed = attended(hidden_SD, memory[number], own, weights["r_w_bias"], weights["r_r_bias"], clamp)
        hidden_SD = norm(hidden_SD + mixed, "attention_norm")
        inner = torch.relu(hidden_SD @ own["feed_forward.inner.weight"].T + own["feed_forward.inner.bias"])
        fed = inner @ own["feed_forward.outer.weight"].T + own["feed_forward.outer.bias"]
        hidden_SD = norm(hidden_SD + fed, "feed_forward_norm")
    return hidden_SD, inputs

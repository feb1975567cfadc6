"""A second implementation of MosaicBERT, one sequence at a time and without packing: the oracle of its tests.

Weights are read by their names in the published checkpoints. Portes et al. 2023, arXiv:2312.17482, section 2; biases of
Press et al. 2022, arXiv:2108.12409.

Shapes: S positions, D width, N heads, H head width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from bertkit.models.families.mosaicbert import MosaicBertConfig

Weights = Mapping[str, Tensor]


def norm(weights: Weights, name: str, states: Tensor, eps: float) -> Tensor:
    centred = states - states.mean(dim=-1, keepdim=True)
    scaled = centred / (centred.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def linear(weights: Weights, name: str, states: Tensor) -> Tensor:
    product = states @ weights[f"{name}.weight"].t()
    return product + weights[f"{name}.bias"] if f"{name}.bias" in weights else product


def slope(head: int, heads: int) -> float:
    """Slopes of heads 0, 1, ...: a geometric sequence that ends at 2^-8 if the number of heads is a power of two."""
    power = 2 ** math.floor(math.log2(heads))
    if head < power:
        return float(2 ** (-8 * (head + 1) / power))
    return float(2 ** (-8 * (2 * (head - power) + 1) / (2 * power)))


def attention(weights: Weights, layer: int, states_SD: Tensor, heads: int) -> Tensor:
    name, length = f"bert.encoder.layer.{layer}.attention", len(states_SD)
    query, key, value = linear(weights, f"{name}.self.Wqkv", states_SD).unflatten(-1, (3, heads, -1)).unbind(1)
    mixed = []
    for head in range(heads):
        scores = query[:, head] @ key[:, head].t() / math.sqrt(query.shape[-1])
        biases = torch.tensor([[-slope(head, heads) * abs(i - j) for j in range(length)] for i in range(length)])
        mixed.append(torch.softmax(scores + biases, dim=-1) @ value[:, head])
    return linear(weights, f"{name}.output.dense", torch.cat(mixed, dim=-1))


def feed_forward(weights: Weights, layer: int, states_SD: Tensor) -> Tensor:
    name = f"bert.encoder.layer.{layer}.mlp"
    gate, other = linear(weights, f"{name}.gated_layers", states_SD).chunk(2, dim=-1)
    return linear(weights, f"{name}.wo", 0.5 * gate * (1 + torch.erf(gate / math.sqrt(2))) * other)


def hidden_states(weights: Weights, ids_S: Tensor, types_S: Tensor, config: MosaicBertConfig) -> list[Tensor]:
    """The embeddings and the states after each layer, each (S, D)."""
    eps = config.layer_norm_eps
    states = weights["bert.embeddings.word_embeddings.weight"][ids_S]
    states = states + weights["bert.embeddings.token_type_embeddings.weight"][types_S]
    found = [norm(weights, "bert.embeddings.LayerNorm", states, eps)]
    for layer in range(config.num_hidden_layers):
        name, states = f"bert.encoder.layer.{layer}", found[-1]
        attended = attention(weights, layer, states, config.num_attention_heads)
        states = norm(weights, f"{name}.attention.output.LayerNorm", states + attended, eps)
        found.append(norm(weights, f"{name}.mlp.layernorm", states + feed_forward(weights, layer, states), eps))
    return found


def logits(weights: Weights, states_SD: Tensor) -> Tensor:
    """(S, V)."""
    dense = functional.gelu(linear(weights, "cls.predictions.transform.dense", states_SD))
    dense = norm(weights, "cls.predictions.transform.LayerNorm", dense, 1e-12)
    return dense @ weights["bert.embeddings.word_embeddings.weight"].t() + weights["cls.predictions.decoder.bias"]

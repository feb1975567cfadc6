"""A second implementation of Nomic BERT with experts, token by token and without packing: the oracle of its tests.

Weights are read by their names in the published checkpoint. Nussbaum and Duderstadt 2025, arXiv:2502.07972;
rotations as products of complex numbers, of which the two halves of a head are the parts.

Shapes: S positions, D width, F width of the feed-forward layer, N heads, H head width, E experts, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from bertkit.models.families.nomic_bert_moe import NomicBertMoeConfig

Weights = Mapping[str, Tensor]


def linear(weights: Weights, name: str, states: Tensor) -> Tensor:
    return states @ weights[f"{name}.weight"].t() + weights[f"{name}.bias"]


def gelu(values: Tensor) -> Tensor:
    return values * (1 + torch.erf(values / math.sqrt(2))) / 2


def norm(weights: Weights, name: str, states: Tensor, eps: float) -> Tensor:
    centred = states - states.mean(dim=-1, keepdim=True)
    scaled = centred / (centred.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def turned(rows_SH: Tensor, base: float) -> Tensor:
    """Dimensions i and i + H/2 as a complex number, turned by position / base^(2i / H)."""
    half = rows_SH.shape[1] // 2
    angle = torch.arange(len(rows_SH))[:, None] / base ** (torch.arange(half) / half)
    numbers = torch.complex(rows_SH[:, :half].contiguous(), rows_SH[:, half:].contiguous())
    product = numbers * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([product.real, product.imag], dim=1)


def attention(weights: Weights, name: str, states_SD: Tensor, config: NomicBertMoeConfig) -> Tensor:
    query_SD, key_SD, value_SD = linear(weights, f"{name}.Wqkv", states_SD).chunk(3, dim=1)
    mixed = []
    for query, key, value in zip(
        *(rows.chunk(config.num_attention_heads, dim=1) for rows in (query_SD, key_SD, value_SD)), strict=True
    ):
        scores = turned(query, config.rope_theta) @ turned(key, config.rope_theta).t() / math.sqrt(query.shape[1])
        mixed.append(torch.softmax(scores, dim=1) @ value)
    return linear(weights, f"{name}.out_proj", torch.cat(mixed, dim=1))


def experts(weights: Weights, name: str, states_SD: Tensor, config: NomicBertMoeConfig) -> Tensor:
    """Each token by its `experts_per_token` most probable experts; their probabilities are not normalised again."""
    first_EFD, second_EFD = (
        weights[f"{name}.experts.mlp.{part}"].view(config.num_experts, config.intermediate_size, config.hidden_size)
        for part in ("w1", "w2")
    )
    rows = []
    for state_D in states_SD:
        probability_E = torch.softmax(weights[f"{name}.router.layer.weight"] @ state_D, dim=0)
        chosen = sorted(range(config.num_experts), key=lambda e: -probability_E[e].item())[: config.experts_per_token]
        parts = [probability_E[e] * (gelu(first_EFD[e] @ state_D) @ second_EFD[e]) for e in chosen]
        rows.append(torch.stack(parts).sum(dim=0) + weights[f"{name}.experts.bias"])
    return torch.stack(rows)


def hidden_states(weights: Weights, ids_S: Tensor, config: NomicBertMoeConfig) -> list[Tensor]:
    """The embeddings and the states after each layer, each (S, D)."""
    eps = config.layer_norm_eps
    words = weights["embeddings.word_embeddings.weight"][ids_S]
    found = [norm(weights, "emb_ln", words + weights["embeddings.token_type_embeddings.weight"][0], eps)]
    for layer in range(config.num_hidden_layers):
        name, states = f"encoder.layers.{layer}", found[-1]
        states = norm(weights, f"{name}.norm1", states + attention(weights, f"{name}.attn", states, config), eps)
        if layer % config.expert_layer_interval == 1:
            fed = experts(weights, f"{name}.mlp", states, config)
        else:
            fed = linear(weights, f"{name}.mlp.fc2", gelu(linear(weights, f"{name}.mlp.fc1", states)))
        found.append(norm(weights, f"{name}.norm2", states + fed, eps))
    return found


def logits(weights: Weights, states_SD: Tensor, eps: float) -> Tensor:
    """(S, V)."""
    dense = gelu(linear(weights, "cls.predictions.transform.dense", states_SD))
    normed = norm(weights, "cls.predictions.transform.layer_norm", dense, eps)
    return normed @ weights["embeddings.word_embeddings.weight"].t() + weights["cls.predictions.decoder.bias"]

"""A second implementation of JinaBERT, one sequence at a time and without packing: the oracle of its tests.

Weights are read by their names in the published checkpoints. Günther et al. 2023, arXiv:2310.19923, section 4; norms
on queries and keys as in jinaai/jina-bert-v2-qk-post-norm.

Shapes: S positions, D width, N heads, H head width.
"""

from __future__ import annotations

import math

import torch
from tests.models.families.reference_mosaicbert import Weights, linear, norm, slope
from torch import Tensor
from torch.nn import functional

from bertkit.models.families.jina_bert import JinaBertConfig, JinaBertQkConfig


def attention(weights: Weights, name: str, states_SD: Tensor, heads: int, eps: float) -> Tensor:
    """With the output's linear map."""
    query, key, value = (linear(weights, f"{name}.self.{part}", states_SD) for part in ("query", "key", "value"))
    if f"{name}.self.layer_norm_q.weight" in weights:
        query = norm(weights, f"{name}.self.layer_norm_q", query, eps)
        key = norm(weights, f"{name}.self.layer_norm_k", key, eps)
    mixed, size = [], states_SD.shape[1] // heads
    for head in range(heads):
        own = slice(head * size, (head + 1) * size)
        scores = query[:, own] @ key[:, own].t() / math.sqrt(size)
        for i in range(len(states_SD)):
            scores[i] = scores[i] - slope(head, heads) * (torch.arange(len(states_SD)) - i).abs()
        mixed.append(torch.softmax(scores, dim=-1) @ value[:, own])
    return linear(weights, f"{name}.output.dense", torch.cat(mixed, dim=-1))


def activated(kind: str, states: Tensor) -> Tensor:
    return states.clamp(min=0) if kind == "reglu" else functional.gelu(states)


def layer(weights: Weights, name: str, states: Tensor, config: JinaBertConfig | JinaBertQkConfig) -> Tensor:
    eps, kind, width = config.layer_norm_eps, config.feed_forward_type, config.intermediate_size
    attended = attention(weights, f"{name}.attention", states, config.num_attention_heads, eps)
    attended = norm(weights, f"{name}.attention.output.LayerNorm", attended + states, eps)
    if isinstance(config, JinaBertQkConfig):
        states = norm(weights, f"{name}.layer_norm_1", states + attended, eps)
        both = linear(weights, f"{name}.mlp.up_gated_layer", states)
        fed = linear(weights, f"{name}.mlp.down_layer", both[:, :width] * activated(kind, both[:, width:]))
        return norm(weights, f"{name}.layer_norm_2", states + fed, eps)
    if kind == "original":
        inner = functional.gelu(linear(weights, f"{name}.intermediate.dense", attended))
        fed = linear(weights, f"{name}.output.dense", inner)
        return norm(weights, f"{name}.output.LayerNorm", fed + attended, eps)
    both = linear(weights, f"{name}.mlp.gated_layers", attended)
    fed = linear(weights, f"{name}.mlp.wo", activated(kind, both[:, :width]) * both[:, width:])
    return norm(weights, f"{name}.mlp.layernorm", fed + attended, eps)


def hidden_states(
    weights: Weights, ids_S: Tensor, types_S: Tensor, config: JinaBertConfig | JinaBertQkConfig
) -> list[Tensor]:
    """The embeddings and the states after each layer, each (S, D)."""
    states = weights["bert.embeddings.word_embeddings.weight"][ids_S]
    states = states + weights["bert.embeddings.token_type_embeddings.weight"][types_S]
    found = [norm(weights, "bert.embeddings.LayerNorm", states, config.layer_norm_eps)]
    for number in range(config.num_hidden_layers):
        found.append(layer(weights, f"bert.encoder.layer.{number}", found[-1], config))
    return found


def masked_lm_logits(weights: Weights, states_SD: Tensor, eps: float) -> Tensor:
    dense = functional.gelu(linear(weights, "cls.predictions.transform.dense", states_SD))
    dense = norm(weights, "cls.predictions.transform.LayerNorm", dense, eps)
    return dense @ weights["bert.embeddings.word_embeddings.weight"].t() + weights["cls.predictions.bias"]


def score(weights: Weights, states_SD: Tensor) -> Tensor:
    """The reranker's: a classifier on the pooled first state."""
    return linear(weights, "classifier", torch.tanh(linear(weights, "bert.pooler.dense", states_SD[:1])))

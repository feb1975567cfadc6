"""The cost of a model: parameters and floating-point operations; memory.py has the bytes.

FLOPs as counted by Kaplan et al. 2020, arXiv:2001.08361, section 2.1 (two for a multiply-add, backward twice the
forward), with the attention products and the vocabulary projection counted where they are actually computed.

Shapes: T packed tokens, B sequences, M predicted tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.models.attention.cross_attention import CrossAttention
from bertkit.models.attention.relative_attention import DistanceAttention
from bertkit.models.attention.self_attention import SelfAttention
from bertkit.models.encoder import Encoder
from bertkit.models.encoder_decoder import EncoderDecoder
from bertkit.models.headed import POOLER, HeadedModel
from bertkit.models.heads import HEAD_KINDS
from bertkit.models.operators.mixture_of_experts import MixtureOfExperts
from bertkit.models.operators.vocabulary import VocabularyHead
from bertkit.models.quantisation.int8 import QuantisedModule
from bertkit.objectives.base import Objective
from bertkit.objectives.forward import read_rows, readers

_BACKWARD_AND_FORWARD = 3
FORWARD_SHARE = 1 / _BACKWARD_AND_FORWARD
"""The forward pass's share of the operations of an update."""
REACHED_SHARE = 0.65
"""The MFU that is assumed when estimating the time of a run."""
CHECKPOINT_BYTES = 3 * 4
"""Bytes per parameter in a checkpoint: a weight and two moments, each float32."""


@dataclass(frozen=True)
class ParameterCount:
    """Number of parameters with the pretraining heads (tied weights once), and of embeddings, encoder and pooler."""

    total: int
    backbone: int


def count_parameters(model: HeadedModel) -> ParameterCount:
    """Counts as published: a quantised weight counts as one, and a family's pooler always counts as backbone.

    Works on the meta device.
    """
    backbone = count_weights(model.encoder)
    if model.encoder.config.pooler_hub_name is not None:
        with torch.device("meta"):
            backbone += count_weights(model.encoder.config.build_pooler(model.encoder.width))
    return ParameterCount(total=count_weights(model), backbone=backbone)


def count_weights(module: nn.Module, *, without: nn.Module | None = None) -> int:
    """Number of weights of a module; shared ones count once, and each counts as one regardless of its bits."""
    left_out = set() if without is None else set(without.modules())
    parts = [part for part in module.modules() if part not in left_out]
    own = {id(weight): weight.numel() for part in parts for weight in part.parameters(recurse=False)}
    return sum(own.values()) + sum(part.num_weights for part in parts if isinstance(part, QuantisedModule))


def sizes_of(lengths_B: Tensor | NDArray[Any]) -> dict[str, float]:
    """The sizes on which `step_flops` depends, of sequences of these lengths."""
    lengths_B = torch.as_tensor(lengths_B).cpu().double()
    squared = float((lengths_B**2).sum())
    return {"tokens": float(lengths_B.sum()), "squared_lengths": squared, "sequences": float(len(lengths_B))}


def training_flops(model: HeadedModel, batches: Sequence[PackedBatch], objectives: Sequence[Objective]) -> float:
    """Floating-point operations of one update over these micro-batches, without last layers that no objective reads."""
    flops = 0.0
    for batch in batches:
        flops += step_flops(
            model,
            **sizes_of(batch.sequences.cu_seqlens_B1.diff()),
            predictions=head_rows(
                objectives,
                methodcaller("count", batch),
                batch.num_tokens,
                batch.num_sequences,
                vocab_size=model.encoder.vocab_size,
            ),
            source_share=1.0 if batch.pairs is None else batch.pairs.source_tokens / batch.num_tokens,
        )
        if batch.lanes is not None:
            flops -= other_direction_flops(model, batch.num_tokens)
        for owner, own in readers(model, objectives):
            index_M = read_rows(owner, own, batch)
            if index_M is not None:
                flops -= unread_flops(owner, batch.num_tokens - index_M.numel())
    return flops


def expected_unread_flops(
    model: HeadedModel, objectives: Sequence[Objective], length: float, predictions: Callable[[Objective], float]
) -> float:
    """The expected `unread_flops` of a sequence, over the model and its companions.

    Args:
        model: with its companions.
        objectives: of the stage.
        length: tokens of the sequence.
        predictions: an objective's number of predictions in it.
    """
    flops = 0.0
    for owner, own in readers(model, objectives):
        declared = [objective.expected_reads(owner, predictions(objective)) for objective in own]
        some = [count for count in declared if count is not None]
        if len(some) == len(declared):
            flops += unread_flops(owner, max(0.0, length - sum(some)))
    return flops


def unread_flops(owner: HeadedModel, tokens: float) -> float:
    """Operations of `step_flops` that are saved in the last layer for this many tokens that no objective reads."""
    weights = sum(_map_weights(part) for part in owner.encoder.selected_token_modules())
    return 2.0 * _BACKWARD_AND_FORWARD * tokens * weights


def other_direction_flops(model: HeadedModel, tokens: float) -> float:
    """Operations of `step_flops` that are saved in lanes, where a model that reads both ways reads each token in one
    direction."""
    if not model.encoder.config.reads_backward:
        return 0.0
    return _BACKWARD_AND_FORWARD * tokens * sum(_map_weights(part) for part in model.encoder.executed_modules())


def head_rows(
    objectives: Sequence[Objective],
    count: Callable[[Objective], float],
    tokens: float,
    sequences: float = 1.0,
    *,
    vocab_size: int,
) -> dict[str, float]:
    """The number of states that each vocabulary or token head reads, by the head's name.

    Args:
        objectives: their heads are counted.
        count: an objective's number of predictions.
        tokens: T.
        sequences: B.
        vocab_size: V.
    """
    rows: dict[str, float] = defaultdict(float)
    for objective in objectives:
        for head in objective.heads:
            if HEAD_KINDS[head] != "sequences":
                rows[head] += objective.head_states(count(objective), tokens, sequences, vocab_size)
    return rows


def predictions_of(head: str, tokens: float) -> dict[str, float]:
    """The `predictions` of `step_flops` for a task's head: a vocabulary head reads all tokens."""
    return {head: tokens} if HEAD_KINDS[head] == "vocabulary" else {}


def step_flops(
    model: HeadedModel,
    *,
    tokens: float,
    squared_lengths: float,
    predictions: float | Mapping[str, float],
    sequences: float,
    source_share: float = 0.5,
) -> float:
    """Floating-point operations of one update.

    The last layer is counted as computed for all tokens. Not counted: maps of relative positions, which are computed
    once per batch, and the second stream of XLNet. A companion is a generator; its vocabulary projection is computed a
    second time, forward only, to sample from it: at the predicted tokens, or at all (`Encoder.scores_all_tokens`).

    Args:
        model: any encoder with heads, and its companions.
        tokens: T.
        squared_lengths: the sum of squared sequence lengths, to which attention's products are proportional.
        predictions: M of each vocabulary head; or per head name, as from `head_rows`: a vocabulary head without
            an entry reads nothing, another token head all tokens.
        sequences: B.
        source_share: share of the tokens that the encoder of an encoder-decoder reads.
    """
    products = _products(
        model,
        tokens=tokens,
        squared_lengths=squared_lengths,
        predictions=predictions,
        sequences=sequences,
        source_share=source_share,
    )
    drawing = 0.0
    for companion in model.named_companions().values():
        products += _products(
            companion, tokens=tokens, squared_lengths=squared_lengths, predictions=predictions, sequences=sequences
        )
        drawing += sum(
            (tokens if companion.encoder.scores_all_tokens else _predictions_of(head, predictions))
            * _vocabulary_weights(companion, head)
            for head in companion.head_names
        )
    return 2.0 * (_BACKWARD_AND_FORWARD * products + drawing)


def _predictions_of(head: str, predictions: float | Mapping[str, float]) -> float:
    return predictions.get(head, 0.0) if isinstance(predictions, Mapping) else predictions


def _products(
    model: HeadedModel,
    *,
    tokens: float,
    squared_lengths: float,
    predictions: float | Mapping[str, float],
    sequences: float,
    source_share: float = 1.0,
) -> float:
    """Multiply-adds of a model's forward pass, without those of its companions."""
    if isinstance(model.encoder, EncoderDecoder):
        products = _products_of_stacks(model.encoder, tokens, squared_lengths, source_share)
    else:
        products = _products_of_stack(model, tokens, squared_lengths)
    for head in model.head_names:
        weights = _map_weights(model.get_submodule(head))
        if HEAD_KINDS[head] == "vocabulary":
            products += _predictions_of(head, predictions) * _vocabulary_weights(model, head)
        elif HEAD_KINDS[head] == "tokens":
            read = predictions.get(head, tokens) if isinstance(predictions, Mapping) else tokens
            products += read * weights + squared_lengths * _pair_products(model.get_submodule(head))
        else:
            pooler = _map_weights(model.get_submodule(POOLER)) if model.plans[head].pooled else 0
            products += sequences * (weights + pooler)
    return products


def _pair_products(head: nn.Module) -> int:
    """Multiply-adds of a head's attention for each pair of tokens: RetroMAE's decoder has one."""
    attentions = (part for part in head.modules() if isinstance(part, SelfAttention))
    return sum(attention.products_per_pair * attention.query.out_features for attention in attentions)


def _products_of_stack(model: HeadedModel, tokens: float, squared_lengths: float) -> float:
    """Multiply-adds of an encoder's layers."""
    attentions = attentions_of(model)
    on_positions = sum(_map_weights(getattr(part, name, None)) for part in attentions for name in part.position_maps)
    linear = sum(_map_weights(part) for part in model.encoder.executed_modules()) - on_positions
    products = linear * tokens
    for attention in attentions:
        pairs = tokens * attention.keys_per_query(squared_lengths / tokens)
        rows = attention.products_per_pair * pairs + attention.products_per_token * tokens
        products += rows * attention.query.out_features
    return products


def _products_of_stacks(stacks: EncoderDecoder, tokens: float, squared_lengths: float, source_share: float) -> float:
    """Multiply-adds of an encoder-decoder's layers: each side's tokens pass through its own layers, and source tokens
    also through the decoder's key and value maps."""
    sides = ((stacks.source_layers, source_share), (stacks.target_layers, 1 - source_share))
    products = 0.0
    for layers, share in sides:
        products += sum(map(_map_weights, layers)) * share * tokens
        for part in (part for layer in layers for part in layer.modules()):
            if isinstance(part, SelfAttention):
                products += part.products_per_pair * share**2 * squared_lengths * part.query.out_features
    if source_share < 1:
        for cross in (part for layer in stacks.target_layers for part in layer.modules()):
            if not isinstance(cross, CrossAttention):
                continue
            of_source = _map_weights(cross.key) + _map_weights(cross.value)
            products += of_source * (2 * source_share - 1) * tokens
            products += 2 * source_share * (1 - source_share) * squared_lengths * cross.query.out_features
    return products


def spared_flops(encoder: Encoder, *, tokens: float, squared_lengths: float, sequences: float) -> float:
    """Operations of `step_flops` that are saved if one token per sequence is read: all of the last layer except keys,
    values and that token's states."""
    layer = encoder.summary_token_layer
    if layer is None:
        return 0.0
    (attention,) = (part for part in layer.modules() if isinstance(part, SelfAttention))
    linear = _map_weights(layer) - _map_weights(attention.key) - _map_weights(attention.value)
    pairs = attention.products_per_pair * attention.query.out_features * (squared_lengths - tokens)
    return 2.0 * _BACKWARD_AND_FORWARD * (linear * (tokens - sequences) + pairs)


def _vocabulary_weights(model: HeadedModel, head: str) -> float:
    """Weights of a vocabulary head, including the output embeddings."""
    module = model.get_submodule(head)
    assert isinstance(module, VocabularyHead)
    return _map_weights(module) + model.encoder.embedding_width * module.output_rows(model.encoder.vocab_size)


def attentions_of(model: HeadedModel) -> list[SelfAttention | DistanceAttention]:
    """All attention modules, shared ones as often as they are applied."""
    parts = (part for executed in model.encoder.executed_modules() for part in executed.modules())
    return [part for part in parts if isinstance(part, SelfAttention | DistanceAttention)]


def _map_weights(module: nn.Module | None) -> int:
    """Weights of all linear maps, including those inside an LSTM; each is one multiply-add per row. Of a mixture of
    experts, those that a row passes through."""
    parts = [] if module is None else list(module.modules())
    linear = sum(part.in_features * part.out_features for part in parts if isinstance(part, nn.Linear))
    lstms = (named for part in parts if isinstance(part, nn.LSTM) for named in part.named_parameters(recurse=False))
    idle = sum(part.idle_weights for part in parts if isinstance(part, MixtureOfExperts))
    return linear - idle + sum(weight.numel() for name, weight in lstms if name.startswith("weight"))

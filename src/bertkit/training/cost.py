"""What a model costs: parameters, floating-point operations, memory.

FLOPs as counted by Kaplan et al. 2020, arXiv:2001.08361, section 2.1 (two for a multiply-add, backward twice the
forward), with the attention products and the vocabulary projection counted where they are really computed.

Shapes: T packed tokens, B sequences, M predicted tokens, D width, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from bertkit.data.batch import PackedBatch
from bertkit.models.attention import SelfAttention
from bertkit.models.pretraining import PretrainingModel

_BACKWARD_AND_FORWARD = 3
_PROBE_SECONDS = 0.3
_ADAM_BYTES = 4 * 4
"""Bytes a parameter takes in training: weight, gradient and two moments, each float32."""


@dataclass(frozen=True)
class ParameterCount:
    """Parameters with the pretraining heads (tied weights once), and of embeddings, encoder and pooler alone."""

    total: int
    backbone: int


def count_parameters(model: PretrainingModel) -> ParameterCount:
    """Counts that can be compared with the published ones; works on the meta device.

    The pooler counts as backbone whether or not an objective trains it, as in the published figures.
    """
    pooler = model.encoder.width * (model.encoder.width + 1)
    return ParameterCount(
        total=sum(parameter.numel() for parameter in model.parameters()),
        backbone=sum(parameter.numel() for parameter in model.encoder.parameters()) + pooler,
    )


def training_flops(model: PretrainingModel, batches: Sequence[PackedBatch]) -> float:
    """Floating-point operations of one update over these micro-batches."""
    return sum(
        step_flops(
            model,
            tokens=batch.num_tokens,
            squared_lengths=float((batch.sequences.cu_seqlens_B1.diff().double() ** 2).sum()),
            predictions=batch.target_id_M.numel(),
            sequences=batch.num_sequences,
        )
        for batch in batches
    )


def step_flops(
    model: PretrainingModel, *, tokens: float, squared_lengths: float, predictions: float, sequences: float
) -> float:
    """Floating-point operations of one update.

    Args:
        model: any encoder with heads.
        tokens: T.
        squared_lengths: the sum of squared sequence lengths, which attention's products grow with.
        predictions: M.
        sequences: B.
    """
    width = model.encoder.width
    linear = sum(part.weight.numel() for part in model.encoder.modules() if isinstance(part, nn.Linear))
    attentions = sum(isinstance(part, SelfAttention) for part in model.encoder.modules())
    forward = 2.0 * linear * tokens + 4.0 * width * attentions * squared_lengths
    if "masked_lm" in model.head_names:
        forward += 2.0 * predictions * width * (width + model.encoder.vocab_size)
    if "next_sentence" in model.head_names:
        forward += 2.0 * sequences * width * (width + 2)
    return _BACKWARD_AND_FORWARD * forward


def measured_peak_flops(device: torch.device, *, bf16: bool) -> float:
    """Floating-point operations a second of a large matrix product on this machine, in the training precision."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    left = torch.ones(1024, 1024, dtype=dtype, device=device)
    right = torch.ones(1024, 1024, dtype=dtype, device=device)

    def synchronise() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    best = 0.0
    ends = time.perf_counter() + _PROBE_SECONDS
    while time.perf_counter() < ends:
        synchronise()
        started = time.perf_counter()
        left @ right
        synchronise()
        best = max(best, 2 * 1024**3 / (time.perf_counter() - started))
    return best


def training_memory_bytes(model: PretrainingModel, *, micro_batch_tokens: int, predictions: float) -> float:
    """A rough estimate: weights, gradients and moments, and the activations of one micro-batch.

    A layer keeps about 20 activations of width D a token for its backward pass (with a feed-forward layer of 4 D); the
    vocabulary projection keeps its logits twice.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    layers = sum(isinstance(part, SelfAttention) for part in model.encoder.modules())
    activations = 4.0 * micro_batch_tokens * model.encoder.width * 20 * layers
    logits = 4.0 * predictions * model.encoder.vocab_size * 2
    return parameters * _ADAM_BYTES + activations + logits

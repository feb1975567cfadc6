"""The peak memory of training, as a sum of named terms; part of `--plan` (plan.py).

Not from a paper: what each term counts follows from what the code keeps in memory; the factors were measured
(docs/results.md, benchmarks/plan_accuracy.py). On a CPU the peak is that of the resident size, on a GPU of allocated
memory.

A process has three peaks one after the other: training a vocabulary, the largest update, and writing a checkpoint. The
terms are those of the largest.

Shapes: T tokens of a micro-batch, M predicted tokens of it, V vocabulary, E width of the embeddings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from bertkit.kernels.attention import HEAD_STEP
from bertkit.models.attention.self_attention import SelfAttention
from bertkit.models.headed import HeadedModel
from bertkit.models.operators.dropout import Dropout
from bertkit.models.operators.matmul import onednn_is_faster
from bertkit.models.operators.vocabulary import logit_bytes_on
from bertkit.training.cost import attentions_of, count_weights
from bertkit.training.cpu_memory import CACHED_PRIMITIVES
from bertkit.training.engine import Engine

MemoryTerms = dict[str, float]
"""Bytes by what they are used for."""

PROGRAM_BYTES = 400e6
"""Bytes of Python, torch and this package, with the text's tokenizer."""
_CUDA_BUILD_BYTES = 450e6
"""Bytes that a build of torch with CUDA takes in addition, also without a GPU: 420 MB after import, 500 MB after an
update (torch 2.14.1, CUDA 13.0)."""
PRIMITIVE_BYTES = 1.0e6
"""Bytes of a compiled matrix product in oneDNN's cache."""
_FEATURE_BYTES = {(False, False): 4.0, (False, True): 4.3, (True, False): 2.2, (True, True): 2.7}
"""Bytes that a layer keeps for its backward pass per input and output of its linear maps, by whether it computes in
bfloat16 and whether it has dropout. Residuals, norms and dropout masks are included in these factors."""
_CUDA_FEATURE_BYTES = 2.0
"""The same in bfloat16 on a GPU: BERT base and large kept 1.8 to 2.0 in a measurement (docs/gpu.md)."""
_EMBEDDING_BYTES = 8.0
"""Bytes that the embeddings keep per token and dimension: their sum, and the dropout mask."""
_INPUT_BYTES = 4.0
"""Bytes per value that a layer reads, which is all that a recomputed layer keeps."""
_LOGIT_COPIES = 3
"""How often the logits exist at the same time, in float32: as logits, probabilities and gradients."""
_CPU = torch.device("cpu")
_TEXT_COPIES = 8
"""Bytes needed per byte of the sample when training a vocabulary."""


def program_memory(engine: Engine) -> MemoryTerms:
    """Memory of a process that does not depend on the model."""
    if engine.device.type != "cpu":
        return {}
    products = CACHED_PRIMITIVES * PRIMITIVE_BYTES if engine.bf16 or onednn_is_faster() else 0.0
    program = PROGRAM_BYTES + (_CUDA_BUILD_BYTES if torch.version.cuda else 0.0)
    return {"program": program, "compiled_products": products}


def training_memory(
    model: HeadedModel,
    *,
    micro_batch_tokens: float,
    sequence_length: float,
    predictions: float,
    bf16: bool,
    state_bytes: float = 8.0,
    recomputed: bool = False,
    device: torch.device = _CPU,
    kernels: bool = False,
) -> MemoryTerms:
    """The terms of a model's largest update.

    Args:
        model: with its companions; can be on the meta device.
        micro_batch_tokens: T.
        sequence_length: mean length of the sequences, to which the size of attention probabilities is proportional.
        predictions: M, over all vocabulary heads.
        bf16: whether matrix products are in bfloat16.
        state_bytes: bytes per parameter in the optimiser.
        recomputed: whether layers keep only their inputs, so that only one layer's intermediates exist at a time.
        device: where it is computed.
        kernels: whether attention goes through the compiled kernel (`compiled_kernels.uses_attention_kernel`).
    """
    models = (model, *model.named_companions().values())
    parameters = count_weights(model)
    drops = any(isinstance(part, Dropout) and part.rate for part in model.modules())
    features = sum(_features(each.encoder.executed_modules()) for each in models)
    cells_of = [_cells(each, sequence_length, bf16=bf16, device=device, kernels=kernels) for each in models]
    cells, inputs = sum(map(sum, cells_of)), 0.0
    if recomputed:
        applied = [layer for each in models for layer in _applied_layers(each)]
        largest = max(_features([layer]) for layer in applied)
        features += largest - sum(_features([layer]) for layer in applied)
        cells = max(max(own, default=0.0) for own in cells_of)
        inputs = sum(_INPUT_BYTES * each.encoder.width * len(_applied_layers(each)) for each in models)
    each_feature = _CUDA_FEATURE_BYTES if bf16 and device.type == "cuda" else _FEATURE_BYTES[bf16, drops]
    activations = micro_batch_tokens * (features * each_feature + inputs)
    activations += micro_batch_tokens * sum(_EMBEDDING_BYTES * each.encoder.width for each in models)
    vocabulary = max((each.encoder.vocab_size for each in models), default=0) if predictions else 0
    embedding = vocabulary * model.encoder.embedding_width
    logits = min(4.0 * predictions * vocabulary, max(logit_bytes_on(device), 4.0 * vocabulary)) * _LOGIT_COPIES
    item = 2.0 if bf16 else 4.0
    return {
        "weights": 4.0 * parameters,
        "gradients": 4.0 * parameters,
        "optimizer": state_bytes * parameters,
        "bf16_weights": 2.0 * parameters if bf16 else 0.0,
        "activations": activations,
        "attention": micro_batch_tokens * item * cells,
        "logits": logits + embedding * item,
    }


def _features(modules: Iterable[nn.Module]) -> int:
    """Number of inputs and outputs of all linear maps."""
    maps = [part for module in modules for part in module.modules() if isinstance(part, nn.Linear)]
    return sum(part.in_features + part.out_features for part in maps)


def _applied_layers(model: HeadedModel) -> list[nn.Module]:
    """The layers that can be recomputed, each as often as tokens pass through it."""
    layers = set(model.encoder.recomputable_layers())
    return [part for module in model.encoder.executed_modules() for part in module.modules() if part in layers]


def _cells(
    model: HeadedModel, sequence_length: float, *, bf16: bool, device: torch.device, kernels: bool
) -> list[float]:
    """Number of values that each attention keeps per token. With dropout: probabilities, mask and their product.
    Without dropout: none in float32, where torch's kernel recomputes them, and the probabilities in bfloat16. GPU
    kernels keep none and redraw dropout; the compiled kernel keeps what was drawn."""
    cells = []
    for attention in attentions_of(model):
        if device.type == "cuda" and isinstance(attention, SelfAttention):
            cells.append(0.0)
            continue
        if kernels and _in_kernel(attention):
            drawn = int(attention.dropout_rate > 0)
            cells.append(drawn * attention.heads * attention.keys_per_query(sequence_length))
            continue
        kept = 3 if attention.dropout_rate else int(bf16 or not isinstance(attention, SelfAttention))
        cells.append(kept * attention.heads * attention.keys_per_query(sequence_length))
    return cells


def _in_kernel(attention: nn.Module) -> bool:
    """Whether the compiled kernel computes this attention: BERT's own, with heads of a supported width."""
    if not isinstance(attention, SelfAttention) or type(attention).mix is not SelfAttention.mix:
        return False
    return attention.query.out_features // attention.heads % HEAD_STEP == 0


def peak_memory(update: Mapping[str, float], *, program: Mapping[str, float], text_bytes: float = 0.0) -> MemoryTerms:
    """The terms of the largest of a process's three peaks.

    Args:
        update: of the largest update, over all models that are trained or kept.
        program: `program_memory`.
        text_bytes: size of the sample on which a vocabulary is trained; 0 if none is trained.
    """
    update = {name: value for name, value in {**program, **update}.items() if value}
    kept = {name: value for name, value in update.items() if name.removeprefix("teacher_") not in _OF_AN_UPDATE}
    # The tensors of a file are copied before they are written; the moments are the largest file.
    writing = {**kept, "checkpoint_copy": update.get("optimizer", 0.0)}
    learning = {name: program[name] for name in ("program",) if name in program}
    learning["vocabulary_sample"] = text_bytes * _TEXT_COPIES
    return max((update, writing, learning), key=lambda terms: sum(terms.values()))


_OF_AN_UPDATE = frozenset({"gradients", "bf16_weights", "activations", "attention", "logits", "vectors"})
"""Terms that are freed at the end of an update."""

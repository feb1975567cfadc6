"""Q-BERT: group-wise weights of two to four bits, with more bits for layers where the loss is more sharply curved.

Shen et al. 2020, arXiv:1909.05840. Each matrix is divided into 128 groups of output neurons; a group of query, key or
value lies within one head. A group has 2^k equally spaced values from its smallest weight to its largest. The layers
with more bits follow from the Hessian of the loss: power iteration finds the largest eigenvalue of a layer's block on
each of several parts of the training data, and the layers are ordered by Omega = |mean| + standard deviation over the
parts; the upper half gets the higher number of bits. Activations and tables have eight bits. Gradients pass through the
rounding unchanged. The result is a directory of packed weights (models/quantisation/low_bit.py).

- Pooler and classifier have eight bits, also in groups.
- A row of a table is a group of its own.
- The eigenvalues are computed on a tenth of the training data, as in the paper, but on no more than a configured
  number of examples: each step of a layer's power iteration costs several passes over them.
- The bits are decided once and stored in the run's qbert.json, from which a resumed run reads them.

Sibling q8bert.py has eight bits everywhere. Shapes: T rows, D inputs, F outputs, G groups.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bertkit.compression.q8bert import (
    FakeQuantEmbedding,
    FakeQuantLinear,
    QuantisationAwareTraining,
    known,
    note_quantisation,
)
from bertkit.data.random import Draw
from bertkit.errors import UsageError
from bertkit.files import read_json, write_json
from bertkit.models.attention.self_attention import SelfAttention
from bertkit.models.encoder import LAYER_NAME
from bertkit.models.headed import HeadedModel
from bertkit.models.operators.matmul import is_plain_linear
from bertkit.models.operators.word_embedding import is_plain_embedding
from bertkit.models.quantisation.int8 import QuantisedEmbedding
from bertkit.models.quantisation.low_bit import LowBitLinear, codes_of, row_groups
from bertkit.models.quantisation.quantised import QUANTISATION, module_names, replace_parts
from bertkit.settings import UnreadKey
from bertkit.training.method import TrainingData

log = logging.getLogger(__name__)

RECORD = "qbert.json"
"""In the run's directory: the bits of each layer, and the sensitivities used."""
OUTSIDE_BITS = 8
"""Bits of weights that are in no layer."""


class QBert(QuantisationAwareTraining):
    """All weights, under simulated low-bit arithmetic; the result has packed weights."""

    name: Literal["qbert"] = "qbert"
    bits: Literal[2, 3, 4, 8, "mixed"] = Field(
        "mixed",
        description="Bits of the layers' weights; mixed: high_bits in the more sensitive half, low_bits elsewhere.",
    )
    low_bits: Literal[2, 3, 4] = Field(2, description="Bits of the weights in the less sensitive layers.")
    high_bits: Literal[3, 4, 8] = Field(3, description="Bits of the weights in the more sensitive layers.")
    groups: int = Field(
        128, ge=1, description="Number of quantisation groups per matrix; at most one per output neuron."
    )
    sensitivity_share: float = Field(
        0.1, gt=0, le=1, description="Share of the training examples used to estimate the Hessian."
    )
    sensitivity_examples: int = Field(128, ge=2, description="Maximum number of these examples, whatever the share.")
    sensitivity_parts: int = Field(
        4, ge=2, description="Number of parts that these examples are divided into; Omega is computed over the parts."
    )
    sensitivity_iterations: int = Field(20, ge=1, description="Maximum number of power-iteration steps.")
    sensitivity_tolerance: float = Field(
        0.01, gt=0, description="A power iteration stops when its eigenvalue changes by less than this share."
    )

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if self.bits != "mixed":
            why = f"method.bits is {self.bits} for all layers"
            for name in type(self).model_fields:
                if name in ("low_bits", "high_bits") or name.startswith("sensitivity_"):
                    yield UnreadKey(name, why, "write bits: mixed")

    @model_validator(mode="after")
    def _ordered(self) -> QBert:
        if self.low_bits >= self.high_bits:
            raise ValueError(f"low_bits ({self.low_bits}) must be lower than high_bits ({self.high_bits})")
        return self

    def check_model(self, model: HeadedModel) -> None:
        if not layer_maps(model):
            raise UsageError(
                f"method.name: qbert sets the bits of each layer, but {model.encoder.config.model_type} has no layers"
                " of its own; use q8bert"
            )

    def prepare(self, model: HeadedModel, seed: int, data: TrainingData | None = None) -> HeadedModel:
        """As in `Method`; mixed bits are measured on the training data.

        Raises:
            UsageError: the model has no layers of its own, or mixed bits are requested without data.
        """
        self.check_model(model)
        layers = layer_maps(super().prepare(model, seed))
        path = None if data is None or data.directory is None else data.directory / RECORD
        if path is not None and path.exists():
            record = read_json(path)
        else:
            record = self._decide_bits(model, layers, seed, data)
            if path is not None:
                write_json(path, record)
        _log(record)
        bits_by_map = {part: bits for maps, bits in zip(layers, record["bits"], strict=True) for part in maps}
        maps = [part for part in model.modules() if is_plain_linear(part)]
        groups = {part: groups_of(model, part, self.groups) for part in maps}

        def fake(_name: str, part: nn.Module) -> nn.Module | None:
            if isinstance(part, nn.Linear) and part in groups:
                bits = bits_by_map.get(part, OUTSIDE_BITS)
                return FakeQuantGroupLinear(part, self.activation_bits, group_F=groups[part], weight_bits=bits)
            return FakeQuantEmbedding(part, by_row=True) if is_plain_embedding(part) else None

        replace_parts(model, fake)
        return model

    def _decide_bits(
        self, model: HeadedModel, layers: Sequence[Sequence[nn.Linear]], seed: int, data: TrainingData | None
    ) -> dict[str, Any]:
        """The bits of each layer, and the sensitivities used."""
        common = {"groups": self.groups, "embedding_bits": 8, "outside_bits": OUTSIDE_BITS}
        if self.bits != "mixed":
            return {"bits": [self.bits] * len(layers), **common}
        if data is None:
            raise UsageError("method.bits: mixed bits are measured on training data, and there are none; give a number")
        eigenvalues = self._eigenvalues(model, layers, seed, data)
        omega = [abs(float(np.mean(found))) + float(np.std(found)) for found in eigenvalues]
        sensitive = set(sorted(range(len(layers)), key=lambda layer: -omega[layer])[: -(-len(layers) // 2)])
        bits = [self.high_bits if layer in sensitive else self.low_bits for layer in range(len(layers))]
        return {"bits": bits, "omega": omega, "eigenvalues": eigenvalues, **common}

    def _eigenvalues(
        self, model: HeadedModel, layers: Sequence[Sequence[nn.Linear]], seed: int, data: TrainingData
    ) -> list[list[float]]:
        """The largest eigenvalue of each layer on each part of the data."""
        items = data.features.num_examples
        count = min(items, max(2, min(self.sensitivity_examples, round(self.sensitivity_share * items))))
        chosen = Draw(seed, "qbert").permuted("sensitivity", np.arange(count), size=items, epoch=0)
        parts = np.array_split(chosen, min(self.sensitivity_parts, count))
        log.info("sensitivity of %d layers, on %d examples in %d parts", len(layers), count, len(parts))
        weights = [[part.weight for part in maps] for maps in layers]
        model.eval().to(data.engine.device)
        trained = {parameter: parameter.requires_grad for parameter in model.parameters()}
        for parameter in model.parameters():
            parameter.requires_grad_(any(parameter is each for own in weights for each in own))
        found: list[list[float]] = [[] for _ in layers]
        # Only this attention backend supports second derivatives.
        with sdpa_kernel(SDPBackend.MATH):
            for number, part in enumerate(parts):
                batch = data.features.batch(np.sort(part)).to(data.engine.device)
                loss = data.task.loss(model, model.states(data.task.head, batch.packed), batch)
                mean = loss.sum / max(1, data.task.count(batch))
                for layer, value in enumerate(
                    top_eigenvalues(mean, weights, self.sensitivity_iterations, self.sensitivity_tolerance, seed=number)
                ):
                    found[layer].append(value)
        for parameter, requires in trained.items():
            parameter.requires_grad_(requires)
        return found

    def results(self, model: HeadedModel, directory: Path) -> dict[str, Any]:
        """The table of bits."""
        path = directory / RECORD
        return {"quantisation": read_json(path)} if path.exists() else {}

    def finish(self, model: HeadedModel) -> None:
        """Replace the trained weights with packed weights."""

        def packed(_name: str, part: nn.Module) -> nn.Module | None:
            if isinstance(part, FakeQuantGroupLinear):
                return part.packed()
            return QuantisedEmbedding.of(part) if isinstance(part, FakeQuantEmbedding) else None

        owners = (model, *model.named_companions().values())
        bits = [
            {hub: part.weight_bits for part, hub in _hub_names(owner).items() if isinstance(part, FakeQuantGroupLinear)}
            for owner in owners
        ]
        replace_parts(model, packed)
        note_quantisation(
            model,
            format="packed",
            weights="equal steps between a group's smallest and largest",
            activations="thresholds of training",
            activation_bits=self.activation_bits,
        )
        for owner, own in zip(owners, bits, strict=True):
            owner.extras[QUANTISATION]["bits"] = own


class FakeQuantGroupLinear(FakeQuantLinear):
    """A linear map that simulates a small set of values for each group of its weights.

    Args:
        linear: source of the weights.
        bits: bits of the input.
        group_F: the group of each output.
        weight_bits: bits of a weight.
    """

    def __init__(self, linear: nn.Linear, bits: int, *, group_F: Tensor, weight_bits: int) -> None:
        super().__init__(linear, bits, requantised=False)
        self.register_buffer("group_F", group_F.to(linear.weight.device), persistent=False)
        self.weight_bits = weight_bits

    group_F: Tensor

    def rounded_weight(self) -> Tensor:
        code_FD, low_G, step_G = codes_of(self.weight.detach(), self.group_F, self.weight_bits)
        return code_FD * step_G[self.group_F, None] + low_G[self.group_F, None]

    def packed(self) -> LowBitLinear:
        """The same map with packed weights."""
        limit = known(self.input_threshold)
        return LowBitLinear.of(self, self.group_F.cpu(), self.weight_bits, limit, activation_bits=self.bits)


def layer_maps(model: HeadedModel) -> list[list[nn.Linear]]:
    """The linear maps of each layer."""
    found: dict[int, list[nn.Linear]] = {}
    for name, part in model.named_modules():
        match = LAYER_NAME.match(name)
        if match and isinstance(part, nn.Linear):
            found.setdefault(int(match[1]), []).append(part)
    return [found[number] for number in sorted(found)]


def groups_of(model: HeadedModel, linear: nn.Linear, groups: int) -> Tensor:
    """The group of each output, (F,); a group of queries, keys or values never spans two heads."""
    heads = 1
    for part in model.modules():
        if isinstance(part, SelfAttention) and any(linear is each for each in (part.query, part.key, part.value)):
            heads = part.heads if linear.out_features % part.heads == 0 else 1
    return row_groups(linear.out_features, groups, heads)


def _hub_names(model: HeadedModel) -> dict[nn.Module, str]:
    names = {name for name, _ in model.named_modules() if name.startswith("companions.")}
    known_names = module_names(model, model.hub_form().names, without=names)
    return {model.get_submodule(name): hub for name, hub in known_names.items()}


def top_eigenvalues(
    loss: Tensor, blocks: Sequence[Sequence[Tensor]], iterations: int, tolerance: float, *, seed: int
) -> list[float]:
    """The eigenvalue of largest magnitude of each block of the Hessian, by power iteration.

    Args:
        loss: a scalar with its graph.
        blocks: parameters, one block per eigenvalue.
        iterations: maximum number of products with the Hessian for each.
        tolerance: the iteration ends when the eigenvalue's relative change is smaller.
        seed: for the initial vectors.
    """
    gradients = torch.autograd.grad(loss, [each for block in blocks for each in block], create_graph=True)
    found, first = [], 0
    for block in blocks:
        own, first = gradients[first : first + len(block)], first + len(block)
        generator = torch.Generator().manual_seed(seed)
        vector = _unit([torch.randn(each.shape, generator=generator).to(each.device) for each in block])
        value = 0.0
        for _ in range(iterations):
            along = torch.stack([(gradient * part).sum() for gradient, part in zip(own, vector, strict=True)]).sum()
            product = torch.autograd.grad(along, list(block), retain_graph=True)
            before, value = value, float(sum((a * b).sum() for a, b in zip(product, vector, strict=True)))
            if float(_norm(product)) == 0 or abs(value - before) <= tolerance * abs(value):
                break
            vector = _unit(product)
        found.append(value)
    return found


def _norm(parts: Sequence[Tensor]) -> Tensor:
    norm: Tensor = torch.stack([part.square().sum() for part in parts]).sum().sqrt()
    return norm


def _unit(parts: Sequence[Tensor]) -> list[Tensor]:
    norm = _norm(parts)
    return [part / norm for part in parts]


def _log(record: dict[str, Any]) -> None:
    omega = record.get("omega")
    for layer, bits in enumerate(record["bits"]):
        log.info("layer %d: %d bits%s", layer, bits, f" (Omega {omega[layer]:.3g})" if omega else "")
    log.info(
        "%d groups per matrix; embeddings %d bits, pooler and classifier %d",
        *(record["groups"], record["embedding_bits"], record["outside_bits"]),
    )

"""Quantised linear maps and tables in a model: inserts them, and restores them from a model directory.

Not from a paper. int8.py, calibrated.py and low_bit.py define the modules. `quantise` converts any model to eight bits;
compression/q8bert.py and qbert.py convert the models that they train.

config.json describes the quantisation under `quantization_config`; the tensors of a quantised module replace its
`weight` in the file.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bertkit.errors import DataError
from bertkit.models.attention.projection import Projection, project_separately
from bertkit.models.attention.self_attention import SelfAttention
from bertkit.models.headed import HeadedModel
from bertkit.models.layers import FeedForward
from bertkit.models.operators.matmul import is_plain_linear
from bertkit.models.operators.word_embedding import is_plain_embedding
from bertkit.models.quantisation.calibrated import (
    INPUT_FACTOR,
    INPUT_RANGE,
    CalibratedLinear,
    CalibratedProjection,
    InputRange,
    check_calibration,
    feed_forward_of,
    smoothing_factors,
)
from bertkit.models.quantisation.int8 import (
    INPUT_THRESHOLD,
    OUTPUT_THRESHOLD,
    SCALE,
    WEIGHT,
    JointProjection,
    QuantisedEmbedding,
    QuantisedLinear,
    QuantisedModule,
    StaticQuantisedLinear,
)
from bertkit.models.quantisation.low_bit import LowBitLinear
from bertkit.models.weights import Names, to_hub_names

QUANTISATION = "quantization_config"
"""Key of config.json, one of a model's `extras`: whether and how its weights are quantised."""
METHOD = "bertkit"
"""The value of its `quant_method`."""
_LEAVES = (WEIGHT, SCALE, INPUT_THRESHOLD, OUTPUT_THRESHOLD, INPUT_RANGE, INPUT_FACTOR, *LowBitLinear.LEAVES)


def quantise(model: HeadedModel, ranges: Mapping[str, InputRange] | None = None) -> list[str]:
    """Replace all linear maps and tables with int8 ones; returns their names.

    Args:
        model: changed in place.
        ranges: fixed input ranges of maps, by name; the other maps quantise each row by its own range.
    """
    model.extras[QUANTISATION] = {
        "quant_method": METHOD,
        "format": "int8",
        "weights": "a scale an output, a scale a row of a table",
        "activations": "ranges of a text, by row where there is none" if ranges else "by row",
        "activation_bits": 8,
    }
    fixed = _calibrated(model, ranges or {})
    return replace_parts(model, lambda name, part: fixed.get(name) or _quantised(part))


def _calibrated(model: nn.Module, ranges: Mapping[str, InputRange]) -> dict[str, CalibratedLinear]:
    """The maps whose inputs have a range. Maps that read the same input share smoothing factors; the input of a
    feed-forward layer's outer map has none."""
    parts = {name: part for name in ranges if is_plain_linear(part := model.get_submodule(name))}
    readers, unsmoothed = {part: [part] for part in parts.values()}, set()
    for owner in model.modules():
        if isinstance(owner, SelfAttention):
            together: list[nn.Linear] = [each for each in (owner.query, owner.key, owner.value) if each in readers]
            readers |= dict.fromkeys(together, together)
        elif type(owner) is FeedForward:
            unsmoothed.add(owner.outer)

    def made(name: str, part: nn.Linear) -> CalibratedLinear:
        if part in unsmoothed:
            return CalibratedLinear.calibrated(part, ranges[name], torch.ones(part.in_features))
        factors_D = smoothing_factors(ranges[name], [each.weight for each in readers[part]])
        return CalibratedLinear.calibrated(part, ranges[name], factors_D)

    return {name: made(name, part) for name, part in parts.items()}


def _quantised(part: nn.Module) -> nn.Module | None:
    if is_plain_linear(part):
        return QuantisedLinear.of(part)
    return QuantisedEmbedding.of(part) if is_plain_embedding(part) else None


def replace_parts(model: nn.Module, replacement: Callable[[str, nn.Module], nn.Module | None]) -> list[str]:
    """Replace modules with others, shared ones only once; returns the names of those that were replaced.

    Args:
        model: changed in place.
        replacement: from name and module to the new module; None: keep the old one.
    """
    found = {name: replacement(name, part) for name, part in model.named_modules() if name}
    changed = {model.get_submodule(name): new for name, new in found.items() if new is not None}
    for parent in list(model.modules()):
        for child, part in list(parent.named_children()):
            if part in changed:
                setattr(parent, child, changed[part])
    join_maps(model)
    return [name for name, new in found.items() if new is not None]


def join_maps(model: nn.Module) -> None:
    """Set how maps are combined: attentions with int8 maps compute queries, keys and values in one product, all others
    separately; feed-forward layers with fixed ranges keep their inner states in bytes."""
    for part in model.modules():
        if isinstance(part, SelfAttention):
            part.projection = _joint_projection([part.query, part.key, part.value])
        elif type(part) is FeedForward:
            part.at_once = feed_forward_of(part)


def _joint_projection(maps: list[nn.Linear]) -> Projection:
    kinds = {(type(each), each.bias is None) for each in maps}
    if len(kinds) == 1 and type(maps[0]) is QuantisedLinear:
        return JointProjection()
    if len(kinds) == 1 and all(isinstance(each, CalibratedLinear) for each in maps):
        return CalibratedProjection()
    return project_separately


def with_float_maps(model: HeadedModel) -> HeadedModel:
    """A model whose linear maps multiply floats, with the same weights: a copy, or the model itself if none is
    quantised. Fixed input ranges do not clip its inputs."""
    if not is_quantised(model):
        return model
    copied = copy.deepcopy(model)
    replace_parts(copied, lambda name, part: _in_floats(part))
    return copied


@torch.no_grad()
def _in_floats(part: nn.Module) -> nn.Linear | None:
    if not isinstance(part, QuantisedModule) or not isinstance(part, nn.Linear):
        return None
    made = nn.Linear(part.in_features, part.out_features, bias=part.bias is not None, device=part.weight.device)
    made.weight.copy_(part.weight)
    if part.bias is not None:
        made.bias.copy_(part.bias)
    return made


def is_quantised(model: nn.Module) -> bool:
    """Whether any part of the model is quantised."""
    return any(isinstance(part, QuantisedModule) for part in model.modules())


def restructure(model: nn.Module, tensors: Mapping[str, Tensor], names: Names, settings: Mapping[str, Any]) -> None:
    """Give a model the modules of a quantised file; their weights are loaded afterwards.

    Args:
        model: as built by its family, on any device.
        tensors: tensors of the file.
        names: from the model's modules to the file's.
        settings: QUANTISATION in config.json.

    Raises:
        DataError: the settings are damaged, or do not match the tensors.
    """
    in_file = module_names(model, names)
    bits, bits_by_map = settings.get("activation_bits", 8), settings.get("bits", {})
    if bits not in range(2, 9) or not isinstance(bits_by_map, Mapping):
        raise DataError(
            f"{QUANTISATION}: activation_bits is {bits!r} and bits is {bits_by_map!r}; expected a number from 2 to 8,"
            " and numbers by the names of linear maps; export the model again"
        )

    def made(name: str, part: nn.Module) -> nn.Module | None:
        prefix = in_file.get(name, name)
        own = {leaf: tensors[full] for leaf in _LEAVES if (full := f"{prefix}.{leaf}") in tensors}
        if isinstance(part, nn.Linear) and LowBitLinear.PACKED in own:
            return LowBitLinear.like(part, own, bits_by_map.get(prefix), activation_bits=bits)
        if WEIGHT not in own or SCALE not in own:
            return None
        scales = own[SCALE].numel()
        if isinstance(part, nn.Embedding):
            return QuantisedEmbedding(part.num_embeddings, part.embedding_dim, scales=scales)
        assert isinstance(part, nn.Linear)
        sizes = (part.in_features, part.out_features)
        if INPUT_RANGE in own and INPUT_FACTOR in own:
            check_calibration(f"{prefix}.{INPUT_RANGE}", own[INPUT_RANGE], own[INPUT_FACTOR])
            return CalibratedLinear(*sizes, bias=part.bias is not None)
        if INPUT_THRESHOLD not in own:
            return QuantisedLinear(*sizes, bias=part.bias is not None, scales=scales)
        return StaticQuantisedLinear(
            *sizes, bias=part.bias is not None, scales=scales, bits=bits, requantised=OUTPUT_THRESHOLD in own
        )

    replace_parts(model, made)


def with_plain_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A file's tensors, with those of quantised weights also under the names of plain weights."""
    quantised = (f".{WEIGHT}", f".{LowBitLinear.PACKED}")
    plain = {f"{name.rpartition('.')[0]}.weight": tensors[name] for name in tensors if name.endswith(quantised)}
    return {**tensors, **plain}


def module_names(model: nn.Module, names: Names, *, without: Collection[str] = ()) -> dict[str, str]:
    """The names of linear maps and tables in a file, by their names here; those in `without` are left out."""
    kinds = (nn.Linear, nn.Embedding)
    parts = [name for name, part in model.named_modules() if isinstance(part, kinds) and name not in without]
    full = to_hub_names((f"{name}.weight" for name in parts), names)
    return {key.removesuffix(".weight"): value.removesuffix(".weight") for key, value in full.items()}

"""Quantised linear maps and tables in a model: putting them in, and reading a directory that has them.

Nothing here follows a paper. int8.py and low_bit.py compute; `quantise` converts any model to eight bits,
compression/q8bert.py and qbert.py convert what they trained.

config.json describes the quantisation under `quantization_config`; the tensors of a quantised module replace its
`weight` in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn

from bertkit.errors import DataError
from bertkit.models.attention import SelfAttention, project_separately
from bertkit.models.headed import HeadedModel
from bertkit.models.int8 import (
    INPUT_THRESHOLD,
    OUTPUT_THRESHOLD,
    SCALE,
    WEIGHT,
    JointProjection,
    QuantisedEmbedding,
    QuantisedLinear,
    QuantisedModule,
    StaticLinear,
)
from bertkit.models.low_bit import LowBitLinear
from bertkit.models.weights import Names, to_hub_names

QUANTISATION = "quantization_config"
"""Key of config.json, one of a model's `extras`: that and how its weights are quantised."""
METHOD = "bertkit"
"""Its `quant_method`."""
_LEAVES = (WEIGHT, SCALE, INPUT_THRESHOLD, OUTPUT_THRESHOLD, *LowBitLinear.LEAVES)


def quantise(model: HeadedModel) -> list[str]:
    """Replace all linear maps and tables by int8 ones; returns their names."""
    model.extras[QUANTISATION] = {
        "quant_method": METHOD,
        "format": "int8",
        "weights": "a scale an output, a scale a row of a table",
        "activations": "by row",
        "activation_bits": 8,
    }
    return replace_parts(model, lambda _, part: _quantised(part))


def _quantised(part: nn.Module) -> nn.Module | None:
    if type(part) is nn.Linear:
        return QuantisedLinear.of(part)
    return QuantisedEmbedding.of(part) if type(part) is nn.Embedding else None


def replace_parts(model: nn.Module, replacement: Callable[[str, nn.Module], nn.Module | None]) -> list[str]:
    """Replace modules by others, shared ones once; returns the names of those that were replaced.

    Args:
        model: whose modules they are.
        replacement: from name and module to what replaces it; None: it stays.
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
    """Have attentions with maps quantised by rows compute queries, keys and values in one product, all others
    separately."""
    for part in model.modules():
        if isinstance(part, SelfAttention):
            maps = [each for each in (part.query, part.key, part.value) if type(each) is QuantisedLinear]
            alike = len(maps) == 3 and len({each.bias is None for each in maps}) == 1
            part.projection = JointProjection() if alike else project_separately


def is_quantised(model: nn.Module) -> bool:
    """Whether any part is."""
    return any(isinstance(part, QuantisedModule) for part in model.modules())


def restructure(model: nn.Module, tensors: Mapping[str, Tensor], names: Names, settings: Mapping[str, Any]) -> None:
    """Give a model the modules of a quantised file; their numbers are loaded afterwards.

    Args:
        model: as its family builds it, on any device.
        tensors: of the file.
        names: from the model's modules to the file's.
        settings: QUANTISATION of config.json.

    Raises:
        DataError: the settings are damaged, or do not match the tensors.
    """
    in_file = module_names(model, names)
    bits, bits_by_map = settings.get("activation_bits", 8), settings.get("bits", {})
    if bits not in range(2, 9) or not isinstance(bits_by_map, Mapping):
        raise DataError(
            f"{QUANTISATION}: activation_bits is {bits!r} and bits {bits_by_map!r}; expected a number from 2 to 8, and"
            " numbers by the names of linear maps; export the model again"
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
        if INPUT_THRESHOLD not in own:
            return QuantisedLinear(*sizes, bias=part.bias is not None, scales=scales)
        return StaticLinear(
            *sizes, bias=part.bias is not None, scales=scales, bits=bits, requantised=OUTPUT_THRESHOLD in own
        )

    replace_parts(model, made)


def with_plain_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A file's tensors, those of quantised weights under the names of plain ones, too."""
    quantised = (f".{WEIGHT}", f".{LowBitLinear.PACKED}")
    plain = {f"{name.rpartition('.')[0]}.weight": tensors[name] for name in tensors if name.endswith(quantised)}
    return {**tensors, **plain}


def module_names(model: nn.Module, names: Names, *, without: Collection[str] = ()) -> dict[str, str]:
    """What a file calls the linear maps and tables, by their names here; `without` are left out."""
    kinds = (nn.Linear, nn.Embedding)
    parts = [name for name, part in model.named_modules() if isinstance(part, kinds) and name not in without]
    full = to_hub_names((f"{name}.weight" for name in parts), names)
    return {key.removesuffix(".weight"): value.removesuffix(".weight") for key, value in full.items()}

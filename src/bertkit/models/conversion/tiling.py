"""Initialises a larger model from a smaller one: weights are repeated in both directions, layers along the depth.

Warner et al. 2024, ModernBERT, arXiv:2412.13663, section 2.2 (the large model starts from the base one), as in its
released initialization.py and model.py, mode tile_weights_from_middle. The smaller matrix is in the middle of the
larger one and is repeated to all sides. Queries, keys, values and the two halves of a gated map are tiled separately.
Layer i is a copy of layer round(i * L / L'), at most L - 1, as in Rae et al. 2021, Gopher, arXiv:2112.11446. The norm
after the last layer keeps its initial weights, as in the released code. Sibling convert.py keeps all sizes.

Shapes: L layers of the smaller model, L' of the larger.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bertkit.errors import UsageError
from bertkit.models.encoder import EncoderConfig, in_layer
from bertkit.models.headed import HeadedModel

_LAST_NORM = "encoder.norm."
_TABLES = ("encoder.word.", "encoder.embeddings.")
"""Tables, whose rows (tokens or positions) are not repeated."""


def tiled(model: HeadedModel, config: EncoderConfig, *, seed: int) -> HeadedModel:
    """A model with this configuration, initialised from the smaller one.

    Args:
        model: the trained model, of the same family; it is not changed.
        config: settings with at least as many layers, and no size smaller.
        seed: seed of the weights that have no counterpart.

    Raises:
        UsageError: the family differs or cannot be tiled, a size is smaller, or the heads differ in width.
    """
    old = model.encoder.config
    parts = config.tiled_parts
    if old.model_type != config.model_type or parts is None:
        raise UsageError(
            f"init_tiling: a model of family {config.model_type!r} cannot be initialised from one of family"
            f" {old.model_type!r}; only bert and modernbert are supported, each from its own family"
        )
    before, after = old.model_dump(), config.model_dump()
    widths = [each["hidden_size"] / each["num_attention_heads"] for each in (before, after)]
    if widths[0] != widths[1]:
        raise UsageError(
            f"init_tiling: heads are {widths[0]:g} wide in the initial model, but {widths[1]:g} in the recipe's; set"
            " model.num_attention_heads to keep their width"
        )
    new = HeadedModel(config.build(model.encoder.vocab_size), model.heads, labels=model.labels)
    new.initialise(seed)
    new.extras = dict(model.extras)
    source = dict(model.named_parameters())
    depths = [int(each["num_hidden_layers"]) for each in (before, after)]
    if depths[1] < depths[0]:
        raise UsageError(
            f"init_tiling: the initial model has {depths[0]} layers, but the recipe's has {depths[1]}; set"
            f" model.num_hidden_layers to at least {depths[0]}"
        )
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            origin = _origin(name, depths[0], depths[1])
            if origin in source and not name.startswith(_LAST_NORM):
                parameter.copy_(_tiled(source[origin], parameter, name, _matrices(name, parts)))
    return new.eval()


def _origin(name: str, before: int, after: int) -> str:
    """The smaller model's parameter from which this one is initialised."""
    # From twice the depth on, the last one is rounded up to L.
    return in_layer(name, lambda number: min(round(number * before / after), before - 1))


def _matrices(name: str, parts: Mapping[str, int]) -> int:
    """Number of matrices stacked in a linear map."""
    return next((count for part, count in parts.items() if f".{part}." in name), 1)


def _tiled(small: Tensor, large: Tensor, name: str, matrices: int) -> Tensor:
    is_table = name.startswith(_TABLES) and small.dim() > 1
    shrinks = any(a > b for a, b in zip(small.shape, large.shape, strict=True))
    if shrinks or (is_table and small.shape[0] != large.shape[0]):
        raise UsageError(
            f"init_tiling: {name.removeprefix('encoder.')} is {' x '.join(map(str, small.shape))} in the initial model"
            f", but {' x '.join(map(str, large.shape))} in the recipe's; sizes can only grow, tables keep their rows"
        )
    rows = [part.index_select(0, _places(part.shape[0], large.shape[0] // matrices)) for part in small.chunk(matrices)]
    found = torch.cat(rows)
    for axis in range(1, small.dim()):
        found = found.index_select(axis, _places(small.shape[axis], large.shape[axis]))
    return found


def _places(small: int, large: int) -> Tensor:
    """The row of `small` for each row of `large`: all of them once in the middle, then repeated to both sides."""
    return (torch.arange(large) - (large - small) // 2) % small

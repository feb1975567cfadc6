"""Progressive stacking: a deeper model out of a shallow one, by copying its layers on top.

Gong et al. 2019, "Efficient training of BERT by progressively stacking", ICML, section 4: layer i + L of the new model
starts as layer i of the old one, norms included; embeddings and heads are kept. (No arXiv id; the rule is also that of
the released double.py.)
"""

from __future__ import annotations

import re

import torch

from bertkit.errors import UsageError
from bertkit.models.encoder import EncoderConfig
from bertkit.models.headed import HeadedModel

_LAYER = re.compile(r"^encoder\.layers\.(\d+)\.")


def stacked(model: HeadedModel, config: EncoderConfig) -> HeadedModel:
    """A model of this configuration whose layers are the given model's, over and over.

    Args:
        model: the shallow one; stays as it is.
        config: the same but for `num_hidden_layers`.

    Raises:
        UsageError: if more than the number of layers differs, the number shrinks, or the layers are not alike.
    """
    old = model.encoder.config
    before, after = _depth(old), _depth(config)
    if old.model_copy(update={"num_hidden_layers": after}) != config or after < before:
        raise UsageError(
            f"model.num_hidden_layers can grow inside a run ({before} to {after} here); no other setting of the model"
            " can change"
        )
    grown = HeadedModel(config.build(model.encoder.vocab_size), _heads(model), labels=model.labels)
    source = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in grown.named_parameters():
            layer = _LAYER.match(name)
            origin = name
            if layer is not None:
                origin = _LAYER.sub(f"encoder.layers.{int(layer[1]) % before}.", name)
            if origin not in source or source[origin].shape != parameter.shape:
                raise UsageError(
                    f"model.family {config.model_type!r} cannot be stacked: {name} has no counterpart in the shallow"
                    " model"
                )
            parameter.copy_(source[origin])
    return grown.to(next(model.parameters()).device)


def _depth(config: EncoderConfig) -> int:
    return int(config.model_dump()["num_hidden_layers"])


def _heads(model: HeadedModel) -> list[str]:
    return [*model.head_names, *(["pooler"] if model.has_pooler else [])]

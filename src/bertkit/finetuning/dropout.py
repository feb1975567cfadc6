"""Dropout rates of a fine-tuned model, in place of those of its config.json: the section `dropout` of a recipe.

Released code often fine-tunes with other rates than those in the checkpoint: fairseq's RoBERTa has no dropout before
its classifier (examples/roberta, `pooler_dropout` 0); the Hub's class has that of the layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from bertkit.errors import UsageError
from bertkit.models.encoder import EncoderConfig
from bertkit.models.headed import HeadedModel

_KEY = "dropout"
_TRIED = (0.25, 0.75)
"""Two rates that show whether anything reads a key."""


def with_dropout(config: EncoderConfig, rates: Mapping[str, float], heads: Collection[str]) -> EncoderConfig:
    """The model's configuration with these rates.

    Args:
        config: of the initial model.
        rates: by the names of the family's settings.
        heads: of the task; those that the model does not have are ignored.

    Raises:
        UsageError: the family has no such rate, or nothing in the model with these heads uses it.
    """
    try:
        changed = config.with_dropout(rates)
    except ValueError as error:
        raise UsageError(f"{_KEY}.{error}") from error
    for name in rates:
        with_one, with_other = (_numbers(config.with_dropout({name: rate}), heads) for rate in _TRIED)
        if with_one == with_other:
            raise UsageError(f"{_KEY}.{name}: this model does not use this rate on this task; leave it out")
    return changed


def _numbers(config: EncoderConfig, heads: Collection[str]) -> list[dict[str, Any]]:
    """The numbers, including dropout rates, stored in each part of the model; no weights are allocated."""
    with torch.device("meta"):
        model = HeadedModel(config.build(vocab_size=8), [head for head in heads if head in config.all_heads()])
    return [{name: value for name, value in vars(part).items() if isinstance(value, float)} for part in model.modules()]

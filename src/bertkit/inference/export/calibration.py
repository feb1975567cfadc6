"""Ranges of a model's activations on a text, for int8 maps whose inputs have a fixed range.

Not from a paper: each line of the text is read by the encoder as one sequence until there are enough tokens. The
minimum and maximum of every channel of every linear map's input are kept (models/quantisation/calibrated.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from bertkit.errors import DataError, UsageError
from bertkit.inference.export.agreement import LONGEST_PROBE, packed, real_rows
from bertkit.models.headed import HeadedModel
from bertkit.models.quantisation.calibrated import InputRange
from bertkit.text.lines import read_lines
from bertkit.text.tokenizer import Tokenizer

ENOUGH_TOKENS = 50_000
_LINES = 32
"""Per batch."""


@torch.no_grad()
def input_ranges(model: HeadedModel, tokenizer: Tokenizer, text: Path) -> dict[str, InputRange]:
    """The range of the inputs of each linear map of the encoder, by the map's name.

    Args:
        model: in evaluation mode.
        tokenizer: its tokenizer.
        text: one sequence per line, like the texts the model will be used on; may be compressed.

    Raises:
        DataError: the text cannot be read, or contains no tokens.
        UsageError: the model has no linear maps, or a decoder.
    """
    maps = {f"encoder.{name}": part for name, part in model.encoder.named_modules() if isinstance(part, nn.Linear)}
    if not maps or model.encoder.config.is_encoder_decoder:
        raise UsageError(
            f"--calibrate: the input ranges of a model of the family {model.encoder.config.model_type} cannot be"
            " measured on lines of text; leave it out"
        )
    found: dict[str, InputRange] = {}
    hooks = [part.register_forward_pre_hook(_observer(name, found)) for name, part in maps.items()]
    tokens = 0
    try:
        waiting = _lines(text)
        while tokens < ENOUGH_TOKENS and (lines := list(islice(waiting, _LINES))):
            rows = real_rows(tokenizer, lines, None, min(model.encoder.max_tokens, LONGEST_PROBE))
            if rows:
                model(packed(model, rows))
            tokens += sum(len(row.ids) for row in rows)
    finally:
        for hook in hooks:
            hook.remove()
    if not tokens:
        raise DataError(f"{text}: contains no text to calibrate on; give lines like those that the model will read")
    return found


def _lines(text: Path) -> Iterator[str]:
    return (line for part in read_lines(text) for line in part if line.strip())


def _observer(name: str, found: dict[str, InputRange]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def observe(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].numel():
            seen = InputRange.of(inputs[0])
            found[name] = found[name].widened(seen) if name in found else seen

    return observe

"""Shared by tests of models against their paper's equations: sizes, random weights, sequences of unequal length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.models.encoder import EncoderConfig
from bertkit.models.files.hub import save_model
from bertkit.models.headed import HeadedModel

VOCABULARY = 97
SIZES: dict[str, Any] = {
    "hidden_size": 42,
    "num_hidden_layers": 3,
    "num_attention_heads": 7,
    "intermediate_size": 51,
    "max_position_embeddings": 37,
}
LENGTHS = [37, 1, 7, 36, 2, 7]
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
EXACT = {"rtol": 1e-9, "atol": 1e-9}
"""In double precision."""


def random_model(
    config: EncoderConfig, vocabulary: int = VOCABULARY, heads: tuple[str, ...] = ("masked_lm",)
) -> HeadedModel:
    """With random weights, large enough that every part matters."""
    model = HeadedModel(config.build(vocabulary), heads)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return model.eval()


def saved_weights(model: HeadedModel, directory: Path) -> dict[str, Tensor]:
    """The tensors of the file, each ready for a gradient."""
    save_model(model, None, directory)
    return {name: tensor.requires_grad_() for name, tensor in load_file(directory / "model.safetensors").items()}


def random_sequences(lengths: list[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def assert_apart(model: HeadedModel, rows: list[list[int]]) -> None:
    """No sequence attends to another: changing the second one's tokens changes only the second one's states."""
    others = [[(token + 1) % VOCABULARY for token in row] if number == 1 else row for number, row in enumerate(rows)]
    states = []
    for each in (rows, others):
        torch.manual_seed(5)
        states.append(model(PackedBatch.from_ids(each)).split([len(row) for row in rows]))
    for number, (before, after) in enumerate(zip(*states, strict=True)):
        assert torch.equal(before, after) == (number != 1)

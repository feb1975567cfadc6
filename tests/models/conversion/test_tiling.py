"""A larger model tiled from a smaller one: the origin of every row and column, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bertkit.errors import UsageError
from bertkit.models.conversion.tiling import tiled
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.modernbert import ModernBertConfig
from bertkit.models.headed import HeadedModel

SMALL: dict[str, Any] = {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 10, "num_hidden_layers": 3}
LARGE: dict[str, Any] = {"hidden_size": 20, "num_attention_heads": 5, "intermediate_size": 17, "num_hidden_layers": 5}
LAYERS = [0, 1, 1, 2, 2]
"""round(i * 3 / 5)."""


def small_model(config: EncoderConfig) -> HeadedModel:
    model = HeadedModel(config.build(31), ["masked_lm"])
    model.initialise(3)
    return model


def repeated(weight: np.ndarray, axis: int, size: int) -> np.ndarray:
    """The weight in the middle of `size` rows or columns, with further copies end to end on both sides."""
    count = weight.shape[axis]
    first = (size - count) // 2
    copies = np.concatenate([weight] * 9, axis=axis)
    return np.take(copies, range(4 * count - first, 4 * count - first + size), axis=axis)


def expected(weight: np.ndarray, shape: tuple[int, ...], halves: bool) -> np.ndarray:
    if halves:
        rows = [repeated(part, 0, shape[0] // 2) for part in np.split(weight, 2)]
        weight = np.concatenate(rows)
    else:
        weight = repeated(weight, 0, shape[0])
    return repeated(weight, 1, shape[1]) if weight.ndim == 2 else weight


@pytest.mark.parametrize("kind", [ModernBertConfig, BertConfig])
def test_weights_are_repeated_from_the_middle_and_layers_drawn_out(kind: type[EncoderConfig]) -> None:
    model = small_model(kind(**SMALL))
    found = tiled(model, kind(**LARGE), seed=5)
    source = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    own = set()
    for name, parameter in found.named_parameters():
        origin = name
        if name.startswith("encoder.layers."):
            words = name.split(".")
            origin = ".".join([*words[:2], str(LAYERS[int(words[2])]), *words[3:]])
        if origin not in source or name.startswith("encoder.norm."):
            own.add(name)
            continue
        wanted = expected(
            source[origin], tuple(parameter.shape), "feed_forward.inner" in name and kind is ModernBertConfig
        )
        np.testing.assert_array_equal(parameter.detach().numpy(), wanted, err_msg=name)
    assert own == ({"encoder.norm.weight"} if kind is ModernBertConfig else set())


@pytest.mark.parametrize(
    ("before", "after", "origins"), [(2, 4, [0, 0, 1, 1]), (1, 3, [0, 0, 0]), (2, 6, [0, 0, 1, 1, 1, 1])]
)
def test_in_a_model_of_twice_the_depth_and_more_no_layer_stays_random(
    before: int, after: int, origins: list[int]
) -> None:
    model = small_model(BertConfig(**{**SMALL, "num_hidden_layers": before}))
    deeper = tiled(model, BertConfig(**{**SMALL, "num_hidden_layers": after}), seed=5)
    source = dict(model.named_parameters())
    for name, parameter in deeper.named_parameters():
        words = name.split(".")
        if words[1] == "layers":
            origin = ".".join([*words[:2], str(origins[int(words[2])]), *words[3:]])
            np.testing.assert_array_equal(parameter.detach().numpy(), source[origin].detach().numpy(), err_msg=name)


def test_a_model_of_the_same_sizes_is_the_same() -> None:
    model = small_model(BertConfig(**SMALL))
    found = dict(tiled(model, BertConfig(**SMALL), seed=5).named_parameters())
    for name, parameter in model.named_parameters():
        np.testing.assert_array_equal(found[name].detach().numpy(), parameter.detach().numpy())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BertConfig(**{**LARGE, "num_attention_heads": 2}), "heads are 4 wide"),
        (BertConfig(**{**LARGE, "num_hidden_layers": 2}), "at least 3"),
        (BertConfig(**{**LARGE, "intermediate_size": 9}), "sizes can only grow"),
        (BertConfig(**LARGE, max_position_embeddings=600), "tables keep their rows"),
        (ModernBertConfig(**LARGE), "cannot be initialised from one of family 'bert'"),
    ],
)
def test_what_cannot_be_tiled_is_refused(config: EncoderConfig, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tiled(small_model(BertConfig(**SMALL)), config, seed=0)

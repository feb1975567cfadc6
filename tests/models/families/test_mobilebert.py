"""MobileBERT's trigrams at the ends of sequences, its teacher, its norms and its initial weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.models.cases.mobilebert import CASES
from tests.models.oracle import make_inputs, make_twins
from tests.models.test_families import TOLERANCE

from bertkit.data.batch import PackedBatch
from bertkit.models.families.mobilebert import MobileBertConfig, with_neighbours
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel

SIZES: dict[str, Any] = {
    "embedding_size": 7,
    "hidden_size": 15,
    "intra_bottleneck_size": 9,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 11,
    "max_position_embeddings": 13,
}


def test_neighbours_are_of_the_same_sequence_and_zero_beyond_its_ends() -> None:
    words_TE = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0]])
    positions_T = torch.tensor([0, 1, 2, 0, 0, 1])
    expected = [[2, 1, 0], [3, 2, 1], [0, 3, 2], [0, 4, 0], [6, 5, 0], [0, 6, 5]]
    assert with_neighbours(words_TE, positions_T).tolist() == expected


@pytest.mark.parametrize("length", [1, 2, 19])
def test_without_padding_the_padding_s_embedding_has_no_say(length: int, tmp_path: Path) -> None:
    """The Hub's class reads it after padded sequences; here a sequence has the same states alone and in a batch."""
    pytest.importorskip("transformers")
    twins = make_twins(CASES[0], "MobileBertForMaskedLM", tmp_path)
    with torch.no_grad():
        twins.oracle.get_input_embeddings().weight[0].fill_(3.0)
        twins.model.encoder.word_embedding.weight[0].fill_(3.0)
    inputs = make_inputs(CASES[0], twins.model, [length])
    logits_TV = twins.model.logits("masked_lm", twins.model(inputs.batch), inputs.batch)
    torch.testing.assert_close(logits_TV, twins.oracle(**inputs.padded).logits[0], **TOLERANCE)


def test_the_teacher_of_the_paper_goes_there_and_back(tmp_path: Path) -> None:
    """Its queries and keys read the states between layers, narrower than those inside, which the Hub cannot express."""
    config = MobileBertConfig(
        **{**SIZES, "hidden_size": 9, "intra_bottleneck_size": 15},
        key_query_shared_bottleneck=False,
        normalization_type="layer_norm",
        num_feedforward_networks=1,
    )
    model = HeadedModel(config.build(31), ("masked_lm",)).eval()
    model.initialise(seed=1)
    save_model(model, None, tmp_path)
    again, report = load_model(tmp_path)
    assert again.encoder.config == config
    assert not report.missing
    assert not report.unexpected
    batch = PackedBatch.from_ids([[5, 6, 7], [8]])
    assert torch.equal(model(batch), again(batch))


def test_norms_without_normalising_begin_as_the_identity() -> None:
    model = HeadedModel(MobileBertConfig(**SIZES).build(31, pad_id=4), ("masked_lm",))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(9.0)
    model.initialise(seed=1)
    layer = model.encoder.get_submodule("layers.0")
    hidden_TF = torch.randn(3, 9)
    assert torch.equal(layer.get_submodule("attention_norm")(hidden_TF), hidden_TF)
    assert not model.encoder.word_embedding.weight[4].any()
    assert model.encoder.word_embedding.weight[5].any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"num_attention_heads": 5}, "inside a layer"), ({"embedding_size": 16}, "embedding_size")],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MobileBertConfig(**{**SIZES, **settings})

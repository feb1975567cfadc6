"""ALBERT's sharing modes, and its published shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.models.families.albert import AlbertConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.heads import HeadShape
from bertkit.models.operators.dropout import Dropout

VOCABULARY = 61
SIZES = {
    "embedding_size": 13,
    "hidden_size": 21,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 29,
    "max_position_embeddings": 17,
}
BATCH = PackedBatch.from_ids([[5, 6, 7, 8, 9], [11], [12, 13, 60]])


def random_model(**settings: Any) -> HeadedModel:
    model = HeadedModel(AlbertConfig(**{**SIZES, **settings}).build(VOCABULARY), ("masked_lm", "sentence_order"))
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model.eval()


@pytest.mark.parametrize("sharing", ["all", "attention", "ffn", "none"])
@pytest.mark.parametrize("inner", [1, 2])
def test_every_sharing_mode_gives_the_same_numbers_in_the_original_class(
    sharing: str, inner: int, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    model = random_model(sharing=sharing, inner_group_num=inner)
    save_model(model, None, tmp_path)
    oracle, information = transformers.AlbertForPreTraining.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager"
    )
    assert not information["missing_keys"]
    assert not information["unexpected_keys"]
    expected = oracle.eval()(torch.tensor([[5, 6, 7, 8, 9]]))
    hidden_TD = model(PackedBatch.from_ids([[5, 6, 7, 8, 9]]))
    torch.testing.assert_close(model.masked_lm_logits(hidden_TD), expected.prediction_logits[0], rtol=1e-5, atol=1e-5)

    again, report = load_model(tmp_path)
    assert again.encoder.config == model.encoder.config
    assert not report.missing
    assert not report.unexpected
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_shared_weights_are_one_weight() -> None:
    """The first layer's attention is used by every layer if attention is shared, and by one layer if not."""
    for sharing, changed in (("attention", 3), ("none", 1)):
        model = random_model(sharing=sharing)
        applied = [attention for attention, _ in model.encoder.applications()]
        first = applied[0].attention.query.weight
        assert sum(attention.attention.query.weight is first for attention in applied) == changed


def test_layers_fall_into_groups_as_in_the_released_code() -> None:
    encoder = AlbertConfig(**{**SIZES, "num_hidden_layers": 7, "num_hidden_groups": 3}).build(VOCABULARY)
    groups = [[group[0] for group in encoder.attentions].index(attention) for attention, _ in encoder.applications()]
    assert groups == [int(layer / (7 / 3)) for layer in range(7)]


def test_copies_that_disagree_are_refused(tmp_path: Path) -> None:
    save_model(random_model(sharing="ffn"), None, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["albert.encoder.albert_layer_groups.2.albert_layers.0.ffn.bias"] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"layer_groups\.2\.albert_layers\.0\.ffn\.bias differs from .*groups\.0\."):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sharing": "ffn", "num_hidden_groups": 2}, "num_hidden_groups"),
        ({"num_hidden_groups": 4}, "num_hidden_layers"),
        ({"num_attention_heads": 4}, "multiple"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AlbertConfig(**{**SIZES, **settings})


def test_sentence_order_has_no_dropout_in_pretraining() -> None:
    """As get_sentence_order_output of the released run_pretraining.py; a task's classifier has dropout."""
    heads = AlbertConfig(classifier_dropout_prob=0.5).heads()
    shape = HeadShape(width=12, embedding_width=7, vocab_size=31, num_labels=2)
    rates = {
        name: [part.rate for part in heads[name].build(shape).modules() if isinstance(part, Dropout)]
        for name in ("sentence_order", "sequence_classification")
    }
    assert rates == {"sentence_order": [0.0], "sequence_classification": [0.5]}

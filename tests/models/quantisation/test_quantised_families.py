"""Every family in eight bits: all its maps and tables are quantised, its outputs are close, and its files reload
identically."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from tests.models.oracle import Case, all_cases, make_inputs, make_twins
from torch import nn

from bertkit.data.batch import PackedBatch
from bertkit.inference.export.agreement import RoughAgreement
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.bilstm import BilstmConfig
from bertkit.models.feature_lstm import FeatureLstmConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.quantisation.int8 import QuantisedModule
from bertkit.models.quantisation.quantised import quantise

BOUND = 0.02
"""A root mean square as a share of the floats'; weights are large, states like a norm's output."""
CASES = {case.name: case for case in all_cases()}
FAMILIES = list({case.config_class: case for case in reversed(CASES.values())}.values())
# Weights that several layers share or that the Hub stores twice are in the file once.
VARIANTS = [CASES["albert-groups"], CASES["mobilebert-no-bottleneck"], CASES["longformer-types"]]


def left_as_they_are(model: nn.Module) -> list[str]:
    kinds = (nn.Linear, nn.Embedding)
    return [
        name
        for name, part in model.named_modules()
        if isinstance(part, kinds) and not isinstance(part, QuantisedModule)
    ]


@pytest.mark.parametrize("case", [*FAMILIES, *VARIANTS], ids=str)
def test_a_family_is_near_its_floats_and_loads_as_it_was(case: Case, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    head, architecture = list(case.heads.items())[-1]
    plain = make_twins(case, architecture, tmp_path / "floats").model
    whole = copy.deepcopy(plain)
    quantise(whole)
    assert left_as_they_are(whole) == []
    save_model(whole, None, tmp_path / "int8")
    again, report = load_model(tmp_path / "int8")
    assert (report.missing, report.unexpected, report.tied) == ([], [], [])
    assert again.head_names == (head,)
    batch = make_inputs(case, plain).batch
    agreement = RoughAgreement(BOUND)
    with torch.no_grad():
        expected, found, read = (model(batch) for model in (plain, whole, again))
        logits = [model.logits(head, states, batch) for model, states in ((plain, expected), (again, read))]
    agreement.add("hidden", expected, read)
    agreement.add(head, *logits)
    assert agreement.errors == []
    assert all(difference > 0 for difference in agreement.differences.values())
    assert torch.equal(found, read)


@pytest.mark.parametrize(
    "config",
    [
        BilstmConfig(embedding_size=9, lstm_width=7, classifier_width=11, lstm_layers=1),
        FeatureLstmConfig(
            base=BertConfig(hidden_size=14, num_hidden_layers=2, num_attention_heads=2, intermediate_size=23),
            layers="last",
            lstm_width=7,
            lstm_layers=1,
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_an_lstm_stays_in_floats_amid_eight_bits(config: EncoderConfig, tmp_path: Path) -> None:
    model = HeadedModel(config.build(41), ("sequence_classification",)).eval()
    model.initialise(5)
    batch = PackedBatch.from_ids([[2, 9, 31, 7, 3], [2, 3], [2, 14, 15, 9, 26, 5, 3]])
    with torch.no_grad():
        expected = model(batch)
        assert quantise(model)
        found = model(batch)
    assert 0 < float((found - expected).norm() / expected.norm()) < BOUND
    assert left_as_they_are(model) == []
    lstms = [part for part in model.modules() if isinstance(part, nn.LSTM)]
    assert {parameter.dtype for part in lstms for parameter in part.parameters()} == {torch.float32}
    save_model(model, None, tmp_path)
    again, report = load_model(tmp_path)
    assert (report.missing, report.unexpected) == ([], [])
    with torch.no_grad():
        assert torch.equal(again(batch), found)

"""ESM-2's token dropout, stored frequencies and files. Everything else is in test_families.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.cases.esm import CASES
from tests.models.oracle import make_oracle
from tests.tasks.tiny_task import tiny_tokenizer

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.models.families.esm import Esm, EsmConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel

pytest.importorskip("transformers")

MASK, PAD = 4, 5
ROWS = [[0, MASK, 7, MASK, MASK, 8, 2], [9, 10, 11], [MASK, 12], [0, 6, MASK, 9, 1, 1, 1, 1, 2]]
WEIGHTS = "model.safetensors"


def saved_oracle(directory: Path) -> Any:
    without_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    oracle = make_oracle(replace(CASES[0], settings={**CASES[0].settings, **without_dropout}), "EsmForMaskedLM")
    oracle.save_pretrained(directory)
    return oracle


def expected_logits(oracle: Any, rows: list[list[int]]) -> torch.Tensor:
    parts = [oracle(torch.tensor([row]), attention_mask=torch.ones(1, len(row))).logits[0] for row in rows]
    return torch.cat(parts)


def test_each_sequence_is_scaled_by_its_own_share_of_masks(tmp_path: Path) -> None:
    oracle = saved_oracle(tmp_path)
    model, _ = load_model(tmp_path)
    for train in (False, True):
        model.train(train), oracle.train(train)
        batch = PackedBatch.from_ids(ROWS)
        torch.testing.assert_close(
            model.logits("masked_lm", model(batch), batch), expected_logits(oracle, ROWS), rtol=1e-5, atol=1e-5
        )


def test_the_scale_is_that_of_a_plain_loop() -> None:
    encoder = EsmConfig(num_hidden_layers=1).with_mask(MASK).build(33, pad_id=PAD)
    assert isinstance(encoder, Esm)
    rows = [*ROWS, [MASK], [7, PAD, MASK]]  # padding inside a sequence is not counted, as in the released code
    scales = []
    for row in rows:
        tokens = sum(token != PAD for token in row)
        masks = row.count(MASK)
        share = 0.88 / (1 - masks / tokens) if masks < tokens else 0.0  # the released code divides by zero
        scales += [0.0 if token == MASK else share for token in row]
    found_T1 = encoder._scale_T1(PackedBatch.from_ids(rows))
    torch.testing.assert_close(found_T1[:, 0], torch.tensor(scales))


def test_stored_frequencies_are_kept_and_not_computed_again(tmp_path: Path) -> None:
    """Published files have them rounded to half precision, once in each layer; transformers 5 has them once."""
    oracle = saved_oracle(tmp_path / "theirs")
    rounded = oracle.esm.rotary_embeddings.inv_freq.half().float()
    oracle.esm.rotary_embeddings.inv_freq.copy_(rounded)
    tensors = load_file(tmp_path / "theirs" / WEIGHTS)
    tensors = {name: each for name, each in tensors.items() if "inv_freq" not in name}
    layers = {f"esm.encoder.layer.{n}.attention.self.rotary_embeddings.inv_freq": rounded.clone() for n in range(2)}
    table = {"esm.embeddings.position_embeddings.weight": torch.ones(19, 42)}  # in the published files, and unused
    save_file({**tensors, **layers, **table}, tmp_path / "theirs" / WEIGHTS, metadata={"format": "pt"})
    row = [list(range(6, 25))]
    for directory in (tmp_path / "theirs", tmp_path / "ours"):
        model, report = load_model(directory)
        assert not report.missing
        assert not report.unexpected
        batch = PackedBatch.from_ids(row)
        logits = model.logits("masked_lm", model(batch), batch)
        torch.testing.assert_close(logits, expected_logits(oracle, row), rtol=1e-5, atol=1e-5)
        save_model(model, None, tmp_path / "ours")
    written = load_file(tmp_path / "ours" / WEIGHTS)
    assert all(torch.equal(written[name], rounded) for name in layers)
    again = type(oracle).from_pretrained(tmp_path / "ours", local_files_only=True)
    assert torch.equal(again.esm.rotary_embeddings.inv_freq, rounded)


def test_a_new_model_has_normal_weights_and_the_frequencies_of_its_base() -> None:
    with torch.device("meta"):
        model = HeadedModel(EsmConfig(rope_theta=100.0).build(33), ("masked_lm",))
    model = model.to_empty(device="cpu")
    model.initialise(seed=3)
    assert isinstance(model.encoder, Esm)
    torch.testing.assert_close(model.encoder.inv_freq, 100.0 ** -(torch.arange(0, 16, 2) / 16))
    weights = {name: each for name, each in model.named_parameters() if each.ndim == 2 and each.numel() > 9000}
    assert len(weights) == 6 * 6 + 2
    for name, weight in weights.items():
        assert weight.std().item() == pytest.approx(0.02, rel=0.05), name
    assert not model.encoder.word.weight[1].any()  # the padding's


def test_the_mask_is_that_of_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    model = HeadedModel(EsmConfig(num_hidden_layers=1).build(tokenizer.vocab_size, pad_id=0), ("masked_lm",))
    model.initialise(seed=3)
    model.encoder.read_vocabulary(tokenizer)
    save_model(model, tokenizer, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["mask_token_id"] == tokenizer.mask_id != 32
    again, _ = load_model(tmp_path)
    batch = PackedBatch.from_ids([[2, tokenizer.mask_id, 7, 3]])
    assert torch.equal(model.eval()(batch), again(batch))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"position_embedding_type": "absolute"}, "ESM-1b and ESM-1v have a table of positions"),
        ({"emb_layer_norm_before": True}, "only ESM-2 is supported"),
        ({"is_folding_model": True}, "ESMFold is not supported"),
    ],
)
def test_other_models_of_this_type_are_refused_by_name(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    saved_oracle(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(DataError, match=message):
        load_model(tmp_path)

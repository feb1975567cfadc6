"""Transformer-XL against the paper's equations, its memory, its adaptive softmax, and its files."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from tests.models.families import reference_transformer_xl as reference
from torch import Tensor

from bertkit.data.batch import BatchLanes, PackedBatch
from bertkit.errors import UsageError
from bertkit.models.families.transformer_xl import TransformerXlConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.operators.adaptive_softmax import AdaptiveDecoder, AdaptiveProjection
from bertkit.models.operators.vocabulary import VocabularyProjection
from bertkit.models.recorder import Recorder

VOCABULARY = 61
SIZES: dict[str, Any] = {
    "hidden_size": 30,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "intermediate_size": 20,
    "initializer_range": 0.3,
    "cutoffs": (20, 35),
}


def model_of(**settings: Any) -> HeadedModel:
    config = TransformerXlConfig.model_validate({**SIZES, **settings})
    model = HeadedModel(config.build(VOCABULARY), ["causal_lm"])
    model.initialise(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.2)
    return model.eval()


def ids_of(count: int, length: int, seed: int = 0) -> list[list[int]]:
    return torch.randint(VOCABULARY, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()


def in_lanes(ids: list[list[int]], reused: int) -> PackedBatch:
    count = len(ids)
    lanes = BatchLanes(torch.arange(count), torch.zeros(count, dtype=torch.bool), reused)
    return replace(PackedBatch.from_ids(ids), lanes=lanes)


@pytest.mark.parametrize("clamp", [-1, 3])
def test_three_segments_equal_the_equations(clamp: int) -> None:
    """With a memory of the previous segments, and gradients through the last of them."""
    model = model_of(mem_len=7, clamp_len=clamp)
    weights = dict(model.encoder.named_parameters())
    memory = [[torch.zeros(0, 30) for _ in range(2)] for _ in range(2)]
    state = None
    for segment in range(3):
        ids = ids_of(2, 4, seed=segment)
        hidden_TD, state = model.encoder.forward_carried(in_lanes(ids, 4), state)
        expected = []
        for lane in range(2):
            states, inputs = reference.states(torch.tensor(ids[lane]), memory[lane], weights, 2, 1e-5, clamp)
            expected.append(states)
            memory[lane] = [
                torch.cat([before, now])[-7:].detach() for before, now in zip(memory[lane], inputs, strict=True)
            ]
        torch.testing.assert_close(hidden_TD, torch.cat(expected), rtol=1e-5, atol=1e-5)
        for layer in range(2):
            kept = torch.stack([memory[lane][layer] for lane in range(2)])
            torch.testing.assert_close(state[f"memory.{layer}"], kept, rtol=1e-5, atol=1e-5)
    ours = torch.autograd.grad(hidden_TD.square().mean(), list(weights.values()), allow_unused=True)
    theirs = torch.autograd.grad(torch.cat(expected).square().mean(), list(weights.values()), allow_unused=True)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_two_segments_with_a_memory_equal_one(tmp_path: Path) -> None:
    """With a memory of all previous text, segment boundaries have no effect on any token."""
    model = model_of(mem_len=64)
    (ids,) = ids_of(1, 12)
    whole = model(PackedBatch.from_ids([ids]))
    first, state = model.encoder.forward_carried(in_lanes([ids[:5]], 5), None)
    second, _ = model.encoder.forward_carried(in_lanes([ids[5:]], 7), state)
    # The second layer's memory includes all that its tokens may attend to, since no token attends to later ones.
    torch.testing.assert_close(torch.cat([first, second]), whole, rtol=1e-5, atol=1e-5)


def test_no_token_sees_what_follows_and_no_sequence_another() -> None:
    model = model_of()
    ids = ids_of(1, 9) + ids_of(1, 4, seed=5) + ids_of(1, 6, seed=7)
    batch = PackedBatch.from_ids(ids)
    before = model(batch)
    for place in range(batch.num_tokens):
        changed = batch.ids_T.clone()
        changed[place] = (changed[place] + 1) % VOCABULARY
        after = model(replace(batch, ids_T=changed))
        differs = (before != after).any(dim=1)
        start = [0, 9, 13][(place >= 9) + (place >= 13)]
        end = {0: 9, 9: 13, 13: 19}[start]
        assert differs.tolist() == [place <= token < end for token in range(19)]
    ones = torch.cat([model(PackedBatch.from_ids([one])) for one in ids])
    torch.testing.assert_close(before, ones, rtol=1e-5, atol=1e-5)


def test_recording_attention_changes_nothing() -> None:
    model = model_of()
    batch = PackedBatch.from_ids(ids_of(1, 9) + ids_of(1, 4, seed=5))
    recorder = Recorder(["blocks.1.attn.hook_pattern"])
    torch.testing.assert_close(model(batch, recorder), model(batch), rtol=1e-5, atol=1e-5)
    pattern = recorder.kept["blocks.1.attn.hook_pattern"]
    assert not pattern[0].triu(1).any()


def adaptive(rows: int, *, bias: bool = True) -> tuple[AdaptiveProjection, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).float().requires_grad_()

    projection = AdaptiveProjection(
        drawn(rows, 8), drawn(VOCABULARY, 8), drawn(VOCABULARY), drawn(2, 8), drawn(2), (20, 35, 61)
    )
    return projection, torch.randint(VOCABULARY, (rows,), generator=generator)


def test_the_adaptive_softmax_is_torchs() -> None:
    """torch's class with the same weights: clusters in reverse order, tails that project by a unit matrix."""
    projection, id_M = adaptive(50)
    weight, bias = projection.weight_VE.detach(), projection.bias_V
    assert bias is not None
    torch_softmax = torch.nn.AdaptiveLogSoftmaxWithLoss(8, VOCABULARY, [20, 35], div_value=1.0, head_bias=True)
    with torch.no_grad():
        torch_softmax.head.weight.copy_(torch.cat([weight[:20], projection.entry_KE.flip(0)]))
        torch_softmax.head.bias.copy_(torch.cat([bias[:20], projection.entry_bias_K.flip(0)]))
        for number, (low, high) in enumerate(((20, 35), (35, 61))):
            torch_softmax.tail[number][0].weight.copy_(torch.eye(8))
            torch_softmax.tail[number][1].weight.copy_(weight[low:high])
    without = AdaptiveProjection(
        projection.states_ME,
        projection.weight_VE,
        torch.cat([bias[:20], torch.zeros(41)]),
        projection.entry_KE,
        projection.entry_bias_K,
        projection.ends,
    )  # torch's tails have no bias
    expected, loss = torch_softmax(projection.states_ME, id_M)
    torch.testing.assert_close(without.logits().gather(1, id_M[:, None])[:, 0], expected)
    torch.testing.assert_close(without.cross_entropy(id_M)[0] / 50, loss)
    torch.testing.assert_close(projection.logits().exp().sum(1), torch.ones(50))


def test_its_rows_may_have_weights() -> None:
    projection, id_M = adaptive(40)
    weight_M = torch.rand(40, generator=torch.Generator().manual_seed(2))
    expected = -(weight_M * projection.logits().gather(1, id_M[:, None])[:, 0]).sum()
    torch.testing.assert_close(projection.cross_entropy(id_M, weight_M=weight_M)[0], expected)


def test_its_loss_and_gradient_are_those_of_the_whole_distribution() -> None:
    projection, id_M = adaptive(40)
    leaves = [
        projection.states_ME,
        projection.weight_VE,
        projection.bias_V,
        projection.entry_KE,
        projection.entry_bias_K,
    ]
    loss, correct = projection.cross_entropy(id_M, logit_bytes=1000)
    expected = -projection.logits().gather(1, id_M[:, None]).sum()
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    right = 0
    first = projection._first(projection.states_ME).logits().argmax(1)
    for row, word in enumerate(id_M.tolist()):
        cluster = (word >= 20) + (word >= 35)
        if cluster == 0:
            right += int(first[row]) == word
        else:
            low, high = (20, 35) if cluster == 1 else (35, 61)
            own = projection._words(projection.states_ME, low, high).logits()[row].argmax()
            right += int(first[row]) == 22 - cluster and int(own) + low == word
    assert int(correct) == right


def test_parts_and_rows_are_those_of_the_whole() -> None:
    projection, _ = adaptive(9)
    index = torch.tensor([3, 3, 8])
    torch.testing.assert_close(projection.rows(index).logits(), projection.logits()[index])
    torch.testing.assert_close(projection.part(slice(2, 5)), projection.logits()[2:5])
    with pytest.raises(UsageError, match="cutoffs"):
        projection.divergence(projection)


def test_cutoffs_beyond_the_vocabulary_make_no_cluster() -> None:
    head = AdaptiveDecoder(VOCABULARY, 8, [20, 61, 100])
    assert head.ends == (20, 61)
    plain = AdaptiveDecoder(VOCABULARY, 8, [61]).project(torch.zeros(2, 8), torch.zeros(VOCABULARY, 8))
    assert type(plain) is VocabularyProjection


def test_a_directory_gives_the_same_model_and_has_the_original_names(tmp_path: Path) -> None:
    model = model_of(mem_len=9)
    save_model(model, None, tmp_path)
    loaded, report = load_model(tmp_path)
    assert not report.missing
    assert loaded.encoder.config == model.encoder.config
    batch = PackedBatch.from_ids(ids_of(2, 5))
    assert torch.equal(loaded(batch), model(batch))
    hidden = model(batch)
    assert torch.equal(loaded.token_logits("causal_lm", hidden), model.token_logits("causal_lm", hidden))
    names = set(load_file(tmp_path / "model.safetensors"))
    expected = (
        "word_emb.emb_layers.0.weight",
        "r_w_bias",
        "layers.1.dec_attn.qkv_net.weight",
        "layers.0.pos_ff.CoreNet.3.bias",
    )
    assert {f"transformer.{name}" for name in expected} <= names
    assert {"crit.out_layers.0.bias", "crit.cluster_weight", "crit.cluster_bias"} <= names
    assert "crit.out_layers.0.weight" not in names
    contents = json.loads((tmp_path / "config.json").read_text())
    head_width = contents["d_model"] // contents["n_head"]
    # The original class has other defaults.
    assert (contents["d_head"], contents["d_embed"], contents["same_length"]) == (
        head_width,
        contents["d_model"],
        False,
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 21, "num_attention_heads": 3}, "even and a multiple"),
        ({"cutoffs": (30, 20)}, "ascending"),
        ({"cutoffs": (0, 20)}, "ascending"),
        ({"mem_len": -1}, "greater than or equal"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TransformerXlConfig.model_validate({**SIZES, **settings})


def test_the_large_released_model_is_refused() -> None:
    with pytest.raises(ValueError, match="div_val is 4"):
        TransformerXlConfig.from_hub({"d_model": 30, "n_head": 5, "div_val": 4})


def test_flops_count_the_clusters_as_often_as_their_words_are_targets() -> None:
    shares = [math.log((rank + 2) / (rank + 1)) / math.log(1001) for rank in range(1000)]
    further = [0] * 50 + [250] * 250 + [700] * 700
    assert sum(shares) == pytest.approx(1)
    expected = 50 + 2 + sum(share * rows for share, rows in zip(shares, further, strict=True))
    assert AdaptiveDecoder(1000, 8, [50, 300]).output_rows(1000) == pytest.approx(expected)
    assert AdaptiveDecoder(1000, 8, []).output_rows(1000) == 1000

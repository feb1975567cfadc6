"""GPT-BERT against a second implementation of its paper; `transformers` has no class for it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models import from_equations
from tests.models.families.reference_gpt_bert import Padded, bucket, hidden_states, logits
from tests.models.from_equations import (
    EXACT,
    LENGTHS,
    TOLERANCE,
    VOCABULARY,
    assert_apart,
    random_model,
    random_sequences,
    saved_weights,
)
from tests.probing.tiny_models import TEXTS, tiny_tokenizer
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError, UsageError
from bertkit.models.conversion.convert import stack_layers
from bertkit.models.conversion.pruning import keep_layers, prune_heads
from bertkit.models.families.gpt_bert import GptBertConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import SCORING_RULE, HeadedModel
from bertkit.models.operators.dropout import Dropout
from bertkit.models.operators.weighted_sum import weighted_sum
from bertkit.models.recorder import Recorder
from bertkit.models.scoring.pseudo_likelihood import score_texts

SIZES: dict[str, Any] = {**from_equations.SIZES, "position_bucket_size": 8}


def made(vocabulary: int = VOCABULARY, heads: tuple[str, ...] = ("masked_lm",), **changes: Any) -> HeadedModel:
    return random_model(GptBertConfig.model_validate({**SIZES, **changes}), vocabulary, heads)


def config_of(model: HeadedModel) -> GptBertConfig:
    assert isinstance(model.encoder.config, GptBertConfig)
    return model.encoder.config


@pytest.mark.parametrize("causal", [False, True])
def test_states_logits_and_gradients_are_those_of_the_papers_equations(causal: bool, tmp_path: Path) -> None:
    # In double precision, because rounding differences in single precision depend on the processor.
    model, rows = made().double(), random_sequences()
    weights, padded = saved_weights(model, tmp_path), Padded.of(rows, [causal] * len(rows))
    batch = PackedBatch.from_ids(rows, causal=causal)
    points = ["blocks.0.hook_resid_pre", *(f"blocks.{layer}.hook_resid_post" for layer in range(3))]
    recorder = Recorder(points)
    ours_TV = model.masked_lm_logits(model(batch, recorder))
    states = hidden_states(weights, padded, config_of(model))
    for point, expected_BSD in zip(points, states, strict=True):
        torch.testing.assert_close(recorder.kept[point], expected_BSD[padded.real_BS], **EXACT)
    theirs_TV = logits(weights, states[-1], config_of(model).layer_norm_eps)[padded.real_BS]
    torch.testing.assert_close(ours_TV, theirs_TV, **EXACT)

    ours_TV.square().mean().backward()
    theirs_TV.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    compared = model.hub_form().to_hub({name: each for name, each in gradients.items() if each is not None})
    assert set(compared) == set(weights)
    for name, gradient in compared.items():
        torch.testing.assert_close(gradient, weights[name].grad, **EXACT, msg=name)


@pytest.mark.parametrize(("buckets", "longest"), [(32, 512), (8, 37), (32, 128), (33, 300), (6, 19), (32, 12), (2, 16)])
def test_distances_fall_into_the_papers_buckets_and_none_outside_the_table(buckets: int, longest: int) -> None:
    rows = GptBertConfig(position_bucket_size=buckets, max_position_embeddings=longest).rows(longest)
    assert rows.tolist() == [
        bucket(distance, buckets, longest) + buckets - 1 for distance in range(1 - longest, longest)
    ]
    assert rows.min() >= 0
    assert rows.max() < 2 * buckets - 1


def test_no_longest_sequence_has_a_distance_outside_the_table() -> None:
    for buckets in range(2, 65, 3):
        for longest in range(2, 1200, 13):
            rows = GptBertConfig(position_bucket_size=buckets, max_position_embeddings=longest).rows(longest)
            assert 0 <= rows[0] <= rows[-1] < 2 * buckets - 1, (buckets, longest)


def test_weights_are_drawn_as_in_the_released_code() -> None:
    model = HeadedModel(
        GptBertConfig(hidden_size=120, num_attention_heads=4, intermediate_size=300, num_hidden_layers=4).build(500),
        ("masked_lm", "sequence_classification"),
    )
    model.initialise(0)
    std = math.sqrt(2 / (5 * 120))
    # A normal distribution truncated at two standard deviations is narrower.
    narrowed = 0.8796
    for name, parameter in model.named_parameters():
        if name.endswith(".bias") or name == "masked_lm.bias":
            assert not parameter.any(), name
        elif "relative_norm" in name:
            assert (parameter == 1).all()
        elif ".mixing." in name:
            assert parameter.tolist() == [0.0] * (parameter.numel() - 1) + [1.0]
        elif parameter.numel() > 5000:
            wanted = std / math.sqrt(2 * (int(name.split(".")[2]) + 1)) if ".feed_forward." in name else std
            assert parameter.std().item() == pytest.approx(narrowed * wanted, rel=0.03), name
            assert parameter.abs().max() <= 2 * wanted + 1e-6, name


def test_at_its_start_a_sum_behind_a_sub_layer_is_the_sub_layers_output() -> None:
    model = HeadedModel(GptBertConfig(**SIZES).build(VOCABULARY), ("masked_lm",))
    model.initialise(0)
    recorder = Recorder(["blocks.1.hook_resid_pre", "blocks.1.hook_attn_out", "blocks.1.hook_resid_mid"])
    model.eval()(PackedBatch.from_ids(random_sequences()), recorder)
    before, added, behind = recorder.kept.values()
    torch.testing.assert_close(before + added, behind, rtol=0, atol=0)


def test_a_weighted_sum_and_its_gradients_are_the_plain_ones() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(4, generator=generator, requires_grad=True)
    states = [torch.randn(5, 3, generator=generator, requires_grad=True) for _ in range(4)]
    plain = (weight[:, None, None] * torch.stack(states)).sum(dim=0)
    ours = weighted_sum(weight, states)
    torch.testing.assert_close(ours, plain)
    gradients = [torch.autograd.grad(each.square().sum(), [weight, *states]) for each in (ours, plain)]
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other)
    doubles = [each.detach().double().requires_grad_() for each in (weight, *states)]
    assert torch.autograd.gradcheck(lambda first, *rest: weighted_sum(first, rest), doubles, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda first, *rest: weighted_sum(first, rest), doubles)


def test_what_is_saved_is_read_back_with_every_head(tmp_path: Path) -> None:
    model = made(heads=tuple(GptBertConfig(**SIZES).heads()))
    save_model(model, None, tmp_path)
    again, report = load_model(tmp_path)
    assert not report.missing
    assert not report.unexpected
    assert again.head_names == model.head_names
    assert again.encoder.config == model.encoder.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    contents = json.loads((tmp_path / "config.json").read_text())
    assert contents["num_layers"] == contents["num_hidden_layers"] == 3


@pytest.mark.parametrize("head", list(GptBertConfig().heads()))
def test_a_head_alone_is_known_by_its_class(head: str, tmp_path: Path) -> None:
    model = made(heads=(head,))
    save_model(model, None, tmp_path)
    again, _ = load_model(tmp_path)
    assert again.head_names == (head,)
    (architecture,) = json.loads((tmp_path / "config.json").read_text())["architectures"]
    assert architecture.startswith("GPTBERTFor")


@pytest.mark.parametrize(
    "spelling",
    [
        {"model_type": "gpt_bert"},
        {"model_type": "", "architectures": ["GPTBERTForCausalLM"]},
        {"architectures": ["GPTBERTForMaskedLM"], "num_hidden_layers": None},
    ],
)
def test_a_published_checkpoint_is_read(spelling: dict[str, Any], tmp_path: Path) -> None:
    """Their files contain the tied matrix twice and tables of distances; some name no type and have a different
    depth."""
    model = made()
    save_model(model, None, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.nonlinearity.5.weight"] = tensors["model.embedding.word_embedding.weight"].clone()
    tensors["model.attention_layers.0.position_indices"] = torch.zeros(3, 3)
    save_file(tensors, tmp_path / "model.safetensors")
    contents = json.loads((tmp_path / "config.json").read_text())
    del contents["model_type"]
    contents |= spelling
    (tmp_path / "config.json").write_text(json.dumps({key: each for key, each in contents.items() if each is not None}))
    again, report = load_model(tmp_path)
    assert not report.missing
    assert not report.unexpected
    batch = PackedBatch.from_ids(random_sequences())
    assert torch.equal(again(batch), model(batch))


def test_a_config_without_a_type_or_a_class_is_refused(tmp_path: Path) -> None:
    save_model(made(), None, tmp_path)
    contents = json.loads((tmp_path / "config.json").read_text())
    del contents["model_type"], contents["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(contents))
    with pytest.raises(DataError, match="model_type is None"):
        load_model(tmp_path)


def test_a_classifier_has_the_released_evaluations_layers(tmp_path: Path) -> None:
    model = made(heads=("sequence_classification",))
    weights = saved_weights(model, tmp_path)
    batch = PackedBatch.from_ids(random_sequences())
    ours = model.logits("sequence_classification", model(batch), batch)
    norm = nn.LayerNorm(42, eps=1e-5, elementwise_affine=False)
    first_BD = model(batch)[batch.first_token_B]
    dense = norm(first_BD) @ weights["classifier.nonlinearity.1.weight"].t() + weights["classifier.nonlinearity.1.bias"]
    dense = norm(nn.functional.gelu(dense))
    plain = dense @ weights["classifier.nonlinearity.5.weight"].t() + weights["classifier.nonlinearity.5.bias"]
    torch.testing.assert_close(ours, plain, **TOLERANCE)


def test_dropout_rates_are_those_of_the_released_code() -> None:
    model = HeadedModel(
        GptBertConfig(**SIZES, hidden_dropout_prob=0.05, attention_probs_dropout_prob=0.2).build(9), ("masked_lm",)
    )
    rates = {name: part.rate for name, part in model.named_modules() if isinstance(part, Dropout)}
    assert {name for name, rate in rates.items() if rate == 0.2} == {
        f"encoder.layers.{layer}.attention.{part}"
        for layer in range(3)
        for part in ("position_dropout", "output_dropout")
    }
    assert {name for name, rate in rates.items() if rate == 0.05} == {
        "encoder.embeddings.dropout",
        "masked_lm.transform.dropout",
        *(f"encoder.layers.{layer}.feed_forward.dropout" for layer in range(3)),
    }
    assert all(layer.attention.dropout_rate == 0.2 for layer in model.encoder.get_submodule("layers"))


@pytest.mark.parametrize("training", [False, True])
def test_one_sequence_never_sees_another(training: bool) -> None:
    model, rows = made().train(training), random_sequences([5, 17, 9, 37, 9])
    assert_apart(model, rows)


def test_recording_changes_nothing_and_every_point_has_its_shape() -> None:
    model, batch = made(), PackedBatch.from_ids(random_sequences())
    recorder = Recorder(["blocks.1.attn.hook_pattern", "blocks.1.attn.hook_z", "blocks.1.attn.hook_gate"])
    torch.testing.assert_close(model(batch, recorder), model(batch), **TOLERANCE)
    pattern_BNSS = recorder.kept["blocks.1.attn.hook_pattern"]
    for number, length in enumerate(LENGTHS):
        sums = pattern_BNSS[number].sum(dim=-1)
        torch.testing.assert_close(sums[:, :length], torch.ones_like(sums[:, :length]))
        assert not sums[:, length:].any()
    assert recorder.kept["blocks.1.attn.hook_z"].shape == (sum(LENGTHS), 7, 6)
    assert recorder.kept["blocks.1.attn.hook_gate"].shape == (sum(LENGTHS), 42)


@pytest.mark.parametrize("rule", ["masked_next_token", "encoder_left_to_right"])
def test_texts_are_scored_as_by_the_papers_equations(rule: str, tmp_path: Path) -> None:
    """Masked and predicted from the previous state, one copy at a time; or left to right in one pass."""
    tokenizer = tiny_tokenizer()
    model = made(tokenizer.vocab_size, max_position_embeddings=128)
    model.extras[SCORING_RULE] = "masked_next_token"
    weights, config = saved_weights(model, tmp_path), config_of(model)

    def log_p_SV(ids: list[int]) -> Tensor:
        padded = Padded.of([ids], [rule == "encoder_left_to_right"])
        states_BSD = hidden_states(weights, padded, config)[-1]
        return logits(weights, states_BSD, config.layer_norm_eps)[0].log_softmax(-1).detach()

    scores = score_texts(model, tokenizer, TEXTS, rule=None if rule == "masked_next_token" else rule)
    for text, score in zip(TEXTS, scores, strict=True):
        inner = tokenizer.encode_batch([text])[0]
        if rule == "masked_next_token":
            ids = [tokenizer.cls_id, *inner, tokenizer.sep_id]
            copies = [[tokenizer.mask_id if j == place else i for j, i in enumerate(ids)] for place in range(len(ids))]
            expected = [float(log_p_SV(copies[place])[place - 1, ids[place]]) for place in range(1, len(ids) - 1)]
        else:
            ids = [tokenizer.cls_id, *inner]
            whole = log_p_SV(ids)
            expected = [float(whole[place - 1, ids[place]]) for place in range(1, len(ids))]
        np.testing.assert_allclose(score.log_p_N, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(UsageError, match="trained to predict the next token"):
        score_texts(model, tokenizer, TEXTS, rule="original")


def test_what_its_sums_and_norms_forbid_is_refused() -> None:
    model = made()
    with pytest.raises(UsageError, match="a norm over the outputs of all heads"):
        prune_heads(model, {0: [1]})
    with pytest.raises(UsageError, match="keep the first ones"):
        keep_layers(model, [0, 2])
    deeper = GptBertConfig.model_validate({**SIZES, "num_hidden_layers": 6})
    with pytest.raises(UsageError, match="cannot be stacked"):
        stack_layers(model, deeper)


def test_its_first_layers_are_a_model_that_gives_their_states() -> None:
    model, batch = made(), PackedBatch.from_ids(random_sequences())
    recorder = Recorder(["blocks.1.hook_resid_post"])
    model(batch, recorder)
    torch.testing.assert_close(keep_layers(model, [0, 1]).eval()(batch), recorder.kept["blocks.1.hook_resid_post"])


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(ValueError, match="must be a multiple of num_attention_heads"):
        GptBertConfig(hidden_size=40, num_attention_heads=7)

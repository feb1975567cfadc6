"""Layers recomputed in the backward pass: the same bits and less memory, in every family."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.files import sha256_of
from bertkit.models.encoder import Encoder, EncoderConfig, initialise
from bertkit.models.families.bert import BertConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.operators.dropout import Dropout
from bertkit.models.recorder import Recorder
from bertkit.models.registry import FAMILIES
from bertkit.pretraining.arguments import PretrainArguments
from bertkit.pretraining.run import run_pretraining
from bertkit.progress import silent_progress
from bertkit.recipe.resolve import Override
from bertkit.training.activation_checkpointing import RecomputedForward, checkpoint_layers
from bertkit.training.memory import training_memory
from tests.conftest import Outcome
from tests.training.tiny_run import write_recipe

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "embedding_size": 16,
    "d_kv": 8,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
REFUSED = {"elmo", "fast-encoder", "gpt-bert", "mpnet", "t5", "t5-encoder"}


def tiny_encoder(family: str) -> tuple[Encoder, PackedBatch]:
    kind = FAMILIES[family]
    sizes = SIZES | ({"intermediate_size": 128} if family == "openai-gpt" else {})
    config: EncoderConfig = kind(**{name: size for name, size in sizes.items() if name in kind.model_fields})
    encoder = config.build(60)
    initialise(encoder, config, seed=1)
    encoder.finish_initialisation()
    rows = [[5 + (7 * place + row) % 50 for place in range(length)] for row, length in enumerate([9, 14, 6, 14])]
    batch = PackedBatch.from_pairs(rows[:2], rows[2:]) if kind.is_encoder_decoder else PackedBatch.from_ids(rows)
    return encoder.train(), batch


def drop_for(encoder: Encoder, batch: PackedBatch, recorder: Recorder | None = None) -> tuple[Tensor, list[Tensor]]:
    """States, and gradients of all parameters, under one state of the generator."""
    torch.manual_seed(3)
    states_TD = encoder(batch, recorder)
    encoder.zero_grad()
    weight_TD = torch.linspace(-1, 1, states_TD.numel()).view(states_TD.shape)
    loss = (states_TD * weight_TD).sum()
    if recorder is not None:
        loss = loss + sum(kept.square().mean() for kept in recorder.kept.values())
    loss.backward()
    return states_TD.detach(), [each.grad.clone() for each in encoder.parameters() if each.grad is not None]


def checkpointed(encoder: Encoder) -> None:
    for layer in encoder.recomputable_layers():
        layer.forward = RecomputedForward(layer)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - REFUSED))
def test_states_gradients_and_the_generator_are_the_same_to_the_bit(family: str) -> None:
    encoder, batch = tiny_encoder(family)
    assert any(isinstance(part, Dropout) and part.rate for part in encoder.modules())
    states_TD, gradients = drop_for(encoder, batch)
    generator = torch.get_rng_state()
    passes = []
    for layer in encoder.recomputable_layers():
        layer.register_forward_pre_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    checkpointed(encoder)
    assert list(encoder.recomputable_layers())
    again_TD, again = drop_for(encoder, batch)
    assert torch.equal(again_TD, states_TD)
    assert torch.equal(torch.get_rng_state(), generator)
    assert len(again) == len(gradients)
    assert all(torch.equal(new, old) for new, old in zip(again, gradients, strict=True))
    assert passes, "the encoder calls the layers' own forward"


def kept_bytes(encoder: Encoder, batch: PackedBatch) -> int:
    """Bytes that a forward pass saves for its backward pass, by torch's hooks, without weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in encoder.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        states_TD = encoder(batch)
    assert states_TD.requires_grad
    return sum(found.values())


def test_layers_keep_their_inputs_alone() -> None:
    """torch's hooks count what is saved outside of layers; a layer then stores only its input, T x D floats."""
    encoder, batch = tiny_encoder("bert")
    plain = kept_bytes(encoder, batch)
    checkpointed(encoder)
    inputs = 3 * batch.num_tokens * 32 * 4
    assert kept_bytes(encoder, batch) + inputs < plain / 4


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_a_family_whose_layers_cannot_be_computed_again_is_refused(family: str) -> None:
    encoder, _ = tiny_encoder(family)
    assert not list(encoder.recomputable_layers())


def test_what_a_recorder_keeps_carries_gradients_and_stays_the_callers() -> None:
    """As in distillation: states and maps of single layers are part of the loss."""
    encoder, batch = tiny_encoder("bert")
    points = ["blocks.0.hook_resid_post", "blocks.1.attn.hook_pattern", "blocks.2.mlp.hook_post"]

    def halved(hidden_TD: Tensor) -> Tensor:
        return hidden_TD / 2

    def recorder() -> Recorder:
        return Recorder(points, {"blocks.1.hook_resid_mid": halved})

    plain, again = recorder(), recorder()
    _, gradients = drop_for(encoder, batch, plain)
    checkpointed(encoder)
    _, again_gradients = drop_for(encoder, batch, again)
    assert all(torch.equal(new, old) for new, old in zip(again_gradients, gradients, strict=True))
    assert set(again.kept) == set(points)
    assert all(torch.equal(again.kept[point], plain.kept[point]) for point in points)


def test_a_copy_of_a_model_computes_with_its_own_weights() -> None:
    encoder, batch = tiny_encoder("bert")
    checkpointed(encoder)
    twin = copy.deepcopy(encoder)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    assert [name for name, _ in twin.named_parameters()] == [
        name for name, _ in tiny_encoder("bert")[0].named_parameters()
    ]
    expected = tiny_encoder("bert")[0]
    expected.load_state_dict(twin.state_dict())
    assert torch.equal(drop_for(twin, batch)[0], drop_for(expected, batch)[0])


ELECTRA = [
    Override("objective", [{"masked_lm": {}}, {"replaced_token": {}}]),
    Override("model.family", "electra"),
    Override("model.embedding_size", 24),
    Override("data.layout.name", "doc-sentences"),
]


@pytest.mark.parametrize("overrides", [[], ELECTRA], ids=["bert", "electra"])
def test_a_run_ends_with_the_same_model(overrides: list[Override], tmp_path: Path) -> None:
    """Dropout, stages, micro-batches, a companion, and evaluations in between."""
    recipe, text = write_recipe(tmp_path)
    models = []
    for switched in (False, True):
        more = [
            Override("optimisation.steps", 8),
            Override("engine.evaluate_every_steps", 4),
            Override("engine.activation_checkpointing", switched),
        ]
        arguments = PretrainArguments(
            str(recipe),
            sources=[str(text)],
            run_dir=tmp_path / str(switched),
            cache=tmp_path / "cache",
            command=["test"],
            overrides=[*overrides, *more],
        )
        models.append(run_pretraining(arguments, progress=silent_progress).run.model)
    plain, again = (sha256_of(model / "model.safetensors") for model in models)
    assert again == plain


def test_a_run_of_a_refused_family_says_why_and_what_to_change(tmp_path: Path, bertkit: Callable[..., Outcome]) -> None:
    recipe, text = write_recipe(tmp_path)
    contents = recipe.read_text(encoding="utf-8").replace("family: bert", "family: mpnet")
    recipe.write_text(contents.replace(", next_sentence]", "]").replace("segment-pair", "doc-sentences"))
    switch = ("--set", "engine.activation_checkpointing=true")
    outcome = bertkit("pretrain", recipe, "--data", text, "--run-dir", tmp_path / "run", *switch)
    assert outcome.code == 2, outcome.stderr
    assert "engine.activation_checkpointing is true, but the layers of family mpnet" in outcome.stderr
    assert "engine.micro_batch_tokens" in outcome.stderr


def planned(layers: int, *, recomputed: bool) -> dict[str, float]:
    config = BertConfig(hidden_size=64, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=256)
    with torch.device("meta"):
        model = HeadedModel(config.build(500), ["masked_lm"])
    checkpoint_layers(model) if recomputed else None
    return training_memory(
        model, micro_batch_tokens=1000, sequence_length=50, predictions=0, bf16=False, recomputed=recomputed
    )


def test_the_plan_has_one_layers_activations_and_the_inputs_of_all() -> None:
    one = planned(1, recomputed=False)
    for layers in (1, 6):
        found = planned(layers, recomputed=True)
        assert found["attention"] == one["attention"]
        assert found["activations"] == pytest.approx(one["activations"] + layers * 1000 * 64 * 4)

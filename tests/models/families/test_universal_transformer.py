"""The Universal Transformer against a second implementation, and its properties: halting, the cache, and cost of
steps."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from tests.models.families.reference_universal_transformer import pair
from tests.models.recomputed_source import RecomputedSourceNextTokens
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.data.config import DataConfig
from bertkit.models.decoding.conditional import CachedSourceNextTokens
from bertkit.models.encoder import initialise
from bertkit.models.encoder_decoder import SEQ2SEQ
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.universal_transformer import UniversalTransformer, UniversalTransformerConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.recorder import Recorder
from bertkit.objectives.pondering import Pondering
from bertkit.training.cost import count_weights, step_flops

VOCABULARY = 53
SOURCES, TARGETS = [7, 13, 1, 9], [5, 2, 11, 8]
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
CONFIGS = {
    "plain": {},
    "sinusoid": {"step_signal": "sinusoid", "num_decoder_layers": 2},
    "halting": {"halting": True, "num_hidden_layers": 5, "num_decoder_layers": 6},
    "halting-sinusoid": {"halting": True, "step_signal": "sinusoid", "halting_epsilon": 0.3},
}
configs = pytest.mark.parametrize("name", CONFIGS)


def config_of(name: str) -> UniversalTransformerConfig:
    return UniversalTransformerConfig(
        hidden_size=12,
        num_hidden_layers=4,
        num_attention_heads=3,
        intermediate_size=22,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        activation_dropout_prob=0.0,
        max_position_embeddings=20,
    ).model_copy(update=CONFIGS[name])


def model_of(name: str) -> HeadedModel:
    config = config_of(name)
    model = HeadedModel(config.build(VOCABULARY), [SEQ2SEQ])
    torch.manual_seed(1)
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            # Large enough that every part matters and tokens halt at different steps.
            parameter.normal_(-0.6 if part.endswith("halting.bias") else 0.0, 0.25)
    return model.eval()


def rows(lengths: list[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def stacks_of(model: HeadedModel) -> UniversalTransformer:
    assert isinstance(model.encoder, UniversalTransformer)
    return model.encoder


def pondering_of(model: HeadedModel) -> Tensor:
    pondered_T = stacks_of(model).take_pondering()
    assert pondered_T is not None
    return pondered_T


@configs
def test_states_steps_and_gradients_are_those_of_the_second_writing(name: str) -> None:
    model = model_of(name)
    sources, targets = rows(SOURCES, 1), rows(TARGETS, 2)
    batch = PackedBatch.from_pairs(sources, targets)
    assert batch.pairs is not None
    sides = batch.pairs.sides(model(batch))
    weights = model.hub_form().to_hub(dict(model.named_parameters()))
    expected = [pair(weights, *each, config_of(name)) for each in zip(sources, targets, strict=True)]
    reads = [[both[side] for both in expected] for side in (0, 1)]
    for states_TD, own in zip(sides, reads, strict=True):
        torch.testing.assert_close(states_TD, torch.cat([read.states_SD for read in own]), **TOLERANCE)
    loss = sum(states_TD.square().sum() for states_TD in sides)
    theirs = sum(read.states_SD.square().sum() for own in reads for read in own)
    if "halting" in name:
        pondered_T = pondering_of(model)
        each = [(read.steps, read.remainders) for own in reads for read in own]
        by_hand = [step + rest for steps, rests in each for step, rest in zip(steps, rests, strict=True)]
        torch.testing.assert_close(pondered_T, torch.stack(by_hand), **TOLERANCE)
        assert len({step for steps, _ in each for step in steps}) > 2  # tokens of all kinds
        loss, theirs = loss + 3 * pondered_T.sum(), theirs + 3 * torch.stack(by_hand).sum()
    parameters = dict(model.named_parameters())
    ours = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    others = torch.autograd.grad(theirs, list(parameters.values()), allow_unused=True)
    for part, gradient, other in zip(parameters, ours, others, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-4, msg=part)


@configs
def test_a_batch_equals_its_pairs_one_by_one(name: str) -> None:
    model = model_of(name)
    sources, targets = rows(SOURCES, 1), rows(TARGETS, 2)
    together = model(PackedBatch.from_pairs(sources, targets))
    alone = [model(PackedBatch.from_pairs([one], [other])) for one, other in zip(sources, targets, strict=True)]
    torch.testing.assert_close(together, torch.cat(alone), **TOLERANCE)


@configs
def test_a_target_does_not_see_what_follows(name: str) -> None:
    model = model_of(name)
    source, target = rows([6], 1), rows([7], 2)
    with torch.no_grad():
        before = model(PackedBatch.from_pairs(source, target))[6:]
        for place in range(7):
            other = [[*target[0][:place], (target[0][place] + 1) % VOCABULARY, *target[0][place + 1 :]]]
            after = model(PackedBatch.from_pairs(source, other))[6:]
            torch.testing.assert_close(before[:place], after[:place], rtol=0, atol=1e-6)
            assert not torch.equal(before[place], after[place])


@configs
def test_the_cache_gives_the_logits_of_reading_all_again(name: str) -> None:
    model = model_of(name)
    sources, prompts = rows([4, 11, 2], 1), [[2], [2, 9, 4], [2, 7]]
    generator = torch.Generator().manual_seed(4)
    decoders: list[CachedSourceNextTokens] = [CachedSourceNextTokens(model), RecomputedSourceNextTokens(model)]
    with torch.inference_mode():
        for decoder in decoders:
            decoder.read(sources)
        torch.testing.assert_close(*(decoder.start(prompts, 16) for decoder in decoders), **TOLERANCE)
        for order in ([0, 0, 2, 1], [3, 1, 0, 0], [2, 0], [1, 0]):
            for decoder in decoders:
                decoder.select(torch.tensor(order))
            token_R = torch.randint(1, VOCABULARY, (len(order),), generator=generator)
            torch.testing.assert_close(*(decoder.step(token_R) for decoder in decoders), **TOLERANCE)


def test_steps_end_when_every_token_has_halted() -> None:
    model = model_of("halting")
    stacks = stacks_of(model)
    with torch.no_grad():
        for side in (stacks.source_recurrence, stacks.target_recurrence):
            assert side.halting is not None
            side.halting.weight.zero_()
            side.halting.bias.fill_(0.0)  # a probability of one half: two steps, the second of which is the remainder
    batch = PackedBatch.from_pairs(rows(SOURCES, 1), rows(TARGETS, 2))
    points = [f"{side}blocks.{step}.hook_halting" for side in ("", "decoder.") for step in range(4)]
    recorder = Recorder(points)
    model(batch, recorder)
    assert set(recorder.kept) == {"blocks.0.hook_halting", "blocks.1.hook_halting"} | {
        "decoder.blocks.0.hook_halting",
        "decoder.blocks.1.hook_halting",
    }
    pondered_T = pondering_of(model)
    torch.testing.assert_close(pondered_T, torch.full_like(pondered_T, 2.5))
    assert stacks.take_pondering() is None


def test_the_term_is_the_mean_of_steps_and_remainders() -> None:
    model = model_of("halting")
    batch = PackedBatch.from_pairs(rows(SOURCES, 1), rows(TARGETS, 2))
    found = Pondering().loss(model, model(batch), batch)
    model(batch)
    assert found.count == batch.num_tokens == sum(SOURCES) + sum(TARGETS)
    torch.testing.assert_close(found.sum, pondering_of(model).sum())
    data = DataConfig(sources=["a.tsv"])
    assert Pondering().errors(data, config_of("halting")) == []
    for other in (config_of("plain"), BertConfig()):
        assert "model.halting: true" in Pondering().errors(data, other)[0]


def test_a_model_can_be_copied_behind_a_pass_and_comes_back_from_its_directory(tmp_path: Path) -> None:
    model = model_of("halting")
    batch = PackedBatch.from_pairs(rows(SOURCES, 1), rows(TARGETS, 2))
    before = model(batch)
    assert torch.equal(copy.deepcopy(model)(batch), before)
    save_model(model, None, tmp_path / "saved")
    again, report = load_model(tmp_path / "saved")
    assert (report.missing, report.unexpected) == ([], [])
    assert again.encoder.config == model.encoder.config
    assert torch.equal(again.eval()(batch), before)


def test_steps_cost_operations_and_no_weights() -> None:
    def built(**changes: int) -> HeadedModel:
        config = config_of("sinusoid").model_copy(update=changes)
        return HeadedModel(config.build(VOCABULARY), [SEQ2SEQ])

    few, many = built(num_hidden_layers=2, num_decoder_layers=3), built(num_hidden_layers=4, num_decoder_layers=6)
    assert count_weights(few.encoder) == count_weights(many.encoder)
    sizes = {"tokens": 60.0, "squared_lengths": 900.0, "predictions": 0.0, "sequences": 4.0}
    assert step_flops(many, **sizes) == pytest.approx(2 * step_flops(few, **sizes))


def test_tokens_halt_soon_at_first() -> None:
    """The initial bias gives a probability of 0.73, so nearly all tokens take two steps, as in the released code."""
    config = config_of("halting")
    model = HeadedModel(config.build(VOCABULARY), [SEQ2SEQ])
    initialise(model, config, seed=0)
    model.encoder.finish_initialisation()
    recurrence = stacks_of(model).source_recurrence
    assert recurrence.halting is not None
    assert recurrence.halting.bias.item() == 1.0
    assert recurrence.signal is not None
    assert recurrence.signal.weight.std().item() == pytest.approx(12**-0.5, rel=0.2)

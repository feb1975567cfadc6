"""XLNet's two streams and its memory against `transformers`, and which tokens a query must not see."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.models.cases.xlnet import CASES
from tests.models.oracle import VOCABULARY, Inputs, Twins, make_inputs, make_twins
from tests.models.test_families import TOLERANCE, assert_gradients_equal
from torch import Tensor

from bertkit.data.batch import BatchLanes, PackedBatch, TokenTargets
from bertkit.models.attention.relative_attention import PermutationOrder, aligned
from bertkit.models.attention.segment_memory import remembered
from bertkit.models.families.xlnet import PERMUTATION, Xlnet, XlnetConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.recorder import Recorder

TARGETS = 3
ARCHITECTURE = "XLNetLMHeadModel"


@dataclass(frozen=True)
class Permuted:
    """The same inputs and order for both sides.

    Attributes:
        inputs: the batch with targets, and the oracle's permutation mask and target mapping.
        order: bertkit's order.
    """

    inputs: Inputs
    order: PermutationOrder


def with_targets(batch: PackedBatch, index_M: Tensor) -> PackedBatch:
    return replace(batch, targets={PERMUTATION: TokenTargets(index_M, batch.ids_T.index_select(0, index_M))})


def permute(inputs: Inputs, *, seed: int = 0) -> Permuted:
    """In each sequence three targets at random positions of a random order, and a token that is not predicted or seen
    before its turn."""
    generator = torch.Generator().manual_seed(seed)
    lengths = inputs.batch.sequences.cu_seqlens_B1.diff().tolist()
    rows, columns = inputs.real_BS.shape
    mask_BSS, mapping_BMS = torch.zeros(rows, columns, columns), torch.zeros(rows, TARGETS, columns)
    key_ranks, query_ranks, targets = [], [], []
    for number, length in enumerate(lengths):
        chosen = torch.randperm(length, generator=generator)[: TARGETS + 1]
        place_S = torch.randperm(length, generator=generator)
        key_S, query_S = torch.full((length,), -1), torch.zeros(length, dtype=torch.int64)
        key_S[chosen] = query_S[chosen] = place_S[chosen]
        query_S[chosen[-1]] += 1
        real = torch.nonzero(inputs.real_BS[number]).flatten()
        mask_BSS[number][real[:, None], real] = (query_S[:, None] <= key_S[None, :]).float()
        mapping_BMS[number, torch.arange(TARGETS), real[chosen[:TARGETS]]] = 1
        targets.append(sum(lengths[:number]) + chosen[:TARGETS])
        key_ranks.append(key_S)
        query_ranks.append(query_S)
    target_index_M = torch.cat(targets)
    batch = with_targets(inputs.batch, target_index_M)
    padded = {**inputs.padded, "perm_mask": mask_BSS, "target_mapping": mapping_BMS}
    order = PermutationOrder(torch.cat(key_ranks), torch.cat(query_ranks))
    return Permuted(Inputs(batch, padded, inputs.real_BS), order)


def encoder_of(model: HeadedModel) -> Xlnet:
    assert isinstance(model.encoder, Xlnet)
    return model.encoder


@pytest.fixture
def twins(tmp_path: Path) -> Twins:
    pytest.importorskip("transformers")
    return make_twins(CASES[0], ARCHITECTURE, tmp_path)


def test_both_streams_equal_the_original(twins: Twins) -> None:
    permuted = permute(make_inputs(CASES[0], twins.model, [19, 4, 7, 18, 5, 7]))
    inputs = permuted.inputs
    points = [f"blocks.{layer}.{stream}hook_resid_post" for layer in (0, 1) for stream in ("", "query_stream.")]
    recorder = Recorder(points)
    streams = encoder_of(twins.model).streams(inputs.batch, order=permuted.order, recorder=recorder)
    assert streams.query_MD is not None
    outputs = twins.oracle(**inputs.padded, output_hidden_states=True)
    # The oracle's hidden states alternate between both streams.
    for point, state in zip(points, outputs.hidden_states[2:], strict=True):
        expected = state.flatten(0, 1) if "query_stream" in point else state[inputs.real_BS]
        torch.testing.assert_close(recorder.kept[point], expected, **TOLERANCE)
    logits_MV = twins.model.token_logits("permutation_lm", streams.query_MD)
    torch.testing.assert_close(logits_MV, outputs.logits.flatten(0, 1), **TOLERANCE)
    logits_MV.square().mean().backward()
    outputs.logits.square().mean().backward()
    assert_gradients_equal(twins.model, twins.oracle)


def test_sequences_from_right_to_left_equal_the_original(twins: Twins) -> None:
    """The oracle treats the second half of a batch as reversed."""
    permuted = permute(make_inputs(CASES[0], twins.model, [19, 4, 7, 5]))
    inputs = permuted.inputs
    twins.oracle.transformer.bi_data = True
    outputs = twins.oracle(**inputs.padded)
    direction_B = torch.tensor([0, 0, 1, 1])
    streams = encoder_of(twins.model).streams(inputs.batch, order=permuted.order, direction_B=direction_B)
    assert streams.query_MD is not None
    logits_MV = twins.model.token_logits("permutation_lm", streams.query_MD)
    torch.testing.assert_close(logits_MV, outputs.logits.flatten(0, 1), **TOLERANCE)


def test_recording_attention_of_both_streams_changes_nothing(twins: Twins) -> None:
    permuted = permute(make_inputs(CASES[0], twins.model, [19, 4, 7]))
    batch, encoder = permuted.inputs.batch, encoder_of(twins.model)
    recorder = Recorder(["blocks.1.query_stream.attn.hook_pattern"])
    recorded = encoder.streams(batch, order=permuted.order, recorder=recorder).query_MD
    torch.testing.assert_close(recorded, encoder.streams(batch, order=permuted.order).query_MD, **TOLERANCE)
    pattern_BNSS = recorder.kept["blocks.1.query_stream.attn.hook_pattern"]
    unseen_BSS = permuted.inputs.padded["perm_mask"].bool()
    assert not pattern_BNSS[0][:, unseen_BSS[0]].any()


def test_a_target_sees_those_before_it_and_neither_itself_nor_those_behind(twins: Twins) -> None:
    """Tokens 0 to 3 in the order 2, 0, 3, 1, all of them targets except 2, which all attend to."""
    inputs = make_inputs(CASES[0], twins.model, [4])
    order = PermutationOrder(torch.tensor([0, 2, -1, 1]), torch.tensor([0, 2, 0, 1]))
    batch = with_targets(inputs.batch, torch.tensor([0, 1, 3]))
    sees = {0: {2}, 3: {2, 0}, 1: {2, 0, 3}}

    def query_states(ids_T: Tensor) -> Tensor:
        streams = encoder_of(twins.model).streams(replace(batch, ids_T=ids_T), order=order)
        assert streams.query_MD is not None
        return streams.query_MD

    before_MD = query_states(batch.ids_T)
    for changed in range(4):
        ids_T = batch.ids_T.clone()
        ids_T[changed] = (ids_T[changed] + 1) % VOCABULARY
        after_MD = query_states(ids_T)
        for row, target in enumerate([0, 1, 3]):
            assert torch.equal(before_MD[row], after_MD[row]) == (changed not in sees[target])


def test_a_target_that_sees_nothing_learns_nothing_of_its_sequence(twins: Twins) -> None:
    inputs = make_inputs(CASES[0], twins.model, [3])
    ranks_T = torch.arange(3)
    order = PermutationOrder(ranks_T, ranks_T)
    states = []
    for ids in ([7, 8, 9], [17, 18, 19]):
        batch = with_targets(replace(inputs.batch, ids_T=torch.tensor(ids)), torch.tensor([0]))
        states.append(encoder_of(twins.model).streams(batch, order=order).query_MD)
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


@pytest.mark.parametrize(("mem_len", "reuse_len"), [(None, None), (7, None), (9, 4), (3, 4)])
def test_a_memory_of_two_texts_before_equals_the_original(
    mem_len: int | None, reuse_len: int | None, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    case = replace(CASES[0], settings={**CASES[0].settings, "mem_len": mem_len, "reuse_len": reuse_len})
    twins = make_twins(case, ARCHITECTURE, tmp_path)
    encoder = encoder_of(twins.model)
    memory: list[Tensor] | None = None
    mems: Any = None
    for text in range(3):
        inputs = make_inputs(case, twins.model, [5, 5, 5], seed=text)
        permuted = permute(inputs, seed=text)
        streams = encoder.streams(permuted.inputs.batch, order=permuted.order, memory=memory)
        assert streams.query_MD is not None
        outputs = twins.oracle(**permuted.inputs.padded, mems=mems, use_mems=True)
        logits_MV = twins.model.token_logits("permutation_lm", streams.query_MD)
        torch.testing.assert_close(logits_MV, outputs.logits.flatten(0, 1), **TOLERANCE)
        following = remembered(streams.inputs_TD, inputs.batch, memory, reused=reuse_len, kept=mem_len or 0)
        memory, mems = list(following.values()), outputs.mems
        for ours, theirs in zip(memory, mems, strict=True):
            torch.testing.assert_close(ours, theirs.transpose(0, 1), **TOLERANCE)


def test_training_carries_the_memory_of_the_original(tmp_path: Path) -> None:
    """The forward pass of pretraining over three steps of lanes, half of them from right to left."""
    pytest.importorskip("transformers")
    case = replace(CASES[0], settings={**CASES[0].settings, "mem_len": 7, "reuse_len": 4})
    twins = make_twins(case, ARCHITECTURE, tmp_path)
    encoder = encoder_of(twins.model)
    twins.oracle.transformer.bi_data = True
    state, mems = None, None
    for text in range(3):
        permuted = permute(make_inputs(case, twins.model, [6, 6], seed=text), seed=text)
        lanes = BatchLanes(torch.arange(2), torch.tensor([False, True]), 4)
        ranks_T2 = torch.stack([permuted.order.key_rank_T, permuted.order.query_rank_T], dim=1)
        batch = replace(permuted.inputs.batch, lanes=lanes, ranks_T2=ranks_T2)
        hidden_TD, state = encoder.forward_carried(batch, state)
        outputs = twins.oracle(**permuted.inputs.padded, mems=mems, use_mems=True)
        logits_MV = twins.model.token_logits(PERMUTATION, hidden_TD[batch.targets[PERMUTATION].index_M])
        torch.testing.assert_close(logits_MV, outputs.logits.flatten(0, 1), **TOLERANCE)
        mems = outputs.mems
        assert list(state) == ["memory.0", "memory.1"]
        for ours, theirs in zip(state.values(), mems, strict=True):
            torch.testing.assert_close(ours, theirs.transpose(0, 1), **TOLERANCE)


def test_a_memory_wants_sequences_of_one_length(twins: Twins) -> None:
    encoder = encoder_of(twins.model)
    unequal = make_inputs(CASES[0], twins.model, [5, 4]).batch
    with pytest.raises(ValueError, match="same length"):
        remembered(encoder.streams(unequal).inputs_TD, unequal, None, reused=None, kept=0)
    equal = make_inputs(CASES[0], twins.model, [5, 5]).batch
    memory = list(remembered(encoder.streams(equal).inputs_TD, equal, None, reused=None, kept=0).values())
    with pytest.raises(ValueError, match="for 2 sequences, but the batch has 1"):
        encoder.streams(make_inputs(CASES[0], twins.model, [5]).batch, memory=memory)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 4), (3, 3), (3, 5)])
def test_scores_by_distance_are_aligned_with_keys(queries: int, keys: int) -> None:
    """Query i and key j are at distance keys - queries + i - j."""
    distance_P = torch.arange(keys, -queries, -1.0)
    by_key = aligned(distance_P.expand(2, 3, queries, -1), keys)
    expected = keys - queries + torch.arange(queries)[:, None] - torch.arange(keys)
    assert torch.equal(by_key, expected.float().expand(2, 3, -1, -1))


@pytest.mark.parametrize("settings", [{"hidden_size": 21, "num_attention_heads": 3}, {"hidden_size": 32}])
def test_widths_without_waves_or_heads_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="even and a multiple"):
        XlnetConfig(**settings)


@pytest.mark.parametrize(("key", "value"), [("d_head", 7), ("attn_type", "uni"), ("bi_data", True), ("untie_r", False)])
def test_other_models_of_the_same_type_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{key} is {value!r}"):
        XlnetConfig.from_hub({"d_model": 30, "n_head": 5, key: value})

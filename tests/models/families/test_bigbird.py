"""BigBird beyond the lengths that it attends to in full. Properties of all families are in test_families.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.models.cases.bigbird import CASES, SIZES
from tests.models.oracle import Case, make_inputs, make_twins
from tests.probing.tiny_models import BERT, tiny_model, tiny_tokenizer

from bertkit.data.batch import PackedBatch, PackedSequences
from bertkit.errors import UsageError
from bertkit.models.attention.block_sparse import BlockPattern, attend_blocks
from bertkit.models.attention.self_attention import fused_attention
from bertkit.models.conversion.convert import converted, converted_config
from bertkit.models.conversion.pruning import prune_heads, with_layers
from bertkit.models.families.bigbird import BigBirdConfig
from bertkit.models.families.roberta import RobertaConfig
from bertkit.models.files.hub import save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.recorder import Recorder, Scope

PATTERN = BlockPattern(size=3, random=2, heads=4, layer=1)
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
NOWHERE = Scope(None, "")


def seen_by_the_papers_rule(pattern: BlockPattern, tokens: int) -> np.ndarray[Any, Any]:
    """Which tokens each token of a long sequence attends to, (N, S, S), without random blocks, which `slots` adds."""
    blocks = -(-tokens // pattern.size)
    seen = np.zeros((pattern.heads, tokens, tokens), dtype=bool)
    drawn = pattern.slots(blocks)[:, :, 5:]
    for head in range(pattern.heads):
        for query in range(tokens):
            for key in range(tokens):
                mine, other = query // pattern.size, key // pattern.size
                is_global = mine in (0, blocks - 1) or other in (0, blocks - 1)
                seen[head, query, key] = is_global or abs(mine - other) <= 1 or other in drawn[head, mine]
    return seen


@pytest.mark.parametrize("lengths", [[40], [31, 40, 33], [3, 28, 40, 27, 29, 1], [60, 7, 59]])
def test_gathered_blocks_give_what_a_mask_of_all_tokens_gives(lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    sequences = PackedSequences.from_lengths(lengths)
    shape = (sum(lengths), PATTERN.heads, 5)
    heads = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    sparse = attend_blocks(*heads, sequences, PATTERN, scope=NOWHERE)
    parts = []
    for query, key, value in zip(*(each.split(lengths) for each in heads), strict=True):
        mask = None
        if len(query) > PATTERN.whole_blocks * PATTERN.size:
            mask = torch.from_numpy(seen_by_the_papers_rule(PATTERN, len(query)))
        by_head = [each.transpose(0, 1)[None] for each in (query, key, value)]
        parts.append(fused_attention(*by_head, mask)[0].transpose(0, 1))
    whole = torch.cat(parts)
    torch.testing.assert_close(sparse, whole)
    gradients = [torch.autograd.grad((each * weight).sum(), heads) for each in (sparse, whole)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_random_blocks_are_others_for_each_head_and_layer_and_none_is_seen_twice() -> None:
    slots = BlockPattern(size=64, random=3, heads=12, layer=0).slots(64)
    assert slots.shape == (12, 64, 8)
    for row in range(1, 63):
        for head in range(12):
            chosen = [block for block in slots[head, row] if block >= 0]
            assert len(set(chosen)) == len(chosen)
            assert {0, row - 1, row, row + 1, 63} <= set(chosen)
            assert len(chosen) == 8 - (row in (1, 62))
    assert not np.array_equal(slots[0], slots[1])
    assert not np.array_equal(slots, BlockPattern(size=64, random=3, heads=12, layer=1).slots(64))
    assert np.array_equal(slots, BlockPattern(size=64, random=3, heads=12, layer=0).slots(64))
    # Every block is drawn about equally often: 3 of about 58 candidates, 12 heads times 62 rows.
    drawn = np.bincount(slots[:, 1:-1, 5:].ravel(), minlength=64)[2:-2]
    assert drawn.mean() == pytest.approx(12 * 62 * 3 / 62, rel=0.05)
    assert drawn.min() > 15


@pytest.mark.parametrize("lengths", [[33], [28, 27, 29, 35], [1, 25, 50]])
def test_rounding_lengths_up_changes_no_value(lengths: list[int]) -> None:
    """Vectors are computed in blocks whose length is rounded up, so that they do not depend on their neighbours."""
    generator = torch.Generator().manual_seed(1)
    heads = [torch.randn(sum(lengths), PATTERN.heads, 5, generator=generator) for _ in range(3)]
    own, rounded = (
        attend_blocks(*heads, PackedSequences.from_lengths(lengths, independent=given), PATTERN, scope=NOWHERE)
        for given in (False, True)
    )
    torch.testing.assert_close(rounded, own, **TOLERANCE)


def test_a_short_sequence_is_read_whole() -> None:
    model = HeadedModel(BigBirdConfig(**config_sizes(), block_size=2, num_random_blocks=1).build(97), ("masked_lm",))
    full = HeadedModel(BigBirdConfig(**config_sizes(), attention_type="original_full").build(97), ("masked_lm",))
    model.initialise(1)
    full.load_state_dict(model.state_dict())
    for length, is_whole in ((14, True), (15, False)):
        batch = PackedBatch.from_ids([[(7 * token) % 97 for token in range(length)]])
        difference = (model.eval()(batch) - full.eval()(batch)).abs().max()
        assert (difference < 1e-6) == is_whole


def config_sizes() -> dict[str, Any]:
    return {**{key: value for key, value in SIZES.items() if key != "sep_token_id"}, "max_position_embeddings": 64}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("blocks", [12, 15])
def test_states_of_long_sequences_are_the_oracles_where_it_draws_the_same_blocks(
    blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modeling = pytest.importorskip("transformers.models.big_bird.modeling_big_bird")
    case = CASES[0]
    length = 3 * blocks
    settings = {**SIZES, "block_size": 3, "num_random_blocks": 2, "max_position_embeddings": length}
    twins = make_twins(Case(case.name, case.config_class, settings, case.heads), "BigBirdForMaskedLM", tmp_path)

    def drawn_here(self: Any, *_: Any, **__: Any) -> list[Any]:
        slots = BlockPattern(size=3, random=2, heads=5, layer=self.seed).slots(blocks)
        return list(slots[:, 1:-1, 5:].astype(np.int32))

    sparse = modeling.BigBirdBlockSparseAttention
    monkeypatch.setattr(sparse, "_bigbird_block_rand_mask_with_head", drawn_here)
    inputs = make_inputs(case, twins.model, [length, length])
    with torch.no_grad():
        expected = twins.oracle(**inputs.padded, output_hidden_states=True)
    recorder = Recorder(["blocks.0.hook_resid_post", "blocks.1.hook_resid_post"])
    logits = twins.model.masked_lm_logits(twins.model(inputs.batch))
    twins.model(inputs.batch, recorder)
    assert isinstance(twins.oracle.bert.encoder.layer[1].attention.self, sparse)
    torch.testing.assert_close(logits, expected.logits.flatten(0, 1), **TOLERANCE)
    for layer in (0, 1):
        states = expected.hidden_states[layer + 1].flatten(0, 1)
        torch.testing.assert_close(recorder.kept[f"blocks.{layer}.hook_resid_post"], states, **TOLERANCE)


def test_neither_company_nor_recording_changes_a_long_sequence() -> None:
    model = HeadedModel(BigBirdConfig(**config_sizes(), block_size=2, num_random_blocks=2).build(97), ("masked_lm",))
    model.initialise(1)
    model.eval()
    rows = [
        [(13 * token + number) % 97 for token in range(length)] for number, length in enumerate([64, 5, 37, 63, 38])
    ]
    together = model(PackedBatch.from_ids(rows)).split([len(row) for row in rows])
    for row, states in zip(rows, together, strict=True):
        torch.testing.assert_close(model(PackedBatch.from_ids([row])), states, **TOLERANCE)
    recorder = Recorder(["blocks.1.attn.hook_pattern"])
    torch.testing.assert_close(model(PackedBatch.from_ids(rows), recorder), torch.cat(together), **TOLERANCE)
    pattern_NSS = recorder.kept["blocks.1.attn.hook_pattern"][0]
    torch.testing.assert_close(pattern_NSS.sum(-1), torch.ones(pattern_NSS.shape[:2]))
    # Rows of middle blocks see their own, two neighbours, the first, the last and two random ones: fourteen tokens.
    assert ((pattern_NSS > 0).sum(-1)[:, 4:-4] == 14).all()


def test_a_roberta_goes_on_as_a_bigbird_with_repeated_positions() -> None:
    sizes = {**config_sizes(), "max_position_embeddings": 22, "type_vocab_size": 1, "hidden_act": "gelu"}
    roberta = HeadedModel(RobertaConfig(**sizes).build(97, pad_id=1), ("masked_lm",))
    roberta.initialise(3)
    roberta.eval()
    wanted = BigBirdConfig(**{**sizes, "max_position_embeddings": 50}, layer_norm_eps=1e-5)
    config = converted_config(roberta.encoder.config, wanted)
    bigbird = converted(roberta, config)
    batch = PackedBatch.from_ids([[5, 6, 7, 8], [9, 10, 11, 12, 13, 14]])
    torch.testing.assert_close(bigbird(batch), roberta(batch), **TOLERANCE)
    old, new = (model.get_parameter("encoder.embeddings.position.weight") for model in (roberta, bigbird))
    assert torch.equal(new[:20], old[2:])
    assert torch.equal(new[20:40], old[2:])
    assert torch.equal(new[40:], old[2:12])


def test_another_activation_than_the_initial_models_is_told(caplog: pytest.LogCaptureFixture) -> None:
    sizes = {**config_sizes(), "max_position_embeddings": 22, "type_vocab_size": 1, "hidden_act": "gelu"}
    roberta = HeadedModel(RobertaConfig(**sizes).build(97, pad_id=1), ("masked_lm",))
    roberta.initialise(3)
    own = {"hidden_act": "gelu_new", "max_position_embeddings": 50, "hidden_dropout_prob": 0.3}
    converted(roberta, BigBirdConfig(**{**sizes, **own}))
    assert "hidden_act 'gelu' (recipe: 'gelu_new'), layer_norm_eps 1e-05 (recipe: 1e-12); with the" in caplog.text
    caplog.clear()
    converted(roberta, converted_config(roberta.encoder.config, BigBirdConfig(**{**sizes, **own})))
    converted(roberta, RobertaConfig(**{**sizes, "hidden_dropout_prob": 0.3}))
    assert not caplog.text
    converted(roberta, RobertaConfig(**{**sizes, "hidden_act": "relu"}))
    assert "hidden_act 'gelu' (recipe: 'relu'); with" in caplog.text


def test_what_its_draws_forbid_is_refused() -> None:
    model = HeadedModel(BigBirdConfig(**config_sizes()).build(97), ("masked_lm",))
    with pytest.raises(UsageError, match="depend on its number"):
        prune_heads(model, {0: [1]})
    with pytest.raises(UsageError, match="cannot move"):
        with_layers(model.encoder.config, [1])


def test_keys_that_are_counted_are_those_that_are_seen() -> None:
    pattern = BlockPattern(size=64, random=3, heads=12, layer=0)
    assert pattern.keys_per_query(704) == 704
    seen = np.full(64, 4096.0)
    seen[1:-1] = 8 * 64
    assert pattern.keys_per_query(4096) == pytest.approx(seen.mean())


def test_the_config_is_the_hubs(tmp_path: Path) -> None:
    from bertkit.models.files.hub import save_model

    model = HeadedModel(BigBirdConfig(**config_sizes(), block_size=2).build(97), ("masked_lm",))
    model.initialise(0)
    save_model(model, None, tmp_path)
    contents = json.loads((tmp_path / "config.json").read_text())
    assert contents["model_type"] == "big_bird"
    assert (contents["block_size"], contents["num_random_blocks"], contents["attention_type"]) == (2, 3, "block_sparse")


@torch.no_grad()
def test_the_hubs_class_finds_the_question_of_a_vocabulary_that_is_trained_here(tmp_path: Path) -> None:
    """It rules out all tokens up to the first separator, which has another id in the published vocabulary."""
    transformers = pytest.importorskip("transformers")
    tokenizer = tiny_tokenizer()
    published = transformers.BigBirdConfig().sep_token_id
    assert tokenizer.sep_id != published < tokenizer.vocab_size
    model = tiny_model(tokenizer, BigBirdConfig.model_validate(BERT), ("span",))
    save_model(model, tokenizer, tmp_path)
    oracle = transformers.BigBirdForQuestionAnswering.from_pretrained(tmp_path).eval()
    ids = [tokenizer.cls_id, 10, 11, tokenizer.sep_id, 20, published, 21, 22, tokenizer.sep_id]
    types = [0, 0, 0, 0, 1, 1, 1, 1, 1]
    batch = PackedBatch.from_ids([ids], [types])
    theirs = oracle(torch.tensor([ids]), token_type_ids=torch.tensor([types])).start_logits[0]
    torch.testing.assert_close(model.logits("span", model(batch), batch)[4:, 0], theirs[4:], **TOLERANCE)

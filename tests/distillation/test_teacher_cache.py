"""A teacher's outputs on disk are returned bit for bit; damage after a crash is tested in tests/test_cache.py.

Logits over the vocabulary keep the most probable tokens, and the others share the rest of the probability.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bertkit.data.batch import PackedBatch
from bertkit.distillation.activations import ActivationSpec
from bertkit.distillation.teacher import Teacher, TextQuery
from bertkit.distillation.teacher_cache import CachedItem, TopLogits, open_teacher_cache
from bertkit.models.operators.vocabulary import VocabularyProjection
from tests.probing.tiny_models import tiny_model, tiny_tokenizer

ROWS, WORDS, WIDTH, TOP = 14, 57, 6, 5


def test_an_item_comes_back_to_the_bit_with_the_shape_of_its_logits() -> None:
    values = np.random.default_rng(3).normal(size=11).astype(np.float32)
    found = CachedItem.from_bytes(CachedItem(2, 3, values).to_bytes())
    assert (found.rows, found.columns) == (2, 3)
    assert found.values.tobytes() == values.tobytes()


def test_a_cache_of_another_teacher_lies_elsewhere(tmp_path: Path) -> None:
    for teacher in ("a", "z"):
        cache = open_teacher_cache(tmp_path, {"teacher": teacher}, max_bytes=1e6)
        assert len(cache) == 0
        cache.add(bytes(16), CachedItem(0, 0, np.ones(2, dtype=np.float32)).to_bytes())
        cache.close()
    assert len(open_teacher_cache(tmp_path, {"teacher": "a"}, max_bytes=1e6)) == 1


def projection(rows: int = ROWS) -> VocabularyProjection:
    generator = torch.Generator().manual_seed(3)
    shapes = ((rows, WIDTH), (WORDS, WIDTH), (WORDS,))
    return VocabularyProjection(*(torch.randn(shape, generator=generator) for shape in shapes))


def test_the_likeliest_keep_their_probability_and_the_rest_share_theirs() -> None:
    logits = projection().logits()
    kept = TopLogits.of(projection(), ROWS, WORDS, top_k=TOP)
    share, cut = torch.softmax(logits, dim=-1), torch.softmax(kept.part(slice(0, ROWS)), dim=-1)
    largest = share.topk(TOP, dim=-1)
    torch.testing.assert_close(cut.gather(1, largest.indices), largest.values)
    rest = cut.scatter(1, largest.indices, torch.nan)
    for row in rest:
        others = row[~row.isnan()]
        assert len(others) == WORDS - TOP
        assert others.max() == others.min()
    whole = TopLogits.of(projection(), ROWS, WORDS, top_k=900)
    torch.testing.assert_close(whole.part(slice(3, 9)), logits[3:9], rtol=1e-5, atol=1e-5)


def test_of_no_rows_nothing_is_kept_where_the_logits_are() -> None:
    none = TopLogits.of(projection(0), 0, WORDS, top_k=TOP)
    assert none.table().shape == (0, 2 * TOP + 1)
    assert none.rows(torch.zeros(0, dtype=torch.int64)).part(slice(0, 3)).shape == (0, WORDS)
    assert none.word_Mk.dtype == torch.int64


def test_a_loss_takes_them_in_a_projections_place() -> None:
    student = VocabularyProjection(torch.randn(ROWS, 3), torch.randn(WORDS, 3), None)
    exact, _ = student.divergence(projection(), 2.0)
    whole, _ = student.divergence(TopLogits.of(projection(), ROWS, WORDS, top_k=WORDS), 2.0)
    cut, _ = student.divergence(TopLogits.of(projection(), ROWS, WORDS, top_k=TOP), 2.0)
    torch.testing.assert_close(whole, exact, rtol=1e-4, atol=1e-4)
    assert abs(cut / exact - 1) > 1e-3


@pytest.mark.parametrize("positions", ["all", "some", "none"])
def test_outputs_on_text_come_back_in_any_company_and_only_for_the_same_tokens(tmp_path: Path, positions: str) -> None:
    sequences = [[5, 6, 7, 8], [9, 6, 7], [5, 6], [11, 12, 13, 14, 15]]
    choices = {"all": None, "some": [1, 2, 6, 9, 13], "none": []}
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, seed=3)
    words = positions != "none"
    spec = ActivationSpec(logits=words, states=frozenset({2, 1}), summary_states=frozenset({2}))
    cache = open_teacher_cache(tmp_path, {"teacher": "a"}, max_bytes=1e6)
    teacher, plain = Teacher([model], spec, cache=cache), Teacher([model], spec)

    def query(numbers: list[int], index: list[int] | None) -> TextQuery:
        packed = PackedBatch.from_ids([sequences[number] for number in numbers])
        index_M = None if index is None else torch.tensor(index, dtype=torch.int64)
        return TextQuery(packed, lambda each, recorder: each(packed, recorder), index_M, TOP, model.encoder.vocab_size)

    first = teacher.outputs(query([0, 1, 2, 3], choices[positions]))
    rows = {"all": 14, "some": 5, "none": 0}[positions]
    sizes = {"tokens": 14, "sequences": 4, "rows": rows, "columns": 2 * TOP + 1}
    assert cache.size_bytes == teacher.item_bytes(**sizes) + 3 * CachedItem.bytes_of(0)  # four items, not one
    spent = teacher.flops
    assert spent > 0
    # Only the last and the second sequence.
    turned = {"all": None, "some": [0, 4, 7], "none": []}[positions]
    found, computed = teacher.outputs(query([3, 1], turned)), plain.outputs(query([3, 1], turned))
    assert teacher.flops == spent, "cached outputs are not computed again"
    for layer in (1, 2):
        torch.testing.assert_close(found.states[layer], computed.states[layer])
        assert torch.equal(found.states[layer], torch.cat([first.states[layer][9:], first.states[layer][4:7]]))
    assert torch.equal(found.summary_states[2], first.summary_states[2][[3, 1]])
    if words:
        assert isinstance(found.logits, TopLogits)
        assert isinstance(first.logits, TopLogits)
        own = torch.tensor([*range(9, 14), *range(4, 7)] if positions == "all" else [3, 4, 2])
        assert torch.equal(found.logits.part(slice(0, 8)), first.logits.rows(own).part(slice(0, 8)))
    if positions == "some":
        teacher.outputs(query([3, 1], [0, 4]))
        assert teacher.flops > spent, "other tokens have another key"


def test_a_text_read_from_left_to_right_is_another_item(tmp_path: Path) -> None:
    """causal_lm with a share draws for each sample in which direction both models read it; its tokens stay the same."""
    model = tiny_model(tiny_tokenizer(), seed=3)
    spec = ActivationSpec(states=frozenset({2}))
    cache = open_teacher_cache(tmp_path, {"teacher": "a"}, max_bytes=1e6)
    teacher, plain = Teacher([model], spec, cache=cache), Teacher([model], spec)

    def query(*, causal: bool) -> TextQuery:
        packed = PackedBatch.from_ids([[5, 6, 7, 8], [9, 6, 7]], causal=causal)
        return TextQuery(packed, lambda each, recorder: each(packed, recorder), None, TOP, model.encoder.vocab_size)

    for causal in (False, True):
        found, computed = teacher.outputs(query(causal=causal)), plain.outputs(query(causal=causal))
        torch.testing.assert_close(found.states[2], computed.states[2])
    assert len(cache) == 4

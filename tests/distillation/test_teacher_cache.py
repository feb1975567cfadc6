"""A teacher's words cut to the likeliest: what is kept of them, that the rest is shared, and that they come back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bertkit.data.batch import PackedBatch
from bertkit.distillation.teacher_cache import Answer, Answers, KeptWords
from bertkit.distillation.teacher_store import TeacherStore
from bertkit.distillation.terms import Activations, ActivationSpec
from bertkit.models.vocabulary import VocabularyProjection

ROWS, WORDS, WIDTH, TOP = 14, 57, 6, 5


def projection(rows: int = ROWS) -> VocabularyProjection:
    generator = torch.Generator().manual_seed(3)
    shapes = ((rows, WIDTH), (WORDS, WIDTH), (WORDS,))
    return VocabularyProjection(*(torch.randn(shape, generator=generator) for shape in shapes))


def test_the_likeliest_keep_their_probability_and_the_rest_share_theirs() -> None:
    logits = projection().logits()
    kept = KeptWords.of(projection(), ROWS, WORDS, top_k=TOP)
    share, cut = torch.softmax(logits, dim=-1), torch.softmax(kept.part(slice(0, ROWS)), dim=-1)
    largest = share.topk(TOP, dim=-1)
    torch.testing.assert_close(cut.gather(1, largest.indices), largest.values)
    rest = cut.scatter(1, largest.indices, torch.nan)
    for row in rest:
        others = row[~row.isnan()]
        assert len(others) == WORDS - TOP
        assert others.max() == others.min()
    whole = KeptWords.of(projection(), ROWS, WORDS, top_k=900)
    torch.testing.assert_close(whole.part(slice(3, 9)), logits[3:9], rtol=1e-5, atol=1e-5)


def test_of_no_rows_nothing_is_kept_where_the_logits_are() -> None:
    none = KeptWords.of(projection(0), 0, WORDS, top_k=TOP)
    assert none.table().shape == (0, 2 * TOP + 1)
    assert none.rows(torch.zeros(0, dtype=torch.int64)).part(slice(0, 3)).shape == (0, WORDS)
    assert none.word_Mk.dtype == torch.int64


def test_a_loss_takes_them_in_a_projections_place() -> None:
    student = VocabularyProjection(torch.randn(ROWS, 3), torch.randn(WORDS, 3), None)
    exact, _ = student.divergence(projection(), 2.0)
    whole, _ = student.divergence(KeptWords.of(projection(), ROWS, WORDS, top_k=WORDS), 2.0)
    cut, _ = student.divergence(KeptWords.of(projection(), ROWS, WORDS, top_k=TOP), 2.0)
    torch.testing.assert_close(whole, exact, rtol=1e-4, atol=1e-4)
    assert abs(cut / exact - 1) > 1e-3


@pytest.mark.parametrize("positions", ["all", "some", "none"])
def test_answers_come_back_in_any_company_and_only_to_the_same_question(tmp_path: Path, positions: str) -> None:
    sequences = [[5, 6, 7, 8], [9, 6, 7], [5, 6], [11, 12, 13, 14, 15]]
    wanted = ActivationSpec(states=frozenset({4, 1}), first_states=frozenset({2}))
    choices = {"all": list(range(ROWS)), "some": [1, 2, 6, 9, 13], "none": []}
    index_M = torch.tensor(choices[positions], dtype=torch.int64)
    top_k = TOP if positions != "none" else 0
    store = TeacherStore.open(tmp_path / "store", {"teacher": "a"}, max_bytes=1e6)
    answers = Answers(store, wanted, width=WIDTH, vocab_size=WORDS, top_k=top_k)
    batch = PackedBatch.from_ids(sequences)
    words = KeptWords.of(projection(index_M.numel()), index_M.numel(), WORDS, top_k=TOP) if top_k else None
    states = {layer: torch.randn(ROWS, WIDTH) for layer in wanted.states}
    first_states = {2: torch.randn(4, WIDTH)}
    assert answers.recall(batch, index_M) is None
    answers.keep(Answer(words, Activations(batch, states=states, first_states=first_states)), index_M)
    floats = sum(answers.floats_of(tokens=len(each), rows=0) for each in sequences)
    floats += index_M.numel() * (2 * TOP + 1)
    assert store.size_bytes == 4 * floats

    turned = PackedBatch.from_ids([sequences[3], sequences[1]])
    asked = torch.cat([index_M[index_M >= 9] - 9, index_M[(index_M >= 4) & (index_M < 7)] + 1])
    found = answers.recall(turned, asked)
    assert found is not None
    for layer, expected in states.items():
        assert torch.equal(found.seen.states[layer], torch.cat([expected[9:], expected[4:7]]))
    assert torch.equal(found.seen.first_states[2], first_states[2][[3, 1]])
    if words is not None:
        assert found.words is not None
        own = torch.cat([(index_M >= 9).nonzero(), ((index_M >= 4) & (index_M < 7)).nonzero()]).flatten()
        assert torch.equal(found.words.part(slice(0, ROWS)), words.rows(own).part(slice(0, ROWS)))
        assert answers.recall(turned, asked[:-1]) is None
    assert answers.recall(PackedBatch.from_ids([[5, 6, 9]]), torch.arange(3)[: len(index_M)]) is None

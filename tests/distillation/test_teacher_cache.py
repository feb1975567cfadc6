"""A teacher's outputs on disk: what was kept comes back to the bit, what a crash or a bit flip spoils does not.

Words are cut to the likeliest, and the others share the rest of the probability.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bertkit.data.batch import PackedBatch
from bertkit.distillation import teacher_cache as module
from bertkit.distillation.activations import ActivationSpec
from bertkit.distillation.teacher import Teacher, TextQuery
from bertkit.distillation.teacher_cache import CachedItem, TeacherCache, TopWords
from bertkit.errors import DataError
from bertkit.models.vocabulary import VocabularyProjection
from tests.probing.tiny_models import tiny_model, tiny_tokenizer

IDENTITY = {"teacher": "a", "data": "b"}
ROWS, WORDS, WIDTH, TOP = 14, 57, 6, 5


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def values(number: int) -> np.ndarray:
    return np.random.default_rng(number).normal(size=3 + number % 4).astype(np.float32)


def filled(directory: Path, count: int = 5) -> TeacherCache:
    store = TeacherCache.open(directory, IDENTITY, max_bytes=1e6)
    for number in range(count):
        store.add(key(number), CachedItem(1, 3, values(number)))
    return store


def test_what_was_kept_comes_back_to_the_bit_in_any_order(tmp_path: Path) -> None:
    filled(tmp_path / "s").close()
    again = TeacherCache.open(tmp_path / "s", IDENTITY, max_bytes=1e6)
    found = again.get([key(3), key(0), key(4)])
    assert found is not None
    assert [each.values.tolist() for each in found] == [values(n).tolist() for n in (3, 0, 4)]
    assert (found[0].rows, found[0].columns) == (1, 3)
    assert again.get([key(0), key(9)]) is None


@pytest.mark.parametrize("cut", ["values.bin", "index.bin"])
@pytest.mark.parametrize("lost", [1, 17, 40, 41])
def test_a_tail_that_was_cut_off_is_dropped_and_can_be_kept_again(tmp_path: Path, cut: str, lost: int) -> None:
    filled(tmp_path / "s").close()
    file = tmp_path / "s" / cut
    file.write_bytes(file.read_bytes()[:-lost])
    again = TeacherCache.open(tmp_path / "s", IDENTITY, max_bytes=1e6)
    kept = len(again)
    assert 0 < kept < 5
    assert all(key(number) in again for number in range(kept))
    for number in range(5):
        again.add(key(number), CachedItem(1, 3, values(number)))
    found = again.get([key(number) for number in range(5)])
    assert found is not None
    assert [each.values.tolist() for each in found] == [values(n).tolist() for n in range(5)]


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    filled(tmp_path / "s").close()
    file = tmp_path / "s" / "values.bin"
    raw = bytearray(file.read_bytes())
    raw[1] ^= 4
    file.write_bytes(raw)
    again = TeacherCache.open(tmp_path / "s", IDENTITY, max_bytes=1e6)
    assert again.get([key(0)]) is None
    assert again.get([key(1)]) is not None
    again.add(key(0), CachedItem(1, 3, values(0)))
    again.add(key(9), CachedItem(1, 3, values(9)))
    again.close()
    mended = TeacherCache.open(tmp_path / "s", IDENTITY, max_bytes=1e6)
    found = mended.get([key(number) for number in (0, 1, 2, 3, 4, 9)])
    assert found is not None, "what was computed anew stands behind all that was there"
    assert [each.values.tolist() for each in found] == [values(n).tolist() for n in (0, 1, 2, 3, 4, 9)]


def test_no_more_is_kept_than_allowed(tmp_path: Path) -> None:
    store = TeacherCache.open(tmp_path / "s", IDENTITY, max_bytes=40)
    for number in range(9):
        store.add(key(number), CachedItem(1, 3, values(number)))
    assert 0 < store.size_bytes <= 40
    assert (tmp_path / "s" / "values.bin").stat().st_size == store.size_bytes


def test_answers_of_another_teacher_are_refused(tmp_path: Path) -> None:
    filled(tmp_path / "s").close()
    with pytest.raises(DataError, match=r"another teacher.*teacher 'a', not 'z'"):
        TeacherCache.open(tmp_path / "s", {"teacher": "z", "data": "b"}, max_bytes=1e6)
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "thesis.txt").write_text("mine")
    with pytest.raises(DataError, match="other files"):
        TeacherCache.open(tmp_path / "t", IDENTITY, max_bytes=1e6)


def test_two_processes_that_make_a_store_at_once_have_the_same_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one finds no store, and another's half-made one a moment later."""
    write, others = module.write_json, []

    def write_after_the_other(path: Path, value: object) -> None:
        write(path, value)
        with monkeypatch.context() as inner:
            inner.setattr(module, "write_json", write)
            inner.setattr("bertkit.distillation.teacher_cache.os.getpid", lambda: 1)
            others.append(filled(tmp_path / "s", 2))

    monkeypatch.setattr(module, "write_json", write_after_the_other)
    late = TeacherCache.open(tmp_path / "s", IDENTITY, max_bytes=1e6)
    assert others[0].is_writer
    assert not late.is_writer
    assert late.get([key(0), key(1)]) is not None
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_one_process_writes_and_others_read(tmp_path: Path) -> None:
    writer = filled(tmp_path / "s")
    reader = TeacherCache.open(tmp_path / "s", IDENTITY, max_bytes=1e6)
    assert writer.is_writer
    assert not reader.is_writer
    reader.add(key(7), CachedItem(1, 3, values(7)))
    assert key(7) not in reader
    assert reader.get([key(2)]) is not None


def projection(rows: int = ROWS) -> VocabularyProjection:
    generator = torch.Generator().manual_seed(3)
    shapes = ((rows, WIDTH), (WORDS, WIDTH), (WORDS,))
    return VocabularyProjection(*(torch.randn(shape, generator=generator) for shape in shapes))


def test_the_likeliest_keep_their_probability_and_the_rest_share_theirs() -> None:
    logits = projection().logits()
    kept = TopWords.of(projection(), ROWS, WORDS, top_k=TOP)
    share, cut = torch.softmax(logits, dim=-1), torch.softmax(kept.part(slice(0, ROWS)), dim=-1)
    largest = share.topk(TOP, dim=-1)
    torch.testing.assert_close(cut.gather(1, largest.indices), largest.values)
    rest = cut.scatter(1, largest.indices, torch.nan)
    for row in rest:
        others = row[~row.isnan()]
        assert len(others) == WORDS - TOP
        assert others.max() == others.min()
    whole = TopWords.of(projection(), ROWS, WORDS, top_k=900)
    torch.testing.assert_close(whole.part(slice(3, 9)), logits[3:9], rtol=1e-5, atol=1e-5)


def test_of_no_rows_nothing_is_kept_where_the_logits_are() -> None:
    none = TopWords.of(projection(0), 0, WORDS, top_k=TOP)
    assert none.table().shape == (0, 2 * TOP + 1)
    assert none.rows(torch.zeros(0, dtype=torch.int64)).part(slice(0, 3)).shape == (0, WORDS)
    assert none.word_Mk.dtype == torch.int64


def test_a_loss_takes_them_in_a_projections_place() -> None:
    student = VocabularyProjection(torch.randn(ROWS, 3), torch.randn(WORDS, 3), None)
    exact, _ = student.divergence(projection(), 2.0)
    whole, _ = student.divergence(TopWords.of(projection(), ROWS, WORDS, top_k=WORDS), 2.0)
    cut, _ = student.divergence(TopWords.of(projection(), ROWS, WORDS, top_k=TOP), 2.0)
    torch.testing.assert_close(whole, exact, rtol=1e-4, atol=1e-4)
    assert abs(cut / exact - 1) > 1e-3


@pytest.mark.parametrize("positions", ["all", "some", "none"])
def test_outputs_on_text_come_back_in_any_company_and_only_for_the_same_tokens(tmp_path: Path, positions: str) -> None:
    sequences = [[5, 6, 7, 8], [9, 6, 7], [5, 6], [11, 12, 13, 14, 15]]
    choices = {"all": None, "some": [1, 2, 6, 9, 13], "none": []}
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, seed=3)
    words = positions != "none"
    spec = ActivationSpec(logits=words, states=frozenset({2, 1}), first_states=frozenset({2}))
    cache = TeacherCache.open(tmp_path / "cache", {"teacher": "a"}, max_bytes=1e6)
    teacher, plain = Teacher([model], spec, cache=cache), Teacher([model], spec)

    def query(numbers: list[int], index: list[int] | None) -> TextQuery:
        packed = PackedBatch.from_ids([sequences[number] for number in numbers])
        index_M = None if index is None else torch.tensor(index, dtype=torch.int64)
        return TextQuery(packed, lambda each, recorder: each(packed, recorder), index_M, TOP, model.encoder.vocab_size)

    first = teacher.outputs(query([0, 1, 2, 3], choices[positions]))
    rows = {"all": 14, "some": 5, "none": 0}[positions]
    sizes = {"tokens": 14, "sequences": 4, "rows": rows, "columns": 2 * TOP + 1}
    assert cache.size_bytes == 4 * teacher.floats_of(**sizes)
    spent = teacher.flops
    assert spent > 0
    # The last and the second sequence, alone.
    turned = {"all": None, "some": [0, 4, 7], "none": []}[positions]
    found, computed = teacher.outputs(query([3, 1], turned)), plain.outputs(query([3, 1], turned))
    assert teacher.flops == spent, "nothing is computed that is kept"
    for layer in (1, 2):
        torch.testing.assert_close(found.states[layer], computed.states[layer])
        assert torch.equal(found.states[layer], torch.cat([first.states[layer][9:], first.states[layer][4:7]]))
    assert torch.equal(found.first_states[2], first.first_states[2][[3, 1]])
    if words:
        assert isinstance(found.logits, TopWords)
        assert isinstance(first.logits, TopWords)
        own = torch.tensor([*range(9, 14), *range(4, 7)] if positions == "all" else [3, 4, 2])
        assert torch.equal(found.logits.part(slice(0, 8)), first.logits.rows(own).part(slice(0, 8)))
    if positions == "some":
        teacher.outputs(query([3, 1], [0, 4]))
        assert teacher.flops > spent, "other tokens are another question"

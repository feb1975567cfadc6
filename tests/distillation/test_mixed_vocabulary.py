"""Mixed vocabularies: the text compared with both tokenizers, the draws and masks, and the teacher compared with
itself."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional

from bertkit.data.batch import PackedBatch
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Vocabulary
from bertkit.data.stream import corrupted
from bertkit.distillation.dual_teacher import TEACHER, DualTeacher, teacher_of
from bertkit.distillation.mixed_vocabulary import MixedVocabulary, mixed_batch
from bertkit.distillation.shared_projections import add_teacher
from bertkit.errors import DataError
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.electra import ElectraConfig
from bertkit.models.headed import HeadedModel
from bertkit.objectives.causal_lm import CausalLM
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.pretraining.loss_terms import ObjectiveTerms
from tests.distillation.two_vocabularies import pair_samples, row_of, student, teacher

ROWS = 157
"""Rows of the teacher's table: a few more than it has tokens."""
DRAW = Draw(5, "a stage")
SIZES = {
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 90,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.3,
}
TARGET = MixedVocabulary.term


def objective(max_tokens: int = 90, **settings: float) -> MixedVocabulary:
    return MixedVocabulary(**settings).between(student(), teacher(), rows=ROWS, max_tokens=max_tokens)


def corrupt(wanted: MixedVocabulary, samples: Samples) -> Samples:
    return wanted.corrupt(samples, Vocabulary.of(student()), DRAW)


def written(ids: Sequence[int]) -> str:
    """Mixed tokens as text: words joined, special tokens in between."""
    pieces = [teacher().token(each) if each < ROWS else student().token(each - ROWS) for each in ids]
    return " ".join(pieces).replace(" ##", "")


def original(samples: Samples) -> np.ndarray:
    """The mixed text before masking, from the targets alone."""
    targets = samples.targets[TARGET]
    return np.where(targets.columns["label"] >= 0, targets.columns["label"], targets.id_M)


def models(seed: int = 1) -> tuple[HeadedModel, HeadedModel]:
    """A student and a teacher."""
    small = BertConfig(**SIZES, hidden_size=12, intermediate_size=19).build(student().vocab_size)
    large = BertConfig(**SIZES, hidden_size=24, intermediate_size=31).build(ROWS)
    made = HeadedModel(small, ["masked_lm"]), HeadedModel(large, ["masked_lm", "next_sentence"])
    for model in made:
        model.initialise(seed)
        with torch.no_grad():
            model.masked_lm.bias.normal_(generator=torch.Generator().manual_seed(seed))
    return made


def test_the_teacher_reads_its_own_rows_then_its_students_and_is_trained_whole() -> None:
    _, large = models()
    own_VD = large.encoder.word_embedding.weight.detach().clone()
    dual = DualTeacher(large.requires_grad_(False), 9, seed=0)
    table_ND = torch.cat([own_VD, dual.students.weight.detach()])
    words = dual.model.encoder.get_submodule("embeddings.word")
    assert torch.equal(words(torch.arange(len(table_ND))), table_ND)
    assert all(parameter.requires_grad for parameter in dual.parameters())


def test_without_the_students_share_the_text_is_what_the_teachers_tokenizer_makes() -> None:
    samples, pairs = pair_samples(student(), 23)
    mixed = objective(student_share=0).mixed(samples, DRAW)
    wanted = [row_of(teacher(), *pair) for pair in pairs]
    np.testing.assert_array_equal(mixed.samples.ids_T, np.concatenate(wanted))
    np.testing.assert_array_equal(mixed.samples.lengths_B, [row.size for row in wanted])
    types = [(np.cumsum(row == teacher().sep_id) - (row == teacher().sep_id) > 0) for row in wanted]
    np.testing.assert_array_equal(mixed.samples.token_types_T, np.concatenate(types))


def test_with_the_whole_share_all_pieces_are_the_students_and_special_tokens_the_teachers() -> None:
    samples, _ = pair_samples(student(), 23)
    mixed = objective(student_share=1).mixed(samples, DRAW).samples
    text_T = ~samples.special_T
    np.testing.assert_array_equal(mixed.ids_T[text_T], samples.ids_T[text_T] + ROWS)
    assert set(mixed.ids_T[~text_T].tolist()) == {teacher().cls_id, teacher().sep_id}
    np.testing.assert_array_equal(mixed.cu_seqlens_B1, samples.cu_seqlens_B1)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_whatever_cuts_the_words_they_are_those_that_the_student_reads(share: float) -> None:
    samples, _ = pair_samples(student(), 23)
    found = original(corrupt(objective(student_share=share), samples))
    assert written(found.tolist()) == written((samples.ids_T + ROWS).tolist())


def test_the_share_of_words_is_the_students_share() -> None:
    samples, pairs = pair_samples(student(), 400)
    mixed = objective(student_share=0.3).mixed(samples, DRAW).samples
    begins = {False: student().word_start_V, True: teacher().word_start_V}
    text = mixed.ids_T[~mixed.special_T]
    own = text[text < ROWS]
    by_teacher = int(begins[True][own].sum())
    by_student = int(begins[False][text[text >= ROWS] - ROWS].sum())
    words = sum(len(sentence.split()) + 1 for pair in pairs for sentence in pair)  # the full stop is one, too
    assert by_teacher + by_student == words
    assert abs(by_student / words - 0.3) < 4 * (0.3 * 0.7 / words) ** 0.5


def test_an_unknown_word_stays_unknown_and_a_cut_off_one_goes_on() -> None:
    samples, _ = pair_samples(student(), 9)
    ids_T = samples.ids_T.copy()
    unknown = int(np.flatnonzero(~samples.special_T)[3])
    ids_T[unknown] = student().unk_id
    for share in (0.0, 1.0):
        mixed = objective(student_share=share).mixed(samples.with_changes(ids_T=ids_T), DRAW)
        assert mixed.samples.ids_T[mixed.origin_N == unknown].tolist() == [teacher().unk_id]
    continuing = next(i for i in range(student().vocab_size) if student().token(i).startswith("##"))
    ids_T = samples.ids_T.copy()
    ids_T[1] = continuing
    mixed = objective(student_share=0).mixed(samples.with_changes(ids_T=ids_T), DRAW)
    assert teacher().token(int(mixed.samples.ids_T[1])).startswith("##")


def test_draws_depend_on_a_sequences_address_alone() -> None:
    samples, _ = pair_samples(student(), 17)
    wanted = objective()
    together = list(corrupt(wanted, samples).split(70))
    apart = [corrupt(wanted, part) for part in samples.split(70)]
    assert len(together) > 5
    for found, alone in zip(together, apart, strict=True):
        targets, own = found.targets[TARGET], alone.targets[TARGET]
        np.testing.assert_array_equal(targets.index_M, own.index_M)
        np.testing.assert_array_equal(targets.id_M, own.id_M)
        assert targets.columns.keys() == own.columns.keys()
        for name, column in targets.columns.items():
            np.testing.assert_array_equal(column, own.columns[name])
    travelled = corrupt(pickle.loads(pickle.dumps(wanted)), samples).targets[TARGET]
    np.testing.assert_array_equal(travelled.id_M, corrupt(wanted, samples).targets[TARGET].id_M)
    another = corrupt(wanted, samples.with_changes(epoch_B=samples.epoch_B + 1)).targets[TARGET]
    assert not np.array_equal(another.id_M, corrupt(wanted, samples).targets[TARGET].id_M)


def test_the_student_reads_its_own_masked_text_and_the_teacher_one_of_its_own() -> None:
    samples, _ = pair_samples(student(), 17)
    vocabulary = Vocabulary.of(student())
    masked_lm = MaskedLM()
    both = corrupted(samples, [masked_lm, objective()], vocabulary, DRAW)
    alone = masked_lm.corrupt(samples, vocabulary, DRAW)
    np.testing.assert_array_equal(both.ids_T, alone.ids_T)
    np.testing.assert_array_equal(original(both), original(corrupt(objective(), samples)))
    masks = corrupted(samples, [masked_lm, objective(student_share=1)], vocabulary, DRAW).targets
    hidden_by_student = masks["masked_lm"].index_M
    hidden_by_teacher = np.flatnonzero(masks[TARGET].columns["label"] >= 0)
    assert hidden_by_teacher.size == hidden_by_student.size
    assert not np.array_equal(hidden_by_teacher, hidden_by_student)


def test_masks_are_berts_and_random_pieces_of_the_same_vocabulary() -> None:
    samples, _ = pair_samples(student(), 700)
    wanted = objective()
    mixed = wanted.mixed(samples, DRAW).samples
    targets = corrupt(wanted, samples).targets[TARGET]
    label, read = targets.columns["label"], targets.id_M
    chosen = label >= 0
    counts = np.bincount(mixed.sequence_T[chosen], minlength=700)
    np.testing.assert_array_equal(counts, np.maximum(1, np.rint(0.15 * mixed.lengths_B)))
    assert not (chosen & mixed.special_T).any()
    np.testing.assert_array_equal(read[~chosen], mixed.ids_T[~chosen])
    np.testing.assert_array_equal(label[chosen], mixed.ids_T[chosen])
    is_mask = read[chosen] == teacher().mask_id
    kept = read[chosen] == label[chosen]
    replaced = ~is_mask & ~kept
    total = int(chosen.sum())
    assert abs(is_mask.mean() - 0.8) < 4 * (0.8 * 0.2 / total) ** 0.5
    assert abs(replaced.mean() - 0.1) < 0.03
    assert replaced.sum() > 100
    np.testing.assert_array_equal((read >= ROWS)[chosen][replaced], (label >= ROWS)[chosen][replaced])
    assert read.max() < ROWS + student().vocab_size
    assert not np.isin(read, np.arange(teacher().vocab_size, ROWS)).any()  # spare rows are not tokens
    assert len(Counter(read[chosen][replaced].tolist())) > 60


def test_a_sequence_that_grows_too_long_keeps_its_beginning_and_its_end() -> None:
    samples, _ = pair_samples(student(), 17)
    limit = int(np.median(samples.lengths_B)) - 3
    whole, cut = (objective(max_tokens=tokens, student_share=1).mixed(samples, DRAW) for tokens in (900, limit))
    assert not whole.dropped_B.any()
    np.testing.assert_array_equal(cut.dropped_B, np.maximum(0, samples.lengths_B - limit))
    for number, (start, end) in enumerate(zip(cut.samples.cu_seqlens_B1, cut.samples.cu_seqlens_B1[1:], strict=False)):
        before = whole.samples.ids_T[slice(*samples.cu_seqlens_B1[number : number + 2])]
        expected = before if before.size <= limit else np.append(before[: limit - 1], before[-1])
        np.testing.assert_array_equal(cut.samples.ids_T[start:end], expected)
    assert cut.samples.special_T[cut.samples.cu_seqlens_B1[1:] - 1].all()
    batch = PackedBatch.from_samples(corrupt(objective(max_tokens=limit, student_share=1), samples))
    assert int(batch.targets[TARGET].columns["dropped"].sum()) == cut.dropped_B.sum() > 0


def test_the_teachers_batch_is_the_mixed_text_whole_or_in_parts() -> None:
    samples, _ = pair_samples(student(), 17)
    wanted = objective()
    done = corrupt(wanted, samples)
    plain = wanted.mixed(samples, DRAW).samples.with_changes(ids_T=done.targets[TARGET].id_M)
    for found, expected in (
        (mixed_batch(PackedBatch.from_samples(done)), PackedBatch.from_samples(plain)),
        (mixed_batch(PackedBatch.from_samples(next(done.split(70)))), None),
    ):
        if expected is None:
            few = found.num_sequences
            expected = PackedBatch.from_samples(next(plain.split(int(plain.cu_seqlens_B1[few]))))
        for name in ("ids_T", "token_types_T", "positions_T"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
        assert torch.equal(found.sequences.cu_seqlens_B1, expected.sequences.cu_seqlens_B1)


def test_without_the_students_share_the_teachers_loss_is_its_own_to_the_bit() -> None:
    samples, _ = pair_samples(student(), 13)
    small, large = models()
    untouched = copy.deepcopy(large)
    wanted = objective(student_share=0)
    add_teacher(small, [wanted], large, seed=3)
    batch = PackedBatch.from_samples(corrupt(wanted, samples))
    found = ObjectiveTerms([wanted]).losses(small, batch)[TARGET]
    read = mixed_batch(batch)
    index_M = (batch.targets[TARGET].columns["label"] >= 0).nonzero().flatten()
    logits = untouched.masked_lm_logits(untouched(read)[index_M])
    label_M = batch.targets[TARGET].columns["label"][index_M]
    plain = untouched.projection("masked_lm", untouched.encoder.forward_tokens(read, index_M)).cross_entropy(label_M)
    assert found.sum.equal(plain[0])
    assert found.sum.item() == pytest.approx(functional.cross_entropy(logits, label_M, reduction="sum").item())
    found.sum.backward()
    plain[0].backward()
    dual = teacher_of(small)
    own = dict(dual.model.named_parameters())
    table = own.pop("encoder.embeddings.word.own.weight")
    torch.testing.assert_close(table.grad, untouched.encoder.embeddings.word.weight.grad)
    assert not dual.students.weight.grad.any()
    for name, parameter in own.items():
        if ".students." not in name:
            torch.testing.assert_close(parameter.grad, untouched.get_parameter(name).grad)
    assert all(parameter.grad is None for parameter in small.encoder.parameters())


def test_each_piece_is_predicted_among_those_of_its_own_vocabulary() -> None:
    samples, _ = pair_samples(student(), 13)
    small, large = models()
    wanted = objective()
    add_teacher(small, [wanted, MaskedLM()], large, seed=3)
    dual = teacher_of(small)
    with torch.no_grad():
        dual.students.bias.normal_()
    batch = PackedBatch.from_samples(corrupt(wanted, samples))
    found = ObjectiveTerms([wanted]).losses(small, batch)[TARGET]
    label_T = batch.targets[TARGET].columns["label"]
    index_M = (label_T >= 0).nonzero().flatten()
    head = dual.model.masked_lm
    states = head.norm(head.activation(head.dense(dual.model(mixed_batch(batch))[index_M])))
    own_MV = states @ dual.model.encoder.embeddings.word.own.weight.t() + head.bias
    students_MW = states @ dual.students.weight.t() + dual.students.bias
    loss, right = 0.0, [0, 0]
    for row, label in enumerate(label_T[index_M].tolist()):
        logits, target = (own_MV, label) if label < ROWS else (students_MW, label - ROWS)
        loss += functional.cross_entropy(logits[row], torch.tensor(target)).item()
        right[label >= ROWS] += int(logits[row].argmax() == target)
    assert found.sum.item() == pytest.approx(loss, rel=1e-5)
    assert (found.count, int(found.correct)) == (index_M.numel(), sum(right))
    counters = {name: int(number) for name, number in found.counters.items()}
    students = int((label_T >= ROWS).sum())
    assert counters == {"student": students, "right": right[1], "dropped": 0}
    assert wanted.figures(counters, found.count)["student_share/mixed_vocabulary"] == students / found.count
    assert 0 < students < found.count == wanted.count(batch)


def test_the_students_words_are_drawn_by_the_seed_and_the_teacher_keeps_one_head() -> None:
    drawn = []
    for seed in (3, 3, 4):
        small, large = models()
        add_teacher(small, [objective()], large, seed=seed)
        drawn.append(teacher_of(small).students.weight.detach())
    assert drawn[0].equal(drawn[1])
    assert not drawn[0].equal(drawn[2])
    assert drawn[0].shape == (student().vocab_size, 24)
    assert 0.2 < drawn[0].std() < 0.3  # truncated at two standard deviations of 0.3
    assert teacher_of(small).model.head_names == ("masked_lm",)
    assert not any(name.startswith(TEACHER) for name in small.own_state_dict())


def test_a_teacher_that_cannot_read_two_vocabularies_is_named() -> None:
    narrow = ElectraConfig(num_hidden_layers=1, hidden_size=12, num_attention_heads=3, embedding_size=7)
    silent = BertConfig(num_hidden_layers=1, hidden_size=12, num_attention_heads=3)
    for config, heads, message in (
        (narrow, ["masked_lm"], "models of the family electra cannot read two vocabularies"),
        (silent, ["next_sentence"], r"the model has no masked-LM head \(its heads: next_sentence\)"),
    ):
        with pytest.raises(DataError, match=message):
            DualTeacher(HeadedModel(config.build(40), heads), 9, seed=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"student_share": 1.1}, "student_share"),
        ({"student_share": -0.1}, "student_share"),
        ({"weight": -1.0}, "weight"),
        ({"mask_share": 0.8, "random_share": 0.3}, "must not exceed 1"),
        ({"rate": 1.0}, "rate"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MixedVocabulary(**settings)


def test_it_stands_beside_masked_lm_and_not_alone() -> None:
    mixed = MixedVocabulary()
    assert not mixed.combination_errors([MaskedLM(), mixed])
    assert "add masked_lm" in mixed.combination_errors([CausalLM(), mixed])[0]
    assert mixed.expected_count(100) == MaskedLM().expected_count(100)

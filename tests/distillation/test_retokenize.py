"""Words of one vocabulary split by another, compared with the other tokenizer itself."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import tokenizers

from bertkit.distillation import retokenize
from bertkit.distillation.retokenize import WordRetokenizer, check_same_words, word_rules
from bertkit.errors import DataError
from bertkit.text.tokenizer import Tokenizer
from tests.distillation.two_vocabularies import learnt, sentences, student, teacher

WORDS = sorted({word for sentence in sentences() for word in sentence.removesuffix(".").split()})


def renamed(tokenizer: Tokenizer, **names: str) -> Tokenizer:
    """The same vocabulary with other names for its special tokens, by role."""
    content = json.dumps(json.loads(tokenizer.backend.to_str()))
    for role, name in names.items():
        content = content.replace(tokenizer.roles[role], name)
    return Tokenizer(tokenizers.Tokenizer.from_str(content), {**tokenizer.roles, **names})


def test_a_word_is_cut_as_the_teachers_tokenizer_cuts_it() -> None:
    recutter = WordRetokenizer(student(), teacher())
    several = 0
    for word in WORDS:
        given, wanted = (tokenizer.encode_plain([word])[0] for tokenizer in (student(), teacher()))
        np.testing.assert_array_equal(recutter.cut(given), wanted)
        several += given.size > wanted.size
    assert several > len(WORDS) / 2


def test_what_continues_a_word_is_cut_into_what_continues_one() -> None:
    recutter = WordRetokenizer(student(), teacher())
    for word in WORDS:
        rest = student().encode_plain([word])[0][1:]
        if rest.size:
            pieces = [teacher().token(piece) for piece in recutter.cut(rest)]
            assert all(piece.startswith("##") for piece in pieces)
            text = "".join(student().token(piece).removeprefix("##") for piece in rest)
            assert "".join(piece.removeprefix("##") for piece in pieces) == text


def test_special_tokens_are_the_teachers_by_their_roles_and_text_has_none() -> None:
    other = renamed(teacher(), cls="[BEGIN]", mask="[HIDDEN]")
    special_V = WordRetokenizer(student(), other).special_V
    for role in ("pad", "unk", "cls", "sep", "mask"):
        assert special_V[student().id(student().roles[role])] == other.id(other.roles[role])
    assert (special_V >= 0).sum() == 5


def test_a_full_memory_and_another_process_cut_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    recutter = WordRetokenizer(student(), teacher())
    given = [student().encode_plain([word])[0] for word in WORDS[:40]]
    wanted = [recutter.cut(word).tolist() for word in given]
    travelled = pickle.loads(pickle.dumps(recutter))
    assert not travelled._known
    monkeypatch.setattr(retokenize, "MAX_WORDS", 3)
    assert [travelled.cut(word).tolist() for word in given] == wanted
    assert len(travelled._known) <= 3


def test_accents_that_the_teacher_leaves_to_its_case_are_those_of_its_case() -> None:
    content = json.loads(teacher().backend.to_str())
    content["normalizer"]["strip_accents"] = None  # as in the tokenizers of BERT's authors on the Hub
    unsaid = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)), teacher().roles)
    assert word_rules(unsaid) == word_rules(teacher())
    check_same_words(student(), unsaid)
    content["normalizer"]["strip_accents"] = False
    kept = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)), teacher().roles)
    with pytest.raises(DataError, match="strip_accents is True, the teacher's is False"):
        check_same_words(student(), kept)


@pytest.mark.parametrize(
    ("own", "theirs", "message"),
    [
        (student(), learnt(150, lowercase=False), "lowercase is True, the teacher's is False"),
        (student(), learnt(300, kind="byte-bpe"), "the teacher's tokenizer is a BPE vocabulary"),
        (learnt(70, kind="unigram"), teacher(), "the student's tokenizer is a Unigram vocabulary"),
        (
            student(),
            Tokenizer(teacher().backend, {"unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]"}),
            "no token for mask",
        ),
    ],
)
def test_vocabularies_that_see_other_words_are_refused(own: Tokenizer, theirs: Tokenizer, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_same_words(own, theirs)

"""Words in blanks: scored like whole texts, with shared ties, and at chance for an indifferent model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from bertkit.data.batch import PackedBatch
from bertkit.models.headed import HeadedModel
from bertkit.models.scoring.pseudo_likelihood import score_texts
from bertkit.models.scoring.rules import choose_rule
from bertkit.probing.behaviour.diagnostics import Cloze, Comparison, Completion, Diagnostic
from bertkit.probing.behaviour.measure import (
    BY_MARGIN,
    ONE_TOKEN,
    SENSITIVITY,
    BlankScore,
    DiagnosticScores,
    Proportion,
    accuracy,
    among_top,
    blank_rule,
    clear_preference,
    preference,
    score_blanks,
    score_diagnostic,
    wilson,
)
from tests.probing.tiny_models import constant_model, cpu_engine, tiny_causal_model, tiny_model, tiny_tokenizer

CONTEXTS = ("The reader tests", "A value is", "The number of the file is in the")
WORDS = ("document", "the", "walkable", "sentences", "value")
COMPLETIONS = [Completion(context, word) for context in CONTEXTS for word in WORDS]


def fill(model: HeadedModel, completions: list[Completion] = COMPLETIONS, *, batch: int = 300, ending: str = ""):  # type: ignore[no-untyped-def]  # a list of what is filled in
    rule = blank_rule(choose_rule(model))(tiny_tokenizer())
    scores = score_blanks(model, tiny_tokenizer(), rule, completions, cpu_engine(batch), ending=ending)
    return [scores[each] for each in completions]


@pytest.mark.parametrize("ending", ["", "."])
@pytest.mark.parametrize("kind", ["masked", "causal"])
def test_a_word_in_a_blank_is_scored_as_its_part_of_the_text(kind: str, ending: str) -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer) if kind == "masked" else tiny_causal_model(tokenizer)
    rule = "within_word_l2r" if kind == "masked" else "left_to_right"
    texts = [f"{each.context} {each.word}{ending}" for each in COMPLETIONS]
    pieces = []
    for filled, each, score in zip(
        fill(model, ending=ending), COMPLETIONS, score_texts(model, tokenizer, texts, rule=rule), strict=True
    ):
        first = len(tokenizer.encode_batch([each.context])[0])
        pieces.append(len(tokenizer.encode_batch([each.word])[0]))
        assert filled.tokens == pieces[-1]
        assert filled.log_p == pytest.approx(float(score.log_p_N[first : first + filled.tokens].sum()), rel=1e-4)
    assert min(pieces) == 1 < max(pieces)


def test_ranks_and_the_most_probable_are_those_at_the_mask() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    for filled, each in zip(fill(model), COMPLETIONS, strict=True):
        if filled.tokens > 1:
            continue
        ids = [tokenizer.cls_id, *tokenizer.encode_batch([each.context])[0], tokenizer.mask_id, tokenizer.sep_id]
        with torch.no_grad():
            logits_V = model.masked_lm_logits(model(PackedBatch.from_ids([ids]))[-2:-1])[0]
        order = logits_V.argsort(descending=True).tolist()
        assert filled.above == order.index(tokenizer.encode_batch([each.word])[0][0])
        assert filled.equal == 0
        assert list(filled.top) == order[:5]


def test_the_batch_decides_nothing() -> None:
    model = tiny_model(tiny_tokenizer())
    one, many = fill(model, batch=1), fill(model, batch=5000)
    for a, b in zip(one, many, strict=True):
        assert a.log_p == pytest.approx(b.log_p, abs=1e-4)
        assert (a.tokens, a.above) == (b.tokens, b.above)


def test_unreadable_completions_are_none_and_the_others_stay() -> None:
    model = tiny_model(tiny_tokenizer())
    long = Completion("the " * 80 + "reader tests", "document")
    unknown = Completion("The reader tests", "\u2603")
    partly = Completion("The reader tests", "value-\u2603")
    found = fill(model, [long, COMPLETIONS[0], unknown, partly])
    assert [each is None for each in found] == [True, False, True, True]
    assert found[1] == fill(model, [COMPLETIONS[0]])[0]


def test_ties_share_the_credit() -> None:
    assert [preference(1.0, others) for others in ([0.5, 0.2], [1.0, 0.2], [1.0, 1.0], [1.0, 2.0])] == [
        1,
        1 / 2,
        1 / 3,
        0,
    ]
    assert [among_top(above, equal, 5) for above, equal in ((4, 0), (5, 0), (4, 1), (0, 9), (3, 3))] == [
        1,
        0,
        0.5,
        0.5,
        0.5,
    ]
    assert Proportion(SENSITIVITY, "", "", (1.0, 0.5, 1 / 3, 0.0), 0.5).ties == 2
    assert clear_preference(np.log(0.5), [np.log(0.485)], 0.01) == 1
    assert clear_preference(np.log(0.5), [np.log(0.495)], 0.01) == 0


@pytest.mark.parametrize(("right", "count"), [(0, 8), (3, 16), (44, 44), (21, 88)])
def test_the_interval_is_wilsons(right: int, count: int) -> None:
    expected = binomtest(right, count).proportion_ci(method="wilson")
    assert wilson(right, count) == pytest.approx((expected.low, expected.high), abs=1e-9)


def diagnostic() -> Diagnostic:
    """Three items of two polarities, the last one of another group; words in three contexts."""
    a, b, c = (
        tuple(Completion(context, word) for word in words)
        for context, words in zip(CONTEXTS, (WORDS[:3], WORDS[1:4], WORDS[:2]), strict=True)
    )
    comparisons = (Comparison("1", "up", "H", a), Comparison("2", "up", "L", b), Comparison("3", "down", "H", c))
    clozes = (Cloze("1", "up", "H", a[:2]), Cloze("2", "up", "L", b[:1]), Cloze("3", "down", "H", c[:1]))
    return Diagnostic("made", Path("made.tsv"), comparisons, clozes)


def scored(scores: dict[Completion, BlankScore | None]) -> DiagnosticScores:
    return score_diagnostic(diagnostic(), scores, vocab_size=tiny_tokenizer().vocab_size, top=[1, 5], margin=0.01)


def test_figures_of_made_up_answers() -> None:
    made = diagnostic()
    asked = {c: BlankScore(-9.0, 1, 40, 0, (7,)) for each in made.comparisons for c in each.completions}
    one, two, three = (each.completions for each in made.comparisons)
    asked[one[0]] = BlankScore(np.log(0.4), 1, 2, 0, (7,))
    asked[one[1]] = BlankScore(np.log(0.2), 1, 0, 0, (7,))
    asked[two[1]] = BlankScore(-9.0, 3, 9, 0, (7,))  # more tokens, and a tie with both others
    asked[three[0]] = BlankScore(np.log(0.205), 1, 0, 1, (7,))
    asked[three[1]] = BlankScore(np.log(0.2), 1, 0, 0, (7,))
    found = scored(dict(asked))
    assert found.find(SENSITIVITY, "up").credits == (1.0, pytest.approx(1 / 3))
    assert (found.find(SENSITIVITY, "up").ties, found.find(SENSITIVITY, "up").chance) == (1, pytest.approx(1 / 3))
    assert found.find(ONE_TOKEN, "up").credits == (1.0,)
    assert found.find(SENSITIVITY, "down").value == 1
    assert found.find(BY_MARGIN, "down").value == 0
    assert found.find(accuracy(1), "up").credits == (1.0, 0.0)  # the second expected word is the most probable
    assert found.find(accuracy(1), "down").value == 0.5
    every = score_diagnostic(made, asked, vocab_size=3, top=[5], margin=0.01).find(accuracy(5), "down")
    assert (every.value, every.chance) == (1, 1)  # more than the vocabulary has
    groups = {(s.condition, s.group): s.value for s in found.proportions if s.measure == SENSITIVITY}
    assert groups["up", "H"] == 1
    assert len(found.comparisons) == 3
    assert found.unreadable == []


def test_items_that_cannot_be_read_count_for_nothing_and_are_named() -> None:
    made = diagnostic()
    asked: dict[Completion, BlankScore | None] = {
        c: BlankScore(-9.0, 2, 40, 0, (7,)) for each in made.comparisons for c in each.completions
    }
    asked[made.comparisons[2].completions[1]] = None
    found = scored(asked)
    assert found.find(SENSITIVITY, "down").value is None
    assert found.find(SENSITIVITY, "down").interval is None
    assert len(found.find(SENSITIVITY, "up").credits) == 2
    assert found.unreadable == [f"{CONTEXTS[2]} {WORDS[1]}"]
    assert found.unscored_blanks == 3


def test_constant_logits_are_at_chance_exactly() -> None:
    tokenizer = tiny_tokenizer()
    model = constant_model(tokenizer)
    words = [word for word in ("the", "a", "of", "in", ".") if len(tokenizer.encode_batch([word])[0]) == 1][:3]
    completions = tuple(Completion(CONTEXTS[0], word) for word in words)
    made = Diagnostic(
        "made",
        Path("made.tsv"),
        (Comparison("1", "", "", completions), Comparison("2", "", "", completions[::-1])),
        (Cloze("1", "", "", completions[:1]),),
    )
    filled = dict(zip(completions, fill(model, list(completions)), strict=True))
    found = score_diagnostic(made, filled, vocab_size=tokenizer.vocab_size, top=[1, 5], margin=0.0)
    assert found.find(SENSITIVITY).value == pytest.approx(1 / 3)
    assert found.find(BY_MARGIN).value == 0
    for k in (1, 5):
        assert found.find(accuracy(k)).value == pytest.approx(k / tokenizer.vocab_size)
        assert found.find(accuracy(k)).chance == pytest.approx(k / tokenizer.vocab_size)

"""Filling in masks: the distribution of each chain, Mask-Predict's counts, and diffusion's schedule."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.data.random import Draw
from bertkit.errors import DataError
from bertkit.generation import run
from bertkit.generation import sampling as sampling_module
from bertkit.generation.masked import (
    Filling,
    MaskFiller,
    diffusion,
    gibbs,
    left_to_right,
    mask_predict,
    metropolis_hastings,
    parallel,
    remasked_positions,
)
from bertkit.generation.masked_text import MaskedPredictor, Place, TextWithMasks
from bertkit.generation.run import generate
from bertkit.generation.sampling import Sampling
from bertkit.generation.settings import GenerationSettings
from bertkit.models.families.bert import BertConfig
from bertkit.models.headed import SCORING_RULE, HeadedModel
from tests.probing.tiny_models import tiny_tokenizer

CLS, SEP, MASK, A, B = 0, 1, 2, 3, 4
SPECIAL = (CLS, SEP, MASK)


class ToyConditionals:
    """Two tokens at two positions with conditionals of no joint distribution: the first prefers to equal the second,
    the second prefers to differ from the first."""

    def __init__(self) -> None:
        self.table = torch.full((3, 5, 5), -torch.inf)  # by position and the other position's token
        self.table[1:, :, A], self.table[1:, :, B] = 0.4, 0.0
        for other in (A, B):
            self.table[1, other, other] += 1.5
            self.table[2, other, A + B - other] += 1.5

    def __call__(self, ids: Sequence[Sequence[int]], places: Sequence[Place]) -> Tensor:
        others = [ids[row][3 - position] for row, position in places]
        return self.table[[position for _, position in places], others]


def toy_texts(count: int) -> list[TextWithMasks]:
    return [TextWithMasks([CLS, MASK, MASK, SEP], [1, 2], 0, number) for number in range(count)]


def frequencies(fillings: Sequence[Filling]) -> np.ndarray:
    found = dict.fromkeys(product((A, B), repeat=2), 0)
    for each in fillings:
        found[(each.ids[1], each.ids[2])] += 1
    return np.array(list(found.values())) / len(fillings)


def exact(energy: str) -> np.ndarray:
    """exp(-E) over all texts, normalised."""
    weights = []
    for state in product((A, B), repeat=2):
        total = 0.0
        for position in (1, 2):
            ids = [CLS, *state, SEP]
            ids[position] = MASK
            logits = ToyConditionals()([ids], [(0, position)])[0]
            own = logits if energy == "raw" else torch.log_softmax(logits, dim=-1)
            total += float(own[state[position - 1]])
        weights.append(np.exp(total))
    return np.array(weights) / np.sum(weights)


def variation(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.abs(first - second).sum() / 2)


def filler(sampling: Sampling | None = None, seed: int = 0) -> MaskFiller:
    return MaskFiller(ToyConditionals(), MASK, sampling or Sampling(), Draw(seed))


@pytest.mark.parametrize(
    ("energy", "sampling"), [("normalised", Sampling()), ("raw", Sampling(temperature=2.0))], ids=["normalised", "raw"]
)
def test_metropolis_hastings_converges_to_its_energy_and_gibbs_does_not(energy: str, sampling: Sampling) -> None:
    count, sweeps = 3000, 8
    target = exact(energy)
    chains = metropolis_hastings(filler(sampling), toy_texts(count), sweeps=sweeps, energy=energy)
    assert variation(frequencies(chains), target) < 0.02
    plain = gibbs(filler(sampling), toy_texts(count), iterations=2 * sweeps, burn_in=0)
    assert variation(frequencies(plain), target) > 0.05


def test_draws_do_not_depend_on_how_many_rows_have_their_probabilities_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits_RV = torch.randn(50, 300, generator=torch.Generator().manual_seed(0)) * 3
    uniform_R = np.random.default_rng(0).random(50)
    most: list[int] = []
    narrowed = Sampling._narrowed

    def counted(self: Sampling, part_RV: Tensor) -> tuple[Tensor | None, Tensor]:
        most.append(len(part_RV))
        return narrowed(self, part_RV)

    monkeypatch.setattr(Sampling, "_narrowed", counted)
    for each in (Sampling(), Sampling(0.5, top_k=20), Sampling(top_p=0.9), Sampling(2.0, 290, 0.7)):
        monkeypatch.setattr(sampling_module, "_NUMBERS_AT_ONCE", 1 << 24)
        whole_R = each.draw(logits_RV, uniform_R)
        assert most == [50]
        monkeypatch.setattr(sampling_module, "_NUMBERS_AT_ONCE", 300 * 7)
        assert torch.equal(each.draw(logits_RV, uniform_R), whole_R)
        assert max(most[1:]) == 7
        most.clear()


class BlindConditionals(ToyConditionals):
    """Refuses texts in which a token to predict can be read."""

    def __call__(self, ids: Sequence[Sequence[int]], places: Sequence[Place]) -> Tensor:
        assert all(ids[row][position] == MASK for row, position in places)
        return super().__call__(ids, places)


@pytest.mark.parametrize("method", ["gibbs", "left-to-right", "metropolis-hastings"])
def test_a_chain_over_tokens_never_reads_the_token_that_it_draws(method: str) -> None:
    blind = MaskFiller(BlindConditionals(), MASK, Sampling(), Draw(0))
    found = METHODS[method](blind, toy_texts(20))
    assert [each.ids for each in found] == [each.ids for each in METHODS[method](filler(), toy_texts(20))]


@pytest.mark.parametrize("sweeps", [1, 3])
def test_where_the_energy_is_constant_every_proposal_that_is_symmetric_is_taken(sweeps: int) -> None:
    """The score of a chain is minus its energy, recomputed from its last text."""
    for each in metropolis_hastings(filler(), toy_texts(50), sweeps=sweeps):
        total = 0.0
        for position in (1, 2):
            ids = list(each.ids)
            ids[position] = MASK
            logits = ToyConditionals()([ids], [(0, position)])[0]
            total += float(torch.log_softmax(logits, dim=-1)[each.ids[position]])
        assert each.score == pytest.approx(total, rel=1e-5)


def test_burn_in_draws_from_the_whole_distribution() -> None:
    """Restricted to the most probable token, the chain is deterministic after the burn-in."""
    narrow = Sampling(top_k=1)
    during = gibbs(filler(narrow), toy_texts(400), iterations=8, burn_in=8)
    assert (frequencies(during) > 0.05).all()
    after = gibbs(filler(narrow), toy_texts(400), iterations=40, burn_in=0)
    assert len({tuple(each.ids) for each in after}) < 4 or (frequencies(after) != frequencies(during)).any()


def test_burn_in_is_the_first_iterations() -> None:
    """Restricted to the most probable token, here A, a draw after the burn-in is certain."""
    texts = [TextWithMasks([CLS, MASK, A, SEP], [1], 0, number) for number in range(50)]
    last = {
        burn_in: {each.ids[1] for each in gibbs(filler(Sampling(top_k=1)), texts, iterations=3, burn_in=burn_in)}
        for burn_in in (0, 2, 3)
    }
    assert last == {0: {A}, 2: {A}, 3: {A, B}}


def model() -> HeadedModel:
    config = BertConfig(
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=20,
        max_position_embeddings=40,
        initializer_range=0.5,
    )
    made = HeadedModel(config.build(60), ["masked_lm"])
    made.initialise(3)
    return made.eval()


def text_filler(made: HeadedModel, sampling: Sampling | None = None) -> MaskFiller:
    predictor = MaskedPredictor(made, tiny_tokenizer(), suppressed_ids=SPECIAL, batch_tokens=64)
    return MaskFiller(predictor, MASK, sampling or Sampling(), Draw(3))


def texts() -> list[TextWithMasks]:
    """Masks among words, masks only, one mask, and a copy as another sample."""
    rows = [
        [CLS, 10, MASK, 11, MASK, MASK, 12, SEP],
        [CLS, *[MASK] * 11, SEP],
        [CLS, 20, 21, MASK, SEP],
        [CLS, *[MASK] * 11, SEP],
    ]
    return [
        TextWithMasks(
            ids,
            [i for i, token in enumerate(ids) if token == MASK],
            min(number, 2) if number < 3 else 1,
            int(number == 3),
        )
        for number, ids in enumerate(rows)
    ]


METHODS = {
    "gibbs": lambda own, some: gibbs(own, some, iterations=30, burn_in=4),
    "left-to-right": left_to_right,
    "parallel": lambda own, some: parallel(own, some, iterations=3),
    "metropolis-hastings": lambda own, some: metropolis_hastings(own, some, sweeps=2),
    "mask-predict": lambda own, some: mask_predict(own, some, rounds=4),
    "diffusion": lambda own, some: diffusion(own, some, steps=5),
    "diffusion in blocks": lambda own, some: diffusion(own, some, steps=6, block_length=4),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_mask_is_filled_nothing_else_changes_and_company_decides_nothing(method: str) -> None:
    own = text_filler(model(), Sampling(temperature=1.5, top_k=30))
    together = METHODS[method](own, texts())
    for text, found in zip(texts(), together, strict=True):
        kept = [token for position, token in enumerate(found.ids) if position not in text.free]
        assert kept == [token for token in text.ids if token != MASK]
        assert not set(found.new_ids) & set(SPECIAL)
        (alone,) = METHODS[method](own, [text])
        assert alone.ids == found.ids
        assert alone.score == pytest.approx(found.score, rel=1e-4)
    if method != "mask-predict":
        assert together[1].ids != together[3].ids  # another sample of the same prompt


def test_texts_are_filled_in_groups_whose_logits_fit_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = GenerationSettings(method="parallel", samples=5, max_new_tokens=4, iterations=2)
    made = model()
    whole = generate(made, tiny_tokenizer(), ["a b"], settings)
    groups: list[int] = []
    by_method = run._by_method

    def counted(own: MaskFiller, some: Sequence[TextWithMasks], chosen: GenerationSettings) -> list[Filling]:
        groups.append(len(some))
        return by_method(own, some, chosen)

    monkeypatch.setattr(run, "_by_method", counted)
    monkeypatch.setattr(run, "_MOST_LOGITS", 2 * 4 * made.encoder.vocab_size)
    found = generate(made, tiny_tokenizer(), ["a b"], settings)
    assert groups == [2, 2, 1]
    assert [each["ids"] for each in found[0]["outputs"]] == [each["ids"] for each in whole[0]["outputs"]]


@pytest.mark.parametrize("masks", [1, 2, 7, 10, 13])
@pytest.mark.parametrize("rounds", [1, 2, 3, 4, 10])
def test_mask_predict_masks_exactly_as_many_as_the_paper(masks: int, rounds: int) -> None:
    text = TextWithMasks([CLS, *[MASK] * masks, SEP], list(range(1, masks + 1)), 0)
    seen: list[int] = []

    def conditionals(ids: Sequence[Sequence[int]], places: Sequence[Place]) -> Tensor:
        seen.append(len(places))
        assert ids[0].count(MASK) == len(places)
        logits_MV = torch.randn(len(places), 9, generator=torch.Generator().manual_seed(len(seen)))
        return logits_MV.index_fill(1, torch.tensor(SPECIAL), -torch.inf)

    (found,) = mask_predict(MaskFiller(conditionals, MASK, Sampling(), Draw(0)), [text], rounds=rounds)
    expected = [masks, *(int(np.floor(masks * (1 - t / rounds) + 1e-9)) for t in range(1, rounds))]
    assert seen == [count for count in expected if count]
    assert len(found.log_p) == masks


def test_mask_predict_masks_the_least_probable_and_keeps_the_others_probabilities() -> None:
    filling = Filling.of(TextWithMasks([CLS, *[MASK] * 4, SEP], [1, 2, 3, 4], 0))
    filling.log_p = {1: -0.5, 2: -3.0, 3: -0.1, 4: -2.0}
    assert remasked_positions(filling, 0, 4) == []
    assert remasked_positions(filling, 1, 4) == [2, 4, 1]
    assert remasked_positions(filling, 2, 4) == [2, 4]
    assert remasked_positions(filling, 3, 4) == [2]


@pytest.mark.parametrize(
    ("masks", "steps", "block"), [(7, 3, None), (7, 7, None), (8, 20, None), (9, 4, 4), (10, 2, 3)]
)
def test_diffusion_keeps_the_most_confident_an_equal_number_in_each_step(
    masks: int, steps: int, block: int | None
) -> None:
    """As LLaDA's generate.py, for one text and the most probable tokens."""
    text = TextWithMasks([CLS, *[MASK] * masks, SEP], list(range(1, masks + 1)), 0)
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(masks + 2, 9, generator=generator).index_fill(1, torch.tensor(SPECIAL), -torch.inf)
    left: list[list[int]] = []

    def conditionals(ids: Sequence[Sequence[int]], places: Sequence[Place]) -> Tensor:
        left.append([position for position, token in enumerate(ids[0]) if token == MASK])
        return logits[[position for _, position in places]]

    diffusion(MaskFiller(conditionals, MASK, Sampling(top_k=1), Draw(0)), [text], steps=steps, block_length=block)
    best = torch.softmax(logits, dim=-1).max(dim=-1).values
    left.append([])
    size = block or masks
    counts = [len(before) - len(after) for before, after in pairwise(left)]
    assert sum(counts) == masks
    if block is None:
        share, more = divmod(masks, min(steps, masks))
        assert counts == [share + (number < more) for number in range(min(steps, masks))]
    for before, after in pairwise(left):
        first = (before[0] - 1) // size * size
        own = [position for position in before if first < position <= first + size]
        filled = [position for position in own if position not in after]
        assert set(before) - set(after) == set(filled)
        others = [float(best[position]) for position in own if position in after]
        assert not others or min(float(best[position]) for position in filled) >= max(others)


def test_left_to_right_is_the_chain_rule_over_the_masks() -> None:
    made = model()
    (found,) = left_to_right(text_filler(made), texts()[:1])
    ids, total = list(found.text.ids), 0.0
    for position in found.text.free:
        with torch.no_grad():
            logits = made.masked_lm_logits(made(PackedBatch.from_ids([ids])))[position]
        total += float(
            torch.log_softmax(logits.index_fill(0, torch.tensor(SPECIAL), -torch.inf), dim=-1)[found.ids[position]]
        )
        ids[position] = found.ids[position]
    assert found.score == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("shift", [0, -1])
def test_the_predictor_reads_the_state_that_was_trained_whatever_shares_a_batch(shift: int) -> None:
    made = model()
    if shift:
        made.extras[SCORING_RULE] = "masked_next_token"
    rows = [[CLS, 9, MASK, 8, SEP], [CLS, MASK, SEP], [CLS, 9, MASK, 8, SEP], [CLS, MASK, *[7] * 30, MASK, SEP]]
    places = [(3, 32), (0, 2), (1, 1), (2, 2), (3, 1)]
    found = MaskedPredictor(made, tiny_tokenizer(), suppressed_ids=[MASK], batch_tokens=8)(rows, places)
    for number, (row, position) in enumerate(places):
        with torch.no_grad():
            expected = made.masked_lm_logits(made(PackedBatch.from_ids([rows[row]])))[position + shift]
        expected[MASK] = -torch.inf
        torch.testing.assert_close(found[number], expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(found[1], found[3])


def test_models_that_fill_no_masks_are_refused() -> None:
    made = model()
    made.extras[SCORING_RULE] = "encoder_left_to_right"
    with pytest.raises(DataError, match="only from left to right"):
        MaskedPredictor(made, tiny_tokenizer())
    with pytest.raises(DataError, match="no head that fills in masks"):
        MaskedPredictor(HeadedModel(made.encoder, ["sequence_classification"]), tiny_tokenizer())

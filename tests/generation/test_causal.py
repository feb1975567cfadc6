"""Left-to-right generation: the outputs of `transformers`, and draws that are independent of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertkit.data.random import Draw
from bertkit.errors import DataError
from bertkit.generation.beam import PENALTIES, beam_search
from bertkit.generation.causal import Generated, Limits, Prompt, decode
from bertkit.generation.sampling import Sampling, check_finite
from bertkit.models.decoding.causal import next_tokens
from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.files.hub import load_model
from bertkit.models.headed import HeadedModel
from tests.models.oracle import VOCABULARY, Case, all_cases, make_oracle

pytest.importorskip("transformers")

END = 7
ROOM = 11
LENGTHS = [5, 1, 8, 4]


@pytest.fixture(scope="module", params=["gpt2", "openai-gpt"])
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, HeadedModel]:
    case: Case = next(case for case in all_cases() if case.name == request.param)
    directory = tmp_path_factory.mktemp("oracle")
    oracle = make_oracle(case, case.heads["causal_lm"], seed=3)
    oracle.save_pretrained(directory)
    return oracle, load_model(directory)[0]


def prompts(room: int = ROOM) -> list[Prompt]:
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(8, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]
    return [Prompt(row, number, room) for number, row in enumerate(ids)]


def asked(oracle: Any, prompt: Prompt, end_ids: Sequence[int] = (END,), **settings: Any) -> list[list[int]]:
    """The new tokens of the oracle's outputs, without an end token and what follows it."""
    ids = torch.tensor([prompt.ids])
    found = oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=prompt.room,
        do_sample=False,
        pad_token_id=end_ids[0],
        eos_token_id=list(end_ids),
        **settings,
    )
    rows = found[:, len(prompt.ids) :].tolist()
    return [list(takewhile(lambda token: token not in end_ids, row)) for row in rows]


def new_ids(outputs: list[list[Generated]]) -> list[list[list[int]]]:
    return [[each.ids for each in own] for own in outputs]


def test_greedy_is_the_oracles_for_prompts_of_unequal_length_in_one_batch(twins: tuple[Any, HeadedModel]) -> None:
    oracle, model = twins
    outputs = decode(next_tokens(model), prompts(), Limits(frozenset({END})), sampling=None)
    assert new_ids(outputs) == [asked(oracle, prompt) for prompt in prompts()]


@pytest.mark.parametrize(("beams", "penalty"), [(1, 1.0), (3, 1.0), (4, 0.0), (5, 2.0), (2, -1.0)])
def test_beams_are_the_oracles_all_of_them(twins: tuple[Any, HeadedModel], beams: int, penalty: float) -> None:
    oracle, model = twins
    limits = Limits(frozenset({END}))
    together = beam_search(next_tokens(model), prompts(), limits, beams=beams, length_penalty=penalty, samples=beams)
    for prompt, own in zip(prompts(), together, strict=True):
        more = {"length_penalty": penalty} if beams > 1 else {}
        expected = asked(oracle, prompt, num_beams=beams, num_return_sequences=beams, **more)
        assert [each.ids for each in own] == expected
        alone = beam_search(next_tokens(model), [prompt], limits, beams=beams, length_penalty=penalty, samples=beams)
        assert new_ids(alone) == [[each.ids for each in own]]


def test_beams_of_which_most_continuations_end_are_the_oracles(twins: tuple[Any, HeadedModel]) -> None:
    oracle, model = twins
    end_ids = [token for token in range(VOCABULARY) if token % 4]
    limits = Limits(frozenset(end_ids))
    outputs = beam_search(next_tokens(model), prompts(), limits, beams=4, length_penalty=2.0, samples=4)
    assert new_ids(outputs) == [
        asked(oracle, prompt, end_ids, num_beams=4, num_return_sequences=4, length_penalty=2.0) for prompt in prompts()
    ]
    assert any(len(each.ids) > 1 for own in outputs for each in own)


def test_a_beam_of_one_is_greedy(twins: tuple[Any, HeadedModel]) -> None:
    _, model = twins
    for end_ids in (frozenset[int](), frozenset({END}), frozenset(range(40))):
        greedy = decode(next_tokens(model), prompts(), Limits(end_ids), sampling=None)
        beam = beam_search(next_tokens(model), prompts(), Limits(end_ids), beams=1)
        assert new_ids(greedy) == new_ids(beam)
        assert [own[0].finish for own in greedy] == [own[0].finish for own in beam]
        scores = [[own[0].score for own in each] for each in (greedy, beam)]
        np.testing.assert_allclose(scores[0], scores[1], rtol=1e-5)


def test_a_score_is_the_log_probability_of_the_new_tokens(twins: tuple[Any, HeadedModel]) -> None:
    oracle, model = twins
    (prompt, *_), limits = prompts(), Limits()
    sampling = Sampling(temperature=1.7, top_k=20, top_p=0.9)
    ((drawn,),) = decode(next_tokens(model), [prompt], limits, sampling=sampling, draw=Draw(4))
    with torch.no_grad():
        logits = oracle(torch.tensor([[*prompt.ids, *drawn.ids]])).logits[0].double()
    log_p = torch.log_softmax(logits, dim=-1)[len(prompt.ids) - 1 : -1]
    expected = log_p.gather(1, torch.tensor(drawn.ids)[:, None]).sum().item()
    assert drawn.score == pytest.approx(expected, rel=1e-5)


def test_draws_do_not_depend_on_company(twins: tuple[Any, HeadedModel]) -> None:
    """Not on the other prompts of a batch, on the number of samples, nor on a cache."""
    _, model = twins
    limits, sampling, draw = Limits(frozenset({END})), Sampling(), Draw(11, "generate")
    together = decode(next_tokens(model), prompts(), limits, sampling=sampling, samples=3, draw=draw)
    for prompt in prompts():
        alone = decode(next_tokens(model), [prompt], limits, sampling=sampling, samples=2, draw=draw)
        assert new_ids(alone)[0] == new_ids(together)[prompt.number][:2]
    plain = decode(next_tokens(model, cached=False), prompts(), limits, sampling=sampling, samples=3, draw=draw)
    assert new_ids(plain) == new_ids(together)
    other = decode(next_tokens(model), prompts(), limits, sampling=sampling, samples=3, draw=Draw(12, "generate"))
    assert new_ids(other) != new_ids(together)
    assert len({tuple(each.ids) for own in together for each in own}) == 12


@pytest.mark.parametrize("kind", ["plain", "temperature", "top_k", "top_p", "both"])
def test_draws_have_the_frequencies_of_the_narrowed_distribution(kind: str) -> None:
    generator = torch.Generator().manual_seed(9)
    logits_V = torch.randn(301, generator=generator) * 3
    logits_V[17] = -torch.inf
    sampling = {
        "plain": Sampling(),
        "temperature": Sampling(temperature=0.5),
        "top_k": Sampling(top_k=5),
        "top_p": Sampling(top_p=0.8),
        "both": Sampling(temperature=2.0, top_k=50, top_p=0.6),
    }[kind]
    expected_V = _narrowed(logits_V.double(), sampling) if kind != "plain" else logits_V.double().softmax(-1)
    p_1V = sampling.log_p(logits_V[None], torch.arange(301)[None]).exp()
    torch.testing.assert_close(p_1V[0], expected_V, atol=1e-6, rtol=1e-5)
    uniform_R = (np.arange(20_000) + 0.5) / 20_000
    token_R = sampling.draw(logits_V.expand(20_000, -1), uniform_R)
    found_V = torch.bincount(token_R, minlength=301).double() / 20_000
    torch.testing.assert_close(found_V, expected_V, atol=1.01 / 20_000, rtol=0)


def test_a_nucleus_may_be_most_of_the_vocabulary() -> None:
    logits_V = torch.randn(1301, generator=torch.Generator().manual_seed(3)) / 10
    sampling = Sampling(top_p=0.95)
    expected_V = _narrowed(logits_V.double(), sampling)
    assert (expected_V > 0).sum() > 1200
    p_1V = sampling.log_p(logits_V[None], torch.arange(1301)[None]).exp()
    torch.testing.assert_close(p_1V[0], expected_V, atol=1e-9, rtol=1e-5)


def _narrowed(logits_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """With `transformers`' own processors."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    ids, row_1V = torch.zeros(1, 1, dtype=torch.long), logits_V[None]
    row_1V = TemperatureLogitsWarper(sampling.temperature)(ids, row_1V)
    if sampling.top_k is not None:
        row_1V = TopKLogitsWarper(sampling.top_k)(ids, row_1V)
    if sampling.top_p is not None:
        row_1V = TopPLogitsWarper(sampling.top_p)(ids, row_1V)
    return torch.softmax(row_1V[0], dim=-1)


def test_the_ends_of_the_uniform_range_draw_tokens_that_are_allowed() -> None:
    logits_RV = torch.tensor([[-torch.inf, 1.0, 2.0, -torch.inf]] * 2)
    for sampling in (Sampling(), Sampling(top_k=3), Sampling(top_p=0.9), Sampling(top_p=1e-9)):
        found = sampling.draw(logits_RV, np.array([0.0, 1 - 2.0**-53])).tolist()
        assert set(found) <= {1, 2}
    assert Sampling(top_p=1e-9).draw(logits_RV, np.array([0.0, 0.99])).tolist() == [2, 2]
    assert Sampling(top_k=1).draw(logits_RV, np.array([0.0, 0.99])).tolist() == [2, 2]


def test_stop_texts_and_room_end_outputs_and_suppressed_tokens_never_appear(twins: tuple[Any, HeadedModel]) -> None:
    _, model = twins
    free = decode(next_tokens(model), prompts(), Limits(), sampling=None)
    stop = free[2][0].ids[3]
    limits = Limits(is_stop=lambda number, ids: number == 2 and ids[-1] == stop)
    found = decode(next_tokens(model), prompts(), limits, sampling=None)
    assert found[2][0].finish == "stop"
    assert found[2][0].ids == free[2][0].ids[: free[2][0].ids.index(stop) + 1]
    assert new_ids(found)[:2] == new_ids(free)[:2]
    unequal = [Prompt(each.ids, each.number, 3 * each.number + 1) for each in prompts(1)]
    unequal = [each for each in unequal if len(each.ids) + each.room <= 19]
    shorter = decode(next_tokens(model), unequal, Limits(), sampling=None)
    assert [len(own[0].ids) for own in shorter] == [each.room for each in unequal]
    forbidden = tuple({own[0].ids[0] for own in free})
    other = decode(next_tokens(model), prompts(), Limits(suppressed_ids=forbidden), sampling=None)
    assert not {token for own in other for token in own[0].ids} & set(forbidden)
    beams = beam_search(next_tokens(model), prompts(), Limits(suppressed_ids=forbidden), beams=3)
    assert not {token for own in beams for token in own[0].ids} & set(forbidden)


def test_a_vocabulary_smaller_than_the_beam(tmp_path: Path) -> None:
    """All continuations of the first step are kept, and no beam is filled by a missing one."""
    config = Gpt2Config(
        hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=24, max_position_embeddings=9
    )
    model = HeadedModel(config.build(4), ("causal_lm",))
    model.initialise(1)
    (found,) = beam_search(next_tokens(model), [Prompt([2], 0, 3)], Limits(), beams=40, length_penalty=0.0, samples=40)
    assert len({tuple(each.ids) for each in found}) == 40
    scores = [each.score for each in found]
    assert scores == sorted(scores, reverse=True)
    (all_found,) = beam_search(
        next_tokens(model), [Prompt([2], 0, 3)], Limits(), beams=64, length_penalty=0.0, samples=64
    )
    assert np.exp([each.score for each in all_found]).sum() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("power", [0.0, 0.6, 2.0, -0.7])
@pytest.mark.parametrize(("form", "base"), [("length", lambda n: n), ("gnmt", lambda n: (5 + n) / 6)])
def test_a_beam_of_all_outputs_ranks_them_as_an_exhaustive_search_does(
    form: str, base: Callable[[int], float], power: float
) -> None:
    vocabulary, room, end = 5, 4, 3
    config = Gpt2Config(
        hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=24, max_position_embeddings=9
    )
    model = HeadedModel(config.build(vocabulary), ("causal_lm",)).eval()
    model.initialise(1)
    for weight in model.parameters():
        weight.data *= 5
    outputs = [ids for length in range(1, room + 1) for ids in product(range(vocabulary), repeat=length)]
    outputs = [ids for ids in outputs if end not in ids[:-1] and (ids[-1] == end or len(ids) == room)]
    decoder = next_tokens(model, cached=False)
    log_p_of = {
        before: decoder.start([[2, *before]], 9)[0].double().log_softmax(-1).tolist()
        for before in {ids[:place] for ids in outputs for place in range(len(ids))}
    }
    score_of = {ids: sum(log_p_of[ids[:place]][token] for place, token in enumerate(ids)) for ids in outputs}
    ranks = sorted((score / base(len(ids)) ** power for ids, score in score_of.items()), reverse=True)
    (found,) = beam_search(
        next_tokens(model), [Prompt([2], 0, room)], Limits(frozenset({end})), beams=vocabulary**room,
        length_penalty=power, penalty=PENALTIES[form], samples=9,
    )  # fmt: skip
    ended = [(*each.ids, end) if each.finish == "end" else tuple(each.ids) for each in found]
    assert [score_of[ids] / base(len(ids)) ** power for ids in ended] == pytest.approx(ranks[:9], rel=1e-5)


@pytest.mark.parametrize("cached", [True, False])
def test_a_prompt_that_fills_the_model_does_not_end_the_others(cached: bool) -> None:
    """One finished row of many is kept, but not beyond the last position that the model has."""
    config = Gpt2Config(
        hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=24, max_position_embeddings=16
    )
    model = HeadedModel(config.build(20), ("causal_lm",))
    model.initialise(1)
    asked = [Prompt([*range(14)], 0, 2), *(Prompt([1, number], number, 9) for number in range(1, 8))]
    together = decode(next_tokens(model, cached=cached), asked, Limits(), sampling=None)
    alone = [decode(next_tokens(model), [prompt], Limits(), sampling=None)[0] for prompt in asked]
    assert new_ids(together) == new_ids(alone)
    assert [len(own[0].ids) for own in together] == [2, *[9] * 7]


def test_one_number_that_is_not_finite_is_enough_and_minus_infinity_is_a_score() -> None:
    check_finite(torch.tensor([0.0, -torch.inf]))
    for wrong in (torch.nan, torch.inf):
        with pytest.raises(DataError, match="not finite numbers"):
            check_finite(torch.tensor([0.0, wrong]))


def test_a_damaged_model_is_named(twins: tuple[Any, HeadedModel]) -> None:
    _, model = twins
    saved = model.encoder.word_embedding.weight[5].clone()
    with torch.no_grad():
        model.encoder.word_embedding.weight[5] = torch.nan
    try:
        for search in (
            lambda: decode(next_tokens(model), prompts(), Limits(), sampling=None),
            lambda: beam_search(next_tokens(model), prompts(), Limits(), beams=2),
        ):
            with pytest.raises(DataError, match="not finite numbers"):
                search()
    finally:
        with torch.no_grad():
            model.encoder.word_embedding.weight[5] = saved

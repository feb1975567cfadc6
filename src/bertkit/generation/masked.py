"""Ways to fill masks: chains over tokens, from left to right, all at once, and by confidence.

- `gibbs`: Wang and Cho 2019, arXiv:1902.04094, section 3, as their parallel-sequential sampling: a position at random
  is masked and drawn again. Their claim that this samples from a Markov random field was withdrawn: the conditionals
  of a masked LM belong to no joint distribution.
- `metropolis-hastings`: Goyal et al. 2021, arXiv:2106.02736, section 3: the same draws are proposals, and an energy of
  the whole text decides whether they are taken, so that the chain's distribution is known.
- `left-to-right` and `parallel`: the other two orders of Wang and Cho's code.
- `mask-predict`: Ghazvininejad et al. 2019, arXiv:1904.09324, section 3.2, with a given length: all masks are filled,
  then in round t of T the floor(N (1 - t/T)) least probable tokens are masked and predicted again.
- `diffusion`: Nie et al. 2025, LLaDA, arXiv:2502.09992, section 2.4 and its generate.py: every step predicts all masks
  and keeps the most confident ones, an equal number in each step.

Every draw is keyed by (seed, prompt, sample, step and position), so it does not depend on the rest of the batch.

Shapes: M predicted tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bertkit.data.random import Draw
from bertkit.generation.masked_text import Conditionals, Place, TextWithMasks
from bertkit.generation.sampling import Sampling

_MOST_POSITIONS = 1 << 16
"""Distance of two steps in the address of a draw."""


@dataclass
class Filling:
    """A text while it is being filled.

    Attributes:
        text: as given.
        ids: in its present state.
        log_p: of the token at each filled position when it was chosen, in nats, under the model's own distribution.
        energy: of the whole text, for methods that have one.
    """

    text: TextWithMasks
    ids: list[int]
    log_p: dict[int, float]
    energy: float | None = None

    @classmethod
    def of(cls, text: TextWithMasks) -> Filling:
        return cls(text, list(text.ids), {})

    @property
    def new_ids(self) -> list[int]:
        """The tokens in place of the masks."""
        return [self.ids[position] for position in self.text.free]

    @property
    def score(self) -> float:
        """Minus the energy if there is one; else the sum of `log_p`."""
        return sum(self.log_p.values()) if self.energy is None else -self.energy


class MaskFiller:
    """The common part of all methods: the model, the random numbers, and how tokens are drawn.

    Args:
        conditionals: the model.
        mask_id: id of the mask token.
        sampling: the distribution that tokens are drawn from.
        draw: the source of uniform numbers.
    """

    def __init__(self, conditionals: Conditionals, mask_id: int, sampling: Sampling, draw: Draw) -> None:
        self.conditionals = conditionals
        self.mask_id = mask_id
        self.sampling = sampling
        self.draw = draw

    def uniform(
        self, purpose: str, fillings: Sequence[Filling], step: int, position: Sequence[int] | int = 0
    ) -> np.ndarray:
        """A number in [0, 1) for each."""
        return self.draw.uniform(
            purpose,
            sample=np.array([each.text.number for each in fillings]),
            epoch=np.array([each.text.sample for each in fillings]),
            position=np.asarray(position) + step * _MOST_POSITIONS,
        )

    def logits(self, fillings: Sequence[Filling], positions: Sequence[int]) -> Tensor:
        """The logits at one position of each with a mask in it, (M, V)."""
        rows = [_with(each.ids, position, self.mask_id) for each, position in zip(fillings, positions, strict=True)]
        return self.conditionals(rows, list(enumerate(positions)))

    def fill(
        self, fillings: Sequence[Filling], positions: Sequence[int], step: int, *, sampling: Sampling | None = None
    ) -> None:
        """Mask one position of each and draw its token."""
        logits_MV = self.logits(fillings, positions)
        token_M = (sampling or self.sampling).draw(logits_MV, self.uniform("token", fillings, step, positions))
        log_p_M = _log_p(logits_MV, token_M)
        for each, position, token, log_p in zip(fillings, positions, token_M.tolist(), log_p_M.tolist(), strict=True):
            each.ids[position] = token
            each.log_p[position] = log_p

    def logits_at(self, fillings: Sequence[Filling], places: Sequence[Place]) -> Tensor:
        """The logits at several positions of each text in its present state, (M, V)."""
        return self.conditionals([each.ids for each in fillings], places)


def gibbs(filler: MaskFiller, texts: Sequence[TextWithMasks], *, iterations: int, burn_in: int) -> list[Filling]:
    """Each iteration masks one position of every text at random and draws it again.

    Args:
        filler: model and draws.
        texts: in the first iteration all their masks are present.
        iterations: in total; positions that none of them chose are drawn at the end.
        burn_in: number of first iterations that draw from the whole distribution, at the filler's temperature.
    """
    fillings = [Filling.of(text) for text in texts]
    whole = Sampling(filler.sampling.temperature)
    for step in range(iterations):
        uniform_R = filler.uniform("position", fillings, step)
        positions = [
            each.text.free[int(uniform * len(each.text.free))]
            for each, uniform in zip(fillings, uniform_R, strict=True)
        ]
        filler.fill(fillings, positions, step, sampling=whole if step < burn_in else None)
    _fill_the_rest(filler, fillings, iterations)
    return fillings


def left_to_right(filler: MaskFiller, texts: Sequence[TextWithMasks]) -> list[Filling]:
    """Fill the masks in order, each once."""
    fillings = [Filling.of(text) for text in texts]
    _fill_the_rest(filler, fillings, 0)
    return fillings


def parallel(filler: MaskFiller, texts: Sequence[TextWithMasks], *, iterations: int) -> list[Filling]:
    """Every iteration draws all positions at once: the first from the masks, the others from the current text."""
    fillings = [Filling.of(text) for text in texts]
    for step in range(iterations):
        places = _places(fillings, lambda each: each.text.free)
        _take(fillings, places, *_drawn(filler, fillings, places, step))
    return fillings


def metropolis_hastings(
    filler: MaskFiller, texts: Sequence[TextWithMasks], *, sweeps: int, energy: str = "normalised"
) -> list[Filling]:
    """Samples of the distribution exp(-E). All masks are first filled in random order; then sweeps propose a new token
    for each position, again in random order, and accept or reject it.

    Args:
        filler: model and draws; its sampling is that of the proposals.
        texts: the texts.
        sweeps: number of passes over all positions.
        energy: `normalised`: minus the sum of the log-probabilities of the filled tokens, each computed with that token
            masked; `raw`: minus the sum of their logits.
    """
    fillings = [Filling.of(text) for text in texts]
    for sweep in range(sweeps + 1):
        orders = [_order(filler, each, sweep) for each in fillings]
        if sweep == 1:
            _set_energies(filler, fillings, energy)
        for number in range(max(map(len, orders))):
            active = [row for row, order in enumerate(orders) if number < len(order)]
            moving = [fillings[row] for row in active]
            positions = [orders[row][number] for row in active]
            if sweep == 0:
                filler.fill(moving, positions, 0)
            else:
                _propose(filler, moving, positions, sweep, energy)
    return fillings


def mask_predict(filler: MaskFiller, texts: Sequence[TextWithMasks], *, rounds: int) -> list[Filling]:
    """The most probable token at every mask, then rounds that predict the least probable ones again.

    Args:
        filler: the model; nothing is drawn.
        texts: the texts.
        rounds: T.
    """
    fillings = [Filling.of(text) for text in texts]
    for step in range(rounds):
        for each in fillings:
            for position in remasked_positions(each, step, rounds):
                each.ids[position] = filler.mask_id
        places = _places(fillings, lambda each: [n for n in each.text.free if each.ids[n] == filler.mask_id])
        if not places:
            break
        logits_MV = filler.logits_at(fillings, places)
        token_M = logits_MV.argmax(dim=-1)
        _take(fillings, places, token_M.tolist(), _log_p(logits_MV, token_M).tolist())
    return fillings


def remasked_positions(filling: Filling, step: int, rounds: int) -> list[int]:
    """The positions that round t of T masks: floor(N (1 - t/T)) of the N, the least probable ones; none in the first
    round, in which all are masked already."""
    if step == 0:
        return []
    count = len(filling.text.free) * (rounds - step) // rounds
    return sorted(filling.text.free, key=lambda position: (filling.log_p[position], position))[:count]


def diffusion(
    filler: MaskFiller, texts: Sequence[TextWithMasks], *, steps: int, block_length: int | None = None
) -> list[Filling]:
    """Every step predicts all masks of a block and keeps the most probable tokens, equally many in each step.

    Args:
        filler: model and draws.
        texts: the texts.
        steps: in total, at least one per block; steps beyond the number of masks have no effect.
        block_length: masks per block; None: all of a text's masks.
    """
    fillings = [Filling.of(text) for text in texts]
    plans = [_kept_by_step(len(text.free), steps, block_length) for text in texts]
    for step in range(max(map(len, plans))):
        active = [row for row, plan in enumerate(plans) if step < len(plan)]
        moving = [fillings[row] for row in active]
        own = [plans[row][step] for row in active]
        places = [
            (row, position)
            for row, (each, (first, last, _)) in enumerate(zip(moving, own, strict=True))
            for position in each.text.free[first:last]
            if each.ids[position] == filler.mask_id
        ]
        tokens, log_ps = _drawn(filler, moving, places, step)
        best = sorted(range(len(places)), key=lambda index: (places[index][0], -log_ps[index], places[index][1]))
        left = [count for _, _, count in own]
        kept = []
        for index in best:
            row = places[index][0]
            if left[row]:
                left[row] -= 1
                kept.append(index)
        _take(moving, [places[i] for i in kept], [tokens[i] for i in kept], [log_ps[i] for i in kept])
    return fillings


def _kept_by_step(masks: int, steps: int, block_length: int | None) -> list[tuple[int, int, int]]:
    """For each step the first and last mask of its block, and how many of them it fills."""
    size = masks if block_length is None else min(block_length, masks)
    blocks = [(first, min(first + size, masks)) for first in range(0, masks, size)]
    plan: list[tuple[int, int, int]] = []
    for number, (first, last) in enumerate(blocks):
        own = (number + 1) * steps // len(blocks) - number * steps // len(blocks)
        own = min(max(1, own), last - first)
        share, more = divmod(last - first, own)
        plan += [(first, last, share + (each < more)) for each in range(own)]
    return plan


def _fill_the_rest(filler: MaskFiller, fillings: Sequence[Filling], step: int) -> None:
    """Draw the positions that are still masks, from left to right."""
    while True:
        waiting = [
            (each, next((position for position in each.text.free if each.ids[position] == filler.mask_id), None))
            for each in fillings
        ]
        moving = [(each, position) for each, position in waiting if position is not None]
        if not moving:
            return
        filler.fill([each for each, _ in moving], [position for _, position in moving], step)


def _places(fillings: Sequence[Filling], positions: Callable[[Filling], Sequence[int]]) -> list[Place]:
    return [(row, position) for row, each in enumerate(fillings) for position in positions(each)]


def _drawn(
    filler: MaskFiller, fillings: Sequence[Filling], places: Sequence[Place], step: int
) -> tuple[list[int], list[float]]:
    """A token at each place, all from the text in its present state, and its log-probability."""
    logits_MV = filler.logits_at(fillings, places)
    owners = [fillings[row] for row, _ in places]
    positions = [position for _, position in places]
    token_M = filler.sampling.draw(logits_MV, filler.uniform("token", owners, step, positions))
    return token_M.tolist(), _log_p(logits_MV, token_M).tolist()


def _take(fillings: Sequence[Filling], places: Sequence[Place], tokens: Sequence[int], log_ps: Sequence[float]) -> None:
    for (row, position), token, log_p in zip(places, tokens, log_ps, strict=True):
        fillings[row].ids[position] = token
        fillings[row].log_p[position] = log_p


def _order(filler: MaskFiller, filling: Filling, sweep: int) -> list[int]:
    """The positions in the order of a sweep."""
    count = len(filling.text.free)
    keys = filler.uniform("order", [filling] * count, sweep, filling.text.free)
    return [filling.text.free[number] for number in np.argsort(keys, kind="stable")]


def _set_energies(filler: MaskFiller, fillings: Sequence[Filling], kind: str) -> None:
    for each, energy in zip(
        fillings, _energies(filler, [(each.text, each.ids) for each in fillings], kind), strict=True
    ):
        each.energy = energy


def _energies(filler: MaskFiller, texts: Sequence[tuple[TextWithMasks, list[int]]], kind: str) -> list[float]:
    """Goyal et al. 2021, equations 2 and 3: computed on as many copies of a text as it has filled positions."""
    rows: list[list[int]] = []
    places: list[Place] = []
    tokens: list[int] = []
    owner: list[int] = []
    for number, (text, ids) in enumerate(texts):
        for position in text.free:
            places.append((len(rows), position))
            rows.append(_with(ids, position, filler.mask_id))
            tokens.append(ids[position])
            owner.append(number)
    logits_MV = filler.conditionals(rows, places)
    token_M = torch.tensor(tokens, device=logits_MV.device)
    term_M = _log_p(logits_MV, token_M) if kind == "normalised" else logits_MV.gather(1, token_M[:, None])[:, 0]
    return [-float(each) for each in np.bincount(owner, weights=term_M.double().cpu().numpy(), minlength=len(texts))]


def _propose(filler: MaskFiller, fillings: Sequence[Filling], positions: Sequence[int], sweep: int, kind: str) -> None:
    """One step of each chain: E(x) + log q(x) of both texts decides, where q draws the token at the position."""
    logits_MV = filler.logits(fillings, positions)
    new_M = filler.sampling.draw(logits_MV, filler.uniform("token", fillings, sweep, positions))
    old_M = torch.tensor(
        [each.ids[position] for each, position in zip(fillings, positions, strict=True)], device=new_M.device
    )
    log_q_M2 = filler.sampling.log_p(logits_MV, torch.stack([old_M, new_M], dim=1)).tolist()
    log_p_M = _log_p(logits_MV, new_M).tolist()
    changed = [number for number in range(len(fillings)) if int(old_M[number]) != int(new_M[number])]
    texts = [(fillings[n].text, _with(fillings[n].ids, positions[n], int(new_M[n]))) for n in changed]
    energies = _energies(filler, texts, kind) if changed else []
    uniform_R = filler.uniform("accept", fillings, sweep, positions)
    for number, (_, ids), energy in zip(changed, texts, energies, strict=True):
        each, (log_old, log_new) = fillings[number], log_q_M2[number]
        assert each.energy is not None
        log_ratio = each.energy - energy + log_old - log_new
        if uniform_R[number] < math.exp(min(0.0, log_ratio)):
            each.ids, each.energy = ids, energy
            each.log_p[positions[number]] = log_p_M[number]


def _with(ids: Sequence[int], position: int, token: int) -> list[int]:
    return [*ids[:position], token, *ids[position + 1 :]]


def _log_p(logits_MV: Tensor, token_M: Tensor) -> Tensor:
    """The log-probability of one token in each row, (M,)."""
    return logits_MV.gather(1, token_M[:, None])[:, 0] - logits_MV.logsumexp(dim=-1)

"""Beam search: keeps the B best continuations of each prompt, ranked at the end by their mean log-probability.

Wu et al. 2016, arXiv:1609.08144, section 7: the rank of a finished output is its summed log-probability divided by its
length, or by (5 + length) / 6 as there, to the power `length_penalty`. As in `transformers`, only a continuation among
the B best of a step can finish; a search ends once B outputs are finished and the best running one, at its present
length, would not rank before the worst of them.

Shapes: P prompts, B beams, R = P B rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bertkit.generation.causal import Finish, Generated, Limits, Prompt
from bertkit.generation.sampling import check_finite
from bertkit.models.decoding.causal import NextTokens

Penalty = Callable[[int], float]
"""From an output's length to the base of the length penalty's power."""

PENALTIES: dict[str, Penalty] = {"length": float, "gnmt": lambda length: (5 + length) / 6}


@dataclass(frozen=True)
class _Finished:
    rank: float
    output: Generated


@dataclass
class _Search:
    """The search for one prompt.

    Attributes:
        ids, scores: new tokens and summed log-probability of each running continuation, best first; the score of an
            unused place is -inf.
        finished: the best finished outputs, best first.
    """

    prompt: Prompt
    beams: int
    length_penalty: float
    penalty: Penalty
    limits: Limits
    ids: list[list[int]] = field(default_factory=lambda: [[]])
    scores: list[float] = field(default_factory=lambda: [0.0])
    finished: list[_Finished] = field(default_factory=list)
    is_over: bool = False

    def advance(self, candidates: Sequence[tuple[float, int, int]]) -> tuple[list[int], list[int]]:
        """Take the best candidates (score, beam, token), best first; the beam and the token of each that continues."""
        running: list[tuple[float, int, list[int]]] = []
        for place, (score, beam, token) in enumerate(candidates):
            ids = [*self.ids[beam], token]
            finish = self.limits.finish(self.prompt, ids)
            if finish is None:
                running.append((score, beam, ids))
            elif place < self.beams and score > -math.inf:
                self._finish(ids, score, finish)
        running = running[: self.beams]
        # Every place is filled, so that all prompts have equally many rows.
        while running and len(running) < self.beams:
            running.append((-math.inf, running[0][1], running[0][2]))
        self.ids, self.scores = [ids for _, _, ids in running], [score for score, _, _ in running]
        if not running or self.scores[0] == -math.inf:
            self.is_over = True
        elif len(self.finished) == self.beams:
            self.is_over = self._rank(self.scores[0], len(self.ids[0])) <= self.finished[-1].rank
        return [beam for _, beam, _ in running], [ids[-1] for ids in self.ids]

    def _rank(self, score: float, length: int) -> float:
        return score / float(self.penalty(length) ** self.length_penalty)

    def _finish(self, ids: list[int], score: float, finish: Finish) -> None:
        done = _Finished(self._rank(score, len(ids)), Generated(self.limits.kept(ids), score, finish))
        self.finished = sorted([*self.finished, done], key=lambda each: -each.rank)[: self.beams]


@torch.inference_mode()
def beam_search(
    decoder: NextTokens,
    prompts: Sequence[Prompt],
    limits: Limits,
    *,
    beams: int,
    length_penalty: float = 1.0,
    penalty: Penalty = float,
    samples: int = 1,
) -> list[list[Generated]]:
    """The best outputs of each prompt, best first.

    Args:
        decoder: the model.
        prompts: of any lengths.
        limits: where outputs end.
        beams: B.
        length_penalty, penalty: see above.
        samples: outputs of each prompt, at most B; fewer if fewer were found.

    Raises:
        DataError: logits are not finite.
    """
    room = max(len(prompt.ids) + prompt.room for prompt in prompts)
    searches = [_Search(prompt, beams, length_penalty, penalty, limits) for prompt in prompts]
    running = searches
    logits_RV = decoder.start([prompt.ids for prompt in prompts], room)
    while True:
        parents: list[int] = []
        tokens: list[int] = []
        found = _best(running, logits_RV, limits)
        left = []
        width = logits_RV.shape[0] // len(running)
        for number, (search, candidates) in enumerate(zip(running, found, strict=True)):
            own_parents, own_tokens = search.advance(candidates)
            if not search.is_over:
                left.append(search)
                parents += [number * width + beam for beam in own_parents]
                tokens += own_tokens
        if not left:
            break
        running = left
        decoder.select(torch.tensor(parents, device=logits_RV.device))
        logits_RV = decoder.step(torch.tensor(tokens, device=logits_RV.device))
    return [[each.output for each in search.finished[:samples]] for search in searches]


def _best(searches: Sequence[_Search], logits_RV: Tensor, limits: Limits) -> list[list[tuple[float, int, int]]]:
    """The best candidates of each search (score, beam, token), enough for B of them to continue, best first."""
    log_p_RV = torch.log_softmax(logits_RV, dim=-1)
    check_finite(log_p_RV[:, 0])
    log_p_RV = limits.without_suppressed(log_p_RV)
    score_R1 = torch.tensor([search.scores for search in searches], device=logits_RV.device).view(-1, 1)
    vocabulary = logits_RV.shape[-1]
    total_PX = (log_p_RV + score_R1).view(len(searches), -1)
    wanted = max(2, 1 + len(limits.end_ids)) * searches[0].beams
    best = total_PX.topk(min(wanted, total_PX.shape[1]), dim=-1)
    return [
        [(value, index // vocabulary, index % vocabulary) for value, index in zip(values, indices, strict=True)]
        for values, indices in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]

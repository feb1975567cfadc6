"""Decoding from left to right: the most probable token, or a random draw, at every step.

Radford et al. 2019, GPT-2, section 2; the released sample.py draws the same way. Sibling beam.py keeps several
continuations of a prompt at once.

Shapes: R rows (one sample of one prompt each), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from bertkit.data.random import Draw
from bertkit.generation.sampling import Sampling, check_finite
from bertkit.models.decoding.causal import NextTokens

Finish = Literal["end", "stop", "length"]
"""Why an output ends: its end token, a stop text, or the maximum number of tokens."""

IsStop = Callable[[int, Sequence[int]], bool]
"""Whether the new tokens of a prompt, given by its number, contain a stop text."""

DROPPED_SHARE = 0.75
"""Finished rows are dropped once at most this share of the rows is left, because dropping copies the cache, or once one
of them has no room for another token."""


@dataclass(frozen=True)
class Generated:
    """An output.

    Attributes:
        ids: its new tokens, without the end token.
        score: their log-probability under the model, the end token's included, in nats.
        finish: why it ends.
    """

    ids: list[int]
    score: float
    finish: Finish


@dataclass(frozen=True)
class Prompt:
    """Tokens to continue.

    Attributes:
        ids: with the start token, if the model has one.
        number: index among all prompts, which addresses its random draws.
        room: maximum number of new tokens.
    """

    ids: list[int]
    number: int
    room: int


@dataclass(frozen=True)
class Limits:
    """What ends an output, and which tokens never occur in one.

    Attributes:
        end_ids: tokens that end it.
        suppressed_ids: tokens that are not chosen.
        is_stop: whether an output contains a stop text; None: there are no stop texts.
    """

    end_ids: frozenset[int] = frozenset()
    suppressed_ids: tuple[int, ...] = ()
    is_stop: IsStop | None = None

    def finish(self, prompt: Prompt, ids: Sequence[int]) -> Finish | None:
        """Why these new tokens are complete; None if they are not."""
        if ids[-1] in self.end_ids:
            return "end"
        if self.is_stop is not None and self.is_stop(prompt.number, ids):
            return "stop"
        return "length" if len(ids) >= prompt.room else None

    def without_suppressed(self, logits_RV: Tensor) -> Tensor:
        """The logits with suppressed tokens at -inf."""
        if not self.suppressed_ids:
            return logits_RV
        logits_RV = logits_RV.clone()
        logits_RV[:, list(self.suppressed_ids)] = -torch.inf
        return logits_RV

    def kept(self, ids: list[int]) -> list[int]:
        """The tokens of an output without the end token."""
        return ids[:-1] if ids[-1] in self.end_ids else ids


OnToken = Callable[[Prompt, int, list[int]], None]
"""Called after every new token with the prompt, the sample's number, and the new tokens so far."""


@torch.inference_mode()
def decode(
    decoder: NextTokens,
    prompts: Sequence[Prompt],
    limits: Limits,
    *,
    sampling: Sampling | None,
    samples: int = 1,
    draw: Draw | None = None,
    on_token: OnToken | None = None,
) -> list[list[Generated]]:
    """The outputs of each prompt.

    Args:
        decoder: the model.
        prompts: of any lengths.
        limits: where outputs end.
        sampling: the distribution to draw from; None: take the most probable token.
        samples: outputs of each prompt.
        draw: the source of uniform numbers, by (prompt, sample, position); needed for sampling.
        on_token: see `OnToken`.

    Raises:
        DataError: logits are not finite.
    """
    room = max(len(prompt.ids) + prompt.room for prompt in prompts)
    logits_RV = decoder.start([prompt.ids for prompt in prompts], room)
    rows = [(p, sample) for p in range(len(prompts)) for sample in range(samples)]
    if samples > 1:
        first_R = torch.arange(len(prompts), device=logits_RV.device).repeat_interleave(samples)
        decoder.select(first_R)
        logits_RV = logits_RV[first_R]
    new_ids: list[list[int]] = [[] for _ in rows]
    score = np.zeros(len(rows))
    outputs: list[list[Generated | None]] = [[None] * samples for _ in prompts]
    alive = list(range(len(rows)))  # the row of each of the decoder's sequences
    is_done = [False] * len(rows)
    for steps in count(1):
        numbers = [prompts[rows[row][0]].number for row in alive]
        position = [len(new_ids[row]) for row in alive]
        if sampling is None:
            uniform_R = None
        else:
            assert draw is not None
            sample_R = np.array([rows[row][1] for row in alive])
            uniform_R = draw.uniform("token", sample=np.array(numbers), epoch=sample_R, position=np.array(position))
        log_z_R = logits_RV.logsumexp(dim=-1)
        check_finite(log_z_R)
        allowed_RV = limits.without_suppressed(logits_RV)
        token_R = allowed_RV.argmax(dim=-1) if sampling is None else sampling.draw(allowed_RV, uniform_R)  # type: ignore[arg-type]  # drawn above
        log_p_R = (logits_RV.gather(1, token_R[:, None])[:, 0] - log_z_R).tolist()
        for place, (row, token) in enumerate(zip(alive, token_R.tolist(), strict=True)):
            if is_done[row]:
                continue
            number, sample = rows[row]
            new_ids[row].append(token)
            score[row] += log_p_R[place]
            finish = limits.finish(prompts[number], new_ids[row])
            if on_token is not None:
                on_token(prompts[number], sample, limits.kept(new_ids[row]))
            if finish is not None:
                is_done[row] = True
                outputs[number][sample] = Generated(limits.kept(new_ids[row]), float(score[row]), finish)
        left = [place for place, row in enumerate(alive) if not is_done[row]]
        if not left:
            break
        is_full = any(steps > prompts[rows[row][0]].room for row in alive)
        if is_full or len(left) <= DROPPED_SHARE * len(alive):
            left_R = torch.tensor(left, device=token_R.device)
            decoder.select(left_R)
            token_R = token_R[left_R]
            alive = [alive[place] for place in left]
        logits_RV = decoder.step(token_R)
    return [[each for each in own if each is not None] for own in outputs]

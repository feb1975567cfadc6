"""Texts with masks, and the model's predictions at the masks.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 3.1. How a model reads a mask is a rule in
models/scoring/rules.py: GPT-BERT predicts it from the state before it, and XLNet by its query stream. Sibling
masked.py has the methods that fill masks.

Shapes: M predicted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from bertkit.data.batch import batches_by_length
from bertkit.errors import DataError
from bertkit.generation.sampling import check_finite
from bertkit.models.headed import HeadedModel
from bertkit.models.scoring.rules import MaskedRule, mask_rule
from bertkit.text.tokenizer import Tokenizer

Place = tuple[int, int]
"""A row and a position in it."""

Conditionals = Callable[[Sequence[Sequence[int]], Sequence[Place]], Tensor]
"""From sequences and places in them to the logits of the vocabulary at each place, (M, V), as masked.py needs them.
Tokens that must not be chosen have -inf."""

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class TextWithMasks:
    """A text with masks to fill.

    Attributes:
        ids: including special tokens and masks.
        free: positions of the masks, ascending.
        number: index among all prompts, which addresses its random draws.
        sample: number of the output.
    """

    ids: list[int]
    free: list[int]
    number: int
    sample: int = 0


class MaskedPredictor:
    """The logits at masks, computed a few sequences at a time; equal sequences are computed once.

    Args:
        model: with a head that fills masks.
        tokenizer: the model's.
        suppressed_ids: tokens that are never chosen.
        batch_tokens: number of tokens computed at once, at least one sequence's.
        device: where to compute.

    Raises:
        DataError: the model has no such head, or was trained only from left to right.
    """

    def __init__(
        self,
        model: HeadedModel,
        tokenizer: Tokenizer,
        *,
        suppressed_ids: Sequence[int] = (),
        batch_tokens: int = 4096,
        device: torch.device = _CPU,
    ) -> None:
        self.rule = mask_rule(model)(tokenizer)
        self.predictor = self.rule.predictor(model, device=device)
        self.model = model
        self.suppressed_ids = list(suppressed_ids)
        self.batch_tokens = batch_tokens

    @torch.inference_mode()
    def __call__(self, ids: Sequence[Sequence[int]], places: Sequence[Place]) -> Tensor:
        """The logits at these places, (M, V), in fp32.

        Raises:
            DataError: they are not finite.
        """
        row_of: dict[tuple[int, ...], int] = {}
        distinct = [row_of.setdefault(tuple(ids[row]), len(row_of)) for row, _ in places]
        rows = list(row_of)
        wanted = sorted({(row, position) for row, (_, position) in zip(distinct, places, strict=True)})
        found: dict[Place, int] = {}
        parts = []
        for batch in batches_by_length([len(row) for row in rows], self.batch_tokens):
            first_of = dict(zip(batch, accumulate((len(rows[row]) for row in batch), initial=0), strict=False))
            own = [place for place in wanted if place[0] in first_of]
            index = [first_of[row] + position - self.rule.shifted for row, position in own]
            index_M = torch.tensor(index, device=self.predictor.device)
            hidden_MD = self.predictor.states([rows[row] for row in batch], index_M)
            logits_MV = self.model.token_logits(self.rule.head, hidden_MD).float()
            check_finite(logits_MV.logsumexp(dim=-1))
            found |= {place: len(found) + number for number, place in enumerate(own)}
            parts.append(logits_MV)
        logits = torch.cat(parts) if len(parts) > 1 else parts[0]
        logits[:, self.suppressed_ids] = -torch.inf
        chosen = [found[(row, position)] for row, (_, position) in zip(distinct, places, strict=True)]
        # A copy of all logits takes as much memory again.
        return logits if chosen == [*range(len(logits))] else logits[torch.tensor(chosen, device=logits.device)]


def masked_texts(
    rule: MaskedRule, prompts: Sequence[str], masks: int, *, samples: int, max_tokens: int
) -> list[TextWithMasks]:
    """The texts of each prompt, one per sample: with the prompt's own masks, or with `masks` appended.

    Args:
        rule: how the model reads a text with masks.
        prompts: texts, some with masks.
        masks: number of masks appended to a prompt without masks.
        samples: texts of each prompt.
        max_tokens: maximum length that the model reads.

    Raises:
        DataError: a text is longer than the model's maximum, or the tokenizer has no mask token.
    """
    tokenizer = rule.tokenizer
    texts = []
    for number, prompt in enumerate(prompts):
        ids = tokenizer.encode_with_masks(prompt)
        if tokenizer.mask_id not in ids:
            ids += [tokenizer.mask_id] * masks
        ids = rule.read(ids)
        free = [position for position, token in enumerate(ids) if token == tokenizer.mask_id]
        if len(ids) > max_tokens:
            raise DataError(
                f"prompt {number} ({prompt[:40]!r}...) has {len(ids)} tokens with {len(free)} masks and its special"
                f" tokens, and the model reads at most {max_tokens}; shorten it, or lower --max-new-tokens"
            )
        texts += [TextWithMasks(ids, free, number, sample) for sample in range(samples)]
    return texts

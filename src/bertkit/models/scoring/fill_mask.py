"""Filling in masks: the most probable words at each [MASK] of a text.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 3.1. The head is used as in training: a GPT-BERT head (Charpentier
and Samuel 2024, arXiv:2410.24159) predicts a masked token from the state before it, and XLNet's (Yang et al. 2019,
arXiv:1906.08237) reads its query stream.

Shapes: M masks, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bertkit.errors import DataError
from bertkit.models.headed import HeadedModel
from bertkit.models.scoring.rules import MaskedRule, mask_rule
from bertkit.text.tokenizer import Tokenizer

_CPU = torch.device("cpu")


@torch.no_grad()
def fill_masks(
    model: HeadedModel,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    top: int = 5,
    device: torch.device = _CPU,
) -> list[dict[str, Any]]:
    """The `top` words for each mask of each text, in the format of the command line's `fill` output.

    Masks of one text are filled independently of one another.

    Raises:
        DataError: the model cannot fill masks, a text has none or is longer than the model reads, or outputs are not
            finite.
    """
    rule = mask_rule(model)(tokenizer)
    predictor = rule.predictor(model, device=device)
    results = []
    for text in texts:
        ids, masks_M = masked_ids(rule, text, model.encoder.max_tokens)
        hidden_MD = predictor.states([ids], torch.tensor(masks_M, device=device) + rule.offset)
        logits_MV = model.token_logits(rule.head, hidden_MD)
        if not logits_MV.isfinite().all():
            raise DataError(
                "the model's outputs are not finite numbers: its weights are damaged, or its training diverged; use"
                " another checkpoint"
            )
        probability_MV = torch.softmax(logits_MV, dim=-1)
        # Rows of the embedding table beyond the vocabulary are no words.
        best = probability_MV[:, : tokenizer.vocab_size].topk(min(top, tokenizer.vocab_size), dim=-1)
        masks = [
            [
                {"token": tokenizer.token(n), "text": tokenizer.shown(n), "id": n, "probability": p}
                for n, p in zip(*candidates, strict=True)
            ]
            for candidates in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        results.append({"text": text, "masks": masks})
    return results


def masked_ids(rule: MaskedRule, text: str, max_tokens: int) -> tuple[list[int], list[int]]:
    """The ids with special tokens added, and the positions of the masks in the text.

    Raises:
        DataError: the text has no mask, or is longer than the model reads.
    """
    mask_id = rule.tokenizer.mask_id
    mask = rule.tokenizer.token(mask_id)
    if mask not in text:
        raise DataError(f"{text!r} has no {mask}; write one for each word to fill in")
    inner = rule.tokenizer.encode_with_masks(text)
    ids = rule.read(inner)
    if len(ids) > max_tokens:
        raise DataError(f"{text[:40]!r}... has {len(ids)} tokens, but the model reads at most {max_tokens}; shorten it")
    return ids, [position for position, token in enumerate(inner) if token == mask_id]

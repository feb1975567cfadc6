"""Filling in masks: the most probable words at each [MASK] of a text.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 3.1. The masked-LM head is used as it was trained: one trained as in
GPT-BERT (Charpentier and Samuel 2024, arXiv:2410.24159) predicts a masked token from the state before it.

Shapes: T tokens, M masks, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.models.headed import SCORING_RULE, HeadedModel
from bertkit.models.pseudo_likelihood import EncoderLeftToRight, MaskedNextTokenScoring
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
    """The `top` words for each mask of each text, as the `fill` document of the command line.

    Masks of one text are filled independently of one another.

    Raises:
        DataError: the model has no masked-LM head or one that does not fill masks, a text has no mask or is longer than
            the model reads, or outputs are not finite.
    """
    if "masked_lm" not in model.head_names:
        raise DataError("the model has no masked-LM head; take one that was pretrained with masked_lm")
    rule = model.extras.get(SCORING_RULE)
    if rule == EncoderLeftToRight.name:
        raise DataError("the model was trained from left to right alone; take one that was pretrained with masked_lm")
    offset = -1 if rule == MaskedNextTokenScoring.name else 0
    mask = tokenizer.token(tokenizer.mask_id)
    model.eval()
    results = []
    for text in texts:
        ids = _encode(tokenizer, text, mask, model.encoder.config.max_tokens)
        hidden_TD = model(PackedBatch.from_ids([ids]).to(device))
        position_M = [index + offset for index, token in enumerate(ids) if token == tokenizer.mask_id]
        logits_MV = model.masked_lm_logits(hidden_TD[position_M])
        if not logits_MV.isfinite().all():
            raise DataError(
                "the model's outputs are not finite numbers: its weights are damaged, or its training diverged; take"
                " another checkpoint"
            )
        probability_MV = torch.softmax(logits_MV, dim=-1)
        best = probability_MV.topk(min(top, probability_MV.shape[-1]), dim=-1)
        masks = [
            [{"token": tokenizer.token(n), "id": n, "probability": p} for n, p in zip(*candidates, strict=True)]
            for candidates in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        results.append({"text": text, "masks": masks})
    return results


def _encode(tokenizer: Tokenizer, text: str, mask: str, max_tokens: int) -> list[int]:
    parts = text.split(mask)
    if len(parts) == 1:
        raise DataError(f"{text!r} has no {mask}; write one where a word is to be filled in")
    ids = [tokenizer.cls_id]
    for number, part in enumerate(tokenizer.encode_batch(parts)):
        ids += [tokenizer.mask_id] * (number > 0) + part
    ids.append(tokenizer.sep_id)
    if len(ids) > max_tokens:
        raise DataError(f"{text[:40]!r}... has {len(ids)} tokens, the model reads at most {max_tokens}; shorten it")
    return ids

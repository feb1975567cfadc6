"""A head's predictions for single tokens: log-probabilities of a vocabulary head, or energies of Electric's head.

The rules in models/scoring/rules.py decide which tokens are predicted, and in which copies of a text.

Shapes: T tokens of a packed batch, M predicted tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bertkit.arrays import BoolArray, Float32Array, Int64Array
from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.models.headed import HeadedModel
from bertkit.models.heads import HEAD_KINDS
from bertkit.models.scoring.query_stream import query_stream_batch

MAX_LOGITS = 1 << 24
"""Maximum number of logits in memory at once: with a causal model every token of a batch has V of them."""

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class TokenScores:
    """The log-probability (nats) of M tokens, and whether each is the most probable in the vocabulary."""

    log_p_M: Float32Array
    is_first_M: BoolArray


class TokenPredictor:
    """Log-probabilities of the head `masked_lm` or `causal_lm` at given positions, in fp32.

    The model is moved to the device and set to evaluation mode; if `causal`, it is run with causal attention.
    """

    def __init__(self, model: HeadedModel, head: str, *, causal: bool = False, device: torch.device = _CPU) -> None:
        assert HEAD_KINDS[head] == "vocabulary", "check_distribution reports this to the user"
        self.model = model.to(device).eval()
        self.head = head
        self.causal = causal
        self.device = device

    def __call__(self, ids: Sequence[Sequence[int]], index_M: Int64Array, target_M: Int64Array) -> TokenScores:
        """The scores of the target tokens; arguments and errors as in `distributions`."""
        log_p, is_first = [], []
        for log_p_MV, target_M1 in self.distributions(ids, index_M, target_M):
            log_p.append(log_p_MV.gather(1, target_M1)[:, 0].cpu())
            is_first.append((log_p_MV.argmax(dim=-1) == target_M1[:, 0]).cpu())
        return TokenScores(torch.cat(log_p).numpy(), torch.cat(is_first).numpy())

    @torch.inference_mode()
    def distributions(
        self, ids: Sequence[Sequence[int]], index_M: Int64Array, target_M: Int64Array
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Log-probabilities of the vocabulary, (M, V), with the target ids, (M, 1), some rows at a time.

        Args:
            ids: ids of each sequence, including special tokens.
            index_M: positions to predict at, counted over all sequences end to end.
            target_M: ids of the target tokens.

        Raises:
            DataError: a log-probability of a target is not a number.
        """
        hidden_MD = self.states(ids, torch.from_numpy(index_M).to(self.device))
        target = torch.from_numpy(target_M).to(self.device)
        rows = max(1, MAX_LOGITS // self.model.encoder.vocab_size)
        for own_MD, target_M1 in zip(torch.split(hidden_MD, rows), torch.split(target[:, None], rows), strict=True):
            logits_MV = self.model.token_logits(self.head, own_MD)
            log_p_MV = torch.log_softmax(logits_MV.float(), dim=-1)
            if log_p_MV.gather(1, target_M1).isnan().any():
                raise DataError(
                    "the model's log-probabilities are not numbers (NaN): its weights are damaged or diverged"
                )
            yield log_p_MV, target_M1

    def states(self, ids: Sequence[Sequence[int]], index_M: Tensor) -> Tensor:
        """The states that the head reads, (M, D)."""
        encoder = self.model.encoder
        return encoder.forward_tokens(
            encoder.with_global_tokens(self.batch(ids, index_M), self.model.head_names), index_M
        )

    def batch(self, ids: Sequence[Sequence[int]], index_M: Tensor) -> PackedBatch:
        """The batch that the model reads to predict at these positions."""
        return PackedBatch.from_ids(ids, causal=self.causal).to(self.device)


class RightToLeftPredictor(TokenPredictor):
    """`TokenPredictor` for a model that reads from both ends, for sequences given from last token to first.

    The head reads the half of a state that comes from the right (`EncoderConfig.reads_backward`).
    """

    def states(self, ids: Sequence[Sequence[int]], index_M: Tensor) -> Tensor:
        assert self.model.encoder.config.reads_backward
        states_TD: Tensor = self.model(self.batch([row[::-1] for row in ids], index_M))
        places = torch.split(torch.arange(states_TD.shape[0], device=states_TD.device), [len(row) for row in ids])
        left_TP, right_TP = states_TD.index_select(0, torch.cat([own.flip(0) for own in places])).chunk(2, dim=1)
        return torch.cat([right_TP, left_TP], dim=1).index_select(0, index_M)


class QueryStreamPredictor(TokenPredictor):
    """`TokenPredictor` for XLNet's head `permutation_lm`: the query stream predicts, and no token attends to masked or
    predicted ones.

    Args:
        mask_id: id of missing tokens.
        special_ids: ids of the special tokens around a text.
    """

    def __init__(
        self, model: HeadedModel, head: str, *, mask_id: int, special_ids: Sequence[int], device: torch.device = _CPU
    ) -> None:
        super().__init__(model, head, device=device)
        self.mask_id = mask_id
        self.special_ids = special_ids

    def batch(self, ids: Sequence[Sequence[int]], index_M: Tensor) -> PackedBatch:
        return query_stream_batch(
            super().batch(ids, index_M), index_M, mask_id=self.mask_id, special_ids=self.special_ids
        )


class EnergyPredictor:
    """Minus the energies of a model trained by `bertkit.objectives.noise_contrastive`, in fp32: estimates of the
    log-probabilities of tokens given all others, without a softmax. Arguments as in `TokenPredictor`."""

    def __init__(self, model: HeadedModel, head: str, *, device: torch.device = _CPU) -> None:
        self.model = model.to(device).eval()
        self.head = head
        self.device = device

    @torch.inference_mode()
    def __call__(self, ids: Sequence[Sequence[int]], index_M: Int64Array, target_M: Int64Array) -> TokenScores:
        """The scores of the tokens at these positions; it is unknown which words would have scored higher.

        Raises:
            DataError: an energy is not a number.
        """
        hidden_TD = self.model(PackedBatch.from_ids(ids).to(self.device))
        hidden_MD = hidden_TD.index_select(0, torch.from_numpy(index_M).to(self.device))
        log_p_M = -self.model.token_logits(self.head, hidden_MD).squeeze(-1).float()
        if log_p_M.isnan().any():
            raise DataError("the model's energies are not numbers (NaN): its weights are damaged or diverged")
        return TokenScores(log_p_M.cpu().numpy(), np.zeros(log_p_M.numel(), dtype=np.bool_))

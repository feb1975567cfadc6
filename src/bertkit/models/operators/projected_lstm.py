"""An LSTM whose output is a projection of its cell, both clipped, over sequences of different lengths.

Sak et al. 2014, arXiv:1402.1128 (the projection); clipping and skip connection as in ELMo's released code
(allenai/bilm-tf, bilm/training.py: TensorFlow's LSTMCell with cell_clip and proj_clip). Without clipping it is
torch.nn.LSTM with proj_size, which does not clip. families/bilstm.py uses torch's LSTM.

Quirk: TensorFlow adds 1 to the forget gate; here the gate's bias is initialised to 1.

Shapes: T tokens in the order of their positions, b_s sequences that have a position s, E width of the input, H width of
the cell, P width of the projection, B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from bertkit.arrays import Int64Array
from bertkit.models.operators.matmul import Linear

GATES = 4
FORGET = 1
"""Index of the forget gate in torch's order of gates: input, forget, cell, output."""


@dataclass(frozen=True)
class Reading:
    """The order in which tokens are read: by position, the longest sequence first.

    Attributes:
        order_T: the tokens in that order.
        running_S: number of sequences that have each position.
        rank_B: each sequence's rank, the longest first.
    """

    order_T: Tensor
    running_S: list[int]
    rank_B: Tensor

    @classmethod
    def of(
        cls, starts_B: Int64Array, lengths_B: Int64Array, device: torch.device, *, backward: bool = False
    ) -> Reading:
        """Of sequences, given their first tokens and lengths; backward: starting from their last tokens."""
        rank_B = np.empty_like(lengths_B)
        rank_B[np.argsort(-lengths_B, kind="stable")] = np.arange(lengths_B.size)
        before_T = np.repeat(np.cumsum(lengths_B) - lengths_B, lengths_B)
        position_T = np.arange(int(lengths_B.sum())) - before_T
        offset_T = np.repeat(lengths_B, lengths_B) - 1 - position_T if backward else position_T
        by_position_T = np.lexsort((np.repeat(rank_B, lengths_B), position_T))
        order_T = (np.repeat(starts_B, lengths_B) + offset_T)[by_position_T]
        running_S: list[int] = np.bincount(position_T).tolist()
        return cls(torch.from_numpy(order_T).to(device), running_S, torch.from_numpy(rank_B).to(device))


class ProjectedLstm(nn.Module):
    """One layer in one direction.

    Args:
        width: E.
        cell_width: H.
        projection: P.
        cell_clip, projection_clip: largest absolute value of the cell and of the projection; None: no limit.
    """

    def __init__(
        self,
        width: int,
        cell_width: int,
        projection: int,
        *,
        cell_clip: float | None = None,
        projection_clip: float | None = None,
    ) -> None:
        super().__init__()
        self.cell_clip = cell_clip
        self.projection_clip = projection_clip
        self.input = Linear(width, GATES * cell_width)
        self.hidden = Linear(projection, GATES * cell_width, bias=False)
        self.projection = Linear(cell_width, projection, bias=False)

    def forward(
        self, states_TE: Tensor, running_S: Sequence[int], start: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Outputs, (T, P), and the last output and cell of each sequence, (B, P) and (B, H).

        Args:
            states_TE: tokens at the first position of all sequences, longest sequence first, then at the second, ...
            running_S: b_s of each position, in non-increasing order.
            start: output and cell before the first token; None: zeros.
        """
        gates_TG = self.input(states_TE)
        count = running_S[0]
        hidden, cell = start or (
            states_TE.new_zeros(count, self.projection.out_features),
            states_TE.new_zeros(count, self.projection.in_features),
        )
        outputs, ended = [], []
        for gates_bG in torch.split(gates_TG, list(running_S)):
            running = gates_bG.shape[0]
            if running < hidden.shape[0]:
                ended.append((hidden[running:], cell[running:]))
                hidden, cell = hidden[:running], cell[:running]
            take, keep, new, give = (gates_bG + self.hidden(hidden)).chunk(GATES, dim=-1)
            cell = _within(torch.sigmoid(keep) * cell + torch.sigmoid(take) * torch.tanh(new), self.cell_clip)
            hidden = _within(self.projection(torch.sigmoid(give) * torch.tanh(cell)), self.projection_clip)
            outputs.append(hidden)
        ended.append((hidden, cell))
        last = [torch.cat([part[kind] for part in reversed(ended)]) for kind in (0, 1)]
        return torch.cat(outputs), (last[0], last[1])


def _within(tensor: Tensor, bound: float | None) -> Tensor:
    return tensor if bound is None else tensor.clamp(-bound, bound)

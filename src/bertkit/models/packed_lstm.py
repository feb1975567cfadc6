"""torch's LSTM on packed sequences, without padding.

Hochreiter and Schmidhuber 1997, "Long short-term memory"; `torch.nn.LSTM` computes it. Used by bilstm.py, a model of
its own, and feature_lstm.py, which reads another model's states.

Shapes: T packed tokens, B sequences, S longest sequence, D width, H width of a direction.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


def packed_lstm(lstm: nn.LSTM, states_TD: Tensor, cu_seqlens_B1: Tensor) -> Tensor:
    """An LSTM over packed sequences, each from its own beginning to its own end, (T, 2 H).

    torch wants all first tokens, then all second ones, the longest sequence in front; the packed order is restored
    behind it.

    Args:
        lstm: of one direction or two.
        states_TD: what it reads.
        cu_seqlens_B1: where each sequence begins, and T; none is empty.
    """
    lengths_B = cu_seqlens_B1.diff().cpu().numpy().astype(np.int64)
    rank_B = np.empty_like(lengths_B)
    rank_B[np.argsort(-lengths_B, kind="stable")] = np.arange(lengths_B.size)
    starts_B = np.cumsum(lengths_B) - lengths_B
    position_T = np.arange(int(lengths_B.sum())) - np.repeat(starts_B, lengths_B)
    by_position_T = np.lexsort((np.repeat(rank_B, lengths_B), position_T))
    running_S = torch.from_numpy(np.bincount(position_T))
    order_T = torch.from_numpy(by_position_T).to(states_TD.device)
    output, _ = lstm(PackedSequence(states_TD[order_T], running_S))
    return torch.empty_like(output.data).index_copy(0, order_T, output.data)

"""Disentangled attention: scores between contents and relative positions, each with their own maps.

He et al. 2021, DeBERTa, arXiv:2006.03654, section 3.1, equations 2 to 4. A score is the sum of content to content, the
query's content to the key's position, and the key's content to the query's position; position to position is left out.
Unlike in the original code, only the table rows that the batch's lengths need are projected.

Shapes: T packed tokens, D width, N heads, H head width, b sequences of one block, S its longest, R rows of the table.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from bertkit.data.batch import AttentionBlock, PackedSequences
from bertkit.models.attention.self_attention import Bias, SelfAttention
from bertkit.models.operators.dropout import Dropout
from bertkit.models.operators.matmul import Linear
from bertkit.models.recorder import Scope

Kind = Literal["c2p", "p2c"]


class Distances:
    """The rows of the table of distances that a batch needs, shared by all layers.

    Args:
        table_RD: all rows.
        rows: the row of each distance (query minus key) of the longest sequence, smallest distance first.
    """

    def __init__(self, table_RD: Tensor, rows: Tensor) -> None:
        first, last = 0, table_RD.shape[0] - 1
        if not torch.compiler.is_exporting():  # a graph is for all lengths
            first, last = int(rows.min()), int(rows.max())
        self.table_RD = table_RD[first : last + 1]
        self._row_of_distance = (rows - first).to(table_RD.device)
        self._rows: dict[str, Tensor] = {}

    def rows(self, length: int) -> Tensor:
        """The row for each pair of positions, (S, S), queries first."""
        key = str(length)  # an exported graph's symbol cannot be a key
        if key not in self._rows:
            zero = self._row_of_distance.numel() // 2
            position_S = torch.arange(length, device=self._row_of_distance.device)
            self._rows[key] = self._row_of_distance[position_S[:, None] - position_S[None, :] + zero]
        return self._rows[key]


class DisentangledAttention(SelfAttention):
    """Attention with scores between contents and positions; a subclass projects the positions.

    Args:
        width, heads: D and N.
        kinds: kinds of scores in addition to content to content.
        scale: factor of all scores.
        dropout_rate: of the attention probabilities.
        position_dropout_rate: on the table of relative positions.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kinds: Collection[Kind],
        scale: float,
        dropout_rate: float,
        position_dropout_rate: float,
    ) -> None:
        super().__init__(width, heads, dropout_rate=dropout_rate)
        self.kinds = frozenset(kinds)
        self.scale = scale
        self.position_dropout = Dropout(position_dropout_rate)
        # Each kind of score needs at most twice as many table rows as there are keys.
        self.products_per_pair = 2 + 2 * len(self.kinds)

    @abstractmethod
    def position_map(self, kind: Kind) -> nn.Module:
        """The map of positions, (R, D) to (R, D), to keys for c2p and to queries for p2c."""

    def forward(  # type: ignore[override]  # it also reads the distances
        self,
        hidden_TD: Tensor,
        sequences: PackedSequences,
        scope: Scope,
        index_M: Tensor | None = None,
        *,
        distances: Distances | None,
        asking_TD: Tensor | None = None,
    ) -> Tensor:
        """(T, D) to (T, D), or (M, D) of these tokens alone. Points: those of `project`.

        Args:
            hidden_TD: the states from which keys and values are computed.
            sequences: of the batch.
            scope: of this layer's attention.
            index_M: the tokens whose output is computed; None: all.
            distances: rows of the table of distances; None: no scores of positions.
            asking_TD: the states from which queries are computed; None: `hidden_TD`.
        """
        bias = None if distances is None or not self.kinds else self._bias(distances)
        mix = self.mixing(sequences, scope, bias=bias, scale=self.scale)
        if asking_TD is None:
            return self.project(hidden_TD, mix, scope, index_M)
        key_TD, value_TD = self.projection((self.key, self.value), hidden_TD)
        heads = (each.view(each.shape[0], self.heads, -1) for each in (self.query(asking_TD), key_TD, value_TD))
        return self._to_output(mix(*heads), index_M)

    def _bias(self, distances: Distances) -> Bias:
        """The second and third terms of equation 4. The query's position relative to the key is the negative of the
        key's position relative to the query, so both terms read the same row."""
        table_RD = self.position_dropout(distances.table_RD)
        key_NHR = self._by_head(self.position_map("c2p")(table_RD)) if "c2p" in self.kinds else None
        query_NHR = self._by_head(self.position_map("p2c")(table_RD)) if "p2c" in self.kinds else None

        def bias(query_bNSH: Tensor, key_bNSH: Tensor, block: AttentionBlock) -> Tensor:
            row_bNSS = distances.rows(block.length).expand(*query_bNSH.shape[:2], -1, -1)
            scores = []
            if key_NHR is not None:
                scores.append(((query_bNSH * self.scale) @ key_NHR).gather(-1, row_bNSS))
            if query_NHR is not None:
                by_key_bNSS = ((key_bNSH * self.scale) @ query_NHR).gather(-1, row_bNSS.transpose(-1, -2))
                scores.append(by_key_bNSS.transpose(-1, -2))
            return scores[0] if len(scores) == 1 else scores[0] + scores[1]

        return bias

    def _by_head(self, rows_RD: Tensor) -> Tensor:
        return rows_RD.view(rows_RD.shape[0], self.heads, -1).permute(1, 2, 0)


class SharedPositions(DisentangledAttention):
    """Positions go through the contents' own maps: `share_att_key`."""

    def position_map(self, kind: Kind) -> nn.Module:
        return self.key if kind == "c2p" else self.query


class SeparatePositions(DisentangledAttention):
    """Positions have maps of their own, for the kinds of scores in use; arguments as in `DisentangledAttention`.

    Attributes:
        key_bias: whether the positions' map to keys has a bias.
    """

    position_maps: ClassVar[tuple[str, ...]] = ("position_key", "position_query")
    key_bias: ClassVar[bool] = True

    def __init__(self, width: int, heads: int, **settings: Any) -> None:
        super().__init__(width, heads, **settings)
        if "c2p" in self.kinds:
            self.position_key = Linear(width, width, bias=self.key_bias)
        if "p2c" in self.kinds:
            self.position_query = Linear(width, width)

    def position_map(self, kind: Kind) -> nn.Module:
        return self.position_key if kind == "c2p" else self.position_query


class KeysWithoutBias(SeparatePositions):
    """Version 1's attention: keys of contents and of positions have no bias."""

    key_bias: ClassVar[bool] = False
    pruning_obstacle = "its files contain one matrix for equally many heads of queries, keys and values"

    def __init__(self, width: int, heads: int, **settings: Any) -> None:
        super().__init__(width, heads, **settings)
        self.key = Linear(width, width, bias=False)

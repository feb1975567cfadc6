"""A two-tower cloze model: one transformer reads from left to right, another from right to left, and each token is
predicted from the states of both its neighbours.

Clark et al. 2020, Electric, arXiv:2012.08561, section 2.3; as TwoTowerClozeTransformer of google-research/electra. No
token is masked: the state before a token depends on the tokens to its left, the state after it on those to its right.
One pass therefore gives every token's distribution given all others. Both towers are encoders with the same settings;
the head on their concatenated states is a masked-LM head, tied to the left tower's word embeddings. Sibling electra.py:
the towers.

Quirk honoured: at the ends of a sequence states wrap around, so the first token is predicted from the last one's state
and vice versa; only special tokens are there. Quirk left: in the released code they wrap around the padded row, so the
ends of a short row read padding.

Shapes: T packed tokens, D width of a tower.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.models.encoder import Encoder, EncoderConfig
from bertkit.models.recorder import Recorder
from bertkit.models.weights import Names


@dataclass(frozen=True)
class _Order:
    """For each packed token, the tokens of its sequence that are before it, after it (wrapping around), and equally far
    from the other end."""

    before_T: Tensor
    behind_T: Tensor
    mirrored_T: Tensor

    @classmethod
    def of(cls, batch: PackedBatch) -> _Order:
        bounds_B1 = batch.sequences.cu_seqlens_B1.long()
        lengths_B = bounds_B1.diff()
        first_T, length_T = (
            torch.repeat_interleave(each_B, lengths_B, output_size=batch.num_tokens)
            for each_B in (bounds_B1[:-1], lengths_B)
        )
        place_T = torch.arange(batch.num_tokens, device=first_T.device) - first_T
        before_T, behind_T = (first_T + (place_T + step) % length_T for step in (-1, 1))
        return cls(before_T, behind_T, first_T + length_T - 1 - place_T)


class TwoTower(Encoder):
    """Two encoders in opposite directions; the states of all tokens are (T, 2 D).

    Args:
        config: settings of one tower.
        vocab_size: V.
        pad_id: padding id of the tokenizer.
    """

    hub_names: ClassVar[Names] = {}
    has_hub_class: ClassVar[bool] = False
    scores_all_tokens: ClassVar[bool] = True

    def __init__(self, config: EncoderConfig, vocab_size: int, *, pad_id: int = 0) -> None:
        left, right = (config.build(vocab_size, pad_id=pad_id) for _ in range(2))
        super().__init__(config, width=left.width + right.width, vocab_size=vocab_size)
        self.left_to_right, self.right_to_left = left, right

    @property
    def towers(self) -> tuple[Encoder, Encoder]:
        return self.left_to_right, self.right_to_left

    @property
    def word_embedding(self) -> nn.Embedding:
        return self.left_to_right.word_embedding

    def forward(self, batch: PackedBatch, recorder: Recorder | None = None) -> Tensor:
        """(T, 2 D): the left tower's state of the previous token and the right tower's state of the next one.

        No points are recorded.
        """
        order = _Order.of(batch)
        causal = replace(batch, sequences=batch.sequences.as_causal())
        left_TD: Tensor = self.left_to_right(causal)
        # Positions stay those of the text; only the order is reversed, which makes a causal pass read from the right.
        mirrored = replace(
            causal,
            ids_T=batch.ids_T[order.mirrored_T],
            token_types_T=batch.token_types_T[order.mirrored_T],
            positions_T=batch.positions_T[order.mirrored_T],
        )
        right_TD: Tensor = self.right_to_left(mirrored)
        return torch.cat([left_TD[order.before_T], right_TD[order.mirrored_T[order.behind_T]]], dim=-1)

"""AnglE: the ranking of CoSENT, by the difference of angles in complex space.

Li and Li 2023, AnglE, arXiv:2309.12871, section 3.4: a vector's halves are the real and the imaginary parts of complex
numbers, which keep their gradient when the cosine's saturates. For two vectors of length one, the similarity is the sum
of the real and imaginary parts of the complex quotients; its absolute value is ranked, as in the released angle.py.

Shapes: I examples, E width of the vectors.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn import functional

from bertkit.tasks.embedding.losses.base import unit
from bertkit.tasks.embedding.losses.cosent import RankingLoss


class AngleLoss(RankingLoss):
    """Ranking by angles."""

    name: Literal["angle"] = "angle"

    def similarity(self, first_IE: Tensor, second_IE: Tensor) -> Tensor:
        return angle_similarity(first_IE, second_IE)


def angle_similarity(first_IE: Tensor, second_IE: Tensor) -> Tensor:
    """|sum of Re(z conj(w)) + sum of Im(z conj(w))| of the unit vectors as complex numbers z and w, (I,).

    A vector of odd width is padded with a zero.
    """
    even = first_IE.shape[-1] + first_IE.shape[-1] % 2
    first, second = (functional.pad(unit(each), (0, even - each.shape[-1])) for each in (first_IE, second_IE))
    (a, b), (c, d) = first.chunk(2, dim=-1), second.chunk(2, dim=-1)
    return (a * c + b * d + b * c - a * d).sum(dim=-1).abs()

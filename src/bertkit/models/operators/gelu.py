"""GELU: x times the normal distribution function of x, exact or as the tanh approximation.

Hendrycks and Gimpel 2016, arXiv:1606.08415; BERT's released code uses the tanh approximation. Same results as
torch.nn.functional.gelu; compiled kernels (kernels/), if active, only make it faster.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from bertkit.kernels import ops
from bertkit.kernels.loading import active


def gelu(values: Tensor) -> Tensor:
    """Exact GELU, elementwise."""
    kernels = active(values)
    return functional.gelu(values) if kernels is None else ops.gelu(kernels, values, "exact")


def gelu_by_tanh(values: Tensor) -> Tensor:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), elementwise."""
    kernels = active(values)
    return functional.gelu(values, approximate="tanh") if kernels is None else ops.gelu(kernels, values, "tanh")

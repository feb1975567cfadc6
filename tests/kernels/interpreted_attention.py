"""Compare the kernels of triton_attention.py, in triton's interpreter without a GPU, with plain operators.

    TRITON_INTERPRET=1 python -m tests.kernels.interpreted_attention

Prints the largest relative error of any output or gradient. In float16: the interpreter has no bfloat16.
"""

from __future__ import annotations

import torch

from bertkit.kernels import gpu_attention
from tests.kernels.dropped_attention import Case, plain_attention, relative_error

CASES = (
    Case(lengths=(5, 70, 1, 33), heads=2, width=32, dtype=torch.float16, rate=0.1),
    Case(lengths=(64, 31), heads=3, width=64, dtype=torch.float16),
    Case(lengths=(70, 128), heads=1, width=32, dtype=torch.float16, window=(9, 3), rate=0.3),
    Case(lengths=(70, 3, 128), heads=1, width=64, dtype=torch.float16, window=(-1, 0), rate=0.1),
)


def main() -> None:
    worst = 0.0
    for case in CASES:
        rows, bounds_B1, given = case.drawn(torch.device("cpu"))
        scale = 0.9 * case.width**-0.5
        shared = (*(each.detach() for each in rows), bounds_B1, max(case.lengths), *case.window, scale, case.rate)
        out, log_sum, drawn = gpu_attention.forward(*shared)
        found = gpu_attention.backward(out, given, log_sum, drawn, *shared).unbind(1)
        exact = plain_attention(rows, bounds_B1, drawn, case.window, scale, case.rate)
        expected = torch.autograd.grad(exact, rows, given.double())
        worst = max(worst, *map(relative_error, (out, *found), (exact, *expected)))
    print(worst)


if __name__ == "__main__":
    main()

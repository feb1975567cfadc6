"""The device of these tests, which are skipped if there is none."""

from __future__ import annotations

import pytest
import torch

GPU = torch.device("cuda")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none")

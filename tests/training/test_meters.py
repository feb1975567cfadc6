"""The memory in log lines, on a machine whose GPU the process does not use."""

from __future__ import annotations

import pytest
import torch

from bertkit.training.meters import peak_memory_mb


@pytest.mark.parametrize("allocated", [0, 3_000_000])
def test_a_process_that_allocates_nothing_on_the_gpu_reports_its_own_memory(
    allocated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: allocated)
    assert peak_memory_mb() == 3.0 if allocated else peak_memory_mb() > 50

"""The rate behind `mfu` is the highest measured for its processor, threads and dtype; no test depends on timing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from bertkit.training.product_rate import (
    AGAIN_SECONDS,
    ProductKind,
    ProductRates,
    measured_peak_flops,
    product_rates,
    timed,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BERTKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def rates(*measured: list[float], clock: Iterable[float] = ()) -> ProductRates:
    """A process in which the machine has these rates, one list per measurement, at these times."""
    lists, times = iter(measured), iter(clock)
    return ProductRates(lambda device, bf16: next(lists), lambda: next(times, 0.0))


def test_the_best_of_several_counts() -> None:
    assert rates([3e9, 7e9, 5e9]).highest(CPU, bf16=False) == 7e9


def test_a_later_process_on_a_busy_machine_has_the_quiet_rate() -> None:
    assert rates([9e9]).highest(CPU, bf16=False) == 9e9
    assert rates([4e9]).highest(CPU, bf16=False) == 9e9


def test_a_process_that_began_on_a_busy_machine_measures_again() -> None:
    times = [0.0, AGAIN_SECONDS / 2, AGAIN_SECONDS, AGAIN_SECONDS + 1]
    found = rates([4e9], [9e9], clock=times)
    assert [found.highest(CPU, bf16=False) for _ in times] == [4e9, 4e9, 9e9, 9e9]


def test_dtypes_threads_and_processors_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rates([9e9]).highest(CPU, bf16=True) == 9e9
    assert rates([4e9]).highest(CPU, bf16=False) == 4e9
    monkeypatch.setattr("bertkit.training.product_rate.device_name", lambda device: "another processor")
    assert rates([3e9]).highest(CPU, bf16=True) == 3e9
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert rates([2e9]).highest(CPU, bf16=True) == 2e9
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("content", ["", "[]", '{"flops_per_second": "9"}', '{"flops_per_second": -1}', "{"])
def test_a_damaged_file_is_written_anew(cache: Path, content: str) -> None:
    rates([9e9]).highest(CPU, bf16=False)
    (path,) = (cache / "rates").iterdir()
    path.write_text(content)
    assert rates([4e9]).highest(CPU, bf16=False) == 4e9
    assert json.loads(path.read_text())["flops_per_second"] == 4e9


def test_a_cache_that_is_none_keeps_nothing(cache: Path) -> None:
    cache.write_text("a file where the directory would be")
    found = rates([4e9], [3e9], clock=[0.0, AGAIN_SECONDS])
    assert [found.highest(CPU, bf16=False) for _ in range(2)] == [4e9, 4e9]


def test_a_kind_says_what_was_measured() -> None:
    kind = ProductKind.of(CPU, bf16=True)
    assert (kind.dtype, kind.threads, kind.torch_version) == ("bfloat16", torch.get_num_threads(), torch.__version__)
    assert kind.processor


def test_the_time_of_a_work_is_between_its_two_readings() -> None:
    clock = iter([2.0, 2.5])
    assert timed(lambda: None, CPU, lambda: next(clock)) == 0.5


def test_a_rate_is_measured_and_no_random_number_is_drawn() -> None:
    state = torch.get_rng_state()
    found = product_rates(CPU, bf16=False, seconds=0.0)
    assert len(found) == 1
    assert found[0] > 0
    assert torch.equal(torch.get_rng_state(), state)


def test_the_processs_own_rates_are_kept(cache: Path) -> None:
    first = measured_peak_flops(CPU, bf16=False)
    assert 0 < first == measured_peak_flops(CPU, bf16=False)

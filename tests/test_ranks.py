"""Ranks: read from the environment, their shares, and a single process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bertkit.errors import UsageError
from bertkit.ranks import Ranks, TorchrunEnvironment, current, share_of, use_ranks

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.parametrize("number", [0, 1, 3, 9, 64])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_shares_are_consecutive_even_and_complete(number: int, count: int) -> None:
    shares = [share_of(number, rank, count) for rank in range(count)]
    assert [item for begin, end in shares for item in range(begin, end)] == list(range(number))
    sizes = [end - begin for begin, end in shares]
    assert max(sizes) - min(sizes) <= 1


def test_what_torchrun_sets_is_read() -> None:
    assert TorchrunEnvironment.of_environment(TORCHRUN) == TorchrunEnvironment(rank=3, local_rank=1, count=4, restart=0)
    restarted = TorchrunEnvironment.of_environment({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"})
    assert restarted is not None
    assert restarted.restart == 2


@pytest.mark.parametrize("environment", [{}, {"RANK": "0"}, {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}])
def test_without_torchrun_or_by_one_rank_a_process_is_alone(environment: dict[str, str]) -> None:
    assert TorchrunEnvironment.of_environment(environment) is None


@pytest.mark.parametrize("wrong", [{"RANK": "one"}, {"RANK": "4"}, {"WORLD_SIZE": "-2"}])
def test_variables_that_make_no_sense_are_named(wrong: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        TorchrunEnvironment.of_environment({**TORCHRUN, **wrong})


def test_alone_every_answer_is_the_own() -> None:
    alone = Ranks()
    assert alone.is_first
    assert alone.gathered("a") == ["a"]
    assert alone.sum_counts([1, 2]) == [1, 2]
    assert alone.led(lambda: 5, str, int) == 5
    with use_ranks(alone), alone.in_turn():
        assert current() is alone
    assert current() is not alone


@pytest.mark.parametrize("is_rank", [False, True])
def test_a_rank_ends_at_once_with_all_that_it_printed(is_rank: bool) -> None:
    """A single process cleans up first, as Python does."""
    script = (
        "import atexit; from bertkit.ranks import leave; "
        "atexit.register(print, 'cleaned up'); print('result'); leave(75)"
    )
    others = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
    environment = {**others, **(TORCHRUN if is_rank else {})}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 75
    assert done.stdout.split("\n")[:-1] == (["result"] if is_rank else ["result", "cleaned up"])

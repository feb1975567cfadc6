"""Messages if Ray is not installed or its cluster is unreachable."""

from __future__ import annotations

import socket
import sys

import pytest

from bertkit.errors import DataError, UsageError
from bertkit.jobs.ray_cluster import _passed_on, _require_reachable
from bertkit.jobs.registry import executor_of
from bertkit.jobs.settings import ExecutorSettings
from bertkit.training.config import EngineConfig


def test_without_ray_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"ray is not installed; pip install 'bertkit\[ray\]', or take"):
        executor_of(ExecutorSettings(executor="ray"))


def test_a_cluster_out_of_reach_is_told_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]  # no process listens
        for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
            with pytest.raises(DataError, match=rf"RAY_ADDRESS={address}: no Ray cluster answers there \(.*refused"):
                _require_reachable(address)
    with pytest.raises(UsageError, match="expected HOST:PORT"):
        _require_reachable("head:first")
    _require_reachable("auto")


def test_workers_of_a_cluster_get_settings_and_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERTKIT_CACHE", "/shared/cache")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    secrets = ("HF_TOKEN", "HF_TOKENIZER_KEY", "BERTKIT_SERVE_KEYS", "HF_PASSWORD")
    for name in secrets:
        monkeypatch.setenv(name, "hf_secret")
    passed = _passed_on()
    assert passed["BERTKIT_CACHE"] == "/shared/cache"
    assert passed["TOKENIZERS_PARALLELISM"] == "false"
    assert not set(secrets) & set(passed)


def test_ranks_and_jobs_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="ranks is 2, but independent runs are to run in parallel"):
        EngineConfig(ranks=2, jobs=2)

"""Messages if Ray is not installed or its cluster is unreachable."""

from __future__ import annotations

import socket
import sys
from types import SimpleNamespace

import pytest

from bertkit.errors import DataError, UsageError
from bertkit.jobs.ray_cluster import RayExecutor, _messages_logged, _passed_on, _require_reachable
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


class _RayError(Exception):
    """Stands for Ray's class of all its errors."""


@pytest.mark.parametrize("kind", [ConnectionError, _RayError])
def test_a_cluster_that_requires_a_token_is_a_users_error_with_the_remedy(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: object) -> None:
        raise kind("no token\nmore")

    exceptions = SimpleNamespace(RayError=_RayError)
    ray = SimpleNamespace(is_initialized=lambda: False, init=init, exceptions=exceptions)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with socket.create_server(("127.0.0.1", 0)) as cluster:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{cluster.getsockname()[1]}")
        with pytest.raises(DataError, match=r"\(no token\).*set RAY_AUTH_MODE=token"), RayExecutor(1):
            pass


def test_workers_of_a_cluster_get_settings_and_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERTKIT_CACHE", "/shared/cache")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    secrets = ("HF_TOKEN", "HF_TOKENIZER_KEY", "BERTKIT_SERVE_KEYS", "HF_PASSWORD")
    for name in secrets:
        monkeypatch.setenv(name, "hf_secret")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("WANDB_SERVICE", "3-1234-tcp-localhost-40000")  # of W&B's process on this machine
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:secret@tracker.example")
    passed = _passed_on()
    assert passed["BERTKIT_CACHE"] == "/shared/cache"
    assert passed["TOKENIZERS_PARALLELISM"] == "false"
    assert passed["WANDB_MODE"] == "offline"
    assert not {*secrets, "WANDB_API_KEY", "WANDB_SERVICE", "MLFLOW_TRACKING_URI"} & set(passed)


def test_messages_of_ray_are_logged_and_leave_stdout_to_the_result(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    worker = SimpleNamespace(print_to_stdstream=lambda data, ignore_prefix: print(*data["lines"]))
    message = {"lines": ["A worker died."], "pid": "raylet", "is_err": False}  # as listen_error_messages passes it
    with _messages_logged(worker):
        worker.print_to_stdstream(message, ignore_prefix=False)
    assert not capfd.readouterr().out
    assert [each.getMessage() for each in caplog.records] == ["Ray: A worker died."]
    worker.print_to_stdstream(message, ignore_prefix=False)
    assert capfd.readouterr().out == "A worker died.\n"


def test_ranks_and_jobs_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"--nproc 2 \(engine.ranks\) cannot be combined with --jobs 2"):
        EngineConfig(ranks=2, jobs=2)

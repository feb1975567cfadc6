"""Stores for tests: a server of the S3 protocol, and directories; no waiting between attempts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bertkit.data import shards
from bertkit.run import uploading
from bertkit.stores import store
from tests.stores.s3_server import BUCKET, S3Server, set_environment


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts follow each other quickly, and the uploading thread checks often."""
    monkeypatch.setattr(store, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(uploading, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(uploading, "QUIET_SECONDS", 0.3)
    monkeypatch.setattr(uploading, "FIRST_PAUSE_SECONDS", 0.02)
    shards.are_stored.cache_clear()


@pytest.fixture(scope="session")
def _server() -> Iterator[S3Server]:
    pytest.importorskip("moto", reason="a server of the S3 protocol (the extra dev)")
    pytest.importorskip("s3fs", reason="the client of S3 (the extra s3)")
    server = S3Server()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def s3(_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The server with an empty bucket, in the environment of this test."""
    import fsspec

    set_environment(monkeypatch, _server)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    _server.client().create_bucket(Bucket=BUCKET)
    yield _server
    if _server._server is None:
        _server.start()
    _server.refuse_credentials(refuse=False)
    _server.call("reset")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with its own caches and runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BERTKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path

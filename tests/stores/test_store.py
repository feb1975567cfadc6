"""Operations on a store and their failures: retries, and messages without secrets."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from bertkit.errors import DataError, UsageError
from bertkit.files import unfinished_name
from bertkit.stores.failures import Failure, without_secrets
from bertkit.stores.store import ATTEMPTS, Store, StoreError
from bertkit.stores.url import StoreUrl
from tests.stores.s3_server import ACCESS_KEY, BUCKET, SECRET, S3Server


class ServiceError(Exception):
    """An error as raised by botocore."""

    def __init__(self, code: str, status: int) -> None:
        super().__init__(f"An error occurred ({code})")
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


class HttpError(Exception):
    """An error as raised by gcsfs."""

    def __init__(self, code: int) -> None:
        super().__init__("refused")
        self.code = code


@pytest.mark.parametrize(
    ("error", "words", "may_pass"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "full", False),
        (ServiceError("XMinioStorageFull", 507), "full", False),
        (ServiceError("InsufficientStorage", 507), "full", False),
        (HttpError(507), "full", False),
        (ServiceError("InvalidAccessKeyId", 403), "access is refused (InvalidAccessKeyId)", False),
        (HttpError(401), "access is refused", False),
        (PermissionError(errno.EACCES, "Permission denied"), "access is refused", False),
        (ServiceError("NoSuchBucket", 404), "no such bucket", False),
        (FileNotFoundError(errno.ENOENT, "No such file"), "no file or directory with this name", False),
        (ServiceError("SlowDown", 503), "cannot serve this now", True),
        (HttpError(429), "cannot serve this now", True),
        (TimeoutError(), "did not answer in time", True),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset"), "cannot be reached", True),
        (OSError(errno.ESTALE, "Stale file handle"), "Stale file handle", True),
    ],
)
def test_an_error_is_told_by_its_meaning(error: Exception, words: str, may_pass: bool) -> None:
    failure = Failure.of(error)
    assert words in failure.reason
    assert failure.may_pass is may_pass


def test_secrets_and_signatures_are_cut_out_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    text = f"GET https://me:{SECRET}@host/x?X-Amz-Credential=AKID%2F2026&X-Amz-Signature=abc123 {SECRET}"
    shown = without_secrets(text)
    assert shown == "GET https://host/x?X-Amz-Credential=***&X-Amz-Signature=*** ***"


def test_a_failure_that_may_pass_is_tried_again_with_a_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(StoreUrl.parse(tmp_path.as_uri()))
    calls: list[str] = []

    def fails(name: str) -> bytes:
        calls.append(name)
        if len(calls) < ATTEMPTS:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        return b"there"

    monkeypatch.setattr(store._files, "cat_file", fails)
    with caplog.at_level(logging.INFO, "bertkit.stores"):
        assert store.get_bytes("a") == b"there"
    assert len(calls) == ATTEMPTS
    assert [record.getMessage().rpartition("; ")[2] for record in caplog.records] == [
        f"attempt {n} of {ATTEMPTS} follows" for n in range(2, ATTEMPTS + 1)
    ]


def test_a_failure_that_stays_ends_after_a_bounded_number_of_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(StoreUrl.parse(tmp_path.as_uri()))
    calls: list[str] = []

    def fails(name: str) -> bytes:
        calls.append(name)
        raise TimeoutError

    monkeypatch.setattr(store._files, "cat_file", fails)
    with pytest.raises(StoreError, match="did not answer in time"):
        store.get_bytes("a")
    assert len(calls) == ATTEMPTS


def test_a_full_store_is_told_and_a_full_disk_is_another_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(StoreUrl.parse((tmp_path / "store").as_uri()))
    source = tmp_path / "source"
    source.write_bytes(b"x")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store._files, "put_file", full)
    monkeypatch.setattr(store._files, "get_file", full)
    with pytest.raises(StoreError, match="the store is full"):
        store.put(source, "a")
    with pytest.raises(OSError, match="No space left on device") as caught:
        store.get("a", tmp_path / "here")
    assert not isinstance(caught.value, DataError)
    assert caught.value.filename == str(tmp_path / "here")
    assert not (tmp_path / "here").exists()


def test_a_directory_as_a_store_keeps_files_whole(tmp_path: Path) -> None:
    store = Store(StoreUrl.parse((tmp_path / "store").as_uri()))
    assert store.list() == {}
    store.put_bytes(b"one", "a/b")
    (tmp_path / "two").write_bytes(b"twotwo")
    store.put(tmp_path / "two", "c")
    unfinished_name(tmp_path / "store" / "c").write_bytes(b"two")  # of an upload that was killed
    assert {name: file.size for name, file in store.list().items()} == {"a/b": 3, "c": 6}
    assert (store.get_bytes("a/b"), store.get_bytes("none")) == (b"one", None)
    next((tmp_path / "store").glob(".c.*")).unlink()
    store.remove(["a/b", "none"])
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["c"]  # and no empty directory
    with pytest.raises(FileNotFoundError):  # a missing local file is not an error of the store
        store.put(tmp_path / "gone", "d")


def test_a_library_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UsageError, match=r"pip install 'bertkit\[gs\]'"):
        Store(StoreUrl.parse("gs://corpora/x"))


def test_an_s3_server_holds_files(s3: S3Server, tmp_path: Path) -> None:
    store = Store(StoreUrl.parse(f"s3://{BUCKET}/some/where"))
    assert store.list() == {}
    store.put_bytes(b"one", "a/b")
    (tmp_path / "two").write_bytes(b"twotwo")
    store.put(tmp_path / "two", "c")
    assert {name: file.size for name, file in store.list().items()} == {"a/b": 3, "c": 6}
    assert s3.names() == ["some/where/a/b", "some/where/c"]
    store.get("c", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"twotwo"
    assert (store.get_bytes("a/b"), store.get_bytes("none")) == (b"one", None)
    before = store.list()["c"]
    store.put_bytes(b"2wo2wo", "c")
    assert store.list()["c"] != before  # of the same size: the entity tag differs
    store.remove(["c", "none"])
    assert list(store.list()) == ["a/b"]


def test_refused_credentials_are_told_without_them(s3: S3Server) -> None:
    store = Store(StoreUrl.parse(f"s3://{BUCKET}/x"))
    s3.refuse_credentials()
    for operation in (store.list, lambda: store.get_bytes("a"), lambda: store.put_bytes(b"", "a")):
        with pytest.raises(StoreError, match="access is refused") as caught:
            operation()
        assert SECRET not in str(caught.value)
        assert ACCESS_KEY not in str(caught.value)


def test_no_credentials_are_told(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(StoreError, match="no usable credentials were found"):
        Store(StoreUrl.parse(f"s3://{BUCKET}/x")).list()


def test_a_bucket_that_is_not_there_is_told(s3: S3Server) -> None:
    store = Store(StoreUrl.parse("s3://elsewhere/x"))
    for operation in (store.list, lambda: store.get_bytes("a"), lambda: store.put_bytes(b"", "a")):
        with pytest.raises(StoreError, match="there is no such bucket"):
            operation()


def test_a_server_that_is_gone_is_told(s3: S3Server) -> None:
    s3.stop()
    with pytest.raises(StoreError, match="cannot be reached; check the network and the endpoint"):
        Store(StoreUrl.parse(f"s3://{BUCKET}/x")).list()

"""Token shards on a store: the files of a local directory, the manifest last, and compared with it before reading."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertkit.data.shards import MANIFEST, TokenShards, are_stored
from bertkit.data.stored_shards import shards_directory
from bertkit.errors import DataError
from bertkit.stores.store import Store
from tests.stores.s3_server import BUCKET, S3Server
from tests.text.corpora import english

Command = Callable[..., Any]
PLACE = f"s3://{BUCKET}/shards/english"


@pytest.fixture
def text(machine: Path) -> Path:
    path = machine / "text.txt"
    path.write_text("\n\n".join(english(120)), encoding="utf-8")
    return path


def tokenize(bertkit: Command, text: Path, out: str | Path, *more: str) -> Any:
    return bertkit("tokenize", text, "--out", out, "--vocab-size", "300", *more)


def test_the_store_has_the_files_of_a_local_directory_and_its_manifest_last(
    s3: S3Server, text: Path, machine: Path, bertkit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    for name in ("put", "put_bytes"):
        whole = getattr(Store, name)
        monkeypatch.setattr(
            Store,
            name,
            lambda store, content, name, whole=whole: (whole(store, content, name), written.append(name))[0],
        )
    assert tokenize(bertkit, text, machine / "local").code == 0
    done = tokenize(bertkit, text, PLACE, "--json")
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["shards"] == PLACE
    local = {f"shards/english/{path.name}": path.read_bytes() for path in (machine / "local").iterdir()}
    assert {name: s3.content(name) for name in s3.names()} == local
    assert written[-1] == MANIFEST
    written.clear()
    again = tokenize(bertkit, text, PLACE)
    assert (again.code, again.stdout, written) == (0, f"{PLACE}\n", [])


def test_another_cache_reads_them_as_they_are(
    s3: S3Server, text: Path, machine: Path, bertkit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tokenize(bertkit, text, PLACE).code == 0
    assert tokenize(bertkit, text, machine / "local").code == 0
    monkeypatch.setenv("BERTKIT_CACHE", str(machine / "another"))
    shards = TokenShards.open(shards_directory(PLACE), verify=True)
    assert shards.fingerprint == TokenShards.open(machine / "local").fingerprint
    assert shards.directory.is_relative_to(machine / "another")
    with monkeypatch.context() as patch:
        patch.setattr(Store, "get", lambda *_: pytest.fail("a copy is fetched once"))
        assert shards_directory(PLACE) == shards.directory


def test_a_damaged_copy_is_fetched_again_and_a_damaged_original_refused(
    s3: S3Server, text: Path, machine: Path, bertkit: Command
) -> None:
    assert tokenize(bertkit, text, PLACE).code == 0
    tokens = shards_directory(PLACE) / "tokens-00000.bin"
    whole = tokens.read_bytes()
    tokens.write_bytes(b"?" + whole[1:])
    assert (shards_directory(PLACE) / tokens.name).read_bytes() == whole
    s3.put(f"shards/english/{tokens.name}", b"?" + whole[1:])
    with pytest.raises(DataError, match=r"its files do not match its manifest\.json: .*altered"):
        shards_directory(PLACE)


def test_shards_of_other_text_and_other_files_are_not_written_over(s3: S3Server, text: Path, bertkit: Command) -> None:
    assert tokenize(bertkit, text, PLACE).code == 0
    before = {name: s3.content(name) for name in s3.names()}
    text.write_text("\n\n".join(english(60)), encoding="utf-8")
    done = tokenize(bertkit, text, PLACE)
    assert done.code == 2
    assert "shards are never changed" in done.stderr
    assert {name: s3.content(name) for name in s3.names()} == before
    s3.put("other/notes.txt", b"")
    done = tokenize(bertkit, text, f"s3://{BUCKET}/other")
    assert done.code == 2
    assert "contains other files (notes.txt)" in done.stderr


def test_an_upload_that_ends_early_leaves_no_shards_and_goes_on(
    s3: S3Server, text: Path, bertkit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = Store.put

    def fails_at_the_tokens(store: Store, path: Path, name: str) -> None:
        if name.startswith("tokens"):
            raise DataError("the store is full")
        put(store, path, name)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "put", fails_at_the_tokens)
        done = tokenize(bertkit, text, PLACE)
    assert (done.code, "the store is full" in done.stderr) == (3, True)
    from bertkit.stores.url import StoreUrl

    assert not are_stored(StoreUrl.parse(PLACE))
    are_stored.cache_clear()
    assert tokenize(bertkit, text, PLACE).code == 0
    assert are_stored(StoreUrl.parse(PLACE))

"""Text on a store equals a local copy: byte-identical shards, changes are noticed, downloaded once."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from bertkit.data.shards import MANIFEST, TokenShards, is_shards
from bertkit.errors import DataError
from bertkit.files import cache_directory, sha256_of
from bertkit.progress import ProgressMeter, silent_progress
from bertkit.stores.fetch import fetched_directory, fetched_files
from bertkit.stores.store import Store
from bertkit.stores.url import StoreUrl
from bertkit.text.sources import open_corpus
from tests.stores.s3_server import ACCESS_KEY, BUCKET, SECRET, S3Server
from tests.text.corpora import english

Command = Callable[..., Any]
VOCABULARY = ("--vocab-size", "300")


def write_corpus(directory: Path) -> dict[str, bytes]:
    """Files of a corpus and some other files, by their names below the directory."""
    documents = english(120)
    files = {
        "b.txt": "\n\n".join(documents[:40]).encode(),
        "a/deep.txt.gz": gzip.compress("\n\n".join(documents[40:80]).encode(), mtime=0),
        "a.txt": "\n\n".join(documents[80:]).encode(),
        "README.md": b"no text of the corpus",
    }
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    return files


def hashes(directory: Path) -> dict[str, str]:
    """Hashes of all files of shards except the manifest, which names the source files."""
    return {path.name: sha256_of(path) for path in sorted(directory.iterdir()) if path.name != MANIFEST}


@pytest.fixture
def stored(s3: S3Server, machine: Path) -> str:
    """The corpus on a server, and next to it in `local`."""
    for name, content in write_corpus(machine / "local").items():
        s3.put(f"text/{name}", content)
    return f"s3://{BUCKET}/text"


@pytest.mark.parametrize("below", ["", "/*.txt", "/b.txt", "/**/*.txt*"])
def test_shards_are_those_of_a_local_copy_to_the_byte(below: str, stored: str, machine: Path, bertkit: Command) -> None:
    for source, out in ((f"local{below}", "from-disk"), (f"{stored}{below}", "from-store")):
        done = bertkit("tokenize", source, "--out", machine / out, *VOCABULARY)
        assert done.code == 0, done.stderr
    assert hashes(machine / "from-disk") == hashes(machine / "from-store")
    local, remote = (TokenShards.open(machine / out) for out in ("from-disk", "from-store"))
    for key in ("identity", "files", "options", "tokenizer"):
        assert local.manifest[key] == remote.manifest[key]
    read = [each["content"] for each in local.manifest["source"]["read"]]
    assert read == [each["content"] for each in remote.manifest["source"]["read"]]


def test_files_are_fetched_once_and_again_when_they_change(
    stored: str, s3: S3Server, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []
    get = Store.get
    monkeypatch.setattr(
        Store, "get", lambda store, name, path: (fetched.append(store.url.name), get(store, name, path))[1]
    )
    first = open_corpus([stored])
    assert open_corpus([stored]).fingerprint == first.fingerprint
    assert sorted(fetched) == ["a.txt", "b.txt", "deep.txt.gz"]
    content = s3.content("text/b.txt")
    s3.put("text/b.txt", content[:-1] + b"?")  # of the same size
    assert open_corpus([stored]).fingerprint != first.fingerprint
    assert sorted(fetched) == ["a.txt", "b.txt", "b.txt", "deep.txt.gz"]
    s3.put("text/b.txt", content)
    assert open_corpus([stored]).fingerprint == first.fingerprint


def test_the_bytes_that_are_fetched_are_shown(stored: str, machine: Path) -> None:
    shown: list[tuple[str, int | None, str]] = []

    def progress(
        label: str, total: int | None = None, unit: str = "steps", start: int = 0
    ) -> AbstractContextManager[ProgressMeter]:
        shown.append((label, total, unit))
        return silent_progress(label, total, unit, start)

    size = sum((machine / "local" / name).stat().st_size for name in ("a.txt", "b.txt", "a/deep.txt.gz"))
    for _ in range(2):
        open_corpus([stored], progress=progress)
        assert shown == [("fetching text", size, "bytes")]


def test_a_fetch_that_is_cut_off_leaves_no_half_file(
    stored: str, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CutOffError(Exception):
        pass

    def half(store: Store, name: str, path: Path) -> None:
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(b"half")
        raise CutOffError

    with monkeypatch.context() as patch:
        patch.setattr(Store, "get", half)
        with pytest.raises(CutOffError):
            open_corpus([stored])
    text = "\n".join(line for document in open_corpus([stored]).documents() for line in document)
    assert text == "\n".join(line for document in open_corpus(["local"]).documents() for line in document)


def test_a_copy_that_lost_its_content_is_fetched_again(machine: Path, tmp_path: Path) -> None:
    """As after a crash of the machine, which may keep a file's name without its content."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "a.txt").write_text("some words")
    url = StoreUrl.parse(f"file://{tmp_path}/store")
    for fetched in (lambda: fetched_files(str(url), lambda path: True)[0], lambda: fetched_directory(url) / "a.txt"):
        fetched().write_bytes(b"")
        assert fetched().read_text() == "some words"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (f"s3://{BUCKET}/none", "there is no such file, and there are no files below it"),
        (f"s3://{BUCKET}/text/*.csv", "no file matches"),
        (f"s3://{BUCKET}/text/README.md/x", "there is no such file"),
        ("s3://elsewhere/text", "there is no such bucket"),
    ],
)
def test_what_is_not_there_is_told(source: str, message: str, stored: str, bertkit: Command, machine: Path) -> None:
    done = bertkit("tokenize", source, "--out", machine / "out", *VOCABULARY)
    assert done.code == 3
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_wrong_credentials_end_with_a_line_that_does_not_show_them(
    stored: str, s3: S3Server, bertkit: Command, machine: Path
) -> None:
    s3.refuse_credentials()
    done = bertkit("tokenize", stored, "--out", machine / "out", "-vv", *VOCABULARY)
    assert done.code == 3
    assert "access is refused" in done.stderr
    for secret in (SECRET, ACCESS_KEY):
        assert secret not in done.stderr + done.stdout


def test_a_name_on_the_store_that_leads_out_of_the_cache_is_refused(s3: S3Server, machine: Path) -> None:
    out = "../" * len(Path("fetched/DIGEST/s3", BUCKET, "text", "cache").parts)
    s3.put("text/a.txt", b"a line\n")
    s3.put(f"text/{out}evil.txt", b"another\n")
    for source in (f"s3://{BUCKET}/text", f"s3://{BUCKET}/text/**"):
        with pytest.raises(DataError, match=r"a file named .*evil\.txt.*, which is not a valid local file name"):
            open_corpus([source])
    assert not list(machine.rglob("evil.txt"))


def test_offline_reads_no_store(stored: str, bertkit: Command, machine: Path) -> None:
    done = bertkit("tokenize", stored, "--out", machine / "out", "--offline", *VOCABULARY)
    assert done.code == 3
    assert "--offline forbids" in done.stderr


def test_an_unknown_scheme_is_wrong_usage(bertkit: Command, machine: Path) -> None:
    done = bertkit("tokenize", "ftp://host/x.txt", "--out", machine / "out", *VOCABULARY)
    assert done.code == 2
    assert "no such scheme; expected a path, s3://, gs:// or file://" in done.stderr


def test_a_single_file_is_no_shards(machine: Path) -> None:
    write_corpus(machine / "local")
    assert not is_shards((machine / "local" / "a.txt").as_uri())


def test_a_directory_of_another_disk_is_a_store_too(machine: Path) -> None:
    write_corpus(machine / "local")
    url = (machine / "local").as_uri()
    assert open_corpus([url]).fingerprint == open_corpus(["local"]).fingerprint
    assert list((cache_directory() / "fetched").rglob("deep.txt.gz"))
    (machine / "other").mkdir()
    (machine / "other" / "x.md").write_text("x")
    with pytest.raises(DataError, match="none of the 1 files below it has a known ending"):
        open_corpus([(machine / "other").as_uri()])

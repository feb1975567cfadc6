"""`bertkit search --update`: the index is that which building anew gives, and only new texts are embedded, whatever
happened to an update before."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertkit.errors import UsageError
from bertkit.inference.embed import InputText
from bertkit.inference.embedder import Embedder
from bertkit.inference.search import index as index_module
from bertkit.inference.search import update, vectors
from bertkit.inference.search.index import TextIndex, build_index
from bertkit.inference.search.settings import IndexSettings
from tests.inference.test_independent_batches import engine
from tests.tasks.tiny_task import reviews, write_model

pytest.importorskip("faiss")
Command = Callable[..., Any]
TEXTS = list(dict.fromkeys(text for text, _ in reviews(90, seed=8)))
OLD = [*TEXTS[:40], TEXTS[3], " "]
NEW = [TEXTS[50], *TEXTS[5:45], TEXTS[3], "a text that is much longer than the others " * 30, TEXTS[50]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def embedder(model: Path) -> Embedder:
    return Embedder.load(model, engine(), name=str(model))


def write(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"id": f"{path.stem}{n}", "text": text}) + "\n" for n, text in enumerate(texts)))
    return path


def build(
    directory: Path, corpus: Path, embedder: Embedder, settings: IndexSettings | None = None, *, update: bool = False
) -> TextIndex:
    rows = [json.loads(line) for line in corpus.read_text().splitlines()]
    texts = (InputText(row["id"], row["text"], "") for row in rows)
    return build_index(directory, corpus, texts, embedder, settings or IndexSettings(), update=update)


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("settings", [{"kind": "hnsw"}, {"long": "window", "truncate": 7}, {"long": "cut"}])
def test_an_updated_index_is_one_built_anew(
    embedder: Embedder, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = IndexSettings.model_validate(settings)
    old, new = write(tmp_path / "old.jsonl", OLD), write(tmp_path / "new.jsonl", NEW)
    anew = build(tmp_path / "anew", new, embedder, chosen)
    index = build(tmp_path / "index", old, embedder, chosen)
    assert index.bm25  # of the old corpus
    embedded: list[int] = []
    joined = Embedder.joined
    monkeypatch.setattr(Embedder, "joined", lambda self, parts: (embedded.append(len(parts)), joined(self, parts))[1])
    updated = build(tmp_path / "index", new, embedder, chosen, update=True)
    assert sum(embedded) == len([text for text in NEW if text not in OLD])
    assert files_of(updated.directory) == files_of(anew.directory)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["anew", "index", "new.jsonl", "old.jsonl"]


def test_an_update_that_changes_nothing_embeds_nothing(
    embedder: Embedder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = write(tmp_path / "old.jsonl", TEXTS)
    first = build(tmp_path / "index", texts, embedder)
    vectors_before = np.array(first.vectors)
    monkeypatch.setattr(Embedder, "vectors", lambda *_: pytest.fail("embedded"))
    build(tmp_path / "index", texts, embedder, update=True)
    fewer = write(tmp_path / "new.jsonl", TEXTS[::-2])
    updated = build(tmp_path / "index", fewer, embedder, update=True)
    assert np.array_equal(updated.vectors, vectors_before[::-2])


def test_texts_of_one_hash_are_told_apart(embedder: Embedder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "_hash", lambda text: len(text) % 3)
    old, new = write(tmp_path / "old.jsonl", OLD), write(tmp_path / "new.jsonl", NEW)
    anew = build(tmp_path / "anew", new, embedder)
    build(tmp_path / "index", old, embedder)
    assert files_of(build(tmp_path / "index", new, embedder, update=True).directory) == files_of(anew.directory)


@pytest.mark.parametrize("moment", ["embedding", "indexing", "replacing"])
def test_a_stopped_update_leaves_an_index_and_continues(
    moment: str, embedder: Embedder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = write(tmp_path / "old.jsonl", OLD), write(tmp_path / "new.jsonl", NEW)
    settings = IndexSettings(kind="hnsw")
    anew = build(tmp_path / "anew", new, embedder, settings)
    directory = build(tmp_path / "index", old, embedder, settings).directory

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if moment == "embedding":
            patch.setattr(index_module, "embed_to_file", stopped)
        elif moment == "indexing":
            patch.setattr(vectors, "write", stopped)
        else:  # between the two renames
            rename = Path.rename

            def renamed(self: Path, target: Path) -> Path:
                return stopped() if self.name == ".index.updating" else rename(self, target)  # type: ignore[return-value]

            patch.setattr(Path, "rename", renamed)
        with pytest.raises(KeyboardInterrupt):
            build(directory, new, embedder, settings, update=True)
    if moment == "replacing":
        update.recover(directory)
    assert TextIndex.open(directory).count == len(OLD) - 1
    assert files_of(build(directory, new, embedder, settings, update=True).directory) == files_of(anew.directory)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_an_index_of_other_settings_is_not_updated(embedder: Embedder, tmp_path: Path) -> None:
    old, new = write(tmp_path / "old.jsonl", OLD), write(tmp_path / "new.jsonl", NEW)
    directory = build(tmp_path / "index", old, embedder).directory
    with pytest.raises(UsageError, match="differs in: corpus; give --update to embed only the texts that it does not"):
        build(directory, new, embedder)
    with pytest.raises(UsageError, match="differs in: settings, corpus; name a new directory, or delete this one"):
        build(directory, new, embedder, IndexSettings(kind="hnsw"), update=True)


def test_the_command_updates_with_the_settings_of_the_index(model: Path, tmp_path: Path, bertkit: Command) -> None:
    old, new = write(tmp_path / "old.jsonl", OLD), write(tmp_path / "new.jsonl", NEW)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "index", target_is_directory=True)
    built = bertkit("search", "--model", model, "--corpus", old, "--index", tmp_path / "index", "--truncate", 6)
    assert built.code == 0, built.stderr
    refused = bertkit("search", "--corpus", new, "--index", link)
    assert (refused.code, "--update" in refused.stderr) == (2, False)  # the settings differ, too
    done = bertkit("search", "--corpus", new, "--index", link, "--update", "--json")
    assert (done.code, json.loads(done.stdout)["width"]) == (0, 6), done.stderr
    assert "vectors were taken from the index" in done.stderr
    assert link.is_symlink()
    found = bertkit("search", "--index", link, TEXTS[50], "--top", 2, "--json")
    assert {hit["text"] for hit in json.loads(found.stdout)[0]["hits"]} == {TEXTS[50]}
    shutil.rmtree(tmp_path / "index")
    alone = bertkit("search", "--index", link, "a", "--update")
    assert (alone.code, "--update: works only with --corpus FILE and --index DIR" in alone.stderr) == (2, True)

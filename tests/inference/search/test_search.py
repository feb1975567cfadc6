"""`bertkit search` and `mine-negatives`: every kind of index returns the hits of a plain search, joining, re-ranking
and mining follow from these, and an index opens only with its own model."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bertkit as package
from bertkit.errors import DataError, UsageError
from bertkit.files import is_unfinished, unfinished_name
from bertkit.inference.embed import InputText
from bertkit.inference.embedder import Embedder
from bertkit.inference.search import index as index_module
from bertkit.inference.search import query, vectors
from bertkit.inference.search.bm25 import Bm25
from bertkit.inference.search.index import DESCRIPTION, TextIndex, build_index
from bertkit.inference.search.settings import IndexSettings, QuerySettings
from bertkit.inference.vector_types import normalised
from bertkit.models.labels import Labels
from tests.inference.search.conftest import TEXTS, texts
from tests.inference.test_independent_batches import engine
from tests.limits import largest_file
from tests.tasks.tiny_task import write_model

pytest.importorskip("faiss")
Command = Callable[..., Any]


def cosines_to_all(embedder: Embedder, *queries: str) -> Any:
    return normalised(embedder.encode(queries)) @ normalised(embedder.encode(TEXTS)).T


def test_hits_are_those_of_a_plain_search(model: Path, corpus: Path, bertkit: Command) -> None:
    asked = ["the fine cat", "a list of words"]
    done = bertkit("search", "--model", model, "--corpus", corpus, *asked, "--top", 5, "--json", "--precision", "fp32")
    documents = json.loads(done.stdout)
    encode = package.load(str(model)).encode
    cosine = normalised(encode(asked)) @ normalised(encode(TEXTS)).T
    for row, document in enumerate(documents):
        best = np.argsort(-cosine[row], kind="stable")[:5]
        assert document["query"] == asked[row]
        assert [hit["id"] for hit in document["hits"]] == [f"t{number}" for number in best]
        assert [hit["text"] for hit in document["hits"]] == [TEXTS[number] for number in best]
        np.testing.assert_allclose([hit["score"] for hit in document["hits"]], cosine[row, best], atol=1e-5)


def test_blank_lines_are_no_hits_and_count_in_the_ids(model: Path, tmp_path: Path, bertkit: Command) -> None:
    (tmp_path / "texts.txt").write_text(f"{TEXTS[0]}\n\n{TEXTS[1]}\n \n{TEXTS[2]}\n", encoding="utf-8")
    done = bertkit("search", "--model", model, "--corpus", tmp_path / "texts.txt", "the fine cat", "--json")
    (found,) = json.loads(done.stdout)
    assert {hit["id"]: hit["text"] for hit in found["hits"]} == {"0": TEXTS[0], "2": TEXTS[1], "4": TEXTS[2]}


def test_ids_are_those_of_a_corpus_in_the_layout_of_beir(model: Path, tmp_path: Path, bertkit: Command) -> None:
    rows = [{"_id": f"d{number}", "title": "", "text": text} for number, text in enumerate(TEXTS[:3])]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    done = bertkit("search", "--model", model, "--corpus", tmp_path / "corpus.jsonl", "the fine cat", "--json")
    assert {hit["id"] for hit in json.loads(done.stdout)[0]["hits"]} == {"d0", "d1", "d2"}


@pytest.mark.parametrize("kind", ["exact", "ivf", "hnsw"])
def test_every_kind_finds_what_a_search_of_all_finds(kind: Any, tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    points = normalised(generator.normal(size=(2000, 16)).astype(np.float32))
    asked = points[::50] + 0.05 * generator.normal(size=(40, 16)).astype(np.float32)
    index = vectors.build(points, kind)
    if kind != "exact":
        vectors.write(index, tmp_path / "i")
        index = vectors.read(tmp_path / "i", count=2000, width=16)
    vectors.set_probes(index, None)
    _, found = vectors.nearest(index, asked, 10)
    expected = np.argsort(-(asked @ points.T), axis=1)[:, :10]
    recall = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(found.tolist(), expected.tolist(), strict=True)])
    assert recall == 1.0 if kind == "exact" else recall > 0.9
    assert vectors.nearest(index, asked, 5000)[1].shape == (40, 2000)


def test_a_query_visits_a_quarter_of_the_cells() -> None:
    points = normalised(np.random.default_rng(0).normal(size=(12_000, 2)).astype(np.float32))
    index = vectors.build(points, "ivf")
    found = []
    for probes in (None, 7, 1000):
        vectors.set_probes(index, probes)
        found.append(index.nprobe)
    assert (index.nlist, found) == (300, [75, 7, 300])


def test_the_kind_goes_by_size() -> None:
    assert [vectors.kind_for("auto", count) for count in (1, 100_000, 100_001)] == ["exact", "exact", "ivf"]
    assert [vectors.cells_for(count) for count in (1, 1_000_000)] == [4, 4096]
    with pytest.raises(UsageError, match="needs 40 texts or more, there are 7"):
        vectors.build(np.eye(7, dtype=np.float32), "ivf")


def test_an_index_is_kept_reopened_and_refused_to_another_model(
    model: Path, corpus: Path, tmp_path: Path, bertkit: Command
) -> None:
    directory = tmp_path / "index"
    done = bertkit("search", "--model", model, "--corpus", corpus, "--index", directory, "--kind", "hnsw", "--json")
    described = json.loads(done.stdout)
    assert described == {"index": str(directory), "count": len(TEXTS), "width": 30, "kind": "hnsw", "cut": 0}
    stamp = (directory / "vectors.npy").stat().st_mtime_ns
    again = bertkit("search", "--model", model, "--corpus", corpus, "--index", directory, "--kind", "hnsw", "a cat")
    assert (again.code, (directory / "vectors.npy").stat().st_mtime_ns) == (0, stamp)
    recorded = bertkit("search", "--corpus", corpus, "--index", directory, "--kind", "hnsw", "a cat")  # its own model
    assert (recorded.code, recorded.stdout) == (0, again.stdout)
    done = bertkit("search", "--index", directory, "the cat", "--json")
    assert len(json.loads(done.stdout)[0]["hits"]) == 10
    other = write_model(tmp_path / "other", max_tokens=44)
    done = bertkit("search", "--index", directory, "--model", other, "the cat")
    assert (done.code, "is a different model" in done.stderr) == (3, True)
    done = bertkit("search", "--model", model, "--corpus", corpus, "--index", directory)
    assert (done.code, "contains an index that differs in: settings; name a new directory" in done.stderr) == (2, True)
    (directory / "vectors.faiss").write_bytes(b"damaged")
    done = bertkit("search", "--index", directory, "the cat")
    assert (done.code, "cannot be read as a FAISS index" in done.stderr) == (3, True)


def test_a_changed_config_is_another_model_and_an_earlier_index_stays_usable(
    built: TextIndex, corpus: Path, embedder: Embedder, tmp_path: Path
) -> None:
    """Fingerprints of earlier versions did not include config.json."""
    written = built.directory / "index.json"
    changed = write_model(tmp_path / "changed")
    assert Embedder.load(changed, engine()).fingerprint == embedder.fingerprint
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] - 1}))
    with pytest.raises(DataError, match="is a different model"):
        built.check_model(Embedder.load(changed, engine()))
    earlier = tmp_path / "earlier"
    shutil.copytree(written.parent, earlier)
    described = json.loads(written.read_text())
    (earlier / "index.json").write_text(json.dumps(described | {"fingerprint": embedder._earlier_fingerprint}))
    TextIndex.open(earlier).check_model(embedder)
    build_index(earlier, corpus, texts(), embedder, IndexSettings())


@pytest.mark.parametrize("change", [{"settings": {"new": 1}}, {"settings": None}, {"count": "many"}, {"format": 2}])
def test_an_index_of_another_version_is_told(built: TextIndex, change: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(json.dumps(built.described | change))
    with pytest.raises(DataError, match="is not an index of this version; build the index again"):
        TextIndex.open(tmp_path)


@pytest.mark.parametrize("name", ["vectors.npy", "texts.npy", "texts.jsonl"])
def test_a_damaged_file_of_an_index_is_named(built: TextIndex, embedder: Embedder, tmp_path: Path, name: str) -> None:
    directory = tmp_path / "i"
    shutil.copytree(built.directory, directory)
    whole = (directory / name).read_bytes()
    for kept in (0, len(whole) // 2):
        (directory / name).write_bytes(whole[:kept])
        with pytest.raises(DataError, match=rf"{name}: is damaged.*build the index again"):
            query.search(TextIndex.open(directory), embedder, ["cat"], QuerySettings(top=len(TEXTS)))


def test_a_kill_while_a_file_was_written_is_no_foreign_file(embedder: Embedder, corpus: Path, tmp_path: Path) -> None:
    directory = tmp_path / "i"
    directory.mkdir()
    for name in (DESCRIPTION, "vectors.json", "texts.npy"):
        unfinished_name(directory / name).write_text("half")
    (directory / ".DS_Store").write_bytes(b"Bud1")  # macOS
    assert build_index(directory, corpus, texts(), embedder, IndexSettings()).count == len(TEXTS)
    assert not [path.name for path in directory.iterdir() if is_unfinished(path.name)]


def test_vectors_that_are_there_are_not_computed_again(
    embedder: Embedder, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, settings = tmp_path / "index", IndexSettings(kind="hnsw")

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(vectors, "write", stopped)
        with pytest.raises(KeyboardInterrupt):
            build_index(directory, corpus, texts(), embedder, settings)
    monkeypatch.setattr(index_module, "embed_to_file", stopped)
    built = build_index(directory, corpus, texts(), embedder, settings)
    assert (built.count, built.faiss.ntotal, built.at([3])) == (len(TEXTS), len(TEXTS), [("t3", TEXTS[3])])


def test_a_file_of_an_index_that_the_disk_has_no_space_for_is_named(
    embedder: Embedder, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    long = (InputText(f"t{number}", text + " " * 2000, "") for number, text in enumerate(TEXTS))
    with pytest.raises(OSError, match="File too large") as kept, largest_file(1 << 16):
        build_index(tmp_path / "i", corpus, long, embedder, IndexSettings())
    assert kept.value.filename == str(tmp_path / "i" / "texts.jsonl")
    assert "Traceback" not in capfd.readouterr().err
    made = vectors.build(np.ones((3000, 16), np.float32), "hnsw")
    with pytest.raises(OSError, match="File too large") as graph, largest_file(1 << 16):
        vectors.write(made, tmp_path / "vectors.faiss")
    assert (graph.value.errno, graph.value.filename) == (errno.EFBIG, str(tmp_path / "vectors.faiss"))
    vectors.write(made, tmp_path / "vectors.faiss")
    assert vectors.read(tmp_path / "vectors.faiss", count=3000, width=16).ntotal == 3000


def test_queries_come_from_stdin(model: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, bertkit: Command) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a cat\n\nthe word\n")))
    done = bertkit("search", "--model", model, "--corpus", corpus, "--json", "--top", 1)
    assert [document["query"] for document in json.loads(done.stdout)] == ["a cat", "the word"]


def test_bm25_is_kept_with_the_index(built: TextIndex) -> None:
    fresh, kept = Bm25.of(TEXTS), built.bm25
    again = TextIndex.open(built.directory).bm25
    for each in (kept, again):
        np.testing.assert_array_equal(each.scores("the fine cat"), fresh.scores("the fine cat"))


def test_an_index_that_cannot_be_written_is_searched_by_words_too(
    built: TextIndex, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "bm25.npz")

    shutil.copytree(built.directory, tmp_path / "index", ignore=shutil.ignore_patterns("bm25.*"))
    monkeypatch.setattr(Bm25, "save", refused)
    found = TextIndex.open(tmp_path / "index").bm25
    np.testing.assert_array_equal(found.scores("fine cat"), Bm25.of(TEXTS).scores("fine cat"))
    assert "Read-only file system" in caplog.text


def test_hybrid_joins_reciprocal_ranks(built: TextIndex, embedder: Embedder) -> None:
    assert query.fused([[7, 3], [3, 5]]) == [
        (3, pytest.approx(1 / 62 + 1 / 61)),
        (7, pytest.approx(1 / 61)),
        (5, pytest.approx(1 / 62)),
    ]
    asked = TEXTS[11]
    (document,) = query.search(built, embedder, [asked], QuerySettings(hybrid=True, top=4))
    dense = np.argsort(-cosines_to_all(embedder, asked)[0], kind="stable")[:100].tolist()
    words, _ = Bm25.of(TEXTS).nearest(asked, 100)
    expected = query.fused([dense, words])[:4]
    assert [hit["id"] for hit in document["hits"]] == [f"t{number}" for number, _ in expected]


def test_a_cross_encoder_orders_the_first_hits(
    built: TextIndex,
    embedder: Embedder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    labels = Labels(("0", "1"))
    directory = write_model(tmp_path / "cross", heads=("sequence_classification",), labels=labels)
    cross = query.CrossEncoder(str(directory), engine())
    settings = QuerySettings(top=3, rerank_depth=9)
    (document,) = query.search(built, embedder, ["a fine cat"], settings, reranker=cross)
    for _ in range(2):
        cross.scores("cat " * 500, ["a", "b"])
    assert caplog.text.count("are cut") == 1
    (before,) = query.search(built, embedder, ["a fine cat"], QuerySettings(top=9))
    scores = cross.scores("a fine cat", [hit["text"] for hit in before["hits"]])
    order = sorted(range(9), key=lambda n: -scores[n])[:3]
    assert [hit["id"] for hit in document["hits"]] == [before["hits"][n]["id"] for n in order]
    three = write_model(tmp_path / "three", heads=("sequence_classification",), labels=Labels(("a", "b", "c")))
    with pytest.raises(DataError, match="is not a cross-encoder: its head is for classification with 3 outputs"):
        query.CrossEncoder(str(three), engine())
    monkeypatch.setattr(query.Predictor, "reads_single_texts", True)
    with pytest.raises(DataError, match="is not a cross-encoder: it was trained on single texts"):
        query.CrossEncoder(str(directory), engine())


def test_batch_tokens_are_the_cross_encoders_too(
    model: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, bertkit: Command
) -> None:
    class RecordedError(Exception):
        pass

    def record(name: str, engine: Any, *, offline: bool) -> None:
        raise RecordedError(engine.micro_batch_tokens)

    monkeypatch.setattr(query, "CrossEncoder", record)
    words = ("--model", model, "--corpus", corpus, "--rerank", model, "--batch-tokens", "123", "a cat")
    assert "RecordedError: 123" in bertkit("search", *words).stderr


def test_a_signal_leaves_no_temporary_index(model: Path, corpus: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bertkit", "search", "--model", str(model), "--corpus", str(corpus)]
    (tmp_path / "temporary").mkdir()
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("a cat\n" * 256)  # a block of queries, which is answered while stdin stays open
    process.stdin.flush()
    assert process.stdout.readline() == "a cat\n"
    assert any((tmp_path / "temporary").glob("bertkit-index-*"))
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert not any((tmp_path / "temporary").glob("bertkit-index-*"))


def test_a_pipe_that_is_read_twice_is_refused_without_advice_to_use_stdin(
    model: Path, corpus: Path, tmp_path: Path, bertkit: Command
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for words in (("mine-negatives", "--pairs", pipe), ("search", "--corpus", pipe, "cat")):
        done = bertkit(*words, "--model", model)
        assert done.code == 3
        assert f"{pipe}: is a pipe, device or socket; write it to a file" in " ".join(done.stderr.split())


def test_what_is_missing_is_named(model: Path, corpus: Path, tmp_path: Path, bertkit: Command) -> None:
    def fails(code: int, message: str, *arguments: object) -> None:
        done = bertkit("search", *arguments)
        assert (done.code, message in done.stderr.replace("\n", " ")) == (code, True), done.stderr

    fails(2, "give --corpus FILE", "--model", model, "a")
    fails(3, "contains no index; build it with --corpus", "--model", model, "--index", tmp_path, "a")
    fails(3, "no such file", "--model", model, "--corpus", tmp_path / "none.txt", "a")
    fails(2, "--pairs: compares the texts", "--model", model, "--corpus", corpus, "--pairs", "a")
    fails(2, "query 1 is empty", "--model", model, "--corpus", corpus, " ")
    fails(0, "--probes has no effect: the index compares", "--model", model, "--corpus", corpus, "--probes", "3", "a")
    built = ("--model", model, "--index", tmp_path / "i")
    fails(2, "--kind, --long: work only with --corpus", *built, "--kind", "hnsw", "--long", "error", "a")
    fails(2, "--text: works only with --corpus", *built, "--text", "body", "a")
    fails(2, "--min-score: works only with --pairs", *built, "--min-score", "0.5", "a")
    fails(2, "--hybrid: works only with queries", *built, "--hybrid", "--pairs")
    fails(2, "--top: works only with queries; without one", *built, "--corpus", corpus, "--top", "3")
    fails(2, "--rerank: works only with queries; without one", *built, "--corpus", corpus, "--rerank", "x")
    fails(2, "--rerank-depth: works only with --rerank", *built, "--rerank-depth", "3", "a")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("")
    fails(2, "contains other files", "--model", model, "--corpus", corpus, "--index", tmp_path / "other")
    (tmp_path / "none").write_text("")
    fails(3, "contains no texts", "--model", model, "--corpus", tmp_path / "none", "a")

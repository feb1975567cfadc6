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
from bertkit.inference.search.mining import LabelledPair, hard_negatives, paraphrases
from bertkit.inference.search.settings import IndexSettings, NegativeSettings, PairSettings, QuerySettings
from bertkit.inference.vector_types import normalised
from bertkit.models.labels import Labels
from tests.inference.test_independent_batches import engine
from tests.limits import largest_file
from tests.tasks.tiny_task import reviews, write_model

pytest.importorskip("faiss")
Command = Callable[..., Any]
TEXTS = list(dict.fromkeys(text for text, _ in reviews(120, seed=5)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "texts.jsonl"
    path.write_text("".join(json.dumps({"id": f"t{n}", "text": text}) + "\n" for n, text in enumerate(TEXTS)))
    return path


def texts() -> Any:
    return (InputText(f"t{number}", text, "") for number, text in enumerate(TEXTS))


@pytest.fixture(scope="module")
def embedder(model: Path) -> Embedder:
    return Embedder.load(model, engine(), name="base")


@pytest.fixture(scope="module")
def built(embedder: Embedder, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> TextIndex:
    return build_index(tmp_path_factory.mktemp("index") / "i", corpus, texts(), embedder, IndexSettings())


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


def test_paraphrases_are_the_nearest_of_all_pairs(built: TextIndex, embedder: Embedder) -> None:
    cosine = cosines_to_all(embedder, *TEXTS)
    upper = np.triu_indices(len(TEXTS), k=1)
    best = np.argsort(-cosine[upper], kind="stable")[:7]
    found = paraphrases(built, PairSettings(max_pairs=7))
    expected = cosine[upper][best]
    np.testing.assert_allclose([pair["score"] for pair in found], expected, atol=1e-5)
    pairs = {frozenset((pair["id1"], pair["id2"])) for pair in found}
    assert pairs == {frozenset((f"t{upper[0][n]}", f"t{upper[1][n]}")) for n in best}
    assert all(pair["score"] >= 0.99 for pair in paraphrases(built, PairSettings(min_score=0.99)))


def test_negatives_are_near_and_not_right(built: TextIndex, embedder: Embedder) -> None:
    anchors = TEXTS[:6]
    right = {anchor: {TEXTS[number + 20], TEXTS[number + 21]} for number, anchor in enumerate(anchors)}
    pairs = [LabelledPair(anchor, TEXTS[number + 20]) for number, anchor in enumerate(anchors)]
    settings = NegativeSettings(negatives=3, skip=2, depth=40, margin=0.001)
    cosine = cosines_to_all(embedder, *anchors)
    for number, (pair, found) in enumerate(hard_negatives(built, embedder, pairs, right, settings)):
        positive = cosine[number, TEXTS.index(pair.positive)]
        order = [
            n for n in np.argsort(-cosine[number], kind="stable") if TEXTS[n] not in {pair.anchor, *right[pair.anchor]}
        ]
        expected = [TEXTS[n] for n in order[2:42] if cosine[number, n] <= positive - 0.001][:3]
        assert [text for text, _ in found] == expected


def test_a_negative_has_at_most_a_share_of_the_positives_cosine(built: TextIndex, embedder: Embedder) -> None:
    anchors, positives = TEXTS[:6], TEXTS[20:26]
    pairs = [LabelledPair(*pair) for pair in zip(anchors, positives, strict=True)]
    settings = NegativeSettings(negatives=2, depth=len(TEXTS), relative_margin=0.002)
    found = hard_negatives(built, embedder, pairs, {}, settings)
    cosine = cosines_to_all(embedder, *anchors)
    for number, (_, negatives) in enumerate(found):
        allowed = 0.998 * cosine[number, 20 + number]
        order = [n for n in np.argsort(-cosine[number], kind="stable") if cosine[number, n] <= allowed]
        assert [text for text, _ in negatives] == [TEXTS[n] for n in order[:2]]


@pytest.mark.parametrize("limit", [{"max_score": 30.0}, {"margin": -2.5}])
def test_a_limit_that_no_cosine_has_is_refused(
    built: TextIndex, embedder: Embedder, limit: dict[str, Any], corpus: Path, model: Path, bertkit: Command
) -> None:
    with pytest.raises(UsageError, match="scores of dense vectors are cosines; give a number from"):
        next(hard_negatives(built, embedder, [], {}, NegativeSettings(**limit)))
    done = bertkit("search", "--model", model, "--corpus", corpus, "--pairs", "--min-score", "30")
    assert (done.code, "--min-score 30: scores of dense vectors" in done.stderr) == (2, True)


def test_copies_of_a_text_are_one_negative(
    built: TextIndex, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scores of equal vectors may differ in the last bit, by their places in a block of many queries."""

    def two_of_each(index: Any, query_QE: Any, count: int) -> tuple[Any, Any]:
        scores, numbers = vectors.nearest(index, query_QE, count)
        scores, numbers = np.repeat(scores, 2, axis=1), np.repeat(numbers, 2, axis=1)
        scores[:, 1::2] = np.nextafter(scores[:, 1::2], np.float32(-1))
        return scores, numbers

    monkeypatch.setattr("bertkit.inference.search.mining.nearest", two_of_each)
    pair = LabelledPair(TEXTS[0], TEXTS[0])
    ((_, found),) = hard_negatives(built, embedder, [pair], {}, NegativeSettings(negatives=5))
    assert len({text for text, _ in found}) == len(found) == 5


def test_a_positive_of_several_anchors_is_embedded_once(
    built: TextIndex, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [LabelledPair(TEXTS[number], TEXTS[20 + number % 2]) for number in range(6)]
    right = {pair.anchor: {pair.positive} for pair in pairs}
    settings = NegativeSettings(negatives=2, depth=40, margin=0.001)
    alone = [found for pair in pairs for _, found in hard_negatives(built, embedder, [pair], right, settings)]
    sizes: list[int] = []
    encode = Embedder.encode
    monkeypatch.setattr(
        Embedder, "encode", lambda self, each, **how: (sizes.append(len(each)), encode(self, each, **how))[1]
    )
    assert [found for _, found in hard_negatives(built, embedder, pairs, right, settings)] == alone
    assert sizes == [6, 2]


def test_only_the_texts_that_can_be_negatives_are_read(
    built: TextIndex, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[bytes] = []
    row = TextIndex._row
    monkeypatch.setattr(TextIndex, "_row", lambda index, line: read.append(line) or row(index, line))
    # One anchor with many positives must not be the reason to read as many texts for each of the others.
    right = {TEXTS[0]: set(TEXTS[1:30]), **{anchor: {TEXTS[30]} for anchor in TEXTS[1:6]}}
    pairs = [LabelledPair(anchor, TEXTS[30]) for anchor in TEXTS[1:6]] + [LabelledPair(TEXTS[0], TEXTS[1])]
    settings = NegativeSettings(negatives=1, skip=0, depth=2)
    mined = hard_negatives(built, embedder, pairs, right, settings)
    for _ in range(5):
        next(mined)
    assert len(read) <= 5 * 4  # the anchor, its positive and two negatives


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


def test_pairs_are_columns_separated_by_tabs(model: Path, tmp_path: Path, bertkit: Command) -> None:
    (tmp_path / "texts.txt").write_text(f"{TEXTS[0]}\n{TEXTS[0]}\t\x1b\n", encoding="utf-8")
    done = bertkit("search", "--model", model, "--corpus", tmp_path / "texts.txt", "--pairs")
    score, *both = done.stdout.rstrip("\n").split("\t")
    assert 0.5 < float(score) <= 1.001
    assert sorted(both) == [TEXTS[0], f"{TEXTS[0]}\\t\\x1b"]


def test_mining_writes_triplets(model: Path, tmp_path: Path, bertkit: Command) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("question,answer\n" + "".join(f"{a},{b}\n" for a, b in zip(TEXTS[:9], TEXTS[9:18], strict=True)))
    out = tmp_path / "triplets.jsonl"
    options = ("--model", model, "--pairs", path, "--columns", "question,answer", "--margin", "-2")
    done = bertkit("mine-negatives", *options, "--out", out, "--json")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert json.loads(done.stdout) == {"out": str(out), "count": 9}
    assert {row["anchor"] for row in rows} == set(TEXTS[:9])
    assert all(row["negative"] in TEXTS[9:18] and row["negative"] != row["positive"] for row in rows)
    done = bertkit("mine-negatives", "--model", model, "--pairs", path)
    assert (done.code, "anchor" in done.stderr) == (3, True)
    (tmp_path / "none.csv").write_text("anchor,positive\n")
    done = bertkit("mine-negatives", "--model", model, "--pairs", tmp_path / "none.csv")
    assert (done.code, "contains no pairs" in done.stderr) == (3, True)
    done = bertkit("mine-negatives", "--model", model, "--pairs", path, "--columns", "zz,answer")
    assert (done.code, "no column 'zz'" in done.stderr, "name it with --columns" in done.stderr) == (3, True, True)
    done = bertkit("mine-negatives", *options, "--max-score", "-1")
    assert (done.code, done.stdout) == (0, "")
    assert "9 of 9 pairs have no negative within the limits; raise --depth or --max-score" in done.stderr
    for bad, told in ((path, "is read by this command"), (tmp_path / "no" / "t.jsonl", "does not exist; create it")):
        done = bertkit("mine-negatives", *options, "--out", bad)
        assert (done.code, told in done.stderr) == (2, True), done.stderr
    done = bertkit("mine-negatives", *options, "--text", "question")
    assert (done.code, "work only with --corpus" in done.stderr) == (2, True)
    other = tmp_path / "other.csv"
    other.write_text(path.read_text().replace(",", ";") + "caf\u00e9;cat\n", encoding="latin-1")
    done = bertkit(
        "mine-negatives", *options[:2], "--pairs", other, *options[4:], "--encoding", "latin-1", "--delimiter", ";"
    )
    assert (done.code, json.loads(done.stdout.splitlines()[-1])["anchor"]) == (0, "caf\u00e9"), done.stderr


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

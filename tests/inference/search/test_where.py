"""`bertkit search --where`: the hits are those of a search of all texts without the others, in every kind of index."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertkit.errors import DataError, UsageError
from bertkit.inference.embed import AnyEmbedder, InputText
from bertkit.inference.embedder import Embedder
from bertkit.inference.search.index import DESCRIPTION, TextIndex, build_index
from bertkit.inference.search.query import fused, search
from bertkit.inference.search.settings import IndexSettings, QuerySettings
from bertkit.inference.token_embedder import TokenEmbedder
from bertkit.models.sentence_files import write_sentence_files
from bertkit.text.tokenizer_files import load_tokenizer
from tests.inference.test_independent_batches import engine
from tests.inference.test_token_embedder import written
from tests.tasks.tiny_task import reviews, write_model

pytest.importorskip("faiss")
Command = Callable[..., Any]
TEXTS = list(dict.fromkeys(text for text, _ in reviews(70, seed=3)))
YEARS = [str(2020 + number % 3) for number in range(len(TEXTS))]
ASKED = ["the fine cat", "a list of words"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "base")


def embedder_of(vectors: str, model: Path, directory: Path) -> AnyEmbedder:
    if vectors == "dense":
        return Embedder.load(model, engine(), name="base")
    if vectors == "tokens":
        written(directory / "model", model)
        return TokenEmbedder.load(directory / "model", engine())
    sparse = write_model(directory / "model", heads=("masked_lm",))
    width = load_tokenizer(sparse).vocab_size
    write_sentence_files(sparse, width=width, pooling=("splade",), normalise=False, max_tokens=24)
    return Embedder.load(sparse, engine())


def built(directory: Path, embedder: AnyEmbedder, kind: Any = "auto") -> TextIndex:
    (corpus := directory.with_suffix(".txt")).write_text("\n".join(TEXTS))
    rows = enumerate(zip(TEXTS, YEARS, strict=True))
    texts = (InputText(f"t{n}", text, "", {"year": year, "number": str(n)}) for n, (text, year) in rows)
    return build_index(directory, corpus, texts, embedder, IndexSettings(kind=kind))


@pytest.mark.parametrize(
    ("vectors", "kinds"), [("dense", ("exact", "ivf", "hnsw")), ("tokens", ("exact", "ivf")), ("sparse", ("auto",))]
)
def test_hits_are_those_of_a_search_of_all_texts_without_the_others(
    vectors: str, kinds: tuple[str, ...], model: Path, tmp_path: Path
) -> None:
    embedder = embedder_of(vectors, model, tmp_path)
    for kind in kinds:
        index = built(tmp_path / kind, embedder, kind)
        if kind == kinds[0]:
            every = search(index, embedder, ASKED, QuerySettings(top=len(TEXTS)))
        found = search(index, embedder, ASKED, QuerySettings(top=6, where=["year=2021"]))
        joined = search(index, embedder, ASKED, QuerySettings(hybrid=True, where=["year=2021"]))
        for number, document in enumerate(every):
            own = [hit for hit in document["hits"] if YEARS[int(hit["id"][1:])] == "2021"]
            hits = found[number]["hits"]
            assert [hit["id"] for hit in hits] == [hit["id"] for hit in own[:6]]
            assert [hit["text"] for hit in hits] == [hit["text"] for hit in own[:6]]
            assert [hit["score"] for hit in hits] == pytest.approx([hit["score"] for hit in own[:6]], rel=1e-5)
            weights = index.bm25.scores(ASKED[number])
            by_words = [n for n in np.argsort(-weights, kind="stable") if weights[n] > 0 and YEARS[n] == "2021"]
            both = fused([[int(hit["id"][1:]) for hit in own], by_words])[:10]
            assert [(hit["id"], hit["score"]) for hit in joined[number]["hits"]] == [(f"t{n}", s) for n, s in both]
        assert index.part(("year=2021",)) is index.part(("year=2021",))  # for the next block of queries
        (one,) = search(index, embedder, ASKED[:1], QuerySettings(where=["year=2021", "number=7"]))
        assert [hit["id"] for hit in one["hits"]] == ["t7"]
        assert search(index, embedder, ASKED, QuerySettings(where=["year=2021", "year=2022"]))[1]["hits"] == []


def test_fields_are_those_of_the_rows_and_a_wrong_one_is_refused(model: Path, tmp_path: Path, bertkit: Command) -> None:
    rows = [
        {"id": "a", "text": "the fine cat", "year": 2020, "good": True, "tags": ["x"], "body": "long " * 99},
        {"_id": "b", "text": "the fine cat sat", "year": 2021.5, "place": "São Paulo = here"},
        {"text": "a list", "year": None},
    ]
    corpus, index = tmp_path / "c.jsonl", tmp_path / "index"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert bertkit("search", "--model", model, "--corpus", corpus, "--index", index).code == 0
    assert json.loads((index / DESCRIPTION).read_text())["fields"] == ["good", "place", "year"]
    for given, ids in (
        ("year=2020", ["a"]),
        ("year=2021.5", ["b"]),
        ("good=true", ["a"]),
        ("place=São Paulo = here", ["b"]),
        ("id=2", ["2"]),
        ("year=", []),
    ):
        done = bertkit("search", "--index", index, "--where", given, "a cat", "--json")
        assert [hit["id"] for hit in json.loads(done.stdout)[0]["hits"]] == ids
    unknown = "no text has a field 'yaer'; there are: id, good, place, year"
    for given, told in {"yaer=2020": unknown, "year": "expected FIELD=VALUE"}.items():
        done = bertkit("search", "--index", index, "--where", given, "a cat")
        assert (done.code, told in done.stderr) == (2, True)


def test_an_index_without_fields_is_told(model: Path, tmp_path: Path) -> None:
    embedder = Embedder.load(model, engine(), name="base")
    built(tmp_path / "index", embedder)
    described = json.loads((tmp_path / "index" / DESCRIPTION).read_text())
    (tmp_path / "index" / DESCRIPTION).write_text(json.dumps({k: v for k, v in described.items() if k != "fields"}))
    index = TextIndex.open(tmp_path / "index")
    assert len(search(index, embedder, ["a"], QuerySettings())[0]["hits"]) == 10
    with pytest.raises(DataError, match="was built by a version that kept ids and texts only"):
        search(index, embedder, ["a"], QuerySettings(where=["year=2020"]))
    with pytest.raises(UsageError, match="query 1 is empty"):
        search(index, embedder, [" "], QuerySettings(where=["year=2020"]))

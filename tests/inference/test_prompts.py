"""Prompts: every command puts the prompt of its role before a text, and a model's own ones are found by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bertkit as package
from bertkit.errors import DataError, UsageError
from bertkit.files import read_json, write_json
from bertkit.inference.vector_types import normalised
from bertkit.models.sentence import read_pooling
from bertkit.models.sentence_files import write_sentence_files
from bertkit.models.text_reading import TextReading
from tests.inference.serving.clients import post, served
from tests.tasks.tiny_task import reviews, write_model

Command = Callable[..., Any]
TEXTS = sorted({text for text, _ in reviews(31, seed=2)})
QUERY, DOCUMENT = "fine list of ", "poor number "
BOTH = TextReading({"query": QUERY, "passage": DOCUMENT, "topic": "cat "}, "topic")


def write_embedder(directory: Path, reading: TextReading = BOTH) -> Path:
    write_sentence_files(
        write_model(directory), width=30, pooling=("mean",), normalise=False, max_tokens=24, reading=reading
    )
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedder(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "texts.txt"
    path.write_text("".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
    return path


def encoded(model: Path, prompt: str, texts: list[str] = TEXTS) -> Any:
    """The vectors of texts with a literal prefix; the empty prompt replaces the model's default one."""
    return package.load(str(model), device="cpu").encode([prompt + text for text in texts], prompt="")


@pytest.mark.parametrize(
    ("prompts", "default", "query", "document"),
    [
        ({}, None, "", ""),
        ({"query": "q "}, None, "q ", ""),
        ({"query": "q "}, "query", "q ", ""),
        ({"corpus": "c ", "passage": "p "}, None, "", "p "),
        ({"document": "d ", "passage": "p "}, "document", "", "d "),
        ({"topic": "t "}, "topic", "t ", "t "),
    ],
)
def test_a_role_has_its_own_prompt_or_none(prompts: Any, default: str | None, query: str, document: str) -> None:
    reading = TextReading(prompts, default)
    assert (reading.query_prompt, reading.document_prompt) == (query, document)


def test_encode_takes_a_prompt_or_the_name_of_one(model: Path) -> None:
    loaded = package.load(str(model), device="cpu")
    np.testing.assert_array_equal(loaded.encode(TEXTS), encoded(model, "cat "))
    np.testing.assert_array_equal(loaded.encode(TEXTS, prompt_name="query"), encoded(model, QUERY))
    np.testing.assert_array_equal(loaded.encode(TEXTS, prompt_name="document"), encoded(model, ""))
    np.testing.assert_array_equal(loaded.encode(TEXTS, prompt="a word "), encoded(model, "a word "))
    with pytest.raises(UsageError, match="no prompt 'qeury'; its prompts are passage, query, topic"):
        loaded.encode(TEXTS, prompt_name="qeury")
    with pytest.raises(UsageError, match="give one of them"):
        loaded.encode(TEXTS, prompt="x", prompt_name="query")


def test_embed_puts_the_prompt_before_every_text(model: Path, corpus: Path, tmp_path: Path, bertkit: Command) -> None:
    for number, (option, expected) in enumerate([(("--prompt-name", "passage"), DOCUMENT), (("--prompt", "a "), "a ")]):
        out = tmp_path / f"{number}.npy"
        done = bertkit("embed", "--model", model, corpus, "--out", out, "--precision", "fp32", *option)
        assert done.code == 0, done.stderr
        np.testing.assert_array_equal(np.load(out), encoded(model, expected))
    done = bertkit("embed", "--model", model, corpus, "--prompt", "a", "--prompt-name", "query")
    assert (done.code, "--prompt-name and --prompt: give one of them" in done.stderr) == (2, True)


def test_search_compares_prompted_queries_with_prompted_texts(
    model: Path, corpus: Path, tmp_path: Path, bertkit: Command
) -> None:
    def scores(*more: Any) -> list[float]:
        done = bertkit("search", "--model", model, *more, "the cat", "--json", "--top", 50, "--precision", "fp32")
        assert done.code == 0, done.stderr
        hits = json.loads(done.stdout)[0]["hits"]
        return [hit["score"] for hit in sorted(hits, key=lambda hit: int(hit["id"]))]

    def cosines(query: str, document: str) -> Any:
        return normalised(encoded(model, document)) @ normalised(encoded(model, query, ["the cat"]))[0]

    index = tmp_path / "index"
    np.testing.assert_allclose(scores("--corpus", corpus, "--index", index), cosines(QUERY, DOCUMENT), atol=1e-5)
    np.testing.assert_allclose(scores("--index", index), cosines(QUERY, DOCUMENT), atol=1e-5)
    given = ("--query-prompt", "a ", "--document-prompt", "")
    np.testing.assert_allclose(scores("--corpus", corpus, *given), cosines("a ", ""), atol=1e-5)


def test_an_index_of_an_earlier_version_has_the_default_prompt(
    model: Path, corpus: Path, tmp_path: Path, bertkit: Command
) -> None:
    """Such an index has no prompts in its settings: queries get the default prompt, as its texts did."""
    index = tmp_path / "index"
    options = ("--index", index, "--precision", "fp32")
    default = ("--query-prompt", "cat ", "--document-prompt", "cat ")
    assert bertkit("search", "--model", model, "--corpus", corpus, *options, *default).code == 0
    described = read_json(index / "index.json")
    del described["settings"]["query_prompt"], described["settings"]["document_prompt"]
    write_json(index / "index.json", described)
    done = bertkit("search", *options, "the cat", "--json", "--top", 1)
    best = max(normalised(encoded(model, "cat ")) @ normalised(encoded(model, "cat ", ["the cat"]))[0])
    assert json.loads(done.stdout)[0]["hits"][0]["score"] == pytest.approx(best, abs=1e-5)
    done = bertkit("search", "--corpus", corpus, *options, "--update")
    assert (done.code, "differs in: settings" in done.stderr) == (2, True)


def test_a_model_without_prompts_has_indexes_like_those_of_earlier_versions(
    corpus: Path, tmp_path: Path, bertkit: Command
) -> None:
    plain = write_model(tmp_path / "plain")
    assert bertkit("search", "--model", plain, "--corpus", corpus, "--index", tmp_path / "index").code == 0
    assert not any("prompt" in key for key in read_json(tmp_path / "index/index.json")["settings"])


def test_negatives_are_compared_as_query_and_documents(model: Path, tmp_path: Path, bertkit: Command) -> None:
    pairs = [{"anchor": TEXTS[n], "positive": TEXTS[-1 - n]} for n in range(5)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    done = bertkit("mine-negatives", "--model", model, "--pairs", tmp_path / "pairs.jsonl", "--precision", "fp32")
    positives = [pair["positive"] for pair in pairs]
    anchor = normalised(encoded(model, QUERY, [pair["anchor"] for pair in pairs]))
    cosine = anchor @ normalised(encoded(model, DOCUMENT, positives)).T
    expected = {}
    for row, pair in enumerate(pairs):
        allowed = [n for n in range(5) if n != row and cosine[row, n] <= cosine[row, row] - 0.0]
        if allowed:
            expected[pair["anchor"]] = positives[max(allowed, key=lambda n: cosine[row, n])]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["anchor"]: row["negative"] for row in rows} == expected


@pytest.mark.parametrize("options", [("--query-prompt", "--document-prompt"), ("--query-prefix", "--document-prefix")])
def test_retrieval_takes_prompts_or_has_the_models(
    options: tuple[str, str], model: Path, tmp_path: Path, bertkit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "beir"
    (folder / "qrels").mkdir(parents=True)
    rows = [{"_id": f"d{n}", "title": "", "text": text} for n, text in enumerate(TEXTS)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "queries.jsonl").write_text(json.dumps({"_id": "q", "text": "the cat"}) + "\n")

    def mrr(query: str, document: str, relevant: int) -> float:
        cosine = normalised(encoded(model, document)) @ normalised(encoded(model, query, ["the cat"]))[0]
        rank = int((cosine > cosine[relevant]).sum()) + 1
        return 1 / rank if rank <= 10 else 0

    for query, document, more in (
        (QUERY, DOCUMENT, ()),
        ("a word ", "letter ", (options[0], "a word ", options[1], "letter ")),
    ):
        cosine = normalised(encoded(model, document)) @ normalised(encoded(model, query, ["the cat"]))[0]
        relevant = int(np.argsort(-cosine)[1])
        (folder / "qrels/test.tsv").write_text(f"query-id\tcorpus-id\tscore\nq\td{relevant}\t1\n")
        done = bertkit("eval", "retrieval", "--model", model, "--data-dir", folder, "--json", *more)
        found = json.loads(done.stdout)["tasks"]["beir"]["mrr@10"]["mean"]
        assert found == pytest.approx(mrr(query, document, relevant)) == 0.5


def test_the_server_knows_the_prompts(model: Path) -> None:
    models = [served("base", model)]
    named = post(models, "/v1/embeddings", {"input": "the cat", "prompt_name": "query"}).json()
    query = encoded(model, QUERY, ["the cat"])
    np.testing.assert_array_equal(np.float32(named["data"][0]["embedding"]), query[0])
    unknown = post(models, "/v1/embeddings", {"input": "the cat", "prompt_name": "x"})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (422, "prompt_name")
    assert "no prompt 'x'; its prompts are passage, query, topic" in unknown.json()["error"]["message"]
    ranked = post(models, "/rerank", {"query": "the cat", "documents": TEXTS}).json()
    scores = {row["index"]: row["relevance_score"] for row in ranked["results"]}
    cosine = normalised(encoded(model, DOCUMENT)) @ normalised(query)[0]
    np.testing.assert_allclose([scores[number] for number in range(len(TEXTS))], cosine, atol=1e-6)
    long = post(models, "/rerank", {"query": "the cat", "documents": ["a cat", "cat " * 90]}, long="error")
    assert "documents.1: " in long.json()["error"]["message"]


@pytest.mark.parametrize("default", [None, "query"])
@pytest.mark.parametrize("mode", ["mean", "max", "cls", "lasttoken", "mean_sqrt_len_tokens"])
def test_a_pooling_may_leave_out_the_prompts_tokens(tmp_path: Path, mode: str, default: str | None) -> None:
    library = pytest.importorskip("sentence_transformers", reason="the oracle is a development dependency")
    model = write_embedder(tmp_path / "base", TextReading({"query": QUERY}, default))
    write_json(
        model / "1_Pooling/config.json", {"embedding_dimension": 30, "pooling_mode": mode, "include_prompt": False}
    )
    loaded, theirs = package.load(str(model), device="cpu"), library.SentenceTransformer(str(model), device="cpu")
    texts = [*TEXTS[:5], "", "cat " * 40]
    for prompt in (QUERY, "poor", ""):
        own = loaded.encode(texts, prompt=prompt)
        np.testing.assert_allclose(own, theirs.encode(texts, prompt=prompt), atol=1e-5)
        alone = np.concatenate([loaded.encode([text], prompt=prompt) for text in texts])
        np.testing.assert_array_equal(alone, own)
    np.testing.assert_allclose(loaded.encode(texts), theirs.encode(texts), atol=1e-5)
    whole = encoded(model, QUERY, texts)
    assert np.allclose(loaded.encode(texts, prompt=QUERY), whole, atol=1e-4) == (mode == "lasttoken")


def test_what_cannot_leave_out_a_prompt_is_refused(tmp_path: Path) -> None:
    model = write_embedder(tmp_path / "base")
    pooling = {"embedding_dimension": 30, "pooling_mode": "weightedmean", "include_prompt": False}
    write_json(model / "1_Pooling/config.json", pooling)
    with pytest.raises(
        DataError, match="include_prompt is false, which is not supported with the pooling_mode weighted"
    ):
        package.load(str(model), device="cpu").encode(["a cat"])
    write_json(model / "1_Pooling/config.json", pooling | {"pooling_mode": "mean"})
    with pytest.raises(DataError, match="include_prompt is false, but the model has a prompt; this cannot be trained"):
        read_pooling(model)

"""Responses of all addresses: the commands' objects, OpenAI's embeddings, and independence of other requests."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from bertkit.inference.serving.served import ServedModel, apart
from bertkit.inference.serving.service import Service, shortened
from bertkit.tasks.examples import TaggedExample
from tests.inference.serving.clients import in_process, post, served

Models = dict[str, ServedModel]
TEXTS = ["the film was warm", "", "a", "of the story and the actors is not who what Was . , ?" * 5, "fine cat"]
TOLERANCE = 1e-6
"""Between a served prediction and that of `bertkit predict`, and between different batches at this width of 30: matrix
products round differently by shape. At widths that are multiples of four, the batch changes no bit
(test_independent_predictions.py)."""


def inputs_of(kind: str) -> list[Any]:
    context = "the fine cat is a warm letter . " * 12
    return {
        "classification": ["a fine film", "a cold paper of the cat", " ", "poor"],
        "regression": ["a fine film", "poor"],
        "tagging": ["a fine cat. (warm) paper", ["fine", "cat"], {"words": ["cold", "list"], "id": "w"}, ""],
        "span": [{"question": "what is it ?", "context": context}, {"question": "who ?", "context": "a warm cat"}],
        "choice": [{"text": "the cat", "endings": ["fine", "cold cat", "a list"]}],
    }[kind]


def vectors_of(response: httpx2.Response) -> np.ndarray[Any, Any]:
    assert response.status_code == 200, response.text
    document = response.json()
    assert [each["index"] for each in document["data"]] == list(range(len(document["data"])))
    return np.array([each["embedding"] for each in document["data"]], dtype=np.float32)


def test_embeddings_are_those_of_encode(models: Models) -> None:
    base = models["base"]
    expected = base.model.encode(TEXTS)
    response = post([base], "/v1/embeddings", {"model": "base", "input": TEXTS})
    assert np.array_equal(vectors_of(response), expected)
    document = response.json()
    lengths = [len(each.ids) for each in base.model.embedder.sequences(TEXTS)]
    assert document["usage"] == {
        "prompt_tokens": sum(lengths),
        "total_tokens": sum(lengths),
        "truncated_inputs": 1,
    }
    assert (document["object"], document["model"], document["data"][0]["object"]) == ("list", "base", "embedding")
    one = post([base], "/v1/embeddings", {"model": "base", "input": TEXTS[0], "user": "somebody"})
    np.testing.assert_allclose(vectors_of(one), expected[:1], atol=TOLERANCE)


def test_a_body_without_its_header_is_told(models: Models) -> None:
    """curl's default header, which declares every body a form."""

    async def ask(client: httpx2.AsyncClient, _: Service) -> httpx2.Response:
        form = {"content-type": "application/x-www-form-urlencoded"}
        return await client.post("/v1/embeddings", content=b'{"model": "base", "input": "a"}', headers=form)

    refused = in_process([models["base"]], ask)
    assert refused.status_code == 422
    assert "the header content-type: application/json" in refused.json()["error"]["message"]


def test_token_ids_and_base64(models: Models) -> None:
    base = models["base"]
    ids = [each.ids[1:-1] for each in base.model.embedder.sequences(["the fine cat", "a list"])]
    asked = {"model": "base", "input": ids, "encoding_format": "base64"}
    found = post([base], "/v1/embeddings", asked).json()["data"]
    decoded = [np.frombuffer(base64.b64decode(each["embedding"]), dtype="<f4") for each in found]
    assert np.array_equal(np.stack(decoded), base.model.encode(["the fine cat", "a list"]))
    alone = vectors_of(post([base], "/v1/embeddings", {"model": "base", "input": ids[0]}))
    np.testing.assert_allclose(alone[0], decoded[0], atol=TOLERANCE)
    outside = post([base], "/v1/embeddings", {"model": "base", "input": [[0], [10**30]]})
    assert (outside.status_code, outside.json()["error"]["param"]) == (422, "input")
    assert "is not a token id" in outside.json()["error"]["message"]


def test_usage_counts_special_tokens_and_what_is_read(models: Models) -> None:
    context = "the fine cat is a warm letter . "
    asked: list[tuple[str, Any, int]] = [
        ("classification", "a fine cat", 5),
        ("pair", {"id": "a fine cat", "text": "fine", "text_pair": "cat"}, 5),
        ("classification", "cat " * 500, models["classification"].model.longest_example or 0),
        ("tagging", ["fine", "cat"], 4),
        ("tagging", "fine cat " * 100, 202),
        ("span", {"question": "who ?", "context": context * 9}, 2 + 8 * 9 + 3),
        ("choice", {"text": "the cat", "endings": ["fine", "cold cat"]}, 2 * (2 + 3) + 3),
    ]
    for name, each, tokens in asked:
        usage = post([models[name]], "/predict", {"inputs": [each]}).json()["usage"]
        cut = int(isinstance(each, str) and each.startswith("cat cat"))
        assert usage == {"prompt_tokens": tokens, "total_tokens": tokens, "truncated_inputs": cut}
    filled = post([models["base"]], "/fill", {"input": ["the [MASK] [MASK] cat", "[MASK]"]}).json()
    assert filled["usage"]["total_tokens"] == 4 + 2 + 1 + 2
    ranked = post([models["relevance"]], "/rerank", {"query": "fine", "documents": ["cat", "a cat"]}).json()
    assert ranked["usage"]["total_tokens"] == 2 + 3 + 3 + 3


def test_texts_that_are_cut_are_counted_in_every_answer_and_logged_once(
    models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    long = "cat " * 500
    endings = {"text": "the cat", "endings": ["fine", long]}
    names = ("classification", "choice", "span", "relevance")

    async def ask(client: httpx2.AsyncClient, _: Service) -> list[int]:
        asked: list[tuple[str, dict[str, Any]]] = [
            ("/predict", {"model": "classification", "inputs": ["fine", long, long]}),
            ("/predict", {"model": "classification", "inputs": [long]}),
            ("/predict", {"model": "classification", "inputs": ["fine"]}),
            ("/predict", {"model": "choice", "inputs": [endings, endings]}),
            ("/predict", {"model": "span", "inputs": [{"question": long, "context": "a fine cat"}]}),
            ("/predict", {"model": "span", "inputs": [{"question": "who ?", "context": long}]}),
            ("/rerank", {"model": "relevance", "query": "fine", "documents": [long, "cat"]}),
            ("/rerank", {"model": "base", "query": "fine", "documents": [long, "cat"]}),
        ]
        answers = [await client.post(path, json=body) for path, body in asked]
        return [answer.json()["usage"]["truncated_inputs"] for answer in answers]

    served_here = [models[name] for name in (*names, "base")]
    assert in_process(served_here, ask) == [2, 1, 0, 2, 1, 0, 1, 1]
    told = [each.getMessage() for each in caplog.records if "cut" in each.getMessage()]
    assert [message.partition(":")[0] for message in told] == [*names, "base"]


def test_what_is_wrong_is_told_in_fields_of_the_request(models: Models) -> None:
    asked: list[tuple[str, Any, str]] = [
        ("classification", {"textx": "a"}, "input 0: no field 'text'; there are: 'textx'"),
        ("classification", {"text": 3}, "input 0, text: found a number, expected text"),
        ("tagging", ["fine", " "], "input 0, words: found ' '; expected words, none of them blank"),
        ("span", "who ?", "input 0: no field 'question'; there are: 'text'"),
        (
            "choice",
            {"text": "a", "endings": ["b"]},
            "input 0, endings: a list, expected a list of at least two endings",
        ),
    ]
    for name, each, message in asked:
        error = post([models[name]], "/predict", {"inputs": [each]}).json()["error"]
        assert error["message"].startswith(message)
        assert error["param"] == "inputs"
        assert "--" not in error["message"]


def test_a_text_alone_for_a_model_of_pairs_is_refused(models: Models) -> None:
    for alone in ("a fine cat", {"text": "a fine cat"}):
        refused = post([models["pair"]], "/predict", {"inputs": [{"text": "a", "text_pair": "b"}, alone]})
        assert refused.status_code == 422
        told = "input 1: pair was trained on pairs of texts; give an object with text and text_pair"
        assert refused.json()["error"]["message"] == told
    for fine in ({"text": "a fine cat", "text_pair": "the cat"}, {"left": "a fine cat", "right": ""}):
        assert post([models["pair"]], "/predict", {"inputs": [fine]}).json()["predictions"][0]["prediction"]


def test_a_pair_for_a_model_of_single_texts_is_refused(models: Models) -> None:
    for kind in ("classification", "regression"):
        inputs = ["a", {"text": "a", "text_pair": None}, {"text": "a", "text_pair": ""}]
        refused = post([models[kind]], "/predict", {"inputs": inputs})
        assert refused.status_code == 422
        error = refused.json()["error"]
        assert error["message"] == f"input 2: {kind} was trained on single texts; leave text_pair out"
        assert (error["code"], error["param"]) == ("invalid_value", "inputs")
        assert post([models[kind]], "/predict", {"inputs": inputs[:2]}).status_code == 200
    ranked = post([models["regression"]], "/rerank", {"query": "a", "documents": ["b"]})
    assert ranked.status_code == 422


def test_offsets_count_characters_without_width(models: Models) -> None:
    text = "\u200bfine c\u200dat is\ufeff warm \u200b"
    (found,) = post([models["tagging"]], "/predict", {"inputs": [text]}).json()["predictions"]
    assert ("warm", text.index("warm")) in [(each["text"], each["start"]) for each in found["entities"]]
    (asked,) = post([models["span"]], "/predict", {"inputs": [{"question": "who ?", "context": text}]}).json()[
        "predictions"
    ]
    assert asked["answers"]
    for each in (*found["entities"], *asked["answers"]):
        assert each["text"] == text[each["start"] : each["end"]]


def test_dimensions_shorten_vectors_and_keep_their_length(models: Models) -> None:
    base = models["base"]
    whole = base.model.encode(["a fine cat"])
    found = vectors_of(post([base], "/v1/embeddings", {"model": "base", "input": "a fine cat", "dimensions": 7}))
    assert np.array_equal(found, whole[:, :7])  # not of length one, so only cut
    unit = whole / np.linalg.norm(whole, axis=-1, keepdims=True)
    np.testing.assert_allclose(np.linalg.norm(shortened(unit, 7), axis=-1), 1, atol=1e-6)
    over = post([base], "/v1/embeddings", {"model": "base", "input": "a", "dimensions": 31})
    assert (over.status_code, over.json()["error"]["param"]) == (422, "dimensions")


@pytest.mark.parametrize("kind", ["classification", "regression", "tagging", "span", "choice"])
def test_predictions_are_the_objects_of_the_command(kind: str, models: Models) -> None:
    inputs = inputs_of(kind)
    response = post([models[kind]], "/predict", {"inputs": inputs})
    assert response.status_code == 200, response.text
    expected = json.loads(json.dumps(models[kind].model.predict(inputs)))
    _assert_near(response.json()["predictions"], expected)
    assert response.json()["usage"]["total_tokens"] > 0
    if kind == "tagging":
        assert [(e["start"], e["end"], e["text"]) for e in expected[0]["entities"]] == [
            (2, 6, "fine"),
            (13, 17, "warm"),
        ]
    best = post([models[kind]], "/predict", {"model": kind, "inputs": inputs, "top": 1}).json()["predictions"]
    _assert_near(best, json.loads(json.dumps(models[kind].model.predict(inputs, top=1))))


def test_fills_are_those_of_the_command(models: Models) -> None:
    text = "the [MASK] of the [MASK]"
    found = post([models["base"]], "/fill", {"input": [text, "a [MASK]"], "top": 3}).json()["results"]
    assert [each["text"] for each in found] == [text, "a [MASK]"]
    assert found[0]["masks"] == models["base"].model.fill(text, top=3)
    unmasked = post([models["base"]], "/fill", {"input": "a cat"})
    assert (unmasked.status_code, unmasked.json()["error"]["code"]) == (422, "invalid_value")


def test_reranking_by_vectors_and_by_a_cross_encoder(models: Models) -> None:
    documents = ["a cold list", "the fine cat", "paper", "fine cat"]
    asked = {"query": "fine cat", "documents": documents, "return_documents": True}
    found = post([models["base"]], "/rerank", asked).json()["results"]
    assert found[0]["index"] == 3
    assert found[0]["relevance_score"] == pytest.approx(1, abs=1e-6)
    assert [each["document"]["text"] for each in found] == [documents[each["index"]] for each in found]
    objects = [{"text": text, "id": number} if number % 2 else text for number, text in enumerate(documents)]
    assert post([models["base"]], "/rerank", {**asked, "documents": objects}).json()["results"] == found
    pairs = [{"text": "fine cat", "text_pair": each} for each in documents]
    scores = [each["prediction"] for each in models["relevance"].model.predict(pairs)]
    found = post([models["relevance"]], "/v1/rerank", {**asked, "top_n": 2, "return_documents": False}).json()[
        "results"
    ]
    order = sorted(range(4), key=lambda number: -scores[number])[:2]
    assert [each["index"] for each in found] == order
    assert [each["relevance_score"] for each in found] == pytest.approx([scores[n] for n in order], abs=TOLERANCE)
    assert set(found[0]) == {"index", "relevance_score"}


@pytest.mark.parametrize("kind", ["base", "classification", "regression", "tagging", "span", "choice"])
def test_an_answer_is_the_same_alone_and_in_company(kind: str, models: Models) -> None:
    """Vectors bit for bit; labels, positions and order of predictions exactly, their numbers to `TOLERANCE`."""
    model = models[kind]
    inputs = TEXTS if kind == "base" else inputs_of(kind) * 2
    path, key = ("/v1/embeddings", "input") if kind == "base" else ("/predict", "inputs")

    async def ask(client: httpx2.AsyncClient, service: Service) -> tuple[list[Any], list[Any], float]:
        async def one(text: Any) -> Any:
            response = await client.post(path, json={"model": kind, key: [text]})
            assert response.status_code == 200, response.text
            return response.json()

        alone = [await one(text) for text in inputs]
        together = await asyncio.gather(*(one(text) for text in inputs))
        (largest,) = (
            float(line.rsplit(" ", 1)[1])
            for line in service.metrics.page().decode().splitlines()
            if line.startswith("bertkit_batch_requests_sum")
        )
        (batches,) = (
            float(line.rsplit(" ", 1)[1])
            for line in service.metrics.page().decode().splitlines()
            if line.startswith("bertkit_batch_requests_count")
        )
        return alone, together, largest / batches

    alone, together, requests_in_a_batch = in_process([model], ask, wait_ms=300.0)
    assert requests_in_a_batch > 1.2
    if kind == "base":
        assert alone == together
    for one, other in zip(alone, together, strict=True):
        _assert_near(one, other)


def test_what_a_directory_can_do(directories: dict[str, Path], models: Models, tmp_path: Path) -> None:
    assert models["base"].abilities == {"embed", "rerank", "fill"}
    assert models["relevance"].abilities == {"predict", "rerank"}
    assert models["regression"].abilities == {"predict"}
    assert models["tagging"].abilities == {"predict"}
    # sentence-transformers 6 also writes modules.json for cross-encoders, with only the Transformer.
    transformer = {
        "idx": 0,
        "name": "0",
        "path": "",
        "type": "sentence_transformers.base.modules.transformer.Transformer",
    }
    pooling = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
    cross = tmp_path / "cross"
    shutil.copytree(directories["regression"] / "model", cross)
    (cross / "modules.json").write_text(json.dumps([transformer]))
    assert served("cross", cross).abilities == {"predict", "rerank"}
    sentences = tmp_path / "sentences"
    shutil.copytree(directories["base"], sentences)
    (sentences / "1_Pooling").mkdir()
    (sentences / "1_Pooling" / "config.json").write_text('{"pooling_mode": "max"}')
    (sentences / "modules.json").write_text(json.dumps([transformer, pooling]))
    assert served("sentences", sentences).abilities == {"embed", "rerank"}


def test_requests_of_several_models_and_kinds_at_once(models: Models) -> None:
    async def ask(client: httpx2.AsyncClient, _: Service) -> list[httpx2.Response]:
        bodies = [
            ("/v1/embeddings", {"model": "base", "input": TEXTS}),
            ("/predict", {"model": "classification", "inputs": "a fine film"}),
            ("/predict", {"model": "tagging", "inputs": "a fine film"}),
            ("/fill", {"input": "a [MASK] cat"}),
            ("/predict", {"model": "classification", "inputs": [7]}),
        ] * 4
        return list(await asyncio.gather(*(client.post(path, json=body) for path, body in bodies)))

    found = in_process(list(models.values()), ask)
    assert [each.status_code for each in found] == [200, 200, 200, 200, 422] * 4


def test_sentences_of_two_requests_are_no_neighbours() -> None:
    items = [TaggedExample("0", ("a",), document=0), TaggedExample("0", ("b",), document=0)]
    first, second = apart(items)
    assert isinstance(first, TaggedExample)
    assert isinstance(second, TaggedExample)
    assert first.document != second.document


def test_the_model_is_found_by_name_or_by_what_it_can_do(models: Models) -> None:
    both = [models["base"], models["classification"], models["tagging"]]
    assert post(both, "/fill", {"input": "a [MASK]"}).json()["model"] == "base"
    refused = {
        "missing": {"inputs": "a"},
        "model_not_found": {"model": "nothing", "inputs": "a"},
        "model_not_able": {"model": "base", "inputs": "a"},
    }
    for code, body in refused.items():
        response = post(both, "/predict", body)
        error = response.json()["error"]
        assert (error["code"], error["param"]) == (code, "model")
        assert "classification, tagging" in error["message"]
        assert response.status_code == (404 if code == "model_not_found" else 422)


def test_pages_about_the_server(models: Models) -> None:
    async def ask(client: httpx2.AsyncClient, service: Service) -> None:
        health = await client.get("/health")
        assert (health.status_code, health.json()) == (200, {"status": "ok", "models": ["base", "span"]})
        assert (await client.head("/health")).status_code == 200
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(each["id"], each["answers"]) for each in listed] == [
            ("base", ["/v1/embeddings", "/rerank", "/fill"]),
            ("span", ["/predict"]),
        ]
        assert (await client.get("/v1/models/span")).json()["id"] == "span"
        missing = await client.get("/v1/models/a/b")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        page = (await client.get("/openapi.json")).json()
        assert {"/v1/embeddings", "/predict", "/rerank", "/fill", "/health", "/metrics"} <= set(page["paths"])
        assert (await client.get("/docs")).status_code == 200
        metrics = (await client.get("/metrics")).text
        assert 'bertkit_requests_total{path="/health",status="200"} 2.0' in metrics
        await client.get("/made/up/by/a/client")
        metrics = (await client.get("/metrics")).text
        assert 'bertkit_requests_total{path="other",status="404"} 2.0' in metrics
        assert "made" not in metrics
        service.draining = True
        stopping = await client.get("/health")
        assert (stopping.status_code, stopping.json()["status"]) == (503, "stopping")
        assert stopping.headers["connection"] == "close"

    in_process([models["base"], models["span"]], ask)


def _assert_near(one: Any, other: Any) -> None:
    """Equal documents, numbers within `TOLERANCE`."""
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            _assert_near(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for first, second in zip(one, other, strict=True):
            _assert_near(first, second)
    elif isinstance(one, float):
        assert one == pytest.approx(other, abs=TOLERANCE)
    else:
        assert one == other

"""Every hostile or invalid request gets a 4xx response in OpenAI's format, and the next request is served."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bertkit.errors import UsageError
from bertkit.inference.serving.run import names_of
from bertkit.inference.serving.served import ServedModel
from bertkit.inference.serving.service import Service
from bertkit.inference.serving.settings import ServeSettings
from bertkit.models.sentence import SentenceModel
from tests.inference.serving.clients import in_process, post, served

Models = dict[str, ServedModel]
GOOD = {"model": "base", "input": "a fine cat"}


def embed_body(**fields: Any) -> bytes:
    return json.dumps({**GOOD, **fields}).encode()


NOT_JSON = {
    "words": b"hello",
    "cut": embed_body()[:-3],
    "deep": b'{"model": "base", "input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep but short": b'{"model": "base", "input": ' + b"[" * 80 + b"]" * 80 + b"}",
    "NaN": b'{"model": "base", "input": [NaN]}',
    "Infinity": b'{"model": "base", "input": "a", "dimensions": Infinity}',
    "a number of 5000 digits": b'{"model": "base", "input": [' + b"9" * 5_000 + b"]}",
    "half a surrogate pair": b'{"model": "base", "input": "\\ud800"}',
    "half a surrogate pair in a key": b'{"model": "base", "input": "a", "\\udc00": 1}',
    "invalid UTF-8": b'{"model": "base", "input": "\xff\xfe"}',
    "UTF-16": embed_body().decode().encode("utf-16"),
}
OF_ANOTHER_SHAPE: dict[str, bytes] = {
    "nothing": b"",
    "null": b"null",
    "a list": b"[]",
    "a number": b"1e400",
    "no input": b'{"model": "base"}',
    "input null": embed_body(input=None),
    "input empty": embed_body(input=[]),
    "input of nothing": embed_body(input=[[]]),
    "input mixed": embed_body(input=["a", 1]),
    "input of floats": embed_body(input=[1.0]),
    "input of booleans": embed_body(input=[True]),
    "input an object": embed_body(input={"a": "b"}),
    "input nested": embed_body(input=[[["a"]]]),
    "ids below zero": embed_body(input=[-1]),
    "ids beyond the vocabulary": embed_body(input=[10**9]),
    "ids beyond 64 bits": embed_body(input=[2**64]),
    "ids of 4000 digits": b'{"model": "base", "input": [' + b"9" * 4_000 + b"]}",
    "dimensions 0": embed_body(dimensions=0),
    "dimensions text": embed_body(dimensions="7"),
    "dimensions huge": embed_body(dimensions=2**70),
    "dimensions 1e999": b'{"model": "base", "input": "a", "dimensions": 1e999}',
    "another format": embed_body(encoding_format="float16"),
    "model a number": embed_body(model=1),
    "a field of its own": embed_body(path="/etc/passwd"),
}


@pytest.mark.parametrize("name", NOT_JSON)
def test_what_is_no_json_is_400(name: str, models: Models) -> None:
    assert_refused(post([models["base"]], "/v1/embeddings", NOT_JSON[name]), 400)


@pytest.mark.parametrize("name", OF_ANOTHER_SHAPE)
def test_json_of_another_shape_is_422(name: str, models: Models) -> None:
    assert_refused(post([models["base"]], "/v1/embeddings", OF_ANOTHER_SHAPE[name]), 422)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("classification", {"inputs": [{"id": "x"}]}),
        ("classification", {"inputs": [{"text": 7}]}),
        ("classification", {"inputs": [["words", "of", "a", "tagger"]]}),
        ("classification", {"inputs": [None]}),
        ("classification", {"inputs": "a", "top": 0}),
        ("tagging", {"inputs": [["fine", " "]]}),
        ("tagging", {"inputs": [["fine", 1]]}),
        ("span", {"inputs": ["a text"]}),
        ("span", {"inputs": [{"question": "who ?", "context": ["a"]}]}),
        ("choice", {"inputs": [{"text": "a", "endings": "b"}]}),
        ("choice", {"inputs": [{"text": "a", "endings": []}]}),
        ("choice", {"inputs": [{"text": "a", "endings": [1, 2]}]}),
    ],
)
def test_inputs_that_cannot_be_predicted_are_422(kind: str, body: Any, models: Models) -> None:
    assert_refused(post([models[kind]], "/predict", body), 422)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"inputs": ["a", 3]}, "inputs.1: Input should be a valid string, or Input should be a valid list, or Input"),
        ({"inputs": []}, "inputs: List should have at least 1 item after validation, not 0"),
        ({"inputs": 3}, "inputs: Input should be a valid string, or Input should be a valid list"),
        ({"inputs": ["a"], "topk": 3}, "topk: unknown field; /docs lists"),
    ],
)
def test_the_item_at_fault_is_named(body: Any, message: str, models: Models) -> None:
    error = assert_refused(post([models["classification"]], "/predict", body), 422)
    assert error["message"].startswith(message)
    assert error["param"] == message.split(":")[0].split(".")[0]


def test_limits_on_bodies_texts_tokens_and_length(models: Models) -> None:
    base = [models["base"]]
    assert_refused(
        post(base, "/v1/embeddings", embed_body(input="a" * 2_000), max_body_mb=0.001), 413, "body_too_large"
    )
    assert_refused(post(base, "/v1/embeddings", embed_body(input=["a"] * 4), max_inputs=3), 422, "too_many_inputs")
    assert_refused(
        post(base, "/v1/embeddings", embed_body(input=["a"] * 4), max_request_tokens=11), 422, "too_many_tokens"
    )
    assert post(base, "/v1/embeddings", embed_body(input=["a"] * 4), max_request_tokens=12).status_code == 200
    long = embed_body(input=["a", "cat " * 100])
    error = assert_refused(post(base, "/v1/embeddings", long, long="error"), 422, "context_length_exceeded")
    assert error["message"].startswith("input.1: 102 tokens, the model reads at most 40")
    ranked = {"query": "a", "documents": ["a", "cat " * 100]}
    error = assert_refused(post(base, "/rerank", ranked, long="error"), 422, "context_length_exceeded")
    assert (error["param"], error["message"][:12]) == ("documents", "documents.1:")
    ranked = {"query": "cat " * 100, "documents": ["a"]}
    error = assert_refused(post(base, "/rerank", ranked, long="error"), 422, "context_length_exceeded")
    assert (error["param"], error["message"][:6]) == ("query", "query:")
    asked = {"inputs": [{"text": "a", "endings": ["a"] * 9}]}
    assert_refused(post([models["choice"]], "/predict", asked, max_request_tokens=17), 422, "too_many_tokens")


def test_a_body_without_a_length_is_bounded_too(models: Models) -> None:
    async def ask(client: httpx2.AsyncClient, _: Service) -> httpx2.Response:
        async def parts() -> Any:
            for _ in range(100):
                yield b" " * 1_000

        return await client.post("/v1/embeddings", content=parts(), headers={"content-type": "application/json"})

    assert_refused(in_process([models["base"]], ask, max_body_mb=0.05), 413, "body_too_large")


def test_compressed_bodies_are_refused(models: Models) -> None:
    async def ask(client: httpx2.AsyncClient, _: Service) -> httpx2.Response:
        return await client.post("/v1/embeddings", content=b"\x1f\x8b", headers={"content-encoding": "gzip"})

    assert_refused(in_process([models["base"]], ask), 415, "unsupported_encoding")


def test_the_only_model_that_can_answer_need_not_be_named(models: Models) -> None:
    assert post([models["base"]], "/v1/embeddings", b'{"input": "a"}').status_code == 200


def test_more_candidates_for_masks_than_an_answer_may_have_are_refused(models: Models) -> None:
    async def ask(client: httpx2.AsyncClient, _: Service) -> httpx2.Response:
        return await client.post("/fill", json={"model": "base", "input": "[MASK] " * 101, "top": 1000})

    assert_refused(in_process([models["base"]], ask), 422, "too_many_candidates")


_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["[MASK]", "the [MASK]", "a fine cat", "base", "classification", "tagging", "span", "choice"]),
)
_VALUES = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
_ROWS = st.lists(
    st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("text", "text_pair", "words", "question", "context", "endings", "id"), _VALUES)
    ),
    max_size=3,
)
_FIELDS = {
    "/v1/embeddings": ("model", "input", "encoding_format", "dimensions", "user"),
    "/predict": ("model", "inputs", "top"),
    "/rerank": ("model", "query", "documents", "top_n", "return_documents"),
    "/fill": ("model", "input", "top"),
}


@st.composite
def _bodies(draw: st.DrawFn) -> tuple[str, Any]:
    """An address, and a body that has most of its fields with any values."""
    path = draw(st.sampled_from(sorted(_FIELDS)))
    body: dict[str, Any] = {name: draw(_VALUES) for name in draw(st.sets(st.sampled_from(_FIELDS[path])))}
    names = st.sampled_from(["base", "classification", "regression", "tagging", "span", "choice"])
    body["model"] = draw(names | _VALUES)
    if path == "/predict" and draw(st.booleans()):
        body["inputs"] = draw(_ROWS)
    return path, draw(st.just(body) | _VALUES)


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(asked=st.lists(_bodies(), min_size=5, max_size=5))
def test_no_json_is_a_bug(asked: list[tuple[str, Any]], models: Models) -> None:
    """For any request, the response is 200 or 4xx in OpenAI's format."""

    async def ask(client: httpx2.AsyncClient, _: Service) -> list[httpx2.Response]:
        sent = [
            client.post(path, content=json.dumps(body).encode(), headers={"content-type": "application/json"})
            for path, body in asked
        ]
        return list(await asyncio.gather(*sent))

    for response in in_process(list(models.values()), ask, wait_ms=0.0):
        if response.status_code != 200:
            assert response.status_code in (400, 404, 422), (asked, response.text)
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_full_queue_is_429_with_retry_after(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    base = models["base"]

    async def ask(client: httpx2.AsyncClient, service: Service) -> list[httpx2.Response]:
        bodies = [{"model": "base", "input": ["a"] * 30}] * 8
        found = list(await asyncio.gather(*(client.post("/v1/embeddings", json=body) for body in bodies)))
        assert (await client.post("/v1/embeddings", json=GOOD)).status_code == 200
        return found

    for limits in ({"queue_tokens": 200, "max_request_tokens": 100}, {"queue_requests": 2}):
        found = in_process([base], ask, **limits)
        busy = [each for each in found if each.status_code == 429]
        assert 0 < len(busy) < 8
        assert {each.status_code for each in found} == {200, 429}
        for each in busy:
            assert assert_refused(each, 429, "server_busy")["type"] == "rate_limit_error"
            assert 1 <= int(each.headers["retry-after"]) <= 60


def test_a_fault_of_the_model_is_500_and_names_no_path(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    base = models["base"]
    monkeypatch.setattr(
        SentenceModel, "forward", lambda _, packed, *_more: torch.full((packed.num_sequences, 30), np.nan)
    )
    response = post([base], "/v1/embeddings", GOOD)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (500, "model_fault", "server_error")
    assert str(base.model.directory) not in response.text
    assert error["message"].startswith("base: its ")


def test_a_short_relative_name_does_not_make_a_request_the_models_fault(
    directories: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t").symlink_to(directories["classification"] / "model")
    monkeypatch.chdir(tmp_path)
    model = served("reviews", Path("t"))
    monkeypatch.chdir("/")  # what is read later is found there, too
    error = assert_refused(post([model], "/predict", {"inputs": [{"text": 7}]}), 422)
    assert error["message"] == "input 0, text: found a number, expected text"


def test_a_bug_is_500_without_details_and_the_next_request_is_served(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = models["base"]

    async def ask(client: httpx2.AsyncClient, service: Service) -> tuple[httpx2.Response, httpx2.Response]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Service, "_compute", lambda *_: 1 / 0)
            service.batcher._compute = service._compute
            first = await client.post("/v1/embeddings", json=GOOD)
        service.batcher._compute = service._compute
        return first, await client.post("/v1/embeddings", json=GOOD)

    first, second = in_process([base], ask)
    assert (first.status_code, first.json()["error"]["code"]) == (500, "internal_error")
    assert "Zero" not in first.text
    assert second.status_code == 200


def test_no_address_reads_a_file(models: Models, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret of the machine", encoding="utf-8")
    paths = ["/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", f"/{secret}", "/v1/models/../../etc/passwd", "/static/x"]
    paths += [f"/v1/models/{secret}", "/docs/../../etc/passwd"]

    async def ask(client: httpx2.AsyncClient, _: Service) -> list[httpx2.Response]:
        found = [await client.get(path) for path in paths]
        names = (str(secret), f"file://{secret}", f"../{secret.name}", "nobody/nothing")
        bodies = [{"model": name, "input": "a"} for name in names]
        return found + [await client.post("/v1/embeddings", json=body) for body in bodies]

    for response in in_process([models["base"]], ask):
        assert response.status_code == 404
        assert "secret of" not in response.text
        assert "root:" not in response.text


def test_names_of_models_show_no_directories(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "my-run"
    (run / "model").mkdir(parents=True)
    assert names_of([str(run), "org/name", f"x={run}"]) == {"my-run": str(run), "org/name": "org/name", "x": str(run)}
    assert list(names_of([str(run / "model")])) == ["my-run"]
    with pytest.raises(UsageError, match="served already; give it another name: NAME="):
        names_of([str(run), str(run / "model")])
    for bad in ("=x", "x="):
        with pytest.raises(UsageError, match="expected MODEL or NAME=MODEL"):
            names_of([bad])


def test_a_directory_whose_name_has_a_sign_is_no_name_and_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rte-seed=0").mkdir()
    monkeypatch.chdir(tmp_path)
    assert names_of(["rte-seed=0", "x=rte-seed=0"]) == {"rte-seed=0": "rte-seed=0", "x": "rte-seed=0"}


def test_a_request_beyond_the_queue_is_a_mistake_of_the_settings() -> None:
    with pytest.raises(ValueError, match="raise queue_tokens or lower max_request_tokens"):
        ServeSettings(queue_tokens=10, max_request_tokens=11)


def assert_refused(response: httpx2.Response, status: int, code: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert code in (None, error["code"])
    assert "Traceback" not in response.text
    assert len(response.text) < 1_000
    return error

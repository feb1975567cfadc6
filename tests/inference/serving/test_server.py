"""The command as a process: its address, the official OpenAI client, slow clients, and a shutdown that loses
nothing."""

from __future__ import annotations

import base64
import http.client
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

import bertkit
from bertkit.errors import UsageError
from bertkit.inference.serving.connections import address_of, open_socket
from tests.inference.serving.clients import SECONDS, Live, live
from tests.tasks.tiny_task import write_model

LIMITS = ("--precision", "fp32", "--client-seconds", "1.5", "--max-body-mb", "1", "--max-inputs", "20000")
BODY = json.dumps({"model": "base", "input": ["a fine cat", "of the story"]}).encode()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def server(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(tmp_path_factory.mktemp("server"), base, *LIMITS) as found:
        yield found


def test_the_official_openai_client_gets_vectors(base: Path, server: Live) -> None:
    openai = pytest.importorskip("openai")
    texts = ["a fine cat", "of the story and the actors"]
    expected = bertkit.load(str(base), device="cpu").encode(texts)
    client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
    for given in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        found = client.embeddings.create(model="base", input=texts, **given)
        vectors = [each.embedding for each in found.data]
        if given.get("encoding_format") == "base64":
            vectors = [np.frombuffer(base64.b64decode(each), dtype="<f4") for each in vectors]
        np.testing.assert_allclose(np.array(vectors, dtype=np.float32), expected, atol=1e-6)
        assert found.usage.prompt_tokens > 0
    assert [each.id for each in client.models.list()] == ["base"]
    assert client.models.retrieve("base").owned_by == "bertkit"
    with pytest.raises(openai.NotFoundError) as missing:
        client.embeddings.create(model="text-embedding-3-small", input="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.UnprocessableEntityError, match="dimensions"):
        client.embeddings.create(model="base", input="a", dimensions=4_000)


def test_a_client_that_sends_nothing_or_half_a_head_is_disconnected(server: Live) -> None:
    for begun in (b"", b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nX-Slow: "):
        started = time.monotonic()
        with server.connect() as connection:
            connection.sendall(begun)
            assert _rest(connection) == b""
        assert time.monotonic() - started < 20


def test_a_slow_body_is_408_and_slow_does_not_stop_others(server: Live) -> None:
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n"
    with server.connect() as connection:
        connection.sendall(head)
        for _ in range(3):
            connection.sendall(b" ")
            assert httpx2.get(f"{server.address}/health").status_code == 200
        answer = _rest(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"body_too_slow" in answer


def test_a_client_that_does_not_read_is_disconnected(server: Live) -> None:
    texts = 16_000  # a response of some 10 MB, more than the kernel buffers
    document = json.dumps({"model": "base", "input": ["a"] * texts, "encoding_format": "float"}).encode()
    with server.connect(receive_buffer=4_096) as connection:
        connection.sendall(_request(document))
        begun = connection.recv(100)
        time.sleep(6)
        answer = begun + _rest(connection)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"usage" not in answer[-1_000:]


def test_bad_http_and_large_bodies(server: Live) -> None:
    with server.connect() as connection:
        connection.sendall(b"\x16\x03\x01 not http at all\r\n\r\n")
        assert _rest(connection).startswith(b"HTTP/1.1 400 ")
    with server.connect() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 300_000)
        assert b"HTTP/1.1 400 " in _rest(connection)
    assert httpx2.post(f"{server.address}/v1/embeddings", content=b" " * 1_000_001).status_code == 413
    with server.connect() as connection:  # refused because of the announced length, before anything is sent
        connection.sendall(b"POST /fill HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999\r\n\r\n")
        assert connection.recv(1_000).startswith(b"HTTP/1.1 413 ")


def test_a_client_that_leaves_costs_nothing(server: Live) -> None:
    for _ in range(5):
        with server.connect() as connection:
            connection.sendall(_request(BODY))
    assert httpx2.post(f"{server.address}/v1/embeddings", content=BODY, headers=JSON).status_code == 200
    assert "Traceback" not in server.errors.read_text(encoding="utf-8")


def test_sigterm_under_load_loses_no_request(base: Path, tmp_path: Path) -> None:
    with live(tmp_path, base, "--json", "--wait-ms", "50") as server:
        clients = [Client(server) for _ in range(8)]
        for each in clients:
            each.start()
        while min(each.answered for each in clients) < 5:
            time.sleep(0.01)
        code = server.stop(signal.SIGTERM)
        for each in clients:
            each.join(SECONDS)
        output, _ = server.process.communicate(timeout=SECONDS)
    assert code == 0
    assert [each.lost for each in clients] == [[]] * 8
    assert all(each.told_to_close for each in clients)
    summary = json.loads(output)
    assert summary["answers"] == {"200": sum(each.answered for each in clients)}
    assert "stopping; what was accepted is answered first" in server.errors.read_text(encoding="utf-8")


def test_ctrl_c_ends_an_idle_server_which_then_refuses_connections(base: Path, tmp_path: Path) -> None:
    with live(tmp_path, base, "-q") as server:
        assert server.stop(signal.SIGINT) == 0
        with pytest.raises(ConnectionRefusedError):
            server.connect()
        assert server.errors.read_text(encoding="utf-8") == f"listening on {server.address}\n"


def test_an_address_that_is_taken_is_a_mistake(base: Path, bertkit: Callable[..., Any]) -> None:
    with open_socket("127.0.0.1", 0) as taken:
        taken.listen()
        port = address_of(taken).rsplit(":", 1)[1]
        outcome = bertkit("serve", base, "--port", port)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "cannot listen there" in outcome.stderr
    assert bertkit("serve", base, "--host", "no.such.host.invalid").code == 2
    assert bertkit("serve", "./nothing", "--port", "0").code == 3
    assert bertkit("serve", base, base, "--port", "0").code == 2
    assert bertkit("serve", base, "--queue-tokens", "5").code == 2
    assert bertkit("serve").code == 2


def test_an_ipv6_address_is_written_with_brackets() -> None:
    try:
        found = open_socket("::1", 0)
    except UsageError:
        pytest.skip("no IPv6 here")
    with found:
        assert address_of(found).startswith("http://[::1]:")


JSON = {"content-type": "application/json"}


class Client(threading.Thread):
    """Send requests over one connection until the server closes it or accepts no new connection."""

    def __init__(self, server: Live) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.answered = 0
        self.lost: list[str] = []
        self.told_to_close = False

    def run(self) -> None:
        connection = http.client.HTTPConnection(*self.server.place, timeout=SECONDS)
        connection.connect()
        while True:
            try:
                connection.request("POST", "/v1/embeddings", BODY, JSON)
                response = connection.getresponse()
                document = json.loads(response.read())
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.lost.append(repr(error))
                return
            if response.status != 200 or len(document["data"]) != 2:
                self.lost.append(str(document))
                return
            self.answered += 1
            if response.headers["connection"] == "close":
                self.told_to_close = True
                return


def _request(body: bytes) -> bytes:
    head = (
        f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    return head.encode() + b"\r\n" + body


def _rest(connection: socket.socket) -> bytes:
    """Everything that the server still sends before the connection ends; a reset also ends it."""
    parts = []
    try:
        while part := connection.recv(65_536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)

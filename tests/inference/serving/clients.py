"""Clients for tests: of the application in this process, and of the command in a separate process."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx2

import bertkit
from bertkit.inference.serving.app import build_app
from bertkit.inference.serving.served import ServedModel
from bertkit.inference.serving.service import Service
from bertkit.inference.serving.settings import ServeSettings

Result = TypeVar("Result")
SECONDS = 240.0
"""Time after which a test gives up on a server."""


def served(name: str, directory: Path) -> ServedModel:
    """A model on the CPU."""
    return ServedModel.load(name, bertkit.load(str(directory), device="cpu"))


def in_process(
    models: Sequence[ServedModel],
    test: Callable[[httpx2.AsyncClient, Service], Awaitable[Result]],
    **settings: Any,
) -> Result:
    """Run `test` with a client of the application, without sockets."""

    async def run() -> Result:
        app, service = build_app(models, ServeSettings(**settings))
        transport = httpx2.ASGITransport(app=app, raise_app_exceptions=True)  # type: ignore[arg-type]
        async with service.running(), httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            return await asyncio.wait_for(test(client, service), SECONDS)

    return asyncio.run(run())


def post(models: Sequence[ServedModel], path: str, body: Any, **settings: Any) -> httpx2.Response:
    """One request; `body` is JSON, or bytes sent unchanged."""

    async def ask(client: httpx2.AsyncClient, _: Service) -> httpx2.Response:
        if isinstance(body, bytes):
            return await client.post(path, content=body, headers={"content-type": "application/json"})
        return await client.post(path, json=body)

    return in_process(models, ask, **settings)


@dataclass
class Live:
    """A server in a separate process."""

    process: subprocess.Popen[str]
    address: str
    errors: Path

    @property
    def place(self) -> tuple[str, int]:
        host, port = self.address.removeprefix("http://").rsplit(":", 1)
        return host, int(port)

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        """A plain connection."""
        connection = socket.socket()
        connection.settimeout(SECONDS)
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect(self.place)
        return connection

    def stop(self, number: int) -> int:
        """Its exit code."""
        self.process.send_signal(number)
        return self.process.wait(SECONDS)


@contextmanager
def live(tmp_path: Path, *arguments: str | Path) -> Iterator[Live]:
    """`bertkit serve` on a free port of the loopback device; killed at the end."""
    errors = tmp_path / "server.txt"
    command = [sys.executable, "-m", "bertkit", "serve", *map(str, arguments), "--port", "0"]
    with errors.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            stderr=file,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs ignore it
        )
    try:
        end = time.monotonic() + SECONDS
        while (found := re.search(r"^listening on (http://\S+)$", errors.read_text(encoding="utf-8"), re.M)) is None:
            assert process.poll() is None, errors.read_text(encoding="utf-8")
            assert time.monotonic() < end, "the server did not start to listen"
            time.sleep(0.05)
        yield Live(process, found[1], errors)
    finally:
        process.kill()
        process.communicate()

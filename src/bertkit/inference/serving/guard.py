"""Runs before every route: limits on bodies, slow and disconnected clients, and a count of every answer.

ASGI (asgi.readthedocs.io, HTTP connection scope). A body is read here, in full and within its limits, before any other
code handles the request. Sibling connections.py limits what happens before the request's headers are complete and after
its answer is written.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from bertkit.inference.serving.errors import RequestError, internal_error
from bertkit.inference.serving.metrics import ServerMetrics

log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_CLOSE = (b"connection", b"close")


class ClientGoneError(Exception):
    """The client has closed its connection."""


class Guard:
    """An application that wraps the application.

    Args:
        app: answers the requests.
        metrics: counts the answers.
        max_body_bytes: maximum size of a body.
        body_seconds: time within which a body must arrive.
        is_draining: whether connections are to be closed with their next answer.
        address_of: the route of a path; clients choose paths, and the metrics must not have a line for each.
    """

    def __init__(
        self,
        app: Application,
        metrics: ServerMetrics,
        *,
        max_body_bytes: int,
        body_seconds: float,
        is_draining: Callable[[], bool],
        address_of: Callable[[str], str],
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._body_seconds = body_seconds
        self._is_draining = is_draining
        self._address_of = address_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, answer = time.perf_counter(), _Answer(send, self._is_draining)
        with self._metrics.in_work.track_inprogress():
            try:
                body = await self._body(scope, receive)
                await self._until_answered(scope, body, receive, answer)
            except RequestError as error:
                await error.response()(scope, receive, answer.send)
            except ClientGoneError:
                self._metrics.gone.inc()
                return
            except Exception as bug:  # the application has already answered, if it could
                log.error("a bug in bertkit: %s: %s (-v shows where)", type(bug).__name__, bug)
                log.debug("the bug's trace:", exc_info=bug)
                if answer.status is None:
                    await internal_error().response()(scope, receive, answer.send)
        address, seconds = self._address_of(scope["path"]), time.perf_counter() - started
        self._metrics.observe_request(address, answer.status or 500, seconds)
        log.debug("%s %s: %s in %.0f ms", scope["method"], address, answer.status, seconds * 1000)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """The complete body.

        Raises:
            RequestError: the body is too large (413), too slow (408) or compressed (415).
            ClientGoneError: the body never ended.
        """
        headers = dict(scope["headers"])
        limit = self._max_body_bytes
        too_large = RequestError(
            413, f"the body has more than {limit:,} bytes; send less at once", code="body_too_large"
        )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > limit:
            raise too_large
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise RequestError(415, "compressed bodies are not read; send it uncompressed", code="unsupported_encoding")
        parts, size, more = list[bytes](), 0, True
        try:
            async with asyncio.timeout(self._body_seconds):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    size += len(message.get("body", b""))
                    if size > limit:
                        raise too_large
                    parts.append(message.get("body", b""))
                    more = message.get("more_body", False)
        except TimeoutError as error:
            raise RequestError(
                408, f"the body did not arrive within {self._body_seconds:g} s", code="body_too_slow"
            ) from error
        return b"".join(parts)

    async def _until_answered(self, scope: Scope, body: bytes, receive: Receive, answer: _Answer) -> None:
        """Let the application answer; if the client disconnects first, its work is cancelled.

        Raises:
            ClientGoneError: the client disconnected.
        """
        rest: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        answered = asyncio.Event()

        async def receive_whole() -> Message:
            if rest:
                return rest.pop()
            await answered.wait()
            return {"type": "http.disconnect"}

        async def leave() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        work = asyncio.ensure_future(self._app(scope, receive_whole, answer.send))
        watch = asyncio.create_task(leave())
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not answer.is_complete:  # uvicorn reports the end of an answer as a disconnect, too
                work.cancel()
                with suppress(asyncio.CancelledError):
                    await work
                raise ClientGoneError
            await work
        finally:
            answered.set()
            for task in (work, watch):
                task.cancel()


class _Answer:
    """Passes an answer on, and records its status and whether its end was written.

    A connection is closed with its answer if the server is about to stop, or if the request's body may still be
    arriving.
    """

    def __init__(self, send: Send, is_draining: Callable[[], bool]) -> None:
        self._send = send
        self._is_draining = is_draining
        self.status: int | None = None
        self.is_complete = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self._is_draining() or self.status == 408:
                message = {**message, "headers": [*message.get("headers", []), _CLOSE]}
        elif not message.get("more_body", False):
            self.is_complete = True
        await self._send(message)

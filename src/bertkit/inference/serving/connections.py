"""The server's sockets: uvicorn, extended to disconnect slow clients and to lose no request at shutdown.

uvicorn closes an idle connection (5 s), but it waits indefinitely for the headers of a first request and for a client
that does not read its answer. At shutdown it closes connections on which a request may be arriving. Sibling guard.py
limits everything between headers and answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from bertkit.errors import UsageError
from bertkit.inference.serving.guard import Application

log = logging.getLogger(__name__)

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LINGER_SECONDS = 1.0
"""How long a stopping server still reads from open connections, so that a request already on its way is answered; each
answer closes its connection."""
_TICK_SECONDS = 0.02
_MOST_CONNECTIONS = 4_096
"""Beyond this number uvicorn answers 503."""
_BACKLOG = 2_048


class BoundedProtocol(H11Protocol):
    """A connection whose client must send its headers, and read its answer, within a time limit."""

    client_seconds: float = 10.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        self._headers_timer: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timers()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._await_headers()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self.client_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self._cancel_timers(headers=False)
        super().resume_writing()

    def _await_headers(self) -> None:
        """Close the connection unless a request begins in time."""
        if self._headers_timer is not None:
            self._headers_timer.cancel()
        self._headers_timer = self.loop.call_later(self.client_seconds, self._close_without_request)

    def _close_without_request(self) -> None:
        if (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing():
            self.transport.abort()

    def _cancel_timers(self, *, headers: bool = True) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        if headers and self._headers_timer is not None:
            self._headers_timer.cancel()


class GracefulServer(uvicorn.Server):
    """uvicorn's server with a different start and shutdown.

    Args:
        config: uvicorn's.
        on_listening: called once connections are accepted.
        on_stopping: called once the server begins to stop.
    """

    def __init__(
        self, config: uvicorn.Config, *, on_listening: Callable[[], None], on_stopping: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._on_listening = on_listening
        self._on_stopping = on_stopping

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, briefly answer requests arriving on open ones, then finish those in progress."""
        self._on_stopping()
        for server in self.servers:
            server.close()
        loop = asyncio.get_running_loop()
        end = loop.time() + LINGER_SECONDS
        while self.server_state.connections and loop.time() < end and not self.force_exit:
            await asyncio.sleep(_TICK_SECONDS)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at the first signal; a second SIGINT does not wait for answers. The process then exits by itself,
        whereas uvicorn's own method would raise the signal again."""
        before = {
            number: signal.signal(number, self.handle_exit)
            for number in STOPPING
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True


def open_socket(host: str, port: int) -> socket.socket:
    """A socket bound to an address; clients cannot connect before the server listens.

    Raises:
        UsageError: the address does not exist on this machine, or is in use.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind(address)
        except OSError:
            found.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise _unusable(f"--host {host:.100} --port {port}", reason) from error
    found.setblocking(False)
    return found


def _unusable(where: str, reason: object) -> UsageError:
    return UsageError(f"{where}: cannot listen there ({reason}); choose another address, or --port 0 for a free port")


def address_of(listener: socket.socket) -> str:
    """`http://HOST:PORT` of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_server(
    app: Application,
    listener: socket.socket,
    *,
    client_seconds: float,
    stop_seconds: int,
    on_listening: Callable[[], None],
    on_stopping: Callable[[], None],
) -> None:
    """Serve until a signal arrives and everything that was accepted is answered.

    Args:
        app: answers the requests.
        listener: bound, see `open_socket`; closed at the end.
        client_seconds: time limit for sending headers and for continuing to read an answer.
        stop_seconds: after this time a stopping server no longer waits for answers.
        on_listening, on_stopping: called at the start and at the end.

    Raises:
        UsageError: another server is listening there.
    """
    protocol = type("BoundedConnection", (BoundedProtocol,), {"client_seconds": client_seconds})
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=_MOST_CONNECTIONS,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=stop_seconds,
    )
    with _messages_shown(), contextlib.closing(listener):
        address = address_of(listener)
        try:
            GracefulServer(config, on_listening=on_listening, on_stopping=on_stopping).run(sockets=[listener])
        except OSError as error:
            if error.errno != errno.EADDRINUSE:  # another server began to listen while the models were read
                raise
            raise _unusable(address, error.strerror) from error


@contextlib.contextmanager
def _messages_shown() -> Iterator[None]:
    """Show the libraries' warnings among the program's own; clients' mistakes are details."""
    handler = _Forward()
    loggers = [logging.getLogger(name) for name in ("uvicorn", "asyncio")]
    for each in loggers:
        each.addHandler(handler)
        each.propagate = False
        each.setLevel(logging.INFO)
    try:
        yield
    finally:
        for each in loggers:
            each.removeHandler(handler)
            each.propagate = True


class _Forward(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        log.log(logging.WARNING if record.levelno >= logging.ERROR else logging.DEBUG, "%s", record.getMessage())
        if record.exc_info:
            log.debug("its trace:", exc_info=record.exc_info)

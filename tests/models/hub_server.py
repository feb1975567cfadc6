"""A small server that speaks as much of the Hub's protocol as fetching a model needs.

Protocol of huggingface.co as `huggingface_hub` asks it: `/api/models/ID/revision/REV` names the commit, `/tree/` lists
the files, and `/ID/resolve/REV/FILE` gives one, with its etag and commit in headers, and byte ranges.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What the server gives and what it was asked.

    Attributes:
        files: contents by model id and path.
        revisions: branches and tags that exist; all of them are one commit.
        gated, private: ids that are refused.
        cut_after: bytes after which the connection of a file breaks off; each cut happens once.
        log: method, path and range of each request.
        url: where it listens.
    """

    files: dict[str, dict[str, bytes]]
    revisions: tuple[str, ...] = ("main",)
    gated: tuple[str, ...] = ()
    private: tuple[str, ...] = ()
    cut_after: dict[str, int] = field(default_factory=dict)
    log: list[tuple[str, str, str | None]] = field(default_factory=list)
    url: str = ""

    def downloads(self, path: str) -> list[str | None]:
        """The ranges asked for in downloads of one file."""
        return [asked for method, wanted, asked in self.log if method == "GET" and wanted.endswith("/" + path)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def log_message(self, *_arguments: object) -> None:
        """Quiet: the tests look at `Hub.log`."""

    def answer(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.log.append((self.command, path, self.headers.get("Range")))
        match = re.fullmatch(r"/api/models/(.+?)(?:/(revision|tree)/([^/]+))?", path)
        if match:
            self.describe(match[1], match[3] or "main", as_tree=match[2] == "tree")
            return
        match = re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path)
        if match and not self.refused(match[1], match[2]):
            self.give(match[1], match[3])
        elif not match:
            self.send({}, b"", status=404)

    def refused(self, model: str, revision: str) -> bool:
        if model in self.hub.gated:
            self.fault(403, "GatedRepo", f"Access to model {model} is restricted")
        elif model in self.hub.private or model not in self.hub.files:
            # The real Hub does not tell a private model from one that does not exist.
            self.fault(401, "RepoNotFound", "Repository not found")
        elif revision not in (*self.hub.revisions, COMMIT):
            self.fault(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return False
        return True

    def fault(self, status: int, code: str, message: str) -> None:
        self.send({"X-Error-Code": code, "X-Error-Message": message}, b"{}", status=status)

    def describe(self, model: str, revision: str, *, as_tree: bool) -> None:
        if self.refused(model, revision):
            return
        files = self.hub.files[model]
        contents: object = {
            "id": model,
            "modelId": model,
            "sha": COMMIT,
            "siblings": [{"rfilename": name} for name in sorted(files)],
            "private": False,
            "tags": [],
        }
        if as_tree:
            contents = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in sorted(files.items())
            ]
        self.send({"Content-Type": "application/json"}, json.dumps(contents).encode())

    def give(self, model: str, name: str) -> None:
        contents = self.hub.files[model].get(name)
        if contents is None:
            self.fault(404, "EntryNotFound", "Entry not found")
            return
        headers = {
            "ETag": f'"{hashlib.sha256(contents).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if not asked:
            self.send(headers, contents, cut=self.hub.cut_after.pop(name, None) if self.command == "GET" else None)
            return
        start, last = int(asked[1]), int(asked[2] or len(contents) - 1)
        headers["Content-Range"] = f"bytes {start}-{last}/{len(contents)}"
        self.send(headers, contents[start : last + 1], status=206)

    def send(self, headers: dict[str, str], body: bytes, *, status: int = 200, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Listen on a free port of the loopback device."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

"""A small server that speaks as much of the Hub's protocol as fetching models and data sets needs.

Protocol of huggingface.co as `huggingface_hub` asks it: `/api/models/ID/revision/REV` names the commit, `/tree/` lists
the files, `/paths-info/` those asked for, and `/ID/resolve/REV/FILE` gives one, with its etag and commit in headers,
and byte ranges. Of data sets it is `/api/datasets/ID` and `/datasets/ID/resolve/`.
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
from pathlib import PurePosixPath
from urllib.parse import parse_qs, unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What the server gives and what it was asked.

    Attributes:
        files: contents by id and path; a data set's id begins with `datasets/`. Behind an id may stand `@` and a branch
            that has files of its own.
        revisions: other branches and tags that exist; all of them are one commit.
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

    def do_POST(self) -> None:
        self.answer()

    def log_message(self, *_arguments: object) -> None:
        """Quiet: the tests look at `Hub.log`."""

    def answer(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.log.append((self.command, path, self.headers.get("Range")))
        asked = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        match = re.fullmatch(r"/api/(?:models/|(?=datasets/))(.+?)(?:/(revision|tree|paths-info)/([^/]+)(/.+)?)?", path)
        if match:
            found = self.find(match[1], unquote(match[3] or "main"))
            if found is not None:
                self.describe(match[1], *found, match[2] or "revision", unquote(match[4] or "/")[1:], asked)
            return
        match = re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path)
        if not match:
            self.send({}, b"", status=404)
            return
        found = self.find(match[1], unquote(match[2]))
        if found is not None:
            self.give(*found, unquote(match[3]))

    def find(self, repository: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The commit and the files of a revision; None where the answer was a refusal."""
        for name, files in self.hub.files.items():
            own, _, branch = name.partition("@")
            commit = commit_of(files)
            if branch and own == repository and revision in (branch, commit):
                return commit, files
        if repository in self.hub.gated:
            self.fault(403, "GatedRepo", f"Access to {repository} is restricted")
        elif repository in self.hub.private or repository not in self.hub.files:
            # The real Hub does not tell a private repository from one that does not exist.
            self.fault(401, "RepoNotFound", "Repository not found")
        elif revision not in (*self.hub.revisions, COMMIT):
            self.fault(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return COMMIT, self.hub.files[repository]
        return None

    def fault(self, status: int, code: str, message: str) -> None:
        self.send({"X-Error-Code": code, "X-Error-Message": message}, b"{}", status=status)

    def describe(
        self, repository: str, commit: str, files: dict[str, bytes], what: str, folder: str, asked: bytes
    ) -> None:
        """A repository (`revision`), what lies in a folder (`tree`), or what the body asks for (`paths-info`)."""
        if what == "revision":
            name = repository.removeprefix("datasets/")
            siblings = [{"rfilename": path} for path in sorted(files)]
            contents: object = {
                "id": name, "modelId": name, "sha": commit, "siblings": siblings, "private": False, "tags": []
            }  # fmt: skip
        else:
            folders = {str(parent) for path in files for parent in PurePosixPath(path).parents} - {"."}
            if what == "paths-info":
                paths = set(parse_qs(asked.decode())["paths"]) & (files.keys() | folders)
            else:
                everything = "recursive=true" in self.path.lower()
                inside = {path for path in files.keys() | folders if path.startswith(f"{folder}/" if folder else "")}
                paths = {path for path in inside if everything or _folder_of(path) == folder}
                if not paths:
                    self.fault(404, "EntryNotFound", "Entry not found")
                    return
            contents = [_entry(path, files.get(path)) for path in sorted(paths)]
        self.send({"Content-Type": "application/json"}, json.dumps(contents).encode())

    def give(self, commit: str, files: dict[str, bytes], name: str) -> None:
        contents = files.get(name)
        if contents is None:
            self.fault(404, "EntryNotFound", "Entry not found")
            return
        etag = f'"{hashlib.sha256(contents).hexdigest()}"'
        headers = {"ETag": etag, "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
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


def commit_of(files: dict[str, bytes]) -> str:
    """Of a branch that has files of its own."""
    hashes = {name: hashlib.sha1(contents).hexdigest() for name, contents in files.items()}
    return hashlib.sha1(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


def _folder_of(path: str) -> str:
    return path.rpartition("/")[0]


def _entry(path: str, contents: bytes | None) -> dict[str, object]:
    """How the Hub lists a file, or a folder, which has no contents."""
    if contents is None:
        return {"type": "directory", "path": path, "oid": hashlib.sha1(path.encode()).hexdigest(), "size": 0}
    return {"type": "file", "path": path, "oid": hashlib.sha1(contents).hexdigest(), "size": len(contents)}


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

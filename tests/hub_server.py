"""A small server with the parts of the Hub's protocol needed to fetch models and data sets.

Protocol of huggingface.co as used by `huggingface_hub`: `/api/models/ID/revision/REV` names the commit, `/tree/` lists
the files, `/paths-info/` the requested ones, and `/ID/resolve/REV/FILE` returns one, with its etag and commit in
headers, and byte ranges. For data sets it is `/api/datasets/ID` and `/datasets/ID/resolve/`. Uploads use Large File
Storage: `/api/repos/create`, `/preupload/`, `/info/lfs/objects/batch`, a PUT of each object, and `/commit/`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from urllib.parse import parse_qs, unquote

STOPPED = 75
"""Exit code of a command that was stopped early."""
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """The server's contents and its log of requests.

    Attributes:
        files: contents by id and path; a data set's id begins with `datasets/`. An id may be followed by `@` and a
            branch with its own files.
        revisions: other existing branches and tags, all of the same commit.
        gated, private: ids that are refused.
        cut_after: bytes after which a file's connection is cut; each cut happens once.
        writers: tokens with write access; others are unknown.
        objects: uploaded large files by sha256.
        log: method, path and range of each request.
        url: the server's address.
    """

    files: dict[str, dict[str, bytes]]
    revisions: tuple[str, ...] = ("main",)
    gated: tuple[str, ...] = ()
    private: tuple[str, ...] = ()
    cut_after: dict[str, int] = field(default_factory=dict)
    writers: tuple[str, ...] = ()
    objects: dict[str, bytes] = field(default_factory=dict)
    log: list[tuple[str, str, str | None]] = field(default_factory=list)
    url: str = ""

    def downloads(self, path: str) -> list[str | None]:
        """The ranges requested in downloads of one file."""
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

    def do_PUT(self) -> None:
        self.answer()

    def log_message(self, *_arguments: object) -> None:
        """No output: the tests read `Hub.log`."""

    def answer(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.log.append((self.command, path, self.headers.get("Range")))
        asked = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.take(path, asked):
            return
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

    def take(self, path: str, asked: bytes) -> bool:
        """Answer a request of an upload; returns whether it is one."""
        if (stored := re.fullmatch(r"/objects/([0-9a-f]{64})", path)) and self.command == "PUT":
            assert hashlib.sha256(asked).hexdigest() == stored[1]
            self.hub.objects[stored[1]] = asked
            self.send({}, b"")
            return True
        if path == "/api/validate-yaml":
            errors = [{"message": '"license" must be one of [...]'}] if b"license: none-such" in asked else []
            self.tell({"errors": errors, "warnings": []}, status=400 if errors else 200)
            return True
        match = re.fullmatch(
            r"/api/repos/create|/(?:api/models/)?(.+?)(/preupload|/commit|/branch|\.git/info/lfs)/.+", path
        )
        if match is None or self.command != "POST":
            return False
        if (self.headers.get("Authorization") or "").removeprefix("Bearer ") not in self.hub.writers:
            self.fault(401, "", "Invalid username or password.")
            return True
        if match[1] is None:
            made = json.loads(asked)
            name = f"{made['organization']}/{made['name']}" if made.get("organization") else made["name"]
            exists = name in self.hub.files
            self.hub.files.setdefault(name, {})
            self.tell({"url": f"{self.hub.url}/{name}", "name": name}, status=409 if exists else 200)
        else:
            self.store(match[1], match[2], path.rpartition("/")[2], asked)
        return True

    def store(self, repository: str, what: str, branch: str, asked: bytes) -> None:
        """A step of an upload to a repository that exists."""
        if what == "/branch":
            self.hub.files.setdefault(f"{repository}@{branch}", dict(self.hub.files[repository]))
            self.tell({})
        elif what == "/preupload":
            large = {True: "lfs", False: "regular"}
            files = [
                {
                    "path": each["path"],
                    "uploadMode": large[each["path"].endswith(".safetensors")],
                    "shouldIgnore": False,
                }
                for each in json.loads(asked)["files"]
            ]
            self.tell({"files": files})
        elif what == "/commit":
            name = repository if branch == "main" else f"{repository}@{branch}"
            for line in asked.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    self.hub.files[name][value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    self.hub.files[name][value["path"]] = self.hub.objects[value["oid"]]
            url = f"{self.hub.url}/{repository}/commit/{COMMIT}"
            self.tell({"commitUrl": url, "commitOid": COMMIT, "pullRequestUrl": None, "success": True})
        else:
            upload = [
                {**each, "actions": {"upload": {"href": f"{self.hub.url}/objects/{each['oid']}", "header": {}}}}
                for each in json.loads(asked)["objects"]
            ]
            self.tell({"transfer": "basic", "objects": upload}, kind="application/vnd.git-lfs+json")

    def tell(self, contents: object, *, status: int = 200, kind: str = "application/json") -> None:
        self.send({"Content-Type": kind}, json.dumps(contents).encode(), status=status)

    def find(self, repository: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The commit and the files of a revision; None if the request was refused."""
        for name, files in self.hub.files.items():
            own, _, branch = name.partition("@")
            commit = commit_of(files)
            if branch and own == repository and revision in (branch, commit):
                return commit, files
        if repository in self.hub.gated:
            self.fault(403, "GatedRepo", f"Access to {repository} is restricted")
        elif repository in self.hub.private or repository not in self.hub.files:
            # The real Hub does not distinguish a private repository from a missing one.
            self.fault(401, "RepoNotFound", "Repository not found")
        elif revision not in (*self.hub.revisions, COMMIT):
            self.fault(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return COMMIT, self.hub.files[repository]
        return None

    def fault(self, status: int, code: str, message: str, commit: str | None = None) -> None:
        """An error; that of a missing file names the commit, which the client notes in its cache."""
        named = {} if commit is None else {"X-Repo-Commit": commit}
        self.send({"X-Error-Code": code, "X-Error-Message": message, **named}, b"{}", status=status)

    def describe(
        self, repository: str, commit: str, files: dict[str, bytes], what: str, folder: str, asked: bytes
    ) -> None:
        """A repository (`revision`), a folder's entries (`tree`), or the paths in the body (`paths-info`)."""
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
            self.fault(404, "EntryNotFound", "Entry not found", commit)
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
    """The id of a branch with its own files."""
    hashes = {name: hashlib.sha1(contents).hexdigest() for name, contents in files.items()}
    return hashlib.sha1(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


def _folder_of(path: str) -> str:
    return path.rpartition("/")[0]


def _entry(path: str, contents: bytes | None) -> dict[str, object]:
    """The Hub's listing of a file, or of a folder, which has no contents."""
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


def bertkit(home: Path, url: str, *words: object) -> int:
    """Run a command against a server, in a separate process, because the clients read their environment once; its
    caches are below `home`. Returns the exit code, 0 or `STOPPED`."""
    environment = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
    environment |= {"HF_ENDPOINT": url, "HF_HOME": str(home / "hf"), "BERTKIT_CACHE": str(home / "cache")}
    environment |= {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "bertkit", *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode in (0, STOPPED), done.stderr
    return done.returncode

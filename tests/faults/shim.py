"""Injects disk and machine faults into a child process, at one moment of its writing or from then on.

The package itself is unchanged: inside the child, the standard library's writing functions and safetensors' one are
replaced. Only paths below one directory are affected, and a "full disk" is a raised error, so the machine's own disk is
never filled.

A moment is (operation, kind of file, number among these), so it is the same in each run for any order of threads.
TensorBoard writes in a separate thread and does not affect results: its moments are not counted, but a lasting fault
also applies to its files.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Key = tuple[str, str]
Fault = Literal["count", "kill", "ENOSPC", "EIO", "EROFS"]

_TAKES_SPACE = {"open", "write", "create", "mkdir", "safetensors", "truncate", "sendfile", "link"}
_FAILS_TOO = {"replace", "rename", "unlink", "rmdir", "fsync"}
"""These fail on a read-only or failing disk and work on a full one."""


def kind_of(path: str) -> str:
    """A file's name without the numbers of steps, processes or hashes."""
    name = re.sub(r"[0-9a-f]{16,}", "H", path)
    name = re.sub(r"\.\d+\.(tmp|new|writing)", r".\1", name)
    name = re.sub(r"-[0-9a-f]{8}(?=/|$)", "-h", name)
    return re.sub(r"\d+", "N", name)


@dataclass
class Shim:
    """The fault injected into a child process.

    Attributes:
        root: the directory whose files are counted.
        fault: what happens; `count` only counts.
        at: the kind of moment, and its number among those of this kind; except for `kill`, the fault lasts from then
            on.
        told: called with the step of each checkpoint once `latest` names it.
        counts: number of moments by kind.
    """

    root: Path
    fault: Fault = "count"
    at: tuple[Key, int] | None = None
    told: Callable[[str], None] = lambda _: None
    counts: Counter[Key] = field(default_factory=Counter)
    lasting: bool = False

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._prefix = os.path.realpath(self.root) + os.sep

    def name_of(self, path: Any, directory: int | None = None) -> str | None:
        """A path relative to the root; None for others."""
        if isinstance(path, int):
            try:
                path = os.readlink(f"/proc/self/fd/{path}").removesuffix(" (deleted)")
            except OSError:
                return None
        if directory is not None and not os.path.isabs(path):
            path = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), os.fsdecode(path))
        whole = os.path.join(os.path.realpath(os.path.dirname(os.path.abspath(os.fsdecode(path)))), "")
        whole += os.path.basename(os.fsdecode(path))
        if not whole.startswith(self._prefix):
            return None
        return whole.removeprefix(self._prefix)

    def moment(self, operation: str, path: Any, partly: Callable[[], object] | None = None, **where: Any) -> None:
        """Called before each write; raises an error or ends the process if the fault occurs now."""
        name = self.name_of(path, **where)
        if name is None:
            return
        with self._lock:
            key = (operation, kind_of(name))
            counted = "/tensorboard" not in name
            if counted:
                self.counts[key] += 1
            now = counted and self.at is not None and self.at == (key, self.counts[key])
            if self.fault == "kill" and now:
                if partly is not None:
                    partly()
                os.kill(os.getpid(), signal.SIGKILL)
            self.lasting = self.lasting or (now and self.fault not in ("count", "kill"))
            harmed = _TAKES_SPACE if self.fault == "ENOSPC" else _TAKES_SPACE | _FAILS_TOO
            if self.lasting and operation in harmed:
                number = getattr(errno, self.fault)
                raise OSError(number, os.strerror(number), os.fspath(path) if not isinstance(path, int) else name)

    def arm(self) -> None:
        """Replace the functions permanently; the child ends soon."""
        self._wrap("replace", "rename", "unlink", "remove", "rmdir", "mkdir", "truncate", "ftruncate", "fsync")
        real_write, real_pwrite, real_open, real_link = os.write, os.pwrite, os.open, os.link

        def write(descriptor: int, content: Any) -> int:
            half = bytes(content)[: len(content) // 2]
            self.moment("write", descriptor, partly=lambda: real_write(descriptor, half))
            return real_write(descriptor, content)

        def pwrite(descriptor: int, content: Any, offset: int) -> int:
            half = bytes(content)[: len(content) // 2]
            self.moment("write", descriptor, partly=lambda: real_pwrite(descriptor, half, offset))
            return real_pwrite(descriptor, content, offset)

        def open_descriptor(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if flags & os.O_CREAT and not isinstance(path, int):
                self.moment("create", path, directory=dir_fd)
            return real_open(path, flags, mode, dir_fd=dir_fd)

        def link(source: Any, target: Any, **more: Any) -> None:
            self.moment("link", target)
            real_link(source, target, **more)

        os.write, os.pwrite, os.open, os.link = write, pwrite, open_descriptor, link  # type: ignore[assignment]
        self._wrap_open()
        self._wrap_named_files()
        self._wrap_safetensors()
        import numpy.lib._format_impl as numpy_format

        numpy_format.isfileobj = lambda _: False  # np.save then writes through the file object

    def _wrap(self, *names: str) -> None:
        for name in names:
            setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        operation = {"remove": "unlink", "ftruncate": "truncate"}.get(name, name)

        def wrapped(path: Any, *rest: Any, **more: Any) -> Any:
            target = rest[0] if name in ("replace", "rename") else path
            self.moment(operation, target, directory=more.get("dir_fd"))
            done = real(path, *rest, **more)
            if operation == "replace" and os.path.basename(os.fspath(target)) == "latest":
                self.told(Path(os.fspath(target)).read_text().strip())
            return done

        return wrapped

    def _wrap_open(self) -> None:
        shim, real = self, io.open

        class Raw(io.FileIO):
            def write(self, content: Any) -> int:
                half = bytes(content)[: len(content) // 2]
                shim.moment("write", self.fileno(), partly=lambda: super(Raw, self).write(half))
                return super().write(content)

        def faulty_open(
            file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None,
            newline: Any = None, closefd: bool = True, opener: Any = None,
        ) -> Any:  # fmt: skip
            if not set(mode) & set("wax+") or isinstance(file, int) or shim.name_of(file) is None:
                return real(file, mode, buffering, encoding, errors, newline, closefd, opener)
            shim.moment("open", file)
            raw = Raw(file, mode.replace("b", "").replace("t", ""), closefd, opener)
            if buffering == 0:
                return raw
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            if "b" in mode:
                return buffered
            text = io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)
            text.mode = mode
            return text

        builtins.open = io.open = faulty_open  # type: ignore[assignment]

    def _wrap_named_files(self) -> None:
        """`bertkit.files.open_to_write` opens its files itself."""
        from bertkit import files

        shim = self

        class Named(files._NamedFile):
            def __init__(self, path: str, mode: str, **more: Any) -> None:
                shim.moment("open", path)
                super().__init__(path, mode, **more)

            def write(self, content: Any) -> int:
                half = bytes(content)[: len(content) // 2]
                shim.moment("write", self.name, partly=lambda: io.FileIO.write(self, half))
                return super().write(content)

        files._NamedFile = Named  # type: ignore[misc]

    def _wrap_safetensors(self) -> None:
        import safetensors.torch
        from safetensors import SafetensorError

        real = safetensors.torch.serialize_file

        def serialize_file(tensors: Any, path: Any, metadata: Any = None) -> None:
            def half() -> None:
                real(tensors, path, metadata)
                os.truncate(path, os.stat(path).st_size // 2)

            try:
                self.moment("safetensors", path, partly=half)
            except OSError as error:
                raise SafetensorError(
                    f"Error while serializing: I/O error: {error.strerror} (os error {error.errno})"
                ) from error
            real(tensors, path, metadata)

        safetensors.torch.serialize_file = serialize_file

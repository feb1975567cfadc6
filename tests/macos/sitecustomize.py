"""Python starts as if on a Mac with Apple's processor, as far as bertkit and its tests can see.

    PYTHONPATH=tests/macos PATH=$PWD/tests/macos:$PATH .venv/bin/pytest tests/run tests/jobs

Child processes inherit it. Missing for everyone: what only Linux has in the standard library, psutil and torch's build.
Only bertkit and its tests are told of another system and find neither /proc nor /sys, since other packages are those of
this machine. Processes are spawned.
"""

from __future__ import annotations

import builtins
import copyreg
import errno
import importlib
import importlib.abc
import importlib.machinery
import io
import multiprocessing
import os
import platform
import resource
import signal
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

_OWN = tuple(f"{Path(__file__).parents[2] / name}/" for name in ("src", "tests"))
_BETWEEN = ("pathlib.py", "contextlib.py", "shutil.py", "glob.py", "<frozen os>")
_LINUX_ONLY: dict[types.ModuleType, str] = {
    os: "sched_getaffinity sched_setaffinity memfd_create posix_fadvise posix_fallocate copy_file_range splice pipe2"
    " fdatasync pidfd_open eventfd getrandom getxattr setxattr O_DIRECT O_PATH O_TMPFILE O_NOATIME",
    signal: "sigtimedwait sigwaitinfo SIGPWR SIGRTMIN SIGRTMAX pidfd_send_signal",
    resource: "prlimit RUSAGE_THREAD",
    errno: "EREMOTEIO EUCLEAN ENOMEDIUM",
}


def _asked_by_bertkit() -> bool:
    """Whether the caller of the function that calls this is code of the checkout."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.endswith(_BETWEEN):
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(_OWN)


def _elsewhere(real: Callable[..., Any], answer: Any) -> Callable[..., Any]:
    return lambda *arguments: answer if _asked_by_bertkit() else real(*arguments)


class _System(types.ModuleType):
    """The module `sys`, whose `platform` depends on who asks; tests may set it."""

    _set: str | None = None

    @property
    def platform(self) -> str:
        return self._set or ("darwin" if _asked_by_bertkit() else "linux")

    @platform.setter
    def platform(self, value: str) -> None:
        self._set = None if value == "darwin" else value


class _Usage:
    """`getrusage` in macOS's units."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name) * (1024 if name == "ru_maxrss" else 1)


def _without_proc(real: Callable[..., Any]) -> Callable[..., Any]:
    def called(path: Any = ".", *arguments: Any, **options: Any) -> Any:
        name = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
        if isinstance(name, str) and name.startswith(("/proc/", "/sys/")) and _asked_by_bertkit():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return real(path, *arguments, **options)

    for supporting in (os.supports_fd, os.supports_dir_fd, os.supports_follow_symlinks):
        if real in supporting:
            supporting.add(called)
    return called


def _drop(owner: Any, names: str) -> None:
    for name in names.split():
        if hasattr(owner, name):
            delattr(owner, name)


def _of_psutil(psutil: Any) -> None:
    _drop(psutil.Process, "io_counters cpu_affinity rlimit ionice memory_maps cpu_num")


def _of_torch(torch: Any) -> None:
    def no() -> bool:
        return False

    torch.multiprocessing.set_sharing_strategy("file_system")
    torch.backends.mkldnn.is_available = torch.backends.mkl.is_available = no
    torch._C._has_mkldnn = False
    torch._C._set_mkldnn_enabled(False)
    torch.ops.__dict__["mkldnn"] = types.SimpleNamespace()
    for name in [each for each in vars(torch.cpu) if each.startswith(("_is_avx", "_is_amx", "_is_vnni"))]:
        setattr(torch.cpu, name, no)
    type(torch.backends.quantized).supported_engines = property(lambda _: ["qnnpack", "none"])


class _Changed(importlib.abc.MetaPathFinder):
    """Changes a package after its import."""

    changes: dict[str, Callable[[Any], None]] = {"psutil": _of_psutil, "torch": _of_torch}  # noqa: RUF012 (one finder)

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if (change := self.changes.pop(name, None)) is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (run(module), change(module))  # type: ignore[method-assign]
        return spec


sys.__class__ = _System
sys.modules["_frozen_importlib"]._new_module = types.ModuleType  # type: ignore[attr-defined]  # it takes that of `sys`
copyreg.pickle(_System, lambda module: (importlib.import_module, ("sys",)))  # type: ignore[arg-type]
platform.machine = _elsewhere(platform.machine, "arm64")
platform.processor = _elsewhere(platform.processor, "arm")
platform.libc_ver = _elsewhere(platform.libc_ver, ("", ""))
for _module, _names in _LINUX_ONLY.items():
    _drop(_module, _names)
for _name in ("stat", "lstat", "listdir", "scandir", "readlink", "access"):
    setattr(os, _name, _without_proc(getattr(os, _name)))
io.open = builtins.open = _without_proc(io.open)
_usage = resource.getrusage
resource.getrusage = lambda who: _Usage(_usage(who))  # type: ignore[assignment,return-value]
tempfile._O_TMPFILE_WORKS = False
multiprocessing.set_start_method("spawn")
sys.meta_path.insert(0, _Changed())

"""One writer per run: a lock that the operating system releases when its holder dies in any way.

Source: POSIX record locks, fcntl(2). Unlike flock(2) locks they are not inherited by forked data workers, which may
outlive a killed trainer, and they work on NFS. They are lost when the holder closes *any* descriptor of the file, so
this process remembers its locks and never opens such a file again. Imports nothing heavy.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

from bertkit.errors import DataError, UsageError
from bertkit.files import naming, read_json

LOCK_FILE = ".lock"
ATTEMPTS = 20
ATTEMPT_SECONDS = 0.05

_TAKEN = {errno.EACCES, errno.EAGAIN}
_held: dict[str, int] = {}

log = logging.getLogger(__name__)


class RunLock:
    """The right to write a run directory, from construction until `release` or the end of the process.

    Raises:
        UsageError: another process, or this one, is already writing the run; the message names the process.
    """

    def __init__(self, run: Path) -> None:
        self._key = os.path.realpath(run / LOCK_FILE)
        if self._key in _held:
            raise UsageError(f"{run}: this process is writing this run already")
        descriptor = os.open(self._key, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            _lock(descriptor, run)
            with naming(run / LOCK_FILE):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(_this_process()).encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        _held[self._key] = os.getpid()

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if _held.get(self._key) == os.getpid():
            del _held[self._key]
            os.close(self._descriptor)


def is_locked(run: Path) -> bool:
    """Whether a running process is writing the run; True if that is unknown."""
    key = os.path.realpath(run / LOCK_FILE)
    if _held.get(key) == os.getpid():
        return True
    try:
        descriptor = os.open(key, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _TAKEN or _holder_lives(run)
    finally:
        os.close(descriptor)
    return False


def _lock(descriptor: int, run: Path) -> None:
    # Several attempts, because `is_locked` in another process briefly holds a shared lock.
    for attempt in range(ATTEMPTS):
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _TAKEN:
                if _holder_lives(run):
                    raise UsageError(_taken(run)) from error
                log.warning("%s: this file system has no locks (%s); start only one process on this run", run, error)
                return
            if attempt + 1 == ATTEMPTS:
                raise UsageError(_taken(run)) from error
            time.sleep(ATTEMPT_SECONDS)
        else:
            return


def _this_process() -> dict[str, Any]:
    import psutil

    return {"pid": os.getpid(), "host": socket.gethostname(), "started": psutil.Process().create_time()}


def _holder(run: Path) -> dict[str, Any]:
    try:
        return read_json(run / LOCK_FILE)
    except DataError:
        return {}


def _holder_lives(run: Path) -> bool:
    """For file systems without locks: whether the process that wrote the lock file still exists; True if on another
    host."""
    import psutil

    holder = _holder(run)
    if not holder:
        return False
    if holder.get("host") != socket.gethostname():
        return True
    try:
        return bool(abs(psutil.Process(holder.get("pid")).create_time() - holder.get("started", 0.0)) < 2.0)
    except (psutil.Error, TypeError, ValueError):
        return False


def _taken(run: Path) -> str:
    holder = _holder(run)
    who = f"process {holder.get('pid')} on {holder.get('host')}" if holder else "another process"
    return f"{run}: {who} is writing this run; wait for it to end, stop it, or choose another directory with --run-dir"

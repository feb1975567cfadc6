"""Commands in forks of one process that has imported what they need: a start costs a tenth of a second, not three.

For tests that start and kill a command again and again. A command whose imports or environment matter is started by
`bertkit_process` (conftest.py).
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

_SECONDS = 120
_IMPORTED = ["bertkit.cli.app", "bertkit.cli.pretrain", "bertkit.cli.study", "bertkit.study.run"]


class Forked:
    """A command that was started; its stderr is in a file.

    Args:
        words: of the command line.
        directory: where it runs.
        environment: variables that differ from this process's.
    """

    def __init__(self, words: Sequence[str | Path], directory: Path, environment: Mapping[str, str]) -> None:
        self._errors = directory / f"{os.urandom(6).hex()}.stderr"
        variables = {**os.environ, **environment}
        given = (list(map(str, words)), directory, variables, self._errors)
        self.process: BaseProcess = _context().Process(target=_run, args=given)
        self.process.start()

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs, and -9 after a kill."""
        return self.process.exitcode

    def send(self, number: int) -> None:
        """Send it a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self) -> int:
        """Its exit code once it has ended."""
        self.process.join(_SECONDS)
        assert self.code is not None, "it has not ended"
        return self.code

    @property
    def errors(self) -> str:
        """What it wrote to stderr."""
        return self._errors.read_text(encoding="utf-8")


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


def _run(words: list[str], directory: Path, environment: dict[str, str], errors: Path) -> None:
    from bertkit.cli.app import main

    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    for number, file in ((1, Path(os.devnull)), (2, errors)):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.argv = ["bertkit", *words]
    main()

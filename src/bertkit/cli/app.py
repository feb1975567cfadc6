"""The `bertkit` command: finds the subcommand, runs it, and turns every fault into its exit code.

Nothing here follows a paper; exit codes and streams are those of the command-line contract. A subcommand's module is
imported only when it is asked for, and imports nothing heavy itself, so that `--help` and `--version` answer at once.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

from bertkit import __version__
from bertkit.cli.common import spread_arguments, story
from bertkit.cli.console import ReaderLeftError
from bertkit.cli.groups import LazyGroup
from bertkit.errors import BertkitError, DataError, UsageError

COMMANDS = {
    "tokenize": "bertkit.cli.tokenize",
    "pretrain": "bertkit.cli.pretrain",
    "finetune": "bertkit.cli.finetune",
    "distill": "bertkit.cli.distill",
    "show-batch": "bertkit.cli.show_batch",
    "fill": "bertkit.cli.fill",
    "eval": "bertkit.cli.eval",
    "probe": "bertkit.cli.probe",
    "predict": "bertkit.cli.predict",
    "export": "bertkit.cli.export",
    "runs": "bertkit.cli.runs",
    "recipes": "bertkit.cli.recipes",
}
"""Each subcommand and the module that holds its `app`, in the order of the help page."""

COMPLETION = "_BERTKIT_COMPLETE"
"""Set by the shell's completion script, which passes the words to complete in the environment and no arguments."""

INTERRUPTED = 130
"""128 + SIGINT, as shells have it: stopped by Ctrl-C where there was nothing to save."""

READER_LEFT = 141
"""128 + SIGPIPE, as shells have it: stdout was closed before all was written, as by `| head`."""

_MACHINE_FAULTS = {
    errno.ENOSPC: "free some space and run again",
    errno.EDQUOT: "free some space and run again",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.EACCES: "check who may read and write there",
    errno.EPERM: "check who may read and write there",
    errno.EROFS: "choose a place that can be written",
    errno.EIO: "check the disk",
}


class Commands(LazyGroup):
    """The subcommands."""

    table = COMMANDS
    called = "command"
    path = "bertkit"


app = typer.Typer(name="bertkit", cls=Commands, pretty_exceptions_enable=False)


def _version(value: bool) -> None:
    if value:
        print(f"bertkit {__version__}")
        raise typer.Exit


@app.callback(context_settings={"help_option_names": ["-h", "--help"]})
def bertkit(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train, evaluate and probe the BERT family: one recipe per paper, runs that reproduce to the bit."""


def run(arguments: Sequence[str]) -> int:
    """Run `bertkit` with these arguments and return its exit code; nothing but SystemExit is ever raised."""
    story.begin()
    try:
        return _run(arguments)
    finally:
        story.end()


def _run(arguments: Sequence[str]) -> int:
    if not arguments and COMPLETION not in os.environ:
        with redirect_stdout(sys.stderr):  # the help is no result here
            _run(["--help"])
        return UsageError.exit_code
    command = typer.main.get_command(app)
    try:
        code = command.main(spread_arguments(list(arguments)), prog_name="bertkit", standalone_mode=False)
        sys.stdout.flush()
    except BertkitError as fault:
        return _tell(fault)
    except TyperException as fault:
        return _tell_usage(fault)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except (ReaderLeftError, BrokenPipeError):
        # What is left to write has nowhere to go, Python's own flush at exit included.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_LEFT
    except OSError as fault:
        if fault.errno not in _MACHINE_FAULTS:
            return _tell_bug(fault)
        where = f"{fault.filename}: " if fault.filename else ""
        return _tell(DataError(f"{where}{fault.strerror}; {_MACHINE_FAULTS[fault.errno]}"))
    except Exception as bug:
        return _tell_bug(bug)
    if code == INTERRUPTED:
        story.error("interrupted")
    return code if isinstance(code, int) else 0


def main() -> None:
    """The console entry point."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))


def _tell(fault: BertkitError) -> int:
    story.error(str(fault) or type(fault).__name__)
    return fault.exit_code


def _tell_usage(fault: TyperException) -> int:
    context = getattr(fault, "ctx", None)
    text = fault.format_message().strip()
    help_of = f"; see `{context.command_path} --help`" if context is not None else ""
    story.error(text.rstrip(".") + help_of)
    return fault.exit_code


def _tell_bug(bug: Exception) -> int:
    text = "".join(traceback.format_exception(bug))
    where = story.log_file or _open_log()
    try:
        if where is None:
            handle, name = tempfile.mkstemp(prefix=f"bertkit-{datetime.now():%Y%m%d-%H%M%S}-", suffix=".txt", text=True)
            os.close(handle)
            where = Path(name)
        with where.open("a", encoding="utf-8") as file:
            file.write(f"arguments: {sys.argv[1:]}\n{text}")
        told = f"the traceback is in {where}"
    except OSError as unwritable:
        told = f"the traceback could not be written ({unwritable}):\n{text}"
    story.error(f"a bug in bertkit: {type(bug).__name__}: {bug}\n{told}")
    return BertkitError.exit_code


def _open_log() -> Path | None:
    """The file that a run in progress logs to, if there is one."""
    for handler in logging.getLogger("bertkit").handlers:
        if isinstance(handler, logging.FileHandler):
            return Path(handler.baseFilename)
    return None

"""The `bertkit` command: finds the subcommand, runs it, and turns every error into its exit code.

Exit codes and streams are those of the command-line contract. A subcommand's module is imported only when it runs or
shows its help, so that `--help` and `--version` take a fifth of a second.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

from bertkit import __version__
from bertkit.cli.commands import CommandGroup
from bertkit.cli.console import ClosedOutputError, console, result
from bertkit.cli.other_options import written_as
from bertkit.errors import (
    REINSTALL,
    BertkitError,
    DataError,
    StoppedError,
    UsageError,
    first_line,
    is_of_installation,
    is_out_of_memory,
)
from bertkit.openmp import limit_spinning, limit_threads
from bertkit.ranks import leave
from bertkit.run import NEWEST

COMMANDS = {
    "tokenize": "bertkit.cli.tokenize:tokenize",
    "pretrain": "bertkit.cli.pretrain:pretrain",
    "finetune": "bertkit.cli.finetune:finetune",
    "tune": "bertkit.cli.tune:tune",
    "distill": "bertkit.cli.distill:distill",
    "show-batch": "bertkit.cli.show_batch:show_batch",
    "replay-batch": "bertkit.cli.replay_batch:replay_batch",
    "fill": "bertkit.cli.fill:fill",
    "generate": "bertkit.cli.generate:generate",
    "eval": "bertkit.cli.eval:Suites",
    "probe": "bertkit.cli.probe:Kinds",
    "study": "bertkit.cli.study:study",
    "predict": "bertkit.cli.predict:predict",
    "embed": "bertkit.cli.embed:embed",
    "search": "bertkit.cli.search:search",
    "mine-negatives": "bertkit.cli.search:mine_negatives",
    "export": "bertkit.cli.export:export",
    "push": "bertkit.cli.push:push",
    "serve": "bertkit.cli.serve:serve",
    "doctor": "bertkit.cli.doctor:doctor",
    "bench": "bertkit.cli.bench:bench",
    "report": "bertkit.cli.report:report",
    "runs": "bertkit.cli.runs:Runs",
    "cache": "bertkit.cli.cache:Cache",
    "recipes": "bertkit.cli.recipes:Recipes",
    "init": "bertkit.cli.init:init",
}
"""Each subcommand and its function or class of commands, in the order of the help page."""

COMPLETION = "_BERTKIT_COMPLETE"
"""Set by the shell's completion script, which passes the words to complete in the environment, without arguments."""

INTERRUPTED = 130
"""128 + SIGINT, as in shells: stopped by Ctrl-C when there was nothing to save."""

CLOSED_OUTPUT = 141
"""128 + SIGPIPE, as in shells: stdout was closed before everything was written, for example by `| head`."""

OPTIONAL_VALUE = {"--resume": NEWEST}
"""Options whose value may be left out, with the value used in that case."""

MANY_VALUES = frozenset({"--data"})
"""Options that take several words, as produced by a shell's glob: `--data *.txt`."""

_OF_A_SERVER = "check the server of the file system and the network, and run again"
_MACHINE_ERRORS = {
    errno.ENOSPC: "free some space and run again",
    errno.EDQUOT: "free some space and run again",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EROFS: "choose a writable directory",
    errno.EIO: "check the disk",
    errno.EEXIST: "it already exists; choose another name",
    errno.ENOTEMPTY: "choose an empty directory",
    errno.ENOENT: "check the path; if it existed, it was deleted while the command ran",
    errno.ENOTDIR: "check the path: one of its directories is a file",
    errno.EISDIR: "give a file, not a directory",
    errno.ELOOP: "the symbolic links form a loop; remove one",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EINVAL: "choose another path",
    errno.ENXIO: "give a regular file",
    errno.ENODEV: "give a regular file",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "close other programs",
    errno.ENOMEM: "free some memory and run again",
    errno.EBUSY: "end what uses it, or wait, and run again",
    errno.EAGAIN: "wait a little and run again",
    errno.ESTALE: "it was replaced on its server: run again, or mount the file system again",
    errno.ENOTCONN: "mount the file system again",
    errno.ENOTSUP: "choose a directory on another file system",
    errno.ENOSYS: "choose a directory on another file system",
    errno.ENOLCK: "choose a directory on another file system",
    errno.ETIMEDOUT: _OF_A_SERVER,
    getattr(errno, "EREMOTEIO", errno.ETIMEDOUT): _OF_A_SERVER,  # Linux only
}
_OUT_OF_MEMORY = "free some memory, or compute less at once: smaller batches, shorter texts, fewer --jobs"


class Commands(CommandGroup):
    """The subcommands."""

    table = COMMANDS
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
    """Train, evaluate and probe the BERT family: one recipe per paper, runs that reproduce to the bit.

    To start: `bertkit doctor` checks this machine, and `bertkit pretrain quickstart` trains a first model in minutes.
    """


def run(arguments: Sequence[str]) -> int:
    """Run `bertkit` with these arguments and return its exit code; nothing but SystemExit is ever raised."""
    console.open()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        code, message = _run(arguments)
        if message is not None and asks_for_json(arguments) and not console.has_result:
            with suppress(ClosedOutputError):
                result({"error": message, "code": code}, as_json=True)
        return code
    finally:
        console.close()
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _run(arguments: Sequence[str]) -> tuple[int, str | None]:
    """The exit code and the error, which is None if there was none."""
    if (strange := next((each for each in arguments if not _is_unicode(each)), None)) is not None:
        return _report(UsageError(f"{strange}: not valid UTF-8; rename the file, or write the value in UTF-8"))
    try:
        os.getcwd()
    except FileNotFoundError:
        return _report(DataError("the working directory has been deleted; change to another one (cd) and run again"))
    if not arguments and COMPLETION not in os.environ:
        with redirect_stdout(sys.stderr):  # the help is not a result here
            _run(["--help"])
        return UsageError.exit_code, None
    command = typer.main.get_command(app)
    try:
        code = command.main(one_value_each(list(arguments)), prog_name="bertkit", standalone_mode=False)
        sys.stdout.flush()
    except BertkitError as error:
        return _report(error)
    except TyperException as error:
        return _report_usage(error)
    except typer.Abort as abort:
        if isinstance(abort.__cause__, EOFError):  # which typer takes for the end of the user's input
            return _report_bug(abort.__cause__)
        code = INTERRUPTED
    except KeyboardInterrupt:
        code = INTERRUPTED
    except (ClosedOutputError, BrokenPipeError):
        return _leave_output()
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):  # after which typer and rich end the process
            raise
        return _leave_output()
    except Exception as error:
        if (message := _data_error(error)) is None:
            return _report_bug(error)
        console.debug("".join(traceback.format_exception(error)))
        return _report(DataError(message))
    if code == INTERRUPTED:
        console.stopped("interrupted")
        return code, "interrupted"
    return code if isinstance(code, int) else 0, None


def _data_error(error: Exception) -> str | None:
    """The message of an error that the data, the machine or the installation cause; None if it is a bug."""
    text = str(error)
    if isinstance(error, OSError):
        remedy = _MACHINE_ERRORS.get(error.errno or 0)
        return None if remedy is None else _of_the_machine(error, remedy)
    if isinstance(error, UnicodeEncodeError) and error.encoding == "utf-8":
        return f"{error.object[:60]!r}: invalid Unicode at character {error.start}; correct the data"
    if not isinstance(error, MemoryError | RuntimeError | ImportError):
        return None
    if is_out_of_memory(error):
        return f"out of memory: {first_line(error)}; {_OUT_OF_MEMORY}"
    if is_of_installation(error):
        return f"{first_line(error)}; {REINSTALL}"
    if text.startswith("Symlink loop"):  # pathlib's form of ELOOP
        return f"{text}; {_MACHINE_ERRORS[errno.ELOOP]}"
    if text.startswith("Could not determine home directory"):  # pathlib's for `~` and `~NAME`
        return "a path begins with ~, but there is no such user or home directory; write it in full"
    return None


def _of_the_machine(error: OSError, remedy: str) -> str:
    """The file, the system's message, what the writer of the file notes (such as what is kept), and the remedy."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    file = (is_full and error.filename2) or error.filename  # a full disk is that of the copy, not of its source
    text = f"{file}: {error.strerror}" if file else str(error.strerror)
    if is_full and str(file).startswith(os.path.join(tempfile.gettempdir(), "bertkit-")):  # nothing there is kept
        elsewhere = "" if error.errno == errno.EFBIG else ", or set TMPDIR to a directory on another disk"
        return f"{text}; {remedy}{elsewhere}"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and file and _is_of_the_cache(Path(str(file))):
        remedy = "set BERTKIT_CACHE to a directory that you can write"
    return "; ".join([text, *getattr(error, "__notes__", ()), remedy])


def _is_of_the_cache(path: Path) -> bool:
    """Whether a path is in the directory of the caches, or is one of its parents, which is to be created first."""
    from bertkit.files import cache_directory

    try:
        cache = cache_directory().absolute()
    except RuntimeError:  # there is no home directory
        return False
    return cache.is_relative_to(path) or path.is_relative_to(cache)


def _leave_output() -> tuple[int, None]:
    """The reader of stdout has closed it: the rest of the output has nowhere to go, including Python's own flush at
    exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return CLOSED_OUTPUT, None


def asks_for_json(arguments: Sequence[str]) -> bool:
    """Whether `--json` is among the options, even if they could not be parsed."""
    words = list(arguments)
    return "--json" in words[: words.index("--") if "--" in words else None]


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def main() -> None:
    """The console entry point."""
    _open_closed_streams()
    limit_threads()
    limit_spinning()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    leave(run(sys.argv[1:]))


def _open_closed_streams() -> None:
    """Open /dev/null in place of the standard streams that the caller has closed (`>&-`), so that what is printed is
    discarded, and no file of the run gets the number of such a stream, to which libraries write."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (for the whole process)


def one_value_each(arguments: list[str]) -> list[str]:
    """Rewrite `--resume [RUN]` and `--data SOURCE...` as options with one value, which the parser can read.

    A word after a bare `--resume` is its RUN unless it begins with `-` or names a YAML file, which is a recipe. Words
    after the first of `--data` are further sources if they look like one: `hub:` or `builtin:`, a `/`, `.` or `*`, or
    an existing path. In `--data a.txt quickstart` the last word is therefore still a recipe's name.
    """
    found: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word == "--":
            return [*found, word, *words]
        if word in OPTIONAL_VALUE:
            has_value = bool(words) and not words[0].startswith("-") and not _is_yaml(words[0])
            found.append(f"{word}={words.pop(0) if has_value else OPTIONAL_VALUE[word]}")
        elif word in MANY_VALUES and words and not words[0].startswith("-"):
            found.append(f"{word}={words.pop(0)}")
            while words and _is_source(words[0]):
                found.append(f"{word}={words.pop(0)}")
        else:
            found.append(word)
    return found


def _is_yaml(word: str) -> bool:
    return word.endswith((".yaml", ".yml"))


def _is_source(word: str) -> bool:
    if word.startswith("-") or _is_yaml(word):
        return False
    return word.startswith(("hub:", "builtin:")) or any(sign in word for sign in "/.*") or os.path.exists(word)


def _report(error: BertkitError) -> tuple[int, str]:
    message = str(error) or type(error).__name__
    if isinstance(error, StoppedError):  # requested by the user, or by a limit that the user has set
        console.stopped(message)
    else:
        console.error(message)
    return error.exit_code, message


def _report_usage(error: TyperException) -> tuple[int, str]:
    context = getattr(error, "ctx", None)
    text = _with_value(error.format_message().strip(), error.__cause__ or error.__context__)
    if (option := getattr(error, "option_name", None)) is not None and context is not None:
        options = [name for each in context.command.params for name in each.opts]
        if instead := written_as(option, options, context.info_name):
            text = f"{error.message}; {instead}"
    see = f"; see `{context.command_path} --help`" if context is not None else ""
    misplaced = ("Missing argument", "Got unexpected extra argument", "No such option: --model")
    if text.startswith(misplaced) and context is not None:
        example = re.search(r"`bertkit [^`]+`", context.command.help or "")
        see += f", for example {example[0]}" if example else ""
    message = text.rstrip(".") + see
    console.error(message)
    return error.exit_code, message


def _with_value(text: str, cause: BaseException | None) -> str:
    """A message about an option's value without the validation library's wording, with the given value and, for a name,
    the nearest valid one."""
    given, choice, known = text.partition(" is not one of ")
    if choice:
        from bertkit.tasks.spec import other_name

        name, names = given.split("'")[-2], re.findall(r"'([^']*)'", known)
        elsewhere = other_name(name)
        near = [elsewhere] if elsewhere in names else get_close_matches(name, names, n=1)
        text = text.rstrip(".") + (f"; did you mean {near[0]}?" if near else "")
    elif errors := getattr(cause, "errors", None):
        text = f"{text.partition(', unable to parse')[0].rstrip('.')}, got {errors()[0]['input']!r}"
    text = text.replace("Value error, ", "").replace(": Input should be ", ": expected ")
    return re.sub(": expected (greater|less) ", r": expected a number \1 ", text)


def _report_bug(bug: Exception) -> tuple[int, str]:
    text = "".join(traceback.format_exception(bug))
    path = console.log_file or _open_log()
    try:
        if path is None:
            handle, name = tempfile.mkstemp(prefix=f"bertkit-{datetime.now():%Y%m%d-%H%M%S}-", suffix=".txt", text=True)
            os.close(handle)
            path = Path(name)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"arguments: {sys.argv[1:]}\n{text}")
        where = f"the traceback is in {path}"
    except OSError as unwritable:
        where = f"the traceback could not be written ({unwritable}):\n{text}"
    message = f"a bug in bertkit: {type(bug).__name__}: {bug}"
    console.error(f"{message}\n{where}")
    return BertkitError.exit_code, message


def _open_log() -> Path | None:
    """The log file of the run in progress; None if there is none."""
    for handler in logging.getLogger("bertkit").handlers:
        if isinstance(handler, logging.FileHandler):
            return Path(handler.baseFilename)
    return None

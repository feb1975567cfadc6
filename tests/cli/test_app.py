"""The command line starts quickly, separates result and messages, and turns every error into its exit code."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import pytest
import typer

from bertkit import __version__, errors
from bertkit.cli import app as app_module
from bertkit.cli.console import console, result
from bertkit.cli.options import Common, Data, Measuring, Output, RecipeName, Resume

HEAVY = {"torch", "datasets", "tokenizers", "transformers", "pydantic", "numpy", "yaml", "huggingface_hub"}


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Adds a command `play` that calls the given function."""
    module = types.ModuleType("bertkit_play")
    monkeypatch.setitem(sys.modules, "bertkit_play", module)
    monkeypatch.setitem(app_module.COMMANDS, "play", "bertkit_play:play")

    def install(function: Callable[..., None]) -> None:
        module.play = function

    return install


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_import_nothing_heavy(option: str) -> None:
    probe = (
        "import sys; from bertkit.cli.app import run; code = run(sys.argv[1:]);"
        "print(code, sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", probe, option], capture_output=True, text=True, check=True)
    code, _, modules = done.stderr.strip().splitlines()[-1].partition(" ")
    assert code == "0"
    assert not HEAVY & {name.strip("'[] ") for name in modules.split(",")}


def test_the_version_is_the_packages(bertkit) -> None:
    assert bertkit("--version").stdout == f"bertkit {__version__}\n"


def test_help_lists_every_command_with_a_line_of_its_own(bertkit) -> None:
    outcome = bertkit("--help")
    assert outcome.code == 0
    for command in app_module.COMMANDS:
        assert command in outcome.stdout


def test_every_command_has_help_and_describes_every_option(bertkit) -> None:
    for command in app_module.COMMANDS:
        outcome = bertkit(command, "-h")
        assert outcome.code == 0, command
        assert "Usage: bertkit" in outcome.stdout
        assert "<bool>" not in outcome.stdout, "a flag takes no value"


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        ("", "bertkit [OPTIONS] COMMAND [ARGS]..."),
        ("pretrain", "bertkit pretrain [OPTIONS] [RECIPE]"),
        ("tokenize", "bertkit tokenize [OPTIONS] SOURCE..."),
        ("push", "bertkit push [OPTIONS] MODEL ORG/NAME"),
        ("runs diff", "bertkit runs diff [OPTIONS] RUN-A RUN-B"),
        ("eval", "bertkit eval [OPTIONS] SUITE [ARGS]..."),
        ("eval RUN", "bertkit eval RUN [OPTIONS]"),
        ("eval score", "bertkit eval score [OPTIONS] TASK"),
        ("probe", "bertkit probe [OPTIONS] KIND [ARGS]..."),
    ],
)
def test_the_usage_line_names_each_argument_once_without_braces(bertkit, words: str, usage: str) -> None:
    lines = bertkit(*words.split(), "--help").stdout.splitlines()
    assert [line.strip() for line in lines if "Usage:" in line] == [f"Usage: {usage}"]


def test_no_arguments_show_the_help_and_count_as_wrong_usage(bertkit) -> None:
    outcome = bertkit()
    assert outcome.code == 2
    assert outcome.stdout == ""
    assert "recipes" in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipe"], "did you mean `bertkit recipes`?"),
        (["zzzz"], "one of: "),
        (["recipes"], "Missing command; see `bertkit recipes --help`"),
        (["recipes", "lst"], "did you mean `bertkit recipes list`?"),
        (["recipes", "list", "--jsn"], "--json"),
        (["recipes", "show"], "Missing argument 'RECIPE'"),
        (["eval", "RUN"], "see `bertkit eval RUN --help`, for example `bertkit eval RUN --data new.csv`"),
        (["recipes", "show", "bert", "--set"], "requires an argument"),
        (["recipes", "list", "extra"], "unexpected extra argument"),
        (["embed", "RUN", "texts.txt"], "for example `bertkit embed --model M texts.txt --out vectors.npy`"),
        (["serve", "--model", "RUN"], "for example `bertkit serve RUN --port 8000`"),
        (["export", "--model", "RUN"], "for example `bertkit export RUN --to DIR`"),
        (["fill", ".", "The [MASK]"], "TEXT .: is a directory, not a text with [MASK]; give a model with --model"),
        (["finetune", "--train", "a.csv", "--kind", "taging"], "did you mean tagging?"),
        (["finetune", "--train", "a.csv", "--kind", "token-classification"], "did you mean tagging?"),
    ],
)
def test_wrong_usage_ends_with_2_and_the_nearest_name(bertkit, arguments: list[str], message: str) -> None:
    outcome = bertkit(*arguments)
    assert outcome.code == 2
    assert outcome.stdout == ""
    assert outcome.stderr.startswith("error: ")
    assert message in outcome.stderr
    assert "Traceback" not in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["finetune", "--train", "a.csv", "--dev", "b.csv", "--model", ""], "--model: the value is empty"),
        (["finetune", "--train", "a.csv", "--dev", "b.csv", "--text="], "--text: the value is empty"),
        (["pretrain", "", "--data", "a.txt"], "RECIPE: the value is empty"),
        (["pretrain", "bert-tiny", "--data", ""], "--data: the value is empty"),
        (["pretrain", "bert-tiny", "--init", ""], "--init: the value is empty"),
        (["distill", "distil-task", "--teacher="], "--teacher: the value is empty"),
        (["predict", "", "--model", "base"], "FILE: the value is empty"),
        (["embed", "a.txt", "--model", ""], "--model: the value is empty, as that of a shell variable that is not set"),
        (
            ["export", "", "--to", "b"],
            "MODEL: the value is empty, as that of a shell variable that is not set; give one\n",
        ),
        (["eval", "mlm", "--data", "a.txt", "--model", ""], "--model: the value is empty"),
    ],
)
def test_an_empty_name_is_told_as_such(bertkit, arguments: list[str], told: str) -> None:
    done = bertkit(*arguments)
    assert done.code == 2
    assert told in done.stderr


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (errors.UsageError, 2),
        (errors.DataError, 3),
        (errors.DivergedError, 4),
        (errors.CheckError, 5),
        (errors.StoppedError, 75),
    ],
)
def test_each_fault_has_its_exit_code_and_no_traceback(bertkit, play, fault: type[Exception], code: int) -> None:
    def failing() -> None:
        """Fail."""
        raise fault("file.txt:3: what was wrong")

    play(failing)
    outcome = bertkit("play")
    assert outcome.code == code
    assert outcome.stdout == ""
    prefix = "" if code == 75 else "error: "  # a stop is not an error
    assert outcome.stderr == f"{prefix}file.txt:3: what was wrong\n"


def test_a_bug_ends_with_1_and_its_traceback_in_the_runs_log(bertkit, play, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("earlier line\n")

    def buggy() -> None:
        """Break."""
        console.log_file = log
        raise ZeroDivisionError("unforeseen")

    play(buggy)
    outcome = bertkit("play")
    assert outcome.code == 1
    assert "ZeroDivisionError: unforeseen" in outcome.stderr
    assert str(log) in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert log.read_text().startswith("earlier line\n")
    assert "Traceback" in log.read_text()


def test_a_bug_without_a_run_names_a_file_with_the_traceback(
    bertkit, play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def buggy() -> None:
        """Break."""
        raise ZeroDivisionError("unforeseen")

    play(buggy)
    outcome = bertkit("play")
    (file,) = tmp_path.iterdir()
    assert outcome.code == 1
    assert str(file) in outcome.stderr
    assert "ZeroDivisionError" in file.read_text()


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ImportError("libcudart.so.12: cannot open shared object file", name="torch._C"), 3, errors.REINSTALL),
        (ModuleNotFoundError("No module named 'psutil'", name="psutil"), 3, errors.REINSTALL),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object", name="torch._C"), 3, "out of memory"),
        (RuntimeError("std::bad_alloc"), 3, "out of memory"),
        (ImportError("cannot import name 'x' from 'bertkit.run'", name="bertkit.run"), 1, "a bug in bertkit"),
    ],
)
def test_a_damaged_installation_is_no_bug(bertkit, play, error: Exception, code: int, told: str) -> None:
    def importing() -> None:
        """Import."""
        raise error

    play(importing)
    outcome = bertkit("play")
    assert outcome.code == code
    assert str(error) in outcome.stderr
    assert told in outcome.stderr


def test_a_deleted_working_directory_is_told_as_such(bertkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    outcome = bertkit("runs", "list", "--json")
    assert outcome.code == 3
    assert "the working directory has been deleted" in outcome.stderr
    assert "the working directory has been deleted" in outcome.stdout


def test_a_full_disk_is_the_machines_fault_and_no_bug(bertkit, play) -> None:
    def writing() -> None:
        """Write."""
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out.bin")

    play(writing)
    outcome = bertkit("play")
    assert outcome.code == 3
    assert outcome.stderr == "error: out.bin: No space left on device; free some space and run again\n"


def test_a_full_disk_is_reported_with_the_notes_of_the_writer_and_the_copy_not_its_source(bertkit, play) -> None:
    def copying() -> None:
        """Copy."""
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "source.bin", None, "copy.bin")
        error.add_note("it needs 5 bytes or more")
        raise error

    play(copying)
    assert bertkit("play").stderr == (
        "error: copy.bin: No space left on device; it needs 5 bytes or more; free some space and run again\n"
    )


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free some space and run again, or set TMPDIR to a directory on another disk"),
        (errno.EFBIG, "raise the limit on file sizes (ulimit -f)"),
    ],
)
def test_nothing_is_kept_in_a_temporary_directory_on_a_full_disk(bertkit, play, number: int, remedy: str) -> None:
    file = os.path.join(tempfile.gettempdir(), "bertkit-x", "vectors.npy")

    def writing() -> None:
        """Write."""
        error = OSError(number, os.strerror(number), file)
        error.add_note("7 vectors are kept")
        raise error

    play(writing)
    assert bertkit("play").stderr == f"error: {file}: {os.strerror(number)}; {remedy}\n"


def test_a_full_disk_of_the_output_is_named() -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "bertkit", "recipes", "list", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.returncode == 3
    assert ended.stderr == "error: standard output: No space left on device; free some space and run again\n"


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("home/.cache", "set BERTKIT_CACHE to a directory that you can write"),
        ("home/.cache/bertkit/shards/x", "set BERTKIT_CACHE to a directory that you can write"),
        ("home/out.bin", "check the permissions"),
    ],
)
def test_a_cache_that_cannot_be_written_is_set_elsewhere(
    bertkit, play, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str, told: str
) -> None:
    monkeypatch.setenv("BERTKIT_CACHE", str(tmp_path / "home" / ".cache" / "bertkit"))

    def writing() -> None:
        """Write."""
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path / file))

    play(writing)
    assert bertkit("play").stderr == f"error: {tmp_path / file}: Permission denied; {told}\n"


@pytest.mark.parametrize("name", ["EBUSY", "EAGAIN", "ESTALE", "ETIMEDOUT", "EREMOTEIO", "ENOTCONN", "ENOTSUP"])
def test_a_failing_network_file_system_is_no_bug(bertkit, play, name: str) -> None:
    number = getattr(errno, name)

    def reading() -> None:
        """Read."""
        raise OSError(number, os.strerror(number), "/net/in.bin")

    play(reading)
    outcome = bertkit("play")
    assert outcome.code == 3
    assert outcome.stderr.startswith(f"error: /net/in.bin: {os.strerror(number)}; ")


@pytest.mark.parametrize(
    "fault", [MemoryError("Unable to allocate 9 GiB"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_memory_that_is_exhausted_is_no_bug(bertkit, play, fault: Exception) -> None:
    def computing() -> None:
        """Compute."""
        raise fault

    play(computing)
    outcome = bertkit("play")
    assert outcome.code == 3
    assert outcome.stderr.startswith(f"error: out of memory: {fault}; free some memory, or compute less at once")


def test_ctrl_c_ends_with_130_without_a_traceback(bertkit, play) -> None:
    def waiting() -> None:
        """Wait."""
        raise KeyboardInterrupt

    play(waiting)
    outcome = bertkit("play")
    assert (outcome.code, outcome.stdout, outcome.stderr) == (130, "", "interrupted\n")


def test_the_home_of_an_unknown_user_is_no_bug(bertkit) -> None:
    outcome = bertkit("fill", "--model", "~no-such-user/run", "a [MASK]")
    assert outcome.code == 3
    assert "a path begins with ~" in outcome.stderr


def test_a_reader_that_leaves_early_is_no_bug(tmp_path: Path) -> None:
    program = (
        "import sys; from bertkit.cli import app; from bertkit.cli.console import result; import types;"
        "m = types.ModuleType('m'); sys.modules['m'] = m; app.COMMANDS['play'] = 'm:play'\n"
        "def play() -> None:\n    [result('x' * 100) for _ in range(100_000)]\n"
        "m.play = play; sys.argv = ['bertkit', 'play']; app.main()"
    )
    command = f'{sys.executable} -c "$PROGRAM" | head -n 1; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", command], env={**os.environ, "PROGRAM": program}, capture_output=True, text=True, check=False
    )
    assert done.stdout == "x" * 100 + "\n"
    assert done.stderr == ""
    assert done.returncode == 141


def test_a_help_page_whose_reader_leaves_is_no_failure() -> None:
    command = f"{sys.executable} -m bertkit finetune --help | (read -r line); exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_the_caller_has_closed_are_no_bug(closed: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m bertkit recipes list --json {closed}"], capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert bool(done.stdout) is (">&-" not in closed.replace("2>&-", ""))


def test_the_end_of_a_file_is_no_interruption(bertkit, play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def reading() -> None:
        """Read."""
        raise EOFError("Ran out of input")

    play(reading)
    outcome = bertkit("play")
    assert outcome.code == 1
    assert "a bug in bertkit: EOFError: Ran out of input" in outcome.stderr


def test_result_goes_to_stdout_and_messages_to_stderr(bertkit, play) -> None:
    def working(*, common: Output) -> None:
        """Work."""
        console.debug("a detail")
        console.info("under way")
        console.warn("mind this")
        with console.progress("working", total=2, unit="steps") as meter:
            meter.update(1)
        result(
            {"x": float("nan"), "path": Path("a"), "word": "né"} if common.as_json else "runs/x", as_json=common.as_json
        )

    play(working)
    assert bertkit("play").stdout == "runs/x\n"
    assert bertkit("play").stderr == "under way\nwarning: mind this\n"
    assert bertkit("play", "-q").stderr == "warning: mind this\n"
    assert bertkit("play", "-v").stderr == "a detail\nunder way\nwarning: mind this\n"
    assert bertkit("play", "--json").stdout == '{"x": null, "path": "a", "word": "né"}\n'


def test_no_colour_and_no_bar_where_stderr_is_no_terminal(bertkit_process) -> None:
    outcome = bertkit_process("recipes", "show", "no-such-recipe")
    assert outcome.code == 2
    assert "\x1b" not in outcome.stderr
    assert "\x1b" not in bertkit_process("--help").stdout


def test_offline_is_set_before_a_library_could_read_it(bertkit, play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "0")

    def reading(*, common: Common) -> None:
        """Read."""
        result(os.environ["HF_HUB_OFFLINE"] + os.environ["HF_DATASETS_OFFLINE"])

    play(reading)
    assert bertkit("play").stdout == "00\n"
    assert bertkit("play", "--offline").stdout == "11\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["bert", "--resume"], ("bert", "newest", None)),
        (["bert", "--resume", "runs/x"], ("bert", "runs/x", None)),
        (["bert", "--resume=runs/x"], ("bert", "runs/x", None)),
        (["--resume", "bert.yaml"], ("bert.yaml", "newest", None)),
        (["--resume", "--offline", "bert"], ("bert", "newest", None)),
        (["bert"], ("bert", None, None)),
        (["bert", "--data", "a.txt"], ("bert", None, ["a.txt"])),
        (["bert", "--data", "a.txt", "b.txt", "--resume"], ("bert", "newest", ["a.txt", "b.txt"])),
        (["bert", "--data=a.txt", "--data", "b.txt"], ("bert", None, ["a.txt", "b.txt"])),
        (["--data", "corpus", "hub:a/b", "bert"], ("bert", None, ["corpus", "hub:a/b"])),
        (["--data", "a.txt", "recipes/bert.yaml"], ("recipes/bert.yaml", None, ["a.txt"])),
        (["bert", "--data", "builtin:pydocs", "d/*.txt"], ("bert", None, ["builtin:pydocs", "d/*.txt"])),
    ],
)
def test_resume_takes_a_run_or_none_and_data_takes_many(bertkit, play, arguments: list[str], expected: object) -> None:
    def training(recipe: RecipeName, data: Data = None, resume: Resume = None, *, common: Common) -> None:
        """Train."""
        result(repr((recipe, resume, data or None)))

    play(training)
    outcome = bertkit("play", *arguments)
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout == f"{expected!r}\n"


def test_several_files_for_a_command_that_reads_one_are_refused(bertkit, play, tmp_path: Path) -> None:
    def scoring(data: Annotated[Path, typer.Option("--data", help="A table.")], *, common: Common) -> None:
        """Score."""
        result(data)

    play(scoring)
    assert bertkit("play", "--data", "a.csv").stdout == "a.csv\n"
    outcome = bertkit("play", "--data", "a.csv", "b.csv")
    assert outcome.code == 2
    assert "--data: takes one file here, but 2 are given: a.csv, b.csv" in outcome.stderr


def test_a_tilde_is_the_home_directory_behind_an_equals_sign_too(
    bertkit, play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("BERTKIT_RUNS", "~/mine")

    def writing(text: Annotated[str, typer.Argument()], *, common: Measuring) -> None:
        """Write."""
        result(f"{common.run_dir} {text} {common.argument_fields()['runs_root']}")

    play(writing)
    done = bertkit("play", "--run-dir=~/a", "--", "--text=~/b")
    assert done.stdout == f"{tmp_path / 'a'} --text=~/b {tmp_path / 'mine'}\n", done.stderr

"""Disturb commands at every moment of writing, and resume them.

    python -m tests.faults.disturbed kill 240        # kill at this many moments: nothing finished is lost, equal bits
    python -m tests.faults.disturbed ENOSPC 400      # full disk from each moment on: exit 3, equal bits elsewhere
    python -m tests.faults.disturbed EIO 40          # failing disk; EROFS: read-only disk from then on

Each command runs in a fork of this process, in its own directory below one temporary directory, with limits on memory,
processor time and file size.
"""

from __future__ import annotations

import io
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.commands import Command, made_commands
from tests.faults.shim import Fault, Key, Shim

LIMITS = {
    resource.RLIMIT_AS: 12 << 30,
    resource.RLIMIT_CPU: 120,
    resource.RLIMIT_FSIZE: 1 << 28,
    resource.RLIMIT_CORE: 0,
}
SECONDS = 180
"""A child that runs longer counts as hanging."""


@dataclass
class Outcome:
    """Outcomes of the disturbed commands.

    Attributes:
        moments: number of moments tried, by command.
        kinds: number of kinds of moments, by command.
        codes: exit codes of the disturbed command; -9 is the kill.
        wrong: unexpected outcomes, which are bugs in bertkit.
        begun_again: number of times that there was no run to resume yet.
    """

    moments: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    codes: Counter[tuple[str, int]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    begun_again: Counter[str] = field(default_factory=Counter)


def in_child(work: Callable[[], int], story: Path) -> int:
    """The exit code of `work` in a fork under limits (minus the signal that ended it); its output is in `story`."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        code = 70
        try:
            for limit, value in LIMITS.items():
                resource.setrlimit(limit, (value, value))
            descriptor = os.open(story, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    ends = time.monotonic() + SECONDS
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > ends:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -999
        time.sleep(0.005)


def bertkit_in_child(words: Sequence[str], place: Path, shim: Shim | None = None) -> tuple[int, str]:
    """Exit code and output of a command with its cache and runs in `place`."""
    story = place.with_name(f"{place.name}.story")
    story.unlink(missing_ok=True)

    def work() -> int:
        from bertkit.cli.app import run

        os.environ["BERTKIT_CACHE"] = str(place / "cache")
        os.chdir(place)
        if shim is None or shim.at is None or "figures/" not in shim.at[0][1]:
            _draw_nothing()
        if shim is not None:
            shim.arm()
        return run(list(words))

    code = in_child(work, story)
    return code, story.read_text(errors="replace") if story.exists() else ""


def _draw_nothing() -> None:
    """Skip figures, which take most of a small run's time and do not affect its result, unless figures are
    disturbed."""
    from bertkit.pretraining import trainer

    trainer.draw_curves = lambda *_, **__: []


def moments_of(command: Command, place: Path) -> tuple[str, dict[Key, int]]:
    """The hash of an undisturbed result, and the number of moments of each kind."""
    place.mkdir(parents=True)
    shim, counted = Shim(place), place.with_name("counted")

    def work() -> int:
        from bertkit.cli.app import run

        os.environ["BERTKIT_CACHE"] = str(place / "cache")
        os.chdir(place)
        shim.arm()
        code = run(command.start(place / "out"))
        counted.write_text(repr(dict(shim.counts)))
        return code

    story = place.with_name("counted.story")
    code = in_child(work, story)
    assert code == 0, story.read_text()
    return command.result(place / "out"), eval(counted.read_text())


def chosen(moments: dict[Key, int], count: int) -> list[tuple[Key, int]]:
    """Choose this many moments: the first and the last of each kind, then evenly spaced ones between them."""
    rounds: list[list[tuple[Key, int]]] = [[], [], []]
    for key, number in sorted(moments.items()):
        rounds[0].append((key, 1))
        rounds[1] += [(key, number)] if number > 1 else []
        rounds[2] += [(key, n) for n in range(2, number)]
    first = rounds[0] + rounds[1]
    if count <= len(first):
        return [first[n * len(first) // count] for n in range(count)]
    rest, wanted = rounds[2], count - len(first)
    step = max(1.0, len(rest) / wanted)
    return first + [rest[int(n * step)] for n in range(min(wanted, len(rest)))]


def disturb(command: Command, fault: Fault, count: int, home: Path, outcome: Outcome) -> None:
    """Disturb a command at this many moments, one after the other, and resume it each time."""
    wanted, moments = moments_of(command, home / "straight" / "place")
    outcome.kinds[command.name] = len(moments)
    for number, at in enumerate(chosen(moments, count)):
        place = home / f"disturbed-{number}"
        place.mkdir()
        error = _disturb_once(command, fault, at, place, wanted, outcome)
        outcome.moments[command.name] += 1
        if error is not None:
            outcome.wrong.append(f"{command.name}, {fault} at {at}: {error}")
            print(outcome.wrong[-1], flush=True)
        shutil.rmtree(place)
    shutil.rmtree(home / "straight")


def _disturb_once(
    command: Command, fault: Fault, at: tuple[Key, int], place: Path, wanted: str, outcome: Outcome
) -> str | None:
    out, finished = place / "out", place.with_name("finished")
    finished.write_text("")

    def told(name: str) -> None:
        descriptor = os.open(finished, os.O_WRONLY | os.O_APPEND)
        os.write(descriptor, f"{name}\n".encode())
        os.close(descriptor)

    shim = Shim(place, fault, at, told=told)
    code, story = bertkit_in_child(command.start(out), place, shim)
    outcome.codes[command.name, code] += 1
    if code not in ((-signal.SIGKILL, 0) if fault == "kill" else (0, 3)) or "Traceback" in story:
        return f"exit {code}: {story[-1500:]}"
    if error := _lost(out, finished.read_text().split()):
        return error
    elsewhere = place / "elsewhere" if fault != "kill" else None
    if not (out / "run.json").is_file():
        outcome.begun_again[command.name] += 1
    if command.resume is None:
        elsewhere = None
    words = command.goes_on(out, elsewhere)
    code, story = bertkit_in_child(words, place)
    if code != 0:
        return f"{words[:3]} after it: exit {code}: {story[-1500:]}"
    found = command.result(elsewhere or out)
    return None if found == wanted else f"the result is another: {found[:16]}, not {wanted[:16]}"


def _lost(out: Path, finished: Sequence[str]) -> str | None:
    """A message if a finished checkpoint that `latest` named no longer exists."""
    from bertkit.run.checkpoint import newest_valid_checkpoint

    if not finished or (out / "results.json").exists():
        return None
    newest = newest_valid_checkpoint(out / "checkpoints")
    if newest is None or newest.name < finished[-1]:
        return f"the checkpoint {finished[-1]} was finished, and the newest valid one is {newest}"
    return None


def main(fault: Fault, count: int, only: str | None = None) -> int:
    """Disturb every command; returns the number of unexpected outcomes."""
    import logging

    import torch

    torch.set_num_threads(1)
    logging.getLogger("bertkit").setLevel(logging.ERROR)
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as name:
        commands = made_commands(Path(name) / "home")
        names = [each for each in commands if only in (None, each)]
        names = [each for each in names if fault == "kill" or each != "tokenize"]
        _import_all(commands, Path(name) / "warm")
        for each in names:
            place = Path(name) / each.replace(" ", "-")
            place.mkdir()
            disturb(commands[each], fault, -(-count // len(names)), place, outcome)
            codes = {code: number for (of, code), number in outcome.codes.items() if of == each}
            print(
                f"{each}: {outcome.moments[each]} moments of {outcome.kinds[each]} kinds, exit codes {codes},"
                f" begun again {outcome.begun_again[each]}, wrong {len(outcome.wrong)}",
                flush=True,
            )
    print(f"{fault}: {outcome.moments.total()} moments, {len(outcome.wrong)} not as promised")
    return len(outcome.wrong)


def _import_all(commands: Mapping[str, Command], place: Path) -> None:
    """Run everything once here, so that no child has to import anything."""
    from bertkit.cli.app import run

    os.environ["BERTKIT_CACHE"] = str(place / "cache")
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        codes = [run(command.start(place / command.name.replace(" ", "-"))) for command in commands.values()]
    assert not any(codes), codes


if __name__ == "__main__":
    given: Any = sys.argv[1]
    sys.exit(bool(main(given, int(sys.argv[2]), *sys.argv[3:4])))

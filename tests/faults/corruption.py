"""Single corruptions of runs are each found and named by `runs verify`, or counted as harmless with the reason.

`python -m tests.faults.corruption 2400 [SEED]` makes a run of every kind and this many corruptions of a file's bytes,
length or presence, spread over all kinds of files.
"""

from __future__ import annotations

import os
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bertkit.errors import BertkitError
from bertkit.run.verify import verify_run

HARMS = ("a bit flipped", "a byte replaced", "cut off", "bytes appended", "deleted", "emptied")


@dataclass
class Findings:
    """Outcomes of the corruptions.

    Attributes:
        named: detected and named, by kind of file and kind of corruption.
        harmless: judged harmless, with the reason.
        missed: neither, a bug in bertkit.
    """

    named: Counter[tuple[str, str]] = field(default_factory=Counter)
    harmless: Counter[tuple[str, str]] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)

    def table(self) -> str:
        """Kinds of file with their numbers, in Markdown."""
        kinds = sorted({kind for kind, _ in (*self.named, *self.harmless)})
        lines = ["| file | " + " | ".join(HARMS) + " | harmless |", "|---" * (len(HARMS) + 2) + "|"]
        for kind in kinds:
            numbers = [self.named[kind, harm] for harm in HARMS]
            why = [f"{count} ({reason})" for (of, reason), count in self.harmless.items() if of == kind]
            lines.append(f"| {kind} | " + " | ".join(map(str, numbers)) + f" | {', '.join(why) or 0} |")
        return "\n".join(lines)


def kind_of(name: str) -> str:
    """A file's kind: its name without numbers or names of a run, a step or a machine."""
    if "events.out.tfevents" in name:
        return "tensorboard/events"
    name = re.sub(r"^.*runs/[^/]+/(?=.)", "", name)
    return re.sub(r"\d+", "N", name)


def corruptions(run: Path, others: Sequence[Path], count: int, generator: random.Random, findings: Findings) -> None:
    """Corrupt files of a run and of further directories, one at a time; each corruption is undone.

    Args:
        run: a finished run.
        others: further directories, such as its shards.
        count: number of corruptions.
        generator: source of randomness.
        findings: outcomes are added here.
    """
    files = [path for root in (run, *others) for path in sorted(root.rglob("*")) if path.is_file() or path.is_symlink()]
    files = [path for path in files if not any(each.is_symlink() for each in path.parents)]
    by_kind: dict[str, list[Path]] = {}
    for path in files:
        root = next(each for each in (run, *others) if path.is_relative_to(each))
        by_kind.setdefault(kind_of(path.relative_to(root).as_posix()), []).append(path)
    before = report(run)
    assert before == "", before
    kinds = sorted(by_kind)
    for number in range(count):
        kind = kinds[number % len(kinds)]
        path = generator.choice(by_kind[kind])
        harm = HARMS[(number // len(kinds)) % len(HARMS)]
        _one(run, path, kind, harm, generator, findings)
    assert report(run) == ""


def report(run: Path) -> str:
    """Everything that `runs verify` reports."""
    try:
        return "\n".join(verify_run(run).errors)
    except BertkitError as error:
        return str(error)


def _one(run: Path, path: Path, kind: str, harm: str, generator: random.Random, findings: Findings) -> None:
    if path.is_symlink():
        target = os.readlink(path)
        path.unlink()
        found = report(run)
        path.symlink_to(target)
        _note(found, path, kind, "deleted", findings)
        return
    content, status = path.read_bytes(), path.stat()
    harmed = damaged(content, harm, generator)
    if harmed == content:
        findings.harmless[kind, "empty file: nothing to damage so"] += 1
        return
    path.unlink() if harmed is None else path.write_bytes(harmed)
    try:
        found = report(run)
    finally:
        path.write_bytes(content)
        os.chmod(path, status.st_mode)
    if path.name == ".lock" and not found:
        findings.harmless[kind, "says which process holds the run; empty in meaning once none does"] += 1
        return
    _note(found, path, kind, harm, findings)


def _note(found: str, path: Path, kind: str, harm: str, findings: Findings) -> None:
    if str(path) in found or (path.name in found and str(path.parent.name) in found):
        findings.named[kind, harm] += 1
    else:
        findings.missed.append(f"{kind}, {harm}: {path}: {found or 'nothing found'}")


def damaged(content: bytes, harm: str, generator: random.Random) -> bytes | None:
    """A file's content after a corruption; None if the file is deleted."""
    if harm == "deleted":
        return None
    if harm == "emptied":
        return b""
    if harm == "bytes appended":
        return content + generator.randbytes(generator.randint(1, 40))
    if not content:
        return content
    place = generator.randrange(len(content))
    if harm == "cut off":
        return content[:place]
    other = content[place] ^ (1 << generator.randrange(8) if harm == "a bit flipped" else generator.randrange(1, 256))
    return content[:place] + bytes([other]) + content[place + 1 :]


def shards_of(run: Path) -> list[Path]:
    """The shards that a run read, if any."""
    from bertkit.run.directory import RunDirectory

    shards = RunDirectory.open(run).record.get("shards")
    return [Path(shards)] if isinstance(shards, str) else []


def main(count: int, seed: int, show: Callable[[str], None] = print) -> int:
    """All kinds of runs; returns the number of missed corruptions."""
    from tests.faults.made_runs import KINDS, made_run

    findings = Findings()
    with tempfile.TemporaryDirectory() as name:
        for kind in KINDS:
            run = made_run(Path(name), kind)
            corruptions(run, shards_of(run), count // len(KINDS), random.Random(f"{seed} {kind}"), findings)
            named, harmless = findings.named.total(), findings.harmless.total()
            show(f"{kind}: so far {named} named, {harmless} harmless, {len(findings.missed)} missed")
    show(findings.table())
    for each in findings.missed:
        show(f"missed: {each}")
    return len(findings.missed)


if __name__ == "__main__":
    sys.exit(bool(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)))

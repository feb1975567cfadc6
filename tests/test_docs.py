"""The pages: links lead somewhere, and the commands and options that are named exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from bertkit.cli.app import app
from bertkit.cli.commands import CommandGroup

CHECKOUT = Path(__file__).parents[1]
PAGES = [*CHECKOUT.glob("*.md"), *sorted((CHECKOUT / "docs").glob("*.md")), CHECKOUT / "benchmarks" / "README.md"]
FENCED = re.compile(r"^```[a-z]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MADE_BY_A_PAGE = {"scitail"}
"""Names that docs/add-a-task.md adds."""


class _Parsing:
    resilient_parsing = False


def anchors(page: Path) -> set[str]:
    """The headings as GitHub spells them in links."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def named(command: Any, words: list[str]) -> Any:
    """The command that the words begin with; None if a placeholder stands for it."""
    while isinstance(command, CommandGroup):
        if not words or words[0].startswith("-") or words[0].isupper() or words[0] in MADE_BY_A_PAGE:
            return None
        _, command, words = command.resolve_command(_Parsing(), words)
    return command


def commands(page: Path) -> list[list[str]]:
    """The words after `bertkit` of each command in a block or a sentence."""
    text = page.read_text(encoding="utf-8")
    lines = [line for block in FENCED.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    lines += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", FENCED.sub("", text))]
    found = (re.match(r"(?:\$ )?bertkit (.*)", line) for line in lines)
    return [shlex.split(match[1], comments=True) for match in found if match]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith(("http", "mailto:")):
            continue
        name, _, heading = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not heading or target.suffix != ".md" or heading in anchors(target), link


def test_commands_take_the_options() -> None:
    group = typer.main.get_command(app)
    wrong = []
    for page in PAGES:
        if page.name == "CHANGELOG.md":  # names what has since been renamed
            continue
        for words in commands(page):
            command = named(group, words)
            if command is None:
                continue
            known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)} | {"--help"}
            options = {word.partition("=")[0] for word in words if re.match("--[a-z]", word)}
            wrong += [f"{page.name}: {' '.join(words)}: {option}" for option in sorted(options - known)]
    assert not wrong

"""The table of published tasks in docs/finetuning.md names every task of the catalogue, its folder and its files."""

from __future__ import annotations

import re
from pathlib import Path

from bertkit.tasks.catalogue import TASKS

PAGE = (Path(__file__).parents[2] / "docs" / "finetuning.md").read_text(encoding="utf-8")
SECTION = PAGE.split("\n## Published tasks\n")[1].split("\n## ")[0]
ROWS = [row.split(" | ") for row in SECTION.splitlines() if row.startswith("| `")]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_table_names_every_published_task_and_no_other() -> None:
    listed = sorted(name for first, *_ in ROWS for name in names(first))
    assert listed == sorted(TASKS), "docs/finetuning.md, Published tasks: one row for each"


def test_the_table_names_the_folders_and_files() -> None:
    for first, _, _, folder, files in ROWS:
        for name in names(first):
            spec = TASKS[name]
            assert spec.folders[0] in names(folder), name
            if files.startswith("the same"):  # as in the row above
                continue
            wanted = {patterns[0] for patterns in spec.splits.values() if patterns}
            shown = set(names(files))
            assert wanted <= shown or "and so on" in files, (name, wanted - shown)


def test_only_the_tasks_named_as_such_lack_a_copy_on_the_hub() -> None:
    lacking = {name for name, spec in TASKS.items() if spec.hub is None and spec.kind != "embedding"}
    named = {name for name in TASKS if name == "codah" or name.startswith("babylm-")}
    assert lacking == named, "give the task a `hub` in catalogue.yaml, or name it in docs/finetuning.md and here"
    assert "except for `codah` and `babylm-*`" in SECTION

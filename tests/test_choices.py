"""Every choice that a user has, by its name in a recipe or on the command line, has a row on the page of its kind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from bertkit.cli.app import app
from bertkit.cli.commands import CommandGroup
from bertkit.cli.eval import PUBLISHED
from bertkit.cli.probe import KINDS
from bertkit.data.layouts import AnyLayout
from bertkit.distillation.terms import LABELS, TERMS
from bertkit.finetuning.methods import AnyMethod
from bertkit.finetuning.recipe import _OWN_METRICS
from bertkit.generation.settings import Method
from bertkit.objectives.masking import AnyUnits
from bertkit.objectives.registry import OBJECTIVES
from bertkit.study.measure_settings import AnyMeasure
from bertkit.tasks.augmentation import AnyAugmentation
from bertkit.tasks.base import Task
from bertkit.tasks.choice import Choice
from bertkit.tasks.classification import Classification, MultiLabelClassification, Regression
from bertkit.tasks.embedding.losses import AnyLoss
from bertkit.tasks.embedding.task import Embedding
from bertkit.tasks.span import Span
from bertkit.tasks.tagging import Tagging
from bertkit.training.optimizers import AnyOptimizerConfig
from bertkit.training.schedules import AnySchedule
from tests.test_docs import PAGES, commands

NAME = re.compile(r"`([\w-]+)`")
DOCS = Path(__file__).parents[1] / "docs"
CHOICES: list[tuple[str, str, Any]] = [
    ("pretraining.md", "layout", AnyLayout),
    ("pretraining.md", "objective", OBJECTIVES),
    ("pretraining.md", "units", AnyUnits),
    ("optimisation.md", "`optimizer.name`", AnyOptimizerConfig),
    ("optimisation.md", "`schedule.name`", AnySchedule),
    ("finetuning.md", "method", AnyMethod),
    ("sentence-training.md", "losses", AnyLoss),
    ("distillation.md", "term", {LABELS, *TERMS}),
    ("distillation.md", "`augmentation.name`", AnyAugmentation),
    ("generation.md", "`--method`", get_args(Method)),
    ("probes.md", "KIND", KINDS),
    ("studies.md", "kind", AnyMeasure),
]
"""The page, the heading of the column with the names, and the registry."""
TASKS: dict[str, type[Task]] = {
    "classification": Classification,
    "multi_label": MultiLabelClassification,
    "regression": Regression,
    "tagging": Tagging,
    "span": Span,
    "choice": Choice,
    "embedding": Embedding,
}


def names(choices: Any) -> set[str]:
    """The names in a registry: its own, or those that select a variant of a discriminated union."""
    if not hasattr(choices, "__metadata__"):
        return set(choices)
    union, (by, *_) = choices.__origin__, choices.__metadata__
    key = by.discriminator if isinstance(by.discriminator, str) else "name"
    variants = [get_args(each)[0] if hasattr(each, "__metadata__") else each for each in get_args(union)]
    return {name for each in variants for name in get_args(each.model_fields[key].annotation)}


def rows_of(page: str, heading: str) -> Iterator[list[list[str]]]:
    """The rows of each table of a page that has a column with this heading, from that column on."""
    for table in re.findall(r"(?:^\|.*\n)+", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in table.splitlines())
        if heading in head:
            yield [row[head.index(heading) :] for row in rows]


@pytest.mark.parametrize(("page", "heading", "choices"), CHOICES, ids=[f"{page}-{head}" for page, head, _ in CHOICES])
def test_every_choice_has_a_row(page: str, heading: str, choices: Any) -> None:
    cells = [row[0] for rows in rows_of(page, heading) for row in rows]
    found, known = {name for cell in cells for name in NAME.findall(cell)}, names(choices)
    where = f"docs/{page}, the table with a column {heading}"
    assert not known - found, f"{where}: add {sorted(known - found)}"
    assert not found - known, f"{where}: remove {sorted(found - known)}"


def test_the_scores_of_every_kind_of_task_are_listed_with_the_defaults() -> None:
    where = "docs/finetuning.md, table `task.metrics`"
    (table,) = rows_of("finetuning.md", "`task.kind`")
    rows = {row[0].strip("`"): row[1:] for row in table}
    assert rows.keys() == TASKS.keys() == _OWN_METRICS.keys(), f"{where}: one row for each kind"
    for kind, task in TASKS.items():
        default, others = (set(NAME.findall(cell)) for cell in rows[kind])
        assert set(_OWN_METRICS[kind]) <= default, f"{where}, {kind}: the metrics of a task that names none"
        assert default | others == task.metric_of.keys(), f"{where}, {kind}: all of {task.__name__}.metric_of"


def leaves(group: Any, *before: str) -> Iterator[tuple[str, ...]]:
    """The commands of a group and of the groups in it, without those that are published tasks."""
    for name in set(group.list_commands(None)).difference(PUBLISHED):
        _, command, _ = group.resolve_command(None, [name])
        yield from leaves(command, *before, name) if isinstance(command, CommandGroup) else [(*before, name)]


def test_every_command_is_shown_on_a_page() -> None:
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    shown = {tuple(words[:depth]) for page in pages for words in commands(page) for depth in (1, 2)}
    missing = [" ".join(command) for command in leaves(typer.main.get_command(app)) if command not in shown]
    assert not missing, f"the README or a page of docs/ has to show `bertkit {missing[0]}`: {missing}"

"""Commands that read a table also read a data set of the Hub, here one that is in the cache already."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.tasks.tiny_task import reviews, write_model

from bertkit.tasks.readers.hub_table import HubTable

Bertkit = Callable[..., Any]
TEXTS = [text for text, _ in reviews(9, 4)]


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[HubTable]:
    """The tables that were asked for; each is nine texts."""
    file = tmp_path / "texts-train.parquet"
    columns = {"body": TEXTS, "anchor": TEXTS, "positive": [*TEXTS[1:], TEXTS[0]], "label": list("010101010")}
    pq.write_table(pa.table(columns), file)
    asked: list[HubTable] = []

    def give(table: HubTable, *, offline: bool = False) -> Path:
        asked.append(table)
        return file

    monkeypatch.setattr(HubTable, "fetched", give)
    return asked


@pytest.mark.parametrize(
    ("arguments", "split", "lines"),
    [
        (("embed", "hub:org/texts", "--text", "body"), "train", 9),
        (("search", "--corpus", "hub:org/texts:en", "--text", "body", "--top", "2", TEXTS[0]), "train", 1),
        (("mine-negatives", "--pairs", "hub:org/texts::extra"), "extra", 1),
        (("eval", "pairs", "--data", "hub:org/texts", "--columns", "anchor,positive,label"), "test", 1),
        (("eval", "triplets", "--data", "hub:org/texts", "--columns", "body,anchor,positive"), "test", 1),
        (("eval", "clustering", "--data", "hub:org/texts::train", "--columns", "body,label"), "train", 1),
    ],
)
def test_a_table_of_the_hub_is_read_like_a_file(
    arguments: tuple[str, ...],
    split: str,
    lines: int,
    fetched: list[HubTable],
    bertkit: Bertkit,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BERTKIT_RUNS", str(tmp_path / "runs"))
    model = write_model(tmp_path / "model")
    done = bertkit(*arguments, "--model", model, "--json")
    assert done.code == 0, done.stderr
    assert len([json.loads(line) for line in done.stdout.splitlines()]) >= lines
    (table,) = fetched
    assert (table.repository, table.split) == ("org/texts", split)

"""Text, tasks and tokenizers of the Hub, with its own clients and a small local server.

Models are in tests/models/files/test_hub_fetch.py.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from bertkit.tasks.examples import Example, TaggedExample, TextExample
from bertkit.text.tokenizer_files import save_tokenizer
from tests.hub_server import Hub, serving
from tests.tasks.tiny_task import tiny_tokenizer

DOCUMENTS = [[f"Document {number} begins.", f"It has a line {number * 7}."] for number in range(11)]
CARD = """---
configs:
- config_name: small
  data_files:
  - {split: train, path: small/train.jsonl}
  - {split: test, path: small/test.jsonl}
---
"""
GLUE_CARD = """---
configs:
- config_name: rte
  data_files:
  - {split: validation, path: rte/validation-*}
dataset_info:
- config_name: rte
  features:
  - {name: sentence1, dtype: string}
  - {name: sentence2, dtype: string}
  - {name: label, dtype: {class_label: {names: {'0': entailment, '1': not_entailment}}}}
  - {name: idx, dtype: int32}
---
"""
PAIRS = [
    TextExample("5", "A cat sat.", "A cat.", "entailment"),
    TextExample("9", "It rains.", "It is dry.", "not_entailment"),
]
WORDS = {split: TaggedExample("0", (split, "Ada"), ("O", "B-PER"), 0) for split in ("train", "validation")}


def shown(*examples: Example) -> list[str]:
    return [repr(example) for example in examples]


READ: dict[str, Any] = {
    "text=hub:org/data:small": DOCUMENTS,
    "text=hub:org/data:small:test": DOCUMENTS[:3],
    "text=hub:org/plain": DOCUMENTS[:3],
    "text=hub:org/data@v2": DOCUMENTS[:5],
    "copied=org/plain": 3,
    "offline-text=hub:org/plain": DOCUMENTS[:3],
    "task=rte:dev": shown(*PAIRS),
    "offline-task=rte:dev": shown(*PAIRS),
    "task=conll2003:dev": shown(WORDS["validation"]),
    "task=conll2003:train": shown(WORDS["train"]),
    "offline-task=conll2003:train": shown(WORDS["train"]),
    "tokenizer=org/tokenizer": 60,
    "offline-tokenizer=org/tokenizer": 60,
    "unreachable tokenizer=org/tokenizer": 60,
}
REFUSED = {
    "text=hub:org/data:large": "hub:org/data:large:train: cannot be read .*'large' not found.*'small'",
    "text=hub:org/data:small:dev": "hub:org/data:small:dev: cannot be read .*dev.*'train', 'test'",
    "text=hub:org/data@v9": "hub:org/data@v9: this data set on the Hub has no branch, tag or commit with this name",
    "text=hub:org/absent": "hub:org/absent: the Hub has no data set with this name; check the name, and set HF_TOKEN",
    "text=hub:org/gated": "hub:org/gated: access to this data set on the Hub requires accepting its terms",
    "text=hub:a b": "hub:a b: not a valid name for a data set on the Hub",
    "offline-text=hub:org/data:small": "hub:org/data:small:train: `datasets` has no copy of commit 0123456789ab, ",
    "offline-text=hub:org/other": "hub:org/other: not in the local Hub cache while the Hub cannot be reached",
    "task=snli:dev": "hub:stanfordnlp/snli, plain_text, validation: cannot be loaded: .*--data-dir",
    "offline-task=imdb:test": "hub:stanfordnlp/imdb, .*not in the local cache and the network is off",
    "tokenizer=org/absent": "'org/absent': no file or directory .*the Hub has no model with this name",
    "offline-tokenizer=org/other": "'org/other': .*not in the local Hub cache .*go online once",
    "unreachable text=hub:org/other": "hub:org/other: not in the local Hub cache while the Hub cannot be reached",
    "unreachable tokenizer=org/other": "'org/other': .*while the Hub cannot be reached",
}


def json_lines(documents: list[list[str]]) -> bytes:
    return b"".join(json.dumps({"body": "\n".join(lines)}).encode() + b"\n" for lines in documents)


def parquet(**columns: list[Any]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


def hub_with(tokenizer: Path) -> Hub:
    pairs = {
        "sentence1": [example.text for example in PAIRS],
        "sentence2": [example.text_pair for example in PAIRS],
        "label": [0, 1],
        "idx": [5, 9],
    }
    tags = {
        f"conll2003/{split}/0000.parquet": parquet(id=["0"], tokens=[example.words], ner_tags=[example.tags])
        for split, example in WORDS.items()
    }
    data = {"README.md": CARD.encode(), "small/train.jsonl": json_lines(DOCUMENTS)}
    few = json_lines(DOCUMENTS[:3])
    return Hub(
        {
            "datasets/org/data": {**data, "small/test.jsonl": few},
            "datasets/org/data@v2": {"train.jsonl": json_lines(DOCUMENTS[:5])},
            "datasets/org/plain": {"train.jsonl": few},
            "datasets/nyu-mll/glue": {"README.md": GLUE_CARD.encode(), "rte/validation-0.parquet": parquet(**pairs)},
            "datasets/eriktks/conll2003": {"conll2003.py": b"raise SystemExit('never run')\n"},
            "datasets/eriktks/conll2003@refs/convert/parquet": tags,
            "org/tokenizer": {path.name: path.read_bytes() for path in tokenizer.iterdir()},
        },
        gated=("datasets/org/gated",),
    )


def ask(url: str, home: Path, words: Sequence[str]) -> list[Any]:
    environment = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
    environment |= {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}
    environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, str(Path(__file__).with_name("ask_hub.py")), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    answers: list[Any] = json.loads(done.stdout)
    return answers


@pytest.fixture(scope="module")
def hub_and_answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Hub, dict[str, Any]]:
    root = tmp_path_factory.mktemp("hub")
    save_tokenizer(tiny_tokenizer(vocab_size=60), root / "tokenizer")
    hub, home = hub_with(root / "tokenizer"), root / "home"
    reached = [word for word in (*READ, *REFUSED) if not word.startswith("unreachable ")]
    unreached = [word for word in (*READ, *REFUSED) if word.startswith("unreachable ")]
    with serving(hub):
        answers = dict(zip(reached, ask(hub.url, home, reached), strict=True))
    # The server is gone: no process listens at its address.
    asked = [word.removeprefix("unreachable ") for word in unreached]
    answers |= zip(unreached, ask(hub.url, home, asked), strict=True)
    return hub, answers


@pytest.mark.parametrize("word", READ)
def test_what_the_hub_has_is_read(hub_and_answers: tuple[Hub, dict[str, Any]], word: str) -> None:
    """A configuration, a split, files without a card; a program's Parquet export; then from the cache."""
    assert hub_and_answers[1][word] == READ[word]


def test_what_is_in_the_cache_is_not_fetched_again(hub_and_answers: tuple[Hub, dict[str, Any]]) -> None:
    hub, _ = hub_and_answers
    for path in ("rte/validation-0.parquet", "conll2003/train/0000.parquet", "tokenizer.json"):
        assert len(hub.downloads(path)) == 1, path


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_be_had_is_said(hub_and_answers: tuple[Hub, dict[str, Any]], word: str) -> None:
    answer = hub_and_answers[1][word]
    assert isinstance(answer, dict), answer
    assert re.search(REFUSED[word], answer["error"], re.DOTALL), answer

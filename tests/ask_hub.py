"""Queries the Hub in a separate process, because its client reads its settings only once; argv is a list of KIND=NAME.

KIND is `text` (a source's documents), `task` (TASK:SPLIT, its examples), `tokenizer` (its vocabulary size) or `copied`
(the rows of a data set that `datasets` copies into its cache); the prefix `offline-` prevents any request. Prints one
JSON list with each answer or error.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import datasets

from bertkit.errors import DataError
from bertkit.tasks.catalogue import TASKS
from bertkit.tasks.readers.hub import read_hub
from bertkit.text.source_options import SourceOptions
from bertkit.text.sources import open_corpus
from bertkit.text.tokenizer_files import load_tokenizer


def asked(kind: str, name: str, *, offline: bool) -> Any:
    if kind == "text":
        return list(open_corpus([name], SourceOptions(text_field="body"), offline=offline).documents())
    if kind == "task":
        task, _, split = name.partition(":")
        return [repr(example) for example in read_hub(TASKS[task], split, offline=offline).examples]
    if kind == "copied":
        return len(datasets.load_dataset(name, split="train"))
    return load_tokenizer(name, offline=offline).vocab_size


def main() -> None:
    answers = []
    for word in sys.argv[1:]:
        kind, _, name = word.partition("=")
        try:
            answers.append(asked(kind.removeprefix("offline-"), name, offline=kind.startswith("offline-")))
        except DataError as error:
            answers.append({"error": str(error)})
    print(json.dumps(answers))


if __name__ == "__main__":
    main()

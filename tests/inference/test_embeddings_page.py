"""The commands of docs/embeddings.md work unchanged on small files with the names used there."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bertkit.models.late_interaction import LateInteraction, write_token_files
from bertkit.models.sentence_files import write_sentence_files
from bertkit.models.text_reading import TextReading
from bertkit.text.tokenizer_files import load_tokenizer
from tests.evaluation.embeddings.test_embedding_suites import write_folder, write_sets
from tests.tasks.tiny_task import reviews, write_model

PAGE = Path(__file__).parents[2] / "docs" / "embeddings.md"
TEXTS = list(dict.fromkeys(text for text, _ in reviews(40, seed=2)))


def commands() -> list[list[str]]:
    """The lines of `embed`, `search`, `mine-negatives` and the suites of sentence vectors."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [shlex.split(line, comments=True)[1:] for block in blocks for line in block.splitlines()]
    known = {("eval", suite) for suite in ("sts", "pairs", "triplets", "retrieval")}
    return [words for words in lines if words[0] in ("embed", "search", "mine-negatives") or tuple(words[:2]) in known]


def test_every_command_of_the_page_works(
    bertkit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("faiss")
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "MODEL")
    sparse = write_model(tmp_path / "SPLADE", heads=("masked_lm",))
    width = load_tokenizer(sparse).vocab_size
    write_sentence_files(sparse, width=width, pooling=("splade",), normalise=False, max_tokens=24)
    late = write_model(tmp_path / "COLBERT")
    m3 = write_model(tmp_path / "BAAI" / "bge-m3")
    for name, outputs in (("sparse", 1), ("colbert", 8)):
        torch.save(torch.nn.Linear(30, outputs).state_dict(), m3 / f"{name}_linear.pt")
    write_token_files(late, torch.eye(8, 30), LateInteraction(), max_tokens=24, reading=TextReading())
    write_sets(tmp_path / "DIR")
    write_folder(tmp_path / "beir-folder")

    def table(name: str, header: str, rows: list[str]) -> None:
        (tmp_path / name).write_text("\n".join([header, *rows]) + "\n")

    table("texts.txt", TEXTS[0], TEXTS[1:])
    table("reviews.csv", "body", TEXTS)
    table("pairs.csv", "anchor,positive", [f"{TEXTS[n]},{TEXTS[n + 6]}" for n in range(6)])
    table("my-pairs.csv", "first,second,score", [f"{TEXTS[n]},{TEXTS[n + 1]},{n}" for n in range(6)])
    table("duplicates.csv", "sentence1,sentence2,label", [f"{TEXTS[n]},{TEXTS[n + 1]},{n % 2}" for n in range(6)])
    table("triplets.csv", "anchor,positive,negative", [f"{TEXTS[n]},{TEXTS[n]},{TEXTS[n + 1]}" for n in range(6)])
    articles = [json.dumps({"text": text, "year": 2019 + n % 2, "language": "en"}) for n, text in enumerate(TEXTS)]
    table("articles.jsonl", articles[0], articles[1:])
    words = sorted({word for text in TEXTS for word in text.split()})
    (tmp_path / "glove.txt").write_text("".join(f"{word} {n % 5} {n % 3} 1\n" for n, word in enumerate(words)))
    found = commands()
    assert len(found) == 25
    for words in found:
        done = bertkit(*words)
        assert done.code == 0, (words, done.stderr)


def documented() -> dict[str, list[str]]:
    """The keys that the page lists, by the first words of the command."""
    section = PAGE.read_text(encoding="utf-8").partition("### What `--json` prints\n")[2].partition("\n## ")[0]
    rows = [row.split(" | ") for row in section.splitlines() if row.startswith("| `")]
    return {command.lstrip("| "): re.findall(r"`([a-z0-9]+)`", keys) for command, keys in rows}


def test_the_documents_have_the_keys_that_the_page_lists(bertkit: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    model = write_model(tmp_path / "MODEL")
    corpus, pairs, index = tmp_path / "texts.txt", tmp_path / "pairs.csv", tmp_path / "index"
    corpus.write_text("\n".join([*TEXTS, "word " * 90]) + "\n")
    pairs.write_text("anchor,positive\n" + "".join(f"{TEXTS[n]},{TEXTS[n + 6]}\n" for n in range(6)))
    shared = ("--model", model, "--json")

    def printed(*words: object) -> Any:
        done = bertkit(*words, *shared)
        assert done.code == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    listed = documented()
    (lines, written, built, hits, alike, negatives, mined) = listed.values()
    assert list(printed("embed", corpus)[0]) == lines
    (document,) = printed("embed", corpus, "--out", tmp_path / "v.npy", "--long", "window")
    assert list(document) == written
    assert document["windowed"] == 1
    (document,) = printed("embed", corpus, "--out", tmp_path / "w.npy")
    assert [*document, "windowed"] == written
    assert (document["cut"], document["count"]) == (1, len(TEXTS) + 1)
    (document,) = printed("search", "--corpus", corpus, "--index", index)
    assert (list(document), document["kind"]) == (built, "exact")
    (found,) = printed("search", "--index", index, "a fine list")
    assert [*found[0], *found[0]["hits"][0]] == hits
    (found,) = printed("search", "--index", index, "--pairs")
    assert list(found[0]) == alike
    assert list(printed("mine-negatives", "--pairs", pairs, "--corpus", corpus)[0]) == negatives
    (document,) = printed("mine-negatives", "--pairs", pairs, "--corpus", corpus, "--out", tmp_path / "t.jsonl")
    assert list(document) == mined

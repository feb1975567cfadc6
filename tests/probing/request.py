"""Shared by tests of probes: a tiny model on disk, text and a treebank to read, a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bertkit.models.headed import HeadedModel
from bertkit.probing.run import ProbeArguments
from bertkit.text.tokenizer import Tokenizer
from tests.probing.tiny_models import save_tiny, tiny_model, tiny_tokenizer
from tests.text.corpora import english


def write_sentences(path: Path, sentences: list[str] | None = None) -> Path:
    """Plain text, seven sentences per document; 83 of artificial English if none are given."""
    lines = english(83, seed=3) if sentences is None else sentences
    documents = ["\n".join(lines[first : first + 7]) for first in range(0, len(lines), 7)]
    path.write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    return path


def write_treebank(path: Path, sentences: list[list[str]]) -> Path:
    """CoNLL-U in which every word depends on the previous one, the first on the root."""
    blocks = []
    for number, words in enumerate(sentences, 1):
        rows = [f"# sent_id = s{number}"]
        rows += [
            f"{place}\t{word}\t_\tX\t_\t_\t{place - 1}\t{'dep' if place > 1 else 'root'}\t_\t_"
            for place, word in enumerate(words, 1)
        ]
        blocks.append("\n".join(rows) + "\n\n")
    path.write_text("".join(blocks), encoding="utf-8")
    return path


def request_for(
    directory: Path,
    data: Path | None = None,
    *,
    model: HeadedModel | None = None,
    tokenizer: Tokenizer | None = None,
    **more: Any,
) -> ProbeArguments:
    """A request for a model saved as `directory/model`, by default a tiny BERT; runs go to `directory/runs`.

    Finished runs are measured again. `more` goes into the request: `models`, `batch_tokens`, `run_dir`, ...
    """
    tokenizer = tiny_tokenizer() if tokenizer is None else tokenizer
    path = directory / "model"
    if "models" not in more and not path.exists():
        save_tiny(tiny_model(tokenizer) if model is None else model, tokenizer, path)
    fields = {"models": [str(path)], "device": "cpu", "batch_tokens": 300, "command": ["x"], "fresh": True, **more}
    return ProbeArguments(data=[] if data is None else [str(data)], runs_root=directory / "runs", **fields)

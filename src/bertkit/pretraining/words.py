"""Number of words that a run has read, which BabyLM limits and which decides when models are saved.

Charpentier et al. 2025, arXiv:2502.10645: words are separated by white space, every pass counts them again, and models
are saved after each million words up to ten, then after each ten million. Siblings: trainer.py saves the models, run.py
counts the words of the text.

Tokenising and packing lose the ends of words, so words are counted in the text: a run has read the words of its
training text times the number of passes made. This depends only on the step: a resumed run, or one on several ranks,
saves the same models. Within a pass it is exact only if all samples have equally many words per token.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertkit.data.config import DataConfig
from bertkit.errors import DataError, UsageError
from bertkit.pretraining.stage_run import StageRun
from bertkit.progress import Progress
from bertkit.text.corpus import Corpus
from bertkit.training.engine_config import EngineConfig

log = logging.getLogger(__name__)

WORDS = "words"
"""The entry of run.json with the words of the text, if they were counted."""
FOLDER = "models"
"""The directory of a run with the saved models."""
CLOSE = 0.9
"""A run that ends with this share of a mark's words saves its last model for that mark."""


def needs_words(data: DataConfig, engine: EngineConfig) -> bool:
    """Whether anything in a recipe with these settings depends on the words of the text."""
    return data.max_words is not None or bool(engine.models_at_words)


def count_words(corpus: Corpus, progress: Progress) -> int:
    """Number of words in the whole text, separated by white space."""
    count = 0
    with progress("count words", unit="words") as meter:
        for block in corpus.blocks():
            count += sum(len(line.split()) for _, lines in block.parts for line in lines)
            meter.update(count)
    return count


def check_words(data: DataConfig, words: int) -> None:
    """Raise DataError if the text has more words than `data.max_words` allows."""
    limit = data.max_words
    if limit is not None and words > limit:
        raise DataError(
            f"{', '.join(data.sources)}: {words:,} words separated by white space, {words - limit:,} more than"
            f" data.max_words allows ({limit:,}); remove some text, or lift the limit with --set data.max_words=null"
        )


def check_countable(data: DataConfig, engine: EngineConfig) -> None:
    """Raise UsageError if words are to be counted in token shards, which is impossible."""
    if needs_words(data, engine) and data.is_tokenised:
        key = "engine.models_at_words" if data.max_words is None else "data.max_words"
        raise UsageError(
            f"{key}: {data.sources[0]} contains tokens, whose words cannot be counted; give the text itself, or set"
            f" {key} to {'[]' if key.startswith('engine') else 'null'}"
        )


def warn_of_unexpected_files(expected: Sequence[str], corpus: Corpus, *, sources: Sequence[str], name: str) -> None:
    """Warn of files that a recipe does not expect, and of missing ones.

    Args:
        expected: its `engine.expected_files`; if empty, any files are fine.
        corpus: its text.
        sources: of the text, for the message.
        name: of the recipe, for the message.
    """
    if not expected:
        return
    found = {Path(reader.name).name: Path(reader.name).name.partition(".")[0] for reader in corpus.readers}
    others = [file for file, stem in found.items() if stem not in expected]
    missing = [name for name in expected if name not in found.values()]
    parts = ([f"has {', '.join(others)}"] if others else []) + ([f"lacks {', '.join(missing)}"] if missing else [])
    if parts:
        log.warning(
            "%s: not the text that recipe %s expects (engine.expected_files): it %s. Scores are not comparable with"
            " those of models trained on that text",
            *(", ".join(sources), name, " and ".join(parts)),
        )


def passes_before(stages: Sequence[StageRun], step: int) -> float:
    """How many times the updates before this one have read the training text, over all stages."""
    passes = 0.0
    for each in stages:
        first, end = each.stage.first_step, min(step, each.stage.end_step)
        if end > first:
            passes += each.stage.sequences(first, end) / each.batches.stream.epoch_length(0)
    return passes


@dataclass(frozen=True)
class WordsRead:
    """The number of words that a run has read before each of its updates.

    Attributes:
        stages: of the run.
        text_words: of the whole text, including held-out text.
        steps: of the run.
    """

    stages: Sequence[StageRun]
    text_words: int
    steps: int

    @property
    def training_words(self) -> float:
        """Words read in one pass, without held-out text."""
        stream = self.stages[0].batches.stream
        return self.text_words * stream.tokens / stream.shards.tokens

    def before(self, step: int) -> int:
        """Words read by the updates before this one; given the number of steps, words read by the whole run."""
        return int(self.training_words * passes_before(self.stages, step))

    def due(self, step: int, marks: Sequence[int]) -> list[int]:
        """Marks that are reached by the update after which the run has made this number of steps.

        The last update also serves a mark of which it reaches only the share `CLOSE`: the limit of ten passes keeps a
        run just below the hundred million words that it is allowed.
        """
        before, read = self.before(step - 1), self.before(step)
        return [mark for mark in marks if before < mark and (CLOSE if step == self.steps else 1) * mark <= read]

    def steps_of(self, marks: Sequence[int]) -> dict[int, int]:
        """The step after which each mark's model is saved; marks that the run does not reach are left out."""
        numbers = range(self.steps + 1)
        found = {mark: bisect_left(numbers, mark, key=self.before) for mark in marks}
        return {mark: min(step, self.steps) for mark, step in found.items() if CLOSE * mark <= self.before(self.steps)}


def milestone_name(words: int) -> str:
    """The directory name of a saved model: 3M, 250k or 1234 words."""
    for size, letter in ((1_000_000, "M"), (1_000, "k")):
        if words >= size and words % size == 0:
            return f"{words // size}{letter}"
    return str(words)


def words_of_milestone(name: str) -> int | None:
    """The inverse of `milestone_name`; None for any other name."""
    number, size = (name[:-1], {"M": 1_000_000, "k": 1_000}[name[-1]]) if name[-1:] in ("M", "k") else (name, 1)
    return int(number) * size if number.isascii() and number.isdigit() else None


def kept_document(read: WordsRead, marks: Sequence[int]) -> dict[str, Any]:
    """The words in results.json: those of the text, those read, and the saved models."""
    steps = read.steps_of(marks)
    models = [
        {"words": mark, "read": read.before(step), "step": step, "directory": f"{FOLDER}/{milestone_name(mark)}"}
        for mark, step in steps.items()
    ]
    not_reached = [mark for mark in marks if mark not in steps]
    return {"text": read.text_words, "read": read.before(read.steps), "models": models, "not_reached": not_reached}

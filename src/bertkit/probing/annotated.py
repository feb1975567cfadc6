"""Shared by probes that train on annotated sentences: reading files, sampling sentences, alignment, states on disk.

Annotations are per word. A sentence is left out, counted and named in a note if the tokenizer does not keep its words
one for one, or if it is longer than the model's maximum length. Used by layers/, structure/ and senses/, which read
different files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from bertkit.data.random import Draw
from bertkit.errors import DataError, UsageError
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.files import sha256_of
from bertkit.models.headed import HeadedModel
from bertkit.models.hook_points import point_shapes
from bertkit.probing.run import ProbeArguments
from bertkit.probing.sentences import EncodedSentence, Sentence, TextEncoder
from bertkit.probing.state_store import StateStore, collect_states

NOT_ALIGNED = "sentences of which the tokenizer gives back another number of words (left out)"
_HELD_OUT = 0.2
_BYTES = 4
"""Bytes of a float32."""


class Annotated(Protocol):
    """A sentence with annotated words."""

    @property
    def id(self) -> str: ...

    @property
    def words(self) -> tuple[str, ...]: ...


Example = TypeVar("Example", bound=Annotated)
Item = TypeVar("Item")


def hashes_of(train: Sequence[Path], test: Sequence[Path] = ()) -> dict[str, str]:
    """Hash of each file's content, its use (training or testing) and its place, by name: among several, a test file
    belongs to the training file in the same place."""
    hashes = {}
    for use, paths in (("", train), ("test", test)):
        for number, path in enumerate(paths):
            context = " ".join(each for each in (use, str(number or "")) if each)
            digest = sha256_of(path)
            hashes[f"{path} (test)" if use else str(path)] = (
                hashlib.sha256(f"{context} {digest}".encode()).hexdigest() if context else digest
            )
    return hashes


def drawn(examples: Sequence[Item], most: int, draw: Draw, purpose: str) -> list[Item]:
    """At most `most` of the examples, drawn uniformly, in their original order."""
    key = draw.uniform(purpose, sample=np.arange(len(examples)))
    return [examples[number] for number in np.sort(np.argsort(key, kind="stable")[:most]).tolist()]


def train_and_test(
    examples: Sequence[Item], others: Sequence[Item] | None, most: int, most_test: int, draw: Draw
) -> tuple[list[Item], list[Item]]:
    """At most so many examples for training and for testing, drawn from two files. If `others` is None, a fifth of the
    one file is held out for testing."""
    if others is None:
        key = draw.uniform("held out", sample=np.arange(len(examples)))
        held_out = set(np.argsort(key, kind="stable")[: max(1, round(_HELD_OUT * len(examples)))].tolist())
        others = [each for number, each in enumerate(examples) if number in held_out]
        examples = [each for number, each in enumerate(examples) if number not in held_out]
    return drawn(examples, most, draw, "train"), drawn(others, most_test, draw, "test")


def align(encoder: TextEncoder, examples: Sequence[Example]) -> list[tuple[Example, EncodedSentence]]:
    """The sentences whose words the model can all read; the encoder's notes count and name the others."""
    pairs = []
    for encoded in encoder.encode(Sentence(each.id, words=each.words) for each in examples):
        example = examples[encoded.number]
        if len(encoded.words) == len(example.words):
            pairs.append((example, encoded))
        else:
            encoder.notes.add(NOT_ALIGNED, f"{example.id}: {len(example.words)} words, {len(encoded.words)} given back")
    return pairs


def check_aligned(pairs: Sequence[object], encoder: TextEncoder, source: str, least: int) -> None:
    """Check that enough sentences are left.

    Raises:
        DataError: too few; with the reasons why sentences were left out.
    """
    if len(pairs) < least:
        why = f" ({encoder.notes})" if encoder.notes.counts else ""
        raise DataError(f"{source}: {len(pairs)} sentences are left, at least {least} are needed{why}")


def check_store(layers: int, rows: int, width: int, store_gb: float) -> None:
    """Check that the states fit on disk.

    Raises:
        UsageError: they do not; with the disk space they would take.
    """
    needed = layers * rows * width * _BYTES / 1e9
    if needed > store_gb:
        raise UsageError(
            f"states of {rows:,} words in {layers} layers take {needed:.1f} GB of disk, more than --store-gb"
            f" {store_gb:g}; lower --sentences or raise --store-gb"
        )


def width_of(model: HeadedModel, points: Sequence[str]) -> int:
    """D, the width of the states at the last of these points."""
    return point_shapes(model)[points[-1]][1]


def kept_states(
    request: ProbeArguments,
    subject: LoadedModel,
    sentences: Sequence[EncodedSentence],
    points: Sequence[str],
    *,
    wanted: Sequence[Sequence[int]] | None = None,
) -> StateStore:
    """The states of these sentences, kept on the run's disk until the store is closed; see `collect_states`."""
    return collect_states(
        subject.model,
        sentences,
        points,
        request.run_dir or request.runs_root,
        request.engine(),
        wanted=wanted,
        progress=request.progress,
    )

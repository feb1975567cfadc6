"""What probes that learn from annotated sentences share: files for training and testing, draws, alignment, states.

Own design. Annotations are by word; a sentence whose words the tokenizer does not give back one for one, or that is
longer than the model reads, is left out whole, counted and named. Siblings: jobs/probing/layers.py, structure.py
and senses.py, which read different files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from bertkit.data.batch import PackedBatch
from bertkit.data.random import Draw
from bertkit.errors import DataError, UsageError
from bertkit.evaluation.loaded_model import ProbedModel
from bertkit.files import sha256_of
from bertkit.models.headed import HeadedModel
from bertkit.models.recorder import point_shapes
from bertkit.probing.run import ProbeRequest
from bertkit.probing.sentences import EncodedSentence, Sentence, TextEncoder
from bertkit.probing.state_store import StateStore, collect_states, store_bytes

NOT_ALIGNED = "sentences of which the tokenizer gives back another number of words (left out)"
STORE_GB = 8.0
"""Disk that states may take where nobody says."""
_HELD_OUT = 0.2


class Annotated(Protocol):
    """A sentence with something said of its words."""

    @property
    def id(self) -> str: ...

    @property
    def words(self) -> tuple[str, ...]: ...


Example = TypeVar("Example", bound=Annotated)
Thing = TypeVar("Thing")


def existing(source: str, *, option: str = "--data") -> Path:
    """The path of a file.

    Raises:
        DataError: there is none; the nearest name beside it is given.
    """
    path = Path(source).expanduser()
    if not path.is_file():
        beside = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        near = get_close_matches(path.name, beside, n=1)
        raise DataError(f"{option} {source}: no such file" + (f"; did you mean {near[0]}?" if near else ""))
    return path


def hashes_of(train: Sequence[Path], test: Sequence[Path] = ()) -> dict[str, str]:
    """Of each file's content and of the part it plays, by name."""
    hashes = {str(path): sha256_of(path) for path in train}
    for path in test:
        hashes[f"{path} (test)"] = hashlib.sha256(f"test {sha256_of(path)}".encode()).hexdigest()
    return hashes


def drawn(examples: Sequence[Thing], most: int, draw: Draw, purpose: str) -> list[Thing]:
    """So many of them, each as probable as any other, in their order."""
    key = draw.uniform(purpose, sample=np.arange(len(examples)))
    return [examples[number] for number in np.sort(np.argsort(key, kind="stable")[:most]).tolist()]


def train_and_test(
    examples: Sequence[Thing], others: Sequence[Thing] | None, most: int, most_test: int, draw: Draw
) -> tuple[list[Thing], list[Thing]]:
    """A draw for training, and one for testing: of the other file, or of a fifth of the one there is.

    Args:
        examples: of the file for training.
        others: of the file for testing; None where there is none.
        most: so many are trained on at most.
        most_test: so many are tested on at most.
        draw: of the choice.
    """
    if others is None:
        key = draw.uniform("held out", sample=np.arange(len(examples)))
        held_out = set(np.argsort(key, kind="stable")[: max(1, round(_HELD_OUT * len(examples)))].tolist())
        others = [each for number, each in enumerate(examples) if number in held_out]
        examples = [each for number, each in enumerate(examples) if number not in held_out]
    return drawn(examples, most, draw, "train"), drawn(others, most_test, draw, "test")


def align(encoder: TextEncoder, examples: Sequence[Example]) -> list[tuple[Example, EncodedSentence]]:
    """Those sentences that the model reads with all their words; the encoder's notes count and name the others."""
    sentences: Iterable[Sentence] = (Sentence(each.id, words=each.words) for each in examples)
    pairs = []
    for encoded in encoder.encode(sentences):
        example = examples[encoded.number]
        if len(encoded.words) == len(example.words):
            pairs.append((example, encoded))
        else:
            encoder.notes.add(NOT_ALIGNED, f"{example.id}: {len(example.words)} words, {len(encoded.words)} given back")
    return pairs


def check_aligned(pairs: Sequence[object], encoder: TextEncoder, source: str, least: int) -> None:
    """Refuse to go on with too few sentences.

    Raises:
        DataError: with what was left out.
    """
    if len(pairs) < least:
        why = f" ({encoder.notes})" if encoder.notes.counts else ""
        raise DataError(f"{source}: {len(pairs)} sentences are left, at least {least} are needed{why}")


def check_store(layers: int, rows: int, width: int, store_gb: float) -> None:
    """Refuse to begin what would not fit.

    Raises:
        UsageError: with what it would take.
    """
    wanted = store_bytes(layers, rows, width) / 1e9
    if wanted > store_gb:
        raise UsageError(
            f"states of {rows:,} words in {layers} layers take {wanted:.1f} GB of disk, more than --store-gb"
            f" {store_gb:g}; lower --sentences or raise --store-gb"
        )


def width_of(model: HeadedModel, points: Sequence[str]) -> int:
    """D, the width of the states at the last of these points."""
    device = next(model.parameters()).device
    return point_shapes(model, PackedBatch.from_ids([[0, 0]]).to(device))[points[-1]][1]


def kept_states(
    request: ProbeRequest,
    subject: ProbedModel,
    sentences: Sequence[EncodedSentence],
    points: Sequence[str],
    *,
    wanted: Sequence[Sequence[int]] | None = None,
) -> StateStore:
    """The states of these sentences, on the disk that the run is on until the store is closed; see `collect_states`."""
    engine = request.engine()
    return collect_states(
        subject.model,
        sentences,
        points,
        request.runs_root if request.run_dir is None else request.run_dir,
        wanted=wanted,
        max_batch_tokens=engine.micro_batch_tokens,
        device=engine.device,
        progress=request.progress,
    )

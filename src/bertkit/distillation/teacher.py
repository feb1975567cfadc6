"""A teacher: one model or several, read but never trained, whose word on a batch is computed or remembered.

Several teachers speak as one by the mean of their logits (Yang et al. 2020, TextBrewer, arXiv:2002.12620, section 3.2);
what goes on inside them cannot be averaged, so a term that looks inside needs a single one. Sibling store.py keeps on
disk what was said; attention scores, which grow with the square of the length, are never kept.

Shapes: T packed tokens, B sequences, I items, M rows of logits, K classes, D width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.distillation.teacher_store import StoredOutputs, TeacherStore, keys_of
from bertkit.distillation.terms.base import ActivationRecorder, Activations, ActivationSpec
from bertkit.errors import UsageError
from bertkit.models.headed import HeadedModel

LogitsOf = Callable[[HeadedModel, Tensor], Tensor]
"""From a model and the states that its head reads to rows of logits, (M, K), in the order of the items. A logit of
minus infinity is a class that a row does not have; such classes stand last."""


@dataclass(frozen=True)
class TeacherBatch:
    """A batch, and how a head's word on it is formed.

    Attributes:
        packed: what is read.
        head: whose word it is, by its name in `bertkit.models.heads.HEAD_KINDS`.
        logits_of: forms the rows of logits.
        rows_I: how many rows each item has.
        sequences_I: how many sequences each item has.
        asked_T: the tokens whose rows these are, where the sequences alone do not tell.
    """

    packed: PackedBatch
    head: str
    logits_of: LogitsOf
    rows_I: Sequence[int]
    sequences_I: Sequence[int]
    asked_T: Tensor | None = None

    def keys(self) -> list[bytes]:
        """What each item is known by, 16 bytes: its sequences, and whose rows are asked for."""
        each = iter(keys_of(self.packed, self.asked_T))
        return [
            hashlib.blake2b(b"".join(next(each) for _ in range(count)), digest_size=16).digest()
            for count in self.sequences_I
        ]

    def tokens_I(self) -> list[int]:
        """Tokens of each item."""
        lengths = iter(self.packed.sequences.cu_seqlens_B1.diff().tolist())
        return [sum(next(lengths) for _ in range(count)) for count in self.sequences_I]


class Teacher:
    """One model or several, in evaluation mode.

    Args:
        models: where they compute.
        wanted: what is to be seen of them.
        store: where their answers are kept; None to compute them in every pass.

    Raises:
        UsageError: a look inside several teachers.
    """

    def __init__(
        self, models: Sequence[HeadedModel], wanted: ActivationSpec, *, store: TeacherStore | None = None
    ) -> None:
        if len(models) > 1 and wanted.is_inside:
            raise UsageError(
                f"teacher: {len(models)} teachers speak as one by the mean of their logits; a term that compares states"
                " or attention needs a single teacher"
            )
        self.models = [model.eval().requires_grad_(False) for model in models]
        self.wanted = wanted
        # What changes from layer to layer with the square of the length is not worth its room.
        self.store = None if wanted.scores else store
        self._viewers = [ActivationRecorder(model, wanted) for model in models]

    @torch.no_grad()
    def see(self, reading: TeacherBatch) -> Activations:
        """What the teacher makes of a batch: remembered where the store has all of it, else computed and kept."""
        if self.store is None:
            return self._computed(reading)
        keys = reading.keys()
        kept = self.store.get(keys)
        if kept is not None:
            return self._recalled(reading, kept)
        seen = self._computed(reading)
        self._keep(keys, reading, seen)
        return seen

    def floats_of(self, *, tokens: int, sequences: int, rows: int, classes: int) -> int:
        """How many numbers are kept of an item of this size."""
        width = self.models[0].encoder.width
        logits = rows * classes * self.wanted.logits
        return logits + width * (sequences * len(self.wanted.first_states) + tokens * len(self.wanted.states))

    def _computed(self, reading: TeacherBatch) -> Activations:
        found = []
        for model, viewer in zip(self.models, self._viewers, strict=True):
            recorder = viewer.recorder()
            packed = reading.packed
            hidden_TD = model.states(reading.head, packed) if recorder is None else model(packed, recorder)
            logits_MK = reading.logits_of(model, hidden_TD).float() if self.wanted.logits else None
            found.append(viewer.seen(recorder, packed, logits_MK))
        if len(found) == 1:
            return found[0]
        return Activations(reading.packed, torch.stack([seen.logits for seen in found]).mean(dim=0))

    def _keep(self, keys: Sequence[bytes], reading: TeacherBatch, seen: Activations) -> None:
        """An item's logits, then the first tokens' states, then all tokens', layer by layer."""
        assert self.store is not None
        first = {layer: states.float().cpu().numpy() for layer, states in sorted(seen.first_states.items())}
        every = {layer: states.float().cpu().numpy() for layer, states in sorted(seen.states.items())}
        logits = None if seen.logits_MK is None else seen.logits_MK.cpu()
        row = sequence = token = 0
        sizes = zip(keys, reading.rows_I, reading.sequences_I, reading.tokens_I(), strict=True)
        for key, rows, sequences, tokens in sizes:
            parts: list[NDArray[np.float32]] = []
            classes = 0
            if logits is not None:
                own_mK = logits[row : row + rows]
                classes = int(torch.isfinite(own_mK).sum(dim=-1).max()) if rows else 0
                parts.append(own_mK[:, :classes].numpy().ravel())
            parts += [states[sequence : sequence + sequences].ravel() for states in first.values()]
            parts += [states[token : token + tokens].ravel() for states in every.values()]
            self.store.add(key, rows, classes, np.concatenate(parts))
            row, sequence, token = row + rows, sequence + sequences, token + tokens

    def _recalled(self, reading: TeacherBatch, kept: Sequence[StoredOutputs]) -> Activations:
        device = reading.packed.ids_T.device
        width = self.models[0].encoder.width
        logits: list[Tensor] = []
        first: dict[int, list[NDArray[np.float32]]] = {layer: [] for layer in sorted(self.wanted.first_states)}
        every: dict[int, list[NDArray[np.float32]]] = {layer: [] for layer in sorted(self.wanted.states)}
        for each, sequences, tokens in zip(kept, reading.sequences_I, reading.tokens_I(), strict=True):
            place = 0
            if self.wanted.logits:
                place = each.rows * each.classes
                logits.append(torch.from_numpy(each.values[:place].reshape(each.rows, each.classes).copy()))
            for found, count in ((first, sequences), (every, tokens)):
                for parts in found.values():
                    parts.append(each.values[place : place + count * width].reshape(count, width))
                    place += count * width
        return Activations(
            reading.packed,
            _padded_rows(logits).to(device) if self.wanted.logits else None,
            {layer: torch.from_numpy(np.concatenate(parts)).to(device) for layer, parts in every.items()},
            {layer: torch.from_numpy(np.concatenate(parts)).to(device) for layer, parts in first.items()},
        )


def _padded_rows(parts: Sequence[Tensor]) -> Tensor:
    """Rows of all items under each other, (M, K), minus infinity where an item has fewer classes."""
    classes = max(part.shape[1] for part in parts)
    return torch.cat(
        [
            torch.nn.functional.pad(part, (0, classes - part.shape[1]), value=-torch.inf)
            if part.shape[1] < classes
            else part
            for part in parts
        ]
    )

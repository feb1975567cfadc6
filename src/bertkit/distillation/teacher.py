"""A teacher: one model or several, read and never trained, whose outputs on a batch are computed or read from a cache.

Several teachers act as one through the mean of their logits (Yang et al. 2020, TextBrewer, arXiv:2002.12620, section
3.2); their states cannot be averaged, so a term that compares layers needs a single teacher. Sibling teacher_cache.py
stores the outputs in files; teacher_files.py finds and loads the models.

Shapes: T packed tokens, B sequences, I items (examples of a task, or sequences of a text), M rows of logits, K classes,
D width, V vocabulary.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bertkit.arrays import Float32Array
from bertkit.cache import RecordCache
from bertkit.data.batch import PackedBatch, sequence_keys
from bertkit.distillation.activations import ActivationRecorder, Activations, ActivationSpec
from bertkit.distillation.teacher_cache import CachedItem, TopLogits
from bertkit.errors import UsageError
from bertkit.models.headed import HeadedModel
from bertkit.models.operators.vocabulary import VocabularyProjection, WordLogits
from bertkit.models.recorder import Recorder
from bertkit.training.cost import FORWARD_SHARE, sizes_of, spared_flops, step_flops

WORDS_HEAD = "masked_lm"
"""The head whose word predictions are compared on text."""
LogitsOf = Callable[[HeadedModel, Tensor], Tensor]
"""From a model and the states that its head reads to rows of logits, (M, K), in the order of the items. A logit of
minus infinity marks a class that a row does not have; such classes come last."""
StatesOf = Callable[[HeadedModel, Recorder | None], Tensor]
"""From a model and a recorder to the states that its head reads, (T, D)."""


@dataclass(frozen=True)
class ItemLayout:
    """How a batch is divided into items.

    Attributes:
        rows_I: number of rows of logits of each item.
        sequences_I: number of sequences of each item.
        marked_T: the tokens that the rows belong to, bool; None if the sequences alone determine them.
    """

    rows_I: Sequence[int]
    sequences_I: Sequence[int]
    marked_T: Tensor | None = None

    def tokens_I(self, packed: PackedBatch) -> list[int]:
        """Number of tokens in each item."""
        starts = packed.sequences.cu_seqlens_B1.cpu().numpy()
        return [int(count) for count in np.diff(starts[np.cumsum([0, *self.sequences_I])])]

    def keys(self, packed: PackedBatch) -> list[bytes]:
        """The identity of each item, 16 bytes: its sequences and the tokens whose logits are requested."""
        keys = sequence_keys(packed)
        if self.marked_T is not None:
            parts = np.split(self.marked_T.cpu().numpy(), packed.sequences.cu_seqlens_B1[1:-1].cpu().numpy())
            keys = [_digest(key + part.tobytes()) for key, part in zip(keys, parts, strict=True)]
        ends = np.cumsum(self.sequences_I)
        return [_digest(b"".join(keys[end - count : end])) for end, count in zip(ends, self.sequences_I, strict=True)]


class TeacherQuery(ABC):
    """A batch that a teacher reads, and the logits requested for it.

    Attributes:
        packed: the batch.
    """

    packed: PackedBatch

    @abstractmethod
    def layout(self) -> ItemLayout:
        """How the batch is divided into items."""

    @abstractmethod
    def states(self, model: HeadedModel, recorder: Recorder | None) -> Tensor:
        """One model's pass over the batch: the states that its head reads."""

    @abstractmethod
    def logits(self, models: Sequence[HeadedModel], states: Sequence[Tensor]) -> Tensor | WordLogits:
        """The mean of the models' logits, (M, K)."""

    @abstractmethod
    def table(self, logits: Tensor | WordLogits) -> Float32Array:
        """What is cached of these logits: one row of numbers each; minus infinities, always last, are left out."""

    @abstractmethod
    def from_tables(self, tables: Sequence[Float32Array]) -> Tensor | WordLogits:
        """The logits, rebuilt from the table of each item."""

    @abstractmethod
    def flops(self, model: HeadedModel, spec: ActivationSpec) -> float:
        """Floating-point operations of one model's pass."""


@dataclass(frozen=True)
class TaskQuery(TeacherQuery):
    """Examples of a task, and how the logits of its head are computed.

    Attributes:
        head: its name in `bertkit.models.heads.HEAD_KINDS`.
        logits_of: computes the rows of logits.
        items: the examples.
    """

    packed: PackedBatch
    head: str
    logits_of: LogitsOf
    items: ItemLayout

    def layout(self) -> ItemLayout:
        return self.items

    def states(self, model: HeadedModel, recorder: Recorder | None) -> Tensor:
        if recorder is None:
            return model.states(self.head, self.packed)
        hidden_TD: Tensor = model(self.packed, recorder)
        return hidden_TD

    def logits(self, models: Sequence[HeadedModel], states: Sequence[Tensor]) -> Tensor:
        each = [self.logits_of(*pair).float() for pair in zip(models, states, strict=True)]
        return each[0] if len(each) == 1 else torch.stack(each).mean(dim=0)

    def table(self, logits: Tensor | WordLogits) -> Float32Array:
        assert isinstance(logits, Tensor)
        return np.asarray(logits.cpu().numpy(), dtype=np.float32)

    def from_tables(self, tables: Sequence[Float32Array]) -> Tensor:
        classes = max(table.shape[1] for table in tables)
        absent = [((0, 0), (0, classes - table.shape[1])) for table in tables]
        padded = [np.pad(table, width, constant_values=-np.inf) for table, width in zip(tables, absent, strict=True)]
        return torch.from_numpy(np.concatenate(padded)).to(self.packed.ids_T.device)

    def flops(self, model: HeadedModel, spec: ActivationSpec) -> float:
        sizes = sizes_of(self.packed.sequences.cu_seqlens_B1.diff())
        flops = step_flops(model, **sizes, predictions=0)
        if model.reads_one_token(self.head) and not spec.has_layers:
            flops -= spared_flops(model.encoder, **sizes)
        return FORWARD_SHARE * flops


@dataclass(frozen=True)
class TextQuery(TeacherQuery):
    """Sequences of a text, each an item, and the tokens whose words are compared.

    Attributes:
        states_of: a model's pass.
        index_M: those tokens, ascending; None for all.
        top_k: number of words per token that a cache stores.
        vocab_size: V.
    """

    packed: PackedBatch
    states_of: StatesOf
    index_M: Tensor | None
    top_k: int
    vocab_size: int

    @property
    def num_rows(self) -> int:
        """M."""
        return self.packed.num_tokens if self.index_M is None else self.index_M.numel()

    def layout(self) -> ItemLayout:
        # On the host: keys are hashed there, and a GPU would be waited for once per sequence.
        marked_T = torch.full((self.packed.num_tokens,), self.index_M is None)
        if self.index_M is not None:
            marked_T[self.index_M.cpu()] = True
        parts = marked_T.tensor_split(self.packed.sequences.cu_seqlens_B1[1:-1].long().cpu())
        return ItemLayout([int(part.sum()) for part in parts], [1] * len(parts), marked_T)

    def states(self, model: HeadedModel, recorder: Recorder | None) -> Tensor:
        return self.states_of(model, recorder)

    def logits(self, models: Sequence[HeadedModel], states: Sequence[Tensor]) -> WordLogits:
        each = [words_at(model, hidden_TD, self.index_M) for model, hidden_TD in zip(models, states, strict=True)]
        return each[0] if len(each) == 1 else MeanLogits(tuple(each))

    def table(self, logits: Tensor | WordLogits) -> Float32Array:
        assert isinstance(logits, WordLogits)
        cast = logits.in_precision()
        with torch.autocast(self.packed.ids_T.device.type, enabled=False):
            return TopLogits.of(cast, self.num_rows, self.vocab_size, top_k=self.top_k).table()

    def from_tables(self, tables: Sequence[Float32Array]) -> TopLogits:
        table = np.concatenate([each.reshape(-1, 2 * self.top_k + 1) for each in tables])
        return TopLogits.from_table(table, self.vocab_size, self.packed.ids_T.device)

    def flops(self, model: HeadedModel, spec: ActivationSpec) -> float:
        predictions = {WORDS_HEAD: self.num_rows if spec.logits else 0}
        sizes = sizes_of(self.packed.sequences.cu_seqlens_B1.diff())
        return FORWARD_SHARE * step_flops(model, **sizes, predictions=predictions)


def words_at(model: HeadedModel, hidden_TD: Tensor, index_M: Tensor | None) -> VocabularyProjection:
    """The logits of a model's words at these tokens (None: at all), not computed yet."""
    return model.projection(WORDS_HEAD, hidden_TD if index_M is None else hidden_TD.index_select(0, index_M))


@dataclass(frozen=True)
class MeanLogits(WordLogits):
    """The mean of several models' logits."""

    models: tuple[WordLogits, ...]

    def part(self, part: slice) -> Tensor:
        return torch.stack([each.part(part) for each in self.models]).mean(dim=0)

    def rows(self, index_M: Tensor) -> MeanLogits:
        return MeanLogits(tuple(each.rows(index_M) for each in self.models))

    def in_precision(self) -> MeanLogits:
        return MeanLogits(tuple(each.in_precision() for each in self.models))


class Teacher:
    """One model or several, in evaluation mode.

    Args:
        models: on the device where they compute.
        spec: what is recorded from them.
        cache: where their outputs are stored; None to compute them in every pass.

    Attributes:
        flops: floating-point operations of all computed outputs; a caller that measures resets it to 0.

    Raises:
        UsageError: the spec has layers, but there are several teachers.
    """

    def __init__(
        self, models: Sequence[HeadedModel], spec: ActivationSpec, *, cache: RecordCache | None = None
    ) -> None:
        if len(models) > 1 and spec.has_layers:
            raise UsageError(
                f"teacher: {len(models)} teachers act as one through the mean of their logits; give a single teacher,"
                " or leave out the terms that compare states or attention"
            )
        self.models = [model.eval().requires_grad_(False) for model in models]
        self.spec = spec
        self.cache = cache
        self.flops = 0.0
        self._recorders = [ActivationRecorder(model, spec) for model in models]

    @property
    def can_be_cached(self) -> bool:
        """Attention scores grow with the square of the length, and are not cached."""
        return not self.spec.scores

    @torch.no_grad()
    def outputs(self, query: TeacherQuery) -> Activations:
        """The teacher's outputs on a batch: read from the cache if it has all of them, else computed and stored."""
        if self.cache is None or not self.can_be_cached:
            return self._computed(query)
        layout = query.layout()
        keys = layout.keys(query.packed)
        records = self.cache.get(keys)
        if records is not None:
            return self._from_items(query, layout, [CachedItem.from_bytes(record) for record in records])
        items = self._items(query, layout, self._computed(query))
        for key, item in zip(keys, items, strict=True):
            self.cache.add(key, item.to_bytes())
        return self._from_items(query, layout, items)

    def item_bytes(self, *, tokens: float, sequences: float, rows: float, columns: int) -> float:
        """How many bytes an item of this size takes in the cache.

        Args:
            tokens, sequences, rows: of the item.
            columns: columns of its table of logits: classes, or 2 k + 1 for k words.
        """
        width = self.models[0].encoder.width
        logits = rows * columns * self.spec.logits
        states = width * (sequences * len(self.spec.summary_states) + tokens * len(self.spec.states))
        return CachedItem.bytes_of(logits + states)

    def _computed(self, query: TeacherQuery) -> Activations:
        recorders = [each.recorder() for each in self._recorders]
        passes = zip(self.models, recorders, strict=True)
        states = [query.states(model, recorder) for model, recorder in passes]
        self.flops += sum(query.flops(model, self.spec) for model in self.models)
        logits = query.logits(self.models, states) if self.spec.logits else None
        return self._recorders[0].activations(recorders[0], query.packed, logits)

    def _items(self, query: TeacherQuery, layout: ItemLayout, outputs: Activations) -> list[CachedItem]:
        """Stored values of each item: logits, the states that classifiers read, those of all tokens, layer by layer."""
        read = [states.float().cpu().numpy() for _, states in sorted(outputs.summary_states.items())]
        every = [states.float().cpu().numpy() for _, states in sorted(outputs.states.items())]
        table = None if outputs.logits is None else query.table(outputs.logits)
        items = []
        row = sequence = token = 0
        sizes = zip(layout.rows_I, layout.sequences_I, layout.tokens_I(query.packed), strict=True)
        for rows, sequences, tokens in sizes:
            own = np.zeros((0, 0), dtype=np.float32) if table is None else table[row : row + rows]
            columns = int((own != -np.inf).sum(axis=1).max()) if own.size else 0
            parts = [own[:, :columns].ravel()]
            parts += [states[sequence : sequence + sequences].ravel() for states in read]
            parts += [states[token : token + tokens].ravel() for states in every]
            items.append(CachedItem(len(own), columns, np.concatenate(parts)))
            row, sequence, token = row + rows, sequence + sequences, token + tokens
        return items

    def _from_items(self, query: TeacherQuery, layout: ItemLayout, items: Sequence[CachedItem]) -> Activations:
        """The inverse of `_items`."""
        device, width = query.packed.ids_T.device, self.models[0].encoder.width
        tables: list[Float32Array] = []
        read: dict[int, list[Float32Array]] = {layer: [] for layer in sorted(self.spec.summary_states)}
        every: dict[int, list[Float32Array]] = {layer: [] for layer in sorted(self.spec.states)}
        sizes = zip(items, layout.sequences_I, layout.tokens_I(query.packed), strict=True)
        for item, sequences, tokens in sizes:
            place = item.rows * item.columns
            tables.append(item.values[:place].reshape(item.rows, item.columns))
            for layers, count in ((read, sequences), (every, tokens)):
                for parts in layers.values():
                    parts.append(item.values[place : place + count * width].reshape(count, width))
                    place += count * width
        return Activations(
            query.packed,
            query.from_tables(tables) if self.spec.logits else None,
            {layer: torch.from_numpy(np.concatenate(parts)).to(device) for layer, parts in every.items()},
            {layer: torch.from_numpy(np.concatenate(parts)).to(device) for layer, parts in read.items()},
        )


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()

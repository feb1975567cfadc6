"""What a teacher said of texts, kept from run to run: of every token the likeliest words, and the states compared.

Own design. Several students of one teacher on the same text and seed (the arms of an ablation), and every pass over
static masks, show it the same corrupted sequences. Of a row of logits the k largest are kept and one more, which all
other words then share: the one at which their probability together is what it was, at temperature 1. An answer is cut
in the same way where it comes from the teacher itself, so that a full disk changes no result. Sibling store.py has the
files; teacher.py does the same for tasks, whose classes are few. Attention scores are never kept.

Shapes: T packed tokens, M rows of words, B sequences, D width, V vocabulary, k likeliest words; m rows of one part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.distillation.teacher_store import TeacherStore, keys_of
from bertkit.distillation.terms.base import Activations, ActivationSpec
from bertkit.models.vocabulary import LOGIT_BYTES, WordLogits


@dataclass(frozen=True)
class KeptWords(WordLogits):
    """Logits of which the largest are known.

    Attributes:
        word_Mk, largest_Mk: the k likeliest words of each row, and their logits.
        rest_M1: the logit of every other word.
        vocab_size: V.
    """

    word_Mk: Tensor
    largest_Mk: Tensor
    rest_M1: Tensor
    vocab_size: int

    @classmethod
    def of(cls, logits: WordLogits, rows: int, vocab_size: int, *, top_k: int) -> KeptWords:
        """Of all rows, formed a few at a time; fewer words than `top_k` where there are no more."""
        top_k = min(top_k, vocab_size - 1)
        size = max(1, LOGIT_BYTES // (8 * vocab_size))
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for first in range(0, max(1, rows), size):  # of no rows one part, too, which is where the logits are
            logits_mV = logits.part(slice(first, first + size))
            largest_mk, word_mk = logits_mV.topk(top_k, dim=-1)
            others_mV = logits_mV.scatter(1, word_mk, -torch.inf)
            rest_m1 = torch.logsumexp(others_mV, dim=-1, keepdim=True) - math.log(vocab_size - top_k)
            parts.append((word_mk, largest_mk, rest_m1))
        word_Mk, largest_Mk, rest_M1 = (torch.cat(column) for column in zip(*parts, strict=True))
        return cls(word_Mk, largest_Mk, rest_M1, vocab_size)

    def part(self, part: slice) -> Tensor:
        rest_mV = self.rest_M1[part].expand(-1, self.vocab_size).clone()
        return rest_mV.scatter_(1, self.word_Mk[part], self.largest_Mk[part])

    def rows(self, index_M: Tensor) -> KeptWords:
        """Some of the rows."""
        return KeptWords(self.word_Mk[index_M], self.largest_Mk[index_M], self.rest_M1[index_M], self.vocab_size)

    def table(self) -> NDArray[np.float32]:
        """Rows of words (as the bits of floats), logits and rest, (M, 2k + 1)."""
        columns = (self.word_Mk.int().view(torch.float32), self.largest_Mk, self.rest_M1)
        return np.asarray(torch.cat(columns, dim=1).cpu().numpy(), dtype=np.float32)

    @classmethod
    def from_table(cls, table: NDArray[np.float32], vocab_size: int, device: torch.device) -> KeptWords:
        """The inverse of `table`."""
        top_k = table.shape[1] // 2
        columns = torch.from_numpy(table)
        word_Mk = columns[:, :top_k].contiguous().view(torch.int32).long()
        return cls(
            word_Mk.to(device),
            columns[:, top_k : 2 * top_k].contiguous().to(device),
            columns[:, 2 * top_k :].contiguous().to(device),
            vocab_size,
        )


@dataclass(frozen=True)
class Answer:
    """What a teacher said of a batch.

    Attributes:
        words: of the rows asked for; None where no words are compared.
        seen: states by layer.
    """

    words: KeptWords | None
    seen: Activations


class Answers:
    """A store of answers of one kind.

    Args:
        store: the files.
        wanted: states that are kept; no attention scores.
        width: D of the teacher.
        vocab_size: V of the teacher.
        top_k: words kept of a row; 0 where no words are compared.
    """

    def __init__(self, store: TeacherStore, wanted: ActivationSpec, *, width: int, vocab_size: int, top_k: int) -> None:
        assert not wanted.scores, "scores grow with the square of the length"
        self.store = store
        self.wanted = wanted
        self.width, self.vocab_size, self.top_k = width, vocab_size, min(top_k, vocab_size - 1)

    def floats_of(self, *, tokens: float, rows: float) -> float:
        """Numbers kept of a sequence."""
        words = rows * (2 * self.top_k + 1) if self.top_k else 0.0
        return words + self.width * (tokens * len(self.wanted.states) + len(self.wanted.first_states))

    def recall(self, batch: PackedBatch, index_M: Tensor) -> Answer | None:
        """The answer; None where a part of it is not kept.

        Args:
            batch: what is read.
            index_M: whose words are compared, ascending.
        """
        kept = self.store.get(_keys(batch, index_M))
        if kept is None:
            return None
        device = batch.ids_T.device
        lengths = batch.sequences.cu_seqlens_B1.diff().tolist()
        tables: list[NDArray[np.float32]] = []
        layers = [*sorted(self.wanted.first_states), *sorted(self.wanted.states)]
        columns: list[list[NDArray[np.float32]]] = [[] for _ in layers]
        for each, length in zip(kept, lengths, strict=True):
            place = each.rows * (2 * self.top_k + 1) if self.top_k else 0
            tables.append(each.values[:place].reshape(-1, 2 * self.top_k + 1))
            for number, column in enumerate(columns):
                count = 1 if number < len(self.wanted.first_states) else length
                column.append(each.values[place : place + count * self.width].reshape(count, self.width))
                place += count * self.width
        states = [torch.from_numpy(np.concatenate(column)).to(device) for column in columns]
        firsts = len(self.wanted.first_states)
        words = KeptWords.from_table(np.concatenate(tables), self.vocab_size, device) if self.top_k else None
        seen = Activations(
            batch,
            states=dict(zip(layers[firsts:], states[firsts:], strict=True)),
            first_states=dict(zip(layers[:firsts], states[:firsts], strict=True)),
        )
        return Answer(words, seen)

    def keep(self, answer: Answer, index_M: Tensor) -> None:
        """Keep an answer, as far as there is room."""
        if not self.store.is_writer:
            return
        batch = answer.seen.batch
        starts = batch.sequences.cu_seqlens_B1.cpu().numpy()
        rows_B1 = np.searchsorted(index_M.cpu().numpy(), starts)
        table = None if answer.words is None else answer.words.table()
        firsts = [states.float().cpu().numpy() for _, states in sorted(answer.seen.first_states.items())]
        every = [states.float().cpu().numpy() for _, states in sorted(answer.seen.states.items())]
        for number, key in enumerate(_keys(batch, index_M)):
            tokens, own = slice(*starts[number : number + 2]), slice(*rows_B1[number : number + 2])
            parts = [] if table is None else [table[own].ravel()]
            parts += [states[number] for states in firsts]
            parts += [states[tokens].ravel() for states in every]
            rows = 0 if table is None else int(own.stop - own.start)
            self.store.add(key, rows, 0, np.concatenate(parts))


def _keys(batch: PackedBatch, index_M: Tensor) -> list[bytes]:
    """What each sequence is known by, of which these tokens are asked about."""
    asked_T = torch.zeros(batch.num_tokens, dtype=torch.bool, device=index_M.device)
    return keys_of(batch, asked_T.index_fill_(0, index_M, True))

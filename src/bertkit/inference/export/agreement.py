"""Comparison of the outputs of two copies of a model on real text and random tokens.

Not from a paper; for `bertkit export`. Batches are packed, so sequences have different lengths and no padding. They
include a single token, the longest text that the model reads (up to a limit), and pairs with their segment types.

Shapes: T packed tokens, B sequences, D width, K outputs of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.errors import CheckError
from bertkit.models.headed import POOLER, HeadedModel
from bertkit.text.tokenizer import Tokenizer

LONGEST_PROBE = 512
"""Maximum length of compared texts, even if the model reads longer ones."""

TEXTS = (
    "The committee met on Tuesday, and nobody could say why the vote (17 to 4) had been postponed.",
    "She sells sea shells by the sea shore.",
    "Yes.",
    "A café in Zürich — naïve, isn't it? — serves “Grüße” for 3.50 €.",
    "def tokenize(text: str) -> list[str]: return text.split()",
    "漢字とかな, 한국어, العربية, русский текст and 🙂 in one line.",
    "It was the year 1969; the lander touched down with less than a minute of fuel left, and the whole world listened.",
)
_RANDOM_LENGTHS = (1, 2, 7, 18, 33)
_SEED = 20_190_524

SMALLEST_OUTPUT = 0.5
"""Minimum root mean square used in the comparison. A barely trained head outputs numbers around 0, for which a relative
difference means nothing."""

Outputs = Mapping[str, Tensor]
"""By name: `hidden` (T, D), `pooler` (B, D), and each head's logits, (T, K) or (B, K)."""


@dataclass(frozen=True)
class ProbeRow:
    """One sequence: its ids, and how many of them belong to the first segment."""

    ids: tuple[int, ...]
    first: int

    @property
    def token_types(self) -> list[int]:
        return [int(index >= self.first) for index in range(len(self.ids))]


@dataclass
class Agreement:
    """The difference between two copies of a model.

    Attributes:
        tolerance: the largest accepted difference for outputs up to 1; it grows with larger outputs.
        batches, sequences, tokens: the amounts compared.
        differences: the largest difference of each output.
        errors: outputs that differ by more than the tolerance.
        measure, unit: of a difference, in words and as the text after its number.
    """

    measure: ClassVar[str] = "absolute"
    unit: ClassVar[str] = ""
    tolerance: float
    batches: int = 0
    sequences: int = 0
    tokens: int = 0
    differences: dict[str, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    @property
    def largest(self) -> float:
        return max(self.differences.values(), default=0.0)

    def add(self, name: str, wanted: Tensor, found: Tensor) -> None:
        """Compare one output. Values that are not finite never agree."""
        if wanted.shape != found.shape:
            self.errors.append(f"{name} has shape {tuple(found.shape)}, the source {tuple(wanted.shape)}")
            return
        if not (bool(wanted.isfinite().all()) and bool(found.isfinite().all())):
            self.errors.append(f"{name} is not finite")
            return
        difference = self.difference(wanted, found)
        self.differences[name] = max(difference, self.differences.get(name, 0.0))
        if difference > self.accepted(wanted):
            self.errors.append(f"{name} differs by {difference:.3g}{self.unit}")

    def difference(self, wanted: Tensor, found: Tensor) -> float:
        """The difference between two tensors of the same shape."""
        return float((wanted - found).abs().max())

    def accepted(self, wanted: Tensor) -> float:
        """The largest accepted difference."""
        return self.tolerance * max(1.0, float(wanted.abs().max()))

    def raise_if_different(self, what: str) -> None:
        """Raises:
        CheckError: the two do not agree.
        """
        if self.errors:
            errors = "; ".join(dict.fromkeys(self.errors))
            raise CheckError(
                f"{what} does not reproduce the outputs of its source (tolerance {self.tolerance:g}): {errors}"
            )


class RoughAgreement(Agreement):
    """As `Agreement`, with relative root mean squares: 0 is equal, 1 is the error of all zeros.

    Computed over all rows of a batch, so that the state of one rare word does not decide the result.
    """

    measure: ClassVar[str] = "root mean square as a share of the source's"
    unit: ClassVar[str] = " of its size"

    def difference(self, wanted: Tensor, found: Tensor) -> float:
        return _root_mean_square(wanted - found) / max(_root_mean_square(wanted), SMALLEST_OUTPUT)

    def accepted(self, wanted: Tensor) -> float:
        return self.tolerance


def _root_mean_square(values: Tensor) -> float:
    return float(values.float().square().mean().sqrt())


def probe_batches(model: HeadedModel, tokenizer: Tokenizer | None) -> list[list[ProbeRow]]:
    """Rows to compare: random ids, and, if there is a tokenizer, real text and pairs of it."""
    longest = min(model.encoder.max_tokens, LONGEST_PROBE)
    generator = torch.Generator().manual_seed(_SEED)
    batches = []
    if tokenizer is not None:
        batches += [real_rows(tokenizer, TEXTS, None, longest), real_rows(tokenizer, TEXTS, TEXTS[::-1], longest)]
    for seconds in (False, True):
        lengths = sorted({min(length, longest) for length in (*_RANDOM_LENGTHS, longest)}, reverse=True)
        rows = []
        for length in lengths:
            ids = torch.randint(0, model.encoder.vocab_size, (length,), generator=generator)
            first = int(torch.randint(1, length + 1, (1,), generator=generator)) if seconds else length
            rows.append(ProbeRow(tuple(ids.tolist()), first))
        batches.append(rows[1:] + rows[:1])
    return batches


def real_rows(tokenizer: Tokenizer, texts: Sequence[str], others: Sequence[str] | None, longest: int) -> list[ProbeRow]:
    """Rows in the tokenizer's template, of at most `longest` tokens; texts without tokens are left out."""
    inputs = list(texts) if others is None else list(zip(texts, others, strict=True))
    rows = []
    for encoding in tokenizer.backend.encode_batch(inputs):
        ids = tuple(encoding.ids[:longest])
        seconds = [index for index, part in enumerate(encoding.sequence_ids[:longest]) if part == 1]
        if ids:
            rows.append(ProbeRow(ids, seconds[0] if seconds else len(ids)))
    return rows


def packed(model: HeadedModel, rows: Sequence[ProbeRow]) -> PackedBatch:
    """The rows as a batch, with segment types if the model reads them."""
    types = [row.token_types for row in rows] if model.encoder.config.reads_token_types else None
    return PackedBatch.from_ids([row.ids for row in rows], types)


@torch.no_grad()
def outputs_of(model: HeadedModel, rows: Sequence[ProbeRow]) -> dict[str, Tensor]:
    """All outputs of a model for the rows."""
    batch = packed(model, rows)
    hidden_TD = model(batch)
    found = {"hidden": hidden_TD, **{head: model.logits(head, hidden_TD, batch) for head in model.head_names}}
    if model.has_pooler:
        found[POOLER] = model.get_submodule(POOLER)(hidden_TD[batch.first_token_B])
    return found


def compare(
    model: HeadedModel,
    tokenizer: Tokenizer | None,
    other: Callable[[Sequence[ProbeRow]], Outputs],
    *,
    tolerance: float,
    kind: type[Agreement] = Agreement,
) -> Agreement:
    """Compute the same rows with both models.

    Args:
        model: the source, in evaluation mode.
        tokenizer: the source's; None: only random tokens.
        other: computes the outputs of the copy; outputs that it does not have are not compared.
        tolerance: see `Agreement`.
        kind: how differences are measured.
    """
    agreement = kind(tolerance)
    for rows in probe_batches(model, tokenizer):
        wanted, found = outputs_of(model, rows), other(rows)
        for name in found:
            agreement.add(name, wanted[name], found[name])
        agreement.batches += 1
        agreement.sequences += len(rows)
        agreement.tokens += sum(len(row.ids) for row in rows)
    return agreement

"""`probe points`: every hook point of a model, with its shape in symbols.

The names follow TransformerLens. The model runs twice on batches of different sizes. An axis that varies with the
number of tokens is T, and so on; an axis of constant size is matched with the model's own sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.models.hook_points import recordable_points
from bertkit.probing.run import ProbeArguments, ProbeResult
from bertkit.probing.sentences import Sentence, TextEncoder, packed

SYMBOLS = {
    "T": "tokens of all sequences of the batch, concatenated",
    "B": "sequences",
    "S": "tokens of the longest sequence; only attention maps are padded to it",
    "D": "hidden_size",
    "E": "embedding_size, if it differs from D",
    "F": "intermediate_size",
    "N": "num_attention_heads",
    "H": "width of a head",
}
# Three sequences, then four, so that no two of T, B and S are equal in both batches.
_LENGTHS = ((5, 3, 2), (7, 4, 4, 2))


def list_points(request: ProbeArguments, sentence: str) -> ProbeResult:
    """The hook points of a model in forward order, with their sizes for one sentence.

    Raises:
        DataError: no such model, or the sentence has no words or is too long for the model.
    """
    subject = request.subject()
    encoder = TextEncoder.of(subject.model, subject.tokenizer)
    example = next(encoder.encode([Sentence("sentence", sentence)]), None)
    if example is None:
        raise DataError(f"--sentence {sentence[:60]!r}: has no words, or more tokens than the model reads")
    sizes = recordable_points(subject.model, packed([example]))
    symbols = point_symbols(subject)
    points = [
        {"name": name, "shape": list(symbols.get(name, map(str, shape))), "example": list(shape)}
        for name, shape in sizes.items()
    ]
    summary = {"points": points, "example": {"sentence": sentence, "tokens": int(example.ids_T.size)}}
    return ProbeResult(
        None, {"kind": "points", "model": subject.name, "summary": summary, "definitions": dict(SYMBOLS)}
    )


@torch.inference_mode()
def point_symbols(subject: LoadedModel) -> dict[str, tuple[str, ...]]:
    """The shape of every point in symbols."""
    shapes, sizes = [], []
    for lengths in _LENGTHS:
        batch = PackedBatch.from_ids([[subject.tokenizer.vocab_size - 1] * length for length in lengths])
        shapes.append(recordable_points(subject.model, batch))
        sizes.append({"T": sum(lengths), "B": len(lengths), "S": max(lengths)})
    fixed = _sizes_of(subject)
    return {name: _symbols(name, shapes[0][name], shapes[1][name], sizes, fixed) for name in shapes[0]}


def _symbols(
    name: str,
    first: Sequence[int],
    second: Sequence[int],
    sizes: Sequence[Mapping[str, int]],
    fixed: Mapping[str, int],
) -> tuple[str, ...]:
    """The symbol of each axis of a point, from its sizes in the two batches."""
    symbol_of = {(sizes[0][symbol], sizes[1][symbol]): symbol for symbol in sizes[0]}
    return tuple(
        _fixed_symbol(name, axis, len(first), pair[0], fixed)
        if pair[0] == pair[1]
        else symbol_of.get(pair, str(pair[0]))
        for axis, pair in enumerate(zip(first, second, strict=True))
    )


def _fixed_symbol(name: str, axis: int, axes: int, size: int, fixed: Mapping[str, int]) -> str:
    """The symbol of the model's size that an axis has; the axis's position decides between equal sizes."""
    within_heads = ".attn." in name and axes > 2
    likely = ("N", "H") if within_heads else ("F", "D", "E") if ".mlp." in name else ("D", "E", "F")
    if within_heads and axis == axes - 1 and axes == 3:
        likely = ("H", "N")
    for symbol in likely:
        if fixed.get(symbol) == size:
            return symbol
    doubled = [symbol for symbol in ("F", "D") if fixed.get(symbol, 0) * 2 == size]
    return f"2{doubled[0]}" if doubled else str(size)


def _sizes_of(subject: LoadedModel) -> dict[str, int]:
    settings: dict[str, Any] = subject.config.model_dump()
    width, heads = settings.get("hidden_size"), settings.get("num_attention_heads")
    sizes = {
        "D": width,
        "E": subject.model.encoder.embedding_width,
        "F": settings.get("intermediate_size"),
        "N": heads,
        "H": settings.get("head_dim") or (width // heads if width and heads else None),
    }
    return {symbol: size for symbol, size in sizes.items() if isinstance(size, int)}

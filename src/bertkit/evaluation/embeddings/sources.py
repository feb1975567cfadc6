"""Sources of text vectors: a model, or the mean of word vectors.

Reimers and Gurevych 2019, arXiv:1908.10084, table 1 (averaged GloVe vectors as the baseline). The inverse document
frequency weight of a word is scikit-learn's smooth form, ln((1 + N) / (1 + df)) + 1.

Shapes: N texts, E width.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from scipy.sparse import issparse

from bertkit.arrays import Float32Array
from bertkit.evaluation.embeddings.settings import VectorSettings
from bertkit.evaluation.run import MeasurementArguments
from bertkit.files import sha256_of
from bertkit.inference.embedder import Embedder
from bertkit.inference.token_embedder import TokenEmbedder
from bertkit.models.bge_m3 import find_embedder
from bertkit.models.similarity import Similarity
from bertkit.models.text_reading import TextReading
from bertkit.text.word_split import word_places
from bertkit.text.word_vectors import WordVectors, read_word_vectors


class Encode(Protocol):
    """Computes the vectors of texts."""

    def __call__(self, texts: Sequence[str], prompt: str | None = None) -> Any: ...


@dataclass(frozen=True)
class VectorSource:
    """Converts texts to vectors.

    Attributes:
        name: the name as given by the user.
        fingerprint: hash of everything that determines the vectors.
        tokenizer: fingerprint of the tokenizer; None if there is none.
        encode: maps texts to vectors, (N, E), each text after a prompt; None: the model's default prompt. Sparse
            vectors are a sparse matrix.
        notes: notes for the results.
        reading: the model's prompts.
        is_sparse: whether vectors have weights of words (SPLADE).
        similarity: how vectors are compared: cosine or dot.
        by_token: in place of `encode`, a model with a vector for each token (ColBERT); None: texts have one vector.
    """

    name: str
    fingerprint: str
    tokenizer: str | None
    encode: Encode
    notes: dict[str, Any] = field(default_factory=dict)
    reading: TextReading = field(default_factory=TextReading)
    is_sparse: bool = False
    similarity: Similarity = "cosine"
    by_token: TokenEmbedder | None = None

    def similarities(self, first_NE: Any, second_NE: Any) -> Any:
        """The similarity of each pair of rows, (N,) in float64."""
        return cosines(first_NE, second_NE) if self.similarity == "cosine" else dot_products(first_NE, second_NE)


def model_source(model: str, settings: VectorSettings, arguments: MeasurementArguments) -> VectorSource:
    """Vectors from a model, computed in fp32.

    Raises:
        DataError: no such model, or a damaged one.
    """
    embedder = Embedder.load(
        find_embedder(model, offline=arguments.offline),
        arguments.engine(),
        name=model,
        max_tokens=settings.max_length,
        offline=arguments.offline,
    )
    notes: dict[str, Any] = {"texts_cut": 0, "most_tokens": embedder.max_tokens}

    def encode(texts: Sequence[str], prompt: str | None = None) -> Any:
        parts = embedder.parts(texts, "cut", prompt)
        notes["texts_cut"] += sum(several[0].cut > 0 for several in parts)
        if embedder.is_sparse:
            return embedder.sparse_vectors([first for (first,) in parts])
        return embedder.joined(parts)

    # A dense model that has been marked for the other similarity has other results.
    fingerprint = embedder.fingerprint + ("" if embedder.is_sparse or embedder.similarity == "cosine" else "-dot")
    tokenizer, similarity = embedder.tokenizer.fingerprint, embedder.similarity
    return VectorSource(model, fingerprint, tokenizer, encode, notes, embedder.reading, embedder.is_sparse, similarity)


def token_source(model: str, settings: VectorSettings, arguments: MeasurementArguments) -> VectorSource:
    """Vectors of tokens from a model, computed in fp32.

    Raises:
        DataError: a damaged model.
        UsageError: the length does not fit.
    """
    embedder = TokenEmbedder.load(
        find_embedder(model, offline=arguments.offline),
        arguments.engine(),
        name=model,
        max_tokens=settings.max_length,
        offline=arguments.offline,
    )

    def encode(texts: Sequence[str], prompt: str | None = None) -> Any:
        raise AssertionError("by_token has the vectors")

    notes = {"most_tokens": embedder.max_tokens}
    tokenizer = embedder.tokenizer.fingerprint
    return VectorSource(model, embedder.fingerprint, tokenizer, encode, notes, embedder.reading, by_token=embedder)


def word_source(path: Path, settings: VectorSettings, texts: Callable[[], Iterable[str]]) -> VectorSource:
    """The mean of a text's word vectors; a word not in the file falls back to its lower-cased form, else is skipped.

    Args:
        path: a file with one word and its numbers per line.
        settings: how to weight words.
        texts: all texts to encode, read once for their words and frequencies.

    Raises:
        DataError: the file cannot be read.
    """
    frequency: Counter[str] = Counter()
    count = 0
    for text in texts():
        frequency.update(set(_words(text)))
        count += 1
    vectors = read_word_vectors(path, only=frequency.keys() | {word.lower() for word in frequency})
    weights = None if settings.weighting == "average" else _inverse_frequencies(vectors, frequency, count)
    notes: dict[str, Any] = {
        "weighting": settings.weighting,
        "words_known": sum(_number(vectors, word) is not None for word in frequency) / max(1, len(frequency)),
        "texts_without_known_words": 0,
    }

    def encode(texts: Sequence[str], prompt: str | None = None) -> Float32Array:
        found = np.zeros((len(texts), vectors.width), dtype=np.float32)
        for row, text in enumerate(texts):
            numbers = [each for word in _words((prompt or "") + text) if (each := _number(vectors, word)) is not None]
            if not numbers:
                notes["texts_without_known_words"] += 1
                continue
            found[row] = np.average(
                vectors.vector_NE[numbers].astype(np.float64),
                axis=0,
                weights=None if weights is None else weights[numbers],
            )
        return found

    return VectorSource(str(path), sha256_of(path), None, encode, notes)


def _inverse_frequencies(vectors: WordVectors, frequency: Counter[str], count: int) -> Any:
    """The weight of each vector; words that share a vector are counted together."""
    known: Counter[int] = Counter()
    for word, times in frequency.items():
        if (number := _number(vectors, word)) is not None:
            known[number] += times
    return np.array([math.log((1 + count) / (1 + min(count, known[n]))) + 1 for n in range(len(vectors.words))])


def _words(text: str) -> list[str]:
    return [text[first:end] for first, end in word_places(text)]


def _number(vectors: WordVectors, word: str) -> int | None:
    number = vectors.number.get(word)
    return vectors.number.get(word.lower()) if number is None else number


def cosines(first_NE: Any, second_NE: Any) -> Any:
    """The cosine of each pair of rows, (N,) in float64; 0 if one is all zeros."""
    first, second = first_NE.astype(np.float64), second_NE.astype(np.float64)
    product = np.sqrt((first * first).sum(axis=1) * (second * second).sum(axis=1))
    return (first * second).sum(axis=1) / np.where(product > 0, product, 1.0)


def dot_products(first_NE: Any, second_NE: Any) -> Any:
    """The dot product of each pair of rows, (N,) in float64."""
    if issparse(first_NE):
        return np.asarray(first_NE.astype(np.float64).multiply(second_NE).sum(axis=1)).ravel()
    return (first_NE.astype(np.float64) * second_NE).sum(axis=1)


def encoded_once(source: VectorSource, *columns: Sequence[str]) -> list[Any]:
    """The vectors of several columns of texts; each distinct text is computed once."""
    numbers: dict[str, int] = {}
    for column in columns:
        for text in column:
            numbers.setdefault(text, len(numbers))
    vectors = source.encode(list(numbers))
    return [vectors[[numbers[text] for text in column]] for column in columns]

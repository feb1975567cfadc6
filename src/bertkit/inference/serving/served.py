"""A model that is served: what it can do, the work of a request, and how work of many requests is computed together.

Nothing here follows a paper; bertkit.inference.model computes. Methods that count and tokenise are called by one
thread, `compute` by another: they share nothing that changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from bertkit.errors import DataError, UsageError
from bertkit.inference.documents import Item
from bertkit.inference.embedder import TextSequence
from bertkit.inference.model import Model
from bertkit.inference.predict import head_kind
from bertkit.models.hub import read_config
from bertkit.models.model_files import MODULES_FILE, encoder_directory
from bertkit.models.sentence import is_embedder, read_modules
from bertkit.tasks.examples import TaggedExample

Ability = Literal["embed", "predict", "rerank", "fill"]
ROUTES: dict[Ability, str] = {
    "embed": "/v1/embeddings",
    "predict": "/predict",
    "rerank": "/rerank",
    "fill": "/fill",
}


class WorkKind(NamedTuple):
    """Work that is computed together: of one model, of one kind, with one setting of `top`."""

    model: str
    ability: Ability
    top: int | None = None


class Work(NamedTuple):
    """Items and the tokens of each."""

    items: list[Any]
    tokens: list[int]


@dataclass(frozen=True)
class ServedModel:
    """A model with the name that requests give.

    Attributes:
        name: of requests; nothing of where it lies.
        model: the model.
        abilities: what it answers.
    """

    name: str
    model: Model
    abilities: frozenset[Ability]

    @classmethod
    def load(cls, name: str, model: Model) -> ServedModel:
        """Find out what a model can do, and read the weights for it.

        A directory of sentence-transformers gives vectors, a model with a task's head predictions, one with a masked-LM
        head tokens for masks and vectors, and any other vectors. What has vectors reranks by their cosine, what
        predicts a number of a pair by that.

        Raises:
            DataError: the model cannot be read.
        """
        abilities = _abilities(model)
        if "predict" in abilities and model.kind == "regression":
            abilities |= {"rerank"}
        if "embed" in abilities:
            model.encode(["a"])  # a damaged model ends the start, not a request
        return cls(name, model, abilities)

    def embed_work(self, texts: Sequence[str | Sequence[int]]) -> Work:
        """The sequences of texts or token ids.

        Raises:
            DataError: an id that is not in the vocabulary; a text without a token in a model without special ones.
        """
        sequences = self.model.sequences(texts)
        empty = next((number for number, each in enumerate(sequences) if not each.ids), None)
        if empty is not None:
            raise DataError(f"text {empty} has no tokens; leave it out")
        return Work(list(sequences), [len(each.ids) for each in sequences])

    def predict_work(self, inputs: Sequence[Any]) -> Work:
        """The examples of inputs as `bertkit predict` reads them.

        Raises:
            DataError: an input lacks a field.
        """
        examples = self.model.examples(inputs)
        return Work(list(examples), self._counted([_texts_of(each) for each in inputs]))

    def fill_work(self, texts: Sequence[str]) -> Work:
        """Texts with masks."""
        return Work(list(texts), self._counted([[text] for text in texts]))

    def _counted(self, texts: Sequence[Sequence[str]]) -> list[int]:
        """Tokens of each item, at least one."""
        counts = iter(self.model.token_counts([text for each in texts for text in each]))
        return [max(1, sum(next(counts) for _ in each)) for each in texts]

    def compute(self, kind: WorkKind, items: Sequence[Any]) -> list[Any]:
        """One result for each item: a vector, a document of predictions, or one of filled masks.

        Raises:
            DataError: an item that the model cannot read.
        """
        if kind.ability == "embed":
            sequences: Sequence[TextSequence] = items
            return list(self.model.vectors(sequences))
        if kind.ability == "fill":
            return [{"text": text, "masks": self.model.fill(text, top=kind.top or 5)} for text in items]
        return self.model.documents(apart(items), top=kind.top, independent=True)

    def blame(self, error: DataError | UsageError) -> tuple[bool, str]:
        """Whether the model is at fault rather than the request, and the message without the model's place."""
        message = str(error)
        directory = self.model.directory
        places = [
            each for path in (directory, encoder_directory(directory)) for each in (str(path.resolve()), str(path))
        ]
        for place in places:
            if place in message:
                return True, message.replace(place, self.name)
        given, colon, rest = message.partition(": ")
        is_own = bool(colon) and given == self.model.name
        return is_own, f"{self.name}: {rest}" if is_own else message


def apart(items: Sequence[Item]) -> list[Item]:
    """Sentences of different requests are no neighbours in a document."""
    return [
        replace(item, document=number) if isinstance(item, TaggedExample) else item for number, item in enumerate(items)
    ]


def cosine(query_E: np.ndarray[Any, Any], vector_NE: np.ndarray[Any, Any]) -> list[float]:
    """Of one vector with each of several, in float64; 0 where one of them has no length."""
    query, vectors = query_E.astype(np.float64), vector_NE.astype(np.float64)
    lengths = np.linalg.norm(vectors, axis=-1) * np.linalg.norm(query)
    products = (vectors * query).sum(axis=-1)  # row by row, so that no score depends on its company
    scores: list[float] = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0).tolist()
    return scores


def _abilities(model: Model) -> frozenset[Ability]:
    found: set[Ability] = set()
    if is_embedder(model.directory):
        found |= {"embed", "rerank"}
        if read_modules(model.directory / MODULES_FILE)[0].kind == "StaticEmbedding":
            return frozenset(found)  # a table of vectors has no heads, and as others write it no config.json
    config, contents = read_config(encoder_directory(model.directory))
    try:
        head_kind(config, contents, model.name)
    except DataError:
        if not found:
            found |= {"embed", "rerank"}
            found |= {"fill"} if model.can_fill() else set()
        return frozenset(found)
    return frozenset({*found, "predict"})


def _texts_of(given: Any) -> list[str]:
    """All texts of an input, as often as a model reads them: a context stands beside each of its endings."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, Mapping):
        several = [each for value in given.values() if isinstance(value, list) for each in value]
        single = [value for value in given.values() if isinstance(value, str)]
        endings = given.get("endings")
        return single * (len(endings) if isinstance(endings, list) else 1) + [t for t in several if isinstance(t, str)]
    return [each for each in given if isinstance(each, str)]

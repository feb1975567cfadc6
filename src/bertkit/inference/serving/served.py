"""A served model: its abilities, the work of a request, and how work of many requests is computed together.

Not from a paper; bertkit.inference.model computes. Methods that count and tokenise are called by one thread, `compute`
by another; they share no mutable state.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from bertkit.errors import DataError, UsageError
from bertkit.inference.documents import Item
from bertkit.inference.embedder import TextSequence
from bertkit.inference.model import Model
from bertkit.inference.predict import head_kind
from bertkit.models.files.hub import read_config
from bertkit.models.files.model_files import MODULES_FILE, encoder_directory, read_modules
from bertkit.models.sentence import is_embedder, is_sparse_embedder, is_token_encoder
from bertkit.models.similarity import Similarity
from bertkit.tasks.choice import completed
from bertkit.tasks.embedding.token_reader import TokenSequence
from bertkit.tasks.examples import ChoiceExample, QuestionExample, SentenceExample, TaggedExample, TextExample

Ability = Literal["embed", "embed_sparse", "predict", "rerank", "fill"]
ROUTES: dict[Ability, str] = {
    "embed": "/v1/embeddings",
    "embed_sparse": "/v1/sparse-embeddings",
    "predict": "/predict",
    "rerank": "/rerank",
    "fill": "/fill",
}


class WorkKind(NamedTuple):
    """Work that is computed together: of one model, one kind and one value of `top`."""

    model: str
    ability: Ability
    top: int | None = None


class Work(NamedTuple):
    """Items and the number of tokens of each; `cut` is the number of items that exceed the model's maximum length."""

    items: list[Any]
    tokens: list[int]
    cut: int = 0


@dataclass(frozen=True)
class ServedModel:
    """A model with the name that requests use.

    Attributes:
        name: used in requests; does not reveal the path.
        model: the model.
        abilities: the kinds of requests it answers.
    """

    name: str
    model: Model
    abilities: frozenset[Ability]

    @classmethod
    def load(cls, name: str, model: Model) -> ServedModel:
        """Determine a model's abilities, and read the weights for them.

        A directory of sentence-transformers gives vectors; a model with a task head gives predictions; one with a
        masked-LM head fills masks and gives vectors; any other model gives vectors. Models with vectors rerank by
        their own similarity, cosine or dot product; models with a vector for each token (ColBERT)
        only rerank; models that predict a number, and were not
        trained on single texts, rerank by the number of a pair.

        Raises:
            DataError: the model cannot be read.
        """
        if is_sparse_embedder(model.directory):
            model.encode(["a"])  # as below
            return cls(name, model, frozenset({"embed_sparse", "rerank"}))
        if is_token_encoder(model.directory):
            model.late_scores("a", ["a"])  # as below
            return cls(name, model, frozenset({"rerank"}))
        abilities = _abilities(model)
        if "predict" in abilities and model.kind == "regression" and not model.reads_single_texts:
            abilities |= {"rerank"}
        if "embed" in abilities:
            model.encode(["a"])  # a damaged model fails at the start, not during a request
        return cls(name, model, abilities)

    def embed_work(
        self,
        texts: Sequence[str | Sequence[int]],
        place: Callable[[int], str] = "text {}".format,
        prompt: str | None = None,
    ) -> Work:
        """The sequences of texts or token ids.

        Args:
            texts: the texts.
            place: the name of a text in errors, by its number.
            prompt: prefix of each text; None: the model's default prompt.

        Raises:
            DataError: an id is not in the vocabulary, or a text has no tokens and the model adds no special ones.
        """
        sequences = self.model.embedder.sequences(texts, prompt)
        empty = next((number for number, each in enumerate(sequences) if not each.ids), None)
        if empty is not None:
            raise DataError(f"{place(empty)} has no tokens; leave it out")
        return _cut_work(sequences)

    def ranking_work(self, texts: Sequence[str], place: Callable[[int], str]) -> Work:
        """The sequences of a query and the documents after it, with the model's prompts for either.

        Raises:
            DataError: see `embed_work`.
        """
        prompts = self.model.embedder.reading
        query = self.embed_work(texts[:1], place, prompts.query_prompt)
        documents = self.embed_work(texts[1:], lambda number: place(number + 1), prompts.document_prompt)
        return _cut_work([*query.items, *documents.items])

    @property
    def compares_tokens(self) -> bool:
        """Whether the model has a vector for each token (ColBERT)."""
        return self.abilities == {"rerank"}

    def token_work(self, texts: Sequence[str]) -> Work:
        """The sequences of a query and the documents after it, for a model with a vector for each token."""
        reader = self.model.by_token.reader
        return _cut_work([*reader.queries(texts[:1]), *reader.documents(texts[1:])])

    def predict_work(self, inputs: Sequence[Any]) -> Work:
        """The examples of inputs, read as by `bertkit predict`.

        Raises:
            DataError: an input has no value for a required field, or one text for a model of pairs, or a pair for one
                of single texts.
        """
        examples = self.model.examples(inputs)
        for number, example in enumerate(examples):
            if not isinstance(example, TextExample):
                continue
            if self.model.reads_pairs and example.text_pair is None:
                raise DataError(
                    f"input {number}: {self.name} was trained on pairs of texts; give an object with text and text_pair"
                )
            if self.model.reads_single_texts and example.text_pair is not None:
                raise DataError(f"input {number}: {self.name} was trained on single texts; leave text_pair out")
        sequences = [_sequences_of(each) for each in examples]
        every_length = iter(self._lengths([texts for each in sequences for texts in each]))
        lengths = [[next(every_length) for _ in each] for each in sequences]
        longest = self.model.longest_example or sys.maxsize
        tokens = [max(1, sum(min(each, longest) for each in own)) for own in lengths]
        cut = sum(max(own, default=0) > longest for own in lengths) + self._questions_cut(examples)
        return Work(list(examples), tokens, cut)

    def _questions_cut(self, examples: Sequence[Item]) -> int:
        """The number of questions that are longer than the model reads."""
        longest = self.model.longest_question
        if longest is None:
            return 0
        questions = [each.question for each in examples if isinstance(each, QuestionExample)]
        return sum(count > longest for count in self.model.token_counts(questions))

    def fill_work(self, texts: Sequence[str]) -> Work:
        """Texts with masks."""
        parts = [text.split(self.model.mask_token) for text in texts]
        counts = iter(self.model.token_counts([part for each in parts for part in each]))
        around, _ = self.model.special_tokens
        return Work(list(texts), [sum(next(counts) for _ in each) + len(each) - 1 + around for each in parts])

    def _lengths(self, sequences: Sequence[Sequence[str]]) -> list[int]:
        """Number of tokens of each sequence of one text or two, special tokens included; nothing is cut."""
        counts = iter(self.model.token_counts([text for texts in sequences for text in texts]))
        around = self.model.special_tokens
        return [sum(next(counts) for _ in texts) + around[len(texts) - 1] for texts in sequences]

    def compute(self, kind: WorkKind, items: Sequence[Any]) -> list[Any]:
        """One result per item: a vector (if sparse, a matrix of one row), or a document of predictions or of filled
        masks.

        Raises:
            DataError: the model cannot read an item.
        """
        if kind.ability == "rerank":
            tokens: Sequence[TokenSequence] = items
            return list(self.model.by_token.vectors(tokens))
        if kind.ability == "embed":
            sequences: Sequence[TextSequence] = items
            return list(self.model.embedder.vectors(sequences))
        if kind.ability == "embed_sparse":
            weight_NV = self.model.embedder.sparse_vectors(items)
            return [weight_NV[[row]] for row in range(len(items))]
        if kind.ability == "fill":
            return [{"text": text, "masks": self.model.fill(text, top=kind.top or 5)} for text in items]
        return self.model.documents(apart(items), top=kind.top, independent=True)

    def blame(self, error: DataError | UsageError) -> tuple[bool, str]:
        """Whether the model rather than the request is at fault, and the message without the model's path."""
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
    """Number documents so that sentences of different requests are not neighbours in a document."""
    return [
        replace(item, document=number) if isinstance(item, TaggedExample) else item for number, item in enumerate(items)
    ]


def _cut_work(sequences: Sequence[TextSequence | TokenSequence]) -> Work:
    """The work of sequences that are already cut."""
    cut = sum(each.cut > 0 for each in sequences)
    return Work(list(sequences), [len(each.ids) for each in sequences], cut)


def similarities(query_E: np.ndarray[Any, Any], vector_NE: np.ndarray[Any, Any], similarity: Similarity) -> list[float]:
    """Cosine or dot product of one vector with each of several, in float64."""
    if similarity == "cosine":
        return cosine(query_E, vector_NE)
    scores: list[float] = (vector_NE.astype(np.float64) * query_E).sum(axis=-1).tolist()
    return scores


def cosine(query_E: np.ndarray[Any, Any], vector_NE: np.ndarray[Any, Any]) -> list[float]:
    """Cosine of one vector with each of several, in float64; 0 if one of them has length zero."""
    query, vectors = query_E.astype(np.float64), vector_NE.astype(np.float64)
    lengths = np.linalg.norm(vectors, axis=-1) * np.linalg.norm(query)
    products = (vectors * query).sum(axis=-1)  # row by row, so that no score depends on the other rows
    quotients = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
    scores: list[float] = quotients.clip(-1, 1).tolist()  # rounding may exceed one
    return scores


def _abilities(model: Model) -> frozenset[Ability]:
    found: set[Ability] = set()
    if is_embedder(model.directory):
        found |= {"embed", "rerank"}
        if read_modules(model.directory / MODULES_FILE)[0].kind == "StaticEmbedding":
            return frozenset(found)  # a table of vectors has no heads and, as others write it, no config.json
    config, contents = read_config(encoder_directory(model.directory))
    try:
        head_kind(config, contents, model.name)
    except DataError:
        if not found:
            found |= {"embed", "rerank"}
            found |= {"fill"} if model.can_fill() else set()
        return frozenset(found)
    return frozenset({*found, "predict"})


def _sequences_of(item: Item) -> list[list[str]]:
    """The texts of each sequence that a model reads for an item; windows of a long text count as one sequence."""
    if isinstance(item, TextExample):
        return [[item.text] if item.text_pair is None else [item.text, item.text_pair]]
    if isinstance(item, QuestionExample):
        return [[item.question, item.context]]
    if isinstance(item, ChoiceExample):
        return [[item.context, completed(item.question, ending)] for ending in item.endings]
    if isinstance(item, SentenceExample):
        return [[text] for text in item.texts]
    text = " ".join(item.words) if isinstance(item, TaggedExample) else item.text
    return [[text]] if text.strip() else []

"""A model in Python: the results of `bertkit predict`, `fill` and `generate`, and vectors, as Python objects.

Not from a paper except the pooling of vectors (Reimers and Gurevych 2019, arXiv:1908.10084, see
bertkit.models.sentence). `bertkit.load` returns a Model; each method reads the weights when it is first called.

Shapes: N texts, E width of the vectors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from numbers import Integral
from typing import Any, Literal

import torch

from bertkit.arrays import Float32Array
from bertkit.errors import DataError, MissingColumnError, UsageError
from bertkit.generation.run import generate
from bertkit.generation.settings import GenerationSettings
from bertkit.inference.documents import Item, documents
from bertkit.inference.embedder import Embedder
from bertkit.inference.independent_predictions import independent_outputs
from bertkit.inference.predict import Predictor
from bertkit.inference.predict_input import examples_of
from bertkit.inference.sparse_vectors import words_of_vocabulary
from bertkit.inference.token_embedder import TokenEmbedder
from bertkit.models.bge_m3 import find_embedder
from bertkit.models.files.hub import check_vocabulary, load_model
from bertkit.models.files.model_files import encoder_directory
from bertkit.models.headed import HeadedModel
from bertkit.models.scoring.fill_mask import fill_masks
from bertkit.models.sentence import is_token_encoder
from bertkit.openmp import warn_of_more_threads
from bertkit.recipe.errors import validate
from bertkit.recipe.tree import Located
from bertkit.tasks.catalogue import Kind
from bertkit.tasks.encoding import Template
from bertkit.tasks.span import Span
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.engine import resolve_engine
from bertkit.training.engine_config import EngineConfig

Input = str | tuple[str, str] | Sequence[str] | Mapping[str, Any]
"""A text, a pair of texts, the words of a sentence, or fields by name, as in JSON Lines for `bertkit predict`."""


class Model:
    """A loaded model, see `bertkit.load`.

    Args:
        name: a run directory, a model directory or a Hub id.
        device: where to compute; everything except `encode` uses fp32.
        precision: of `encode`; bf16 is about three times as fast on a processor with instructions for it, and auto
            chooses it there.
        offline: read Hub models only from the local cache.

    Attributes:
        directory: the directory of the model.

    Raises:
        DataError: there is no such model.
        UsageError: there is no CUDA device, or an argument is invalid.
    """

    def __init__(
        self,
        name: str | os.PathLike[str],
        *,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        precision: Literal["auto", "fp32", "bf16"] = "fp32",
        offline: bool = False,
    ) -> None:
        given = Located.of({"device": device, "precision": precision}, "load()")
        self._settings = validate(given, EngineConfig, what="load()")
        self.name = os.fspath(name)
        self.directory = find_embedder(self.name, offline=offline).absolute()  # read later, from anywhere
        self._offline = offline
        self._engine = resolve_engine(EngineConfig(device=device, precision="fp32"))
        if self._engine.device.type == "cpu":
            warn_of_more_threads(torch.get_num_threads())

    def __repr__(self) -> str:
        return f"bertkit.load({self.name!r})"

    def predict(self, inputs: Iterable[Input], *, top: int | None = None) -> list[dict[str, Any]]:
        """Predict labels with the head the model was fine-tuned with.

        Args:
            inputs: texts, pairs of texts as tuples (question and context for a model that answers questions), lists of
                words (for a tagger), or mappings with the fields that `bertkit predict` reads (`question` and
                `context`, `context` and `endings`).
            top: keep this many of the greatest scores, or answers; None: all scores, 5 answers.

        Returns:
            One document per input, in order, as printed by `bertkit predict`: `id`, `prediction` and, if the task has
            any, `scores`. For a tagger given a text: `text` and `entities`, with `label`, `start`, `end` (characters,
            end exclusive), `text`, `score`. For a question: `answers` (`text`, `start`, `end`, `score`) and
            `no_answer`, a probability. The prediction of an empty text is None.

        Raises:
            DataError: the model has no fine-tuned head, or an input has no value for a required field.
            UsageError: `inputs` is a single text, an input is neither a text nor fields or words, or `top` is below 1.
        """
        if top is not None:
            _require_count(top, "predict")
        return self.documents(self.examples(inputs), top=top)

    def examples(self, inputs: Iterable[Input]) -> list[Item]:
        """The inputs of `predict` as examples; an empty text if there is nothing to read.

        Raises:
            DataError: the model has no fine-tuned head, or an input has no value for a required field.
            UsageError: `inputs` is a single text, or an input is neither a text nor fields or words.
        """
        several = list(_several(inputs, "predict"))
        kind = self.kind
        rows = [(where := f"input {number}", _fields(each, kind, where)) for number, each in enumerate(several)]
        try:
            return list(examples_of(rows, kind, self._predictor.columns))
        except MissingColumnError as error:  # a table has columns, a mapping has fields
            raise DataError(str(error).replace("no column", "no field", 1)) from error

    def documents(
        self, examples: Iterable[Item], *, top: int | None = None, independent: bool = False
    ) -> list[dict[str, Any]]:
        """The documents of examples, see `predict`. A tagger trained on documents reads neighbouring examples with the
        same `document` together.

        Args:
            examples: as returned by `examples`.
            top: see `predict`.
            independent: for a server, which counts texts that are cut itself: on a CPU no answer's bits depend on
                another (independent_predictions.py); slightly slower.
        """
        predictor = self._independent_predictor if independent else self._predictor
        return [document for _, document in documents(predictor, examples, top=top)]

    @property
    def reads_pairs(self) -> bool:
        """Whether the fine-tuned head was trained on pairs of texts, as far as the model's files tell.

        Raises:
            DataError: there is no such head.
        """
        return bool(self._predictor.columns.text_pairs)

    @property
    def reads_single_texts(self) -> bool:
        """Whether the fine-tuned head was trained on single texts, as far as the model's files tell.

        Raises:
            DataError: there is no such head.
        """
        return self._predictor.reads_single_texts

    @property
    def kind(self) -> Kind:
        """What the fine-tuned head predicts.

        Raises:
            DataError: there is no such head.
        """
        return self._predictor.kind

    def encode(
        self, texts: Iterable[str], *, prompt: str | None = None, prompt_name: str | None = None
    ) -> Float32Array:
        """The vector of each text, of shape (N, E) and in the order of the texts.

        Pooling and further modules are those of a sentence-transformers directory; for other models the states are
        averaged over the tokens. A text longer than the model's maximum is cut at its end. On a CPU the vector of a
        text is bit-identical whatever other texts are in the call.

        Args:
            texts: the texts.
            prompt: text to put before each text, such as "query: ".
            prompt_name: name of one of the model's own prompts, such as query; by default its default prompt, if it has
                one.

        Raises:
            UsageError: `texts` is a single text, one of them is not a text, the model has no such prompt, or both a
                prompt and a name are given.
            DataError: a text has no tokens and the model's sequences have no special tokens.
        """
        chosen = [_text(each, f"text {number}") for number, each in enumerate(_several(texts, "encode"))]
        if prompt is not None and prompt_name is not None:
            raise UsageError("encode(): prompt and prompt_name: give one of them")
        prompt = self.embedder.reading.named(prompt_name) if prompt_name is not None else prompt
        sequences = self.embedder.sequences(chosen, prompt)
        empty = next((number for number, each in enumerate(sequences) if not each.ids), None)
        if empty is not None:
            raise DataError(f"text {empty} ({chosen[empty]!r}) has no tokens; leave it out")
        return self.embedder.vectors(sequences)

    def token_vectors(
        self, texts: Iterable[str], *, role: Literal["query", "document"] = "document"
    ) -> list[Float32Array]:
        """The vectors of each text's scored tokens, one array (tokens, E) per text, of a model with a vector for each
        token (ColBERT), with the model's prompt for the role.

        Raises:
            UsageError: `texts` is a single text, one of them is not a text, or the model has one vector per text.
        """
        chosen = [_text(each, f"text {number}") for number, each in enumerate(_several(texts, "token_vectors"))]
        if role not in ("query", "document"):
            raise UsageError(f"token_vectors(): role is {role!r}; expected query or document")
        return (self.by_token.queries if role == "query" else self.by_token.documents)(chosen)

    def late_scores(self, query: str, texts: Iterable[str]) -> list[float]:
        """How well each text answers the query, by late interaction (ColBERT).

        Raises:
            UsageError: see `token_vectors`.
        """
        chosen = [_text(each, f"text {number}") for number, each in enumerate(_several(texts, "late_scores"))]
        return self.by_token.scores(_one(query, "late_scores"), chosen)

    @cached_property
    def by_token(self) -> TokenEmbedder:
        """The model with a vector for each token.

        Raises:
            UsageError: the model has one vector per text.
        """
        if not is_token_encoder(self.directory):
            raise UsageError(f"{self.name}: has no vector for each token (ColBERT); encode() gives one vector per text")
        return TokenEmbedder.load(self.directory, self._engine, name=self.name, offline=self._offline)

    @cached_property
    def embedder(self) -> Embedder:
        """The model with a vector for each text, for a server, which tokenises and computes apart."""
        return Embedder.load(self.directory, resolve_engine(self._settings), name=self.name, offline=self._offline)

    @cached_property
    def vocabulary_words(self) -> list[str]:
        """The word of each number of a sparse vector (SPLADE)."""
        return words_of_vocabulary(self.embedder)

    def fill(self, text: str, *, top: int = 5) -> list[list[dict[str, Any]]]:
        """The most probable tokens at each [MASK] of a text.

        Args:
            text: with the model's mask token in place of words.
            top: number of tokens per mask.

        Returns:
            For each mask, in order, the tokens with their probability, most probable first: `token` (its form in the
            vocabulary), `text` (its readable form), `id`, `probability`.

        Raises:
            DataError: the model has no masked-LM head, or the text has no mask or is too long.
            UsageError: `text` is not one text, or `top` is below 1.
        """
        _require_count(top, "fill")
        texts = [_one(text, "fill")]
        (document,) = fill_masks(self._pretrained, self._tokenizer, texts, top=top, device=self._engine.device)
        masks: list[list[dict[str, Any]]] = document["masks"]
        return masks

    def generate(
        self, prompt: str, *, on_text: Callable[[str], None] | None = None, **settings: Any
    ) -> list[dict[str, Any]]:
        """Continue a text, or fill its masks.

        Args:
            prompt: the text; for a masked model optionally with masks to fill.
            on_text: called with the output so far after every new token of a causal model, if there is one sample.
            settings: fields of `bertkit.generation.settings.GenerationSettings`: `max_new_tokens=20`, `samples=3`,
                `temperature=0.8`, `beam=4`, `seed=1`, ...

        Returns:
            The outputs, as printed by `bertkit generate`: `text`, `ids` (the new tokens), `score` (their
            log-probability in nats), `finish`.

        Raises:
            DataError: the model has no head that generates, or the prompt leaves no room for output.
            UsageError: a setting is invalid or has no effect, or `prompt` is not one text.
        """
        chosen = validate(Located.of(dict(settings), "generate()"), GenerationSettings, what="generate()")
        (document,) = generate(
            self._pretrained,
            self._tokenizer,
            [_one(prompt, "generate")],
            chosen,
            device=self._engine.device,
            on_text=None if on_text is None else lambda _prompt, _sample, text: on_text(text),
        )
        outputs: list[dict[str, Any]] = document["outputs"]
        return outputs

    def token_counts(self, texts: Sequence[str]) -> list[int]:
        """The number of tokens of each text, without special tokens; nothing is cut."""
        lengths: list[int] = self._tokenizer.encode_plain(list(texts))[1].tolist() if texts else []
        return lengths

    @cached_property
    def special_tokens(self) -> tuple[int, int]:
        """The number of special tokens in a sequence of one text, and in one of two."""
        one, two = (Template.of(self._tokenizer.backend, texts) for texts in (1, 2))
        return one.special_tokens, two.special_tokens

    @property
    def longest_example(self) -> int | None:
        """The number of tokens to which `predict` cuts an example; None if it reads a long one in several windows.

        Raises:
            DataError: the model has no fine-tuned head.
        """
        settings = getattr(self._predictor.task, "settings", None)
        in_windows = self.kind in ("tagging", "span") or getattr(settings, "window_stride", None)
        return None if in_windows else self._predictor.encoder.max_tokens

    @property
    def longest_question(self) -> int | None:
        """The number of tokens to which `predict` cuts a question; None if the model does not answer any.

        Raises:
            DataError: the model has no fine-tuned head.
        """
        task = self._predictor.task
        return task.settings.max_query_tokens if isinstance(task, Span) else None

    def can_fill(self) -> bool:
        """Whether the model fills masks: it has a trained masked-LM head."""
        try:
            self.fill(self.mask_token, top=1)
        except DataError:
            self.__dict__.pop("_pretrained", None)  # no longer used; frees its memory
            return False
        return True

    @property
    def mask_token(self) -> str:
        """The mask token, as it is written in a text."""
        return self._tokenizer.token(self._tokenizer.mask_id)

    @property
    def batch_tokens(self) -> int:
        """Number of tokens computed at once."""
        return self._engine.micro_batch_tokens

    @cached_property
    def _predictor(self) -> Predictor:
        return Predictor.load(str(self.directory), self._engine, offline=self._offline)

    @cached_property
    def _independent_predictor(self) -> Predictor:
        return replace(self._predictor, outputs=independent_outputs, warns_of_cut=False)

    @cached_property
    def _pretrained(self) -> HeadedModel:
        model, _ = load_model(self.directory)
        check_vocabulary(model, self._tokenizer, source=self.name)
        return model.to(self._engine.device)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(encoder_directory(self.directory), offline=self._offline)


def _several(inputs: Iterable[Any], method: str) -> Iterable[Any]:
    if isinstance(inputs, str | Mapping) or not isinstance(inputs, Iterable):
        raise UsageError(f"{method} takes a list of texts; write {method}([text])")
    return inputs


def _one(given: Any, method: str) -> str:
    if not isinstance(given, str):
        raise UsageError(f"{method} takes one text, not {_of_type(given)}; call it once per text")
    return given


def _require_count(top: Any, method: str) -> None:
    if not isinstance(top, Integral) or isinstance(top, bool) or top < 1:
        raise UsageError(f"{method}(): top is {_of_type(top)}, expected a whole number from 1 on")


def _text(given: Any, where: str) -> str:
    if not isinstance(given, str):
        raise UsageError(f"{where}: {_of_type(given)}, expected a text; leave missing ones out, or give empty texts")
    return given


def _fields(given: Input, kind: Kind, where: str) -> dict[str, Any]:
    if isinstance(given, str):
        return {"text": given}
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, tuple):
        names = ("question", "context") if kind == "span" else ("text", "text_pair")
        if len(given) != len(names):
            raise UsageError(f"{where}: a tuple of {len(given)}, expected a pair, ({', '.join(names)})")
        return dict(zip(names, given, strict=True))
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise UsageError(
            f"{where}: {_of_type(given)}, expected a text, a pair of texts, a list of words or a mapping of fields;"
            " the prediction of an empty text is None"
        )
    return {"words": list(given)}


def _of_type(given: Any) -> str:
    return f"{given!r:.60} of type {type(given).__name__}"

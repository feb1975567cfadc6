"""A model from Python: what `bertkit predict`, `fill` and `generate` print, and vectors of texts, as Python objects.

Nothing here follows a paper but the pooling of vectors (Reimers and Gurevych 2019, arXiv:1908.10084, see
bertkit.models.sentence). `bertkit.load` makes a Model; each of its methods reads the weights at its first call.

Shapes: N texts, E width of the vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError, UsageError
from bertkit.generation.run import generate
from bertkit.generation.settings import GenerationSettings
from bertkit.inference.documents import documents
from bertkit.inference.predict import Predictor
from bertkit.inference.predict_input import examples_of
from bertkit.models.fill_mask import fill_masks
from bertkit.models.headed import HeadedModel
from bertkit.models.hub import load_model
from bertkit.models.model_files import encoder_directory, find_model
from bertkit.models.sentence import SentenceModel, load_sentence_model
from bertkit.recipe.errors import validate
from bertkit.recipe.tree import Located
from bertkit.tasks.catalogue import Kind
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.engine import resolve_engine
from bertkit.training.engine_config import EngineConfig

Input = str | tuple[str, str] | Sequence[str] | Mapping[str, Any]
"""A text, a pair of texts, the words of a sentence, or fields by name, as in JSON Lines for `bertkit predict`."""


class Model:
    """A model in use, see `bertkit.load`.

    Args:
        name: a run directory, a model directory or a Hub id.
        device: where to compute, always in fp32.
        offline: read a Hub model from the local cache alone.

    Attributes:
        directory: the directory of the model.

    Raises:
        DataError: there is no such model.
        UsageError: there is no CUDA device.
    """

    def __init__(self, name: str, *, device: Literal["auto", "cpu", "cuda"] = "auto", offline: bool = False) -> None:
        self.name = name
        self.directory = find_model(name, offline=offline)
        self._offline = offline
        self._engine = resolve_engine(EngineConfig(device=device, precision="fp32"))

    def __repr__(self) -> str:
        return f"bertkit.load({self.name!r})"

    def predict(self, inputs: Iterable[Input], *, top: int | None = None) -> list[dict[str, Any]]:
        """Label texts with the head that the model was fine-tuned with.

        Args:
            inputs: texts, pairs of texts as tuples (of a model for answers: question and context), lists of words (for
                a tagger), or mappings with the fields that `bertkit predict` reads (`question` and `context`, `context`
                and `endings`).
            top: keep this many of the greatest scores, or answers; all scores, and 5 answers, where None.

        Returns:
            One document for each input, in order, as `bertkit predict` prints: `id`, `prediction` and, where the task
            has any, `scores`. A tagger's of a text has `text` and `entities`: `label`, `start`, `end` (characters, the
            end not included), `text`, `score`. That of a question has `answers` (`text`, `start`, `end`, `score`) and
            `no_answer`, a probability. An empty text has the prediction None.

        Raises:
            DataError: the model has no fine-tuned head, or an input lacks a field.
            UsageError: `inputs` is a single text.
        """
        several = list(_several(inputs, "predict"))
        kind = self._predictor.kind
        rows = [(f"input {number}", _fields(each, kind)) for number, each in enumerate(several)]
        examples = examples_of(rows, kind, self._predictor.columns)
        return [document for _, document in documents(self._predictor, examples, top=top)]

    def encode(self, texts: Iterable[str]) -> NDArray[np.float32]:
        """The vector of each text, of shape (N, E) and in the order of the texts.

        Pooling and further modules are those of a sentence-transformers directory; any other model's states are
        averaged over the tokens. A text that is longer than the model reads is cut at its end.

        Raises:
            UsageError: `texts` is a single text.
            DataError: a text has no tokens and the model's sequences no special ones.
        """
        model = self._sentence_model
        chosen = [text.lower() if model.lowercases else text for text in _several(texts, "encode")]
        encoder = SequenceEncoder(
            self._tokenizer,
            max_tokens=model.max_tokens,
            token_types=model.model.encoder.config.reads_token_types,
        )
        room = encoder.room(1)
        sequences_N = [encoder.single.fill(ids[:room]) for ids in encoder.ids(chosen)]
        empty = next((number for number, (ids, _) in enumerate(sequences_N) if not ids), None)
        if empty is not None:
            raise DataError(f"text {empty} ({chosen[empty]!r}) has no tokens; leave it out")
        vectors: dict[int, NDArray[np.float32]] = {}
        with torch.inference_mode():
            for batch in _batches([len(ids) for ids, _ in sequences_N], self._engine.micro_batch_tokens):
                ids, types = zip(*(sequences_N[number] for number in batch), strict=True)
                packed = PackedBatch.from_ids(ids, types).to(self._engine.device)
                vectors.update(zip(batch, model(packed).cpu().numpy(), strict=True))
        if not vectors:
            return np.empty((0, self.encode(["a"]).shape[1]), dtype=np.float32)
        return np.stack([vectors[number] for number in range(len(chosen))])

    def fill(self, text: str, *, top: int = 5) -> list[list[dict[str, Any]]]:
        """The most probable tokens at each [MASK] of a text.

        Args:
            text: with the model's mask token in place of words.
            top: tokens for each mask.

        Returns:
            For each mask, in order, the tokens with their probability, the most probable first: `token`, `id`,
            `probability`.

        Raises:
            DataError: the model has no masked-LM head, or the text has no mask or is too long.
        """
        (document,) = fill_masks(self._pretrained, self._tokenizer, [text], top=top, device=self._engine.device)
        masks: list[list[dict[str, Any]]] = document["masks"]
        return masks

    def generate(
        self, prompt: str, *, on_text: Callable[[str], None] | None = None, **settings: Any
    ) -> list[dict[str, Any]]:
        """Go on from a text, or fill in its masks.

        Args:
            prompt: the text; of a masked model also with masks to be filled.
            on_text: called with the output so far after every new token of a causal model, where there is one sample.
            settings: fields of `bertkit.generation.settings.GenerationSettings`: `max_new_tokens=20`, `samples=3`,
                `temperature=0.8`, `beam=4`, `seed=1`, ...

        Returns:
            The outputs, as `bertkit generate` prints: `text`, `ids` (the new tokens), `score` (their log-probability,
            in nats), `finish`.

        Raises:
            DataError: the model has no head that generates, or the prompt has no room.
            UsageError: an invalid setting, or one without effect.
        """
        chosen = validate(Located.of(dict(settings), "generate()"), GenerationSettings, what="generate()")
        (document,) = generate(
            self._pretrained,
            self._tokenizer,
            [prompt],
            chosen,
            device=self._engine.device,
            on_text=None if on_text is None else lambda _prompt, _sample, text: on_text(text),
        )
        outputs: list[dict[str, Any]] = document["outputs"]
        return outputs

    @cached_property
    def _predictor(self) -> Predictor:
        return Predictor.load(str(self.directory), self._engine, offline=self._offline)

    @cached_property
    def _pretrained(self) -> HeadedModel:
        return load_model(self.directory)[0].to(self._engine.device)

    @cached_property
    def _sentence_model(self) -> SentenceModel:
        return load_sentence_model(self.directory).to(self._engine.device)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(encoder_directory(self.directory), offline=self._offline)


def _several(inputs: Iterable[Any], method: str) -> Iterable[Any]:
    if isinstance(inputs, str | Mapping):
        raise UsageError(f"{method} takes a list of texts; write {method}([text])")
    return inputs


def _fields(given: Input, kind: Kind) -> dict[str, Any]:
    if isinstance(given, str):
        return {"text": given}
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, tuple):
        return dict(zip(("question", "context") if kind == "span" else ("text", "text_pair"), given, strict=True))
    return {"words": list(given)}


def _batches(lengths: Sequence[int], most: int) -> Iterable[list[int]]:
    """Numbers of sequences, the longest first, in batches of at most `most` tokens."""
    batch: list[int] = []
    tokens = 0
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if batch and tokens + lengths[number] > most:
            yield batch
            batch, tokens = [], 0
        batch.append(number)
        tokens += lengths[number]
    if batch:
        yield batch

"""Queries and documents to token vectors and scores: late interaction with a finished model.

Khattab and Zaharia 2020, ColBERT, arXiv:2004.12832 (the model, bertkit.models.late_interaction). Sibling embedder.py
has one vector per text; as there, the bits of a text's vectors do not depend on other texts. Everything is computed in
fp32.

Shapes: E width of the vectors, L scored tokens of a text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertkit.arrays import Float32Array
from bertkit.data.batch import batches_by_length
from bertkit.errors import DataError, UsageError
from bertkit.inference.embedder import Long, TooLongError
from bertkit.inference.independent_batches import (
    each_on_one_thread,
    independent_batch,
    tokens_per_batch,
)
from bertkit.models.files.hub import check_vocabulary
from bertkit.models.files.model_files import config_hash, encoder_directory, weights_hash
from bertkit.models.late_interaction import TokenModel, load_token_model, score
from bertkit.models.sentence import Normalise
from bertkit.models.text_reading import TextReading
from bertkit.tasks.embedding.token_reader import TokenReader, TokenSequence
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.engine import Engine


class TokenEmbedder:
    """A model that computes a vector for each token.

    Args:
        model: the encoder with its linear map.
        tokenizer: its tokenizer.
        engine: device and batch size.
        name: the model's, for messages.
        max_tokens: maximum sequence length; None: the model's.

    Attributes:
        fingerprint: sha256 (hex) of all that determines the vectors; empty if the model was not read from a directory.

    Raises:
        UsageError: `max_tokens` exceeds the model's limit, or leaves no room.
    """

    def __init__(
        self, model: TokenModel, tokenizer: Tokenizer, engine: Engine, *, name: str, max_tokens: int | None = None
    ) -> None:
        limit = model.model.encoder.max_tokens
        if max_tokens is not None and max_tokens > limit:
            raise UsageError(f"--max-length {max_tokens}: {name} reads at most {limit} tokens; lower it")
        self.name = name
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens or model.max_tokens
        self.fingerprint = ""
        self._loaded_by: Callable[[], TokenEmbedder] | None = None
        self._engine = replace(engine, bf16=False)
        self._model = model.to(engine.device).eval()
        interaction = model.interaction
        if max_tokens is not None:
            interaction = replace(interaction, document_length=max_tokens)
        encoder = SequenceEncoder(
            tokenizer,
            max_tokens=max(self.max_tokens, interaction.query_length or 0),
            token_types=model.model.encoder.config.reads_token_types,
        )
        self.reader = TokenReader(encoder, interaction, model.reading)

    @classmethod
    def load(
        cls,
        directory: Path,
        engine: Engine,
        *,
        name: str | None = None,
        max_tokens: int | None = None,
        offline: bool = False,
    ) -> TokenEmbedder:
        """Read a model directory, found as by `find_model`.

        Raises:
            DataError: a file is damaged or not supported.
            UsageError: `max_tokens` does not fit.
        """
        model, inner = load_token_model(directory), encoder_directory(directory)
        tokenizer = load_tokenizer(inner, offline=offline)
        check_vocabulary(model.model, tokenizer, source=name or str(directory))
        found = cls(model, tokenizer, engine, name=name or str(directory), max_tokens=max_tokens)
        maps = {
            key: hashlib.sha256(each.numpy().tobytes()).hexdigest() for key, each in model.after.state_dict().items()
        }
        described = [weights_hash(inner), config_hash(inner), tokenizer.fingerprint, repr(model.after), maps]
        settings = [repr(model.interaction), model.max_tokens, repr(model.reading)]
        found._loaded_by = partial(
            cls.load, directory.resolve(), engine, name=name, max_tokens=max_tokens, offline=offline
        )
        found.fingerprint = hashlib.sha256(json.dumps([*described, *settings]).encode()).hexdigest()
        return found

    is_sparse = False
    is_by_token = True
    precision = "fp32"
    similarity = "maxsim"

    @property
    def device(self) -> str:
        """cpu or cuda."""
        return self._engine.device.type

    @cached_property
    def width(self) -> int:
        """E."""
        return int(self.documents(["a"])[0].shape[1])

    @property
    def normalises(self) -> bool:
        """Whether the model's own last step scales vectors to unit length."""
        return any(isinstance(each, Normalise) for each in list(self._model.after)[-1:])

    @property
    def loader(self) -> Callable[[], TokenEmbedder]:
        """A function that reads the same model again, in another process."""
        assert self._loaded_by is not None, "of a model directory"
        return self._loaded_by

    def has_fingerprint(self, recorded: Any) -> bool:
        """Whether this is the fingerprint of the model."""
        return bool(recorded == self.fingerprint)

    @property
    def reading(self) -> TextReading:
        """The model's prompts and lower-casing."""
        return self._model.reading

    def queries(self, texts: Sequence[str], prompt: str | None = None) -> list[Float32Array]:
        """The vectors of each query's tokens, (L, E); `prompt` replaces the model's."""
        return self.vectors(self.reader.queries(texts, prompt))

    def documents(self, texts: Sequence[str], prompt: str | None = None) -> list[Float32Array]:
        """The vectors of each document's scored tokens, (L, E); `prompt` replaces the model's."""
        return self.vectors(self.reader.documents(texts, prompt))

    def parts(self, texts: Sequence[str], long: Long, prompt: str | None = None) -> list[list[TokenSequence]]:
        """The sequence of each document.

        Raises:
            DataError: a text is too long and `long` is "error"; the message begins with the text's number.
        """
        sequences = self.reader.documents(texts, prompt)
        for number, each in enumerate(sequences):
            if each.cut and long == "error":
                raise TooLongError(number, len(each.ids) + each.cut, len(each.ids))
        return [[each] for each in sequences]

    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """How well each text answers the query."""
        (query_QE,) = self.queries([query])
        return [score(query_QE, document_LE) for document_LE in self.documents(texts)]

    def vectors(self, sequences: Sequence[TokenSequence]) -> list[Float32Array]:
        """The vectors of each sequence's scored tokens, (L, E), in order.

        Raises:
            DataError: a vector contains numbers that are not finite.
        """
        lengths = [len(each.ids) for each in sequences]
        batches = batches_by_length(lengths, tokens_per_batch(lengths, self._engine))
        found: list[Float32Array] = [np.empty((0, 0), dtype=np.float32)] * len(sequences)

        def computed(batch: Sequence[int]) -> Float32Array:
            return self._computed([sequences[number] for number in batch])

        on_cpu = self._engine.device.type == "cpu"
        results = each_on_one_thread(computed, batches) if on_cpu else map(computed, batches)
        for batch, rows in zip(batches, results, strict=True):
            if not np.isfinite(rows).all():
                raise DataError(f"{self.name}: its vectors contain NaN or infinite numbers; its weights are damaged")
            counts = [sum(sequences[number].scored) for number in batch]
            for number, own in zip(batch, np.split(rows, np.cumsum(counts)[:-1]), strict=True):
                found[number] = own
        return found

    def _computed(self, sequences: Sequence[TokenSequence]) -> Float32Array:
        ids, types, keys, scored, _ = zip(*sequences, strict=True)
        hidden = any(key < len(own) for key, own in zip(keys, ids, strict=True))
        packed = independent_batch(ids, types, max_tokens=self.max_tokens, keys=keys if hidden else None)
        flags = np.zeros(packed.num_tokens, dtype=np.bool_)
        flags[: sum(map(len, scored))] = np.concatenate(scored)
        device = self._engine.device
        with torch.inference_mode():
            vectors: Float32Array = self._model(packed.to(device), torch.from_numpy(flags).to(device)).cpu().numpy()
        return vectors

"""Texts to vectors: the one place in which `encode`, `embed`, `search`, `eval` and `serve` compute them.

Reimers and Gurevych 2019, Sentence-BERT, arXiv:1908.10084, section 3 (the model, bertkit.models.sentence). Texts are
tokenised once, sorted by length and packed without padding. A vector is bit-identical in any batch, next to any other
texts (independent_batches.py).

Shapes: N texts or sequences, E width of the vectors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_matrix, vstack

from bertkit.arrays import Float32Array
from bertkit.data.batch import PackedBatch, batches_by_length
from bertkit.errors import DataError, UsageError
from bertkit.inference.independent_batches import (
    SEQUENCE_STEP,
    TOKEN_STEP,
    each_on_one_thread,
    independent_batch,
    tokens_per_batch,
)
from bertkit.models.families.static import StaticEncoder
from bertkit.models.files.hub import check_vocabulary
from bertkit.models.files.model_files import CONFIG_FILE, config_hash, encoder_directory, weights_hash
from bertkit.models.quantisation.bf16 import cast_linears_to_bf16, use_fixed_row_blocks
from bertkit.models.sentence import Normalise, SentenceModel, load_sentence_model
from bertkit.models.similarity import Similarity
from bertkit.models.splade import is_sparse
from bertkit.models.text_reading import TextReading
from bertkit.tasks.encoding import SequenceEncoder, windows
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.engine import Engine

_INSTRUCTORS = tuple(f"hkunlp/instructor-{size}" for size in ("base", "large", "xl"))
"""Models that do not pool the tokens of a prompt, which is not in their files; sentence-transformers has their names,
too."""
Long = Literal["error", "cut", "window"]
"""What to do with a text that is longer than the model's maximum."""


class TextSequence(NamedTuple):
    """A text as the model reads it: ids and segment types with special tokens, the number of tokens cut off, and that
    of the first tokens, special ones included, that are not pooled."""

    ids: list[int]
    types: list[int]
    cut: int
    unpooled: int = 0


class Embedder:
    """A model that computes vectors of texts.

    Args:
        model: the sentence encoder; its linear maps are converted to bfloat16 if the engine computes in it.
        tokenizer: its tokenizer.
        engine: device, precision and batch size.
        name: the model's, for messages.
        max_tokens: maximum sequence length with special tokens; None: the model's limit.

    Attributes:
        fingerprint: sha256 (hex) of all that determines the vectors besides precision and length: weights, config.json,
            modules, tokenizer; empty if the model was not read from a directory.

    Raises:
        UsageError: `max_tokens` exceeds the model's limit.
    """

    def __init__(
        self, model: SentenceModel, tokenizer: Tokenizer, engine: Engine, *, name: str, max_tokens: int | None = None
    ) -> None:
        if max_tokens is not None and max_tokens > model.model.encoder.max_tokens:
            raise UsageError(
                f"--max-length {max_tokens}: {name} reads at most {model.model.encoder.max_tokens} tokens; lower it"
            )
        self.name = name
        self.max_tokens = max_tokens or model.max_tokens
        self.tokenizer = tokenizer
        self._engine = engine
        self.model = model.to(engine.device).eval()
        self.fingerprint = self._earlier_fingerprint = ""
        self._loaded_by: Callable[[], Embedder] | None = None
        self._encoder = SequenceEncoder(
            tokenizer, max_tokens=self.max_tokens, token_types=model.model.encoder.config.reads_token_types
        )

    @classmethod
    def load(
        cls,
        directory: Path,
        engine: Engine,
        *,
        name: str | None = None,
        max_tokens: int | None = None,
        offline: bool = False,
    ) -> Embedder:
        """Read a model directory, found as by `find_model`.

        Raises:
            DataError: a file is damaged, or the model does not compute vectors.
            UsageError: `max_tokens` exceeds the model's limit.
        """
        model = load_sentence_model(directory)
        model.pools_prompt = model.pools_prompt and name not in _INSTRUCTORS
        tokenizer = load_tokenizer(encoder_directory(directory), offline=offline)
        check_vocabulary(model.model, tokenizer, source=name or str(directory))
        if isinstance(model.model.encoder, StaticEncoder):
            tokenizer = tokenizer.without_special_tokens()
        found = cls(model, tokenizer, engine, name=name or str(directory), max_tokens=max_tokens)
        inner = encoder_directory(directory)
        described = _described(model, weights_hash(inner), tokenizer.fingerprint)
        config = config_hash(inner) if (inner / CONFIG_FILE).is_file() else None
        found._earlier_fingerprint = _hash(described)
        found.fingerprint = _hash([*described, {CONFIG_FILE: config}])
        if engine.bf16:
            cast_linears_to_bf16(model)
            if engine.device.type == "cpu":
                use_fixed_row_blocks(model, tokens=TOKEN_STEP, others=SEQUENCE_STEP)
        found._loaded_by = partial(
            cls.load, directory.resolve(), engine, name=name, max_tokens=max_tokens, offline=offline
        )
        return found

    @property
    def loader(self) -> Callable[[], Embedder]:
        """A function that reads the same model again, in another process."""
        assert self._loaded_by is not None, "of a model directory"
        return self._loaded_by

    def has_fingerprint(self, recorded: Any) -> bool:
        """Whether this is a fingerprint of the model; those of earlier versions do not include config.json."""
        return recorded in (self.fingerprint, self._earlier_fingerprint)

    @property
    def reading(self) -> TextReading:
        """The model's prompts and lower-casing."""
        return self.model.reading

    @property
    def similarity(self) -> Similarity:
        """How the model's vectors are compared."""
        return self.model.similarity

    @property
    def precision(self) -> str:
        """fp32 or bf16."""
        return self._engine.precision

    @property
    def device(self) -> str:
        """cpu or cuda."""
        return self._engine.device.type

    @cached_property
    def width(self) -> int:
        """E."""
        return int(self._computed([self._sequence([self.tokenizer.vocab_size - 1], 0, 0)]).shape[1])

    @property
    def is_sparse(self) -> bool:
        """Whether a vector has a weight for each word of the vocabulary, most of them 0 (SPLADE)."""
        return is_sparse(self.model.pooling)

    is_by_token = False
    """Whether a text has a vector for each token; see token_embedder.py."""

    @property
    def normalises(self) -> bool:
        """Whether the model's own last step scales vectors to unit length."""
        last = list(self.model.after_pooling.children())[-1:]
        return bool(last) and isinstance(last[0], Normalise)

    def token_ids(self, texts: Sequence[str], prompt: str | None = None) -> list[list[int]]:
        """The ids of each text after a prompt, without special tokens, untruncated.

        Args:
            texts: the texts.
            prompt: prefix of each text; None: the model's default prompt.
        """
        return self._encoder.ids([self.model.reading(text, prompt) for text in texts])

    def sequences(self, texts: Sequence[str | Sequence[int]], prompt: str | None = None) -> list[TextSequence]:
        """The sequences of texts after a prompt, or of token ids without the special ones, cut to the model's length.

        A text without tokens is an empty sequence if the model's sequences have no special tokens.

        Raises:
            DataError: an id is not in the vocabulary.
        """
        encoded = iter(self.token_ids([text for text in texts if isinstance(text, str)], prompt))
        unpooled = self._unpooled(prompt)
        room, size = self._encoder.room(1), self.tokenizer.vocab_size
        found = []
        for number, text in enumerate(texts):
            ids = next(encoded) if isinstance(text, str) else list(text)
            if not isinstance(text, str) and not all(0 <= each < size for each in ids):
                bad = next(each for each in ids if not 0 <= each < size)
                raise DataError(f"text {number}: {bad!s:.40} is not a token id; the vocabulary has {size:,} tokens")
            found.append(self._sequence(ids[:room], len(ids) - room, unpooled if isinstance(text, str) else 0))
        return found

    def parts(self, texts: Sequence[str], long: Long, prompt: str | None = None) -> list[list[TextSequence]]:
        """For each text the sequences from which its vector is computed: one, or the windows of a long text. A prompt
        is the beginning of the text, so only the first window has it.

        Raises:
            DataError: a text is too long and `long` is "error"; the message begins with the text's number.
        """
        room, unpooled = self._encoder.room(1), self._unpooled(prompt)
        found = []
        for number, ids in enumerate(self.token_ids(texts, prompt)):
            if len(ids) > room and long == "error":
                special = self.max_tokens - room
                raise TooLongError(number, len(ids) + special, self.max_tokens)
            cuts = windows(ids, room, room) if long == "window" else [(0, ids[:room])]
            excess = 0 if long == "window" else len(ids) - room
            found.append([self._sequence(part, excess, 0 if at else unpooled) for at, (_, part) in enumerate(cuts)])
        return found

    def _sequence(self, ids: list[int], excess: int, unpooled: int) -> TextSequence:
        own, types = self._encoder.single.fill(ids)
        return TextSequence(own, types, max(0, excess), min(unpooled, max(0, len(own) - 1)))

    def _unpooled(self, prompt: str | None) -> int:
        """The number of the first tokens that are not pooled: none, or those of the prompt and before it."""
        text = self.model.reading("", prompt)
        if self.model.pools_prompt or not text:
            return 0
        (ids,) = self._encoder.ids([text])
        return len(self._encoder.single.fill(ids)[0]) - len(self._encoder.single.frames[-1])

    def joined(self, parts: Sequence[Sequence[TextSequence]]) -> Float32Array:
        """The vector of each text from the vectors of its parts, (N, E): their mean, weighted by tokens.

        If the model's own vectors have unit length, the means are scaled to it too.

        Raises:
            DataError: see `vectors`.
        """
        vectors = self.vectors([part for several in parts for part in several])
        if all(len(several) == 1 for several in parts):
            return vectors
        found = np.empty((len(parts), vectors.shape[1]), dtype=np.float32)
        first = 0
        for number, several in enumerate(parts):
            own = vectors[first : first + len(several)]
            if len(several) > 1:
                weights = np.array([len(part.ids) for part in several], dtype=np.float64)
                mean = (own * weights[:, None]).sum(axis=0) / weights.sum()
                found[number] = mean / max(float(np.sqrt((mean * mean).sum())), 1e-12) if self.normalises else mean
            else:
                found[number] = own[0]
            first += len(several)
        return found

    def vectors(self, sequences: Sequence[TextSequence]) -> Float32Array:
        """The vector of each sequence, (N, E), in order; zeros for a sequence without tokens.

        On a CPU a vector is bit-identical for any number and kind of other sequences.

        Raises:
            DataError: a vector contains numbers that are not finite.
        """
        found = np.zeros((len(sequences), self.width), dtype=np.float32)
        for batch, vectors in self._batches(sequences):
            found[batch] = vectors
        return found

    def sparse_vectors(self, sequences: Sequence[TextSequence]) -> csr_matrix:
        """The same as a sparse matrix, of which only one batch is in memory with its zeros.

        Raises:
            DataError: see `vectors`.
        """
        rows, row_N = [csr_matrix((1, self.width), dtype=np.float32)], np.zeros(len(sequences), dtype=np.int64)
        count = 1
        for batch, vectors in self._batches(sequences):
            rows.append(csr_matrix(vectors))
            row_N[batch] = np.arange(count, count + len(batch))
            count += len(batch)
        return vstack(rows, format="csr")[row_N]

    def _batches(self, sequences: Sequence[TextSequence]) -> Iterator[tuple[list[int], Float32Array]]:
        """The numbers of the sequences of each batch and their vectors; a sequence without tokens has none."""
        real = [number for number, each in enumerate(sequences) if each.ids]
        lengths = [len(sequences[number].ids) for number in real]
        batches = batches_by_length(lengths, tokens_per_batch(lengths, self._engine))
        chosen = [[real[place] for place in batch] for batch in batches]

        def computed(batch: Sequence[int]) -> Float32Array:
            return self._computed([sequences[number] for number in batch])

        on_cpu = self._engine.device.type == "cpu"
        results = each_on_one_thread(computed, chosen) if on_cpu else map(computed, chosen)
        for batch, vectors in zip(chosen, results, strict=True):
            if not np.isfinite(vectors).all():
                hint = "; try --precision fp32" if self._engine.bf16 else ""
                raise DataError(
                    f"{self.name}: its vectors contain NaN or infinite numbers; its weights are damaged{hint}"
                )
            yield batch, vectors

    def encode(self, texts: Sequence[str], *, long: Long = "cut", prompt: str | None = None) -> Float32Array:
        """The vector of each text after a prompt, by default the model's, (N, E).

        Raises:
            DataError: see `parts` and `vectors`.
        """
        return self.joined(self.parts(texts, long, prompt))

    def _computed(self, sequences: Sequence[TextSequence]) -> Float32Array:
        ids, types, _, unpooled = zip(*sequences, strict=True)
        packed: PackedBatch = independent_batch(ids, types, max_tokens=self.max_tokens).to(self._engine.device)
        unpooled_B = None
        if any(unpooled):
            fillers = [0] * (packed.num_sequences - len(sequences))
            unpooled_B = torch.tensor([*unpooled, *fillers], device=self._engine.device)
        with torch.inference_mode(), self._engine.autocast():
            vectors: Float32Array = self.model(packed, unpooled_B)[: len(sequences)].float().cpu().numpy()
        return vectors


class TooLongError(DataError):
    """A text is longer than the model's maximum.

    Attributes:
        number: index of the text.
        tokens: its length, including special tokens.
    """

    def __init__(self, number: int, tokens: int, most: int) -> None:
        super().__init__(f"text {number}: {reason_too_long(tokens, most)}")
        self.number = number
        self.reason = reason_too_long(tokens, most)


def reason_too_long(tokens: int, most: int) -> str:
    """The reason why a text is refused, and the fix."""
    return f"{tokens:,} tokens, the model reads {most:,}; give --long cut or --long window, or shorten it"


def _described(model: SentenceModel, weights: str, tokenizer: str) -> list[Any]:
    """What determines the vectors, without config.json."""
    modules = [
        (repr(part), {name: _bytes_hash(each) for name, each in part.state_dict().items()})
        for part in model.after_pooling
    ]
    reading = model.reading
    content = [weights, tokenizer, list(model.pooling), modules, model.max_tokens, reading.lowercases]
    return [*content, reading.default_prompt] if reading.default_prompt else content


def _hash(described: list[Any]) -> str:
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def _bytes_hash(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()

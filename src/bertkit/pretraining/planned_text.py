"""What `--plan` knows of the text: its vocabulary, its size in tokens, and how long its samples are.

Not from a paper. Token shards and short texts are read; of longer texts only the beginning is, so that a plan takes a
few seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from bertkit.data.config import DataConfig
from bertkit.data.language_stream import LanguageStream, training_and_held_out
from bertkit.data.layouts import LaneLayout
from bertkit.data.samples import Vocabulary
from bertkit.data.shard_writer import ShardWriter
from bertkit.data.shards import TokenShards
from bertkit.data.stored_shards import shards_directory
from bertkit.data.stream import SampleSpec, SampleStream
from bertkit.data.tokenizing import tokenize_blocks
from bertkit.errors import DataError, UsageError
from bertkit.stores.url import is_url
from bertkit.text.added_tokens import extended
from bertkit.text.corpus import Corpus
from bertkit.text.lines import COMPRESSIONS, ending, read_lines
from bertkit.text.sources import local_files, open_corpus
from bertkit.text.tokenizer import Tokenizer, TokenizerConfig
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.text.vocabulary import train_tokenizer
from bertkit.training.plan import PlannedVocabulary

log = logging.getLogger(__name__)

_BYTES_OF_A_TOKEN = 4.5
"""For English text, if the tokenizer is not there yet."""
_COUNTED_BYTES = 1_000_000
"""Size of the beginning of the text whose tokens are counted, in characters also of the one that is laid out."""
_LAID_OUT_TOKENS = 1_000_000
"""Tokens that are laid out as samples; of larger shards the beginning."""
_SAMPLES = 4096
"""Samples whose lengths are measured, the first of the stage."""
_SAMPLED_LINES = 1000
"""Lines of a JSON Lines file, of which the share of text is measured."""
_COMPRESSED_RATIO = 3.0
"""Bytes of text per byte of its compressed file."""
SAMPLED_MEGABYTES = 8.0
"""Maximum size of text on which a plan trains a vocabulary."""


@dataclass(frozen=True)
class SampleLengths:
    """How long the samples of a stage are.

    Attributes:
        mean: tokens of a sample, special tokens included.
        squared: the mean over samples of their sequences' squared numbers of tokens; a sample is one sequence, or
            several packed documents.
        text_tokens: tokens of the text per sample.
        measured: whether they were measured on the text; otherwise all samples have the full length.
    """

    mean: float
    squared: float
    text_tokens: float
    measured: bool


@dataclass(frozen=True)
class PlannedText:
    """The text of a run.

    Attributes:
        vocabulary: of the model.
        trained_on: bytes of text that the vocabulary is trained on; 0 if it is not trained.
        tokens: of the text; None if unknown.
        sample: the text, or its beginning; None if there is none or no tokenizer yet.
    """

    vocabulary: PlannedVocabulary
    trained_on: float
    tokens: float | None
    sample: TokenShards | None

    def lengths(self, data: DataConfig, seed: int, stage: int, sequences: int | None = None) -> SampleLengths:
        """The lengths of the samples of a stage with these settings and this number, which reads so many; None: the
        whole text."""
        if self.sample is not None and not isinstance(data.layout, LaneLayout):
            with suppress(DataError):  # the beginning may have too few documents for the layout
                return _measured(self.sample, data, seed, stage, sequences)
        full = float(data.sequence_length)
        return SampleLengths(full, full**2, full, measured=False)


@contextmanager
def planned_text(
    data: DataConfig, config: TokenizerConfig, *, vocab_size: int | None = None, offline: bool = False
) -> Iterator[PlannedText]:
    """The text of a run, with files that exist only within the context.

    Args:
        data, config: the text and the tokenizer of a resolved recipe.
        vocab_size: V if known.
        offline: do not use the network.

    Raises:
        UsageError: token shards are combined with other text.
        DataError: the tokenizer cannot be used.
    """
    files = _text_files(data)
    if vocab_size is None:
        vocabulary, trained_on, tokenizer = _planned_vocabulary(data, config, files, offline=offline)
    else:
        given = config.path if files else None
        tokenizer = None if given is None else load_tokenizer(given, offline=offline)
        vocabulary, trained_on = PlannedVocabulary(vocab_size), 0.0
    tokens = _text_tokens(data, files, tokenizer, offline=offline)
    with TemporaryDirectory(prefix="bertkit-plan-") as directory:
        sample = None
        if data.is_tokenised:
            sample = TokenShards.open(shards_directory(data.sources[0], offline=offline))
        elif files and tokenizer is not None:
            with suppress(DataError):  # an empty text, which the run will report
                sample = _beginning(data, tokenizer, Path(directory), offline=offline)
        yield PlannedText(vocabulary, trained_on, tokens, sample)


def _beginning(data: DataConfig, tokenizer: Tokenizer, directory: Path, *, offline: bool) -> TokenShards:
    """Token shards of the beginning of the text."""
    corpus = open_corpus(data.sources, data.reading, offline=offline, hashed=False)
    fields = corpus.options.marked_fields
    writer, read = ShardWriter(directory, "a sample", tokenizer.vocab_size, span_fields=fields), 0
    for block, _, characters in tokenize_blocks(corpus.blocks(), tokenizer, corpus.options, workers=1):
        writer.append(block, None)
        read += characters
        if read >= _COUNTED_BYTES:
            break
    return writer.finish({}, [])


def _measured(shards: TokenShards, data: DataConfig, seed: int, stage: int, sequences: int | None) -> SampleLengths:
    """The lengths of the first samples of a stage: those of the run if the shards are the whole text, and few."""
    stream: SampleStream | LanguageStream
    if shards.tokens <= _LAID_OUT_TOKENS:
        stream = training_and_held_out(data, shards, seed=seed, stage=stage, plans=None)[0]
    else:
        start_D1 = shards.document_start_D1
        documents_N2 = np.stack([start_D1[:-1], start_D1[1:]], axis=1).astype(np.int64)
        few = int(np.searchsorted(shards.segment_start_S1[documents_N2[:, 1]], _LAID_OUT_TOKENS)) + 1
        spec = SampleSpec(seed, f"train/{stage}", data.layout, data.sequence_length, data.static_copies)
        stream = SampleStream(spec, shards, documents_N2[:few], None)
    rows = stream.epoch_length(0)
    count = min(rows, _SAMPLES, rows if sequences is None else max(1, sequences))
    # Only the number of special tokens matters.
    vocabulary = Vocabulary(shards.vocab_size, 0, 0, 0, 0, np.ones(shards.vocab_size, dtype=np.bool_))
    samples = stream.samples(0, count, vocabulary)
    length_B = np.diff(samples.cu_seqlens_B1).astype(np.float64)  # several of a sample, if it packs documents
    mean, squared = (float((length_B**power).sum() / count) for power in (1, 2))
    return SampleLengths(mean, squared, stream.tokens / rows, measured=True)


def _text_files(data: DataConfig) -> list[Path]:
    """The files of the text; none for token shards, several languages, or text that is not all on this machine. A text
    that is not there is reported, because a recipe can be planned without it.

    Raises:
        UsageError: a directory contains token shards, or is a run.
    """
    sources = data.all_sources
    if data.is_tokenised or any(each.startswith(("hub:", "builtin:")) or is_url(each) for each in sources):
        return []
    try:
        files = {file.resolve(): file for source in sources for file in local_files(source)}
    except DataError as error:
        log.warning("%s; the plan is made without the text", error)
        return []
    return [] if data.languages else list(files.values())


def _text_tokens(
    data: DataConfig, files: Sequence[Path], tokenizer: Tokenizer | None, *, offline: bool
) -> float | None:
    """Tokens of the text: counted for shards and short texts, estimated from the size of other files; None for any
    other text."""
    if data.is_tokenised:
        return float(TokenShards.open(shards_directory(data.sources[0], offline=offline)).tokens)
    if not files:
        return None
    records = next((file for file in files if ending(file) == ".jsonl"), None)
    text_share = 1.0 if records is None else _text_share(records, data, offline=offline)
    size = 0.0
    for file in files:
        ratio = _COMPRESSED_RATIO if file.suffix in COMPRESSIONS else 1.0
        size += ratio * file.stat().st_size * (text_share if ending(file) == ".jsonl" else 1.0)
    if tokenizer is None:
        return size / _BYTES_OF_A_TOKEN
    read, tokens = 0, 0
    for document in open_corpus(data.sources, data.reading, offline=offline, hashed=False).documents():
        read += _bytes(document)
        tokens += len(tokenizer.encode_plain(document)[0]) + 1  # most layouts have a separator between documents
        if read >= _COUNTED_BYTES:
            return size * tokens / read
    return float(tokens) if tokens else None


def _text_share(records: Path, data: DataConfig, *, offline: bool) -> float:
    """The share of a JSON Lines file that is text: its first lines' documents, divided by these lines."""
    lines = next(read_lines(records, data.reading.encoding), [])[:_SAMPLED_LINES]
    documents = open_corpus([str(records)], data.reading, offline=offline, hashed=False).documents()
    text = sum(_bytes(document) for document in islice(documents, len(lines)))
    return min(1.0, text / max(1, _bytes(lines)))


def _bytes(lines: Sequence[str]) -> int:
    return sum(len(line.encode("utf-8", "surrogatepass")) + 1 for line in lines)


def _planned_vocabulary(
    data: DataConfig, config: TokenizerConfig, files: Sequence[Path], *, offline: bool
) -> tuple[PlannedVocabulary, float, Tokenizer | None]:
    """The size of the model's vocabulary, the bytes of text that it is trained on (0 if it is not trained), and a
    tokenizer, unless it belongs to token shards: the given one, or one trained on the text or its beginning.

    The size is known if the tokenizer is given, or if the text is token shards. A vocabulary that is to be trained or
    extended on at most `SAMPLED_MEGABYTES` of files is trained or extended here, which takes a few seconds. For any
    other, the requested size is assumed and marked: a text that is too small for it yields fewer entries, and a smaller
    model.

    Raises:
        DataError: the given tokenizer is not found, or lacks a special token that every run needs; or the text has
            fewer words to add.
    """
    if data.is_tokenised:
        shards = TokenShards.open(shards_directory(data.sources[0], offline=offline))
        return PlannedVocabulary(shards.vocab_size), 0.0, None
    size = min(sum(file.stat().st_size for file in files), config.sample_megabytes * 1e6)
    is_small = bool(files) and size <= SAMPLED_MEGABYTES * 1e6
    if config.path is not None:
        given = load_tokenizer(config.path, offline=offline)
        if config.add_tokens and is_small:
            text = open_corpus(data.sources, data.reading, offline=offline, hashed=False).sample_text(
                config.sample_megabytes
            )
            extended(given, text, config.add_tokens, min_frequency=config.added_frequency)
        return PlannedVocabulary(Vocabulary.of(given).size + config.add_tokens), 0.0, given
    if not files:
        return PlannedVocabulary(config.vocab_size, at_most=True), size, None
    state = tuple((str(file), file.stat().st_mtime_ns) for file in files)
    trained = _trained(config.model_dump_json(), data.model_dump_json(), state, is_small, offline=offline)
    if is_small and trained is not None:
        return PlannedVocabulary(trained.vocab_size), size, trained
    return PlannedVocabulary(config.vocab_size, at_most=True), size, trained


@lru_cache(maxsize=4)
def _trained(
    tokenizer: str, data: str, state: tuple[tuple[str, int], ...], is_small: bool, *, offline: bool
) -> Tokenizer | None:
    """A tokenizer trained on a text, of which only the beginning is read unless it `is_small`; None if that fails.

    It is kept for other plans on the text, such as the arms of a study; hence settings as JSON, and the `state` of the
    files.
    """
    config, settings = TokenizerConfig.model_validate_json(tokenizer), DataConfig.model_validate_json(data)
    corpus = open_corpus(settings.sources, settings.reading, offline=offline, hashed=False)
    if is_small:
        return train_tokenizer(config, corpus.sample_text(config.sample_megabytes))
    with suppress(DataError, UsageError):  # the beginning may have too few words for the vocabulary
        return train_tokenizer(config, _first_lines(corpus))
    return None


def _first_lines(corpus: Corpus) -> Iterator[str]:
    read = 0
    for block in corpus.blocks():
        for _, lines in block.parts:
            yield from lines
        read += block.characters
        if read >= _COUNTED_BYTES:
            return

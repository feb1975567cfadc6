"""From a corpus to token shards: train or load the tokenizer, tokenise on all cores, and write.

Not from a paper. A directory of shards is addressed by its identity, the hash of source, tokenizer and options; once
finished, it never changes. Sibling shard_writer.py continues an interrupted run; this file decides what is made and
where.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from bertkit.cache import lock_of_shards
from bertkit.data.languages import LANGUAGES, LanguageCorpus, language_documents
from bertkit.data.shard_writer import SHARD_TOKENS, ShardWriter
from bertkit.data.shards import COUNTS, MANIFEST, PROGRESS, SPANS, VERSION, TokenShards, is_shards
from bertkit.data.tokenizing import tokenize_blocks
from bertkit.errors import DataError, UsageError
from bertkit.files import json_sha256, names_in, noting, one_at_a_time, read_json, write_json
from bertkit.jobs.settings import ExecutorSettings
from bertkit.openmp import usable_cores
from bertkit.progress import Progress, silent_progress
from bertkit.text.added_tokens import extended
from bertkit.text.corpus import Corpus, Position
from bertkit.text.tokenizer import Tokenizer, TokenizerConfig
from bertkit.text.tokenizer_files import TOKENIZER_FILES, load_tokenizer, save_tokenizer
from bertkit.text.vocabulary import train_tokenizer

log = logging.getLogger(__name__)


_UNKNOWN_SHARE = 0.01
"""Share of unknown tokens from which a warning is logged."""


def prepare_shards(
    corpus: Corpus,
    config: TokenizerConfig,
    out: Path | None = None,
    *,
    cache: Path,
    workers: int | None = None,
    executor: ExecutorSettings | None = None,
    progress: Progress = silent_progress,
    offline: bool = False,
    shard_tokens: int = SHARD_TOKENS,
) -> TokenShards:
    """Token shards of a corpus; finished ones are reused, interrupted ones continued.

    The files do not depend on `workers`, `executor` or interruptions. Memory does not grow with the corpus.

    Args:
        config: the vocabulary to train, or the tokenizer to use.
        out: the directory; None: one under `cache` named by the identity.
        workers: processes that tokenise; None: all cores.
        executor: what tokenises instead of local processes, if not `local`.
        progress: shows how many characters are read and tokenised.
        shard_tokens: a shard is closed when it has this many tokens.

    Raises:
        UsageError: `out` contains something else; the vocabulary is too small.
        DataError: the corpus is empty or cannot be read, or the shards in `out` are damaged.
    """
    given = load_tokenizer(config.path, offline=offline) if config.path is not None else None
    identity = shards_identity(corpus, config, given, shard_tokens)
    directory = Path(out) if out is not None else cache / "shards" / identity[:32]
    with _locked(directory, cache):
        finished = _finished(directory, identity, is_cached=out is None)
        if finished is not None:
            log.info("token shards of this corpus and tokenizer found in %s", directory)
            _report_spans(finished)
            if given is not None:
                _report_unknown(finished, given)
            return finished
        _claim(directory, identity)
        tokenizer, files = _tokenizer(corpus, config, given, directory, progress)
        workers = workers or usable_cores()
        fields = corpus.options.marked_fields
        with (
            noting(f"shards in {directory} that are full are kept, and the same command continues after them"),
            closing(
                ShardWriter(directory, identity, tokenizer.vocab_size, shard_tokens=shard_tokens, span_fields=fields)
            ) as writer,
        ):
            start, language_ends = _resumed_at(writer.position)
            if start is not None and isinstance(corpus, LanguageCorpus):
                language_ends[corpus.language_before(start)] = writer.documents
            blocks = tokenize_blocks(corpus.blocks(start), tokenizer, corpus.options, workers, executor)
            done = 0
            with progress("tokenising", unit="characters") as meter, closing(blocks):
                for block, end, characters in blocks:
                    writer.append(block, [end.reader, end.parts, language_ends])
                    if isinstance(corpus, LanguageCorpus):
                        language_ends[corpus.language_before(end)] = writer.documents
                    done += characters
                    meter.update(done)
            if not writer.tokens:
                raise _empty(corpus)
            description: dict[str, Any] = {
                "source": {"fingerprint": corpus.fingerprint, "read": corpus.describe()},
                "options": corpus.options.model_dump(mode="json"),
                "tokenizer": {"fingerprint": tokenizer.fingerprint, "config": config.model_dump()},
            }
            if isinstance(corpus, LanguageCorpus):
                languages = language_documents(corpus.names, language_ends)
                corpus.check_texts({name: end - first for name, first, end in languages})
                description[LANGUAGES] = languages
            shards = writer.finish(description, files)
            _report_spans(shards)
            if given is not None or config.type != "word":
                _report_unknown(shards, tokenizer)
            return shards


def _report_unknown(shards: TokenShards, tokenizer: Tokenizer) -> None:
    """Log a warning if many tokens are the one for unknown words."""
    share = float(shards.token_counts_V[tokenizer.unk_id]) / shards.tokens if "unk" in tokenizer.roles else 0.0
    if share > _UNKNOWN_SHARE:
        log.warning(
            "%.1f%% of the tokens of the text are %s, for words that the vocabulary cannot write; train one on it:"
            ' `--set "tokenizer={type: unigram, vocab_size: 32000}"` (`bertkit tokenize`: --train unigram)',
            *(100 * share, tokenizer.token(tokenizer.unk_id)),
        )


def _report_spans(shards: TokenShards) -> None:
    """Log the outcomes of the corpus's annotated spans."""
    for field, outcomes in shards.manifest.get(SPANS, {}).items():
        lost = {outcome: number for outcome, number in outcomes.items() if outcome != "kept" and number}
        reasons = ", ".join(f"{number:,} {_OUTCOMES_IN_WORDS[outcome]}" for outcome, number in lost.items())
        total = sum(outcomes.values())
        if lost or not total:
            hint = f"; left out: {reasons}" if reasons else "; check the name of the field"
            log.warning("%s: %s of %s annotated spans are kept%s", field, f"{outcomes['kept']:,}", f"{total:,}", hint)
        else:
            log.info("%s: all %s annotated spans are kept", field, f"{total:,}")


_OUTCOMES_IN_WORDS = {
    "without_token": "match no token",
    "across_segments": "reach over the end of a segment",
    "overlapping": "overlap a longer one",
}


def _resumed_at(position: Any) -> tuple[Position | None, dict[str, int]]:
    """Where reading continues, and the number of documents up to the end of each language read so far."""
    if not position:
        return None, {}
    reader, parts, *more = position
    return Position(reader, parts), dict(*more)


def shards_identity(
    corpus: Corpus, config: TokenizerConfig, given: Tokenizer | None, shard_tokens: int = SHARD_TOKENS
) -> str:
    """sha256 of all that determines the shards' content: source, tokenizer (or how it is trained), options, format."""
    tokenizer: Any = given.fingerprint if given is not None else config.model_dump(exclude={"path"})
    if given is not None and config.add_tokens:
        added = ("add_tokens", "added_frequency", "sample_megabytes")
        tokenizer = [given.fingerprint, {name: getattr(config, name) for name in added}]
    record = {
        "version": VERSION,
        "corpus": corpus.fingerprint,
        "tokenizer": tokenizer,
        "shard_tokens": shard_tokens,
    }
    return json_sha256(record)


def _finished(directory: Path, identity: str, *, is_cached: bool) -> TokenShards | None:
    """The finished shards with this identity, verified; damaged ones in the cache are removed and rebuilt later."""
    if not (directory / MANIFEST).is_file() or not (is_cached or is_shards(directory)):
        return None
    try:
        shards = TokenShards.open(directory, verify=True)
    except DataError as error:
        if not is_cached:
            raise
        log.warning("%s; the cached shards are rebuilt", error)
        write_json(directory / PROGRESS, {"identity": "", "stage": "tokenizer"})
        return None
    found = shards.manifest.get("identity")
    if found != identity:
        raise UsageError(
            f"{directory} contains token shards with another source, tokenizer or option "
            f"(identity {str(found)[:12]}, not {identity[:12]}); shards are never changed: choose another directory, "
            "or remove this one"
        )
    return shards


_NUMBER = "[0-9]" * 5
"""The number of a shard in its file names."""


def _claim(directory: Path, identity: str) -> None:
    """Mark the directory as the one where these shards are being made; unfinished shards of another identity are
    removed.

    Raises:
        UsageError: the directory contains other files.
    """
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is a file; expected a directory")
    for path in directory.glob(f".{PROGRESS}.*.tmp"):
        path.unlink(missing_ok=True)  # left by a run that was killed at its start
    if directory.is_dir() and names_in(directory) and not is_shards(directory):
        raise UsageError(f"{directory} is not empty and contains no token shards; choose another directory")
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.glob(".*.tmp"):
        path.unlink()  # incomplete file of a run that was killed while writing
    if (directory / PROGRESS).is_file() and read_json(directory / PROGRESS).get("identity") == identity:
        return
    write_json(directory / PROGRESS, {"identity": identity, "stage": "tokenizer"})
    (directory / MANIFEST).unlink(missing_ok=True)
    for pattern in (f"tokens-{_NUMBER}.bin", f"spans-{_NUMBER}.bin", "*.idx", COUNTS, *TOKENIZER_FILES):
        for path in directory.glob(pattern):
            path.unlink()


def _tokenizer(
    corpus: Corpus, config: TokenizerConfig, given: Tokenizer | None, directory: Path, progress: Progress
) -> tuple[Tokenizer, list[str]]:
    """The tokenizer, after writing its files to the directory, and their names."""
    if given is not None and not config.add_tokens:
        tokenizer = given
    elif read_json(directory / PROGRESS)["stage"] == "tokens":
        return load_tokenizer(directory), _names(directory)
    else:
        text = list(corpus.sample_text(config.sample_megabytes, progress))
        if not text:
            raise _empty(corpus)
        if given is not None:
            tokenizer = extended(given, text, config.add_tokens, min_frequency=config.added_frequency)
        else:
            size = sum(map(len, text))
            log.info(
                "training a vocabulary on %s characters", f"{size / 1e6:.1f} million" if size >= 1e5 else f"{size:,}"
            )
            tokenizer = train_tokenizer(config, text)
            if tokenizer.vocab_size < config.vocab_size:
                log.warning(
                    "tokenizer.vocab_size: the text gives a vocabulary of %s entries, not of %s",
                    *(f"{tokenizer.vocab_size:,}", f"{config.vocab_size:,}"),
                )
    save_tokenizer(tokenizer, directory)
    return tokenizer, _names(directory)


def _empty(corpus: Corpus) -> DataError:
    return DataError(f"the corpus is empty: there is no text in {', '.join(corpus.sources)}")


def _names(directory: Path) -> list[str]:
    return [name for name in TOKENIZER_FILES if (directory / name).is_file()]


@contextmanager
def _locked(directory: Path, cache: Path) -> Iterator[None]:
    """Let one process at a time make a directory of shards; others wait and then find it finished."""
    path = lock_of_shards(directory, cache)
    path.parent.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(path, directory):
        yield


def prepared_description(shards: TokenShards) -> dict[str, Any]:
    """Counts of finished shards, for display and JSON, and outcomes of annotated spans, if there are any."""
    spans = {SPANS: shards.manifest[SPANS]} if SPANS in shards.manifest else {}
    return {
        "shards": str(shards.directory),
        "documents": shards.num_documents,
        "segments": shards.num_segments,
        "tokens": shards.tokens,
        "vocab_size": shards.vocab_size,
        "fingerprint": shards.fingerprint,
        **spans,
    }

"""Opens the SOURCE arguments of the command line or a recipe as a corpus.

Not from a paper; the command-line contract defines SOURCE. corpus.py is what is opened, readers.py reads each kind.
"""

from __future__ import annotations

import glob
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from pathlib import Path

from bertkit.errors import DataError, UsageError
from bertkit.files import cache_directory, open_regular, read_json, sha256_of, write_json
from bertkit.hub import dataset_commit, is_offline
from bertkit.progress import Progress, silent_progress
from bertkit.stores.fetch import fetched_files
from bertkit.stores.url import has_scheme, is_url
from bertkit.text.corpus import Corpus
from bertkit.text.fasta import FastaReader
from bertkit.text.lines import COMPRESSIONS
from bertkit.text.parallel import PairForm, TabbedPairReader, TwoFilesPairReader, joint_hash
from bertkit.text.readers import (
    CsvReader,
    HubReader,
    JsonLinesReader,
    ParquetReader,
    Reader,
    RecordForm,
    TextForm,
    TextReader,
)
from bertkit.text.source_options import KINDS, NAMED_ONLY, SourceOptions, kind_of_file

MAX_REMEMBERED = 100_000
"""Maximum number of file hashes in the table of a cache directory."""
log = logging.getLogger(__name__)


class FileHashes:
    """sha256 of corpus files, kept in a JSON file between runs.

    A file counts as unchanged while its path, size, modification time and inode are, as in make and git.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, str] = {}
        self._changed = False
        if path.is_file():
            try:
                self._known = read_json(path)
            except DataError:
                log.warning("%s is damaged; the hashes are computed again", path)

    def sha256(self, path: Path) -> str:
        """The sha256 of a file's content.

        Raises:
            DataError: the file cannot be read.
        """
        try:
            state = path.stat()
            key = f"{path.resolve()}|{state.st_size}|{state.st_mtime_ns}|{state.st_ino}"
            if key not in self._known:
                self._known[key] = sha256_of(path)
                self._changed = True
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
        return self._known[key]

    def save(self) -> None:
        """Write the table if it has grown, without its oldest entries if it is full."""
        if self._changed:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, dict(list(self._known.items())[-MAX_REMEMBERED:]))
            self._changed = False


def open_corpus(
    sources: Sequence[str],
    options: SourceOptions | None = None,
    *,
    cache: Path | None = None,
    offline: bool = False,
    commits: Mapping[str, str] | None = None,
    progress: Progress = silent_progress,
    hashed: bool = True,
) -> Corpus:
    """Open sources: files, directories, globs, those of a store (`s3://BUCKET/KEY`), `hub:ORG/NAME[@REVISION][:CONFIG
    [:SPLIT]]`, `builtin:pydocs`.

    Args:
        cache: directory of file hashes and harvested text; None: BERTKIT_CACHE or ~/.cache/bertkit.
        offline: do not use the network.
        commits: of Hub datasets, as from `hub_commits`; these are then not looked up.
        progress: shows the bytes that are fetched from a store.
        hashed: whether to hash the files, for the corpus's fingerprint; a look at their beginning can do without.

    Raises:
        UsageError: no source, or an unknown scheme or kind of file.
        DataError: a source does not exist, or cannot be read.
    """
    cache = cache or cache_directory()
    if not sources:
        raise UsageError("no source: name a file, a directory, hub:ORG/NAME or builtin:pydocs")
    hashes = FileHashes(cache / "file-hashes.json") if hashed else _NoHashes(cache)
    opening = _Opening(options or SourceOptions(), cache, hashes, offline, commits or {}, progress)
    readers: list[Reader] = []
    contents: list[str] = []
    seen: set[Path] = set()
    for reader, content in opening.readers(sources):
        path = getattr(reader, "path", None)
        if path is not None and path.resolve() in seen:
            log.info("%s is named twice; it is read once", path)
            continue
        seen |= {path.resolve()} if path is not None else set()
        readers.append(reader)
        contents.append(content)
    hashes.save()
    return Corpus(readers, opening.options, contents, tuple(sources))


def hub_commits(sources: Sequence[str], *, offline: bool = False) -> dict[str, str]:
    """The current commits of the Hub datasets among these, by `ORG/NAME` or `ORG/NAME@REVISION`.

    Raises:
        DataError: one does not exist, or the Hub cannot be reached.
    """
    repositories = {source.split(":")[1] for source in sources if source.startswith("hub:")}
    return {each: dataset_commit(each, offline=is_offline(offline)) for each in sorted(repositories - {""})}


class _NoHashes(FileHashes):
    """Stands for hashes where none are needed."""

    def sha256(self, path: Path) -> str:
        return ""


@dataclass(frozen=True)
class _Opening:
    """How the sources of one corpus are opened; the attributes are the arguments of `open_corpus`."""

    options: SourceOptions
    cache: Path
    hashes: FileHashes
    offline: bool
    commits: Mapping[str, str]
    progress: Progress

    def readers(self, sources: Sequence[str]) -> Iterator[tuple[Reader, str]]:
        """The readers of all sources, each with the hash of its content."""
        if self.options.target_field is not None:
            return self._pairs(sources, PairForm(self.options.text_field, self.options.target_field))
        return chain.from_iterable(map(self._texts, sources))

    def _texts(self, source: str) -> Iterator[tuple[Reader, str]]:
        scheme, colon, rest = source.partition(":")
        if scheme == "hub" and colon:
            yield self._hub(rest, TextForm(self.options.text_field, self.options.span_fields), "hub")
        elif scheme == "builtin" and colon:
            if rest != "pydocs":
                raise UsageError(f"source {source!r}: the only built-in corpus is builtin:pydocs")
            from bertkit.text.pydocs import harvest

            _check_spans(source, self.options)
            path = harvest(self.cache)
            yield TextReader(path, "blank-line"), self.hashes.sha256(path)
        else:
            for path in self._files(source):
                yield _file_reader(path, self.options), self.hashes.sha256(path)

    def _pairs(self, sources: Sequence[str], form: PairForm) -> Iterator[tuple[Reader, str]]:
        """Readers of parallel text; text files are taken in twos, in the order given."""
        encoding = self.options.encoding
        alone: Path | None = None
        for source in sources:
            scheme, colon, rest = source.partition(":")
            if scheme == "hub" and colon:
                reader, content = self._hub(rest, form, "pairs-records")
                yield reader, joint_hash(content, form.target)
                continue
            if scheme == "builtin" and colon:
                raise UsageError(
                    f"source {source!r} has no pairs; parallel text is .tsv, .jsonl, .parquet, two text files, or"
                    " hub:ORG/NAME[:CONFIG[:SPLIT]]"
                )
            for path in self._files(source):
                kind = kind_of_file(path, {**KINDS, ".tsv": "tsv"})
                content = self.hashes.sha256(path)
                if kind == "tsv":
                    yield TabbedPairReader(path, encoding), content
                elif kind == "jsonl":
                    yield JsonLinesReader(path, form, encoding, "pairs-jsonl"), content
                elif kind == "parquet":
                    yield ParquetReader(path, form, "pairs-records"), content
                elif kind in ("csv", "fasta"):
                    raise UsageError(
                        f"{path}: parallel text is not read from {kind.upper()}; write it as .tsv or .jsonl"
                    )
                elif alone is None:
                    alone = path
                else:
                    yield TwoFilesPairReader(alone, path, encoding), joint_hash(self.hashes.sha256(alone), content)
                    alone = None
        if alone is not None:
            raise UsageError(
                f"{alone}: a text file has only one side of parallel text; name the file of the other side after it, or"
                " give a .tsv of two columns or .jsonl"
            )

    def _files(self, source: str) -> list[Path]:
        """Files of a path, directory or glob, ordered by name; for a store, their copies in the cache."""
        if is_url(source):
            return fetched_files(
                source,
                lambda path: kind_of_file(path) is not None,
                cache=self.cache,
                offline=self.offline,
                progress=self.progress,
            )
        return local_files(source)

    def _hub(self, rest: str, form: RecordForm, kind: str) -> tuple[HubReader, str]:
        """A Hub dataset at its current commit; offline, at the last known commit."""
        repository, _, config_split = rest.partition(":")
        config, _, split = config_split.partition(":")
        if not repository:
            raise UsageError(f"source 'hub:{rest}': expected hub:ORG/NAME[@REVISION][:CONFIG[:SPLIT]]")
        offline = is_offline(self.offline)
        commit = self.commits.get(repository) or dataset_commit(repository, offline=offline)
        reader = HubReader(repository, config or None, split or "train", commit, form, offline, kind)
        read = ":".join([self.options.text_field, *self.options.span_fields])
        return reader, hashlib.sha256(f"{reader.name}@{commit}:{read}".encode()).hexdigest()


_SHARD_FILES = frozenset({"manifest.json", "tokenizer.json"})
_RUN_FILES = frozenset({"run.json", "recipe.yaml"})


def local_files(source: str) -> list[Path]:
    """The files of a path, directory or glob on this machine, ordered by name.

    Raises:
        UsageError: a store, or a directory without text to train on.
        DataError: there is no such file.
    """
    if has_scheme(source):
        raise UsageError(
            f"source {source!r}: no such scheme; expected a path, s3://, gs:// or file://, hub:ORG/NAME or"
            " builtin:pydocs"
        )
    path = Path(source).expanduser()
    if path.is_dir():
        _require_text(path, source)
        # macOS keeps a file's attributes beside it, in `._NAME`, on disks and in archives that have no room for them.
        files = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("._"))
        found = [p for p in files if kind_of_file(p)]
        if not found:
            raise DataError(f"{source}: no {', '.join(KINDS)} file in this directory")
        if others := [p.name for p in files if not kind_of_file(p)]:
            kinds = ", ".join(KINDS)
            log.info("%s: files other than %s are left out: %d, such as %s", source, kinds, len(others), others[0])
        return found
    if path.exists():
        open_regular(path).close()
        return [path]
    if glob.has_magic(source):
        found = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
        if not found:
            raise DataError(f"{source}: no file matches this pattern")
        return found
    beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, beside, n=1)
    raise DataError(
        f"{source}: no such file or directory" + (f"; did you mean {path.parent / near[0]}?" if near else "")
    )


def _require_text(directory: Path, source: str) -> None:
    """Refuse directories whose text files are no text to train on.

    Raises:
        UsageError: token shards, or a run.
    """
    names = {path.name for path in directory.iterdir()}
    if names >= _SHARD_FILES:
        raise UsageError(
            f"{source}: is a directory of token shards, which cannot be read as text or combined with other sources;"
            " give it alone to `bertkit pretrain --data`, or give the texts that it was made from"
        )
    if names >= _RUN_FILES:
        raise UsageError(f"{source}: is a run directory, not text; give the texts that it was trained on")


def _file_reader(path: Path, options: SourceOptions) -> Reader:
    kind = kind_of_file(path, {**KINDS, **NAMED_ONLY})
    if kind in ("text", "csv", "fasta"):
        _check_spans(str(path), options)
    if kind == "text":
        return TextReader(path, options.documents, options.encoding)
    if kind == "fasta":
        return FastaReader(path, options.encoding)
    if kind == "jsonl":
        return JsonLinesReader(path, TextForm(options.text_field, options.span_fields), options.encoding)
    if kind == "csv":
        return CsvReader(path, options.text_field, options)
    if kind == "parquet":
        return ParquetReader(path, TextForm(options.text_field, options.span_fields))
    known = ", ".join(KINDS)
    raise UsageError(
        f"{path}: unknown kind of file {path.suffix or '(no suffix)'!r}; expected {known}, "
        f"or one of these with {', '.join(COMPRESSIONS)} added"
    )


def _check_spans(source: str, options: SourceOptions) -> None:
    """Raise UsageError if spans are requested from a source that cannot have any."""
    if options.span_fields:
        raise UsageError(
            f"data.reading.span_fields: {source} cannot contain spans; annotated text is JSONL, Parquet or"
            " Hub data; set span_fields to [] for text without annotations"
        )

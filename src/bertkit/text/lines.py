"""Lines of a text file of any size, plain or compressed, with every error located.

Not from a paper. The formats are those of gzip, xz, bzip2 and Zstandard; UTF-8 is RFC 3629. Python's own text mode
would read the same lines, but does not report the byte at which the text stops being UTF-8. The names of encodings, and
guesses for text that is not valid UTF-8, are in file_format.py.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import logging
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from bertkit.errors import DataError
from bertkit.files import open_regular
from bertkit.text.file_format import likely_encodings

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 22
MAX_LINE_BYTES = 16 << 20
"""Maximum length of a line. A line is decoded, split and tokenised as a whole, which takes some eighty times its size
in memory; the longest novels have five million characters."""
MAX_XZ_BYTES = 256 << 20
"""Memory limit for an .xz file's dictionary; `xz -9` needs 65 MiB."""
# First bytes of file types that are given by mistake, and the fix for each.
_FOREIGN = {
    b"%PDF": "a PDF document; extract its text first",
    b"PK\x03\x04": "a zip archive (or an office document); unpack it first",
    b"\x1f\x8b": "gzip-compressed; name it .gz",
    b"\xfd7zXZ": "xz-compressed; name it .xz",
    b"\x28\xb5\x2f\xfd": "Zstandard-compressed; name it .zst",
    b"BZh": "bzip2-compressed; name it .bz2",
    b"PAR1": "a Parquet file; name it .parquet",
}
_UTF_16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_lines(path: Path, encoding: str | None = None, *, errors: str = "strict") -> Iterator[list[str]]:
    """The file's lines without their ends, several thousand at a time, in bounded memory.

    Args:
        path: the file.
        encoding: of the text; None: UTF-8, or UTF-16 if the file begins with a byte order mark, which is logged.
        errors: how undecodable bytes are handled, as in Python's codecs.

    Raises:
        DataError: missing or unreadable file, damaged compression, a binary file, bytes that are invalid in the
            encoding (with their offset), or a line of more than `MAX_LINE_BYTES`.
    """
    chunks = read_bytes(path)
    first = next(chunks, b"")
    if encoding is None and is_utf_16(first):
        encoding = "utf-16"
        _say_utf_16(path)
    chunks = chain([first], chunks)
    if encoding is not None and codecs.lookup(encoding).name != "utf-8":
        yield from _decoded_lines(path, chunks, encoding, errors)
        return
    offset, rest, number = 0, b"", 1
    for chunk in chunks:
        if not offset and not rest:
            _refuse_foreign(path, chunk)
            if chunk.startswith(codecs.BOM_UTF8):
                offset, chunk = len(codecs.BOM_UTF8), chunk[len(codecs.BOM_UTF8) :]
        end = chunk.rfind(b"\n") + 1
        if not end:
            rest += chunk
            _refuse_long(path, len(rest), offset)
            continue
        whole = rest + chunk[:end]
        lines = _decoded(path, whole, offset, number, errors)
        yield lines
        offset, number = offset + len(whole), number + len(lines)
        rest = chunk[end:]
    if rest:
        yield _decoded(path, rest, offset, number, errors)


def _decoded_lines(path: Path, chunks: Iterator[bytes], encoding: str, errors: str) -> Iterator[list[str]]:
    """Lines of text that is not UTF-8, from the chunks of its file."""
    decoder = codecs.getincrementaldecoder(encoding)(errors)
    offset, rest = 0, ""
    for chunk in chain(chunks, [b""]):
        if not offset:
            _refuse_foreign(path, chunk)
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeError as error:
            at = offset + getattr(error, "start", 0)
            raise DataError(
                f"{path}: not valid {encoding} near byte offset {at:,}: {getattr(error, 'reason', error)}; give another"
                " --encoding (reading.encoding), or convert the file to UTF-8"
            ) from error
        if not offset:
            text = text.removeprefix("\ufeff")  # the byte order mark of UTF-16-LE, which is not text
        if "\0" in text:
            raise DataError(
                f"{path}: NUL characters when read as {encoding}: a binary file; or give another --encoding"
            )
        offset += len(chunk)
        whole, newline, rest = (rest + text).rpartition("\n")
        _refuse_long(path, len(rest), offset)
        if newline:
            yield [line.removesuffix("\r") for line in whole.split("\n")]
    if rest:
        yield [rest]


def _refuse_long(path: Path, length: int, offset: int) -> None:
    if length > MAX_LINE_BYTES:
        raise DataError(
            f"{path}: the line at byte {offset:,} is longer than {MAX_LINE_BYTES >> 20} MiB; "
            "put line ends between paragraphs or sentences"
        )


def is_utf_16(first: bytes) -> bool:
    """Whether a file with these first bytes has the byte order mark of UTF-16."""
    return first.startswith(_UTF_16_MARKS)


def read_text(path: Path, encoding: str | None = None) -> str:
    """The whole file as one text with its line ends unchanged, without a byte order mark.

    Args:
        path: the file.
        encoding: as for `read_lines`.

    Raises:
        DataError: as for `read_lines`, except for the length of a line.
    """
    content = b"".join(read_bytes(path))
    _refuse_foreign(path, content)
    if encoding is None and is_utf_16(content):
        encoding = "utf-16"
    if encoding is not None and codecs.lookup(encoding).name != "utf-8":
        try:
            return content.decode(encoding).removeprefix("\ufeff")
        except UnicodeError as error:
            raise DataError(f"{path}: not valid {encoding}: {error}; give another --encoding") from error
    offset = len(codecs.BOM_UTF8) if content.startswith(codecs.BOM_UTF8) else 0
    return _text(path, content[offset:], offset)


def read_bytes(path: Path) -> Iterator[bytes]:
    """The file's decompressed content in chunks of bounded size, for any compression ratio.

    Raises:
        DataError: missing or unreadable file, not a regular file, or damaged compression.
    """
    decompressed: Callable[[Any], Iterator[bytes]] = _DECOMPRESSED.get(path.suffix.lower(), _chunks)
    try:
        with open_regular(path) as file:
            yield from filter(None, decompressed(file))  # an empty chunk would count as the end
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: damaged or truncated {path.suffix} file: {error}") from error
    except MemoryError as error:  # liblzma, above its limit
        raise DataError(f"{path}: needs more than {MAX_XZ_BYTES >> 20} MiB to decompress; compress it again") from error
    except OSError as error:
        if path.suffix.lower() in COMPRESSIONS and error.errno is None:
            raise DataError(f"{path}: damaged or truncated {path.suffix} file: {error}") from error
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _chunks(file: Any) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def _gzip(file: BinaryIO) -> Iterator[bytes]:
    return _chunks(gzip.open(file))


def _bzip2(file: BinaryIO) -> Iterator[bytes]:
    return _chunks(bz2.open(file))


def _xz(file: BinaryIO) -> Iterator[bytes]:
    """All streams of the file; the library's own reader does not limit the memory of a file's dictionary."""
    decompressor = _xz_decompressor()
    compressed = file.read(CHUNK_BYTES)
    while compressed:
        yield decompressor.decompress(compressed, max_length=CHUNK_BYTES)
        while not decompressor.eof and not decompressor.needs_input:
            yield decompressor.decompress(b"", max_length=CHUNK_BYTES)
        if not decompressor.eof:
            compressed = file.read(CHUNK_BYTES)
            continue
        # Between streams there may be zeros, four at a time.
        compressed = decompressor.unused_data.lstrip(b"\0")
        while not compressed and (more := file.read(CHUNK_BYTES)):
            compressed = more.lstrip(b"\0")
        if compressed:
            decompressor = _xz_decompressor()
    if not decompressor.eof:
        raise EOFError("the file ends before the end of its stream")


def _xz_decompressor() -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(format=lzma.FORMAT_AUTO, memlimit=MAX_XZ_BYTES)


def _zstandard(file: BinaryIO) -> Iterator[bytes]:
    """All frames of the file, read by Arrow: zstandard's own reader accepts a truncated frame as complete, and its
    decompressor expands a whole block of the file at once."""
    import pyarrow

    with pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd") as stream:
        # Its `read` never frees the buffer it allocated if the file turns out to be damaged.
        while chunk := stream.read_buffer(CHUNK_BYTES).to_pybytes():
            yield chunk


_DECOMPRESSED: dict[str, Callable[[BinaryIO], Iterator[bytes]]] = {
    ".gz": _gzip,
    ".xz": _xz,
    ".bz2": _bzip2,
    ".zst": _zstandard,
}
COMPRESSIONS = tuple(_DECOMPRESSED)


@cache  # a text is read several times
def _say_utf_16(path: Path) -> None:
    log.info("%s: is read as UTF-16, according to its first bytes", path)


def ending(path: Path) -> str:
    """What a file's name ends in, in lower case and without the ending of a compression: `.jsonl` for `A.JSONL.gz`."""
    return (path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path).suffix.lower()


def _refuse_foreign(path: Path, chunk: bytes) -> None:
    for beginning, remedy in _FOREIGN.items():
        if chunk.startswith(beginning):
            raise DataError(f"{path}: not a text file but {remedy}")


def _decoded(path: Path, content: bytes, offset: int, number: int, errors: str) -> list[str]:
    """Lines of UTF-8 that begins at this byte offset of the decompressed file, with this line number."""
    text = _text(path, content, offset, number, errors)
    lines = (text[:-1] if text.endswith("\n") else text).split("\n")
    return [line[:-1] if line.endswith("\r") else line for line in lines] if "\r" in text else lines


def _text(path: Path, content: bytes, offset: int, number: int = 1, errors: str = "strict") -> str:
    """UTF-8 text that begins at this byte offset of the decompressed file, with this line number."""
    nul = content.find(b"\0")
    if nul >= 0:
        raise DataError(f"{path}: a binary file, not text: NUL byte at offset {offset + nul:,}")
    try:
        return content.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        line = number + content.count(b"\n", 0, error.start)
        raise DataError(
            f"{path}: not valid UTF-8 at byte offset {offset + error.start:,} "
            f"(line {line}, byte 0x{content[error.start]:02x}: {error.reason}){_remedy(content, error.start)}"
        ) from error


def _remedy(content: bytes, start: int) -> str:
    """The fix for bytes that are not UTF-8, with the word they are part of in each likely encoding; words that are the
    same in several are given once."""
    words: dict[str, str] = {}
    for encoding in likely_encodings(content, start):
        words.setdefault(_word_at(content, start, encoding), encoding)
    if not words:
        return "; it is damaged, or in another encoding: convert the file to UTF-8, or name it with --encoding"
    seems = [f"{_TITLES.get(encoding, encoding)} ({word!r})" for word, encoding in words.items()]
    if len(words) == 1:
        given = next(iter(words.values()))
        return f"; it seems to be {seems[0]}: give --encoding {given} (reading.encoding), or convert the file to UTF-8"
    return (
        f"; it may be {', '.join(seems[:-1])} or {seems[-1]}: give the one whose word is right with --encoding"
        " (reading.encoding), or convert the file to UTF-8"
    )


_TITLES = {"latin-1": "Latin-1", "cp1252": "Windows-1252"}


def _word_at(content: bytes, start: int, encoding: str) -> str:
    """The word that contains this byte, in an encoding in which the content is valid."""
    line, end = content.rfind(b"\n", 0, start) + 1, content.find(b"\n", start)
    text = content[line : end if end >= 0 else None].decode(encoding, "ignore")
    at = len(content[line:start].decode(encoding, "ignore"))
    before, after = text[max(0, at - 40) : at], text[at : at + 40]
    return re.split(r"\W", before)[-1] + after[:1] + re.split(r"\W", after[1:])[0]

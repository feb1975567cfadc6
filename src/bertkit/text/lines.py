"""Lines of a text file of any size, plain or compressed, with every error located.

No paper. The formats are those of gzip, xz, bzip2 and Zstandard; UTF-8 is RFC 3629. Python's own text mode would read
the same lines, but does not locate the byte at which the text stops being UTF-8.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from bertkit.errors import DataError

CHUNK_BYTES = 1 << 22
MAX_LINE_BYTES = 64 << 20
# Beginnings of file kinds that people hand over by mistake, and what to do about them.
_FOREIGN = {
    b"%PDF": "a PDF document; extract its text first",
    b"PK\x03\x04": "a zip archive (or an office document); unpack it first",
    b"\xff\xfe": "text in UTF-16; convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)",
    b"\xfe\xff": "text in UTF-16; convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)",
    b"\x1f\x8b": "gzip-compressed; name it .gz",
    b"\xfd7zXZ": "xz-compressed; name it .xz",
    b"\x28\xb5\x2f\xfd": "Zstandard-compressed; name it .zst",
    b"BZh": "bzip2-compressed; name it .bz2",
    b"PAR1": "a Parquet file; name it .parquet",
}
_BOM = b"\xef\xbb\xbf"


def read_lines(path: Path) -> Iterator[list[str]]:
    """The file's lines without their ends, several thousand at a time; memory stays flat.

    Raises:
        DataError: missing or unreadable file, damaged compression, a binary file, invalid UTF-8 (with its byte offset),
            or a line of more than 64 MiB.
    """
    offset, rest = 0, b""
    for chunk in read_bytes(path):
        if not offset and not rest:
            _refuse_foreign(path, chunk)
            if chunk.startswith(_BOM):
                offset, chunk = len(_BOM), chunk[len(_BOM) :]
        end = chunk.rfind(b"\n") + 1
        if not end:
            rest += chunk
            if len(rest) > MAX_LINE_BYTES:
                raise DataError(
                    f"{path}: the line at byte {offset:,} is longer than {MAX_LINE_BYTES >> 20} MiB; "
                    "put line ends between paragraphs or sentences"
                )
            continue
        whole = rest + chunk[:end]
        yield _decoded(path, whole, offset)
        offset += len(whole)
        rest = chunk[end:]
    if rest:
        yield _decoded(path, rest, offset)


def read_text(path: Path) -> str:
    """The whole file as one text, its line ends as they are; a byte order mark is no part of it.

    Raises:
        DataError: as `read_lines`, but for the length of a line.
    """
    content = b"".join(read_bytes(path))
    _refuse_foreign(path, content)
    offset = len(_BOM) if content.startswith(_BOM) else 0
    return _text(path, content[offset:], offset)


def read_bytes(path: Path) -> Iterator[bytes]:
    """The file's decompressed content in chunks.

    Raises:
        DataError: missing or unreadable file, or damaged compression.
    """
    opener = OPENERS.get(path.suffix, open)
    try:
        if path.suffix == ".zst":
            yield from _read_zstandard(path)
            return
        with opener(path, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: damaged or truncated {path.suffix} file: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


OPENERS: dict[str, Callable[..., BinaryIO | Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
COMPRESSIONS = (*OPENERS, ".zst")


def _read_zstandard(path: Path) -> Iterator[bytes]:
    """All frames of the file; the library's own reader stops after the first, and takes a cut-off one for whole."""
    import zstandard

    decompressor = zstandard.ZstdDecompressor().decompressobj()
    unfinished = False
    with path.open("rb") as file:
        while compressed := file.read(CHUNK_BYTES >> 2):
            while compressed:
                try:
                    content = decompressor.decompress(compressed)
                except zstandard.ZstdError as error:
                    raise DataError(f"{path}: damaged .zst file: {error}") from error
                if content:
                    yield content
                unfinished = not decompressor.eof
                compressed = b"" if unfinished else decompressor.unused_data
                if not unfinished:
                    decompressor = zstandard.ZstdDecompressor().decompressobj()
    if unfinished:
        raise DataError(f"{path}: truncated .zst file")


def _refuse_foreign(path: Path, chunk: bytes) -> None:
    for beginning, remedy in _FOREIGN.items():
        if chunk.startswith(beginning):
            raise DataError(f"{path}: not a text file but {remedy}")


def _decoded(path: Path, content: bytes, offset: int) -> list[str]:
    """Lines of content that begins at a byte offset of the decompressed file."""
    text = _text(path, content, offset)
    lines = (text[:-1] if text.endswith("\n") else text).split("\n")
    return [line[:-1] if line.endswith("\r") else line for line in lines] if "\r" in text else lines


def _text(path: Path, content: bytes, offset: int) -> str:
    """Content that begins at a byte offset of the decompressed file."""
    nul = content.find(b"\0")
    if nul >= 0:
        raise DataError(f"{path}: a binary file, not text: NUL byte at offset {offset + nul:,}")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not valid UTF-8 at byte offset {offset + error.start:,} "
            f"(byte 0x{content[error.start]:02x}: {error.reason}); convert the file to UTF-8"
        ) from error

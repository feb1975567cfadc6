"""Sources: the same documents from every format, errors located, blocks from which reading can continue."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest

from bertkit.errors import DataError, UsageError
from bertkit.text import corpus as corpus_module
from bertkit.text import lines as lines_module
from bertkit.text import readers
from bertkit.text.corpus import Corpus
from bertkit.text.source_options import SourceOptions
from bertkit.text.sources import open_corpus

DOCUMENTS = [["First title", "A line. Another “sentence” of it."], ["Second", "naïve café 中文", "end"], ["Third"]]
TEXT = "\n\n".join("\n".join(document) for document in DOCUMENTS) + "\n"


def zstandard_frames(content: bytes) -> bytes:
    """Two frames, as parallel compressors write them."""
    zstandard = pytest.importorskip("zstandard")
    half = len(content) // 2
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in (content[:half], content[half:]))


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard_frames,
}


def opened(*names: str | Path, cache: Path, **options: object) -> Corpus:
    return open_corpus([str(name) for name in names], SourceOptions.model_validate(options), cache=cache, offline=True)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def records(kind: str) -> bytes:
    """The documents as records of a field named `body`."""
    rows = [{"id": i, "body": "\n".join(document)} for i, document in enumerate(DOCUMENTS)]
    if kind == "jsonl":
        return "\n".join(json.dumps(row) for row in rows).encode()
    if kind == "csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, ["id", "body"])
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(rows)
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv"])
def test_every_format_and_compression_gives_the_same_documents(
    tmp_path: Path, cache: Path, kind: str, suffix: str
) -> None:
    path = tmp_path / f"corpus.{kind}{suffix}"
    path.write_bytes(COMPRESSORS[suffix](TEXT.encode() if kind == "txt" else records(kind)))
    assert list(opened(path, cache=cache, text_field="body").documents()) == DOCUMENTS


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_an_empty_stream_of_a_compressed_file_is_not_its_end(tmp_path: Path, cache: Path, encoding: str) -> None:
    path, content = tmp_path / "corpus.txt.xz", TEXT.encode(encoding)
    path.write_bytes(b"".join(map(lzma.compress, (b"", content[:7], b"", content[7:]))))
    assert list(opened(path, cache=cache).documents()) == DOCUMENTS


@pytest.mark.parametrize("name", ["corpus.parquet", "corpus[1].parquet", "cor*.parquet"])
def test_parquet_gives_the_same_documents(tmp_path: Path, cache: Path, name: str) -> None:
    """A name is no pattern: the second one would match no file, and the third one another, too."""
    (tmp_path / name).write_bytes(records("parquet"))
    (tmp_path / "corner.parquet").write_bytes(b"not read")
    assert list(opened(tmp_path / name, cache=cache, text_field="body").documents()) == DOCUMENTS


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_a_record_of_fasta_is_a_document(tmp_path: Path, cache: Path, suffix: str) -> None:
    """Wrapped lines are joined, lower case is raised, the end's `*`, headers, comments and empty records dropped."""
    text = ">sp|P1|A first\r\nMKT*L\r\n lla aa*\r\n;a comment\r\n\r\n>empty\n>P2\nM-.X\n*\n"
    (tmp_path / f"a.fa{suffix}").write_bytes(COMPRESSORS[suffix](text.encode()))
    corpus = opened(tmp_path / f"a.fa{suffix}", cache=cache)
    assert list(corpus.documents()) == [["MKT*LLLAAA"], ["M-.X"]]
    (tmp_path / "in").mkdir()
    for name in ("b.fasta", "c.FAA"):
        (tmp_path / "in" / name).write_text(">x\nMK\n")
    assert list(opened(tmp_path / "in", cache=cache).documents()) == [["MK"], ["MK"]]


def test_dots_lead_into_nested_records_unless_a_field_has_the_whole_name(tmp_path: Path, cache: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"id": 1, "meta": {"body": "\n".join(document), "url": "x"}} for document in DOCUMENTS]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        found = opened(tmp_path / name, cache=cache, text_field="meta.body")
        assert list(found.documents()) == DOCUMENTS
        with pytest.raises(DataError, match=r"no field 'meta.boddy'; there are: body; name it with"):
            list(opened(tmp_path / name, cache=cache, text_field="meta.boddy").documents())
    (tmp_path / "b.jsonl").write_text(json.dumps({"meta.body": "own", "meta": {"body": "nested"}}))
    assert list(opened(tmp_path / "b.jsonl", cache=cache, text_field="meta.body").documents()) == [["own"]]


def test_a_parquet_file_without_rows_has_no_documents(tmp_path: Path, cache: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    empty = pyarrow.table({"body": pyarrow.array([], pyarrow.string())})
    pyarrow.parquet.write_table(empty, tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(records("parquet"))
    assert list(opened(tmp_path, cache=cache, text_field="body").documents()) == DOCUMENTS


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            ("manifest.json", "tokenizer.json", "vocab.txt"),
            "is a directory of token shards, which cannot be",
        ),
        (("run.json", "recipe.yaml", "log.txt"), "is a run directory, not text"),
    ],
)
def test_directories_of_other_things_are_no_text(
    tmp_path: Path, cache: Path, files: tuple[str, ...], words: str
) -> None:
    for name in files:
        (tmp_path / name).write_text("[PAD]")
    with pytest.raises(UsageError, match=words):
        opened(tmp_path, cache=cache)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
def test_chunks_of_any_size_give_the_same_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    text = "\ufeffone\r\ntwo\n\n中文 three\u2028not a line end\nno end"
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    if chunk < 64:  # the byte order mark must be within the first chunk
        path.write_bytes(text.removeprefix("\ufeff").encode())
    monkeypatch.setattr(lines_module, "CHUNK_BYTES", chunk)
    lines = [line for part in lines_module.read_lines(path) for line in part]
    assert lines == ["one", "two", "", "中文 three\u2028not a line end", "no end"]


def test_document_borders_follow_the_option(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(" \n = Title = \n\n text \n\n = = Part = = \n more\n\n = Other = \n= x\n")
    borders = {
        "blank-line": [[" = Title = "], [" text "], [" = = Part = = ", " more"], [" = Other = ", "= x"]],
        "wikitext": [["Title", " text ", "Part", " more"], ["Other", "= x"]],
        "line": [[" = Title = "], [" text "], [" = = Part = = "], [" more"], [" = Other = "], ["= x"]],
        "file": [[" = Title = ", " text ", " = = Part = = ", " more", " = Other = ", "= x"]],
    }
    for option, documents in borders.items():
        assert list(opened(path, cache=cache, documents=option).documents()) == documents


def test_wikitext_has_as_many_documents_as_titles(shared_data: Path, cache: Path) -> None:
    path = shared_data / "text" / "wikitext2-test.txt"
    lines = [line.strip() for line in path.read_text(encoding="utf-8").split("\n")]
    titles = [line[2:-2] for line in lines if line[:2] == "= " and line[-2:] == " =" and line[2] != "="]
    documents = list(opened(path, cache=cache, documents="wikitext").documents())
    assert [document[0] for document in documents] == titles


def test_blocks_go_on_from_any_position_and_large_documents_come_in_parts(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "BLOCK_CHARACTERS", 300)
    monkeypatch.setattr(readers, "PART_CHARACTERS", 120)
    for name, sizes in {"a.txt": [3, 90, 1], "b.txt": [1], "c.txt": [40, 2, 2, 2, 9]}.items():
        documents = ["\n".join(f"line {i} of {name}" for i in range(size)) for size in sizes]
        (tmp_path / name).write_text("\n\n".join(documents))
    corpus = opened(tmp_path, cache=cache)
    blocks = list(corpus.blocks())
    assert len(blocks) > 5
    assert all(block.characters < 300 + 140 for block in blocks)
    for number, block in enumerate(blocks):
        assert list(corpus.blocks(block.end)) == blocks[number + 1 :]
    assert [len(document) for document in corpus.documents()] == [3, 90, 1, 1, 40, 2, 2, 2, 9]
    assert [begins for block in blocks for begins, _ in block.parts].count(True) == 9


def test_fingerprints_follow_content_and_options_not_names(tmp_path: Path, cache: Path) -> None:
    for name, text in {"a.txt": TEXT, "b.txt": TEXT, "c.txt": TEXT + "x"}.items():
        (tmp_path / name).write_text(text)
    a, b, c = (opened(tmp_path / name, cache=cache).fingerprint for name in ("a.txt", "b.txt", "c.txt"))
    assert a == b != c
    assert opened(tmp_path / "a.txt", cache=cache, segments="line").fingerprint != a
    (tmp_path / "a.txt").write_text(TEXT + "changed")
    assert opened(tmp_path / "a.txt", cache=cache).fingerprint != a
    (cache / "file-hashes.json").write_text("{damaged")
    assert opened(tmp_path / "b.txt", cache=cache).fingerprint == a


def test_directories_and_globs_are_read_in_order_and_each_file_once(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("sub/2.txt", "1.txt", "3.jsonl", "readme.md"):
        (tmp_path / name).write_text(json.dumps({"text": name}) if name.endswith("jsonl") else name)
    found = opened(tmp_path, tmp_path / "1.txt", cache=cache)
    assert [document[0] for document in found.documents()] == ["1.txt", "3.jsonl", "sub/2.txt"]
    by_glob = opened(tmp_path / "**" / "*.txt", cache=cache)
    assert [document[0] for document in by_glob.documents()] == ["1.txt", "sub/2.txt"]
    assert [entry["kind"] for entry in found.describe()] == ["text", "jsonl", "text"]


def test_a_directory_of_babylm_gives_its_training_text_alone(tmp_path: Path, cache: Path) -> None:
    for kind in ("train", "dev", "test"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / f"childes.{kind}").write_text(f"One {kind} line.\n\nAnother.\n")
    assert list(opened(tmp_path, cache=cache).documents()) == [["One train line."], ["Another."]]
    for named in (tmp_path / "dev" / "childes.dev", tmp_path / "de?" / "*.dev"):
        assert list(opened(named, cache=cache).documents()) == [["One dev line."], ["Another."]]


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.txt", b"good line\nbad \xff byte", "a.txt: not valid UTF-8 at byte offset 14 "),
        ("a.txt", b"text\n" * 9 + b"\x00\x01", "a.txt: a binary file, not text: NUL byte at offset 45"),
        ("a.txt", b"%PDF-1.7", "a PDF document"),
        ("a.txt", gzip.compress(b"x", mtime=0), "name it .gz"),
        ("a.txt.gz", b"plain text", "damaged or truncated .gz"),
        ("a.txt.gz", gzip.compress(b"text" * 99, mtime=0)[:-9], "damaged or truncated .gz"),
        ("a.txt.xz", lzma.compress(b"text" * 99)[:-9], "damaged or truncated .xz"),
        ("a.txt.bz2", bz2.compress(b"text" * 99)[:-9], "damaged or truncated .bz2"),
        ("a.txt.zst", zstandard_frames(b"text" * 99)[:-3], "damaged or truncated .zst"),
        ("a.txt.zst", b"plain text", "damaged or truncated .zst"),
        ("a.jsonl", b'{"text": "x"}\n\n{"text": }', "a.jsonl, line 3, column 10: not valid JSON"),
        ("a.jsonl", b'{"txt": "x"}', "a.jsonl, line 1: no field 'text'; there are: txt"),
        ("a.jsonl", b'{"text": {"txt": "x"}}', "line 1: field 'text' is dict, expected a string"),
        ("a.jsonl", b"[1]", "line 1: expected a JSON object, found list"),
        ("a.jsonl", b'{"text": 5}', "line 1: field 'text' is int, expected a string"),
        ("a.jsonl", b'{"text": "\\ud800"}', "half a surrogate pair at character 0"),
        ("a.csv", b"id,tex\n1,x\n", "a.csv: no field 'text'; there are: tex"),
        ("a.csv", b"id,text\n1,\xff\n", "a.csv: not valid UTF-8 at byte offset 10"),
        ("a.csv", b"id,text\n1,x,y,z\n2,x,y\n1,2,3,4,5,6\n", "a.csv: cannot be read"),
        ("a.fa", b"\nACGT\n", "a.fa, line 2: not FASTA, whose first record begins with '>': 'ACGT'"),
        ("a.fa", b">x\nMK\n>y\nMK3K\n", "a.fa, line 4: not FASTA: '3' is no residue"),
        ("a.fasta.gz", b">x\nMK\n", "damaged or truncated .gz"),
        ("a.parquet", b"PAR1 but not more", "a.parquet: not a readable Parquet file"),
    ],
)
def test_faulty_files_are_named_with_the_place(
    tmp_path: Path, cache: Path, name: str, content: bytes, fault: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(opened(tmp_path / name, cache=cache).documents())
    assert fault in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "utf-16-le"])
@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv"])
def test_text_of_another_encoding_is_the_same_text(tmp_path: Path, cache: Path, encoding: str, kind: str) -> None:
    documents = [["na\u00efve \u201ccaf\u00e9\u201d"], ["end"]]
    lines = [" ".join(document) for document in documents]
    content = {
        "txt": "\n\n".join(lines),
        "jsonl": "\n".join(json.dumps({"text": line}, ensure_ascii=False) for line in lines),
        "csv": "id;text\n" + "".join(f"{number};{line}\n" for number, line in enumerate(lines)),
    }[kind]
    path = tmp_path / f"a.{kind}"
    path.write_bytes(content.encode(encoding))
    assert list(opened(path, cache=cache, encoding=encoding).documents()) == documents
    if encoding == "utf-16":
        assert list(opened(path, cache=cache).documents()) == documents, "by its byte order mark"


def test_lines_of_another_encoding_do_not_depend_on_the_chunks(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "caf\u00e9 \u4e2d\r\nnext\n\n\U0001f600 last"
    (tmp_path / "a.txt").write_bytes(text.encode("utf-16"))
    whole = list(opened(tmp_path / "a.txt", cache=cache).documents())
    assert whole == [["caf\u00e9 \u4e2d", "next"], ["\U0001f600 last"]]
    for size in (3, 7, 8):
        monkeypatch.setattr(lines_module, "CHUNK_BYTES", size)
        assert list(opened(tmp_path / "a.txt", cache=cache).documents()) == whole


def test_a_delimiter_is_read_off_the_first_line_or_given(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id;text\n1;one, two\n")
    assert list(opened(path, cache=cache).documents()) == [["one, two"]]
    path.write_text("id^text\n1^one, two\n")
    assert list(opened(path, cache=cache, delimiter="^").documents()) == [["one, two"]]
    with pytest.raises(DataError, match=r"a.csv, line 1: no ';' in the first line"):
        list(opened(path, cache=cache, delimiter=";").documents())


def test_options_that_are_not_given_leave_the_fingerprint_as_it_was() -> None:
    assert SourceOptions().decides.keys() == {"text_field", "documents", "segments"}
    assert SourceOptions().model_dump().keys() == {"text_field", "span_fields", "documents", "segments"}
    assert SourceOptions(encoding="latin-1").decides["encoding"] == "iso8859-1"


def test_an_overlong_line_is_refused(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr(lines_module, "CHUNK_BYTES", 40)
    (tmp_path / "a.txt").write_text("short\n" + "x" * 300)
    with pytest.raises(DataError, match="the line at byte 6 is longer"):
        list(opened(tmp_path / "a.txt", cache=cache).documents())


@pytest.mark.parametrize(
    ("source", "fault", "message"),
    [
        ("corpas.txt", DataError, "did you mean .*corpus.txt"),
        ("*.nothing", DataError, "no file matches"),
        ("empty", DataError, "no .txt, .jsonl, .csv, .parquet, .train, .fasta, .fa, .faa file"),
        ("notes.docx", UsageError, "unknown kind of file '.docx'"),
        ("plain", UsageError, "no suffix"),
    ],
)
def test_what_cannot_be_opened_is_explained(
    tmp_path: Path, cache: Path, source: str, fault: type[Exception], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("corpus.txt", "notes.docx", "plain"):
        (tmp_path / name).write_text("x")
    with pytest.raises(fault, match=message):
        opened(tmp_path / source, cache=cache)


@pytest.mark.parametrize("source", ["builtin:other", "ftp://host/x.txt", "s3:///x.txt", "hub:"])
def test_unknown_schemes_are_wrong_usage(cache: Path, source: str) -> None:
    with pytest.raises(UsageError):
        opened(source, cache=cache)


def test_no_source_is_wrong_usage(cache: Path) -> None:
    with pytest.raises(UsageError, match="no source"):
        open_corpus([], cache=cache)


def test_a_hub_data_set_that_is_not_cached_is_a_data_fault_offline(cache: Path) -> None:
    with pytest.raises(DataError, match="hub:org/absent: not in the local Hub cache"):
        opened("hub:org/absent", cache=cache)


def test_endings_in_capitals_are_the_same_and_files_that_are_not_read_are_told(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "A.TXT").write_text("one two\n")
    (tmp_path / "in" / "b.txt.GZ").write_bytes(gzip.compress(b"three four\n"))
    (tmp_path / "in" / "notes.doc").write_text("five")
    (tmp_path / "in" / "._A.TXT").write_bytes(b"\0\5\26\7")  # attributes that macOS keeps beside a file
    with caplog.at_level("INFO"):
        documents = list(open_corpus([str(tmp_path / "in")], cache=cache).documents())
    assert documents == [["one two"], ["three four"]]
    assert "are left out: 1, such as notes.doc" in caplog.text
    assert "notes.doc" in caplog.text

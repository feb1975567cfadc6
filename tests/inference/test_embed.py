"""`bertkit embed`: files and lines of vectors that depend only on the text, in one run or resumed."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file, save_file

import bertkit as package
from bertkit.errors import DataError, StoppedError, UsageError
from bertkit.inference import embed as job
from bertkit.inference.embed import InputText, embed_to_file
from bertkit.inference.embed_settings import EmbedSettings
from bertkit.inference.embedder import Embedder
from bertkit.inference.vector_files import VectorFile
from bertkit.inference.vector_types import stored
from tests.inference.test_independent_batches import engine
from tests.tasks.tiny_task import reviews, write_model

Command = Callable[..., Any]
TEXTS = [text for text, _ in reviews(23, seed=1)]
LONG = " ".join(["fine cat list word letter"] * 30)
TEXTS[3], TEXTS[7] = "", LONG


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
    return path


def vectors_of(model: Path) -> Any:
    return package.load(str(model), device="cpu").encode(TEXTS)


def test_lines_and_files_hold_the_vectors_of_encode(model: Path, file: Path, tmp_path: Path, bertkit: Command) -> None:
    common = ("--model", model, "--precision", "fp32", "--device", "cpu")
    expected = vectors_of(model)
    done = bertkit("embed", *common, file)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["id"] for row in rows] == [str(number) for number in range(len(TEXTS))]
    printed = np.array([row["embedding"] for row in rows], dtype=np.float32)
    np.testing.assert_array_equal(printed, expected)
    assert "1 of 23 texts are longer than 40 tokens and were cut" in done.stderr
    for ending in ("npy", "parquet", "arrow"):
        out = tmp_path / f"v.{ending}"
        done = bertkit("embed", *common, file, "--out", out, "--json", "--batch-tokens", 64)
        assert json.loads(done.stdout) == {"out": str(out), "count": 23, "dim": 30, "dtype": "float32", "cut": 1}
        np.testing.assert_array_equal(read(out), expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts.txt", "v.arrow", "v.npy", "v.parquet"]


def read(out: Path) -> Any:
    if out.suffix == ".npy":
        return np.load(out)
    table = parquet.read_table(out) if out.suffix == ".parquet" else pa.ipc.open_file(out).read_all()
    assert table.column("id").to_pylist() == [str(number) for number in range(table.num_rows)]
    return np.array(table.column("embedding").to_pylist(), dtype=np.float32)


def test_neither_blocks_nor_company_change_a_vector(model: Path) -> None:
    embedder = Embedder.load(model, engine())
    texts = [InputText(str(number), text, "") for number, text in enumerate(TEXTS)]
    settings = EmbedSettings(dtype="int8", truncate=17, normalise=True, long="window")
    whole = job.embed_block(embedder, texts, settings)
    assert (whole.windowed, whole.cut, whole.without_tokens) == (1, 0, 0)
    for first in (1, 7):
        parts = [
            job.embed_block(embedder, block, settings) for block in job.blocks_of(texts, first=first, largest=first)
        ]
        np.testing.assert_array_equal(np.concatenate([part.stored_NF for part in parts]), whole.stored_NF)


def test_ids_and_columns_of_a_table(model: Path, tmp_path: Path, bertkit: Command) -> None:
    (tmp_path / "t.csv").write_text("id,body\na,the cat\nb,\n")
    done = bertkit("embed", "--model", model, tmp_path / "t.csv", "--text", "body", "--out", tmp_path / "v.parquet")
    assert done.code == 0
    assert parquet.read_table(tmp_path / "v.parquet").column("id").to_pylist() == ["a", "b"]


def test_types_hold_each_vector_by_itself() -> None:
    vectors = np.array([[0.5, -2.0, 0.001, 1.0], [0, 0, 0, 0], [3e-39, 0, 0, -1e-39]], dtype=np.float32)
    assert stored(vectors, "int8").tolist() == [[32, -127, 0, 64], [0, 0, 0, 0], [127, 0, 0, -42]]
    assert stored(vectors, "binary").tolist() == [[0b10110000], [0], [0b10000000]]
    bf16 = torch.from_numpy(stored(vectors, "bf16")).view(torch.bfloat16)
    torch.testing.assert_close(bf16, torch.from_numpy(vectors).bfloat16(), rtol=0, atol=0)


def test_int8_keeps_directions_and_binary_their_neighbours(model: Path) -> None:
    vectors = vectors_of(model)
    quantised = stored(vectors, "int8").astype(np.float32)
    cosine = (vectors * quantised).sum(1) / np.linalg.norm(vectors, axis=1) / np.linalg.norm(quantised, axis=1)
    assert cosine.min() > 0.9999


def test_normalised_and_truncated(model: Path, file: Path, tmp_path: Path, bertkit: Command) -> None:
    expected = vectors_of(model)[:, :7]
    expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    for flag in ("--normalise", "--normalize"):
        options = ("--truncate", 7, flag, "--precision", "fp32", "--out", tmp_path / "v.npy")
        assert bertkit("embed", "--model", model, file, *options).code == 0
        np.testing.assert_allclose(np.load(tmp_path / "v.npy"), expected, atol=1e-6)


def test_windows_read_all_of_a_long_text(model: Path) -> None:
    embedder = Embedder.load(model, engine())
    ids = embedder.token_ids([LONG])[0]
    room = 38
    pieces = [ids[first : first + room] for first in range(0, len(ids), room)]
    vectors = embedder.vectors(embedder.sequences(pieces)).astype(np.float64)
    weights = np.array([len(piece) + 2 for piece in pieces])
    expected = (vectors * weights[:, None]).sum(0) / weights.sum()
    np.testing.assert_allclose(embedder.encode([LONG], long="window")[0], expected, atol=1e-6)


def test_a_stopped_run_goes_on_to_the_same_bytes(model: Path, tmp_path: Path) -> None:
    embedder = Embedder.load(model, engine())
    texts = [InputText(str(number), text, "") for number, text in enumerate(TEXTS)]
    for ending in ("npy", "parquet"):
        straight, resumed = tmp_path / f"straight.{ending}", tmp_path / f"resumed.{ending}"
        source = {"path": "texts"}
        embed_to_file(embedder, texts, straight, EmbedSettings(), source=source)
        for _ in range(3):
            with pytest.raises(StoppedError, match=r"SIGTERM after [0-9]+ texts; give the same command again"):
                embed_to_file(embedder, _stopping(texts), resumed, EmbedSettings(), source=source)
        # Data written after the last complete block is not kept.
        with (tmp_path / f"resumed.{ending}.part").open("ab") as part:
            part.write(b"torn")
        embed_to_file(embedder, texts, resumed, EmbedSettings(), source=source)
        assert resumed.read_bytes() == straight.read_bytes()


def test_a_second_command_does_not_write_into_the_same_file(model: Path, tmp_path: Path) -> None:
    embedder, out = Embedder.load(model, engine()), tmp_path / "v.npy"
    refused = pytest.raises(DataError, match=r"v\.npy: another process is writing it; wait for that")

    def texts() -> Iterator[InputText]:
        yield InputText("0", "a", "")
        with refused:
            embed_to_file(embedder, [InputText("0", "b", "")], out, EmbedSettings(), source={})

    embed_to_file(embedder, texts(), out, EmbedSettings(), source={})
    np.testing.assert_array_equal(np.load(out), embedder.encode(["a"]))
    with pytest.raises(UsageError):
        embed_to_file(embedder, [], tmp_path / "v.doc", EmbedSettings(), source={})
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("v.")] == ["v.npy"]


def _stopping(texts: list[InputText]) -> Any:
    """The texts; a signal arrives while they are read, seven texts after the finished ones."""
    state = list(texts)
    for text in state:
        yield text
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "LARGEST_BLOCK", 7)


def test_an_unfinished_file_of_other_texts_or_options_is_not_continued(model: Path, tmp_path: Path) -> None:
    embedder = Embedder.load(model, engine())
    texts = [InputText(str(number), text, "") for number, text in enumerate(TEXTS)]
    out = tmp_path / "v.npy"
    with pytest.raises(StoppedError):
        embed_to_file(embedder, _stopping(texts), out, EmbedSettings(), source={"path": "a"})
    changed = [InputText("0", "another", ""), *texts[1:]]
    with pytest.raises(DataError, match=r"v\.npy\.part: was begun with other texts; delete it"):
        embed_to_file(embedder, changed, out, EmbedSettings(), source={"path": "a"})
    written = embed_to_file(embedder, texts, out, EmbedSettings(dtype="binary"), source={"path": "a"})
    assert (written.count, np.load(out).shape) == (23, (23, 4))


def test_a_part_continues_after_its_last_whole_block(tmp_path: Path) -> None:
    file = VectorFile(tmp_path / "v.parquet", np.float32, 3, {})
    file.append(["a"], np.ones((1, 3)), {"cut": 1})
    (tmp_path / "v.parquet.part").open("ab").write(b"torn")
    again = VectorFile(tmp_path / "v.parquet", np.float32, 3, {})
    assert (again.rows, again.notes) == (1, {"cut": 1})
    assert (tmp_path / "v.parquet.part").stat().st_size == 128 + 12


def test_a_damaged_part_is_begun_anew(tmp_path: Path) -> None:
    described = '{"key": {}, "rows": 900, "bytes": {"": 900, "ids": 0}, "notes": {}}'
    for damage in ("{", described, '{"key": {}, "rows": "x"}'):
        file = VectorFile(tmp_path / "v.npy", np.float32, 3, {})
        file.append(["0"], np.ones((1, 3)), {})
        (tmp_path / "v.npy.part.json").write_text(damage)
        assert VectorFile(tmp_path / "v.npy", np.float32, 3, {}).rows == 0


def test_a_full_disk_is_told_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = VectorFile(tmp_path / "v.npy", np.float32, 3, {})
    (tmp_path / "v.npy.part").unlink()
    (tmp_path / "v.npy.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*v\.npy\.part'"):
        file.append(["0"], np.ones((1, 3)), {})


def test_bad_input_is_named(model: Path, file: Path, tmp_path: Path, bertkit: Command) -> None:
    def fails(code: int, message: str, *arguments: object) -> None:
        done = bertkit("embed", "--model", model, *arguments)
        assert (done.code, message in done.stderr.replace("\n", " ")) == (code, True), done.stderr

    fails(3, "texts.txt, line 8: 152 tokens, the model reads 40; give --long cut or", file, "--long", "error")
    fails(2, "--truncate 31: the vectors of", file, "--truncate", "31")
    fails(2, "its ending is none of .npy, .parquet, .arrow", file, "--out", tmp_path / "v.csv")
    fails(2, "does not exist; create it", file, "--out", tmp_path / "no" / "v.npy")
    fails(2, "--out s3://...: the file is written to a local directory", file, "--out", "s3://bucket/v.npy")
    fails(2, "--max-length 41", file, "--max-length", "41")
    fails(3, "no such file", tmp_path / "none.txt")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"words": 3}\n')
    fails(3, "bad.jsonl, line 2", tmp_path / "bad.jsonl")


def test_vectors_that_are_not_finite_are_an_error_that_names_the_model(
    model: Path, file: Path, tmp_path: Path, bertkit: Command
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for each in model.iterdir():
        (broken / each.name).write_bytes(each.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    next(iter(tensors.values())).fill_(float("nan"))
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    done = bertkit("embed", "--model", broken, file, "--out", tmp_path / "v.npy", "--json")
    assert done.code == 3
    assert "NaN" in json.loads(done.stdout)["error"]
    assert "broken" in json.loads(done.stdout)["error"]
    assert not (tmp_path / "v.npy").exists()


def test_an_empty_file_and_a_pipe(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bertkit: Command
) -> None:
    (tmp_path / "none.txt").write_text("")
    done = bertkit("embed", "--model", model, tmp_path / "none.txt", "--out", tmp_path / "v.npy")
    assert (done.code, "contains no text" in done.stderr) == (0, True)
    assert np.load(tmp_path / "v.npy").shape == (0, 30)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the cat\n\n")))
    done = bertkit("embed", "--model", model, "-")
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == ["0", "1"]


def test_an_error_leaves_nothing_of_a_pipe_and_what_a_file_needs_to_continue(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bertkit: Command
) -> None:
    texts = b"the cat\n" + b"cat " * 200 + b"\n"
    (tmp_path / "texts.txt").write_bytes(texts)
    for source, left in (("-", set()), (tmp_path / "texts.txt", {"v.npy.part", "v.npy.part.ids"})):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(texts)))
        done = bertkit("embed", "--model", model, source, "--long", "error", "--out", tmp_path / "v.npy")
        assert (done.code, "line 2: 202 tokens" in done.stderr) == (3, True), done.stderr
        assert {path.name for path in tmp_path.iterdir()} == {"texts.txt"} | left


def test_an_input_is_not_replaced(model: Path, tmp_path: Path, bertkit: Command) -> None:
    file = tmp_path / "texts.parquet"
    parquet.write_table(pa.table({"text": ["the cat"]}), file)
    before = file.read_bytes()
    done = bertkit("embed", "--model", model, file, "--out", file)
    assert (done.code, "is read by this command" in done.stderr) == (2, True), done.stderr
    assert file.read_bytes() == before

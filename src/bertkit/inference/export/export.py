"""Export of a model for other tools; nothing is written unless its outputs agree with the source's.

Not from a paper (contract: `bertkit export`). The export is written, read back and compared with the source on the
same texts (agreement.py); only then is the directory given its name. Formats: a Hugging Face directory; the same with
int8 weights (models/quantisation/quantised.py), for bertkit only; or an ONNX graph (onnx_graph.py) with float or int8
weights, next to config.json and tokenizer.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import torch

from bertkit import __version__
from bertkit.errors import UsageError
from bertkit.files import atomic_directory, file_within, files_within, read_json, sha256_of, write_json
from bertkit.inference.export.agreement import (
    TEXTS,
    Agreement,
    RoughAgreement,
    compare,
    outputs_of,
    packed,
    probe_batches,
)
from bertkit.inference.export.calibration import input_ranges
from bertkit.models.conversion.pruning import dense
from bertkit.models.files.hub import check_vocabulary, load_model, save_model, write_config, write_tokenizer
from bertkit.models.files.model_files import MODULES_FILE, encoder_directory, find_model, read_modules, weight_files
from bertkit.models.headed import HeadedModel
from bertkit.models.late_interaction import load_token_model, own_projection, write_token_files
from bertkit.models.quantisation.quantised import is_quantised, quantise
from bertkit.models.sentence import is_embedder, is_of_colbert, is_token_encoder, load_sentence_model
from bertkit.models.text_reading import VERSION_FILE, settings_file
from bertkit.models.weights import WeightReport
from bertkit.tasks.embedding.late_interaction import register_markers
from bertkit.tasks.embedding.token_reader import TokenReader
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import READ_FIRST, load_tokenizer

Format = Literal["hf", "int8", "onnx", "onnx-int8"]
RECORD = "export.json"
TOLERANCE: dict[Format, float] = {"hf": 1e-5, "int8": 0.25, "onnx": 1e-4, "onnx-int8": 0.25}
"""The largest accepted difference; ONNX Runtime sums in a different order. For int8 it is the root mean square relative
to the source's: all-MiniLM-L6-v2 fine-tuned on RTE, whose states have a few large elements, reaches 0.11, and 0.14 in
ONNX Runtime."""

_SENTENCE_FILES = (MODULES_FILE, VERSION_FILE)


@dataclass(frozen=True)
class Source:
    """A model to export.

    Attributes:
        name: as given by the user.
        directory: where it is.
        inner: directory of its encoder below `directory`; "." except for some sentence encoders.
        model, tokenizer, report: the loaded model; tokenizer is None if there are no tokenizer files.
    """

    name: str
    directory: Path
    inner: str
    model: HeadedModel
    tokenizer: Tokenizer | None
    report: WeightReport

    @property
    def has_modules(self) -> bool:
        """Whether sentence-transformers wrote it: an embedder, or a cross-encoder of version 6."""
        return (self.directory / MODULES_FILE).is_file()

    @property
    def is_embedder(self) -> bool:
        return is_embedder(self.directory)


def export_model(
    name: str, to: Path, *, kind: Format = "hf", calibrate: Path | None = None, offline: bool = False
) -> dict[str, Any]:
    """Export a model to `to`; returns the contents of its export.json.

    Args:
        name: a model directory, a run directory or a Hub id.
        to: a directory that does not exist, is empty, or contains only an earlier export.
        kind: format of the export.
        calibrate: for int8, a text from whose activations input ranges are measured; None: each row has its own.
        offline: do not use the network.

    Raises:
        UsageError: `to` contains other files, the model is already int8, or its family cannot be exported in this
            format.
        DataError: the model cannot be read.
        CheckError: the export does not reproduce the outputs of its source; it is deleted.
    """
    directory = find_model(name, offline=offline)
    if kind != "hf" and is_token_encoder(directory):
        raise UsageError(
            f"--format {kind}: {name} computes a vector for each token (ColBERT), which is only exported as hf;"
            " `bertkit serve` and `bertkit search --rerank` compute with it"
        )
    check_destination(to, directory)
    source = read_source(name, directory)
    if is_quantised(source.model):
        raise UsageError(f"{name}: is already quantised; export the model that it was made from")
    writers: dict[Format, Callable[[Source, Path], Agreement]] = {
        "hf": _write_directory,
        "int8": partial(_write_int8, calibrate=calibrate),
        "onnx": partial(_write_onnx, kind="onnx"),
        "onnx-int8": partial(_write_onnx, kind="onnx-int8"),
    }
    with atomic_directory(to) as staging:
        agreement = writers[kind](source, staging)
        agreement.raise_if_different(f"{name}: the export as {kind}")
        record = _record(source, kind, agreement, staging)
        if calibrate is not None:
            record["calibrated_on"] = {"file": str(calibrate), "sha256": sha256_of(calibrate)}
        write_json(staging / RECORD, record)
    return record


def read_source(name: str, directory: Path) -> Source:
    """Load the model and, if there are tokenizer files, its tokenizer."""
    inner = encoder_directory(directory)
    model, report = load_model(directory)
    tokenizer = None
    if any((inner / file).is_file() for file in READ_FIRST):
        tokenizer = load_tokenizer(inner)
        check_vocabulary(model, tokenizer, source=name)
    return Source(name, directory, str(inner.relative_to(directory)), model, tokenizer, report)


def check_destination(to: Path, source: Path) -> None:
    """Raises:
    UsageError: existing files would be overwritten.
    """
    here, there = to.resolve(), source.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise UsageError(
            f"--to {to}: is, contains or is inside the directory of the model to export; choose another directory"
        )
    if not to.exists():
        return
    if not to.is_dir():
        raise UsageError(f"--to {to}: is a file; give a directory that does not exist yet")
    found = {
        path.relative_to(to).as_posix() for path in to.rglob("*") if not path.is_dir() and path.name != ".DS_Store"
    }
    if not found:
        return
    others = found - {RECORD} - _recorded(to / RECORD)
    if RECORD not in found or others:
        shown = ", ".join(sorted(others or found)[:3])
        raise UsageError(f"--to {to}: contains other files than an export ({shown}); give another directory")


def _recorded(path: Path) -> set[str]:
    files = read_json(path).get("files") if path.is_file() else None
    return set(files) if isinstance(files, dict) else set()


def _write_directory(source: Source, staging: Path) -> Agreement:
    """A Hugging Face directory with removed heads as zeros; a sentence encoder's other steps are copied."""
    return _write_model(source, staging, dense(source.model), tolerance=TOLERANCE["hf"])


def _write_int8(source: Source, staging: Path, calibrate: Path | None) -> Agreement:
    """A directory like a Hugging Face one, with int8 weights for linear maps and tables."""
    ranges = None
    if calibrate is not None:
        if source.tokenizer is None:
            raise UsageError(f"--calibrate: {source.name} has no tokenizer to read {calibrate} with; leave it out")
        ranges = input_ranges(source.model, source.tokenizer, calibrate)
    small = copy.deepcopy(source.model)
    quantise(small, ranges)
    return _write_model(source, staging, small, tolerance=TOLERANCE["int8"], kind=RoughAgreement)


def _write_model(
    source: Source, staging: Path, model: HeadedModel, *, tolerance: float, kind: type[Agreement] = Agreement
) -> Agreement:
    """Write a model directory and report differences found when reading it back: outputs, weights, heads, tokenizer and
    a sentence encoder's vectors."""
    save_model(model, source.tokenizer, staging / source.inner)
    _write_modules(source, staging)
    again, report = load_model(staging)
    agreement = compare(
        source.model, source.tokenizer, lambda rows: outputs_of(again, rows), tolerance=tolerance, kind=kind
    )
    odd = [*report.newly_initialised, *report.unexpected]
    if odd:
        agreement.errors.append(f"weights are missing or unexpected: {', '.join(odd[:3])}")
    if again.head_names != source.model.head_names:
        agreement.errors.append(f"heads are {again.head_names}, the source's {source.model.head_names}")
    if source.tokenizer is not None and load_tokenizer(staging / source.inner).encode_batch(
        TEXTS
    ) != source.tokenizer.encode_batch(TEXTS):
        agreement.errors.append("the tokenizer gives different ids")
    if source.is_embedder:
        _compare_vectors(source, staging, agreement)
    return agreement


def _write_modules(source: Source, staging: Path) -> None:
    """For a directory of sentence-transformers: its other modules, and an embedder's maximum length."""
    if is_of_colbert(source.directory) and source.tokenizer is not None:
        _write_token_files(source, staging)
    if not source.has_modules:
        return
    _copy_steps(source, staging)
    if source.is_embedder and source.tokenizer is not None:
        # sentence-transformers 6 reads the maximum length from here.
        limit = load_sentence_model(source.directory).max_tokens
        write_tokenizer(source.model, source.tokenizer, staging / source.inner, max_tokens=limit)


def _write_token_files(source: Source, staging: Path) -> None:
    """For a directory of ColBERT's own code: the files of a MultiVectorEncoder, with its linear map."""
    model = load_token_model(source.directory)
    weight = own_projection(model, source.directory).weight
    limit = model.max_tokens
    write_token_files(staging, weight, model.interaction, max_tokens=limit, reading=model.reading)
    assert source.tokenizer is not None
    write_tokenizer(source.model, source.tokenizer, staging, max_tokens=limit)
    markers = TokenReader(SequenceEncoder(source.tokenizer, max_tokens=limit), model.interaction, model.reading).markers
    register_markers(staging, markers)


def _copy_steps(source: Source, staging: Path) -> None:
    """Copy the modules after the encoder, and the settings of all modules.

    Raises:
        DataError: modules.json or a link points outside the model directory.
    """
    modules = source.directory / MODULES_FILE
    settings = settings_file(source.directory / source.inner).name
    names = {*_SENTENCE_FILES, (PurePosixPath(source.inner) / settings).as_posix()}
    copied = {name for name in names if (source.directory / name).is_file()}
    encoder = PurePosixPath(source.inner)
    for step in read_modules(modules):
        path = file_within(source.directory, step.path, modules)
        below = PurePosixPath(step.path)
        if below not in (PurePosixPath(), encoder) and path.is_dir():
            copied |= set(files_within(source.directory, below.as_posix(), modules))
    for name in sorted(copied):
        origin, copy = file_within(source.directory, name, modules), staging / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(origin, copy)


@torch.no_grad()
def _compare_vectors(source: Source, staging: Path, agreement: Agreement) -> None:
    first, second = load_sentence_model(source.directory), load_sentence_model(staging)
    for name in ("max_tokens", "reading"):
        before, after = getattr(first, name), getattr(second, name)
        if before != after:
            agreement.errors.append(f"{name} is {after!r}, the source's {before!r}")
    for rows in probe_batches(source.model, source.tokenizer):
        batch = packed(source.model, rows)
        agreement.add("sentence_vectors", first(batch), second(batch))


def _write_onnx(source: Source, staging: Path, kind: Literal["onnx", "onnx-int8"]) -> Agreement:
    """A graph, that with int8 weights in its own folder as on the Hub; next to it config.json, the tokenizer, and a
    sentence encoder's other steps."""
    from bertkit.inference.export.onnx_graph import (
        GRAPH_FILE,
        INT8_GRAPH_FILE,
        Graph,
        check_exportable,
        write_graph,
        write_int8_graph,
    )

    check_exportable(source.model)
    directory = staging / source.inner
    directory.mkdir(parents=True, exist_ok=True)
    write_config(source.model, source.tokenizer, directory)
    if source.tokenizer is not None:
        write_tokenizer(source.model, source.tokenizer, directory)
    _write_modules(source, staging)
    if kind == "onnx":
        file, agreement = directory / GRAPH_FILE, Agreement
        write_graph(source.model, file)
    else:
        file, agreement = directory / INT8_GRAPH_FILE, RoughAgreement
        write_int8_graph(source.model, file)
    outputs = Graph(file, source.model).outputs
    return compare(source.model, source.tokenizer, outputs, tolerance=TOLERANCE[kind], kind=agreement)


def _record(source: Source, kind: Format, agreement: Agreement, staging: Path) -> dict[str, Any]:
    weights = asdict(source.report)
    files = sorted(path for path in staging.rglob("*") if path.is_file())
    exported = [path for path in files if ".onnx" in path.name] or weight_files(staging)

    def bytes_of(paths: Sequence[Path]) -> int:
        return sum(path.stat().st_size for path in paths)

    return {
        "source": source.name,
        "format": kind,
        "family": source.model.encoder.config.model_type,
        "heads": list(source.model.head_names),
        "parameters": sum(parameter.numel() for parameter in source.model.parameters()),
        "tokenizer": source.tokenizer is not None,
        "largest_difference": agreement.largest,
        "differences": agreement.differences,
        "tolerance": agreement.tolerance,
        "measure": agreement.measure,
        "probe": {"batches": agreement.batches, "sequences": agreement.sequences, "tokens": agreement.tokens},
        "weights": {**weights, "loaded": len(source.report.loaded)},
        "versions": {"bertkit": __version__, "torch": str(torch.__version__)},
        "weights_bytes": {"source": bytes_of(weight_files(source.directory)), "export": bytes_of(exported)},
        "files": {
            path.relative_to(staging).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
            for path in files
        },
    }

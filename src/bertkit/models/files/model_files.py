"""Finds a model's directory by name and reads its weights in any supported format.

Formats of `transformers` and `sentence-transformers`: config.json, model.safetensors or pytorch_model.bin, either of
them possibly in several shards (`*.index.json`: `weight_map` from tensor to file). A .bin file is a pickle, which could
run code; it is read with torch's restricted reader, which refuses anything but tensors. Sibling hub.py builds the
model.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bertkit.cache import identity_hash
from bertkit.errors import DataError, first_line
from bertkit.files import (
    atomic_directory,
    cache_directory,
    earlier_version,
    file_within,
    joint_sha256,
    json_sha256,
    read_json,
    read_json_file,
    sha256_of,
    write_json,
)
from bertkit.hub import hub_errors, is_offline, model_revision, note_model, refusal
from bertkit.models.files.adapters import (
    ADAPTER_FILE,
    ADAPTER_WEIGHTS,
    TASKS,
    adapter_settings,
    changed_config,
    merge,
    with_task,
)
from bertkit.models.text_reading import VERSION_FILE
from bertkit.run.similar_models import close_names, is_local_name, similar_models, unfinished_run
from bertkit.stores.fetch import check_online, fetched_directory
from bertkit.stores.store import Store
from bertkit.stores.url import StoreUrl, has_scheme

ADAPTERS = "adapters"
"""The cache's directory of models with an adapter merged into them."""
SAFETENSORS = "model.safetensors"
PICKLE = "pytorch_model.bin"
WEIGHT_FILES = (SAFETENSORS, f"{SAFETENSORS}.index.json", PICKLE, f"{PICKLE}.index.json")
"""Weights in a model directory, in order of preference."""

_OTHER_WEIGHTS = (".h5", ".msgpack", ".gguf", ".ckpt", ".ckpt.index", "adapter_model.safetensors")
"""Endings of files of weights that are not read: other formats, and parts of a model."""
_OF_THE_WRITER = frozenset({"transformers_version", "_name_or_path", "dtype", "torch_dtype"})
"""Keys of config.json that do not change what a model computes here."""
_OF_DAMAGED_PICKLES = (
    *(OSError, EOFError, RuntimeError, ValueError, LookupError, TypeError),
    *(AttributeError, AssertionError, ArithmeticError, struct.error),
)
"""What torch raises for damaged files, besides the errors of pickle."""
_OLD_NORM = {"gamma": "weight", "beta": "bias"}
"""Checkpoints converted from TensorFlow name a norm's weight gamma and its bias beta."""
_OLD_NORM_NAME = re.compile(r"(?<=LayerNorm\.)(gamma|beta)$")


def find_weights(directory: Path) -> Path:
    """The file of the weights, or the index of its shards; DataError if there is none."""
    for name in WEIGHT_FILES:
        if (directory / name).is_file():
            return directory / name
    graphs = sorted([*directory.glob("*.onnx"), *directory.glob("onnx/*.onnx")])
    others = sorted(each for ending in _OTHER_WEIGHTS for each in directory.glob(f"*{ending}"))
    hint = f"; {graphs[0].name} is a graph for onnxruntime: give the model that it was exported from" if graphs else ""
    if others and not graphs:
        hint = (
            f"; {others[0].name} cannot be read: load it with the program that wrote it, and save it as {SAFETENSORS}"
        )
    raise DataError(f"{directory}: no weights here; expected one of {', '.join(WEIGHT_FILES)}{hint}")


def weights_hash(directory: Path) -> str:
    """sha256 (hex) of the weights: of their file, or of the hashes of all shards, since an index contains no values.

    Raises:
        DataError: there are none, or a shard is missing.
    """
    path = find_weights(directory)
    if path.suffix != ".json":
        return sha256_of(path)
    return joint_sha256(map(sha256_of, _shards(path)))


def config_hash(directory: Path) -> str:
    """sha256 (hex) of a model's config.json as values, without what depends on the version that wrote it.

    Raises:
        DataError: the file is missing or damaged.
    """
    return settings_hash(read_json(directory / CONFIG_FILE))


def settings_hash(contents: Mapping[str, Any]) -> str:
    """sha256 (hex) of the keys of a config.json, without what depends on the version that wrote it."""
    return json_sha256({key: value for key, value in contents.items() if key not in _OF_THE_WRITER})


def weight_files(directory: Path) -> list[Path]:
    """The files that a model's weights are loaded from; DataError if there are none."""
    return _files(find_weights(encoder_directory(directory)))


def read_weights(path: Path, *, ignored: Iterable[str] = ()) -> dict[str, Tensor]:
    """All tensors of a file, or of the shards of an index, by name.

    Args:
        path: as found by `find_weights`.
        ignored: suffixes of names to leave out.

    Raises:
        DataError: a file is missing, damaged, or contains more than tensors.
    """
    endings = tuple(ignored)
    found: dict[str, Tensor] = {}
    for file in _files(path):
        tensors = _read_safetensors(file) if file.suffix == ".safetensors" else _read_pickle(file)
        # In files of a base model, a name may be the ignored ending alone, without its leading dot.
        found |= {name: tensor for name, tensor in tensors.items() if not f".{name}".endswith(endings)}
    return {_OLD_NORM_NAME.sub(lambda old: _OLD_NORM[old[0]], name): tensor for name, tensor in found.items()}


def _files(path: Path) -> list[Path]:
    """The file itself, or the shards that an index names."""
    return [path] if path.suffix != ".json" else _shards(path)


def _shards(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(n, str) for n in weight_map.values()):
        raise DataError(f"{index}: not an index of weight files: weight_map must name a file for each tensor")
    files = {name: file_within(index.parent, name, index) for name in sorted(set(weight_map.values()))}
    for name, file in files.items():
        if file.parent != index.parent:
            raise DataError(f"{index}: names {name!r}, which is not a file in the same directory")
        if not file.is_file():
            raise DataError(f"{index}: names {name}, which is missing; fetch the model again")
    return list(files.values())


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{path}: cannot be read as safetensors: {error}; the file is damaged or cut off: {_remedy(path)}"
        ) from error
    return tensors


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors by name; they must not share memory.

    Raises:
        OSError: the disk is full or failing.
        DataError: the file cannot be written for another reason.
    """
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise DataError(f"{path}: cannot be written: {error}") from error
        full = OSError(int(number[1]), os.strerror(int(number[1])), str(path))  # which the library wraps
        full.add_note(f"it needs {sum(each.nbytes for each in tensors.values()):,} bytes or more")
        raise full from error


def _read_pickle(path: Path) -> dict[str, Tensor]:
    try:
        contents: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=False)
    except pickle.UnpicklingError as error:
        raise DataError(
            f"{path}: refused, because it contains more than tensors and could run code when it is opened; get the"
            f" model as {SAFETENSORS}"
        ) from error
    except _OF_DAMAGED_PICKLES as error:
        raise DataError(
            f"{path}: cannot be read as a torch file: {first_line(error)}; if it is damaged: {_remedy(path)}"
        ) from error
    if not isinstance(contents, dict):
        raise DataError(f"{path}: expected tensors by name, found {type(contents).__name__}")
    if others := [str(name) for name, tensor in contents.items() if not isinstance(tensor, Tensor)]:
        raise DataError(f"{path}: expected tensors by name, but it has {', '.join(others[:5])}: save only the weights")
    return contents


def _remedy(path: Path) -> str:
    """How to replace a damaged file. The Hub's cache links to files elsewhere and only fetches those missing there."""
    return f"delete {path.resolve()} and fetch the model again"


CONFIG_FILE = "config.json"
MODULES_FILE = "modules.json"
"""File of a sentence-transformers directory, whose encoder may be in a subdirectory."""
_SMALL_FILES = ["*.json", "*.txt", "*.model", "artifact.metadata", "sparse_linear.pt", "colbert_linear.pt"]
_SAFE_WEIGHTS = ["*.safetensors"]
_PICKLED_WEIGHTS = (PICKLE, "pytorch_model-*.bin")
# Other frameworks' copies of the same weights.
_NOT_WANTED = ["onnx/*", "openvino/*", "coreml/*", "checkpoint-*/*", "runs/*"]


def find_model(model: str, *, offline: bool = False) -> Path:
    """The directory of a model.

    Args:
        model: a model directory, a run directory, either of them on a store (`s3://BUCKET/KEY`), or a Hub id, which may
            include a revision: `ORG/NAME@main`; of jina-embeddings-v3 also followed by a task, see `_with_task`.
        offline: use only the local cache.

    Raises:
        DataError: there is no such directory, and the Hub has no such model or cannot be reached; the message lists
            runs and models with similar names.
    """
    if has_scheme(model):
        return _fetched_from_store(StoreUrl.parse(model), offline=offline)
    path = Path(model).expanduser()
    for directory in (path, path / "model"):
        if is_adapter(directory):
            return _merged_adapter(directory, offline=offline)
        if is_model(directory):
            return directory
    if path.exists():
        hint = f"; it is a file: give its directory, {path.parent}" if path.is_file() else what_is_there(path)
        raise DataError(f"{model}: no model here (neither {CONFIG_FILE} nor model/{CONFIG_FILE}){hint}")
    if (earlier := earlier_version(path)) is not None:
        raise DataError(
            f"{model}: does not exist: a process was killed while it replaced this directory; its earlier version is"
            f" {earlier}: rename that, or give the command that wrote it again"
        )
    if (adapted := _with_task(model, offline=offline)) is not None:
        return adapted
    if is_local_name(model):
        raise DataError(f"{model}: does not exist; {similar_models(path)}")
    name, revision = model_revision(model)
    try:
        directory = _fetched(name, revision, offline=is_offline(offline))
    except DataError as error:
        near = close_names(path)
        if not near:
            raise
        raise DataError(f"{error}; similar names on disk: {', '.join(near)}") from error
    note_model(model, directory)
    return directory


def what_is_there(path: Path) -> str:
    """What a directory without a model contains instead, as the end of a message; empty if that is unknown."""
    found = (file for name in (CONFIG_FILE, ADAPTER_FILE) for file in path.glob(f"checkpoint-*/{name}"))
    checkpoints = sorted(found, key=lambda each: each.stat().st_mtime)
    return f": give a checkpoint, such as {checkpoints[-1].parent}" if checkpoints else unfinished_run(path)


def _fetched_from_store(url: StoreUrl, *, offline: bool) -> Path:
    """The cached copy of a model's files; for a run directory, the files of its model."""
    check_online(url, offline)
    names = Store(url).list()
    for below in ("", "model/"):
        if not names.keys().isdisjoint((f"{below}{CONFIG_FILE}", f"{below}{MODULES_FILE}")):
            return fetched_directory(url / below.rstrip("/") if below else url)
    raise DataError(f"{url}: no model here (neither {CONFIG_FILE} nor model/{CONFIG_FILE})")


def is_model(directory: Path) -> bool:
    """Whether a directory contains a model: an encoder, or a sentence encoder with its modules in subdirectories."""
    return (directory / CONFIG_FILE).is_file() or (directory / MODULES_FILE).is_file()


def is_adapter(directory: Path) -> bool:
    """Whether a directory contains an adapter of PEFT, and not the weights of its model."""
    return (directory / ADAPTER_FILE).is_file() and not any((directory / name).is_file() for name in WEIGHT_FILES)


def _merged_adapter(directory: Path, *, offline: bool) -> Path:
    """A model with an adapter merged into it; made once, in the cache. A config.json and the files of a tokenizer
    beside the adapter replace the model's."""
    settings = adapter_settings(directory)
    source, name = directory / ADAPTER_FILE, settings["base_model_name_or_path"]
    if Path(name).resolve() == directory.resolve():
        raise DataError(f"{source}: base_model_name_or_path is the adapter's own directory")
    revision = settings.get("revision")
    try:
        base = find_model(f"{name}@{revision}" if revision else name, offline=offline)
    except DataError as error:
        raise DataError(f"{source}: base_model_name_or_path: {error}") from error
    encoder = encoder_directory(base)
    files = _small_files(encoder) | _small_files(base) | _small_files(directory)
    hashes = {place: sha256_of(file) for place, file in files.items()}
    identity = [settings, sha256_of(directory / ADAPTER_WEIGHTS), weights_hash(encoder), hashes]

    def made() -> tuple[dict[str, Any], dict[str, Tensor]]:
        tensors, adapter = read_weights(find_weights(encoder)), read_weights(directory / ADAPTER_WEIGHTS)
        contents = read_json(files[CONFIG_FILE])
        contents |= changed_config(contents, adapter, settings)
        merge(tensors, adapter, settings, source=directory)
        return contents, tensors

    return _merged(directory.resolve().name, identity, files, made)


def _with_task(model: str, *, offline: bool) -> Path | None:
    """jina-embeddings-v3 with the updates of a task merged into it and the task's prompt as the default, if this is
    such a model's name, followed by that of a task: `jinaai/jina-embeddings-v3/text-matching`."""
    name, _, task = model.rpartition("/")
    on_hub = name.count("/") == 1 and not is_local_name(name)
    if task not in TASKS or not (on_hub or is_model(Path(name).expanduser())):
        return None
    base = find_model(name, offline=offline)
    encoder = encoder_directory(base)
    files = _small_files(encoder) | _small_files(base)
    identity = [task, weights_hash(encoder), {place: sha256_of(file) for place, file in files.items()}]

    def made() -> tuple[dict[str, Any], dict[str, Tensor]]:
        contents = read_json(files[CONFIG_FILE])
        tensors = with_task(read_weights(find_weights(encoder)), contents, task, model)
        return {key: value for key, value in contents.items() if not key.startswith("lora_")}, tensors

    return _merged(f"{Path(name).name}-{task}", identity, files, made, prompt=task)


def _merged(
    name: str,
    identity: list[Any],
    files: Mapping[str, Path],
    made: Callable[[], tuple[dict[str, Any], dict[str, Tensor]]],
    *,
    prompt: str | None = None,
) -> Path:
    """A model in the cache, written if it is not there.

    Args:
        name: beginning of the directory's name.
        identity: what determines the model.
        files: copied, by their place in the directory.
        made: computes config.json and the weights.
        prompt: name of the default prompt, if the model has it; None: as in the files.
    """
    merged = cache_directory() / ADAPTERS / f"{name}-{identity_hash(identity)[:16]}"
    if not merged.is_dir():
        contents, tensors = made()
        with atomic_directory(merged) as making:
            for place, file in files.items():
                (making / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, making / place)
            version = making / VERSION_FILE
            if version.is_file() and prompt in ((found := read_json(version)).get("prompts") or {}):
                write_json(version, {**found, "default_prompt_name": prompt})
            write_json(making / CONFIG_FILE, contents)
            write_safetensors(making / SAFETENSORS, tensors)
    return merged


def _small_files(directory: Path) -> dict[str, Path]:
    """The files that a merged model takes over, by their place: settings and tokenizers, also those of the modules of a
    sentence encoder, with their weights."""
    patterns = [*_SMALL_FILES, *(f"[0-9]*_*/{each}" for each in (*_SMALL_FILES, *_SAFE_WEIGHTS))]
    found = sorted(file for pattern in patterns for file in directory.glob(pattern) if file.is_file())
    places = {file.relative_to(directory).as_posix(): file for file in found}
    return {place: file for place, file in places.items() if place not in (ADAPTER_FILE, *WEIGHT_FILES)}


def encoder_directory(directory: Path) -> Path:
    """The directory of config.json, weights and tokenizer; older sentence encoders have them in that of their first
    module, usually 0_Transformer. A table of vectors (StaticEmbedding) may have no config.json. A file in the
    directory may be given in its place (models/bge_m3.py).

    Raises:
        DataError: modules.json is damaged, or names a directory outside the model's.
    """
    if directory.is_file():
        return encoder_directory(directory.parent)
    if (directory / CONFIG_FILE).is_file() or not (directory / MODULES_FILE).is_file():
        return directory
    (kind, inner), *_ = module_directories(directory) or [("", directory)]
    return inner if (inner / CONFIG_FILE).is_file() or (kind == "StaticEmbedding" and inner.is_dir()) else directory


class ModuleEntry(NamedTuple):
    """An entry of modules.json: its kind, such as Pooling, and its directory below the model's."""

    kind: str
    path: str


def read_modules(path: Path) -> list[ModuleEntry]:
    """The modules of a modules.json in order; callers check the names of directories with `file_within`.

    Raises:
        DataError: the file does not contain a list of modules.
    """
    steps = read_json_file(path)
    if not isinstance(steps, list) or not all(map(_is_module, steps)):
        raise DataError(f"{path}: expected a list of modules, each with a type and path (texts) and an idx (integer)")
    ordered = sorted(steps, key=lambda step: int(step.get("idx", 0)))
    return [ModuleEntry(step["type"].rpartition(".")[2], step.get("path", "")) for step in ordered]


def module_directories(directory: Path) -> list[tuple[str, Path]]:
    """The kinds of a directory's modules in order, each with the module's own directory.

    Raises:
        DataError: as in `read_modules`, or a module's directory is not below this one.
    """
    listed = directory / MODULES_FILE
    return [(step.kind, file_within(directory, step.path, listed)) for step in read_modules(listed)]


def _is_module(step: Any) -> bool:
    return (
        isinstance(step, dict)
        and isinstance(step.get("type"), str)
        and isinstance(step.get("path", ""), str)
        and isinstance(step.get("idx", 0), int)
    )


def _fetched(name: str, revision: str | None, *, offline: bool) -> Path:
    shown = f"{name}@{revision}" if revision else name
    try:
        directory = _snapshot(name, revision, [*_SMALL_FILES, *_SAFE_WEIGHTS], offline=offline)
        if pickled := _only_pickled(directory):
            directory = _snapshot(name, revision, [*_SMALL_FILES, *pickled], offline=offline)
    except hub_errors() as error:
        raise DataError(f"{shown}: no directory of this name, and {refusal(error, 'model')}") from error
    if is_adapter(directory):
        return _merged_adapter(directory, offline=offline)
    if not is_model(directory):
        raise DataError(f"{shown}: the Hub's model has no {CONFIG_FILE}{what_is_there(directory)}")
    return directory


def _only_pickled(directory: Path) -> list[str]:
    """The names of the weights, as patterns, that a model has only as pickles: those of its encoder, or of the Dense
    modules of a sentence encoder. The two are often converted at different times."""
    places = [encoder_directory(directory), *sorted(directory.glob("*_Dense"))]
    lacking = [each for each in places if not any((each / name).is_file() for name in WEIGHT_FILES[:2])]
    return [(each.relative_to(directory) / name).as_posix() for each in lacking for name in _PICKLED_WEIGHTS]


def _snapshot(name: str, revision: str | None, patterns: list[str], *, offline: bool) -> Path:
    return Path(
        snapshot_download(
            name,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=_NOT_WANTED,
            local_files_only=offline,
        )
    )

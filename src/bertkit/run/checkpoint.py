"""Checkpoints on disk: atomic, exact, and verified by hash before use.

Not from a paper (contract: the run directory). Each `step-00001000/` contains safetensors files, `state.json` and a
manifest. Unlike files.py this module replaces whole directories: after a kill at any moment, the previous checkpoint is
still valid and `latest` still names it.

    checkpoints/
      latest                       one line, "step-00002000"; updated last
      step-00001000/, step-00002000/
        manifest.json              {"format": 1, "step": 2000, "files": {NAME: {"bytes": n, "sha256": H}}}
        state.json                 everything that is not a tensor
        model.safetensors, ...     one file per group of tensors
      .writing-step-00003000/      left by a killed writer; never read, removed by the next save

Equal tensors and an equal state give equal bytes: no time, path or host name is stored.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bertkit.errors import DataError
from bertkit.files import file_within, fsync_path, read_json, sha256_of, write_text
from bertkit.run.tensor_stream import TensorStream, write_stream

MANIFEST = "manifest.json"
STATE = "state.json"
LATEST = "latest"
FORMAT = 1
SUFFIX = ".safetensors"

_WRITING = ".writing-"
_REPLACED = ".replaced-"
_NAME = re.compile(r"step-(\d{8,})")
_LONGEST_NAME = 255
_STEM = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

log = logging.getLogger(__name__)

TensorGroups = Mapping[str, Mapping[str, Tensor] | TensorStream]
"""File stem -> name -> tensor, or a stream of tensors."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory.

    Attributes:
        path: the directory it was read from.
        step: optimiser steps done when it was written.
        tensors: file stem -> name -> tensor, on the CPU, without shared memory.
        state: as given to `save_checkpoint`, with tuples as lists.
    """

    path: Path
    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def checkpoint_name(step: int) -> str:
    """The directory name of a step: `step-00001000`."""
    return f"step-{step:08d}"


def save_checkpoint(
    directory: Path, step: int, tensors: TensorGroups, state: Mapping[str, Any], keep: int, *, spare: int | None = None
) -> Path:
    """Write `directory/step-XXXXXXXX`, point `latest` at it, then remove all but the newest `keep` checkpoints.

    Checkpoints of later steps are removed too, since the run went back to before them. Rewriting a step with the same
    bytes changes nothing.

    Args:
        directory: the run's `checkpoints` directory; made if missing.
        step: optimiser steps done.
        tensors: file stem -> name -> tensor, of any layout and device; names may share memory (tied weights). Streams
            are read in the order of the stems.
        state: JSON values only, with text keys, so that it is read back unchanged.
        keep: how many checkpoints to keep, at least 1.
        spare: the step of one more checkpoint to keep.

    Returns:
        The checkpoint's directory.

    Raises:
        DataError: the disk is full or failing; the message names the checkpoint that is still valid.
        TypeError: `state` contains a value that JSON cannot represent.
        ValueError: `keep` is below 1, the step is negative, or a stem is not a plain file name.
    """
    if keep < 1:
        raise ValueError(f"keep: {keep}; expected at least 1, or no checkpoint would be left to resume from")
    if step < 0:
        raise ValueError(f"step: {step}; expected 0 or more")
    for stem in tensors:
        if not _STEM.fullmatch(stem):
            raise ValueError(f"tensors: {stem!r} is not a plain file name")
    _check_json(state, "state")
    final = directory / checkpoint_name(step)
    writing = directory / f"{_WRITING}{final.name}"
    try:
        if not directory.is_dir():
            directory.mkdir(parents=True)
            fsync_path(directory.parent)
        _clean(directory)
        writing.mkdir()
        _write_files(writing, step, tensors, state)
        _put_in_place(writing, final)
        write_text(directory / LATEST, final.name + "\n")
    except (OSError, SafetensorError) as error:
        raise DataError(_write_failure(directory, final, error)) from error
    finally:
        shutil.rmtree(writing, ignore_errors=True)
    _prune(directory, step, keep, spare)
    return final


def go_back(directory: Path, step: int) -> None:
    """Make the checkpoint of a step the one to resume from, and remove later ones.

    Raises:
        DataError: the disk is full or failing; then the next resume goes back.
    """
    try:
        if (directory / checkpoint_name(step)).is_dir():
            write_text(directory / LATEST, checkpoint_name(step) + "\n")
    except OSError as error:
        raise DataError(f"{directory / LATEST}: cannot be written ({error}); free some space and --resume") from error
    _prune(directory, step, keep=len(list_checkpoints(directory)) + 1)


def load_checkpoint(directory: Path) -> Checkpoint:
    """Read one checkpoint after checking every file against its manifest; DataError names the damaged files."""
    verify_checkpoint(directory)
    return _read(directory)


def load_newest_checkpoint(directory: Path) -> Checkpoint | None:
    """Read the checkpoint that `newest_valid_checkpoint` finds; None if the run has none."""
    path = newest_valid_checkpoint(directory)
    return None if path is None else _read(path)


def verify_checkpoint(directory: Path) -> None:
    """Check a checkpoint's files against its manifest, by size and sha256; DataError names every damaged file."""
    errors = checkpoint_errors(directory)
    if errors:
        raise DataError(f"checkpoint {directory} is damaged: " + "; ".join(errors))


def checkpoint_errors(directory: Path) -> list[str]:
    """What is wrong with a checkpoint, one line per file; empty if it is intact."""
    try:
        manifest = read_json(directory / MANIFEST)
    except DataError as error:
        return [str(error)]
    files = manifest.get("files")
    if manifest.get("format") != FORMAT or not isinstance(files, dict) or STATE not in files:
        return [f"{directory / MANIFEST}: not a manifest of format {FORMAT}"]
    step = manifest.get("step")
    if not isinstance(step, int) or checkpoint_name(step) != directory.name:
        return [f"{directory / MANIFEST}: is for step {step}, but the directory is {directory.name}"]
    strange = [name for name in files if Path(name).name != name]
    if strange:
        return [f"{directory / MANIFEST}: names files outside the checkpoint: {', '.join(strange)}"]
    try:
        paths = {file_within(directory, name, directory / MANIFEST): entry for name, entry in sorted(files.items())}
    except DataError as error:
        return [str(error)]
    return [problem for path, entry in paths.items() if (problem := _file_problem(path, entry))]


def newest_valid_checkpoint(directory: Path) -> Path | None:
    """The checkpoint to resume from: the one named by `latest` or, if it is damaged, the next older valid one.

    Every fallback is logged as a warning that names the damaged file.

    Returns:
        The checkpoint's directory; None if no checkpoint was ever finished.

    Raises:
        DataError: there are checkpoints, but all of them are damaged.
    """
    _restore_replaced(directory)
    errors: list[str] = []
    for path in _candidates(directory):
        found = checkpoint_errors(path)
        if not found:
            if errors:
                log.warning("resuming from the older checkpoint %s, because %s", path, "; ".join(errors))
            return path
        errors.extend(found)
    if errors:
        raise DataError(
            f"no checkpoint in {directory} can be used: {'; '.join(errors)}. Restore the files from a copy, "
            "or start a new run without --resume"
        )
    return None


def list_checkpoints(directory: Path) -> list[Path]:
    """The finished checkpoints of a run in order of step, including damaged ones."""
    if not directory.is_dir():
        return []
    found = (path for path in directory.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())
    return sorted(found, key=_step_of)


def latest_name(directory: Path) -> str | None:
    """The name in `latest`, whether or not it exists; None if there is no such file, empty if it is not readable."""
    path = directory / LATEST
    if not os.path.lexists(path):
        return None
    try:
        with path.open(encoding="utf-8", errors="replace") if path.is_file() else io.StringIO() as file:
            return file.read(_LONGEST_NAME).strip()
    except OSError as error:
        log.warning("%s cannot be read (%s)", path, error.strerror or error)
        return ""


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _candidates(directory: Path) -> list[Path]:
    """The checkpoint named by `latest`, then older ones, then newer ones (left by a kill before `latest` moved)."""
    paths = list_checkpoints(directory)[::-1]
    latest = latest_name(directory)
    if latest is None:
        return paths
    if not _NAME.fullmatch(latest) or not (directory / latest).is_dir():
        log.warning("%s names %r, which is not a checkpoint; trying the others", directory / LATEST, latest[:80])
        return paths
    step = _step_of(directory / latest)
    return [path for path in paths if _step_of(path) <= step] + [path for path in paths if _step_of(path) > step]


def _file_problem(path: Path, entry: Any) -> str | None:
    """Compare one file with its manifest entry; the size first, since that costs nothing."""
    try:
        size = path.stat().st_size
        if not isinstance(entry, dict) or size != entry.get("bytes"):
            return f"{path}: {size} bytes, the manifest says {entry} (truncated or altered)"
        if sha256_of(path) != entry.get("sha256"):
            return f"{path}: its sha256 is not the manifest's (altered)"
    except FileNotFoundError:
        return f"{path}: missing"
    except OSError as error:
        return f"{path}: cannot be read ({error.strerror or error})"
    return None


def _read(directory: Path) -> Checkpoint:
    manifest = read_json(directory / MANIFEST)
    tensors: dict[str, dict[str, Tensor]] = {}
    try:
        for name in sorted(manifest["files"]):
            if name.endswith(SUFFIX):
                with safe_open(directory / name, framework="pt", device="cpu") as file:
                    # Cloned: a tensor in the mapped file can be at any address. A kernel that handles the first
                    # unaligned elements separately would sum in another order than in a run that never stopped.
                    tensors[name.removesuffix(SUFFIX)] = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise DataError(f"{directory / name}: cannot be read as safetensors ({error})") from error
    return Checkpoint(directory, manifest["step"], tensors, read_json(directory / STATE))


def _write_files(writing: Path, step: int, tensors: TensorGroups, state: Mapping[str, Any]) -> None:
    state_path = writing / STATE
    write_text(state_path, json.dumps(state, sort_keys=True, ensure_ascii=False, indent=1) + "\n")
    names = [STATE]
    for stem, group in tensors.items():
        names.append(stem + SUFFIX)
        path = writing / names[-1]
        if isinstance(group, TensorStream):
            write_stream(path, group)
        else:
            save_file(_independent(group), path)
        shutil.copymode(state_path, path)  # safetensors creates private files; the others follow the umask
        fsync_path(path)
    files = {
        name: {"bytes": (writing / name).stat().st_size, "sha256": sha256_of(writing / name)} for name in sorted(names)
    }
    manifest = {"format": FORMAT, "step": step, "files": files}
    write_text(writing / MANIFEST, json.dumps(manifest, sort_keys=True, indent=1) + "\n")


def _independent(group: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors in order of name, none sharing memory with another, as safetensors requires."""
    seen: set[int] = set()
    result: dict[str, Tensor] = {}
    for name in sorted(group):
        tensor = group[name].detach().cpu().contiguous()
        address = tensor.untyped_storage().data_ptr()
        if address in seen:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        result[name] = tensor
    return result


def _put_in_place(writing: Path, final: Path) -> None:
    """Rename the finished directory. An existing one is moved aside first, and is restored after a kill in between."""
    if final.exists():
        if not checkpoint_errors(final) and (writing / MANIFEST).read_bytes() == (final / MANIFEST).read_bytes():
            return
        replaced = final.with_name(f"{_REPLACED}{final.name}")
        os.rename(final, replaced)
        os.rename(writing, final)
        fsync_path(final.parent)
        shutil.rmtree(replaced)
    else:
        os.rename(writing, final)
        fsync_path(final.parent)


def _restore_replaced(directory: Path) -> None:
    """Undo a replacement that a kill interrupted between the two renames."""
    for replaced in directory.glob(f"{_REPLACED}*"):
        final = directory / replaced.name.removeprefix(_REPLACED)
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            os.rename(replaced, final)
            log.warning("restored %s, which an interrupted writer had set aside", final)


def _clean(directory: Path) -> None:
    """Remove what killed writers left."""
    _restore_replaced(directory)
    for leftover in directory.glob(f"{_WRITING}*"):
        log.warning("removing %s, which a killed writer left unfinished", leftover)
        shutil.rmtree(leftover)
    for leftover in directory.glob(f".{LATEST}.*.tmp"):
        leftover.unlink()


def _prune(directory: Path, step: int, keep: int, spare: int | None = None) -> None:
    paths = list_checkpoints(directory)
    stale = [path for path in paths if _step_of(path) > step]
    kept = [path for path in paths if _step_of(path) <= step]
    for path in stale + [path for path in kept[:-keep] if _step_of(path) != spare]:
        # Renamed first, so that a kill during the removal leaves no checkpoint that looks damaged.
        doomed = path.with_name(f"{_WRITING}{path.name}")
        try:
            os.rename(path, doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            log.warning("the old checkpoint %s could not be removed (%s); training continues", path, error)


def _write_failure(directory: Path, final: Path, error: Exception) -> str:
    valid = [path for path in list_checkpoints(directory)[::-1] if path != final and not checkpoint_errors(path)]
    previous = f"the previous checkpoint {valid[0]} is still valid" if valid else "no earlier checkpoint exists"
    try:
        free = f"{shutil.disk_usage(directory).free // 2**20} MiB are free there; "
    except OSError:
        free = ""
    return f"cannot write the checkpoint {final}: {error}; {previous}. {free}free some space and continue with --resume"


def _check_json(value: Any, key: str) -> None:
    """Raise TypeError, naming the key, for what JSON would silently change (a number as a key) or cannot represent."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            if not isinstance(name, str):
                raise TypeError(f"{key}: the key {name!r} is a {type(name).__name__}; expected text")
            _check_json(item, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_json(item, f"{key}[{index}]")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise TypeError(f"{key}: a {type(value).__name__}; expected text, a number, true, false, a list or a mapping")

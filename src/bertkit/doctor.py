"""What works on this machine and installation, and how to fix what does not: `bertkit doctor`.

Not from a paper (contract: `bertkit doctor`). Each check examines one thing and reports it in one sentence; a fault
keeps bertkit from working, a warning from working well. The last check trains a tiny model, then again with a stop.
"""

from __future__ import annotations

import inspect
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EACCES, ENOSPC, EPERM, EROFS
from pathlib import Path
from typing import Any, Literal

from bertkit import __version__
from bertkit.errors import REINSTALL, BertkitError, StoppedError, first_line, is_of_installation
from bertkit.files import cache_directory, sha256_of
from bertkit.openmp import memory_limit, usable_cores
from bertkit.visible import number_of

_LEAST_DISK_GB = 2.0
_LEAST_MEMORY_GB = 2.0
_HUB_SECONDS = 5.0
_STEPS = 12
_RECIPE = f"""
name: doctor
tokenizer: {{vocab_size: 400, min_frequency: 1}}
data: {{sequence_length: 32, held_out: 0.1, static_copies: null}}
model: {{family: bert, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 64,
  max_position_embeddings: 32}}
objective: [masked_lm]
optimisation:
  schedule: {{name: linear, peak: 1.0e-3, warmup_steps: 2}}
  batch_sequences: 8
  steps: {_STEPS}
engine: {{device: cpu, log_every_steps: 4, save_every_steps: 5, pseudo_perplexity_sequences: 0}}
"""
_TEXT = (
    str,
    bytes,
    list,
    dict,
    set,
    int,
    float,
    complex,
    range,
    slice,
    property,
    type,
    memoryview,
    open,
    print,
    sorted,
)
"""Modules with English docstrings that are present on every machine."""

Verdict = Literal["ok", "warning", "fault"]


@dataclass(frozen=True)
class Diagnosis:
    """The result of a check.

    Attributes:
        name: of what was checked.
        verdict: a fault keeps bertkit from working, a warning from working well.
        found: the finding in one sentence.
        remedy: what to do about it; empty if all is well.
    """

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


def diagnoses(*, offline: bool = False, runs_root: Path = Path("runs")) -> Iterator[Diagnosis]:
    """Run the checks one after the other.

    Args:
        offline: do not contact the Hub.
        runs_root: where runs are written.
    """
    checks: Mapping[str, Callable[[], Diagnosis]] = {
        "installation": _installation,
        "processor": _processor,
        "other processes": _others,
        "memory": _memory,
        "GPU": _gpu,
        "compiled kernels": _kernels,
        "cache": lambda: _directory("cache", cache_directory(), "BERTKIT_CACHE"),
        "runs": lambda: _directory("runs", runs_root, "BERTKIT_RUNS"),
        "Hub": lambda: _hub(offline=offline),
        "training": _training,
    }
    for name, check in checks.items():
        try:
            yield check()
        except (BertkitError, OSError, RuntimeError, ImportError) as error:
            remedy = "report this with the whole output of `bertkit doctor`"
            remedy = REINSTALL if is_of_installation(error) else _WRITABLE if _is_of_disk(error) else remedy
            yield Diagnosis(name, "fault", first_line(error), remedy)


_WRITABLE = "set BERTKIT_CACHE and BERTKIT_RUNS to directories you can write, with room"


def _is_of_disk(error: BaseException) -> bool:
    """Whether a disk refused a write."""
    errors = (error, error.__cause__)
    return any(isinstance(each, OSError) and each.errno in (EROFS, EACCES, EPERM, ENOSPC) for each in errors)


def _installation() -> Diagnosis:
    from bertkit.run.environment import dependency_versions

    versions = dependency_versions()
    missing = [name for name, version in versions.items() if version is None]
    found = f"bertkit {__version__}, Python {sys.version.split()[0]}, torch {versions['torch']}"
    if missing:
        return Diagnosis("installation", "fault", f"{found}; missing: {', '.join(missing)}", "pip install bertkit")
    return Diagnosis("installation", "ok", found)


def _processor() -> Diagnosis:
    import torch

    from bertkit.models.operators.matmul import onednn_is_faster
    from bertkit.run.environment import device_name
    from bertkit.training.config import EngineConfig
    from bertkit.training.engine import resolve_engine

    precision = resolve_engine(EngineConfig(device="cpu")).precision
    cores = usable_cores()
    threads = torch.get_num_threads()
    found = f"{device_name(torch.device('cpu'))}, {cores} cores, {number_of(threads, 'thread')}"
    found += f", trains in {precision}"
    if onednn_is_faster():
        found += ", multiplies float32 by oneDNN"
    if threads > cores:
        remedy = f"export OMP_NUM_THREADS={cores}: with more threads than cores, threads wait for one another"
        return Diagnosis("processor", "warning", found, remedy)
    return Diagnosis("processor", "ok", found)


def _others() -> Diagnosis:
    import psutil

    load, cores = psutil.getloadavg()[0], psutil.cpu_count() or 1
    found = f"load {load:.1f} on {cores} cores"
    if load > 0.75 * cores:
        return Diagnosis("other processes", "warning", found, "training is slower, and measured speeds are unreliable")
    return Diagnosis("other processes", "ok", found)


def _memory() -> Diagnosis:
    import psutil

    memory = psutil.virtual_memory()
    free = memory.available / 1e9
    found = f"{free:.1f} of {memory.total / 1e9:.1f} GB free"
    limit = memory_limit()
    if limit is not None and limit < memory.total:
        found += f", of which this container or control group may use {limit / 1e9:.1f} GB in all"
        free = min(free, limit / 1e9)
    if free < _LEAST_MEMORY_GB:
        return Diagnosis("memory", "warning", found, "close other programs; --plan shows how much a run needs")
    return Diagnosis("memory", "ok", found)


def _gpu() -> Diagnosis:
    import torch

    if not torch.cuda.is_available():
        built = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds none"
        return Diagnosis("GPU", "ok", f"none ({built}); runs use the processor")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    torch.ones(8, device="cuda").sum().item()  # fails here if the driver does not match
    fault = _triton_fault()
    if fault is not None:
        remedy = "install a C compiler and Python's headers for triton: attention then takes two thirds of the time"
        return Diagnosis("GPU", "warning", f"{', '.join(names)}; attention by torch's kernel ({fault})", remedy)
    return Diagnosis("GPU", "ok", ", ".join(names))


def _triton_fault() -> str | None:
    """Why the Triton kernels for attention do not run on the first GPU; None: they run, or do not support it."""
    import torch

    from bertkit.kernels.gpu_attention import find_fault, supports_device

    device = torch.device("cuda", 0)
    return find_fault(device) if supports_device(device) else None


def _kernels() -> Diagnosis:
    import torch

    from bertkit.kernels.loading import build
    from bertkit.native import CompilerError
    from bertkit.training.engine import multiplies_bf16

    try:
        path = build()
    except CompilerError as error:
        if not multiplies_bf16(torch.device("cpu")):
            return Diagnosis("compiled kernels", "ok", f"none ({error}); training in fp32 does without them")
        remedy = "install g++ or clang++ with OpenMP: training in bf16 on a processor is a quarter faster with kernels"
        remedy = _WRITABLE if _is_of_disk(error) else remedy
        return Diagnosis("compiled kernels", "warning", str(error), remedy)
    return Diagnosis("compiled kernels", "ok", f"built: {path}")


def _directory(name: str, path: Path, variable: str) -> Diagnosis:
    """Whether files can be written to the directory set by `variable`, and how much space is left."""
    there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    free = shutil.disk_usage(there).free / 1e9
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"bertkit")
    except OSError as error:
        return Diagnosis(name, "fault", f"{path}: {error.strerror}", f"set {variable} to a directory you can write")
    found = f"{path}, {free:,.0f} GB free"
    if free < _LEAST_DISK_GB:
        return Diagnosis(name, "warning", found, f"free some space, or set {variable} to a directory on another disk")
    return Diagnosis(name, "ok", found)


def _hub(*, offline: bool) -> Diagnosis:
    from huggingface_hub import HfApi, constants

    from bertkit.hub import hub_errors, is_offline

    if is_offline(offline):
        return Diagnosis("Hub", "ok", "offline as requested; only models and data sets in the cache are used")
    try:
        HfApi().model_info("google-bert/bert-base-uncased", timeout=_HUB_SECONDS)
    except hub_errors() as error:
        found = f"{constants.ENDPOINT} cannot be reached ({first_line(error)[:120]})"
        remedy = "your own models and text need no network; set HF_HUB_OFFLINE=1 to avoid waiting for it"
        return Diagnosis("Hub", "warning", found, remedy)
    return Diagnosis("Hub", "ok", f"{constants.ENDPOINT} answers")


def _training() -> Diagnosis:
    """Train a tiny model twice, the second time with a stop, and compare the weights."""
    with tempfile.TemporaryDirectory(prefix="bertkit-doctor-") as home, _quiet():
        directory = Path(home)
        straight = _trained(directory, "straight")
        stopped = _trained(directory, "stopped", max_minutes=0.0)
    found = f"{_STEPS} updates of a tiny model, and the same with a stop"
    if straight != stopped:
        remedy = "report this with the whole output of `bertkit doctor`: a resumed run has different weights here"
        return Diagnosis("training", "fault", f"{found}: different weights", remedy)
    return Diagnosis("training", "ok", f"{found}: bit-identical weights")


def _trained(directory: Path, name: str, **limits: Any) -> str:
    """The hash of the weights of a run, which is resumed each time it stops."""
    from bertkit.pretraining.arguments import PretrainArguments
    from bertkit.pretraining.run import run_pretraining
    from bertkit.progress import silent_progress

    recipe, text = directory / "doctor.yaml", directory / "text.txt"
    recipe.write_text(_RECIPE, encoding="utf-8")
    text.write_text("\n\n".join(inspect.getdoc(each) or "" for each in _TEXT), encoding="utf-8")
    common: dict[str, Any] = {"runs_root": directory, "cache": directory / "cache", "offline": True}
    run_dir = directory / name
    new = PretrainArguments(recipe=str(recipe), sources=(str(text),), run_dir=run_dir, **common, **limits)
    try:
        finished = run_pretraining(new, progress=silent_progress)
    except StoppedError:
        finished = run_pretraining(PretrainArguments(resume=str(run_dir), **common), progress=silent_progress)
    return sha256_of(finished.run.model / "model.safetensors")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the logs of the runs."""
    log = logging.getLogger("bertkit")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)

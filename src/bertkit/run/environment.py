"""The environment of a run: versions, hardware, threads, and the state of the working directory's git repository.

Not from a paper (contract: environment.json). It records what can change a result or a speed, and no secrets: only
environment variables that are listed here by name, and no credentials within URLs.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from bertkit import __version__
from bertkit.files import without_credentials
from bertkit.openmp import usable_cores

VARIABLES = frozenset(
    {
        *("BERTKIT_CACHE", "BERTKIT_MODEL", "BERTKIT_RUNS"),
        *(
            "HF_HOME",
            "HF_HUB_CACHE",
            "HF_DATASETS_CACHE",
            "HF_MODULES_CACHE",
            "HF_ENDPOINT",
            "HF_HUB_OFFLINE",
            "HF_DATASETS_OFFLINE",
        ),
        *("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "OMP_SCHEDULE", "OMP_DYNAMIC", "OMP_WAIT_POLICY"),
        "GOMP_SPINCOUNT",
        *("MKL_NUM_THREADS", "MKL_DYNAMIC", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS"),
        *(
            "OPENBLAS_NUM_THREADS",
            "CUBLAS_WORKSPACE_CONFIG",
            "TOKENIZERS_PARALLELISM",
            "PYTHONHASHSEED",
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
        ),
        *("KMP_AFFINITY", "KMP_BLOCKTIME", "KMP_HW_SUBSET"),
        *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING"),
        *(
            "NCCL_DEBUG",
            "NCCL_P2P_DISABLE",
            "NCCL_IB_DISABLE",
            "NCCL_SHM_DISABLE",
            "NCCL_SOCKET_IFNAME",
            "NCCL_ALGO",
            "NCCL_PROTO",
        ),
        *("TORCH_HOME", "TORCH_LOGS", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
        *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
    }
)
"""The recorded variables, by name: no pattern can distinguish a setting from a secret (HF_BEARER, NCCL_PASS)."""
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MOST_SECONDS = 10
_MAC_CPU = ("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")
"""`platform` calls every processor of Apple's "arm"."""


def describe_environment() -> dict[str, Any]:
    """The content of environment.json; a second call in one process returns the same unless something changed."""
    return {
        "bertkit": __version__,
        "python": sys.version.split()[0],
        "packages": dependency_versions(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "memory_mb": round(psutil.virtual_memory().total / 2**20),
        "threads": {"intra_op": torch.get_num_threads(), "inter_op": torch.get_num_interop_threads()},
        "gpus": _gpus(),
        "git": git_state(Path.cwd()),
        "arguments": [without_credentials(argument) for argument in sys.argv],
        "variables": _variables(),
    }


@cache  # it takes a tenth of a second
def dependency_versions() -> Mapping[str, str | None]:
    """The installed version of each direct dependency of the package; None if it is not installed."""
    try:
        requirements = metadata.requires("bertkit") or []
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        requirements = []
    names = sorted(
        {match[0] for text in requirements if "extra ==" not in text and (match := _REQUIREMENT.match(text))}
    )
    versions: dict[str, str | None] = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {**versions, "torch": torch.__version__}


def git_state(directory: Path) -> dict[str, Any] | None:
    """Commit of the repository that contains `directory`, and whether tracked files differ; None if there is none."""
    if shutil.which("git") is None:
        return None
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(directory: Path, *arguments: str) -> str | None:
    """The command's output; None if it fails (no repository, no commit yet) or takes too long."""
    # A repository's own configuration can name a program that git would run here.
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(directory), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MOST_SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu() -> dict[str, Any]:
    return {
        "model": _cpu_model(),
        "cores": psutil.cpu_count(logical=False),
        "logical": psutil.cpu_count(),
        "usable": usable_cores(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def _cpu_model() -> str:
    """The processor's name: on Linux from /proc/cpuinfo, on macOS from its own command, elsewhere from `platform`."""
    if sys.platform == "darwin":
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(_MAC_CPU, capture_output=True, text=True, timeout=_MOST_SECONDS, check=True)
            return done.stdout.strip()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """The name of a processor or of a GPU."""
    return _cpu_model() if device.type == "cpu" else torch.cuda.get_device_name(device)


def _gpus() -> list[dict[str, Any]]:
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        memory_mb = round(properties.total_memory / 2**20)
        found.append({"name": properties.name, "memory_mb": memory_mb, "capability": capability})
    return found


def _variables() -> dict[str, str]:
    return {name: without_credentials(os.environ[name]) for name in sorted(VARIABLES & os.environ.keys())}

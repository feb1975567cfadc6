"""Building and loading the compiled kernels: once for each compiler, processor and source, kept in the cache.

They are built for the exact CPU that they run on (native.py). Their parallel loops use the OpenMP library that torch
has loaded, and therefore torch's threads. Siblings ops.py and attention.py have the functions on tensors.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from bertkit.native import CompilerError, build_library, compiler, compiler_version, library_file
from bertkit.run.environment import device_name

SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.cpp", "attention.cpp"))
HEADER = Path(__file__).with_name("elements.h")


def flags_for(machine: str) -> tuple[str, ...]:
    """The compiler's flags for a type of machine, as `platform.machine` names it."""
    # Compilers for other processors refuse this flag.
    of_x86 = ("-mprefer-vector-width=512",) if machine.lower() in ("x86_64", "amd64", "i686", "i386") else ()
    return (
        "-std=c++17",
        "-O3",
        "-march=native",
        *of_x86,
        "-ffp-contract=fast",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fno-strict-aliasing",
        "-fopenmp",
        "-fPIC",
        "-shared",
    )


FLAGS = flags_for(platform.machine())


@dataclass(frozen=True)
class Kernels:
    """The loaded library, and the element types for which it replaces torch's operators.

    Attributes:
        path: of the library.
        dtypes: a subset of float32 and bfloat16.
    """

    path: Path
    dtypes: frozenset[torch.dtype]

    def has(self, name: str, dtype: torch.dtype) -> bool:
        """Whether the CPU has the instructions that a function needs."""
        return hasattr(_loaded(self.path), f"{name}_{str(dtype).removeprefix('torch.')}")

    def call(self, name: str, dtype: torch.dtype, *arguments: object) -> None:
        """Call a compiled function for this element type; torch's number of threads is the last argument."""
        function = _function(self.path, f"{name}_{str(dtype).removeprefix('torch.')}")
        function(*map(_as_c, arguments), ctypes.c_int(torch.get_num_threads()))


def _as_c(value: object) -> object:
    """Convert to C arguments: tensors to addresses, None to a null pointer, int to int64, float to float."""
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, bool):
        return ctypes.c_int(value)
    if isinstance(value, int):
        return ctypes.c_int64(value)
    if isinstance(value, float):
        return ctypes.c_float(value)
    assert value is None, value
    return ctypes.c_void_p(None)


@lru_cache(maxsize=1)
def _loaded(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


@lru_cache(maxsize=64)
def _function(path: Path, name: str) -> ctypes._NamedFuncPointer:
    function = _loaded(path)[name]
    function.restype = None
    return function


def _instructions() -> str:
    """Hash of the CPU's feature flags, which a virtual machine may reduce; empty if the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(flags.encode()).hexdigest()


def build(root: Path | None = None) -> Path:
    """The library for this machine, from the cache or built now, which takes a few seconds.

    Args:
        root: directory of all caches; None: `cache_directory()`.

    Raises:
        CompilerError: there is no compiler, or it fails.
    """
    identity = {
        "compiler": compiler_version(compiler()),
        "processor": device_name(torch.device("cpu")),
        "instructions": _instructions(),
    }
    try:
        path = library_file((*SOURCES, HEADER), FLAGS, identity, root)
        build_library(path, SOURCES, FLAGS)
        _loaded(path)
    except OSError as error:
        raise CompilerError(f"the compiled kernels cannot be kept or loaded ({error})") from error
    return path


_active: Kernels | None = None


def loaded_kernels() -> Kernels | None:
    """The kernels that this process uses, if any, for any element type."""
    return None if torch.compiler.is_compiling() else _active


def in_use(values: torch.Tensor) -> Kernels | None:
    """The kernels, if this run uses any: for residual states, which are float32 in bfloat16 runs, too."""
    if values.dtype not in (torch.float32, torch.bfloat16) or values.device.type != "cpu":
        return None
    return loaded_kernels()


def active(values: torch.Tensor) -> Kernels | None:
    """The kernels, if they are used for tensors like this one."""
    kernels = in_use(values)
    return kernels if kernels is not None and values.dtype in kernels.dtypes else None


def activate(kernels: Kernels | None) -> None:
    """Use these kernels in this process from now on; None: only torch's operators."""
    global _active
    _active = kernels


@contextmanager
def activated(kernels: Kernels | None) -> Iterator[None]:
    """`activate` within the context; restores the previous kernels afterwards."""
    before = _active
    activate(kernels)
    try:
        yield
    finally:
        activate(before)

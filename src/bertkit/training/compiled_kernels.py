"""Decides if a run uses compiled kernels and the faster library's products, or only torch's operators.

Not from a paper. Compiled kernels round where the operators round and draw the same random numbers, but sum in another
order. In bf16, where products round far more, they are the default; in single precision, where they gain little, they
are used if the recipe requests them. On a GPU attention has Triton kernels (kernels/gpu_attention.py). Products in
single precision use oneDNN if MKL leaves half of the processor unused (models/operators/matmul.py). Sibling
cpu_memory.py limits what oneDNN compiles.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bertkit.errors import UsageError
from bertkit.kernels.gpu_attention import triton_attention_enabled
from bertkit.kernels.loading import Kernels, activated, build
from bertkit.models.operators.matmul import use_torch_matmul
from bertkit.native import COMPILERS, CompilerError
from bertkit.training.config import EngineConfig
from bertkit.training.engine import Engine

log = logging.getLogger(__name__)


@contextmanager
def use_kernels(config: EngineConfig, engine: Engine) -> Iterator[None]:
    """Compute with the kernels and the products selected by the settings, within the context.

    Raises:
        UsageError: `engine.kernels` is compiled, but they are not available.
    """
    plain = config.kernels == "torch"
    with activated(_wanted(config, engine)), triton_attention_enabled(not plain), use_torch_matmul(plain):
        yield


def uses_attention_kernel(config: EngineConfig, engine: Engine) -> bool:
    """Whether a run will compute attention by the compiled kernel, as far as is known without building it."""
    bf16_on_cpu = engine.bf16 and engine.device.type == "cpu" and config.kernels != "torch"
    has_instructions = torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()
    return bf16_on_cpu and has_instructions and any(map(shutil.which, COMPILERS))


def _wanted(config: EngineConfig, engine: Engine) -> Kernels | None:
    needed = config.kernels == "compiled"
    if engine.device.type != "cpu":
        if needed:
            raise UsageError("engine.kernels: compiled works only on a CPU; leave it out, or use --device cpu")
        return None
    if config.kernels == "torch" or not (engine.bf16 or needed):
        return None
    try:
        path = build()
    except CompilerError as error:
        if needed:
            raise UsageError(
                f"engine.kernels is compiled: {error}; install one with OpenMP, or use engine.kernels=auto"
            ) from error
        log.info("training is up to a third slower without compiled kernels: %s", error)
        return None
    dtypes = {torch.bfloat16, torch.float32} if needed else {torch.bfloat16}
    return Kernels(path, frozenset(dtypes))

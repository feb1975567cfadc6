"""`bertkit bench`: runs one benchmark after the other, and measures the machine's own rates before and after.

Not from a paper. Only the highest product rate is stored (training/product_rate.py): a figure is valid only for the
minute in which it was measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bertkit.bench.comparison import compare
from bertkit.bench.embed import embedding
from bertkit.bench.finetune import finetuning
from bertkit.bench.generate import generation
from bertkit.bench.machine import MachineRates
from bertkit.bench.material import write_random_model
from bertkit.bench.pretrain import pretraining
from bertkit.bench.settings import Benchmark, BenchSettings
from bertkit.bench.startup import startup
from bertkit.bench.tokenize import tokenizing
from bertkit.bench.workload import Workload, quiet_libraries
from bertkit.files import cache_directory
from bertkit.models.files.model_files import find_model
from bertkit.progress import Progress
from bertkit.text.sources import open_corpus
from bertkit.training.compiled_kernels import use_kernels
from bertkit.training.config import EngineConfig
from bertkit.training.engine import Engine, resolve_engine

Build = Callable[[BenchSettings, Engine, Path, bool], Workload]
"""Makes a workload from the settings, the engine, an empty directory, and whether the network is not used."""


def _on_a_model(
    make: Callable[..., Workload], settings: BenchSettings, engine: Engine, directory: Path, offline: bool
) -> Workload:
    """A workload on the user's model, or on a random one."""
    if settings.model is not None:
        found = find_model(settings.model, offline=offline)
        return make(settings, engine, found, settings.model, offline=offline)
    write_random_model(settings, directory)
    return make(settings, engine, directory, f"random, {settings.size}", offline=offline)


BENCHMARKS: dict[Benchmark, Build] = {
    Benchmark.pretrain: lambda settings, engine, directory, offline: pretraining(settings, engine),
    Benchmark.finetune: partial(_on_a_model, finetuning),
    Benchmark.embed: partial(_on_a_model, embedding),
    Benchmark.generate: lambda settings, engine, directory, offline: generation(settings, engine, directory),
    Benchmark.tokenize: lambda settings, engine, directory, offline: tokenizing(settings, directory),
    Benchmark.startup: lambda settings, engine, directory, offline: startup(settings),
}
"""The function that makes each workload."""


_TRAINING = {Benchmark.pretrain, Benchmark.finetune}
"""Work for which the commands use the kernels of training; a model in use is computed by torch's operators."""
_ON_A_MODEL = {Benchmark.finetune, Benchmark.embed}
_WITHOUT_TEXT = {Benchmark.generate, Benchmark.startup}


def _check(names: Sequence[Benchmark], settings: BenchSettings, *, offline: bool) -> None:
    """Find the model and the text before minutes are spent on earlier benchmarks.

    Raises:
        DataError, UsageError: one of them does not exist.
    """
    if settings.model is not None and _ON_A_MODEL & set(names):
        find_model(settings.model, offline=offline)
    if set(names) - _WITHOUT_TEXT:
        open_corpus(settings.data, cache=cache_directory(), offline=offline)


def run_benchmarks(
    names: Sequence[Benchmark],
    settings: BenchSettings,
    config: EngineConfig,
    progress: Progress,
    *,
    generation_bf16: bool = False,
    offline: bool = False,
) -> dict[str, Any]:
    """Run the benchmarks.

    Args:
        names: the benchmarks to run.
        settings: what is measured.
        config: device, precision and kernels.
        progress: a display.
        generation_bf16: whether generation runs in bfloat16 if the rest does; it is not the default of `bertkit
            generate`.
        offline: nothing is downloaded.

    Returns:
        `{"machine": {...}, "benchmarks": {NAME: {...}}}`.

    Raises:
        DataError, UsageError: no such text or model, or one that is unsuitable.
    """
    engine = resolve_engine(config)
    _check(names, settings, offline=offline)
    machine = MachineRates(engine.device)
    machine.measure()
    found = {}
    with quiet_libraries():
        for name in names:
            with tempfile.TemporaryDirectory(prefix="bertkit-bench-") as directory:
                narrow = engine.bf16 and (generation_bf16 or name is not Benchmark.generate)
                own = replace(engine, bf16=narrow)
                with use_kernels(config, own) if name in _TRAINING else nullcontext():
                    workload = BENCHMARKS[name](settings, own, Path(directory), offline)
                    found[name.value] = compare(name.value, workload, settings.rounds, own, machine, progress)
            machine.measure()
    return {"machine": machine.document(), "benchmarks": found}

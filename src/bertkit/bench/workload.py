"""A piece of work that bertkit and other libraries are timed on side by side.

Not from a paper. The other libraries are not dependencies: each is imported by name when it is timed. One that is
missing or fails is left out with the reason, because bertkit's own figure does not depend on it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bertkit.training.engine import Engine

Work = Callable[[], object]
"""Does all of the work, and returns when it is finished."""

OWN = "bertkit"
"""The name of the side that the others are compared with."""


@dataclass(frozen=True)
class Workload:
    """What is timed.

    Attributes:
        about: model, batch and so on, for the document.
        unit: what a call's amount counts, in the plural.
        amount: per call; the same for every side.
        sides: by name; the others are compared with the first one.
        left_out: why a side is not timed, by name.
        flops: floating-point operations per call of the first side; None if they are not meaningful.
        memory_bytes: bytes that a call of the first side must also read and write: the optimiser's state in an update,
            the weights for each new token.
        parts: the shares of its time by kind of work, measured separately; None: torch's profiler measures them.
    """

    about: Mapping[str, Any]
    unit: str
    amount: float
    sides: Mapping[str, Work]
    left_out: Mapping[str, str] = field(default_factory=dict)
    flops: float | None = None
    memory_bytes: float = 0.0
    parts: Callable[[], Mapping[str, float]] | None = None


class Peers:
    """The sides run by other libraries.

    Args:
        wanted: whether any are timed.

    Attributes:
        sides: those that are ready, by name.
        left_out: why the others are not timed, in one line each.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self.sides: dict[str, Work] = {}
        self.left_out: dict[str, str] = {}

    def add(self, name: str, build: Callable[[], Work]) -> None:
        """Prepare a side; an exception then, or in its first call, is the reason why it is left out."""
        if not self._wanted:
            self.left_out[name] = "skipped (--no-peers)"
            return
        try:
            work = build()
            work()
        except ImportError as error:
            missing = (error.name or name).partition(".")[0].replace("_", "-")
            self.left_out[name] = f"{missing} is not installed; `pip install {missing}` adds it to the comparison"
        except Exception as error:  # any failure of a peer, which is not a fault of what is measured
            first_line = (str(error).splitlines() or [""])[0]
            self.left_out[name] = f"{type(error).__name__}: {first_line:.200}"
        else:
            self.sides[name] = work


def peer_library(name: str) -> Any:
    """Import a library that is measured but is not a dependency of this package.

    Raises:
        ImportError: it is not installed.
    """
    return import_module(name)


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hide progress bars of other libraries and the profiler's own lines between the rounds."""
    names = {
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TQDM_DISABLE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "KINETO_LOG_LEVEL": "99",
    }
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def plain_update(
    model: Any, inputs: Callable[[], Mapping[str, Any]], engine: Engine, *, rate: float, clip_norm: float
) -> Work:
    """An update of the plain training loop, for a model of `transformers` that returns its loss.

    Args:
        model: on the engine's device, in training mode.
        inputs: makes the next batch, on the CPU.
        engine: device and precision.
        rate: of AdamW.
        clip_norm: largest norm of the gradient.
    """
    import torch

    from bertkit.training.product_rate import synchronise

    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)

    def update() -> None:
        batch = {name: tensor.to(engine.device) for name, tensor in inputs().items()}
        with engine.autocast():
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronise(engine.device)

    return update

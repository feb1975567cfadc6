"""Recompute a saved batch and name what is not finite first: a weight, a layer's output, a term, a gradient.

Not from a paper; similar to torch.autograd's anomaly detection, but with the model's names instead of operations.
Sibling saved_batch.py saves the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bertkit.errors import DataError
from bertkit.run.checkpoint import Checkpoint, checkpoint_name, list_checkpoints, load_checkpoint
from bertkit.training.generators import restore_generators
from bertkit.training.saved_batch import BATCH, DIRECTORY, unpacked
from bertkit.training.trainer import Trainer


@dataclass
class Found:
    """The first non-finite value of each kind, in the order of computation.

    Attributes:
        step: the update, counted from 1.
        micro_batch: the first one, from 1, with a value that is not finite.
        weight: name of a non-finite weight before the update.
        layer: name of the module with a non-finite output.
        terms: the loss of each term, summed over the batch.
        term: the first of these that is not finite.
        parameter: name of the parameter with a non-finite gradient; the last layer's gradient is computed first.
        gradient_norm: over all parameters.
        finite: whether everything is finite this time.
    """

    step: int
    micro_batch: int | None = None
    weight: str | None = None
    layer: str | None = None
    terms: dict[str, float] = field(default_factory=dict)
    term: str | None = None
    parameter: str | None = None
    gradient_norm: float = 0.0
    finite: bool = True

    def to_json(self) -> dict[str, Any]:
        """The document for `--json`."""
        return asdict(self)

    def in_words(self) -> str:
        """One sentence."""
        if self.finite:
            return (
                f"step {self.step}: everything is finite this time: the cause is not the batch or the weights but the"
                " machine, or another precision or version"
            )
        names = {
            "the weight": self.weight,
            "the output of": self.layer,
            "the loss term": self.term,
            "the gradient of": self.parameter,
        }
        found = [f"{what} {name}" for what, name in names.items() if name is not None]
        where = "" if self.micro_batch is None else f" in micro-batch {self.micro_batch}"
        first = found or [f"the norm of all gradients ({self.gradient_norm}), each of which is finite"]
        return f"step {self.step}{where}: not finite: {', then '.join(first)}"


def saved_batch(run: Path, step: int | None = None) -> Checkpoint:
    """The saved batch of a non-finite update (from 1; None: the newest), with the state before it.

    Raises:
        DataError: no batch was saved, or it is damaged.
    """
    saved = list_checkpoints(run / DIRECTORY)
    if not saved:
        raise DataError(f"{run}: no saved batch; only updates with a non-finite loss or gradient leave one")
    names = [path.name for path in saved]
    name = names[-1] if step is None else checkpoint_name(step)
    if name not in names:
        raise DataError(f"{run}: no saved batch of step {step}; choose one of {', '.join(names)}")
    return load_checkpoint(run / DIRECTORY / name)


def replay(trainer: Trainer[Any], saved: Checkpoint) -> Found:
    """Restore the state before an update, and repeat it; nothing is written.

    Args:
        trainer: a new trainer of the run.
        saved: as returned by `saved_batch`.

    Raises:
        DataError: the batch belongs to another kind of run.
    """
    found = Found(int(saved.state["step"]) + 1)
    batches = unpacked(saved.state.get(BATCH), saved.tensors.get(BATCH, {}), trainer.batch_class)
    trainer.start_average()
    trainer.restore(saved)
    trainer.divergence.forget()  # a skipped update is computed, not skipped
    with trainer.session(), closing(trainer.batches()) as updates:
        next(updates)  # starts the stage; the batch itself is not needed
        restore_generators(saved.tensors["generators"], trainer.engine.device)
        found.weight = next((name for name, each in trainer.weights().items() if not _is_finite(each)), None)
        with _watched(trainer.model, found):
            outcome = trainer.update(_Counted(batches, found))
    found.terms = {name: total.sum for name, total in outcome.terms.items()}
    found.term = next((name for name, value in found.terms.items() if not _is_finite(torch.tensor(value))), None)
    found.gradient_norm, found.finite = outcome.gradient_norm, outcome.finite
    if found.finite or (found.layer is None and found.parameter is None):
        found.micro_batch = None
    return found


class _Counted(list[Any]):
    """Micro-batches that record which one is being computed, until something is found."""

    def __init__(self, batches: list[Any], found: Found) -> None:
        super().__init__(batches)
        self.found = found

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(super().__iter__(), start=1):
            if self.found.layer is None and self.found.parameter is None:
                self.found.micro_batch = number
            yield batch


@contextmanager
def _watched(model: nn.Module, found: Found) -> Iterator[None]:
    """Note the first module whose output is not finite, and the first parameter whose gradient is not."""
    names = {module: name or type(module).__name__ for name, module in model.named_modules()}

    def look_at_output(module: nn.Module, _: Any, output: Any) -> None:
        if found.layer is None and not all(map(_is_finite, _tensors(output))):
            found.layer = names[module]

    def look_at_gradient(name: str) -> Any:
        def look(parameter: Tensor) -> None:
            if found.parameter is None and parameter.grad is not None and not _is_finite(parameter.grad):
                found.parameter = name

        return look

    hooks = [module.register_forward_hook(look_at_output) for module in names]
    hooks += [
        parameter.register_post_accumulate_grad_hook(look_at_gradient(name))  # type: ignore[no-untyped-call]  # torch's
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (each for item in value.values() for each in _tensors(item))
    elif isinstance(value, list | tuple):
        yield from (each for item in value for each in _tensors(item))


def _is_finite(tensor: Tensor) -> bool:
    values = tensor._values() if tensor.is_sparse else tensor
    return not values.is_floating_point() or bool(torch.isfinite(values).all())

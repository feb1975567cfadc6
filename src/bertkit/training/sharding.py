"""Weights, gradients and moments sharded over the ranks: FSDP2 around the passes of an update.

Zhao et al. 2023, PyTorch FSDP, arXiv:2304.11277, in its second form, `torch.distributed.fsdp.fully_shard`: a rank keeps
1/N of each parameter along its first axis, and gathers a layer when it is computed, forward and backward. Rajbhandari
et al. 2020, ZeRO, arXiv:1910.02054, stage 3. Sibling placement.py keeps everything on every rank.

Units are the layers of each encoder, and the rest of the model: embeddings, heads, poolers. The rest stays gathered
throughout a pass, since a vocabulary head reads the embedding's weight, and losses call parts of the model by name. The
outermost module is therefore a pass itself, whose forward computes the losses.

All ranks make the same number of passes, because the ranks gather together in each pass. A rank with fewer
micro-batches repeats its last one at a weight of zero. A rank without any takes one of another rank. Gradients of all
passes but the last stay on their rank, unsharded; after the last pass they are summed, not averaged, and each rank
keeps its part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from bertkit.models.encoder import Encoder
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.ranks import RankLostError, Ranks
from bertkit.run.checkpoint import Checkpoint, TensorGroups
from bertkit.run.tensor_stream import TensorStream
from bertkit.training.clipping import Clipping
from bertkit.training.placement import Batch, Placement, sharding_error, weights_digest

if TYPE_CHECKING:
    from bertkit.training.rank_group import RankGroup

_STACKS = ("layers", "decoder_layers")
"""The encoder's lists of layers that are computed once per pass, in order."""
_OTHER_CALLS = "forward_"
"""Names of methods that compute only part of a layer, for one token of each sequence."""


class _Pass(nn.Module):
    """The outermost unit, whose forward computes the losses of a micro-batch with its model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, losses_of: Callable[[], Mapping[str, LossSum]], found: dict[str, LossSum]) -> list[Tensor]:
        """The sums, from which the backward pass starts; the losses themselves are put into `found`."""
        found.update(losses_of())
        return [part.sum for part in found.values()]


class ShardedClipping(Clipping):
    """Clips gradients that are sharded over the ranks, by their global norm."""

    def clip(self) -> Tensor:
        norm = super().clip()
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


class Sharded(Placement):
    """Each rank has its part of every parameter, gradient and moment.

    Args:
        ranks: ranks of torch.distributed; their training must have begun.
        device: the device of this rank.
    """

    is_sharded = True

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        super().__init__(ranks)
        self._group = cast("RankGroup", ranks)
        self._mesh = self._group.mesh(device.type)
        self._model: HeadedModel
        self._pass: nn.Module
        self._units: list[FSDPModule] = []
        self._is_whole = False
        self._reached: set[int] = set()
        """Indices of the parameters that got a gradient in a backward pass of this update."""

    def place(self, model: HeadedModel) -> None:
        """Shard a model's parameters; the ranks' weights are compared first, then each rank keeps its part of its own.

        Raises:
            UsageError: the model cannot be sharded, or the ranks have different weights.
        """
        if reason := unshardable_reason(model):
            raise sharding_error(reason)
        self.ranks.require_same({"weights": weights_digest(dict(model.named_parameters()))})
        self._model, self._pass = model, _Pass(model)
        layers = layers_of(model)
        for layer in layers:
            fully_shard(layer, mesh=self._mesh)
            for name in dir(layer):
                if name.startswith(_OTHER_CALLS):
                    register_fsdp_forward_method(layer, name)
        fully_shard(self._pass, mesh=self._mesh, reshard_after_forward=False)
        self._units = [_unit(each) for each in (self._pass, *layers)]
        for unit in self._units:
            # A sum, because losses are divided by the counts of all ranks; gloo has no other operation.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            # A parameter without a gradient on one rank gets zeros there; `sum_gradients` finds those without any.
            unit.set_reduce_scatter_unused_params(True, recurse=False)
        self._reached.clear()
        with self.whole():
            for number, parameter in enumerate(model.parameters()):
                hook = partial(self._reach, number)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch leaves it so

    def clipping(self, parameters: Iterable[nn.Parameter], max_norm: float | None) -> Clipping:
        return ShardedClipping(parameters, max_norm)

    def row_clipping(self, model: HeadedModel, max_norm: float | None) -> Clipping:
        return ShardedClipping(model.parameters(), max_norm)

    def passes(self, batches: Sequence[Batch]) -> Iterator[tuple[Batch, bool]]:
        numbers = self.ranks.gathered(len(batches))
        repeated = batches[-1] if batches else None
        if not all(numbers):
            lent = self.ranks.gathered(repeated if self.ranks.rank == _most(numbers) else None)
            repeated = repeated or lent[_most(numbers)]
        root, last = self._units[0], max(numbers) - 1
        for number in range(last + 1):
            root.set_requires_gradient_sync(number == last)
            if number < len(batches):
                yield batches[number], True
            else:
                assert repeated is not None
                yield repeated, False

    def computing(self) -> AbstractContextManager[None]:
        return self._group.exchanging()

    def losses(self, losses_of: Callable[[], Mapping[str, LossSum]]) -> Mapping[str, LossSum]:
        found: dict[str, LossSum] = {}
        self._pass(losses_of, found)
        return found

    def _reach(self, number: int, _parameter: Tensor) -> None:
        self._reached.add(number)

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Drop the zeros of parameters without gradient on any rank; the last backward pass has summed the others."""
        reached = set().union(*self.ranks.gathered(self._reached))
        self._reached.clear()
        for number, parameter in enumerate(self._model.parameters()):
            if number not in reached:
                parameter.grad = None

    @contextmanager
    def whole(self) -> Iterator[None]:
        with self._group.exchanging():
            self._gather()
        try:
            yield
        finally:
            self._scatter()

    @contextmanager
    def spread(self) -> Iterator[None]:
        if not self._is_whole:
            yield
            return
        self._scatter()
        try:
            yield
        finally:
            with self._group.exchanging():
                self._gather()

    def _gather(self) -> None:
        assert not self._is_whole
        with torch.no_grad():
            self._pass(dict, {})  # registers this unit as the outermost one
        for unit in self._units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        # Each of them would shard the weights again when a state_dict is taken.
        self._hooks = {part: part._state_dict_pre_hooks.copy() for part in self._pass.modules()}
        for part in self._hooks:
            part._state_dict_pre_hooks.clear()
        self._is_whole = True

    def _scatter(self) -> None:
        for part, hooks in self._hooks.items():
            part._state_dict_pre_hooks.update(hooks)
        for unit in self._units:
            unit.set_reshard_after_forward(unit is not self._units[0], recurse=False)
        # Also forgets the passes made meanwhile: ranks make different numbers of them, and what a backward pass gathers
        # in advance follows the order of all layers since the last one.
        self._units[0].reset_iter_state()
        self._is_whole = False

    def part_of(self, checkpoint: Checkpoint, model: nn.Module, stems: Iterable[str]) -> Checkpoint:
        parameters = dict(model.named_parameters())
        spread = {
            stem: {key: _part(value, parameters.get(key.partition(":")[0])) for key, value in group.items()}
            for stem in stems
            if (group := checkpoint.tensors.get(stem)) is not None
        }
        return replace(checkpoint, tensors={**checkpoint.tensors, **spread})

    def digest(self, weights: Mapping[str, Tensor]) -> str:
        """Empty: the weights were compared before sharding, or were read from one checkpoint."""
        return ""

    def write(self, tensors: TensorGroups, save: Callable[[TensorGroups], object]) -> None:
        """Let the first rank save tensors, which are gathered one at a time, in order; errors are raised on all."""
        streams = {stem: self._stream(group) for stem, group in tensors.items()}
        if not self.ranks.is_first:
            for stream in streams.values():
                stream.drain()
            self.ranks.from_first(lambda: None)
            return

        def saved() -> None:
            try:
                save(streams)
            except RankLostError:
                raise
            except BaseException:
                with suppress(RankLostError):
                    for stream in streams.values():
                        stream.drain()
                raise

        self.ranks.from_first(saved)

    def write_and_wait(self, write: Callable[[], None]) -> None:
        write()

    def _stream(self, group: Mapping[str, Tensor] | TensorStream) -> TensorStream:
        assert not isinstance(group, TensorStream)
        names = sorted(group)
        kinds = {name: (group[name].dtype, tuple(group[name].shape)) for name in names}
        return TensorStream(kinds, (self._gathered(group[name]) for name in names))

    def _gathered(self, tensor: Tensor) -> Tensor:
        with self._group.exchanging():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            return whole.detach().cpu().contiguous()


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers that are units: those in stacks of several, in all encoders, each once."""
    encoders = [part for part in model.modules() if isinstance(part, Encoder)]
    encoders = [encoder for encoder in encoders if encoder.layers_run_once and not encoder.decodes_masks]
    stacks = [getattr(encoder, name, None) for encoder in encoders for name in _STACKS]
    return list(dict.fromkeys(layer for stack in stacks if isinstance(stack, nn.ModuleList) for layer in stack))


def unshardable_reason(model: nn.Module) -> str | None:
    """Why a model's weights cannot be sharded; None if they can."""
    for name, part in model.named_modules():
        if isinstance(part, nn.RNNBase):
            return f"{name} is an {type(part).__name__}, whose kernel needs all of its weights on one rank"
    scalars = [name for name, parameter in model.named_parameters() if not parameter.dim()]
    return f"{scalars[0]} is a single number, which cannot be divided" if scalars else None


def _most(numbers: Sequence[int]) -> int:
    """The first rank with the largest number of micro-batches."""
    return numbers.index(max(numbers))


def _unit(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


def _part(value: Tensor, parameter: Any) -> Tensor:
    """This rank's part of a tensor with a sharded parameter's shape; other tensors unchanged."""
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)

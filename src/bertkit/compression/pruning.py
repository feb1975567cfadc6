"""Pruning: heads and layers are removed before the first update; weights are zeroed during training.

Heads are removed by importance on the training examples, lowest first, after division by the L2 norm over their layer
(Michel, Levy and Neubig 2019, arXiv:1905.10650, sections 4.1 and 4.2), or as listed in the settings. Weights are zeroed
by magnitude, the same share of every matrix, along a cubic schedule (Zhu and Gupta 2017, arXiv:1710.01878, equation 1;
for BERT: Gordon, Duh and Andrews 2020, arXiv:2002.08307). models/conversion/pruning.py changes the model.

- Every layer keeps at least one head.
- A weight that is 0 stays 0, also if it was 0 in the initial model. The zeros are thus the mask, and checkpoints
  contain it.
- Importance is measured once and stored in the run's pruned.json, from which a resumed run reads it.

Shapes: L layers, N heads of a layer.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from bertkit.compression.head_importance import Heads, gated_score, head_importance, normalised_by_layer
from bertkit.compression.pruning_order import TrainingLoss, heads_to_prune
from bertkit.data.random import Draw
from bertkit.errors import UsageError, below
from bertkit.files import read_json, write_json
from bertkit.models.conversion.layer_choice import ChoiceName, chosen_layers
from bertkit.models.conversion.pruning import (
    HeadChoice,
    cubic_sparsity,
    keep_layers,
    prunable_attentions,
    prunable_maps,
    prune_heads,
    pruned_heads,
    restore_heads,
    sparsity,
    zero_smallest_weights,
)
from bertkit.models.headed import HeadedModel
from bertkit.settings import UnreadKey
from bertkit.tasks.base import Features
from bertkit.training.method import Method, RunResources, TrainingData

log = logging.getLogger(__name__)

RECORD = "pruned.json"
"""In the run's directory: what was removed, and the importance scores used."""
_KEPT = "kept"
"""A buffer of a linear map during the run: 1 where its weight is not 0."""


class Pruned(Method):
    """Fewer heads, fewer layers, or zeroed weights; the rest is trained."""

    name: Literal["pruned"] = "pruned"
    heads: int | float | dict[int, tuple[int, ...]] | None = Field(
        None,
        description="Heads to remove, the least important ones: a share of all heads or a number of heads; or"
        " {layer: [heads]}, both counted from 0 (probes count from 1), heads as in the unpruned model.",
    )
    examples: int | None = Field(
        None,
        ge=1,
        description="Number of training examples, drawn by the seed, over which importance is averaged; null: all.",
    )
    normalise: Literal["layer", "none"] = Field(
        "layer",
        description="layer: importance is divided by its L2 norm over the heads of a layer before ranking; none: it"
        " is not.",
    )
    layers: ChoiceName | tuple[int, ...] | None = Field(
        None,
        description="Layers to keep; the others are removed: first, last, uniform, skip, or their numbers from 0.",
    )
    keep: int | None = Field(None, ge=1, description="Number of layers to keep if layers is a name; null: half.")
    magnitude: float | None = Field(
        None, gt=0, lt=1, description="Final share of zeros among the weights of each linear map of the encoder."
    )
    magnitude_ramp: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Share of the updates over which the share of zeros grows; 0: it is reached at once.",
    )
    magnitude_every_steps: int = Field(
        10, ge=1, description="Number of updates between two increases of the share of zeros."
    )

    @field_validator("heads", mode="after")
    @classmethod
    def _heads_in_range(cls, heads: Any) -> Any:
        if isinstance(heads, float) and not 0 < heads < 1:
            raise ValueError(f"{heads}; a share is above 0 and below 1, a count is written without a decimal point")
        if isinstance(heads, int) and heads < 1:
            raise ValueError(f"{heads}; expected at least one head, or a share, or {{layer: [heads]}}")
        return heads

    @model_validator(mode="after")
    def _takes_something(self) -> Pruned:
        if self.heads is None and self.layers is None and self.magnitude is None:
            raise ValueError("nothing is pruned; give heads, layers or magnitude")
        if self.keep is not None and not isinstance(self.layers, str):
            raise ValueError("keep works only with layers=first, last, uniform or skip; leave it out for a list")
        return self

    @property
    def not_averaged(self) -> str:
        return "" if self.magnitude is None else "sets weights to 0 (magnitude), which are not 0 in an average"

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if self.heads is None or isinstance(self.heads, dict):
            what = "removes no heads" if self.heads is None else "names the heads to remove"
            yield UnreadKey("examples", f"the method {what}, so no importance is measured", "write how many heads")
            yield UnreadKey("normalise", f"the method {what}, so no importance is measured", "write how many heads")
        if self.magnitude is None:
            yield UnreadKey("magnitude_ramp", "method.magnitude is not set: no weight becomes 0")
            yield UnreadKey("magnitude_every_steps", "method.magnitude is not set: no weight becomes 0")
        elif self.magnitude_ramp == 0:
            yield UnreadKey("magnitude_every_steps", "method.magnitude_ramp is 0: all weights are zeroed at once")

    def prepare(self, model: HeadedModel, seed: int, data: TrainingData | None = None) -> HeadedModel:
        """As in `Method`; importance is measured on the training data."""
        model = super().prepare(model, seed)
        before, depth = _size(model), _depth(model)
        path = None if data is None or data.directory is None else data.directory / RECORD
        record = read_json(path) if path is not None and path.exists() else None
        kept = self._kept_layers(depth)
        if kept is not None:
            with below("method"):
                model = keep_layers(model, kept)
        pruned_before = sum(map(len, pruned_heads(model.encoder).values()))
        measured: dict[str, Any] = {}
        if self.heads is not None:
            chosen = self._named_heads(kept, depth) if record is None else _as_choice(record["heads"])
            if chosen is None:
                chosen, measured = self._least_important(model, seed, data)
            with below("method"):
                prune_heads(model, chosen)
        else:
            chosen = {}
        if self.magnitude is not None:
            prunable_maps(model)
        if record is None:
            record = {
                "layers_before": depth,
                "layers_kept": list(range(depth)) if kept is None else kept,
                "heads": {str(layer): sorted(heads) for layer, heads in sorted(chosen.items())},
                "heads_gone_before": pruned_before,
                "parameters_before": before,
                "parameters": _size(model),
                **measured,
            }
            if path is not None:
                write_json(path, record)
        _log(record)
        return model

    def check_model(self, model: HeadedModel) -> None:
        depth = _depth(model)
        kept = self._kept_layers(depth)
        named = self._named_heads(kept, depth)
        with below("method"), torch.device("meta"):
            model = copy.deepcopy(model) if kept is None else keep_layers(model, kept)
            attentions = [] if self.heads is None else prunable_attentions(model.encoder)
            if named is not None:
                prune_heads(model, named)
        if attentions and named is None:
            self._count(sum(each.heads for each in attentions), len(attentions))
        if self.magnitude is not None:
            prunable_maps(model)

    @contextmanager
    def session(self, model: HeadedModel, splits: Sequence[Features], resources: RunResources) -> Iterator[None]:
        """Within the session, weights that are 0 get no gradient."""
        if self.magnitude is None:
            yield
            return
        maps = prunable_maps(model).values()
        self._set_zeros(model, None if self.magnitude_ramp else self.magnitude)
        if not self.magnitude_ramp:
            _log_zeros(model, 0)
        hooks = [
            part.weight.requires_grad_(True).register_hook(_gradient_of_kept(part))  # type: ignore[no-untyped-call]  # torch leaves it untyped
            for part in maps
        ]
        try:
            yield
        finally:
            for hook, part in zip(hooks, maps, strict=True):
                hook.remove()
                delattr(part, _KEPT)

    def after_update(self, model: HeadedModel, step: int, steps: int) -> None:
        """Reset the zeroed weights to 0, and zero more of them at the schedule's steps."""
        if self.magnitude is None:
            return
        ramp_steps, every = math.ceil(self.magnitude_ramp * steps), self.magnitude_every_steps
        grows = step == ramp_steps or (step < ramp_steps and step % every == 0)

        def share(at: int) -> float:
            return cubic_sparsity(self.magnitude or 0.0, at, ramp_steps=ramp_steps, every_steps=every)

        self._set_zeros(model, share(step) if grows else None)
        # The share grows up to thousands of times.
        tenths = [int(10 * share(at) / self.magnitude) for at in (max(0, step - 1), step)]
        if grows and tenths[0] < tenths[1]:
            _log_zeros(model, step)

    def results(self, model: HeadedModel, directory: Path) -> dict[str, Any]:
        """What was removed, and the share of zeros in the model."""
        path = directory / RECORD
        found = read_json(path) if path.exists() else {}
        if self.magnitude is not None:
            zeros, weights = sparsity(model)
            found |= {"magnitude": {"asked": self.magnitude, "share": zeros / weights, "zeros": zeros, "of": weights}}
            if zeros < self.magnitude * weights - len(prunable_maps(model)):
                log.warning(
                    "%.1f%% of the weights are 0, not %.1f%%: the best evaluation was before the share had fully grown;"
                    " lower method.magnitude_ramp, or write optimisation.select=last",
                    *(100 * zeros / weights, 100 * self.magnitude),
                )
        return {"pruned": found}

    @torch.no_grad()
    def _set_zeros(self, model: HeadedModel, share: float | None) -> None:
        """Zero the masked weights, and each map's smallest ones up to this share; None: no further ones."""
        for part in prunable_maps(model).values():
            kept = getattr(part, _KEPT, None)
            if kept is not None:
                part.weight.masked_fill_(~kept, 0.0)
            if share is not None:
                zero_smallest_weights(part.weight, share)
            part.register_buffer(_KEPT, part.weight != 0, persistent=False)

    def _kept_layers(self, depth: int) -> list[int] | None:
        """The layers to keep; None: all."""
        if self.layers is None:
            return None
        keep = (self.keep or (depth + 1) // 2) if isinstance(self.layers, str) else None
        with below("method"):
            return chosen_layers(self.layers, of=depth, keep=keep)

    def _named_heads(self, kept: list[int] | None, depth: int) -> HeadChoice | None:
        """The heads named in the settings, by kept layer; None if importance decides.

        Raises:
            UsageError: the settings name heads of a removed layer.
        """
        if not isinstance(self.heads, dict):
            return None
        index = {layer: number for number, layer in enumerate(range(depth) if kept is None else kept)}
        unknown = [layer for layer in self.heads if layer not in index]
        if unknown:
            raise UsageError(f"method.heads: layer {unknown[0]} does not exist; the layers are {_listed(list(index))}")
        return {index[layer]: heads for layer, heads in self.heads.items()}

    def _least_important(
        self, model: HeadedModel, seed: int, data: TrainingData | None
    ) -> tuple[HeadChoice, dict[str, Any]]:
        """The least important heads on the training examples, and what was measured.

        Raises:
            UsageError: more heads are to be removed than is possible, there are no data, or all heads are equal.
        """
        if data is None:
            raise UsageError("method.heads: importance needs training examples; list the heads as {layer: [heads]}")
        with below("method"):
            prunable_attentions(model.encoder)
        # Previously pruned heads are temporarily zeros, so that all layers have equally many heads.
        pruned = restore_heads(model)
        measure = TrainingLoss(model, data, self._items(data.features.num_examples, seed))
        heads = Heads.of(model)
        importance_LN = head_importance(measure, heads)
        if not importance_LN.any():
            raise UsageError(
                "method.heads: the importance of every head is 0: the training loss has no gradient at the initial"
                " weights, as for a model that is its own teacher; list the heads as {layer: [heads]}"
            )
        ranked_LN = normalised_by_layer(importance_LN) if self.normalise == "layer" else importance_LN
        present_LN = heads.all_on()
        for layer, numbers in pruned.items():
            present_LN[layer, list(numbers)] = 0
        chosen = heads_to_prune(ranked_LN, present_LN, self._count(int(present_LN.sum()), len(present_LN)))
        after_LN = present_LN.copy()
        for layer, removed in chosen.items():
            after_LN[layer, list(removed)] = 0
        losses = [gated_score(measure, heads, gate_LN) for gate_LN in (present_LN, after_LN)]
        model.requires_grad_(True).cpu()
        if pruned:
            prune_heads(model, pruned)
        measured = {
            "examples": measure.examples,
            "importance": importance_LN.tolist(),
            "train_loss_before": losses[0],
            "train_loss_without": losses[1],
        }
        return chosen, measured

    def _count(self, present: int, layers: int) -> int:
        """How many heads are removed.

        Raises:
            UsageError: a layer would have none left.
        """
        assert isinstance(self.heads, int | float)
        count = max(1, round(self.heads * present)) if isinstance(self.heads, float) else self.heads
        if count > present - layers:
            raise UsageError(
                f"method.heads: {self.heads} of {present} heads are {count}; each of {layers} layers keeps one, so at"
                f" most {present - layers} can be removed (method.layers removes whole layers)"
            )
        return count

    def _items(self, items: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        if self.examples is None or self.examples >= items:
            return np.arange(items)
        return np.sort(Draw(seed, "pruned").permuted("examples", np.arange(self.examples), size=items))


def _gradient_of_kept(part: nn.Linear) -> Any:
    """A hook that zeroes the gradient of weights that are 0."""

    def masked(gradient: Tensor) -> Tensor:
        kept: Tensor = getattr(part, _KEPT)
        return gradient * kept

    return masked


def _as_choice(recorded: dict[str, list[int]]) -> HeadChoice:
    return {int(layer): heads for layer, heads in recorded.items()}


def _depth(model: HeadedModel) -> int:
    return int(getattr(model.encoder.config, "num_hidden_layers", 0))


def _size(model: HeadedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def _log_zeros(model: HeadedModel, step: int) -> None:
    zeros, weights = sparsity(model)
    log.info(
        "update %d: %.1f%% of the weights of %d linear maps are 0: %s of %s",
        *(step, 100 * zeros / weights, len(prunable_maps(model)), f"{zeros:,}", f"{weights:,}"),
    )


def _log(record: dict[str, Any]) -> None:
    """Log what is removed, layer by layer."""
    kept, importance = record["layers_kept"], record.get("importance")
    removed = [layer for layer in range(record["layers_before"]) if layer not in kept]
    if removed:
        log.info("layers removed: %s; kept: %s", _listed(removed), _listed(kept))
    for layer, heads in record["heads"].items():
        rows = [f"{head} (I {importance[int(layer)][head]:.2g})" if importance else str(head) for head in heads]
        log.info("layer %s: heads removed: %s", kept[int(layer)], ", ".join(rows))
    if "train_loss_without" in record:
        log.info(
            "training loss, over %s examples: %.4f with these heads, %.4f without",
            *(f"{record['examples']:,}", record["train_loss_before"], record["train_loss_without"]),
        )
    log.info("parameters: %s of %s remain", f"{record['parameters']:,}", f"{record['parameters_before']:,}")

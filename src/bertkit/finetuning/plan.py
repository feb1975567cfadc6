"""The cost of fine-tuning, over all tasks and runs of a suite: the parts of `--plan` (training/plan.py).

Tokens and FLOPs are those of the real examples.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from bertkit.arrays import Float64Array
from bertkit.finetuning.arguments import FinetuneArguments, PlannedRun
from bertkit.finetuning.data import Prepared
from bertkit.finetuning.label_counts import skipped_counts
from bertkit.finetuning.loss_terms import task_flops
from bertkit.finetuning.methods.feature_store import FEATURE_BYTES
from bertkit.finetuning.methods.features import FeatureBased
from bertkit.finetuning.methods.frozen import Frozen, GradualUnfreezing
from bertkit.finetuning.methods.lora import Lora
from bertkit.finetuning.methods.setfit import Setfit
from bertkit.finetuning.multitask import joined
from bertkit.finetuning.recipe import FinetuneRecipe
from bertkit.finetuning.sweep import sweep_runs
from bertkit.finetuning.task_order import TaskOrder
from bertkit.finetuning.trainer import with_pairs
from bertkit.models.conversion.pruning import prune_heads
from bertkit.models.feature_lstm import FeatureLstm
from bertkit.models.files.hub import read_config
from bertkit.models.headed import COMPANIONS, HeadedModel
from bertkit.recipe.hashing import name_and_hash
from bertkit.tasks.embedding.late_interaction import LateInteractionTask
from bertkit.tasks.embedding.sparse import SparseEmbedding
from bertkit.tasks.embedding.task import Embedding
from bertkit.training.compiled_kernels import uses_attention_kernel
from bertkit.training.cost import (
    CHECKPOINT_BYTES,
    FORWARD_SHARE,
    count_parameters,
    predictions_of,
    sizes_of,
    step_flops,
)
from bertkit.training.engine import TASK_INTERVALS, Engine, resolve_engine
from bertkit.training.memory import MemoryTerms, training_memory
from bertkit.training.plan import PlannedCost, plan_document
from bertkit.training.rates import group_rates

_MODEL_BYTES = 4
"""Bytes per parameter in the model of a finished run: float32."""
_VECTOR_COPIES = 6
"""Tensors of the size of a batch's sparse vectors that exist at the same time: weights before and after the logarithm,
the tokens that have them, the loss's own, and gradients."""
_OTHER_LAYERS = ("theseus", "pruned")
"""Methods that number or nest layers anew."""


def finetuning_plan(arguments: FinetuneArguments) -> dict[str, Any]:
    """Parameters, steps, tokens, FLOPs, memory, disk and time of all runs of the command; how many runs there are, how
    many examples each split has, and its labels with their counts.

    Tokens and FLOPs are those of the real sequences, training only, assuming that every weight is trained: a method
    that freezes the encoder costs less. For setfit they are those of the pairs of texts; for features those of the
    LSTM, and of the encoder's pass over the training texts, once if its features can be stored. Each setting of a grid
    is counted with its own epochs, batch size and method on the same texts; a run before it, on its own. The passes of
    a teacher are counted and listed under `teacher`. Memory counts gradients and moments of what the method trains.

    Raises:
        UsageError: a group of parameters names none, or the method does not fit data or model.
        DataError: data or model are missing or do not fit.
    """
    recipe = arguments.new_recipe()
    data = _PlannedData.of(arguments, recipe)
    prepared, parts = data.prepared, data.parts
    before = arguments.before(recipe)
    data_before = None if before is None else _PlannedData.of(arguments, before, like=(recipe, data))
    engine = resolve_engine(recipe.engine, TASK_INTERVALS)
    model = joined([part.model for part in parts])
    parameters = count_parameters(model)
    runs = sweep_runs(recipe, arguments.seeds or [recipe.seed], arguments.grid, arguments.trials)
    steps, tokens, flops = 0, 0.0, 0.0
    planned: list[tuple[FinetuneRecipe, _PlannedData]] = []
    for run in runs:
        first = arguments.before(run.recipe)
        if first is not None and data_before is not None:
            planned.append((first, data_before.trained_by(first)))
        planned.append((run.recipe, data.trained_by(run.recipe)))
        _check_groups(*planned[-1])
    planned_runs: list[PlannedRun] = []
    for each_recipe, own_data in planned:
        optimisation = each_recipe.optimisation
        assert optimisation.epochs is not None
        order = TaskOrder.of(each_recipe, own_data.prepared)
        own = order.steps(optimisation.epochs, optimisation.steps)
        each_recipe.method.check_steps(own)
        for part in own_data.parts:
            each_recipe.method.check_model(part.model)
        steps += own
        planned_runs.append(PlannedRun(each_recipe, own_data.prepared, own / order.steps_per_epoch))
        for part, each, count in zip(own_data.parts, order.orders, order.steps_by_task, strict=True):
            epochs = own / order.steps_per_epoch * count / each.steps_per_epoch
            tokens += epochs * part.tokens
            flops += epochs * part.epoch_flops * each_recipe.method.gradient(each_recipe.seed).passes + part.once_flops
    optimizer = recipe.optimisation.optimizer
    best = 4.0 * parameters.total if recipe.optimisation.keeps_best else 0.0
    cost = PlannedCost(
        parameters=parameters,
        steps=steps,
        tokens=tokens,
        flops=flops,
        memory={
            **_largest_update(recipe, parts, engine),
            "average": parameters.total * 2.0 * recipe.optimisation.average_bytes,
            "best_weights": best,
            "initial_model": 4.0 * parameters.total,
            "examples": sum(map(_example_bytes, prepared)),
        },
        disk_bytes=parameters.total
        * ((CHECKPOINT_BYTES + recipe.optimisation.average_bytes) * 2 + _MODEL_BYTES * len(planned))
        + max(sum(part.store_bytes for part in own.parts) for _, own in planned),
        optimizer_flops=0.0 if optimizer is None else steps * optimizer.update_flops(model),
    )
    document = name_and_hash(recipe) | plan_document(engine, cost, teacher=arguments.planned_teacher(planned_runs))
    named = [(f"{each.spec.name}/" if len(prepared) > 1 else "", each) for each in prepared]
    counts = {f"{at}{split}": own for at, each in named for split, own in each.label_counts.items()}
    found = {f"{at}{split}": own for at, each in named for split, own in each.read.items()}
    repeated = {f"{at}{split}": count for at, each in named for split, count in each.in_train.items()}
    return document | {
        "runs": len(planned),
        "examples": {name: len(split.examples) for name, split in found.items()},
        "labels": counts,
        "in_train": repeated,
        "skipped": skipped_counts(found),
    }


def _example_bytes(prepared: Prepared) -> float:
    """Memory of the texts and ids of all examples."""
    tokens = sum(int(split.features.starts_S1[-1]) for split in (prepared.train, *prepared.others.values()))
    return prepared.task.bytes_of_a_token * tokens


def models_mb(plan: Mapping[str, Any]) -> float:
    """The part of a plan's `disk_mb` that remains when its runs are finished: their models."""
    return float(_MODEL_BYTES * plan["parameters"]["total"] * plan["runs"] / 1e6)


def _check_groups(recipe: FinetuneRecipe, data: _PlannedData) -> None:
    """Check `optimisation.groups` against the parameters, as the run does before its first step. Not checked: what is
    trained beside the model (companions), and models whose layers the method replaces.

    Raises:
        UsageError: a group names no parameter.
    """
    groups, method = recipe.optimisation.groups, recipe.method
    if not groups or method.name in _OTHER_LAYERS:
        return
    model = joined(copy.deepcopy([part.model for part in data.parts]))
    if isinstance(method, Lora):
        with torch.device("meta"):
            model = method.prepare(model, recipe.seed)
    beside = [each for group in groups for each in group.patterns if each.startswith(COMPANIONS)]
    group_rates([*(name for name, _ in model.named_parameters()), *beside], groups)


def _largest_update(recipe: FinetuneRecipe, parts: Sequence[_TaskCost], engine: Engine) -> MemoryTerms:
    """Memory of the largest update, of the task that needs most."""
    optimizer, sequences = recipe.optimisation.optimizer, recipe.optimisation.batch_sequences
    terms = max(
        (
            training_memory(
                part.model,
                micro_batch_tokens=part.micro_batch_tokens(sequences, engine),
                sequence_length=part.mean_length_seen,
                predictions=sum(predictions_of(part.head, part.micro_batch_tokens(sequences, engine)).values()),
                bf16=engine.bf16,
                recomputed=engine.activation_checkpointing,
                device=engine.device,
                kernels=uses_attention_kernel(recipe.engine, engine),
                **({} if optimizer is None else {"state_bytes": optimizer.state_bytes}),
            )
            | part.vector_memory(sequences)
            for part in parts
        ),
        key=lambda terms: sum(terms.values()),
    )
    share = max(_trained_share(recipe, part.model) for part in parts)
    return terms | {name: share * terms[name] for name in ("gradients", "optimizer")}


def _trained_share(recipe: FinetuneRecipe, model: HeadedModel) -> float:
    """The share of the parameters that have gradients and moments: of those that the last epoch trains."""
    method = recipe.method
    if not isinstance(method, Lora | Frozen | GradualUnfreezing):
        return 1.0
    with torch.device("meta"):
        model = method.prepare(copy.deepcopy(model), recipe.seed)
    method.set_trained(model, math.ceil(recipe.optimisation.epochs or 1) - 1)
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, is_trained in sizes if is_trained) / sum(size for size, _ in sizes)


@dataclass(frozen=True)
class _PlannedData:
    """What a run trains on, and the cost of each of its tasks.

    Attributes:
        recipe: trains on it.
        texts: the data as read.
        prepared: the data as trained on: with setfit, pairs of texts.
        parts: the cost of each task.
    """

    recipe: FinetuneRecipe
    texts: Sequence[Prepared]
    prepared: Sequence[Prepared]
    parts: Sequence[_TaskCost]

    @classmethod
    def of(
        cls,
        arguments: FinetuneArguments,
        recipe: FinetuneRecipe,
        like: tuple[FinetuneRecipe, _PlannedData] | None = None,
    ) -> _PlannedData:
        """Of a recipe; `like` are another recipe and its data, which are the same if the recipes read alike."""
        if like is not None and arguments.data_key(recipe) == arguments.data_key(like[0]):
            return like[1].trained_by(recipe)
        return cls._of_texts([arguments.prepare(each) for each in recipe.alone], recipe)

    def trained_by(self, recipe: FinetuneRecipe) -> _PlannedData:
        """The same texts, trained on by this recipe."""
        is_same = recipe.method == self.recipe.method and recipe.compares_layers == self.recipe.compares_layers
        return self if is_same else self._of_texts(self.texts, recipe)

    @classmethod
    def _of_texts(cls, texts: Sequence[Prepared], recipe: FinetuneRecipe) -> _PlannedData:
        method, prepared = recipe.method, texts
        if isinstance(method, Setfit):
            prepared = [with_pairs(each, method, recipe.seed) for each in texts]
        return cls(recipe, texts, prepared, [_TaskCost.of(each, recipe) for each in prepared])


@dataclass(frozen=True)
class _TaskCost:
    """One task: its model without weights, its sequence lengths, and the cost of an epoch.

    Attributes:
        head: of the task.
        vector_numbers: numbers in an example's sparse vectors, which exist for a whole batch; 0 if it has none.
        once_flops: operations of a run besides its epochs.
        store_bytes: size of what a run stores on disk while it lasts.
    """

    model: HeadedModel
    head: str
    vector_numbers: float
    length_S: Float64Array
    epoch_flops: float
    once_flops: float = 0.0
    store_bytes: float = 0.0

    @property
    def tokens(self) -> int:
        return int(self.length_S.sum())

    @property
    def mean_length_seen(self) -> float:
        """The mean sequence length, averaged over tokens."""
        return float((self.length_S**2).sum() / self.length_S.sum())

    def micro_batch_tokens(self, sequences: int | None, engine: Engine) -> float:
        """Tokens of the largest micro-batch: three standard deviations above the mean batch, or the engine's limit."""
        count = len(self.length_S) if sequences is None else min(sequences, len(self.length_S))
        largest = count * self.length_S.mean() + 3 * np.sqrt(count) * self.length_S.std()
        return float(min(engine.micro_batch_tokens, largest, self.tokens))

    def vector_memory(self, examples: int | None) -> MemoryTerms:
        """Memory of the sparse vectors of a batch of this many examples; None: of all."""
        if not self.vector_numbers:
            return {}
        largest = len(self.length_S) if examples is None else min(examples, len(self.length_S))
        return {"vectors": 4.0 * _VECTOR_COPIES * self.vector_numbers * largest}

    @classmethod
    def of(cls, prepared: Prepared, recipe: FinetuneRecipe) -> _TaskCost:
        """The cost of a task with a recipe's method, loss and limit of what a run stores."""
        _, contents = read_config(prepared.model_directory)
        head = prepared.task.head
        with torch.device("meta"):
            model = HeadedModel(prepared.config.build(contents["vocab_size"]), [head], labels=prepared.task.labels)
            if pruned := prepared.pruned:
                prune_heads(model, pruned)
            if isinstance(recipe.method, FeatureBased):
                model = recipe.method.with_lstm(model)
            model.companions.update(_planned_modules(prepared, model))
        features = prepared.train.features
        texts = (features.starts_S1.size - 1) / max(1, features.num_examples)
        numbers = texts * model.encoder.vocab_size if isinstance(prepared.task, SparseEmbedding) else 0.0
        lengths = np.diff(features.starts_S1).astype(np.float64)
        sizes = sizes_of(lengths)
        flops = task_flops(model, head, sizes, whole=recipe.compares_layers)
        if not isinstance(model.encoder, FeatureLstm):
            return cls(model, head, numbers, lengths, flops)
        stored = FEATURE_BYTES * sizes["tokens"] * model.encoder.features_width
        encoder = FORWARD_SHARE * step_flops(HeadedModel(model.encoder.base), **sizes, predictions=0)
        if stored > recipe.engine.feature_store_gb * 1e9:
            return cls(model, head, numbers, lengths, flops + encoder)
        return cls(model, head, numbers, lengths, flops, once_flops=encoder, store_bytes=stored)


def _planned_modules(prepared: Prepared, model: HeadedModel) -> dict[str, nn.Module]:
    """The maps of vectors that are trained beside the model; the modules of losses are dropped after training, and are
    not planned."""
    if isinstance(prepared.task, LateInteractionTask):
        return prepared.task.modules(model, 0)
    return prepared.task.copied_maps() if isinstance(prepared.task, Embedding) else {}

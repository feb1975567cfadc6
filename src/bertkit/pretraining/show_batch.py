"""A training batch in readable form: what was masked, replaced, kept or moved, and what is predicted.

Not from a paper. A batch is a pure function of the recipe, the text and the step (data/stream.py), so any step of any
run can be shown, before or long after it is taken. What an objective predicts follows from its declarations
(objectives/base.py); the original tokens come from the text. Sibling trainer.py trains on the same batches.

Shapes: T packed tokens, B sequences, M predicted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.arrays import Int64Array
from bertkit.data.samples import Samples
from bertkit.data.shards import TokenShards
from bertkit.errors import UsageError
from bertkit.objectives.base import Objective
from bertkit.pretraining.arguments import PretrainArguments, fitted, with_recorded_held_out
from bertkit.pretraining.recipe import Recipe
from bertkit.pretraining.run import open_shards
from bertkit.pretraining.stage_run import StageRun
from bertkit.pretraining.stages import stages_of
from bertkit.progress import Progress
from bertkit.recipe.resolve import KINDS, load_any
from bertkit.run.directory import RECORD, RunDirectory
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import load_tokenizer


@dataclass(frozen=True)
class ShownToken:
    """One token of a batch.

    Attributes:
        token: the model's input.
        change: `masked`, `replaced`, `moved`, `kept` if it is predicted unchanged, or `predicted` if it is hidden from
            the states that predict it; else None.
        original: the token of the text, if there is a change.
        predicts: what is predicted from this token's state besides the original, by the objective's name.
    """

    token: str
    change: str | None = None
    original: str | None = None
    predicts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ShownSequence:
    """One sequence of a batch: the address of its random draws, its tokens, labels, and label names by objective."""

    epoch: int
    sample: int
    causal: bool
    labels: dict[str, float]
    label_names: dict[str, str]
    tokens: list[ShownToken]

    def as_document(self) -> dict[str, Any]:
        """For JSON; fields that a token does not have are left out."""
        tokens = [{name: value for name, value in vars(token).items() if value} for token in self.tokens]
        return {**vars(self), "tokens": tokens}


@dataclass(frozen=True)
class ShownBatch:
    """A step's batch, or its first sequences; `stage` counts from 0, as in the keys of `optimisation.stages`."""

    recipe: str
    step: int
    stage: int
    sequences: list[ShownSequence]
    in_all: int
    stages: int = 1

    def as_document(self) -> dict[str, Any]:
        return {**vars(self), "sequences": [sequence.as_document() for sequence in self.sequences]}


def show_batch(request: PretrainArguments, *, step: int, sequences: int, progress: Progress) -> ShownBatch:
    """The batch of a step.

    Args:
        request: its `recipe` names a recipe or a run directory.
        step: the run's update, counted from 1 as in metrics.jsonl.
        sequences: how many of the batch's sequences are shown.
        progress: the progress display, for text that has to be tokenised first.

    Raises:
        UsageError: no such recipe, or a step that the run does not have.
        DataError: the text cannot be read.
    """
    recipe, shards = _recipe_and_shards(request, progress)
    recipe = fitted(recipe, shards, cache=request.cache)
    steps = recipe.optimisation.steps
    if not 1 <= step <= steps:
        raise UsageError(f"--step {step}: {recipe.name} has only steps 1 to {steps:,}; choose one of these")
    stages = stages_of(recipe)
    stage = next(each for each in stages if step <= each.end_step)
    tokenizer = load_tokenizer(shards.directory)
    batches = StageRun(stage, shards, tokenizer, cache=request.cache).batches
    batches.check_enough()
    samples, originals = (of(step - 1 - stage.first_step) for of in (batches.samples, batches.uncorrupted))
    pairs = list(zip(samples.split(1), originals.split(1), strict=True))
    shown = [_sequence(one, text.ids_T, stage.recipe.objectives, tokenizer) for one, text in pairs[:sequences]]
    return ShownBatch(recipe.name, step, stage.number, shown, len(pairs), len(stages))


def _recipe_and_shards(request: PretrainArguments, progress: Progress) -> tuple[Recipe, TokenShards]:
    assert request.recipe is not None
    directory = Path(request.recipe)
    if not (directory / RECORD).is_file():
        recipe = request.new_recipe()
        return recipe, open_shards(recipe, cache=request.cache, offline=request.offline, progress=progress)
    run = RunDirectory.open(directory)
    recipe = with_recorded_held_out(_recipe_on_text(run), run)
    shards = run.record.get("shards")  # none if it was killed while it began
    if shards is not None and Path(shards).is_dir():
        return recipe, TokenShards.open(Path(shards))
    commits = run.record.get("commits")
    return recipe, open_shards(recipe, cache=request.cache, offline=request.offline, progress=progress, commits=commits)


def _recipe_on_text(run: RunDirectory) -> Recipe:
    """The recipe of a run that pretrained, or distilled on text.

    Raises:
        UsageError: it trained on a task, or its batches are also tokenised by its teacher's tokenizer.
    """
    recipe = load_any(str(run.path / "recipe.yaml")) if run.record["kind"] in KINDS else None
    if not isinstance(recipe, Recipe):
        raise UsageError(f"{run.path}: is a run of `bertkit {run.record['kind']}` on a task; give a run on text")
    if not all(objective.is_shown for objective in recipe.objectives):
        raise UsageError(f"{run.path}: its batches are in two vocabularies and cannot be shown; give another run")
    return recipe


def _sequence(
    one: Samples, original_T: Int64Array, objectives: Sequence[Objective], tokenizer: Tokenizer
) -> ShownSequence:
    """One sequence, with the text's original ids; without them if an objective changed the tokenization."""
    if original_T.size != one.ids_T.size:
        original_T = one.ids_T
    changes: dict[int, str] = {}
    predicts: list[dict[str, str]] = [{} for _ in original_T]
    mask_id = tokenizer.mask_id if "mask" in tokenizer.roles else -1
    for index in np.flatnonzero(one.ids_T != original_T).tolist():
        changes[index] = "masked" if one.ids_T[index] == mask_id else "replaced"
    for objective in objectives:
        targets = one.targets.get(objective.term)
        if targets is None:
            continue
        for index, target in zip(targets.index_M.tolist(), objective.described(targets, tokenizer), strict=True):
            if not objective.in_place:
                predicts[index] |= {} if target is None else {objective.term: target}
            elif objective.change == "replaced":
                changes.setdefault(index, "kept")
            else:
                changes[index] = objective.change
    tokens = [
        ShownToken(
            tokenizer.token(token),
            changes.get(index),
            tokenizer.token(int(original_T[index])) if index in changes else None,
            predicts[index],
        )
        for index, token in enumerate(one.ids_T.tolist())
    ]
    labels = {each.term: one.labels[each.term][0].item() for each in objectives if each.term in one.labels}
    return ShownSequence(
        epoch=int(one.epoch_B[0]),
        sample=int(one.sample_B[0]),
        causal=bool(one.causal_B is not None and one.causal_B[0]),
        labels=labels,
        label_names={
            each.term: each.label_names[int(labels[each.term])]
            for each in objectives
            if each.label_names and each.term in labels
        },
        tokens=tokens,
    )

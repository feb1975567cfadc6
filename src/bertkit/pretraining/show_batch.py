"""A training batch as a person reads it: what was hidden, replaced, kept or moved, and what is to be predicted.

Own design. A batch is a pure function of the recipe, the text and the step (see data/stream.py), so that any step of
any run can be looked at, before it is taken or long after. Sibling pretrain.py trains on the same batches.

Shapes: T packed tokens, B sequences, M predicted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertkit.data.samples import Samples
from bertkit.data.shards import TokenShards
from bertkit.distillation.mixed_vocabulary import MixedVocabulary
from bertkit.errors import UsageError
from bertkit.objectives.base import Objective
from bertkit.pretraining.arguments import PretrainArguments
from bertkit.pretraining.batches import stage_batches
from bertkit.pretraining.recipe import Recipe
from bertkit.pretraining.run import open_shards
from bertkit.pretraining.stages import stages_of
from bertkit.progress import Progress
from bertkit.recipe.load import load_any
from bertkit.recipe.resolve import KINDS
from bertkit.run.directory import RECORD, RunDirectory
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import load_tokenizer

_IN_PLACE = ("masked_lm", "word_order")
"""Objectives that predict the token that stood where their state is."""


@dataclass(frozen=True)
class ShownToken:
    """One token of a batch.

    Attributes:
        token: what the model reads.
        change: `masked`, `replaced`, `kept` or `moved`; None where no objective touched it.
        original: what stood there, where an objective touched it.
        predicts: what each other objective predicts from this token's state, by its name.
    """

    token: str
    change: str | None = None
    original: str | None = None
    predicts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ShownSequence:
    """One sequence of a batch: where its draws are addressed, its tokens, its labels and their names by objective."""

    epoch: int
    sample: int
    causal: bool
    labels: dict[str, int]
    label_names: dict[str, str]
    tokens: list[ShownToken]

    def as_document(self) -> dict[str, Any]:
        """For JSON; what is absent of a token is left out."""
        tokens = [{name: value for name, value in vars(token).items() if value} for token in self.tokens]
        return {**vars(self), "tokens": tokens}


@dataclass(frozen=True)
class ShownBatch:
    """A step's batch, or its first sequences."""

    recipe: str
    step: int
    stage: int
    sequences: list[ShownSequence]
    in_all: int

    def as_document(self) -> dict[str, Any]:
        return {**vars(self), "sequences": [sequence.as_document() for sequence in self.sequences]}


def show_batch(request: PretrainArguments, *, step: int, sequences: int, progress: Progress) -> ShownBatch:
    """The batch of a step.

    Args:
        request: its `recipe` names a recipe or a run directory.
        step: the run's update, counted from 1 as in metrics.jsonl.
        sequences: how many of the batch's sequences are shown.
        progress: the display, for text that has to be tokenised first.

    Raises:
        UsageError: no such recipe, or a step that the run does not have.
        DataError: text at fault.
    """
    recipe, shards = _recipe_and_shards(request, progress)
    steps = recipe.optimisation.steps
    if not 1 <= step <= steps:
        raise UsageError(f"--step {step}: {recipe.name} has steps 1 to {steps:,}")
    stage = next(each for each in stages_of(recipe) if step <= each.end_step)
    tokenizer = load_tokenizer(shards.directory)
    samples = stage_batches(stage, shards, tokenizer, cache=request.cache).samples(step - 1 - stage.first_step)
    in_all = int(samples.lengths_B.size)
    few = next(samples.split(int(samples.cu_seqlens_B1[min(sequences, in_all)])))
    return ShownBatch(recipe.name, step, stage.number, shown(few, stage.recipe.objectives, tokenizer), in_all)


def shown(samples: Samples, objectives: Sequence[Objective], tokenizer: Tokenizer) -> list[ShownSequence]:
    """Corrupted samples, in words."""
    return [_sequence(one, objectives, tokenizer) for one in samples.split(1)]


def _recipe_and_shards(request: PretrainArguments, progress: Progress) -> tuple[Recipe, TokenShards]:
    assert request.recipe is not None
    directory = Path(request.recipe)
    if not (directory / RECORD).is_file():
        recipe = request.requested()
        return recipe, open_shards(recipe, cache=request.cache, offline=request.offline, progress=progress)
    run = RunDirectory.open(directory)
    recipe = _recipe_on_text(run)
    shards = Path(str(run.record.get("shards", "")))
    if shards.is_dir():
        return recipe, TokenShards.open(shards)
    commits = run.record.get("commits")
    return recipe, open_shards(recipe, cache=request.cache, offline=request.offline, progress=progress, commits=commits)


def _recipe_on_text(run: RunDirectory) -> Recipe:
    """The recipe of a run that pretrained, or distilled on text.

    Raises:
        UsageError: it learnt from a task, or its batches are made with its teacher's tokenizer, too.
    """
    recipe = load_any(str(run.path / "recipe.yaml")) if run.record["kind"] in KINDS else None
    if not isinstance(recipe, Recipe):
        raise UsageError(f"{run.path}: is a run of `bertkit {run.record['kind']}` on a task; give one that read text")
    if any(objective.term == MixedVocabulary.term for objective in recipe.objectives):
        raise UsageError(f"{run.path}: its batches are cut by two vocabularies, and are not shown")
    return recipe


def _sequence(one: Samples, objectives: Sequence[Objective], tokenizer: Tokenizer) -> ShownSequence:
    tokens = [ShownToken(tokenizer.token(token)) for token in one.ids_T.tolist()]
    for term, targets in sorted(one.targets.items(), key=lambda item: item[0] in _IN_PLACE):
        for index, target in zip(targets.index_M.tolist(), targets.id_M.tolist(), strict=True):
            tokens[index] = _with_target(tokens[index], term, target, int(one.ids_T[index]), tokenizer)
    labels = {each.term: int(one.labels[each.term][0]) for each in objectives if each.label_names}
    return ShownSequence(
        epoch=int(one.epoch_B[0]),
        sample=int(one.sample_B[0]),
        causal=bool(one.causal_B is not None and one.causal_B[0]),
        labels=labels,
        label_names={each.term: each.label_names[labels[each.term]] for each in objectives if each.label_names},
        tokens=tokens,
    )


def _with_target(shown_token: ShownToken, term: str, target: int, token_id: int, tokenizer: Tokenizer) -> ShownToken:
    original = tokenizer.token(target)
    if term not in _IN_PLACE:
        predicts = {**shown_token.predicts, term: original}
        return ShownToken(shown_token.token, shown_token.change, shown_token.original, predicts)
    if term == "word_order":
        change = "moved"
    elif token_id == target:
        change = "kept"
    else:
        change = "masked" if token_id == tokenizer.mask_id else "replaced"
    return ShownToken(shown_token.token, change, original, shown_token.predicts)

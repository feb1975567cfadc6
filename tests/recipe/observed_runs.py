"""Everything that a tiny run computes, in parts from cheap to expensive, for the property test of keys.

A recipe is observed only through its effects: text and tokenizer, samples, learning rates, initial weights, losses,
gradients and updates of a few steps, the average of the weights, when a run is given up, and the finished model's heads
for a task.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bertkit.data.batch import PackedBatch
from bertkit.distillation.text_arguments import DistillTextArguments
from bertkit.distillation.text_recipe import DistillTextRecipe
from bertkit.errors import BertkitError, DivergedError
from bertkit.models.headed import HeadedModel
from bertkit.models.labels import Labels
from bertkit.pretraining.arguments import PretrainArguments
from bertkit.pretraining.run import open_shards, open_text
from bertkit.pretraining.stage_run import check_epochs
from bertkit.pretraining.words import check_words, count_words, needs_words
from bertkit.progress import silent_progress
from bertkit.run.directory import RunDirectory
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.trainer import Trainer

Observed = Iterator[str]
UPDATES = 3
"""Batches of each stage, or of a run on a task."""
MORE_BATCHES = 60
"""Further batches of each stage if everything else is equal."""
_TASKS = ("sequence_classification", "token_classification", "span", "multiple_choice")


def digest(*parts: Any) -> str:
    """A short hash of arrays, tensors and plain values."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, torch.Tensor):
            part = part.detach().contiguous().view(torch.uint8 if part.dtype == torch.bfloat16 else part.dtype).numpy()
        content = part.tobytes() if isinstance(part, np.ndarray) else json.dumps(part, sort_keys=True).encode()
        found.update(content + b"|")
    return found.hexdigest()[:16]


REFUSED = "refused"
"""First part of an observation if the program refuses the recipe."""


def differs(first: Callable[[], Observed], second: Callable[[], Observed]) -> str:
    """Outcome for two runs: different, equal, or which of them was refused: first or second.

    Expensive parts are computed only if all earlier ones are equal. The runs alternate, each with its own state of
    torch's generator.
    """
    runs, states = (first(), second()), [torch.get_rng_state()] * 2

    def part(number: int) -> str | None:
        torch.set_rng_state(states[number])
        found = next(runs[number], None)
        states[number] = torch.get_rng_state()
        return found

    while True:
        mine, other = part(0), part(1)
        for name, found in (("first", mine), ("second", other)):
            if found is not None and found.startswith(REFUSED):
                return name
        if mine != other:
            return "different"
        if mine is None:
            return "equal"


def weights(model: nn.Module) -> str:
    """All parameters by name."""
    return digest(*(part for name, value in model.named_parameters() for part in (name, value)))


class Pretraining:
    """What pretraining computes from recipes over small texts."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache

    def observed(self, recipe: Any) -> Observed:
        """The parts, from cheap to expensive; the last one says so if the program refuses the recipe."""
        try:
            yield from self._observed(recipe)
        except BertkitError as error:
            yield f"{REFUSED}: {type(error).__name__}"

    def _observed(self, recipe: Any) -> Observed:
        if needs_words(recipe.data, recipe.engine):
            opened = open_text(recipe, offline=True)
            check_words(recipe.data, count_words(opened, silent_progress))
        shards = open_shards(recipe, cache=self.cache, offline=True, progress=silent_progress)
        tokenizer = load_tokenizer(shards.directory)
        count = int(shards.segment_start_S1[-1])
        yield digest(tokenizer.fingerprint, shards.tokens_between(0, count), shards.segment_start_S1)
        kind = DistillTextArguments if isinstance(recipe, DistillTextRecipe) else PretrainArguments
        arguments = kind(cache=self.cache, offline=True)
        trainer = arguments.trainer(recipe, shards, RunDirectory(self.cache / "none", {}))
        check_epochs(recipe.data.max_epochs, recipe.optimisation, trainer.stages)
        steps = trainer.steps
        yield digest([stage.stage.learning_rate(step) for stage in trainer.stages for step in _steps_of(stage)])
        yield digest([stage.batches.stream.epoch_length(0) for stage in trainer.stages])
        reads_types = recipe.model.reads_token_types
        for stage in trainer.stages:
            own = range(stage.stage.end_step - stage.stage.first_step)
            for step in {*own[:4], *own[:: len(own) // 5], own[-1]}:
                yield _samples(stage.batches.samples(step), reads_types)
        yield weights(trainer.model)
        torch.manual_seed(recipe.seed)
        trainer.start_average()
        for stage in trainer.stages:
            trainer.step, trainer.current = stage.stage.first_step, stage
            trainer._enter(stage)
            last: Sequence[PackedBatch] = ()
            for number in range(UPDATES):
                last = stage.batches[number]
                yield _update(trainer, last)
        yield weights(trainer.model)
        trainer.take_average()
        yield weights(trainer.model)
        yield from _for_tasks(trainer.model)
        yield _given_up_after(trainer, last)
        yield digest(steps, recipe.model.max_tokens)
        # A rare choice, such as that of a random token, may be in none of those batches.
        for stage in trainer.stages:
            for step in range(4, min(MORE_BATCHES, stage.stage.end_step - stage.stage.first_step)):
                yield _samples(stage.batches.samples(step), reads_types)


def _steps_of(stage: Any) -> range:
    return range(stage.stage.first_step, stage.stage.end_step)


def _samples(samples: Any, reads_types: bool) -> str:
    """The parts of a batch that models and losses read."""
    parts = [samples.ids_T, samples.cu_seqlens_B1, *([samples.token_types_T] if reads_types else [])]
    more = (samples.causal_B, samples.ranks_T2, samples.decoder_start_B)
    parts += [each for each in more if each is not None]
    if samples.lanes is not None:
        lanes = samples.lanes
        parts += [lanes.number_B, lanes.reversed_B, lanes.following_B, [lanes.reused_tokens]]
    for name, targets in sorted(samples.targets.items()):
        parts += [name, targets.index_M, targets.id_M, *targets.places.values(), *targets.columns.values()]
    return digest(*parts, *(part for pair in sorted(samples.labels.items()) for part in pair))


def _update(trainer: Trainer[Any], batches: Sequence[Any]) -> str:
    """One update: its losses, counts and gradient."""
    outcome = trainer.take_step(batches)
    totals = {name: [total.sum, total.count, total.correct] for name, total in outcome.terms.items()}
    return digest({name: list(map(float, total)) for name, total in totals.items()}, outcome.gradient_norm)


def _given_up_after(trainer: Trainer[Any], batches: Sequence[Any]) -> str:
    """How many updates in a row may fail, tested with non-finite weights."""
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.fill_(torch.nan)
    for number in range(50):
        try:
            trainer.take_step(batches)
        except DivergedError:
            return f"given up after {number}"
    return "never given up"


def _for_tasks(model: HeadedModel) -> Observed:
    """The heads that a task adds to the finished model, in training: structure, weights, dropout, activation."""
    config = model.encoder.config
    plans = config.all_heads()
    for name in ("masked_lm", "causal_lm", *_TASKS):
        if name in plans:
            plan = plans[name]
            yield digest(plan.architecture, plan.pooled, plan.summary, plan.decoder, sorted(plan.hub_names.items()))
    ids = torch.arange(40).remainder(7).add(5)
    ids[5] = getattr(config, "sep_token_id", None) or 2
    batch = PackedBatch.from_ids([ids[:9].tolist(), ids[9:20].tolist()])
    for name in _TASKS:
        if name not in plans:
            continue
        encoder = copy.deepcopy(model.encoder)
        ready = HeadedModel(encoder, [name], labels=Labels(("a", "b"), "single_label_classification"))
        ready.initialise(1)
        torch.manual_seed(0)
        own = encoder.with_global_tokens(batch, [name])
        hidden_TD = ready.train().encoder(own)
        logits = ready.token_logits(name, hidden_TD) if name in _TASKS[1:3] else ready.logits(name, hidden_TD, own)
        yield digest(logits)


@cache
def write_texts(directory: Path) -> dict[str, Path]:
    """Small texts of several formats and languages, in which the settings of tokenizers and readers have an effect."""
    generator = np.random.default_rng(0)
    nouns = (
        "Cat",
        "letters",
        "functions",
        "tensor",
        "matrix",
        "paper",
        "numbers",
        "café",
        "Zürich",
        "naïveté",
        "New York",
    )
    verbs = ("reads", "returned", "writing", "holds", "keeps", "finding")
    rare = ("ß", "λ", "Ω", "ж", "ø")

    def sentence() -> str:
        words = ["The", generator.choice(nouns), generator.choice(verbs), "a", generator.choice(nouns)]
        if generator.random() < 0.1:
            words.append(generator.choice(rare))
        return " ".join(map(str, words)) + "."

    def document() -> list[str]:
        return [
            f"{sentence()} {sentence()}" if generator.random() < 0.3 else sentence()
            for _ in range(generator.integers(3, 12))
        ]

    documents = [document() for _ in range(40)]
    text = "\n\n".join(
        "\n".join([*([f" = Title {number} = "] if number % 5 == 0 else []), *own])
        for number, own in enumerate(documents)
    )
    files = {name: directory / name for name in ("en.txt", "de.txt", "records.jsonl", "lexicon.txt")}
    files["en.txt"].write_text(text + "\n", encoding="utf-8")
    small = [document() for _ in range(12)]
    files["de.txt"].write_text(
        "\n\n".join("\n".join(own).replace("The", "Das") for own in small) + "\n", encoding="utf-8"
    )
    records = []
    for own in documents[:30]:
        line = " ".join(own)
        places = [[at, at + 8] for at in range(len(line)) if line.startswith("New York", at)]
        records.append({"text": line, "other": line[::-1], "spans": places, "more": places[:1]})
    files["records.jsonl"].write_text("\n".join(map(json.dumps, records)) + "\n", encoding="utf-8")
    files["lexicon.txt"].write_text("New York\npaper reads\nThe Cat\n", encoding="utf-8")
    return files

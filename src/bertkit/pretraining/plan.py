"""The cost of a pretraining run, stage by stage: the parts of `--plan` (training/plan.py).

Not from a paper.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from bertkit.data.layouts import LaneLayout
from bertkit.data.samples import Vocabulary
from bertkit.data.shards import TokenShards
from bertkit.data.stored_shards import shards_directory
from bertkit.errors import DataError
from bertkit.models.conversion.pruning import prune_heads
from bertkit.models.headed import HeadedModel
from bertkit.models.heads import HEAD_KINDS
from bertkit.objectives.base import Objective
from bertkit.objectives.forward import pretraining_model
from bertkit.pretraining.arguments import with_steps
from bertkit.pretraining.initial_model import initial_pruned_heads
from bertkit.pretraining.recipe import Recipe
from bertkit.pretraining.stages import Stage, multi_rank_obstacle, stages_of
from bertkit.recipe.hashing import name_and_hash
from bertkit.stores.url import is_url
from bertkit.text.added_tokens import extended
from bertkit.text.lines import COMPRESSIONS, ending, read_lines
from bertkit.text.sources import local_files, open_corpus
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.text.vocabulary import train_tokenizer
from bertkit.training.batch_ramp import updates_for
from bertkit.training.compiled_kernels import uses_attention_kernel
from bertkit.training.cost import (
    CHECKPOINT_BYTES,
    count_parameters,
    expected_unread_flops,
    head_rows,
    other_direction_flops,
    step_flops,
)
from bertkit.training.engine import Engine, resolve_engine
from bertkit.training.memory import MemoryTerms, training_memory
from bertkit.training.placement import multi_rank_error
from bertkit.training.plan import PlannedCost, PlannedTeacher, PlannedVocabulary, plan_document, planned_rate

log = logging.getLogger(__name__)

_BYTES_OF_A_TOKEN = 4.5
"""For English text, if the tokenizer is not there yet."""
_COUNTED_BYTES = 1_000_000
"""Size of the beginning of the text whose tokens are counted."""
_SAMPLED_LINES = 1000
"""Lines of a JSON Lines file, of which the share of text is measured."""
_COMPRESSED_RATIO = 3.0
"""Bytes of text per byte of its compressed file."""
SAMPLED_MEGABYTES = 8.0
"""Maximum size of text on which a plan trains a vocabulary."""


def pretraining_plan(
    recipe: Recipe, *, vocab_size: int | None = None, teacher: PlannedTeacher | None = None, offline: bool = False
) -> dict[str, Any]:
    """Parameters, steps, tokens, FLOPs, memory, disk and time; sequences are taken at their full length.

    A run limited by time has as many steps as this machine makes in that time.

    Args:
        recipe: resolved.
        vocab_size: V if known; otherwise that of `planned_vocabulary`.
        teacher: the teacher next to the model, if there is one.
        offline: do not use the network.

    Raises:
        UsageError: several ranks are to train what they cannot, or token shards are combined with other text.
        DataError: the tokenizer cannot be used.
    """
    text_bytes, tokenizer, files = 0.0, None, _text_files(recipe)
    if vocab_size is None:
        vocabulary, text_bytes, tokenizer = _planned_vocabulary(recipe, files, offline=offline)
    else:
        vocabulary = PlannedVocabulary(vocab_size)
    text_tokens = _text_tokens(recipe, files, tokenizer, offline=offline)
    recipe, steps_estimated = _with_planned_steps(recipe, text_tokens)
    engine = resolve_engine(recipe.engine)
    stages = stages_of(recipe)
    if recipe.engine.ranks > 1 and (reason := multi_rank_obstacle(stages)) is not None:
        raise multi_rank_error(recipe.engine.ranks, reason)
    objectives = [objective for stage in stages for objective in stage.recipe.objectives]
    with torch.device("meta"):
        model = pretraining_model(recipe.model, objectives, vocabulary.size)
        if not recipe.init_tiling and (pruned := initial_pruned_heads(recipe.init, offline=offline)):
            prune_heads(model, pruned)
    parameters = count_parameters(model)
    optimizer_flops = recipe.optimisation.optimizer.update_flops(model)
    memory: MemoryTerms = {}
    stretches: list[_Stretch] = []
    for stage in stages:
        for stretch, terms in _stretches_of(stage, model, recipe, engine):
            stretches.append(stretch)
            memory = max(memory, terms, key=lambda each: sum(each.values()))
    whole = stretches
    if (hours := recipe.optimisation.schedule.hours) is not None:
        beside = 0.0 if teacher is None else teacher.flops / _flops(whole)
        stretches = _within(whole, hours * 3600 * planned_rate(engine) / (1 + beside), optimizer_flops)
        teacher = None if teacher is None else replace(teacher, flops=beside * _flops(stretches))
    steps = sum(each.steps for each in stretches)
    kept, models = engine.intervals.most_checkpoints(steps), 1 + len(recipe.engine.models_at_words)
    tokens = sum(each.steps * each.step_tokens for each in stretches)
    cost = PlannedCost(
        parameters=parameters,
        steps=steps,
        tokens=tokens,
        flops=_flops(stretches),
        memory={
            **memory,
            "average": parameters.total * 2.0 * recipe.optimisation.average_bytes,
            "initial_model": 4.0 * parameters.total if recipe.init is not None else 0.0,
        },
        disk_bytes=parameters.total * ((CHECKPOINT_BYTES + recipe.optimisation.average_bytes) * kept + 4 * models),
        text_bytes=text_bytes,
        optimizer_flops=steps * optimizer_flops,
    )
    document = name_and_hash(recipe) | plan_document(engine, cost, vocabulary=vocabulary, teacher=teacher)
    if text_tokens:
        document["text_passes"] = tokens / text_tokens
        _warn_of_passes(recipe, steps, tokens / text_tokens)
    return document | ({"steps_estimated": True} if steps_estimated else {})


def _stretches_of(
    stage: Stage, model: HeadedModel, recipe: Recipe, engine: Engine
) -> Iterator[tuple[_Stretch, MemoryTerms]]:
    """The stretches of steps with the same batch size, and the memory of an update in each."""
    text_length = stage.recipe.data.sequence_length
    length = max(each.sample_tokens(text_length) for each in stage.recipe.objectives)
    for first, end, sequences in stage.batch_sizes.ranges(stage.first_step, stage.end_step):
        mean_count = partial(_mean_count, stage=stage, first=first, end=end)
        predictions = head_rows(stage.recipe.objectives, mean_count, length, vocab_size=model.encoder.vocab_size)
        in_all = sum(count for head, count in predictions.items() if HEAD_KINDS[head] == "vocabulary")
        step = step_flops(
            model,
            tokens=sequences * length,
            squared_lengths=sequences * length**2,
            predictions={head: sequences * count for head, count in predictions.items()},
            sequences=sequences,
        )
        step -= sequences * expected_unread_flops(model, stage.recipe.objectives, length, mean_count)
        if isinstance(stage.recipe.data.layout, LaneLayout):
            step -= other_direction_flops(model, sequences * length)
        micro_batch = min(engine.micro_batch_tokens, sequences * length)
        terms = training_memory(
            model,
            micro_batch_tokens=micro_batch,
            sequence_length=length,
            predictions=in_all * micro_batch / length,
            bf16=engine.bf16,
            recomputed=engine.activation_checkpointing,
            device=engine.device,
            kernels=uses_attention_kernel(recipe.engine, engine),
            state_bytes=recipe.optimisation.optimizer.state_bytes,
        )
        yield _Stretch(end - first, sequences * text_length, step), terms


def _with_planned_steps(recipe: Recipe, text_tokens: float | None) -> tuple[Recipe, bool]:
    """The recipe with the steps that its passes will make, and whether they are estimated from the size of the text.
    They are for files and shards; for any other text, `steps` is used, which is their upper limit."""
    optimisation = recipe.optimisation
    if optimisation.passes is None:
        return recipe, False
    if text_tokens is None:
        return recipe, True
    sequences = text_tokens * optimisation.passes * (1 - recipe.data.held_out) / recipe.data.sequence_length
    return with_steps(recipe, updates_for(sequences, optimisation.batch_sequences, optimisation.batch_ramp)), True


def _text_files(recipe: Recipe) -> list[Path]:
    """The files of the text; none for token shards, several languages, or text that is not all on this machine. A text
    that is not there is reported, because a recipe can be planned without it.

    Raises:
        UsageError: a directory contains token shards, or is a run.
    """
    sources = recipe.data.all_sources
    if recipe.data.is_tokenised or any(each.startswith(("hub:", "builtin:")) or is_url(each) for each in sources):
        return []
    try:
        files = {file.resolve(): file for source in sources for file in local_files(source)}
    except DataError as error:
        log.warning("%s; the plan is made without the text", error)
        return []
    return [] if recipe.data.languages else list(files.values())


def _text_tokens(recipe: Recipe, files: Sequence[Path], tokenizer: Tokenizer | None, *, offline: bool) -> float | None:
    """Tokens of the text: counted for shards and short texts, estimated from the size of other files; None for any
    other text."""
    if recipe.data.is_tokenised:
        return float(TokenShards.open(shards_directory(recipe.data.sources[0], offline=offline)).tokens)
    if not files:
        return None
    records = next((file for file in files if ending(file) == ".jsonl"), None)
    text_share = 1.0 if records is None else _text_share(records, recipe, offline=offline)
    size = 0.0
    for file in files:
        ratio = _COMPRESSED_RATIO if file.suffix in COMPRESSIONS else 1.0
        size += ratio * file.stat().st_size * (text_share if ending(file) == ".jsonl" else 1.0)
    if tokenizer is None:
        return size / _BYTES_OF_A_TOKEN
    read, tokens = 0, 0
    for document in open_corpus(recipe.data.sources, recipe.data.reading, offline=offline).documents():
        read += _bytes(document)
        tokens += len(tokenizer.encode_plain(document)[0]) + 1  # most layouts have a separator between documents
        if read >= _COUNTED_BYTES:
            return size * tokens / read
    return float(tokens) if tokens else None


def _text_share(records: Path, recipe: Recipe, *, offline: bool) -> float:
    """The share of a JSON Lines file that is text: its first lines' documents, divided by these lines."""
    lines = next(read_lines(records, recipe.data.reading.encoding), [])[:_SAMPLED_LINES]
    documents = open_corpus([str(records)], recipe.data.reading, offline=offline).documents()
    text = sum(_bytes(document) for document in islice(documents, len(lines)))
    return min(1.0, text / max(1, _bytes(lines)))


def _bytes(lines: Sequence[str]) -> int:
    return sum(len(line.encode("utf-8", "surrogatepass")) + 1 for line in lines)


def _warn_of_passes(recipe: Recipe, steps: int, passes: float) -> None:
    """Warn of a run that would be refused because it reads its text too often."""
    limit = recipe.data.max_epochs
    if limit is not None and passes > limit:
        log.warning(
            "%s steps would read the text about %.2f times, but data.max_epochs allows only %g: the run would be"
            " refused; give --max-steps %d or less, or more text",
            *(f"{steps:,}", passes, limit, max(1, int(steps * limit / passes))),
        )


def _planned_vocabulary(
    recipe: Recipe, files: Sequence[Path], *, offline: bool
) -> tuple[PlannedVocabulary, float, Tokenizer | None]:
    """The size of the model's vocabulary, the bytes of text that it is trained on (0 if it is not trained), and the
    tokenizer, unless it is still to be trained or belongs to token shards.

    The size is known if the tokenizer is given, or if the text is token shards. A vocabulary that is to be trained or
    extended on at most `SAMPLED_MEGABYTES` of files is trained or extended here, which takes a few seconds. For any
    other, the requested size is assumed and marked: a text that is too small for it yields fewer entries, and a smaller
    model.

    Raises:
        DataError: the given tokenizer is not found, or lacks a special token that every run needs; or the text has
            fewer words to add.
    """
    tokenizer, data = recipe.tokenizer, recipe.data
    if data.is_tokenised:
        shards = TokenShards.open(shards_directory(data.sources[0], offline=offline))
        return PlannedVocabulary(shards.vocab_size), 0.0, None
    size = min(sum(file.stat().st_size for file in files), tokenizer.sample_megabytes * 1e6)
    is_small = bool(files) and size <= SAMPLED_MEGABYTES * 1e6
    text = partial(_sample, recipe, offline=offline)
    if tokenizer.path is not None:
        given = load_tokenizer(tokenizer.path, offline=offline)
        if tokenizer.add_tokens and is_small:
            extended(given, text(), tokenizer.add_tokens, min_frequency=tokenizer.added_frequency)
        return PlannedVocabulary(Vocabulary.of(given).size + tokenizer.add_tokens), 0.0, given
    if not is_small:
        return PlannedVocabulary(tokenizer.vocab_size, at_most=True), size, None
    trained = train_tokenizer(tokenizer, text())
    return PlannedVocabulary(trained.vocab_size), size, trained


def _sample(recipe: Recipe, *, offline: bool) -> Iterator[str]:
    """The text that the run would train its vocabulary on."""
    corpus = open_corpus(recipe.data.sources, recipe.data.reading, offline=offline)
    yield from corpus.sample_text(recipe.tokenizer.sample_megabytes)


@dataclass(frozen=True)
class _Stretch:
    """Consecutive updates that cost the same."""

    steps: int
    step_tokens: int
    step_flops: float


def _flops(stretches: Sequence[_Stretch]) -> float:
    total = 0.0
    for each in stretches:
        total += each.steps * each.step_flops
    return total


def _within(stretches: Sequence[_Stretch], flops: float, optimizer_flops: float) -> list[_Stretch]:
    """The first updates that fit into this many operations, including the optimiser's; at least one."""
    found: list[_Stretch] = []
    for each in stretches:
        update = each.step_flops + optimizer_flops
        fitting = min(each.steps, int(flops / update + 1e-6))
        found.append(replace(each, steps=max(fitting, 0 if found else 1)))
        flops -= fitting * update
        if fitting < each.steps:
            break
    return found


def _mean_count(objective: Objective, stage: Stage, first: int, end: int) -> float:
    """An objective's predictions per sequence, averaged over some updates of the stage."""
    data, steps = stage.recipe.data, stage.run_steps
    count = objective.mean_expected_count(data.sequence_length, first / steps, end / steps)
    return count * objective.share_of_sequences(data)

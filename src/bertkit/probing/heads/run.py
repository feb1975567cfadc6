"""`probe heads`: the importance of every attention head for a task or a text.

Michel et al. 2019, arXiv:1905.10650; gates and importance are in compression/head_importance.py, losses and scores in
measure.py. Importance and scores use different examples: for a task, its train and dev splits; for a text, different
sentences.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.compression.head_importance import (
    Heads,
    Measure,
    ablate_all_but_one,
    ablate_each_head,
    gated_score,
    head_importance,
    least_important_first,
    normalised_by_layer,
    pruned_counts,
    pruning_curve,
)
from bertkit.data.random import Draw
from bertkit.errors import DataError, UsageError
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.evaluation.own_head import head_use
from bertkit.finetuning.data import fewer, load_examples, watched_splits
from bertkit.finetuning.recipe import FinetuneRecipe, resolved
from bertkit.finetuning.warm_start import recipe_of
from bertkit.inference.predict import Predictor
from bertkit.models.conversion.pruning import head_numbers
from bertkit.models.files.model_files import CONFIG_FILE, MODULES_FILE, encoder_directory
from bertkit.models.scoring.rules import QueryStream, check_distribution, choose_rule
from bertkit.models.sentence import load_sentence_model
from bertkit.probing.heads import HeadsSettings
from bertkit.probing.heads.measure import HalfRetrieval, TaskScore, WordLoss
from bertkit.probing.heads.report import DEFINITIONS, HeadResults, heads_report
from bertkit.probing.report import Report
from bertkit.probing.run import ProbeArguments, ProbeResult, left_out, run_probe
from bertkit.probing.sentences import EncodedSentence, TextEncoder
from bertkit.tasks.catalogue import TaskSpec, find_task
from bertkit.tasks.examples import Split
from bertkit.visible import shell_word


@dataclass(frozen=True)
class ScoredModel:
    """A model and what its heads are scored on.

    Attributes:
        subject: the model.
        train, test: measures on the examples for importance, and on those for scores.
        what: description for titles.
        data: hashes of all data read.
        summary: entries to add to the summary.
    """

    subject: LoadedModel
    train: Measure
    test: Measure
    what: str
    data: Mapping[str, str]
    summary: Mapping[str, Any]


def probe_heads(request: ProbeArguments, settings: HeadsSettings) -> ProbeResult:
    """Measure and write a run.

    Raises:
        UsageError: neither a text nor a task, or both; several models.
        DataError: unreadable data or model, or a model without attention heads or a prediction head.
    """
    if settings.task is not None and request.data:
        raise UsageError("--task and --data: a task has its own examples (--data-dir); give one of the two")
    subject = request.subject()
    heads = Heads.of(subject.model)
    if settings.task is None and request.data:
        # A sentence embedder has no head that predicts words.
        is_embedder = not subject.model.head_names and (subject.directory / MODULES_FILE).is_file()
        scored = (_halves if is_embedder else _words)(request, settings, subject)
    else:
        scored = _task(request, settings, subject)

    def measure() -> Report:
        summary, findings = heads_report(measure_heads(request, settings, scored, heads))
        return Report({**summary, **scored.summary}, DEFINITIONS, findings)

    return run_probe(request, settings, [scored.subject], measure, data=scored.data)


def measure_heads(request: ProbeArguments, settings: HeadsSettings, scored: ScoredModel, heads: Heads) -> HeadResults:
    """Importance, ablations and pruning curves.

    Raises:
        DataError: the score with all heads is undefined.
    """
    train, test = scored.train, scored.test
    size = heads.shape[0] * heads.per_layer
    counts = pruned_counts(size, settings.prune_share)
    before = gated_score(test, heads, heads.all_on())
    if np.isnan(before):
        raise DataError(
            f"{scored.subject.name}: its {test.metric} on {test.examples:,} examples is undefined, for example because"
            " all predictions are the same, so heads cannot be compared"
        )
    with request.progress("importance", train.examples, "examples") as meter:
        importance_LN = head_importance(train, heads, done=meter.update)
    normalised_LN = normalised_by_layer(importance_LN)
    ranked_LN = normalised_LN if settings.normalise == "layer" else importance_LN
    with request.progress("ablation", size, "heads") as meter:
        without_LN = ablate_each_head(test, heads, done=meter.update)
    with request.progress("one head left", size, "heads") as meter:
        alone_LN = ablate_all_but_one(test, heads, done=meter.update)
    draw = Draw(settings.seed, settings.kind)
    orders = {
        "importance": least_important_first(ranked_LN),
        "oracle": least_important_first(test.loss_of_score(before, without_LN)),
        **{
            f"random_{number}": draw.permuted("order", np.arange(size), size=size, epoch=number)
            for number in range(1, settings.random_orders + 1)
        },
    }
    curves: dict[str, Sequence[float]] = {}
    with request.progress("pruning", len(orders), "orders") as meter:
        for name, order_A in orders.items():
            curves[name] = pruning_curve(test, heads, order_A, counts)
            meter.update(len(curves))
    return HeadResults(
        label=scored.subject.label,
        what=scored.what,
        metric=test.metric,
        higher_is_better=test.higher_is_better,
        examples=(train.examples, test.examples),
        before=before,
        importance_LN=importance_LN,
        normalised_LN=normalised_LN,
        ranked_LN=ranked_LN,
        worse_without_LN=test.loss_of_score(before, without_LN),
        worse_alone_LN=test.loss_of_score(before, alone_LN),
        numbers=head_numbers(scored.subject.model.encoder, layers=heads.shape[0], heads=heads.per_layer),
        counts=counts,
        curves=curves,
    )


def _words(request: ProbeArguments, settings: HeadsSettings, subject: LoadedModel) -> ScoredModel:
    """Score on words of a text."""
    rule = choose_rule(subject.model, source=subject.name)
    check_distribution(rule, source=subject.name)
    if rule is QueryStream:
        raise DataError(
            f"{subject.name}: the heads of its two streams cannot be scored separately; use a model without a query"
            " stream, or fine-tune this one on a task"
        )
    parts = _two_parts(request, settings, subject)
    engine = request.engine()
    train, test = (
        WordLoss(
            subject.model,
            sentences,
            rule(subject.tokenizer),
            engine,
            masking_rate=settings.mask_rate,
            seed=settings.seed,
        )
        for sentences in (parts.train, parts.test)
    )
    words = "hidden words" if rule.head == "masked_lm" and not rule.causal else "next words"
    summary = {"predicted_tokens": test.predicted, "left_out": parts.left_out}
    return ScoredModel(subject, train, test, f"{words} of text", parts.hashes, summary)


def _halves(request: ProbeArguments, settings: HeadsSettings, subject: LoadedModel) -> ScoredModel:
    """Score a sentence embedder on retrieving sentences by halves."""
    parts = _two_parts(request, settings, subject)
    sentence_model = load_sentence_model(subject.directory)
    engine = request.engine()
    train, test = (HalfRetrieval(sentence_model, sentences, engine) for sentences in (parts.train, parts.test))
    short = {"sentences of fewer than 8 words (left out)": {"count": train.too_short + test.too_short}}
    own = replace(subject, model=sentence_model.model)
    summary = {"left_out": parts.left_out | short}
    return ScoredModel(own, train, test, "finding a sentence's other half", parts.hashes, summary)


@dataclass(frozen=True)
class _Parts:
    """A text's sentences for importance and for scores, hashes of the sources, and what was left out."""

    train: list[EncodedSentence]
    test: list[EncodedSentence]
    hashes: Mapping[str, str]
    left_out: dict[str, Any]


def _two_parts(request: ProbeArguments, settings: HeadsSettings, subject: LoadedModel) -> _Parts:
    """The drawn sentences: some for scores, the others for importance."""
    texts = request.texts(most=settings.sentences + settings.score_sentences, seed=settings.seed, unique=True)
    encoder = TextEncoder.of(subject.model, subject.tokenizer)
    sentences = list(encoder.encode(texts.sentences))
    if len(sentences) < 2:
        raise DataError(
            f"{', '.join(request.data)}: contains {len(sentences)} sentence(s) that the model can read; two are needed"
        )
    count = len(sentences)
    order = Draw(settings.seed, settings.kind).permuted("halves", np.arange(count), size=count).tolist()
    # A short text is divided in the ratio of the two settings.
    share = settings.score_sentences / (settings.sentences + settings.score_sentences)
    cut = min(settings.score_sentences, max(1, min(len(sentences) - 1, round(share * len(sentences)))))
    test, train = ([sentences[number] for number in sorted(part)] for part in (order[:cut], order[cut:]))
    return _Parts(train, test, texts.hashes, left_out(encoder.notes))


def _task(request: ProbeArguments, settings: HeadsSettings, subject: LoadedModel) -> ScoredModel:
    """Score on the task that the model was fine-tuned on."""
    name = subject.name
    directory = encoder_directory(subject.directory)
    recipe, spec = _recipe(settings.task, directory, request.data_dir, name)
    watched = watched_splits(spec)[0]
    train, dev = (load_examples(recipe, split, offline=request.offline) for split in ("train", watched))
    for_importance = fewer(train, settings.sentences, settings.seed)
    for_scores = fewer(dev, settings.score_sentences, settings.seed)
    published = spec if isinstance(recipe.task, str) else None
    predictor = Predictor.load(
        name, request.engine(), spec=published, examples=for_importance.examples, offline=request.offline
    )
    tuned = predictor.tuned(predictor(for_scores.examples), for_scores.examples)
    importance, scores = (
        TaskScore(
            predictor.model,
            predictor.task,
            predictor.encoder,
            split.examples,
            predictor.engine,
            metric=spec.primary,
            tuned=tuned,
        )
        for split in (for_importance, for_scores)
    )
    summary = {"task": spec.name, "split": watched, "examples_cut": importance.cut + scores.cut}
    own = replace(subject, model=predictor.model)
    return ScoredModel(own, importance, scores, spec.name, _hashes({"train": train, watched: dev}), summary)


def _recipe(task: str | None, directory: Path, data_dir: Path | None, name: str) -> tuple[FinetuneRecipe, TaskSpec]:
    """The recipe for reading the examples of the model's task.

    Raises:
        UsageError: no task is given, and the model's run names none; or the model is a checkpoint.
        DataError: the model has no head of this task.
    """
    if task is None:
        recipe = recipe_of(directory)
        if recipe is None or len(recipe.specs) > 1:
            raise UsageError(
                f"nothing to score the heads of {name} on. Give --data SOURCE (text whose words it predicts), or --task"
                " TASK (the task it was fine-tuned on)"
            )
        if data_dir is not None:
            recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"directory": str(data_dir)})})
        return recipe, recipe.spec
    spec = find_task(task)
    if not (directory / CONFIG_FILE).is_file():
        raise UsageError(
            f"--task {spec.name}: {name} is a checkpoint, which does not name its head; give its run, or --data SOURCE"
        )
    if (use := head_use(directory, spec, "auto", name=name)) != "own":
        has = "no task head" if use == "none" else f"a head that is not one of {spec.name}"
        remedy = f"`bertkit finetune --task {spec.name} --model {shell_word(name)}` makes one"
        raise DataError(f"{name}: has {has}; {remedy}")
    recipe = resolved(FinetuneRecipe(name=spec.name, task=spec.name, model=name))
    data = recipe.data.model_copy(update={"directory": None if data_dir is None else str(data_dir)})
    return recipe.model_copy(update={"data": data}), spec


def _hashes(splits: Mapping[str, Split]) -> dict[str, str]:
    """sha256 (hex) of the examples of each split, by their source, and by the split if they have one source."""
    sources = [split.source for split in splits.values()]
    found = {}
    for name, split in splits.items():
        digest = hashlib.sha256("\n".join(map(repr, split.examples)).encode("utf-8", "backslashreplace"))
        shared = split.source and sources.count(split.source) > 1
        shown = f"{split.source} ({name})" if shared else split.source or name
        found[shown] = digest.hexdigest()
    return found

"""`probe heads`: a task or a text to the worth of every attention head, as tables, heat maps and pruning curves.

Michel et al. 2019, arXiv:1905.10650; gates and importance are in probes/heads.py, what is asked in
probes/head_measures.py. Importance and scores come from different examples: of a task, its train and dev splits; of a
text, different sentences.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from bertkit.compression.head_importance import (
    Heads,
    Measure,
    each_alone_in_its_layer,
    gated_score,
    head_importance,
    least_first,
    normalised_by_layer,
    pruned_counts,
    pruning_curve,
    without_each,
)
from bertkit.data.random import Draw
from bertkit.errors import DataError, UsageError
from bertkit.evaluation.loaded_model import ProbedModel
from bertkit.evaluation.own_head import head_use
from bertkit.finetuning.data import fewer, load_examples, watched_splits
from bertkit.finetuning.recipe import FinetuneRecipe, resolved
from bertkit.finetuning.warm_start import recipe_of
from bertkit.inference.predict import Predictor
from bertkit.models.model_files import MODULES_FILE, encoder_directory, find_model
from bertkit.models.pseudo_likelihood import choose_rule
from bertkit.models.sentence import load_sentence_model
from bertkit.probing.heads.measure import HalvesFound, TaskAnswers, WordsOfText
from bertkit.probing.heads.report import HeadFigures, report
from bertkit.probing.run import Analysis, Probed, ProbeRequest, carry_out, left_out
from bertkit.probing.sentences import EncodedSentence, TextEncoder
from bertkit.settings import Settings
from bertkit.tasks.catalogue import TaskSpec, find_task
from bertkit.tasks.examples import Split

KIND = "heads"


class HeadsSettings(Settings):
    """What decides the result, beside model and data."""

    task: str | None = Field(
        None, description="The task that the model was fine-tuned on; null: words of the text, or the run's own task."
    )
    sentences: int = Field(1000, ge=1, description="Sentences, or training examples, that importance is the mean of.")
    score_sentences: int = Field(200, ge=1, description="Other sentences, or dev examples, that scores are of.")
    normalise: Literal["layer", "none"] = Field(
        "layer",
        description="layer: importance is divided by its L2 norm over the heads of a layer before it is ranked.",
    )
    prune_share: float = Field(0.1, gt=0, le=1, description="Share of all heads that a step of pruning removes.")
    random_orders: int = Field(3, ge=0, description="Random orders of pruning, as a baseline.")
    mask_rate: float = Field(0.15, gt=0, lt=1, description="Share of a sentence's tokens that is masked (text only).")
    seed: int = Field(0, ge=0, description="Of all choices.")


DEFINITIONS = {
    "importance": "I_h = mean over examples x of |dL(x)/dxi_h| at xi = 1, xi_h a factor of head h's output (Michel et"
    " al. 2019, section 4.1); the absolute value is each example's own, so that the batch's size changes nothing",
    "importance_normalised": "I_h divided by the L2 norm of its layer's; the ranking is of these unless"
    " settings.normalise is none",
    "gate": "a factor of a head's output (blocks.N.attn.hook_z) before the output projection; 0 is the same as zeros in"
    " the head's columns of that projection, whose bias stays",
    "finding_halves": "of a sentence embedder: the mean reciprocal rank, by cosine, of a sentence's second half among"
    " those of all sentences, asked for by the first; gates are on the first; L(x) is the cross-entropy of 20 x"
    " cosine",
    "words_of_text": "of a pretrained model: a share of a sentence's tokens masked at once (settings.mask_rate), or of"
    " a causal one every next token; L(x) is the sum over the sentence's, the score the mean over all",
    "ablation": "the score with one head's gate at 0, for every head alone (section 3.2)",
    "one_head_left": "the score with all heads of one layer at 0 but this one, the other layers untouched (section"
    " 3.3); a layer's best head is chosen on the examples that it is scored on, so its figure is an upper bound",
    "worse_by": "the score before, minus the score after where higher is better, else the other way round: above 0 the"
    " head is missed",
    "pruning": "heads removed for good in steps, lowest first, in one order that is settled before the first step"
    " (section 4.2): by importance; by the single ablations, which know the examples that are scored (oracle); at"
    " random",
}


@dataclass(frozen=True)
class Question:
    """What the heads are to be good for.

    Attributes:
        subject: the model that is asked.
        learnt, scored: on the examples of importance, and on those of scores.
        what: for titles.
        data: hash of all that is read.
        summary: what a summary says of it.
    """

    subject: ProbedModel
    learnt: Measure
    scored: Measure
    what: str
    data: Mapping[str, str]
    summary: Mapping[str, Any]


def probe_heads(request: ProbeRequest, settings: HeadsSettings, *, data_dir: Path | None = None) -> Probed:
    """Measure and write a run.

    Args:
        request: the model, and text where no task is asked for.
        settings: see there.
        data_dir: folder of a task's official files; the Hub's copy where None.

    Raises:
        UsageError: neither a text nor a task, or both; several models.
        DataError: data or model at fault, a model without heads of attention, or without the head that is asked.
    """
    if settings.task is not None and request.data:
        raise UsageError("--task and --data: a task brings its own examples (--data-dir); give one of the two")
    subject = request.subject()
    heads = Heads.of(subject.model)
    if settings.task is None and request.data:
        # A sentence embedder has no head that says a word.
        is_embedder = not subject.model.head_names and (subject.directory / MODULES_FILE).is_file()
        question = (_halves if is_embedder else _words)(request, settings, subject)
    else:
        question = _task(request, settings, subject, data_dir)

    def analyse() -> Analysis:
        figures = measure_heads(question, heads, settings, request)
        found = report(figures)
        return Analysis({**found.summary, **question.summary}, DEFINITIONS, found.findings)

    return carry_out(KIND, settings, request, [question.subject], analyse, data=question.data, seed=settings.seed)


def measure_heads(question: Question, heads: Heads, settings: HeadsSettings, request: ProbeRequest) -> HeadFigures:
    """All that is computed."""
    learnt, scored = question.learnt, question.scored
    layers, per_layer = heads.shape
    counts = pruned_counts(layers * per_layer, settings.prune_share)
    with request.progress("importance", learnt.examples, "examples") as meter:
        importance_LN = head_importance(learnt, heads, done=meter.update)
    normalised_LN = normalised_by_layer(importance_LN)
    ranked_LN = normalised_LN if settings.normalise == "layer" else importance_LN
    before = gated_score(scored, heads, heads.all_on())
    with request.progress("ablation", layers * per_layer, "heads") as meter:
        without_LN = without_each(scored, heads, done=meter.update)
    with request.progress("one head left", layers * per_layer, "heads") as meter:
        alone_LN = each_alone_in_its_layer(scored, heads, done=meter.update)
    draw = Draw(settings.seed, KIND)
    size = layers * per_layer
    orders = {
        "importance": least_first(ranked_LN),
        "oracle": least_first(scored.loss_of_score(before, without_LN)),
        **{
            f"random_{number}": draw.permuted("order", np.arange(size), size=size, epoch=number)
            for number in range(1, settings.random_orders + 1)
        },
    }
    curves: dict[str, Sequence[float]] = {}
    with request.progress("pruning", len(orders) * len(counts), "scores") as meter:
        for number, (name, order_A) in enumerate(orders.items()):
            before_it = number * len(counts)

            def done(steps: int, before_it: int = before_it) -> None:
                meter.update(before_it + steps)

            curves[name] = pruning_curve(scored, heads, order_A, counts, done=done)
    return HeadFigures(
        label=question.subject.label,
        what=question.what,
        metric=scored.metric,
        higher_is_better=scored.higher_is_better,
        examples=(learnt.examples, scored.examples),
        before=before,
        importance_LN=importance_LN,
        normalised_LN=normalised_LN,
        ranked_LN=ranked_LN,
        worse_without_LN=scored.loss_of_score(before, without_LN),
        worse_alone_LN=scored.loss_of_score(before, alone_LN),
        counts=counts,
        curves=curves,
    )


def _words(request: ProbeRequest, settings: HeadsSettings, subject: ProbedModel) -> Question:
    """Words of a text."""
    rule = choose_rule(subject.model, source=subject.name)
    parts = _two_parts(request, settings, subject)
    engine = request.engine()
    learnt, scored = (
        WordsOfText(
            subject.model,
            sentences,
            rule(subject.tokenizer),
            rate=settings.mask_rate,
            seed=settings.seed,
            max_batch_tokens=engine.micro_batch_tokens,
            device=engine.device,
        )
        for sentences in (parts.learnt, parts.scored)
    )
    asked = "hidden words" if rule.head == "masked_lm" and not rule.causal else "next words"
    summary = {"predicted_tokens": scored.predicted, "left_out": parts.left_out}
    return Question(subject, learnt, scored, f"{asked} of text", parts.hashes, summary)


def _halves(request: ProbeRequest, settings: HeadsSettings, subject: ProbedModel) -> Question:
    """Sentences that a sentence embedder finds by halves."""
    parts = _two_parts(request, settings, subject)
    sentence_model = load_sentence_model(subject.directory)
    engine = request.engine()
    learnt, scored = (
        HalvesFound(sentence_model, sentences, max_batch_tokens=engine.micro_batch_tokens, device=engine.device)
        for sentences in (parts.learnt, parts.scored)
    )
    short = {"sentences of fewer than 8 words (left out)": {"count": learnt.too_short + scored.too_short}}
    own = replace(subject, model=sentence_model.model)
    return Question(
        own, learnt, scored, "finding a sentence's other half", parts.hashes, {"left_out": parts.left_out | short}
    )


@dataclass(frozen=True)
class _Parts:
    """A text's sentences for importance, others for scores, hashes of the sources, and what was left out."""

    learnt: list[EncodedSentence]
    scored: list[EncodedSentence]
    hashes: Mapping[str, str]
    left_out: dict[str, Any]


def _two_parts(request: ProbeRequest, settings: HeadsSettings, subject: ProbedModel) -> _Parts:
    """The sentences that are drawn: some are for scores, the others for importance."""
    texts = request.texts(most=settings.sentences + settings.score_sentences, seed=settings.seed, unique=True)
    encoder = TextEncoder.of(subject.model, subject.tokenizer)
    sentences = list(encoder.encode(texts.sentences))
    if len(sentences) < 2:
        raise DataError(
            f"{', '.join(request.data)}: holds {len(sentences)} sentence that the model reads; two are needed"
        )
    order = Draw(settings.seed, KIND).permuted("halves", np.arange(len(sentences)), size=len(sentences)).tolist()
    # Where the text is short, scores have the share of it that was asked for.
    share = settings.score_sentences / (settings.sentences + settings.score_sentences)
    cut = min(settings.score_sentences, max(1, min(len(sentences) - 1, round(share * len(sentences)))))
    scored, learnt = ([sentences[number] for number in sorted(part)] for part in (order[:cut], order[cut:]))
    return _Parts(learnt, scored, texts.hashes, left_out(encoder.notes))


def _task(request: ProbeRequest, settings: HeadsSettings, subject: ProbedModel, data_dir: Path | None) -> Question:
    """The task that the model was fine-tuned on."""
    name = subject.name
    directory = encoder_directory(find_model(name, offline=request.offline))
    recipe, spec = _recipe(settings.task, directory, data_dir, name)
    watched = watched_splits(spec)[0]
    train, dev = (load_examples(recipe, split, offline=request.offline) for split in ("train", watched))
    learnt_from = fewer(train, settings.sentences, settings.seed)
    scored_on = fewer(dev, settings.score_sentences, settings.seed)
    published = spec if isinstance(recipe.task, str) else None
    predictor = Predictor.load(
        name, request.engine(), spec=published, examples=learnt_from.examples, offline=request.offline
    )
    tuned = predictor.tuned(predictor(scored_on.examples), scored_on.examples)

    def measure(split: Split) -> TaskAnswers:
        return TaskAnswers(
            predictor.model,
            predictor.task,
            predictor.encoder,
            split.examples,
            metric=spec.primary,
            tuned=tuned,
            max_batch_tokens=predictor.engine.micro_batch_tokens,
            device=predictor.engine.device,
        )

    learnt, scored = measure(learnt_from), measure(scored_on)
    summary = {"task": spec.name, "split": watched, "examples_cut": learnt.cut + scored.cut}
    own = replace(subject, model=predictor.model)
    return Question(own, learnt, scored, spec.name, {**_hash(train, "train"), **_hash(dev, watched)}, summary)


def _recipe(task: str | None, directory: Path, data_dir: Path | None, name: str) -> tuple[FinetuneRecipe, TaskSpec]:
    """Where the examples of the model's task come from.

    Raises:
        UsageError: no task is named, and the model's run does not say.
        DataError: the model has no head of this task.
    """
    if task is None:
        recipe = recipe_of(directory)
        if recipe is None or len(recipe.specs) > 1:
            raise UsageError(
                f"what are the heads of {name} to be good for? Give --data SOURCE, text whose words it is asked, or"
                " --task TASK, what it was fine-tuned on"
            )
        if data_dir is not None:
            recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"directory": str(data_dir)})})
        return recipe, recipe.spec
    spec = find_task(task)
    if (use := head_use(directory, spec, "auto", name=name)) != "own":
        has = "no head of a task" if use == "none" else f"a head that is not one of {spec.name}"
        raise DataError(f"{name}: has {has}; `bertkit finetune --task {spec.name} --model {name}` makes one")
    recipe = resolved(FinetuneRecipe(name=spec.name, task=spec.name, model=name))
    data = recipe.data.model_copy(update={"directory": None if data_dir is None else str(data_dir)})
    return recipe.model_copy(update={"data": data}), spec


def _hash(split: Split, name: str) -> dict[str, str]:
    """sha256 (hex) of a split's examples, by where they were read."""
    digest = hashlib.sha256("\n".join(map(repr, split.examples)).encode("utf-8", "backslashreplace"))
    return {split.source or name: digest.hexdigest()}

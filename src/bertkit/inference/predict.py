"""Prediction with a fine-tuned model: one prediction for each example, in order.

Not from a paper; each kind of task reads and decides as in fine-tuning (bertkit.tasks). The task is read from the
model: from its run's recipe if there is one, else from its config.json. Siblings: predict_input.py converts a user's
lines into examples, documents.py converts predictions into the printed documents.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertkit.errors import DataError, UsageError
from bertkit.files import read_json
from bertkit.finetuning.data import build_task, has_head
from bertkit.finetuning.inputs import CustomTask
from bertkit.finetuning.methods.setfit import Setfit
from bertkit.finetuning.prediction import predict
from bertkit.finetuning.recipe import FinetuneRecipe, resolved
from bertkit.finetuning.warm_start import head_directory, recipe_of
from bertkit.inference.predict_input import InputColumns
from bertkit.jobs.job import Job
from bertkit.jobs.registry import executor_of
from bertkit.jobs.settings import ExecutorSettings
from bertkit.models.encoder import EncoderConfig
from bertkit.models.files.hub import check_vocabulary, load_model, read_config
from bertkit.models.files.model_files import encoder_directory, find_model, weights_hash
from bertkit.models.headed import HeadedModel
from bertkit.models.labels import Labels
from bertkit.models.sentence import is_token_encoder
from bertkit.models.text_reading import VERSION_FILE
from bertkit.progress import Progress, silent_progress
from bertkit.tasks.base import EncodedTokenCounts, Prediction, Task
from bertkit.tasks.catalogue import HEADS, Kind, TaskSpec
from bertkit.tasks.classification import ACTIVATION_OWNER, LARGEST_SCORE, SIGMOID, has_vector_head
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.examples import Example, TaggedExample
from bertkit.tasks.readers.table import Columns
from bertkit.tasks.span import THRESHOLD, Span
from bertkit.tasks.tagging import Tagging
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.engine import Engine
from bertkit.visible import shell_word

log = logging.getLogger(__name__)

_NEW_HEAD = "give --head new to fine-tune with a new head"
_OLD_ACTIVATION = "sbert_ce_default_activation_function"
_LONGEST = 512
"""Maximum sequence length if the length used in training is unknown and the model reads more."""
FIRST_WINDOW, LARGEST_WINDOW = 64, 4096
"""Examples predicted together: few at first, so that an answer comes soon, then more, so that batches are full."""
LARGEST_CHARACTERS = 1 << 22
"""Characters per group of examples, for any number of examples: 4 million bound the memory."""
_WINDOWS_AHEAD = 2
"""Per worker: one window is computed while another waits."""


@dataclass(frozen=True)
class PredictedWindow:
    """Examples predicted together.

    Attributes:
        examples: None for a blank line.
        predictions: of the examples that are not None, in order.
        cut: how many of them were cut to the model's maximum length.
    """

    examples: list[Example | None]
    predictions: list[Prediction]
    cut: int


@dataclass(frozen=True)
class Predictor:
    """A model with the head of its task.

    Attributes:
        directory: the model's.
        kind: of its task.
        task: with the labels in the order of the model's outputs.
        model, encoder: the model, and the encoder that lays out its sequences.
        engine: device, precision and batch size.
        columns: names of the text columns in its training data, as far as known.
        recipe: of the run that made it; of the task alone if there is no run.
        outputs: computes the head's outputs: `predict`, or a function with the same signature.
        loader: reads the same model again, in another process; None if the model exists only in memory.
        warns_of_cut: whether examples that are cut are reported in the log.
    """

    directory: Path
    kind: Kind
    task: Task
    model: HeadedModel
    encoder: SequenceEncoder
    engine: Engine
    columns: InputColumns
    recipe: FinetuneRecipe
    outputs: Callable[..., list[NDArray[Any]]] = field(default=predict, kw_only=True)
    loader: Callable[[], Predictor] | None = field(default=None, kw_only=True)
    warns_of_cut: bool = field(default=True, kw_only=True)

    @classmethod
    def load(
        cls,
        name: str,
        engine: Engine,
        *,
        spec: TaskSpec | None = None,
        examples: Sequence[Example] = (),
        max_length: int | None = None,
        offline: bool = False,
    ) -> Predictor:
        """Find and read a fine-tuned model.

        Args:
            name: a Hub id, a model directory or a run directory.
            engine: where it computes.
            spec: the task whose labels the outputs must have, matched by name; None: any.
            examples: of that task, for properties that depend on them (whether a question may have no answer).
            max_length: maximum sequence length in tokens; None: as in training.
            offline: do not use the network.

        Raises:
            UsageError: the length exceeds the model's maximum.
            DataError: no model, no fine-tuned head, or labels that are not the task's.
        """
        whole = find_model(name, offline=offline)
        if is_token_encoder(whole):
            raise DataError(
                f"{name}: computes a vector for each token (ColBERT) and predicts no label; `bertkit search --rerank"
                f" {shell_word(name)}` ranks texts with it, as does late_scores(query, texts) in Python"
            )
        directory = encoder_directory(whole)
        if spec is not None:
            directory = head_directory(directory, spec.name)
        config, contents = read_config(directory)
        recipe = recipe_of(directory)
        if recipe is not None and len(recipe.specs) > 1:
            if spec is None:
                heads = ", ".join(str(directory / each.name) for each in recipe.specs)
                raise DataError(f"{name}: was trained on several tasks; name the head of one with --model: {heads}")
            recipe = None
        if recipe is None or (spec is not None and spec.name != recipe.spec.name):
            plain = _recipe_from(spec or head_kind(config, contents, name), name)
            recipe = _with_vectors(contents, _with_sigmoid(plain, contents, directory))
        found = recipe.spec
        if not has_head(config, contents, found.head) and not has_vector_head(contents):
            word = shell_word(name)
            if found.kind == "embedding":
                raise DataError(f"{name}: computes vectors, no labels; `bertkit embed --model {word}` prints them")
            raise DataError(
                f"{name}: has no head for {found.kind}; `bertkit finetune --task TASK --model {word}` makes one"
            )
        names = Labels.from_hub(contents).names if spec is None else names_in_order(contents, spec, name)
        # Without the contents of config.json, `names` keep the order of the model's outputs.
        task = build_task(recipe, examples, names, config, {}, directory)
        model, report = load_model(directory, heads=(task.head,), labels=task.labels)
        if report.newly_initialised:
            fault = "do not fit the number of labels in config.json" if report.reinitialised else "are missing"
            raise DataError(f"{name}: weights of its head {fault}: {', '.join(report.newly_initialised[:3])}")
        if isinstance(task, Span):
            task.may_be_impossible |= THRESHOLD in model.extras
        tokenizer = load_tokenizer(directory, offline=offline)
        check_vocabulary(model, tokenizer, source=name)
        if max_length is not None and max_length > config.max_tokens:
            raise UsageError(f"--max-length {max_length}: {name} reads at most {config.max_tokens} tokens; lower it")
        length = min(max_length or recipe.data.max_length or _LONGEST, config.max_tokens)
        encoder = SequenceEncoder(tokenizer, max_tokens=length, token_types=config.reads_token_types)
        return cls(
            directory,
            found.kind,
            task,
            model.to(engine.device),
            encoder,
            engine,
            columns_of(recipe),
            recipe,
            loader=partial(
                cls.load, name, engine, spec=spec, examples=examples, max_length=max_length, offline=offline
            ),
        )

    def __call__(
        self, examples: Sequence[Example], *, progress: Progress = silent_progress, label: str = "predictions"
    ) -> list[Prediction]:
        """One prediction for each example, in order; batches are limited by tokens.

        Args:
            examples: of the model's kind of task.
            progress: the display.
            label: text of the display.

        Raises:
            DataError: an example cannot be encoded, or outputs are not finite.
        """
        if not examples:
            return []
        predictions, account = self._read(examples, progress, label, with_candidates=False)
        if self.warns_of_cut:
            self._warn_of_cut(account.examples_cut, len(examples))
        return predictions

    def stream(
        self,
        examples: Iterable[Example | None],
        *,
        first: int = FIRST_WINDOW,
        largest: int = LARGEST_WINDOW,
        executor: ExecutorSettings | None = None,
    ) -> Iterator[tuple[Example | None, Prediction | None]]:
        """Each example with its prediction, in bounded memory; None stays None.

        Args:
            examples: read only as far as the next windows require.
            first, largest: sizes of the windows; a tagger that reads documents keeps sentences of one document
                together.
            executor: predicts the windows, and says how many at a time; None: this process.
        """
        cut = count = 0
        reads_documents = isinstance(self.task, Tagging) and self.task.settings.context == "document"
        joined = same_document if reads_documents else None
        windows = windows_of(examples, first, largest, joined)
        if executor is not None and executor.is_parallel:
            predicted = self._predicted_by_workers(windows, executor)
        else:
            predicted = map(self.predicted_window, windows)
        for done in predicted:
            cut, count = cut + done.cut, count + len(done.predictions)
            remaining = iter(done.predictions)
            for example in done.examples:
                yield example, None if example is None else next(remaining)
        if self.warns_of_cut:
            self._warn_of_cut(cut, count)

    def _predicted_by_workers(
        self, windows: Iterable[list[Example | None]], executor: ExecutorSettings
    ) -> Iterator[PredictedWindow]:
        """Each window with its predictions, in order; every worker reads the model once. It predicts a window in the
        same batches, so the predictions are those of one process with as many threads."""
        assert self.loader is not None, "of a model directory"
        job = partial(_predict_job, self.loader, weights_hash(self.directory))
        with executor_of(executor, fresh_process=False) as workers:
            jobs = (Job(f"window {n} of examples", partial(job, window)) for n, window in enumerate(windows))
            for done in workers.run(jobs, ordered=True, ahead=_WINDOWS_AHEAD):
                yield done.value

    def predicted_window(self, window: list[Example | None]) -> PredictedWindow:
        """The predictions of some examples, with candidates if the task has any."""
        known = [example for example in window if example is not None]
        if not known:
            return PredictedWindow(window, [], 0)
        predictions, account = self._read(known, silent_progress, "", with_candidates=True)
        return PredictedWindow(window, predictions, account.examples_cut)

    def tuned(self, predictions: Sequence[Prediction], examples: Sequence[Example]) -> dict[str, Any]:
        """Thresholds and the like, tuned on labelled examples if the model does not contain them."""
        return {} if self.stored else self.task.tune(predictions, examples)

    @property
    def stored(self) -> dict[str, Any]:
        """Values that fine-tuning tuned and stored with the model."""
        return {key: self.model.extras[key] for key in self.task.tuned_keys if key in self.model.extras}

    @property
    def reads_single_texts(self) -> bool:
        """Whether a model of texts was trained on single ones; false if it is not known."""
        task = self.recipe.task
        is_known = not isinstance(task, CustomTask) or bool(task.train)  # see `_recipe_from`
        return is_known and bool(self.columns.texts) and not self.columns.text_pairs

    @property
    def scored_labels(self) -> tuple[str, ...]:
        """The labels that each have a score in every prediction; none for other kinds of tasks."""
        return self.task.labels.names if self.kind in ("classification", "multi_label") else ()

    def _read(
        self, examples: Sequence[Example], progress: Progress, label: str, *, with_candidates: bool
    ) -> tuple[list[Prediction], EncodedTokenCounts]:
        """The predictions of one or more examples; subclasses override it."""
        features = self.task.encode(examples, self.encoder)
        outputs = self.outputs(self.model, self.task, features, self.engine, progress=progress, label=label)
        self._check_finite(outputs, examples, features.origin_I)
        found = self.task.predictions(examples, features, outputs)
        if with_candidates and isinstance(self.task, Span):
            candidates = self.task.candidates(list(examples), features, outputs)  # type: ignore[arg-type]  # questions
            found = [replace(one, candidates=own) for one, own in zip(found, candidates, strict=True)]
        return self.task.final(found, self.stored), features.account

    def _check_finite(self, outputs: Iterable[Any], examples: Sequence[Example], origin: Iterable[int]) -> None:
        """Raise DataError at the first output that is not finite; `origin` has the index of each one's example."""
        for output, number in zip(outputs, origin, strict=True):
            if not np.isfinite(output).all():
                raise DataError(
                    f"{self.directory}: its outputs are not finite numbers (NaN or infinity), first for example"
                    f" {examples[number].id}; the weights are damaged, or training diverged"
                )

    def _warn_of_cut(self, cut: int, count: int) -> None:
        if cut:
            log.warning("%d of %d examples were cut to %d tokens", cut, count, self.encoder.max_tokens)


_loaded: dict[str, Predictor] = {}
"""A worker's models by the hash of their weights; a worker serves one command."""


def _predict_job(load: Callable[[], Predictor], identity: str, window: list[Example | None]) -> PredictedWindow:
    """A window on a worker.

    Raises:
        DataError: the worker finds a different model at the same path.
    """
    if identity not in _loaded:
        predictor = load()
        if weights_hash(predictor.directory) != identity:
            raise DataError(
                f"{predictor.directory}: a worker found different weights here; all machines must read the same files"
            )
        _loaded[identity] = predictor
    return _loaded[identity].predicted_window(window)


def windows_of(
    items: Iterable[Any],
    first: int = FIRST_WINDOW,
    largest: int = LARGEST_WINDOW,
    joined: Callable[[Any, Any], bool] | None = None,
) -> Iterator[list[Any]]:
    """Lists of at most `first` items, doubling each time up to `largest`; long texts make them shorter.

    While `joined` is true of an item and the next one, a list continues, unless long texts end it.
    """
    size, window, characters = first, list[Any](), 0
    for item in items:
        together = joined is not None and bool(window) and joined(window[-1], item)
        if window and (characters > LARGEST_CHARACTERS or (len(window) >= size and not together)):
            yield window
            size, window, characters = min(2 * size, largest), [], 0
        window.append(item)
        characters += 0 if item is None else len(repr(item))
        if joined is None and (len(window) == size or characters > LARGEST_CHARACTERS):
            yield window  # at once: the next item may take long to arrive
            size, window, characters = min(2 * size, largest), [], 0
    if window:
        yield window


def same_document(before: Example | None, after: Example | None) -> bool:
    """Whether two sentences are from one document."""
    return isinstance(before, TaggedExample) and isinstance(after, TaggedExample) and before.document == after.document


def head_kind(config: EncoderConfig, contents: Mapping[str, Any], name: str) -> Kind:
    """The kind of task of a checkpoint's head.

    Raises:
        DataError: it has no task head.
    """
    if has_vector_head(contents):
        return "classification"
    heads = [head for head in dict.fromkeys(HEADS.values()) if has_head(config, contents, head)]
    if not heads:
        named = contents.get("architectures") or ["none"]
        plans = {head: plan.architecture for head, plan in config.heads().items() if plan.architecture}
        known = {"none", config.classes + config.base_class_ending, *config.joint_architectures.values()}
        strange = [each for each in named if each not in known.union(plans.values())]
        classes = [plans[head] for head in dict.fromkeys(HEADS.values()) if head in plans]
        makes = f"`bertkit finetune --task TASK --model {shell_word(name)}` makes one"
        if strange and classes:
            raise DataError(
                f"{name}: the class {strange[0]} in config.json (architectures) is not known, so neither is its task"
                f" head; if it has the weights of {' or '.join(classes)}, write that there; otherwise {makes}"
            )
        raise DataError(f"{name}: has no task head (architectures: {', '.join(named)}); {makes}")
    if heads[0] != HEADS["classification"]:
        return next(kind for kind, head in HEADS.items() if head == heads[0])
    labels = Labels.from_hub(contents)
    if labels.is_regression:
        return "regression"
    return "multi_label" if labels.problem_type == "multi_label_classification" else "classification"


def names_in_order(contents: Mapping[str, Any], spec: TaskSpec, name: str) -> tuple[str, ...]:
    """A task's labels in the order of a checkpoint's outputs, matched by name.

    A checkpoint trained on the Hub's copy of CoLA has `unacceptable` and `acceptable` where GLUE has 0 and 1; the
    task's own names are returned.

    Args:
        contents: of config.json.
        spec: the task.
        name: the model's, for messages.

    Raises:
        DataError: the outputs are not the task's labels, or have no names.
    """
    labels = Labels.from_hub(contents)
    if spec.kind == "regression" and labels.count != 1:
        raise DataError(f"{name}: its head has {labels.count} outputs, {spec.name} needs 1; {_NEW_HEAD}")
    if spec.labels is None:
        return labels.names
    official = {theirs.casefold(): ours for theirs, ours in spec.hub.names.items()} if spec.hub else {}
    here = labels.names if not labels.are_named else tuple(official.get(n.casefold(), n) for n in labels.names)
    try:
        order = Labels(here, labels.problem_type).order_of(spec.labels, source=name)
    except DataError as error:
        raise DataError(f"{error}; or {_NEW_HEAD}") from error
    by_output = dict(zip(order, spec.labels, strict=True))
    return tuple(by_output[number] for number in range(len(order)))


def columns_of(recipe: FinetuneRecipe) -> InputColumns:
    """The column names in the data of a recipe's task: the user's, GLUE's, or the Hub's."""
    if isinstance(recipe.task, CustomTask):
        own = recipe.task.columns
        own_pairs = () if own.text_pair is None else (own.text_pair,)
        texts = () if recipe.task.kind == "tagging" and own.text == Columns().text else (own.text,)
        ids = () if own.id is None else (own.id,)
        return InputColumns(texts=texts, text_pairs=own_pairs, endings=own.endings, ids=ids)
    spec = recipe.spec
    if spec.head != "sequence_classification":
        return InputColumns()
    firsts: tuple[str, ...] = ()
    seconds: tuple[str, ...] = ()
    if spec.columns is not None:
        firsts, seconds = spec.columns.text, spec.columns.text_pair
    if spec.hub is not None:
        first, *second = spec.hub.columns
        firsts, seconds = (*firsts, first), (*seconds, *second)
    return InputColumns(texts=firsts, text_pairs=seconds)


def _with_vectors(contents: Mapping[str, Any], recipe: FinetuneRecipe) -> FinetuneRecipe:
    """The recipe of a classifier on vectors, if config.json names its head."""
    if not has_vector_head(contents) or recipe.spec.kind != "classification":
        return recipe
    return recipe.model_copy(update={"method": Setfit()})


def _with_sigmoid(recipe: FinetuneRecipe, contents: Mapping[str, Any], directory: Path) -> FinetuneRecipe:
    """The recipe of a regression whose score is the output of a sigmoid, if the directory names the sigmoid as
    sentence-transformers does for a cross-encoder: version 6 in its own file, older versions in config.json."""
    owner, file = contents.get(ACTIVATION_OWNER), directory / VERSION_FILE
    settings = [owner if isinstance(owner, dict) else {}, read_json(file) if file.is_file() else {}]
    names = [*(each.get("activation_fn") for each in settings), contents.get(_OLD_ACTIVATION)]
    largest = contents.get(LARGEST_SCORE, 1.0)
    if SIGMOID not in names or recipe.text is None or recipe.spec.kind != "regression":
        return recipe
    valid = isinstance(largest, int | float) and largest > 0
    text = recipe.text.model_copy(update={LARGEST_SCORE: float(largest) if valid else 1.0})
    return recipe.model_copy(update={"text": text})


def _recipe_from(what: TaskSpec | Kind, name: str) -> FinetuneRecipe:
    """A recipe of the task alone; no files are read."""
    task: str | CustomTask
    if isinstance(what, TaskSpec):
        return resolved(FinetuneRecipe(name=what.name, task=what.name, model=name))
    task = CustomTask(kind=what, train="", dev="")
    recipe = resolved(FinetuneRecipe(name=what, task=task, model=name))
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_length": None})})

"""Prepares the data of a fine-tuning recipe: examples, labels in the model's order, sequences.

The order of labels differs between code bases, so labels are matched only by name: a model that already has the head
must name its outputs, or it is refused. Sibling trainer.py trains on the prepared data.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.data.random import Draw
from bertkit.errors import DataError, UsageError
from bertkit.finetuning.dropout import with_dropout
from bertkit.finetuning.embedding import embedding_task, evaluated_by
from bertkit.finetuning.embedding_teacher import taught
from bertkit.finetuning.inputs import CustomTask
from bertkit.finetuning.label_counts import label_counts, log_label_counts
from bertkit.finetuning.own_data import read_own_split
from bertkit.finetuning.recipe import FinetuneRecipe
from bertkit.finetuning.repeated_examples import log_repeated_examples
from bertkit.finetuning.warm_start import head_directory, with_start
from bertkit.metrics.modules import load_metric
from bertkit.models.conversion.pruning import HeadChoice, saved_heads
from bertkit.models.encoder import EncoderConfig
from bertkit.models.files.hub import find_model, read_config, refuse_quantised
from bertkit.models.files.model_files import CONFIG_FILE, config_hash, encoder_directory, weights_hash
from bertkit.models.labels import Labels, ProblemType
from bertkit.run.finished import CONFIG_FINGERPRINT
from bertkit.tasks.base import Features, Task
from bertkit.tasks.catalogue import Kind, TaskSpec
from bertkit.tasks.choice import Choice
from bertkit.tasks.classification import (
    Classification,
    MultiLabelClassification,
    Regression,
    TextSettings,
    VectorClassification,
)
from bertkit.tasks.embedding.settings import EmbeddingSettings
from bertkit.tasks.embedding.task import Embedding
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.examples import Split, match_label_case
from bertkit.tasks.label_ids import class_weights
from bertkit.tasks.readers import label_names, load_split
from bertkit.tasks.readers.columns import NOT_IOB2
from bertkit.tasks.readers.labels import label_order
from bertkit.tasks.readers.squad import UNANSWERED
from bertkit.tasks.span import Span
from bertkit.tasks.tagging import Tagging
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.engine import TASK_INTERVALS, resolve_engine

log = logging.getLogger(__name__)

_PROBLEM_TYPES: dict[Kind, ProblemType] = {
    "classification": "single_label_classification",
    "multi_label": "multi_label_classification",
    "regression": "regression",
}


@dataclass(frozen=True)
class EncodedSplit:
    """A split with its sequences.

    Attributes:
        split: examples, and notes on reading them.
        features: of all examples, in order.
        scored: whether its examples have labels.
    """

    split: Split
    features: Features
    scored: bool

    @property
    def examples(self) -> list[Any]:
        return self.split.examples


@dataclass(frozen=True)
class Prepared:
    """The prepared inputs of a run.

    Attributes:
        spec: the task.
        task: with its labels in the order of the model's outputs.
        model_directory: directory of the initial model.
        config: of the encoder that is trained.
        new_head: whether to initialise a new head even if the model has one.
        tokenizer: the model's.
        train: the training examples.
        others: by name, the splits that are predicted; those evaluated during training have labels.
        watched: names of the splits that are evaluated during training; the first one's score selects.
        label_counts: for each labelled split, how often each label occurs; of train, in the examples trained on.
        fingerprints: of data, tokenizer and model.
        label_mean: for regression, the mean over labelled training examples; over the train split if there are none, as
            in a transfer set.
        in_train: for each split, how many of its examples are also trained on, if any are.
    """

    spec: TaskSpec
    task: Task
    model_directory: Path
    config: EncoderConfig
    new_head: bool
    tokenizer: Tokenizer
    train: EncodedSplit
    others: Mapping[str, EncodedSplit]
    watched: tuple[str, ...]
    label_counts: Mapping[str, Mapping[str, int]]
    fingerprints: Mapping[str, str]
    label_mean: float = field(default=0.0, kw_only=True)
    in_train: Mapping[str, int] = field(default_factory=dict, kw_only=True)

    @property
    def read(self) -> dict[str, Split]:
        """All splits, as they were read."""
        return {name: each.split for name, each in {"train": self.train, **self.others}.items()}

    @property
    def pruned(self) -> HeadChoice:
        """The pruned heads of the model before its first step."""
        return saved_heads(read_config(self.model_directory)[1], source=str(self.model_directory / CONFIG_FILE))

    @property
    def selecting(self) -> str:
        """The split whose score selects: dev, or a labelled split if there is no dev."""
        return self.watched[0]


class Preparation:
    """Hooks by which a kind of recipe changes the preparation; fine-tuning changes nothing."""

    needs_labels = True
    """Whether training examples must have labels."""

    def check_start(self, directory: Path, contents: Mapping[str, Any]) -> None:
        """Check the model in `recipe.model` and its config.json before anything is read.

        Raises:
            DataError: the model cannot be trained.
        """
        refuse_quantised(directory, contents)

    def labels(self, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """The task's labels in the order of a newly initialised head."""
        return names

    def encoder_config(self, found: EncoderConfig) -> EncoderConfig:
        """The configuration of the trained model, which may differ from that in `recipe.model`."""
        return found

    def learnt_from(self, train: Split) -> Split:
        """The examples to train on, possibly in place of the training split."""
        return train


def prepare(recipe: FinetuneRecipe, *, offline: bool = False, preparation: Preparation | None = None) -> Prepared:
    """Read the data and lay out the sequences.

    Args:
        recipe: resolved, of one task.
        offline: use no network.
        preparation: of the recipe's kind.

    Raises:
        UsageError: a length that the model cannot read.
        DataError: invalid data, labels, model or tokenizer.
    """
    spec, preparation = recipe.spec, preparation or Preparation()
    watched = watched_splits(spec)
    assert recipe.model is not None
    directory = head_directory(encoder_directory(find_model(recipe.model, offline=offline)), spec.name)
    config, contents = read_config(directory)
    config = with_dropout(config, recipe.dropout, (spec.head,))
    preparation.check_start(directory, contents)
    tokenizer = load_tokenizer(directory, offline=offline)
    if recipe.causal is not None:
        recipe.causal.check(config)
        tokenizer = recipe.causal.framed(tokenizer)
    splits = _read(recipe, watched, offline=offline)
    whole = splits.pop("train")
    train = fewer(whole, recipe.data.train_examples, recipe.seed)
    _log_notes(spec.name, {"train": train, **splits})
    scored = {name: splits[name].examples for name in watched}
    names_of_labels = preparation.labels(_label_names(spec, whole.examples, train.examples, scored))
    train, splits = _spelt(train, names_of_labels), {k: _spelt(each, names_of_labels) for k, each in splits.items()}
    recipe = with_start(recipe, names_of_labels, directory)
    others = [split.examples for split in splits.values()]
    task = build_task(recipe, train.examples, names_of_labels, config, contents, directory, others=others)
    if isinstance(task, Embedding):
        spec = evaluated_by(spec, task, splits[watched[0]].examples)
    task.additional = tuple(load_metric(name, offline=offline) for name in recipe.metrics)
    encoder = sequence_encoder(recipe, tokenizer, preparation.encoder_config(config))
    counts = {name: label_counts(task, each.examples) for name, each in {"train": train, **splits}.items()}
    log_label_counts(spec.name, counts)
    labelled_train, train = train, preparation.learnt_from(train)
    if train is not labelled_train:
        counts["train"] = label_counts(task, train.examples)
    in_train = log_repeated_examples(spec.name, train, splits, is_own=isinstance(recipe.task, CustomTask))
    train_needs_labels = preparation.needs_labels and not isinstance(task, Embedding)  # a loss may need none
    labelled = (*(("train",) if train_needs_labels else ()), *watched)
    encoders = {"train": _train_encoder(recipe, encoder)}
    encoded = {
        name: encode_split(task, name, each, encoders.get(name, encoder), must_be_scored=name in labelled)
        for name, each in {"train": train, **splits}.items()
    }
    task.check_additional(splits[watched[0]].examples)
    hashes = {"tokenizer": tokenizer.fingerprint, "model": weights_hash(directory)}
    hashes[CONFIG_FINGERPRINT] = config_hash(directory)
    if isinstance(task, Embedding) and recipe.task_settings.teacher is not None:
        features, hashes["teacher"] = taught(
            encoded["train"].features,
            encoded["train"].examples,
            task,
            teacher=recipe.task_settings.teacher,
            config=preparation.encoder_config(config),
            max_tokens=encoders["train"].max_tokens,
            engine=resolve_engine(recipe.engine, TASK_INTERVALS),
            offline=offline,
        )
        encoded["train"] = replace(encoded["train"], features=features)
    return Prepared(
        spec=spec,
        task=task,
        model_directory=directory,
        config=preparation.encoder_config(config),
        new_head=recipe.new_head,
        tokenizer=tokenizer,
        train=encoded.pop("train"),
        others=encoded,
        watched=watched,
        label_counts={name: own for name, own in counts.items() if own},
        fingerprints={"data": splits_sha256({"train": train, **splits}), **hashes},
        in_train=in_train,
        label_mean=_label_mean(train.examples, labelled_train.examples) if isinstance(task, Regression) else 0.0,
    )


def _read(recipe: FinetuneRecipe, watched: Sequence[str], *, offline: bool) -> dict[str, Split]:
    """All splits of a recipe's task."""
    names = dict.fromkeys(("train", *watched, *recipe.data.predict))
    log.info("reading %s: %s", recipe.spec.name, ", ".join(names))
    return {name: load_examples(recipe, name, offline=offline) for name in names}


def _log_notes(task: str, splits: Mapping[str, Split]) -> None:
    """Log what was noted while the splits were read."""
    for name, split in splits.items():
        for what, count in split.notes.items():
            level = logging.INFO if what == NOT_IOB2 else logging.WARNING
            named = split.named.get(what, ())[:3]
            shown = f"{'such as ' if count > len(named) else ''}{', '.join(named)}"
            log.log(level, "%s, %s: %s: %s (%s)", task, name, what, f"{count:,}", shown)


def _spelt(split: Split, names: tuple[str, ...] | None) -> Split:
    """The split with its labels spelt like these names; unchanged if the task has none."""
    return split if names is None else replace(split, examples=match_label_case(split.examples, names))


def _label_names(
    spec: TaskSpec, whole: Sequence[Any], train: Sequence[Any], scored: Mapping[str, Sequence[Any]]
) -> tuple[str, ...] | None:
    """The names of the labels; None if the task has none. For a sample of the training file, the names are those of the
    whole file, so a label that was not drawn is not unknown.

    Raises:
        DataError: see `label_names`.
    """
    if spec.labels is not None or spec.kind not in ("classification", "multi_label", "tagging"):
        return spec.labels
    if len(train) < len(whole):
        label_names(train)  # a single label is an error
    return label_names(whole, scored)


def _label_mean(*parts: Sequence[Any]) -> float:
    """The mean label of the first part that has labels; 0 if none has."""
    for examples in parts:
        labels = [float(example.label) for example in examples if example.label is not None]
        if labels:
            return float(np.mean(labels))
    return 0.0


def build_task(
    recipe: FinetuneRecipe,
    examples: Sequence[Any],
    names: tuple[str, ...] | None,
    config: EncoderConfig,
    contents: Mapping[str, Any],
    directory: Path,
    *,
    others: Sequence[Sequence[Any]] = (),
) -> Task:
    """The task with its labels in the order of the model's outputs.

    Args:
        recipe: resolved.
        examples: of train.
        names: of the labels, in the task's order; None if it has none.
        config: of the model.
        contents: of its config.json.
        directory: of the model.
        others: examples of each other split, which may include unanswerable questions.

    Raises:
        DataError: the model already has the head, and its labels are not the task's.
    """
    spec, settings = recipe.spec, recipe.task_settings
    if spec.kind == "embedding":
        return embedding_task(spec, settings, examples, directory)
    if spec.kind == "regression":
        if settings.label_smoothing or settings.class_weights:
            raise UsageError("text.label_smoothing and text.class_weights do not apply to a regression; leave them out")
        labels = Labels.unnamed(1, "regression")
        if not recipe.new_head and has_head(config, contents, spec.head):
            here = Labels.from_hub(contents).count
            if here != 1:
                raise DataError(
                    f"{directory}: the model's classifier has {here} outputs, but a regression needs 1; {_NEW_HEAD}"
                )
        return Regression(labels, spec.metrics, settings)
    if spec.kind == "span":
        impossible = any(example.impossible for part in (examples, *others) for example in part)
        return Span(spec.metrics, settings, may_be_impossible=impossible)
    if spec.kind == "choice":
        return Choice(spec.metrics, settings)
    assert names is not None
    labels = Labels(_in_order(recipe, names, config, contents, directory), _PROBLEM_TYPES.get(spec.kind))
    task: Task
    if spec.kind == "tagging":
        task = Tagging(labels, spec.metrics, settings)
    else:
        weight_K = class_weights(settings.class_weights, examples, labels.names)
        kind = {"classification": Classification, "multi_label": MultiLabelClassification}[spec.kind]
        if recipe.method.name == "setfit":
            kind = VectorClassification
        task = kind(labels, spec.metrics, settings, positive=spec.positive, class_weight_K=weight_K)
    # The same for any order of the model's outputs.
    task.label_order = spec.labels or tuple(sorted(names, key=label_order))
    return task


_NEW_HEAD = "give --new-head (new_head: true) to initialise a new one"


def has_head(config: EncoderConfig, contents: Mapping[str, Any], head: str) -> bool:
    """Whether a checkpoint has this head, by its config.json."""
    plan = config.heads().get(head)
    return plan is not None and plan.architecture in (contents.get("architectures") or ())


def _in_order(
    recipe: FinetuneRecipe,
    wanted: tuple[str, ...],
    config: EncoderConfig,
    contents: Mapping[str, Any],
    directory: Path,
) -> tuple[str, ...]:
    """The labels in the order of the model's existing head, matched by name; it may have more."""
    if recipe.new_head or not has_head(config, contents, recipe.spec.head):
        return wanted
    try:
        here = Labels.from_hub(contents)
        order = here.order_of(wanted, source=str(directory), may_have_more=True)
    except ValueError as error:
        raise DataError(f"{directory}/config.json: {error}") from error
    except DataError as error:
        raise DataError(f"{error}; or {_NEW_HEAD}") from error
    if others := [name for number, name in enumerate(here.names) if number not in order]:
        log.info(
            "%s: the task has no labels %s: the head's outputs for them are left out", directory, ", ".join(others)
        )
    by_logit = dict(zip(order, wanted, strict=True))
    return tuple(by_logit[number] for number in sorted(by_logit))


def watched_splits(spec: TaskSpec) -> tuple[str, ...]:
    """The splits that are evaluated during training: dev, never a test split unless there is no dev.

    Raises:
        UsageError: the task is only for testing.
    """
    dev = tuple(name for name in spec.scored if name.startswith("dev"))
    if "train" not in spec.splits or not spec.scored:
        raise UsageError(f"{spec.name} cannot be fine-tuned on: it has no train split, or no labels to evaluate on")
    return dev or spec.scored[:1]


def load_examples(recipe: FinetuneRecipe, split: str, *, offline: bool = False) -> Split:
    """The examples of one split of the recipe's task."""
    if not isinstance(recipe.task, CustomTask) or split in recipe.spec.sources:
        return load_split(recipe.spec, split, recipe.data.directory, offline=offline)
    files = recipe.spec.splits
    if split not in files:
        raise UsageError(f"task.{split}: no file is given for this split; there are: {', '.join(files)}")
    return read_own_split(recipe.task, split, files[split][0], offline=offline)


def fewer(split: Split, count: int | None, seed: int) -> Split:
    """This many of the split's examples, drawn by the seed, in file order."""
    if count is None or count >= len(split.examples):
        return split
    drawn = Draw(seed, "finetune").permuted("examples", np.arange(count), size=len(split.examples))
    return replace(split, examples=[split.examples[i] for i in sorted(drawn.tolist())], groups=())


def sequence_encoder(recipe: FinetuneRecipe, tokenizer: Tokenizer, config: EncoderConfig) -> SequenceEncoder:
    """The encoder of sequences for a model.

    Raises:
        UsageError: sequences would be longer than the model allows.
    """
    return SequenceEncoder(tokenizer, max_tokens=_max_tokens(recipe, config), token_types=config.reads_token_types)


def _train_encoder(recipe: FinetuneRecipe, encoder: SequenceEncoder) -> SequenceEncoder:
    """The encoder of training examples.

    Args:
        recipe: resolved, of one task.
        encoder: of all other splits.

    Raises:
        UsageError: the training length is not below that of the other splits.
    """
    settings = recipe.task_settings
    shorter = settings.train_max_length if isinstance(settings, EmbeddingSettings) else None
    if shorter is None:
        return encoder
    if shorter >= encoder.max_tokens:
        raise UsageError(
            f"embedding.train_max_length is {shorter}, which is not below data.max_length ({encoder.max_tokens}); raise"
            " data.max_length, or leave embedding.train_max_length out"
        )
    return encoder.shortened(shorter)


def encode_split(
    task: Task, name: str, split: Split, encoder: SequenceEncoder, *, must_be_scored: bool
) -> EncodedSplit:
    """Encode a split.

    Raises:
        DataError: an example that cannot be encoded, or that has no label although all must have one.
    """
    try:
        features = task.encode(split.examples, encoder)
    except DataError as error:
        raise DataError(f"{split.source or name}: {error}") from error
    scored = features.labelled
    if must_be_scored and not scored:
        first = "".join(split.named.get(UNANSWERED, ())[:1])
        hint = first and f'; {first} has no answers: if its context contains none, add "is_impossible": true'
        raise DataError(f"{split.source or name}: the {name} split needs a label for every example{hint}")
    account = features.account
    if account.examples_cut:
        log.info(
            "%s: %s of %s examples are truncated to %d tokens; %s tokens are dropped",
            *(name, f"{account.examples_cut:,}", f"{account.examples:,}", encoder.max_tokens),
            f"{account.tokens_dropped:,}",
        )
    return EncodedSplit(split, features, scored)


def _max_tokens(recipe: FinetuneRecipe, config: EncoderConfig) -> int:
    wanted = recipe.data.max_length
    assert wanted is not None
    if wanted <= config.max_tokens:
        return wanted
    if wanted == recipe.spec.max_length:
        log.info("%s: sequences have at most %d tokens in place of %d", recipe.name, config.max_tokens, wanted)
        return config.max_tokens
    windows = ", or set text.window_stride to read a long text in several windows"
    raise UsageError(
        f"data.max_length is {wanted}, but the model reads at most {config.max_tokens} tokens; lower it"
        + (windows if isinstance(recipe.task_settings, TextSettings) else "")
    )


def splits_sha256(splits: Mapping[str, Split]) -> str:
    """sha256 (hex) of all examples."""
    digest = hashlib.sha256()
    for name, split in sorted(splits.items()):
        digest.update(f"{name}\n".encode())
        for example in split.examples:
            digest.update(repr(example).encode("utf-8", "backslashreplace"))
    return digest.hexdigest()

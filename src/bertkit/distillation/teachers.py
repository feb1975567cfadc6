"""Those who teach a task: found, compared with one another and with the task, and read.

Nothing here follows a paper. Several teachers speak as one (`bertkit.distillation.teacher`), so they must read the same
tokens and give the same labels in the same order. Sibling student.py has those who learn.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bertkit.distillation.terms import ActivationSpec
from bertkit.errors import DataError
from bertkit.finetuning.data import has_head
from bertkit.finetuning.warm_start import head_directory, recipe_of
from bertkit.models.encoder import EncoderConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.hub import load_model, read_config
from bertkit.models.labels import Labels
from bertkit.models.model_files import encoder_directory, find_model, weights_hash
from bertkit.tasks.spec import TaskSpec
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import load_tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Teachers:
    """Those who teach, as files.

    Attributes:
        names: as the recipe has them.
        directories: where they lie.
        config: of the first encoder that tells segments apart, else of the first one.
        tokenizer: of all of them.
        labels: of their heads, in their order.
        fingerprint: of their weights.
    """

    names: tuple[str, ...]
    directories: tuple[Path, ...]
    config: EncoderConfig
    tokenizer: Tokenizer
    labels: Labels
    fingerprint: str

    def load(self, head: str, labels: Labels) -> list[HeadedModel]:
        """The models."""
        return [load_model(directory, heads=(head,), labels=labels)[0] for directory in self.directories]


def find_teachers(names: Sequence[str], spec: TaskSpec, *, offline: bool = False) -> Teachers:
    """The teachers of a task.

    Raises:
        DataError: a model has no head for it, or teachers do not read and answer alike.
    """
    directories = tuple(
        head_directory(encoder_directory(find_model(name, offline=offline)), spec.name) for name in names
    )
    configs, labels, tokenizers = [], [], []
    for name, directory in zip(names, directories, strict=True):
        config, contents = read_config(directory)
        if not has_head(config, contents, spec.head):
            raise DataError(
                f"teacher: {name}: has no head for {spec.kind}, so it cannot teach {spec.name}; fine-tune it first:"
                f" bertkit finetune --task {spec.name} --model {name}"
            )
        learnt = recipe_of(directory)
        if learnt is not None and spec.name not in [each.name for each in learnt.specs]:
            tasks = " and ".join(each.name for each in learnt.specs)
            log.warning("teacher: %s was fine-tuned on %s, not on %s", name, tasks, spec.name)
        configs.append(config)
        labels.append(Labels.from_hub(contents))
        tokenizers.append(load_tokenizer(directory, offline=offline))
        if spec.kind == "regression" and labels[-1].count != 1:
            raise DataError(
                f"teacher: {name}: has {labels[-1].count} outputs; {spec.name} is a regression, which has 1"
            )
    for name, own, tokenizer in zip(names[1:], labels[1:], tokenizers[1:], strict=True):
        if tokenizer.fingerprint != tokenizers[0].fingerprint:
            raise DataError(
                f"teacher: {name} and {names[0]} have different tokenizers; teachers that speak as one must read the"
                " same tokens"
            )
        if own.names != labels[0].names and spec.kind not in ("regression", "span", "choice"):
            raise DataError(
                f"teacher: the labels of {name} are {', '.join(own.names)}, those of {names[0]}"
                f" {', '.join(labels[0].names)}; teachers that speak as one must have the same labels in the same order"
            )
    digests = [weights_hash(directory) for directory in directories]
    return Teachers(
        tuple(names),
        directories,
        next((config for config in configs if config.reads_token_types), configs[0]),
        tokenizers[0],
        labels[0],
        digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest(),
    )


def answers_identity(
    models: Sequence[HeadedModel], *, weights: str, tokenizer: Tokenizer, wanted: ActivationSpec, precision: str
) -> dict[str, str]:
    """What a teacher's answer to given tokens depends on, by which its store is known.

    Args:
        models: those who teach.
        weights: the hash of theirs.
        tokenizer: of all of them.
        wanted: what is looked at.
        precision: of matrix products.
    """
    settings = [model.encoder.config.model_dump(mode="json") for model in models]
    return {
        "teacher": weights,
        "settings": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest(),
        "tokenizer": tokenizer.fingerprint,
        "wanted": wanted.in_words(),
        "precision": precision,
    }

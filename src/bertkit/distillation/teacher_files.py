"""The models of a teacher: found, compared with one another and with a task, and loaded.

Not from a paper. Several teachers act as one (teacher.py), so they must read the same tokens and have the same labels
in the same order.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from bertkit.distillation.activations import ActivationSpec, ModelShape
from bertkit.errors import DataError
from bertkit.files import joint_sha256, json_sha256
from bertkit.finetuning.data import has_head
from bertkit.finetuning.warm_start import head_directory, recipe_of
from bertkit.models.conversion.pruning import HeadChoice, saved_heads
from bertkit.models.encoder import EncoderConfig
from bertkit.models.files.hub import check_vocabulary, load_model, read_config
from bertkit.models.files.model_files import CONFIG_FILE, encoder_directory, find_model, is_model, weights_hash
from bertkit.models.headed import HeadedModel
from bertkit.models.labels import Labels
from bertkit.tasks.spec import TaskSpec
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import load_tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TeacherFiles:
    """The models of a teacher, as files.

    Attributes:
        names: as in the recipe.
        directories: where they are.
        configs: of their encoders.
        tokenizer: shared by all of them.
        pruned: the pruned heads of the first encoder.
        labels: of their heads, in the heads' order; none on text.
    """

    names: tuple[str, ...]
    directories: tuple[Path, ...]
    configs: tuple[EncoderConfig, ...]
    tokenizer: Tokenizer
    pruned: HeadChoice
    labels: Labels | None = None

    @classmethod
    def find(cls, names: Sequence[str], *, task: str | None = None, offline: bool = False) -> TeacherFiles:
        """Find the models with these names.

        Args:
            names: Hub ids, model or run directories.
            task: the task whose head is needed from a model that was trained on several.
            offline: do not use the network.

        Raises:
            DataError: a model does not exist, or the models have different tokenizers.
        """
        found = [encoder_directory(find_model(name, offline=offline)) for name in names]
        directories = found if task is None else [head_directory(each, task) for each in found]
        read = [read_config(directory) for directory in directories]
        tokenizers = [load_tokenizer(directory, offline=offline) for directory in directories]
        for name, tokenizer in zip(names, tokenizers, strict=True):
            if tokenizer.fingerprint != tokenizers[0].fingerprint:
                raise DataError(
                    f"teacher: {name} and {names[0]} have different tokenizers; use teachers with the same tokenizer,"
                    " or only one of them"
                )
        pruned = saved_heads(read[0][1], source=str(directories[0] / CONFIG_FILE))
        return cls(tuple(names), tuple(directories), tuple(config for config, _ in read), tokenizers[0], pruned)

    @property
    def config(self) -> EncoderConfig:
        """Of the first encoder, from which students are made."""
        return self.configs[0]

    @property
    def max_tokens(self) -> int:
        """Length of the longest sequence that all of them can read."""
        return min(config.max_tokens for config in self.configs)

    @property
    def reads_token_types(self) -> bool:
        """Whether any of them reads token types."""
        return any(config.reads_token_types for config in self.configs)

    @property
    def shape(self) -> ModelShape:
        """The sizes of its layers, which terms depend on."""
        return ModelShape.from_config(self.config, self.pruned)

    @cached_property
    def fingerprint(self) -> str:
        """The hash of the weights."""
        digests = [weights_hash(directory) for directory in self.directories]
        return digests[0] if len(digests) == 1 else joint_sha256(digests)

    def load(self, head: str | None = None, labels: Labels | None = None) -> list[HeadedModel]:
        """The models, with a task's head or with all their heads.

        Raises:
            DataError: the tokenizer does not fit a model's table.
        """
        if head is not None:
            return [load_model(directory, heads=(head,), labels=labels)[0] for directory in self.directories]
        models = [load_model(directory)[0] for directory in self.directories]
        for model, directory in zip(models, self.directories, strict=True):
            check_vocabulary(model, self.tokenizer, source=str(directory))
        return models


def find_task_teachers(names: Sequence[str], spec: TaskSpec, *, offline: bool = False) -> TeacherFiles:
    """The teachers of a task.

    Raises:
        DataError: a model has no head for it, or the teachers' tokenizers or labels differ.
    """
    files = TeacherFiles.find(names, task=spec.name, offline=offline)
    labels: list[Labels] = []
    for name, directory in zip(names, files.directories, strict=True):
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
        own = Labels.from_hub(contents)
        if spec.kind == "regression" and own.count != 1:
            raise DataError(f"teacher: {name}: has {own.count} outputs, but the regression {spec.name} needs one")
        if own.is_regression and spec.kind in ("classification", "multi_label"):
            raise DataError(
                f"teacher: {name}: is a regression, whose output is a number, so it cannot teach the labels of"
                f" {spec.name}; use a model that was fine-tuned on them:"
                f" bertkit finetune --task {spec.name} --model MODEL"
            )
        labels.append(own)
        if own.names != labels[0].names and spec.kind not in ("regression", "span", "choice"):
            raise DataError(
                f"teacher: the labels of {name} are {', '.join(own.names)}, those of {names[0]} are"
                f" {', '.join(labels[0].names)}; use teachers with the same labels in the same order"
            )
    return replace(files, labels=labels[0])


def cache_identity(
    models: Sequence[HeadedModel], files: TeacherFiles, spec: ActivationSpec, precision: str
) -> dict[str, str]:
    """Everything that a teacher's outputs on given tokens depend on, which identifies its cache.

    Args:
        models: the teacher's.
        files: the teacher's.
        spec: what is recorded.
        precision: of matrix products.
    """
    settings = [model.encoder.config.model_dump(mode="json") for model in models]
    return {
        "teacher": files.fingerprint,
        "settings": json_sha256(settings),
        "tokenizer": files.tokenizer.fingerprint,
        "recorded": spec.to_json(),
        "precision": precision,
    }


def pretrained_model_of(teacher: str) -> str | None:
    """The model that a teacher's run was fine-tuned from; None if the teacher does not come from such a run."""
    path = Path(teacher).expanduser()
    directory = next((each for each in (path / "model", path) if is_model(each)), None)
    recipe = None if directory is None else recipe_of(directory)
    return None if recipe is None else recipe.model

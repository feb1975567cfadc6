"""Models to evaluate or probe: any MODEL, and the checkpoints of a run.

Contract: MODEL. In addition to the names that every command accepts, `RUN@500` is the checkpoint of that step and
`RUN@all` all kept checkpoints of the run, in order; `RUN@2M` is the model that the run saved after that many words
(`engine.models_at_words`) and `RUN@words` all of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertkit.errors import DataError, UsageError
from bertkit.files import read_json, sha256_of
from bertkit.models.conversion.pruning import rebuilt
from bertkit.models.encoder import EncoderConfig
from bertkit.models.files.hub import check_vocabulary, load_model
from bertkit.models.files.model_files import encoder_directory, find_model, settings_hash, weights_hash
from bertkit.models.headed import HeadedModel, with_whole_tables
from bertkit.pretraining.recipe import load_recipe
from bertkit.pretraining.stages import stages_of
from bertkit.pretraining.words import FOLDER, WORDS, milestone_name, words_of_milestone
from bertkit.run.checkpoint import Checkpoint, list_checkpoints, load_checkpoint
from bertkit.run.directory import RECIPE, RECORD, RunDirectory
from bertkit.run.metrics import METRICS_FILE, metrics_by_step
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.visible import number_of, shell_word

ALL = "all"
_WEIGHTS = "weights"


@dataclass(frozen=True)
class LoadedModel:
    """A model to measure.

    Attributes:
        name: the name as given by the user.
        directory: where it was found.
        model, tokenizer: the loaded model and tokenizer.
        fingerprint: sha256 of the weights file, or of the index if there are several.
        training: steps, tokens and id of the run that produced it, and the words read if the run counted them; None if
            it is in no run directory.
        label: a short name for figures: the last part of its path or id, with the step of a checkpoint.
    """

    name: str
    directory: Path
    model: HeadedModel
    tokenizer: Tokenizer
    fingerprint: str
    training: dict[str, Any] | None
    label: str = ""

    @classmethod
    def load(cls, name: str, *, offline: bool = False) -> LoadedModel:
        """Find and load one model.

        Raises:
            DataError: no such model, invalid files, a tokenizer of another model, or no checkpoint of this step.
            UsageError: the name refers to several checkpoints.
        """
        models = load_models([name], offline=offline)
        if len(models) > 1:
            raise UsageError(f"{name}: refers to {len(models)} checkpoints; give one step, such as {models[0].name}")
        return models[0]

    @property
    def config(self) -> EncoderConfig:
        return self.model.encoder.config

    @property
    def config_fingerprint(self) -> str:
        """sha256 of the model's settings, its labels and the other keys of config.json, such as the scoring rule."""
        return settings_hash({**self.model.extras, **self.model.labels.to_hub(), **self.config.to_hub()})

    def random_twin(self, seed: int = 0) -> LoadedModel:
        """The same model with newly initialised weights, by its family's rules: a baseline without training."""
        model = rebuilt(self.model, self.config, heads=self.model.head_names)
        model.initialise(seed)
        model.encoder.read_vocabulary(self.tokenizer)
        return replace(
            self, name=f"{self.name} (random weights)", label=f"{self.label}, random", model=model.eval(), training=None
        )


def load_models(names: Sequence[str], *, offline: bool = False) -> list[LoadedModel]:
    """Find and load the models with these names, in order.

    Raises:
        DataError: no such model, invalid files, or no checkpoint of this step.
        UsageError: a name is given twice.
    """
    models = [model for name in names for model in _load(name, offline=offline)]
    _check_different([model.name for model in models])
    if len({model.label for model in models}) < len(models):
        return [replace(model, label=model.name) for model in models]
    return models


def window_length(wanted: int | None, usual: int, max_tokens: int) -> int:
    """Tokens per window: the requested number, or else the usual one if the model can read that many.

    Raises:
        UsageError: the model reads fewer than requested.
    """
    if wanted is None:
        return min(usual, max_tokens)
    if wanted > max_tokens:
        raise UsageError(f"--sequence-length {wanted}: the model reads at most {max_tokens} tokens")
    return wanted


def short_name(name: str) -> str:
    """A model's name in figures: the last part of its directory or Hub id, or the run's name for RUN/model."""
    path = Path(name)
    parts = [part for part in path.parts if part not in ("/", ".", "..")]
    if not parts:
        parts = list(path.resolve().parts)
    return parts[-2] if parts[-1] == "model" and len(parts) > 1 else parts[-1]


def _load(name: str, *, offline: bool) -> list[LoadedModel]:
    run_path, which = _in_run(name)
    if which is not None:
        run, paths = _paths(run_path, which)
        return [_of_run(run, run_path, each, path) for each, path in paths.items()]
    directory = find_model(name, offline=offline)
    return [_found(name, directory, _training(directory), short_name(name))]


def _found(name: str, directory: Path, training: dict[str, Any] | None, label: str) -> LoadedModel:
    """The model in a directory."""
    inner = encoder_directory(directory)
    model, _ = load_model(directory)
    tokenizer = load_tokenizer(inner)
    check_vocabulary(model, tokenizer, source=name)
    return LoadedModel(name, directory, model, tokenizer, weights_hash(inner), training, label=label)


def _in_run(name: str) -> tuple[str, str | None]:
    """The run directory and what follows the @ in `RUN@500`; None if the name is not of this form."""
    run_path, at, which = name.rpartition("@")
    return (run_path, which) if at and (Path(run_path) / RECORD).is_file() else (name, None)


def each_name(names: Sequence[str]) -> list[str]:
    """The names, with `RUN@all` and `RUN@words` replaced by those of the run's models; nothing is loaded.

    Raises:
        DataError: a run has no such model.
        UsageError: a model is named twice.
    """
    found: list[str] = []
    for name in names:
        run_path, which = _in_run(name)
        several = which in (ALL, WORDS)
        found += [f"{run_path}@{each}" for each in _paths(run_path, str(which))[1]] if several else [name]
    _check_different(found)
    return found


def _check_different(names: Sequence[str]) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"--model {twice} is given twice; name different models or checkpoints")


def saved_at_words(run: Path) -> dict[int, Path]:
    """The models that a run has saved after given numbers of words, by words, in ascending order."""
    folders = [each.parent for each in run.joinpath(FOLDER).glob("*/config.json")]
    words = {read: each for each in folders if (read := words_of_milestone(each.name)) is not None}
    return dict(sorted(words.items()))


def _paths(run_path: str, which: str) -> tuple[RunDirectory, dict[str, Path]]:
    """The run, and those of its checkpoints and saved models that are meant, by what follows the @ in their names."""
    run = RunDirectory.open(Path(run_path))
    steps = {str(_step_of(path)): path for path in list_checkpoints(run.checkpoints)}
    words = {milestone_name(read): path for read, path in saved_at_words(run.path).items()}
    known = {**words, **steps}
    which = str(int(which)) if which.isdecimal() and len(which) < 19 else which
    found = {ALL: steps, WORDS: words}.get(which, {which: known[which]} if which in known else {})
    if not found:
        near = get_close_matches(which, known, n=1)
        hint = f"; did you mean {run_path}@{near[0]}?" if near else ""
        has = f"steps {', '.join(steps) or 'none'}, or write @{ALL} for all"
        if words or which == WORDS:
            has += f", and the models of {', '.join(words) or 'no'} words"
            has += f", or write @{WORDS} for all" if words else " (train with engine.models_at_words)"
        raise DataError(f"{run_path}@{which}: no such checkpoint; the run has kept {has}{hint}")
    return run, found


def _of_run(run: RunDirectory, run_path: str, which: str, path: Path) -> LoadedModel:
    """A checkpoint of a run, or a model that it has saved after so many words."""
    if path.parent.name != FOLDER:
        return _read(run, run_path, int(which), path, _tokenizer_of(run))
    name, read = f"{run_path}@{which}", words_of_milestone(which)
    saved = ((run.results or {}).get(WORDS) or {}).get("models", [])
    step = next((each["step"] for each in saved if each["words"] == read), None)
    training = {"run": run.id, "steps": step, "tokens": None, "words": read}
    return _found(name, path, training, f"{short_name(run_path)}@{which}")


def _read(run: RunDirectory, run_path: str, step: int, path: Path, tokenizer: Tokenizer) -> LoadedModel:
    checkpoint = load_checkpoint(path)
    name = f"{run_path}@{step}"
    model = _model_of(run, checkpoint, tokenizer, name)
    check_vocabulary(model, tokenizer, source=name)
    training: dict[str, Any] = {
        "run": run.id,
        "steps": checkpoint.state.get("step", step),
        "tokens": checkpoint.state.get("tokens"),
        **_words_read(run.path, run.record, step),
    }
    fingerprint = sha256_of(path / f"{_WEIGHTS}.safetensors")
    return LoadedModel(name, path, model, tokenizer, fingerprint, training, label=f"{short_name(run_path)}@{step}")


def _model_of(run: RunDirectory, checkpoint: Checkpoint, tokenizer: Tokenizer, name: str) -> HeadedModel:
    """The model of the recipe's stage, with the checkpoint's weights, and heads and scoring rule of the finished
    model."""
    recipe = load_recipe(str(run.path / RECIPE))
    step = checkpoint.step
    stage = next((each for each in stages_of(recipe) if step <= each.end_step), None)
    if stage is None:
        raise DataError(
            f"{name}: the recipe ends before step {step}; the files of the run directory do not belong together"
        )
    finished = load_model(run.model)[0] if run.model.is_dir() else None
    weights = with_whole_tables(checkpoint.tensors.get(_WEIGHTS, {}))
    config = stage.recipe.model
    table, rows = _word_table(config), tokenizer.vocab_size
    if table is not None:
        words = next((tensor for key, tensor in weights.items() if key.endswith(table)), None)
        if words is None:
            raise DataError(f"{checkpoint.path}: has no {table}; it is from another version or kind of run")
        rows = words.shape[0]
    if finished is None:
        model = HeadedModel(config.build(rows, pad_id=tokenizer.pad_id))
    else:
        model = rebuilt(finished, config, heads=finished.head_names, vocab_size=rows)
    model.initialise(seed=0)
    model.encoder.read_vocabulary(tokenizer)
    own = dict(model.named_parameters())
    lacking = sorted(key for key, tensor in own.items() if getattr(weights.get(key), "shape", None) != tensor.shape)
    if lacking:
        raise DataError(
            f"{checkpoint.path}: lacks {number_of(len(lacking), 'weight')} of the model, such as {lacking[0]}"
        )
    with torch.no_grad():
        for key, parameter in own.items():
            parameter.copy_(weights[key])
    return model.eval()


def _word_table(config: EncoderConfig) -> str | None:
    """The name of the word embedding table in a checkpoint; None if words are composed of characters."""
    with torch.device("meta"):
        encoder = config.build(1)
    table = encoder.word_embedding.weight
    if len(table) != encoder.vocab_size:
        return None
    return next(f"encoder.{name}" for name, parameter in encoder.named_parameters() if parameter is table)


def _tokenizer_of(run: RunDirectory) -> Tokenizer:
    """The run's tokenizer, from its model or from its token shards."""
    shards = run.record.get("shards")
    for directory in (run.model, Path(shards) if shards else None):
        if directory is not None and directory.is_dir():
            return load_tokenizer(directory)
    raise DataError(
        f"{run.path}: the run is not finished and its token shards are missing, so its tokenizer is not known;"
        f" continue with `bertkit pretrain --resume {shell_word(run.path)}`"
    )


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _training(directory: Path) -> dict[str, Any] | None:
    record = directory.parent / RECORD
    if not record.is_file():
        return None
    try:
        recorded = read_json(record)
    except DataError:
        return None
    steps = recorded.get("steps")
    own = {"run": recorded.get("id"), "steps": steps, "tokens": recorded.get("tokens")}
    return own | _words_read(directory.parent, recorded, steps)


def _words_read(run: Path, record: Mapping[str, Any], step: int | None) -> dict[str, int]:
    """The words that a run had read by a step, as `words`, linear between logged steps; empty if it did not count
    them."""
    if WORDS not in record or step is None:
        return {}
    with suppress(DataError):  # a damaged metrics.jsonl does not keep a model from being measured
        logged = {row["step"]: row[WORDS] for row in metrics_by_step(run / METRICS_FILE) if WORDS in row}
        if step <= max(logged, default=-1):
            return {"words": int(np.interp(step, [0, *logged], [0, *logged.values()]))}
    return {}

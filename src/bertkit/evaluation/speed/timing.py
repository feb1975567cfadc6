"""Times models against each other: what each model is, and how long its forward pass takes.

All models are loaded into one process, and each cell of the table (a batch size and a length) is timed for all models
in alternation (stopwatch.py), so that anything that slows the machine affects all of them equally. Sentences are random
tokens of one length: no padding, and no time spent on tokenisation.

Shapes: T tokens of a sentence, B sentences of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bertkit.data.batch import PackedBatch
from bertkit.errors import UsageError
from bertkit.evaluation.loaded_model import LoadedModel, short_name
from bertkit.evaluation.run import MeasurementArguments
from bertkit.evaluation.settings import SpeedSettings
from bertkit.evaluation.speed.footprint import Footprint, multiply_adds, outputs, task_head
from bertkit.evaluation.speed.record import Score, methods_by_model, scores_by_model
from bertkit.evaluation.speed.stopwatch import CLOCKS, Timing, time_in_rounds
from bertkit.models.families.bilstm import BilstmConfig
from bertkit.models.files.model_files import CONFIG_FILE
from bertkit.models.headed import HeadedModel
from bertkit.progress import Progress
from bertkit.text.tokenizer import Tokenizer


@dataclass(frozen=True, order=True)
class Cell:
    """A batch size and a length at which all models are timed."""

    batch: int
    length: int

    @property
    def name(self) -> str:
        """The name of the cell in metrics."""
        return f"batch={self.batch}/length={self.length}"


@dataclass(frozen=True)
class TimedModel:
    """A model to time.

    Attributes:
        loaded: the model.
        label: its short name.
        head: the head to time; None for the states of all tokens.
        footprint: its size.
        multiply_adds: multiply-adds of one sentence, by length.
        cannot: why it cannot be timed at a length, by length.
        scores: scores by task.
        method: the method that produced it, and the source of this information.
    """

    loaded: LoadedModel
    label: str
    head: str | None
    footprint: Footprint
    multiply_adds: Mapping[int, int]
    cannot: Mapping[int, str]
    scores: Mapping[str, Score]
    method: tuple[str, str] | None

    @property
    def asked(self) -> str:
        """What is computed: the name of a head, or the encoder."""
        return self.head or "encoder"


Timings = Mapping[Cell, Mapping[str, Timing]]
"""Times of a whole batch, by cell and by label."""


def load_timed_models(
    settings: SpeedSettings, arguments: MeasurementArguments, results: Sequence[str], methods: Sequence[str]
) -> list[TimedModel]:
    """Load the models, and read the records of their runs.

    Raises:
        UsageError: a model is a checkpoint.
    """
    loaded = [LoadedModel.load(name, offline=arguments.offline) for name in settings.models]
    for each in loaded:
        if not (each.directory / CONFIG_FILE).is_file():
            raise UsageError(
                f"--model {each.name}: a checkpoint is the state of training, whose files are not those of a model; all"
                f" models of a run are of one size and speed, so give the run: --model {each.name.rpartition('@')[0]}"
            )
    scores = scores_by_model(loaded, results, arguments.runs_root)
    made_by = methods_by_model(loaded, methods)
    labels = [short_name(name) for name in settings.models]
    if len(set(labels)) < len(labels):
        labels = list(settings.models)
    return [_timed_model(*each, settings.lengths) for each in zip(loaded, labels, scores, made_by, strict=True)]


def _timed_model(
    loaded: LoadedModel,
    label: str,
    scores: Mapping[str, Score],
    method: tuple[str, str] | None,
    lengths: Sequence[int],
) -> TimedModel:
    model = loaded.model
    head = task_head(model)
    cannot = {length: reason for length in lengths if (reason := _unfit(model, length)) is not None}
    return TimedModel(
        loaded=loaded,
        label=label,
        head=head,
        footprint=Footprint.of(model, loaded.directory),
        multiply_adds={length: multiply_adds(model, head, length) for length in lengths if length not in cannot},
        cannot=cannot,
        scores=scores,
        method=method,
    )


def _unfit(model: HeadedModel, length: int) -> str | None:
    """Why a model cannot be timed at a length; None if it can."""
    if length > model.encoder.max_tokens:
        return f"reads at most {model.encoder.max_tokens} tokens"
    return "reads pairs of texts" if length < 2 and reads_pairs(model) else None


def time_models(
    timed_models: Sequence[TimedModel], settings: SpeedSettings, device: torch.device, progress: Progress
) -> Timings:
    """Time every cell, in rounds over all models that can read it."""
    cells = [Cell(batch, length) for batch in settings.batch_sizes for length in settings.lengths]
    for each in timed_models:
        each.loaded.model.to(device).eval()
    timings: dict[Cell, dict[str, Timing]] = {}
    done, clock = 0, CLOCKS[settings.clock]
    with torch.inference_mode(), progress("timing", len(cells) * settings.rounds, "rounds") as meter:
        for cell in cells:
            able = [each for each in timed_models if cell.length not in each.cannot]
            works = [_Work(each, cell, settings.seed, device) for each in able]

            def tick(cell: Cell = cell) -> None:
                nonlocal done
                done += 1
                meter.update(done, cell.name)

            timed = time_in_rounds(works, rounds=settings.rounds, clock=clock, after_round=tick) if works else []
            timings[cell] = {each.label: timing for each, timing in zip(able, timed, strict=True)}
    return timings


class _Work:
    """One model's forward pass on one batch."""

    def __init__(self, timed_model: TimedModel, cell: Cell, seed: int, device: torch.device) -> None:
        self._model, self._head = timed_model.loaded.model, timed_model.head
        pairs = reads_pairs(self._model)
        self._batch = random_batch(timed_model.loaded.tokenizer, cell, seed, pairs=pairs).to(device)
        self._on_cuda = device.type == "cuda"

    def __call__(self) -> None:
        outputs(self._model, self._head, self._batch)
        if self._on_cuda:
            torch.cuda.synchronize()


def random_batch(tokenizer: Tokenizer, cell: Cell, seed: int, *, pairs: bool = False) -> PackedBatch:
    """Sentences of random tokens, between the tokenizer's first and last special token if it has them.

    Args:
        tokenizer: the model's.
        cell: batch size and length.
        seed: seed of the draw.
        pairs: whether the second half of each sentence is a second text.
    """
    plain = np.setdiff1d(np.arange(tokenizer.vocab_size), np.array(sorted(tokenizer.special_ids)))
    ids_BT = np.random.default_rng(seed).choice(plain, size=(cell.batch, cell.length))
    if "cls" in tokenizer.roles:
        ids_BT[:, 0] = tokenizer.cls_id
    if "sep" in tokenizer.roles and cell.length > 1:
        ids_BT[:, -1] = tokenizer.sep_id
    types_BT = np.zeros_like(ids_BT)
    if pairs:
        types_BT[:, -(cell.length // 2) :] = 1
    return PackedBatch.from_ids(ids_BT.tolist(), types_BT.tolist())


def reads_pairs(model: HeadedModel) -> bool:
    """Whether a model only reads pairs of texts."""
    config = model.encoder.config
    return isinstance(config, BilstmConfig) and config.texts == 2 and task_head(model) is not None

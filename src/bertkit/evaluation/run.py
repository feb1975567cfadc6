"""How `bertkit eval` and `bertkit probe` measure: what both are told, the model that is examined, the run directory.

Own design (contract: `eval`, `probe`, the run directory). evaluating/ and probing/ each have a base.py over it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bertkit.errors import DataError
from bertkit.files import read_json
from bertkit.models.headed import HeadedModel
from bertkit.models.hub import check_vocabulary, load_model
from bertkit.models.model_files import encoder_directory, find_model, weights_hash
from bertkit.run.directory import RECORD, RunDirectory, RunIdentity
from bertkit.settings import Settings
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.config import EngineConfig
from bertkit.training.engine import Engine, resolve_engine

Kind = Literal["eval", "probe"]
_MEASURED_BY = {"eval": "suite", "probe": "probe"}
"""What the recorded recipe calls the thing that a run of each kind carried out."""


@dataclass(frozen=True, kw_only=True)
class MeasureRequest:
    """What decides where a measurement runs and is written, and nothing of what it finds.

    Attributes:
        device: where to compute, always in fp32.
        batch_tokens: tokens computed at once; a default of the device's where None. Decides speed and memory alone.
        runs_root: where runs lie.
        run_dir: exactly where this one goes.
        offline: ask no network.
        command: the command line, for the record.
        begun: called with the run's directory before the work starts.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    batch_tokens: int | None = None
    runs_root: Path = Path("runs")
    run_dir: Path | None = None
    offline: bool = False
    command: Sequence[str] = ()
    begun: Callable[[RunDirectory], None] = lambda run: None

    def engine(self) -> Engine:
        """Device and batch, decided.

        Raises:
            UsageError: cuda was asked for and there is none.
        """
        tokens: int | Literal["auto"] = "auto" if self.batch_tokens is None else self.batch_tokens
        return resolve_engine(EngineConfig(device=self.device, precision="fp32", micro_batch_tokens=tokens))


@dataclass(frozen=True)
class LoadedModel:
    """A model that is measured.

    Attributes:
        name: as the user gave it.
        directory: where it was found.
        model, tokenizer: what was read.
        fingerprint: sha256 of the weights' file, or of the index where there are several.
        training: steps, tokens and id of the run that made it; None where it lies in no run directory.
    """

    name: str
    directory: Path
    model: HeadedModel
    tokenizer: Tokenizer
    fingerprint: str
    training: dict[str, Any] | None

    @classmethod
    def load(cls, name: str, *, offline: bool = False) -> LoadedModel:
        """Find and read a model.

        Raises:
            DataError: nothing there, files at fault, or a tokenizer of another model.
        """
        directory = find_model(name, offline=offline)
        inner = encoder_directory(directory)
        model, _ = load_model(directory)
        tokenizer = load_tokenizer(inner)
        check_vocabulary(model, tokenizer, source=name)
        return cls(name, directory, model, tokenizer, weights_hash(inner), _training(directory))


def begin_measurement(
    kind: Kind,
    name: str,
    models: Sequence[LoadedModel],
    settings: Settings,
    request: MeasureRequest,
    *,
    data: Mapping[str, str],
    seed: int = 0,
) -> RunDirectory:
    """A run directory named by the hash of all that decides the result.

    Args:
        kind: of the run.
        name: of the suite, or of the kind of probe.
        models: all that are looked at.
        settings: the suite's own: all that decides the result beside models and data.
        request: where the run goes.
        data: hash of all that is read, by name.
        seed: of all randomness.
    """
    told = settings.model_dump(mode="json")
    hashes, weights = sorted(data.values()), [each.fingerprint for each in models]
    run = RunDirectory.create(
        request.runs_root,
        RunIdentity.of_measurement(
            kind,
            name,
            {
                "kind": kind,
                _MEASURED_BY[kind]: name,
                "models": [each.name for each in models],
                "data": sorted(data),
                "settings": told,
            },
            {"kind": kind, "name": name, "settings": told, "data": hashes, "models": weights},
            seed=seed,
            command=request.command,
            fingerprints={
                "data": _joint_hash(hashes),
                "tokenizer": models[0].tokenizer.fingerprint,
                "model": weights[0] if len(weights) == 1 else _joint_hash(weights),
            },
        ),
        request.run_dir,
    )
    request.begun(run)
    return run


def _joint_hash(hashes: Sequence[str]) -> str:
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def _training(directory: Path) -> dict[str, Any] | None:
    record = directory.parent / RECORD
    if not record.is_file():
        return None
    try:
        told = read_json(record)
    except DataError:
        return None
    return {"run": told.get("id"), "steps": told.get("steps"), "tokens": told.get("tokens")}

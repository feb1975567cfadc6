"""What the suites of `bertkit eval` have in common: the model that is asked, the run directory, the result's shape.

Own design (contract: `eval`). One file a suite does the rest: blimp.py, mlm.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bertkit.errors import DataError
from bertkit.files import read_json
from bertkit.models.find import encoder_directory, find_model
from bertkit.models.headed import HeadedModel
from bertkit.models.hub import check_vocabulary, load_model
from bertkit.models.weight_files import weights_hash
from bertkit.run.directory import RECORD, RunDirectory, RunIdentity
from bertkit.settings import Settings
from bertkit.text.tokenizer import Tokenizer
from bertkit.training.config import EngineConfig
from bertkit.training.engine import Engine, resolve_engine


@dataclass(frozen=True)
class EvalRequest:
    """What every suite is told.

    Attributes:
        model: a Hub id, a model directory or a run directory.
        device: where to compute, always in fp32.
        batch_tokens: tokens computed at once; a default of the device's where None. Decides speed and memory alone.
        runs_root: where runs lie.
        run_dir: exactly where this one goes.
        offline: ask no network.
        command: the command line, for the record.
        begun: called with the run's directory before the work starts.
    """

    model: str
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
class Examined:
    """The model that is evaluated.

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
    def load(cls, name: str, *, offline: bool = False) -> Examined:
        """Find and read a model.

        Raises:
            DataError: nothing there, files at fault, or a tokenizer of another model.
        """
        directory = find_model(name, offline=offline)
        inner = encoder_directory(directory)
        model, _ = load_model(directory)
        tokenizer = Tokenizer.load(inner)
        check_vocabulary(model, tokenizer, source=name)
        return cls(name, directory, model, tokenizer, weights_hash(inner), _training(directory))

    def begin_run(
        self, suite: str, settings: Settings, request: EvalRequest, *, data: Mapping[str, str], seed: int = 0
    ) -> RunDirectory:
        """A run directory of kind `eval`, named by the hash of all that decides the result.

        Args:
            suite: its name.
            settings: the suite's own.
            request: where the run goes.
            data: hash of each file that is read, by its path.
            seed: of all randomness.
        """
        hashes = sorted(data.values())
        deciding = {"suite": suite, "settings": settings.model_dump(mode="json"), "data": hashes}
        recipe = {
            "kind": "eval",
            "suite": suite,
            "model": self.name,
            "data": sorted(data),
            "settings": settings.model_dump(mode="json"),
        }
        run = RunDirectory.create(
            request.runs_root,
            RunIdentity.of_measurement(
                "eval",
                suite,
                recipe,
                {**deciding, "model": self.fingerprint},
                seed=seed,
                command=request.command,
                fingerprints={
                    "data": hashlib.sha256("".join(hashes).encode()).hexdigest(),
                    "tokenizer": self.tokenizer.fingerprint,
                    "model": self.fingerprint,
                },
            ),
            request.run_dir,
        )
        request.begun(run)
        return run


@dataclass(frozen=True)
class Evaluated:
    """What came of it.

    Attributes:
        run: the run directory.
        results: what its results.json holds: the contract's `suite`, `model`, `tasks` and `average`, and more.
    """

    run: RunDirectory
    results: dict[str, Any]

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document of the contract."""
        return {key: self.results[key] for key in ("suite", "model", "tasks", "average")}


def measured_once(value: float | None) -> dict[str, Any]:
    """A metric of a model as it stands: there is one value, and no spread over seeds."""
    return {"mean": value, "std": None, "seeds": [value]}


def _training(directory: Path) -> dict[str, Any] | None:
    record = directory.parent / RECORD
    if not record.is_file():
        return None
    try:
        told = read_json(record)
    except DataError:
        return None
    return {"run": told.get("id"), "steps": told.get("steps"), "tokens": told.get("tokens")}

"""Shared by the suites of `bertkit eval` and the kinds of `bertkit probe`: arguments, run directory, format of results.

Contract: `eval`, `probe`, the run directory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bertkit.errors import UsageError
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.files import joint_sha256
from bertkit.run.directory import RECORD, RunDirectory, RunIdentity
from bertkit.run.finished import CONFIG_FINGERPRINT, finished_before
from bertkit.settings import Settings
from bertkit.text.corpus import Corpus
from bertkit.text.source_options import SourceOptions
from bertkit.text.sources import open_corpus
from bertkit.training.config import EngineConfig
from bertkit.training.engine import Engine, resolve_engine

Kind = Literal["eval", "probe"]
_MEASURED_BY = {"eval": "suite", "probe": "probe"}
"""The key of the recorded recipe that names the suite or probe."""


@dataclass(frozen=True, kw_only=True)
class MeasurementArguments:
    """Where a measurement runs and is written; none of this changes its results.

    Attributes:
        device: where to compute, always in fp32.
        batch_tokens: tokens computed at once; the device's default if None. Affects only speed and memory.
        runs_root: parent directory of runs.
        run_dir: this run's directory, if it is not named by its hash.
        fresh: measure even if a finished run of the same measurement exists.
        offline: do not use the network.
        command: the command line, for the record.
        on_start: called with the run's directory before the work starts.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    batch_tokens: int | None = None
    runs_root: Path = Path("runs")
    run_dir: Path | None = None
    fresh: bool = False
    offline: bool = False
    command: Sequence[str] = ()
    on_start: Callable[[RunDirectory], None] = lambda run: None

    def engine(self) -> Engine:
        """The device and the tokens of a batch.

        Raises:
            UsageError: there is no CUDA device.
        """
        tokens: int | Literal["auto"] = "auto" if self.batch_tokens is None else self.batch_tokens
        return resolve_engine(EngineConfig(device=self.device, precision="fp32", micro_batch_tokens=tokens))


@dataclass(frozen=True)
class EvalArguments(MeasurementArguments):
    """The arguments of every suite.

    Attributes:
        model: a Hub id, a model directory or a run directory.
    """

    model: str


@dataclass(frozen=True)
class EvaluationResult:
    """A finished evaluation.

    Attributes:
        run: the run directory.
        results: the contents of its results.json: the contract's `suite`, `model`, `tasks` and `average`, and others.
    """

    run: RunDirectory
    results: dict[str, Any]

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document that the contract specifies."""
        return {key: self.results[key] for key in ("suite", "model", "tasks", "average")}


def single_score(value: float | None) -> dict[str, Any]:
    """A metric of one model: one value, without a spread over seeds."""
    return {"mean": value, "std": None, "seeds": [value]}


def measurement_identity(
    kind: Kind,
    name: str,
    models: Sequence[LoadedModel],
    settings: Settings,
    arguments: MeasurementArguments,
    *,
    data: Mapping[str, str],
    seed: int = 0,
) -> RunIdentity:
    """The record of a measurement, with the hash of everything that determines its result.

    Args:
        kind: kind of the run.
        name: name of the suite or of the kind of probe.
        models: all models to measure.
        settings: all settings that affect the result, apart from models and data.
        arguments: the arguments, with the command line.
        data: hash of each source, by name.
        seed: seed of all random choices.
    """
    chosen = settings.model_dump(mode="json")
    hashes, weights = sorted(data.values()), [each.fingerprint for each in models]
    configs = [each.config_fingerprint for each in models]
    tokenizers = [each.tokenizer.fingerprint for each in models]
    return RunIdentity.of_measurement(
        kind,
        name,
        {
            "kind": kind,
            _MEASURED_BY[kind]: name,
            "models": [each.name for each in models],
            "data": sorted(data),
            "settings": chosen,
        },
        {"kind": kind, "name": name, "settings": chosen, "data": hashes, "models": weights},
        seed=seed,
        command=arguments.command,
        fingerprints={
            "data": joint_sha256(hashes),
            "tokenizer": joint_fingerprint(tokenizers),
            "model": weights[0] if len(weights) == 1 else joint_sha256(weights),
            CONFIG_FINGERPRINT: joint_fingerprint(configs),
        },
    )


def joint_fingerprint(fingerprints: Sequence[str]) -> str:
    """One fingerprint of all; if they are equal, that one."""
    return fingerprints[0] if len(set(fingerprints)) == 1 else joint_sha256(fingerprints)


def finished_measurement(identity: RunIdentity, arguments: MeasurementArguments) -> RunDirectory | None:
    """The finished run of this measurement, with the same names of models and data; None with `fresh`.

    Raises:
        UsageError: `run_dir` contains a finished run of it that cannot be reused.
    """
    if arguments.fresh:
        return None

    def differs(run: RunDirectory) -> str | None:
        return None if _has_names(run, identity) else "its models or data have other names"

    return finished_before(arguments.runs_root, identity, run_dir=arguments.run_dir, objection=differs)


def _has_names(run: RunDirectory, identity: RunIdentity) -> bool:
    """Whether a run records the same names of models and data, which its hash leaves out."""
    return run.record.get("recipe_sha256") == hashlib.sha256(identity.recipe_yaml.encode()).hexdigest()


def measure(
    identity: RunIdentity, arguments: MeasurementArguments, compute: Callable[[RunDirectory], dict[str, Any]]
) -> EvaluationResult:
    """Compute and write results.json in a new run directory, named by the hash of all that determines the result; an
    unfinished run of the same measurement in `run_dir` is written again.

    Args:
        identity: result of `measurement_identity`.
        arguments: where to write.
        compute: returns the contents of results.json, and may write other files next to it.
    """
    run = _unfinished(identity, arguments) or RunDirectory.create(arguments.runs_root, identity, arguments.run_dir)
    arguments.on_start(run)
    with run.recording(arguments.command):
        run.write_environment()
        results = compute(run)
        run.write_results(results)
    return EvaluationResult(run, results)


def _unfinished(identity: RunIdentity, arguments: MeasurementArguments) -> RunDirectory | None:
    """The run in `run_dir` if it is of the same measurement and did not end, for example because the disk was full."""
    if arguments.fresh or arguments.run_dir is None or not (arguments.run_dir / RECORD).is_file():
        return None
    run = RunDirectory.open(arguments.run_dir)
    recorded = (run.record["kind"], run.record["what_hash"], run.record["fingerprints"])
    same = recorded == (identity.kind, identity.what_hash, dict(identity.fingerprints)) and _has_names(run, identity)
    return run if same and run.status in ("stopped", "failed") else None


def measure_or_reuse(
    identity: RunIdentity, arguments: MeasurementArguments, compute: Callable[[RunDirectory], dict[str, Any]]
) -> EvaluationResult:
    """The results of the finished run of this measurement, or else of `measure`."""
    done = finished_measurement(identity, arguments)
    return measure(identity, arguments, compute) if done is None else EvaluationResult(done, done.results or {})


def open_evaluation_text(
    sources: Sequence[str], arguments: MeasurementArguments, options: SourceOptions | None = None, *, what: str = "text"
) -> Corpus:
    """The text of `--data`.

    Args:
        sources: sources from the command line.
        arguments: determine whether the network may be used.
        options: how the text is read.
        what: kind of text, for the message.

    Raises:
        UsageError: no source.
        DataError: a source cannot be read.
    """
    if not sources:
        raise UsageError(f"no text to evaluate on: give --data SOURCE, {what} that the model was not trained on")
    return open_corpus(sources, options, offline=arguments.offline)

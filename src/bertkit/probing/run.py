"""A probe as a run: its models and data, and the run directory that its report is written to.

Contract: `probe`, the run directory. A kind's run.py reads its data, then calls `run_probe` with a function that
measures and returns a `Report`; see report.py for the files. RUN/results.json contains

    {"kind", "model", "summary", "definitions", "models", "data", "settings"}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from bertkit.errors import UsageError
from bertkit.evaluation.loaded_model import LoadedModel, load_models
from bertkit.evaluation.run import MeasurementArguments, measure_or_reuse, measurement_identity
from bertkit.probing import STORE_GB, ProbeSettings
from bertkit.probing.report import Report, read_sentences
from bertkit.probing.sentence_sources import DrawnSentences, read_texts
from bertkit.progress import Progress, silent_progress
from bertkit.run.directory import RunDirectory
from bertkit.tasks.readers.common import Notes


@dataclass(frozen=True)
class ProbeArguments(MeasurementArguments):
    """Models and data of a probe, and where it runs.

    Attributes:
        models: Hub ids, model or run directories, `RUN@STEP` or `RUN@all`.
        data: text sources, or files that this kind of probe reads.
        test_data: files to compute scores on, for kinds that train on `data`.
        data_dir: folder with a task's official files; the Hub's copy if None.
        store_gb: maximum disk space of hidden states while the probe runs.
        progress: the progress display.
    """

    models: Sequence[str]
    data: Sequence[str] = ()
    test_data: Sequence[str] = ()
    data_dir: Path | None = None
    store_gb: float = STORE_GB
    progress: Progress = silent_progress

    def subjects(self) -> list[LoadedModel]:
        """The models, loaded.

        Raises:
            DataError: nothing there, or damaged files.
        """
        return load_models(self.models, offline=self.offline)

    def subject(self) -> LoadedModel:
        """The model, for kinds that probe exactly one.

        Raises:
            UsageError: several were given.
            DataError: nothing there, or damaged files.
        """
        subjects = self.subjects()
        if len(subjects) > 1:
            names = ", ".join(each.name for each in subjects)
            raise UsageError(f"this probe takes one model, but --model names {names}")
        return subjects[0]

    def texts(self, *, most: int | None = None, seed: int = 0, unique: bool = False) -> DrawnSentences:
        """All sentences of the data, or a sample of them; see `read_texts`."""
        return read_texts(self.data, most=most, seed=seed, unique=unique, offline=self.offline)


@dataclass(frozen=True)
class ProbeResult:
    """The outcome of a probe.

    Attributes:
        run: the run directory; None if nothing is written, as by `points`.
        results: the contents of results.json.
        sentences: the findings in words.
    """

    run: RunDirectory | None
    results: dict[str, Any]
    sentences: Sequence[str] = ()

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document that the contract specifies."""
        known = {key: self.results[key] for key in ("kind", "model", "summary", "definitions")}
        run = None if self.run is None else str(self.run.path)
        return {"kind": known["kind"], "model": known["model"], "run": run, **known}


def run_probe(
    request: ProbeArguments,
    settings: ProbeSettings,
    subjects: Sequence[LoadedModel],
    measure: Callable[[], Report],
    *,
    data: Mapping[str, str],
) -> ProbeResult:
    """Measure in a new run directory and write the report; a finished run of the same measurement is not repeated.

    Raise errors in arguments, models and data before calling this, so that no run directory is created for them.

    Args:
        request: where to write the run.
        settings: the settings of the kind.
        subjects: the models.
        measure: does the work.
        data: hashes of all data read, by name.
    """
    identity = measurement_identity("probe", settings.kind, subjects, settings, request, data=data, seed=settings.seed)

    def compute(run: RunDirectory) -> dict[str, Any]:
        report = measure()
        results = {
            "kind": settings.kind,
            "model": ", ".join(subject.name for subject in subjects),
            "summary": dict(report.summary),
            "definitions": dict(report.definitions),
            "models": [
                {"name": each.name, "label": each.label, "fingerprint": each.fingerprint, "trained": each.training}
                for each in subjects
            ],
            "data": sorted(data),
            "settings": settings.model_dump(mode="json"),
        }
        plain = cast("dict[str, Any]", json.loads(json.dumps(results, default=_plain)))
        report.write(run.path)
        return plain

    found = measure_or_reuse(identity, request, compute)
    return ProbeResult(found.run, found.results, read_sentences(found.run.path))


def left_out(notes: Notes) -> dict[str, Any]:
    """For the summary: counts of sentences that were left out, with the first few named."""
    return {
        what: {"count": count, "such_as": list(notes.named.get(what, ()))[:3]} for what, count in notes.counts.items()
    }


def _plain(value: Any) -> Any:
    """A numpy number or array as plain Python values for JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")

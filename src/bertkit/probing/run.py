"""What the kinds of `bertkit probe` have in common: the models, the run directory, the files that a finding becomes.

Own design (contract: `probe`, the run directory). measure.py of a kind computes (no files), its run.py feeds it
and hands an `Analysis` to `carry_out`, which makes of it

    RUN/results.json            {"kind", "model", "summary", "definitions", "models", "data", "settings"}
    RUN/tables/NAME.csv         what each figure was drawn from
    RUN/figures/NAME.svg, .png
    RUN/summary.txt             a sentence a finding
    RUN/...                     what else an analysis has, such as vectors or a page of HTML
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertkit.errors import UsageError
from bertkit.evaluation.loaded_model import LoadedModel, load_models
from bertkit.evaluation.run import MeasurementArguments, begin_measurement
from bertkit.files import write_text
from bertkit.probing.sentence_sources import Texts, read_texts
from bertkit.progress import Progress, silent_progress
from bertkit.run.directory import RunDirectory
from bertkit.settings import Settings
from bertkit.tasks.readers.common import Notes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = "summary.txt"


@dataclass(frozen=True)
class ProbeRequest(MeasurementArguments):
    """What every kind is told.

    Attributes:
        models: Hub ids, model or run directories, `RUN@STEP` or `RUN@all`.
        data: sources, or files of whatever the kind reads.
        progress: the display.
    """

    models: Sequence[str]
    data: Sequence[str] = ()
    progress: Progress = silent_progress

    def subjects(self) -> list[LoadedModel]:
        """The models, read.

        Raises:
            DataError: nothing there, or files at fault.
        """
        return load_models(self.models, offline=self.offline)

    def subject(self) -> LoadedModel:
        """The model of a kind that looks at one.

        Raises:
            UsageError: several were given.
            DataError: nothing there, or files at fault.
        """
        subjects = self.subjects()
        if len(subjects) > 1:
            names = ", ".join(each.name for each in subjects)
            raise UsageError(f"this probe looks at one model at a time, and --model names {names}")
        return subjects[0]

    def texts(self, *, most: int | None = None, seed: int = 0, unique: bool = False) -> Texts:
        """Sentences of the data, or a draw of them; see `read_texts`."""
        return read_texts(self.data, most=most, seed=seed, unique=unique, offline=self.offline)


@dataclass(frozen=True)
class Finding:
    """One thing that was found: a table, the figure that it was drawn as, and what both say.

    Attributes:
        name: of the files, without suffix.
        sentence: what was computed, on how many of what, and what came out; ends with a full stop.
        columns: of the table, with units where there are any.
        rows: of the table; None is an empty field.
        draw: gives the figure; nothing is drawn where None.
    """

    name: str
    sentence: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = ()
    draw: Callable[[], Figure] | None = None


@dataclass(frozen=True)
class Analysis:
    """What a kind has found.

    Attributes:
        summary: figures, for programs: numbers, texts, lists and objects of them.
        definitions: each figure's formula in words, with the paper and the variant, and what was left out.
        findings: tables, figures and sentences.
        files: what else is written: paths within the run, and functions that write them.
    """

    summary: Mapping[str, Any]
    definitions: Mapping[str, str]
    findings: Sequence[Finding]
    files: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Probed:
    """What came of it.

    Attributes:
        run: the run directory; None where nothing is written, as by `points`.
        results: what its results.json holds.
        sentences: what was found, for people.
    """

    run: RunDirectory | None
    results: dict[str, Any]
    sentences: Sequence[str] = ()

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document of the contract."""
        known = {key: self.results[key] for key in ("kind", "model", "summary", "definitions")}
        run = None if self.run is None else str(self.run.path)
        return {"kind": known["kind"], "model": known["model"], "run": run, **known}


def carry_out(
    kind: str,
    settings: Settings,
    request: ProbeRequest,
    subjects: Sequence[LoadedModel],
    analyse: Callable[[], Analysis],
    *,
    data: Mapping[str, str],
    seed: int = 0,
) -> Probed:
    """Run an analysis inside a new run directory and write what it finds.

    Whatever can be found at fault beforehand (no such word, a model that lacks what is asked for) is better said before
    this is called: there is then no run to show for it.

    Args:
        kind: its name.
        settings: the kind's own: all that decides the result beside models and data.
        request: where the run goes.
        subjects: the models.
        analyse: does the work.
        data: hash of all that is read, by name.
        seed: of all randomness.
    """
    run = begin_measurement("probe", kind, subjects, settings, request, data=data, seed=seed)
    with run.recording(request.command):
        run.write_environment()
        analysis = analyse()
        results: dict[str, Any] = {
            "kind": kind,
            "model": ", ".join(subject.name for subject in subjects),
            "summary": dict(analysis.summary),
            "definitions": dict(analysis.definitions),
            "models": [
                {"name": each.name, "label": each.label, "fingerprint": each.fingerprint, "trained": each.training}
                for each in subjects
            ],
            "data": sorted(data),
            "settings": settings.model_dump(mode="json"),
        }
        sentences = [finding.sentence for finding in analysis.findings]
        results = json.loads(json.dumps(results, default=_plain))
        _write(run.path, analysis)
        run.write_results(results)
    return Probed(run, results, sentences)


def left_out(notes: Notes) -> dict[str, Any]:
    """For a summary: what was left out of the text, counted, with the first few named."""
    return {
        what: {"count": count, "such_as": list(notes.named.get(what, ()))[:3]} for what, count in notes.counts.items()
    }


def _write(directory: Path, analysis: Analysis) -> None:
    from bertkit.evaluation.figures import save

    for finding in analysis.findings:
        if finding.columns:
            path = directory / "tables" / f"{finding.name}.csv"
            path.parent.mkdir(exist_ok=True)
            with path.open("w", encoding="utf-8", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(finding.columns)
                writer.writerows(finding.rows)
        if finding.draw is not None:
            save(finding.draw(), directory / "figures" / finding.name)
    for name, write in analysis.files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    write_text(directory / SUMMARY, "".join(f"{finding.sentence}\n" for finding in analysis.findings))


def _plain(value: Any) -> Any:
    """A numpy number or array as JSON has it."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON")

"""A probe of one model, applied to several: what a model has learned by which checkpoint, or how models differ.

Each model is probed in a run of its own, which is reused like any other; another run has the results of all, see
evaluation/several.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from bertkit.evaluation.loaded_model import LoadedModel, each_name, load_models
from bertkit.evaluation.several import Curve, draw_curve, joined_tables, training_columns
from bertkit.probing import ProbeSettings
from bertkit.probing.report import Finding, Report
from bertkit.probing.run import ProbeArguments, ProbeResult, run_probe

Probe = Callable[[ProbeArguments, Any], ProbeResult]

CURVES = {
    "layers": Curve("layers", "score", "score of the linear probe", panel="task"),
    "structure": Curve("structure", "uuas", "UUAS"),
    "behaviour": Curve("minimal_pairs", "accuracy", "share of pairs, good sentence preferred", line="phenomenon"),
    "contextuality": Curve("contextuality", "self_similarity_adjusted", "self-similarity minus anisotropy"),
}
"""The main figure of a kind of probe, for those that have one."""


def probe_each(request: ProbeArguments, settings: ProbeSettings, probe: Probe) -> ProbeResult:
    """Probe every model and write the run with the results of all; a single model has only its own.

    Args:
        request: with any number of models; `run_dir` is that of the results of all.
        settings: the settings of the kind.
        probe: probes one model and writes a run.

    Raises:
        UsageError: a model is given twice, or as of the probe.
        DataError: as of the probe.
    """
    names = each_name(request.models)
    if settings.compares_models or len(names) == 1:
        return probe(request, settings)
    results = [probe(replace(request, models=[name], run_dir=None), settings) for name in names]
    data = {str(each.run.path): each.run.record["what_hash"] for each in results if each.run is not None}
    subjects = [_without_weights(name, request) for name in names]
    if len({each.label for each in subjects}) < len(subjects):
        subjects = [replace(each, label=each.name) for each in subjects]
    return run_probe(request, settings, subjects, partial(_combined, settings.kind, subjects, results), data=data)


def _without_weights(name: str, request: ProbeArguments) -> LoadedModel:
    """A model for the record, which needs its names and hashes only."""
    (subject,) = load_models([name], offline=request.offline)
    subject.model.to("meta")
    return subject


def _combined(kind: str, subjects: Sequence[LoadedModel], results: Sequence[ProbeResult]) -> Report:
    """The results of all models as one report."""
    rows = training_columns([each.label for each in subjects], [each.training for each in subjects])
    tables = joined_tables(rows, [each.run.path for each in results if each.run is not None])
    curve = CURVES.get(kind)
    findings = [
        Finding(
            name,
            f"The table {name} has the rows of {len(subjects)} models.",
            table,
            partial(draw_curve, curve) if curve is not None and name == curve.table else None,
        )
        for name, table in tables.items()
    ]
    findings += [Finding(each.label, own.sentences[0]) for each, own in zip(subjects, results, strict=True)]
    summary = {
        "models": {each.name: own.results["summary"] for each, own in zip(subjects, results, strict=True)},
        "runs": {each.name: str(own.run and own.run.path) for each, own in zip(subjects, results, strict=True)},
    }
    return Report(summary, results[0].results["definitions"], findings)

"""`probe behaviour`: reads and scores minimal pairs and diagnostics with blanks.

Minimal pairs are those of `eval blimp` (Warstadt et al. 2020, arXiv:1912.00582), scored and averaged by the same code
(evaluation/blimp.py). Diagnostics are Ettinger's (2020, arXiv:1907.13528): cloze, role reversal, negation; files are
read by diagnostics.py, blanks scored by measure.py.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertkit.errors import DataError, UsageError
from bertkit.evaluation.blimp import blimp_results, drawn_pairs, score_paradigms
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.files import sha256_of
from bertkit.models.scoring.rules import ScoringRule, check_distribution, choose_rule
from bertkit.probing.behaviour import BehaviourSettings
from bertkit.probing.behaviour.diagnostics import Diagnostic, diagnostic_files, read_diagnostic
from bertkit.probing.behaviour.measure import DiagnosticScores, blank_rule, score_blanks, score_diagnostic
from bertkit.probing.behaviour.report import DEFINITIONS, diagnostic_findings, diagnostic_summary, pair_findings
from bertkit.probing.report import Finding, Report
from bertkit.probing.run import ProbeArguments, ProbeResult, run_probe
from bertkit.tasks.minimal_pairs import BELOW, Paradigm, matches, read_paradigms, select


def probe_behaviour(request: ProbeArguments, settings: BehaviourSettings) -> ProbeResult:
    """Score and write a run.

    Raises:
        UsageError: no data, several models, nothing matches `only`, or the rule does not fit the model.
        DataError: invalid data or model, or the model has no head to score with.
    """
    if not request.data:
        raise UsageError(
            "no data to score: give --data PATH, minimal pairs (a folder or .jsonl file in BLiMP's format) or"
            " diagnostics (.tsv files of github.com/aetting/lm-diagnostics, or a folder of them)"
        )
    subject = request.subject()
    rule = choose_rule(subject.model, settings.rule, source=subject.name)
    paradigms, diagnostics = read_data([Path(each).expanduser() for each in request.data], settings)
    if diagnostics:
        check_distribution(rule, source=subject.name)
    paths = [*(each.path for each in paradigms), *(each.path for each in diagnostics)]
    data = {str(path): sha256_of(path) for path in dict.fromkeys(paths)}

    def measure() -> Report:
        summary: dict[str, Any] = {"rule": rule.name}
        findings: list[Finding] = []
        if diagnostics:
            scores = [_scored(subject, each, blank_rule(rule), settings, request) for each in diagnostics]
            summary |= {"blank_rule": blank_rule(rule).name, "diagnostics": diagnostic_summary(scores)}
            findings += diagnostic_findings(subject.label, scores, subject.tokenizer, settings.top)
        if paradigms:
            outcomes = score_paradigms(subject, paradigms, settings, request.engine(), request.progress)
            results = blimp_results(outcomes, subject, settings)
            results["tasks"] = {task: {k: v["mean"] for k, v in row.items()} for task, row in results["tasks"].items()}
            kept = {key: value for key, value in results.items() if key not in ("suite", "model", "trained")}
            summary["minimal_pairs"] = kept
            findings += pair_findings(subject.label, outcomes, results)
        return Report(summary, DEFINITIONS, findings)

    return run_probe(request, settings, [subject], measure, data=data)


def read_data(paths: Sequence[Path], settings: BehaviourSettings) -> tuple[list[Paradigm], list[Diagnostic]]:
    """Minimal pairs and diagnostics in all paths; a folder may contain both.

    Raises:
        DataError: a path contains neither, or two entries have the same name.
        UsageError: a pattern of `only` matches nothing.
    """
    paradigms: list[Paradigm] = []
    diagnostics: list[Diagnostic] = []
    for path in paths:
        found = [read_diagnostic(file) for file in diagnostic_files(path) if file.suffix == ".tsv"]
        diagnostics += found
        if path.is_file() and found:
            continue
        if not found or any(any((path / below).glob("*.jsonl")) for below in BELOW):
            paradigms += read_paradigms(path)
    paradigms, diagnostics = _selected(paradigms, diagnostics, settings.only)
    names = [*(each.name for each in paradigms), *(each.name for each in diagnostics)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{', '.join(map(str, paths))}: {twice!r} occurs twice; name one of them")
    return drawn_pairs(paradigms, settings), diagnostics


def _selected(
    paradigms: Sequence[Paradigm], diagnostics: Sequence[Diagnostic], only: Sequence[str]
) -> tuple[list[Paradigm], list[Diagnostic]]:
    """Those that match one of the patterns; all if there are none.

    Raises:
        UsageError: a pattern matches nothing.
    """
    if not only:
        return list(paradigms), list(diagnostics)
    of_pairs = [pattern for pattern in only if any(matches(each, pattern) for each in paradigms)]
    wanted = [each for each in diagnostics if any(fnmatch.fnmatchcase(each.name, pattern) for pattern in only)]
    unmatched = [
        pattern
        for pattern in only
        if pattern not in of_pairs and not any(fnmatch.fnmatchcase(each.name, pattern) for each in wanted)
    ]
    if unmatched and paradigms:
        select(paradigms, unmatched)  # says which name is near
    if unmatched:
        raise UsageError(f"--only {', '.join(unmatched)}: matches none of the diagnostics")
    return select(paradigms, of_pairs) if of_pairs else [], wanted


def _scored(
    subject: LoadedModel,
    diagnostic: Diagnostic,
    rule: type[ScoringRule],
    settings: BehaviourSettings,
    request: ProbeArguments,
) -> DiagnosticScores:
    """Each completion is scored once."""
    completions = dict.fromkeys(
        [each for comparison in diagnostic.comparisons for each in comparison.completions]
        + [each for cloze in diagnostic.clozes for each in cloze.expected]
    )
    scores = score_blanks(
        subject.model,
        subject.tokenizer,
        rule(subject.tokenizer),
        list(completions),
        request.engine(),
        ending=settings.ending,
        progress=request.progress,
    )
    vocab_size = subject.tokenizer.vocab_size
    return score_diagnostic(diagnostic, scores, vocab_size=vocab_size, top=settings.top, margin=settings.margin)

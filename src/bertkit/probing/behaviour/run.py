"""`probe behaviour`: minimal pairs and diagnostics with blanks, scored, tabled and drawn.

Minimal pairs are those of `eval blimp` (Warstadt et al. 2020, arXiv:1912.00582), scored and averaged by the same code
(jobs/evaluating/blimp.py); here they are drawn by phenomenon. Diagnostics are Ettinger's (2020, arXiv:1907.13528):
cloze, role reversal, negation; files in tasks/diagnostics.py, blanks in probes/behaviour.py.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from bertkit.errors import DataError, UsageError
from bertkit.evaluation.blimp import blimp_results, chosen_paradigms, score_paradigms
from bertkit.evaluation.loaded_model import ProbedModel
from bertkit.evaluation.settings import BlimpSettings
from bertkit.files import sha256_of
from bertkit.models.pseudo_likelihood import choose_rule
from bertkit.probing.behaviour.measure import blank_rule, fill_blanks
from bertkit.probing.behaviour.report import Judged, diagnostic_findings, diagnostic_summary, judge, pair_findings
from bertkit.probing.run import Analysis, Finding, Probed, ProbeRequest, carry_out
from bertkit.tasks.diagnostics import Completion, Diagnostic, diagnostic_files, read_diagnostic
from bertkit.tasks.minimal_pairs import BELOW, Paradigm

KIND = "behaviour"


class BehaviourSettings(BlimpSettings):
    """What decides the result, beside model and data; of minimal pairs as in `eval blimp`."""

    top: list[int] = Field([1, 5], min_length=1, description="k of the accuracy in a blank: among the k most probable.")
    margin: float = Field(0.01, ge=0, lt=1, description="Probability by which a clear preference is greater.")
    ending: str = Field("", description="What stands behind a blank, such as a full stop; nothing in the paper's code.")


DEFINITIONS = {
    "accuracy_at_k": "share of blanks whose expected word is among the k most probable tokens (Ettinger 2020); of"
    " several expected words one is enough; only words of one piece can be, so that blanks without any are left out and"
    " counted (blanks_of_more_pieces)",
    "sensitivity": "share of items whose good completion is more probable than each of the bad ones: CPRAG's expected"
    " word than both inappropriate ones; ROLE's target after its own context than after the reversed one; NEG's true"
    " word than the false one, for affirmative and negative contexts apart",
    "sensitivity_by_margin": "the same where its probability is greater by more than the margin",
    "log_p": "nats; a word of one piece by its probability in the blank, one of several by the sum over its pieces,"
    " each with the later ones hidden (Kauf and Ivanova 2023); sensitivity_one_piece leaves items with such words out",
    "blank": "[MASK] behind the context, then the ending (nothing unless settings.ending), then [SEP]; of a model that"
    " reads from left to right, the next token",
    "ties": "what ties with n others counts 1/(n+1): a half with one; of tokens with the same probability at the border"
    " of the top k, the share that has a place",
    "interval": "95%, Wilson 1927",
    "chance": "one over the number of completions compared; k over the size of the vocabulary",
    "minimal_pairs": "as `bertkit eval blimp`: (pseudo-)log-likelihood of the good sentence greater than of the bad"
    " one, sums in nats, a tie counts half; constant_logits is what the number of tokens alone would give",
}


def probe_behaviour(request: ProbeRequest, settings: BehaviourSettings) -> Probed:
    """Score and write a run.

    Raises:
        UsageError: no data, several models, nothing matches `only`, or a rule that does not fit the model.
        DataError: data or model at fault, or the model has no head to score with.
    """
    if not request.data:
        raise UsageError(
            "nothing to look at: give --data PATH, minimal pairs (a folder or .jsonl file of BLiMP's shape) or"
            " diagnostics (.tsv files of github.com/aetting/lm-diagnostics, or a folder of them)"
        )
    subject = request.subject()
    rule = choose_rule(subject.model, settings.rule, source=subject.name)
    paradigms, diagnostics = read_data([Path(each).expanduser() for each in request.data], settings)
    paths = [*(each.path for each in paradigms), *(each.path for each in diagnostics)]
    data = {str(path): sha256_of(path) for path in dict.fromkeys(paths)}

    def analyse() -> Analysis:
        summary: dict[str, Any] = {"rule": rule.name}
        findings: list[Finding] = []
        if diagnostics:
            judged = [_judged(subject, each, settings, request) for each in diagnostics]
            summary |= {"blank_rule": blank_rule(rule).name, "diagnostics": diagnostic_summary(judged)}
            findings += diagnostic_findings(subject.label, judged, settings.top)
        if paradigms:
            outcomes = score_paradigms(subject, paradigms, settings, request.engine(), request.progress)
            results = blimp_results(outcomes, subject, settings)
            results["tasks"] = {task: {k: v["mean"] for k, v in row.items()} for task, row in results["tasks"].items()}
            kept = {key: value for key, value in results.items() if key not in ("suite", "model", "trained")}
            summary["minimal_pairs"] = kept
            findings += pair_findings(subject.label, outcomes, results)
        return Analysis(summary, DEFINITIONS, findings)

    return carry_out(KIND, settings, request, [subject], analyse, data=data, seed=settings.seed)


def read_data(paths: Sequence[Path], settings: BehaviourSettings) -> tuple[list[Paradigm], list[Diagnostic]]:
    """Minimal pairs and diagnostics of all paths; a folder may hold both.

    Raises:
        DataError: a path holds neither, or one name stands for two things.
        UsageError: `only` matches nothing.
    """
    paradigms: list[Paradigm] = []
    diagnostics: list[Diagnostic] = []
    unmatched: UsageError | None = None
    for path in paths:
        found = [read_diagnostic(file) for file in diagnostic_files(path) if file.suffix == ".tsv"]
        diagnostics += [each for each in found if _is_wanted(each.name, settings.only)]
        if path.is_file() and found:
            continue
        if not found or any(any((path / below).glob("*.jsonl")) for below in BELOW):
            try:
                paradigms += chosen_paradigms(path, settings)
            except UsageError as error:
                unmatched = error
    if unmatched is not None and not paradigms and not diagnostics:
        raise unmatched
    if not paradigms and not diagnostics:
        raise UsageError(f"--only {', '.join(settings.only)}: matches none of the diagnostics")
    names = [*(each.name for each in paradigms), *(each.name for each in diagnostics)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{', '.join(map(str, paths))}: {twice!r} is there twice; name one of them")
    return paradigms, diagnostics


def _is_wanted(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _judged(subject: ProbedModel, diagnostic: Diagnostic, settings: BehaviourSettings, request: ProbeRequest) -> Judged:
    """All completions of a diagnostic, each asked for once."""
    asked = dict.fromkeys(
        [each for comparison in diagnostic.comparisons for each in comparison.completions]
        + [each for cloze in diagnostic.clozes for each in cloze.expected]
    )
    completions: list[Completion] = list(asked)
    engine = request.engine()
    rule = blank_rule(choose_rule(subject.model, settings.rule))
    found = fill_blanks(
        subject.model,
        subject.tokenizer,
        rule(subject.tokenizer),
        completions,
        ending=settings.ending,
        max_batch_tokens=engine.micro_batch_tokens,
        device=engine.device,
        progress=request.progress,
    )
    filled = dict(zip(completions, found, strict=True))
    return judge(diagnostic, filled, subject.tokenizer, top=settings.top, margin=settings.margin)

"""`probe attribution`: how much each input token contributes to hidden states and predictions, and whether it can be
recovered.

Brunner et al. 2020, arXiv:1908.04211, sections 2 and 4, for hidden states (measure.py, identifiability.py);
predictions.py and explanations.py for predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bertkit.data.random import Draw
from bertkit.errors import DataError, UsageError
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.models.hook_points import layer_points, point_shapes
from bertkit.probing import LEAST_SENTENCES
from bertkit.probing.attribution import AttributionSettings
from bertkit.probing.attribution.identifiability import identifiability, token_states
from bertkit.probing.attribution.measure import Contributions, contributions, directions, squared_norms
from bertkit.probing.attribution.predictions import check_methods, chosen_methods, explain, make_question
from bertkit.probing.attribution.report import (
    DEFINITIONS,
    TRAIN_SHARE,
    Identifiability,
    contribution_results,
    identifiability_results,
    prediction_finding,
    prediction_summary,
)
from bertkit.probing.report import Finding, Report
from bertkit.probing.run import ProbeArguments, ProbeResult, left_out, run_probe
from bertkit.probing.sentences import EncodedSentence, TextEncoder


@dataclass(frozen=True)
class AttributionInput:
    """The sentences whose Jacobians are computed, those for token identifiability, and the hashes of the sources."""

    jacobians: Sequence[EncodedSentence] = ()
    identify: Sequence[EncodedSentence] = ()
    hashes: dict[str, str] | None = None
    left_out: dict[str, Any] | None = None


def probe_attribution(request: ProbeArguments, settings: AttributionSettings) -> ProbeResult:
    """Measure and write a run.

    Raises:
        UsageError: neither text nor data, several models, no such method or target, a text without a mask, a method
            or baseline that does not fit the model, or too few sentences wanted for token identifiability.
        DataError: unreadable text or model, or too few sentences to train on.
    """
    subject = request.subject()
    methods = chosen_methods(settings.methods, subject.model)
    questions = [make_question(subject, text, settings.target) for text in settings.texts]
    if not questions:
        _refuse(settings, ("target", "methods", "baseline", "steps"), "--text, the text whose prediction to explain")
    if not request.data and not questions:
        raise UsageError("nothing to probe: give --data SOURCE, or --text with a prediction to explain")
    if not request.data:
        _refuse(settings, ("sentences", "directions", "identify_sentences", "epochs"), "--data, the text of Jacobians")
    check_methods(subject, questions, methods, settings.baseline)
    inputs = _read_input(request, settings, subject) if request.data else AttributionInput()

    def measure() -> Report:
        engine = request.engine()
        summary: dict[str, Any] = {}
        findings: list[Finding] = []
        if request.data:
            summary["layers"] = list(range(len(layer_points(subject.model))))
        if inputs.jacobians:
            gathered = _jacobians(request, settings, subject, inputs.jacobians)
            own, found = contribution_results(subject.label, gathered, len(inputs.jacobians), settings.directions)
            summary |= own
            findings += found
        if inputs.identify:
            shares, finding = identifiability_results(
                subject.label, _identifiability(request, settings, subject, inputs.identify)
            )
            summary["identifiability"] = shares
            findings.append(finding)
        if request.data:
            summary["left_out"] = inputs.left_out
        explained = [
            explain(subject, each, methods, baseline=settings.baseline, steps=settings.steps, engine=engine)
            for each in questions
        ]
        summary["predictions"] = [prediction_summary(each) for each in explained]
        findings += [prediction_finding(subject.label, number, each) for number, each in enumerate(explained, 1)]
        return Report(summary, DEFINITIONS, findings)

    return run_probe(request, settings, [subject], measure, data=inputs.hashes or {})


def _refuse(settings: AttributionSettings, names: Sequence[str], needed: str) -> None:
    """Refuse settings that have no effect without an input.

    Raises:
        UsageError: one of them is set.
    """
    for name in names:
        value = getattr(settings, name)
        if value != AttributionSettings.model_fields[name].get_default(call_default_factory=True):
            option = "method" if name == "methods" else name.replace("_", "-")
            shown = value[0] if isinstance(value, list) else value
            raise UsageError(f"--{option} {shown}: also give {needed}, or leave it out; it has no effect alone")


def _read_input(request: ProbeArguments, settings: AttributionSettings, subject: LoadedModel) -> AttributionInput:
    layer_points(subject.model)  # rejects a family without layers before a run is created
    most = max(settings.sentences, settings.identify_sentences)
    if not most:
        raise UsageError("--sentences 0 and --identify-sentences 0 leave nothing to do with --data")
    if 0 < settings.identify_sentences < LEAST_SENTENCES:
        raise UsageError(
            f"--identify-sentences {settings.identify_sentences}: expected 0, or at least {LEAST_SENTENCES}"
        )
    texts = request.texts(most=most, seed=settings.seed)
    encoder = TextEncoder.of(subject.model, subject.tokenizer)
    every = list(encoder.encode(texts.sentences))
    key = Draw(settings.seed, settings.kind).uniform("sentence", sample=np.arange(len(every)))
    order = [every[number] for number in np.argsort(key, kind="stable").tolist()]
    least, fewer = (LEAST_SENTENCES, ", or --identify-sentences 0") if settings.identify_sentences else (1, "")
    if len(every) < least:
        raise DataError(
            f"{', '.join(request.data)}: {len(every)} sentences that the model can read, expected at least {least}"
            f"{f' ({encoder.notes})' if encoder.notes.counts else ''}; give more text{fewer}"
        )
    jacobians, identify = order[: settings.sentences], order[: settings.identify_sentences]
    return AttributionInput(jacobians, identify, texts.hashes, left_out(encoder.notes))


def _jacobians(
    request: ProbeArguments, settings: AttributionSettings, subject: LoadedModel, sentences: Sequence[EncodedSentence]
) -> Contributions:
    engine = request.engine()
    model = subject.model.to(engine.device).eval()
    points = layer_points(model)
    width = point_shapes(model)[points[0]][-1]
    gathered = Contributions()
    with request.progress("Jacobians", len(sentences), "sentences") as meter:
        for number, sentence in enumerate(sentences, 1):
            along_KD = directions(width, settings.directions, seed=settings.seed, sentence=sentence.number)
            squares_Lnn = squared_norms(model, sentence, points, along_KD, max_batch_tokens=engine.micro_batch_tokens)
            gathered.add(contributions(squares_Lnn))
            meter.update(number)
    return gathered


def _identifiability(
    request: ProbeArguments, settings: AttributionSettings, subject: LoadedModel, sentences: Sequence[EncodedSentence]
) -> Identifiability:
    states = token_states(subject.model, sentences, request.engine(), progress=request.progress)
    cut = round(TRAIN_SHARE * len(sentences))
    train, test = states.of(range(cut)), states.of(range(cut, len(sentences)))
    shares = identifiability(train, test, epochs=settings.epochs, seed=settings.seed, progress=request.progress)
    tokens = test.sentence_T.size
    return Identifiability(shares, np.unique(test.sentence_T).size / tokens, train.sentence_T.size, tokens)

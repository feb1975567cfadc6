"""`probe attention`: what every head attends to, which heads are similar, shapes of their maps, what they parse.

Clark et al. 2019, arXiv:1906.04341, and Kovaleva et al. 2019, arXiv:1908.08593; measure.py, head_distances.py,
head_patterns.py and head_syntax.py state where their measures differ from the papers'. Sibling effective_attention/
measures the part of a map that affects the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bertkit.arrays import Int64Array
from bertkit.data.random import Draw
from bertkit.errors import DataError, UsageError
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.files import write_text
from bertkit.models.conversion.pruning import head_numbers, require_equal_heads
from bertkit.probing.annotated import drawn, hashes_of
from bertkit.probing.attention import AttentionSettings
from bertkit.probing.attention.head_distances import HeadDistances
from bertkit.probing.attention.head_patterns import PATTERNS, classify, pairs
from bertkit.probing.attention.head_syntax import DependencyScores, among_words
from bertkit.probing.attention.measure import HeadSums, Maps, SpecialTokens, attention_maps, pattern_points
from bertkit.probing.attention.report import DEFINITIONS, AttentionResults, PatternCounts, attention_report
from bertkit.probing.attention.viewer import ViewedSentence, viewer_page
from bertkit.probing.report import Report
from bertkit.probing.run import ProbeArguments, ProbeResult, left_out, run_probe
from bertkit.probing.sentence_sources import existing, is_treebank
from bertkit.probing.sentences import EncodedSentence, Sentence, TextEncoder
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.readers.common import Notes
from bertkit.tasks.readers.trees import TreeExample, read_trees
from bertkit.training.engine import Engine

_VIEWED_TOKENS = range(6, 33)
"""Lengths of the sentences sampled for the viewer."""


@dataclass(frozen=True)
class AttentionInput:
    """The sentences to measure.

    Attributes:
        sentences: encoded sentences; `number` is an index into `trees`, if there are any.
        hashes: hashes of the sources.
        available: number of sentences in them.
        notes: what was left out.
        trees: trees of the sentences drawn from treebanks; empty for other text.
    """

    sentences: list[EncodedSentence]
    hashes: dict[str, str]
    available: int
    notes: Notes
    trees: list[TreeExample] = field(default_factory=list)


def probe_attention(request: ProbeArguments, settings: AttentionSettings) -> ProbeResult:
    """Measure and write a run.

    Raises:
        UsageError: no data, several models, or no token drawn to compare heads on.
        DataError: unreadable text or model, an invalid tree, or a model without attention maps.
    """
    subject = request.subject()
    require_equal_heads(subject.model.encoder)
    pattern_points(subject.model)
    inputs = read_input(request, settings, subject)
    if not inputs.sentences:
        raise DataError(f"{', '.join(request.data)}: no sentence that the model can read ({inputs.notes})")
    viewed = _viewed(settings, subject, inputs)

    def measure_all() -> Report:
        engine = request.engine()
        results = measure(request, settings, subject, inputs, engine)
        summary, findings = attention_report(subject.label, results)
        summary |= {"sentences_in_data": inputs.available, "left_out": left_out(inputs.notes)}
        pages = []
        for sentence in viewed:
            (maps,) = attention_maps(subject.model, [sentence], engine)
            pages.append(ViewedSentence([subject.tokenizer.token(int(i)) for i in sentence.ids_T], maps.of(0)))
        if not pages:
            return Report(summary, DEFINITIONS, findings)
        page = viewer_page(subject.label, results.numbers, pages)
        return Report(summary, DEFINITIONS, findings, {"viewer.html": lambda path: write_text(path, page)})

    return run_probe(request, settings, [subject], measure_all, data=inputs.hashes)


def read_input(request: ProbeArguments, settings: AttentionSettings, subject: LoadedModel) -> AttentionInput:
    """The sentences, with their trees if all sources are treebanks."""
    encoder = TextEncoder.of(subject.model, subject.tokenizer)
    if not request.data or not all(map(is_treebank, request.data)):
        texts = request.texts(most=settings.sentences, seed=settings.seed)
        return AttentionInput(list(encoder.encode(texts.sentences)), texts.hashes, texts.available, encoder.notes)
    paths = list(dict.fromkeys(existing(source) for source in request.data))
    every = [tree for path in paths for tree in read_trees(path)]
    trees = drawn(every, settings.sentences, Draw(settings.seed, "probe"), "sentence")
    sentences = list(encoder.encode(Sentence(tree.id, words=tree.words) for tree in trees))
    return AttentionInput(sentences, hashes_of(paths), len(every), encoder.notes, trees)


def measure(
    request: ProbeArguments, settings: AttentionSettings, subject: LoadedModel, inputs: AttentionInput, engine: Engine
) -> AttentionResults:
    """Run all passes over the sentences."""
    tokens = sum(sentence.ids_T.size for sentence in inputs.sentences)
    sums = HeadSums(SpecialTokens.of(subject.tokenizer))
    distances = HeadDistances(settings.divergence_tokens / tokens, Draw(settings.seed, settings.kind))
    relations = sorted({_relation(name) for tree in inputs.trees for name in tree.relations})
    parsed, random = DependencyScores(relations), DependencyScores(relations)
    with request.progress("attention maps", len(inputs.sentences), "sentences") as meter:
        for maps in attention_maps(subject.model, inputs.sentences, engine):
            sums.add(maps)
            distances.add(maps)
            _add_trees(parsed, maps, inputs.trees)
            meter.update(sums.sentences)
    if not distances.tokens:
        raise UsageError(
            f"--divergence-tokens {settings.divergence_tokens}: by chance no token was drawn to compare heads on; raise"
            " it"
        )
    if inputs.trees:
        with request.progress("random weights", len(inputs.sentences), "sentences") as meter:
            done = 0
            for maps in attention_maps(subject.random_twin(settings.seed).model, inputs.sentences, engine):
                _add_trees(random, maps, inputs.trees)
                done += len(maps.sentences)
                meter.update(done)
    profile = sums.profile()
    layers, heads = profile.values["self"].shape
    return AttentionResults(
        head_numbers(subject.model.encoder, layers=layers, heads=heads),
        profile,
        distances.means(),
        distances.tokens,
        _patterns(subject, settings, inputs, engine),
        parsed.scores(least=settings.least_words),
        random.scores(least=settings.least_words),
    )


def _relation(name: str) -> str:
    """The relation without its subtype; `nmod:poss` keeps it because the paper scores possessors."""
    return name if name == "nmod:poss" else name.split(":")[0]


def _add_trees(scores: DependencyScores, maps: Maps, trees: Sequence[TreeExample]) -> None:
    if not trees:
        return
    for place, sentence in enumerate(maps.sentences):
        tree = trees[sentence.number]
        if len(tree.words) != len(sentence.words):
            raise DataError(f"sentence {tree.id}: {len(tree.words)} words, of which {len(sentence.words)} were read")
        scores.add(among_words(maps.of(place), sentence), tree.heads, [_relation(name) for name in tree.relations])


def _patterns(
    subject: LoadedModel, settings: AttentionSettings, inputs: AttentionInput, engine: Engine
) -> PatternCounts | None:
    """How often each head's map has each shape; None if no pair fits."""
    config = subject.config
    notes = Notes()
    sequences = SequenceEncoder(subject.tokenizer, max_tokens=config.max_tokens, token_types=config.reads_token_types)
    some = inputs.sentences[: 2 * settings.pattern_pairs]
    first_words = {pair.number: (pair, words) for pair, words in pairs(some, sequences, notes)}
    if not first_words:
        return None
    counts_AP: Int64Array | int = 0
    for maps in attention_maps(subject.model, [pair for pair, _ in first_words.values()], engine):
        for place, pair in enumerate(maps.sentences):
            shape_A = classify(maps.of(place), pair, first_words[pair.number][1])
            counts_AP = counts_AP + np.eye(len(PATTERNS), dtype=np.int64)[shape_A]
    assert not isinstance(counts_AP, int)
    return PatternCounts(counts_AP, len(first_words), sum(notes.counts.values()))


def _viewed(settings: AttentionSettings, subject: LoadedModel, inputs: AttentionInput) -> list[EncodedSentence]:
    """The viewer's sentences.

    Raises:
        UsageError: one of `show` cannot be read.
    """
    if not settings.show:
        fit = [each for each in inputs.sentences if each.ids_T.size in _VIEWED_TOKENS]
        return (fit or inputs.sentences)[: settings.viewed]
    encoder = TextEncoder.of(subject.model, subject.tokenizer)
    found = list(encoder.encode(Sentence(text[:60], text) for text in settings.show))
    if len(found) < len(settings.show):
        raise UsageError(f"--show: {encoder.notes}; give sentences with words that fit the model's maximum length")
    return found

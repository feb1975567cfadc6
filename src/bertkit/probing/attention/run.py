"""`probe attention`: where every head looks, which heads are alike, what their maps' shapes are, and what they parse.

Clark et al. 2019, arXiv:1906.04341, and Kovaleva et al. 2019, arXiv:1908.08593; the measures and where they differ from
the papers' are in probes/attention.py, head_distances.py, head_patterns.py and head_syntax.py. Sibling
effective_attention.py looks at the part of a map that makes a difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import Field
from torch import Tensor

from bertkit.data.random import Draw
from bertkit.errors import DataError, UsageError
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.files import sha256_of, write_text
from bertkit.models.headed import HeadedModel
from bertkit.probing.attention.head_distances import HeadDistances
from bertkit.probing.attention.head_patterns import PATTERNS, classify, pairs
from bertkit.probing.attention.head_syntax import FARTHEST, DependencyScores, among_words
from bertkit.probing.attention.measure import Columns, HeadSums, Maps, attention_maps, pattern_points
from bertkit.probing.attention.report import AttentionReport, Measured, PatternCounts
from bertkit.probing.attention.viewer import ViewedSentence, viewer_page
from bertkit.probing.run import Analysis, Probed, ProbeRequest, carry_out, left_out
from bertkit.probing.sentence_sources import is_treebank
from bertkit.probing.sentences import EncodedSentence, Sentence, TextEncoder
from bertkit.settings import Settings
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.readers.common import Notes
from bertkit.tasks.readers.trees import TreeExample, read_trees
from bertkit.training.engine import Engine

KIND = "attention"
_VIEWED_TOKENS = range(6, 33)
"""Lengths of sentences that are drawn for the viewer."""


class AttentionSettings(Settings):
    """What decides the result, beside model and text."""

    sentences: int = Field(1000, ge=1, description="Sentences, drawn at random from the text.")
    divergence_tokens: int = Field(
        5000,
        ge=1,
        description="Tokens whose attention is compared between all heads, about; all where there are fewer.",
    )
    pattern_pairs: int = Field(100, ge=0, description="Pairs of sentences whose maps are sorted by shape.")
    least_words: int = Field(50, ge=1, description="A relation with fewer words is not reported.")
    show: list[str] = Field(default_factory=list, description="Sentences of the viewer; empty: some of the text.")
    viewed: int = Field(6, ge=0, description="Sentences of the viewer where none are given.")
    seed: int = Field(0, ge=0, description="Of all choices.")


DEFINITIONS = {
    "head": "layer-head, both counted from 1 as in Clark et al. 2019: 2-3 is `blocks.1.attn.hook_pattern`, head 2",
    "share": "attention to [CLS], [SEP], words of punctuation, the token itself, the one before and the one behind it:"
    " mean over all tokens that attend, the first and the last included (Clark et al. 2019, section 3); tokens of all"
    " sentences weigh the same",
    "entropy": "of a token's attention, in nats, mean over tokens; `even` is the mean of ln n, what a head would have"
    " that attends to all n tokens alike. Not smoothed, unlike the code published with the paper",
    "distance": "mean distance of a token from what it attends to, in tokens",
    "divergence": "Jensen-Shannon divergence of two heads' attention, in nats, mean over tokens (the paper adds up);"
    " 0 to ln 2; the map is metric multidimensional scaling of it (SMACOF from the classical solution)",
    "pattern": "shape of a map of a pair of sentences by a rule on three shares (v: attention to special tokens; d: to"
    " ordinary tokens at most 1 away; s: of attention among ordinary tokens, what stays in the own sentence): vertical,"
    " diagonal or both where v + d >= 1/2 (one alone where it is 4/5 of the sum), else block where s >= 3/4, else"
    " heterogeneous. Kovaleva et al. 2019 used a convolutional network trained on some 400 maps sorted by hand",
    "dependencies": "accuracy of `the word with most attention is the syntactic head` for words that have one: word"
    " attention is the sum over the attended word's pieces and the mean over the attending word's; special tokens and"
    " the word itself left out; both directions; the best head is chosen on the same sentences (Clark et al. 2019,"
    f" table 1). Baseline: the best fixed offset of -{FARTHEST} to {FARTHEST} for the relation, chosen likewise."
    " `all` leaves punctuation out; subtypes count as their relation, but for nmod:poss",
    "random": "the same choice among the heads of the same model with weights drawn anew",
    "dtype": "float32 maps, float64 sums",
}


@dataclass(frozen=True)
class Material:
    """The sentences that are looked at.

    Attributes:
        sentences: encoded; `number` is a place in `trees`, where there are any.
        trees: what was drawn of treebanks; empty of other text.
        hashes: of the sources.
        available: sentences in them.
        notes: what was left out.
    """

    sentences: list[EncodedSentence]
    trees: list[TreeExample]
    hashes: dict[str, str]
    available: int
    notes: Notes


def probe_attention(request: ProbeRequest, settings: AttentionSettings) -> Probed:
    """Measure and write a run.

    Raises:
        UsageError: no data, or several models.
        DataError: text or model at fault, a tree that is none, or a model without attention maps.
    """
    subject = request.subject()
    layers = len(pattern_points(subject.model))
    material = read_material(request, settings, subject)
    if not material.sentences:
        raise DataError(f"{', '.join(request.data)}: no sentence that the model can read ({material.notes})")
    viewed = _viewed(settings, subject, material)

    def analyse() -> Analysis:
        engine = request.engine()
        measured = measure(subject, settings, material, engine, request)
        pages = [
            ViewedSentence([subject.tokenizer.token(int(i)) for i in sentence.ids_T], maps)
            for sentence, maps in _maps_in_order(subject.model, viewed, engine)
        ]
        report = AttentionReport(subject.label, measured)
        summary = report.summary() | {
            "sentences_in_data": material.available,
            "left_out": left_out(material.notes),
        }
        files = {}
        if pages:
            heads = measured.profile.values["self"].shape[1]
            page = viewer_page(subject.label, layers, heads, pages)
            files["viewer.html"] = lambda path: write_text(path, page)
        return Analysis(summary, DEFINITIONS, report.findings(), files)

    return carry_out(KIND, settings, request, [subject], analyse, data=material.hashes, seed=settings.seed)


def read_material(request: ProbeRequest, settings: AttentionSettings, subject: LoadedModel) -> Material:
    """The sentences, with their trees where all sources are treebanks."""
    encoder = TextEncoder.of(subject.model, subject.tokenizer)
    if not request.data or not all(map(is_treebank, request.data)):
        texts = request.texts(most=settings.sentences, seed=settings.seed)
        sentences = list(encoder.encode(texts.sentences))
        return Material(sentences, [], texts.hashes, texts.available, encoder.notes)
    paths = [Path(source).expanduser() for source in request.data]
    for path in paths:
        if not path.is_file():
            raise DataError(f"{path}: no such file")
    hashes = {source: sha256_of(path) for source, path in zip(request.data, paths, strict=True)}
    every = [tree for path in paths for tree in read_trees(path)]
    keys = Draw(settings.seed, "probe").uniform("sentence", sample=np.arange(len(every)))
    drawn = np.sort(np.argsort(keys, kind="stable")[: settings.sentences]).tolist()
    trees = [every[number] for number in drawn]
    sentences = list(encoder.encode(Sentence(tree.id, words=tree.words) for tree in trees))
    return Material(sentences, trees, hashes, len(every), encoder.notes)


def measure(
    subject: LoadedModel, settings: AttentionSettings, material: Material, engine: Engine, request: ProbeRequest
) -> Measured:
    """All passes over the sentences."""
    tokens = sum(sentence.ids_T.size for sentence in material.sentences)
    sums = HeadSums(Columns.of(subject.tokenizer))
    distances = HeadDistances(settings.divergence_tokens / tokens, Draw(settings.seed, KIND))
    relations = sorted({_relation(name) for tree in material.trees for name in tree.relations})
    scores = DependencyScores(relations) if relations else None
    with request.progress("attention maps", len(material.sentences), "sentences") as meter:
        for maps in _maps(subject.model, material.sentences, engine):
            sums.add(maps)
            distances.add(maps)
            if scores is not None:
                _add_trees(scores, maps, material.trees)
            meter.update(sums.sentences)
    if not distances.tokens:
        raise DataError("no token was drawn to compare heads by; raise --sentences")
    random = DependencyScores(relations) if relations else None
    if random is not None:
        with request.progress("random weights", len(material.sentences), "sentences") as meter:
            done = 0
            for maps in _maps(subject.random_twin(settings.seed).model, material.sentences, engine):
                _add_trees(random, maps, material.trees)
                done += len(maps.sentences)
                meter.update(done)
    return Measured(
        sums.profile(),
        distances.means(),
        distances.tokens,
        _patterns(subject, settings, material, engine),
        [] if scores is None else scores.figures(least=settings.least_words),
        [] if random is None else random.figures(least=settings.least_words),
    )


def _relation(name: str) -> str:
    """Without its subtype; `nmod:poss` keeps it, for possessors are what the paper asks about."""
    return name if name == "nmod:poss" else name.split(":")[0]


def _add_trees(scores: DependencyScores, maps: Maps, trees: Sequence[TreeExample]) -> None:
    for place, sentence in enumerate(maps.sentences):
        tree = trees[sentence.number]
        if len(tree.words) != len(sentence.words):
            raise DataError(f"sentence {tree.id}: {len(tree.words)} words, of which {len(sentence.words)} were read")
        scores.add(among_words(maps.of(place), sentence), tree.heads, [_relation(name) for name in tree.relations])


def _patterns(
    subject: LoadedModel, settings: AttentionSettings, material: Material, engine: Engine
) -> PatternCounts | None:
    """How often each head's map has each shape; None where no pair fits."""
    config = subject.config
    notes = Notes()
    try:
        sequences = SequenceEncoder(
            subject.tokenizer, max_tokens=config.max_tokens, token_types=config.reads_token_types
        )
    except UsageError:
        return None
    some = material.sentences[: 2 * settings.pattern_pairs]
    first_words = {pair.number: (pair, words) for pair, words in pairs(some, sequences, notes)}
    if not first_words:
        return None
    counts: np.ndarray | None = None
    for maps in _maps(subject.model, [pair for pair, _ in first_words.values()], engine):
        for place, pair in enumerate(maps.sentences):
            shapes_A = classify(maps.of(place), pair, first_words[pair.number][1])
            counts = np.zeros((shapes_A.size, len(PATTERNS)), dtype=np.int64) if counts is None else counts
            counts[np.arange(shapes_A.size), shapes_A] += 1
    assert counts is not None
    return PatternCounts(counts, len(first_words), sum(notes.counts.values()))


def _viewed(settings: AttentionSettings, subject: LoadedModel, material: Material) -> list[EncodedSentence]:
    """The viewer's sentences.

    Raises:
        UsageError: one that was asked for cannot be read.
    """
    if not settings.show:
        fit = [each for each in material.sentences if each.ids_T.size in _VIEWED_TOKENS]
        return (fit or material.sentences)[: settings.viewed]
    encoder = TextEncoder.of(subject.model, subject.tokenizer)
    found = list(encoder.encode(Sentence(text[:60], text) for text in settings.show))
    if len(found) < len(settings.show):
        raise UsageError(f"--show: {encoder.notes}; give sentences with words that the model can read whole")
    return found


def _maps(model: HeadedModel, sentences: Sequence[EncodedSentence], engine: Engine) -> Iterator[Maps]:
    return attention_maps(model, sentences, max_batch_tokens=engine.micro_batch_tokens, device=engine.device)


def _maps_in_order(
    model: HeadedModel, sentences: Sequence[EncodedSentence], engine: Engine
) -> Iterator[tuple[EncodedSentence, Tensor]]:
    for sentence in sentences:
        for maps in _maps(model, [sentence], engine):
            yield sentence, maps.of(0)

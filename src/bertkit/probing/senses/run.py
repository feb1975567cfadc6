"""`probe senses`: nearest-neighbour disambiguation by layer on sense-annotated files, and pictures of words' senses.

Wiedemann et al. 2019, arXiv:1909.10430; the rules are in measure.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from bertkit.data.random import Draw
from bertkit.errors import DataError, UsageError
from bertkit.models.hook_points import layer_points
from bertkit.probing.annotated import (
    align,
    check_aligned,
    check_store,
    drawn,
    hashes_of,
    kept_states,
    train_and_test,
    width_of,
)
from bertkit.probing.report import Report
from bertkit.probing.run import ProbeArguments, ProbeResult, left_out, run_probe
from bertkit.probing.senses import Candidates, SensesSettings
from bertkit.probing.senses.measure import (
    FrequentSenses,
    backed_off,
    cosines,
    knn_answers,
    left_out_purity,
    sense_scores,
)
from bertkit.probing.senses.report import DEFINITIONS, SensesScores, TestResult, WordPicture
from bertkit.probing.sentence_sources import existing
from bertkit.probing.sentences import EncodedSentence, TextEncoder
from bertkit.probing.state_store import StateStore
from bertkit.tasks.readers.senses import DATA, SenseMark, SenseSentence, read_senses

LAST = 4
"""Number of layers that the paper concatenates."""
_LEAST_OCCURRENCES = 5
_NO_GOLD = "words without a gold sense (left out)"


@dataclass(frozen=True)
class Marks:
    """Words with senses, and the sentences that contain them.

    Attributes:
        name: name of the file.
        sentences: sentences with at least one of the marks.
        wanted: positions of the marks in each sentence; states are kept in this order.
        marks: marks of all sentences, in this order.
        words: the words as written.
    """

    name: str
    sentences: Sequence[EncodedSentence]
    wanted: Sequence[Sequence[int]]
    marks: Sequence[SenseMark]
    words: Sequence[str]

    def by_group(self, candidates: Candidates) -> dict[str, list[int]]:
        """Numbers of the marks to compare with each other, by group."""
        groups: dict[str, list[int]] = {}
        for number, (mark, word) in enumerate(zip(self.marks, self.words, strict=True)):
            groups.setdefault(group_of(mark, word, candidates), []).append(number)
        return groups


def group_of(mark: SenseMark, word: str, candidates: Candidates) -> str:
    """The key that examples must share with a word to be compared with it."""
    if candidates == "word":
        return word.lower()
    return mark.lemma if candidates == "lemma" else f"{mark.lemma}/{mark.pos}"


def probe_senses(request: ProbeArguments, settings: SensesSettings) -> ProbeResult:
    """Disambiguate the words of test files, or of a held-out fifth of the one file's sentences, and write a run.

    Raises:
        UsageError: no data or several files, several models, or too much disk space.
        DataError: invalid model or files, no gold senses, or a word to plot that is too rare.
    """
    subject = request.subject()
    if len(request.data) != 1:
        given = ", ".join(request.data) or "nothing"
        raise UsageError(f"this probe takes its examples from one file: give --data semcor.jsonl (given: {given})")
    train_path = existing(request.data[0])
    test_paths = [existing(each, option="--test-data") for each in request.test_data]
    everything = read_senses(train_path)
    train, counted, tests = _divided(everything, train_path, test_paths, settings)
    encoder = TextEncoder.of(subject.model, subject.tokenizer)
    picture_encoder = TextEncoder.of(subject.model, subject.tokenizer)  # with separate notes
    pictured = {word: _occurrences(word, everything, picture_encoder) for word in settings.words}
    tested = [_marks(name, sentences, encoder, lambda *_: True) for name, sentences in tests.items()]
    for each in tested:
        check_aligned(each.marks, encoder, each.name, 1)
    groups = {group for each in tested for group in each.by_group(settings.candidates)}
    trained = _marks(
        str(train_path), train, encoder, lambda mark, word: group_of(mark, word, settings.candidates) in groups
    )
    if not trained.marks:
        raise DataError(f"{train_path}: none of the words of {', '.join(tests)} occurs in the {len(train):,} sentences")
    points = layer_points(subject.model)
    rows = len(trained.marks) + sum(len(each.marks) for each in tested)
    check_store(len(points), rows, width_of(subject.model, points), request.store_gb)
    # Counting needs no states, so the back-off also counts sentences that were not drawn.
    frequent = FrequentSenses((m.lemma, m.pos, m.keys[0]) for each in counted for m in each.marks if m.keys)

    def measure() -> Report:
        with ExitStack() as stack:
            stores = [
                stack.enter_context(kept_states(request, subject, each.sentences, points, wanted=each.wanted))
                for each in (trained, *tested, *pictured.values())
            ]
            results = [
                _result(each, store, trained, stores[0], frequent, settings)
                for each, store in zip(tested, stores[1:], strict=False)
            ]
            pictures = [
                _picture(word, marks, store, settings.seed)
                for (word, marks), store in zip(pictured.items(), stores[1 + len(tested) :], strict=True)
            ]
        scores = SensesScores(subject.label, sorted(set(settings.ks)), len(trained.marks), results, pictures)
        return Report(scores.summary() | {"left_out": left_out(encoder.notes)}, DEFINITIONS, scores.findings())

    return run_probe(request, settings, [subject], measure, data=hashes_of([train_path], test_paths))


def _divided(
    sentences: Sequence[SenseSentence], train_path: Path, test_paths: Sequence[Path], settings: SensesSettings
) -> tuple[list[SenseSentence], Sequence[SenseSentence], dict[str, list[SenseSentence]]]:
    """Sentences with examples, those in which the back-off counts senses, and those of each test file by its name."""
    draw = Draw(settings.seed, settings.kind)
    most = settings.sentences or len(sentences)
    if test_paths:
        names = [path.name.removesuffix(DATA).partition(".")[0] for path in test_paths]
        shown = [name if names.count(name) == 1 else str(path) for name, path in zip(names, test_paths, strict=True)]
        tests = {name: read_senses(path) for name, path in zip(shown, test_paths, strict=True)}
        return drawn(sentences, most, draw, "train"), sentences, tests
    whole, test = train_and_test(sentences, None, len(sentences), len(sentences), draw)
    return drawn(whole, most, draw, "train"), whole, {f"{train_path.name.partition('.')[0]} (held out)": test}


def _occurrences(word: str, sentences: Sequence[SenseSentence], encoder: TextEncoder) -> Marks:
    """Every occurrence of a lemma with a sense, including sentences that were not drawn.

    Raises:
        DataError: it occurs too rarely; suggests the nearest lemmas.
    """
    lemma = word.lower().replace(" ", "_")
    counts = Counter(mark.lemma for sentence in sentences for mark in sentence.marks if mark.keys)
    if not counts[lemma]:
        often = [name for name, count in counts.items() if count >= _LEAST_OCCURRENCES]
        near = get_close_matches(lemma, often, n=3)
        hint = f"; similar lemmas: {', '.join(near)}" if near else ""
        raise DataError(f"--word {word}: never occurs with a sense{hint}")
    marks = _marks(word, sentences, encoder, lambda mark, _: mark.lemma == lemma)
    if len(marks.marks) < _LEAST_OCCURRENCES:
        raise DataError(
            f"--word {word}: occurs {len(marks.marks)} times with a sense, a picture needs {_LEAST_OCCURRENCES}; choose"
            " a more frequent word"
        )
    return marks


def _marks(
    name: str, given: Sequence[SenseSentence], encoder: TextEncoder, is_wanted: Callable[[SenseMark, str], bool]
) -> Marks:
    """The requested marks with gold senses; `is_wanted` is called with a mark and its word as written."""
    kept: dict[int, list[SenseMark]] = {}
    for sentence in given:
        for mark in sentence.marks:
            if not mark.keys:
                encoder.notes.add(_NO_GOLD, f"{sentence.id}: {sentence.words[mark.place]}")
            elif is_wanted(mark, sentence.words[mark.place]):
                kept.setdefault(id(sentence), []).append(mark)
    pairs = align(encoder, [sentence for sentence in given if id(sentence) in kept])
    marked = [(sentence, mark) for sentence, _ in pairs for mark in kept[id(sentence)]]
    return Marks(
        name,
        [encoded for _, encoded in pairs],
        [[mark.place for mark in kept[id(sentence)]] for sentence, _ in pairs],
        [mark for _, mark in marked],
        [sentence.words[mark.place] for sentence, mark in marked],
    )


def configurations(layers: int) -> dict[str, tuple[int, ...]]:
    """Every layer, and the last four concatenated (if there are fewer, all except the embeddings), by name."""
    last = min(LAST, layers - 1)
    single = {f"layer {number}": (number,) for number in range(layers)}
    return single | {f"last {last} layers": tuple(range(layers - last, layers))}


def _result(
    tested: Marks,
    store: StateStore,
    trained: Marks,
    train_store: StateStore,
    frequent: FrequentSenses,
    settings: SensesSettings,
) -> TestResult:
    gold = [mark.keys for mark in tested.marks]
    senses = [mark.keys[0] for mark in trained.marks]
    tests, trains = tested.by_group(settings.candidates), trained.by_group(settings.candidates)
    others = [frequent.of(mark.lemma, mark.pos) for mark in tested.marks]
    alone, with_back_off = {}, {}
    for name, layers in configurations(store.layers).items():
        tables = [(store.layer(number), train_store.layer(number)) for number in layers]
        answers = knn_answers(tests, trains, tables, senses, sorted(set(settings.ks)), capped=settings.capped)
        alone[name] = {k: sense_scores(gold, found) for k, found in answers.items()}
        with_back_off[name] = {k: sense_scores(gold, backed_off(found, others)) for k, found in answers.items()}
    return TestResult(tested.name, alone, with_back_off, sense_scores(gold, others))


def _picture(word: str, marks: Marks, store: StateStore, seed: int) -> WordPicture:
    """All occurrences of a lemma in a plane, by t-SNE on the concatenation of the last four layers."""
    from sklearn.manifold import TSNE

    senses = tuple(mark.keys[0] for mark in marks.marks)
    *_, last = configurations(store.layers).values()
    tables = [store.layer(number) for number in last]
    similarity_NN = cosines(tables, tables)
    perplexity = min(30.0, (len(senses) - 1) / 3)
    plane = TSNE(metric="precomputed", init="random", perplexity=perplexity, random_state=seed)
    places_N2 = plane.fit_transform(np.clip(1 - similarity_NN, 0, None))
    return WordPicture(word, senses, np.asarray(places_N2, np.float64), left_out_purity(similarity_NN, senses))

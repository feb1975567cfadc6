"""`probe senses`: sense-annotated files to nearest-neighbour disambiguation by layer, and a picture of a word's senses.

Wiedemann et al. 2019, arXiv:1909.10430; the rules are in probes/senses.py, tables and figures in
senses_report.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from bertkit.data.random import Draw
from bertkit.errors import DataError, UsageError
from bertkit.models.recorder import layer_points
from bertkit.probing.annotated import (
    STORE_GB,
    align,
    check_aligned,
    check_store,
    drawn,
    existing,
    hashes_of,
    kept_states,
    train_and_test,
    width_of,
)
from bertkit.probing.run import Analysis, Probed, ProbeRequest, carry_out, left_out
from bertkit.probing.senses.measure import (
    FrequentSenses,
    backed_off,
    cosines,
    knn_answers,
    left_out_purity,
    sense_scores,
)
from bertkit.probing.senses.report import DEFINITIONS, Configuration, SensesReport, TestResult, WordPicture
from bertkit.probing.sentences import EncodedSentence, TextEncoder
from bertkit.probing.state_store import StateStore
from bertkit.settings import Settings
from bertkit.tasks.readers.senses import DATA, SenseMark, SenseSentence, read_senses

KIND = "senses"
LAST = 4
"""Layers that the paper concatenates."""
_LEAST_OCCURRENCES = 5
_NO_GOLD = "words without a gold sense (left out)"

Candidates = Literal["lemma", "lemma-pos", "word"]


class SensesSettings(Settings):
    """What decides the result, beside model and data."""

    ks: list[int] = Field(default_factory=lambda: [1, 3, 5, 10], description="Neighbours that vote.")
    capped: bool = Field(True, description="No more neighbours vote than the word's rarest sense has examples.")
    candidates: Candidates = Field("lemma", description="What must be the same for an example to count.")
    sentences: int = Field(0, ge=0, description="Training sentences drawn; 0: all.")
    words: list[str] = Field(default_factory=list, description="Lemmas whose senses are drawn.")
    seed: int = Field(0, ge=0, description="Of draws and pictures.")


@dataclass(frozen=True)
class Marks:
    """Words with senses, and the sentences that they stand in.

    Attributes:
        name: of the file.
        sentences: with at least one of the marks.
        wanted: places of the marks in each sentence; states are kept in this order.
        marks: of all sentences, in this order.
        words: each as it is written.
    """

    name: str
    sentences: Sequence[EncodedSentence]
    wanted: Sequence[Sequence[int]]
    marks: Sequence[SenseMark]
    words: Sequence[str]

    def by_group(self, candidates: Candidates) -> dict[str, list[int]]:
        """Numbers of the marks that are compared with one another."""
        groups: dict[str, list[int]] = {}
        for number, (mark, word) in enumerate(zip(self.marks, self.words, strict=True)):
            groups.setdefault(group_of(mark, word, candidates), []).append(number)
        return groups


def group_of(mark: SenseMark, word: str, candidates: Candidates) -> str:
    """What examples must share with a word to be compared with it."""
    if candidates == "word":
        return word.lower()
    return mark.lemma if candidates == "lemma" else f"{mark.lemma}/{mark.pos}"


def probe_senses(
    request: ProbeRequest, settings: SensesSettings, *, test_data: Sequence[str] = (), store_gb: float = STORE_GB
) -> Probed:
    """Disambiguate, draw and write a run.

    Args:
        request: its data is one file to take examples from.
        settings: all that decides the result.
        test_data: files that scores are of; a fifth of the sentences of the other one where there are none.
        store_gb: disk that states may take.

    Raises:
        UsageError: no data or several files, several models, a k below 1, or too much disk.
        DataError: model or files at fault, no gold senses, or a word to draw that hardly occurs.
    """
    subject = request.subject()
    if len(request.data) != 1:
        given = ", ".join(request.data) or "nothing"
        raise UsageError(f"this probe takes its examples from one file: give --data semcor.jsonl (given: {given})")
    if not settings.ks or min(settings.ks) < 1:
        raise UsageError(f"--k {min(settings.ks, default=0)}: at least one neighbour must vote")
    train_path, test_paths = existing(request.data[0]), [existing(each, option="--test-data") for each in test_data]
    everything = read_senses(train_path)
    train, tests = _divided(everything, train_path, test_paths, settings)
    encoder = TextEncoder.of(subject.model, subject.tokenizer)
    other = TextEncoder.of(subject.model, subject.tokenizer)
    pictured = {word: _occurrences(word, everything, other) for word in settings.words}
    tested = [_marks(name, sentences, encoder, lambda *_: True) for name, sentences in tests.items()]
    for each in tested:
        check_aligned(each.marks, encoder, each.name, 1)
    groups = {group for each in tested for group in each.by_group(settings.candidates)}

    def is_candidate(mark: SenseMark, word: str) -> bool:
        return group_of(mark, word, settings.candidates) in groups

    trained = _marks(str(train_path), train, encoder, is_candidate)
    if not trained.marks:
        raise DataError(f"{train_path}: none of the words of {', '.join(tests)} occurs in the {len(train):,} sentences")
    points = layer_points(subject.model)
    rows = len(trained.marks) + sum(len(each.marks) for each in tested)
    check_store(len(points), rows, width_of(subject.model, points), store_gb)
    # Counting needs no states, so the back-off knows the sentences that were not drawn, too, but none for testing.
    counted = everything if test_paths else train
    frequent = FrequentSenses(
        [(mark.lemma, mark.pos, mark.keys[0]) for each in counted for mark in each.marks if mark.keys]
    )

    def store_of(marks: Marks) -> StateStore:
        return kept_states(request, subject, marks.sentences, points, wanted=marks.wanted)

    def analyse() -> Analysis:
        with ExitStack() as stack:
            stores = [stack.enter_context(store_of(each)) for each in (trained, *tested)]
            results = [
                _result(each, store, trained, stores[0], frequent, settings)
                for each, store in zip(tested, stores[1:], strict=True)
            ]
            pictures = [
                _picture(word, marks, stack.enter_context(store_of(marks)), settings)
                for word, marks in pictured.items()
            ]
        report = SensesReport(subject.label, settings.ks, len(trained.marks), results, pictures)
        notes = left_out(encoder.notes)
        return Analysis({**report.summary(), "left_out": notes}, DEFINITIONS, report.findings())

    data = hashes_of([train_path], test_paths)
    return carry_out(KIND, settings, request, [subject], analyse, data=data, seed=settings.seed)


def _divided(
    sentences: Sequence[SenseSentence], train_path: Path, test_paths: Sequence[Path], settings: SensesSettings
) -> tuple[list[SenseSentence], dict[str, list[SenseSentence]]]:
    """Sentences with examples, and those of each test file by its name."""
    draw = Draw(settings.seed, KIND)
    most = settings.sentences or len(sentences)
    if test_paths:
        tests = {path.name.removesuffix(DATA).partition(".")[0]: read_senses(path) for path in test_paths}
        return drawn(sentences, most, draw, "train"), tests
    train, test = train_and_test(sentences, None, most, len(sentences), draw)
    return train, {f"{train_path.name.partition('.')[0]} (held out)": test}


def _occurrences(word: str, sentences: Sequence[SenseSentence], encoder: TextEncoder) -> Marks:
    """Every occurrence of a lemma with a sense, whatever was drawn to take examples from.

    Raises:
        DataError: it hardly occurs; with the nearest lemmas.
    """
    lemma = word.lower().replace(" ", "_")
    counts = Counter(mark.lemma for sentence in sentences for mark in sentence.marks if mark.keys)
    if not counts[lemma]:
        often = [name for name, count in counts.items() if count >= _LEAST_OCCURRENCES]
        near = get_close_matches(lemma, often, n=3)
        hint = f"; near it are {', '.join(near)}" if near else ""
        raise DataError(f"--word {word}: occurs nowhere with a sense{hint}")
    marks = _marks(word, sentences, encoder, lambda mark, _: mark.lemma == lemma)
    if len(marks.marks) < _LEAST_OCCURRENCES:
        raise DataError(
            f"--word {word}: occurs {len(marks.marks)} times with a sense, a picture needs {_LEAST_OCCURRENCES}; choose"
            " a commoner word"
        )
    return marks


def _marks(
    name: str,
    given: Sequence[SenseSentence],
    encoder: TextEncoder,
    is_wanted: Callable[[SenseMark, str], bool],
) -> Marks:
    """The marks with gold that are wanted, each asked for with its word as it is written."""
    kept: dict[int, list[SenseMark]] = {}
    chosen = []
    for sentence in given:
        own = []
        for mark in sentence.marks:
            if not mark.keys:
                encoder.notes.add(_NO_GOLD, f"{sentence.id}: {sentence.words[mark.place]}")
            elif is_wanted(mark, sentence.words[mark.place]):
                own.append(mark)
        if own:
            kept[id(sentence)] = own
            chosen.append(sentence)
    pairs = align(encoder, chosen)
    marks = [mark for sentence, _ in pairs for mark in kept[id(sentence)]]
    words = [sentence.words[mark.place] for sentence, _ in pairs for mark in kept[id(sentence)]]
    wanted = [[mark.place for mark in kept[id(sentence)]] for sentence, _ in pairs]
    return Marks(name, [encoded for _, encoded in pairs], wanted, marks, words)


def configurations(layers: int) -> list[Configuration]:
    """Every layer, and the last four of them concatenated (all but the embeddings where there are fewer)."""
    last = min(LAST, layers - 1)
    single = [Configuration(f"layer {number}", (number,)) for number in range(layers)]
    return [*single, Configuration(f"last {last} layers", tuple(range(layers - last, layers)))]


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
    alone, together = {}, {}
    for configuration in configurations(store.layers):
        tables: list[tuple[Tensor, Tensor]] = [
            (store.layer(number), train_store.layer(number)) for number in configuration.layers
        ]
        answers = knn_answers(tests, trains, tables, senses, settings.ks, capped=settings.capped)
        alone[configuration] = {k: sense_scores(gold, answers[k]) for k in settings.ks}
        together[configuration] = {k: sense_scores(gold, backed_off(answers[k], others)) for k in settings.ks}
    return TestResult(Path(tested.name).name, alone, together, sense_scores(gold, others))


def _picture(word: str, marks: Marks, store: StateStore, settings: SensesSettings) -> WordPicture:
    """All occurrences of a lemma on a plane, by t-SNE on the concatenation of the last four layers."""
    from sklearn.manifold import TSNE

    senses = tuple(mark.keys[0] for mark in marks.marks)
    tables = [store.layer(number) for number in configurations(store.layers)[-1].layers]
    similarity_NN = cosines(tables, tables)
    perplexity = min(30.0, (len(senses) - 1) / 3)
    plane = TSNE(metric="precomputed", init="random", perplexity=perplexity, random_state=settings.seed)
    places_N2 = plane.fit_transform(np.clip(1 - similarity_NN, 0, None))
    return WordPicture(word, senses, np.asarray(places_N2, np.float64), left_out_purity(similarity_NN, senses))

"""Files with labels on words, spans and pairs of spans, as tasks for a probe.

Tenney et al. 2019, arXiv:1905.06316, section 3: a task is a label for one span of a sentence, or for two. The
annotations in a file determine its tasks:

    .conllu         pos (universal parts of speech), dep (the relation of a word to its head; two spans)
    columns         chunks, ner (IOB tags, word by word) or tags (other ones); chunks-spans, ner-spans (the type of a
                    span)
    .jsonl          one task named after the file, in the format of edge probing: {"text": "The cat sat", "targets":
                    [{"span1": [1, 2], "span2": [2, 3], "label": "ARG0"}]}, spans in words cut at blanks, the end not
                    included, `span2` in all targets or in none; semantic roles come like this

Sibling tasks/readers reads the same files for fine-tuning, with one label per word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.arrays import Int64Array
from bertkit.errors import DataError, UsageError
from bertkit.metrics.tagging import ChunkF1, conlleval_spans
from bertkit.probing.layers.measure import Items, accuracy
from bertkit.probing.sentence_sources import is_treebank
from bertkit.probing.sentences import EncodedSentence
from bertkit.tasks.examples import TaggedExample
from bertkit.tasks.readers.columns import is_iob, read_conll
from bertkit.tasks.readers.common import field, json_rows, text_in
from bertkit.tasks.readers.trees import read_trees
from bertkit.text.lines import ending

SPANS = "-spans"
"""Name suffix of tasks that predict the types of given spans; such a task only runs if it is named."""
_CHUNK_TYPES = frozenset({"NP", "VP", "PP"})
_EXPECTED = (
    "this probe reads annotated sentences and no running text: a treebank (.conllu), a word and its tag per line with"
    " blank lines between sentences, or .jsonl with labelled spans"
)
_FEW_TAGS = 20
"""A file with more tags, on average on fewer than two words each, has something else in its last column."""
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Target:
    """The label of one or two spans, in words."""

    spans: tuple[Span, ...]
    label: str


@dataclass(frozen=True, slots=True)
class LabelledSentence:
    """A sentence as annotated, with the targets of each task; `id` names it in messages."""

    id: str
    words: tuple[str, ...]
    targets: Mapping[str, tuple[Target, ...]]


def read_labelled(path: Path, task: str | None = None) -> list[LabelledSentence]:
    """The sentences of a file and their targets.

    Args:
        path: the file.
        task: the name of the task in a .jsonl file; by default that of the file.

    Raises:
        DataError: invalid file, an invalid tree, words without tags, or a span that is not in its sentence.
    """
    if is_treebank(str(path)):
        return _treebank(path)
    if ending(path) == ".jsonl":
        return _edges(path, task or task_of_file(path))
    return _columns(path)


def _treebank(path: Path) -> list[LabelledSentence]:
    sentences = []
    for tree in read_trees(path):
        arcs = tuple(
            Target(((word, word + 1), (head, head + 1)), relation.partition(":")[0])
            for word, (head, relation) in enumerate(zip(tree.heads, tree.relations, strict=True))
            if head >= 0
        )
        sentences.append(LabelledSentence(tree.id, tree.words, {"pos": _by_word(tree.tags), "dep": arcs}))
    return sentences


def _columns(path: Path) -> list[LabelledSentence]:
    try:
        read = read_conll(path).examples
    except DataError as error:
        raise DataError(f"{error}; {_EXPECTED}") from error
    examples = [each for each in read if isinstance(each, TaggedExample)]
    untagged = next((each for each in examples if each.tags is None), None)
    if untagged is not None:
        raise DataError(f"{path}: sentence {untagged.id} has words and no tags; expected a tag in the last column")
    tags = {tag for each in examples for tag in each.tags or ()}
    if not is_iob(tags):
        words = sum(len(each.words) for each in examples)
        if len(tags) > max(_FEW_TAGS, words / 2):
            raise DataError(f"{path}: {len(tags):,} different tags on {words:,} words in its last column; {_EXPECTED}")
        return [LabelledSentence(each.id, each.words, {"tags": _by_word(each.tags or ())}) for each in examples]
    name = "chunks" if {tag[2:] for tag in tags} & _CHUNK_TYPES else "ner"
    sentences = []
    for each in examples:
        assert each.tags is not None
        spans = tuple(Target(((span.start, span.stop),), span.type) for span in conlleval_spans(each.tags))
        targets = {name: _by_word(each.tags), f"{name}{SPANS}": spans}
        sentences.append(LabelledSentence(each.id, each.words, targets))
    return sentences


def _by_word(tags: Sequence[str]) -> tuple[Target, ...]:
    return tuple(Target(((place, place + 1),), tag) for place, tag in enumerate(tags))


def task_of_file(path: Path) -> str:
    """The name of the task in a .jsonl file: the file's, up to its first dot."""
    return path.name.partition(".")[0]


def _edges(path: Path, name: str) -> list[LabelledSentence]:
    sentences: list[LabelledSentence] = []
    spans = 0
    for line, record in json_rows(path):
        where = f"{path}, line {line}"
        words = tuple(text_in(field(record, "text", where), where).split())
        listed = field(record, "targets", where)
        if not isinstance(listed, list):
            raise DataError(f"{where}: targets are {listed!r:.60}, expected a list of objects")
        targets = tuple(_target(each, len(words), f"{where}, target {n}") for n, each in enumerate(listed, 1))
        for target in targets:
            spans = spans or len(target.spans)
            if len(target.spans) != spans:
                raise DataError(f"{where}: a target with {len(target.spans)} spans, but others have {spans}")
        sentences.append(LabelledSentence(str(record.get("id", f"line {line}")), words, {name: targets}))
    if not sentences:
        raise DataError(f"{path}: contains no sentences")
    return sentences


def _target(record: Any, words: int, where: str) -> Target:
    if not isinstance(record, dict):
        raise DataError(f"{where}: {record!r:.60}, expected an object with span1 and label")
    field(record, "span1", where)
    spans = tuple(_span(record[key], words, f"{where}, {key}") for key in ("span1", "span2") if key in record)
    label = field(record, "label", where)
    if isinstance(label, list) and len(label) == 1:
        label = label[0]
    if not isinstance(label, str):
        raise DataError(f"{where}: label {label!r:.60}, expected one name")
    return Target(spans, label)


def _span(value: Any, words: int, where: str) -> Span:
    whole = isinstance(value, list) and len(value) == 2 and all(type(each) is int for each in value)
    if not whole or not 0 <= value[0] < value[1] <= words:
        raise DataError(
            f"{where}: {value!r:.60}, expected [start, end] in a sentence of {words} words, end not included"
        )
    return value[0], value[1]


def chosen_tasks(sentences: Sequence[LabelledSentence], wanted: Sequence[str]) -> list[str]:
    """The requested tasks of these sentences; if none are named, all except those of given spans."""
    names = dict.fromkeys(name for each in sentences for name in each.targets)
    given = {f"{name}{SPANS}" for name in names}
    return [name for name in names if (name in wanted if wanted else name not in given)]


def check_tasks(wanted: Sequence[str], available: Sequence[str]) -> None:
    """Check that each requested task is annotated in some file.

    Raises:
        UsageError: it is not; suggests the nearest name.
    """
    for name in wanted:
        if name not in available:
            near = get_close_matches(name, available, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"--task {name}: the data are annotated for {', '.join(available)}{hint}")


@dataclass(frozen=True, eq=False)
class LayerTask:
    """A task prepared for probes.

    Attributes:
        name: of the task.
        labels: names of the training items' labels, K of them, in alphabetical order.
        train, test: the items; a test label that is not in `labels` is -1.
        test_names: names of the test items' labels.
        test_sentence_N: number of each test item's sentence.
        test_words: number of words of each test sentence, for a task whose word tags form chunks; else empty.
    """

    name: str
    labels: tuple[str, ...]
    train: Items
    test: Items
    test_names: tuple[str, ...]
    test_sentence_N: Int64Array
    test_words: tuple[int, ...] = ()

    def score(self, predicted_N: Int64Array) -> float:
        """F1 over chunks for a task with chunks, else accuracy on the test items."""
        f1 = self.chunk_f1(predicted_N)
        return accuracy(self.test.label_N, predicted_N) if f1 is None else f1

    def chunk_f1(self, predicted_N: Int64Array) -> float | None:
        """conlleval's F1 over the chunks of the test sentences; None for a task without chunks."""
        if not self.test_words:
            return None
        ends = np.cumsum(self.test_words)[:-1]
        tags = (np.array(self.labels)[predicted_N], np.array(self.test_names))
        predicted, gold = ([own.tolist() for own in np.split(each, ends)] for each in tags)
        return ChunkF1().score(predicted, gold)


Pair = tuple[LabelledSentence, EncodedSentence]


def layer_task(name: str, train: Sequence[Pair], test: Sequence[Pair], *, title: str, source: str) -> LayerTask:
    """The items of a task; rows of states are numbered over training sentences, then test sentences.

    Raises:
        DataError: training or test sentences have no target or differ in its number of spans, or all have the same
            label.
    """
    first_test = sum(len(sentence.words) for sentence, _ in train)
    spans, names, keys = _gathered(name, train, 0)
    test_spans, test_names, test_keys = _gathered(name, test, first_test)
    labels = tuple(sorted(set(names)))
    if not names or not test_names:
        raise DataError(f"{source}: no target of {name} in the {'training' if not names else 'test'} sentences drawn")
    if spans.shape[1] != test_spans.shape[1]:
        raise DataError(
            f"{source}: a target of {name} has {spans.shape[1]} spans for training, {test_spans.shape[1]} for testing"
        )
    if len(labels) < 2:
        raise DataError(f"{source}: all targets of {name} have the label {labels[0]!r}; there is nothing to predict")
    number_of = {label: number for number, label in enumerate(labels)}
    # A span in a .jsonl file may have the name of a task of tags.
    has_chunks = all(f"{name}{SPANS}" in sentence.targets for sentence, _ in (*train, *test))
    return LayerTask(
        title,
        labels,
        Items(spans, np.array([number_of[label] for label in names], dtype=np.int64), keys),
        Items(test_spans, np.array([number_of.get(label, -1) for label in test_names], dtype=np.int64), test_keys),
        tuple(test_names),
        np.repeat(np.arange(len(test)), [len(sentence.targets.get(name, ())) for sentence, _ in test]),
        tuple(len(sentence.words) for sentence, _ in test) if has_chunks else (),
    )


def _gathered(name: str, pairs: Sequence[Pair], first: int) -> tuple[np.ndarray[Any, Any], list[str], list[str]]:
    spans: list[list[Span]] = []
    names: list[str] = []
    keys: list[str] = []
    for sentence, _ in pairs:
        for target in sentence.targets.get(name, ()):
            spans.append([(start + first, stop + first) for start, stop in target.spans])
            names.append(target.label)
            start, stop = target.spans[0]
            keys.append(" ".join(sentence.words[start:stop]))
        first += len(sentence.words)
    return np.array(spans, dtype=np.int64).reshape(len(spans), len(spans[0]) if spans else 1, 2), names, keys

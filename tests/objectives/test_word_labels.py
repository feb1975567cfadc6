"""Capitalisation and token-document relation: every label compared with the text, through files, layouts and
batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertkit.data.config import DataConfig
from bertkit.data.layouts import ContinuousText
from bertkit.data.layouts.pairs import SegmentPair
from bertkit.data.layouts.sentences import FullSentences
from bertkit.data.prepare import prepare_shards
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Vocabulary
from bertkit.data.shards import TokenShards
from bertkit.data.stream import SampleSpec, SampleStream, corrupted
from bertkit.errors import UsageError
from bertkit.models.families.bert import BertConfig
from bertkit.objectives.base import Objective
from bertkit.objectives.capitalisation import Capitalisation
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.token_document import TokenDocument, recurring
from bertkit.objectives.word_order import WordOrder
from bertkit.text.annotated import CAPITALS
from bertkit.text.sentences import split_sentences
from bertkit.text.source_options import SourceOptions
from bertkit.text.sources import open_corpus
from bertkit.text.tokenizer import TokenizerConfig
from bertkit.text.tokenizer_files import load_tokenizer
from tests.data.toy_corpus import whole_documents, write_shards

DOCUMENTS = [
    "The Reader walks to Hong Kong. the file is Old, and McDonald's file is new. Élan of iPhone, NASA and x!",
    "No word comes back here? Numbers 12 Or 3. a Value",
    "It rains. It rains. It pours. Über the Old town",
]
CONFIG = TokenizerConfig(vocab_size=90, min_frequency=1)


@pytest.fixture(scope="module", params=["txt", "jsonl"])
def shards(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    """Shards of the documents, lowercased; also as records with their own spans."""
    directory = tmp_path_factory.mktemp("corpus")
    if request.param == "txt":
        source, options = directory / "text.txt", SourceOptions(mark_capitals=True)
        source.write_text("\n\n".join(DOCUMENTS), encoding="utf-8")
    else:
        source, options = directory / "text.jsonl", SourceOptions(mark_capitals=True, span_fields=("names",))
        source.write_text("\n".join(json.dumps({"text": text, "names": [[0, 3]]}) for text in DOCUMENTS))
    corpus = open_corpus([str(source)], options, cache=directory / "cache")
    return prepare_shards(corpus, CONFIG, directory / "shards", cache=directory / "cache", workers=1)


def samples_of(shards: TokenShards, objectives: list[Objective], layout: Any = None) -> tuple[Samples, Samples]:
    """All samples of an epoch, uncorrupted and corrupted."""
    tokenizer = load_tokenizer(shards.directory)
    spec = SampleSpec(3, "test", layout or FullSentences(), 20, None)
    stream = SampleStream(spec, shards, whole_documents(shards), None)
    vocabulary = Vocabulary.of(tokenizer)
    plain = stream.samples(0, stream.epoch_length(0), vocabulary)
    prepared = [objective.prepared(tokenizer, shards) for objective in objectives]
    return plain, corrupted(plain, prepared, vocabulary, Draw(1))


def is_capital(text: str, place: int) -> bool:
    """Whether the word around this character begins with a capital, read letter by letter. An apostrophe belongs to the
    word if there are letters on both sides."""

    def in_word(at: int) -> bool:
        if not 0 <= at < len(text):
            return False
        inside = text[at] in "'’" and 0 < at < len(text) - 1 and text[at - 1].isalnum() and text[at + 1].isalnum()
        return text[at].isalnum() or inside

    first = place
    while in_word(first - 1) and in_word(first):
        first -= 1
    return in_word(place) and text[first].isupper()


def test_every_token_has_the_case_of_its_word_in_the_text(shards: TokenShards) -> None:
    """Against the tokenizer's own offsets in each sentence, for whole sentences."""
    tokenizer = load_tokenizer(shards.directory)
    number = shards.span_fields.index(CAPITALS)
    expected, ids = [], []
    for document in DOCUMENTS:
        for sentence in split_sentences(document):
            encoding = tokenizer.encodings_plain([sentence])[0]
            ids += encoding.ids
            expected += [is_capital(sentence, start) for start, _ in encoding.offsets]
    assert shards.tokens_between(0, shards.tokens).tolist() == ids
    marks = shards.span_marks_between(0, shards.tokens) >> 2 * number & 2 > 0
    assert marks.tolist() == expected
    assert 10 < sum(expected) < len(expected) - 10


@pytest.mark.parametrize("layout", [FullSentences(), SegmentPair(random_partner_probability=0.5)])
def test_batches_have_the_labels_of_the_corpus_beside_masks(shards: TokenShards, layout: Any) -> None:
    plain, samples = samples_of(shards, [MaskedLM(), Capitalisation(), TokenDocument()], layout)
    assert plain.source_T is not None
    assert (plain.source_T == -1).tolist() == plain.special_T.tolist()
    ordinary = np.flatnonzero(~plain.special_T)
    tokens = shards.tokens_between(0, shards.tokens)
    assert plain.ids_T[ordinary].tolist() == tokens[plain.source_T[ordinary]].tolist()
    for term in ("capitalisation", "token_document"):
        assert samples.targets[term].index_M.tolist() == ordinary.tolist()
        assert 0 < samples.targets[term].id_M.sum() < ordinary.size
    masked = samples.targets["masked_lm"].index_M
    assert (samples.ids_T[masked] != plain.ids_T[masked]).any()

    # Computed naively: documents as lists of segments, segments as sets.
    edges = shards.segment_start_S1.tolist()
    documents = [
        [set(tokens[edges[s] : edges[s + 1]].tolist()) for s in range(low, high)]
        for low, high in whole_documents(shards).tolist()
    ]
    place_of = {}
    for d, (low, high) in enumerate(whole_documents(shards).tolist()):
        for s in range(low, high):
            for token in range(edges[s], edges[s + 1]):
                place_of[token] = (d, s - low)
    expected = []
    for index in ordinary:
        d, own = place_of[int(plain.source_T[index])]
        others = (segment for number, segment in enumerate(documents[d]) if number != own)
        expected.append(int(any(int(plain.ids_T[index]) in segment for segment in others)))
    assert samples.targets["token_document"].id_M.tolist() == expected


def test_a_token_twice_in_one_segment_does_not_recur(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "toy", [[3, 2], [4]])

    class Repeating:
        segment_start_S1 = shards.segment_start_S1

        def tokens_between(self, start: int, end: int) -> np.ndarray:
            return np.array([7, 7, 8, 8, 9, 5, 5, 7, 8])[start:end]

    assert recurring(Repeating(), 0, 5).tolist() == [False, False, True, True, False]  # type: ignore[arg-type]  # a stub
    assert not recurring(Repeating(), 5, 9).any()  # type: ignore[arg-type]  # a stub


def test_shards_without_case_are_told_how_to_get_it(tmp_path: Path) -> None:
    (fault,) = Capitalisation().errors(DataConfig(), BertConfig())
    assert "set data.reading.mark_capitals to true" in fault
    with pytest.raises(UsageError, match=r"mark_capitals to true"):
        Capitalisation().prepared(None, write_shards(tmp_path / "toy", [[3]]))  # type: ignore[arg-type]  # not read


def test_a_layout_of_lanes_gives_no_case() -> None:
    data = DataConfig(layout=ContinuousText(), reading=SourceOptions(mark_capitals=True))
    (fault,) = Capitalisation().errors(data, BertConfig())
    assert "needs the marks of the text, which data.layout 'continuous' does not read" in fault


@pytest.mark.parametrize("objective", [Capitalisation(), TokenDocument()])
def test_moved_words_are_told(objective: Objective) -> None:
    (fault,) = objective.combination_errors((objective, WordOrder()))
    assert "objective.word_order moves" in fault


def test_a_field_of_the_same_name_is_told() -> None:
    with pytest.raises(ValueError, match="'capitals'"):
        SourceOptions(mark_capitals=True, span_fields=("capitals",))
    with pytest.raises(ValueError, match="at most 3 span_fields"):
        SourceOptions(mark_capitals=True, span_fields=("a", "b", "c", "d"))


def test_at_its_default_the_key_changes_no_hash() -> None:
    assert "mark_capitals" not in SourceOptions().model_dump()

"""Tags: one per word for any number of tokens and any sentence length, trained at each word's first token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from bertkit.errors import DataError
from bertkit.models.files.hub import load_model
from bertkit.models.labels import Labels
from bertkit.tasks.base import Prediction
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.examples import TaggedExample
from bertkit.tasks.tagging import FIRST, TAG, Tagging, TaggingSettings
from tests.tasks.tiny_task import NOUNS, tiny_tokenizer, write_model

TAGS = Labels(("O", "B-X", "I-X"))
TOKENIZER = tiny_tokenizer()


def task(**given_settings: object) -> Tagging:
    metrics = ["f1", "precision", "recall", "accuracy"]
    return Tagging(TAGS, metrics, TaggingSettings.model_validate(given_settings))


def sentence(number: int, words: int, document: int = 0) -> TaggedExample:
    drawn = np.random.default_rng(number)
    chosen = tuple(str(drawn.choice([*NOUNS, "fineness", "wordless", "\u200b", "?"])) for _ in range(words))
    return TaggedExample(str(number), chosen, tuple(str(drawn.choice(TAGS.names)) for _ in range(words)), document)


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(6, 24), st.sampled_from(["sentence", "document"])
)
def test_every_word_is_tagged_exactly_once(lengths: list[int], max_tokens: int, context: str) -> None:
    """However words are truncated, joined or without tokens: predictions that repeat the labels give the labels
    back."""
    examples = [sentence(number, words, document=number // 2) for number, words in enumerate(lengths)]
    own = task(context=context)
    features = own.encode(examples, SequenceEncoder(TOKENIZER, max_tokens=max_tokens))
    lengths_S = np.diff(features.starts_S1)
    assert lengths_S.max() <= max_tokens
    first, tags = features.token_labels[FIRST], features.token_labels[TAG]
    assert ((tags >= 0) == first).all()
    outputs = [
        np.eye(3)[tags[start:end][first[start:end]]]
        for start, end in zip(features.starts_S1[:-1], features.starts_S1[1:], strict=True)
    ]
    found = own.predictions(examples, features, outputs)
    assert [tuple(each.prediction) for each in found] == [example.tags for example in examples]
    assert own.score(found, examples)["accuracy"] == 1.0


def test_a_word_of_a_long_sentence_is_tagged_where_it_sees_most() -> None:
    example = TaggedExample("0", ("cat",) * 20, ("O",) * 20)
    features = task().encode([example], SequenceEncoder(TOKENIZER, max_tokens=10))
    assert features.account.tokens_dropped == 0
    sizes = np.diff(features.starts_S1) - 2
    assert (sizes <= 8).all()
    tagged = [[place for _, place in words] for words in features.extra]
    # Windows of eight words begin every four words; their middles are tagged, and also the text's own ends.
    assert tagged == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9], [10, 11, 12, 13], [14, 15, 16, 17, 18, 19]]


def test_a_word_that_is_longer_than_a_sequence_is_cut_and_counted() -> None:
    encoder, word = SequenceEncoder(TOKENIZER, max_tokens=9), "fine" * 12
    size = len(encoder.word_encodings([(word,)])[0].ids)
    features = task().encode([TaggedExample("0", ("cat", word, "cat"), ("O",) * 3), sentence(1, 3)], encoder)
    assert size > 7
    assert (features.account.examples_cut, features.account.tokens_dropped) == (1, size - 7)


def test_sentences_of_a_document_stand_together_as_far_as_they_fit() -> None:
    examples = [TaggedExample(str(i), ("cat",) * words, None, document) for i, (words, document) in
                enumerate([(3, 0), (4, 0), (2, 0), (1, 1)])]  # fmt: skip
    features = task(context="document").encode(examples, SequenceEncoder(TOKENIZER, max_tokens=9))
    assert (np.diff(features.starts_S1) - 2).tolist() == [7, 2, 1]
    assert not features.labelled


def test_the_loss_is_that_of_transformers_at_first_pieces(tmp_path_factory: pytest.TempPathFactory) -> None:
    transformers = pytest.importorskip("transformers")
    directory = write_model(tmp_path_factory.mktemp("m"), heads=("token_classification",), labels=TAGS, dropout=0.0)
    model, _ = load_model(directory)
    oracle = transformers.AutoModelForTokenClassification.from_pretrained(directory).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    examples = [TaggedExample("0", ("fineness", "cat", "list"), ("B-X", "I-X", "O")), sentence(5, 7)]
    examples[1] = TaggedExample(
        "1", tuple(word.replace("\u200b", "cat") for word in examples[1].words), examples[1].tags
    )
    own = task()
    features = own.encode(examples, SequenceEncoder(TOKENIZER, max_tokens=40))
    batch = features.batch(np.array([1, 0]))
    with torch.no_grad():
        hidden_TD = model.eval()(batch.packed)
        part = own.loss(model, hidden_TD, batch)
        outputs = own.decode(model, hidden_TD, batch)
    expected = 0.0
    for example, logits_WK in zip([examples[1], examples[0]], outputs, strict=True):
        encoded = tokenizer([list(example.words)], is_split_into_words=True, return_tensors="pt")
        words = encoded.word_ids(0)
        firsts = [words.index(number) for number in range(len(example.words))]
        with torch.no_grad():
            logits = oracle(**encoded).logits[0, firsts]
        np.testing.assert_allclose(logits_WK, logits.numpy(), atol=1e-5)
        targets = torch.tensor([TAGS.names.index(tag) for tag in example.tags or ()])
        expected += float(functional.cross_entropy(logits, targets, reduction="sum"))
    assert float(part.sum) == pytest.approx(expected, rel=1e-5)
    assert part.count == own.count(batch) == 10


def test_scores_are_of_entities_and_strange_tags_are_refused() -> None:
    examples = [TaggedExample("0", ("a", "b", "c"), ("B-X", "I-X", "O"))]
    scores = task().score([Prediction("0", ["B-X", "O", "O"])], examples)
    assert scores == {"f1": 0.0, "precision": 0.0, "recall": 0.0, "accuracy": pytest.approx(2 / 3)}
    with pytest.raises(DataError, match="example 0: the label 'B-Y' is not one"):
        task().encode([TaggedExample("0", ("a",), ("B-Y",))], SequenceEncoder(TOKENIZER, max_tokens=9))

"""Spans: answers located in the text itself, window by window, and no answer if that scores higher."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import processors
from torch.nn import functional

from bertkit.errors import DataError, UsageError
from bertkit.models.files.hub import load_model
from bertkit.tasks.base import Features, Prediction
from bertkit.tasks.catalogue import TASKS
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.examples import Answer, QuestionExample
from bertkit.tasks.span import END, START, THRESHOLD, Span, SpanSettings, answer_tokens, most_context
from bertkit.text.tokenizer import Tokenizer
from tests.tasks.tiny_task import NOUNS, tiny_tokenizer, write_model

CONTEXT = " ".join(NOUNS) + ", fineness! " + " ".join(NOUNS)
FULL = SpanSettings(max_query_tokens=6, doc_stride=5)


def question(text: str, name: str = "0", impossible: bool = False) -> QuestionExample:
    answers = () if impossible else (Answer(text, CONTEXT.index(text)),)
    return QuestionExample(name, "what is a cat ?", CONTEXT, answers, impossible)


def task(settings: SpanSettings = FULL, *, may_be_impossible: bool = False) -> Span:
    return Span(["f1", "exact_match"], settings, may_be_impossible=may_be_impossible)


def encoder(max_tokens: int = 24) -> SequenceEncoder:
    return SequenceEncoder(tiny_tokenizer(), max_tokens=max_tokens)


def certain(features: Features, item: int, start: int, end: int, score: float = 9.0) -> np.ndarray:
    """Logits that favour one span."""
    logits = np.zeros((int(features.tokens_I[item]), 2))
    logits[start, 0] = logits[end, 1] = score
    return logits


@pytest.mark.parametrize("answer", ["cat", "list word letter", "fineness", "fineness! cat", "ineness"])
def test_the_labels_give_the_answer_back(answer: str) -> None:
    """Logits that favour the encoded labels predict the answer's text, extended to whole tokens."""
    own, example = task(), question(answer)
    features = own.encode([example], encoder(30))
    assert features.num_examples > 1
    outputs = [np.zeros((int(tokens), 2)) for tokens in features.tokens_I]
    inside = [i for i in range(features.num_examples) if features.example_labels[START][i] > 0]
    assert inside
    for item in inside:
        chunk = features.extra[item]
        start, end = int(features.example_labels[START][item]), int(features.example_labels[END][item])
        if chunk.has_most_context[start - chunk.first]:
            outputs[item] = certain(features, item, start, end)
    (found,) = own.predictions([example], features, outputs)
    assert answer in found.prediction
    assert answer == "ineness" or found.prediction == answer
    assert features.account.to_json()["answers_lost"] == 0


def test_a_chunk_is_correct_where_both_ends_are() -> None:
    own = task()
    features = own.encode([question("cat")], encoder())
    batch = features.batch(np.arange(features.num_examples))
    logits = torch.zeros(features.num_examples, batch.packed.sequences.max_length, 2)
    for item, (start, end) in enumerate(zip(*(features.example_labels[name] for name in (START, END)), strict=True)):
        logits[item, start, 0] = -9.0 if item == 0 else 9.0
        logits[item, end, 1] = -9.0 if item == 1 else 9.0
    assert own.loss_of(logits, batch).correct == features.num_examples - 2 > 0


def test_answers_longer_than_any_chunk_are_counted_as_lost() -> None:
    examples = [question("cat"), question(CONTEXT, "1"), question("cat", "2", impossible=True), question(CONTEXT, "3")]
    assert task().encode(examples, encoder()).account.to_json()["answers_lost"] == 2


def test_a_chunk_without_the_answer_has_it_at_the_classifier_token() -> None:
    features = task().encode([question("cat")], encoder())
    starts = features.example_labels[START]
    assert (starts == 0).any()
    assert ((features.example_labels[END] == 0) == (starts == 0)).all()


def test_chunks_are_those_of_the_released_rule() -> None:
    """Strides of the given size, and each token in the window where min(left, right) + 0.01 length is largest."""
    chunks = [(0, 8), (5, 8), (10, 6)]
    expected = []
    for position in range(16):
        scores = [
            (min(position - start, start + size - 1 - position) + 0.01 * size, -row)
            for row, (start, size) in enumerate(chunks)
            if start <= position < start + size
        ]
        expected.append(-max(scores)[1])
    assert most_context(chunks, 16).tolist() == expected
    features = task().encode([question("cat")], encoder())
    piece = encoder().encodings([CONTEXT])[0]
    begins = [features.extra[i].offsets[0] for i in range(features.num_examples)]
    assert begins == [piece.offsets[5 * i] for i in range(features.num_examples)]
    counted = sum(int(chunk.has_most_context.sum()) for chunk in features.extra)
    assert counted == len(piece.ids)


def test_long_answers_and_crossed_ends_are_not_allowed() -> None:
    own = task(SpanSettings(max_query_tokens=6, max_answer_tokens=2, doc_stride=50))
    example = question("cat list word")
    features = own.encode([example], encoder(60))
    chunk = features.extra[0]
    logits = certain(features, 0, chunk.first, chunk.first + 2)
    logits[chunk.first + 1, 1] = 5.0
    (found,) = own.predictions([example], features, [logits])
    assert found.prediction == "cat list"
    crossed = certain(features, 0, chunk.first + 3, chunk.first + 1)
    (found,) = own.predictions([example], features, [crossed])
    assert len(found.prediction.split()) <= 2


def test_no_answer_scores_the_smallest_over_chunks_and_a_threshold_is_tuned() -> None:
    own = task(may_be_impossible=True)
    example = question("cat", impossible=True)
    features = own.encode([example], encoder())
    outputs = [np.zeros((int(tokens), 2)) for tokens in features.tokens_I]
    for number, logits in enumerate(outputs):
        logits[0] = 3.0 - number
    (found,) = own.predictions([example], features, outputs)
    lowest = 2 * (3.0 - (features.num_examples - 1))
    assert found.scores["null_odds"] == pytest.approx(lowest)

    examples = [question("cat", "a"), question("list", "b"), question("cat", "c", impossible=True)]
    texts = {"a": ("cat", -1.0), "b": ("list", 2.0), "c": ("word", 4.0)}
    raw = [
        Prediction(name, "" if odds > 0 else text, {"score": 0.0, "null_odds": odds, "text": text})
        for name, (text, odds) in texts.items()
    ]
    tuned = own.tune(raw, examples)
    assert 2.0 <= tuned[THRESHOLD] < 4.0
    final = own.final(raw, tuned)
    assert [each.prediction for each in final] == ["cat", "list", ""]
    assert own.score(final, examples) == own.score(raw, examples) == {"f1": 1.0, "exact_match": 1.0}


@pytest.mark.parametrize("name", ["squad", "squad2"])
def test_the_published_tasks_have_the_metrics_that_they_name(name: str) -> None:
    spec = TASKS[name]
    own = Span(spec.metrics, FULL, may_be_impossible=name == "squad2")
    scores = own.score([Prediction("a", "cat", {THRESHOLD: 0.0})], [question("cat", "a")])
    assert scores == dict.fromkeys(spec.metrics, 1.0)
    assert spec.primary in scores


def test_the_loss_is_that_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    directory = write_model(tmp_path, heads=("span",), dropout=0.0)
    oracle = transformers.AutoModelForQuestionAnswering.from_pretrained(directory).eval()
    model, _ = load_model(directory)
    own = task()
    features = own.encode([question("cat"), question("fineness", "1")], encoder())
    batch = features.batch(np.arange(features.num_examples))
    with torch.no_grad():
        hidden_TD = model.eval()(batch.packed)
        part = own.loss(model, hidden_TD, batch)
        outputs = own.decode(model, hidden_TD, batch)
    expected = 0.0
    for item in range(features.num_examples):
        span = slice(features.starts_S1[item], features.starts_S1[item + 1])
        ids, types = features.ids_T[span].astype(np.int64), features.token_types_T[span].astype(np.int64)
        start, end = (torch.tensor([features.example_labels[name][item]]) for name in (START, END))
        with torch.no_grad():
            found = oracle(
                input_ids=torch.from_numpy(ids)[None],
                token_type_ids=torch.from_numpy(types)[None],
                start_positions=start,
                end_positions=end,
            )
        np.testing.assert_allclose(outputs[item][:, 0], found.start_logits[0].numpy(), atol=1e-5)
        np.testing.assert_allclose(outputs[item][:, 1], found.end_logits[0].numpy(), atol=1e-5)
        own_loss = functional.cross_entropy(found.start_logits, start) + functional.cross_entropy(found.end_logits, end)
        assert float(found.loss) == pytest.approx(float(own_loss) / 2, rel=1e-6)
        expected += float(found.loss)
    assert float(part.sum) == pytest.approx(expected, rel=1e-5)
    assert part.count == features.num_examples


def test_an_answer_without_a_token_a_length_without_room_and_sequences_without_a_classifier_token() -> None:
    assert answer_tokens(question("cat"), []) is None
    with pytest.raises(UsageError, match=r"span\.max_query_tokens is 64"):
        task(SpanSettings()).encode([question("cat")], encoder())
    tokenizer = tiny_tokenizer()
    sep = tokenizer.roles["sep"]
    backend = type(tokenizer.backend).from_str(tokenizer.backend.to_str())
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {sep}", pair=f"$A {sep} $B {sep}", special_tokens=[(sep, tokenizer.sep_id)]
    )
    closed = Tokenizer(backend, tokenizer.roles, lowercases=tokenizer.lowercases)
    with pytest.raises(DataError, match=r"puts no \[CLS\] into a sequence"):
        task().encode([question("cat")], SequenceEncoder(closed, max_tokens=24))

"""The bits of an example's outputs do not depend on other examples, for heads of sequences, words, tokens and
choices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bertkit.finetuning.prediction import predict
from bertkit.inference.independent_predictions import filled, independent_outputs
from bertkit.models.headed import HeadedModel
from bertkit.models.labels import Labels
from bertkit.models.registry import FAMILIES
from bertkit.tasks.choice import Choice, ChoiceSettings
from bertkit.tasks.classification import Classification, TextSettings
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.examples import ChoiceExample, QuestionExample, TaggedExample, TextExample
from bertkit.tasks.span import Span, SpanSettings
from bertkit.tasks.tagging import Tagging, TaggingSettings
from tests.inference.test_independent_batches import SIZES, engine
from tests.tasks.tiny_task import reviews, tiny_tokenizer

TEXTS = [text for text, _ in reviews(19, seed=7)] + ["a", "fine", "the cat " * 20]
NAMES = Labels(("one", "two", "three"))
Made = tuple[Any, list[Any]]


def made(kind: str) -> Made:
    """A task and its examples."""
    if kind == "classification":
        return Classification(NAMES, ("accuracy",), TextSettings()), [TextExample(t, t) for t in TEXTS]
    if kind == "tagging":
        return Tagging(NAMES, (), TaggingSettings()), [TaggedExample(t, tuple(t.split())) for t in TEXTS]
    if kind == "span":
        task = Span((), SpanSettings(max_query_tokens=8), may_be_impossible=False)
        return task, [QuestionExample(t, "what is it ?", t * 3) for t in TEXTS]
    return Choice((), ChoiceSettings()), [
        ChoiceExample(t, t, "", tuple(TEXTS[: 2 + n % 3])) for n, t in enumerate(TEXTS)
    ]


@pytest.mark.parametrize("family", ["bert", "modernbert", "deberta-v2"])
@pytest.mark.parametrize("kind", ["classification", "tagging", "span", "choice"])
def test_no_company_changes_a_bit_of_an_output(kind: str, family: str) -> None:
    task, examples = made(kind)
    config = FAMILIES[family]
    tokenizer = tiny_tokenizer()
    sizes = {name: value for name, value in SIZES.items() if name in config.model_fields}
    model = HeadedModel(config.model_validate(sizes).build(tokenizer.vocab_size), (task.head,), labels=task.labels)
    model.initialise(seed=4)
    encoder = SequenceEncoder(tokenizer, max_tokens=40, token_types=False)

    def outputs(some: list[Any], tokens: int = 4096) -> list[Any]:
        return independent_outputs(model, task, task.encode(some, encoder), engine(tokens))

    expected = outputs(examples)
    alone = [output for example in examples for output in outputs([example])]
    assert len(alone) == len(expected)
    for one, other in zip(alone, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(outputs(examples, 100), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    plain = predict(model, task, task.encode(examples, encoder), engine())
    for one, other in zip(plain, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_fillers_are_examples_behind_the_others() -> None:
    task, examples = made("tagging")
    features = task.encode(examples[:3], SequenceEncoder(tiny_tokenizer(), max_tokens=40, token_types=False))
    batch = features.batch(np.arange(3))
    found = filled(batch, 40)
    assert found.num_tokens % 64 == found.packed.num_sequences % 16 == 0
    assert found.example_B.tolist() == list(range(found.packed.num_sequences))
    assert found.packed.ids_T[: batch.num_tokens].tolist() == batch.packed.ids_T.tolist()
    for name, label in batch.token_labels.items():
        assert found.token_labels[name][: batch.num_tokens].tolist() == label.tolist()
        assert found.token_labels[name].shape[0] == found.num_tokens

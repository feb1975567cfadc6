"""Choices: a softmax over an example's own endings, as in `transformers`; the passage is truncated, not the
question."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from bertkit.models.files.hub import load_model
from bertkit.tasks.base import Prediction
from bertkit.tasks.choice import Choice, ChoiceSettings, completed
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.examples import ChoiceExample
from tests.tasks.tiny_task import tiny_tokenizer, write_model

EXAMPLES = [
    ChoiceExample("0", "the cat is fine", "a list", ("of words", "of letter is cold", "who"), 1),
    ChoiceExample("1", "what is a tensor", "", ("matrix", "paper of number"), 0),
]


def test_the_loss_is_that_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    directory = write_model(tmp_path, heads=("multiple_choice",), dropout=0.0)
    oracle = transformers.AutoModelForMultipleChoice.from_pretrained(directory).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model, _ = load_model(directory)
    task = Choice(["accuracy"], ChoiceSettings())
    features = task.encode(EXAMPLES, SequenceEncoder(tiny_tokenizer(), max_tokens=40))
    batch = features.batch(np.array([1, 0]))
    with torch.no_grad():
        hidden_TD = model.eval()(batch.packed)
        part = task.loss(model, hidden_TD, batch)
        outputs = task.decode(model, hidden_TD, batch)
    expected = 0.0
    for example, own in zip([EXAMPLES[1], EXAMPLES[0]], outputs, strict=True):
        seconds = [completed(example.question, ending) for ending in example.endings]
        encoded = tokenizer([example.context] * len(seconds), seconds, padding=True, return_tensors="pt")
        with torch.no_grad():
            logits = oracle(**{key: value[None] for key, value in encoded.items()}).logits
        np.testing.assert_allclose(own, logits[0].numpy(), atol=1e-5)
        expected += float(functional.cross_entropy(logits, torch.tensor([example.label])))
    assert float(part.sum) == pytest.approx(expected, rel=1e-5)
    found = task.predictions(EXAMPLES, features, [outputs[1], outputs[0]])
    assert [len(each.scores) for each in found] == [3, 2]
    right = np.mean([each.prediction == example.label for each, example in zip(found, EXAMPLES, strict=True)])
    assert task.score(found, EXAMPLES) == {"accuracy": right}


def test_gradients_stay_finite_where_an_example_has_fewer_endings(tmp_path: Path) -> None:
    model, _ = load_model(write_model(tmp_path, heads=("multiple_choice",)))
    task = Choice(["accuracy"], ChoiceSettings())
    batch = task.encode(EXAMPLES, SequenceEncoder(tiny_tokenizer(), max_tokens=40)).batch(np.arange(2))
    task.loss(model, model(batch.packed), batch).sum.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_an_output_that_is_not_a_number_stays_visible(tmp_path: Path) -> None:
    model, _ = load_model(write_model(tmp_path, heads=("multiple_choice",)))
    with torch.no_grad():
        for parameter in model.get_submodule("multiple_choice").parameters():
            parameter.fill_(torch.nan)
        task = Choice(["accuracy"], ChoiceSettings())
        batch = task.encode(EXAMPLES, SequenceEncoder(tiny_tokenizer(), max_tokens=40)).batch(np.arange(2))
        outputs = task.decode(model.eval(), model(batch.packed), batch)
    assert [len(each) for each in outputs] == [3, 2]
    assert all(np.isnan(each).all() for each in outputs)


def test_the_passage_is_cut_and_the_question_kept() -> None:
    encoder = SequenceEncoder(tiny_tokenizer(), max_tokens=20)
    example = ChoiceExample("0", "cat " * 30, "a list of", ("words", "letter"), 0)
    features = Choice(["accuracy"], ChoiceSettings()).encode([example], encoder)
    endings = encoder.ids(["a list of words", "a list of letter"])
    for number, ending in enumerate(endings):
        ids = features.ids_T[features.starts_S1[number] : features.starts_S1[number + 1]].tolist()
        assert len(ids) == 20
        assert ids[-1 - len(ending) : -1] == ending
    assert features.account.examples_cut == 1
    assert features.account.tokens_dropped == sum(30 - (17 - len(ending)) for ending in endings)
    fits = ChoiceExample("1", "cat " * (17 - len(endings[0])), "a list of", ("words",))
    one_less = ChoiceExample("2", fits.context + "cat", "a list of", ("words",))
    features = Choice(["accuracy"], ChoiceSettings()).encode([fits, one_less], encoder)
    assert (features.account.examples_cut, features.account.tokens_dropped, features.labelled) == (1, 1, False)


def test_a_blank_is_filled_and_a_question_completed() -> None:
    assert completed("the _ is fine", "cat") == "the cat is fine"
    assert completed("what is it ?", "a cat") == "what is it ? a cat"
    assert completed("", "a cat") == "a cat"


@pytest.mark.parametrize(("lettered", "names"), [(False, (["2", "0"], ["1", "0"])), (True, (["C", "A"], ["B", "A"]))])
def test_endings_are_compared_by_the_names_they_have_in_the_file(
    lettered: bool, names: tuple[list[str], list[str]]
) -> None:
    examples = [replace(each, lettered=lettered) for each in EXAMPLES]
    predictions = [Prediction("0", 2), Prediction("1", 0)]
    assert Choice(["accuracy"], ChoiceSettings()).comparable(predictions, examples) == names

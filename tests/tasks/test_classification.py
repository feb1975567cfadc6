"""Texts with labels: the loss and its parts against plain formulas, windows, labels by name, truncation counted."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from bertkit.errors import DataError, UsageError
from bertkit.metrics.modules import load_metric
from bertkit.models.files.hub import load_model
from bertkit.models.headed import HeadedModel
from bertkit.models.labels import Labels
from bertkit.tasks.base import EncodedTokenCounts, Features, FeatureWriter, Prediction
from bertkit.tasks.classification import (
    ENOUGH_TO_TUNE,
    Classification,
    MultiLabelClassification,
    Regression,
    TextSettings,
    TextTask,
)
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.examples import TextExample
from bertkit.tasks.label_ids import class_weights, label_ids
from tests.tasks.tiny_task import reviews, tiny_tokenizer, write_model

NAMES = Labels(("bad", "good", "so-so"))


def examples(count: int = 9, seed: int = 0) -> list[TextExample]:
    return [TextExample(str(number), text, None, label) for number, (text, label) in enumerate(reviews(count, seed))]


def encoder(max_tokens: int = 40) -> SequenceEncoder:
    return SequenceEncoder(tiny_tokenizer(), max_tokens=max_tokens)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> HeadedModel:
    directory = write_model(tmp_path_factory.mktemp("model"), dropout=0.0)
    return load_model(directory, heads=("sequence_classification",), labels=NAMES)[0].eval()


def logits_of(task: TextTask, model: HeadedModel, features: Features, items: Sequence[int]) -> torch.Tensor:
    batch = features.batch(np.asarray(items))
    with torch.no_grad():
        return task.logits(model, model(batch.packed), batch)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weights", [None, {"good": 3.0}])
def test_the_loss_is_cross_entropy_summed_over_examples(
    model: HeadedModel, smoothing: float, weights: dict[str, float] | None
) -> None:
    settings = TextSettings(label_smoothing=smoothing, class_weights=weights)
    weight_K = class_weights(weights, examples(), NAMES.names)
    task = Classification(NAMES, ["accuracy"], settings, class_weight_K=weight_K)
    features = task.encode(examples(), encoder())
    batch = features.batch(np.arange(9))
    with torch.no_grad():
        part = task.loss(model, model(batch.packed), batch)
    logits = logits_of(task, model, features, range(9))
    targets = torch.tensor([NAMES.names.index(str(example.label)) for example in examples()])
    factors = torch.tensor([1.0, 1.0 if weights is None else 3.0, 1.0])
    log_probability = functional.log_softmax(logits, -1)
    smooth = functional.one_hot(targets, 3) * (1 - smoothing) + smoothing / 3
    expected = -(smooth * factors * log_probability).sum()
    torch.testing.assert_close(part.sum, expected, rtol=1e-5, atol=1e-5)
    assert part.count == task.count(batch) == 9
    assert int(part.correct) == int((logits.argmax(-1) == targets).sum())


def test_balanced_weights_give_every_label_the_same_share() -> None:
    names = ("bad", "good")
    some = [TextExample(str(i), "the cat", None, "bad" if i < 6 else "good") for i in range(8)]
    weight_K = class_weights("balanced", some, names)
    assert weight_K is not None
    np.testing.assert_allclose(weight_K * np.array([6, 2]), [4, 4])
    rare_K = class_weights("balanced", some[:7], names)  # one example is good
    assert rare_K is not None
    np.testing.assert_allclose(rare_K * np.array([6, 1]), [3.5, 3.5])
    with pytest.raises(UsageError, match=r"text.class_weights.fine: not one of the task's 2 labels \(bad, good\)"):
        class_weights({"fine": 2.0}, some, names)


def test_windows_of_a_long_text_are_averaged_and_lose_nothing(model: HeadedModel) -> None:
    long = TextExample("long", " ".join(f"cat {word}" for word, _ in reviews(6, 1)), None, "good")
    settings = TextSettings(window_stride=7)
    task = Classification(NAMES, ["accuracy"], settings)
    features = task.encode([*examples(2), long], encoder(16))
    assert features.num_examples == 3
    assert features.account.sequences > 3
    assert features.account.tokens_dropped == features.account.examples_cut == 0
    first = int(features.example_starts_I1[2])
    alone = []
    for number in range(first, features.account.sequences):
        ids = features.ids_T[features.starts_S1[number] : features.starts_S1[number + 1]].tolist()
        assert len(ids) <= 16
        alone.append(ids)
    from bertkit.data.batch import PackedBatch

    batch = PackedBatch.from_ids(alone)
    with torch.no_grad():
        windows = model.logits(task.head, model(batch), batch)
    together = logits_of(task, model, features, [0, 2, 1])
    torch.testing.assert_close(together[1], windows.mean(0), rtol=1e-5, atol=1e-6)


def test_without_windows_the_cut_is_accounted_for() -> None:
    task = Classification(NAMES, ["accuracy"], TextSettings())
    text = "cat " * 30
    some = [TextExample("0", text), TextExample("1", "cat", text), TextExample("2", "cat")]
    features = task.encode(some, encoder(20))
    account = features.account.to_json()
    room_of_one, room_of_two = 18, 17
    assert account == {
        "examples": 3,
        "sequences": 3,
        "tokens": 20 + 20 + 3,
        "examples_cut": 2,
        "tokens_dropped": (30 - room_of_one) + (31 - room_of_two),
    }


def test_a_prediction_names_labels_whatever_their_order() -> None:
    outputs = [np.array([2.0, -1.0, 0.5])]
    for names in (("bad", "good", "so-so"), ("so-so", "bad", "good")):
        task = Classification(Labels(names), ["accuracy"], TextSettings())
        order = [names.index(name) for name in ("bad", "good", "so-so")]
        logits = np.empty(3)
        logits[order] = outputs[0]
        found = task.prediction(TextExample("7", "x"), logits)
        assert found.prediction == "bad"
        assert found.scores["good"] == pytest.approx(np.exp(-1) / np.exp(outputs[0]).sum())


def test_labels_are_found_by_name_and_strange_ones_refused() -> None:
    assert label_ids([("0", "Good"), ("1", "bad")], ("bad", "good")).tolist() == [1, 0]
    assert label_ids([("0", "A"), ("1", "a")], ("a", "A")).tolist() == [1, 0]
    with pytest.raises(
        DataError, match=r"example 3: the label 'worse' is not one of the task's 2 labels \(bad, good\)"
    ):
        label_ids([("3", "worse")], ("bad", "good"))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_several_labels_are_sigmoids_with_a_threshold_of_one_half(model: HeadedModel, smoothing: float) -> None:
    task = MultiLabelClassification(NAMES, ["micro_f1"], TextSettings(label_smoothing=smoothing))
    some = [TextExample("0", "the cat", None, ("bad", "so-so")), TextExample("1", "a list of words", None, ())]
    features = task.encode(some, encoder())
    np.testing.assert_array_equal(features.example_labels["label"], [[1, 0, 1], [0, 0, 0]])
    batch = features.batch(np.arange(2))
    with torch.no_grad():
        part = task.loss(model, model(batch.packed), batch)
    logits = logits_of(task, model, features, range(2))
    # As with two classes for each label, present and absent.
    smooth = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]) * (1 - smoothing) + smoothing / 2
    expected = functional.binary_cross_entropy_with_logits(logits, smooth) * 2
    torch.testing.assert_close(part.sum, expected, rtol=1e-5, atol=1e-6)
    assert task.rows_of(batch) == [3, 3]
    assert task.prediction(some[0], np.array([0.1, -0.1, 3.0])).prediction == ["bad", "so-so"]
    scores = task.score([Prediction("0", ["bad"]), Prediction("1", [])], some)
    assert scores == {"micro_f1": pytest.approx(2 / 3)}


def test_a_number_is_learnt_by_squared_error(tmp_path: Path) -> None:
    directory = write_model(tmp_path, dropout=0.0)
    own, _ = load_model(directory, heads=("sequence_classification",), labels=Labels.unnamed(1, "regression"))
    task = Regression(Labels.unnamed(1, "regression"), ["pearson", "mean_squared_error"], TextSettings())
    some = [TextExample(str(i), text, None, float(i)) for i, (text, _) in enumerate(reviews(5, 2))]
    features = task.encode(some, encoder())
    batch = features.batch(np.array([3, 0, 4]))
    with torch.no_grad():
        part = task.loss(own, own(batch.packed), batch)
    logits = logits_of(task, own, features, [3, 0, 4])[:, 0]
    torch.testing.assert_close(part.sum, ((logits - torch.tensor([3.0, 0.0, 4.0])) ** 2).sum())
    guesses = [Prediction(str(i), 2.0 * i) for i in range(5)]
    assert task.score(guesses, some) == {"pearson": pytest.approx(1.0), "mean_squared_error": pytest.approx(6.0)}


def test_a_score_of_known_range_is_a_share_of_the_largest() -> None:
    task = Regression(Labels.unnamed(1, "regression"), ["pearson"], TextSettings(largest_score=4.0))
    some = [TextExample(str(score), "the cat", None, score) for score in (0.0, 1.0, 4.0)]
    np.testing.assert_allclose(task.label_array(some), [0, 0.25, 1])
    with pytest.raises(DataError, match=r"the score 4.5 is not between 0 and 4 \(text.largest_score\)"):
        task.label_array([TextExample("0", "the cat", None, 4.5)])
    for score in (0.0, 1.0, 3.5, 4.0):
        assert task.prediction(some[0], np.array([task.output_for(score)])).prediction == pytest.approx(score, abs=0.05)


def test_f1_is_that_of_the_second_of_two_labels_whatever_their_names() -> None:
    """For the task's own metrics and an additional one; they do not apply to three labels, which is an error before
    training."""
    some = [TextExample(str(i), "a", None, label) for i, label in enumerate(("no", "yes", "yes"))]
    guesses = [Prediction(str(i), label) for i, label in enumerate(("yes", "yes", "no"))]
    task = Classification(Labels(("yes", "no")), ["f1"], TextSettings())
    task.label_order = ("no", "yes")  # a model may have them in another order
    task.additional = (load_metric("f1"),)
    assert task.score(guesses, some) == {"f1": 0.5, "f1_f1": 0.5}
    three = Classification(NAMES, ["accuracy", "f1"], TextSettings())
    with pytest.raises(
        UsageError, match=r"f1: is the F1 of the second of two labels, but the task has 3 labels; use macro_f1"
    ):
        three.check_additional(some)


def test_scores_by_label_are_arrays_that_read_as_dictionaries() -> None:
    names = ("b", "a", "c")
    task = MultiLabelClassification(Labels(names), ("micro_f1",), TextSettings())
    examples = [TextExample(str(number), "x", None, ("a",) * (number % 2)) for number in range(ENOUGH_TO_TUNE)]
    logits = np.random.default_rng(0).normal(size=(ENOUGH_TO_TUNE, 3)).astype(np.float32)
    found = task.predictions(
        examples, FeatureWriter().finish(EncodedTokenCounts(0, 0, 0), labelled=False), list(logits)
    )
    plain = [replace(each, scores=dict(each.scores)) for each in found]
    assert [each.to_json() for each in found] == [each.to_json() for each in plain]
    assert (list(found[0].scores), len(found[0].scores)) == (list(names), 3)
    assert repr(found[0].scores) == repr(plain[0].scores)
    assert found == plain
    assert pickle.loads(pickle.dumps(found)) == plain
    with pytest.raises(KeyError):
        found[0].scores["d"]
    # A saved prediction has a dictionary, which may be in another order.
    turned = [replace(each, scores=dict(reversed(list(each.scores.items())))) for each in found]
    tuned = task.tune(found, examples)
    assert tuned == task.tune(turned, examples)
    assert [each.prediction for each in task.final(found, tuned)] == [
        [name for name in names if each.scores[name] >= tuned["label_thresholds"][name]] for each in plain
    ]
    assert task.final(turned, tuned) == task.final(found, tuned)

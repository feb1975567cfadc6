"""Every metric with evaluate's interface: the same figures, nothing fetched, nothing left on disk."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bertkit.errors import DataError, UsageError
from bertkit.metrics import METRICS, find_metric
from bertkit.metrics.mlqa import LANGUAGES
from bertkit.metrics.modules import load_metric, local_metric, metric_class

LABELS = (["1", "0", "1"], ["1", "1", "1"])
NUMBERS = ([0.5, 2.0, 2.5], [1.0, 2.0, 4.0])
TAGS = ([["B-PER", "O"], ["I-LOC", "O", "O"]], [["B-PER", "O"], ["B-LOC", "O", "O"]])
INPUTS = {
    **dict.fromkeys(("accuracy", "f1", "macro_f1", "micro_f1", "matthews_correlation"), LABELS),
    **dict.fromkeys(("pearson", "spearman", "mean_squared_error"), NUMBERS),
    **dict.fromkeys(("conlleval", "strict_iob2", "tag_accuracy"), TAGS),
    "multi_label": ([["joy"], []], [["joy", "fear"], []]),
}
QUESTIONS = (
    [{"id": "q1", "prediction_text": "fox"}, {"id": "q2", "prediction_text": ""}],
    [
        {"id": "q1", "answers": {"text": ["the fox", "hen"], "answer_start": [3, 40]}},
        {"id": "q2", "answers": {"text": ["a goose"], "answer_start": [0]}},
    ],
)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a metric asked for the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize("name", INPUTS)
def test_evaluate_gives_the_functions_scores(name: str) -> None:
    predictions, references = INPUTS[name]
    metric = local_metric(name)
    assert metric.compute(predictions=predictions, references=references) == pytest.approx(
        METRICS[name](predictions, references)
    )
    metric.add_batch(predictions=predictions, references=references)
    assert metric.compute() == pytest.approx(METRICS[name](predictions, references))


def test_label_ids_and_options_are_taken() -> None:
    assert local_metric("accuracy").compute(predictions=[1, 2, 0], references=[1, 2, 2])["accuracy"] == pytest.approx(
        2 / 3
    )
    assert local_metric("f1").compute(predictions=["b", "b"], references=["b", "a"], positive="b") == {
        "f1": pytest.approx(2 / 3)
    }


def test_questions_are_given_as_items_with_ids() -> None:
    predictions, references = QUESTIONS
    assert local_metric("squad").compute(predictions=predictions, references=references[::-1]) == {
        "exact_match": 0.5,
        "f1": 0.5,
    }
    predictions = [{**item, "no_answer_probability": 0.2} for item in predictions]
    references = [references[0], {"id": "q2", "answers": {"text": [], "answer_start": []}}]
    scores = local_metric("squad_v2").compute(predictions=predictions, references=references)
    assert (scores["exact"], scores["NoAns_total"], scores["best_f1"]) == (1.0, 1, 1.0)
    strict = local_metric("squad_v2").compute(predictions=predictions, references=references, no_answer_threshold=0.1)
    assert strict["exact"] == 0.5


def test_a_question_given_twice_is_named() -> None:
    predictions, references = QUESTIONS
    with pytest.raises(DataError, match="question q2 occurs twice"):
        local_metric("squad").compute(predictions=[predictions[1], predictions[1]], references=references)


def test_numbers_are_not_cut_to_labels() -> None:
    with pytest.raises(DataError, match=r"metric accuracy: reads labels, not numbers such as 0\.5; leave it out"):
        load_metric("accuracy").compute(*NUMBERS)
    assert load_metric("pearson").compute(*NUMBERS) == METRICS["pearson"](*NUMBERS)


def test_undefined_scores_stay_none() -> None:
    assert local_metric("pearson").compute(predictions=[1.0, 1.0], references=[1.0, 2.0]) == {"pearson": None}


def test_every_metric_has_a_local_form_and_unknown_ones_name_the_nearest() -> None:
    of_items = {"squad", "squad_v2", *(f"mlqa_{language}" for language in LANGUAGES)}
    assert {*INPUTS, *of_items} == set(METRICS), "INPUTS above has an example for each metric"
    with pytest.raises(UsageError, match="did you mean spearman"):
        local_metric("spearmanr")
    with pytest.raises(UsageError, match="one of: accuracy, f1"):
        find_metric("zzz")


def test_nothing_stays_on_the_disk(tmp_path: Path) -> None:
    metric = metric_class("accuracy")(keep_in_memory=True, cache_dir=str(tmp_path))
    assert metric.compute(predictions=[1, 0], references=[1, 1]) == {"accuracy": 0.5}
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_metrics_import_without_evaluate_or_torch() -> None:
    code = (
        "import sys, bertkit.metrics.modules, bertkit.metrics.statistics\n"
        "print([name for name in ('evaluate', 'datasets', 'torch', 'sklearn') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""Attribution as a run: outputs, explanations and refusals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from bertkit.errors import DataError, UsageError
from bertkit.models.families.electra import ElectraConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.labels import Labels
from bertkit.probing.attribution import AttributionSettings
from bertkit.probing.attribution.explanations import METHODS
from bertkit.probing.attribution.run import probe_attribution
from bertkit.probing.sentences import Sentence, TextEncoder, packed
from tests.probing.request import request_for, write_sentences
from tests.probing.test_attention import results
from tests.probing.tiny_models import BERT, tiny_causal_model, tiny_model, tiny_tokenizer


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn but not written, which takes most of a small run's time."""
    monkeypatch.setattr("bertkit.run.figure_files.save", lambda figure, stem: [])


@pytest.fixture(scope="module")
def attribution_run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("attribution")
    text = write_sentences(directory / "text.txt")
    settings = AttributionSettings(
        sentences=3, directions=2, identify_sentences=40, epochs=2, texts=["The reader [MASK] a file."], steps=20
    )
    return probe_attribution(request_for(directory, text), settings)


def test_an_attribution_run_holds_shares_identifiability_and_an_explanation(attribution_run: Any) -> None:
    summary = results(attribution_run)["summary"]
    assert_allclose(np.sum(summary["by_distance"]["contribution"], axis=1), np.ones(2))
    assert summary["identifiability"]["nearest"][0] == 1.0
    assert all(0 < median < 1 for median in summary["own_share"]["median"])
    (explained,) = summary["predictions"]
    assert explained["tokens"][explained["read_token"]] == "[MASK]"
    assert set(explained["methods"]) == set(METHODS)
    total = sum(explained["methods"]["integrated_gradients"])
    assert total + explained["gap"] == pytest.approx(explained["prediction"] - explained["baseline_prediction"])
    assert abs(explained["gap"]) < 1e-3
    assert sum(explained["methods"]["attention_rollout"]) == pytest.approx(1)
    # Special tokens and the mask are the same in the baseline, so they do not contribute to the difference.
    same = [place for place, token in enumerate(explained["tokens"]) if token in ("[CLS]", "[MASK]", "[SEP]")]
    assert [explained["methods"]["integrated_gradients"][place] for place in same] == [0.0] * 3
    names = {"context", "identifiability", "own_share", "prediction-1"}
    assert {path.stem for path in (attribution_run.run.path / "figures").iterdir()} == names


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "nothing to probe: give --data SOURCE, or --text"),
        ({"texts": ["No mask here."]}, r"contains \[MASK\] 0 times; write it once"),
        ({"texts": ["[MASK] and [MASK]."]}, r"contains \[MASK\] 2 times"),
        ({"texts": ["A [MASK]."], "target": "modelable"}, r"--target modelable: \d tokens"),
        ({"texts": ["A [MASK]."], "methods": ["integrated"]}, "did you mean integrated_gradients"),
        ({"target": "a"}, "--target a: also give --text"),
        ({"identify_sentences": 9}, "--identify-sentences 9: expected 0, or at least 10"),
    ],
)
def test_what_cannot_be_explained_is_refused_before_a_run(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    data = write_sentences(tmp_path / "text.txt") if "identify_sentences" in settings else None
    with pytest.raises(UsageError, match=message):
        probe_attribution(request_for(tmp_path, data), AttributionSettings(**settings))
    assert not (tmp_path / "runs").exists()


def test_too_few_sentences_to_learn_from_are_refused(tmp_path: Path) -> None:
    text = write_sentences(tmp_path / "text.txt", ["A short file.", "Another one."])
    with pytest.raises(DataError, match="expected at least 10; give more text, or --identify-sentences 0"):
        probe_attribution(request_for(tmp_path, text), AttributionSettings(sentences=1))


@pytest.mark.usefixtures("undrawn")
def test_a_class_is_explained_by_name_and_the_baseline_can_be_chosen(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, ElectraConfig(**BERT, embedding_size=12), ("sequence_classification",))
    model.labels = Labels(("bad", "good"), "single_label_classification")
    request = request_for(tmp_path, model=model, tokenizer=tokenizer)
    found = {}
    for baseline in ("zero", "pad"):
        settings = AttributionSettings(texts=["A good file."], target="good", baseline=baseline)
        (found[baseline],) = results(probe_attribution(request, settings))["summary"]["predictions"]
    assert found["zero"]["target"] == found["pad"]["target"] == "good"
    assert found["zero"]["prediction"] == found["pad"]["prediction"]
    assert found["zero"]["baseline_prediction"] != found["pad"]["baseline_prediction"]
    with pytest.raises(UsageError, match="--target fine: no such class; the model has bad, good"):
        probe_attribution(request, AttributionSettings(texts=["A good file."], target="fine"))


@pytest.mark.usefixtures("undrawn")
def test_a_model_without_a_head_has_its_rollout_alone(tmp_path: Path) -> None:
    request = request_for(tmp_path, model=tiny_model(tiny_tokenizer(), heads=()))
    (explained,) = results(probe_attribution(request, AttributionSettings(texts=["A file."])))["summary"]["predictions"]
    assert list(explained["methods"]) == ["attention_rollout"]
    assert explained["prediction"] is None
    with pytest.raises(UsageError, match=r"the model has no .* head, .* by saliency; --method attention_rollout"):
        probe_attribution(request, AttributionSettings(texts=["A file."], methods=["saliency"]))


@pytest.mark.usefixtures("undrawn")
def test_the_rollout_of_a_left_to_right_model_is_that_of_its_last_token(tmp_path: Path) -> None:
    request = request_for(tmp_path, model=tiny_causal_model(tiny_tokenizer()))
    (explained,) = results(probe_attribution(request, AttributionSettings(texts=["A file."])))["summary"]["predictions"]
    (shares,) = explained["methods"].values()
    assert explained["read_token"] == len(explained["tokens"]) - 1
    assert sum(shares) == pytest.approx(1)
    assert min(shares) > 0


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("labels", "activation", "told"),
    [
        (Labels(("a", "b", "c"), "multi_label_classification"), torch.sigmoid, "predicts 'b' with a probability of"),
        (Labels(("a", "b", "c")), lambda row: torch.softmax(row, -1), "predicts 'b' with a probability of"),
        (Labels(("a", "b"), "regression"), lambda row: row, "has the output .* for 'b'"),
        (Labels(("b",)), lambda row: row, "has the output .* for 'b'"),
    ],
    ids=["several-apply", "one-applies", "numbers", "number"],
)
def test_a_prediction_is_what_the_head_is_trained_for(
    labels: Labels, activation: Any, told: str, tmp_path: Path
) -> None:
    tokenizer = tiny_tokenizer()
    config = ElectraConfig(**BERT, embedding_size=12)
    model = HeadedModel(
        config.build(tokenizer.vocab_size, pad_id=tokenizer.pad_id), ("sequence_classification",), labels=labels
    )
    model.initialise(seed=4)
    request = request_for(tmp_path, model=model.eval())
    probed = probe_attribution(request, AttributionSettings(texts=["A file."], target="b", methods=["saliency"]))
    (explained,) = results(probed)["summary"]["predictions"]
    (sentence,) = TextEncoder.of(model, tokenizer).encode([Sentence("", "A file.")])
    batch = packed([sentence])
    with torch.no_grad():
        expected = activation(model.logits("sequence_classification", model(batch), batch)[0])
    assert explained["prediction"] == pytest.approx(float(expected[labels.names.index("b")]), rel=1e-5)
    assert re.search(told, probed.sentences[0])

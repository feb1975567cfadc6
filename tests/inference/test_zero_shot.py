"""Zero-shot labels: entailment outputs equal `transformers`, and cosines of vectors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

import bertkit as package
from bertkit.errors import DataError, UsageError
from bertkit.finetuning import prediction
from bertkit.inference import zero_shot as module
from bertkit.inference.zero_shot import zero_shot
from bertkit.models.labels import Labels
from bertkit.models.sentence_files import write_sentence_files
from bertkit.tasks.base import Features
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.examples import TextExample
from bertkit.training.engine import resolve_engine
from bertkit.training.engine_config import EngineConfig
from tests.tasks.tiny_task import write_model

ENGINE = resolve_engine(EngineConfig(device="cpu", precision="fp32"))
TEXTS = ["fine cat list", "poor tensor of words in a matrix", "number"]
LABELS = ("warm", "cold letter", "paper")


@pytest.fixture(scope="module")
def nli(tmp_path_factory: pytest.TempPathFactory) -> Path:
    labels = Labels(("contradiction", "entailment", "neutral"), "single_label_classification")
    return write_model(tmp_path_factory.mktemp("nli") / "model", heads=("sequence_classification",), labels=labels)


def predictions(model: Path, template: str | None = None) -> list[dict[str, float]]:
    predictor = zero_shot(str(model), LABELS, ENGINE, template=template)
    found = predictor([TextExample(str(i), text) for i, text in enumerate(TEXTS)])
    assert all(each.prediction == max(each.scores, key=each.scores.get) for each in found)
    return [each.scores for each in found]


@pytest.mark.parametrize("template", [None, "the list is {} ."])
def test_scores_are_those_of_transformers_pipeline(nli: Path, template: str | None) -> None:
    transformers = pytest.importorskip("transformers", reason="the oracle is a development dependency")
    pipeline = transformers.pipeline("zero-shot-classification", model=str(nli), device="cpu")
    wanted = pipeline(TEXTS, list(LABELS), hypothesis_template=template or "This example is {}.")
    for own, theirs in zip(predictions(nli, template), wanted, strict=True):
        scores = dict(zip(theirs["labels"], theirs["scores"], strict=True))
        assert own == pytest.approx(scores, abs=1e-5)


def test_pairs_are_read_a_few_at_a_time_with_the_same_bits(nli: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many at a time as are computed together; fewer if they are long."""
    monkeypatch.setattr(prediction, "WINDOW_ITEMS", 8)
    texts = [TextExample(str(i), " ".join(TEXTS[:2]) * (i % 4)) for i in range(1, 12)]
    predictor = zero_shot(str(nli), LABELS, ENGINE)
    pairs = [TextExample(each.id, each.text, f"This example is {name}.") for each in texts for name in LABELS]
    features = predictor.task.encode(pairs, predictor.encoder)
    logits = np.stack(prediction.predict(predictor.model, predictor.task, features, ENGINE))[:, 1].astype(np.float64)
    shares = np.exp(logits.reshape(-1, 3) - logits.reshape(-1, 3).max(axis=1, keepdims=True))
    read: list[int] = []

    def counted(pairs: list[TextExample], encoder: SequenceEncoder, encode: Any = predictor.task.encode) -> Features:
        read.append(len(pairs))
        found: Features = encode(pairs, encoder)
        return found

    monkeypatch.setattr(predictor.task, "encode", counted)
    monkeypatch.setattr(module, "WINDOW_ITEMS", 8)
    monkeypatch.setattr(module, "LARGEST_CHARACTERS", 300)
    scores = np.array([list(each.scores.values()) for each in predictor(texts)])
    np.testing.assert_array_equal(scores, shares / shares.sum(axis=1, keepdims=True))
    assert sum(read) == len(pairs)
    assert max(read) <= 8
    assert min(read[:-1]) < 8  # long texts


def test_an_embedder_takes_the_nearest_name(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    write_sentence_files(model, width=30, pooling=("max",), normalise=True, max_tokens=20)
    loaded = package.load(str(model))
    texts, names = (loaded.encode(each) for each in (TEXTS, LABELS))
    for own, wanted in zip(predictions(model), texts @ names.T, strict=True):
        np.testing.assert_allclose(list(own.values()), wanted, atol=1e-5)


def test_what_cannot_be_chosen_among_is_refused(nli: Path, tmp_path: Path) -> None:
    for labels, fault in ((["a", "b", "a"], "a is given twice"), (["a"], "two labels"), (["a", " "], "two labels")):
        with pytest.raises(UsageError, match=fault):
            zero_shot(str(nli), labels, ENGINE)
    with pytest.raises(UsageError, match=r"one \{\} for the label"):
        zero_shot(str(nli), LABELS, ENGINE, template="This is it.")
    other = Labels(("bad", "good"), "single_label_classification")
    stars = write_model(tmp_path / "stars", heads=("sequence_classification",), labels=other)
    with pytest.raises(DataError, match="is a classifier for bad, good; --zero-shot needs"):
        zero_shot(str(stars), LABELS, ENGINE)


def test_the_command_prints_a_line_for_each_text(nli: Path, tmp_path: Path, bertkit: Callable[..., Any]) -> None:
    (tmp_path / "texts.txt").write_text("\n".join([TEXTS[0], "", TEXTS[1]]) + "\n", encoding="utf-8")
    words = ("predict", "--zero-shot", "--labels", "warm,cold letter", "--model", nli, tmp_path / "texts.txt")
    done = bertkit(*words)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["prediction"] is None for row in rows] == [False, True, False]
    assert set(rows[0]["scores"]) == {"warm", "cold letter"}
    assert bertkit("predict", "--labels", "a,b", "--model", nli, tmp_path / "texts.txt").code == 2


def test_an_embedder_reads_its_prompt_before_texts_and_labels(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    write_sentence_files(model, width=30, pooling=("mean",), normalise=True, max_tokens=20)
    settings = json.loads((model / "config_sentence_transformers.json").read_text())
    settings |= {"prompts": {"topic": "the number "}, "default_prompt_name": "topic"}
    (model / "config_sentence_transformers.json").write_text(json.dumps(settings))
    loaded = package.load(str(model))
    texts, names = (loaded.encode(each) for each in (TEXTS, LABELS))
    for own, wanted in zip(predictions(model), texts @ names.T, strict=True):
        np.testing.assert_allclose(list(own.values()), wanted, atol=1e-5)


def test_the_warning_of_cut_texts_counts_pairs_with_labels(nli: Path, caplog: pytest.LogCaptureFixture) -> None:
    predictor = zero_shot(str(nli), LABELS, ENGINE)
    predictor([TextExample("0", "fine cat list " * 600), TextExample("1", "number")])
    assert "3 of 6 pairs of a text and a label were cut to" in caplog.text


@pytest.mark.parametrize("kind", ["dense", "table"])
def test_an_embedder_is_used_with_all_its_modules(tmp_path: Path, kind: str) -> None:
    """A dense map after the pooling, and a table of vectors in a folder of its own without config.json."""
    library = pytest.importorskip("sentence_transformers", reason="the oracle is a development dependency")
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    model, out = write_model(tmp_path / "model"), tmp_path / "embedder"
    if kind == "dense":
        dense = pytest.importorskip("sentence_transformers.base.modules").Dense(30, 9)
        parts = [modules.Transformer(str(model)), modules.Pooling(30), dense]
        library.SentenceTransformer(modules=parts, device="cpu").save(str(out))
    else:
        tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
        table = modules.StaticEmbedding(tokenizer, embedding_dim=9)
        library.SentenceTransformer(modules=[table], device="cpu").save(str(out))
        # Where versions before 6 write it.
        inner = out / "0_StaticEmbedding"
        inner.mkdir()
        for name in ("model.safetensors", "tokenizer.json"):
            (out / name).rename(inner / name)
        listed = json.loads((out / "modules.json").read_text())
        (out / "modules.json").write_text(json.dumps([{**listed[0], "path": inner.name}]))
    loaded = package.load(str(out), precision="fp32")
    texts, names = (loaded.encode(each).astype(np.float64) for each in (TEXTS, LABELS))
    np.testing.assert_allclose(texts, library.SentenceTransformer(str(out), device="cpu").encode(TEXTS), atol=2e-6)
    lengths = (np.linalg.norm(each, axis=1) for each in (texts, names))
    wanted_IL = texts @ names.T / np.outer(*lengths)
    for own, wanted in zip(predictions(out), wanted_IL, strict=True):
        np.testing.assert_allclose(list(own.values()), wanted, atol=1e-6)


def test_a_length_is_not_ignored(nli: Path, tmp_path: Path) -> None:
    embedder = write_model(tmp_path / "model")
    write_sentence_files(embedder, width=30, pooling=("mean",), normalise=True, max_tokens=20)
    for model in (nli, embedder):
        assert zero_shot(str(model), LABELS, ENGINE, max_length=12).encoder.max_tokens == 12
        with pytest.raises(UsageError, match=r"--max-length 4000: .* reads at most 40 tokens"):
            zero_shot(str(model), LABELS, ENGINE, max_length=4000)

"""`probe heads` as a run: on text or a task, the same for any batch, and refused if nothing can be scored."""

from __future__ import annotations

import csv
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertkit.errors import DataError, UsageError
from bertkit.evaluation.run import MeasurementArguments
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.inputs import CustomTask
from bertkit.finetuning.run import finetune
from bertkit.inference.predict import Predictor
from bertkit.models.conversion.pruning import prune_heads
from bertkit.models.families.bert import BertConfig
from bertkit.models.files.hub import load_model
from bertkit.models.labels import Labels
from bertkit.models.scoring.rules import choose_rule
from bertkit.models.sentence import SentenceModel
from bertkit.probing.heads import HeadsSettings
from bertkit.probing.heads.measure import HalfRetrieval, WordLoss, halves
from bertkit.probing.heads.report import HeadResults, _draw_heads, heads_report
from bertkit.probing.heads.run import probe_heads
from bertkit.probing.run import ProbeArguments, ProbeResult
from bertkit.probing.sentences import Sentence, TextEncoder
from bertkit.progress import silent_progress
from bertkit.recipe.resolve import Override
from bertkit.run.verify import verify_run
from bertkit.tasks.catalogue import find_task
from bertkit.tasks.readers import load_split
from bertkit.text.tokenizer_files import load_tokenizer
from tests.probing.request import request_for, write_sentences
from tests.probing.tiny_models import BERT, TEXTS, save_tiny, tiny_causal_model, tiny_model, tiny_tokenizer, write_run
from tests.tasks.tiny_glue import write_glue
from tests.tasks.tiny_task import write_model

pytestmark = pytest.mark.usefixtures("drawn_figures")


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertkit.run.figure_files.save", lambda figure, stem: [])


def run_heads(request: ProbeArguments, *, data_dir: Path | None = None, **settings: Any) -> ProbeResult:
    return probe_heads(replace(request, data_dir=data_dir), HeadsSettings(**{"random_orders": 2, **settings}))


def table(probed: ProbeResult, name: str) -> list[dict[str, str]]:
    assert probed.run is not None
    with (probed.run.path / "tables" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_on_text_holds_every_head_and_does_not_depend_on_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # this one draws
    text = write_sentences(tmp_path / "text.txt")
    probed = run_heads(request_for(tmp_path, text), sentences=20, score_sentences=9)
    assert probed.run is not None
    assert not verify_run(probed.run.path).errors
    names = {path.name for path in (probed.run.path / "figures").iterdir()}
    assert names == {"heads.png", "heads.svg", "pruning.png", "pruning.svg"}
    summary = probed.results["summary"]
    assert (summary["examples"], summary["score_examples"]) == (20, 9)
    rows = table(probed, "heads")
    assert [(row["layer"], row["head"]) for row in rows] == [("1", "1"), ("1", "2"), ("2", "1"), ("2", "2")]
    assert sorted(int(row["rank"]) for row in rows) == [1, 2, 3, 4]
    for row in rows:
        assert float(row["score_without"]) - float(row["worse_by"]) == pytest.approx(summary["score"])
    assert [row["best_head"] for row in table(probed, "one_head_left")] == [str(n) for n in summary["best_head_left"]]
    curves = table(probed, "pruning")
    assert list(curves[0]) == ["heads_pruned", "share_pruned", "importance", "oracle", "random_1", "random_2"]
    for name in ("importance", "oracle", "random_1", "random_2"):
        assert float(curves[0][name]) == pytest.approx(summary["score"], rel=1e-6)
        assert float(curves[-1][name]) == pytest.approx(float(curves[-1]["oracle"]), rel=1e-6)
    # The first head removed in the oracle's order is the one with the smallest ablation loss.
    assert float(curves[1]["oracle"]) == pytest.approx(min(float(row["score_without"]) for row in rows), rel=1e-6)
    other = run_heads(request_for(tmp_path, text, batch_tokens=33), sentences=20, score_sentences=9).results["summary"]
    np.testing.assert_allclose(other["importance"], summary["importance"], rtol=1e-3)
    assert other["score"] == pytest.approx(summary["score"], rel=1e-5)


def test_heads_of_a_pruned_model_have_their_numbers_in_the_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # cells of pruned heads are left out of the picture
    text = write_sentences(tmp_path / "text.txt")
    model = tiny_model(tiny_tokenizer(), BertConfig(**BERT | {"hidden_size": 24, "num_attention_heads": 4}))
    prune_heads(model, {0: [0, 2], 1: [1, 2]})
    probed = run_heads(request_for(tmp_path, text, model=model), sentences=9, score_sentences=5, random_orders=0)
    rows = table(probed, "heads")
    assert [(row["layer"], row["head"]) for row in rows] == [("1", "2"), ("1", "4"), ("2", "1"), ("2", "4")]
    summary = probed.results["summary"]
    assert summary["head_numbers"] == [[2, 4], [1, 4]]
    for layer, best in enumerate(summary["best_head_left"]):
        alone = {int(row["head"]): float(row["alone_worse_by"]) for row in rows if row["layer"] == str(layer + 1)}
        assert best == min(alone, key=lambda head: alone[head])


def test_a_short_text_is_shared_out(tmp_path: Path) -> None:
    text = write_sentences(tmp_path / "text.txt")
    summary = run_heads(request_for(tmp_path, text), random_orders=0).results["summary"]
    assert summary["examples"] + summary["score_examples"] <= 83
    assert 4 < summary["examples"] / summary["score_examples"] < 6
    assert "random" not in summary["removable"]


@pytest.fixture(scope="module")
def glue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_glue(tmp_path_factory.mktemp("heads") / "glue")


def classifier(directory: Path, *names: str) -> Path:
    return write_model(directory, heads=("sequence_classification",), labels=Labels(names))


def test_a_task_is_scored_as_it_is_evaluated_whatever_the_order_of_its_labels(glue: Path, tmp_path: Path) -> None:
    found = []
    for number, names in enumerate((("entailment", "not_entailment"), ("not_entailment", "entailment"))):
        model = classifier(tmp_path / f"m{number}", *names)
        summary = run_heads(request_for(tmp_path, models=[str(model)]), task="rte", data_dir=glue).results["summary"]
        predictor = Predictor.load(str(model), MeasurementArguments(device="cpu").engine(), spec=find_task("rte"))
        examples = load_split(find_task("rte"), "dev", glue).examples
        score = predictor.task.score(predictor(examples), examples)["accuracy"]
        assert (summary["metric"], summary["score"]) == ("accuracy", pytest.approx(score))
        assert summary["higher_is_better"]
        assert np.shape(summary["importance"]) == (2, 3)
        found.append(summary["score"])
    assert found[0] + found[1] == pytest.approx(1)  # the same weights, the labels exchanged


def test_a_run_of_its_own_brings_its_task_along(glue: Path, tmp_path: Path) -> None:
    request = FinetuneArguments(
        task="sst2",
        model=str(write_model(tmp_path / "base")),
        data_dir=str(glue),
        overrides=(Override("optimisation.max_steps", 2), Override("engine.device", "cpu")),
        run_dir=tmp_path / "tuned",
    )
    run = finetune(request, progress=silent_progress).run
    summary = run_heads(request_for(tmp_path, models=[str(run.path)])).results["summary"]
    assert (summary["task"], summary["split"], summary["what"]) == ("sst2", "dev", "sst2")
    tuned = run.results
    assert tuned is not None
    assert summary["score"] == pytest.approx(tuned["tasks"]["sst2"]["accuracy"]["mean"])


def test_a_half_is_read_as_a_text_of_its_words() -> None:
    tokenizer = tiny_tokenizer()
    texts = [text for text in TEXTS if len(text.split()) > 3]
    encoder = TextEncoder.of(tiny_model(tokenizer), tokenizer)
    for sentence in encoder.encode(Sentence(text, text) for text in texts):
        cut = len(sentence.words) // 2
        for half, words in zip(halves(sentence), (sentence.words[:cut], sentence.words[cut:]), strict=True):
            (alone,) = encoder.encode([Sentence("half", " ".join(words))])
            assert half.words == alone.words == words
            for name in ("ids_T", "types_T", "word_T", "spans_W2"):
                np.testing.assert_array_equal(getattr(half, name), getattr(alone, name))


def test_a_sentence_embedder_retrieves_halves(tmp_path: Path) -> None:
    text = write_sentences(tmp_path / "text.txt")
    request = request_for(tmp_path, text, model=tiny_model(tiny_tokenizer(), heads=()))
    directory = tmp_path / "model"
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    steps = [{"idx": 0, "path": "", "type": "x.Transformer"}, {"idx": 1, "path": "1_Pooling", "type": "x.Pooling"}]
    (directory / "modules.json").write_text(json.dumps(steps))
    summary = run_heads(request, random_orders=0).results["summary"]
    assert summary["metric"] == "mean reciprocal rank"
    assert 0 < summary["score"] <= 1
    assert summary["left_out"]["sentences of fewer than 8 words (left out)"]["count"] > 0


def test_what_cannot_be_scored_is_refused(glue: Path, tmp_path: Path) -> None:
    text = write_sentences(tmp_path / "text.txt")
    bare = request_for(tmp_path / "bare", text, model=tiny_model(tiny_tokenizer(), heads=()))
    with pytest.raises(DataError, match="no masked_lm, causal_lm or permutation_lm head"):
        run_heads(bare)
    for models in ({}, {"models": [f"{write_run(tmp_path / 'run', [5])}@5"]}):
        with pytest.raises(UsageError, match=r"Give --data SOURCE.* or --task TASK"):
            run_heads(request_for(tmp_path, **models))
    with pytest.raises(UsageError, match=r"--task rte: .*@5 is a checkpoint, which does not name its head"):
        run_heads(request_for(tmp_path, **models), task="rte", data_dir=glue)
    with pytest.raises(UsageError, match="give one of the two"):
        run_heads(request_for(tmp_path, text), task="rte")
    with pytest.raises(DataError, match=r"no task head; `bertkit finetune --task rte --model '.*/of a reader/model'`"):
        run_heads(request_for(tmp_path / "of a reader"), task="rte", data_dir=glue)
    other = classifier(tmp_path / "other", "acceptable", "unacceptable")
    with pytest.raises(DataError, match="a head that is not one of rte"):
        run_heads(request_for(tmp_path, models=[str(other)]), task="rte", data_dir=glue)
    assert not list(tmp_path.rglob("results.json"))


def test_a_model_that_needs_no_head_is_named() -> None:
    ones = np.ones((1, 2))
    figures = HeadResults(
        "m",
        "rte",
        "accuracy",
        True,
        (5, 7),
        0.4,
        ones,
        ones,
        ones,
        -ones,
        -ones,
        [[0, 1]],
        [0, 1, 2],
        {"importance": [0.4, 0.5, 0.6]},
    )
    told = " ".join(finding.sentence for finding in heads_report(figures)[1])
    assert "Without any head the accuracy of m is 0.6, no worse than 0.4 with all 2" in told


def test_a_lower_error_is_better(tmp_path: Path) -> None:
    rows = [f"{word} {number},{number / 7}" for number, word in enumerate(("a", "the", "file", "value", "test") * 3)]
    table_file = tmp_path / "t.csv"
    table_file.write_text("\n".join(["text,label", *rows]) + "\n", encoding="utf-8")
    task = CustomTask(kind="regression", train=str(table_file), dev=str(table_file), metrics=("mean_squared_error",))
    request = FinetuneArguments(
        task=task,
        model=str(write_model(tmp_path / "base")),
        overrides=(Override("optimisation.max_steps", 2), Override("engine.device", "cpu")),
        run_dir=tmp_path / "tuned",
    )
    run = finetune(request, progress=silent_progress).run
    probed = run_heads(request_for(tmp_path, models=[str(run.path)]))
    summary = probed.results["summary"]
    assert (summary["metric"], summary["higher_is_better"]) == ("mean_squared_error", False)
    for row in table(probed, "heads"):
        assert float(row["score_without"]) - float(row["worse_by"]) == pytest.approx(summary["score"])
    # Train and dev are one file, and the hashes of both are recorded.
    assert probed.results["data"] == [f"{table_file} (dev)", f"{table_file} (train)"]


def test_the_titles_of_few_heads_fit_into_the_figure() -> None:
    values = {key: [0.5, 0.2] for key in ("importance_normalised", "worse_by", "alone_worse_by")}
    figure = _draw_heads("", (10_000, 10_000), {"layer": [1, 1], "head": [1, 2]} | values)
    figure.draw_without_rendering()
    assert figure.axes[2].title.get_window_extent().x1 <= figure.bbox.x1


def test_undefined_scores_are_never_the_best() -> None:
    worse = np.array([[np.nan, 0.2], [np.nan, np.nan]])
    figures = HeadResults(
        "m",
        "stsb",
        "spearman",
        True,
        (5, 7),
        0.4,
        np.ones((2, 2)),
        np.ones((2, 2)),
        np.ones((2, 2)),
        worse,
        worse,
        [[0, 1], [0, 1]],
        [0, 2, 4],
        {"importance": [0.4, float("nan"), float("nan")]},
    )
    summary, findings = heads_report(figures)
    assert summary["best_head_left"].tolist() == [2, 1]
    assert summary["worse_with_best_head_left"] == pytest.approx([0.2, np.nan], nan_ok=True)
    assert "at most 0.2 worse, without head 1-2" in findings[0].sentence
    assert "Layer 1 loses most, 0.2 of the spearman" in findings[1].sentence
    assert findings[2].sentence.startswith("Without any head the spearman of m is undefined")
    nothing = np.full((2, 2), np.nan)
    _, findings = heads_report(replace(figures, worse_without_LN=nothing, worse_alone_LN=nothing))
    assert "is 0.4 on 7 examples, and undefined without any one of them" in findings[0].sentence
    assert "The spearman is then undefined in every layer" in findings[1].sentence
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert findings[0].draw is not None
        findings[0].draw(findings[0].table)


def test_a_model_whose_score_is_undefined_is_refused(glue: Path, tmp_path: Path) -> None:
    model = write_model(
        tmp_path / "constant", heads=("sequence_classification",), labels=Labels.unnamed(1, "regression")
    )
    loaded, _ = load_model(model)
    for name, weight in loaded.named_parameters():
        if not name.startswith("encoder."):
            torch.nn.init.zeros_(weight)
    save_tiny(loaded, load_tokenizer(model), model)
    with pytest.raises(DataError, match=r"constant: its spearman on \d+ examples is undefined"):
        run_heads(request_for(tmp_path, models=[str(model)]), task="stsb", data_dir=glue)


def test_texts_that_are_too_short_are_refused() -> None:
    bare = tiny_model(tiny_tokenizer(), heads=())
    encoder = TextEncoder.of(bare, tiny_tokenizer())
    short = list(encoder.encode(Sentence(each, each) for each in ("a", "the file", "the value of a file")))
    engine = MeasurementArguments(device="cpu").engine()
    with pytest.raises(DataError, match="0 of 3 sentences have 8 words or more"):
        HalfRetrieval(SentenceModel(bare, ("mean",)), short, engine)
    causal = tiny_causal_model(tiny_tokenizer())
    one = list(TextEncoder.of(causal, tiny_tokenizer()).encode([Sentence("a", "a")]))
    rule = choose_rule(causal)(tiny_tokenizer())
    with pytest.raises(DataError, match="no token to predict"):
        WordLoss(
            causal,
            [replace(each, word_T=np.full_like(each.word_T, -1)) for each in one],
            rule,
            engine,
            masking_rate=0.15,
            seed=0,
        )

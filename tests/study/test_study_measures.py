"""Each measure equals the figure of its command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from bertkit.data.random import Draw
from bertkit.errors import DataError, UsageError
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.evaluation.mlm import evaluate_mlm
from bertkit.evaluation.run import EvalArguments
from bertkit.evaluation.settings import MlmSettings
from bertkit.models.headed import SCORING_RULE
from bertkit.models.scoring.rules import reads_causally
from bertkit.pretraining.recipe import load_recipe
from bertkit.probing.annotated import train_and_test
from bertkit.probing.layers import LayersSettings
from bertkit.probing.layers.data import LabelledSentence, read_labelled
from bertkit.probing.layers.run import layer_scores, probe_layers
from bertkit.probing.run import ProbeArguments
from bertkit.probing.sentences import Sentence, TextEncoder
from bertkit.probing.states import layer_states
from bertkit.progress import silent_progress
from bertkit.run.directory import RunDirectory
from bertkit.study.check import check_measures
from bertkit.study.measure_settings import FinetuneMeasure, MlmMeasure
from bertkit.study.measurer import Measurer
from bertkit.study.run import run_study
from bertkit.study.settings import Study
from tests.probing.test_annotated import write_trees
from tests.probing.tiny_models import cpu_engine, tiny_model, tiny_tokenizer
from tests.study.tiny_study import STUDY, arguments, results, study, write_study
from tests.tasks.tiny_glue import write_glue

ELECTRA = {
    "model.num_attention_heads": 4,
    "objective": [
        {"masked_lm": {"mask_share": 0.85, "random_share": 0.0}},
        {"replaced_token": {"tie": "none", "generator_size": 0.5}},
    ],
}
MEASURES: dict[str, Any] = {
    "accuracy": {
        "kind": "held-out",
        "metric": ["accuracy/causal_lm", "accuracy/masked_lm", "accuracy/masked_next_token"],
    },
    "pairs": {"kind": "blimp", "directory": "pairs.jsonl"},
    "pos": {"kind": "layers", "data": "t.conllu", "sentences": 30, "test_sentences": 20},
    "rte": {
        "kind": "finetune",
        "task": "rte",
        "directory": "glue",
        "set": {"optimisation.steps": 2, "engine.precision": "fp32"},
    },
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a study of all measures, run without a choice, with all files kept."""
    directory = tmp_path_factory.mktemp("measures")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setattr("bertkit.study.run.draw_figures", lambda *_: [])
        changes = {"choose": None, "claims": [], "budget": {"steps": 2}, "engine": {"keep": "checkpoints"}}
        arms = {"replaced": {"set": ELECTRA}, "shifted": {"set": {"objective": ["masked_next_token"]}}}
        write_study(directory, study(arms=arms, measures=MEASURES, **changes))
        rows = [("The cat reads a list.", "The cat read a list."), ("A paper holds words.", "A paper hold words.")]
        lines = [json.dumps({"sentence_good": good, "sentence_bad": bad}) for good, bad in rows]
        (directory / "pairs.jsonl").write_text("\n".join(lines) + "\n")
        write_trees(directory / "t.conllu", 60)
        write_glue(directory / "glue")
        run_study(arguments(directory, "run"), progress=silent_progress)
    return directory


def answers(home: Path, arm: str) -> dict[str, Any]:
    """The arm's run with the first seed."""
    return next(run["answers"] for run in results(home, "run")["runs"] if (run["arm"], run["seed"]) == (arm, 0))


def test_every_arm_is_asked_what_it_can_be(home: Path) -> None:
    found = {arm: answers(home, arm) for arm in ("masked", "causal", "replaced", "shifted")}
    missing = {(arm, name) for arm, own in found.items() for name, answer in own.items() if answer["score"] is None}
    assert missing == {("causal", "other")}
    assert {own["accuracy"]["more"]["metric"] for own in found.values()} == {
        "accuracy/masked_lm",
        "accuracy/causal_lm",
        "accuracy/masked_next_token",
    }


def test_the_generator_speaks_for_a_model_that_finds_replaced_tokens(home: Path) -> None:
    own = answers(home, "replaced")
    assert {name for name, answer in own.items() if answer.get("of") == "generator"} == {"other", "pairs"}
    generator = home / "run" / "runs" / "replaced-seed=0" / "generator"
    settings = MlmSettings(sequences=12, pseudo_sequences=0)
    request = EvalArguments(str(generator), device="cpu", runs_root=home / "by-hand", command=["test"])
    by_hand = evaluate_mlm(request, [str(home / "other.txt")], settings)
    assert own["other"]["score"] == by_hand.results["average"]


def test_pseudo_perplexity_is_that_of_the_evaluation_and_lower_is_better(home: Path, tmp_path: Path) -> None:
    run = RunDirectory.open(home / "run" / "runs" / "masked-seed=0")
    text = [str(home / "other.txt")]
    measure = MlmMeasure(kind="mlm", data=text, metric="pseudo_perplexity", sequences=5, pseudo_sequences=2)
    assert not measure.higher
    recipe = load_recipe(str(run.path / "recipe.yaml"))
    found = Measurer(tmp_path, ["test"], silent_progress, offline=True).measure("x", measure, run, recipe)
    request = EvalArguments(str(run.path), device="cpu", runs_root=tmp_path, command=["test"])
    by_hand = evaluate_mlm(request, text, MlmSettings(sequences=5, pseudo_sequences=2))
    assert found.score == by_hand.results["tasks"]["mlm"]["pseudo_perplexity"]["mean"]


def test_a_perplexity_that_overflows_has_a_reason(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "run.json").write_text('{"status": "done"}')
    (tmp_path / "x" / "results.json").write_text('{"tasks": {"mlm": {"perplexity": {"mean": null}}}}')
    measure = MlmMeasure(kind="mlm", data=["t.txt"], metric="perplexity")
    run = RunDirectory(tmp_path / "run", {})
    found = Measurer(tmp_path, ["test"], silent_progress, offline=True).measure("x", measure, run, load_recipe("bert"))
    assert found.document() == {"score": None, "reason": "its perplexity is too large for a floating-point number"}


def test_fine_tuning_has_the_seed_of_its_run(home: Path) -> None:
    for seed in (0, 1):
        place = home / "run" / "measured" / f"masked-seed={seed}" / "rte"
        record = json.loads((place / "run.json").read_text())
        assert (record["seed"], record["status"], record["steps"]) == (seed, "done", 2)
    scores = json.loads((home / "run" / "measured" / "masked-seed=0" / "rte" / "results.json").read_text())
    assert answers(home, "masked")["rte"]["score"] == scores["tasks"]["rte"]["accuracy"]["mean"]


def test_layers_are_those_of_the_probe_and_the_best_one_counts(home: Path) -> None:
    """The full probe gives the same scores; layer 0, the embeddings, never counts."""
    run = home / "run" / "runs" / "masked-seed=0"
    settings = LayersSettings(tasks=["pos"], sentences=30, test_sentences=20)
    common: dict[str, Any] = {"models": [str(run)], "data": [str(home / "t.conllu")], "device": "cpu"}
    probed = probe_layers(ProbeArguments(**common, runs_root=home / "probes", command=["test"]), settings)
    scores = probed.results["summary"]["tasks"]["pos"]["score"]
    place = home / "run" / "measured" / "masked-seed=0" / "pos"
    assert json.loads((place / "results.json").read_text())["score"] == pytest.approx(scores)
    own = answers(home, "masked")["pos"]
    assert own["score"] == pytest.approx(max(scores[1:]))
    assert scores[own["more"]["layer"]] == pytest.approx(own["score"])


def test_a_left_to_right_encoder_is_probed_as_it_was_trained(home: Path) -> None:
    run = home / "run" / "runs"
    loaded = {arm: LoadedModel.load(str(run / f"{arm}-seed=0")) for arm in ("masked", "causal")}
    assert {arm: reads_causally(each.model) for arm, each in loaded.items()} == {"masked": False, "causal": True}


def test_states_of_a_left_to_right_encoder_do_not_depend_on_later_words() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    encoder = TextEncoder.of(model, tokenizer)
    pair = [Sentence("a", words=("the", "reader", "tests")), Sentence("b", words=("the", "reader", "written"))]
    encoded = list(encoder.encode(pair))

    def first_two() -> list[Any]:
        (found,) = layer_states(model, encoded, cpu_engine())
        return [states[[0, 1]] - states[[3, 4]] for states in found.states]

    assert float(first_two()[-1].abs().max()) > 1e-3
    model.extras[SCORING_RULE] = "encoder_left_to_right"
    assert float(first_two()[-1].abs().max()) < 1e-6


def test_scores_of_layers_are_scikit_learns(home: Path) -> None:
    """Logistic regression on standardised states, fitted by scikit-learn's solver."""
    path, settings = home / "t.conllu", LayersSettings(tasks=["pos"], sentences=30, test_sentences=20)
    run = str(home / "run" / "runs" / "masked-seed=0")
    request = ProbeArguments(models=[run], data=[str(path)], device="cpu", runs_root=home, command=["test"])
    ours = layer_scores(request, settings)["pos"]
    loaded = LoadedModel.load(run)
    drawn = train_and_test(read_labelled(path), None, 30, 20, Draw(0, "layers/0"))
    (train, train_tags), (test, test_tags) = (_states_and_tags(loaded, sentences) for sentences in drawn)
    for layer in (0, 2):
        scaler = StandardScaler().fit(train[layer])
        probe = LogisticRegression(C=1.0, max_iter=5000, tol=1e-8).fit(scaler.transform(train[layer]), train_tags)
        theirs = probe.score(scaler.transform(test[layer]), test_tags)
        assert ours[layer] == pytest.approx(theirs, abs=0.03)  # theirs does not penalise the bias


def _states_and_tags(loaded: LoadedModel, sentences: Sequence[LabelledSentence]) -> tuple[list[Any], list[str]]:
    """For all words of the sentences that the model reads: the states by layer, and the tags."""
    encoder = TextEncoder.of(loaded.model, loaded.tokenizer)
    encoded = list(encoder.encode(Sentence(each.id, words=each.words) for each in sentences))
    (found,) = layer_states(loaded.model, encoded, cpu_engine(10**6))
    tags = [target.label for each in encoded for target in sentences[each.number].targets["pos"]]
    return [states.numpy() for states in found.states], tags


def test_a_fine_tuning_that_diverges_leaves_its_score_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bertkit.study.run.draw_figures", lambda *_: [])
    write_glue(tmp_path / "glue")
    settings = {
        "optimisation.steps": 3,
        "optimisation.optimizer": {"name": "adamw", "clip_norm": None, "weight_decay": 1e38},
        "optimisation.max_nonfinite_steps": 0,
    }
    measures = {"rte": {"kind": "finetune", "task": "rte", "directory": "glue", "set": settings}}
    changes = {"choose": None, "claims": [], "budget": {"steps": 2}, "seeds": [0]}
    write_study(tmp_path, study(arms={"causal": None}, measures=measures, **changes))
    run_study(arguments(tmp_path, "run"), progress=silent_progress)
    (run,) = results(tmp_path, "run")["runs"]
    assert run["scores"]["rte"] is None
    assert "diverged" in run["answers"]["rte"]["reason"]
    measured = tmp_path / "run" / "measured" / "masked-seed=0" / "rte"
    assert not (measured / "checkpoints").exists()
    assert (measured / "nonfinite").is_dir(), "for `bertkit replay-batch`, which the reason names"


def test_a_task_without_a_dev_split_is_measured_on_test(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.txt").write_text("The DT B-NP\ncat NN I-NP\n\n" * 3, encoding="utf-8")
    measure = FinetuneMeasure(kind="finetune", task="conll2000", directory=str(tmp_path))
    of = Study.model_validate(study(name="t", measures={"chunks": measure.model_dump(), "other": None}))
    before = check_measures(of, offline=True)
    (tmp_path / "test.txt").write_text("A DT B-NP\ncat NN I-NP\n\n", encoding="utf-8")
    assert check_measures(of, offline=True) != before


def test_a_tasks_file_is_found_from_the_data_folder_and_recorded_in_full(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    own = tmp_path / "data" / "mine.yaml"
    own.write_text("{kind: regression, train: t.csv, dev: d.csv, metrics: [mean_squared_error]}", encoding="utf-8")
    measure = FinetuneMeasure(kind="finetune", task="mine.yaml").located(tmp_path / "data")
    assert measure.task == str(own)
    assert FinetuneMeasure(kind="finetune", task="rte").located(tmp_path).task == "rte"
    for name in ("t.csv", "d.csv"):
        (tmp_path / "data" / name).write_text("text,label\na,1\n", encoding="utf-8")
    of = Study.model_validate(study(name="t", measures={"mine": measure.model_dump(), "other": None}))
    with pytest.raises(UsageError, match=r"measures\.mine: metric: lower is better for mean_squared_error.*name it"):
        check_measures(of, offline=True)


def test_all_measures_without_data_are_reported_at_once_with_the_settings_that_leave_them_out() -> None:
    gone = {"text": {"kind": "mlm", "data": ["gone.txt"]}, "tags": {"kind": "layers", "data": "gone.conllu"}}
    of = Study.model_validate(study(name="t", measures=gone | {"other": None}))
    with pytest.raises(DataError, match=r"(?s)measures\.text: .*gone\.txt.*measures\.tags: .*gone\.conllu") as caught:
        check_measures(of, offline=True)
    told = str(caught.value)
    assert told.endswith("without these data: --set measures.text=null --set measures.tags=null")
    assert "no run is trained on it: --set measures.text.data=[FILE]" in told
    assert "the labelled sentences gone.conllu: no such file" in told
    choice = STUDY["choose"] | {"by": "tags"}
    of = Study.model_validate(study(name="t", measures=gone | {"other": None}, choose=choice))
    with pytest.raises(DataError, match=r"--set choose\.by=NAME, with another measure for the choice \(held_out\)$"):
        check_measures(of, offline=True)

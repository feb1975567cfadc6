"""A study end to end: choices and scores, and interruptions at any point without an effect."""

from __future__ import annotations

import csv
import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from bertkit.errors import DataError, StoppedError, UsageError
from bertkit.files import read_json
from bertkit.objectives.forward import pretraining_model
from bertkit.pretraining.run import open_shards
from bertkit.pretraining.stage_run import StageRun
from bertkit.pretraining.stages import stages_of
from bertkit.progress import silent_progress
from bertkit.run.directory import RunDirectory
from bertkit.study import context as study_context
from bertkit.study.measurer import Measurer, MeasureResult
from bertkit.study.plan import study_plan
from bertkit.study.planned import PlannedStudy
from bertkit.study.run import StudyArguments, run_study
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.cost import training_flops
from tests.conftest import Outcome
from tests.forked import Forked
from tests.study.tiny_study import ALONE, PEAK, arguments, results, study, times_of, write_study
from tests.training.stopping import stopping_at

RUNS = 2 * (2 + 2)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, drawn_figures: None) -> Path:
    """A folder with the study, and its uninterrupted run `straight`."""
    directory = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setattr("bertkit.pretraining.trainer.draw_curves", lambda *_, **__: [])
        write_study(directory)
        run_study(arguments(directory, "straight"), progress=silent_progress)
    return directory


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures take longer than everything else; only `straight` has them, those of the study."""
    monkeypatch.setattr("bertkit.pretraining.trainer.draw_curves", lambda *_, **__: [])
    monkeypatch.setattr("bertkit.study.run.draw_figures", lambda *_: [])


def test_every_arm_is_scored_at_its_best_candidate_on_fresh_seeds(home: Path) -> None:
    found = results(home, "straight")
    assert {arm: len(own["candidates"]) for arm, own in found["choice"].items()} == {"masked": 2, "causal": 2}
    for arm, own in found["choice"].items():
        best = min(own["candidates"], key=lambda candidate: candidate["score"])
        assert own["setting"] == best["setting"]
        assert [candidate["steps"] for candidate in own["candidates"]] == [3, 3]  # half of the budget
        scored = [run for run in found["runs"] if run["arm"] == arm]
        assert [(run["seed"], run["steps"], run["setting"]) for run in scored] == [
            (seed, 6, best["setting"]) for seed in (0, 1)
        ]
        for run in scored:
            directory = RunDirectory.open(home / "straight" / run["run"])
            assert directory.results is not None
            assert run["scores"]["held_out"] == directory.results["held_out"]["loss"]
            assert f"peak: {best['setting'][PEAK]}" in directory.recipe_yaml
        assert found["scores"][arm]["held_out"]["mean"] == fmean(run["scores"]["held_out"] for run in scored)


def test_a_measure_that_an_arm_cannot_be_asked_is_left_empty_with_the_reason(home: Path) -> None:
    found = results(home, "straight")
    assert found["scores"]["causal"]["other"] is None
    reasons = {run["answers"]["other"].get("reason") for run in found["runs"] if run["arm"] == "causal"}
    assert reasons == {"it does not learn to predict a masked token"}
    assert "causal, other: it does not learn" in (home / "straight" / "report.md").read_text()


def test_the_disk_keeps_the_models_of_the_scored_seeds_and_no_checkpoint(home: Path) -> None:
    runs = home / "straight" / "runs"
    assert len(list(runs.iterdir())) == RUNS
    assert not list(runs.glob("*/checkpoints"))
    assert {path.parent.name for path in runs.glob("*/model")} == {
        f"{arm}-seed={seed}" for arm in ("masked", "causal") for seed in (0, 1)
    }


def test_figures_have_the_table_that_drew_them(home: Path) -> None:
    figures = home / "straight" / "figures"
    assert {path.name for path in figures.iterdir()} == {
        f"{name}.{suffix}" for name in ("scores", "choice") for suffix in ("svg", "png", "csv")
    }
    with (figures / "scores.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["held_out"]) for row in rows] == [
        run["scores"]["held_out"] for run in results(home, "straight")["runs"]
    ]
    with (figures / "choice.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 4


def test_stopped_again_and_again_within_its_runs_it_ends_with_the_same_results(home: Path) -> None:
    """Each attempt runs two updates of a run of three or six."""
    stops: list[str] = []
    while not (home / "stopped" / "results.json").exists():
        try:
            with stopping_at(2):
                run_study(arguments(home, "stopped", resume=bool(stops)), progress=silent_progress)
        except StoppedError as stopped:
            stops.append(str(stopped))
            assert RunDirectory.open(home / "stopped").status == "stopped"
    assert len(stops) > 3
    assert all(f"continue with `bertkit study --resume {home / 'stopped'}`" in stop for stop in stops)
    assert results(home, "stopped") == results(home, "straight")


def test_killed_between_two_runs_it_does_not_repeat_what_is_finished(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry_out = study_context.StudyContext.carry_out
    done: list[str] = []

    def until_the_fifth(self: study_context.StudyContext, study_run: object, *rest: object, **more: object) -> None:
        if len(done) == 5:
            raise KeyboardInterrupt
        carry_out(self, study_run, *rest, **more)  # type: ignore[arg-type]  # passed on
        done.append(study_run.name)  # type: ignore[attr-defined]  # a StudyRun

    monkeypatch.setattr(study_context.StudyContext, "carry_out", until_the_fifth)
    with pytest.raises(StoppedError, match="interrupted; continue with"):
        run_study(arguments(home, "between"), progress=silent_progress)
    monkeypatch.undo()
    records = [home / "between" / "runs" / name / "run.json" for name in done]
    before = times_of(records)
    run_study(arguments(home, "between", resume=True), progress=silent_progress)
    assert times_of(records) == before
    assert results(home, "between") == results(home, "straight")


def test_broken_off_while_a_run_is_measured_it_ends_with_the_same_results(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = Measurer.measure

    def interrupted(self: Measurer, name: str, *rest: object) -> MeasureResult:
        answer = measure(self, name, *rest)  # type: ignore[arg-type]  # passed on
        if name == "other":
            raise KeyboardInterrupt
        return answer

    monkeypatch.setattr(Measurer, "measure", interrupted)
    with pytest.raises(StoppedError, match="interrupted"):
        run_study(arguments(home, "measured"), progress=silent_progress)
    monkeypatch.undo()
    run_study(arguments(home, "measured", resume=True), progress=silent_progress)
    assert results(home, "measured") == results(home, "straight")


def test_a_signal_to_the_command_ends_it_with_75_and_it_goes_on(
    home: Path, bertkit: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["study", "small.yaml", "--data", "text.txt", "--data-dir", ".", "--run-dir", "signalled"]
    process = Forked(words, home, {"BERTKIT_CACHE": str(home / "cache")})
    lines = home / "signalled" / "runs" / "masked-candidate=1" / "metrics.jsonl"
    while not lines.exists() and process.code is None:
        time.sleep(0.001)
    process.send(signal.SIGINT)
    assert process.wait() == 75, process.errors
    assert "continue with `bertkit study --resume signalled`" in process.errors
    monkeypatch.chdir(home)
    monkeypatch.setenv("BERTKIT_CACHE", str(home / "cache"))
    resumed = bertkit("study", "--resume", "signalled")
    assert resumed.code == 0, resumed.stderr
    assert resumed.stdout.strip() == "signalled"
    assert results(home, "signalled") == results(home, "straight")


@pytest.mark.slow
def test_two_runs_at_a_time_give_the_same_results(home: Path) -> None:
    sets = ["choose=null"]
    run_study(arguments(home, "alone", *sets), progress=silent_progress)
    run_study(arguments(home, "together", *sets, "engine.jobs=2"), progress=silent_progress)
    assert results(home, "together") == results(home, "alone")
    assert {arm: own["candidates"] for arm, own in results(home, "alone")["choice"].items()} == {
        "masked": [],
        "causal": [],
    }


def test_an_error_in_a_process_is_the_commands(home: Path) -> None:
    with stopping_at(1), pytest.raises(StoppedError):
        run_study(arguments(home, "broken"), progress=silent_progress)
    (home / "broken" / "runs" / "masked-candidate=1" / "run.json").write_text("{}")
    with pytest.raises(DataError, match=r"run\.json: .*the file is damaged"):
        run_study(arguments(home, "broken", "engine.jobs=2", resume=True), progress=silent_progress)


def test_a_finished_study_is_not_carried_out_again(home: Path) -> None:
    before = times_of([home / "straight" / "results.json"])
    finished = run_study(arguments(home, "straight", resume=True), progress=silent_progress)
    assert finished.results == results(home, "straight")
    assert times_of([home / "straight" / "results.json"]) == before


def test_another_study_or_another_text_is_no_resume(home: Path) -> None:
    with stopping_at(1), pytest.raises(StoppedError):
        run_study(arguments(home, "other"), progress=silent_progress)
    with pytest.raises(UsageError, match=r"budget\.steps: the run has 6, now 7"):
        run_study(arguments(home, "other", "budget.steps=7", resume=True), progress=silent_progress)
    text = home / "text.txt"
    before = text.read_text()
    text.write_text(before + "\nThe cat reads a paper.\n")
    with pytest.raises(DataError, match="the data has changed since the run began"):
        run_study(arguments(home, "other", resume=True), progress=silent_progress)
    text.write_text(before)


def test_what_is_kept_is_no_part_of_what_is_compared(home: Path) -> None:
    with stopping_at(1), pytest.raises(StoppedError):
        run_study(arguments(home, "kept"), progress=silent_progress)
    run_study(arguments(home, "kept", "engine.keep=scores", resume=True), progress=silent_progress)
    assert not list((home / "kept" / "runs").glob("*/model"))
    assert results(home, "kept") == results(home, "straight")


def test_a_candidate_that_diverges_is_never_chosen(place: Path) -> None:
    """Both runs of the causal arm do, so it has no score; the study continues without it."""
    sets = [
        "choose.grid.optimisation.schedule.peak=[1.0e-3, 2.0e-3]",
        "arms.causal.set.optimisation.optimizer={name: adamw, clip_norm: null, weight_decay: 1.0e+38}",
        "set.optimisation.max_nonfinite_steps=0",
        "arms.third={set: {objective: [masked_lm], model.num_hidden_layers: 1}}",
    ]
    finished = run_study(arguments(place, "diverged", *sets), progress=silent_progress)
    found = finished.results
    assert found["choice"]["causal"]["setting"] is None
    assert all("diverged" in candidate["diverged"] for candidate in found["choice"]["causal"]["candidates"])
    assert {run["arm"] for run in found["runs"]} == {"masked", "third"}
    assert found["claims"][0]["verdict"] == "undecided"
    assert found["claims"][0]["reason"] == "fewer than two seeds have both scores"


def test_a_run_costs_the_budget_by_the_cost_model(place: Path) -> None:
    """All batches of the run are counted here; the study measures a sample of them."""
    planned = _planned(arguments(place, "unused", "budget={flops: 2.0e+9, steps: null}"))
    costs = planned.costs({}, silent_progress)
    steps = {}
    for study_run in planned.runs():
        steps[study_run.arm] = planned.steps(study_run, costs)
        recipe = planned.recipe(study_run, steps[study_run.arm])
        (stage,) = stages_of(recipe)
        shards = open_shards(recipe, cache=place / "cache", offline=True, progress=silent_progress)
        tokenizer = load_tokenizer(shards.directory)
        run = StageRun(stage, shards, tokenizer, cache=place / "cache")
        model = pretraining_model(recipe.model, recipe.objectives, tokenizer.vocab_size)
        spent = sum(training_flops(model, run.batches[step], run.objectives) for step in range(steps[study_run.arm]))
        assert spent == pytest.approx(2e9 * study_run.share, rel=0.04)
    assert steps["causal"] < steps["masked"]  # a prediction at every token


def test_an_arm_with_a_share_of_the_budget_is_the_same_run_in_fewer_steps(place: Path) -> None:
    arms = "arms.short={set: {objective: [masked_lm]}, budget_share: 0.25}"
    planned = _planned(arguments(place, "unused", arms, "budget={flops: 4.0e+9, steps: null}"))
    costs = planned.costs({}, silent_progress)
    steps = {each.arm: planned.steps(each, costs) for each in planned.runs() if each.candidate is None}
    tried = {each.arm: planned.steps(each, costs) for each in planned.runs() if each.candidate is not None}
    assert steps["masked"] > 8
    assert steps["short"] == pytest.approx(steps["masked"] / 4, abs=0.6)
    assert tried["short"] == pytest.approx(steps["short"] / 2, abs=0.6), "candidates use the choice's share"


def test_tokens_as_a_budget_give_arms_of_one_layout_equal_steps(place: Path) -> None:
    planned = _planned(arguments(place, "unused", "budget={tokens: 3000, steps: null}"))
    costs = planned.costs({}, silent_progress)
    steps = {planned.steps(study_run, costs) for study_run in planned.runs() if study_run.candidate is None}
    (one,) = steps
    assert one * 9 * 20 == pytest.approx(3000, rel=0.3)


def _planned(given: StudyArguments) -> PlannedStudy:
    return PlannedStudy(given.requested(), given.cache, given.offline)


def test_the_command_plans_and_shows_its_results(home: Path, bertkit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    planned = bertkit("study", "small.yaml", "--data", "text.txt", "--plan", "--json")
    assert planned.code == 0, planned.stderr
    assert '"runs": 8' in planned.stdout
    done = bertkit("study", "--resume", home / "straight")
    assert done.code == 0
    assert "undecided: it is worse (a test)" in done.stderr or "ed: it is worse (a test)" in done.stderr


def test_a_plan_on_shards_has_the_steps_of_the_study(place: Path, bertkit) -> None:
    shards = bertkit("tokenize", "text.txt", "--out", "shards", "--train", "wordpiece", "--vocab-size", "200")
    assert shards.code == 0, shards.stderr
    given = arguments(place, "unused", "budget={tokens: 3000, steps: null}", sources=[str(place / "shards")])
    planned = _planned(given)
    costs = planned.costs({}, silent_progress)
    plan = study_plan(planned)
    assert not plan["full_sequences"]
    assert plan["steps"] == sum(planned.steps(study_run, costs) for study_run in planned.runs())
    text = study_plan(_planned(arguments(place, "unused", "budget={tokens: 3000, steps: null}")))
    assert not text["full_sequences"]
    assert text["steps"] == pytest.approx(plan["steps"], rel=0.05)
    told = bertkit("study", "small.yaml", "--data", "text.txt", "--plan")
    assert "sequences   as long as those of the text" in told.stdout
    told = bertkit("study", "small.yaml", "--data", "builtin:pydocs", "--plan")
    assert "sequences   taken as full" in told.stdout


def test_a_finished_study_is_not_repeated_in_its_directory(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    before = times_of(sorted((home / "straight").rglob("*")))
    again = run_study(arguments(home, "straight"), progress=silent_progress)
    assert again.results == results(home, "straight")
    assert "finished already" in caplog.text
    assert "another --run-dir runs it again" in caplog.text
    assert times_of(sorted((home / "straight").rglob("*"))) == before
    with pytest.raises(UsageError, match="straight"):
        run_study(arguments(home, "straight", "seeds=[3, 4]"), progress=silent_progress)


def test_a_finished_study_is_found_until_the_data_of_a_measure_change(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    def found(**more: Any) -> RunDirectory | None:
        given = arguments(home, "straight", run_dir=None, runs_root=home, max_minutes=0.0, **more)
        try:
            return run_study(given, progress=silent_progress).run
        except StoppedError:
            return None

    again = found()
    assert again is not None
    assert again.record["status"] == "done"
    assert "--fresh runs it again" in caplog.text
    assert found(fresh=True) is None
    other = home / "other.txt"
    before = other.read_text()
    other.write_text(before.replace("cat", "dog"))
    assert found() is None
    assert "not used: another measures" in caplog.text
    other.write_text(before)


def test_an_unfinished_study_of_an_earlier_version_is_continued(home: Path) -> None:
    with stopping_at(1), pytest.raises(StoppedError):
        run_study(arguments(home, "older"), progress=silent_progress)
    record = json.loads((home / "older" / "run.json").read_text())
    assert record["fingerprints"].pop("measures")
    (home / "older" / "run.json").write_text(json.dumps(record))
    with stopping_at(1), pytest.raises(StoppedError):
        run_study(arguments(home, "older", resume=True), progress=silent_progress)


def test_a_plan_is_refused_where_the_study_would_be(home: Path, bertkit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    long = ["--set", "set={optimisation.schedule: {name: linear, peak: 1.0e-3, warmup_steps: 6}}"]
    planned = bertkit("study", "small.yaml", "--data", "text.txt", "--plan", *long)
    assert planned.code == 2, planned.stderr
    assert "schedule.warmup_steps (6) must be below steps (3)" in planned.stderr
    assert "schedule.warmup_share" in planned.stderr


def test_some_arms_alone_keep_the_claims_between_them(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    given = arguments(
        place,
        "unused",
        "arms.third={set: {objective: [masked_lm], model.num_hidden_layers: 1}}",
        arms=["masked", "third"],
    ).requested()
    assert list(given.arms) == ["masked", "third"]
    assert given.claims == []
    assert "--arms leaves out the claims about other arms: causal against masked on " in caplog.text
    given = arguments(
        place,
        "unused",
        "arms.third={set: {objective: [masked_lm], model.num_hidden_layers: 1}}",
        arms=["third", "causal"],
    ).requested()
    assert given.against == "causal"


def test_two_claims_about_the_same_arms_are_named_once_when_left_out(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    claim = "{claim: a, source: b, arm: causal, measure: held_out, expects: %s}"
    arguments(place, "unused", f"claims=[{claim % 'lower'}, {claim % 'higher'}]", arms=["masked"]).requested()
    assert caplog.text.count("causal against masked on held_out") == 1


def test_an_arm_alone_is_carried_out_on_its_seeds(place: Path) -> None:
    write_study(place, study(choose=None))
    outcome = run_study(arguments(place, "run", arms=["causal"]), progress=silent_progress)
    assert [(run["arm"], run["seed"]) for run in outcome.results["runs"]] == [("causal", 0), ("causal", 1)]
    assert outcome.results["scores"]["causal"]["held_out"]["n"] == 2
    assert "paired by seed" not in (place / "run" / "report.md").read_text(encoding="utf-8")
    costs = [read_json(outcome.run.path / run["run"] / "run.json")["flops"] for run in outcome.results["runs"]]
    assert [run["flops"] for run in outcome.results["runs"]] == costs
    assert all(cost > 0 for cost in costs)


def test_seeds_carried_out_by_themselves_have_the_cost_of_all(place: Path) -> None:
    of_all, of_one = (_planned(arguments(place, "unused", *sets)) for sets in ([], ["seeds=[1]", "claims=[]"]))
    assert of_all.costs({}, silent_progress) == of_one.costs({}, silent_progress)


def test_an_arm_may_start_from_a_recipe_of_its_own(place: Path) -> None:
    (place / "own.yaml").write_text("extends: tiny.yaml\nmodel: {hidden_size: 48}\n", encoding="utf-8")
    write_study(place, study(arms={"wide": {"recipe": "own", "set": {"objective": ["masked_lm"]}}}))
    given = arguments(place, "run")
    planned = _planned(given)
    (_, wide), *_ = planned.recipes["wide"]
    (_, masked), *_ = planned.recipes["masked"]
    assert (wide.model.hidden_size, masked.model.hidden_size) == (48, 24)
    assert given.requested().arms["wide"].recipe == str(place / "own.yaml")
    write_study(place, study(arms={"wide": {"recipe": "owm"}}))
    mistaken = arguments(place, "run")
    with pytest.raises(UsageError, match=r"'owm': .*did you mean"):
        mistaken.requested()


def test_without_claims_one_seed_will_do_and_nothing_is_compared(place: Path) -> None:
    arms = {"causal": {"recipe": "tiny", "set": {"objective": ["causal_lm"]}}}
    write_study(place, study(seeds=[3], claims=[], choose=None, arms=arms))
    run_study(arguments(place, "run"), progress=silent_progress)
    assert [run["seed"] for run in results(place, "run")["runs"]] == [3, 3]
    report = (place / "run" / "report.md").read_text(encoding="utf-8")
    assert re.search(r"Recipe `\S*tiny\S*`, `\S*tiny\S*` for causal, 6 steps", report)
    assert "paired by seed" not in report


@pytest.mark.parametrize(
    "change",
    [
        "set.optimisation.batch_ramp={start: 3, increment: 3, until: 0.8}",
        "set.objective=[{masked_lm: {rate: {start: 0.5, end: 0.05}}}]",
    ],
)
def test_batches_and_masks_that_change_during_a_run_are_in_its_budget(place: Path, change: str) -> None:
    """The recipe reads the text many times, and its first pass is not like the rest."""
    sets = [*ALONE, "arms.masked.set={}", "set.objective=[masked_lm]", change, "budget={flops: 2.0e+9, steps: null}"]
    planned = _planned(arguments(place, "unused", *sets))
    costs = planned.costs({}, silent_progress)
    (study_run,) = planned.runs()
    recipe = planned.recipe(study_run, planned.steps(study_run, costs))
    (stage,) = stages_of(recipe)
    shards = open_shards(recipe, cache=place / "cache", offline=True, progress=silent_progress)
    run = StageRun(stage, shards, load_tokenizer(shards.directory), cache=place / "cache")
    model = pretraining_model(recipe.model, recipe.objectives, load_tokenizer(shards.directory).vocab_size)
    steps = range(recipe.optimisation.steps)
    spent = sum(training_flops(model, run.batches[step], run.objectives) for step in steps)
    assert spent == pytest.approx(2e9, rel=0.05)

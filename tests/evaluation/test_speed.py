"""`eval speed`: ratios are within a round, the frontier has no dominated point.

No test depends on timing: where times matter, the clock is simulated.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bertkit.errors import DataError, UsageError
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.evaluation.run import MeasurementArguments
from bertkit.evaluation.settings import SpeedSettings
from bertkit.evaluation.speed import stopwatch
from bertkit.evaluation.speed.record import Score, methods_by_model, scores_by_model, scores_of
from bertkit.evaluation.speed.report import draw_pareto, spread, without_crossings
from bertkit.evaluation.speed.results import frontier, retention
from bertkit.evaluation.speed.run import evaluate_speed
from bertkit.evaluation.speed.stopwatch import LEAST_SECONDS, Timing, processor_share, threads, time_in_rounds
from bertkit.evaluation.speed.timing import Cell, random_batch
from bertkit.models.families.bert import BertConfig
from bertkit.models.headed import HeadedModel
from bertkit.run.directory import RunDirectory, RunIdentity
from bertkit.run.verify import verify_run
from tests.probing.tiny_models import BERT, save_tiny, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("drawn_figures")
CLASSIFIER = ("sequence_classification",)


class Clock:
    """A clock that advances only when a task requests it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.called: list[str] = []

    def __call__(self) -> float:
        return self.now

    def work(self, name: str, seconds: Callable[[], float]) -> Callable[[], None]:
        def run() -> None:
            self.called.append(name)
            self.now += seconds()

        return run


def test_ratios_are_of_one_round_so_that_drift_leaves_them_alone() -> None:
    clock = Clock()
    drift = iter(np.linspace(1, 9, 1000))
    slower = 1.0

    def of_round() -> None:
        nonlocal slower
        slower = float(next(drift))

    works = [clock.work("a", lambda: 0.6 * slower), clock.work("b", lambda: 0.2 * slower)]
    first, second = time_in_rounds(works, rounds=5, clock=clock, after_round=of_round)
    assert second.times_as_fast_as(first) == pytest.approx(3)
    assert first.times_as_fast_as(first) == 1
    assert first.median == pytest.approx(np.median(first.seconds))
    assert first.seconds[-1] > first.seconds[0]


def test_every_round_times_each_work_once_in_an_order_of_its_own() -> None:
    clock = Clock()
    works = [clock.work(name, lambda: 2.0) for name in "abc"]  # long enough for one warm-up call
    timings = time_in_rounds(works, rounds=4, clock=clock)
    assert "".join(clock.called) == "abc" + "abc" + "bca" + "cab" + "abc"
    assert [timing.seconds for timing in timings] == [(2.0,) * 4] * 3


def test_a_short_work_is_repeated_and_told_for_one_call() -> None:
    clock = Clock()
    (timing,) = time_in_rounds([clock.work("a", lambda: LEAST_SECONDS / 7.5)], rounds=3, clock=clock)
    assert len(clock.called) == 2 + 3 * 8
    assert timing.seconds == pytest.approx([LEAST_SECONDS / 7.5] * 3)
    assert timing.quartiles == pytest.approx((LEAST_SECONDS / 7.5,) * 2)


def test_quartiles_hold_half_of_the_rounds() -> None:
    assert Timing((5.0, 1.0, 2.0, 4.0, 3.0)).quartiles == (2.0, 4.0)


def test_threads_are_given_back_after_a_fault() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []

    def fail() -> None:
        with threads(before + 1) as count:
            seen.extend((count, torch.get_num_threads()))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert seen == [before + 1] * 2
    assert torch.get_num_threads() == before
    with threads(None) as count:
        assert count == before


def test_the_share_of_the_processor_is_what_this_process_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopwatch.time, "perf_counter", iter([10.0, 14.0, 18.0]).__next__)
    monkeypatch.setattr(stopwatch.time, "process_time", iter([1.0, 3.0, 3.5]).__next__)
    share_since_now = processor_share()
    assert (share_since_now(), share_since_now()) == (2 / 4, 2.5 / 8)


Points = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12)


@given(Points)
def test_the_frontier_is_what_no_point_beats_and_beats_all_else(points: list[tuple[int, int]]) -> None:
    def no_worse(one: tuple[int, int], other: tuple[int, int]) -> bool:
        return one[0] <= other[0] and one[1] >= other[1]

    best = frontier(points)
    assert best
    for index, point in enumerate(points):
        beaten_by = [each for each in points if no_worse(each, point) and each != point]
        assert (index in best) == (not beaten_by)
        assert any(no_worse(points[each], point) for each in best)
    assert {points[each] for each in best} == {points[::-1][each] for each in frontier(points[::-1])}
    assert best == frontier([(2.0**x, y**3) for x, y in points])  # the scales do not matter


@given(st.lists(st.floats(0, 1), max_size=9), st.floats(0.001, 0.5))
def test_names_are_moved_apart_below_the_top_and_keep_their_order(places: list[float], least: float) -> None:
    moved = spread(sorted(places), least=least, top=1.0)
    assert all(b - a >= least - 1e-9 for a, b in itertools.pairwise(moved))
    assert all(place <= 1.0 for place in moved)
    far = [2.0 * least * number for number in range(4)]
    assert spread(far, least=least, top=far[-1]) == far


@pytest.mark.parametrize("height", [0.5, 0.95, 1.0])
def test_lines_from_points_of_equal_height_to_their_names_do_not_cross(height: float) -> None:
    """Names of points near the top are moved down, others up."""
    xs = [0.4, 0.1, 0.3, 0.2, 0.5]
    heights = dict.fromkeys(range(5), height)
    places = dict(enumerate(spread([height] * 5, least=0.03, top=1.0)))
    named = without_crossings(places, xs, heights)
    assert sorted(named.values()) == list(places.values())
    for left, right in itertools.permutations(range(5), 2):
        if xs[left] < xs[right]:  # where the right line begins, the left one is already on the side where it ends
            there = height + (named[left] - height) * (xs[right] - xs[left]) / (1.04 - xs[left])
            assert (there - height) * (named[left] - named[right]) >= 0


def test_retention_is_over_the_tasks_that_both_have_in_one_metric() -> None:
    teacher = {name: Score("accuracy", value, "") for name, value in (("a", 0.8), ("b", 0.5), ("c", 0.9))}
    student = {"a": Score("accuracy", 0.6, ""), "b": Score("f1", 0.9, ""), "c": Score("accuracy", 0.75, "")}
    assert retention(teacher, teacher) == (1.0, ("a", "b", "c"))
    kept, tasks = retention(student, teacher)
    assert (kept, tasks) == (pytest.approx((0.6 + 0.75) / (0.8 + 0.9)), ("a", "c"))
    assert retention({}, teacher) == (None, ())
    assert retention(teacher, {"a": Score("accuracy", 0.0, "")}) == (None, ("a",))


def test_sentences_are_plain_tokens_between_the_special_ones() -> None:
    tokenizer = tiny_tokenizer()
    batch = random_batch(tokenizer, Cell(3, 11), seed=5)
    ids_BT = batch.ids_T.view(3, 11)
    assert (ids_BT[:, 0] == tokenizer.cls_id).all()
    assert (ids_BT[:, -1] == tokenizer.sep_id).all()
    assert not set(ids_BT[:, 1:-1].flatten().tolist()) & tokenizer.special_ids
    assert batch.sequences.gather_P is None  # nothing is padded
    assert torch.equal(batch.ids_T, random_batch(tokenizer, Cell(3, 11), seed=5).ids_T)
    pairs = random_batch(tokenizer, Cell(3, 11), seed=5, pairs=True)
    assert pairs.token_types_T.view(3, 11).sum(dim=1).tolist() == [5, 5, 5]


def save_run(
    path: Path,
    *,
    kind: str,
    recipe: str,
    scores: dict[str, Any],
    model: HeadedModel,
    started_from: str = "x",
    settings: str = "method: {name: full}",
) -> Path:
    """A finished run with a model and scores, as written by `finetune` and `distill`."""
    identity = RunIdentity(kind, recipe, settings, "0" * 64, 0, ["bertkit"], {"model": started_from})
    run = RunDirectory.create(path.parent, identity, path)
    with run.recording():
        save_tiny(model, tiny_tokenizer(), run.model)
        tasks = {task: {"accuracy": {"mean": value}, "f1": {"mean": 0.1}} for task, value in scores.items()}
        run.write_results({"tasks": tasks, "primary": "accuracy"})
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher and a student made by a TinyBERT recipe, each in its run; the student reads fewer tokens."""
    root = tmp_path_factory.mktemp("runs")
    teacher = tiny_model(tiny_tokenizer(), heads=CLASSIFIER)
    student = tiny_model(
        tiny_tokenizer(), BertConfig(**BERT | {"num_hidden_layers": 1, "max_position_embeddings": 24}), CLASSIFIER
    )
    save_run(root / "teacher", kind="finetune", recipe="sst2", scores={"sst2": 0.9, "rte": 0.6}, model=teacher)
    save_run(root / "student", kind="distill", recipe="tinybert-sst2", scores={"sst2": 0.81}, model=student)
    return root


@pytest.fixture(scope="module")
def evaluated(runs: Path) -> tuple[Path, dict[str, Any]]:
    settings = SpeedSettings(
        models=[str(runs / "teacher"), str(runs / "student")], batch_sizes=[1, 3], lengths=[7, 31], rounds=2, threads=1
    )
    request = MeasurementArguments(device="cpu", runs_root=runs, run_dir=runs / "out", command=["bertkit"])
    done = evaluate_speed(request, settings)
    return done.run.path, done.results


def test_results_have_the_contracts_form(evaluated: tuple[Path, dict[str, Any]]) -> None:
    path, results = evaluated
    teacher, student = (str(path.parent / name) for name in ("teacher", "student"))
    assert (results["suite"], results["model"], list(results["tasks"])) == ("speed", teacher, [teacher, student])
    for metrics in results["tasks"].values():
        assert all({"mean", "std", "seeds"} <= set(figure) for figure in metrics.values())
    ours = results["tasks"][student]
    assert len(ours["ms_per_sentence/batch=3/length=7"]["seeds"]) == 2
    assert ours["sst2/accuracy"]["mean"] == 0.81
    assert ours["retention"]["mean"] == pytest.approx(0.9)  # on sst2 alone
    assert results["tasks"][teacher]["retention"]["mean"] == 1
    assert json.loads((path / "results.json").read_text())["tasks"] == results["tasks"]
    assert (results["threads"], results["device"]) == (1, "cpu")
    assert results["processor_share"] > 0
    assert verify_run(path).errors == []


def test_ratios_are_against_the_first_model(evaluated: tuple[Path, dict[str, Any]]) -> None:
    path, results = evaluated
    first, second = results["tasks"].values()
    for cell in ("batch=1/length=7", "batch=3/length=7"):
        assert first[f"speed_up/{cell}"]["mean"] == 1
        own, theirs = (np.array(each[f"ms_per_sentence/{cell}"]["seeds"]) for each in (second, first))
        assert second[f"speed_up/{cell}"]["mean"] == pytest.approx(float(np.median(theirs / own)))
    rows = {row["label"]: row for row in results["compression"]}
    assert [rows["teacher"][name] for name in ("size", "parameters", "retention", "speed_up")] == [1, 1, 1, 1]
    sizes = [(path.parent / name / "model" / "model.safetensors").stat().st_size for name in ("teacher", "student")]
    assert rows["student"]["size"] == sizes[0] / sizes[1]
    assert rows["student"]["published"]["title"] == "TinyBERT, 4 layers"
    assert rows["teacher"]["published"] is None


def test_a_model_that_cannot_read_a_length_says_so_and_the_others_are_timed(
    evaluated: tuple[Path, dict[str, Any]],
) -> None:
    _, results = evaluated
    rows = {(row["batch"], row["length"], row["model"]): row for row in results["cells"]}
    assert rows[1, 31, "student"]["reason"] == "reads at most 24 tokens"
    assert rows[1, 31, "teacher"]["ms_per_sentence"] > 0
    student = list(results["tasks"].values())[1]
    assert not [name for name in student if name.endswith("length=31")]
    assert rows[1, 7, "student"].get("reason") is None
    told = next(row for row in results["compression"] if row["label"] == "student")
    assert (told["measured_at"], told["speed_up"]) == ("batch=1/length=31", None)


def test_tables_and_figure_are_drawn_from_the_results(evaluated: tuple[Path, dict[str, Any]]) -> None:
    path, results = evaluated
    with (path / "figures" / "pareto.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["model"] for row in rows] == ["teacher", "teacher"]  # the student cannot read 31 tokens
    assert {row["on_frontier"] for row in rows} == {"True"}
    assert [float(row["score"]) for row in rows] == [0.9, 0.9]
    for suffix in (".svg", ".png"):
        assert (path / "figures" / f"pareto{suffix}").stat().st_size > 1000
    assert "teacher" in (path / "figures" / "pareto.svg").read_text()
    with (path / "tables" / "speed.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(results["cells"]) == 8
    with (path / "tables" / "compression.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    assert (last["model"], last["published_compression"], last["known_by"]) == ("student", "7.5", "by its run")


def test_the_figure_shows_the_quartiles_of_all_points(evaluated: tuple[Path, dict[str, Any]]) -> None:
    pareto = evaluated[1]["pareto"]
    points = [each | {"ms_lower_quartile": each["ms_per_sentence"] / 9} for each in pareto["points"]]
    figure = draw_pareto(evaluated[1] | {"pareto": pareto | {"points": points}})
    for panel, batch in zip(figure.axes, dict.fromkeys(each["batch"] for each in points), strict=True):
        assert panel.get_xlim()[0] < min(each["ms_lower_quartile"] for each in points if each["batch"] == batch)


def test_an_axis_of_a_narrow_range_has_ticks(evaluated: tuple[Path, dict[str, Any]]) -> None:
    """Of 1, 2 and 5 milliseconds, none is between 2.3 and 4.4, the ends for a model that takes 3.2."""
    same = {"ms_per_sentence": 3.2, "ms_lower_quartile": 3.2, "ms_upper_quartile": 3.2}
    pareto = evaluated[1]["pareto"]
    axes = draw_pareto(evaluated[1] | {"pareto": pareto | {"points": [pareto["points"][0] | same]}}).axes[0]
    low, high = axes.get_xlim()
    assert sum(low <= tick <= high for tick in axes.get_xticks()) >= 3


def test_the_figure_can_show_the_bytes_of_the_weights(runs: Path, tmp_path: Path) -> None:
    models = [str(runs / name) for name in ("teacher", "student")]
    settings = SpeedSettings(models=models, batch_sizes=[1], lengths=[7], rounds=1, threads=1, against="disk_mb")
    request = MeasurementArguments(device="cpu", runs_root=tmp_path, command=["bertkit"])
    done = evaluate_speed(request, settings)
    pareto = done.results["pareto"]
    sizes = [(runs / name / "model" / "model.safetensors").stat().st_size / 1e6 for name in ("teacher", "student")]
    assert (pareto["against"], [point["disk_mb"] for point in pareto["points"]]) == ("disk_mb", sizes)
    assert pareto["points"][1]["on_frontier"]  # the smaller one
    assert draw_pareto(done.results).axes[0].get_ylabel() == "weight files, MB (log scale)"


def examined(runs: Path) -> list[LoadedModel]:
    return [LoadedModel.load(str(runs / name)) for name in ("teacher", "student")]


def test_scores_of_other_runs_are_of_the_model_that_they_name_or_began_with(runs: Path, tmp_path: Path) -> None:
    models = examined(runs)
    model = tiny_model(tiny_tokenizer(), heads=CLASSIFIER, seed=9)
    beside = {"kind": "finetune", "recipe": "r", "model": model}
    known = save_run(tmp_path / "known", scores={"mrpc": 0.7}, started_from=models[1].fingerprint, **beside)
    foreign = save_run(tmp_path / "foreign", scores={"sst2": 0.5}, **beside)
    _, student = scores_by_model(models, [str(known)], tmp_path)
    assert {task: score.value for task, score in student.items()} == {"sst2": 0.81, "mrpc": 0.7}
    with pytest.raises(UsageError, match="belongs to none of the models; write --results MODEL="):
        scores_by_model(models, [str(foreign)], tmp_path)
    teacher, _ = scores_by_model(models, [f"{models[0].name}={foreign}"], tmp_path)
    assert (teacher["sst2"].value, teacher["rte"].value) == (0.5, 0.6)  # the user's run counts for its own task
    assert teacher["sst2"].metric == "accuracy"


def test_a_run_without_scores_is_refused(runs: Path, evaluated: tuple[Path, dict[str, Any]]) -> None:
    models = examined(runs)
    with pytest.raises(DataError, match="no task scores"):
        scores_by_model(models, [str(evaluated[0])], runs)
    with pytest.raises(DataError, match="no such run"):
        scores_by_model(models, ["nowhere"], runs)


@pytest.mark.parametrize("suite", ["lm", "surprisal"])
def test_what_is_better_the_lower_it_is_is_no_score(suite: str, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, RunIdentity("eval", f"eval-{suite}", "kind: eval", "0" * 64, 0, ["bertkit"]))
    with run.recording():
        run.write_results({"suite": suite, "average": 1.5, "tasks": {suite: {"bits_per_word": {"mean": 20.0}}}})
    assert scores_of(run) == {}
    (chosen := tmp_path / "chosen").mkdir()
    run = RunDirectory.create(chosen, RunIdentity("finetune", "r", "kind: finetune", "0" * 64, 0, ["bertkit"]))
    with run.recording():
        scores = {"mean_squared_error": {"mean": 9.0}, "spearman": {"mean": 0.4}}
        run.write_results({"primary": "mean_squared_error", "tasks": {"age": scores}})
    assert scores_of(run)["age"].metric == "spearman"


def test_a_method_is_the_users_word_before_the_runs(runs: Path) -> None:
    models = examined(runs)
    assert methods_by_model(models, []) == [None, ("tinybert", "by its run")]
    named = methods_by_model(models, [f"{models[1].name}=BERT-PKD", f"{models[0].name}=q8bert"])
    assert named == [("q8bert", "given"), ("pkd", "given")]
    assert methods_by_model(models, [f"{models[1].name}=none"]) == [None, None]
    with pytest.raises(UsageError, match="expected MODEL=METHOD"):
        methods_by_model(models, ["elsewhere=pkd"])
    with pytest.raises(UsageError, match="did you mean tinybert"):
        methods_by_model(models, [f"{models[1].name}=tinybart"])


@pytest.mark.parametrize(
    ("kind", "recipe", "settings", "method"),
    [
        ("distill", "pkd-3", "method: {name: full}", "pkd"),
        ("distill", "pkd-3", "control: true", None),
        ("distill", "mine", "method: {name: theseus}", "theseus"),
        ("finetune", "mrpc-model", "method: {name: q8bert}", "q8bert"),
        ("finetune", "distilbert", "method: {name: full}", None),
    ],
)
def test_a_run_names_its_method_by_its_recipe_or_its_method_and_a_control_names_none(
    tmp_path: Path, kind: str, recipe: str, settings: str, method: str | None
) -> None:
    model = tiny_model(tiny_tokenizer(), heads=CLASSIFIER)
    save_run(tmp_path / "run", kind=kind, recipe=recipe, settings=settings, scores={"rte": 0.6}, model=model)
    found = methods_by_model([LoadedModel.load(str(tmp_path / "run"))], [])
    assert found == [None if method is None else (method, "by its run")]

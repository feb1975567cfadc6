"""The BabyLM evaluation: counting rules, missing parts are named, and ties are reported."""

from __future__ import annotations

import json
import math
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertkit.errors import DataError
from bertkit.evaluation.babylm.items import BabylmItem, ScoredItem, SubsetScore, accuracy, weights_of
from bertkit.evaluation.babylm.readers import read_comps, read_entity_tracking, read_ewok, read_wug_past_tense
from bertkit.evaluation.babylm.reading_times import (
    EYE_TRACKING,
    PREDICTORS,
    SELF_PACED,
    ReadingWords,
    partial_r2,
    reading_gains,
)
from bertkit.evaluation.babylm.run import average_of, correlations, evaluate_babylm
from bertkit.evaluation.babylm.tasks import TASKS, find_tasks
from bertkit.evaluation.run import EvalArguments
from bertkit.evaluation.settings import BabylmSettings
from bertkit.models.headed import SCORING_RULE, HeadedModel
from bertkit.models.scoring.pseudo_likelihood import score_texts
from tests.evaluation.babylm.babylm_files import write_evaluation_data, write_ewok, write_jsonl
from tests.probing.tiny_models import constant_model, save_tiny, tiny_causal_model, tiny_model, tiny_tokenizer


def evaluate(tmp_path: Path, model: HeadedModel, data: Path, **settings: Any) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path / "model"
    if not directory.exists():
        save_tiny(model, tiny_tokenizer(), directory)
    request = EvalArguments(model=str(directory), device="cpu", runs_root=tmp_path / "runs", fresh=True)
    done = evaluate_babylm(request, data, BabylmSettings(**settings))
    return done.run.path, done.results


def answered(*log_p: float, human: float | None = None) -> ScoredItem:
    texts = tuple("abcdefg"[: len(log_p)])
    return ScoredItem(BabylmItem.whole("subset", texts, human), log_p)


def test_a_tie_is_right_officially_shared_in_fairness_and_wrong_in_doubt() -> None:
    assert answered(-1.0, -2.0).credit() == (1, 1, 1)
    assert answered(-2.0, -1.0).credit() == (0, 0, 0)
    assert answered(-1.0, -1.0).credit() == (1, 0.5, 0)
    assert answered(-1.0, -3.0, -1.0, -1.0).credit() == (1, 1 / 3, 0)
    assert answered(-2.0, -1.0, -1.0).credit() == (0, 0, 0)  # the tie is not the right text's
    subset = SubsetScore.of([answered(0, 0), answered(0, -1), answered(-1, 0), answered(0.0, -1e-6)])
    assert list(subset.shares.values()) == [0.75, 0.625, 0.5]
    assert (subset.ties, subset.near_ties) == (1, 1)


def test_groups_weigh_the_same_whatever_the_number_of_their_subsets() -> None:
    names = ["regular_0_ops", "regular_1_ops", "regular_2_ops", "ambiref_0_ops"]
    assert weights_of(names, ("regular", "ambiref", "move_contents")) == dict(
        zip(names, [1 / 6] * 3 + [1 / 2], strict=True)
    )
    assert weights_of(names) == dict.fromkeys(names, 1 / 4)
    subset = SubsetScore(101, {"accuracy": 0.5}, 0, 0)
    value, interval = accuracy({"only": subset}, {"only": 1.0}, "accuracy")
    assert (value, *interval) == pytest.approx((0.5, 0.5 - 1.959964 * 0.05, 0.5 + 1.959964 * 0.05))


def test_a_model_of_constant_logits_is_right_in_every_tie_officially_and_at_chance_otherwise(tmp_path: Path) -> None:
    data = write_evaluation_data(tmp_path / "data")
    write_jsonl(
        data / "full_eval" / "blimp_filtered" / "agreement.jsonl",
        [{"sentence_good": "A value", "sentence_bad": "value A"}] * 5,
    )
    _, results = evaluate(tmp_path, constant_model(tiny_tokenizer()), data, only=["blimp", "wug_past", "reading"])
    figures = {name: figure["mean"] for name, figure in results["tasks"]["blimp"].items()}
    assert figures == {"accuracy": 1.0, "accuracy_ties_shared": 0.5, "accuracy_ties_wrong": 0.0}
    assert results["subsets"]["blimp"]["agreement"]["ties"] == 5
    assert 0 <= results["tasks"]["reading"]["eye_tracking"]["mean"] < 1


def test_all_tasks_are_scored_as_the_sentences_one_by_one(tmp_path: Path) -> None:
    data = write_evaluation_data(tmp_path / "data")
    write_ewok(data)
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    run, results = evaluate(tmp_path, model, data)
    assert list(results["tasks"]) == [task.name for task in TASKS]
    assert set(results["left_out"]) == {"aoa", "glue"}
    assert results["average"] == results["averages"]["accuracy"]["value"]
    for task in TASKS[:-1]:
        rows = [json.loads(line) for line in (run / "predictions" / f"{task.name}.jsonl").read_text().splitlines()]
        assert task.read is not None
        choices = task.read(find_tasks(data, "full", [task.name])[0][task.name])
        assert len(rows) == len(choices) == results["items"][task.name]
        for row, choice in list(zip(rows, choices, strict=True))[::4]:
            for text, start, nats in zip(choice.texts, choice.starts, row["nats"], strict=True):
                (score,) = score_texts(model, tokenizer, [text])
                (encoding,) = tokenizer.encodings_plain([text])
                kept = sum(end > start for _, end in encoding.offsets)
                assert nats == pytest.approx(score.log_p_N[-kept:].sum(), abs=1e-4)
    tracking = results["subsets"]["entity_tracking"]
    by_file = [np.mean([s["accuracy"] for n, s in tracking.items() if n.startswith(k)]) for k in ("regular", "ambiref")]
    assert results["tasks"]["entity_tracking"]["accuracy"]["mean"] == pytest.approx(np.mean(by_file))
    supplement = results["subsets"]["blimp_supplement"]
    assert supplement["turns"]["ties"] == 2
    for figure in results["tasks"]["comps"].values():
        assert figure["interval"][0] <= figure["mean"] <= figure["interval"][1]


def test_the_leaderboards_file_holds_the_chosen_texts_and_says_what_it_lacks(tmp_path: Path) -> None:
    data = write_evaluation_data(tmp_path / "data")
    run, results = evaluate(tmp_path, tiny_model(tiny_tokenizer()), data)
    submission = results["submission"]
    document = json.loads((run / submission["file"]).read_text())
    assert set(document) == {task.name for task in TASKS} - {"ewok"}
    assert not submission["complete"]
    assert {"ewok", "aoa", "glue", "blimp"} <= set(submission["missing"])
    assert submission["missing"]["blimp"] == "8 items in 1 subsets; the leaderboard requires 59875 in 67"
    folder = (run / submission["file"]).parent / "main" / "zero_shot" / "mlm"
    for place in (
        "blimp/blimp_filtered",
        "blimp/supplement_filtered",
        "comps/comps",
        "reading",
        "wug_past/wug_past_tense",
    ):
        assert (folder / place / "predictions.json").is_file()
    predictions = document["blimp"]["agreement"]["predictions"]
    assert [each["id"] for each in predictions[:2]] == ["agreement_0", "agreement_1"]
    share = np.mean([each["pred"].split()[2] == "tests" for each in predictions])
    assert results["tasks"]["blimp"]["accuracy"]["mean"] == pytest.approx(share)
    assert set(document["wug_adj"]["wug_adj"]["predictions"][0]) == {"id", "pred", "prob"}
    reading = document["reading"]["reading"]["predictions"]
    assert len(reading) == 40
    assert [k for k, each in enumerate(reading) if math.isnan(each["prev_pred"])] == [1]
    assert min(each["pred"] for each in reading) > 0


def test_what_is_missing_is_named_and_no_mean_is_given_over_part_of_the_columns(tmp_path: Path) -> None:
    data = write_evaluation_data(tmp_path / "data")
    _, results = evaluate(tmp_path, tiny_model(tiny_tokenizer()), data, items=2)
    assert results["left_out"]["ewok"] == f"no ewok_filtered in {data} or in its full_eval"
    assert results["average"] is None
    assert results["averages"]["accuracy"]["lacking"] == ["ewok"]
    assert results["items"]["blimp"] == 2
    assert results["references"] == []  # they are of the whole sets
    assert average_of({})["value"] is None
    with pytest.raises(DataError, match=r"contains none of the fast evaluation's files; expected blimp: blimp_fast"):
        find_tasks(data, "fast", ["blimp"])
    with pytest.raises(DataError, match="no such directory"):
        find_tasks(tmp_path / "nowhere", "full", ())
    with pytest.raises(DataError, match="give --data-dir"):
        find_tasks(None, "full", ())
    (tmp_path / "blimp_fast").mkdir()
    _, left_out = find_tasks(tmp_path, "fast", ["blimp", "comps"])
    assert left_out == {"comps": "comps is not part of the fast evaluation"}


def test_a_task_whose_texts_are_too_long_for_the_model_is_left_out_with_the_reason(tmp_path: Path) -> None:
    data = write_evaluation_data(tmp_path / "data")
    file = data / "full_eval" / "comps" / "comps_base.jsonl"
    row = {"prefix_acceptable": "A value " * 60, "prefix_unacceptable": "A", "property_phrase": "is."}
    write_jsonl(file, [row])
    _, results = evaluate(tmp_path, tiny_model(tiny_tokenizer()), data, only=["comps", "blimp"])
    assert "the model reads at most 60" in results["left_out"]["comps"]
    assert list(results["tasks"]) == ["blimp"]
    with pytest.raises(DataError, match="the model reads at most 60"):
        evaluate(tmp_path, tiny_model(tiny_tokenizer()), data, only=["comps"])


def test_a_rule_that_the_model_was_not_trained_for_is_warned_of(tmp_path: Path) -> None:
    data = write_evaluation_data(tmp_path / "data")
    tokenizer = tiny_tokenizer()
    _, results = evaluate(tmp_path, tiny_model(tokenizer), data, only=["blimp"], rule="masked_next_token")
    assert "scored by the rule masked_next_token, but original is the default for its head" in results["warnings"][0]
    assert results["protocol"]["official_backend"] == "mntp"
    _, results = evaluate(tmp_path, tiny_model(tokenizer), data, only=["blimp"], rule="within_word_l2r")
    assert results["warnings"] == [
        "the official pipeline has no backend for the rule within_word_l2r, so no submission is written"
    ]
    shifted = tiny_model(tokenizer)
    shifted.extras[SCORING_RULE] = "masked_next_token"
    save_tiny(shifted, tokenizer, tmp_path / "shifted")
    _, results = evaluate(tmp_path, tiny_model(tokenizer), data, only=["blimp"])
    assert results["warnings"] == []


def test_a_causal_model_reads_the_words_so_far(tmp_path: Path) -> None:
    data = write_evaluation_data(tmp_path / "data")
    _, results = evaluate(tmp_path, tiny_causal_model(tiny_tokenizer()), data, only=["reading", "wug_adj"])
    assert results["protocol"]["official_backend"] == "causal"
    for name in ("eye_tracking", "self_paced_reading"):
        figure = results["tasks"]["reading"][name]
        assert 0 <= figure["mean"] <= 1
        assert figure["interval"][0] < figure["interval"][1]


def test_the_gain_in_explained_variance_is_that_of_two_least_squares_fits() -> None:
    draw = np.random.default_rng(0)
    predictors = np.column_stack([draw.normal(9, 2, 300), draw.integers(1, 9, 300), draw.integers(2, 12, 300)])
    surprisal = draw.gamma(2, 3, 300)
    time = 200 + 3 * predictors[:, 1] + 1.5 * surprisal + draw.normal(0, 20, 300)
    time[5], predictors[9, 0] = np.nan, np.nan
    a, b, c = predictors.T
    known = np.isfinite(time) & np.isfinite(a)
    base = np.column_stack([np.ones(300), a, b, c, a * b, a * c, b * c])[known]

    def unexplained(columns: Any) -> float:
        return float(((time[known] - columns @ np.linalg.lstsq(columns, time[known])[0]) ** 2).sum())

    without, beside = unexplained(base), unexplained(np.column_stack([base, surprisal[known]]))
    counts = draw.multinomial(300, np.full(300, 1 / 300), size=50)
    found = partial_r2(time, predictors, surprisal, counts)
    assert found[0] == pytest.approx((without - beside) / without)
    assert found.shape == (51,)
    assert found[1:].min() < found[0] < found[1:].max()
    assert not partial_r2(time, predictors, np.ones(300), counts).any()
    # A predictor that is the same for all words, and its products, add nothing to the others.
    two = unexplained(base[:, [0, 1, 2, 4]]), unexplained(np.column_stack([base[:, [0, 1, 2, 4]], surprisal[known]]))
    constant = partial_r2(time, np.column_stack([a, b, np.full(300, 7.0)]), surprisal, counts)
    assert constant[0] == pytest.approx((two[0] - two[1]) / two[0])


def test_the_gains_are_those_of_all_words_with_the_mean_of_the_four_eye_tracking_times() -> None:
    draw = np.random.default_rng(1)
    surprisal, previous = draw.gamma(2, 3, (2, 200))
    names = (*PREDICTORS, "prev_length", *EYE_TRACKING, SELF_PACED)
    columns = {name: draw.normal(9, 2, 200) + 0.1 * number * surprisal for number, name in enumerate(names)}
    found = reading_gains(ReadingWords([], [], columns), surprisal, previous, seed=3)
    base = np.column_stack([columns[name] for name in PREDICTORS])
    more = np.column_stack([base, columns["prev_length"], previous])
    none = np.ones((0, 200), dtype=np.int64)
    eye = [partial_r2(columns[name], base, surprisal, none)[0] for name in EYE_TRACKING]
    assert found["eye_tracking"][0] == pytest.approx(np.mean(eye))
    assert found["self_paced_reading"][0] == pytest.approx(partial_r2(columns[SELF_PACED], more, surprisal, none)[0])
    assert all(low < score < high for score, low, high in found.values())


def test_correlations_tell_what_single_precision_rounds_away() -> None:
    shares = [0.1, 0.4, 0.3, 0.9]
    items = [answered(gap, 0.0, human=share) for gap, share in zip((30.0, 60.0, 40.0, 50.0), shares, strict=True)]
    found = correlations(items, 0)
    assert found["spearman"]["mean"] is None  # all shares are 1.0
    assert found["spearman_unrounded"]["mean"] == pytest.approx(0.8)
    assert correlations([answered(1.0, 0.0, human=0.5)] * 3, 0)["spearman_unrounded"]["mean"] is None


@pytest.mark.parametrize(
    ("reader", "row", "message"),
    [
        (read_ewok, {"Context1": "A", "Target1": "B", "Target2": "C"}, "no column 'Domain'"),
        (read_comps, {"prefix_acceptable": "A", "prefix_unacceptable": "B", "property_phrase": " "}, "expected text"),
        (read_entity_tracking, {"input_prefix": "A", "numops": 0, "options": ["b"]}, "expected at least two texts"),
        (read_wug_past_tense, {"sentences": "a", "ratio": 0.5}, "1 text separated by tabs"),
        (read_wug_past_tense, {"sentences": "a\tb", "ratio": "half"}, "expected a number"),
    ],
)
def test_a_faulty_record_is_named_by_file_and_line(tmp_path: Path, reader: Any, row: Any, message: str) -> None:
    file = tmp_path / "file.jsonl"
    write_jsonl(file, [row])
    with pytest.raises(DataError, match=message) as error:
        reader(file)
    assert f"{file}, line 1" in str(error.value)


def test_the_challenges_files_have_the_sizes_that_the_leaderboard_takes(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "babylm" / "eval"
    if not source.is_dir():
        pytest.skip(f"needs {source}")
    for name in ("blimp_filtered", "supplement_filtered", "entity_tracking"):
        with tarfile.open(source / f"{name}.tar.xz") as archive:
            archive.extractall(tmp_path, filter="data")
    for name in ("wug_adj_nominalization.jsonl", "wug_past_tense.jsonl"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    found, left_out = find_tasks(tmp_path, "full", ())
    assert set(left_out) == {"ewok", "comps", "reading"}
    for task in TASKS:
        if task.name in found:
            assert task.read is not None
            choices = task.read(found[task.name])
            assert (len(choices), len({each.subset for each in choices})) == (task.items, task.subsets)

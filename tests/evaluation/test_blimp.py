"""BLiMP: ties count one half, the order of a pair does not matter, and the run records its protocol."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertkit.errors import DataError, UsageError
from bertkit.evaluation.blimp import Outcome, Side, blimp_results, evaluate_blimp, share_preferred
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.evaluation.run import EvalArguments
from bertkit.evaluation.settings import BlimpSettings
from bertkit.models.headed import HeadedModel
from bertkit.models.scoring.pseudo_likelihood import TextScore, score_texts
from bertkit.run.verify import verify_run
from bertkit.tasks.minimal_pairs import MinimalPair, Paradigm
from tests.probing.tiny_models import constant_model, save_tiny, tiny_model, tiny_tokenizer
from tests.training.tiny_run import write_recipe

SINGULAR = [("The reader tests a file.", "The reader test a file."), ("A value is the number.", "A value the number.")]
WORDS = ("reader", "value", "document", "token", "sentence", "writer", "number")


def write_pairs(directory: Path, *, swapped: bool = False) -> Path:
    """Two paradigms of unequal size: good and bad differ in length in one and never in the other."""
    directory.mkdir()
    unequal = [(f"The {word} is walked.", f"The {word} walk.") for word in WORDS] + SINGULAR
    equal = [(f"{a} {b} in the file", f"{b} {a} in the file") for a, b in itertools.combinations(WORDS, 2)]
    rows = {"unequal": (unequal, "syntax/semantics"), "equal": ([*equal, ("the same", "the same")], "syntax_semantics")}
    for name, (pairs, field) in rows.items():
        with (directory / f"{name}.jsonl").open("w") as file:
            for good, bad in pairs:
                first, second = (bad, good) if swapped else (good, bad)
                record = {"sentence_good": first, "sentence_bad": second, "UID": name, "field": field}
                file.write(json.dumps(record | {"linguistics_term": name}) + "\n")
    return directory


def evaluate(tmp_path: Path, model: HeadedModel, data: Path, *, batch: int = 200, **settings: Any) -> tuple[Path, Any]:
    directory = tmp_path / "model"
    if not directory.exists():
        save_tiny(model, tiny_tokenizer(), directory)
    request = EvalArguments(
        model=str(directory), device="cpu", batch_tokens=batch, runs_root=tmp_path / "runs", fresh=True
    )
    done = evaluate_blimp(request, data, BlimpSettings(**settings))
    return done.run.path, done.results


def test_a_tie_counts_half() -> None:
    assert share_preferred(np.array([1e-9, -3.0, 0.0, 0.0, 2.0])) == pytest.approx(0.6)
    assert share_preferred(np.zeros(7)) == 0.5


@pytest.mark.parametrize("swapped", [False, True])
def test_constant_logits_score_exactly_half_but_for_the_length_that_the_sum_sees(tmp_path: Path, swapped: bool) -> None:
    data = write_pairs(tmp_path / "data", swapped=swapped)
    run, results = evaluate(tmp_path, constant_model(tiny_tokenizer()), data)
    tasks = results["tasks"]
    assert tasks["equal"]["accuracy"]["mean"] == 0.5
    assert {tasks[name]["accuracy_per_token"]["mean"] for name in tasks} == {0.5}
    assert tasks["unequal"]["accuracy"]["mean"] != 0.5
    assert results["averages"] == results["constant_logits"]  # predicted from the token counts alone
    rows = [json.loads(line) for line in (run / "predictions" / "blimp.jsonl").read_text().splitlines()]
    assert results["ties"] == sum(row["prediction"] == "tie" for row in rows) == 22


def test_exchanging_good_and_bad_exchanges_right_and_wrong_exactly(tmp_path: Path) -> None:
    model = tiny_model(tiny_tokenizer())
    _, results = evaluate(tmp_path, model, write_pairs(tmp_path / "data"))
    _, other = evaluate(tmp_path, model, write_pairs(tmp_path / "swapped", swapped=True))
    for task, row in results["tasks"].items():
        for name, figure in row.items():
            assert figure["mean"] + other["tasks"][task][name]["mean"] == pytest.approx(1, abs=1e-12)
    assert (results["ties"], results["near_ties"]) == (other["ties"], other["near_ties"]) == (1, 0)


def test_figures_follow_from_the_scores_of_the_single_sentences(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    run, results = evaluate(tmp_path, model, write_pairs(tmp_path / "data"), batch=51)
    rows = [json.loads(line) for line in (run / "predictions" / "blimp.jsonl").read_text().splitlines()]
    right: dict[str, list[float]] = {}
    for row, line in zip(rows, (tmp_path / "data" / "equal.jsonl").read_text().splitlines(), strict=False):
        pair = json.loads(line)
        (good,), (bad,) = (score_texts(model, tokenizer, [pair[key]]) for key in ("sentence_good", "sentence_bad"))
        assert (row["task"], row["good_tokens"], row["bad_tokens"]) == ("equal", good.tokens, bad.tokens)
        assert (row["good_nats"], row["bad_nats"]) == pytest.approx((good.total, bad.total), abs=1e-5)
    for row in rows:
        right.setdefault(row["task"], []).append({"good": 1.0, "tie": 0.5, "bad": 0.0}[row["prediction"]])
    means = {task: float(np.mean(values)) for task, values in right.items()}
    assert {task: row["accuracy"]["mean"] for task, row in results["tasks"].items()} == pytest.approx(means)
    assert results["average"] == pytest.approx(np.mean(list(means.values())))
    spread = [m * (1 - m) / (len(right[task]) - 1) for task, m in means.items()]
    assert results["standard_error"] == pytest.approx(np.sqrt(sum(spread)) / 2)
    with (run / "paradigms.csv").open() as file:
        table = {row["task"]: row for row in csv.DictReader(file)}
    assert {task: float(row["accuracy"]) for task, row in table.items()} == pytest.approx(means)
    assert table["equal"]["identical"] == "1"


def test_the_run_says_how_the_figures_were_made_and_verifies(tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "data")
    run, results = evaluate(tmp_path, tiny_model(tiny_tokenizer()), data, pairs=4, rule="within_word_l2r", seed=5)
    assert results == json.loads((run / "results.json").read_text())
    assert results["by_field"].keys() == {"syntax_semantics"}  # two spellings in the files
    assert results["by_field"]["syntax_semantics"]["paradigms"] == 2
    protocol = results["protocol"]
    assert protocol["rule"] == "within_word_l2r"
    assert protocol["set"] == "a selection: 2 paradigms, 8 of 31 pairs, drawn with seed 5 (Philox, by paradigm)"
    assert results["references"] == []  # they are for all of BLiMP
    record = json.loads((run / "run.json").read_text())
    assert (record["kind"], record["status"], record["seed"]) == ("eval", "done", 5)
    assert run.name == f"eval-blimp-{record['what_hash'][:8]}"
    assert not verify_run(run).errors


def test_the_name_of_a_run_changes_with_what_decides_its_result_and_with_nothing_else(tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "data")
    model = tiny_model(tiny_tokenizer())

    def name(**settings: Any) -> str:
        return evaluate(tmp_path, model, data, **settings)[0].name.split("-")[2]

    first = name(pairs=2)
    assert first == name(pairs=2, batch=30)
    assert first != name(pairs=3)
    assert first != name(pairs=2, seed=1)
    (data / "equal.jsonl").write_text((data / "equal.jsonl").read_text().replace("file", "files"))
    assert first != name(pairs=2)


def test_identical_pairs_are_listed_and_differing_token_counts_shown(tmp_path: Path) -> None:
    _, results = evaluate(tmp_path, tiny_model(tiny_tokenizer()), write_pairs(tmp_path / "data"))
    assert results["identical_pairs"] == ["equal/21"]
    counts = len(WORDS) + len(SINGULAR)
    encode = tiny_tokenizer().encode_batch
    differing = sum(len(encode([good])[0]) != len(encode([bad])[0]) for good, bad in SINGULAR) + len(WORDS)
    assert results["differing_token_counts"] == pytest.approx(differing / counts / 2)


def test_near_ties_are_those_that_another_machine_may_decide_otherwise() -> None:
    def score(*log_p: float) -> TextScore:
        return TextScore(np.array(log_p, dtype=np.float32), 1)

    pairs = tuple(MinimalPair(str(n), "a", "b") for n in range(3))
    paradigm = Paradigm("p", None, None, pairs, 3, Path("p"))
    good = Side.of([score(-1), score(-1, -2), score(-3)])
    bad = Side.of([score(-1), score(-1, -2.00005), score(-2)])
    outcome = Outcome(paradigm, good, bad)
    assert (outcome.ties, outcome.near_ties) == (1, 1)
    assert outcome.accuracy() == pytest.approx(0.5)


def test_faults_are_found_before_there_is_a_run(tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "data")
    tokenizer = tiny_tokenizer()
    with pytest.raises(DataError, match="no masked_lm, causal_lm or permutation_lm head"):
        evaluate(tmp_path, tiny_model(tokenizer, heads=()), data)
    with pytest.raises(UsageError, match="matches 'equall'; did you mean 'equal'"):
        evaluate(tmp_path, tiny_model(tokenizer), data, only=["equall"])
    with pytest.raises(DataError, match="give --data-dir DIR"):
        evaluate_blimp(EvalArguments(model=str(tmp_path / "model")), None, BlimpSettings())
    assert not (tmp_path / "runs").exists()


def test_a_part_of_blimp_is_called_a_selection_and_compared_with_no_published_figure(
    tmp_path: Path, shared_data: Path
) -> None:
    _, results = evaluate(tmp_path, tiny_model(tiny_tokenizer()), shared_data, pairs=1, batch=4096)
    assert (results["paradigms"], results["pairs"]) == (67, 67)
    assert results["protocol"]["set"].startswith("a selection: 67 paradigms, 67 of 67,000 pairs")
    assert results["standard_error"] is None  # the spread within a paradigm is unknown
    assert results["references"] == []
    assert 0 <= results["average"] <= 1


def test_the_standard_error_is_that_of_the_paradigms_samples_of_at_least_two_pairs() -> None:
    """Half of 2 pairs and two thirds of 3 are right: p (1 - p) / (n - 1) is 1/4 and 1/9."""
    examined = LoadedModel("m", Path("m"), tiny_model(tiny_tokenizer()), tiny_tokenizer(), "", None)

    def outcome(right: int, pairs: int) -> Outcome:
        bad, ones = np.zeros(pairs), np.ones(pairs, dtype=np.int64)
        good = np.where(np.arange(pairs) < right, 1.0, -1.0)
        paradigm = Paradigm(f"p{pairs}", None, None, (), pairs, Path("p"))
        return Outcome(paradigm, Side(good, ones, ones), Side(bad, ones, ones))

    two, three = outcome(1, 2), outcome(2, 3)
    found = blimp_results([two, three], examined, BlimpSettings())
    assert found["average"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert found["standard_error"] == pytest.approx((1 / 4 + 1 / 9) ** 0.5 / 2)
    assert blimp_results([outcome(1, 1), three], examined, BlimpSettings())["standard_error"] is None


def test_all_of_blimp_is_compared_with_published_figures() -> None:
    paradigms = [Paradigm(f"p{n}", None, None, (), 1000, Path("p")) for n in range(67)]
    side = Side.of([TextScore(np.array([-1.0], dtype=np.float32), 1)] * 1000)
    model = tiny_model(tiny_tokenizer())
    examined = LoadedModel("m", Path("m"), model, tiny_tokenizer(), "", None)
    whole = [Outcome(paradigm, side, side) for paradigm in paradigms]
    results = blimp_results(whole, examined, BlimpSettings())
    assert results["protocol"]["set"] == "BLiMP in full: 67 paradigms, 67,000 of 67,000 pairs"
    percent = {row["model"]: round(100 * row["accuracy"], 1) for row in results["references"]}
    assert percent == {"human": 88.6, "RoBERTa-large": 86.5, "GPT-2-345M": 82.6, "LSTM": 69.8, "n-gram": 61.2}
    assert (results["average"], results["ties"]) == (0.5, 67_000)
    assert blimp_results(whole[1:], examined, BlimpSettings())["references"] == []


def test_a_run_of_masked_next_token_prediction_is_scored_as_it_was_trained(
    tmp_path: Path, bertkit: Callable[..., Any]
) -> None:
    recipe, text = write_recipe(tmp_path)
    words = ["--set", "objective=[masked_next_token, {causal_lm: {share: 0.3}}]", "--set", "engine.examples=[]"]
    words += ["--set", "data.layout={name: doc-sentences}", "--max-steps", "2", "-q"]
    done = bertkit("pretrain", recipe, "--data", text, "--run-dir", tmp_path / "run", *words)
    assert done.code == 0, done.stderr
    data = write_pairs(tmp_path / "data")
    request = EvalArguments(model=str(tmp_path / "run"), device="cpu", runs_root=tmp_path / "runs")
    results = evaluate_blimp(request, data, BlimpSettings(pairs=2)).results
    assert results["protocol"]["rule"] == "masked_next_token"
    assert "predicted from the state before it" in results["protocol"]["statement"]
    with pytest.raises(UsageError, match=r"trained to predict the next token.*use masked_next_token"):
        evaluate_blimp(request, data, BlimpSettings(pairs=2, rule="original"))

"""`probe behaviour` as a run: pairs as in `eval blimp`, diagnostics, and refusals."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bertkit.errors import DataError, UsageError
from bertkit.evaluation.blimp import evaluate_blimp
from bertkit.evaluation.run import EvalArguments
from bertkit.evaluation.settings import BlimpSettings
from bertkit.models.scoring.rules import WithinWordLeftToRight
from bertkit.probing.behaviour import BehaviourSettings
from bertkit.probing.behaviour.diagnostics import Completion
from bertkit.probing.behaviour.measure import score_blanks
from bertkit.probing.behaviour.run import probe_behaviour
from bertkit.probing.run import ProbeResult
from bertkit.run.verify import verify_run
from tests.probing.request import request_for
from tests.probing.tiny_models import cpu_engine, tiny_causal_model, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("drawn_figures")

NEG = "item\tcontext_aff\tcontext_neg\ttarget_aff\ttarget_neg\n"
ROWS = [("reader", "token", "value"), ("file", "document", "number"), ("sentence", "reader", "token")]


def write_data(directory: Path) -> Path:
    """Two paradigms of one phenomenon, one of another, and a diagnostic."""
    directory.mkdir()
    for name, term in (("one", "agreement"), ("two", "agreement"), ("three", "islands")):
        with (directory / f"{name}.jsonl").open("w") as file:
            for word in ("reader", "value", "document", "token", "number")[: 2 + len(name) % 3]:
                good, bad = f"The {word} is {name}.", f"The {word} are {name}."
                pair = {"sentence_good": good, "sentence_bad": bad, "UID": name, "linguistics_term": term}
                file.write(json.dumps(pair) + "\n")
    rows = "".join(f"{n}\tThe {a} is a\tThe {a} is not a\t{b}\t{c}\n" for n, (a, b, c) in enumerate(ROWS))
    (directory / "NEG.tsv").write_text(NEG + rows)
    return directory


def score(request: Any, **settings: Any) -> ProbeResult:
    return probe_behaviour(request, BehaviourSettings(**settings))


def table(probed: ProbeResult, name: str) -> list[dict[str, str]]:
    assert probed.run is not None
    with (probed.run.path / "tables" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_folder_of_both_gives_both_and_pairs_are_those_of_the_suite(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")
    request = request_for(tmp_path, data)
    probed = score(request)
    assert probed.run is not None
    assert not verify_run(probed.run.path).errors
    names = {path.name for path in (probed.run.path / "figures").iterdir()}
    assert names == {"diagnostics.png", "diagnostics.svg", "minimal_pairs.png", "minimal_pairs.svg"}
    summary = probed.results["summary"]
    wanted = EvalArguments(request.models[0], device="cpu", runs_root=tmp_path / "runs", command=["x"])
    suite = evaluate_blimp(wanted, data, BlimpSettings()).results
    pairs = summary["minimal_pairs"]
    assert pairs["average"] == suite["average"]
    assert pairs["by_linguistics_term"] == suite["by_linguistics_term"]
    rows = {row["phenomenon"]: row for row in table(probed, "minimal_pairs")}
    assert {term: int(row["paradigms"]) for term, row in rows.items()} == {"agreement": 2, "islands": 1}
    for term, row in rows.items():
        assert float(row["accuracy"]) == pytest.approx(suite["by_linguistics_term"][term]["accuracy"])
    measures = summary["diagnostics"]["NEG"]["measures"]
    assert [measures[f"sensitivity/{each}"]["n"] for each in ("affirmative", "negative")] == [3, 3]
    assert len(table(probed, "diagnostic_items")) == 6
    assert summary["blank_rule"] == "within_word_l2r"


def test_a_word_that_is_the_better_affirmative_is_the_worse_negative_in_the_same_context(tmp_path: Path) -> None:
    """Equal contexts must give sensitivities that sum to 1."""
    path = tmp_path / "NEG.tsv"
    path.write_text(NEG + "".join(f"{n}\tThe {a} is a\tThe {a} is a\t{b}\t{c}\n" for n, (a, b, c) in enumerate(ROWS)))
    for number, (model, heads) in enumerate(((tiny_model, "masked"), (tiny_causal_model, "causal"))):
        request = request_for(tmp_path / f"m{number}", path, model=model(tiny_tokenizer()))
        measures = score(request).results["summary"]["diagnostics"]["NEG"]["measures"]
        both = [measures[f"sensitivity/{each}"]["value"] for each in ("affirmative", "negative")]
        assert sum(both) == pytest.approx(1), heads


def test_by_default_a_full_stop_follows_the_blank_as_in_the_published_code(tmp_path: Path) -> None:
    model, tokenizer = tiny_model(tiny_tokenizer()), tiny_tokenizer()
    rows = table(
        score(request_for(tmp_path, write_data(tmp_path / "data") / "NEG.tsv", model=model)), "diagnostic_items"
    )
    completions = [Completion(row["context"], row["good"]) for row in rows]
    stopped, bare = (
        score_blanks(model, tokenizer, WithinWordLeftToRight(tokenizer), completions, cpu_engine(), ending=ending)
        for ending in (".", "")
    )
    for row, completion in zip(rows, completions, strict=True):
        with_stop, without = stopped[completion], bare[completion]
        assert with_stop is not None
        assert without is not None
        assert float(row["good_log_p_nats"]) == pytest.approx(with_stop.log_p, rel=1e-4)
        assert float(row["good_log_p_nats"]) != pytest.approx(without.log_p, rel=1e-3)


def test_patterns_choose_among_both(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")
    summary = score(request_for(tmp_path, data), only=["NEG*"]).results["summary"]
    assert "minimal_pairs" not in summary
    summary = score(request_for(tmp_path, data), only=["islands"], pairs=1).results["summary"]
    assert "diagnostics" not in summary
    assert (summary["minimal_pairs"]["paradigms"], summary["minimal_pairs"]["pairs"]) == (1, 1)
    summary = score(request_for(tmp_path, data), only=["NEG*", "islands"]).results["summary"]
    assert (summary["minimal_pairs"]["paradigms"], list(summary["diagnostics"])) == (1, ["NEG"])
    for only in (["iland"], ["NEG", "iland"], ["islands", "iland"]):
        with pytest.raises(
            UsageError, match="no paradigm, field or phenomenon matches 'iland'; did you mean 'islands'"
        ):
            score(request_for(tmp_path, data), only=only)
    with pytest.raises(UsageError, match="--only ROLE: matches none of the diagnostics"):
        score(request_for(tmp_path, data / "NEG.tsv"), only=["NEG", "ROLE"])


def test_any_number_of_accuracies_is_drawn(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")
    top = [1, 2, 3, 4, 5, 6, 7]
    measures = score(request_for(tmp_path, data / "NEG.tsv"), top=top).results["summary"]["diagnostics"]["NEG"]
    assert {f"accuracy_at_{k}/negative" for k in top} <= set(measures["measures"])


def test_another_scoring_rule_in_the_models_config_is_another_measurement(tmp_path: Path) -> None:
    request = request_for(tmp_path, write_data(tmp_path / "data") / "NEG.tsv", fresh=False)
    first = score(request)
    assert score(request).run.path == first.run.path  # type: ignore[union-attr]  # there are runs
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"scoring_rule": "encoder_left_to_right"}))
    assert score(request).results["summary"]["rule"] == "encoder_left_to_right"


def test_data_and_models_that_cannot_be_scored_are_refused(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")
    with pytest.raises(UsageError, match="give --data PATH, minimal pairs"):
        score(request_for(tmp_path))
    with pytest.raises(DataError, match="no masked_lm, causal_lm or permutation_lm head"):
        score(request_for(tmp_path / "bare", data, model=tiny_model(tiny_tokenizer(), heads=())))
    with pytest.raises(DataError, match="no such file or directory"):
        score(request_for(tmp_path, tmp_path / "nowhere"))
    twice = replace(request_for(tmp_path, data), data=[str(data), str(data / "NEG.tsv")])
    with pytest.raises(DataError, match="'NEG' occurs twice"):
        score(twice)
    assert not (tmp_path / "runs").exists()

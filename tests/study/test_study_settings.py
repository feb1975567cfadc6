"""Errors of a study are reported before its first step, with key and remedy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bertkit.errors import BertkitError, DataError, UsageError
from bertkit.progress import silent_progress
from bertkit.recipe.resolve import load_any
from bertkit.study.report import with_source
from bertkit.study.run import run_study
from bertkit.study.settings import Claim, Study, load_study
from tests.study.tiny_study import PEAK, STUDY, arguments, study, write_study

CHOICE: dict[str, Any] = STUDY["choose"]
CLAIM: dict[str, Any] = STUDY["claims"][0]
ONE_LAYER = {"set": {"model.num_hidden_layers": 1}}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"seeds": [0, 9]}, UsageError, r"seeds contains 9, the seed that the settings are chosen on"),
        ({"seeds": [0]}, UsageError, "seeds has fewer than two entries, so there is no interval"),
        ({"seeds": [0, 1, 0]}, UsageError, "seeds contains 0 twice"),
        ({"seed": 3}, UsageError, "seed has no effect in a study; write seeds"),
        ({"choose": CHOICE | {"grid": {PEAK: [1e-3]}}}, UsageError, rf"choose\.grid\.{PEAK} has one value"),
        ({"choose": CHOICE | {"grid": {PEAK: [1e-3, 1e-3]}}}, UsageError, "contains a value twice"),
        ({"choose": CHOICE | {"grid": {}}}, UsageError, "choose.grid is empty"),
        ({"choose": CHOICE | {"by": "held-out"}}, UsageError, "no measure 'held-out'; did you mean held_out"),
        ({"choose": CHOICE | {"by": "other"}}, UsageError, r"choose\.by: measures\.other cannot be computed for arm"),
        ({"choose": CHOICE | {"by": ["held_out", "other"]}}, UsageError, "higher is better for one, lower for another"),
        ({"choose": None, "arms": {"third": {"grid": {PEAK: [1, 2]}}}}, UsageError, "nothing chooses among these"),
        ({"arms": {"third": {"grid": {PEAK: [1e-4, 2e-4]}}}}, UsageError, "is also a key of choose.grid"),
        ({"arms": {"third": {"grid": {"model.num_hidden_layers": [1]}}}}, UsageError, "has one value"),
        ({"arms": {"third": {"set": {"seed": 4}}}}, UsageError, r"arms\.third\.set\.seed is set by the study"),
        ({"set": {"optimisation.steps": 4}}, UsageError, "set.optimisation.steps is set by the study, from budget"),
        ({"arms": {"causal": None, "masked": None}, "claims": []}, UsageError, "arms is empty; name at least one"),
        ({"arms": {"a/b": {}}}, UsageError, "the name 'a/b' has characters other than letters"),
        ({"baseline": "mask"}, UsageError, "baseline: no arm 'mask'; did you mean masked"),
        ({"claims": [CLAIM | {"arm": "casual"}]}, UsageError, r"claims\.0\.arm: no arm 'casual'; did you mean causal"),
        ({"claims": [CLAIM | {"against": "nsp"}]}, UsageError, r"claims\.0\.against: no arm 'nsp'; there are: masked"),
        ({"claims": [CLAIM | {"measure": "blimp"}]}, UsageError, r"claims\.0\.measure: no measure 'blimp'"),
        ({"claims": [CLAIM | {"measure": []}]}, UsageError, r"claims\.0\.measure names no measure"),
        ({"claims": [CLAIM | {"arm": "masked"}]}, UsageError, r"claims\.0: masked is compared with itself"),
        ({"claims": [CLAIM | {"measure": "other"}]}, UsageError, r"claims\.0: measures\.other cannot be computed for"),
        ({"budget": {}}, UsageError, "give one of flops, tokens and steps"),
        ({"budget": {"steps": 3, "flops": 1e9}}, UsageError, "give one of flops, tokens and steps"),
        ({"measures": {"x": {"kind": "squad"}}}, UsageError, r"measures\.x\.kind: unknown kind .squad."),
        ({"measures": {"x": {"kind": "mlm", "data": ["gone.txt"]}}}, DataError, r"measures\.x: .*gone\.txt"),
        (
            {"measures": {"x": {"kind": "mlm", "data": ["other.txt"], "metric": "pseudo_bits_per_byte"}}},
            UsageError,
            "goes with window_bytes and pseudo_sequences",
        ),
        (
            {"measures": {"x": {"kind": "mlm", "data": ["other.txt"], "metric": "pseudo_perplexity"}}},
            UsageError,
            "metric pseudo_perplexity goes with pseudo_sequences",
        ),
        ({"measures": {"x": {"kind": "blimp", "directory": "gone"}}}, DataError, r"measures\.x: "),
        ({"measures": {"x": {"kind": "layers", "data": "gone.conllu"}}}, DataError, r"measures\.x: .*gone\.conllu"),
        ({"measures": {"x": {"kind": "finetune", "task": "rte", "directory": "gone"}}}, DataError, r"measures\.x: "),
        ({"measures": {"x": {"kind": "finetune", "task": "sst3"}}}, UsageError, r"measures\.x: .*sst3"),
        (
            {"measures": {"x": {"kind": "finetune", "task": "rte", "metric": "f1"}}},
            UsageError,
            r"measures\.x: metric: rte has no metric 'f1'; there are: accuracy",
        ),
        (
            {"measures": {"x": {"kind": "finetune", "task": "rte", "set": {"optimisation.epoch": 2}}}},
            UsageError,
            r"(?s)measures\.x: .*did you mean epochs",
        ),
        ({"arms": {"third": {"set": {"objective": ["masked_lm"]}}}}, UsageError, "arms.third does not differ from"),
        (
            {"choose": CHOICE | {"grid": {"engine.log_every_steps": [1, 2]}}},
            UsageError,
            r"arms\.masked: the candidates 'log_every_steps 1' and 'log_every_steps 2' are the same run",
        ),
        ({"arms": {"third": {"budget_share": 0}}}, UsageError, r"arms\.third\.budget_share: .*greater than 0"),
        ({"arms": {"third": {"set": {"model.layers": 3}}}}, UsageError, r"(?s)arms\.third: .*layers: unknown key"),
        ({"set": {"model.hidden_size": 25}}, UsageError, r"arms\.masked: "),
        ({"recipe": "conll2003-features"}, UsageError, "is a recipe of kind finetune"),
        ({"recipe": "tinny"}, UsageError, "'tinny': .*did you mean 'tiny'"),
        ({"kind": "pretrain"}, UsageError, "run it with `bertkit pretrain"),
        ({"choice": {}}, UsageError, "choice: unknown key; did you mean choose"),
        ({"measures": {"../x": {"kind": "held-out"}}}, UsageError, r"the name '\.\./x' cannot be that of a directory"),
        ({"measures": {"/x": {"kind": "held-out"}}}, UsageError, r"the name '/x' cannot be that of a directory"),
        ({"measures": {".": {"kind": "held-out"}}}, UsageError, r"the name '\.' cannot be that of a directory"),
        ({"measures": {"scores.json": {"kind": "held-out"}}}, UsageError, r"the name 'scores\.json' cannot be that"),
        (
            {"measures": {"x": {"kind": "held-out", "metric": ["accuracy/masked_lm", "loss"]}}},
            UsageError,
            r"measures\.x: metric: of accuracy/masked_lm, loss, lower is better for some",
        ),
        ({"measures": {"x": {"kind": "held-out", "metric": []}}}, UsageError, r"measures\.x\.metric"),
        (
            {"measures": {"x": {"kind": "mlm", "data": ["other.txt"], "window_bytes": 90, "sequence_length": 20}}},
            UsageError,
            r"measures\.x: sequence_length and window_bytes both set the length of a window",
        ),
        (
            {
                "measures": {"other": {"kind": "mlm", "data": ["other.txt"], "sequence_length": 41}},
                "arms": {"causal": None},
                "claims": [],
                "choose": CHOICE | {"by": "other"},
            },
            UsageError,
            r"for arm masked: it reads at most 40 tokens, and sequence_length is 41",
        ),
    ],
)  # fmt: skip
def test_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], error: type[BertkitError], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path, study(**changes))
    with pytest.raises(error, match=message):
        run_study(arguments(tmp_path, "run"), progress=silent_progress)
    assert not (tmp_path / "run").exists()


def test_all_errors_of_a_study_are_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path, study(seeds=[9], baseline="none"))
    with pytest.raises(UsageError, match=r"fewer than two.*contains 9.*baseline: no arm 'none'"):
        load_study("small")


def test_a_pretraining_command_sends_a_study_to_its_own(tmp_path: Path, bertkit, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path)
    outcome = bertkit("pretrain", "small.yaml")
    assert outcome.code == 2
    assert "run it with `bertkit study small.yaml`" in outcome.stderr


def test_settings_below_set_and_grid_have_dotted_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path)
    sets = ["set.model.hidden_size=12", "arms.causal.set.model.num_hidden_layers=1", f"choose.grid.{PEAK}=[1, 2, 3]"]
    found = arguments(tmp_path, "run", *sets).requested()
    assert found.set["model.hidden_size"] == 12
    assert found.set["data.sequence_length"] == 24
    assert found.arms["causal"].set == {"objective": ["causal_lm"], "model.num_hidden_layers": 1}
    assert found.choose is not None
    assert found.choose.grid == {PEAK: [1, 2, 3]}


def test_a_removed_measure_takes_its_claims_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    claims = [CLAIM, CLAIM | {"arm": "third", "measure": ["other"]}]
    write_study(tmp_path, study(claims=claims, arms={"third": ONE_LAYER}))
    found = arguments(tmp_path, "run", "measures.other=null").requested()
    assert list(found.measures) == ["held_out"]
    assert [claim.arm for claim in found.claims] == ["causal"]
    near = "no measure 'othr'; did you mean other?"
    for setting, message in (("measures.othr=null", near), ("arms.x=null", "no arm 'x'; there are: masked")):
        with pytest.raises(UsageError, match=re.escape(f"--set {setting}: {message}")):
            arguments(tmp_path, "run", setting).requested()


def test_a_claim_of_ones_own_needs_no_source() -> None:
    own = {key: value for key, value in CLAIM.items() if key != "source"}
    assert with_source(Claim.model_validate(own).model_dump()) == "it is worse"
    assert with_source(CLAIM) == "it is worse (a test)"


def test_the_record_of_a_study_runs_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path)
    found = arguments(tmp_path, "run", sources=["text.txt"], data_dir=".").requested()
    assert found.recipe == str(tmp_path / "tiny.yaml")
    assert found.set["data.sources"] == [str(tmp_path / "text.txt")]
    assert found.measures["other"].data == [str(tmp_path / "other.txt")]  # type: ignore[attr-defined]  # an MlmMeasure


def test_the_shipped_study_has_the_objectives_and_their_claims() -> None:
    found = load_any("objectives")
    assert isinstance(found, Study)
    assert list(found.arms) == [
        *("masked_lm", "whole_words", "spans", "next_sentence", "sentence_order", "word_order"),
        *("replaced_token", "causal_lm", "masked_and_causal"),
    ]
    assert [arm for arm, own in found.arms.items() if own.grid] == ["replaced_token"]
    assert found.choose is not None
    assert [len(values) for values in found.choose.grid.values()] == [3]
    papers = {claim.source.partition(",")[0] for claim in found.claims}
    assert len(found.claims) == 10
    assert len(papers) == 8


def test_a_claim_stays_one_about_the_first_arm_where_that_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    claims = [CLAIM, CLAIM | {"arm": "third", "against": "causal"}, CLAIM | {"arm": "third"}]
    write_study(tmp_path, study(claims=claims, arms={"third": ONE_LAYER}))
    found = arguments(tmp_path, "run", "arms.masked=null").requested()
    assert [(claim.arm, claim.against) for claim in found.claims] == [("third", "causal")]
    kept = arguments(tmp_path, "run", "arms.causal=null").requested()
    assert [(claim.arm, claim.against) for claim in kept.claims] == [("third", "masked")]


def test_values_of_the_wrong_kind_are_told_with_arms_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path)
    given = arguments(tmp_path, "run", "baseline=[x]", arms=["masked"])
    with pytest.raises(UsageError, match="baseline: expected"):
        given.requested()
    assert arguments(tmp_path, "run", "claims.0.against=[x]", arms=["masked"]).requested().claims == []

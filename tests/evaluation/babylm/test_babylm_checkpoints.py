"""The scores of a run's intermediate models, one after another, in the files required by the leaderboard."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bertkit.evaluation.babylm.checkpoints import OFFICIAL_MARKS, kept_models
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.models.scoring.pseudo_likelihood import score_texts
from bertkit.pretraining.words import milestone_name, words_of_milestone
from tests.evaluation.babylm.babylm_files import write_evaluation_data
from tests.probing.tiny_models import save_tiny, tiny_model, tiny_tokenizer

FAST = {"blimp_filtered": "blimp_fast", "entity_tracking": "entity_tracking_fast"}


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("10M", "2M", "1M")):
        save_tiny(tiny_model(tiny_tokenizer(), seed=number), tiny_tokenizer(), tmp_path / "run" / "models" / name)
    (tmp_path / "run" / "run.json").write_text("{}")
    full = write_evaluation_data(tmp_path / "evaluation_data") / "full_eval"
    for name, fast in FAST.items():
        (full / name).rename(full / fast)
    full.rename(full.with_name("fast_eval"))


def test_names_of_models_are_read_back() -> None:
    assert [words_of_milestone(milestone_name(words)) for words in OFFICIAL_MARKS] == list(OFFICIAL_MARKS)
    assert len(OFFICIAL_MARKS) == 19
    assert [words_of_milestone(name) for name in ("250k", "17", "M", "final", "-3M", "")] == [250_000, 17, *[None] * 4]


def test_each_model_is_scored_in_the_order_of_its_words(bertkit, tmp_path: Path) -> None:
    assert list(kept_models("run")) == [1_000_000, 2_000_000, 10_000_000]
    chosen = ("--only", "blimp", "--only", "wug_adj", "--only", "entity_tracking")
    command = ("eval", "babylm", "--model", "run", "--data-dir", "evaluation_data", *chosen, "--sample", "fast")
    outcome = bertkit(*command, "--checkpoints", "--json")
    assert outcome.code == 0, outcome.stderr
    document = json.loads(outcome.stdout)
    assert [each["words"] for each in document["checkpoints"]] == [1_000_000, 2_000_000, 10_000_000]
    assert document["tasks"] == document["checkpoints"][-1]["tasks"]
    root = Path(document["run"]) / "submission" / "run"
    shares = json.loads((root / "fast_scores_mlm.json").read_text())["fast_eval_results"]
    assert set(shares) == {"blimp", "wug_adj", "entity_tracking"}
    for number, checkpoint in enumerate(document["checkpoints"]):
        (share,) = shares["blimp"][number].values()
        assert share == pytest.approx(checkpoint["tasks"]["blimp"]["accuracy"]["mean"])
        assert shares["wug_adj"][number] == {"wug_adj": checkpoint["tasks"]["wug_adj"]["spearman"]["mean"]}
    for name in ("1M", "2M", "10M"):
        folder = root / f"chck_{name}" / "zero_shot" / "mlm"
        for task in ("blimp/blimp_fast", "wug_adj/wug_adj_nominalization", "entity_tracking/entity_tracking_fast"):
            assert (folder / task / "predictions.json").is_file()
    assert "without 3M, 4M" in document["submission"]["missing"]["checkpoints"]
    again = json.loads(bertkit(*command, "--checkpoints", "--json").stdout)
    assert again["run"] == document["run"]


def test_surprisals_in_context_make_ages_and_the_official_file(bertkit, tmp_path: Path) -> None:
    folder = tmp_path / "evaluation_data" / "full_eval" / "aoa"
    folder.mkdir(parents=True)
    contexts = {"value": [{"context": "The "}, {"context": "A reader of a"}], "token": [{"context": "One"}]}
    (folder / "cdi_childes.json").write_text(json.dumps(contexts))
    (folder / "cdi_human.csv").write_text(",word,16,23,30\n0,value,0.1,0.5,0.9\n1,token,0.2,0.5,0.8\n")
    command = ("eval", "babylm", "--model", "run", "--data-dir", "evaluation_data", "--sample", "fast")
    outcome = bertkit(*command, "--checkpoints", "--json", "--run-dir", "ages")
    assert outcome.code == 0, outcome.stderr
    document = json.loads(outcome.stdout)
    assert document["aoa"]["aoa"]["words"] <= 2
    assert "aoa" not in document["left_out"]
    file = Path(document["run"]) / "submission" / "run" / "main" / "zero_shot" / "mlm" / "AoA_word" / "surprisal.json"
    rows = json.loads(file.read_text())["results"]
    assert [row["step"] for row in rows[::3]] == ["chck_1M", "chck_2M", "chck_10M"]
    own = [row for row in rows if row["step"] == "chck_10M"]
    assert [(row["target_word"], row["context_id"]) for row in own] == [("value", 0), ("value", 1), ("token", 0)]
    loaded = LoadedModel.load("run/models/10M")
    texts, starts = ["The value", "A reader of a value", "One token"], [4, 14, 4]
    scores = score_texts(loaded.model, loaded.tokenizer, texts, starts=starts)
    assert [row["surprisal"] for row in own] == pytest.approx([-each.total for each in scores])
    record = json.loads(Path("ages/run.json").read_text()) | {"status": "failed"}
    Path("ages/run.json").write_text(json.dumps(record))
    again = bertkit(*command, "--checkpoints", "--json", "--run-dir", "ages")
    assert again.code == 0, again.stderr


def test_mistakes_are_told(bertkit) -> None:
    (Path("empty")).mkdir()
    (Path("empty") / "run.json").write_text("{}")
    for code, told, model, more in [
        (2, "is not a run directory", "run/models/1M", ["--sample", "fast"]),
        (2, "--checkpoints needs --sample fast", "run", []),
        (3, "the run has kept no models at given numbers of words", "empty", ["--sample", "fast"]),
    ]:
        outcome = bertkit("eval", "babylm", "--model", model, "--data-dir", "evaluation_data", "--checkpoints", *more)
        assert outcome.code == code, outcome.stderr
        assert told in " ".join(outcome.stderr.split())

"""The fine-tuned part of the BabyLM evaluation: texts, settings and files as in the official pipeline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bertkit.errors import DataError
from bertkit.evaluation.babylm.glue import FOLDER, SIZES, GlueScores, glue_names
from bertkit.evaluation.babylm.run import evaluate_babylm
from bertkit.evaluation.run import EvalArguments
from bertkit.evaluation.settings import BabylmSettings
from bertkit.tasks.catalogue import TASKS, find_task
from bertkit.tasks.readers import load_split
from bertkit.tasks.readers.babylm import PREFIX, TEXTS
from tests.evaluation.babylm.babylm_files import WORDS, write_evaluation_data, write_jsonl
from tests.probing.tiny_models import save_tiny, tiny_model, tiny_tokenizer

REAL = Path(__file__).parents[4] / "shared" / "data" / "babylm" / "eval"


def write_glue(full: Path) -> None:
    """RTE and WSC with 12 training rows and 5 dev rows; BoolQ without its training file."""
    for split, count in (("train", 12), ("valid", 5)):
        rte = [
            {"sentence1": f"The {w} is a value.", "sentence2": f"A {w}.", "idx": 9 * k, "label": k % 2}
            for k, w in enumerate((WORDS * 2)[:count])
        ]
        write_jsonl(full / FOLDER / f"rte.{split}.jsonl", rte)
        wsc = [
            {"text": f"The {w} is a value.", "span1_text": w, "span2_text": "value", "label": (k // 2) % 2}
            for k, w in enumerate((WORDS * 2)[:count])
        ]
        write_jsonl(full / FOLDER / f"wsc.{split}.jsonl", wsc)
    write_jsonl(full / FOLDER / "boolq.valid.jsonl", [{"question": "is it", "passage": "It is.", "label": 1}])


def test_texts_are_joined_as_the_official_code_joins_them(tmp_path: Path) -> None:
    write_glue(tmp_path)
    row = {"paragraph": "It rained.", "question": "Did it?", "answer": "Yes", "label": 1}
    write_jsonl(tmp_path / FOLDER / "multirc.valid.jsonl", [row])
    (example,) = load_split("babylm-multirc", "dev", tmp_path).examples
    assert (example.text, example.text_pair, example.label) == ("Question: Did it? Answer: Yes", "It rained.", "1")
    example = load_split("babylm-wsc", "dev", tmp_path).examples[1]
    assert example.text == f'Does "value" refer to "{WORDS[1]}" in this passage?'
    assert [each.id for each in load_split("babylm-rte", "train", tmp_path).examples] == [str(k) for k in range(12)]
    write_jsonl(tmp_path / FOLDER / "rte.valid.jsonl", [{"sentence1": "a", "sentence2": "b", "label": 2}])
    with pytest.raises(DataError, match=r"rte.valid.jsonl, line 1: label '2', expected one of '0', '1'"):
        load_split("babylm-rte", "dev", tmp_path)
    write_jsonl(tmp_path / FOLDER / "rte.valid.jsonl", [{"sentence1": "a", "sentence2": "b", "label": "yes"}])
    with pytest.raises(DataError, match="label is 'yes'; expected one of 0, 1"):
        load_split("babylm-rte", "dev", tmp_path)


def test_settings_are_those_of_the_official_script() -> None:
    assert glue_names(["all"]) == list(TEXTS) == list(SIZES)
    for name in TEXTS:
        spec = find_task(f"{PREFIX}{name}")
        settings = spec.settings
        assert (settings.learning_rate, settings.warmup_share, spec.max_length) == (3e-5, 0.06, 512)
        assert settings.epochs == (30 if name == "wsc" else 10)
        assert settings.batch_sequences == (16 if name in ("boolq", "multirc") else 32)
        assert len(spec.labels or ()) == (3 if name == "mnli" else 2)
        assert spec.primary == ("f1" if name in ("mrpc", "qqp") else "accuracy")
    assert {name for name in TASKS if name.startswith(PREFIX)} == {f"{PREFIX}{name}" for name in TEXTS}


@pytest.mark.skipif(not REAL.exists(), reason="no BabyLM evaluation sets next to the repository")
def test_the_real_files_are_read_whole(tmp_path: Path) -> None:
    import tarfile

    with tarfile.open(REAL / "glue_filtered.tar.xz") as archive:
        wanted = [each for each in archive.getmembers() if each.name.endswith(("rte.valid.jsonl", "wsc.valid.jsonl"))]
        archive.extractall(tmp_path, wanted, filter="data")
    for name in ("rte", "wsc"):
        assert len(load_split(f"{PREFIX}{name}", "dev", tmp_path).examples) == SIZES[name]


def test_tasks_are_fine_tuned_and_enter_the_submission(
    bertkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny(tiny_model(tiny_tokenizer()), tiny_tokenizer(), tmp_path / "model")
    write_glue(write_evaluation_data(tmp_path / "evaluation_data") / "full_eval")
    command = ("eval", "babylm", "--model", "model", "--data-dir", "evaluation_data", "--only", "wug_adj", "--json")
    command += ("--finetune", "all", "--finetune-steps", "2")
    planned = json.loads(bertkit(*command, "--plan").stdout)
    assert not Path("runs").exists()
    outcome = bertkit(*command)
    assert outcome.code == 0, outcome.stderr
    document = json.loads(outcome.stdout)
    assert (planned["suite"], planned["steps"], list(planned["tasks"])) == ("babylm", 4, ["rte", "wsc"])
    assert planned["tasks"]["rte"]["examples"] == {"train": 12, "dev": 5}
    assert planned["left_out"]["boolq"] == document["left_out"]["boolq"]
    assert set(document["tasks"]) == {"wug_adj", "rte", "wsc"}
    assert {"accuracy", "accuracy_last_epoch"} <= set(document["tasks"]["rte"])
    assert document["finetuned"]["over"] == ["rte", "wsc"]
    assert document["finetuned"]["average"] is None
    assert "boolq.train.jsonl" in document["left_out"]["boolq"]
    assert "mrpc" in document["submission"]["missing"]["glue"]
    assert "boolq is left out" in outcome.stderr
    runs = Path(document["finetuned"]["run"]) / "runs"
    files = {name: runs / f"babylm-{name}-seed=42" / "results.json" for name in ("rte", "wsc")}
    reasons = {name: json.loads(file.read_text())["degenerate"] for name, file in files.items()}
    degenerate = {name: reason for name, reason in reasons.items() if reason}
    assert document["finetuned"]["degenerate"] == degenerate
    assert degenerate, "two steps teach nothing"
    assert all(f"warning: {name}: {reason}" in outcome.stderr for name, reason in degenerate.items())
    root = Path(document["run"]) / "submission" / "model"
    whole = json.loads((root / "all_full_preds_mlm.json").read_text())
    own = json.loads((root / "main" / "finetune" / "rte" / "predictions.json").read_text())
    assert own == {"rte": whole["glue"]["rte"]}
    assert [row["id"] for row in own["rte"]["predictions"]] == [f"rte_{k}" for k in range(5)]
    assert {row["pred"] for row in own["rte"]["predictions"]} <= {0, 1}
    recipe = (Path(document["finetuned"]["run"]) / "runs" / "babylm-rte-seed=42" / "recipe.yaml").read_text()
    official = ("name: cosine", "floor: 0.1", "peak: 3.0e-05", "select: best", "seed: 42", "max_length: 512")
    for setting in (*official, "weight_decay: 0.01", "decay_biases_and_norms: true", "clip_norm: null"):
        assert setting in recipe, recipe


def test_a_finished_run_is_not_used_for_other_files_of_the_subset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tiny_model(tiny_tokenizer()), tiny_tokenizer(), tmp_path / "model")
    write_glue(write_evaluation_data(tmp_path / "data") / "full_eval")
    calls = []

    def tuned(*given: object) -> GlueScores:
        calls.append(given)
        return GlueScores({}, {}, {}, None, "")

    monkeypatch.setattr("bertkit.evaluation.babylm.run.finetune_glue", tuned)
    request = EvalArguments(model=str(tmp_path / "model"), device="cpu", runs_root=tmp_path / "runs")
    settings = BabylmSettings(only=["wug_adj"], finetune=["all"])
    first = evaluate_babylm(request, tmp_path / "data", settings)
    assert evaluate_babylm(request, tmp_path / "data", settings).run.path == first.run.path
    row = {"question": "is it", "passage": "It is.", "label": 1}
    write_jsonl(tmp_path / "data" / "full_eval" / FOLDER / "boolq.train.jsonl", [row])
    assert evaluate_babylm(request, tmp_path / "data", settings).run.path != first.run.path
    assert len(calls) == 2


def test_mistakes_of_finetuning_end_with_their_codes(bertkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny(tiny_model(tiny_tokenizer()), tiny_tokenizer(), tmp_path / "model")
    write_evaluation_data(tmp_path / "evaluation_data")
    for code, told, arguments in [
        (2, "--plan: only fine-tuning is planned; add --finetune TASK", ["--plan"]),
        (2, "--plan and --checkpoints exclude each other", ["--plan", "--checkpoints", "--sample", "fast"]),
        (2, "and --checkpoints exclude each other", ["--finetune", "rte", "--checkpoints", "--sample", "fast"]),
        (2, "did you mean multirc?", ["--finetune", "multirk"]),
        (2, "--finetune needs --sample full", ["--finetune", "rte", "--sample", "fast"]),
        (3, "no folder glue_filtered", ["--finetune", "rte"]),
    ]:
        command = ("eval", "babylm", "--model", "model", "--data-dir", "evaluation_data", "--only", "wug_adj")
        for more in ((), ("--plan",)):
            outcome = bertkit(*command, *arguments, *more)
            assert outcome.code == code, outcome.stderr
            assert told in " ".join(outcome.stderr.split())

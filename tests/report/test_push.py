"""`bertkit push` with the Hub's own client against a small server: downloads equal the uploaded files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from bertkit.cli.app import run as bertkit
from bertkit.models.late_interaction import LateInteraction, write_token_files
from bertkit.models.registry import FAMILIES
from bertkit.models.sentence import AnyPooling
from bertkit.models.sentence_files import write_sentence_files
from bertkit.models.text_reading import TextReading
from bertkit.report.card import model_card
from bertkit.report.gather import ReportedRun
from bertkit.report.push import push as pushed
from bertkit.run.directory import RunDirectory
from tests.hub_server import Hub, serving
from tests.tasks.tiny_task import write_model

sys.path.insert(0, str(Path(__file__).parents[1] / "run"))
from making import finished_run

TOKEN = "hf_test"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run whose recipe names a model and a data set of the Hub, and a local file."""
    made = finished_run(tmp_path / "runs")
    text = "title: Tiny\npaper: Somebody 2020\ninit: org/base@v1\n"
    sources = f"data: {{sources: ['hub:org/text:en:train', {tmp_path}/secret/mine.txt]}}\n"
    (made.path / "recipe.yaml").write_text(made.recipe_yaml + text + sources)
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
    (made.model / "config.json").write_text(json.dumps(config))
    with made.recording():
        made.seal_model()
    return RunDirectory.open(made.path)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(Hub({}, writers=(TOKEN,))) as listening:
        yield listening


def push(hub: Hub, *arguments: str | Path, token: str | None = TOKEN) -> subprocess.CompletedProcess[str]:
    """In a separate process, because the client reads its environment once."""
    environment = {
        **{name: value for name, value in os.environ.items() if name != "HF_TOKEN"},
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        **({} if token is None else {"HF_TOKEN": token}),
    }
    command = [sys.executable, "-m", "bertkit", "push", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def metadata(card: str) -> dict[str, object]:
    return dict(yaml.safe_load(card.split("---")[1]))


def test_a_run_goes_up_in_one_commit_with_its_card(hub: Hub, run: RunDirectory) -> None:
    done = push(hub, run.path, "me/tiny", "--license", "Apache-2.0", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["url"].startswith(f"{hub.url}/me/tiny/commit/")
    there = hub.files["me/tiny"]
    assert there.keys() == {"README.md", "config.json", "model.safetensors"} == document["files"].keys()
    assert there["model.safetensors"] == (run.model / "model.safetensors").read_bytes()
    assert len([path for method, path, _ in hub.log if "/commit/" in path]) == 1
    card = there["README.md"].decode()
    assert metadata(card) == {
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "fill-mask",
        "tags": ["bertkit", "bert"],
        "base_model": "org/base",
        "datasets": ["org/text"],
    }
    assert "secret" not in card
    assert "mine.txt" in card
    assert 'bertkit.load("me/tiny")' in card


def test_for_an_unknown_licence_the_nearest_is_named(run: RunDirectory, caplog: pytest.LogCaptureFixture) -> None:
    pushed(str(run.path), "me/tiny", run=run, license_id="apache2", dry_run=True)
    assert "did you mean apache-2.0?" in caplog.text


def test_an_unknown_licence_is_a_warning_and_refused_by_the_hub_before_any_file(hub: Hub, run: RunDirectory) -> None:
    done = push(hub, run.path, "me/tiny", "--license", "none-such", "--json")
    assert done.returncode == 2, done.stderr
    assert "--license none-such: not a known identifier of the Hub" in done.stderr
    assert "me/tiny: nothing was uploaded: Invalid metadata in README.md" in json.loads(done.stdout)["error"]
    assert hub.files["me/tiny"] == {}


def test_the_card_of_the_repository_stays_unless_a_new_one_is_asked_for(hub: Hub, run: RunDirectory) -> None:
    hub.files["me/tiny"] = {"README.md": b"written by hand"}
    kept = push(hub, run.path, "me/tiny")
    assert kept.returncode == 0
    assert "me/tiny keeps the README.md that it has; --new-card replaces it" in kept.stderr
    assert hub.files["me/tiny"]["README.md"] == b"written by hand"
    assert "model.safetensors" in hub.files["me/tiny"]
    assert push(hub, run.path, "me/tiny", "--new-card", "--revision", "v2").returncode == 0
    assert hub.files["me/tiny"]["README.md"] == b"written by hand"
    assert hub.files["me/tiny@v2"]["README.md"].startswith(b"---")


def test_a_card_in_the_models_directory_does_not_replace_that_of_the_repository_either(
    hub: Hub, run: RunDirectory, tmp_path: Path
) -> None:
    model = tmp_path / "downloaded"
    shutil.copytree(run.model, model)
    (model / "README.md").write_text("of the base model")
    new = push(hub, model, "me/new", "--license", "mit")
    assert new.returncode == 0
    assert "has a README.md, which is uploaded as it is: --license has no effect" in " ".join(new.stderr.split())
    assert hub.files["me/new"]["README.md"] == b"of the base model"
    hub.files["me/tiny"] = {"README.md": b"written by hand"}
    kept = push(hub, model, "me/tiny", "--json")
    assert hub.files["me/tiny"]["README.md"] == b"written by hand"
    assert json.loads(kept.stdout)["files"].keys() == {"config.json", "model.safetensors"}
    assert push(hub, model, "me/tiny", "--new-card").returncode == 0
    assert hub.files["me/tiny"]["README.md"] == b"of the base model"


@pytest.mark.parametrize("token", [None, "hf_another"])
def test_who_may_not_write_is_told_how_to_log_in(hub: Hub, run: RunDirectory, token: str | None) -> None:
    refused = push(hub, run.path, "me/tiny", token=token)
    assert refused.returncode == 3
    assert "hf auth login" in refused.stderr
    assert token is None or token not in refused.stderr
    assert not hub.files


def test_a_model_that_was_altered_is_not_shared(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    (run.model / "model.safetensors").write_bytes(b"other")
    assert bertkit(["push", str(run.path), "me/tiny", "--dry-run"]) == 5
    assert "model.safetensors" in capsys.readouterr().err


def test_folders_of_git_and_of_the_hubs_client_stay_here(hub: Hub, run: RunDirectory, tmp_path: Path) -> None:
    """`hf download --local-dir` leaves .cache/huggingface; the client refuses to upload it."""
    model = tmp_path / "downloaded"
    shutil.copytree(run.model, model)
    for name in (".cache/huggingface/download/config.json.metadata", ".git/config", "onnx/.cache/x"):
        (model / name).parent.mkdir(parents=True)
        (model / name).write_text("x")
    (model / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    done = push(hub, model, "me/again")
    assert done.returncode == 0, done.stderr
    assert set(hub.files["me/again"]) == {"README.md", "config.json", "model.safetensors", ".gitattributes"}


def test_a_dry_run_shows_the_card_and_needs_no_network(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert bertkit(["push", str(run.path), "me/tiny", "--dry-run"]) == 0
    said = capsys.readouterr()
    assert metadata(said.out)["tags"] == ["bertkit", "bert"]
    assert "model.safetensors" in said.err
    assert bertkit(["push", str(run.path), "me/tiny"]) == 2
    assert "--dry-run" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tiny", "/tiny", "a/b/c"])
def test_a_repository_has_an_owner_and_a_name(run: RunDirectory, name: str) -> None:
    assert bertkit(["push", str(run.path), name, "--dry-run"]) == 2


def test_missing_models_end_with_3(tmp_path: Path) -> None:
    assert bertkit(["push", str(tmp_path / "nothing"), "me/tiny", "--dry-run"]) == 3


@pytest.mark.parametrize(
    ("config", "library", "task"),
    [
        ({"model_type": "fast-encoder", "architectures": ["FastEncoderForMaskedLM"]}, "bertkit", "fill-mask"),
        (
            {"model_type": "roberta", "architectures": ["RobertaForSequenceClassification"]},
            "transformers",
            "text-classification",
        ),
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "transformers", "text-generation"),
        (  # the form of a JinaBERT on the Hub
            {
                "model_type": "bert",
                "position_embedding_type": "alibi",
                "architectures": ["JinaBertForSequenceClassification"],
            },
            "bertkit",
            "text-classification",
        ),
    ],
)
def test_the_card_names_library_and_task(tmp_path: Path, config: dict[str, object], library: str, task: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = metadata(model_card(tmp_path, "me/it", None))
    assert (found["library_name"], found["pipeline_tag"]) == (library, task)
    assert "license" not in found


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_card_imports_transformers_only_for_what_it_has(tmp_path: Path, family: str) -> None:
    kind = FAMILIES[family]
    architecture = next(plan.architecture for plan in kind().heads().values() if plan.architecture)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind.model_type, "architectures": [architecture]}))
    card = model_card(tmp_path, "me/it", None)
    assert ("from transformers import" in card) is (kind.model_type in CONFIG_MAPPING_NAMES)
    assert metadata(card)["library_name"] == ("transformers" if kind.model_type in CONFIG_MAPPING_NAMES else "bertkit")
    if "masked_lm" in kind().heads():
        assert metadata(card)["pipeline_tag"] == "fill-mask"


@pytest.mark.parametrize(
    ("architecture", "recipe", "task", "call"),
    [
        ("BertForMaskedLM", {}, "fill-mask", 'model.fill("The <m> returns a list.")'),
        ("BertForSequenceClassification", {"task": "sst2"}, "text-classification", 'model.predict(["A text."])'),
        ("BertForSequenceClassification", {"task": "mrpc"}, "text-classification", 'model.predict([("A text.", "'),
        (
            "BertForSequenceClassification",
            {"task": {"train": "/home/me/mine.csv", "columns": {"text": "a", "text_pair": "b"}}},
            "text-classification",
            'model.predict([("A text.", "',
        ),
        (
            "BertForSequenceClassification",
            {"task": {"train": "hub:org/reviews@main:en:train", "columns": {"text": "a"}}},
            "text-classification",
            'model.predict(["A text."])',
        ),
        ("GPT2LMHeadModel", {}, "text-generation", 'model.generate("'),
        ("T5ForConditionalGeneration", {"objective": [{"seq2seq_lm": {}}]}, "translation", 'model.generate("'),
        ("T5ForConditionalGeneration", {"objective": [{"span_corruption": {}}]}, None, None),
        ("ElectraForPreTraining", {}, None, None),
    ],
)
def test_the_card_calls_the_model_as_its_task_requires(
    run: RunDirectory, architecture: str, recipe: dict[str, object], task: str | None, call: str | None
) -> None:
    written = {"kind": "finetune" if "task" in recipe else "pretrain", "name": "n", "model": "org/base", **recipe}
    (run.path / "recipe.yaml").write_text(yaml.safe_dump({**written, "title": "", "paper": None}))
    (run.path / "results.json").write_text(json.dumps({"splits": {}, "examples": {"train": 4200, "dev": 11}}))
    (run.model / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": [architecture]}))
    (run.model / "tokenizer_config.json").write_text('{"mask_token": "<m>"}')
    card = model_card(run.model, "me/it", ReportedRun.of(run))
    assert metadata(card).get("pipeline_tag") == task
    assert (f'bertkit.load("me/it")\n{call}' if call else 'bertkit.load("me/it")\n```') in card
    assert "| examples | train 4,200, dev 11 |" in card
    assert "title:" not in card
    assert "paper:" not in card
    if isinstance(own := recipe.get("task"), dict):
        on_hub = own["train"].startswith("hub:")
        assert f"fine-tuned on {'org/reviews' if on_hub else 'mine.csv'}." in card
        assert metadata(card).get("datasets") == (["org/reviews"] if on_hub else None)


def test_text_of_a_run_stays_text_in_the_card(run: RunDirectory) -> None:
    (run.path / "results.json").write_text(json.dumps({"a|b<img>": 1.0}))
    card = model_card(run.model, "me/it", ReportedRun.of(run))
    assert "a\\|b\\<img\\>" in card


def test_the_card_of_a_suite_has_its_scores_and_the_recipe_of_the_chosen_run(run: RunDirectory) -> None:
    inner = run.path / "runs" / "lr=3e-5"
    shutil.copytree(run.path, inner, ignore=shutil.ignore_patterns("runs", "*.lock"))
    own = "kind: finetune\nname: inner\ntask: mrpc\nmodel: org/base\noptimisation: {epochs: 2}\nengine: {device: cpu}\n"
    (inner / "recipe.yaml").write_text(own)
    results = {
        "tasks": {"mrpc": {"f1": {"mean": 0.87, "std": 0.02}}},
        "chosen": {"run": "/elsewhere/suite/runs/lr=3e-5", "seed": 3},
        "truncation": {"train": {"examples": 4242}},
        "runs": [],
    }
    (run.path / "results.json").write_text(json.dumps(results))
    labels = {"id2label": {"0": "not_equivalent", "1": "a|b"}, "architectures": ["BertForSequenceClassification"]}
    (run.model / "config.json").write_text(json.dumps({"model_type": "bert", **labels}))
    with run.recording():
        run.seal_model()
    card = pushed(str(run.path), "me/it", run=run, dry_run=True).card
    assert card is not None
    assert "[org/base](https://huggingface.co/org/base) fine-tuned on mrpc." in card
    assert metadata(card)["base_model"] == "org/base"
    assert metadata(card)["metrics"] == ["f1"]
    assert "| mrpc f1 | 0.87 ± 0.02 |" in card
    assert "epochs: 2" in card
    assert r"Labels: not\_equivalent, a\|b." in card
    assert "4242" not in card
    assert "engine:" not in card


def test_the_card_has_the_labels_in_order_and_the_temperature(tmp_path: Path) -> None:
    names = {str(number): f"kind {number}" for number in range(12)}
    config = {"id2label": names, "temperature": 0.5, "architectures": ["BertForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", **config}, sort_keys=True))
    card = model_card(tmp_path, "me/mine", None)
    assert f"Labels: {', '.join(names.values())}.\n" in card
    assert "`softmax(logits / temperature)` gives calibrated probabilities." in card


def test_a_model_without_weights_is_not_shared(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    for path in run.model.glob("*.safetensors"):
        path.unlink()
    copy = run.path.parent / "without-weights"
    run.model.rename(copy)
    assert bertkit(["push", str(copy), "me/x", "--dry-run"]) == 3
    assert "no weights here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pooling", "name", "task"),
    [("mean", "SentenceTransformer", "sentence-similarity"), ("splade", "SparseEncoder", "feature-extraction")],
)
def test_the_card_of_an_embedder_names_the_class_that_loads_it(
    tmp_path: Path, pooling: AnyPooling, name: str, task: str
) -> None:
    model = write_model(tmp_path / "model", heads=("masked_lm",))
    write_sentence_files(model, width=30, pooling=(pooling,), normalise=False, max_tokens=24)
    card = model_card(model, "me/mine", None)
    assert f"pipeline_tag: {task}" in card
    assert f'from sentence_transformers import {name}\n\nmodel = {name}("me/mine")' in card
    assert "model.encode(" in card


def test_the_card_of_a_model_with_token_vectors_scores_texts(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    write_token_files(model, torch.zeros(8, 30), LateInteraction(), max_tokens=24, reading=TextReading())
    card = model_card(model, "me/mine", None)
    assert 'from sentence_transformers import MultiVectorEncoder\n\nmodel = MultiVectorEncoder("me/mine")' in card
    assert "model.late_scores(" in card

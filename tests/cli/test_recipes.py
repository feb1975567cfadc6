"""`bertkit recipes` lists the shipped recipes and shows a recipe in full, in the forms fixed by the contract."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bertkit.recipe import find, resolve

TINY = """\
title: A tiny BERT
paper: Devlin et al. 2019
arxiv: '1810.04805'
model: {family: bert, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 64}
objective: [masked_lm: {rate: 1.5e-1}]
optimisation: {}
"""


@pytest.fixture(autouse=True)
def _shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shipped recipes, one of which extends the other, and an empty working directory."""
    directory = tmp_path / "shipped"
    directory.mkdir()
    (directory / "tiny.yaml").write_text(TINY)
    (directory / "tiny-long.yaml").write_text(
        "extends: tiny\ntitle: Longer\ndata: {sequence_length: 1_024}\nmodel: {max_position_embeddings: 1_024}\n"
    )
    monkeypatch.setattr(find, "shipped_directory", lambda: directory)
    monkeypatch.setattr(resolve, "shipped_directory", lambda: directory)
    monkeypatch.chdir(tmp_path)


def test_list_names_each_recipe_with_what_it_inherits(bertkit) -> None:
    outcome = bertkit("recipes", "list", "--json")
    assert outcome.code == 0
    assert json.loads(outcome.stdout) == [
        {
            "name": "tiny",
            "kind": "pretrain",
            "title": "A tiny BERT",
            "paper": "Devlin et al. 2019",
            "arxiv": "1810.04805",
        },
        {
            "name": "tiny-long",
            "kind": "pretrain",
            "title": "Longer",
            "paper": "Devlin et al. 2019",
            "arxiv": "1810.04805",
        },
    ]


def test_list_for_people_begins_each_line_with_the_name(bertkit) -> None:
    lines = bertkit("recipes", "list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["tiny", "tiny-long"]


def test_show_prints_a_recipe_that_loads_to_itself(bertkit) -> None:
    shown = bertkit("recipes", "show", "tiny-long", "--set", "objective.masked_lm.rate=0.2")
    assert shown.code == 0
    Path("again.yaml").write_text(shown.stdout)
    assert bertkit("recipes", "show", "again.yaml").stdout == shown.stdout
    document = json.loads(bertkit("recipes", "show", "again.yaml", "--json").stdout)
    assert document["name"] == "tiny-long"
    assert document["data"]["sequence_length"] == 1024
    assert document["objective"][0]["masked_lm"]["rate"] == 0.2


def test_show_reports_all_faults_at_once_with_2(bertkit) -> None:
    Path("mine.yaml").write_text("extends: tiny\nmodel: {hiden_size: 3}\nsed: 1\n")
    outcome = bertkit("recipes", "show", "mine.yaml")
    assert outcome.code == 2
    assert outcome.stdout == ""
    assert "mine.yaml:2: model.hiden_size: unknown key; did you mean hidden_size?" in outcome.stderr
    assert "mine.yaml:3: sed: unknown key; did you mean seed?" in outcome.stderr


def test_show_of_an_unknown_recipe_gives_the_nearest(bertkit) -> None:
    outcome = bertkit("recipes", "show", "tinyy")
    assert outcome.code == 2
    assert "did you mean 'tiny'?" in outcome.stderr


def test_a_recipe_that_fine_tunes_is_shown_with_its_tasks_settings_and_its_faults_are_told(bertkit) -> None:
    Path("mine.yaml").write_text("kind: finetune\ntask: mrpc\nmodel: org/name\noptimisation: {epochs: 4}\n")
    shown = bertkit("recipes", "show", "mine.yaml", "--set", "seed=3", "--json")
    assert shown.code == 0, shown.stderr
    document = json.loads(shown.stdout)
    assert (document["kind"], document["task"], document["seed"]) == ("finetune", "mrpc", 3)
    assert (document["optimisation"]["epochs"], document["optimisation"]["batch_sequences"]) == (4, 32)
    Path("open.yaml").write_text("kind: finetune\ntask: mrpc\n")
    assert bertkit("recipes", "show", "open.yaml").code == 0
    Path("wrong.yaml").write_text("kind: finetune\ntask: mrcp\noptimisation: {epoch: 4}\n")
    outcome = bertkit("recipes", "show", "wrong.yaml")
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "optimisation.epoch: unknown key; did you mean epochs?" in outcome.stderr

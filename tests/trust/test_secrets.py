"""A run records only listed variables of its environment, in files that only their owner can read."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bertkit.files import without_credentials
from bertkit.run.directory import RunDirectory
from bertkit.run.environment import VARIABLES
from tests.run.making import identity


@pytest.fixture
def open_umask() -> Iterator[None]:
    """New files can be read by everybody unless a program restricts them."""
    before = os.umask(0o022)
    yield
    os.umask(before)


SECRETS = ("HF_BEARER", "HF_KEY", "NCCL_PASS", "CUDA_PW", "BERTKIT_X", "HF_TOKEN", "HF_HUB_HTTP_HEADERS", "OMP_PHRASE")


def test_only_variables_that_are_listed_by_name_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SECRETS, "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, f"value-of-{name}")
    run = RunDirectory.create(tmp_path, identity())
    with run.recording():
        run.write_environment()
    text = (run.path / "environment.json").read_text()
    assert [name for name in SECRETS if name in text] == []
    variables = json.loads(text)["variables"]
    assert variables["OMP_NUM_THREADS"] == "value-of-OMP_NUM_THREADS"
    assert variables.keys() <= VARIABLES


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:word@hub.example/x", "https://hub.example/x"),
        ("--set=a=https://word@hub.example", "--set=a=https://hub.example"),
        ("s3://id:wo@rd@bucket/a@b", "s3://bucket/a@b"),
        ("https://hub.example/a@b", "https://hub.example/a@b"),
        ("mail me@example.org", "mail me@example.org"),
    ],
)
def test_urls_lose_user_and_password_and_nothing_else(text: str, shown: str) -> None:
    assert without_credentials(text) == shown


def test_no_file_of_a_run_holds_credentials_of_a_url(tmp_path: Path) -> None:
    url = "https://me:word@hub.example/data"
    named = replace(identity(), recipe_yaml=f"name: a\ntitle: {url}\n", command=["bertkit", "--set", f"a={url}"])
    run = RunDirectory.create(tmp_path, named)
    with run.recording(["bertkit", "--resume", url]):
        pass
    files = {path.name: path.read_text() for path in run.path.iterdir()}
    assert [name for name, text in files.items() if "word" in text] == []
    assert "https://hub.example/data" in files["recipe.yaml"]
    assert files["run.json"].count("https://hub.example/data") == 2


@pytest.mark.usefixtures("open_umask")
def test_what_may_be_private_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, identity())
    with run.recording():
        run.write_environment()
    for name in ("run.json", "recipe.yaml", "environment.json", "log.txt"):
        if (run.path / name).exists():
            assert stat.S_IMODE((run.path / name).stat().st_mode) == 0o600, name
    run.recipe_yaml.encode()

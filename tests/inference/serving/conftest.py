"""Models for every task, trained once."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.run import finetune
from bertkit.inference.serving.served import ServedModel
from bertkit.progress import silent_progress
from tests.inference.serving.clients import served
from tests.overrides import parsed
from tests.tasks.tiny_kinds import write_kind
from tests.tasks.tiny_task import write_model

SETTINGS = {
    "tagging": ["lr=6e-3", "batch=7", "optimisation.epochs=14"],
    "span": ["span.max_query_tokens=8", "data.max_length=32", "optimisation.steps=1"],
}


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model directories: `base` with a masked-LM head, and a run of each kind of task."""
    root = tmp_path_factory.mktemp("served")
    found = {"base": write_model(root / "base")}
    for kind in ("classification", "pair", "tagging", "span", "choice", "regression", "relevance"):
        (root / kind).mkdir()
        task, _ = write_kind(root / kind, kind)
        settings = parsed([*SETTINGS.get(kind, ["optimisation.steps=2"]), "engine.device=cpu"])
        arguments = FinetuneArguments(
            task=task, model=str(found["base"]), run_dir=root / kind / "run", overrides=settings
        )
        found[kind] = finetune(arguments, progress=silent_progress).run.path
    return found


@pytest.fixture(scope="session")
def models(directories: dict[str, Path]) -> dict[str, ServedModel]:
    """The same models, served by their keys."""
    return {name: served(name, directory) for name, directory in directories.items()}

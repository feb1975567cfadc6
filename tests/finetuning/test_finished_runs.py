"""Which finished runs a suite uses instead of training again."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertkit.finetuning.recipe import load_finetune_recipe
from bertkit.finetuning.run import finished_run


def test_a_damaged_run_next_to_a_suite_is_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text("{")
    recipe = load_finetune_recipe("conll2003-features")
    assert finished_run(tmp_path, tmp_path / "suite", recipe, lambda: ()) is None
    assert f"{tmp_path / 'other' / 'run.json'}, column 2: not valid JSON" in caplog.text

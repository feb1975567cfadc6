"""Where the files of a model are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bertkit.errors import DataError
from bertkit.models.files.model_files import encoder_directory


@pytest.mark.parametrize(("kind", "file"), [("Transformer", "config.json"), ("StaticEmbedding", "tokenizer.json")])
def test_the_encoder_is_in_the_directory_that_modules_json_names(tmp_path: Path, kind: str, file: str) -> None:
    for name in ("0_Transformer", "0_StaticEmbedding", "encoder"):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    listed = [
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 0, "name": "0", "path": "encoder", "type": f"sentence_transformers.models.{kind}"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    assert encoder_directory(tmp_path) == tmp_path / "encoder"
    (tmp_path / "modules.json").write_text(json.dumps([listed[1] | {"path": "../elsewhere"}]))
    with pytest.raises(DataError, match="leads out of"):
        encoder_directory(tmp_path)
    (tmp_path / "modules.json").write_text("[]")
    assert encoder_directory(tmp_path) == tmp_path

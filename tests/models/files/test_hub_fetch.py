"""The Hub's own client against a small local server: fresh, cached, interrupted, offline, refused, damaged."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.hub_server import COMMIT, Hub, serving

from bertkit.models.families.bert import BertConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel

CHUNK = 10 * 1024 * 1024
"""Size of the client's writes to disk: a later interrupted connection continues from there."""


def fetch(hub_url: str, cache: Path, *arguments: str) -> list[dict[str, Any]]:
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub_url,
        "HF_HOME": str(cache),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_XET": "1",
    }
    environment.pop("HF_TOKEN", None)
    script = Path(__file__).with_name("fetch_model.py")
    done = subprocess.run(
        [sys.executable, script, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


@pytest.fixture(scope="module")
def hub_and_answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Hub, dict[str, dict[str, Any]], float]:
    """A Hub with good and bad models, the models fetched by a process, and the sum of the good one's weights."""
    root = tmp_path_factory.mktemp("hub")
    model = HeadedModel(
        BertConfig(hidden_size=120, num_hidden_layers=1, num_attention_heads=3, intermediate_size=99).build(22_000),
        ("masked_lm",),
    )
    model.initialise(seed=2)
    save_model(model, None, root / "model")
    files = {path.name: path.read_bytes() for path in (root / "model").iterdir()}
    weights = files["model.safetensors"]
    assert len(weights) > CHUNK
    torch.save(load_file(root / "model" / "model.safetensors"), root / "pytorch_model.bin")
    pickled = {"config.json": files["config.json"], "pytorch_model.bin": (root / "pytorch_model.bin").read_bytes()}
    extra = {"onnx/model.onnx": b"x", "tf_model.h5": b"x", "pytorch_model.bin": b"x"}
    hub = Hub(
        {
            "org/good": {**files, **extra},
            "org/pickled": pickled,
            "org/adapter": {**pickled, "adapter_model.safetensors": b"x"},
            "org/dense": {
                **files,
                **dict.fromkeys(("modules.json", "1_Pooling/config.json", "2_Dense/config.json"), b"{}"),
                **dict.fromkeys(("pytorch_model.bin", "2_Dense/pytorch_model.bin"), pickled["pytorch_model.bin"]),
            },
            "org/damaged": {
                **files,
                "model.safetensors": bytes(255 - byte for byte in files["model.safetensors"][:99]),
            },
            "org/empty": {"README.md": b"x"},
            "org/m3": {**files, "sparse_linear.pt": b"x"},
        },
        revisions=("main", "v1"),
        gated=("org/gated",),
        private=("org/private",),
        cut_after={"model.safetensors": CHUNK + 1000},
    )
    names = ["org/good", "org/good@v1", "org/good@v9", "org/pickled", "org/damaged", "org/empty"]
    names += ["org/adapter", "org/dense", "org/m3/sparse_linear.pt", "org/m3/colbert_linear.pt", "org/m3/separation"]
    names += ["org/gated", "org/private", "org/missing"]
    with serving(hub):
        answers = dict(zip(names, fetch(hub.url, root / "cache", *names), strict=True))
    # The server is gone: no process listens at its address.
    offline = fetch(hub.url, root / "cache", "org/good", "org/pickled", "org/gated", "--offline")
    answers |= {f"offline {name}": answer for name, answer in zip(("good", "pickled", "gated"), offline, strict=True)}
    unreachable = fetch(hub.url, root / "cache", "org/good@v1", "org/gated")
    answers |= {f"unreachable {name}": answer for name, answer in zip(("good", "gated"), unreachable, strict=True)}
    total = sum(float(parameter.detach().double().sum()) for parameter in load_model(root / "model")[0].parameters())
    return hub, answers, total


Fetched = tuple[Hub, dict[str, dict[str, Any]], float]


@pytest.mark.parametrize(
    "name",
    [
        *("org/good", "org/good@v1", "org/pickled", "org/adapter", "org/dense"),
        *("offline good", "offline pickled", "unreachable good"),
    ],
)
def test_fetched_weights_are_the_hubs(hub_and_answers: Fetched, name: str) -> None:
    """Fresh, at a revision, as a pickle of tensors; then from the cache, online and with the server gone."""
    _, answers, total = hub_and_answers
    assert answers[name]["sum"] == pytest.approx(total, rel=1e-12)


def test_a_module_whose_weights_are_only_pickled_is_fetched_as_well(hub_and_answers: Fetched) -> None:
    _, answers, _ = hub_and_answers
    directory = Path(answers["org/dense"]["directory"])
    assert (directory / "2_Dense" / "pytorch_model.bin").is_file()
    assert not (directory / "pytorch_model.bin").exists()


def test_a_fetch_that_was_cut_off_goes_on_where_it_stopped(hub_and_answers: Fetched) -> None:
    hub, _, _ = hub_and_answers
    first, second, *_ = hub.downloads("model.safetensors")
    assert first is None
    assert second is not None
    assert second.startswith(f"bytes={CHUNK}-")


def test_nothing_is_fetched_twice_or_in_vain(hub_and_answers: Fetched) -> None:
    """Both revisions are one commit; other frameworks' weights and duplicate formats are not downloaded."""
    hub, answers, _ = hub_and_answers
    gets = [path for method, path, _ in hub.log if method == "GET" and path.startswith("/org/good/resolve/")]
    assert sorted(path.rpartition("/")[2] for path in gets) == ["config.json", "model.safetensors", "model.safetensors"]
    assert answers["org/good"]["directory"] == answers["org/good@v1"]["directory"]
    assert answers["org/good"]["directory"].endswith(COMMIT)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/good@v9", "org/good@v9: .*this model on the Hub has no branch, tag or commit with this name"),
        ("org/gated", "org/gated: .*access to this model on the Hub requires accepting its terms"),
        ("org/private", "org/private: no directory of this name, and the Hub has no model with this name; .*HF_TOKEN"),
        ("org/missing", "org/missing: .*the Hub has no model with this name"),
        ("org/empty", "org/empty: the Hub's model has no config.json"),
        ("org/damaged", "model.safetensors: cannot be read as safetensors: .* delete .*blobs/.* and fetch"),
        ("offline gated", "org/gated: .*not in the local Hub cache .*go online once"),
        ("unreachable gated", "org/gated: .*not in the local Hub cache while the Hub cannot be reached"),
    ],
)
def test_what_cannot_be_had_is_said(hub_and_answers: Fetched, name: str, message: str) -> None:
    _, answers, _ = hub_and_answers
    assert re.search(message, answers[name]["error"], re.DOTALL), answers[name]


def test_a_part_of_a_model_may_follow_its_name(
    hub_and_answers: Fetched,
) -> None:
    _, answers, total = hub_and_answers
    found = answers["org/m3/sparse_linear.pt"]
    assert found["sum"] == pytest.approx(total)
    assert Path(found["directory"]).name == "sparse_linear.pt"
    assert "org/m3 has no colbert_linear.pt" in answers["org/m3/colbert_linear.pt"]["error"]
    assert "no updates for the task separation; it has none" in answers["org/m3/separation"]["error"]

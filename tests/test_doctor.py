"""`bertkit doctor`: working parts are listed, failures are named with a remedy and an exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bertkit import doctor
from bertkit.native import CompilerError

Bertkit = Callable[..., Any]
NAMES = ["installation", "processor", "other processes", "memory", "GPU", "compiled kernels", "cache", "runs", "Hub"]


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_trained", lambda directory, name, **limits: "the same")


def found(bertkit: Bertkit, name: str, *, code: int) -> dict[str, str]:
    done = bertkit("doctor", "--offline", "--json")
    assert done.code == code, done.stderr
    document = json.loads(done.stdout)
    assert document["ok"] == (code == 0)
    (check,) = (each for each in document["checks"] if each["name"] == name)
    assert not check["remedy"] or check["remedy"] in done.stderr
    return check


def test_everything_is_looked_at_and_a_stopped_training_ends_alike(bertkit: Bertkit, tmp_path: Path) -> None:
    done = bertkit("doctor", "--offline")
    assert done.code == 0, done.stderr
    lines = dict(line[8:].split(": ", 1) for line in done.stdout.splitlines())
    assert list(lines) == [*NAMES, "training"]
    assert lines["training"].endswith("bit-identical weights")
    assert lines["Hub"].startswith("offline")


@pytest.mark.usefixtures("no_training")
def test_a_place_that_cannot_be_written_is_a_fault(
    bertkit: Bertkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BERTKIT_CACHE", str(tmp_path / "file" / "cache"))
    check = found(bertkit, "cache", code=5)
    assert check["verdict"] == "fault"
    assert "BERTKIT_CACHE" in check["remedy"]


@pytest.mark.parametrize("fault", [None, "Failed to find C compiler"])
def test_a_gpu_is_named_with_what_its_attention_lacks(monkeypatch: pytest.MonkeyPatch, fault: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch, "ones", lambda size, device: torch.zeros(size))
    monkeypatch.setattr(doctor, "_triton_fault", lambda: fault)
    diagnosis = doctor._gpu()
    assert diagnosis.found.startswith("GPU 0, GPU 1")
    assert diagnosis.verdict == ("ok" if fault is None else "warning")
    assert (fault or "GPU 1") in diagnosis.found
    assert ("C compiler" in diagnosis.remedy) is (fault is not None)


@pytest.mark.usefixtures("no_training")
def test_a_missing_package_is_a_fault(bertkit: Bertkit, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0", "safetensors": None}
    monkeypatch.setattr("bertkit.run.environment.dependency_versions", lambda: versions)
    assert found(bertkit, "installation", code=5)["found"].endswith("missing: safetensors")


@pytest.mark.usefixtures("no_training")
@pytest.mark.parametrize(("bf16", "verdict"), [(True, "warning"), (False, "ok")])
def test_no_compiler_is_a_warning_where_it_costs_speed(
    bertkit: Bertkit, monkeypatch: pytest.MonkeyPatch, bf16: bool, verdict: str
) -> None:
    def build() -> Path:
        raise CompilerError("no C++ compiler was found")

    monkeypatch.setattr("bertkit.kernels.loading.build", build)
    monkeypatch.setattr("bertkit.training.engine.multiplies_bf16", lambda device: bf16)
    check = found(bertkit, "compiled kernels", code=0)
    assert check["verdict"] == verdict
    assert "no C++ compiler was found" in check["found"]


def test_the_memory_of_a_container_is_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "memory_limit", lambda: 1_500_000_000)
    check = doctor._memory()
    assert check.found.endswith("of which this container or control group may use 1.5 GB in all")
    assert check.verdict == "warning"


@pytest.mark.usefixtures("no_training")
def test_a_package_that_cannot_be_imported_is_to_be_installed_again(
    bertkit: Bertkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> float:
        raise ModuleNotFoundError("No module named 'x'", name="x")

    monkeypatch.setattr("psutil.virtual_memory", fails)
    assert "pip install --force-reinstall" in found(bertkit, "memory", code=5)["remedy"]


def test_other_weights_after_a_stop_are_a_fault(bertkit: Bertkit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_trained", lambda directory, name, **limits: name)
    assert found(bertkit, "training", code=5)["found"].endswith("different weights")


@pytest.mark.usefixtures("no_training")
def test_a_check_that_fails_is_a_fault_and_the_others_go_on(bertkit: Bertkit, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> float:
        raise OSError("no such counter")

    monkeypatch.setattr("psutil.virtual_memory", fails)
    assert found(bertkit, "memory", code=5)["found"] == "no such counter"


def test_a_hub_out_of_reach_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertkit.hub.is_offline", lambda offline: False)
    check = doctor._hub(offline=False)
    assert check.verdict == "warning", "tests run with HF_HUB_OFFLINE, which the client obeys"
    assert "HF_HUB_OFFLINE=1" in check.remedy

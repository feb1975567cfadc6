"""`bertkit bench`: the document, agreement of the sides, what is left out, bad input; no test depends on timing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertkit.bench.comparison import compare, ratio_of
from bertkit.bench.embed import least_cosine
from bertkit.bench.machine import MachineRates
from bertkit.bench.operators import OTHER, REST, kind_of, time_by_kind
from bertkit.bench.pretrain import IGNORED, padded, samples_of
from bertkit.bench.settings import Benchmark, BenchSettings
from bertkit.bench.startup import ended, shares_by_package
from bertkit.bench.workload import OWN, Peers, Workload, peer_library
from bertkit.errors import DataError
from bertkit.evaluation.speed.stopwatch import Timing
from bertkit.kernels.loading import active, build
from bertkit.native import CompilerError
from bertkit.progress import silent_progress
from bertkit.training.config import EngineConfig
from bertkit.training.engine import resolve_engine
from tests.training.tiny_run import write_text

CPU = torch.device("cpu")
PEERS = {
    "pretrain": "transformers",
    "finetune": "transformers",
    "embed": "sentence-transformers",
    "generate": "transformers.generate",
    "tokenize": "datasets.map + group_texts",
}
"""The peer of each benchmark."""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "my.txt", documents=40)


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short stand-in for measuring the machine."""
    monkeypatch.setattr("bertkit.bench.machine.COPY_FLOATS", 1000)
    monkeypatch.setattr(
        "bertkit.bench.machine.product_rates", lambda device, bf16: [2e9 if bf16 else 1e9, 4e9 if bf16 else 2e9]
    )


def options(text: Path) -> list[str]:
    sizes = ["--rounds", "1", "--size", "tiny", "--length", "24", "--vocab-size", "200", "--texts", "7"]
    sizes += ["--prompts", "3", "--new-tokens", "5", "--megabytes", "0.005", "--processes", "1"]
    return [*sizes, "--data", str(text), "--json"]


def without(names: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes these libraries appear as not installed."""

    def imported(name: str) -> Any:
        if name in names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return peer_library(name)

    for module in ("pretrain", "finetune", "embed", "generate", "tokenize"):
        monkeypatch.setattr(f"bertkit.bench.{module}.peer_library", imported)


@pytest.mark.usefixtures("small_machine")
def test_each_work_is_measured_beside_its_peer(bertkit: Callable[..., Any], text: Path) -> None:
    outcome = bertkit("bench", *PEERS, *options(text))
    assert outcome.code == 0
    document = json.loads(outcome.stdout)
    assert list(document["benchmarks"]) == list(PEERS)
    check_page(document)
    for name, peer in PEERS.items():
        found = document["benchmarks"][name]
        assert list(found["sides"]) == [OWN, peer]
        ratio = found["ratios"][peer]
        assert ratio["lowest"] <= ratio["ratio"] <= ratio["highest"]
        assert found["left_out"] == {}
        if name == "tokenize":
            assert "mfu" not in found
            continue
        assert sum(found["time"].values()) == pytest.approx(1)
        # Counts do not depend on the clock.
        assert found["mfu"] == pytest.approx(found["gflops"] / known(document, found))
    assert document["benchmarks"]["finetune"]["amount"] == 32, "--texts is the number of `embed`"
    assert document["benchmarks"]["generate"]["about"]["equal_outputs"] == 3
    assert document["benchmarks"]["embed"]["about"]["least_cosine"] > 0.99


@pytest.mark.usefixtures("small_machine")
def test_text_is_written_in_bf16_where_that_is_asked_for(bertkit: Callable[..., Any], text: Path) -> None:
    outcome = bertkit("bench", "generate", "--precision", "bf16", *options(text))
    assert outcome.code == 0
    found = json.loads(outcome.stdout)["benchmarks"]["generate"]
    assert list(found["sides"]) == [OWN, "transformers.generate", "transformers.generate, bf16"]
    assert found["about"]["precision"] == "bf16"


@pytest.mark.usefixtures("small_machine")
def test_only_training_uses_the_kernels_of_training(
    bertkit: Callable[..., Any], text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        build()
    except CompilerError as error:
        pytest.skip(str(error))
    uses: dict[str, bool] = {}

    def compared(name: str, *others: Any) -> dict[str, Any]:
        uses[name] = active(torch.zeros(1, dtype=torch.bfloat16)) is not None
        return compare(name, *others)

    monkeypatch.setattr("bertkit.bench.run.compare", compared)
    names = ("pretrain", "embed", "generate")
    assert bertkit("bench", *names, "--precision", "bf16", "--no-peers", *options(text)).code == 0
    assert uses == {"pretrain": True, "embed": False, "generate": False}


def check_page(document: dict[str, Any]) -> None:
    """docs/performance.md lists the keys of the document."""
    page = Path(__file__).parents[2] / "docs" / "performance.md"
    shown = json.loads(page.read_text(encoding="utf-8").partition("```json\n")[2].partition("```")[0])
    for part in (lambda each: each, lambda each: each["machine"], lambda each: each["benchmarks"]["pretrain"]):
        assert list(part(document)) == list(part(shown))
    found, example = document["benchmarks"]["pretrain"], shown["benchmarks"]["pretrain"]
    assert list(found["about"]) == list(example["about"])
    assert list(found["limit"]) == list(example["limit"])
    assert list(found["sides"][OWN]) == list(example["sides"][OWN])
    assert list(found["ratios"]["transformers"]) == list(example["ratios"]["transformers"])


def known(document: dict[str, Any], found: dict[str, Any]) -> float:
    rate: float = document["machine"]["product_gflops"][found["about"]["precision"]]["best_known"]
    return rate


@pytest.mark.usefixtures("small_machine")
def test_without_peers_the_own_figures_are_given(
    bertkit: Callable[..., Any], text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without({"transformers", "sentence_transformers"}, monkeypatch)
    outcome = bertkit("bench", *PEERS, *options(text))
    assert outcome.code == 0
    for name, peer in PEERS.items():
        found = json.loads(outcome.stdout)["benchmarks"][name]
        assert (list(found["sides"]), found["ratios"]) == ([OWN], {})
        missing = "sentence-transformers" if name == "embed" else "transformers"
        reason = f"{missing} is not installed; `pip install {missing}` adds it to the comparison"
        assert found["left_out"] == {peer: reason}
        assert f"{peer} is left out: {reason}" in outcome.stderr


@pytest.mark.usefixtures("small_machine")
def test_startup_times_processes_and_no_peers_means_none(bertkit: Callable[..., Any]) -> None:
    outcome = bertkit("bench", "startup", "--rounds", "1", "--no-peers")
    assert outcome.code == 0
    (line,) = outcome.stdout.splitlines()
    assert line.startswith("startup: bertkit --help ")
    assert "import torch is left out: skipped (--no-peers)" in outcome.stderr
    assert "other imports" in outcome.stderr  # which packages take longest depends on the machine's load


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["startup", "--rounds", "0"], 2, "--rounds"),
        (["sleep"], 2, "pretrain"),
        (["embed", "--model", "nobody/nothing", "--offline"], 3, "nobody/nothing"),
        (["pretrain", "--data", "missing.txt"], 3, "missing.txt"),
        (["pretrain", "--data", "s3://bucket/text.txt", "--offline"], 3, "--offline forbids"),
        (["pretrain", "--size", "huge"], 2, "--size"),
        (["pretrain", "--length", "4"], 2, "--length"),
    ],
)
@pytest.mark.usefixtures("small_machine")
def test_bad_input(bertkit: Callable[..., Any], words: list[str], code: int, message: str) -> None:
    outcome = bertkit("bench", *words, "--json")
    assert outcome.code == code
    assert message in json.loads(outcome.stdout)["error"]


@pytest.mark.parametrize("faulty", [["--model", "./nowhere"], ["--data", "nowhere.txt"]])
def test_what_is_missing_is_found_before_anything_is_measured(
    bertkit: Callable[..., Any], faulty: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(machine: MachineRates) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(MachineRates, "measure", measured)
    outcome = bertkit("bench", "startup", "embed", *faulty)
    assert outcome.code == 3
    assert "nowhere" in outcome.stderr


def test_a_text_without_sentences_is_a_fault_of_the_data(bertkit: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short\n")
    outcome = bertkit("bench", "embed", "--data", tmp_path / "short.txt", "--size", "tiny")
    assert outcome.code == 3
    assert "short.txt" in outcome.stderr


def test_both_sides_of_pretraining_read_the_same_tokens_and_targets(text: Path) -> None:
    settings = BenchSettings(data=[str(text)], vocab_size=200, length=24)
    (samples, other, *_), _ = samples_of(settings, sequences=5)
    assert not np.array_equal(samples.ids_T, other.ids_T)
    rows = padded(samples, 24)
    assert rows["input_ids"][rows["attention_mask"].bool()].tolist() == samples.ids_T.tolist()
    targets = [each.targets["masked_lm"].id_M for each in samples.split(1)]
    assert rows["labels"][rows["labels"] != IGNORED].tolist() == np.concatenate(targets).tolist()
    assert rows["attention_mask"].sum(1).tolist() == samples.lengths_B.tolist()


def test_the_ratio_is_that_of_the_medians_and_its_spread_that_of_the_rounds() -> None:
    own, other = Timing((1.0, 2.0, 4.0)), Timing((4.0, 4.0, 10.0))
    assert ratio_of(own, other) == {"ratio": 2.0, "lowest": 2.0, "highest": 4.0}


def test_a_peer_that_fails_is_left_out_with_its_reason() -> None:
    def refuses() -> Any:
        raise ValueError("no such backend\nand more")

    peers = Peers(wanted=True)
    peers.add("broken", refuses)
    peers.add("fails later", lambda: refuses)
    peers.add("fine", lambda: lambda: None)
    assert peers.left_out == dict.fromkeys(("broken", "fails later"), "ValueError: no such backend")
    assert list(peers.sides) == ["fine"]


@pytest.mark.usefixtures("small_machine")
def test_the_limit_is_the_time_of_products_and_of_the_updates_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = MachineRates(CPU)
    machine.measure()
    machine.copies = [5e8, 1e9]
    engine = resolve_engine(EngineConfig(device="cpu", precision="fp32"))
    monkeypatch.setattr(machine, "best_product", lambda *, bf16: 2e9)
    work = Workload({}, "things", 3, {OWN: lambda: None}, flops=4e9, memory_bytes=1e9, parts=dict)
    monkeypatch.setattr(
        "bertkit.bench.comparison.time_in_rounds", lambda works, rounds, after_round: [Timing((6.0,) * rounds)]
    )
    found = compare("x", work, 3, engine, machine, silent_progress)
    assert found["sides"][OWN]["per_s"] == 0.5
    assert found["mfu"] == pytest.approx(1 / 3)
    assert found["limit"] == {"products_seconds": 2.0, "memory_seconds": 1.0, "share_reached": 0.5}


@pytest.mark.usefixtures("small_machine")
def test_a_machine_that_was_faster_before_is_busy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BERTKIT_CACHE", str(tmp_path))
    monkeypatch.setattr("bertkit.bench.machine.multiplies_bf16", lambda device: False)
    machine = MachineRates(CPU)
    machine.products = {"fp32": [1e9, 2e9, 2e9]}
    for best, busy in ((2e9, False), (4e9, True)):
        monkeypatch.setattr(machine, "best_product", lambda *, bf16, best=best: best)
        assert machine.is_busy is busy


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("aten::addmm", "matrix products"),
        ("aten::linear", "matrix products"),
        ("onednn::qlinear_pointwise", "matrix products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::_fused_adamw_", "optimiser"),
        ("aten::native_layer_norm_backward", "norms"),
        ("aten::gelu_backward", "activations"),
        ("aten::_log_softmax", "softmax and losses"),
        ("aten::random_", "random numbers"),
        ("aten::index_select", "look-ups"),
        ("aten::copy_", "copies and casts"),
        ("aten::mul", OTHER),
    ],
)
def test_operators_have_a_kind(operator: str, kind: str) -> None:
    assert kind_of(operator) == kind


def test_the_time_of_a_call_is_divided_among_kinds_of_operators() -> None:
    left = torch.ones(64, 64)
    shares = time_by_kind(lambda: left @ left, CPU)
    assert sum(shares.values()) == pytest.approx(1)
    assert {"matrix products", REST} <= set(shares)


def test_imports_are_summed_up_by_package() -> None:
    lines = [
        "import time: self [us] | cumulative | imported package",
        "import time:       100 |        100 |   rich.text",
        "import time:       500 |        600 | rich",
        "import time:       400 |        400 | typer",
    ]
    shares = shares_by_package("\n".join(lines))
    assert shares == {"import rich": 0.6, "import typer": 0.4, "other imports": 0.0}


def test_a_process_that_fails_says_why() -> None:
    import sys

    with pytest.raises(ImportError, match="no_such_library"):
        ended([sys.executable, "-c", "import no_such_library"])
    with pytest.raises(DataError, match="ended with 3: oh"):
        ended([sys.executable, "-c", "import sys; print('oh', file=sys.stderr); sys.exit(3)"])


def test_the_least_cosine_is_that_of_the_two_that_differ_most() -> None:
    left = np.array([[1.0, 0.0], [0.0, 2.0]], dtype=np.float32)
    right = np.array([[3.0, 0.0], [1.0, 1.0]], dtype=np.float32)
    assert least_cosine(left, right) == pytest.approx(2**-0.5)


def test_every_benchmark_can_be_made() -> None:
    from bertkit.bench.run import BENCHMARKS

    assert list(BENCHMARKS) == list(Benchmark)

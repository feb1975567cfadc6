"""The terms of a run's peak memory, compared with autograd's saved tensors and with a real run."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bertkit.data.batch import PackedBatch
from bertkit.kernels.attention import can_attend
from bertkit.kernels.loading import Kernels, activated, build
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.albert import AlbertConfig
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.electra import ElectraConfig
from bertkit.models.families.eurobert import EuroBertConfig
from bertkit.models.families.modernbert import ModernBertConfig
from bertkit.models.families.neobert import NeoBertConfig
from bertkit.models.families.nomic_bert import NomicBertConfig
from bertkit.models.families.roberta import RobertaConfig
from bertkit.models.headed import HeadedModel
from bertkit.native import CompilerError
from bertkit.training.cpu_memory import CACHED_PRIMITIVES, keep_freed_memory, limit_primitive_cache
from bertkit.training.memory import peak_memory, training_memory
from tests.training.tiny_run import write_text

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 256,
    "max_position_embeddings": 70,
}
LENGTHS = [64, 63, 62, 61] * 4


def kept_by_autograd(model: HeadedModel, batch: PackedBatch, *, bf16: bool) -> int:
    """Bytes of the distinct storages that a forward pass saves for its backward pass, without the weights."""
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    found: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    ):
        hidden = model.encoder(batch)
    assert hidden.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "config",
    [
        BertConfig(**SIZES),
        BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
        RobertaConfig(**SIZES),
        AlbertConfig(**SIZES),
        ElectraConfig(**SIZES),
        ModernBertConfig(**SIZES),
        NeoBertConfig(**SIZES),
        EuroBertConfig(**SIZES, num_key_value_heads=1),
        NomicBertConfig(**SIZES),
    ],
    ids=["bert", "bert without dropout", "roberta", "albert", "electra", "modernbert", "neobert", "eurobert", "nomic"],
)
def test_activations_and_attention_are_what_autograd_keeps(config: EncoderConfig, bf16: bool) -> None:
    model = HeadedModel(config.build(100), [])
    model.initialise(0)
    batch = PackedBatch.from_ids([[7] * length for length in LENGTHS])
    terms = training_memory(
        model,
        micro_batch_tokens=batch.num_tokens,
        sequence_length=sum(length**2 for length in LENGTHS) / sum(LENGTHS),
        predictions=0,
        bf16=bf16,
    )
    planned = terms["activations"] + terms["attention"] + terms["bf16_weights"]
    assert planned == pytest.approx(kept_by_autograd(model.train(), batch, bf16=bf16), rel=1 / 3)


def test_the_compiled_attention_keeps_no_probabilities() -> None:
    try:
        kernels = Kernels(build(), frozenset([torch.bfloat16]))
    except CompilerError as error:
        pytest.skip(str(error))
    if not can_attend(kernels, *[torch.zeros(1, 1, 16, dtype=torch.bfloat16)] * 3):
        pytest.skip("needs a processor that multiplies pairs of bfloat16, without tiles")
    model = HeadedModel(BertConfig(**SIZES).build(100), [])
    model.initialise(0)
    batch = PackedBatch.from_ids([[7] * 64] * 16)
    terms = training_memory(
        model,
        micro_batch_tokens=batch.num_tokens,
        sequence_length=64,
        predictions=0,
        bf16=True,
        kernels=True,
    )
    bits = 2 * 2 * 16 * 2 * 64 * 64
    assert terms["attention"] == bits, "sixteen random bits of each probability: layers, sequences, heads, cells"
    with activated(kernels):
        kept = kept_by_autograd(model.train(), batch, bf16=True)  # which does not see the bits
    assert terms["activations"] + terms["bf16_weights"] == pytest.approx(kept, rel=1 / 3)


def test_weights_gradients_and_moments_are_sixteen_bytes_a_parameter_and_logits_are_bounded() -> None:
    with torch.device("meta"):
        model = HeadedModel(BertConfig(**SIZES).build(30_000), ["masked_lm"])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    few, many = (
        training_memory(model, micro_batch_tokens=512, sequence_length=64, predictions=each, bf16=False)
        for each in (10, 10_000)
    )
    assert few["weights"] + few["gradients"] + few["optimizer"] == 16 * parameters
    table = 4 * 30_000 * 64
    assert few["logits"] - table == 3 * 10 * 30_000 * 4
    assert many["logits"] - table == 3 * 2**25


def test_layers_that_share_their_weights_keep_activations_for_each_use() -> None:
    def activations(sharing: str) -> float:
        with torch.device("meta"):
            model = HeadedModel(AlbertConfig(**SIZES, sharing=sharing).build(100), ["masked_lm"])
        terms = training_memory(model, micro_batch_tokens=512, sequence_length=64, predictions=9, bf16=False)
        return terms["activations"] + terms["attention"]

    assert activations("all") == activations("none")


def test_the_peak_is_the_largest_of_an_update_a_checkpoint_and_learning_the_vocabulary() -> None:
    program = {"program": 100.0}
    update = {"weights": 10.0, "gradients": 10.0, "optimizer": 20.0, "activations": 50.0}
    assert sum(peak_memory(update, program=program).values()) == 190
    writing = peak_memory({**update, "activations": 1.0}, program=program)
    assert writing == {"program": 100.0, "weights": 10.0, "optimizer": 20.0, "checkpoint_copy": 20.0}
    learning = peak_memory(update, program=program, text_bytes=1000.0)
    assert set(learning) == {"program", "vocabulary_sample"}


def test_compiled_products_are_bounded_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    limit_primitive_cache()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == str(CACHED_PRIMITIVES)
    assert os.environ["LRU_CACHE_CAPACITY"] == "7"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is the GNU C library's")
@pytest.mark.parametrize(("highest", "threshold"), [(2**31 - 1, 1 << 28), (1 << 25, 1 << 25)], ids=["2.35", "2.34"])
def test_the_c_library_keeps_blocks_up_to_the_highest_threshold_that_it_accepts(
    highest: int, threshold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """glibc before 2.35 refuses a higher M_MMAP_THRESHOLD than HEAP_MAX_SIZE / 2 and returns 0."""
    mmap, trim = -3, -1
    accepted = {mmap: 128 * 1024}

    def mallopt(parameter: int, value: int) -> int:
        if parameter == mmap and value > highest:
            return 0
        accepted[parameter] = value
        return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    keep_freed_memory()
    assert accepted == {mmap: threshold, trim: 2**31 - 1}


def test_a_real_runs_parameters_are_the_plans_and_its_memory_is_near(tmp_path: Path) -> None:
    """In a separate process, whose peak is the run's. The vocabulary of so small a text is far below the recipe's."""
    text = write_text(tmp_path / "text.txt")
    words = [
        "pretrain",
        "bert-tiny",
        "--data",
        str(text),
        "--max-steps",
        "4",
        "--set",
        "optimisation.batch_sequences=32",
    ]
    words += ["--set", "data.held_out=0.05", "--set", "optimisation.stages=[]", "--set", "data.sequence_length=128"]

    def bertkit(*more: str) -> str:
        done = subprocess.run([sys.executable, "-m", "bertkit", *words, *more], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    plan = json.loads(bertkit("--plan", "--json"))
    assert plan["vocabulary"]["at_most"] is False
    assert plan["vocabulary"]["size"] < 30_522
    assert plan["memory_mb"] == pytest.approx(sum(plan["memory_terms_mb"].values()), abs=1)
    assert "memory" in bertkit("--plan")
    bertkit("--run-dir", str(tmp_path / "run"), "-q")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["vocab_size"] == plan["vocabulary"]["size"]
    if not torch.cuda.is_available():
        peak = max(line["peak_memory_mb"] for line in lines if "peak_memory_mb" in line)
        assert plan["memory_mb"] == pytest.approx(peak, rel=0.3)


@pytest.mark.parametrize(
    ("width", "layers", "heads", "gigabytes"), [(768, 12, 12, 26.0), (1024, 24, 16, 63.0)], ids=["base", "large"]
)
def test_a_gpu_keeps_what_was_measured(width: int, layers: int, heads: int, gigabytes: float) -> None:
    """65,536 tokens in sequences of 128, dropout, bf16, on an H200 (docs/gpu.md); large with compiled layers."""
    config = BertConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * width
    )
    with torch.device("meta"):
        model = HeadedModel(config.build(30_528), ["masked_lm"])
    terms = training_memory(
        model,
        micro_batch_tokens=65_536,
        sequence_length=128,
        predictions=0.15 * 65_536,
        bf16=True,
        device=torch.device("cuda"),
    )
    assert sum(terms.values()) / 1e9 == pytest.approx(gigabytes, rel=0.08)

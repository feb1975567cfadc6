"""Q-BERT: eigenvalues equal to torch.linalg's, bits per layer, and a packed result."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bertkit.compression.q8bert import FakeQuantEmbedding
from bertkit.compression.qbert import FakeQuantGroupLinear, QBert, groups_of, layer_maps, top_eigenvalues
from bertkit.data.batch import PackedBatch
from bertkit.errors import UsageError
from bertkit.files import read_json
from bertkit.models.families.bert import BertConfig
from bertkit.models.files.hub import load_model
from bertkit.models.headed import HeadedModel
from bertkit.models.labels import Labels
from bertkit.models.quantisation.low_bit import LowBitLinear, row_groups
from bertkit.training.run import FinishedRun
from tests.finetuning.test_finetune import Place, stopped, weights

METHOD = ("method.name=qbert", "method.groups=9", "method.ema_decay=0.9", "method.sensitivity_share=0.4", "epochs=3")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("qbert"))


@pytest.fixture(scope="module")
def finished(place: Place) -> FinishedRun:
    return place.run(*METHOD, run_dir=place.directory / "finished")


def test_power_iteration_finds_the_largest_eigenvalue_of_each_block() -> None:
    torch.manual_seed(3)
    first, second = nn.Linear(3, 4), nn.Linear(4, 2)
    rows, labels = torch.randn(11, 3), torch.randint(2, (11,))

    def loss(one: Tensor, two: Tensor) -> Tensor:
        hidden = torch.tanh(nn.functional.linear(rows, one, first.bias))
        return nn.functional.cross_entropy(nn.functional.linear(hidden, two, second.bias) * 3, labels)

    found = top_eigenvalues(
        loss(first.weight, second.weight), [[first.weight], [second.weight]], iterations=300, tolerance=1e-9, seed=0
    )
    blocks = torch.autograd.functional.hessian(loss, (first.weight.detach(), second.weight.detach()))
    for number, value in enumerate(found):
        size = (first, second)[number].weight.numel()
        eigenvalues = torch.linalg.eigvalsh(blocks[number][number].reshape(size, size))
        largest = eigenvalues[eigenvalues.abs().argmax()]
        assert value == pytest.approx(float(largest), rel=1e-3)


def test_a_block_of_several_matrices_is_one_block() -> None:
    torch.manual_seed(1)
    matrix = torch.randn(7, 7)
    symmetric = matrix @ matrix.t()
    one, two = torch.randn(3, requires_grad=True), torch.randn(2, 2, requires_grad=True)
    both = torch.cat([one, two.flatten()])
    (value,) = top_eigenvalues(0.5 * both @ symmetric @ both, [[one, two]], iterations=500, tolerance=1e-10, seed=4)
    assert value == pytest.approx(float(torch.linalg.eigvalsh(symmetric)[-1]), rel=1e-4)


def test_curvature_of_packed_sequences_is_that_of_gradients_by_differences(place: Place) -> None:
    """Attention over sequences of unequal length has its own gradients, which are differentiated a second time here."""
    model, _ = load_model(place.calm, heads=("sequence_classification",), labels=Labels(("bad", "good")))
    model.double().requires_grad_(False)
    block = model.encoder.layers[0].attention.query.bias.requires_grad_(True)  # type: ignore[union-attr, index]
    batch, labels = PackedBatch.from_ids([[2, 9, 31, 7, 3], [2, 3], [2, 14, 15, 9, 26, 5, 3]]), torch.tensor([0, 1, 1])

    def loss() -> Tensor:
        states = model.states("sequence_classification", batch)
        return nn.functional.cross_entropy(model.logits("sequence_classification", states, batch), labels)

    def gradient(vector: Tensor, step: float) -> Tensor:
        with torch.no_grad():
            block.add_(vector, alpha=step)
        (found,) = torch.autograd.grad(loss(), [block])
        with torch.no_grad():
            block.sub_(vector, alpha=step)
        return found

    with sdpa_kernel(SDPBackend.MATH):
        (value,) = top_eigenvalues(loss(), [[block]], iterations=100, tolerance=1e-7, seed=0)
        rows = [gradient(unit, 1e-4) - gradient(unit, -1e-4) for unit in torch.eye(30, dtype=torch.float64)]
    eigenvalues = torch.linalg.eigvalsh(torch.stack(rows) / 2e-4)
    assert value != 0
    assert value == pytest.approx(float(eigenvalues[eigenvalues.abs().argmax()]), rel=1e-4)


def test_the_more_sensitive_half_has_more_bits_and_the_table_says_why(finished: FinishedRun) -> None:
    table = finished.results["quantisation"]
    assert table == read_json(finished.run.path / "qbert.json")
    omega = [abs(np.mean(found)) + np.std(found) for found in table["eigenvalues"]]
    assert table["omega"] == pytest.approx(omega)
    assert sorted(table["bits"]) == [2, 3]
    assert table["bits"][int(np.argmax(omega))] == 3
    log = (finished.run.path / "log.txt").read_text()
    assert log.index("layer 1: ") < log.index("step ")


def test_of_an_odd_number_of_layers_the_larger_half_has_more_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Omega is |mean| + standard deviation: 9, 1, 3 + 3, 2 and 3.5 here."""
    values = [[-9.0, -9.0], [1.0, 1.0], [0.0, 6.0], [2.0, 2.0], [3.5, 3.5]]
    monkeypatch.setattr(QBert, "_eigenvalues", lambda *_: values)
    sizes = {"hidden_size": 12, "num_hidden_layers": 5, "num_attention_heads": 3, "intermediate_size": 20}
    model = HeadedModel(BertConfig(**sizes).build(50), ("sequence_classification",), labels=Labels(("bad", "good")))
    resources = SimpleNamespace(directory=None)
    prepared = QBert(low_bits=2, high_bits=4).prepare(model, 0, resources)  # type: ignore[arg-type]  # no data is read
    bits = [{part.weight_bits for part in own} for own in layer_maps(prepared)]  # type: ignore[attr-defined]
    assert bits == [{4}, {2}, {4}, {2}, {4}]
    tables = [part for part in prepared.modules() if isinstance(part, nn.Embedding)]
    assert all(isinstance(part, FakeQuantEmbedding) and part.by_row for part in tables)
    assert len(tables) == 3


def test_files_hold_packed_bits_and_load_for_use(place: Place, finished: FinishedRun) -> None:
    model, report = load_model(finished.run.model)
    assert (report.missing, report.unexpected) == ([], [])
    tensors = load_file(finished.run.model / "model.safetensors")
    bits = finished.results["quantisation"]["bits"]
    for layer, count in enumerate(bits):
        packed = tensors[f"bert.encoder.layer.{layer}.intermediate.dense.weight_packed"]
        assert (packed.dtype, packed.numel()) == (torch.uint8, -(-30 * 52 * count // 8))
    assert tensors["classifier.weight_packed"].numel() == 2 * 30
    kinds = {type(part) for part in model.modules() if isinstance(part, nn.Linear)}
    assert kinds == {LowBitLinear}
    for layer, part in enumerate(model.encoder.layers):  # type: ignore[arg-type]  # a BERT's
        values = [row.unique().numel() for row in part.feed_forward.outer.weight]  # type: ignore[union-attr]
        assert max(values) <= 2 ** bits[layer]
    settings = json.loads((finished.run.model / "config.json").read_text())["quantization_config"]
    assert settings["bits"]["bert.encoder.layer.0.output.dense"] == bits[0]
    assert finished.results["splits"]["dev"]["accuracy"] > 0.6


def test_a_stopped_run_ends_with_the_same_bytes(
    place: Place, finished: FinishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = place.directory / "stopped"
    stopped(place, 12, *METHOD, run_dir=run_dir)
    monkeypatch.setattr(QBert, "_eigenvalues", None)
    resumed = place.run(*METHOD, resume=str(run_dir))
    assert weights(resumed) == weights(finished)
    assert resumed.results == finished.results


def test_groups_follow_heads_and_rounding_stays_within_them(place: Place) -> None:
    model, _ = load_model(place.calm, heads=("sequence_classification",), labels=Labels(("a", "b")))
    attention = model.encoder.layers[0].attention  # type: ignore[union-attr, index]
    assert torch.equal(groups_of(model, attention.key, 8), row_groups(30, 8, 3))  # type: ignore[union-attr, arg-type]
    assert torch.equal(groups_of(model, attention.output, 8), row_groups(30, 8))  # type: ignore[union-attr, arg-type]
    prepared = QBert(bits=2, groups=8).prepare(model, 0)
    maps = [part for own in layer_maps(prepared) for part in own]
    assert maps
    for part in maps:
        assert isinstance(part, FakeQuantGroupLinear)
        for group in range(int(part.group_F[-1]) + 1):
            assert part.rounded_weight()[part.group_F == group].unique().numel() <= 4


def test_more_bits_come_nearer() -> None:
    linear = nn.Linear(40, 24).requires_grad_(False)
    errors = []
    for bits in (2, 3, 4, 8):
        made = FakeQuantGroupLinear(linear, 8, group_F=row_groups(24, 6), weight_bits=bits)
        errors.append(float((made.rounded_weight() - linear.weight).norm()))
    fewer = FakeQuantGroupLinear(linear, 8, group_F=row_groups(24, 1), weight_bits=4)
    assert errors == sorted(errors, reverse=True)
    assert float((fewer.rounded_weight() - linear.weight).norm()) > errors[2]


def test_mixed_bits_without_data_and_bits_out_of_order_are_refused(place: Place) -> None:
    model, _ = load_model(place.calm)
    with pytest.raises(UsageError, match=r"method\.bits: mixed bits are measured on training data"):
        QBert().prepare(model, 0)
    with pytest.raises(ValueError, match=r"low_bits \(4\) must be lower than high_bits \(3\)"):
        QBert(low_bits=4)

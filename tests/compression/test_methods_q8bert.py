"""Q8BERT: thresholds by hand, gradients as without rounding, and a result that computes what was trained."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from bertkit.compression.q8bert import FakeQuantEmbedding, FakeQuantLinear, Q8Bert, last_maps
from bertkit.errors import DataError, UsageError
from bertkit.finetuning.plan import finetuning_plan
from bertkit.inference.predict import Predictor
from bertkit.models.files.hub import load_model
from bertkit.models.headed import HeadedModel
from bertkit.models.labels import Labels
from bertkit.models.quantisation.int8 import QuantisedEmbedding, StaticQuantisedLinear, fake_quantize
from bertkit.ranks import RankLostError, Ranks, use_ranks
from bertkit.tasks.examples import TextExample
from bertkit.training.engine import Engine
from bertkit.training.run import FinishedRun
from tests.finetuning.test_finetune import DEV, Place, stopped, weights
from tests.tasks.tiny_task import reviews, write_model

METHOD = ("method.name=q8bert", "method.ema_decay=0.9", "epochs=3")
CPU = Engine(torch.device("cpu"), bf16=False, micro_batch_tokens=4096, workers=0)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("q8bert"))


@pytest.fixture(scope="module")
def finished(place: Place) -> FinishedRun:
    return place.run(*METHOD, run_dir=place.directory / "finished")


def prepared(directory: Path, **settings: object) -> HeadedModel:
    source = write_model(directory, dropout=0.0)
    model, _ = load_model(source, heads=("sequence_classification",), labels=Labels(("bad", "good")))
    return Q8Bert.model_validate(settings).prepare(model, 0)


def fake(linear: nn.Linear, threshold: float, *, requantised: bool = False) -> FakeQuantLinear:
    made = FakeQuantLinear(linear, 8, requantised=requantised)
    made.input_threshold.fill_(threshold)
    return made


@pytest.mark.parametrize("threshold", [0.7, 3.0])
def test_rounding_is_that_of_torch(threshold: float) -> None:
    values = torch.randn(7, 5, generator=torch.Generator().manual_seed(4)) * 2
    values[0] = torch.tensor([0.0, threshold, -threshold, 2 * threshold, -9.0])
    expected = torch.fake_quantize_per_tensor_affine(values, threshold / 127, 0, -127, 127)
    torch.testing.assert_close(fake_quantize(values, threshold, 127), expected, rtol=1e-6, atol=1e-7)


def test_a_threshold_is_the_moving_average_of_the_largest_value() -> None:
    made = FakeQuantLinear(nn.Linear(3, 2), 8, requantised=True).train()
    for peaks, expected in (((2.0,), 2.0), ((1.0, 4.0), 0.9 * 2.0 + 0.1 * 4.0), ((0.5,), 0.9 * 2.2 + 0.1 * 0.5)):
        for peak in peaks:
            made(torch.tensor([[0.1, -peak, 0.0]]))
        made.update_thresholds(0.9, active=True)
        assert float(made.input_threshold) == pytest.approx(expected, rel=1e-6)
    made(torch.full((1, 3), float("nan")))
    made.update_thresholds(0.9, active=True)
    assert float(made.input_threshold) == pytest.approx(2.03, rel=1e-6)
    made.eval()(torch.full((1, 3), 100.0))
    made.update_thresholds(0.9, active=True)
    assert float(made.input_threshold) == pytest.approx(2.03, rel=1e-6)


def test_a_threshold_moves_by_the_largest_value_of_all_ranks() -> None:
    """Each rank reads its own share of a batch. If a rank is lost, the update is still made."""
    method, model = Q8Bert(ema_decay=0.5), nn.Sequential(FakeQuantLinear(nn.Linear(2, 2), 8, requantised=False))
    made = model[0]
    assert isinstance(made, FakeQuantLinear)

    class OneOfTwo(Ranks):
        count = 2
        other: Sequence[float | None] | None = ()

        def gathered(self, value: Any) -> list[Any]:
            if self.other is None:
                raise RankLostError("rank 1 died")
            return [value, list(self.other)]

    ranks = OneOfTwo()
    cases: list[tuple[float | None, Sequence[float | None] | None, float]] = [
        (2.0, (4.0, None), 4.0),
        (8.0, (6.0, None), 6.0),
        (None, (2.0, None), 4.0),
        (None, (None, None), 4.0),
        (1.0, (math.nan, None), 4.0),
        (2.0, None, 3.0),
    ]
    with use_ranks(ranks):
        for step, (own, ranks.other, expected) in enumerate(cases, start=1):
            if own is not None:
                made.train()(torch.tensor([[0.0, -own]]))
            method.after_update(model, step, len(cases))  # type: ignore[arg-type]  # its modules are all that is read
            assert float(made.input_threshold) == pytest.approx(expected)


def test_before_its_start_a_map_is_plain_and_measures_nothing() -> None:
    linear = nn.Linear(4, 3)
    made = FakeQuantLinear(linear, 8, requantised=True).train()
    rows = torch.randn(5, 4)
    assert torch.equal(made(rows), linear(rows))
    made.update_thresholds(0.9, active=False)
    made.update_thresholds(0.9, active=True)
    assert (float(made.input_threshold), float(made.output_threshold or 0)) == (0, 0)


def test_a_map_computes_with_rounded_numbers_and_gradients_pass_as_if_not() -> None:
    linear = nn.Linear(4, 3)
    made = fake(linear, 0.8)
    rows = torch.randn(5, 4, requires_grad=True)
    upstream = torch.randn(5, 3)
    found = made(rows)
    limit = linear.weight.detach().abs().max()
    rounded, weight = fake_quantize(rows.detach(), 0.8, 127), fake_quantize(linear.weight.detach(), limit, 127)
    torch.testing.assert_close(found, functional.linear(rounded, weight, linear.bias))
    found.backward(upstream)
    assert rows.grad is not None
    assert made.weight.grad is not None
    torch.testing.assert_close(rows.grad, upstream @ weight)
    torch.testing.assert_close(made.weight.grad, upstream.t() @ rounded)
    assert rows.detach().abs().max() > 0.8, "values beyond the threshold also have a gradient"


def test_rows_of_a_table_are_rounded_and_their_gradient_can_be_sparse() -> None:
    table = nn.Embedding(9, 4)
    made = FakeQuantEmbedding(table, by_row=False)
    made.sparse = True
    ids = torch.tensor([3, 0, 3])
    assert torch.equal(made(ids), table(ids))
    made.update_thresholds(0.9, active=True)
    assert float(made.threshold) == float(table.weight.detach().abs().max())
    found = made(ids)
    torch.testing.assert_close(found, fake_quantize(table(ids).detach(), float(made.threshold), 127))
    found.sum().backward()
    assert made.weight.grad is not None
    assert made.weight.grad.is_sparse
    assert made.weight.grad.to_dense()[3].tolist() == [2.0] * 4


@pytest.mark.parametrize("by_row", [False, True])
def test_a_table_is_trained_with_the_rows_that_its_result_has(by_row: bool) -> None:
    """Rows of any size, and one of zeros."""
    table = nn.Embedding(7, 12)
    with torch.no_grad():
        table.weight.mul_(torch.tensor([0.0, 1e-9, 1e-3, 0.02, 0.3, 1.0, 40.0])[:, None])
    made, ids = FakeQuantEmbedding(table, by_row=by_row), torch.arange(7)
    made.update_thresholds(0.9, active=True)
    torch.testing.assert_close(made(ids), QuantisedEmbedding.of(made, by_row=by_row)(ids), rtol=1e-5, atol=1e-12)


def test_all_maps_and_tables_are_quantised_and_only_the_result_is_left_as_it_is(tmp_path: Path) -> None:
    model = prepared(tmp_path / "m")
    maps = [part for part in model.modules() if isinstance(part, nn.Linear)]
    tables = [part for part in model.modules() if isinstance(part, nn.Embedding)]
    assert all(isinstance(part, FakeQuantLinear) for part in maps)
    assert all(isinstance(part, FakeQuantEmbedding) for part in tables)
    (last,) = last_maps(model)
    assert [part is last for part in maps] == [part.output_threshold is None for part in maps]  # type: ignore[union-attr]  # all fake
    bare = prepared(tmp_path / "n", requantise_outputs=False)
    assert not [name for name, _ in bare.named_parameters() if name.endswith("output_threshold")]


def test_thresholds_are_not_trained_and_the_first_update_only_measures(tmp_path: Path) -> None:
    model, method = prepared(tmp_path / "m"), Q8Bert()
    method.set_trained(model, 0)
    still = {name.rpartition(".")[2] for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert still == {"input_threshold", "output_threshold", "threshold"}
    with pytest.raises(UsageError, match=r"method\.start_step: 4 in a run of 5 updates.*at most 3"):
        Q8Bert(start_step=4).check_steps(5)


def test_a_run_that_ends_before_quantisation_begins_is_refused_before_its_first_update(place: Place) -> None:
    short = ("method.name=q8bert", "optimisation.max_steps=1")
    with pytest.raises(UsageError, match=r"start_step: 0 in a run of 1 updates"):
        finetuning_plan(place.request(*short))
    with pytest.raises(UsageError, match=r"start_step: 0 in a run of 1 updates"):
        place.run(*short, run_dir=place.directory / "short")
    assert not (place.directory / "short").exists()


def test_the_result_is_int8_and_predicts_what_training_measured(place: Place, finished: FinishedRun) -> None:
    tensors = load_file(finished.run.model / "model.safetensors")
    assert {tensor.dtype for name, tensor in tensors.items() if name.endswith("weight_int8")} == {torch.int8}
    assert not [name for name in tensors if name.endswith(("query.weight", "word_embeddings.weight"))]
    assert finished.results["splits"]["dev"]["accuracy"] > 0.8
    lines = (finished.run.path / "predictions" / "stars-dev.jsonl").read_text().splitlines()
    predictor = Predictor.load(str(finished.run.path), CPU)
    examples = [TextExample(str(number), text, None, None) for number, (text, _) in enumerate(reviews(DEV, 2))]
    found = [each.prediction for each in predictor(examples)]
    agreed = [found[number] == json.loads(line)["prediction"] for number, line in enumerate(lines)]
    assert sum(agreed) >= len(lines) - 1, "a value on the border of two steps may round to either side"


def test_it_computes_in_whole_numbers_what_it_computed_in_floats(tmp_path: Path) -> None:
    linear = nn.Linear(37, 6)
    with torch.no_grad():
        linear.weight[2, :2] = 3.0
    made = fake(linear, 1.3, requantised=True)
    assert made.output_threshold is not None
    made.output_threshold.fill_(2.5)
    static = made.static()
    assert isinstance(static, StaticQuantisedLinear)
    rows = torch.randn(50, 37)
    with torch.no_grad():
        differences = (made.eval()(rows) - static(rows)).abs()
    assert differences.max() <= 2.5 / 127 * 1.01, "one step of the output, if a sum is on the border"
    assert (differences > 1e-5).float().mean() < 0.02


@pytest.mark.parametrize("step", [1, 12])
def test_a_stopped_run_ends_with_the_same_bytes(place: Place, finished: FinishedRun, step: int) -> None:
    run_dir = place.directory / f"stopped-{step}"
    stopped(place, step, *METHOD, run_dir=run_dir)
    resumed = place.run(*METHOD, resume=str(run_dir))
    assert weights(resumed) == weights(finished)
    assert resumed.results == finished.results


def test_how_a_batch_is_cut_changes_no_threshold(place: Place) -> None:
    short = (*METHOD, "optimisation.max_steps=3")
    tensors = [
        load_file(outcome.run.model / "model.safetensors")
        for outcome in (
            place.run(*short, f"engine.micro_batch_tokens={tokens}", model=str(place.calm)) for tokens in (4096, 23)
        )
    ]
    names = [name for name in tensors[0] if name.endswith("threshold")]
    assert len(names) > 20
    for name in names:
        torch.testing.assert_close(tensors[0][name], tensors[1][name], rtol=1e-2, atol=1e-4)


def test_an_average_of_the_weights_is_refused(place: Place) -> None:
    told = r"method: q8bert has thresholds that begin at 0, so that an average .*; leave optimisation\.ema out"
    with pytest.raises(UsageError, match=told):
        place.run(*METHOD, "optimisation.ema=0.9")


def test_what_came_out_is_not_trained_on(place: Place, finished: FinishedRun) -> None:
    with pytest.raises(DataError, match="quantised and cannot be trained"):
        place.run("optimisation.max_steps=1", model=str(finished.run.path))

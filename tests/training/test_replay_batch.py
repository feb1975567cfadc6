"""`replay-batch` names what was not finite in a run of each kind, from the batch that the run has saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError, DivergedError, StoppedError
from bertkit.models.loss_sum import LossSum
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.progress import silent_progress
from bertkit.run.directory import RunDirectory
from bertkit.run.verify import verify_run
from bertkit.training.divergence import DIVERGENCE_FILE, DivergenceRecord
from bertkit.training.saved_batch import packed_up, unpacked
from tests.training.stopping import stopping_at
from tests.training.tiny_run import write_recipe

Bertkit = Callable[..., Any]


def pretrained(directory: Path, *overrides: str) -> RunDirectory:
    from bertkit.pretraining.arguments import PretrainArguments
    from bertkit.pretraining.run import run_pretraining
    from tests.overrides import parsed

    recipe, text = write_recipe(directory)
    settings = ["optimisation.steps=14", "optimisation.schedule.warmup_steps=2", *overrides]
    request = PretrainArguments(
        str(recipe), sources=[str(text)], run_dir=directory / "run", cache=directory / "cache",
        overrides=parsed(settings),
    )  # fmt: skip
    return run_pretraining(request, progress=silent_progress).run


def poisoned(monkeypatch: pytest.MonkeyPatch, *, calls: int, of_gradient: bool = False) -> None:
    """The masked LM's loss, or only its gradient, is not finite from this micro-batch on."""
    loss, left = MaskedLM.loss, [calls]

    def failing(self: MaskedLM, *arguments: Any, **more: Any) -> LossSum:
        found = loss(self, *arguments, **more)
        left[0] -= torch.is_grad_enabled()
        if left[0] >= 0:
            return found
        if of_gradient:
            zero = (found.sum - found.sum.detach()).square().sqrt()  # zero, with a gradient of 0 * infinity
            return LossSum(found.sum + zero, found.count, found.correct)
        return LossSum(found.sum * float("inf"), found.count, found.correct)

    monkeypatch.setattr(MaskedLM, "loss", failing)


def poisoned_once(monkeypatch: pytest.MonkeyPatch, *, call: int) -> None:
    """One micro-batch's loss of the masked LM is not finite."""
    loss, left = MaskedLM.loss, [call]

    def failing(self: MaskedLM, *arguments: Any, **more: Any) -> LossSum:
        found = loss(self, *arguments, **more)
        left[0] -= torch.is_grad_enabled()
        failing_now = left[0] == 0 and torch.is_grad_enabled()
        return LossSum(found.sum * float("nan"), found.count, found.correct) if failing_now else found

    monkeypatch.setattr(MaskedLM, "loss", failing)


@pytest.mark.parametrize("of_gradient", [False, True])
def test_a_term_or_a_gradient_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bertkit: Bertkit, of_gradient: bool
) -> None:
    with monkeypatch.context() as patch:
        poisoned(patch, calls=25, of_gradient=of_gradient)
        with pytest.raises(DivergedError, match="replay-batch"):
            pretrained(tmp_path, "optimisation.max_nonfinite_steps=0")
    run = RunDirectory.open(tmp_path / "run")
    (event,) = DivergenceRecord(run.path / DIVERGENCE_FILE).events
    with monkeypatch.context() as patch:
        poisoned(patch, calls=0, of_gradient=of_gradient)
        shown = bertkit("replay-batch", run.path, "--json")
        text = bertkit("replay-batch", run.path, "--step", str(event["step"]))
    assert shown.code == text.code == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert found["step"] == event["step"]
    assert found["term"] == (None if of_gradient else "masked_lm")
    assert found["parameter"] is not None
    assert found["weight"] is found["layer"] is None
    assert "the gradient of" in text.stdout
    # Without the fault the saved batch is finite: the data are not the cause.
    clean = bertkit("replay-batch", run.path)
    assert clean.code == 5
    assert "everything is finite this time" in clean.stdout
    assert not verify_run(run.path).errors
    assert bertkit("replay-batch", run.path, "--step", "2").code == 3


def test_weights_that_fail_are_named_down_to_the_layer(tmp_path: Path, bertkit: Bertkit) -> None:
    """Weights that are finite but far too large overflow in the first layer."""
    from safetensors.torch import load_file, save_file

    healthy = pretrained(tmp_path).model
    tensors = load_file(healthy / "model.safetensors")
    name = next(each for each in tensors if each.endswith("layer.0.intermediate.dense.weight"))
    tensors[name] = torch.full_like(tensors[name], 3e38)
    save_file(tensors, healthy / "model.safetensors")
    directory = tmp_path / "again"
    directory.mkdir()
    with pytest.raises(DivergedError):
        pretrained(directory, f"init={healthy}")
    shown = bertkit("replay-batch", directory / "run", "--json")
    assert shown.code == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert found["weight"] is None
    assert "layers.0" in found["layer"]
    assert found["term"] in ("masked_lm", "next_sentence")
    assert not found["finite"]


def test_a_run_without_a_saved_batch_says_so(tmp_path: Path, bertkit: Bertkit) -> None:
    run = pretrained(tmp_path, "optimisation.steps=3", "optimisation.schedule.warmup_steps=1")
    shown = bertkit("replay-batch", run.path)
    assert shown.code == 3
    assert "no saved batch" in shown.stderr


def test_a_batch_is_read_back_as_it_was_and_nothing_else_is_made_of_it() -> None:
    batches = [PackedBatch.from_ids([[1, 2, 3], [4]], causal=True), PackedBatch.from_ids([[5, 6]])]
    outline, tensors = packed_up(batches)
    outline = json.loads(json.dumps(outline))
    for before, after in zip(batches, unpacked(outline, tensors, PackedBatch), strict=True):
        assert str(before) == str(after)
    for strange in ([{"class": "RunDirectory", "fields": {}}], [{"tensor": "x"}], 3, [[1]]):
        with pytest.raises(DataError, match="the saved batch is not a PackedBatch"):
            unpacked(strange, tensors, PackedBatch)


def test_a_pretraining_that_went_back_and_was_stopped_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hardware fault occurs once; its effect is in the record."""
    from bertkit.pretraining.arguments import PretrainArguments
    from bertkit.pretraining.run import run_pretraining

    settings = ("optimisation.max_nonfinite_steps=0", "optimisation.roll_back={at_most: 1}")
    weights = []
    for name, stops in (("straight", False), ("stopped", True)):
        directory = tmp_path / name
        directory.mkdir()
        with monkeypatch.context() as patch:
            poisoned_once(patch, call=9)
            if not stops:
                pretrained(directory, *settings)
            else:
                with stopping_at(7), pytest.raises(StoppedError):
                    pretrained(directory, *settings)
        if stops:
            again = PretrainArguments(resume=str(directory / "run"), cache=directory / "cache")
            run_pretraining(again, progress=silent_progress)
        record = DivergenceRecord(directory / "run" / DIVERGENCE_FILE)
        assert [event["event"] for event in record.events] == ["skipped", "rolled_back"]
        weights.append((directory / "run" / "model" / "model.safetensors").read_bytes())
        assert not verify_run(directory / "run").errors
    assert weights[0] == weights[1]
    (tmp_path / "plain").mkdir()
    assert (pretrained(tmp_path / "plain").model / "model.safetensors").read_bytes() != weights[0]


@pytest.mark.parametrize("kind", ["finetune", "distill"])
def test_fine_tuning_and_distillation_on_a_task_save_their_batches(tmp_path: Path, bertkit: Bertkit, kind: str) -> None:
    from safetensors.torch import load_file, save_file

    from tests.distillation.task_place import ALL_TERMS
    from tests.distillation.task_place import Place as DistillPlace
    from tests.finetuning.test_finetune import Place as FinetunePlace

    place: Any = FinetunePlace(tmp_path) if kind == "finetune" else DistillPlace(tmp_path)
    weights = (place.model if kind == "finetune" else place.teacher) / "model.safetensors"
    tensors = load_file(weights)
    name = next(each for each in tensors if each.endswith("layer.0.intermediate.dense.weight"))
    save_file({**tensors, name: torch.full_like(tensors[name], 3e38)}, weights)
    recipe = () if kind == "finetune" else (place.recipe("all", ALL_TERMS),)
    with pytest.raises(DivergedError):
        place.run(*recipe, run_dir=tmp_path / "run")
    shown = bertkit("replay-batch", tmp_path / "run", "--json")
    assert shown.code == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert "layers.0" in found["layer"] if kind == "finetune" else found["term"] in found["terms"]

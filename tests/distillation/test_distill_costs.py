"""Sizes and costs that distillation on a task reports for student and teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertkit.distillation.task import retained
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.plan import finetuning_plan
from bertkit.finetuning.run import finetune
from bertkit.models.conversion.pruning import prune_heads
from bertkit.models.files.hub import load_model, save_model
from bertkit.progress import silent_progress
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.meters import WindowMeter
from bertkit.training.run import FinishedRun
from tests.distillation.task_place import ALL_TERMS, DEV, SETTINGS, Place
from tests.overrides import parsed
from tests.tasks.tiny_task import reviews


def test_what_a_teacher_computes_is_counted_unless_its_answers_are_kept(
    place: Place, logits_only: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward pass is a third of the cost of fine-tuning the same model on the same batches."""
    counted: list[float] = []
    plain = WindowMeter.add

    def add(self: WindowMeter, *args: Any, flops: float, **keywords: Any) -> None:
        counted.append(flops)
        plain(self, *args, flops=flops, **keywords)

    monkeypatch.setattr(WindowMeter, "add", add)

    def of(request: FinetuneArguments) -> np.ndarray:
        counted.clear()
        finetune(request, progress=silent_progress)
        return np.array(counted)

    short = "optimisation.max_steps=3"
    kept = of(place.request(logits_only, short))
    asked = of(place.request(logits_only, short, "engine.teacher_store_gb=0"))
    teacher = of(
        FinetuneArguments(
            task=place.task,
            model=str(place.teacher),
            overrides=parsed([*SETTINGS, short]),
            runs_root=place.directory / "runs",
        )
    )
    assert asked - kept == pytest.approx(teacher / 3)
    control = of(place.request(logits_only, short, control=True))
    assert control.tolist() == kept.tolist()


@pytest.mark.parametrize("method", ["q8bert", "qbert"])
def test_a_weight_of_few_bits_is_a_weight(place: Place, logits_only: str, method: str) -> None:
    """Apart from the weights there are a few thresholds of activations."""
    short = "optimisation.max_steps=2"
    runs = [place.run(logits_only, short, *more) for more in ((), (f"method.name={method}",))]
    whole, few = (run.results["student"]["parameters"] for run in runs)
    assert whole <= few < 1.01 * whole


def test_results_have_the_teacher_beside_the_student(place: Place, finished: FinishedRun) -> None:
    results = finished.results
    teacher, _ = load_model(place.teacher)
    assert results["teacher"]["parameters"] == sum(each.numel() for each in teacher.parameters())
    assert results["student"]["parameters"] < results["teacher"]["parameters"]
    score, own = results["teacher"]["splits"]["dev"]["accuracy"], results["splits"]["dev"]["accuracy"]
    assert results["retained"]["dev"]["accuracy"] == pytest.approx(own / score)
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(place.teacher).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(place.teacher)
    texts, labels = zip(*reviews(DEV, 2), strict=True)
    with torch.no_grad():
        guesses = model(**tokenizer(list(texts), padding=True, return_tensors="pt")).logits.argmax(-1).tolist()
    assert score == pytest.approx(
        np.mean([("bad", "good")[guess] == label for guess, label in zip(guesses, labels, strict=True)])
    )


def test_no_share_of_an_undefined_score_or_of_an_error_is_retained() -> None:
    assert retained("accuracy", 0.4, 0.8) == 0.5
    assert retained("mean_squared_error", 0.4, 0.8) is None
    assert [retained("f1", *scores) for scores in ((None, 0.5), (0.5, None), (0.5, 0.0))] == [None] * 3


def test_a_plan_has_the_students_size(place: Place, finished: FinishedRun, logits_only: str) -> None:
    plan = finetuning_plan(place.request(logits_only))
    assert plan["parameters"]["total"] == finished.results["student"]["parameters"]
    assert plan["steps"] == finished.run.record["steps"]


def test_a_plan_counts_the_teacher_once_an_example_where_its_outputs_are_kept_and_else_once_a_pass(
    place: Place, logits_only: str, every_term: str
) -> None:
    """A forward pass is a third of the cost of an epoch of fine-tuning the same model."""
    one_epoch = finetuning_plan(
        FinetuneArguments(task=place.task, model=str(place.teacher), overrides=parsed([*SETTINGS, "epochs=1"]))
    )["flops"]
    kept = finetuning_plan(place.request(logits_only, "epochs=2"))
    student = kept["flops"] - kept["teacher"]["flops"]
    assert kept["teacher"]["model"] == str(place.teacher)
    assert kept["teacher"]["parameters"] == sum(each.numel() for each in load_model(place.teacher)[0].parameters())
    assert kept["teacher"]["flops"] == pytest.approx(one_epoch / 3)
    seeds = finetuning_plan(place.request(logits_only, "epochs=2", seeds=[0, 1, 2]))
    assert seeds["teacher"]["flops"] == kept["teacher"]["flops"], "runs on the same examples share what is kept"
    unkept = finetuning_plan(place.request(logits_only, "epochs=2", "engine.teacher_store_gb=0"))
    assert unkept["teacher"]["flops"] == pytest.approx(2 * kept["teacher"]["flops"])
    attention = finetuning_plan(place.request(every_term, "epochs=2"))
    assert attention["teacher"]["flops"] > 2 * one_epoch / 3, "all of the last layer is computed"
    control = finetuning_plan(place.request(logits_only, "epochs=2", control=True))
    assert control["teacher"]["flops"] == 0.0
    assert control["flops"] == pytest.approx(student)
    two = finetuning_plan(place.request(logits_only, "epochs=2", teachers=[str(place.teacher), str(place.calm)]))
    assert two["teacher"]["flops"] == pytest.approx(2 * kept["teacher"]["flops"])
    assert two["teacher"]["model"] == [str(place.teacher), str(place.calm)]


def test_a_student_whose_layers_are_compared_computes_all_tokens_as_its_teacher_does(place: Place) -> None:
    """It is as large as the teacher, whose forward pass is a third of its cost."""
    recipe = place.recipe("same_size", ALL_TERMS, "student: {layers: first, number: 2}")
    plan = finetuning_plan(place.request(recipe))
    assert plan["flops"] == pytest.approx(4 * plan["teacher"]["flops"])
    assert place.run(recipe).run.record["flops"] == pytest.approx(plan["flops"])
    assert finetuning_plan(place.request(recipe, control=True))["flops"] < 3 * plan["teacher"]["flops"]


@pytest.mark.parametrize("gone", [{}, {0: [0, 2], 1: [1]}], ids=["whole", "pruned"])
def test_a_plan_of_fine_tuning_has_the_operations_that_the_run_counts(
    place: Place, gone: dict[int, list[int]], tmp_path: Path
) -> None:
    """The last layer is computed only for the first token, in both; pruned heads are not counted."""
    model, _ = load_model(place.teacher)
    prune_heads(model, gone)
    save_model(model, load_tokenizer(place.teacher), tmp_path / "model")
    arguments = FinetuneArguments(
        task=place.task, model=str(tmp_path / "model"), overrides=parsed(SETTINGS), runs_root=tmp_path / "planned"
    )
    plan = finetuning_plan(arguments)
    assert plan["flops"] == pytest.approx(finetune(arguments, progress=silent_progress).run.record["flops"])
    assert plan["parameters"]["total"] == sum(each.numel() for each in model.parameters())


def test_a_plan_counts_a_run_before_on_its_own_data(place: Place) -> None:
    recipe = place.recipe(
        "fewer_before",
        "\n- soft_targets",
        "student: {layers: last, number: 1}\nbefore: {set: {data.train_examples: 10, optimisation.epochs: 3}}",
    )
    plan = finetuning_plan(place.request(recipe))
    alone = finetuning_plan(place.request(recipe, "data.train_examples=10", "before=null", "epochs=3"))
    after = finetuning_plan(place.request(recipe, "before=null"))
    assert plan["steps"] == alone["steps"] + after["steps"]
    for key in ("flops", "tokens"):
        assert plan[key] == pytest.approx(alone[key] + after[key])
    assert plan["teacher"]["flops"] == pytest.approx(alone["teacher"]["flops"] + after["teacher"]["flops"])
    record = place.run(recipe).run.record["with_before"]
    assert (record["steps"], record["tokens"]) == (plan["steps"], plan["tokens"])
    assert record["flops"] == pytest.approx(plan["flops"] - plan["teacher"]["flops"]), "outputs are cached"

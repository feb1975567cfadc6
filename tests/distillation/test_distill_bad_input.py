"""Distillation on a task: errors that are found before training."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from bertkit.errors import DataError, UsageError
from bertkit.finetuning.plan import finetuning_plan
from bertkit.finetuning.recipe import CustomTask
from bertkit.models.conversion.pruning import prune_heads
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.labels import Labels
from bertkit.text.tokenizer_files import load_tokenizer
from tests.distillation.task_place import COLUMNS, HEAD, Place
from tests.tasks.tiny_kinds import write_kind
from tests.tasks.tiny_task import tiny_tokenizer, write_model


class TestBadInput:
    def test_a_teacher_without_the_tasks_head(self, place: Place, logits_only: str) -> None:
        base = write_model(place.directory / "headless")
        with pytest.raises(DataError, match=r"has no head for classification.*bertkit finetune --task mood --model"):
            place.run(logits_only, teachers=[str(base)])

    def test_an_embedding_task_of_the_command_line(self, place: Place, logits_only: str) -> None:
        task = CustomTask(kind="embedding", train=str(place.train), dev=str(place.dev), columns=COLUMNS)
        for request in (
            place.request(logits_only, task=task),
            replace(place.request(logits_only, task=task), overrides=()),
        ):
            with pytest.raises(UsageError, match=r"task: distil an embedding model with `bertkit finetune"):
                request.requested()

    def test_a_teacher_with_other_labels(self, place: Place, logits_only: str) -> None:
        other = write_model(place.directory / "other", heads=(HEAD,), labels=Labels(("no", "yes")))
        with pytest.raises(DataError, match=r"labels are no, yes, not bad, good; .*rename"):
            place.run(logits_only, teachers=[str(other)])

    @pytest.mark.parametrize("problem_type", ["regression", None])
    def test_a_regression_as_the_teacher_of_a_classification(
        self, place: Place, logits_only: str, problem_type: Literal["regression"] | None
    ) -> None:
        number = write_model(place.directory / "number", heads=(HEAD,), labels=Labels.unnamed(1, problem_type))
        for teachers in ([number], [place.teacher, number]):
            with pytest.raises(DataError, match=r"number: is a regression.*mood.*bertkit finetune --task mood"):
                place.run(logits_only, teachers=[str(each) for each in teachers])

    def test_a_student_whose_labels_stand_in_another_order(self, place: Place, logits_only: str) -> None:
        turned = write_model(place.directory / "turned", heads=(HEAD,), labels=Labels(("good", "bad")))
        with pytest.raises(
            DataError, match=r"its labels are good, bad, but the teacher's are bad, good.*new_head=true"
        ):
            place.run(logits_only, student=str(turned))
        with pytest.raises(DataError, match=r"use teachers with the same labels in the same order"):
            place.run(logits_only, teachers=[str(place.teacher), str(turned)])

    def test_a_student_with_other_tokens_and_a_term_that_compares_them(self, place: Place, every_term: str) -> None:
        directory = place.directory / "cased"
        if not directory.exists():
            model, _ = load_model(place.teacher)
            save_model(model, tiny_tokenizer(vocab_size=60), directory)
        with pytest.raises(UsageError, match=r"distillation.hidden_states: compares tokens"):
            place.run(every_term, student=str(directory))

    def test_a_quantised_student(self, place: Place, logits_only: str) -> None:
        directory = place.directory / "quantised"
        shutil.copytree(place.teacher, directory, dirs_exist_ok=True)
        contents = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(contents | {"quantization_config": {"bits": 8}}))
        with pytest.raises(DataError, match="is quantised, and quantised weights cannot be trained"):
            place.run(logits_only, student=str(directory))

    def test_several_teachers_and_a_look_inside(self, place: Place, every_term: str) -> None:
        with pytest.raises(UsageError, match="give a single teacher"):
            place.run(every_term, teachers=[str(place.teacher), str(place.calm)])

    def test_attention_of_a_layer_that_lost_heads(self, place: Place, every_term: str) -> None:
        pruned = place.directory / "pruned"
        model, _ = load_model(place.teacher)
        prune_heads(model, {1: [0]})
        save_model(model, load_tokenizer(place.teacher), pruned)
        with pytest.raises(UsageError, match=r"the student's layer 1 has 3, the teacher's layer 2 has 2.*layers"):
            finetuning_plan(place.request(every_term, student=str(place.teacher), teachers=[str(pruned)]))

    @pytest.mark.parametrize(
        ("override", "told"),
        [
            ("student={number: 3}", r"3 layers, but the teacher has only 2"),
            ("student={layers: [0, 5]}", r"student\.layers: \[0, 5\] for 2 of 2 layers"),
            ("student={layers: [1, 0]}", r"student\.layers: \[1, 0\]; .* ascending"),
            (
                "distillation=[{hidden_states: {layers: [[1, 7]]}}]",
                r"distillation\.hidden_states\.layers: \[1, 7\] is out of range",
            ),
            (
                "distillation=[{attention: {layers: [[0, 0]]}}]",
                r"distillation\.attention\.layers: .* start from layer 1",
            ),
            (
                "distillation=[{hidden_states: {layers: skip}}]",
                r"distillation\.hidden_states\.layers: 'skip' leaves nothing to compare",
            ),
        ],
    )
    def test_layers_that_are_not_there(self, place: Place, logits_only: str, override: str, told: str) -> None:
        with pytest.raises(UsageError, match=told):
            place.run(logits_only, override)

    def test_a_regression_has_no_classes(self, tmp_path: Path, place: Place) -> None:
        task, _ = write_kind(tmp_path, "regression")
        with pytest.raises(UsageError, match=r"is a regression.*logit_error"):
            place.run(place.recipe("soft", " [soft_targets]"), task=task)

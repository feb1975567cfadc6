"""Distillation on text: what is kept of a teacher, several teachers, and texts that a teacher cannot read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bertkit.distillation.plan import distill_text_plan
from bertkit.distillation.teacher_cache import TopLogits
from bertkit.errors import DataError, UsageError
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.distilbert import DistilBertConfig
from bertkit.models.families.transformer_xl import TransformerXlConfig
from bertkit.models.files.hub import load_model
from bertkit.pretraining.loss_terms import ObjectiveTerms
from bertkit.progress import silent_progress
from bertkit.training.cost import step_flops
from tests.distillation.test_distill_text import TINYBERT, WITHOUT_DROPOUT, job
from tests.distillation.tiny_teacher import SIZES, Classroom, write_classroom
from tests.training.tiny_run import write_model, write_text


@pytest.fixture(scope="module")
def classroom(tmp_path_factory: pytest.TempPathFactory) -> Classroom:
    return write_classroom(tmp_path_factory.mktemp("distill-text-teachers"))


def test_a_second_run_computes_nothing_of_its_teacher_and_ends_with_the_same_weights(
    classroom: Classroom, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ("teacher_store={top_k: 7, gb: 0.01}", "data.static_copies=2")
    caplog.set_level("INFO", logger="bertkit")
    runs = [classroom.run("first", *overrides, max_steps=4)]
    assert "the teacher's outputs: at most" in caplog.text
    monkeypatch.setattr(TopLogits, "of", None)  # nothing is computed any more
    runs.append(classroom.run("second", *overrides, max_steps=4))
    weights = [(each.run.path / "model" / "model.safetensors").read_bytes() for each in runs]
    assert weights[0] == weights[1]
    assert runs[0].results["held_out"] == runs[1].results["held_out"]


def test_what_a_teacher_computes_is_counted_unless_its_outputs_are_kept(classroom: Classroom, tmp_path: Path) -> None:
    """With an evaluation between two updates over the same batch."""

    def flops(*overrides: str) -> tuple[list[float], float, float]:
        training = job(classroom, tmp_path, "data.static_copies=1", *overrides)
        batches, counted = training.stages[0].batches[0], []
        with training.session():
            for _ in range(2):
                training.step = 0
                training.take_step(batches)
                counted.append(training.flops(batches))
                training._figures(training.stages[0], silent_progress)
        lengths_B = torch.cat([batch.sequences.cu_seqlens_B1.diff() for batch in batches]).double()
        tokens = float(lengths_B.sum())
        sizes = {"tokens": tokens, "squared_lengths": float((lengths_B**2).sum()), "sequences": len(lengths_B)}
        teacher = step_flops(training.teachers[0], **sizes, predictions=tokens) / 3
        return counted, ObjectiveTerms(training.stages[0].objectives).flops(training.model, batches), teacher

    (plain, student, teacher), (kept, _, _) = flops(), flops("teacher_store={top_k: 3, gb: 0.01}")
    assert plain == pytest.approx([student + teacher] * 2)
    assert kept == pytest.approx([student + teacher, student])


def test_two_teachers_teach_by_the_mean_of_their_logits(classroom: Classroom, tmp_path: Path) -> None:
    """A teacher listed twice has the effect of one; with a different one the run's record has both weights."""
    words = ("objective=[{soft_targets: {temperature: 2}}, {masked_lm: {weight: 0.1}}]",)
    same = [str(classroom.teacher)] * 2
    runs = [
        classroom.run("once", *words, max_steps=2, run_dir=tmp_path / "once"),
        classroom.run("twice", *words, max_steps=2, run_dir=tmp_path / "twice", teachers=same),
    ]
    losses = [each.results["held_out"]["loss/soft_targets"] for each in runs]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert runs[1].results["teacher"]["model"] == [str(classroom.teacher.resolve())] * 2
    assert runs[0].run.record["fingerprints"]["teacher"] != runs[1].run.record["fingerprints"]["teacher"]
    plans = [distill_text_plan(classroom.request("none", *words, teachers=teachers)) for teachers in (same[:1], same)]
    assert plans[1]["teacher"]["flops"] == pytest.approx(2 * plans[0]["teacher"]["flops"])
    assert plans[1]["flops"] - plans[1]["teacher"]["flops"] == plans[0]["flops"] - plans[0]["teacher"]["flops"]
    with pytest.raises(UsageError, match=r"objective\.cosine: compares layers, .* give a single teacher"):
        classroom.request("none", teachers=same).requested()
    short = BertConfig(num_hidden_layers=4, **SIZES | {"max_position_embeddings": 20})
    write_model(short, classroom.text, tmp_path / "short")
    with pytest.raises(UsageError, match=r"data\.sequence_length is 24, but the teacher reads at most 20 tokens"):
        classroom.request("none", *words, teachers=[same[0], str(tmp_path / "short")]).requested()
    other = write_model(BertConfig(num_hidden_layers=4, **SIZES), write_text(tmp_path / "few.txt", 40), tmp_path / "o")
    with pytest.raises(DataError, match="have different tokenizers"):
        classroom.request("none", *words, teachers=[same[0], str(other)]).requested()


def test_of_several_teachers_the_first_one_makes_the_student(classroom: Classroom, tmp_path: Path) -> None:
    """Its sizes and layers, whichever of them reads token types."""
    small = write_model(DistilBertConfig(num_hidden_layers=2, **SIZES), classroom.text, tmp_path / "small")
    overrides = ("objective=[soft_targets]", "model={}", "student.layers=last")
    training = job(classroom, tmp_path / "run", *overrides, teachers=[str(small), str(classroom.teacher)])
    assert training.model.encoder.config.model_dump() == load_model(small)[0].encoder.config.model_dump() | {
        "num_hidden_layers": 1
    }
    name = "attention.query.weight"
    found = training.model.get_parameter(f"encoder.layers.0.{name}")
    assert torch.equal(found, training.teachers[0].get_parameter(f"encoder.layers.1.{name}"))


def test_a_teacher_that_cannot_read_the_held_out_text_has_no_figures_there(
    classroom: Classroom, tmp_path: Path
) -> None:
    longer = ("student=null", "model.max_position_embeddings=64", "data.sequence_length=60", "optimisation.steps=2")
    settings = ("optimisation.schedule.warmup_steps=0", "engine.micro_batch_tokens=400")
    control = classroom.run("longer", *longer, *settings, run_dir=tmp_path / "longer", control=True)
    assert control.results["held_out"]["loss/masked_lm"] > 0
    assert "teacher" not in control.results


def test_a_memory_of_earlier_batches_is_refused(classroom: Classroom, tmp_path: Path) -> None:
    """The teacher reads each sequence alone, so the student's states would depend on text that it has not read."""
    sizes = {name: value for name, value in SIZES.items() if name in TransformerXlConfig.model_fields}
    settings = ("data={layout: {name: continuous}, sequence_length: 24, static_copies: null}", "model={}")
    for memory in (8, 0):
        config = TransformerXlConfig(num_hidden_layers=4, mem_len=memory, **sizes)
        teacher = write_model(config, classroom.text, tmp_path / f"memory-{memory}", heads=["causal_lm"])
        request = classroom.request("none", "objective=[forward_lm, hidden_states]", *settings, teachers=[str(teacher)])
        if memory:
            with pytest.raises(
                UsageError, match=r"hidden_states: data\.layout continuous continues texts across batches"
            ):
                request.requested()
        else:
            request.requested()


def test_a_store_that_keeps_all_words_or_has_no_room_changes_nothing(classroom: Classroom, tmp_path: Path) -> None:
    losses = []
    for store in ("null", "{top_k: 400, gb: 1}", "{top_k: 400, gb: 1e-6}"):
        training = job(classroom, tmp_path, f"teacher_store={store}", *WITHOUT_DROPOUT)
        stage_run = training.stages[0]
        for step in (0, 1):
            outcome = training.take_step(stage_run.batches[step])
        losses.append([outcome.gradient_norm, *(term.mean for term in outcome.terms.values())])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)
    with pytest.raises(UsageError, match="attention maps grow"):
        classroom.request("none", *TINYBERT, "teacher_store={}").requested()

"""A student with a small vocabulary, from a recipe to a model: its run, resuming, its control, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bertkit.distillation.dual_teacher import teacher_of
from bertkit.distillation.plan import distill_text_plan
from bertkit.distillation.shared_projections import parameter_projections_of
from bertkit.distillation.small_vocabulary import MixedVocabularyTrainer
from bertkit.errors import DataError, StoppedError, UsageError
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.electra import ElectraConfig
from bertkit.models.files.hub import load_model
from bertkit.pretraining.arguments import PretrainArguments
from bertkit.pretraining.show_batch import show_batch
from bertkit.progress import silent_progress
from bertkit.text.tokenizer import TokenizerConfig
from bertkit.text.tokenizer_files import load_tokenizer, save_tokenizer
from bertkit.text.vocabulary import train_tokenizer
from bertkit.training.cost import step_flops
from bertkit.training.run import FinishedRun
from tests.distillation.tiny_teacher import SIZES, Classroom, assert_transformers_agrees, write_classroom
from tests.training.stopping import stopping_at
from tests.training.tiny_run import write_model

RECIPE = """
title: a student with a small vocabulary for tests
kind: distill
tokenizer: {vocab_size: 60, min_frequency: 1}
data: {layout: {name: segment-pair, random_partner_probability: 0.0}, sequence_length: 24, held_out: 0.05}
model: {hidden_size: 12, intermediate_size: 20}
objective:
- masked_lm
- mixed_vocabulary: {student_share: 0.4}
- shared_projections: {weight: 0.01, direction: both}
optimisation:
  optimizer: {name: adamw}
  schedule: {name: linear, peak: 2.0e-3, warmup_steps: 2}
  batch_sequences: 6
  steps: 6
engine:
  device: cpu
  micro_batch_tokens: 90
  log_every_steps: 2
  save_every_steps: 3
  evaluate_every_steps: 6
  evaluation_sequences: 6
  pseudo_perplexity_sequences: 1
"""


SAME_TEXT = ("objective.mixed_vocabulary.student_share=1.0",)
"""The teacher reads all tokens of the student's vocabulary."""


@pytest.fixture(scope="module")
def classroom(tmp_path_factory: pytest.TempPathFactory) -> Classroom:
    return write_classroom(tmp_path_factory.mktemp("small-vocabulary"), RECIPE)


@pytest.fixture(scope="module")
def finished(classroom: Classroom) -> FinishedRun:
    return classroom.run("finished")


def job(classroom: Classroom, directory: Path, *overrides: str, **changes: object) -> MixedVocabularyTrainer:
    """The plan of a request."""
    return classroom.job(directory, MixedVocabularyTrainer, *overrides, **changes)


def test_transformers_loads_the_student_with_equal_logits(finished: FinishedRun) -> None:
    assert_transformers_agrees(finished.run.path / "model", "BertForMaskedLM")


def test_the_student_is_as_deep_as_its_teacher_and_has_a_vocabulary_of_its_own(
    finished: FinishedRun, classroom: Classroom
) -> None:
    student, teacher = (load_model(path)[0] for path in (finished.run.path / "model", classroom.teacher))
    settings, theirs = (model.encoder.config.model_dump() for model in (student, teacher))
    assert (settings["hidden_size"], settings["intermediate_size"]) == (12, 20)
    assert all(settings[name] == theirs[name] for name in ("family", "num_hidden_layers", "num_attention_heads"))
    assert (student.encoder.vocab_size, teacher.encoder.vocab_size > 100) == (60, True)
    assert not list(finished.run.path.glob("teacher*"))
    held_out = finished.results["held_out"]
    assert {"loss/masked_lm", "loss/mixed_vocabulary", "accuracy/mixed_vocabulary"} <= set(held_out)
    assert "accuracy/shared_projections" not in held_out
    assert held_out["loss"] == pytest.approx(
        held_out["loss/masked_lm"] + held_out["loss/mixed_vocabulary"] + 0.01 * held_out["loss/shared_projections"]
    )


def test_teacher_and_projections_learn_beside_the_student_and_are_kept_in_checkpoints(
    classroom: Classroom, finished: FinishedRun
) -> None:
    weights = load_file(finished.run.checkpoints / "step-00000006" / "weights.safetensors")
    first = load_file(classroom.teacher / "model.safetensors")
    name = "companions.teacher.model.encoder.layers.1.attention.query.weight"
    assert not torch.equal(weights[name], first["bert.encoder.layer.1.attention.self.query.weight"])
    assert weights["companions.teacher.model.encoder.embeddings.word.students.weight"].shape == (60, 24)
    projections = {name for name in weights if name.startswith("companions.projections.")}
    assert len(projections) == 8
    model = load_file(finished.run.path / "model" / "model.safetensors")
    assert not any("companions" in name for name in model)


def test_stopped_and_resumed_it_ends_with_the_same_bytes(
    classroom: Classroom, finished: FinishedRun, tmp_path: Path
) -> None:
    with stopping_at(3), pytest.raises(StoppedError, match="`bertkit distill --resume"):
        classroom.run("stopped", run_dir=tmp_path / "stopped")
    again = classroom.resume(tmp_path / "stopped")
    assert again.results == finished.results
    for name in ("weights", "optimizer"):
        files = [run.run.checkpoints / "step-00000006" / f"{name}.safetensors" for run in (finished, again)]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_the_control_is_the_same_student_alone(classroom: Classroom, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    beside, alone = (job(classroom, tmp_path / "a", control=control) for control in (False, True))
    assert set(beside.model.companions) == {"teacher", "projections"}
    assert not alone.model.companions
    assert [each.term for each in alone.stages[0].objectives] == ["masked_lm"]
    assert beside.model.own_state_dict().keys() == alone.model.own_state_dict().keys()
    for name, tensor in alone.model.own_state_dict().items():
        assert tensor.equal(beside.model.own_state_dict()[name]), name
    batches = [training.stages[0].batches[2] for training in (beside, alone)]
    assert all(a.ids_T.equal(b.ids_T) for a, b in zip(*batches, strict=True))


def test_a_step_is_the_same_however_its_batch_is_cut(classroom: Classroom, tmp_path: Path) -> None:
    without = ("model.hidden_dropout_prob=0", "model.attention_probs_dropout_prob=0")
    outcomes = []
    for tokens in (30, 400):
        training = job(classroom, tmp_path, f"engine.micro_batch_tokens={tokens}", *without)
        for part in training.model.modules():
            if hasattr(part, "rate"):
                part.rate = 0.0  # the teacher's dropout, from its own config
        stage_run = training.stages[0]
        batches = stage_run.batches[1]
        outcome = training.take_step(batches)
        outcomes.append([len(batches) > 1, outcome.gradient_norm, *(term.mean for term in outcome.terms.values())])
    assert [outcome[0] for outcome in outcomes] == [True, False]
    assert outcomes[0][1:] == pytest.approx(outcomes[1][1:], rel=1e-4)


def test_a_steps_operations_are_the_students_and_its_teachers(classroom: Classroom, tmp_path: Path) -> None:
    beside, alone = (job(classroom, tmp_path, *share, control=not share) for share in (SAME_TEXT, ()))
    stage_run = beside.stages[0]
    batches = stage_run.batches[1]
    own = alone.flops(alone.stages[0].batches[1])
    theirs = sum(
        step_flops(
            beside.teacher,
            tokens=each.num_tokens,
            squared_lengths=float((each.sequences.cu_seqlens_B1.diff().double() ** 2).sum()),
            predictions=each.targets["masked_lm"].count,
            sequences=each.num_sequences,
        )
        for each in batches
    )
    assert own < theirs
    assert beside.flops(batches) == pytest.approx(own + theirs, rel=0.01)


def test_dual_training_alone_is_asked_for_by_leaving_projections_out(classroom: Classroom, tmp_path: Path) -> None:
    training = job(classroom, tmp_path, "objective=[masked_lm, mixed_vocabulary]", "model.num_hidden_layers=2")
    assert set(training.model.companions) == {"teacher"}
    assert teacher_of(training.model).own_words == load_model(classroom.teacher)[0].encoder.vocab_size
    both = job(classroom, tmp_path)
    assert parameter_projections_of(both.model)["down_out_width"].shape == (24, 12)


def test_a_plan_counts_the_teachers_training_and_says_what_it_is_for(classroom: Classroom) -> None:
    plan, control = (distill_text_plan(classroom.request("none", control=control)) for control in (False, True))
    assert plan["teacher"]["flops"] > 0 == control["teacher"]["flops"]
    assert plan["flops"] - plan["teacher"]["flops"] == pytest.approx(control["flops"])
    assert plan["disk_mb"] > control["disk_mb"] + plan["teacher"]["parameters"] * 12 / 1e6
    assert plan["memory_mb"] > control["memory_mb"]
    assert plan["parameters"] == control["parameters"]
    compares = {row["term"]: row["compares"] for row in plan["layers"]}
    assert compares == {
        "mixed_vocabulary": "words split by the student's vocabulary with probability 0.4",
        "shared_projections": "parameters of layers, embeddings, head, down and up",
    }


def test_a_student_that_goes_on_keeps_its_own_vocabulary(
    classroom: Classroom, finished: FinishedRun, tmp_path: Path
) -> None:
    training = job(classroom, tmp_path, "model.family=bert", student=str(finished.run.path))
    given, _ = load_model(finished.run.path / "model")
    for name, parameter in given.named_parameters():
        assert torch.equal(training.model.get_parameter(name), parameter)
    assert training.tokenizer.fingerprint == load_tokenizer(finished.run.path / "model").fingerprint


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.num_hidden_layers=3"], "has 3 layers, its teacher 4, .* the same number of layers"),
        (["model.num_hidden_layers=5"], "write model.num_hidden_layers: 4"),
        (["objective.mixed_vocabulary.student_share=1.5"], r"objective\.mixed_vocabulary\.student_share: expected"),
        (["objective.shared_projections.weight=-1"], r"objective\.shared_projections\.weight: expected"),
        (["tokenizer.lowercase=false"], "tokenizer.lowercase: false, but the teacher's is true"),
        (["tokenizer.strip_accents=false"], "leave tokenizer.strip_accents out"),
        (["tokenizer.type=unigram"], "tokenizer.type is unigram, .* write wordpiece"),
        (["student={}"], "leave student out"),
        (["teacher_store={}"], "leave teacher_store out"),
        (
            ["objective=[masked_lm, mixed_vocabulary, cosine, soft_targets]"],
            "cosine, soft_targets compares the outputs",
        ),
        (["objective=[masked_lm, mixed_vocabulary, replaced_token]"], "leave one of them out"),
        (["objective=[mixed_vocabulary]"], "add masked_lm to train the student"),
        (
            ["objective=[masked_lm, shared_projections]", "tokenizer={}"],
            "needs mixed_vocabulary, which trains the teacher",
        ),
        (
            ["data.sequence_length=48", "model.max_position_embeddings=48"],
            "is 48, but the teacher reads at most 40 tokens",
        ),
        (["frozen=[embeddings.segment]"], r"frozen: the student has no part 'embeddings\.segment'"),
        (
            ["optimisation.stages=[{share: 0.5}, {share: 0.5, set: {objective: [masked_lm, cosine]}}]"],
            "a stage has cosine, but the recipe's own objective has mixed_vocabulary",
        ),
        (
            [
                "objective=[masked_lm]",
                "tokenizer={}",
                "optimisation.stages=[{share: 1, set: {objective: [masked_lm, mixed_vocabulary]}}]",
            ],
            "a stage has mixed_vocabulary, but the recipe's own objective does not have mixed_vocabulary",
        ),
        (
            ["optimisation.stages=[{share: 0.5}, {share: 0.5, set: {model.num_hidden_layers: 8}}]"],
            "shared_projections: the student has 8 layers|cannot grow while its teacher",
        ),
    ],
)
def test_what_does_not_fit_is_told_before_anything_is_done(
    classroom: Classroom, tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        job(classroom, tmp_path, *overrides)
    assert not list(tmp_path.iterdir())


def test_teachers_that_cannot_read_two_vocabularies_are_refused(classroom: Classroom, tmp_path: Path) -> None:
    config = BertConfig(num_hidden_layers=4, **SIZES)
    silent = write_model(config, classroom.text, tmp_path / "silent", heads=())
    electra = ElectraConfig(num_hidden_layers=4, embedding_size=8, **SIZES)
    other = write_model(electra, classroom.text, tmp_path / "electra")
    bytewise = write_model(config, classroom.text, tmp_path / "bytewise")
    text = classroom.text.read_text().split("\n")
    save_tokenizer(train_tokenizer(TokenizerConfig(type="byte-bpe", vocab_size=290), text), bytewise)
    cased = write_model(config, classroom.text, tmp_path / "cased")
    save_tokenizer(train_tokenizer(TokenizerConfig(vocab_size=90, min_frequency=1, lowercase=False), text), cased)
    path = f"tokenizer={json.dumps({'path': str(classroom.teacher)})}"
    small = write_model(config, classroom.text, tmp_path / "small")
    contents = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**contents, "quantization_config": {"quant_method": "any"}}))
    for directory, overrides, message in (
        (small, (), "quantised"),
        (silent, (), "the model has no masked-LM head"),
        (other, (), "models of the family electra cannot read two vocabularies"),
        (bytewise, (), "its tokenizer is a BPE vocabulary"),
        (cased, (path,), "lowercase is True, the teacher's is False"),
    ):
        with pytest.raises(DataError, match=message):
            job(classroom, tmp_path, *overrides, teachers=[str(directory)])
    kept = job(classroom, tmp_path, teachers=[str(cased)])
    assert not kept.tokenizer.lowercases


def test_batches_of_two_vocabularies_are_not_shown(classroom: Classroom, finished: FinishedRun) -> None:
    request = PretrainArguments(recipe=str(finished.run.path), cache=classroom.directory / "cache")
    with pytest.raises(UsageError, match="in two vocabularies"):
        show_batch(request, step=1, sequences=1, progress=silent_progress)

"""Distillation on text, from a recipe to a model: its steps compared with transformers, resuming, stages, and
errors."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bertkit.data.batch import PackedBatch
from bertkit.distillation.losses import cosine_distance, soft_targets
from bertkit.distillation.plan import distill_text_plan
from bertkit.distillation.text import TextDistiller
from bertkit.errors import DataError, StoppedError, UsageError
from bertkit.models.conversion.pruning import prune_heads, pruned_heads
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.modernbert import ModernBertConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel
from bertkit.pretraining.arguments import PretrainArguments
from bertkit.pretraining.show_batch import show_batch
from bertkit.progress import silent_progress
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.run import FinishedRun
from tests.distillation.tiny_teacher import SIZES, Classroom, assert_transformers_agrees, write_classroom
from tests.overrides import parsed
from tests.training.stopping import stopping_at
from tests.training.tiny_run import write_model

WITHOUT_DROPOUT = ("model.hidden_dropout_prob=0", "model.attention_probs_dropout_prob=0")


@pytest.fixture(scope="module")
def classroom(tmp_path_factory: pytest.TempPathFactory) -> Classroom:
    return write_classroom(tmp_path_factory.mktemp("distill-text"))


@pytest.fixture(scope="module")
def finished(classroom: Classroom) -> FinishedRun:
    return classroom.run("finished")


def job(classroom: Classroom, directory: Path, *overrides: str, **changes: object) -> TextDistiller:
    """The plan of a request."""
    return classroom.job(directory, TextDistiller, *overrides, **changes)


def test_transformers_loads_the_student_with_equal_logits(finished: FinishedRun) -> None:
    assert_transformers_agrees(finished.run.path / "model", "DistilBertForMaskedLM")


def test_steps_are_those_of_a_plain_loop_over_transformers(classroom: Classroom, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    optimizer = "optimisation.optimizer={name: adamw, weight_decay: 0, eps: 1e-4, betas: [0.9, 0.98], clip_norm: null}"
    # split into micro-batches here, in one batch there
    ours = job(
        classroom, tmp_path, *WITHOUT_DROPOUT, optimizer, "engine.precision=fp32", "engine.micro_batch_tokens=50"
    )
    stage_run = ours.stages[0]
    save_model(ours.model, ours.tokenizer, tmp_path / "first")
    student = transformers.DistilBertForMaskedLM.from_pretrained(tmp_path / "first").train()
    teacher = transformers.BertForMaskedLM.from_pretrained(classroom.teacher).eval()
    plain = torch.optim.AdamW(student.parameters(), lr=0.0, betas=(0.9, 0.98), eps=1e-4, weight_decay=0.0)
    for step in range(4):
        samples = stage_run.batches.samples(step)
        batch = PackedBatch.from_samples(samples)
        lengths = samples.lengths_B.tolist()
        pieces = [torch.from_numpy(each).split(lengths) for each in (samples.ids_T, samples.token_types_T)]
        ids_BS, types_BS = (torch.nn.utils.rnn.pad_sequence(list(each), batch_first=True) for each in pieces)
        mask_BS = torch.arange(ids_BS.shape[1]) < torch.tensor(lengths)[:, None]
        mine = student(input_ids=ids_BS, attention_mask=mask_BS.long(), output_hidden_states=True)
        with torch.no_grad():
            theirs = teacher(
                input_ids=ids_BS, attention_mask=mask_BS.long(), token_type_ids=types_BS, output_hidden_states=True
            )
        targets = batch.targets["masked_lm"]
        words = soft_targets(mine.logits[mask_BS], theirs.logits[mask_BS], 2.0).mean()
        masked = torch.nn.functional.cross_entropy(mine.logits[mask_BS][targets.index_M], targets.id_M)
        direction = cosine_distance(mine.hidden_states[-1][mask_BS], theirs.hidden_states[-1][mask_BS]).mean()
        loss = 5 * words + 2 * masked + direction
        plain.zero_grad()
        loss.backward()
        for group in plain.param_groups:
            group["lr"] = stage_run.stage.learning_rate(step)
        plain.step()
        outcome = ours.take_step(stage_run.batches[step])
        found = sum(each.weight * outcome.terms[each.term].mean for each in stage_run.objectives)
        assert found == pytest.approx(loss.item(), rel=1e-5)
        norm = torch.stack([parameter.grad.norm() for parameter in student.parameters()]).norm()
        assert outcome.gradient_norm == pytest.approx(float(norm), rel=1e-4)
    save_model(ours.model, ours.tokenizer, tmp_path / "last")
    expected = student.state_dict()
    for name, tensor in load_file(tmp_path / "last" / "model.safetensors").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=2e-6)


def test_the_student_begins_with_its_teachers_layers_words_and_head(classroom: Classroom, tmp_path: Path) -> None:
    student = job(classroom, tmp_path).model
    teacher, _ = load_model(classroom.teacher)
    of_teacher = dict(teacher.named_parameters())
    for name, parameter in student.named_parameters():
        origin = name.replace("layers.1.", "layers.3.")
        assert torch.equal(parameter, of_teacher[origin]), name
    random = job(classroom, tmp_path, "student=null").model
    parts = job(classroom, tmp_path, "student={layers: null, head: false}").model
    word, layer, head = (
        [torch.equal(model.get_parameter(name), of_teacher[name]) for model in (random, parts)]
        for name in (
            "encoder.embeddings.word.weight",
            "encoder.layers.0.attention.query.weight",
            "masked_lm.dense.weight",
        )
    )
    assert (word, layer, head) == ([False, True], [False, False], [False, False])


def test_frozen_parts_stay_as_they_begin(classroom: Classroom, tmp_path: Path) -> None:
    training = job(classroom, tmp_path, "frozen=[embeddings.position]")
    teacher, student = training.teachers[0].encoder, training.model.encoder
    training.take_step(training.stages[0].batches[1])
    training.take_step(training.stages[0].batches[2])
    assert torch.equal(student.embeddings.position.weight, teacher.embeddings.position.weight)
    assert not torch.equal(student.embeddings.word.weight, teacher.embeddings.word.weight)


TINYBERT = (
    "student=null",
    "model.hidden_size=12",
    "objective=[{attention: {}}, {hidden_states: {projection: fit}}, {embeddings: {projection: fit}}]",
)


def test_one_map_is_learnt_for_all_layers_and_stays_out_of_the_model(classroom: Classroom) -> None:
    finished = classroom.run("maps", *TINYBERT)
    weights = load_file(finished.run.checkpoints / "step-00000012" / "weights.safetensors")
    maps = [name for name in weights if name.startswith("companions.")]
    assert sorted(maps) == ["companions.distillation.fit.bias", "companions.distillation.fit.weight"]
    model, report = load_model(finished.run.path / "model")
    assert not report.missing
    assert (model.encoder.width, model.head_names) == (12, ())
    lines = [json.loads(line) for line in finished.run.metrics.read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
    assert not any(key.startswith("accuracy/") for line in lines for key in line)


PHASES = (
    "progressive={steps_per_layer: 2, objective: [{feature_maps: {weight: 100}}, {attention: {of: probabilities}}],"
    " then: {optimisation.schedule: {name: linear, peak: 1e-3, warmup_steps: 1}}}",
    "student={layers: null}",
)


def test_transfer_goes_layer_by_layer_before_the_rest(classroom: Classroom, tmp_path: Path) -> None:
    training = job(classroom, tmp_path, *PHASES)
    before = {name: parameter.detach().clone() for name, parameter in training.model.named_parameters()}
    assert [(run.stage.first_step, run.stage.end_step) for run in training.stages] == [(0, 2), (2, 4), (4, 12)]
    layers = [[each.distilled.layer_pairs(training.shapes) for each in run.objectives] for run in training.stages[:2]]
    assert layers == [[((1, 1),), ((1, 2),)], [((2, 2),), ((2, 4),)]]
    assert [each.term for each in training.stages[2].objectives] == ["soft_targets", "masked_lm", "cosine"]
    assert [run.stage.own_schedule for run in training.stages] == [False, False, True]
    first = training.stages[0]
    for step in range(2):
        training.take_step(first.batches[step])
    changed = {
        name for name, parameter in training.model.named_parameters() if not torch.equal(parameter, before[name])
    }
    assert any(name.startswith("encoder.layers.0.") for name in changed)
    assert not any(name.startswith(("encoder.layers.1.", "masked_lm.")) for name in changed)


def test_in_a_layers_phase_it_moves_fast_those_before_slowly_and_all_else_stays(
    classroom: Classroom, tmp_path: Path
) -> None:
    rates = "progressive.current_rate=3.0", "progressive.earlier_rate=0.3", "progressive.new_moments=true"
    adam = "optimisation.optimizer={name: adamw, weight_decay: 0}"
    constant = "progressive.phases={optimisation.schedule: {name: constant, peak: 1e-3}}"
    training = job(classroom, tmp_path, *PHASES, *rates, adam, constant)
    largest: list[dict[str, float]] = []
    with closing(training.batches()) as updates:
        for batches in updates:
            before = {name: parameter.detach().clone() for name, parameter in training.model.named_parameters()}
            training.take_step(batches)
            moved: dict[str, float] = {}
            for name, parameter in training.model.named_parameters():
                part = name.split(".")[2] if ".layers." in name else "other"
                moved[part] = max(moved.get(part, 0.0), float((parameter.detach() - before[name]).abs().max()))
            largest.append(moved)
            if training.step == 5:
                break
    # The first update of Adam moves a weight by its learning rate.
    assert largest[0] == {"0": pytest.approx(3e-3, rel=0.02), "1": 0.0, "other": 0.0}
    assert largest[2] == {"0": pytest.approx(3e-4, rel=0.02), "1": pytest.approx(3e-3, rel=0.02), "other": 0.0}
    assert min(largest[4].values()) > 0  # after the phases all layers are trained


def test_a_phases_projection_is_trained_at_the_rate_of_its_layer(classroom: Classroom, tmp_path: Path) -> None:
    phases = "{steps_per_layer: 2, current_rate: 3.0, objective: [{hidden_states: {projection: fit}}]}"
    training = job(classroom, tmp_path, f"progressive={phases}", "student={layers: null}")
    rates = training.parameter_rates(training.model, training.stages[1])
    trained = {name.rpartition(".")[0] for name, rate in rates.items() if rate}
    assert {"companions.distillation.fit", "encoder.layers.1.attention.query"} < trained
    assert set(rates.values()) == {0.0, 3.0}


def test_stopped_and_resumed_it_ends_with_the_same_bytes(classroom: Classroom, tmp_path: Path) -> None:
    """Stopped inside the second layer's phase, with a trained map and with dropout."""
    overrides = (PHASES[0].replace("feature_maps: {weight: 100}", "hidden_states: {projection: fit}"), PHASES[1])
    whole = classroom.run("whole", *overrides, run_dir=tmp_path / "whole", max_steps=6)
    with stopping_at(3), pytest.raises(StoppedError, match="`bertkit distill --resume"):
        classroom.run("stopped", *overrides, run_dir=tmp_path / "stopped", max_steps=6)
    again = classroom.resume(tmp_path / "stopped")
    assert again.results == whole.results
    for name in ("weights", "optimizer"):
        files = [run.run.checkpoints / "step-00000006" / f"{name}.safetensors" for run in (whole, again)]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_the_control_is_the_same_student_without_the_teachers_terms(
    classroom: Classroom, finished: FinishedRun
) -> None:
    control = classroom.run("control", control=True, max_steps=3)
    assert {name for name in control.results["held_out"] if name.startswith("loss/")} == {"loss/masked_lm"}
    assert "control: true" in (control.run.path / "recipe.yaml").read_text()
    assert control.run.record["what_hash"] != finished.run.record["what_hash"]
    alone = classroom.request("none", *TINYBERT, control=True).requested()
    assert [each.term for each in alone.objectives] == ["masked_lm"]
    phases = classroom.request("none", *PHASES, control=True).requested()
    assert not phases.optimisation.stages


def test_results_stand_beside_the_teachers_own(finished: FinishedRun, classroom: Classroom) -> None:
    results = finished.results
    assert set(results["held_out"]) >= {"loss/soft_targets", "accuracy/soft_targets", "loss/cosine", "loss/masked_lm"}
    assert "accuracy/cosine" not in results["held_out"]
    teacher = results["teacher"]
    assert teacher["model"] == str(classroom.teacher)
    assert 0 <= teacher["held_out"]["accuracy/masked_lm"] <= 1
    assert finished.run.record["fingerprints"]["teacher"]


def test_a_plan_counts_the_teachers_part_and_shows_the_layers(classroom: Classroom) -> None:
    plan, control = (distill_text_plan(classroom.request("none", control=control)) for control in (False, True))
    assert plan["teacher"]["flops"] > 0 == control["teacher"]["flops"]
    assert plan["flops"] - plan["teacher"]["flops"] > control["flops"]
    compares = {row["term"]: row["compares"] for row in plan["layers"]}
    assert compares == {"soft_targets": "words at all positions", "cosine": "layers 2: 4"}


def test_a_model_without_a_family_is_the_teachers_with_fewer_layers(classroom: Classroom) -> None:
    for overrides, layers in (((), 2), (("student.layers=[0, 1, 3]",), 3), (("student.layers=null",), 2)):
        recipe = classroom.request("none", "model={hidden_dropout_prob: 0.3}", *overrides).requested()
        settings = recipe.model.model_dump()
        assert (settings["family"], settings["num_hidden_layers"]) == ("bert", layers)
        assert (settings["hidden_size"], settings["hidden_dropout_prob"]) == (24, 0.3)


def test_what_is_set_layer_by_layer_goes_with_the_layers(classroom: Classroom, tmp_path: Path) -> None:
    kinds = ("full_attention", "sliding_attention", "sliding_attention", "full_attention")
    config = ModernBertConfig(**SIZES, num_hidden_layers=4, layer_types=kinds)
    request = replace(
        classroom.request("none", "model={}"),
        teachers=[str(write_model(config, classroom.text, tmp_path / "modern"))],
    )

    def of_student(*overrides: str) -> list[str]:
        recipe = replace(request, overrides=parsed([*request.overrides, *overrides])).requested()
        return list(recipe.model.model_dump()["layer_types"])

    full, sliding = kinds[:2]
    assert of_student() == [full, full]
    assert of_student("student.layers=[0, 2, 3]") == [full, sliding, full]
    assert of_student("student.layers=null") == [full, sliding]
    with pytest.raises(UsageError, match=r"^student\.layers: \[1, 3\]; .* no norm before it: keep layer 0"):
        of_student("student.layers=[1, 3]")
    with pytest.raises(UsageError, match=r"student\.layers: 'uniform' of 4 layers needs .* found 9"):
        of_student("student.layers=uniform", "model.num_hidden_layers=9")


def test_a_student_may_begin_as_a_model_of_its_own(classroom: Classroom, finished: FinishedRun, tmp_path: Path) -> None:
    student = job(classroom, tmp_path, student=str(finished.run.path)).model
    given, _ = load_model(finished.run.path / "model")
    for name, parameter in given.named_parameters():
        assert torch.equal(student.get_parameter(name), parameter)


def test_a_student_with_another_number_of_words_is_refused(
    classroom: Classroom, finished: FinishedRun, tmp_path: Path
) -> None:
    """A table can have spare rows that belong to no token, so models with one tokenizer can differ in it."""
    tokenizer = load_tokenizer(classroom.teacher)
    encoder = BertConfig(num_hidden_layers=4, **SIZES).build(tokenizer.vocab_size + 8, pad_id=tokenizer.pad_id)
    teacher = HeadedModel(encoder, ("masked_lm",))
    teacher.initialise(seed=2)
    save_model(teacher, tokenizer, tmp_path / "spare")
    changes = {"teachers": [str(tmp_path / "spare")], "student": str(finished.run.path)}
    with pytest.raises(DataError, match=r"student: .*: its word table has \d+ rows, that of the teacher \d+"):
        job(classroom, tmp_path / "run", **changes)
    assert job(classroom, tmp_path / "run", "objective=[masked_lm, cosine]", **changes).teachers


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["student.layers=[0, 4]"], r"student\.layers: \[0, 4\] for 2 of 4 layers; they are counted from 0 to 3"),
        (["student.layers=[0, 1, 2]"], r"for 2 of 4 layers.*; for 2 of its layers.*model=.num_hidden_layers: 2."),
        (
            ["model.num_hidden_layers=5", "student=null", "objective=[hidden_states]"],
            r"objective\.hidden_states\.layers: .* a student of 5 layers",
        ),
        (["objective.cosine.layers=[[3, 4]]"], r"objective\.cosine\.layers: \[3, 4\] is out of range"),
        (
            ["model.hidden_size=12"],
            r"objective\.cosine\.projection: the student's states have width 12, the teacher's 24",
        ),
        (["objective=[attention]", "model.num_attention_heads=2"], "the student has 2 heads per layer, the teacher 3"),
        (["objective.soft_targets.temperature=0"], r"objective\.soft_targets\.temperature: expected"),
        (
            ["objective={soft_targets: {weight: 0}}"],
            "objective: expected a list",
        ),
        (["objective=[soft_targets: {weight: 0}]"], "all weights are 0"),
        (["objective=[soft_targets: {positions: masked}]"], "positions is masked, but no objective masks"),
        (["objective=[masked_lm, replaced_token, cosine]"], "leave one of them out"),
        (
            ["progressive={steps_per_layer: 2, objective: [patience]}"],
            r"progressive\.objective\.patience\.layers: no layer of the teacher is given for the student's layer 2",
        ),
        (["tokenizer.vocab_size=200"], "tokenizer: a student uses its teacher's tokenizer"),
        (
            ["data.sequence_length=48", "model.max_position_embeddings=48"],
            "is 48, but the teacher reads at most 40 tokens",
        ),
        (
            ["frozen=[embeddings.segment]"],
            r"frozen: the student has no part 'embeddings\.segment'; its parts are embeddings\.norm",
        ),
        (["init=x"], "not both"),
        (
            ["optimisation.stages=[{share: 0.5}, {share: 0.5, set: {model.num_hidden_layers: 4}}]"],
            "a student cannot grow during distillation",
        ),
        (["optimisation.stages=[{share: 1}]", PHASES[0]], r"leave optimisation\.stages out"),
        ([PHASES[0].replace("layer: 2", "layer: 9")], "progressive takes 18 steps"),
    ],
)
def test_what_does_not_fit_is_told_before_anything_is_done(
    classroom: Classroom, tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        job(classroom, tmp_path, *overrides)
    assert not list(tmp_path.iterdir())


def test_states_alone_have_no_accuracy_to_warn_of(classroom: Classroom, tmp_path: Path) -> None:
    for objective, is_told in (("{hidden_states: {projection: fit}}", False), ("soft_targets", True)):
        size = job(classroom, tmp_path / "run", f"objective=[{objective}]").stages[-1].held_out_size
        assert ("accuracy" in size.in_words) == is_told
        assert size.suffices != is_told
        assert f"in {size.sequences} sequences" in size.in_words


def test_attention_of_pruned_layers_is_refused_before_anything_is_done(classroom: Classroom, tmp_path: Path) -> None:
    model, _ = load_model(classroom.teacher)
    prune_heads(model, {3: [0, 2]})
    save_model(model, load_tokenizer(classroom.teacher), tmp_path / "pruned")
    run = tmp_path / "run"
    compared = "objective=[{{attention: {{layers: [[1, 2], [2, {}]]}}}}]"
    with pytest.raises(
        UsageError, match=r"^objective\.attention: .* the student's layer 2 has 3, the teacher's layer 4 has 1"
    ):
        job(classroom, run, "student=null", compared.format(4), teachers=[str(tmp_path / "pruned")])
    assert not run.exists()
    job(classroom, run, "student=null", compared.format(3), teachers=[str(tmp_path / "pruned")])
    same = "objective=[{attention: {layers: [[1, 1], [4, 4]]}}]"
    both = {"teachers": [str(tmp_path / "pruned")], "student": str(tmp_path / "pruned")}
    training = job(classroom, run, "model={family: bert}", same, **both)
    assert training.shapes.student == training.shapes.teacher
    assert pruned_heads(training.model.encoder) == {3: (0, 2)}


def test_a_missing_teacher_and_one_that_predicts_no_words_are_refused(classroom: Classroom, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give --teacher MODEL"):
        classroom.request("none", teachers=()).requested()
    silent = write_model(BertConfig(num_hidden_layers=4, **SIZES), classroom.text, tmp_path / "silent", heads=())
    told = r"silent: objective\.soft_targets compares words, but this teacher has no masked-LM head"
    with pytest.raises(DataError, match=told):  # before the text is tokenised
        classroom.request("none", "student.head=false", teachers=[str(silent)]).requested()


def test_another_tokenizer_and_a_changed_teacher_are_refused(classroom: Classroom, tmp_path: Path) -> None:
    config = BertConfig(num_hidden_layers=4, **SIZES)
    (tmp_path / "text.txt").write_text("quite another lot of words, so that the pieces differ\n" * 9)
    other = write_model(config, tmp_path / "text.txt", tmp_path / "other")
    with pytest.raises(DataError, match="student and teacher must read the same tokens"):
        classroom.request("none", f"tokenizer.path={other}").requested()
    run = tmp_path / "run"
    with pytest.raises(StoppedError):
        classroom.run("run", run_dir=run, max_minutes=0.0)
    record = json.loads((run / "run.json").read_text())
    record["fingerprints"]["teacher"] = "0" * 64
    (run / "run.json").write_text(json.dumps(record))
    with pytest.raises(DataError, match="teacher has changed since the run began"):
        classroom.run("run", recipe=None, sources=[], teachers=(), run_dir=None, resume=str(run))


def test_a_students_batch_is_shown_as_it_was_read(classroom: Classroom, finished: FinishedRun, tmp_path: Path) -> None:
    request = PretrainArguments(recipe=str(finished.run.path), cache=classroom.directory / "cache")
    batch = show_batch(request, step=4, sequences=6, progress=silent_progress)
    own = job(classroom, tmp_path)
    samples = own.stages[0].batches.samples(3)
    read = [[own.tokenizer.token(token) for token in one.ids_T.tolist()] for one in samples.split(1)]
    assert [[token.token for token in sequence.tokens] for sequence in batch.sequences] == read
    assert any(token.change == "masked" for sequence in batch.sequences for token in sequence.tokens)

"""Distillation on a task equals a plain `transformers` loop for any micro-batch, and is bit-identical after a stop."""

from __future__ import annotations

import fcntl
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bertkit.data.batch import PackedBatch
from bertkit.distillation.activations import ActivationSpec
from bertkit.distillation.loss_terms import task_query
from bertkit.distillation.losses import soft_targets
from bertkit.distillation.student import from_teacher_layers
from bertkit.distillation.task_arguments import DistillArguments
from bertkit.distillation.teacher_files import TeacherFiles, cache_identity
from bertkit.errors import DataError, StoppedError, UsageError
from bertkit.files import read_json, sha256_of
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.run import finetune
from bertkit.finetuning.task_order import EpochOrder
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.labels import Labels
from bertkit.progress import silent_progress
from bertkit.tasks.base import TaskBatch
from bertkit.tasks.classification import MultiLabelClassification, TextSettings
from bertkit.tasks.readers import read_own
from bertkit.tasks.tagging import FIRST, Tagging, TaggingSettings
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.run import FinishedRun
from tests.distillation.task_place import ALL_TERMS, DEV, HEAD, LABELS, SETTINGS, TRAIN, Place
from tests.overrides import parsed
from tests.tasks.tiny_kinds import KINDS, write_kind
from tests.tasks.tiny_task import reviews, tiny_tokenizer, write_model, write_table
from tests.training.stopping import stopping_at


def weights(outcome: FinishedRun) -> str:
    return sha256_of(outcome.run.model / "model.safetensors")


def lines_of(outcome: FinishedRun) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in outcome.run.metrics.read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def oracle_loss(student: Any, teacher: Any, rows: dict[str, Any], label_I: torch.Tensor) -> torch.Tensor:
    """ALL_TERMS written out on padded rows: padding is masked, and sums are over real tokens."""
    asked = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        taught = teacher(**rows, **asked)
    own = student(**rows, **asked)
    real = rows["attention_mask"].bool()
    labels = torch.nn.functional.cross_entropy(own.logits, label_I)
    p = torch.softmax(taught.logits / 3, -1)
    soft = 9 * (p * (p.log() - torch.log_softmax(own.logits / 3, -1))).sum(-1).mean()
    pairs = [(own.hidden_states[0], taught.hidden_states[0]), (own.hidden_states[1], taught.hidden_states[2])]
    hidden = sum((a - b)[real].square().mean() for a, b in pairs)
    unit = [
        state[1][:, 0] / state[1][:, 0].norm(dim=-1, keepdim=True)
        for state in (own.hidden_states, taught.hidden_states)
    ]
    patience = (unit[0] - unit[1]).square().mean()
    return 0.3 * labels + 0.7 * soft + 2.0 * hidden + 5.0 * patience


def test_a_teacher_that_predicts_a_constant_is_a_warning_before_the_first_step(
    place: Place, logits_only: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, _ = load_model(place.teacher)
    with torch.no_grad():
        model.get_parameter(f"{HEAD}.output.bias").copy_(torch.tensor([9.0, 0.0]))
    save_model(model, load_tokenizer(place.teacher), place.directory / "constant")
    outcome = place.run(logits_only, "optimisation.max_steps=1", teachers=[str(place.directory / "constant")])
    told = "the model does no better than always predicting 'bad': it predicts nothing else"
    assert outcome.results["teacher"]["degenerate"] == told
    warnings = [each.getMessage() for each in caplog.records if "use another teacher" in each.getMessage()]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"teacher {place.directory / 'constant'}: {told};")


def test_steps_equal_a_plain_loop_over_a_teacher_of_transformers(place: Place) -> None:
    """The same batches and learning rates, torch's own AdamW on padded rows, no dropout; attention is tested with the
    terms."""
    transformers = pytest.importorskip("transformers")
    terms = ALL_TERMS.replace("- attention: {weight: 0.5, layers: [[1, 2]]}\n", "")
    outcome = place.run(
        place.recipe("plain", terms),
        "optimisation.max_steps=5",
        teachers=[str(place.calm)],
        run_dir=place.directory / "plain",
    )
    auto = transformers.AutoModelForSequenceClassification
    teacher = auto.from_pretrained(place.calm, attn_implementation="eager").eval()
    student = auto.from_pretrained(place.calm, attn_implementation="eager").train()
    student.bert.encoder.layer = student.bert.encoder.layer[1:]
    decayed = [p for n, p in student.named_parameters() if "LayerNorm" not in n and not n.endswith("bias")]
    kept = [p for n, p in student.named_parameters() if "LayerNorm" in n or n.endswith("bias")]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": kept, "weight_decay": 0.0}], lr=1.0, eps=1e-6
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(place.calm)
    rows, order = reviews(TRAIN, 1), EpochOrder(TRAIN, 7, 0)
    ids = {"bad": 0, "good": 1}
    for step, line in enumerate(lines_of(outcome)):
        items = [rows[item] for item in order.items(step).tolist()]
        batch = dict(tokenizer([text for text, _ in items], padding=True, return_tensors="pt"))
        loss = oracle_loss(student, teacher, batch, torch.tensor([ids[label] for _, label in items]))
        assert line["loss"] == pytest.approx(float(loss.detach()), rel=2e-4), step
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = line["lr"]
        optimizer.step()
    ours = auto.from_pretrained(outcome.run.model)
    assert ours.config.num_hidden_layers == 1
    for name, parameter in student.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], parameter, atol=3e-5, rtol=1e-3, msg=name)


def test_every_term_stands_in_the_metrics_and_adds_up(place: Place, every_term: str) -> None:
    outcome = place.run(every_term, "optimisation.max_steps=4", run_dir=place.directory / "terms")
    weight = {"labels": 0.3, "soft_targets": 0.7, "hidden_states": 2.0, "patience": 5.0, "attention": 0.5}
    for line in lines_of(outcome):
        parts = {name: line[f"loss/{name}"] for name in weight}
        assert line["loss"] == pytest.approx(sum(weight[name] * part for name, part in parts.items()))
        assert all(part > 0 for part in parts.values())
        assert {name for name in line if name.startswith("accuracy/")} == {"accuracy/labels", "accuracy/soft_targets"}


@pytest.mark.parametrize("terms", ["every_term", "logits_only"])
def test_the_cut_of_a_batch_changes_nothing_but_rounding(
    place: Place, terms: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    recipe = request.getfixturevalue(terms)
    overrides = ["optimisation.max_steps=4"]
    whole, cut = (
        place.run(
            recipe,
            *overrides,
            f"engine.micro_batch_tokens={size}",
            teachers=[str(place.calm)],
            run_dir=tmp_path / str(size),
        )
        for size in (4096, 17)
    )
    for one, other in zip(lines_of(whole), lines_of(cut), strict=True):
        assert {name for name in one if "loss" in name} == {name for name in other if "loss" in name}
        for name in (name for name in one if "loss" in name):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6), name


def test_a_stop_and_a_resume_give_the_same_model_to_the_bit(
    place: Place, finished: FinishedRun, logits_only: str
) -> None:
    run = place.directory / "stopped"
    with stopping_at(5), pytest.raises(StoppedError, match=r"at step 5 .*`bertkit distill --resume"):
        place.run(logits_only, run_dir=run)
    resumed = finetune(
        DistillArguments(resume=str(run), runs_root=place.directory / "runs", cache=place.directory / "cache"),
        progress=silent_progress,
    )
    assert weights(resumed) == weights(finished)
    assert resumed.results["splits"] == finished.results["splits"]


def test_outputs_that_are_read_again_equal_those_that_are_computed(
    place: Place, finished: FinishedRun, logits_only: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    again = place.run(logits_only, run_dir=place.directory / "again")
    assert any(f"{TRAIN} are cached already" in message for message in caplog.messages)
    assert weights(again) == weights(finished)
    unkept = place.run(logits_only, "engine.teacher_store_gb=0", run_dir=place.directory / "unkept")
    assert any("computes in every pass" in message for message in caplog.messages)
    for one, other in zip(lines_of(finished), lines_of(unkept), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_a_run_beside_one_that_writes_the_store_has_the_same_bytes(
    place: Place, logits_only: str, tmp_path: Path
) -> None:
    cut = "engine.micro_batch_tokens=23"
    alone = place.run(logits_only, cut, cache=tmp_path / "cache", run_dir=tmp_path / "alone")
    (store,) = (tmp_path / "cache" / "teachers").iterdir()
    with (store / "index.bin").open("r+b") as index:
        fcntl.flock(index, fcntl.LOCK_EX)
        index.truncate(32 * 5)
        beside = place.run(logits_only, cut, cache=tmp_path / "cache", run_dir=tmp_path / "beside")
        assert index.seek(0, 2) == 32 * 5, "nothing is written to it"
    assert weights(beside) == weights(alone)
    assert lines_of(beside)[0]["loss"] == lines_of(alone)[0]["loss"]


def test_kept_outputs_are_those_of_these_weights_settings_tokens_and_precision(place: Place, tmp_path: Path) -> None:
    teacher, _ = load_model(place.teacher)
    other, _ = load_model(place.teacher)
    other.encoder.config = other.encoder.config.model_copy(update={"hidden_act": "relu"})
    files, spec = TeacherFiles.find([str(place.teacher)]), ActivationSpec(logits=True)
    with torch.no_grad():
        next(other.parameters()).add_(1)
    changed = tmp_path / "changed"
    save_model(other, files.tokenizer, changed)
    others = [
        cache_identity([other], files, spec, "fp32"),
        cache_identity([teacher], replace(files, directories=(changed,)), spec, "fp32"),
        cache_identity([teacher], replace(files, tokenizer=tiny_tokenizer(vocab_size=60)), spec, "fp32"),
        cache_identity([teacher], files, spec | ActivationSpec(states=frozenset({1})), "fp32"),
        cache_identity([teacher], files, spec, "bf16"),
    ]
    same = cache_identity([load_model(place.teacher)[0]], files, spec, "fp32")
    assert same == cache_identity([teacher], files, spec, "fp32")
    for number, identity in enumerate(others):
        assert identity != same, number


def test_a_control_is_the_same_student_fine_tuned(place: Place, every_term: str, tmp_path: Path) -> None:
    """Without its teacher, a student is bit-identical to a fine-tuned model."""
    control = place.run(every_term, control=True, run_dir=tmp_path / "control")
    teacher, _ = load_model(place.teacher)
    save_model(from_teacher_layers(teacher, [1]), load_tokenizer(place.teacher), tmp_path / "student")
    request = FinetuneArguments(
        task=place.task, model=str(tmp_path / "student"), overrides=parsed(SETTINGS), run_dir=tmp_path / "plain"
    )
    plain = finetune(request, progress=silent_progress)
    assert weights(control) == weights(plain)
    assert control.results["control"] is True
    assert "control: true" in control.run.recipe_yaml
    assert "loss/soft_targets" not in lines_of(control)[0]


def test_a_run_before_makes_the_student_and_is_not_repeated(place: Place, tmp_path: Path) -> None:
    """Hidden states first at a constant learning rate, then the predictions, as in TinyBERT; a second learning rate
    starts from the same run."""
    inside = "[{hidden_states: {layers: [[1, 2]]}}]"
    before = f"before: {{set: {{distillation: {inside}, lr: 0.001, warmup: 0.0, optimisation.schedule: constant}}}}"
    recipe = place.recipe("steps", " [soft_targets]", f"student: {{layers: first, number: 1}}\n{before}")
    settings = {"runs_root": tmp_path, "run_dir": tmp_path / "suite", "grid": {"lr": ["1e-3", "2e-3"]}}
    outcome = place.run(recipe, "optimisation.max_steps=3", **settings)
    runs = sorted((tmp_path / "suite" / "runs").iterdir())
    assert [(run / "runs" / "before" / "model").is_dir() for run in runs] == [True, False]
    first = runs[0] / "runs" / "before"
    logged = [json.loads(line) for line in (first / "metrics.jsonl").read_text().splitlines()]
    assert {line["lr"] for line in logged if "lr" in line} == {0.001}
    assert set(outcome.results["retained"]) == {"dev"}
    alone = place.run(recipe, "optimisation.max_steps=3", "lr=2e-3", run_dir=tmp_path / "alone" / "run")
    again = alone.run.path / "runs" / "before"
    assert sha256_of(again / "model" / "model.safetensors") == sha256_of(first / "model" / "model.safetensors")
    assert sha256_of(runs[1] / "model" / "model.safetensors") == weights(alone)
    record, of_before = (read_json(path / "run.json") for path in (alone.run.path, again))
    counts = {key: of_before[key] for key in ("steps", "tokens", "flops")}
    assert record["before"] == {"run": str(again), **counts}
    assert record["with_before"] == {key: record[key] + count for key, count in counts.items()}
    assert record["steps"] == 3


def test_maps_between_widths_learn_and_go_when_the_student_is_done(place: Place, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = "hidden_size: 12, num_hidden_layers: 2, num_attention_heads: 3, intermediate_size: 20"
    narrow = f"{{family: bert, {sizes}, max_position_embeddings: 40}}"
    recipe = place.recipe(
        "narrow",
        " [{embeddings: {projection: fit}}, {hidden_states: {projection: fit}}, attention, soft_targets]",
        f"student: {{config: {narrow}}}",
    )
    outcome = place.run(recipe, run_dir=tmp_path / "narrow")
    lines = lines_of(outcome)
    assert lines[-1]["loss/embeddings"] < lines[0]["loss/embeddings"]
    model, told = transformers.BertModel.from_pretrained(outcome.run.model, output_loading_info=True)
    assert not told["missing_keys"]
    assert not [key for key in told["unexpected_keys"] if not key.startswith("classifier")]
    assert model.config.hidden_size == 12


def test_a_student_with_another_tokenizer_learns_the_same_rows(place: Place, tmp_path: Path) -> None:
    """Each reads the items in its own way: a BiLSTM with its own vocabulary, a DistilBERT without segments."""
    bilstm = place.recipe("bilstm", " [logit_error]", "student: {family: bilstm, vocab_size: 60, embedding_size: 9}")
    lines = lines_of(place.run(bilstm, "epochs=6", run_dir=tmp_path / "bilstm"))
    assert lines[-1]["loss"] < lines[0]["loss"]
    distilbert = place.recipe("db", " [soft_targets, hidden_states]", "student: {layers: [1], form: distilbert}")
    outcome = place.run(distilbert, run_dir=tmp_path / "distilbert")
    assert json.loads((outcome.run.model / "config.json").read_text())["architectures"] == [
        "DistilBertForSequenceClassification"
    ]


def test_examples_without_labels_are_learnt_from(place: Place, tmp_path: Path) -> None:
    rows = [[text] for text, _ in reviews(31, 8)]
    file = write_table(tmp_path / "free.csv", rows, ("line",))
    recipe = place.recipe("transfer", " [soft_targets]")
    outcome = place.run(recipe, f"transfer={{file: {file}, columns: {{text: line}}}}", run_dir=tmp_path / "run")
    assert outcome.results["examples"] == {"train": 31, "dev": DEV}
    copies = "augmentation={name: masking, copies: 2}"
    with pytest.raises(DataError, match=r"labels needs a label for every example; leave it.*augmentation.labels=kept"):
        place.run(recipe, "distillation=[labels]", copies, run_dir=tmp_path / "no")
    with pytest.raises(DataError, match=r"a control needs a label for every example; leave the copies out"):
        place.run(recipe, copies, control=True, run_dir=tmp_path / "no")
    with pytest.raises(DataError, match=r"no column 'lime'; .*'line'\? Name it with transfer\.columns\.text$"):
        place.run(recipe, f"transfer={{file: {file}, columns: {{text: lime}}}}", run_dir=tmp_path / "no")
    with pytest.raises(UsageError, match=r"transfer: its examples have no labels, and a control trains"):
        place.run(recipe, f"transfer={{file: {file}}}", control=True, run_dir=tmp_path / "no")


@pytest.mark.parametrize("learnt", ["transfer", "augmentation"])
def test_a_regressions_bias_begins_at_the_mean_of_the_known_labels(learnt: str, tmp_path: Path) -> None:
    task, _ = write_kind(tmp_path, "regression")
    base = write_model(tmp_path / "base")
    shared = {"task": task, "runs_root": tmp_path / "runs"}
    settings = [*SETTINGS, "optimisation.max_steps=1"]
    taught = finetune(
        FinetuneArguments(model=str(base), overrides=parsed(settings), run_dir=tmp_path / "teacher", **shared),
        progress=silent_progress,
    )
    free = write_table(tmp_path / "free.csv", [[text] for text, _ in reviews(9, 8)], ("line",))
    more = {
        "transfer": f"transfer={{file: {free}, columns: {{text: line}}}}",
        "augmentation": "augmentation={name: masking, copies: 1}",
    }
    (tmp_path / "r.yaml").write_text("kind: distill\nstudent: {model: '?'}\ndistillation: [logit_error]\n")
    request = DistillArguments(
        recipe=str(tmp_path / "r.yaml"),
        student=str(base),
        teachers=[str(taught.run.path)],
        overrides=parsed([*settings, "lr=1e-9", more[learnt]]),
        cache=tmp_path / "cache",
        run_dir=tmp_path / "student",
        **shared,
    )
    student, _ = load_model(finetune(request, progress=silent_progress).run.model)
    numbers = [example.label for example in read_own(Path(task.train), "regression", task.columns).examples]
    bias = student.get_parameter("sequence_classification.output.bias")
    assert bias.item() == pytest.approx(sum(numbers) / len(numbers), abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_task_can_be_imitated(kind: str, tmp_path: Path) -> None:
    """A student identical to its teacher has a logit loss of 0 in the first step."""
    task, _ = write_kind(tmp_path, kind)
    base = write_model(tmp_path / "base", dropout=0.0)
    shared = {"runs_root": tmp_path / "runs", "task": task}
    settings = [*SETTINGS, "optimisation.max_steps=1", *(["span.max_query_tokens=9"] if kind == "span" else [])]
    taught = finetune(
        FinetuneArguments(model=str(base), overrides=parsed(settings), run_dir=tmp_path / "teacher", **shared),
        progress=silent_progress,
    )
    term = "logit_error" if kind == "regression" else "soft_targets"
    (tmp_path / "r.yaml").write_text(f"kind: distill\nstudent: {{layers: [0, 1]}}\ndistillation: [{term}]\n")
    request = DistillArguments(
        recipe=str(tmp_path / "r.yaml"),
        teachers=[str(taught.run.path)],
        overrides=parsed([*settings, "lr=1e-9"]),
        cache=tmp_path / "cache",
        run_dir=tmp_path / "student",
        **shared,
    )
    outcome = finetune(request, progress=silent_progress)
    assert lines_of(outcome)[0]["loss"] == pytest.approx(0.0, abs=1e-6)
    for run, name in ((taught, "task"), (outcome, term)):
        assert (f"accuracy/{name}" in lines_of(run)[0]) == (kind != "regression"), "no number is right or wrong"
        assert lines_of(run)[0]["target_tokens_per_s"] > 0
    assert outcome.results["teacher"]["splits"]["dev"] == pytest.approx(taught.results["splits"]["dev"], rel=1e-4)
    shares = outcome.results["retained"]["dev"].values()
    assert all(share is None or share == pytest.approx(1.0, rel=1e-4) for share in shares)


def test_soft_targets_of_several_labels_are_the_mean_of_their_binary_divergences() -> None:
    task = MultiLabelClassification(Labels(("a", "b", "c")), ("micro_f1",), TextSettings())
    generator = torch.Generator().manual_seed(2)
    student_IK, teacher_IK = (torch.randn(5, 3, generator=generator, dtype=torch.float32) for _ in range(2))
    batch = TaskBatch(PackedBatch.from_ids([[5, 6]] * 5), torch.arange(5), {}, {})
    rows = [task.imitated(logits_IK, batch) for logits_IK in (student_IK, teacher_IK)]
    own, theirs = torch.sigmoid(student_IK / 2), torch.sigmoid(teacher_IK / 2)
    wanted = theirs * (theirs / own).log() + (1 - theirs) * ((1 - theirs) / (1 - own)).log()
    assert task.rows_of(batch) == [3] * 5
    torch.testing.assert_close(soft_targets(*rows, 2.0).reshape(5, 3), 4 * wanted, atol=1e-5, rtol=1e-4)


def test_equal_tokens_that_are_other_words_have_other_outputs() -> None:
    task = Tagging(Labels(("O", "X")), ("accuracy",), TaggingSettings())
    first_T = torch.tensor([False, True, False, True, False, True, True, False])
    batch = TaskBatch(PackedBatch.from_ids([[2, 6, 7, 8]] * 2), torch.arange(2), {}, {FIRST: first_T})
    layout = task_query(task, batch).layout()
    assert list(layout.rows_I) == [2, 2]
    assert len(set(layout.keys(batch.packed))) == 2


def test_several_teachers_act_by_the_mean_of_their_logits(place: Place, tmp_path: Path) -> None:
    """With a teacher and its mirror image, the target is their mean."""
    recipe = place.recipe("two", " [logit_error]", "student: {layers: [0, 1]}")
    settings = ["optimisation.max_steps=1"]
    mirror = write_model(tmp_path / "mirror", heads=(HEAD,), labels=LABELS, dropout=0.0)
    model, _ = load_model(mirror)
    with torch.no_grad():
        model.get_parameter(f"{HEAD}.output.weight").neg_()
        model.get_parameter(f"{HEAD}.output.bias").neg_()
    save_model(model, load_tokenizer(mirror), mirror)
    calm = str(place.calm)
    alone = place.run(recipe, *settings, teachers=[calm, calm], run_dir=tmp_path / "same")
    assert lines_of(alone)[0]["loss"] == pytest.approx(0.0, abs=1e-9)
    both = place.run(recipe, *settings, teachers=[calm, str(mirror)], run_dir=tmp_path / "both")
    opposed = place.run(
        recipe, *settings, "student={model: " + calm + "}", teachers=[str(mirror)], run_dir=tmp_path / "op"
    )
    assert lines_of(opposed)[0]["loss"] == pytest.approx(4 * lines_of(both)[0]["loss"], rel=1e-4)


def test_several_teachers_read_what_the_shortest_of_them_can(place: Place, logits_only: str, tmp_path: Path) -> None:
    short = write_model(tmp_path / "short", heads=(HEAD,), labels=LABELS, max_tokens=5)
    request = place.request(logits_only, teachers=[str(place.teacher), str(short)])
    read = request.prepare(request.requested()).teacher_train
    assert read is not None
    assert read.features.tokens_I.max() == 5

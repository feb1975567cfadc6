"""Students from teachers: the chosen layers are copied bit for bit, into files that `transformers` loads completely."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bertkit.data.batch import PackedBatch
from bertkit.distillation.student import (
    as_distilbert,
    from_teacher_layers,
    init_from_teacher,
    new_student,
    reinitialised,
    student_config,
)
from bertkit.distillation.task_recipe import load_distill_recipe
from bertkit.errors import UsageError
from bertkit.models.conversion.pruning import prune_heads, pruned_heads, restore_heads
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.albert import AlbertConfig
from bertkit.models.families.bart import BartConfig
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.electra import ElectraConfig
from bertkit.models.families.elmo import ElmoConfig
from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.families.longformer import LongformerConfig
from bertkit.models.families.mobilebert import MobileBertConfig
from bertkit.models.families.modernbert import ModernBertConfig
from bertkit.models.families.roberta import RobertaConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.labels import Labels
from tests.tasks.tiny_task import tiny_tokenizer

SIZES = {
    "hidden_size": 18,
    "num_hidden_layers": 5,
    "num_attention_heads": 3,
    "intermediate_size": 23,
    "max_position_embeddings": 40,
    "initializer_range": 0.2,
}
LABELS = Labels(("bad", "good"))
FAMILIES = [BertConfig, RobertaConfig, ElectraConfig, Gpt2Config]


def teacher_of(kind: type[EncoderConfig], heads: tuple[str, ...] = ("sequence_classification",)) -> HeadedModel:
    names = {name: value for name, value in SIZES.items() if name in kind.model_fields}
    model = HeadedModel(kind(**names).build(53), heads, labels=LABELS)
    model.initialise(seed=4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # nothing is zero, so an uncopied weight is noticed
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)) * 0.1)
    return model.eval()


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_student_of_all_layers_says_what_its_teacher_says(kind: type[EncoderConfig]) -> None:
    teacher = teacher_of(kind)
    student = from_teacher_layers(teacher, range(5)).eval()
    batch = PackedBatch.from_ids([[5, 9, 11], [6, 7, 8, 9, 10]])
    with torch.no_grad():
        assert torch.equal(teacher(batch), student(batch))


@pytest.mark.parametrize("kind", [BertConfig, LongformerConfig, ModernBertConfig, BartConfig])
def test_the_settings_that_are_planned_are_those_of_the_student(kind: type[EncoderConfig], tmp_path: Path) -> None:
    more = {"attention_window": (2, 4, 6, 8, 10)} if kind is LongformerConfig else {}
    names = {name: value for name, value in SIZES.items() if name in kind.model_fields}
    teacher = HeadedModel(kind(**names, **more).build(53), [])
    teacher.initialise(seed=4)
    (tmp_path / "r.yaml").write_text("kind: distill\nstudent: {layers: [0, 3]}\ndistillation: [labels]\n")
    recipe = load_distill_recipe(str(tmp_path / "r.yaml"))
    made = new_student(recipe, teacher, seed=0)
    assert made is not None
    assert student_config(recipe, teacher.encoder.config) == made.encoder.config


@pytest.mark.parametrize("kind", FAMILIES)
def test_layers_are_copied_and_all_else_is_the_teachers(kind: type[EncoderConfig]) -> None:
    teacher = teacher_of(kind)
    student = from_teacher_layers(teacher, [0, 3])
    source = dict(teacher.named_parameters())
    for name, parameter in student.named_parameters():
        assert torch.equal(parameter, source[name.replace("encoder.layers.1.", "encoder.layers.3.")]), name
    assert student.encoder.config.model_dump()["num_hidden_layers"] == 2
    assert student.labels == LABELS


def test_what_is_not_taken_is_drawn_by_the_seed() -> None:
    teacher = teacher_of(BertConfig)
    first, again, other = (
        from_teacher_layers(teacher, [1], embeddings=False, head=False, seed=seed) for seed in (3, 3, 4)
    )
    source = dict(teacher.named_parameters())
    for name, parameter in first.named_parameters():
        taken = name.startswith("encoder.layers.")
        assert torch.equal(parameter, source[name.replace("layers.0.", "layers.1.")]) == taken, name
        assert torch.equal(parameter, again.get_parameter(name))
    word = "encoder.embeddings.word.weight"
    assert not torch.equal(first.get_parameter(word), other.get_parameter(word))
    shapes = {name: tuple(parameter.shape) for name, parameter in first.named_parameters()}
    blank = reinitialised(first, seed=5)
    assert {name: tuple(parameter.shape) for name, parameter in blank.named_parameters()} == shapes
    assert not torch.equal(blank.get_parameter(word), first.get_parameter(word))


def test_a_blank_elmo_spells_its_words_as_before() -> None:
    sizes = {"character_size": 4, "filters": ((1, 4), (2, 5)), "projection_size": 6, "lstm_width": 8}
    tokenizer = tiny_tokenizer()
    model = HeadedModel(ElmoConfig.model_validate(sizes).build(tokenizer.vocab_size), ("sequence_classification",))
    model.initialise(seed=4)
    model.encoder.read_vocabulary(tokenizer)
    with torch.no_grad():
        states_TD = reinitialised(model, seed=5)(PackedBatch.from_ids([[10], [50], [77]]))
    assert states_TD.std(dim=0).max() > 1e-5, "different words have different states"


def test_a_bert_student_loads_as_bert_with_nothing_missing(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    student = from_teacher_layers(teacher_of(BertConfig), [0, 2, 4]).eval()
    save_model(student, tiny_tokenizer(), tmp_path)
    model, told = transformers.BertModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not told["missing_keys"]
    assert model.config.num_hidden_layers == 3
    with torch.no_grad():
        theirs = model.eval()(torch.tensor([[5, 9, 11, 30]])).last_hidden_state[0]
        ours = student(PackedBatch.from_ids([[5, 9, 11, 30]]))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_distilbert_student_is_its_bert_without_segments_and_pooler(tmp_path: Path) -> None:
    """With segment embeddings of zero both encoders compute the same; the masked-LM head is copied, too."""
    transformers = pytest.importorskip("transformers")
    teacher = teacher_of(BertConfig, ("masked_lm",))
    with torch.no_grad():
        teacher.get_parameter("encoder.embeddings.token_type.weight").zero_()
    save_model(teacher, tiny_tokenizer(), tmp_path / "teacher")
    teacher, _ = load_model(tmp_path / "teacher")
    student = as_distilbert(from_teacher_layers(teacher, [0, 2, 3])).eval()
    batch = PackedBatch.from_ids([[5, 9, 11], [6, 7, 8, 9, 10]])
    wanted = from_teacher_layers(teacher, [0, 2, 3]).eval()
    with torch.no_grad():
        torch.testing.assert_close(
            student.masked_lm_logits(student(batch)), wanted.masked_lm_logits(wanted(batch)), atol=1e-5, rtol=1e-5
        )
    save_model(student, tiny_tokenizer(), tmp_path / "student")
    model, told = transformers.DistilBertForMaskedLM.from_pretrained(tmp_path / "student", output_loading_info=True)
    assert not told["missing_keys"]
    assert model.config.n_layers == 3
    with torch.no_grad():
        theirs = model.eval()(torch.tensor([[5, 9, 11]])).logits[0]
        ours = student.masked_lm_logits(student(PackedBatch.from_ids([[5, 9, 11]])))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_classifier_of_distilbert_is_drawn_anew_for_it_has_another_form() -> None:
    teacher = teacher_of(BertConfig)
    student, other = (as_distilbert(from_teacher_layers(teacher, [0, 2]), seed=seed) for seed in (1, 2))
    assert student.head_names == ("sequence_classification",)
    assert not student.has_pooler
    output = "sequence_classification.output.weight"
    assert not torch.equal(student.get_parameter(output), other.get_parameter(output))
    position = "encoder.embeddings.position.weight"
    assert torch.equal(student.get_parameter(position), teacher.get_parameter(position))


def test_heads_that_a_teacher_lost_are_missing_in_every_student_made_of_it() -> None:
    teacher = teacher_of(BertConfig, ("masked_lm",))
    with torch.no_grad():
        teacher.get_parameter("encoder.embeddings.token_type.weight").zero_()
    prune_heads(teacher, {0: [1], 3: [0, 2]})
    wanted = from_teacher_layers(teacher, [0, 3]).eval()
    student = as_distilbert(wanted).eval()
    batch = PackedBatch.from_ids([[5, 9, 11], [6, 7, 8, 9, 10]])
    with torch.no_grad():
        torch.testing.assert_close(student(batch), wanted(batch), atol=1e-5, rtol=1e-5)
    for made in (wanted, student, reinitialised(wanted, seed=1)):
        assert pruned_heads(made.encoder) == {0: (1,), 1: (0, 2)}


def test_layers_of_a_pruned_teacher_that_do_not_fit_are_refused_with_the_remedy() -> None:
    student, teacher = teacher_of(BertConfig), teacher_of(BertConfig)
    prune_heads(teacher, {1: [0]})
    with pytest.raises(UsageError, match=r"student\.layers: .*pruned heads: `bertkit export TEACHER --to DIR`"):
        init_from_teacher(student, teacher, layers=range(5))
    restore_heads(teacher)
    init_from_teacher(student, teacher, layers=range(5))
    narrow = HeadedModel(BertConfig(**{**SIZES, "hidden_size": 15}).build(53))
    with pytest.raises(UsageError, match=r"student\.embeddings: .*the teacher's widths"):
        init_from_teacher(narrow, teacher, layers=None)


def test_a_norm_that_only_scales_takes_nothing_from_a_layer_norm() -> None:
    """The norm of a MobileBERT's embeddings starts at 1 and 0; its other embeddings and its heads are its teacher's."""
    sizes = {"hidden_size": 18, "num_hidden_layers": 2, "num_attention_heads": 3, "embedding_size": 8}
    heads = ("masked_lm", "next_sentence")
    teacher = HeadedModel(
        MobileBertConfig(
            **sizes,  # type: ignore[arg-type]  # sizes are whole numbers
            intra_bottleneck_size=12,
            num_feedforward_networks=1,
            key_query_shared_bottleneck=False,
            normalization_type="layer_norm",
            classifier_activation=True,
        ).build(53),
        heads,
    )
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(7))
    student = HeadedModel(MobileBertConfig(**sizes, intra_bottleneck_size=6).build(53), heads)  # type: ignore[arg-type]  # as above
    student.initialise(seed=1)
    init_from_teacher(student, teacher, layers=None)
    norm = student.get_submodule("encoder.embeddings.norm")
    assert torch.equal(norm.get_parameter("weight"), torch.ones(18))
    assert torch.equal(norm.get_parameter("bias"), torch.zeros(18))
    copied = [name for name, _ in student.named_parameters() if "layers." not in name and "embeddings.norm" not in name]
    assert "masked_lm.norm.weight" in copied
    for name in copied:
        assert torch.equal(student.get_parameter(name), teacher.get_parameter(name)), name


def test_what_makes_no_student_is_refused() -> None:
    with pytest.raises(UsageError, match=r"\[0, 7\] of 5; expected numbers from 0 to 4"):
        from_teacher_layers(teacher_of(BertConfig), [0, 7])
    with pytest.raises(UsageError, match=r"^student\.layers cannot be removed .* share their weights"):
        from_teacher_layers(teacher_of(AlbertConfig), [0])
    with pytest.raises(UsageError, match="the teacher is of the family electra"):
        as_distilbert(teacher_of(ElectraConfig))

"""Reading existing files and refusing invalid ones: shards, pickles, old names, damaged files."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError, UsageError
from bertkit.files import sha256_of
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.roberta import RobertaConfig
from bertkit.models.files.hub import check_vocabulary, find_model, load_model, save_model
from bertkit.models.files.model_files import read_weights, weights_hash
from bertkit.models.headed import HeadedModel
from bertkit.models.labels import Labels
from bertkit.models.registry import FAMILIES
from bertkit.text.tokenizer_files import load_tokenizer

SIZES = {
    "hidden_size": 21,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 29,
    "max_position_embeddings": 17,
}
VOCABULARY = 53
HEADS = ("masked_lm", "next_sentence", "sequence_classification")
LABELS = Labels(("contradiction", "neutral", "entailment"))
BATCH = PackedBatch.from_ids([[1, 2, 3, 4], [5, 6]])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A model with three heads, whose weights are distinguishable."""
    model = HeadedModel(BertConfig(**SIZES).build(VOCABULARY), HEADS, labels=LABELS)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    save_model(model, None, tmp_path / "model")
    return tmp_path / "model"


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    contents = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in contents.items() if value is not ...}))


def edit_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def states(directory: Path) -> torch.Tensor:
    model, _ = load_model(directory, heads=())
    hidden_TD: torch.Tensor = model(BATCH)
    return hidden_TD.detach()


# What can be read.


def test_saving_and_loading_keeps_weights_labels_heads_and_strange_keys(saved: Path, tmp_path: Path) -> None:
    edit_config(saved, finetuning_task="mnli", bos_token_id=7, strange={"deep": [1, None]})
    model, report = load_model(saved)
    assert model.head_names == HEADS
    assert model.labels == LABELS
    assert not report.missing
    save_model(model, None, tmp_path / "again")
    contents = json.loads((tmp_path / "again" / "config.json").read_text())
    assert contents == {**json.loads((saved / "config.json").read_text()), "architectures": contents["architectures"]}
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (saved / "model.safetensors").read_bytes()


def test_two_heads_of_one_name_are_not_saved_over_each_other(tmp_path: Path) -> None:
    model = HeadedModel(BertConfig(**SIZES).build(30), ("sequence_classification", "token_classification"))
    model.initialise(1)
    with pytest.raises(UsageError, match=r"have one name in Hub files, classifier\.weight, so that one"):
        save_model(model, None, tmp_path)
    assert not (tmp_path / "model.safetensors").exists()


def test_code_that_is_not_written_with_the_model_is_not_named_either(saved: Path, tmp_path: Path) -> None:
    """`transformers` would look for modeling_x.py in the written directory, and fail."""
    elsewhere = {"AutoConfig": "org/x--modeling_x.XConfig"}
    edit_config(saved, auto_map={"AutoModel": "modeling_x.X", "AutoTokenizer": ["x.Slow", None], **elsewhere})
    save_model(load_model(saved)[0], None, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["auto_map"] == elsewhere
    edit_config(saved, auto_map={"AutoModel": "modeling_x.X"})
    save_model(load_model(saved)[0], None, tmp_path / "third")
    assert "auto_map" not in json.loads((tmp_path / "third" / "config.json").read_text())


@pytest.mark.parametrize("kind", ["bin", "sharded safetensors", "sharded bin"])
def test_every_form_of_weight_file_gives_the_same_model(saved: Path, kind: str) -> None:
    expected = states(saved)
    tensors = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    names = sorted(tensors)
    if kind == "bin":
        torch.save(tensors, saved / "pytorch_model.bin")
    else:
        suffix = kind.rpartition(" ")[2]
        stem = "model" if suffix == "safetensors" else "pytorch_model"
        parts = {f"{stem}-0000{n + 1}-of-00003.{suffix}": names[n::3] for n in range(3)}
        for file, members in parts.items():
            part = {name: tensors[name] for name in members}
            save_file(part, saved / file) if suffix == "safetensors" else torch.save(part, saved / file)
        weight_map = {name: file for file, members in parts.items() for name in members}
        (saved / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert torch.equal(states(saved), expected)


def test_the_hash_of_weights_is_of_all_their_values(saved: Path) -> None:
    assert weights_hash(saved) == sha256_of(saved / "model.safetensors")
    tensors = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    names, found = sorted(tensors), []
    weight_map = {name: f"model-{place % 2}.safetensors" for place, name in enumerate(names)}
    (saved / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for change in (0.0, 0.0, 1e-3):
        tensors[names[1]] = tensors[names[1]] + change
        for place in range(2):
            save_file({name: tensors[name] for name in names[place::2]}, saved / f"model-{place}.safetensors")
        found.append(weights_hash(saved))
    assert found[0] == found[1] != found[2]


def test_names_from_tensorflow_and_buffers_and_copies_are_understood(saved: Path) -> None:
    expected = states(saved)

    def make_old(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if "LayerNorm" in name:
                tensors[name.replace(".weight", ".gamma").replace(".bias", ".beta")] = tensors.pop(name)
        tensors["bert.embeddings.position_ids"] = torch.arange(17)[None]
        tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
        tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()

    edit_weights(saved, make_old)
    assert torch.equal(states(saved), expected)
    _, report = load_model(saved)
    assert report.tied == ["cls.predictions.decoder.bias", "cls.predictions.decoder.weight"]
    assert not report.unexpected


def test_a_config_without_a_model_type_is_of_the_family_of_its_class(saved: Path) -> None:
    expected = states(saved)
    edit_config(saved, model_type=..., architectures=["BertForMaskedLM"])
    assert torch.equal(states(saved), expected)
    edit_config(saved, architectures=["RobertaForMaskedLM"])
    assert "lacks 37 weights, such as roberta.embeddings" in refused(saved)


def test_half_precision_files_load_as_single_precision(saved: Path) -> None:
    expected = states(saved)
    edit_weights(saved, lambda tensors: tensors.update({name: t.bfloat16() for name, t in tensors.items()}))
    model, _ = load_model(saved)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    torch.testing.assert_close(states(saved), expected, rtol=0.3, atol=0.3)


def test_a_missing_head_is_drawn_anew_with_a_warning_that_says_what_it_means(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        model, report = load_model(saved, heads=("masked_lm", "span"))
        again, _ = load_model(saved, heads=("span",))
    assert report.missing == ["qa_outputs.weight", "qa_outputs.bias"]
    assert (
        "model.safetensors: has no span head (qa_outputs.bias, qa_outputs.weight): it is untrained, so `predict` and"
        " `eval` would be meaningless; train it by `bertkit finetune --model MODEL`"
    ) in caplog.text
    assert {"classifier.weight", "cls.seq_relationship.bias"} <= set(report.unexpected)
    drawn = model.get_submodule("span.output").weight
    assert 0 < drawn.std() < 0.03
    assert torch.equal(drawn, again.get_submodule("span.output").weight)


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_model_without_a_masked_lm_head_is_told_by_what_that_means(
    is_trained: bool, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lacking = "cls.predictions."
    edit_weights(saved, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(lacking)])
    with caplog.at_level(logging.INFO):
        load_model(saved, heads=("masked_lm",), is_trained=is_trained)
    (line,) = [each for each in caplog.records if "masked-LM head" in each.getMessage()]
    shown = line.getMessage()
    assert "has no masked-LM head (cls.predictions.bias, cls.predictions.transform.LayerNorm.bias and 3 more)" in shown
    if is_trained:
        assert line.levelno == logging.INFO
        assert shown.endswith("it starts untrained, and this run trains it")
    else:
        assert line.levelno == logging.WARNING
        assert "`fill`, `eval mlm` and `eval blimp` would be meaningless; train it by `bertkit pretrain" in shown


def test_a_head_of_which_a_part_is_lacking_is_told_so(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit_weights(saved, lambda tensors: tensors.pop("cls.predictions.bias"))
    with caplog.at_level(logging.WARNING):
        load_model(saved)
    assert "lacks weights of its masked-LM head (cls.predictions.bias): it is untrained" in caplog.text


def test_every_head_has_words_of_its_own() -> None:
    from bertkit.models.files.untrained import untrained_parts
    from bertkit.models.heads import HEAD_KINDS

    for head in (*HEAD_KINDS, "pooler"):
        (line,) = untrained_parts({f"{head}.weight": "x.weight"}, ["x.weight"], source="F", is_trained=False)
        assert "what it predicts would be" not in line


def test_a_classifier_for_other_labels_is_drawn_anew(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    labels = Labels(("no", "yes"))
    model, report = load_model(saved, heads=("sequence_classification",), labels=labels)
    assert "has a classification head for another number of labels (classifier.bias, classifier.weight)" in caplog.text
    assert report.reinitialised == ["classifier.weight", "classifier.bias"]
    assert model.logits("sequence_classification", model(BATCH), BATCH).shape == (2, 2)


@pytest.mark.parametrize(
    ("saved_head", "wanted", "drawn_anew"),
    [
        ("token_classification", "sequence_classification", True),
        ("sequence_classification", "token_classification", True),
        ("sequence_classification", "multiple_choice", False),
    ],
)
def test_a_classifier_of_tokens_is_none_of_sequences(
    saved_head: str, wanted: str, drawn_anew: bool, tmp_path: Path
) -> None:
    """Both are named `classifier`."""
    model = HeadedModel(BertConfig(**SIZES).build(41), (saved_head,), labels=Labels.unnamed(1))
    model.initialise(seed=3)
    save_model(model, None, tmp_path)
    again, report = load_model(tmp_path, heads=(wanted,), new=(wanted,))
    assert ("classifier.weight" in report.missing) == drawn_anew
    same = torch.equal(
        again.get_parameter(f"{wanted}.output.weight"), model.get_parameter(f"{saved_head}.output.weight")
    )
    assert same != drawn_anew


def test_a_padding_row_and_token_types_of_roberta() -> None:
    """One segment type means that all tokens have it; padding rows are initialised to zero and have their own
    position."""
    model = HeadedModel(RobertaConfig(**SIZES).build(VOCABULARY, pad_id=2))
    model.eval().initialise(seed=1)
    assert not model.encoder.word_embedding.weight[2].any()
    assert model.encoder.max_tokens == 17 - 3
    batch = PackedBatch.from_ids([[5, 2, 7, 8], [2, 9]], [[0, 0, 1, 1], [0, 1]])
    assert model.encoder.embeddings.positions_T(batch).tolist() == [3, 2, 4, 5, 2, 3]
    plain = PackedBatch.from_ids([[5, 2, 7, 8], [2, 9]])
    assert torch.equal(model(batch), model(plain))


# What is refused.


def refused(directory: Path) -> str:
    """The message for an unreadable model."""
    with pytest.raises(DataError) as caught:
        load_model(directory)
    return str(caught.value)


def test_an_unknown_model_type_lists_the_known_ones(saved: Path) -> None:
    edit_config(saved, model_type="mamba")
    said = refused(saved)
    assert re.search(r"config\.json: model_type is 'mamba'; known are albert, bart, bert, .*roberta", said)
    assert str(saved) in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "wide"}, "hidden_size: .*found 'wide'"),
        ({"hidden_size": 22}, r"config\.json: hidden_size \(22\) must be a multiple of num_attention_heads \(3\)$"),
        ({"model_type": None, "architectures": ["Mamba"]}, "model_type is None"),
        ({"hidden_act": "snake"}, "hidden_act.*found 'snake'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'; only 'absolute'"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"vocab_size": ...}, "vocab_size is None"),
        ({"id2label": {"0": "a", "2": "b"}}, r"number the labels from 0 without gaps, found \[0, 2\]"),
        ({"id2label": {"0": "a", "1": "a"}}, "id2label has 'a' more than once"),
        ({"problem_type": "guessing"}, "problem_type is 'guessing'"),
    ],
)
def test_a_faulty_setting_names_key_and_value(saved: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(saved, **changes)
    said = refused(saved)
    assert re.search(message, said)
    assert str(saved) in said


@pytest.mark.parametrize(
    ("family", "head"),
    [("electra", "multiple_choice"), ("gpt2", "multiple_choice"), ("xlnet", "sequence_classification")],
)
def test_another_summary_is_refused_for_the_heads_that_read_it(family: str, head: str, tmp_path: Path) -> None:
    sizes = {name: 6 for name in ("hidden_size", "embedding_size") if name in FAMILIES[family].model_fields}
    config = FAMILIES[family].model_validate({**sizes, "num_attention_heads": 1, "intermediate_size": 5})
    save_model(HeadedModel(config.build(VOCABULARY)), None, tmp_path)
    edit_config(tmp_path, summary_type="mean")
    with pytest.raises(DataError, match=f"summary_type is 'mean'; only .* for the head {head}"):
        load_model(tmp_path, heads=(head,))
    assert load_model(tmp_path, heads=("token_classification",))[0].extras["summary_type"] == "mean"


def test_a_config_that_is_no_json_is_refused(saved: Path) -> None:
    (saved / "config.json").write_text("{")
    said = refused(saved)
    assert re.search(r"config\.json, column 2: not valid JSON", said)
    assert str(saved) in said


def test_missing_backbone_weights_are_an_error(saved: Path) -> None:
    edit_weights(saved, lambda tensors: tensors.__delitem__("bert.encoder.layer.1.output.dense.bias"))
    said = refused(saved)
    assert re.search(r"encoder lacks 1 weights, such as bert\.encoder\.layer\.1\.output\.dense\.bias", said)
    assert str(saved) in said


def test_weights_below_another_name_are_named(saved: Path) -> None:
    edit_weights(saved, lambda tensors: [tensors.update({f"module.{n}": tensors.pop(n)}) for n in list(tensors)])
    assert "names in the file that the model does not have are module.bert.embeddings.LayerNorm.bias" in refused(saved)


def test_shapes_that_disagree_name_the_tensor_and_both_shapes(saved: Path) -> None:
    edit_config(saved, intermediate_size=31)
    said = refused(saved)
    assert re.search(r"bert\.encoder\.layer\.0\.intermediate\.dense\.weight has shape \(29, 21\), .* \(31, 21\)", said)
    assert str(saved) in said


def test_a_decoder_that_is_not_tied_is_refused(saved: Path) -> None:
    edit_weights(saved, lambda tensors: tensors.update({"cls.predictions.decoder.weight": torch.ones(VOCABULARY, 21)}))
    said = refused(saved)
    assert re.search(r"cls\.predictions\.decoder\.weight differs from bert\.embeddings\.word_embeddings\.weight", said)
    assert str(saved) in said


class RunsCode:
    """A pickle of this would create a directory when opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("writer", ["torch", "pickle"])
def test_a_pickle_with_code_is_refused_and_does_not_run(saved: Path, writer: str, tmp_path: Path) -> None:
    (saved / "model.safetensors").unlink()
    evil = {"weight": RunsCode(tmp_path / "ran")}
    with (saved / "pytorch_model.bin").open("wb") as file:
        torch.save(evil, file) if writer == "torch" else pickle.dump(evil, file)
    said = refused(saved)
    assert re.search(r"pytorch_model\.bin: refused.*safetensors", said)
    assert str(saved) in said
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.999])
def test_truncated_weights_are_refused(saved: Path, share: float) -> None:
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    said = refused(saved)
    assert re.search(r"model\.safetensors: cannot be read as safetensors.*delete .* and fetch the model again", said)
    assert str(saved) in said


def test_a_truncated_bin_is_refused(saved: Path) -> None:
    torch.save(load_file(saved / "model.safetensors"), saved / "pytorch_model.bin")
    (saved / "model.safetensors").unlink()
    contents = (saved / "pytorch_model.bin").read_bytes()
    (saved / "pytorch_model.bin").write_bytes(contents[: len(contents) // 2])
    said = refused(saved)
    assert re.search(r"pytorch_model\.bin", said)
    assert str(saved) in said


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_bin_of_an_older_torch_that_ends_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a.weight": torch.ones(2), "b.weight": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    contents = path.read_bytes()
    assert set(read_weights(path)) == {"a.weight", "b.weight"}
    for end in range(0, len(contents), 2):
        path.write_bytes(contents[:end])
        with pytest.raises(DataError, match=r"pytorch_model\.bin"):
            read_weights(path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (
            {"weight_map": {"a": "model-00001-of-00002.safetensors"}},
            "model-00001-of-00002.safetensors, which is missing",
        ),
        ({"weight_map": {"a": "../model/model.safetensors"}}, "leads out of"),
        ({"weights": 3}, "not an index"),
    ],
)
def test_an_index_without_its_shards_is_refused(saved: Path, index: Any, message: str) -> None:
    (saved / "model.safetensors").rename(saved / "other.safetensors")
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    said = refused(saved)
    assert re.search(message, said)
    assert str(saved) in said


def test_a_directory_without_weights_names_what_is_looked_for(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    said = refused(saved)
    assert re.search(r"no weights here; expected one of model\.safetensors", said)
    assert str(saved) in said
    (saved / "onnx").mkdir()
    (saved / "onnx" / "model_qint8_avx2.onnx").touch()
    assert "model_qint8_avx2.onnx is a graph for onnxruntime: give the model" in refused(saved)
    (saved / "onnx" / "model_qint8_avx2.onnx").unlink()
    (saved / "tf_model.h5").touch()
    assert "tf_model.h5 cannot be read: load it with the program that wrote it" in refused(saved)


def test_a_checkpoint_of_a_training_program_is_told_by_what_it_has_besides_weights(saved: Path) -> None:
    torch.save({"state_dict": load_file(saved / "model.safetensors"), "epoch": 3}, saved / "pytorch_model.bin")
    (saved / "model.safetensors").unlink()
    assert "expected tensors by name, but it has state_dict, epoch: save only the weights" in refused(saved)


def test_a_head_that_the_family_lacks_is_refused_with_those_that_it_has(saved: Path) -> None:
    said = r"'bert' has no head for permutation_lm; it has masked_lm, next_sentence, .*\. Use .* that has it: xlnet$"
    with pytest.raises(UsageError, match=said):
        load_model(saved, heads=("permutation_lm",))


def test_a_place_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no model here"):
        find_model(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.raises(DataError, match="only LORA can be read; merge it into its model"):
        find_model(str(tmp_path))
    for name in ("./nowhere", "a/b/c"):
        with pytest.raises(DataError, match=rf"{name}: does not exist; "):
            find_model(name)


def test_checkpoints_below_a_place_without_a_model_are_named(saved: Path, tmp_path: Path) -> None:
    saved.rename(tmp_path / "checkpoint-20")
    with pytest.raises(DataError, match=r"no model here.*: give a checkpoint, such as .*checkpoint-20$"):
        find_model(str(tmp_path))


def test_a_tokenizer_with_more_ids_than_the_table_has_rows_is_refused(saved: Path, tmp_path: Path) -> None:
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    for count in (VOCABULARY, VOCABULARY + 1):
        words = [f"w{number}" for number in range(count - len(specials))]
        (tmp_path / "vocab.txt").write_text("\n".join([*specials, *words]) + "\n")
        tokenizer = load_tokenizer(tmp_path / "vocab.txt")
        model, _ = load_model(saved)
        if count == VOCABULARY:
            check_vocabulary(model, tokenizer, source="here")
        else:
            with pytest.raises(DataError, match=r"tokenizer has 54 entries, the model's embedding table 53 rows"):
                check_vocabulary(model, tokenizer, source="here")

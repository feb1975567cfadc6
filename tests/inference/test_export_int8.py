"""Models with int8 weights: close to their source, a quarter of its size, and readable wherever a model is used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bertkit as bertkit_library
from bertkit.cli.console import size
from bertkit.errors import CheckError, UsageError
from bertkit.files import sha256_of
from bertkit.inference.export import export
from bertkit.inference.export.agreement import RoughAgreement
from bertkit.inference.export.export import TOLERANCE, export_model
from bertkit.models.families.bert import BertConfig
from bertkit.models.files.hub import load_model, read_config
from bertkit.models.headed import HeadedModel
from bertkit.models.labels import Labels
from bertkit.models.quantisation.calibrated import CalibratedLinear
from bertkit.models.quantisation.int8 import TRAINING_REFUSED, QuantisedEmbedding
from bertkit.models.quantisation.quantised import is_quantised, quantise
from bertkit.models.sentence import load_sentence_model
from bertkit.text.tokenizer_files import load_tokenizer
from tests.inference.test_export import contents, small_model
from tests.models.files.test_real_checkpoint import small_sentence_directory
from tests.tasks.tiny_task import write_model

Bertkit = Callable[..., Any]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that weights are most of the file."""
    config = BertConfig(
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=260,
        max_position_embeddings=60,
        initializer_range=0.1,
    )
    return small_model(tmp_path_factory.mktemp("int8") / "model", config)


@pytest.fixture(scope="module")
def written(source: Path) -> Path:
    export_model(str(source), source.parent / "whole", kind="int8")
    return source.parent / "whole"


def test_a_directory_has_a_quarter_of_the_bytes_and_near_numbers(source: Path, written: Path) -> None:
    record = json.loads((written / "export.json").read_text())
    assert record["format"] == "int8"
    assert 0 < record["largest_difference"] < record["tolerance"] == TOLERANCE["int8"]
    assert record["differences"].keys() == {"hidden", "masked_lm"}
    before, after = ((path / "model.safetensors").stat().st_size for path in (source, written))
    assert after < 0.31 * before
    assert json.loads((written / "config.json").read_text())["quantization_config"]["quant_method"] == "bertkit"
    model, report = load_model(written)
    assert is_quantised(model)
    assert not report.newly_initialised


def test_every_command_reads_it(written: Path, bertkit: Bertkit, tmp_path: Path) -> None:
    filled = bertkit("fill", "--model", written, "the [MASK] of the list", "--json")
    assert filled.code == 0, filled.stderr
    (found,) = json.loads(filled.stdout)
    assert len(found["masks"][0]) == 5
    classifier = write_model(tmp_path / "m", heads=("sequence_classification",), labels=Labels(("bad", "good")))
    done = bertkit("export", classifier, "--to", tmp_path / "whole", "--format", "int8")
    assert done.code == 0
    before, after = ((each / "model.safetensors").stat().st_size for each in (classifier, tmp_path / "whole"))
    assert f"weights: {size(before)} in the source, {size(after)} in the export ({after / before:.0%})" in done.stderr
    lines = tmp_path / "lines.txt"
    lines.write_text("a fine list\npoor cat\n")
    answers = [
        [json.loads(line) for line in bertkit("predict", lines, "--model", model).stdout.splitlines()]
        for model in (classifier, tmp_path / "whole")
    ]
    assert len(answers[1]) == 2
    for plain, whole in zip(*answers, strict=True):
        assert whole["scores"] == pytest.approx(plain["scores"], abs=0.05)
        assert whole["scores"] != plain["scores"]


@pytest.mark.parametrize("method", ["full", "lora", "features", "pruned", "theseus", "q8bert", "qbert"])
def test_fine_tuning_is_refused_before_the_data_are_read(
    written: Path, bertkit: Bertkit, tmp_path: Path, method: str
) -> None:
    table = tmp_path / "t.csv"
    table.write_text("no,such,column\n")
    words = ["--train", table, "--dev", table, "--text", "text", "--label", "label", "--set", f"method.name={method}"]
    words += ["--set", "method.magnitude=0.5"] if method == "pruned" else []
    done = bertkit("finetune", *words, "--model", written, "--device", "cpu", "--run-dir", tmp_path / "run")
    assert done.code == 3
    assert TRAINING_REFUSED in done.stderr
    assert not (tmp_path / "run").exists()


def test_pretraining_is_refused_before_the_text_is_read(written: Path, bertkit: Bertkit, tmp_path: Path) -> None:
    words = ["--data", tmp_path / "no-such-text.txt", "--run-dir", tmp_path / "run", "--device", "cpu"]
    done = bertkit("pretrain", "domain-adapt", "--init", written, *words)
    assert done.code == 3
    assert TRAINING_REFUSED in done.stderr
    # For a recipe that names its model itself.
    sizes = f"model={json.dumps(read_config(written)[0].model_dump(mode='json'))}"
    start = ["--set", f"init={written}", "--set", sizes, "--set", "data.sequence_length=32"]
    done = bertkit("pretrain", "domain-adapt", *start, *words)
    assert done.code == 3
    assert TRAINING_REFUSED in done.stderr
    assert not (tmp_path / "run").exists()


def test_what_is_far_from_its_source_is_refused_and_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(model: HeadedModel, *_: object) -> None:
        quantise(model)
        words = model.encoder.word_embedding
        assert isinstance(words, QuantisedEmbedding)
        words.weight_int8.copy_(words.weight_int8.flip(0))

    monkeypatch.setattr(export, "quantise", spoilt)
    before = contents(source.parent)
    with pytest.raises(CheckError, match=r"hidden differs by [\d.]+ of its size"):
        export_model(str(source), tmp_path / "out", kind="int8")
    assert not (tmp_path / "out").exists()
    assert contents(source.parent) == before


@pytest.fixture(scope="module")
def text(source: Path) -> Path:
    """Lines of words in the model's vocabulary."""
    words = [word for word in load_tokenizer(source).backend.get_vocab() if word.isalpha()]
    lines = [" ".join(words[start::9]) for start in range(9)]
    (source.parent / "text.txt").write_text("\n\n".join(lines) + "\n")
    return source.parent / "text.txt"


def test_ranges_of_a_text_make_maps_that_are_near_and_the_same_bits_in_any_batch(
    source: Path, text: Path, bertkit: Bertkit, tmp_path: Path
) -> None:
    done = bertkit("export", source, "--to", tmp_path / "out", "--format", "int8", "--calibrate", text, "--json")
    assert done.code == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["calibrated_on"] == {"file": str(text), "sha256": sha256_of(text)}
    assert record["largest_difference"] < record["tolerance"]
    model, _ = load_model(tmp_path / "out")
    maps = [part for part in model.encoder.modules() if isinstance(part, torch.nn.Linear)]
    assert [type(part) for part in maps] == [CalibratedLinear] * 2 * 6
    assert not any(type(part) is CalibratedLinear for name, part in model.named_modules() if "encoder." not in name)
    lines = [line for line in text.read_text().splitlines() if line]
    for precision in ("fp32", "bf16"):
        encode = bertkit_library.load(str(tmp_path / "out"), device="cpu", precision=precision).encode
        together = encode(lines)
        assert np.array_equal(together, np.concatenate([encode([line]) for line in lines]))
        assert np.array_equal(together[:4], encode(lines[:4]))
        wanted = bertkit_library.load(str(source), device="cpu").encode(lines)
        cosine = (together * wanted).sum(1) / np.linalg.norm(together, axis=1) / np.linalg.norm(wanted, axis=1)
        assert cosine.min() > 0.98


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--format", "hf", "--calibrate", "{text}"], 2, "--calibrate: works only with --format int8"),
        (["--format", "onnx", "--int8", "--calibrate", "{text}"], 2, "--calibrate: works only with --format int8"),
        (["--format", "int8", "--calibrate", "{text}.missing"], 3, "no such file"),
        (["--format", "int8", "--calibrate", "{empty}"], 3, "contains no text to calibrate on"),
    ],
)
def test_a_text_that_cannot_be_measured_is_told(
    source: Path, text: Path, bertkit: Bertkit, tmp_path: Path, words: list[str], code: int, message: str
) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    given = [word.format(text=text, empty=tmp_path / "empty.txt") for word in words]
    done = bertkit("export", source, "--to", tmp_path / "out", *given)
    assert done.code == code
    assert message in done.stderr
    assert not (tmp_path / "out").exists()


def test_ranges_need_a_tokenizer_and_an_encoder_alone(source: Path, text: Path, tmp_path: Path) -> None:
    bare = small_sentence_directory(tmp_path / "bare", {"pooling_mode_mean_tokens": True}, dense=False)
    with pytest.raises(UsageError, match="has no tokenizer to read"):
        export_model(str(bare), tmp_path / "out", kind="int8", calibrate=text)
    assert not (tmp_path / "out").exists()


def test_one_that_is_quantised_already_is_refused(written: Path, tmp_path: Path) -> None:
    for kind in ("hf", "int8", "onnx", "onnx-int8"):
        with pytest.raises(UsageError, match="is already quantised; export the model that it was made from"):
            export_model(str(written), tmp_path / "out", kind=kind)  # type: ignore[arg-type]  # values of a tuple lose their Literal
    assert not (tmp_path / "out").exists()


def test_a_sentence_encoder_keeps_its_steps(tmp_path: Path) -> None:
    source = small_sentence_directory(tmp_path / "model", {"pooling_mode_mean_tokens": True}, dense=True)
    export_model(str(source), tmp_path / "out", kind="int8")
    again = load_sentence_model(tmp_path / "out")
    assert is_quantised(again.model)
    assert len(again.after_pooling) == len(load_sentence_model(source).after_pooling)


def test_a_graph_of_int8_stands_where_the_hub_has_it_and_is_near(
    source: Path, bertkit: Bertkit, tmp_path: Path
) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    done = bertkit("export", source, "--to", tmp_path / "out", "--format", "onnx", "--int8", "--json")
    assert done.code == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["largest_difference"] < record["tolerance"] == TOLERANCE["onnx-int8"]
    graphs = {name for name in record["files"] if name.endswith(".onnx")}
    assert graphs == {"onnx/model_qint8_avx2.onnx"}
    kinds = [node.op_type for node in onnx.load(tmp_path / "out" / "onnx" / "model_qint8_avx2.onnx").graph.node]
    assert kinds.count("MatMulInteger") >= 2 * 6
    written = record["files"]["onnx/model_qint8_avx2.onnx"]["bytes"]
    assert written < 0.5 * (source / "model.safetensors").stat().st_size
    assert record["weights_bytes"] == {"source": (source / "model.safetensors").stat().st_size, "export": written}


def test_int8_of_a_directory_of_floats_is_refused(source: Path, bertkit: Bertkit, tmp_path: Path) -> None:
    done = bertkit("export", source, "--to", tmp_path / "out", "--int8")
    assert done.code == 2
    assert "--int8: works only with --format onnx" in done.stderr


def test_rough_agreement_is_a_share_of_the_size() -> None:
    agreement = RoughAgreement(tolerance=0.1)
    wanted = torch.tensor([3.0, -4.0])
    agreement.add("a", wanted, wanted * 1.05)
    assert agreement.differences["a"] == pytest.approx(0.05)
    assert not agreement.errors
    agreement.add("a", wanted, wanted * 1.2)
    agreement.add("small", torch.zeros(3), torch.full((3,), 0.04))
    agreement.add("b", wanted, torch.tensor([3.0, float("nan")]))
    agreement.add("c", wanted, torch.zeros(3))
    assert agreement.differences["small"] == pytest.approx(0.08)
    assert [fault.split()[0] for fault in agreement.errors] == ["a", "b", "c"]

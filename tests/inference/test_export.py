"""Exported models reproduce their source's numbers; a failed export leaves no files."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bertkit.data.batch import PackedBatch
from bertkit.errors import CheckError, DataError, UsageError
from bertkit.files import atomic_directory
from bertkit.inference.export import export
from bertkit.inference.export.agreement import Agreement, probe_batches
from bertkit.inference.export.export import RECORD, export_model
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.distilbert import DistilBertConfig
from bertkit.models.families.jina_bert import JinaBertQkConfig
from bertkit.models.families.roberta import RobertaConfig
from bertkit.models.families.xlnet import XlnetConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.sentence import load_sentence_model
from bertkit.text.tokenizer import Tokenizer, TokenizerConfig
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.text.vocabulary import train_tokenizer
from tests.models.files.test_real_checkpoint import small_sentence_directory
from tests.models.oracle import Case, all_cases, make_inputs, make_oracle, oracle_logits
from tests.models.test_families import read_back
from tests.text.corpora import english

transformers = pytest.importorskip("transformers")

CASES = {case.name: case for case in all_cases()}
FAMILIES = list({case.config_class: case for case in reversed(CASES.values())}.values())
SIZES: dict[str, Any] = {
    "hidden_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 36,
    "max_position_embeddings": 60,
}


def small_model(directory: Path, config: EncoderConfig | None = None, heads: tuple[str, ...] = ("masked_lm",)) -> Path:
    """With its own tokenizer, trained on a little text."""
    tokenizer = train_tokenizer(TokenizerConfig(vocab_size=300), english(300))
    config = BertConfig(**SIZES) if config is None else config
    model = HeadedModel(config.build(tokenizer.vocab_size, pad_id=tokenizer.pad_id), heads)
    model.initialise(seed=4)
    save_model(model, tokenizer, directory)
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


@pytest.mark.parametrize("case", FAMILIES, ids=str)
def test_every_family_is_written_anew_for_its_original_class(case: Case, tmp_path: Path) -> None:
    head, architecture = list(case.heads.items())[-1]
    oracle = make_oracle(case, architecture)
    oracle.save_pretrained(tmp_path / "theirs")
    record = export_model(str(tmp_path / "theirs"), tmp_path / "ours")
    assert (record["heads"], record["largest_difference"]) == ([head], 0)
    assert not any(record["weights"][kind] for kind in ("missing", "unexpected", "reinitialised"))
    assert json.loads((tmp_path / "ours" / RECORD).read_text()) == record
    assert len({path.stat().st_mode for path in (tmp_path / "ours").iterdir()}) == 1
    again = dict(read_back(tmp_path / "ours", architecture, left_out=case.left_out).named_parameters())
    assert all(
        torch.equal(again[name], parameter)
        for name, parameter in oracle.named_parameters()
        if not name.endswith(case.left_out)
    )


@pytest.mark.parametrize(
    ("config", "auto", "reads_types", "longest"),
    [
        (BertConfig(**SIZES), "bert", True, 60),
        (DistilBertConfig(**SIZES), "distilbert", False, 60),
        (RobertaConfig(**SIZES), "roberta", False, 59),
        (XlnetConfig(**{key: value for key, value in SIZES.items() if key[:3] != "max"}), "xlnet", True, None),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_the_tokenizer_gives_just_what_the_model_reads(
    config: EncoderConfig, auto: str, reads_types: bool, longest: int | None, tmp_path: Path
) -> None:
    source = small_model(tmp_path / "run" / "model", config, heads=())
    record = export_model(str(tmp_path / "run"), tmp_path / "out")
    assert record["family"] == auto
    assert record["tokenizer"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModel.from_pretrained(tmp_path / "out").eval()
    inputs = tokenizer("The reader walks.", "It builds models.", return_tensors="pt")
    assert ("token_type_ids" in inputs) == reads_types
    assert tokenizer.model_max_length == (longest or pytest.approx(1e30, rel=1e-6))
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state[0]
        ours, _ = load_model(source)
        types = [inputs["token_type_ids"][0].tolist()] if reads_types else None
        found = ours(PackedBatch.from_ids(inputs["input_ids"].tolist(), types))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def spoil_weight(directory: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    tensors["bert.encoder.layer.1.output.dense.weight"][3, 4] += 0.05
    save_file(tensors, directory / "model.safetensors")


def spoil_with_infinity(directory: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    tensors["bert.embeddings.LayerNorm.bias"][0] = float("nan")
    save_file(tensors, directory / "model.safetensors")


def spoil_settings(directory: Path) -> None:
    settings = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**settings, "hidden_act": "relu"}))


def spoil_tokenizer(directory: Path) -> None:
    settings = json.loads((directory / "tokenizer.json").read_text())
    settings["normalizer"]["lowercase"] = False
    (directory / "tokenizer.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_weight, "hidden differs by"),
        (spoil_with_infinity, "hidden is not finite"),
        (spoil_settings, "masked_lm differs by"),
        (spoil_tokenizer, "the tokenizer gives different ids"),
    ],
)
def test_what_differs_from_its_source_is_refused_and_leaves_nothing(
    spoil: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = small_model(tmp_path / "model")

    def faulty(model: HeadedModel, tokenizer: Tokenizer, directory: Path) -> None:
        save_model(model, tokenizer, directory)
        spoil(directory)

    earlier = tmp_path / "earlier"
    export_model(str(source), earlier)
    before = contents(tmp_path)
    monkeypatch.setattr(export, "save_model", faulty)
    for to in (tmp_path / "new" / "deep" / "out", earlier):
        with pytest.raises(CheckError, match=message):
            export_model(str(source), to)
    assert contents(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["earlier", "model"]


def test_an_interruption_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = small_model(tmp_path / "model")

    def interrupted(model: HeadedModel, tokenizer: Tokenizer, directory: Path) -> None:
        save_model(model, tokenizer, directory)
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "save_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export_model(str(source), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_earlier_export_is_replaced_whole_and_an_empty_directory_filled(tmp_path: Path) -> None:
    source = small_model(tmp_path / "model")
    (tmp_path / "out").mkdir()
    export_model(str(source), tmp_path / "out")
    (tmp_path / "out" / ".DS_Store").write_bytes(b"Bud1")  # macOS
    small_model(source, heads=("sequence_classification",))
    record = export_model(str(source), tmp_path / "out")
    assert record["heads"] == ["sequence_classification"]
    assert load_model(tmp_path / "out")[0].head_names == ("sequence_classification",)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_files_that_are_no_export_are_never_overwritten(tmp_path: Path) -> None:
    source = small_model(tmp_path / "run" / "model")
    (tmp_path / "file").write_text("x")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("x")
    export_model(str(source), tmp_path / "out")
    (tmp_path / "out" / "mine.txt").write_text("x")
    before = contents(tmp_path)
    for to, message in (
        (tmp_path / "file", "is a file"),
        (tmp_path / "notes", r"contains other files than an export \(thesis.txt\)"),
        (tmp_path / "out", r"contains other files than an export \(mine.txt\)"),
        (source, "is, contains or is inside"),
        (source / "inner", "is, contains or is inside"),
        (tmp_path / "run", "is, contains or is inside"),
    ):
        with pytest.raises(UsageError, match=message):
            export_model(str(source), to)
    assert contents(tmp_path) == before


def test_a_model_without_tokenizer_is_written_without(tmp_path: Path) -> None:
    model = HeadedModel(BertConfig(**SIZES).build(41), ("masked_lm",))
    model.initialise(seed=1)
    save_model(model, None, tmp_path / "model")
    record = export_model(str(tmp_path / "model"), tmp_path / "out")
    assert not record["tokenizer"]
    assert set(record["files"]) == {"config.json", "model.safetensors"}


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    source = small_model(tmp_path / "model")
    settings = BertConfig(**SIZES).build(41)
    model = HeadedModel(settings, ("masked_lm",))
    model.initialise(seed=1)
    save_model(model, None, source)
    with pytest.raises(DataError, match=r"the tokenizer has \d+ entries, the model's embedding table 41 rows"):
        export_model(str(source), tmp_path / "out")


@torch.no_grad()
def test_a_sentence_encoder_keeps_its_steps(tmp_path: Path) -> None:
    source = small_sentence_directory(tmp_path / "model", {"pooling_mode_mean_tokens": True}, dense=True)
    record = export_model(str(source), tmp_path / "out")
    assert record["differences"]["sentence_vectors"] == 0
    batch = PackedBatch.from_ids([[1, 2, 3, 4, 5], [7], [8, 9, 40]])
    assert torch.equal(load_sentence_model(tmp_path / "out")(batch), load_sentence_model(source)(batch))


def test_the_probe_has_one_token_the_longest_text_and_pairs(tmp_path: Path) -> None:
    model, _ = load_model(small_model(tmp_path))
    rows = [row for batch in probe_batches(model, load_tokenizer(tmp_path)) for row in batch]
    lengths = [len(row.ids) for row in rows]
    assert (min(lengths), max(lengths)) == (1, model.encoder.max_tokens)
    assert any(0 < row.first < len(row.ids) for row in rows)
    for batch in probe_batches(model, None):
        assert len({len(row.ids) for row in batch}) == len(batch)


def test_small_differences_of_large_numbers_agree_and_infinite_ones_never() -> None:
    agreement = Agreement(tolerance=1e-5)
    agreement.add("a", torch.tensor([100.0]), torch.tensor([100.0005]))
    assert not agreement.errors
    assert agreement.largest == pytest.approx(0.0005, abs=1e-5)
    agreement.add("b", torch.tensor([0.1]), torch.tensor([0.10002]))
    agreement.add("c", torch.tensor([float("inf")]), torch.tensor([float("inf")]))
    agreement.add("d", torch.zeros(2), torch.zeros(3))
    with pytest.raises(CheckError, match="b differs by 2e-05; c is not finite; d has shape"):
        agreement.raise_if_different("it")


def check_names_of_others(session: Any, head: str, inputs: dict[str, Any]) -> None:
    """optimum reads these outputs: states and logits under the names of its own graphs."""
    hidden, again, logits = session.run(["hidden", "last_hidden_state", head], inputs)
    assert (hidden == again).all()
    if head == "span":
        start, end = session.run(["start_logits", "end_logits"], inputs)
        assert (logits[..., 0] == start).all()
        assert (logits[..., 1] == end).all()
    else:
        assert (logits == session.run(["logits"], inputs)[0]).all()


ONNX_HEADS = [
    ("bert", "BertForSequenceClassification"),
    ("roberta", "RobertaForMaskedLM"),
    ("distilbert", "DistilBertForQuestionAnswering"),
    ("albert", "AlbertForTokenClassification"),
    ("gpt2", "GPT2ForSequenceClassification"),
    ("deberta-3", "DebertaV2ForMaskedLM"),
    ("modernbert", "ModernBertForSequenceClassification"),
    ("eurobert", "EuroBertForSequenceClassification"),
    ("nomic-bert", "NomicBertForMaskedLM"),
    ("gte-divided", "GteForMaskedLM"),
    ("ultrabert", "UltrabertForSequenceClassification"),
    ("mpnet", "MPNetForQuestionAnswering"),
    ("esm", "EsmForMaskedLM"),
    ("gemma3-causal", "Gemma3TextForSequenceClassification"),
]


@pytest.mark.parametrize(("name", "architecture"), ONNX_HEADS)
def test_a_graph_gives_the_numbers_of_the_original_for_any_batch_and_length(
    name: str, architecture: str, tmp_path: Path
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    case = CASES[name]
    oracle = make_oracle(case, architecture)
    oracle.save_pretrained(tmp_path / "theirs")
    record = export_model(str(tmp_path / "theirs"), tmp_path / "ours", kind="onnx")
    assert record["largest_difference"] < 1e-5
    assert set(record["files"]) == {"config.json", "model.onnx"}
    model, _ = load_model(tmp_path / "theirs")
    session = onnxruntime.InferenceSession(tmp_path / "ours" / "model.onnx")
    (head,) = model.head_names
    for lengths in ([19, 1, 7, 18, 2, 7], [5], [2, 3]):
        inputs = make_inputs(case, model, lengths)
        wanted = {entry.name for entry in session.get_inputs()}
        given = {key: value for key, value in inputs.padded.items() if key in wanted}
        assert set(given) == wanted
        arrays = {key: value.numpy() for key, value in given.items()}
        (logits,) = session.run([head], arrays)
        check_names_of_others(session, head, arrays)
        with torch.no_grad():
            expected = oracle_logits(head, oracle(**inputs.padded), inputs.real_BS)
        found = torch.from_numpy(logits)
        found = found[inputs.real_BS] if found.dim() == 3 else found
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_graph_holds_for_distances_of_every_length(tmp_path: Path) -> None:
    """The export compares both on sequences from one token to the longest; the graph is traced with one of three."""
    pytest.importorskip("onnxruntime")
    source = small_model(tmp_path / "model", JinaBertQkConfig(**{**SIZES, "num_hidden_layers": 1}))
    record = export_model(str(source), tmp_path / "out", kind="onnx")
    assert record["largest_difference"] < 1e-4


def test_an_embedder_s_graph_is_among_the_files_of_sentence_transformers(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    source = small_sentence_directory(tmp_path / "model", {"pooling_mode_mean_tokens": True}, dense=True)
    record = export_model(str(source), tmp_path / "out", kind="onnx")
    inner = next(Path(name).parent for name in record["files"] if name.endswith("model.onnx"))
    assert (source / inner / "config.json").is_file()
    steps = {name for name in contents(source) if "Pooling" in name or "Dense" in name or name == "modules.json"}
    assert steps
    assert all((tmp_path / "out" / name).read_bytes() == (source / name).read_bytes() for name in steps)


def test_onnxruntime_reports_nothing(tmp_path: Path) -> None:
    """Else it begins a session of its reports at its import, in a file of the temporary directory."""
    pytest.importorskip("onnxruntime")
    environment = {key: value for key, value in os.environ.items() if key != "ORT_DISABLE_TELEMETRY"}
    program = [sys.executable, "-c", "import bertkit.inference.export.onnx_graph, onnxruntime"]
    subprocess.run(program, env={**environment, "TMPDIR": str(tmp_path)}, check=True)
    assert not list(tmp_path.iterdir())


def test_a_graph_that_cannot_be_right_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    make_oracle(CASES["xlnet"], "XLNetLMHeadModel").save_pretrained(tmp_path / "theirs")
    with pytest.raises(UsageError, match=r"a graph of xlnet would be wrong for some texts.*albert"):
        export_model(str(tmp_path / "theirs"), tmp_path / "ours", kind="onnx")
    assert not (tmp_path / "ours").exists()


def test_the_extra_is_named_where_it_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else found(name))
    source = small_model(tmp_path / "model")
    with pytest.raises(UsageError, match=r"needs onnxruntime; install the extra: pip install 'bertkit\[onnx\]'"):
        export_model(str(source), tmp_path / "out", kind="onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_processes_with_one_id_write_in_different_directories(tmp_path: Path) -> None:
    """As in two containers that share a disk."""
    with atomic_directory(tmp_path / "out") as first, atomic_directory(tmp_path / "out") as second:
        (first / "a").write_text("first")
        (second / "a").write_text("second")
        assert (first / "a").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

"""`bertkit.load`: predictions, fills and vectors equal those of the commands and of sentence-transformers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import bertkit
from bertkit.errors import DataError, UsageError
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.inputs import CustomTask
from bertkit.finetuning.run import finetune
from bertkit.inference.model import Model
from bertkit.progress import silent_progress
from tests.overrides import parsed
from tests.tasks.tiny_kinds import write_kind
from tests.tasks.tiny_task import write_model

Command = Callable[..., Any]
TEXTS = ["the film was warm", "", "a", "of the story and the actors is not who what Was . , ?" * 5]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "base")


@pytest.mark.parametrize("kind", ["classification", "pair", "tagging", "span", "choice"])
def test_predictions_are_those_of_the_command(kind: str, base: Path, tmp_path: Path, bertkit: Command) -> None:
    task, inputs = write_kind(tmp_path, kind)
    settings = ["batch=7", "optimisation.steps=2", "engine.device=cpu"]
    settings += ["span.max_query_tokens=8", "data.max_length=32"] if kind == "span" else []
    run = _finetuned(task, base, tmp_path / "run", settings)
    printed = [json.loads(line) for line in bertkit("predict", "--model", run, inputs).stdout.splitlines()]
    rows = [json.loads(line) for line in inputs.read_text().splitlines()] if inputs.suffix == ".jsonl" else None
    if rows is None:
        header, *lines = (line.split(",") for line in inputs.read_text().splitlines())
        rows = [dict(zip(header, line, strict=True)) for line in lines]
    found = _load(run).predict(rows)
    assert json.loads(json.dumps(found)) == printed


def test_texts_pairs_and_words_are_inputs_too(base: Path, tmp_path: Path) -> None:
    task, _ = write_kind(tmp_path, "pair")
    model = _load(_finetuned(task, base, tmp_path / "run", ["optimisation.steps=1"]))
    inputs = [("the cat", "a dog"), {"text": "the cat", "text_pair": "a dog"}, " "]
    first, second, blank = model.predict(inputs, top=1)
    # Rows of one matrix product may round differently, depending on their position.
    assert first["scores"] == pytest.approx(second["scores"], rel=1e-6)
    assert len(first["scores"]) == 1
    assert blank == {"id": "2", "prediction": None}


def test_arguments_of_another_type_are_refused_by_name(base: Path, tmp_path: Path) -> None:
    task, _ = write_kind(tmp_path, "pair")
    model = bertkit.load(_finetuned(task, base, tmp_path / "run", ["optimisation.steps=1"]), device="cpu")  # a Path
    for call, message in [
        (lambda: model.predict(["a", None]), "input 1: None of type NoneType, expected a text, a pair"),
        (lambda: model.predict([("a", "b", "c")]), r"input 0: a tuple of 3, expected a pair, \(text, text_pair\)"),
        (lambda: model.predict(None), r"write predict\(\[text\]\)"),
        (lambda: model.encode(["a", float("nan")]), "text 1: nan of type float, expected a text"),
        (lambda: model.fill(["a [MASK]"]), "fill takes one text, not .* of type list"),
        (lambda: model.generate(["a"]), "generate takes one text, not .* of type list"),
        (lambda: model.predict([("a", "b")], top=-1), r"predict\(\): top is -1 of type int, expected a whole number"),
        (lambda: model.fill("a [MASK]", top=2.5), r"fill\(\): top is 2.5 of type float, expected a whole number"),
        (lambda: bertkit.load(base, precision="fp16"), "precision: .*fp16"),
        (lambda: bertkit.load(base, device="gpu"), "device: .*gpu"),
    ]:
        with pytest.raises(UsageError, match=message):
            call()


def test_labels_that_do_not_fit_the_head_are_named_as_the_cause(base: Path, tmp_path: Path) -> None:
    task, _ = write_kind(tmp_path, "classification")
    run = _finetuned(task, base, tmp_path / "run", ["optimisation.steps=1"])
    path = run / "model" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"id2label": {**config["id2label"], str(len(config["id2label"])): "more"}}))
    with pytest.raises(DataError, match=r"weights of its head do not fit the number of labels in config\.json: "):
        _load(run).predict(["a"])


def test_a_tagger_gives_entities_and_a_reader_answers(base: Path, tmp_path: Path) -> None:
    task, _ = write_kind(tmp_path, "tagging")
    tagger = _load(_finetuned(task, base, tmp_path / "tagger", ["lr=6e-3", "batch=7", "optimisation.epochs=14"]))
    text = "(fine) cat"
    found, words = tagger.predict([text, ["fine", "cat"]])
    assert [(each["start"], each["end"], each["text"]) for each in found["entities"]] == [(1, 5, "fine")]
    assert words["prediction"] == ["B-X", "O"]
    task, _ = write_kind(tmp_path, "span")
    settings = ["span.max_query_tokens=8", "data.max_length=32", "optimisation.steps=1"]
    reader = _load(_finetuned(task, base, tmp_path / "reader", settings))
    context = "the fine cat " * 40
    asked, again = reader.predict([("what is it ?", context), {"question": "what is it ?", "context": context}], top=2)
    assert [each["text"] for each in asked["answers"]] == [each["text"] for each in again["answers"]]
    assert len(asked["answers"]) == 2
    assert all(context[each["start"] : each["end"]] == each["text"] for each in asked["answers"])
    assert 0 < asked["no_answer"] < 1


def test_vectors_equal_sentence_transformers(base: Path, tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.models")
    transformer = modules.Transformer(str(base), max_seq_length=11)
    pooling = modules.Pooling(transformer.get_embedding_dimension(), pooling_mode="max")
    oracle = sentence_transformers.SentenceTransformer(
        modules=[transformer, pooling, modules.Normalize()], device="cpu"
    )
    oracle.save(str(tmp_path / "sentences"))
    found = _load(tmp_path / "sentences").encode(TEXTS)
    assert (found.shape, found.dtype) == ((4, 30), np.float32)
    np.testing.assert_allclose(found, oracle.encode(TEXTS), atol=1e-5)


def test_the_batch_decides_no_vector(base: Path) -> None:
    model = _load(base)
    together = model.encode(TEXTS * 9)
    alone = np.concatenate([model.encode([text]) for text in TEXTS])
    np.testing.assert_allclose(together, np.tile(alone, (9, 1)), atol=1e-6)
    assert model.encode([]).shape == (0, 30)


def test_fills_are_those_of_the_command(base: Path, bertkit: Command) -> None:
    (document,) = json.loads(bertkit("fill", "--model", base, "the [MASK] of the [MASK]", "--top", 3, "--json").stdout)
    masks = _load(base).fill("the [MASK] of the [MASK]", top=3)
    assert masks == document["masks"]
    assert [len(mask) for mask in masks] == [3, 3]


def test_what_cannot_be_done_is_an_error_that_says_why(base: Path) -> None:
    with pytest.raises(DataError, match=r"\./nothing: does not exist"):
        bertkit.load("./nothing")
    model = bertkit.load(str(base))
    with pytest.raises(UsageError, match=r"predict takes a list of texts; write predict\(\[text\]\)"):
        model.predict("a text")
    with pytest.raises(UsageError, match="encode takes a list"):
        model.encode("a text")
    with pytest.raises(DataError, match="no task head"):
        model.predict(["a text"])
    with pytest.raises(DataError, match=r"has no \[MASK\]"):
        model.fill("a text")


def test_a_tokenizer_with_more_entries_than_the_table_has_rows_is_refused(
    base: Path, tmp_path: Path, bertkit: Command
) -> None:
    directory = tmp_path / "short"
    shutil.copytree(base, directory)
    tensors = {
        name: tensor[:-1].clone() if name.endswith(("word_embeddings.weight", "predictions.bias")) else tensor
        for name, tensor in load_file(directory / "model.safetensors").items()
    }
    save_file(tensors, directory / "model.safetensors")
    contents = json.loads((directory / "config.json").read_text())
    contents["vocab_size"] -= 1
    (directory / "config.json").write_text(json.dumps(contents))
    model = _load(directory)
    for call in (lambda: model.fill("the [MASK]"), lambda: model.encode(["the"])):
        with pytest.raises(DataError, match=r"the tokenizer has .* entries, .*they do not belong together"):
            call()
    done = bertkit("fill", "--model", directory, "the [MASK]")
    assert done.code == 3
    assert "they do not belong together" in done.stderr


def test_importing_the_package_does_not_import_torch() -> None:
    script = "import sys, bertkit; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def _finetuned(task: CustomTask, base: Path, run_dir: Path, settings: Sequence[str]) -> Path:
    arguments = FinetuneArguments(task=task, model=str(base), run_dir=run_dir, overrides=parsed(settings))
    return finetune(arguments, progress=silent_progress).run.path


def _load(path: Path) -> Model:
    return bertkit.load(str(path), device="cpu")

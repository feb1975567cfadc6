"""Embedders in the form of Qwen3-Embedding and EmbeddingGemma: vectors are those of sentence-transformers, also after
training.

Tiny random models in the original classes: a causal decoder whose last token is an end token, and a decoder that
attends to both sides, whose mean goes through two linear maps.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file
from tokenizers import processors, trainers

import bertkit
from bertkit.errors import DataError, UsageError
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.multitask import require_joinable
from bertkit.finetuning.recipe import CustomTask
from bertkit.finetuning.run import finetune
from bertkit.models.sentence import read_pooling
from bertkit.progress import silent_progress
from bertkit.tasks.embedding.losses.multiple_negatives import MultipleNegativesLoss
from bertkit.tasks.embedding.task import Embedding, VectorForm
from bertkit.tasks.readers import Columns
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.run import FinishedRun
from tests.overrides import parsed
from tests.tasks.tiny_task import reviews, write_table

library = pytest.importorskip("sentence_transformers")
modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
transformers = pytest.importorskip("transformers")

TEXTS = ["a fine list of words", "cat", "poor numbers\n and  letters " * 5, "Bäume [MASK]", "", " paper "]
SIZES: dict[str, Any] = {
    "hidden_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 6,
    "intermediate_size": 31,
    "max_position_embeddings": 90,
}
IMAGE = "<image_soft_token>"


def learnt(backend: tokenizers.Tokenizer, size: int, special: list[str], alphabet: list[str]) -> tokenizers.Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([text for text, _ in reviews(40, seed=1)], trainer)
    return backend


def write_tokenizer(directory: Path, backend: tokenizers.Tokenizer, **settings: Any) -> Path:
    directory.mkdir(parents=True)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 90, **settings}))
    return directory


def save(encoder: Path, to: Path, model: Any, after: list[Any], prompts: dict[str, str]) -> Path:
    """A directory of sentence-transformers with this encoder, in `encoder` with its tokenizer."""
    with torch.no_grad():
        for parameter in [each for part in (model, *after) for each in part.parameters()]:
            parameter.normal_(0, 0.2)
    model.save_pretrained(encoder)
    parts = [modules.Transformer(str(encoder)), *after, modules.Normalize()]
    library.SentenceTransformer(modules=parts, prompts=prompts, device="cpu").save(str(to))
    return to


def write_qwen3(directory: Path) -> Path:
    own = transformers.Qwen2Tokenizer().backend_tokenizer
    end = "<|endoftext|>"
    backend = learnt(own, 330, [end, "<|im_end|>"], tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A:0 {end}:0", pair=f"$A:0 {end}:0 $B:1 {end}:1", special_tokens=[(end, 0)]
    )
    kind = {"tokenizer_class": "Qwen2Tokenizer", "padding_side": "left"}
    write_tokenizer(directory / "encoder", backend, **kind, pad_token=end, eos_token="<|im_end|>")
    torch.manual_seed(3)
    config = transformers.Qwen3Config(**SIZES, num_key_value_heads=2, vocab_size=340, tie_word_embeddings=True)
    prompts = {"query": "Instruct: fine\nQuery:", "document": ""}
    pooling = modules.Pooling(20, pooling_mode="lasttoken")
    return save(directory / "encoder", directory / "qwen3", transformers.Qwen3Model(config), [pooling], prompts)


def write_gemma3(directory: Path) -> Path:
    own = transformers.GemmaTokenizer().backend_tokenizer
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{number:02X}>" for number in range(256))]
    backend = learnt(own, 340, special, [])
    backend.post_processor = processors.TemplateProcessing(
        single="<bos>:0 $A:0 <eos>:0",
        pair="<bos>:0 $A:0 <eos>:0 <bos>:1 $B:1 <eos>:1",
        special_tokens=[("<bos>", 2), ("<eos>", 1)],
    )
    rows = backend.get_vocab_size()
    backend.add_special_tokens([IMAGE])  # as in Gemma 3's files, without a row in the models for text
    roles = {f"{role}_token": f"<{role}>" for role in ("pad", "eos", "bos", "unk", "mask")}
    write_tokenizer(directory / "encoder", backend, tokenizer_class="GemmaTokenizer", **roles)
    torch.manual_seed(4)
    config = transformers.Gemma3TextConfig(
        **SIZES,
        num_key_value_heads=1,
        vocab_size=rows,
        query_pre_attn_scalar=6,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        use_bidirectional_attention=True,
    )
    plain = {"bias": False, "activation_function": torch.nn.Identity()}
    after = [
        modules.Pooling(20, pooling_mode="mean"),
        modules.Dense(20, 41, **plain),
        modules.Dense(41, 18, **plain),
    ]
    prompts = {"query": "fine | query: ", "document": "title: none | text: ", "STS": "alike: "}
    return save(directory / "encoder", directory / "gemma3", transformers.Gemma3TextModel(config), after, prompts)


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def embedder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    write = {"qwen3": write_qwen3, "gemma3": write_gemma3}[request.param]
    return write(tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma3(tmp_path_factory.mktemp("gemma3"))


def assert_same_vectors(directory: Path, *, prompts: tuple[str, ...]) -> None:
    theirs = library.SentenceTransformer(str(directory), device="cpu")
    ours = bertkit.load(str(directory), device="cpu", precision="fp32")
    for named in ({}, *({"prompt_name": name} for name in prompts)):
        for theirs.tokenizer.padding_side in ("left", "right"):
            np.testing.assert_allclose(ours.encode(TEXTS, **named), theirs.encode(TEXTS, **named), rtol=0, atol=1e-5)


def trained(model: Path, run_dir: Path, *overrides: str, **fields: Any) -> FinishedRun:
    texts = [text for text, _ in reviews(64, seed=2)]
    pairs = write_table(run_dir.parent / "pairs.csv", list(zip(texts[::2], texts[1::2], strict=True)), ("a", "b"))
    files = {"train": str(pairs), "dev": str(pairs), "columns": Columns(text="a", text_pair="b")}
    settings = ("lr=1e-2", "optimisation.steps=2", "batch=8", "engine.device=cpu", "engine.precision=fp32")
    task = fields.pop("task", None) or CustomTask(kind="embedding", **files)
    given = {"task": task, "model": str(model), "run_dir": run_dir, "fresh": True}
    return finetune(
        FinetuneArguments(**given, overrides=parsed([*settings, *overrides]), **fields), progress=silent_progress
    )


def test_vectors_are_those_of_sentence_transformers(embedder: Path) -> None:
    assert_same_vectors(embedder, prompts=("query", "document"))


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_trained_embedder_has_the_vectors_of_sentence_transformers(
    embedder: Path, method: str, tmp_path: Path
) -> None:
    run = trained(embedder, tmp_path / "run", f"method.name={method}")
    before, after = (bertkit.load(str(each), device="cpu").encode(TEXTS) for each in (embedder, run.run.model))
    assert np.abs(after - before).max() > 1e-3
    assert_same_vectors(run.run.model, prompts=("query", "document"))
    for name in ("2_Dense", "3_Dense"):
        if (embedder / name).is_dir():
            old, new = (load_file(each / name / "model.safetensors") for each in (embedder, run.run.model))
            assert old.keys() == new.keys()
            assert not torch.equal(old["linear.weight"], new["linear.weight"])


def test_a_special_token_without_a_row_is_text(gemma3: Path) -> None:
    tokenizer = load_tokenizer(gemma3)
    assert tokenizer.id(IMAGE) is None
    assert tokenizer.vocab_size == json.loads((gemma3 / "config.json").read_text())["vocab_size"]
    assert len(tokenizer.encode_plain([IMAGE])[0]) > 1


def test_maps_that_cannot_be_trained_are_refused(gemma3: Path, tmp_path: Path) -> None:
    _, maps = read_pooling(gemma3)
    form = VectorForm(maps=tuple(maps[:2]))  # type: ignore[arg-type]  # before Normalize
    with pytest.raises(UsageError, match="and so is a model with Dense modules"):
        require_joinable([Embedding(MultipleNegativesLoss(), ("accuracy",), form=form)])
    with pytest.raises(
        UsageError, match=r"embedding\.pooling: the model's Dense module reads vectors of another width"
    ):
        trained(gemma3, tmp_path / "run", "embedding.pooling=[cls, mean]")
    other = tmp_path / "other"
    shutil.copytree(gemma3, other)
    listed = json.loads((other / "modules.json").read_text())
    reordered = [{**listed[old], "idx": new} for new, old in enumerate((0, 1, 4, 2, 3))]
    (other / "modules.json").write_text(json.dumps(reordered))
    with pytest.raises(DataError, match="has a module Dense after Normalize, which cannot be trained here"):
        trained(other, tmp_path / "run")

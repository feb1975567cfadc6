"""BGE-M3's words' weights and token vectors equal those of the released code's equations, in every command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.evaluation.embeddings.test_embedding_suites import write_folder
from tests.inference.test_independent_batches import engine
from tests.tasks.tiny_task import write_model
from torch import Tensor, nn
from transformers import AutoModel

import bertkit as package
from bertkit.errors import DataError
from bertkit.files import read_json
from bertkit.inference.embedder import Embedder
from bertkit.inference.token_embedder import TokenEmbedder
from bertkit.models.sentence_files import write_sentence_files
from bertkit.text.tokenizer_files import load_tokenizer

Command = Callable[..., Any]
TEXTS = ["a cat , a list .", "zzz \u4e2d fine", "", "the fine matrix of words ! " * 9, "cat"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_model(tmp_path_factory.mktemp("m3") / "m3", heads=())
    write_sentence_files(directory, width=30, pooling=("cls",), normalise=True, max_tokens=24)
    torch.manual_seed(1)
    for name, width in (("sparse", 1), ("colbert", 30)):
        linear = nn.Linear(30, width)
        nn.init.constant_(linear.bias, 0.6)
        torch.save(linear.state_dict(), directory / f"{name}_linear.pt")
    return directory


@pytest.fixture(autouse=True)
def own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERTKIT_RUNS", str(tmp_path / "runs"))


@torch.no_grad()
def of_the_released_code(model: Path, text: str) -> tuple[dict[int, float], Tensor]:
    """The weights of a text's words by id, and the vectors of its tokens."""
    tokenizer = load_tokenizer(model)
    ids = [tokenizer.cls_id, *tokenizer.encode_plain([text])[0].tolist()[:22], tokenizer.sep_id]
    hidden_LD = AutoModel.from_pretrained(model)(torch.tensor([ids])).last_hidden_state[0]
    sparse, colbert = (torch.load(model / f"{name}_linear.pt") for name in ("sparse", "colbert"))
    weight_L = (hidden_LD @ sparse["weight"].T + sparse["bias"]).relu()[:, 0].tolist()
    weights: dict[int, float] = {}
    for token, weight in zip(ids, weight_L, strict=True):
        if token not in (tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id, tokenizer.unk_id) and weight > 0:
            weights[token] = max(weight, weights.get(token, 0.0))
    vectors_LD = hidden_LD[1:] @ colbert["weight"].T + colbert["bias"]
    return weights, vectors_LD / vectors_LD.norm(dim=1, keepdim=True)


def test_weights_of_words_are_those_of_the_released_code(model: Path) -> None:
    loaded = package.load(model / "sparse_linear.pt")
    found = loaded.encode(TEXTS)
    assert found.shape[1] == load_tokenizer(model).vocab_size
    for text, own_V in zip(TEXTS, found, strict=True):
        expected, _ = of_the_released_code(model, text)
        assert {number: own_V[number] for number in own_V.nonzero()[0]} == pytest.approx(expected, abs=1e-5)
    assert (found[[0, 3, 4]] > 0).any(axis=1).all()
    alone = [loaded.encode([text])[0] for text in TEXTS]
    np.testing.assert_array_equal(np.stack(alone), found)


def test_token_vectors_are_those_of_the_released_code_without_the_first(model: Path) -> None:
    loaded = package.load(model / "colbert_linear.pt")
    expected = [of_the_released_code(model, text)[1].numpy() for text in TEXTS]
    for role in ("query", "document"):
        for own_LE, other_LE in zip(loaded.token_vectors(TEXTS, role=role), expected, strict=True):  # type: ignore[arg-type]
            np.testing.assert_allclose(own_LE, other_LE, atol=1e-5)
    scores = [(expected[4] @ each.T).max(axis=1).sum() for each in expected]
    np.testing.assert_allclose(loaded.late_scores(TEXTS[4], TEXTS), scores, rtol=1e-5)


def test_fingerprints_depend_on_the_maps(model: Path, tmp_path: Path) -> None:
    prints = {Embedder.load(path, engine()).fingerprint for path in (model, model / "sparse_linear.pt")}
    prints.add(TokenEmbedder.load(model / "colbert_linear.pt", engine()).fingerprint)
    other = write_model(tmp_path / "other", heads=())
    torch.save(nn.Linear(30, 1).state_dict(), other / "sparse_linear.pt")
    prints.add(Embedder.load(other / "sparse_linear.pt", engine()).fingerprint)
    assert len(prints) == 4


@pytest.mark.parametrize("name", ["sparse", "colbert"])
def test_search_and_retrieval(model: Path, tmp_path: Path, bertkit: Command, name: str) -> None:
    own, texts = f"{model}/{name}_linear.pt", tmp_path / "texts.txt"
    texts.write_text("\n".join(text for text in TEXTS if text), encoding="utf-8")
    assert bertkit("search", "--model", own, "--corpus", texts, "--index", tmp_path / "index").code == 0
    (found,) = json.loads(bertkit("search", "--index", tmp_path / "index", "--json", "cat").stdout)
    loaded, lines = package.load(own), [text.strip() for text in TEXTS if text]
    sparse = name == "sparse"
    scores = (loaded.encode(lines) @ loaded.encode(["cat"])[0]).tolist() if sparse else loaded.late_scores("cat", lines)
    expected = {text: score for text, score in zip(lines, scores, strict=True) if not sparse or score > 0}
    assert {hit["text"].strip(): hit["score"] for hit in found["hits"]} == pytest.approx(expected, abs=1e-2)
    assert read_json(tmp_path / "index" / "index.json")["model"] == own
    rescored = bertkit("search", "--model", model, "--corpus", texts, "--rerank", model / "colbert_linear.pt", "cat")
    assert rescored.code == 0
    folder = write_folder(tmp_path / "beir")
    document = json.loads(bertkit("eval", "retrieval", "--model", own, "--data-dir", folder, "--json").stdout)
    assert document["documents"] == 40


def test_embed_writes_words(model: Path, tmp_path: Path, bertkit: Command) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("cat\n", encoding="utf-8")
    vector = json.loads(bertkit("embed", "--model", model / "sparse_linear.pt", texts, "--precision", "fp32").stdout)[
        "vector"
    ]
    expected, _ = of_the_released_code(model, "cat")
    tokenizer = load_tokenizer(model)
    assert vector == pytest.approx({tokenizer.token(number): weight for number, weight in expected.items()}, abs=1e-5)


def test_what_is_not_there_is_told(model: Path, tmp_path: Path, bertkit: Command) -> None:
    plain = write_model(tmp_path / "plain", heads=())
    with pytest.raises(DataError, match=r"has no sparse_linear\.pt, as a model of BGE-M3's form does"):
        package.load(plain / "sparse_linear.pt")
    torch.save(nn.Linear(7, 1).state_dict(), plain / "sparse_linear.pt")
    with pytest.raises(DataError, match="expected a linear map of 30 numbers"):
        package.load(plain / "sparse_linear.pt").encode(["a"])
    torch.save(nn.Linear(30, 2).state_dict(), plain / "sparse_linear.pt")
    with pytest.raises(DataError, match="gives 2 numbers for a token; expected one"):
        package.load(plain / "sparse_linear.pt").encode(["a"])
    done = bertkit("export", model / "colbert_linear.pt", "--to", tmp_path / "out")
    assert done.code == 3
    assert "give its directory" in done.stderr.replace("\n", " ")


def test_the_limit_of_the_directory_applies(model: Path) -> None:
    for name in ("sparse", "colbert"):
        kind = Embedder if name == "sparse" else TokenEmbedder
        assert kind.load(model / f"{name}_linear.pt", engine()).max_tokens == 24

"""ColBERT models of other libraries load with equal token vectors and scores, and score texts everywhere."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

import bertkit
from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError, UsageError
from bertkit.files import read_json, write_json
from bertkit.inference.export.export import export_model
from bertkit.inference.token_embedder import TokenEmbedder
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.late_interaction import LateInteraction, all_scores, check_expansion
from bertkit.models.registry import FAMILIES
from bertkit.models.sentence import is_token_encoder
from bertkit.models.text_reading import TextReading
from bertkit.tasks.embedding.token_reader import TokenReader
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.engine import resolve_engine
from bertkit.training.engine_config import EngineConfig
from tests.evaluation.embeddings.test_embedding_suites import TEXTS, Command, write_folder
from tests.inference.serving.clients import post, served
from tests.tasks.tiny_task import write_model

QUERIES = ["cat", "fine list of words in a matrix , a number ( cat ) . fine list of words in a matrix ."]
DOCUMENTS = ["poor number", "a cat , a list .", "the fine matrix of words ! " * 5, "."]


@pytest.fixture(autouse=True)
def own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERTKIT_RUNS", str(tmp_path / "runs"))


def embedder(directory: Path) -> TokenEmbedder:
    return TokenEmbedder.load(directory, resolve_engine(EngineConfig(device="cpu", precision="fp32")))


def written(directory: Path, root: Path, *, skip: bool = True, **settings: Any) -> Any:
    """A MultiVectorEncoder that sentence-transformers saves."""
    pytest.importorskip("sentence_transformers", reason="the oracle is a development dependency")
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    torch.manual_seed(0)
    encoder = Transformer(str(root), **settings)
    names = {"module_input_name": "token_embeddings"}
    width = encoder.get_embedding_dimension()
    dense = Dense(width, 32, bias=False, activation_function=torch.nn.Identity(), **names)
    mask = MultiVectorMask(skiplist_words=list(string.punctuation) if skip else None)
    prompts = {"query": "the ", "document": "[unused0] "}
    found = MultiVectorEncoder(modules=[encoder, dense, mask, Normalize(**names)], prompts=prompts, device="cpu")
    found.save_pretrained(str(directory))
    return found


def assert_equal(directory: Path, theirs: Any) -> None:
    ours = embedder(directory)
    pairs = [
        (ours.queries(QUERIES), theirs.encode_query(QUERIES, convert_to_numpy=True)),
        (ours.documents(DOCUMENTS), theirs.encode_document(DOCUMENTS, convert_to_numpy=True)),
    ]
    for own, other in pairs:
        for own_LE, other_LE in zip(own, other, strict=True):
            np.testing.assert_allclose(own_LE, other_LE, atol=1e-5)
    vectors = [[torch.from_numpy(each) for each in other] for _, other in pairs]
    scores = np.array([ours.scores(query, DOCUMENTS) for query in QUERIES])
    np.testing.assert_allclose(scores, theirs.similarity(*vectors).numpy(), atol=1e-4)
    np.testing.assert_allclose(all_scores(pairs[0][0], pairs[1][0]), scores, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"query_expansion": {"strategy": "fixed", "attend": False, "length": 16}, "document_length": 12},
        {"query_expansion": {"strategy": "fixed", "attend": True, "length": 16}},
        {"query_length": 10, "skip": False},
    ],
)
def test_a_directory_of_sentence_transformers(tmp_path: Path, settings: dict[str, Any]) -> None:
    theirs = written(tmp_path / "theirs", write_model(tmp_path / "base"), **settings)
    assert_equal(tmp_path / "theirs", theirs)


@pytest.mark.parametrize("family", ["roberta", "distilbert", "modernbert", "electra", "albert", "mpnet"])
def test_other_families_leave_the_expansion_out_of_their_attention(
    tmp_path: Path, tiny_model: Any, family: str
) -> None:
    theirs = written(
        tmp_path / "theirs",
        tiny_model(tmp_path / "base", family),
        query_expansion={"strategy": "fixed", "attend": False, "length": 24},
    )
    assert_equal(tmp_path / "theirs", theirs)


@pytest.fixture
def tiny_model() -> Any:
    """Writes a checkpoint of a family with random weights and the vocabulary of `write_model`."""

    def write(directory: Path, family: str) -> Path:
        tokenizer: Tokenizer = load_tokenizer(write_model(directory.parent / "words"))
        sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 80}
        more = {"local_attention": 48} if family == "modernbert" else {}
        more |= {"embedding_size": 24} if family == "electra" else {}
        config = FAMILIES[family](**sizes, intermediate_size=40, initializer_range=0.2, **more)
        model = HeadedModel(config.build(tokenizer.vocab_size, pad_id=tokenizer.pad_id))
        model.initialise(seed=1)
        save_model(model, tokenizer, directory)
        return directory

    return write


@pytest.mark.parametrize(
    "own",
    [
        {"model_type": "ColBERT", "attend_to_expansion_tokens": False, "skiplist_words": [",", "."]},
        {"model_type": "ColBERT", "skiplist_words": None},
        {"attend_to_mask_tokens": True},  # of before sentence-transformers wrote a model_type
    ],
)
def test_a_directory_of_an_older_pylate(tmp_path: Path, own: dict[str, Any]) -> None:
    directory = tmp_path / "pylate"
    written(directory, write_model(tmp_path / "base"))
    modules = json.loads((directory / "modules.json").read_text(encoding="utf-8"))[:2]
    modules[1]["type"] = "pylate.models.Dense.Dense"
    (directory / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    version = json.loads((directory / "config_sentence_transformers.json").read_text(encoding="utf-8"))
    del version["model_type"]
    version |= {
        "prompts": {},
        "query_prefix": "[unused1] ",
        "document_prefix": "cat ",
        "query_length": 16,
        "document_length": 12,
        "do_query_expansion": True,
        **own,
    }
    (directory / "config_sentence_transformers.json").write_text(json.dumps(version), encoding="utf-8")
    from sentence_transformers import MultiVectorEncoder

    assert is_token_encoder(directory)
    assert_equal(directory, MultiVectorEncoder(str(directory), device="cpu"))


def of_colbert(directory: Path, **settings: Any) -> Path:
    """A directory as ColBERT's own code writes it: the linear map beside the encoder's weights."""
    write_model(directory)
    weights = load_file(directory / "model.safetensors")
    linear = torch.randn(32, 30, generator=torch.manual_seed(0))
    save_file({**weights, "linear.weight": linear}, directory / "model.safetensors", metadata={"format": "pt"})
    config = read_json(directory / "config.json")
    write_json(directory / "config.json", {**config, "architectures": ["HF_ColBERT"]})
    if settings:
        write_json(directory / "artifact.metadata", settings)
    return directory


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"query_maxlen": 16, "doc_maxlen": 12, "attend_to_mask_tokens": True, "mask_punctuation": False},
        {"query_maxlen": 24, "attend_to_mask_tokens": False, "query_token_id": "the", "doc_token_id": "[unused0]"},
    ],
)
def test_a_directory_of_colberts_own_code_and_its_export(tmp_path: Path, settings: dict[str, Any]) -> None:
    library = pytest.importorskip("sentence_transformers", reason="the oracle is a development dependency")
    directory = of_colbert(tmp_path / "colbert", **settings)
    assert is_token_encoder(directory)
    theirs = library.MultiVectorEncoder(str(directory), device="cpu")
    assert_equal(directory, theirs)
    export_model(str(directory), tmp_path / "out")
    assert_equal(tmp_path / "out", theirs)
    assert_equal(tmp_path / "out", library.MultiVectorEncoder(str(tmp_path / "out"), device="cpu"))


def test_a_directory_of_colberts_own_code_without_its_map_is_refused(tmp_path: Path) -> None:
    config = read_json(write_model(tmp_path / "base") / "config.json")
    write_json(tmp_path / "base" / "config.json", {**config, "architectures": ["HF_ColBERT"]})
    with pytest.raises(DataError, match=r"has no linear\.weight of 30 columns"):
        embedder(tmp_path / "base")


def test_vectors_do_not_depend_on_other_texts(tmp_path: Path) -> None:
    settings = {"query_expansion": {"strategy": "fixed", "attend": False, "length": 16}}
    written(tmp_path / "theirs", write_model(tmp_path / "base"), **settings)
    model = embedder(tmp_path / "theirs")
    texts = [*QUERIES, *DOCUMENTS]
    for read in (model.queries, model.documents):
        for text, found in zip(texts, read(texts), strict=True):
            np.testing.assert_array_equal(read([text])[0], found)


def test_in_python(tmp_path: Path) -> None:
    written(tmp_path / "theirs", base := write_model(tmp_path / "base"))
    model = bertkit.load(str(tmp_path / "theirs"))
    (query,) = model.token_vectors(["cat"], role="query")
    scores = [float((query @ each.T).max(axis=1).sum()) for each in model.token_vectors(DOCUMENTS)]
    np.testing.assert_allclose(model.late_scores("cat", DOCUMENTS), scores, rtol=1e-5)
    with pytest.raises(UsageError, match=r"computes a vector for each token \(ColBERT\)"):
        model.encode(["cat"])
    with pytest.raises(UsageError, match=r"has no vector for each token"):
        bertkit.load(str(base)).token_vectors(["cat"])


@pytest.mark.parametrize("family", ["deberta-v2", "longformer", "xlnet", "gpt2"])
def test_families_that_cannot_hide_keys_are_refused(family: str) -> None:
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40}
    with pytest.raises(UsageError, match=r"cannot leave the \[MASK\] tokens of queries out"):
        check_expansion(FAMILIES[family](**sizes).build(50), 32, "here")


@pytest.fixture(scope="module")
def colbert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("colbert")
    settings = {"query_expansion": {"strategy": "fixed", "attend": False, "length": 16}}
    written(root / "model", write_model(root / "base"), **settings)
    return root / "model"


def test_retrieval_ranks_by_maxsim(colbert: Path, tmp_path: Path, bertkit: Command) -> None:
    folder = write_folder(tmp_path / "beir")
    words = ("eval", "retrieval", "--model", colbert, "--data-dir", folder)
    document = json.loads(bertkit(*words, "--json", "--cutoffs", "1,3").stdout)
    model = embedder(colbert)
    places = []
    for number in (3, 9):
        scores = model.scores(TEXTS[number], TEXTS)
        places.append(sorted(range(len(TEXTS)), key=lambda n: (-round(scores[n], 4), n)).index(number))
    expected = float(np.mean([1 / (place + 1) if place < 10 else 0 for place in places]))
    assert document["tasks"]["beir"]["mrr@10"]["mean"] >= expected - 1e-6
    assert document["documents"] == 40
    assert "a vector for each token, which maxsim compares" in bertkit(*words, "--similarity", "cosine").stderr


def test_search_is_rescored(colbert: Path, tmp_path: Path, bertkit: Command) -> None:
    dense, texts = write_model(tmp_path / "dense"), tmp_path / "texts.txt"
    texts.write_text("\n".join(DOCUMENTS), encoding="utf-8")
    words = ("search", "--model", dense, "--corpus", texts, "--rerank", colbert, "--json", "fine list")
    hits = json.loads(bertkit(*words).stdout)[0]["hits"]
    found = {hit["text"].strip(): hit["score"] for hit in hits}
    scores = embedder(colbert).scores("fine list", DOCUMENTS)
    assert found == {
        text.strip(): pytest.approx(score, abs=1e-5) for text, score in zip(DOCUMENTS, scores, strict=True)
    }
    assert [hit["score"] for hit in hits] == sorted(scores, reverse=True)


def test_served_models_rerank(colbert: Path) -> None:
    model = served("colbert", colbert)
    asked = {"query": "fine list", "documents": DOCUMENTS}
    found = post([model], "/rerank", asked).json()["results"]
    scores = embedder(colbert).scores("fine list", DOCUMENTS)
    assert {each["index"]: each["relevance_score"] for each in found} == dict(enumerate(scores))
    refused = post([model], "/v1/embeddings", {"input": "a cat", "model": "colbert"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "model_not_able")
    long = post([model], "/rerank", {"query": "a", "documents": ["number " * 90]}, long="error")
    assert (long.status_code, long.json()["error"]["code"]) == (422, "context_length_exceeded")


@pytest.mark.parametrize(
    "words",
    [
        ("embed", "--model", "{model}", "{texts}"),
        ("eval", "sts", "--model", "{model}", "--data-dir", "{sts}"),
        ("export", "{model}", "--to", "{out}", "--format", "onnx"),
        ("export", "{model}", "--to", "{out}", "--format", "int8"),
    ],
)
def test_what_needs_one_vector_per_text_is_refused(
    colbert: Path, tmp_path: Path, bertkit: Command, words: tuple[str, ...]
) -> None:
    texts, sts = tmp_path / "texts.txt", tmp_path / "sts" / "stsb"
    texts.write_text("\n".join(DOCUMENTS), encoding="utf-8")
    sts.mkdir(parents=True)
    rows = ["score\tsentence1\tsentence2", "3.0\ta cat\tthe cat", "1.0\ta list\tthe cat"]
    (sts / "dev.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    places = {"model": colbert, "texts": texts, "sts": sts.parent, "out": tmp_path / "out"}
    done = bertkit(*(word.format(**places) for word in words))
    assert done.code == 2
    assert "a vector for each token (ColBERT)" in done.stderr.replace("\n", " ")
    assert "--rerank" in done.stderr


def test_predict_names_the_command_that_ranks(colbert: Path, tmp_path: Path, bertkit: Command) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("a cat\n")
    refused = bertkit("predict", "--model", colbert, texts)
    assert refused.code == 3
    told = " ".join(refused.stderr.split())
    assert f"`bertkit search --rerank {colbert}`" in told
    assert "embed" not in told.replace(str(colbert), "")


def test_an_export_as_hf_computes_the_same(colbert: Path, tmp_path: Path, bertkit: Command) -> None:
    assert bertkit("export", colbert, "--to", tmp_path / "out").code == 0
    for own, again in zip(*(embedder(each).documents(DOCUMENTS) for each in (colbert, tmp_path / "out")), strict=True):
        np.testing.assert_array_equal(own, again)


def test_a_vocabulary_without_a_mask_cannot_expand_queries(tmp_path: Path) -> None:
    whole = load_tokenizer(write_model(tmp_path / "base"))
    bare = Tokenizer(whole.backend, {role: token for role, token in whole.roles.items() if role != "mask"})
    encoder = SequenceEncoder(bare, max_tokens=24)
    with pytest.raises(UsageError, match=r"the vocabulary has none; set .*expand_queries=false"):
        TokenReader(encoder, LateInteraction(16, None, "hidden"), TextReading())
    (query,) = TokenReader(encoder, LateInteraction(16), TextReading()).queries(["a cat"])
    assert (len(query.ids), query.keys, query.scored) == (4, 4, [True] * 4)


def test_gradients_with_hidden_keys_are_those_of_transformers(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "base", heads=(), dropout=0.0)
    theirs, (ours, _) = AutoModel.from_pretrained(directory), load_model(directory, heads=())
    keys, length = [5, 9, 16], 16
    ids = torch.randint(5, 20, (3, length), generator=torch.Generator().manual_seed(2))
    mask = torch.arange(length) < torch.tensor(keys)[:, None]
    batch = PackedBatch.from_ids([*ids.tolist(), [6, 7, 8]], keys=[*keys, 3])
    states = ours(batch)[: ids.numel()]
    expected = theirs(input_ids=ids, attention_mask=mask.long()).last_hidden_state.flatten(0, 1)
    torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-4)
    weight = torch.randn(states.shape, generator=torch.Generator().manual_seed(3))
    sides = [
        (states, ours.get_submodule("encoder.layers.0.attention")),
        (expected, theirs.get_submodule("encoder.layer.0.attention.self")),
    ]
    names = ("query.weight", "key.weight", "value.weight")
    found, right = (
        torch.autograd.grad((each * weight).sum(), [part.get_parameter(name) for name in names]) for each, part in sides
    )
    torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-3)

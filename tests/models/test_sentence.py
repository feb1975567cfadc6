"""sentence-transformers directories: their files determine the same vectors as there, and saving preserves this."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.inference.test_export import small_model

import bertkit
from bertkit.errors import DataError
from bertkit.inference.export.export import export_model
from bertkit.models.sentence import load_sentence_model

library = pytest.importorskip("sentence_transformers")
parts = pytest.importorskip("sentence_transformers.models")

TEXTS = ["The reader tests a document.", "A value", " ".join(["values walked to the building and"] * 9)]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An embedder saved by sentence-transformers; it reads 16 of 60 tokens."""
    home = tmp_path_factory.mktemp("sentence")
    transformer = parts.Transformer(str(small_model(home / "encoder", heads=())), max_seq_length=16)
    pooling = parts.Pooling(transformer.get_embedding_dimension(), "mean")
    library.SentenceTransformer(modules=[transformer, pooling], device="cpu").save(str(home / "embedder"))
    return home / "embedder"


def assert_same_vectors(directory: Path, texts: list[str] = TEXTS) -> None:
    expected = library.SentenceTransformer(str(directory), device="cpu").encode(texts)
    found = bertkit.load(str(directory), device="cpu", precision="fp32").encode(texts)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


def changed(source: Path, target: Path, file: str, **values: Any) -> Path:
    """A copy with other values in one of its files."""
    shutil.copytree(source, target)
    path = target / file
    contents = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**contents, **values}))
    return target


def test_an_export_cuts_texts_where_its_source_does(theirs: Path, tmp_path: Path) -> None:
    assert load_sentence_model(theirs).max_tokens == 16
    export_model(str(theirs), tmp_path / "out")
    assert load_sentence_model(tmp_path / "out").max_tokens == 16
    assert library.SentenceTransformer(str(tmp_path / "out"), device="cpu").max_seq_length == 16
    assert_same_vectors(tmp_path / "out")


def test_the_default_prompt_stands_before_every_text(theirs: Path, tmp_path: Path) -> None:
    settings = {"prompts": {"query": "numbers of ", "document": ""}, "default_prompt_name": "query"}
    prompted = changed(theirs, tmp_path / "prompted", "config_sentence_transformers.json", **settings)
    assert_same_vectors(prompted)
    plain, with_prompt = (bertkit.load(str(each), device="cpu").encode(["A value"]) for each in (theirs, prompted))
    assert np.abs(plain - with_prompt).max() > 1e-3
    export_model(str(prompted), tmp_path / "out")
    assert_same_vectors(tmp_path / "out")


def test_vectors_have_the_length_that_is_stored_with_the_model(theirs: Path, tmp_path: Path) -> None:
    cut = changed(theirs, tmp_path / "cut", "config_sentence_transformers.json", truncate_dim=5)
    assert bertkit.load(cut, device="cpu").encode(["A value"]).shape == (1, 5)
    assert_same_vectors(cut)
    export_model(str(cut), tmp_path / "out")
    assert_same_vectors(tmp_path / "out")


def test_a_default_prompt_of_the_wrong_type_is_none(theirs: Path, tmp_path: Path) -> None:
    strange = {"prompts": {"query": "query: "}, "default_prompt_name": ["query"]}
    directory = changed(theirs, tmp_path / "strange", "config_sentence_transformers.json", **strange)
    assert load_sentence_model(directory).reading.default_prompt == ""


@pytest.mark.parametrize(
    "prompts",
    [{"query": "numbers of "}, {"passage": "the file: ", "corpus": "values "}, {"query": "a ", "document": ""}],
)
def test_queries_and_documents_have_the_prompts_of_sentence_transformers(
    theirs: Path, tmp_path: Path, prompts: dict[str, str]
) -> None:
    prompted = changed(theirs, tmp_path / "prompted", "config_sentence_transformers.json", prompts=prompts)
    other, own = library.SentenceTransformer(str(prompted), device="cpu"), bertkit.load(str(prompted), device="cpu")
    of_queries = own.encode(TEXTS, prompt=own.embedder.reading.query_prompt)
    np.testing.assert_allclose(of_queries, other.encode_query(TEXTS), rtol=0, atol=2e-6)
    if "passage" not in prompts:  # its own empty prompt `document` comes before passage and corpus, from version 5.1
        of_documents = own.encode(TEXTS, prompt=own.embedder.reading.document_prompt)
        np.testing.assert_allclose(of_documents, other.encode_document(TEXTS), rtol=0, atol=2e-6)


def test_the_length_is_read_from_older_names_of_the_settings(theirs: Path, tmp_path: Path) -> None:
    old = changed(theirs, tmp_path / "old", "sentence_roberta_config.json", max_seq_length=8, do_lower_case=False)
    for name in ("sentence_bert_config.json",):
        (old / name).unlink(missing_ok=True)
    assert load_sentence_model(old).max_tokens == 8
    assert_same_vectors(old)
    export_model(str(old), tmp_path / "out")
    assert_same_vectors(tmp_path / "out")


def test_a_table_of_vectors_is_the_mean_of_the_texts_own_tokens(theirs: Path, tmp_path: Path) -> None:
    tokenizer = library.SentenceTransformer(str(theirs), device="cpu").tokenizer
    table = parts.StaticEmbedding(tokenizer.backend_tokenizer, embedding_dim=12)
    library.SentenceTransformer(modules=[table], device="cpu").save(str(tmp_path / "table"))
    assert_same_vectors(tmp_path / "table")


def test_a_table_cuts_texts_where_its_tokenizer_does(theirs: Path, tmp_path: Path) -> None:
    tokenizer = library.SentenceTransformer(str(theirs), device="cpu").tokenizer.backend_tokenizer
    tokenizer.enable_truncation(7)
    table = parts.StaticEmbedding(tokenizer, embedding_dim=12)
    library.SentenceTransformer(modules=[table], device="cpu").save(str(tmp_path / "table"))
    assert_same_vectors(tmp_path / "table")


def test_a_cross_encoder_of_version_6_is_exported(theirs: Path, tmp_path: Path) -> None:
    encoder = library.CrossEncoder(str(small_model(tmp_path / "encoder", heads=())), num_labels=1, device="cpu")
    encoder.save(str(tmp_path / "theirs"))
    record = export_model(str(tmp_path / "theirs"), tmp_path / "out")
    assert record["largest_difference"] == 0
    pairs = [("The reader tests a document.", "A value"), ("values", "numbers of the file")]
    again = library.CrossEncoder(str(tmp_path / "out"), device="cpu").predict(pairs)
    np.testing.assert_allclose(again, encoder.predict(pairs), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("file", "values", "said"),
    [
        ("1_Pooling/config.json", {"pooling_mode": 5}, "pooling_mode is 5"),
        ("1_Pooling/config.json", {"pooling_mode": []}, r"pooling_mode is \[\]"),
        ("sentence_bert_config.json", {"max_seq_length": "abc"}, "max_seq_length is 'abc'; expected a whole number"),
        ("sentence_bert_config.json", {"max_seq_length": -5}, "max_seq_length is -5; expected a whole number"),
        ("config_sentence_transformers.json", {"prompts": [1], "default_prompt_name": "x"}, "prompts: expected texts"),
    ],
)
def test_faults_of_a_file_are_told_with_its_key(
    theirs: Path, tmp_path: Path, file: str, values: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match=said) as caught:
        load_sentence_model(changed(theirs, tmp_path / "faulty", file, **values))
    assert Path(file).name in str(caught.value)


def test_a_length_without_end_is_the_encoders(theirs: Path, tmp_path: Path) -> None:
    endless = changed(theirs, tmp_path / "endless", "tokenizer_config.json", model_max_length=float("inf"))
    (endless / "sentence_bert_config.json").unlink(missing_ok=True)
    assert load_sentence_model(endless).max_tokens == 60


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"in_features": 31}, "in_features is 31, but the vectors that it reads have 20 numbers"),
        ({"module_input_name": "token_embeddings"}, "module_input_name is 'token_embeddings'; only"),
    ],
)
def test_a_dense_map_of_something_other_than_the_vector_is_refused(
    theirs: Path, tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    transformer = parts.Transformer(str(theirs))
    width = transformer.get_embedding_dimension()
    modules = [transformer, parts.Pooling(width, "mean"), parts.Dense(values.get("in_features", width), 8)]
    library.SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "dense"))
    faulty = changed(tmp_path / "dense", tmp_path / "faulty", "2_Dense/config.json", **values)
    with pytest.raises(DataError, match=said):
        load_sentence_model(faulty)

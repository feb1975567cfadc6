"""Every shipped recipe that fine-tunes: complete, documented, and trainable on a small model and a few examples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertkit.finetuning.inputs import CustomTask
from bertkit.finetuning.methods.features import FeatureBased
from bertkit.finetuning.methods.freelb import FreeLb, FreeLbGradient
from bertkit.finetuning.recipe import FinetuneRecipe, resolved
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.files.hub import save_model
from bertkit.models.headed import HeadedModel
from bertkit.recipe.dump import dump_recipe
from bertkit.recipe.find import shipped_directory
from bertkit.recipe.resolve import load_any, shipped_headers
from bertkit.tasks.embedding.losses.multiple_negatives import MultipleNegativesLoss
from bertkit.tasks.embedding.settings import EmbeddingSettings, LateInteractionSettings
from bertkit.training.optimizers.adam import AdamWConfig
from tests.tasks.tiny_glue import write_glue
from tests.tasks.tiny_task import GOOD, reviews, tiny_tokenizer

NAMES = [header["name"] for header in shipped_headers() if header["kind"] == "finetune"]
SMALL = {
    "data.max_length": 40,
    "optimisation.batch_sequences": 5,
    "engine.device": "cpu",
    "engine.precision": "fp32",
}
SMALL_METHODS = {"features": {"method.lstm_width": 7}}


def recipe_of(name: str) -> FinetuneRecipe:
    recipe = load_any(name)
    assert isinstance(recipe, FinetuneRecipe)
    return recipe


def write_five_layers(directory: Path) -> Path:
    """A BERT deep enough for its last four layers."""
    tokenizer = tiny_tokenizer()
    config = BertConfig(
        hidden_size=18,
        num_hidden_layers=5,
        num_attention_heads=3,
        intermediate_size=20,
        max_position_embeddings=40,
        initializer_range=0.1,
    )
    model = HeadedModel(config.build(tokenizer.vocab_size, pad_id=tokenizer.pad_id), ("masked_lm",))
    model.initialise(seed=3)
    save_model(model, tokenizer, directory)
    return directory


def write_gpt(directory: Path) -> Path:
    tokenizer = tiny_tokenizer()
    config = Gpt2Config(
        hidden_size=18,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=20,
        max_position_embeddings=40,
        initializer_range=0.1,
    )
    model = HeadedModel(config.build(tokenizer.vocab_size), ("causal_lm",))
    model.initialise(seed=3)
    save_model(model, tokenizer, directory)
    return directory


def write_conll(directory: Path) -> None:
    for number, split in enumerate(("eng.train", "eng.testa", "eng.testb")):
        lines = ["-DOCSTART- -X- O O", ""]
        for text, _ in reviews(23, number):
            lines += [f"{word} X X {'I-PER' if word in GOOD else 'O'}" for word in text.split()]
            lines.append("")
        path = directory / "CoNLL-2003" / split
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines), encoding="utf-8")


def write_rte(directory: Path) -> None:
    names = {"good": "entailment", "bad": "not_entailment"}
    for number, split in enumerate(("train", "dev")):
        rows = [f"{i}\tthe list\t{text}\t{names[label]}" for i, (text, label) in enumerate(reviews(23, number))]
        path = directory / "RTE" / f"{split}.tsv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(["index\tsentence1\tsentence2\tlabel", *rows]) + "\n", encoding="utf-8")


def write_nli(directory: Path) -> None:
    """MNLI and STS-B of GLUE, and SNLI."""
    write_glue(directory)
    (directory / "SNLI").mkdir()
    names = {"good": "entailment", "bad": "contradiction"}
    for split in ("train", "dev"):
        rows = [
            {"sentence1": text, "sentence2": "the list", "gold_label": names[label], "pairID": str(i)}
            for i, (text, label) in enumerate(reviews(23, 5))
        ]
        path = directory / "SNLI" / f"snli_1.0_{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_sentences(directory: Path) -> Path:
    """Texts, one per line, next to STS-B."""
    write_glue(directory)
    path = directory / "sentences.txt"
    path.write_text("".join(f"{text}\n" for text, _ in reviews(60, 2)), encoding="utf-8")
    return path


def write_triplets(directory: Path) -> Path:
    """A query, its positive and its negative per line."""
    directory.mkdir(parents=True, exist_ok=True)
    texts = [text for text, _ in reviews(90, 2)]
    rows = [dict(zip(("query", "positive", "negative"), texts[n : n + 3], strict=True)) for n in range(0, 90, 3)]
    path = directory / "triplets.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


DATA: dict[str, Callable[[Path], object]] = {
    "conll2003": write_conll,
    "rte": write_rte,
    "mrpc": write_glue,
    "sst2": write_glue,
    "stsb": write_glue,
    "sts-embedding": write_glue,
    "nli-embedding": write_nli,
}
"""A few generated examples of the recipes' tasks, in their official layout."""


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_opens_with_its_paper_and_command(name: str) -> None:
    text = (shipped_directory() / f"{name}.yaml").read_text()
    comment = text[: text.index("\nkind:")]
    assert comment.startswith("# ")
    assert f"bertkit finetune {name}" in comment
    recipe = recipe_of(name)
    assert recipe.title
    assert recipe.paper
    assert recipe.arxiv is not None or name == "gpt-task"  # GPT's paper is not there
    assert recipe.arxiv is None or recipe.arxiv in comment


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_the_same_after_writing_and_reading(name: str, tmp_path: Path) -> None:
    recipe = recipe_of(name)
    (tmp_path / "copy.yaml").write_text(dump_recipe(recipe))
    assert load_any(str(tmp_path / "copy.yaml")) == recipe
    assert resolved(recipe) == recipe


@pytest.mark.parametrize("name", NAMES)
def test_a_shrunk_recipe_trains(name: str, bertkit: Callable[..., Any], tmp_path: Path) -> None:
    recipe = recipe_of(name)
    own: list[Any] = ["--data-dir", tmp_path / "data"]
    if isinstance(recipe.task, CustomTask):
        own += ["--kind", "embedding", "--train", write_sentences(tmp_path / "data"), "--dev", "stsb"]
        if name in ("splade", "colbert"):
            triplets = write_triplets(tmp_path / "data")
            own = ["--kind", "embedding", "--train", triplets, "--dev", triplets]
            own += ["--text", "query", "--text-pair", "positive", "--negatives", "negative"]
    else:
        for spec in recipe.specs:
            DATA[spec.name](tmp_path / "data")
    model = (write_gpt if recipe.causal else write_five_layers)(tmp_path / "small")
    changed = {**SMALL, **SMALL_METHODS.get(recipe.method.name, {})}
    words = [word for key, value in changed.items() for word in ("--set", f"{key}={value}")]
    run = tmp_path / "run"
    done = bertkit(
        *("finetune", name, "--model", model, *own),
        *("--run-dir", run, "--max-steps", "6", "-q", *words),
    )
    assert done.code == 0, done.stderr
    assert json.loads((run / "run.json").read_text())["steps"] == 6
    assert (run / "model" / "model.safetensors").is_file()


def test_conll_on_features_reads_what_table_7_has_as_its_best() -> None:
    recipe = recipe_of("conll2003-features")
    method = recipe.method
    assert isinstance(method, FeatureBased)
    assert (method.layers, method.lstm_layers, method.lstm_width) == ("concat-last-four", 2, 768)
    assert recipe.tagging is not None
    assert recipe.tagging.context == "document"


def test_rte_with_freelb_has_the_values_of_the_authors_script() -> None:
    recipe = recipe_of("rte-freelb")
    method, optimisation = recipe.method, recipe.optimisation
    assert isinstance(method, FreeLb)
    assert (method.ascent_steps, method.step_size, method.epsilon, method.start_bound) == (4, 0.06, 0.14, 0.16)
    assert (optimisation.schedule.peak, optimisation.batch_sequences, optimisation.epochs) == (1e-5, 16, 10)
    assert (optimisation.schedule.total_steps, optimisation.schedule.warmup(2036)) == (2036, 122)
    assert FreeLbGradient(method, 0).passes == 1 + 3  # the script's adv-steps are those after the first pass
    assert optimisation.optimizer is not None
    assert (optimisation.optimizer.weight_decay, optimisation.optimizer.clip_norm) == (0.1, None)
    assert optimisation.keeps_best


def test_rte_from_mnli_has_the_values_of_fairseqs_file() -> None:
    recipe = recipe_of("rte-from-mnli")
    optimisation, optimizer = recipe.optimisation, recipe.optimisation.optimizer
    assert (optimisation.schedule.peak, optimisation.batch_sequences, optimisation.epochs) == (2e-5, 16, 10)
    assert (optimisation.schedule.total_steps, optimisation.schedule.warmup(2036)) == (2036, 122)
    assert optimisation.keeps_best
    assert isinstance(optimizer, AdamWConfig)
    assert (optimizer.betas, optimizer.eps, optimizer.weight_decay) == ((0.9, 0.98), 1e-6, 0.1)
    assert (optimizer.clip_norm, optimizer.decay_biases_and_norms) == (None, True)
    assert recipe.dropout == recipe_of("rte-freelb").dropout == {"classifier_dropout": 0.0}


def test_gpt_on_a_task_has_the_values_of_its_code() -> None:
    recipe = recipe_of("gpt-task")
    assert recipe.causal is not None
    assert (recipe.causal.lm_weight, recipe.causal.delimiters) == (0.5, True)
    optimisation = recipe.optimisation
    assert (optimisation.schedule.peak, optimisation.schedule.warmup_share) == (6.25e-5, 0.002)
    assert (optimisation.batch_sequences, optimisation.epochs) == (32, 3)


def test_splade_has_the_values_of_the_released_files() -> None:
    recipe = recipe_of("splade")
    settings, optimisation = recipe.task_settings, recipe.optimisation
    assert isinstance(settings, EmbeddingSettings)
    assert settings.sparsity is not None
    assert (settings.pooling, settings.sparsity.queries, settings.sparsity.documents) == ("splade", 3e-4, 1e-4)
    assert settings.sparsity.growth(49_999, 150_000) == 1 > settings.sparsity.growth(49_000, 150_000)
    assert isinstance(settings.loss, MultipleNegativesLoss)
    assert (settings.loss.similarity, settings.loss.factor) == ("dot", 1.0)
    assert (optimisation.schedule.peak, optimisation.schedule.warmup(150_000)) == (2e-5, 6000)
    assert (optimisation.batch_sequences, recipe.data.max_length) == (128, 256)
    optimizer = optimisation.optimizer
    assert isinstance(optimizer, AdamWConfig)
    assert (optimizer.eps, optimizer.weight_decay, optimizer.clip_norm) == (1e-6, 0.01, None)
    assert optimizer.decay_biases_and_norms


def test_colbert_has_the_values_of_the_released_code() -> None:
    recipe = recipe_of("colbert")
    settings, optimisation = recipe.task_settings, recipe.optimisation
    assert isinstance(settings, EmbeddingSettings)
    assert settings.late_interaction == LateInteractionSettings()  # the defaults are the published ones
    assert (settings.late_interaction.width, settings.late_interaction.query_length) == (128, 32)
    assert isinstance(settings.loss, MultipleNegativesLoss)
    assert (settings.loss.similarity, settings.loss.factor) == ("maxsim", 1.0)
    assert (settings.query_prompt, settings.document_prompt) == ("[unused0] ", "[unused1] ")
    assert {optimisation.schedule.learning_rate(step, 400_000) for step in (0, 399_999)} == {3e-6}
    assert (optimisation.batch_sequences, recipe.data.max_length) == (32, 180)
    optimizer = optimisation.optimizer
    assert isinstance(optimizer, AdamWConfig)
    assert (optimizer.eps, optimizer.weight_decay, optimizer.clip_norm) == (1e-8, 0.0, 2.0)


@pytest.mark.parametrize("name", ["sbert-nli", "sbert-stsb", "sbert-nli-stsb"])
def test_sentence_bert_reads_128_tokens_besides_the_two_special_ones(name: str) -> None:
    assert recipe_of(name).data.max_length == 128 + 2


@pytest.mark.parametrize("name", ["sbert-nli", "sbert-stsb", "sbert-nli-stsb", "cross-encoder-stsb"])
def test_sentence_berts_optimiser_is_that_of_its_released_code(name: str) -> None:
    optimisation = load_any(name).optimisation
    optimizer = optimisation.optimizer
    assert isinstance(optimizer, AdamWConfig)
    assert (optimizer.bias_correction, optimizer.eps, optimizer.weight_decay, optimizer.clip_norm) == (
        False,
        1e-6,
        0.01,
        1,
    )
    assert (optimisation.schedule.peak, optimisation.batch_sequences) == (2e-5, 16)

"""Size and cost of a model: multiplications equal hand counts and torch's own, bytes those of its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bertkit.data.batch import PackedBatch
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.evaluation.speed.footprint import Footprint, multiply_adds, outputs, task_head
from bertkit.models.conversion.pruning import prune_heads
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.albert import AlbertConfig
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.bilstm import BilstmConfig
from bertkit.models.families.distilbert import DistilBertConfig
from bertkit.models.families.modernbert import ModernBertConfig
from bertkit.models.feature_lstm import FeatureLstmConfig
from bertkit.models.files.model_files import weight_files
from bertkit.models.headed import HeadedModel
from bertkit.models.quantisation.quantised import is_quantised, quantise
from tests.probing.tiny_models import BERT, save_tiny, tiny_model, tiny_tokenizer

WIDTH, LAYERS, INNER, LENGTH, LABELS = 24, 3, 41, 13, 2
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 3,
    "intermediate_size": INNER,
    "max_position_embeddings": 40,
}
ROTARY = SIZES | {"num_attention_heads": 2}
CLASSIFIER = ("sequence_classification",)


def small(config: EncoderConfig, heads: tuple[str, ...] = CLASSIFIER) -> HeadedModel:
    model = HeadedModel(config.build(101), heads).eval()
    model.initialise(3)
    return model


def counted_by_torch(model: HeadedModel, length: int) -> float:
    """Half the operations that torch's dispatcher counts for one sentence."""
    batch = PackedBatch.from_ids([[5 + token % 90 for token in range(length)]])
    counter = FlopCounterMode(display=False)
    # The fused attention of the CPU is not counted.
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        outputs(model, task_head(model), batch)
    return counter.get_total_flops() / 2


def test_multiply_adds_are_those_counted_by_hand() -> None:
    encoder = small(BertConfig(**SIZES), ())
    layer = LENGTH * (4 * WIDTH**2 + 2 * WIDTH * INNER) + 2 * LENGTH**2 * WIDTH
    assert multiply_adds(encoder, None, LENGTH) == LAYERS * layer
    # The last layer computes keys and values of all tokens, and everything else only for the first one.
    last = LENGTH * 2 * WIDTH**2 + (2 * WIDTH**2 + 2 * WIDTH * INNER) + 2 * LENGTH * WIDTH
    head = WIDTH**2 + WIDTH * LABELS
    classifier = small(BertConfig(**SIZES))
    assert multiply_adds(classifier, "sequence_classification", LENGTH) == (LAYERS - 1) * layer + last + head


def test_multiply_adds_of_lstms_are_those_counted_by_hand() -> None:
    size, width, classes = 9, 7, 11
    bilstm = small(BilstmConfig(embedding_size=size, lstm_width=width, classifier_width=classes, lstm_layers=1))
    lstm = LENGTH * 2 * 4 * width * (size + width)
    assert multiply_adds(bilstm, task_head(bilstm), LENGTH) == lstm + 2 * width * classes + classes * LABELS
    base = BertConfig(**SIZES)
    features = small(FeatureLstmConfig(base=base, layers="last", lstm_width=width, lstm_layers=1), ())
    own = LENGTH * 2 * 4 * width * (WIDTH + width)
    assert multiply_adds(features, None, LENGTH) == multiply_adds(small(base, ()), None, LENGTH) + own


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        (BertConfig(**SIZES), CLASSIFIER),
        (BertConfig(**SIZES), ("masked_lm", "next_sentence")),
        (DistilBertConfig(**SIZES), CLASSIFIER),
        (DistilBertConfig(**SIZES), ("token_classification",)),
        (AlbertConfig(**SIZES, embedding_size=10), CLASSIFIER),
        (ModernBertConfig(**ROTARY, local_attention=64), CLASSIFIER),
        (ModernBertConfig(**ROTARY, local_attention=64), ("span",)),
    ],
    ids=lambda value: value.model_type if isinstance(value, EncoderConfig) else "+".join(value),
)
def test_multiply_adds_are_those_that_torch_counts(config: EncoderConfig, heads: tuple[str, ...]) -> None:
    model = small(config, heads)
    for length in (1, LENGTH, 31):
        assert multiply_adds(model, task_head(model), length) == counted_by_torch(model, length)


def test_heads_that_are_taken_out_are_not_counted() -> None:
    model = small(BertConfig(**SIZES))
    whole = multiply_adds(model, task_head(model), LENGTH)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    prune_heads(model, {0: {1}, 2: {0, 2}})
    assert multiply_adds(model, task_head(model), LENGTH) == counted_by_torch(model, LENGTH) < whole
    assert sum(parameter.numel() for parameter in model.parameters()) < parameters


def test_a_quantised_weight_counts_as_one_parameter_and_one_product(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, heads=CLASSIFIER)
    directory = save_tiny(model, tokenizer, tmp_path / "whole")
    before = Footprint.of(model, directory), multiply_adds(model, task_head(model), LENGTH)
    assert quantise(model)
    assert sum(parameter.numel() for parameter in model.parameters()) < before[0].without_embeddings
    assert (Footprint.of(model, directory), multiply_adds(model, task_head(model), LENGTH)) == before
    assert is_quantised(model)
    whole = save_tiny(model, tokenizer, tmp_path / "int8")
    read = LoadedModel.load(str(whole))
    after = Footprint.of(read.model, read.directory)
    assert (after.parameters, after.without_embeddings) == (before[0].parameters, before[0].without_embeddings)
    assert after.disk_bytes == (whole / "model.safetensors").stat().st_size < before[0].disk_bytes


def test_a_head_of_pretraining_is_not_asked() -> None:
    assert task_head(small(BertConfig(**SIZES), ("masked_lm", "next_sentence"))) is None
    assert task_head(small(BertConfig(**SIZES), ("masked_lm", "token_classification"))) == "token_classification"


def test_parameters_outside_the_tables_and_bytes_on_disk(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    directory = save_tiny(model, tokenizer, tmp_path / "whole")
    size = Footprint.of(model, directory)
    assert size.parameters == sum(parameter.numel() for parameter in model.parameters())
    tables = (tokenizer.vocab_size + BERT["max_position_embeddings"] + 2) * BERT["hidden_size"]
    assert size.parameters - size.without_embeddings == tables
    assert size.disk_bytes == (directory / "model.safetensors").stat().st_size


def test_bytes_on_disk_are_those_of_all_shards_and_of_no_other_file(tmp_path: Path) -> None:
    directory = save_tiny(tiny_model(tiny_tokenizer()), tiny_tokenizer(), tmp_path / "parts")
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    parts = {"one.safetensors": dict(list(tensors.items())[:5]), "two.safetensors": dict(list(tensors.items())[5:])}
    for name, part in parts.items():
        save_file(part, directory / name)
    weight_map = {key: name for name, part in parts.items() for key in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "notes.safetensors").write_text("something else")
    assert weight_files(directory) == [directory / "one.safetensors", directory / "two.safetensors"]
    model = LoadedModel.load(str(directory)).model
    assert Footprint.of(model, directory).disk_bytes == sum((directory / name).stat().st_size for name in parts)

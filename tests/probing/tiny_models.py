"""Random models, small and fast, with a tokenizer that splits half the words."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.files.hub import save_model
from bertkit.models.headed import HeadedModel
from bertkit.pretraining.recipe import load_recipe
from bertkit.recipe.dump import dump_recipe
from bertkit.recipe.resolve import Override
from bertkit.run.checkpoint import save_checkpoint
from bertkit.run.directory import RunDirectory, RunIdentity
from bertkit.text.tokenizer import Tokenizer, TokenizerConfig
from bertkit.text.vocabulary import train_tokenizer
from bertkit.training.engine import Engine
from tests.text.corpora import english

BERT: dict[str, Any] = {
    "hidden_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 36,
    "max_position_embeddings": 60,
    "initializer_range": 0.3,
}
GPT2: dict[str, Any] = BERT | {"hidden_size": 24}

TEXTS = [
    "The reader tests a document.",
    "The reader test a document.",
    "Modelable numbers!",
    "the tokens of the sentences, in the written files, is walkable",
    "A value",
    "Values walked to the building and learned the number of the file.",
]


def cpu_engine(tokens: int = 4096) -> Engine:
    """A CPU that computes this many tokens at once."""
    return Engine(torch.device("cpu"), bf16=False, micro_batch_tokens=tokens, workers=1)


@cache
def tiny_tokenizer(kind: str = "wordpiece", vocab_size: int = 110) -> Tokenizer:
    config = TokenizerConfig.model_validate({"type": kind, "vocab_size": vocab_size, "min_frequency": 1})
    return train_tokenizer(config, english(300))


def tiny_model(
    tokenizer: Tokenizer, config: EncoderConfig | None = None, heads: tuple[str, ...] = ("masked_lm",), seed: int = 4
) -> HeadedModel:
    config = BertConfig(**BERT) if config is None else config
    model = HeadedModel(config.build(tokenizer.vocab_size, pad_id=tokenizer.pad_id), heads)
    model.initialise(seed=seed)
    return model.eval()


def tiny_causal_model(tokenizer: Tokenizer) -> HeadedModel:
    return tiny_model(tokenizer, Gpt2Config(**GPT2), ("causal_lm",))


def constant_model(tokenizer: Tokenizer) -> HeadedModel:
    """Every token has the same probability in any text."""
    model = tiny_model(tokenizer)
    with torch.no_grad():
        model.encoder.word_embedding.weight.zero_()
    return model


def save_tiny(model: HeadedModel, tokenizer: Tokenizer, directory: Path) -> Path:
    save_model(model, tokenizer, directory)
    return directory


def write_run(directory: Path, steps: Sequence[int], *, finished: bool = True) -> Path:
    """A pretraining run with a different model in each checkpoint."""
    tokenizer = tiny_tokenizer()
    sizes = {f"model.{key}": value for key, value in BERT.items()}
    values = {"model.family": "bert", "data.sequence_length": 40, **sizes}
    recipe = load_recipe("quickstart", [Override(key, value) for key, value in values.items()])
    identity = RunIdentity("pretrain", "tiny", dump_recipe(recipe), "0" * 64, 0, ["x"])
    run = RunDirectory.create(directory, identity, directory)
    for step in steps:
        model = tiny_model(tokenizer, seed=step)
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        save_checkpoint(run.checkpoints, step, {"weights": weights}, {"step": step, "tokens": 10 * step}, keep=9)
    if finished:
        save_model(model, tokenizer, run.model)
    return directory

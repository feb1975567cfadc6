"""Material of the benchmarks, made of real text: its shards, its sentences, and a randomly initialised model."""

from __future__ import annotations

from itertools import chain, islice
from pathlib import Path

from bertkit.bench.settings import SIZES, BenchSettings, ModelSize
from bertkit.data.prepare import prepare_shards
from bertkit.data.shards import TokenShards
from bertkit.errors import DataError
from bertkit.files import cache_directory
from bertkit.models.families.bert import BertConfig
from bertkit.models.files.hub import save_model
from bertkit.models.headed import HeadedModel
from bertkit.text.sources import open_corpus
from bertkit.text.tokenizer import TokenizerConfig
from bertkit.text.tokenizer_files import load_tokenizer

BERT_HEADS = ("masked_lm", "next_sentence")
"""The heads of pretraining, with the pooler."""
SHORTEST_CHARACTERS = 20
"""A shorter line is not a sentence."""


def shards_of(settings: BenchSettings) -> TokenShards:
    """The text in tokens; from the cache if it was tokenised before.

    Raises:
        DataError: no such text, or too little for the vocabulary.
    """
    config = (
        TokenizerConfig(vocab_size=settings.vocab_size)
        if settings.tokenizer is None
        else TokenizerConfig(path=settings.tokenizer)
    )
    return prepare_shards(open_corpus(settings.data), config, cache=cache_directory())


def sentences_of(settings: BenchSettings, count: int) -> list[str]:
    """This many sentences, or fewer if there are no more, from the beginning of the text.

    Raises:
        DataError: no such text, or no sentences in it.
    """
    corpus = open_corpus(settings.data, cache=cache_directory())
    lines = chain.from_iterable(corpus.documents())
    found = list(islice((line for line in lines if len(line) >= SHORTEST_CHARACTERS), count))
    if not found:
        raise DataError(
            f"{', '.join(settings.data)}: no sentence of {SHORTEST_CHARACTERS} characters; give more text with --data"
        )
    return found


def config_of(size: ModelSize) -> BertConfig:
    """A BERT of this shape, with BERT's own dropout."""
    return BertConfig(
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
    )


def write_random_model(settings: BenchSettings, directory: Path) -> None:
    """A BERT of the chosen size with random weights, and the tokenizer of the text, as a Hugging Face directory.

    Raises:
        DataError: see `shards_of`.
    """
    tokenizer = load_tokenizer(shards_of(settings).directory)
    model = HeadedModel(config_of(SIZES[settings.size]).build(tokenizer.vocab_size), BERT_HEADS)
    model.initialise(0)
    save_model(model, tokenizer, directory)

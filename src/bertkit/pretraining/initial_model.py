"""The model that a pretraining run starts from, where it is not drawn: converted, with a new vocabulary, or of two.

Own design. What each conversion does is in models/conversion.py, models/tiling.py and models/bert_gpt2.py. Sibling
arguments.py gives the recipe the initial model's sizes; trainer.py trains what comes out.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from bertkit.errors import UsageError
from bertkit.models.bert_gpt2 import start_decoder
from bertkit.models.conversion import converted, with_vocabulary
from bertkit.models.encoder import EncoderConfig
from bertkit.models.gpt2 import Gpt2Config
from bertkit.models.headed import HeadedModel
from bertkit.models.hub import check_vocabulary, find_model, load_companions, load_model, read_config
from bertkit.models.tiling import tiled
from bertkit.objectives.base import Objective
from bertkit.objectives.forward import add_companions, heads_of
from bertkit.pretraining.recipe import Recipe
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import load_tokenizer

log = logging.getLogger(__name__)


def initial_model(
    recipe: Recipe, init: str, config: EncoderConfig, objectives: Sequence[Objective], tokenizer: Tokenizer
) -> HeadedModel:
    """The recipe's initial model as its first stage trains it, with its companions.

    Args:
        recipe: of the run.
        init: the recipe's initial model.
        config: of the first stage.
        objectives: of all stages.
        tokenizer: the run's.

    Raises:
        DataError: a model is missing or damaged.
        UsageError: its weights or its vocabulary do not fit.
    """
    directory = find_model(init)
    # An encoder has no head of a decoder.
    becomes = config.is_encoder_decoder and not read_config(directory)[0].is_encoder_decoder
    heads = heads_of(objectives)
    loaded, _ = load_model(directory, heads=[] if becomes else heads, is_trained=True)
    own_tokenizer = load_tokenizer(directory)
    check_vocabulary(loaded, own_tokenizer, source=str(directory))
    if recipe.init_tiling:
        start = tiled(loaded, config, seed=recipe.seed)
    else:
        start = converted(loaded, config, heads if becomes else None)
    if recipe.init_decoder is not None:
        start_decoder(start, _decoder(recipe.init_decoder, own_tokenizer, init))
    model, remade = with_vocabulary(start, own_tokenizer, tokenizer, new_tokens=recipe.new_pieces, seed=recipe.seed)
    if remade is not None:
        log.info("new vocabulary of %s", remade)
    add_companions(model, objectives, pad_id=tokenizer.pad_id)
    model.initialise_companions(recipe.seed)
    # A companion's embeddings are of the old vocabulary, too.
    if remade is None and not recipe.init_tiling:
        load_companions(model, directory)
    model.encoder.read_vocabulary(tokenizer)
    return model


def decoder_config(name: str, config: EncoderConfig) -> Gpt2Config:
    """The configuration of the model that a decoder starts from.

    Raises:
        UsageError: it is no GPT-2.
    """
    if not isinstance(config, Gpt2Config):
        raise UsageError(f"init_decoder: {name} is of family {config.model_type!r}; a decoder starts from a gpt2")
    return config


def _decoder(name: str, tokenizer: Tokenizer, encoder: str) -> HeadedModel:
    directory = find_model(name)
    loaded, _ = load_model(directory, heads=[], is_trained=True)
    decoder_config(name, loaded.encoder.config)
    own = load_tokenizer(directory)
    check_vocabulary(loaded, own, source=str(directory))
    if own.backend.get_vocab() != tokenizer.backend.get_vocab():
        raise UsageError(
            f"init_decoder: {name} has another vocabulary than {encoder}, and both sides share one; train it with"
            f" --set tokenizer.path={encoder}"
        )
    return loaded

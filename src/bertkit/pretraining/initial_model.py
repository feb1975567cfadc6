"""The model a pretraining run starts from, if not random: converted, with a new vocabulary, or combined from two.

Not from a paper. The conversions are described in models/conversion/convert.py, models/conversion/tiling.py and
models/families/bert_gpt2.py. Sibling arguments.py gives the recipe the initial model's sizes; trainer.py trains the
result.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bertkit.errors import UsageError
from bertkit.models.conversion.convert import converted, with_vocabulary
from bertkit.models.conversion.pruning import HeadChoice, saved_heads
from bertkit.models.conversion.tiling import tiled
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.bert_gpt2 import start_decoder
from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.files.hub import check_vocabulary, find_model, load_companions, load_model, read_config
from bertkit.models.files.model_files import CONFIG_FILE
from bertkit.models.headed import HeadedModel
from bertkit.objectives.base import Objective
from bertkit.objectives.forward import add_companions, heads_of
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import load_tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Initial:
    """What a run starts from, and how it becomes the run's model.

    Attributes:
        model: a Hub id, a model directory or a run directory.
        decoder: the model from which the decoder starts, if that is another one.
        tiling: whether the model is smaller, so that its weights are repeated.
        new_tokens: how the embeddings of tokens that the model does not know are initialised.
        seed: for all random initialisation.
    """

    model: str
    decoder: str | None
    tiling: bool
    new_tokens: Literal["mean", "random"]
    seed: int


def initial_model(
    initial: Initial, config: EncoderConfig, objectives: Sequence[Objective], tokenizer: Tokenizer
) -> HeadedModel:
    """The initial model as the first stage trains it, with its companions.

    Args:
        initial: what the run starts from.
        config: of the first stage.
        objectives: of all stages.
        tokenizer: the run's tokenizer.

    Raises:
        DataError: a model is missing or damaged.
        UsageError: its weights or its vocabulary do not fit.
    """
    directory = find_model(initial.model)
    # An encoder does not have a decoder's head.
    becomes = config.is_encoder_decoder and not read_config(directory)[0].is_encoder_decoder
    heads = heads_of(objectives)
    loaded, _ = load_model(directory, heads=[] if becomes else heads, is_trained=True)
    own_tokenizer = load_tokenizer(directory)
    check_vocabulary(loaded, own_tokenizer, source=str(directory))
    if initial.tiling:
        start = tiled(loaded, config, seed=initial.seed)
    else:
        start = converted(loaded, config, heads if becomes else None)
    if initial.decoder is not None:
        start_decoder(start, _decoder(initial.decoder, own_tokenizer, initial.model))
    model, remade = with_vocabulary(start, own_tokenizer, tokenizer, new_tokens=initial.new_tokens, seed=initial.seed)
    if remade is not None:
        log.info("new vocabulary of %s", remade)
    add_companions(model, objectives, pad_id=tokenizer.pad_id)
    model.initialise_companions(initial.seed)
    # A companion's embeddings also belong to the old vocabulary.
    if remade is None and not initial.tiling:
        load_companions(model, directory)
    model.encoder.read_vocabulary(tokenizer)
    return model


def initial_pruned_heads(init: str | None, *, offline: bool = False) -> HeadChoice:
    """The pruned heads of the model that a run starts from, which the run's model lacks as well; none without `init`.

    Raises:
        DataError: the model is missing or damaged.
    """
    if init is None:
        return {}
    directory = find_model(init, offline=offline)
    return saved_heads(read_config(directory)[1], source=str(directory / CONFIG_FILE))


def decoder_config(name: str, config: EncoderConfig) -> Gpt2Config:
    """The configuration of the model from which a decoder starts.

    Raises:
        UsageError: the model is not a GPT-2.
    """
    if not isinstance(config, Gpt2Config):
        raise UsageError(f"init_decoder: {name} is of family {config.model_type!r}; name a model of family gpt2")
    return config


def _decoder(name: str, tokenizer: Tokenizer, encoder: str) -> HeadedModel:
    directory = find_model(name)
    loaded, _ = load_model(directory, heads=[], is_trained=True)
    decoder_config(name, loaded.encoder.config)
    own = load_tokenizer(directory)
    check_vocabulary(loaded, own, source=str(directory))
    if own.backend.get_vocab() != tokenizer.backend.get_vocab():
        raise UsageError(
            f"init_decoder: {name} has another vocabulary than {encoder}, but encoder and decoder share one; train it"
            f" with --set tokenizer.path={encoder}"
        )
    return loaded

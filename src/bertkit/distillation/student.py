"""A student out of its teacher's layers.

Sun et al. 2019, PKD, arXiv:1908.09355, section 4.2 (the first layers); Sanh et al. 2019, DistilBERT, arXiv:1910.01108,
section 3 (one layer out of two, in another shape: without segment types and pooler). Sibling models/pruning.py takes
layers out of a model; here the student may also be drawn anew, whole or in part, and may change its family.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from bertkit.errors import UsageError
from bertkit.models.bert import BertConfig
from bertkit.models.distilbert import DistilBertConfig
from bertkit.models.encoder import EncoderConfig
from bertkit.models.headed import POOLER, HeadedModel
from bertkit.models.pruning import keep_layers

log = logging.getLogger(__name__)

_LAYERS = "encoder.layers."
_DISTILBERT_HAS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "max_position_embeddings",
    "initializer_range",
    "hidden_act",
)


def student_of(
    teacher: HeadedModel, layers: Sequence[int], *, embeddings: bool = True, head: bool = True, seed: int = 0
) -> HeadedModel:
    """A model of some of the teacher's layers, with its embeddings and heads or with new ones.

    Args:
        teacher: stays as it is.
        layers: from 0, ascending.
        embeddings: take what the first layer reads, else draw it anew.
        head: take the heads and the pooler, else draw them anew.
        seed: of what is drawn.

    Raises:
        UsageError: see `bertkit.models.pruning.keep_layers`.
    """
    student = keep_layers(teacher, layers)
    anew = {
        name
        for name in student.own_state()
        if not name.startswith(_LAYERS) and not (embeddings if name.startswith("encoder.") else head)
    }
    if anew:
        student.initialise(seed, only=anew)
    return student


def as_distilbert(model: HeadedModel, *, seed: int = 0) -> HeadedModel:
    """A BERT as a DistilBERT: what both have is copied; segment types and pooler go, and heads that read a pooler.

    Args:
        model: stays as it is.
        seed: of the heads that have another form there, which are drawn anew.

    Raises:
        UsageError: the model is no BERT.
    """
    smaller = HeadedModel(
        distilbert_config(model.encoder.config).build(model.encoder.vocab_size, pad_id=_pad_id(model)),
        [name for name in model.head_names if name in DistilBertConfig().all_heads()],
        labels=model.labels,
    )
    # What config.json says of BERT's sizes, the other family calls otherwise.
    config = model.encoder.config
    foreign = {*config.to_hub(), *config.hub_fixed}
    smaller.extras = {key: value for key, value in model.extras.items() if key not in foreign}
    source = dict(model.named_parameters())
    heads = {name.partition(".")[0] for name, _ in smaller.named_parameters()}
    alike = {head for head in heads if _is_copied(smaller, head, source)}
    with torch.no_grad():
        for name, parameter in smaller.named_parameters():
            if name.partition(".")[0] in alike:
                parameter.copy_(source[name])
    anew = {name for name in smaller.own_state() if name.partition(".")[0] not in alike}
    smaller.initialise(seed, only=anew)
    if anew:
        log.info("%s: drawn anew, for DistilBERT has them in another form", ", ".join(sorted(heads - alike)))
    return smaller.train(model.training)


def distilbert_config(config: EncoderConfig) -> DistilBertConfig:
    """The settings of a DistilBERT of the same sizes.

    Raises:
        UsageError: the settings are no BERT's.
    """
    if not isinstance(config, BertConfig) or config.model_type != BertConfig.model_type:
        raise UsageError(
            f"student.form: distilbert is BERT's layers without pooler and segment types; the teacher is of the family"
            f" {config.model_type}; leave form out"
        )
    settings = {name: getattr(config, name) for name in _DISTILBERT_HAS}
    return DistilBertConfig(**settings)


def drawn_anew(model: HeadedModel, *, seed: int) -> HeadedModel:
    """The same shape with new weights."""
    heads = [*model.head_names, *([POOLER] if model.has_pooler else [])]
    config = model.encoder.config
    new = HeadedModel(config.build(model.encoder.vocab_size, pad_id=_pad_id(model)), heads, labels=model.labels)
    new.extras = dict(model.extras)
    new.initialise(seed)
    return new


def _is_copied(smaller: HeadedModel, part: str, source: dict[str, torch.nn.Parameter]) -> bool:
    own = {name: each for name, each in smaller.named_parameters() if name.partition(".")[0] == part}
    return all(name in source and source[name].shape == each.shape for name, each in own.items())


def _pad_id(model: HeadedModel) -> int:
    return int(model.encoder.to_hub().get("pad_token_id", model.encoder.config.default_pad_id))

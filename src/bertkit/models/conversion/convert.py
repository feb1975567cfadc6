"""Conversion of a trained model: another configuration, another vocabulary, or more layers (wider: tiling.py).

Gong et al. 2019, "Efficient training of BERT by progressively stacking", ICML, section 4: layer i + L of the deeper
model is initialised from layer i, norms included; embeddings and heads are copied (so does the released double.py).
Beltagy et al. 2020, Longformer, arXiv:2004.05150, section 5: RoBERTa becomes a Longformer by copying its projections
into the global ones and repeating its 512 positions. Lee et al. 2020, BioBERT, arXiv:1901.08746, keeps BERT's
vocabulary; Beltagy et al. 2019, SciBERT, arXiv:1903.10676, section 2, has its own, but trains from scratch. A new
vocabulary for a trained model is this package's own design: tokens of both vocabularies keep their rows, the others are
initialised as the mean of the tokens that the old tokenizer splits them into, or drawn. Rothe et al. 2020,
arXiv:1907.12461: both stacks of an encoder-decoder start as the same BERT.

Shapes: V vocabulary, E width of the embeddings, P rows of the position table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bertkit.errors import UsageError
from bertkit.models.conversion.pruning import rebuilt
from bertkit.models.encoder import Encoder, EncoderConfig, in_layer
from bertkit.models.families.bart import UNREAD_ROWS
from bertkit.models.headed import POOLER, HeadedModel
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.vocabulary_mapping import VocabularyMapping, map_vocabulary

log = logging.getLogger(__name__)


def stack_layers(model: HeadedModel, config: EncoderConfig) -> HeadedModel:
    """A deeper model whose layers repeat those of the given model.

    Args:
        model: the shallow model; it is not changed.
        config: the same except for `num_hidden_layers`.

    Raises:
        UsageError: another setting differs, the depth shrinks, or the family's layers differ in shape.
    """
    old = model.encoder.config
    before, after = _depth(old), _depth(config)
    if old.model_copy(update={"num_hidden_layers": after}) != config or after < before:
        raise UsageError(
            f"model.num_hidden_layers can grow during a run ({before} to {after} here); no other setting of the model"
            " can change"
        )
    # Built where the caller builds: a recipe is checked without weights, on torch's device "meta".
    grown = rebuilt(model, config)
    source = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in grown.named_parameters():
            origin = in_layer(name, lambda number: number % before)
            if origin not in source or source[origin].shape != parameter.shape:
                raise UsageError(
                    f"model.family {config.model_type!r} cannot be stacked: {name} has no counterpart in the shallow"
                    " model"
                )
            parameter.copy_(source[origin])
    return grown.to(next(model.parameters()).device)


def grown(model: HeadedModel, config: EncoderConfig) -> HeadedModel:
    """The model for a later stage's configuration: the same one if only live settings differ, otherwise a deeper one.

    Args:
        model: of the previous stage; its live settings change.
        config: of the later stage.

    Raises:
        UsageError: as in `stack_layers`.
    """
    live = {name: getattr(config, name) for name in config.live_fields}
    reached = model.encoder.config.model_copy(update=live)
    if reached != model.encoder.config:
        model.encoder.reconfigure(reached)
    return model if reached == config else stack_layers(model, config)


def _depth(config: EncoderConfig) -> int:
    return int(config.model_dump()["num_hidden_layers"])


NewTokens = Literal["mean", "random"]
_FROM_THE_RECIPE = {
    *("family", "max_position_embeddings"),
    *("attention_window", "sep_token_id", "num_decoder_layers", "decoder_attention_heads"),
    *("decoder_intermediate_size", "decoder_position_embeddings", "decoder_act"),
    *("attention_type", "block_size", "num_random_blocks", "rescale_embeddings", "use_bias"),
}
"""Settings that a converted model takes from the recipe; all others that the original model has are the model's."""
_TABLE = "embeddings.position.weight"
_POSITIONS = f"encoder.{_TABLE}"


@dataclass(frozen=True)
class VocabularyChange:
    """How the tokens of a new vocabulary were initialised.

    Attributes:
        shared: tokens whose rows were copied.
        split: tokens whose rows are the mean of others.
        drawn: tokens whose rows were drawn at random.
    """

    shared: int
    split: int
    drawn: int

    def __str__(self) -> str:
        return (
            f"{self.shared + self.split + self.drawn:,} tokens: {self.shared:,} are the old vocabulary's,"
            f" {self.split:,} are initialised as the mean of the tokens that it splits them into, {self.drawn:,} drawn"
        )


def converted_config(found: EncoderConfig, wanted: EncoderConfig) -> EncoderConfig:
    """The configuration with which a recipe continues training a given model.

    Args:
        found: the model's.
        wanted: the recipe's; within one family the model's sizes replace the recipe's.

    Raises:
        UsageError: the families differ, and no conversion is known.
    """
    if found.model_type == wanted.model_type:
        return found
    _conversion(found, wanted)
    own = wanted.model_dump()
    # Some settings of the encoder, such as segment types or how it was initialised, may have no counterpart.
    taken = {key: value for key, value in found.model_dump().items() if key in own and key not in _FROM_THE_RECIPE}
    return type(wanted).model_validate({**own, **taken})


def converted(model: HeadedModel, config: EncoderConfig, heads: Collection[str] | None = None) -> HeadedModel:
    """The model with this configuration, converted if the family differs.

    Args:
        model: the trained model; it is not changed.
        config: the recipe's.
        heads: of the new model, if the old one's family may not have them all; None: the old model's heads.

    Raises:
        UsageError: the weights do not fit, or no conversion is known between the families.
    """
    found = model.encoder.config
    if found == config:
        return model
    fill = _copied if found.model_type == config.model_type else _conversion(found, config)
    new = _zeroed(model, config, heads=heads)
    with torch.no_grad():
        fill(model, new)
    _warn_of_changes(found, config)
    return new.eval()


def _warn_of_changes(found: EncoderConfig, config: EncoderConfig) -> None:
    """Warn if the recipe's model computes something else with the same weights; dropout is expected to differ."""
    before, after = found.model_dump(), config.model_dump()
    ignored = {*_FROM_THE_RECIPE, *config.live_fields, "initializer_range"}
    changed = [
        f"{key} {value!r} (recipe: {after[key]!r})"
        for key, value in before.items()
        if key in after and after[key] != value and key not in ignored and "dropout" not in key
    ]
    if changed:
        log.warning(
            "init: the initial model was trained with %s; with the recipe's values its weights compute something else",
            ", ".join(changed),
        )


def with_vocabulary(
    model: HeadedModel, old: Tokenizer, new: Tokenizer, *, new_tokens: NewTokens = "mean", seed: int = 0
) -> tuple[HeadedModel, VocabularyChange | None]:
    """The model with the embeddings and the head's bias for another vocabulary, and how its tokens were initialised.

    If both vocabularies have the same ids, returns the model itself and None.

    Args:
        model: the trained model; it is not changed.
        old, new: the model's tokenizer and the new one.
        new_tokens: how to initialise tokens that are not in the old vocabulary.
        seed: of the weights that are drawn.
    """
    if new.backend.get_vocab() == old.backend.get_vocab() and new.roles == old.roles:
        return model, None
    found = map_vocabulary(new, old)
    if new_tokens == "random":
        found = VocabularyMapping(found.same, {})
    remade = _zeroed(model, model.encoder.config, vocab_size=new.vocab_size, pad_id=new.pad_id)
    # Token ids in a config.json refer to the old vocabulary.
    remade.extras = {key: value for key, value in model.extras.items() if not key.endswith("_token_id")}
    _fill(remade, model, lambda rows, old_rows: _copy_rows(rows, old_rows, found), seed=seed)
    if any(number != before for number, before in found.same.items()):
        remade.initialise(seed, only={f"encoder.{name}" for name in remade.encoder.hashed_tables})
    with torch.no_grad():
        _move_positions(remade.encoder, model.encoder)
    counts = VocabularyChange(len(found.same), len(found.parts), new.vocab_size - len(found.same) - len(found.parts))
    return remade.eval(), counts


def with_more_tokens(model: HeadedModel, vocab_size: int, *, seed: int) -> HeadedModel:
    """The model with rows for tokens appended to its vocabulary, drawn by the family's rules; the rest is unchanged.

    What else the family takes from a vocabulary is missing until its `Encoder.read_vocabulary`.

    Args:
        model: the trained model; it is not changed.
        vocab_size: of the longer vocabulary.
        seed: of the rows that are drawn.
    """
    longer = _zeroed(model, model.encoder.config, vocab_size=vocab_size)

    def copy_rows(rows: Tensor, old_rows: Tensor) -> None:
        rows[: old_rows.shape[0]] = old_rows

    _fill(longer, model, copy_rows, seed=seed)
    return longer.eval()


def _fill(model: HeadedModel, source: HeadedModel, copy_rows: Callable[[Tensor, Tensor], None], *, seed: int) -> None:
    """Copy a model into one of the same sizes with another vocabulary.

    Args:
        model: the new model; the rows of its vocabulary, and clusters of another number, are drawn from the seed first.
        source: the model that is copied.
        copy_rows: writes into the rows of a parameter, given the source's rows.
        seed: of the rows.
    """
    axes = vocabulary_axes(model.encoder.config, model.head_names)
    old = dict(source.named_parameters())
    # An adaptive softmax may have other clusters with another vocabulary.
    others = {
        name
        for name, parameter in model.named_parameters()
        if name not in axes and (name not in old or old[name].shape != parameter.shape)
    }
    model.initialise(seed, only={*axes, *others})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in axes:
                copy_rows(parameter.movedim(axes[name], 0), old[name].movedim(axes[name], 0))
            elif name not in others:
                parameter.copy_(old[name])


def vocabulary_axes(config: EncoderConfig, heads: Sequence[str]) -> dict[str, int]:
    """The parameters with a row or column per token, and the axis of the tokens."""
    with torch.device("meta"):
        few, more = (dict(HeadedModel(config.build(size), heads).named_parameters()) for size in (11, 12))
    return {
        name: next(axis for axis, size in enumerate(few[name].shape) if size != parameter.shape[axis])
        for name, parameter in more.items()
        if parameter.shape != few[name].shape
    }


def _copy_rows(rows: Tensor, old_rows: Tensor, found: VocabularyMapping) -> None:
    """Fill the rows of tokens that are in the old vocabulary or composed of its tokens."""
    if found.same:
        rows[list(found.same)] = old_rows[list(found.same.values())]
    for number, parts in found.parts.items():
        rows[number] = old_rows[parts].mean(dim=0)


def _zeroed(model: HeadedModel, config: EncoderConfig, **changes: Any) -> HeadedModel:
    """The model with this configuration and all weights zero; `changes` are other arguments of `rebuilt`."""
    with torch.device("meta"):
        new = rebuilt(model, config, **changes)
    new.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.zero_()
    return new


def _copied(model: HeadedModel, new: HeadedModel) -> None:
    """Copy every weight unchanged."""
    source = dict(model.named_parameters())
    for name, parameter in new.named_parameters():
        _copy(parameter, source.get(name), model, new)
    if len(source) != len(dict(new.named_parameters())):
        raise _does_not_fit(model.encoder.config, new.encoder.config)


def _copy(parameter: Tensor, origin: Tensor | None, model: HeadedModel, new: HeadedModel) -> None:
    """Copy a weight of the first model into one of the second; UsageError if there is none of this shape."""
    if origin is None or origin.shape != parameter.shape:
        raise _does_not_fit(model.encoder.config, new.encoder.config)
    parameter.copy_(origin)


def check_same_weights(found: EncoderConfig, wanted: EncoderConfig) -> None:
    """Check a recipe's model against the initial one of the same family, as far as their settings tell.

    Raises:
        UsageError: the weights do not fit.
    """
    if found.model_type != wanted.model_type:
        return
    with torch.device("meta"):
        shapes = [{n: p.shape for n, p in each.build(1).named_parameters()} for each in (found, wanted)]
    if shapes[0] != shapes[1]:
        raise _does_not_fit(found, wanted)


def _does_not_fit(found: EncoderConfig, wanted: EncoderConfig) -> UsageError:
    converted_too = _FROM_THE_RECIPE if found.model_type != wanted.model_type else None
    before, after = found.model_dump(exclude=converted_too), wanted.model_dump()
    differing = [
        f"{key} {value!r} (recipe: {after.get(key)!r})" for key, value in before.items() if value != after.get(key)
    ]
    return UsageError(
        f"init: the model's weights do not fit the recipe's model: it has {', '.join(differing)}; set these as in the"
        " initial model"
    )


def _with_repeated_positions(model: HeadedModel, new: HeadedModel) -> None:
    """A Longformer or a BigBird: weights are copied unchanged, global projections from the ordinary ones (section 5),
    and positions are repeated; a BigBird counts them from 0."""
    source = dict(model.named_parameters())
    before, after = (
        each.padding_id + 1 if "pad_token_id" in each.to_hub() else 0 for each in (model.encoder, new.encoder)
    )
    # BigBird's class on the Hub has a pooler that nothing reads.
    drawn = {name for name, _ in new.named_parameters() if name.startswith(POOLER) and name not in source}
    new.initialise(0, only=drawn)
    for name, parameter in new.named_parameters():
        origin = source.get(name.replace("_global.", "."))  # attention.query_global.weight is attention.query.weight
        if origin is not None and name == _POSITIONS:
            _repeat_positions(parameter, origin[before - after :], first=after)
        elif name not in drawn:
            _copy(parameter, origin, model, new)


def _bart_of_bert(model: HeadedModel, new: HeadedModel) -> None:
    """Both stacks start as the same BERT, and the attention between them is drawn: BERT2BERT of Rothe et al. 2020,
    arXiv:1907.12461, section 3. The first segment's embedding is added to every position's."""
    source = dict(model.encoder.named_parameters())
    rows = source[_TABLE] + source["embeddings.token_type.weight"][0]
    new.initialise(0)
    new.extras = {}  # the old ones are of an encoder alone
    for name, parameter in new.encoder.named_parameters():
        if "cross_attention" in name:
            continue
        side, _, part = name.partition("_positions.")
        if part == "position.weight":
            _copy_first_positions(parameter[UNREAD_ROWS:], rows)
            continue
        _copy(parameter, source.get(f"embeddings.{part}" if part else side.removeprefix("decoder_")), model, new)


def _bert_gpt2_of_bert(model: HeadedModel, new: HeadedModel) -> None:
    """BERT becomes the encoder, bit for bit; the decoder is drawn (BERT2RND of Rothe et al. 2020, unless `init_decoder`
    gives it a GPT-2's weights)."""
    source = dict(model.encoder.named_parameters())
    new.initialise(0)
    new.extras = {}  # the old ones are of an encoder alone
    for name, parameter in new.encoder.named_parameters():
        if name == f"source.{_TABLE}":
            _copy_first_positions(parameter, source[_TABLE])
        elif name.startswith("source."):
            _copy(parameter, source.get(name.removeprefix("source.")), model, new)


def _copy_first_positions(new_PD: Tensor, old_PD: Tensor) -> None:
    """Copy as many positions as the new table has; UsageError if it has more than the old one."""
    if len(new_PD) > len(old_PD):
        raise UsageError(
            f"model.max_position_embeddings ({len(new_PD)}) exceeds the initial model's {len(old_PD)}; lower it"
        )
    new_PD.copy_(old_PD[: len(new_PD)])


def _repeat_positions(new_PD: Tensor, old_PD: Tensor, *, first: int) -> None:
    """Copy the rows before the first position, then all positions, repeated until the new table is full."""
    position_P = torch.arange(len(new_PD))
    period = len(old_PD) - first
    new_PD.copy_(old_PD[torch.where(position_P < first, position_P, first + (position_P - first) % period)])


def _move_positions(new: Encoder, old: Encoder) -> None:
    """If positions are counted from the padding id, move them to the new id."""
    before, after = old.padding_id, new.padding_id
    if "pad_token_id" in old.to_hub() and before != after:
        new_PD, old_PD = new.get_parameter(_TABLE), old.get_parameter(_TABLE)
        new_PD.copy_(old_PD[(torch.arange(len(new_PD)) - after + before).clamp(0, len(old_PD) - 1)])


_Conversion = Callable[[HeadedModel, HeadedModel], None]
_CONVERSIONS: dict[tuple[str, str], _Conversion] = {
    ("bert", "bart"): _bart_of_bert,
    ("bert", "bert-gpt2"): _bert_gpt2_of_bert,
    ("bert", "big_bird"): _with_repeated_positions,
    ("camembert", "big_bird"): _with_repeated_positions,
    ("camembert", "longformer"): _with_repeated_positions,
    ("roberta", "big_bird"): _with_repeated_positions,
    ("roberta", "longformer"): _with_repeated_positions,
    ("xlm-roberta", "big_bird"): _with_repeated_positions,
    ("xlm-roberta", "longformer"): _with_repeated_positions,
}
"""Functions that fill a model of the second family from one of the first."""


def _conversion(found: EncoderConfig, wanted: EncoderConfig) -> _Conversion:
    """The function that fills one family's model from another's; UsageError if there is none."""
    pair = found.model_type, wanted.model_type
    if pair not in _CONVERSIONS:
        known = ", ".join(f"{first} to {second}" for first, second in _CONVERSIONS)
        raise UsageError(
            f"init: the model is of family {pair[0]!r}, the recipe's model.family is {pair[1]!r}; known conversions:"
            f" {known}. Use a recipe of the model's own family, or domain-adapt, which continues any model"
        )
    return _CONVERSIONS[pair]

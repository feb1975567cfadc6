"""Pruning: removes attention heads and whole layers from a model, or sets the smallest weights of linear maps to 0.

Heads: Michel, Levy and Neubig 2019, arXiv:1905.10650, section 2.3. A head whose gate is 0 adds nothing to the input of
the output map, so its rows of query, key and value and its columns of the output map can be removed; the map's bias
stays. probing/heads measures which heads matter least. Weights: by magnitude (for BERT: Gordon, Duh and Andrews 2020,
arXiv:2002.08307), per matrix, on the cubic schedule of Zhu and Gupta 2017, arXiv:1710.01878, equation 1. Sibling
convert.py makes a model deeper.

Pruned heads are in config.json as `pruned_heads`, {layer: [heads]}, by their numbers in the unpruned model, as written
by `transformers` 4. Version 5 has no such key, and its classes have heads of width hidden_size / num_attention_heads in
every layer; it can load the dense form, in which the heads are zeros (`dense`).

Shapes: N heads of a layer, H head width.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bertkit.errors import DataError, UsageError
from bertkit.models.attention.self_attention import SelfAttention
from bertkit.models.encoder import Encoder, EncoderConfig, in_layer
from bertkit.models.encoder_decoder import EncoderDecoderConfig
from bertkit.models.headed import HeadedModel

PRUNED_HEADS = "pruned_heads"
"""The key of config.json, and the attribute of an attention with pruned heads."""
INNER = "base"
"""The encoder within one that reads its states (feature_lstm.py), and the key of its settings in config.json."""
HeadChoice = Mapping[int, Collection[int]]
"""Heads by layer, both counted from 0; heads have their numbers in the unpruned model."""
HeadNumbers = Sequence[Sequence[int]]
"""The heads that each layer has, by their numbers in the unpruned model, from 0."""

_OTHERWISE = "method.magnitude sets single weights of any family to 0"


def prunable_attentions(encoder: Encoder) -> list[SelfAttention]:
    """The attention of every layer; UsageError if the family's heads cannot be pruned."""
    layers = _layers(encoder)
    attentions = [getattr(layer, "attention", None) for layer in layers]
    found = [attention for attention in attentions if isinstance(attention, SelfAttention)]
    reason = None
    if not layers:
        reason = "its layers share their weights, or are not one stack"
    elif len(found) < len(layers):
        reason = "its heads have other weights than those of queries, keys, values and output"
    else:
        reason = next((each.pruning_obstacle for each in found if each.pruning_obstacle), None)
    if reason is not None:
        kind = _family(encoder)
        raise UsageError(f"heads cannot be removed from a model of the family {kind}: {reason}; {_OTHERWISE}")
    return found


def pruned_heads(encoder: Encoder) -> dict[int, tuple[int, ...]]:
    """The pruned heads by layer, without unpruned layers."""
    gone = {number: _gone(getattr(layer, "attention", None)) for number, layer in enumerate(_layers(encoder))}
    return {number: heads for number, heads in gone.items() if heads}


def head_numbers(encoder: Encoder, *, layers: int, heads: int) -> HeadNumbers:
    """The numbers of the heads of an encoder whose layers have equally many; `heads` is how many."""
    gone = {number: set(pruned) for number, pruned in pruned_heads(encoder).items()}
    every = {number: range(heads + len(gone.get(number, ()))) for number in range(layers)}
    return [[head for head in every[number] if head not in gone.get(number, ())] for number in range(layers)]


def require_equal_heads(encoder: Encoder) -> None:
    """Refuse an encoder of which some layers have lost more heads than others.

    Raises:
        DataError: for what compares the heads of all layers.
    """
    gone = pruned_heads(encoder)
    if len({len(gone.get(number, ())) for number in range(len(_layers(encoder)))}) > 1:
        raise DataError(
            "heads were pruned, so the layers have different numbers of them, which this cannot compare; use the model"
            " in its dense form: bertkit export RUN --to DIR"
        )


def pruned_to_hub(encoder: Encoder) -> dict[str, Any]:
    """The entry of pruned heads in config.json; empty if there are none."""
    gone = {str(layer): list(heads) for layer, heads in pruned_heads(encoder).items()}
    return {PRUNED_HEADS: gone} if gone else {}


def saved_heads(contents: Mapping[str, Any], *, source: str) -> dict[int, tuple[int, ...]]:
    """The pruned heads by layer in the contents of config.json; empty if there are none.

    Args:
        contents: contents of config.json.
        source: the file, for messages.

    Raises:
        DataError: the entry does not list heads by layer.
    """
    try:
        return {int(layer): tuple(heads) for layer, heads in (contents.get(PRUNED_HEADS) or {}).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{source}: {PRUNED_HEADS}: {error}") from error


def shrink_to_pruned_heads(encoder: Encoder, contents: Mapping[str, Any], *, source: str) -> None:
    """Give an encoder that has no weights yet the shapes for the pruned heads in config.json.

    Args:
        encoder: unpruned.
        contents: contents of config.json.
        source: the file, for messages.

    Raises:
        DataError: config.json names heads that the model does not have, or all heads of a layer.
    """
    inner = getattr(encoder, INNER, None)
    if isinstance(inner, Encoder):
        shrink_to_pruned_heads(inner, contents[INNER], source=source)
        return
    saved = saved_heads(contents, source=source)
    if not saved:
        return
    try:
        _take_out(prunable_attentions(encoder), saved)
    except (ValueError, TypeError, UsageError) as error:
        raise DataError(f"{source}: {PRUNED_HEADS}: {error}") from error


def prune_heads(model: HeadedModel, chosen: HeadChoice) -> None:
    """Remove heads from a model, in place.

    Args:
        model: may be pruned already.
        chosen: the heads to remove.

    Raises:
        UsageError: the family's heads cannot be pruned, there is no such head, it is pruned already, or a layer would
            have none left.
    """
    attentions = prunable_attentions(model.encoder)
    try:
        _take_out(attentions, chosen)
    except ValueError as error:
        raise UsageError(f"heads: {error}") from error


def rebuilt(
    model: HeadedModel,
    config: EncoderConfig,
    *,
    heads: Collection[str] | None = None,
    layers: Sequence[int] | None = None,
    vocab_size: int | None = None,
    pad_id: int | None = None,
) -> HeadedModel:
    """A model with another configuration and its constructor's weights; labels, pruned heads and uninterpreted keys of
    config.json are those of a given model.

    Args:
        model: the given model, which is not changed.
        config: of the new one.
        heads: its heads; None: the same.
        layers: for each of its layers, that of the given model whose heads it has; None: the same ones, repeated in a
            deeper model.
        vocab_size, pad_id: of its vocabulary; None: the same.

    Raises:
        UsageError: as in `prune_heads`.
    """
    old = model.encoder
    encoder = config.build(
        old.vocab_size if vocab_size is None else vocab_size, pad_id=old.padding_id if pad_id is None else pad_id
    )
    new = HeadedModel(encoder, model.heads if heads is None else heads, labels=model.labels)
    new.extras = dict(model.extras)
    if gone := pruned_heads(old):
        depth = len(_layers(old))
        origins = [number % depth for number in range(len(_layers(encoder)))] if layers is None else layers
        prune_heads(new, {number: gone[origin] for number, origin in enumerate(origins) if origin in gone})
    return new


def restore_heads(model: HeadedModel) -> dict[int, tuple[int, ...]]:
    """Restore pruned heads as zeros, in place, without changing the outputs. Returns the heads.

    All weights of such a head are 0, so no gradient reaches them: they stay 0 in further training.
    """
    gone = pruned_heads(model.encoder)
    for layer in gone:
        _put_back(prunable_attentions(model.encoder)[layer])
    return gone


def dense(model: HeadedModel) -> HeadedModel:
    """The model with zeros in place of pruned heads: a copy, or the model itself if none are pruned."""
    if not pruned_heads(model.encoder):
        return model
    whole = copy.deepcopy(model)
    restore_heads(whole)
    return whole


@torch.no_grad()
def keep_layers(model: HeadedModel, kept: Sequence[int]) -> HeadedModel:
    """A model with some of another's layers; embeddings, norms after the last layer and heads are copied.

    Args:
        model: the other model, which is not changed.
        kept: numbers of the layers, from 0, ascending.

    Raises:
        UsageError: no such layer, an order that does not ascend, or a family whose layers cannot be removed.
    """
    encoder = model.encoder
    depth = len(_layers(encoder))
    if not depth:
        raise UsageError(
            f"layers cannot be removed from a model of the family {_family(encoder)}: they share their weights, or are"
            f" not one stack; its num_hidden_layers may be set lower in config.json, and {_OTHERWISE}"
        )
    if not kept or list(kept) != sorted(set(kept)) or not 0 <= kept[0] <= kept[-1] < depth:
        raise UsageError(
            f"layers: {list(kept)} of {depth}; expected numbers from 0 to {depth - 1} in ascending order, at least one"
        )
    smaller = rebuilt(model, with_layers(encoder.config, kept), layers=kept)
    source = dict(model.named_parameters())
    for name, parameter in smaller.named_parameters():
        parameter.copy_(source[in_layer(name, kept.__getitem__)])
    return smaller.train(model.training)


def prunable_maps(model: HeadedModel) -> dict[str, nn.Linear]:
    """The linear maps that are pruned by magnitude: all of the encoder's, by name, but not embeddings or heads.

    Raises:
        UsageError: there are none.
    """
    found = {name: part for name, part in model.encoder.named_modules() if isinstance(part, nn.Linear)}
    if not found:
        raise UsageError(f"method.magnitude: an encoder of the family {_family(model.encoder)} has no linear maps")
    return found


def sparsity(model: HeadedModel) -> tuple[int, int]:
    """Number of zero weights in the prunable maps, and of all weights; biases are not counted."""
    weights = [part.weight for part in prunable_maps(model).values()]
    return sum(int((weight == 0).sum()) for weight in weights), sum(weight.numel() for weight in weights)


@torch.no_grad()
def zero_smallest_weights(weight: Tensor, share: float) -> None:
    """Set a matrix's smallest weights by absolute value to 0, in place: `share` of all, to the nearest weight.

    Weights that are already 0 count, so a larger share extends a smaller one.
    """
    size = weight.abs().flatten().cpu().numpy()
    count = round(share * size.size)
    if count == 0:
        return
    smallest = np.argpartition(size, count - 1)[:count] if count < size.size else np.arange(size.size)
    weight.view(-1).index_fill_(0, torch.from_numpy(smallest).to(weight.device), 0.0)


def cubic_sparsity(final: float, step: int, *, ramp_steps: int, every_steps: int = 1) -> float:
    """The share of zero weights after this many updates: s_f (1 - (1 - t / r)^3), Zhu and Gupta 2017, equation 1.

    Args:
        final: s_f.
        step: number of updates done.
        ramp_steps: r, number of updates over which the share grows; 0: the final share from the start.
        every_steps: t is `step` rounded down to a multiple of this; after the ramp the share is always the final one.
    """
    if step >= ramp_steps:
        return final
    return final * (1 - (1 - step // every_steps * every_steps / ramp_steps) ** 3)


def _layers(encoder: Encoder) -> Sequence[nn.Module]:
    """The encoder's layers if each has its own weights; otherwise none."""
    layers = getattr(encoder, "layers", None)
    return list(layers) if isinstance(layers, nn.ModuleList) else []


def _family(encoder: Encoder) -> str:
    return encoder.config.model_type


def _gone(attention: Any) -> tuple[int, ...]:
    return tuple(getattr(attention, PRUNED_HEADS, ()))


def _take_out(attentions: Sequence[SelfAttention], chosen: HeadChoice) -> None:
    """Raises:
    ValueError: the choice is impossible for these layers.
    """
    for layer, heads in sorted(chosen.items()):
        if not 0 <= layer < len(attentions):
            raise ValueError(f"there is no layer {layer}; layers are counted from 0 to {len(attentions) - 1}")
        gone = set(_gone(attentions[layer]))
        every = attentions[layer].heads + len(gone)
        strange = sorted(set(heads) - set(range(every)))
        if strange:
            raise ValueError(f"layer {layer} has no head {strange[0]}; its heads are counted from 0 to {every - 1}")
        if gone & set(heads):
            raise ValueError(f"layer {layer}: head {min(gone & set(heads))} is pruned already")
        if len(gone) + len(set(heads)) == every:
            raise ValueError(
                f"layer {layer} would have none of its {every} heads left; keep one, or remove the whole layer"
                " (method.layers)"
            )
    for layer, heads in chosen.items():
        if heads:
            _narrow(attentions[layer], set(heads))


@torch.no_grad()
def _narrow(attention: SelfAttention, heads: set[int]) -> None:
    """Remove the rows and columns of these heads from an attention."""
    gone = _gone(attention)
    present = [head for head in range(attention.heads + len(gone)) if head not in gone]
    width = attention.query.out_features // attention.heads
    places = [place for place, head in enumerate(present) if head not in heads]
    index = torch.cat([torch.arange(place * width, (place + 1) * width) for place in places])
    for linear in _maps_by_head(attention):
        _set(linear, linear.weight.detach()[index], None if linear.bias is None else linear.bias.detach()[index])
    _set(attention.output, attention.output.weight.detach()[:, index], attention.output.bias)
    attention.heads = len(places)
    setattr(attention, PRUNED_HEADS, tuple(sorted({*gone, *heads})))


@torch.no_grad()
def _put_back(attention: SelfAttention) -> None:
    """The inverse of `_narrow`, with zeros."""
    gone = _gone(attention)
    every = attention.heads + len(gone)
    width = attention.query.out_features // attention.heads
    present = [head for head in range(every) if head not in gone]
    index = torch.cat([torch.arange(head * width, (head + 1) * width) for head in present])

    def widened(tensor: Tensor, dim: int) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] = every * width
        return tensor.new_zeros(shape).index_copy_(dim, index.to(tensor.device), tensor.detach())

    for linear in _maps_by_head(attention):
        _set(linear, widened(linear.weight, 0), None if linear.bias is None else widened(linear.bias, 0))
    _set(attention.output, widened(attention.output.weight, 1), attention.output.bias)
    attention.heads = every
    delattr(attention, PRUNED_HEADS)


def _maps_by_head(attention: SelfAttention) -> Iterator[nn.Linear]:
    """The linear maps whose outputs belong to heads: all of the attention's except the last, including those for global
    tokens or positions."""
    for name, part in attention.named_children():
        if isinstance(part, nn.Linear) and name != "output":
            yield part


def _set(linear: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    """Replace a linear map's weights with others, possibly of a different shape."""
    trained = linear.weight.requires_grad
    linear.out_features, linear.in_features = weight.shape
    linear.weight = nn.Parameter(weight.clone(), requires_grad=trained)
    if bias is not None and bias is not linear.bias:
        linear.bias = nn.Parameter(bias.clone(), requires_grad=trained)


def with_layers(config: EncoderConfig, kept: Sequence[int]) -> EncoderConfig:
    """The settings of a model with these layers; settings with one entry per layer keep the entries of these layers.

    Raises:
        UsageError: a layer depends on its number, so it cannot move or be removed.
    """
    settings = config.model_dump()
    update: dict[str, Any] = {"num_hidden_layers": len(kept)}
    if isinstance(config, EncoderDecoderConfig):
        update["num_decoder_layers"] = config.decoder_layer_count  # else a null would follow the encoder
    moved = list(kept) != list(range(len(kept)))
    if moved and settings.get("scale_attn_by_inverse_layer_idx"):
        raise UsageError(
            "layers: this model divides scores by the layer's number (scale_attn_by_inverse_layer_idx), so its layers"
            " cannot move; keep the first ones (layers: first)"
        )
    if moved and settings.get("attention_type") == "block_sparse":
        raise UsageError(
            f"layers: {list(kept)}; the random blocks of a BigBird layer depend on its number, so its layers cannot"
            " move; keep the first ones (layers: first)"
        )
    if config.model_type == "modernbert" and kept[0] != 0:
        raise UsageError(f"layers: {list(kept)}; ModernBERT's first layer alone has no norm before it: keep layer 0")
    if moved and config.model_type == "gpt-bert":
        raise UsageError(
            f"layers: {list(kept)}; each layer of GPT-BERT reads a weighted sum of all earlier ones, so they cannot"
            " move; keep the first ones (layers: first)"
        )
    interval = settings.get("expert_layer_interval")
    if interval and any((number - layer) % interval for number, layer in enumerate(kept)):
        raise UsageError(
            f"layers: {list(kept)}; one of {interval} layers has experts, depending on its number, so layers move by"
            f" multiples of {interval}; keep the first ones (layers: first)"
        )
    if (settings.get("skips") or settings.get("value_embeddings")) and len(kept) != settings["num_hidden_layers"]:
        raise UsageError(
            f"layers: {list(kept)}; with skips or value_embeddings, the inputs of a layer depend on its number, so none"
            " can be removed; train a smaller model (--set model.num_hidden_layers=N)"
        )
    lists = {"attention_window": getattr(config, "windows", ()), "layer_types": getattr(config, "kinds", ())}
    for name, values in lists.items():
        if name in settings and values:
            update[name] = tuple(values[layer] for layer in kept)
    return config.model_copy(update=update)

"""Effective attention: the part of an attention map that affects the output.

Brunner et al. 2020, "On Identifiability in Transformers", arXiv:1908.04211, section 3. A head adds A T to the states,
with T = V W (n x D): the values of the n tokens, through the head's slice of the output projection. The rank of T is at
most the head's width H, so with more than H tokens, many maps A give the same output. Their common part is A without
its projection onto the left null space of T,

    A_eff = A U U^T,    U the left singular vectors of T with a singular value above tolerance;   A_eff T = A T.

Its rows need not sum to 1 and may have negative entries. Variant: V includes the values' bias, which A also mixes. The
paper's further argument from rows that must sum to 1 is not used. With n <= H and full rank, A_eff equals A.

The output projection is recorded, not read from the weights: in one forward pass with `hook_z` replaced by the unit
vectors, `hook_attn_out` contains the corresponding rows of W. Quantised maps count with the weights they stand for.

Shapes: n tokens of a sentence, T packed tokens, N heads, H head width, D width of attention's output, L layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.models.conversion.pruning import require_equal_heads
from bertkit.models.headed import HeadedModel
from bertkit.models.hook_points import device_of, point_shapes
from bertkit.models.quantisation.quantised import with_float_maps
from bertkit.models.recorder import Recorder
from bertkit.models.scoring.rules import reads_causally
from bertkit.probing.attention.measure import pattern_points
from bertkit.probing.sentences import EncodedSentence, packed
from bertkit.probing.states import recorded
from bertkit.training.engine import Engine

VALUES = "blocks.{n}.attn.hook_v"
MIXED = "blocks.{n}.attn.hook_z"
ATTENDED = "blocks.{n}.hook_attn_out"


def output_maps(model: HeadedModel, layers: int) -> list[Tensor]:
    """Each head's slice of the output projection, (N, H, D) per layer, float64.

    Raises:
        DataError: the family does not have one of the points.
    """
    require_equal_heads(model.encoder)
    shapes, device = point_shapes(model), device_of(model)
    for layer in range(layers):
        for name in (VALUES, MIXED, ATTENDED):
            if name.format(n=layer) not in shapes:
                raise DataError(
                    f"a model of the family {model.encoder.config.model_type} has no point {name.format(n=layer)},"
                    " which effective attention needs"
                )
    heads, width = shapes[MIXED.format(n=0)][1:]
    inputs = heads * width
    unit_T = torch.cat([torch.eye(inputs), torch.zeros(1, inputs)]).view(-1, heads, width).to(device)
    # As many tokens as there are inputs, plus one for the bias; their ids do not matter because the edit replaces them.
    row = min(model.encoder.max_tokens, inputs + 1)
    lengths = [row] * ((inputs + 1) // row) + [(inputs + 1) % row] * ((inputs + 1) % row > 0)
    edits = {MIXED.format(n=layer): lambda mixed: unit_T.to(mixed.dtype) for layer in range(layers)}
    # A fixed input range of an int8 map would clip unit vectors.
    model = with_float_maps(model)
    recorder = Recorder([ATTENDED.format(n=layer) for layer in range(layers)], edits)
    with torch.inference_mode():
        model(PackedBatch.from_ids([[0] * length for length in lengths]).to(device), recorder)
    found = []
    for layer in range(layers):
        out_TD = recorder.kept[ATTENDED.format(n=layer)].double().cpu()
        found.append((out_TD[:-1] - out_TD[-1]).view(heads, width, -1))
    return found


def effective(maps_Nnn: Tensor, mixed_NnD: Tensor) -> tuple[Tensor, Tensor]:
    """Effective attention of the heads of a layer, (N, n, n), and the rank of each head's T, (N,).

    Args:
        maps_Nnn: attention maps, float64.
        mixed_NnD: T of each head, float64.
    """
    left_NnK, singular_NK, _ = torch.linalg.svd(mixed_NnD, full_matrices=False)
    greatest_N1 = singular_NK[:, :1]
    # The tolerance of numpy and MATLAB for the rank of a matrix.
    tolerance_N1 = greatest_N1 * max(mixed_NnD.shape[1:]) * torch.finfo(mixed_NnD.dtype).eps
    kept_NK = singular_NK > tolerance_N1
    basis_NnK = left_NnK * kept_NK[:, None].to(left_NnK.dtype)
    return (maps_Nnn @ basis_NnK) @ basis_NnK.transpose(-1, -2), kept_NK.sum(-1)


@dataclass(frozen=True, eq=False)
class LayerAttention:
    """Raw and effective maps of one sentence in one layer.

    Attributes:
        raw_Nnn, effective_Nnn: float64.
        rank_N: rank of T.
    """

    raw_Nnn: Tensor
    effective_Nnn: Tensor
    rank_N: Tensor


def layer_attention(
    model: HeadedModel, sentences: Iterable[EncodedSentence], engine: Engine
) -> Iterator[tuple[EncodedSentence, list[LayerAttention]]]:
    """Every sentence with its maps in all layers, one sentence in memory at a time.

    The model is moved to the device, put in evaluation mode and computed in fp32; the decomposition runs on the CPU in
    fp64.

    Raises:
        DataError: the family does not have one of the points, or their values are not finite.
    """
    model = model.to(engine.device).eval()
    points, causal = pattern_points(model), reads_causally(model)
    maps = output_maps(model, len(points))
    for sentence in sentences:
        wanted = [*points, *(VALUES.format(n=layer) for layer in range(len(points)))]
        values = recorded(model, packed([sentence], causal=causal), wanted)
        layers = zip(values[: len(points)], values[len(points) :], maps, strict=True)
        yield sentence, [_of_layer(raw[0].double().cpu(), value.double().cpu(), own) for raw, value, own in layers]


def _of_layer(raw_Nnn: Tensor, value_nGH: Tensor, map_AHD: Tensor) -> LayerAttention:
    """G heads of values can serve more heads of queries. Heads that attend by position alone have no recorded map; they
    are the first of all A heads."""
    per_value = map_AHD.shape[0] // value_nGH.shape[1]
    value_AnH = value_nGH.transpose(0, 1).repeat_interleave(per_value, dim=0)
    value_NnH, map_NHD = (each[-raw_Nnn.shape[0] :] for each in (value_AnH, map_AHD))
    # The singular values of V W are those of V R^T with W^T = Q R: a matrix of n x H instead of n x D.
    _, upper_NHH = torch.linalg.qr(map_NHD.transpose(-1, -2))
    effective_Nnn, rank_N = effective(raw_Nnn, value_NnH @ upper_NHH.transpose(-1, -2))
    return LayerAttention(raw_Nnn, effective_Nnn, rank_N)


def correlations(layer: LayerAttention) -> Tensor:
    """Pearson's correlation of raw and effective attention over all n^2 cells of each head, (N,); NaN if one is
    constant."""
    cells = [maps.flatten(1) for maps in (layer.raw_Nnn, layer.effective_Nnn)]
    raw, reduced = (each - each.mean(1, keepdim=True) for each in cells)
    norm = raw.norm(dim=1) * reduced.norm(dim=1)
    return torch.where(norm > 0, (raw * reduced).sum(1) / norm, torch.nan)

"""Effective attention: the part of an attention map that its values let through.

Brunner et al. 2020, "On Identifiability in Transformers", arXiv:1908.04211, section 3. A head adds A T to the states,
with T = V W (n x D): the values of the n tokens behind the head's slice of the output projection. T has rank of at most
the head's width H, so that with more tokens than that there are many maps A with the same outcome. What is common to
them is A without its projection onto the left null space of T,

    A_eff = A U U^T,    U the left singular vectors of T with a singular value above tolerance;   A_eff T = A T.

Rows of it need not sum to 1 and may be negative. Variant: V includes the values' bias, for that is what A mixes; the
paper's further argument from rows that must sum to 1 is not used. With n <= H and full rank nothing changes.

The output projection is recorded, not read from the weights: one forward pass whose `hook_z` is edited to be the unit
vectors gives, in `hook_attn_out`, the row of W that belongs to each.

Shapes: n tokens of a sentence, T packed tokens, N heads, H head width, D width of what attention puts out, L layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.models.headed import HeadedModel
from bertkit.models.recorder import Recorder, point_shapes
from bertkit.probing.attention.measure import pattern_points
from bertkit.probing.sentences import EncodedSentence, packed

VALUES = "blocks.{n}.attn.hook_v"
MIXED = "blocks.{n}.attn.hook_z"
ATTENDED = "blocks.{n}.hook_attn_out"
_CPU = torch.device("cpu")


def output_maps(model: HeadedModel, layers: int) -> list[Tensor]:
    """Each head's slice of the output projection, (N, H, D) a layer, float64.

    Args:
        model: out of training mode; read on its own device.
        layers: L.

    Raises:
        DataError: the family has not all the points.
    """
    device = next(model.parameters()).device
    shapes = point_shapes(model, PackedBatch.from_ids([[0, 0]]).to(device))
    for layer in range(layers):
        for name in (VALUES, MIXED, ATTENDED):
            if name.format(n=layer) not in shapes:
                raise DataError(
                    f"a model of the family {model.encoder.config.model_type} has no point {name.format(n=layer)},"
                    " without which effective attention cannot be told"
                )
    heads, width = shapes[MIXED.format(n=0)][1:]
    inputs = heads * width
    unit_T = torch.cat([torch.eye(inputs), torch.zeros(1, inputs)]).view(-1, heads, width).to(device)
    # As many tokens as there are inputs, and one for the bias; which tokens is all the same, for they are replaced.
    row = min(model.encoder.max_tokens, inputs + 1)
    lengths = [row] * ((inputs + 1) // row) + [(inputs + 1) % row] * ((inputs + 1) % row > 0)
    edits = {MIXED.format(n=layer): lambda mixed: unit_T.to(mixed.dtype) for layer in range(layers)}
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
    # numpy's and MATLAB's tolerance of a matrix's rank.
    tolerance_N1 = greatest_N1 * max(mixed_NnD.shape[1:]) * torch.finfo(mixed_NnD.dtype).eps
    kept_NK = singular_NK > tolerance_N1
    basis_NnK = left_NnK * kept_NK[:, None].to(left_NnK.dtype)
    return (maps_Nnn @ basis_NnK) @ basis_NnK.transpose(-1, -2), kept_NK.sum(-1)


@dataclass(frozen=True, eq=False)
class LayerAttention:
    """Raw and effective maps of one sentence in one layer.

    Attributes:
        raw_Nnn, effective_Nnn: float64.
        mixed_NnD: T.
        rank_N: of T.
    """

    raw_Nnn: Tensor
    effective_Nnn: Tensor
    mixed_NnD: Tensor
    rank_N: Tensor


def layer_attention(
    model: HeadedModel, sentences: Iterable[EncodedSentence], *, device: torch.device = _CPU
) -> Iterator[tuple[EncodedSentence, list[LayerAttention]]]:
    """Every sentence with the maps of all layers, one sentence in memory at a time.

    Args:
        model: put on the device and out of training mode.
        sentences: of any number.
        device: where the model is computed, in fp32; the decomposition is done on the CPU in fp64.

    Raises:
        DataError: the family has not all the points, or they are not numbers.
    """
    model = model.to(device).eval()
    points = pattern_points(model)
    maps = output_maps(model, len(points))
    for sentence in sentences:
        yield sentence, _of_sentence(model, sentence, points, maps, device)


@torch.inference_mode()
def _of_sentence(
    model: HeadedModel,
    sentence: EncodedSentence,
    points: Sequence[str],
    maps: Sequence[Tensor],
    device: torch.device,
) -> list[LayerAttention]:
    values = [VALUES.format(n=layer) for layer in range(len(points))]
    recorder = Recorder([*points, *values])
    model(packed([sentence]).to(device), recorder)
    found = []
    for point, name, map_NHD in zip(points, values, maps, strict=True):
        raw_Nnn, value_nNH = (recorder.kept[each].double().cpu() for each in (point, name))
        if not (raw_Nnn.isfinite().all() and value_nNH.isfinite().all()):
            raise DataError(f"{point} or {name} is not numbers (NaN or infinite): the weights are damaged or diverged")
        # The singular values of V W are those of V R^T with W^T = Q R: a matrix of n x H instead of n x D.
        mixed_NnD = value_nNH.transpose(0, 1) @ map_NHD
        effective_Nnn, rank_N = effective(raw_Nnn[0], _narrow(value_nNH.transpose(0, 1), map_NHD))
        found.append(LayerAttention(raw_Nnn[0], effective_Nnn, mixed_NnD, rank_N))
    return found


def _narrow(value_NnH: Tensor, map_NHD: Tensor) -> Tensor:
    """T in the coordinates of an orthonormal basis of the map's rows, (N, n, H): the same left singular vectors."""
    _, upper_NHH = torch.linalg.qr(map_NHD.transpose(-1, -2))
    narrow_NnH: Tensor = value_NnH @ upper_NHH.transpose(-1, -2)
    return narrow_NnH


def correlations(layer: LayerAttention) -> Tensor:
    """Pearson's correlation of raw and effective attention over all n^2 cells of each head, (N,); NaN where one is
    constant."""
    cells = [maps.flatten(1) for maps in (layer.raw_Nnn, layer.effective_Nnn)]
    raw, reduced = (each - each.mean(1, keepdim=True) for each in cells)
    norm = raw.norm(dim=1) * reduced.norm(dim=1)
    return torch.where(norm > 0, (raw * reduced).sum(1) / norm, torch.nan)

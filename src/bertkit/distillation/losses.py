"""The losses of distillation as functions of two tensors, one number per row; nothing here depends on a model.

Every function returns the loss of each row. A term is therefore a sum and a count, and neither padding nor the way a
batch is split changes it. Released implementations use four scales for what they all call the distillation loss; here
there is one:

    bertkit     soft_targets: T^2 x KL, summed over classes, mean over rows
    DistilBERT  the same (`batchmean`); Sanh et al. 2019, arXiv:1910.01108, distiller.py
    PKD         also divided by the number of classes (`mean`); Sun et al. 2019, arXiv:1908.09355, KD_loss.py
    TinyBERT    cross-entropy, also divided by the number of classes, no T^2; Jiao et al. 2019, arXiv:1909.10351
    TextBrewer  cross-entropy, no T^2; Yang et al. 2020, arXiv:2002.12620

To use a weight from one of these implementations here, multiply it first: PKD's by 1/K for K classes, TinyBERT's by
1/(K T^2), TextBrewer's by 1/T^2.

A class with a logit of minus infinity does not exist for its row (an ending that an example does not have).

Shapes: M rows, K classes, D width, B sequences, N heads, S longest sequence, C cells (pairs of tokens of a sequence).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_FEATURE_MAP_EPS = 1e-12
"""Epsilon of TensorFlow's contrib.layers.layer_norm, by which MobileBERT's code normalises feature maps."""


def soft_targets(student_MK: Tensor, teacher_MK: Tensor, temperature: float) -> Tensor:
    """T^2 KL(softmax(teacher / T) || softmax(student / T)) of each row in nats, (M,), in float32.

    Hinton et al. 2015, arXiv:1503.02531, section 2. The factor T^2 preserves the size of the gradient; as T grows, the
    gradient tends to that of half the summed squared difference of the centred logits over K.
    """
    student_MK, teacher_MK = student_MK.float() / temperature, teacher_MK.float() / temperature
    share_MK = torch.softmax(teacher_MK, dim=-1)
    log_share_MK = torch.log_softmax(teacher_MK, dim=-1)
    difference_MK = log_share_MK - torch.log_softmax(student_MK, dim=-1)
    # A class that does not exist has share 0, and minus infinity minus minus infinity is NaN.
    return temperature**2 * (share_MK * difference_MK.masked_fill(share_MK == 0, 0.0)).sum(dim=-1)


def hard_targets(student_MK: Tensor, teacher_MK: Tensor) -> Tensor:
    """Cross-entropy with the teacher's likeliest class as the label, in nats, (M,), in float32."""
    return functional.cross_entropy(student_MK.float(), teacher_MK.argmax(dim=-1), reduction="none")


def logit_squared_error(student_MK: Tensor, teacher_MK: Tensor) -> Tensor:
    """Mean over the classes of the squared difference, (M,), in float32: Ba and Caruana 2014, arXiv:1312.6184."""
    exists_MK = torch.isfinite(teacher_MK)
    difference_MK = (student_MK.float() - teacher_MK.float()).masked_fill(~exists_MK, 0.0)
    return difference_MK.square().sum(dim=-1) / exists_MK.sum(dim=-1)


def state_squared_error(student_MD: Tensor, teacher_MD: Tensor) -> Tensor:
    """Mean over the width of the squared difference of two states, (M,), in float32."""
    return (student_MD.float() - teacher_MD.float()).square().mean(dim=-1)


def normalised_state_squared_error(student_MD: Tensor, teacher_MD: Tensor) -> Tensor:
    """`state_squared_error` of states of length 1: PKD, arXiv:1908.09355, equation 7, with the code's mean over D."""
    return state_squared_error(
        functional.normalize(student_MD.float(), dim=-1), functional.normalize(teacher_MD.float(), dim=-1)
    )


def cosine_distance(student_MD: Tensor, teacher_MD: Tensor) -> Tensor:
    """1 - cos of the angle between two states, (M,), in float32: DistilBERT, arXiv:1910.01108, section 3."""
    return 1 - functional.cosine_similarity(student_MD.float(), teacher_MD.float(), dim=-1)


def feature_map_error(student_MD: Tensor, teacher_MD: Tensor) -> Tensor:
    """`state_squared_error` of states with mean 0 and variance 1: MobileBERT, arXiv:2004.02984, equation 2, as coded.

    The released run_pretraining.py normalises both states, without trained factors, before comparing them.
    """
    width = (student_MD.shape[-1],)
    return state_squared_error(
        functional.layer_norm(student_MD.float(), width, eps=_FEATURE_MAP_EPS),
        functional.layer_norm(teacher_MD.float(), width, eps=_FEATURE_MAP_EPS),
    )


def mean_error(student_MD: Tensor, teacher_MD: Tensor) -> Tensor:
    """Squared difference of the two states' means over their widths, (M,); the widths may differ. MobileBERT, code."""
    return (student_MD.float().mean(dim=-1) - teacher_MD.float().mean(dim=-1)).square()


def variance_error(student_MD: Tensor, teacher_MD: Tensor) -> Tensor:
    """Absolute difference of the two states' variances over their widths, (M,). MobileBERT, code."""
    variances = [states_MD.float().var(dim=-1, unbiased=False) for states_MD in (student_MD, teacher_MD)]
    return (variances[0] - variances[1]).abs()


def cells_of(lengths_B: Tensor, longest: int) -> Tensor:
    """Which cells of maps padded to the longest sequence are pairs of real tokens: bool (B, S, S)."""
    real_BS = torch.arange(longest, device=lengths_B.device) < lengths_B[:, None]
    return real_BS[:, :, None] & real_BS[:, None, :]


def score_squared_error(student_BNSS: Tensor, teacher_BNSS: Tensor, cell_BSS: Tensor, seen_BSS: Tensor) -> Tensor:
    """Squared difference of attention scores before the softmax, averaged over the heads, for each real cell, (C,).

    TinyBERT, arXiv:1909.10351, equation 7. Its code sets the scores of padding to 0 and counts them; here they do not
    exist. Pairs of real tokens that do not attend, such as those with later tokens in a causal model, count as 0.

    Args:
        student_BNSS, teacher_BNSS: other cells have arbitrary values.
        cell_BSS: from `cells_of`.
        seen_BSS: the keys that a query attends to in both models.
    """
    error_BSS = (student_BNSS.float() - teacher_BNSS.float()).square().mean(dim=1)
    return error_BSS.masked_fill(~seen_BSS, 0.0)[cell_BSS]


def pattern_divergence(student_BNSS: Tensor, teacher_BNSS: Tensor, cell_BSS: Tensor, seen_BSS: Tensor) -> Tensor:
    """KL(teacher's attention || student's) in nats, averaged over the heads, for each real query, (T,).

    MobileBERT, arXiv:2004.02984, equation 3.

    Args:
        student_BNSS, teacher_BNSS, cell_BSS, seen_BSS: as for `score_squared_error`.
    """
    real_BS = cell_BSS.diagonal(dim1=1, dim2=2)
    # Queries of padding, which are left out at the end, keep their keys: a softmax needs one.
    hidden_B1SS = (~seen_BSS & real_BS[:, :, None])[:, None]
    logs = [
        torch.log_softmax(scores_BNSS.float().masked_fill(hidden_B1SS, -torch.inf), dim=-1)
        for scores_BNSS in (student_BNSS, teacher_BNSS)
    ]
    difference_BNSS = (logs[1] - logs[0]).masked_fill(hidden_B1SS, 0.0)
    return (logs[1].exp() * difference_BNSS).sum(dim=-1).mean(dim=1)[real_BS]

"""What a student takes of its teacher before the first step, whatever family either is of.

Sanh et al. 2019, DistilBERT, arXiv:1910.01108, section 3, and its released extract_distilbert.py: layers, words and
positions with their norm, and the masked LM's head; segment types and pooler are left. Sun et al. 2020, MobileBERT,
arXiv:2004.02984, section 3.4: embeddings and classifier, no layer. A parameter is taken from the teacher's of the same
name and shape. Sibling student.py makes a student by cutting layers out of its teacher; here it has a configuration of
its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from bertkit.errors import UsageError
from bertkit.models.headed import HeadedModel

_LAYER = re.compile(r"^encoder\.layers\.(\d+)\.")


@torch.no_grad()
def begin_as(
    student: HeadedModel,
    teacher: HeadedModel,
    *,
    layers: Sequence[int] | None,
    embeddings: bool = True,
    head: bool = True,
) -> None:
    """Copy parts of the teacher into the student; what is not taken stays as it is.

    Args:
        student: with its first weights.
        teacher: stays as it is.
        layers: the teacher's, from 0, one for each of the student's; None for none.
        embeddings: all of the encoder that is not in a layer.
        head: heads and pooler, as far as the teacher has them.

    Raises:
        UsageError: a parameter that is to be taken has no counterpart, or one of another shape.
    """
    source = dict(teacher.named_parameters())
    taken = 0
    for name, parameter in student.named_parameters():
        layer = _LAYER.match(name)
        if layer is not None:
            if layers is None:
                continue
            origin, key = _LAYER.sub(f"encoder.layers.{layers[int(layer[1])]}.", name), "layers"
            taken += 1
        elif name.startswith("encoder."):
            if not embeddings:
                continue
            origin, key = name, "embeddings"
        else:
            if not head or not any(each.startswith(f"{name.partition('.')[0]}.") for each in source):
                continue
            origin, key = name, "head"
        found = source.get(origin)
        if found is None or found.shape != parameter.shape:
            has = "none" if found is None else f"one of shape {tuple(found.shape)}"
            raise UsageError(
                f"student.{key}: the student's {name} is of shape {tuple(parameter.shape)}, and the teacher has {has};"
                f" write student.{key}: {'null' if key == 'layers' else 'false'} to draw it anew, or give the"
                " student's model the teacher's widths"
            )
        parameter.copy_(found)
    if layers is not None and not taken:
        raise UsageError(
            f"student.layers: a student of the family {student.encoder.config.model_type} has no layers of its own to"
            " copy; write student.layers: null"
        )

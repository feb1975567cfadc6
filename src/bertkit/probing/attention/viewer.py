"""An HTML page that shows every head's attention on a few sentences; no network, no library, keyboard and mouse.

After the head view of Vig 2019, "A Multiscale Visualization of Attention in the Transformer Model", arXiv:1906.05714.
The page stores the maps in steps of 1/255, which is the precision of its percentages.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

import torch
from torch import Tensor

from bertkit.models.conversion.pruning import HeadNumbers
from bertkit.probing.attention.measure import numbers_from_1

_STEPS = 255
_TEMPLATE = "viewer.html"


@dataclass(frozen=True, eq=False)
class ViewedSentence:
    """A sentence on the page.

    Attributes:
        tokens: tokens as in the vocabulary.
        maps_Ann: maps of all heads, one layer after the other.
    """

    tokens: Sequence[str]
    maps_Ann: Tensor


def viewer_page(title: str, numbers: HeadNumbers, sentences: Sequence[ViewedSentence]) -> str:
    """The page.

    Args:
        title: the model's name.
        numbers: the heads by layer, equally many in each.
        sentences: at least one.
    """
    data = {
        "layers": len(numbers),
        "heads": len(numbers[0]),
        "numbers": numbers_from_1(numbers),
        "sentences": [{"tokens": list(each.tokens), "maps": _packed(each.maps_Ann)} for each in sentences],
    }
    # No token may close the script element.
    written = json.dumps(data, ensure_ascii=True).replace("<", "\\u003c")
    template = files("bertkit.probing.attention").joinpath(_TEMPLATE).read_text(encoding="utf-8")
    return template.replace("@TITLE@", html.escape(title)).replace("@DATA@", written)


def _packed(maps_Ann: Tensor) -> str:
    steps = (maps_Ann * _STEPS).round().clamp(0, _STEPS).to(torch.uint8)
    return base64.b64encode(steps.contiguous().numpy().tobytes()).decode("ascii")

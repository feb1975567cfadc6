"""Tensors that arrive one at a time, and a safetensors file that is written as they arrive.

The format is that of the safetensors library (https://huggingface.co/docs/safetensors): the length of the header in
eight bytes, the header in JSON, and the tensors' bytes. The library's own writer needs all tensors of a file at once;
this one keeps one tensor in memory, so that a rank can write a model that is sharded over many.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bertkit.files import open_to_write

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8


@dataclass(frozen=True)
class TensorStream:
    """Named tensors, each of which can be read once, in order.

    Attributes:
        kinds: data type and shape by name.
        tensors: in the order of `kinds`, contiguous and on the CPU.
    """

    kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    tensors: Iterator[Tensor]

    def drain(self) -> None:
        """Read the remaining tensors, because other ranks wait until each was read."""
        for _ in self.tensors:
            pass


def write_stream(path: Path, stream: TensorStream) -> None:
    """Write a safetensors file, one tensor at a time.

    Raises:
        OSError: the disk is full or failing.
    """
    header: dict[str, object] = {}
    end = 0
    for name, (dtype, shape) in stream.kinds.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with open_to_write(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in stream.tensors:
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)

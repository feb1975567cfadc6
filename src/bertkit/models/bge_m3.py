"""BGE-M3's other two outputs: weights of the words of a text, and a vector for each token.

Chen et al. 2024, M3-Embedding, arXiv:2402.03216, section 3.2; details as in FlagOpen/FlagEmbedding,
FlagEmbedding/inference/embedder/encoder_only/m3.py. A directory of BGE-M3 is one of sentence-transformers with the
dense vectors, and has the linear map of each other output in a file beside them, whose path chooses it. Siblings
splade.py and late_interaction.py have the other models with such vectors. Differs from the released code: the score of
token vectors is the sum over a query's tokens, not their mean, which ranks equally.

Shapes: T packed tokens, B sequences, D width, E width of the vectors, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.models.files.model_files import find_model, read_weights
from bertkit.models.operators.matmul import Linear
from bertkit.text.tokenizer import Tokenizer

SPARSE_FILE, TOKENS_FILE = "sparse_linear.pt", "colbert_linear.pt"
LEXICAL: Literal["lexical"] = "lexical"
"""The pooling mode of the words' weights."""
_NOT_COUNTED = ("pad", "unk", "cls", "sep")


def find_embedder(name: str, *, offline: bool = False) -> Path:
    """The directory of a model, see `find_model`; or the file of one of BGE-M3's outputs in it, if the name ends with
    that of the file: `BAAI/bge-m3/sparse_linear.pt`.

    Raises:
        DataError: there is no such model, or no such file in it.
    """
    directory, _, file = name.rpartition("/")
    if file not in (SPARSE_FILE, TOKENS_FILE):
        return find_model(name, offline=offline)
    path = find_model(directory or ".", offline=offline) / file
    if not path.is_file():
        raise DataError(f"{name}: {directory} has no {file}, as a model of BGE-M3's form does")
    return path


def load_output(path: Path, width: int) -> Linear:
    """The linear map of one of the outputs.

    Args:
        path: its file.
        width: D, of the encoder beside it.

    Raises:
        DataError: the file is damaged, or the map does not read the encoder's states.
    """
    tensors = read_weights(path)
    weight, bias = tensors.get("weight"), tensors.get("bias")
    if tensors.keys() != {"weight", "bias"} or weight is None or bias is None or weight.shape != (len(bias), width):
        raise DataError(f"{path}: expected a linear map of {width} numbers: weight (outputs, {width}) and bias")
    linear = Linear(width, len(bias))
    linear.load_state_dict(tensors)
    return linear


class LexicalWeights(nn.Module):
    """The greatest weight of each word over a sequence's tokens.

    Args:
        linear: from a state to a number, whose positive part is the token's weight.
        tokenizer: of the model, whose special and unknown tokens have no weight.
        vocab_size: V.
    """

    counted_V: Tensor

    def __init__(self, linear: Linear, tokenizer: Tokenizer, vocab_size: int) -> None:
        super().__init__()
        # Not a linear map, so that it stays in single precision, and since products with one column are computed by
        # other kernels for other numbers of rows.
        self.weight_D, self.bias_1 = nn.Parameter(linear.weight[0].detach()), linear.bias
        counted_V = torch.ones(vocab_size)
        counted_V[[number for role in _NOT_COUNTED if (number := _id(tokenizer, role)) is not None]] = 0.0
        self.register_buffer("counted_V", counted_V, persistent=False)

    def forward(self, hidden_TD: Tensor, batch: PackedBatch) -> Tensor:
        """(B, V) in float32."""
        weight_T = torch.relu((hidden_TD.float() * self.weight_D).sum(dim=1) + self.bias_1)
        lengths_B = batch.sequences.cu_seqlens_B1.diff().long()
        sequence_T = torch.repeat_interleave(lengths_B, output_size=batch.num_tokens)
        weights_BV = weight_T.new_zeros(len(lengths_B), len(self.counted_V))
        place_T = sequence_T * len(self.counted_V) + batch.ids_T
        greatest = weights_BV.flatten().scatter_reduce(0, place_T, weight_T * self.counted_V[batch.ids_T], "amax")
        return greatest.view_as(weights_BV)


def _id(tokenizer: Tokenizer, role: str) -> int | None:
    return tokenizer.id(tokenizer.roles[role]) if role in tokenizer.roles else None

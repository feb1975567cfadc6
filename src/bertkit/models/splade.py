"""SPLADE: sparse vectors of texts, with a weight for each word of the vocabulary, most of them 0.

Formal et al. 2021, arXiv:2107.05720 (the sum over tokens), and SPLADE v2, arXiv:2109.10086 (the maximum). The weights
are pooled from the logits of the masked-LM head over all tokens, special ones included, as in the released
transformer_rep.py. Directories are those of `sentence-transformers`: an MLMTransformer and a SpladePooling. Sibling
sentence.py has the dense vectors.

Shapes: T packed tokens, B sequences, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.files import read_json
from bertkit.models.bge_m3 import LEXICAL
from bertkit.models.headed import HeadedModel
from bertkit.models.operators.word_pooling import WordPooling, word_weights

SpladeMode = Literal["splade", "splade_sum"]
SPLADE: dict[str, WordPooling] = {"splade": "max", "splade_sum": "sum"}
"""How the modes pool the tokens' weights of a word: by SPLADE v2, and by its first version."""
WORDS_HEAD = "masked_lm"
"""The head whose logits are pooled."""
ENCODERS, POOLING = ("MLMTransformer", "Transformer"), "SpladePooling"
"""The kinds of modules in modules.json; newer directories have a Transformer whose settings name the task fill-mask."""
_PACKAGE = "sentence_transformers.sparse_encoder.models"


def is_sparse(pooling: Sequence[str]) -> bool:
    """Whether vectors of these pooling modes have a weight for each word of the vocabulary."""
    return any(mode in SPLADE or mode == LEXICAL for mode in pooling)


def pool_words(mode: str, model: HeadedModel, hidden_TD: Tensor, batch: PackedBatch) -> Tensor:
    """The vector of each sequence, (B, V) in float32, from the states of its tokens."""
    return word_weights(model.projection(WORDS_HEAD, hidden_TD), batch.sequences.cu_seqlens_B1, SPLADE[mode])


class MostWords(nn.Module):
    """Keeps the greatest weights of each vector: `max_active_dims` of sentence-transformers."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words = words

    def forward(self, vectors_BV: Tensor) -> Tensor:
        kept_BW = vectors_BV.abs().topk(min(self.words, vectors_BV.shape[1])).indices
        return torch.zeros_like(vectors_BV).scatter(1, kept_BW, vectors_BV.gather(1, kept_BW))

    def extra_repr(self) -> str:
        return str(self.words)


def no_words_head(source: str) -> str:
    """A message that a model has no masked-LM head."""
    return (
        f"{source}: has no masked-LM head, and sparse vectors are pooled from its logits; use a pretrained model with"
        " this head, such as google-bert/bert-base-uncased"
    )


def read_mode(path: Path) -> tuple[SpladeMode]:
    """The mode in a SpladePooling's config.json.

    Raises:
        DataError: the file is damaged, or the pooling is of another kind.
    """
    settings = read_json(path)
    how, activation = settings.get("pooling_strategy", "max"), settings.get("activation_function", "relu")
    if how not in SPLADE.values():
        raise DataError(f"{path}: pooling_strategy is {how!r}; known are {', '.join(SPLADE.values())}")
    if activation != "relu":
        raise DataError(f"{path}: activation_function is {activation!r}; only relu is supported")
    return ("splade",) if how == "max" else ("splade_sum",)


def pooling_json(mode: str, vocab_size: int) -> dict[str, Any]:
    """The contents of a SpladePooling's config.json."""
    return {"pooling_strategy": SPLADE[mode], "activation_function": "relu", "word_embedding_dimension": vocab_size}


MODULE_TYPES = {kind: f"{_PACKAGE}.{kind}" for kind in (ENCODERS[0], POOLING)}
"""Their types in modules.json."""
VERSION_KEYS = {"model_type": "SparseEncoder", "similarity_fn_name": "dot"}
"""The keys of config_sentence_transformers.json in which a directory of sparse vectors differs."""

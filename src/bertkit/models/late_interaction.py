"""Late interaction: a vector for each token of a text, and texts compared token by token.

Khattab and Zaharia 2020, ColBERT, arXiv:2004.12832, section 3: the states are mapped to narrow vectors of length one;
the score of a document is the sum over the query's tokens of the greatest dot product with a token of the document
(MaxSim). Queries are filled up with [MASK] tokens, which are scored but, as in the released code, not attended to.
Punctuation of documents is not scored. Directories are those of sentence-transformers' MultiVectorEncoder; those of
PyLate before version 4, and of ColBERT's own code, are read, too. Sibling sentence.py has one vector per text.

Shapes: T packed tokens, M scored tokens, D width, E width of the vectors, Q queries or their tokens, N documents, C
candidates, L tokens of the longest document, I examples.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bertkit.arrays import Float32Array
from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError, UsageError
from bertkit.files import read_json, write_json
from bertkit.models.attention.self_attention import BiasedAttention, SelfAttention
from bertkit.models.bge_m3 import TOKENS_FILE, load_output
from bertkit.models.encoder import Encoder
from bertkit.models.families.rotary_encoder import LocalRotaryAttention, RotaryAttention
from bertkit.models.files.hub import WEIGHTS_FILE, load_model
from bertkit.models.files.model_files import (
    CONFIG_FILE,
    MODULES_FILE,
    encoder_directory,
    find_weights,
    module_directories,
    read_weights,
    write_safetensors,
)
from bertkit.models.headed import HeadedModel
from bertkit.models.sentence import MASK_MODULE, Dense, Normalise, is_of_colbert, is_of_pylate, modules_after
from bertkit.models.sentence_files import version_settings, write_modules
from bertkit.models.text_reading import (
    SETTINGS_FILE,
    VERSION_FILE,
    TextReading,
    optional_json,
    settings_file,
    stored_length,
    stored_limit,
    whole_number,
)

Expansion = Literal["hidden", "attended"]
"""How queries are filled up: whether tokens attend to the added ones."""

PROJECTION = "projection"
"""The name of the linear map among a model's companions during training."""
METADATA_FILE = "artifact.metadata"
"""The settings of a directory of ColBERT's own code."""
PUNCTUATION = tuple(string.punctuation)
_TOKENS = "token_embeddings"
_PACKAGE = "sentence_transformers.base.modules"
_MASK_TYPE = f"sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.{MASK_MODULE}"
_CELLS = 1 << 24
"""Dot products of tokens that are computed at once."""


@dataclass(frozen=True)
class LateInteraction:
    """Which tokens of queries and documents are read and scored.

    Attributes:
        query_length: maximum number of tokens of a query, special ones included; None: the model's.
        document_length: the same for a document.
        expansion: how shorter queries are filled up with [MASK] tokens to `query_length`; None: they are not.
        skipped: words of the vocabulary that are not scored in documents.
        scores_first: whether the first token, [CLS], is scored.
    """

    query_length: int | None = None
    document_length: int | None = None
    expansion: Expansion | None = None
    skipped: tuple[str, ...] = ()
    scores_first: bool = field(default=True, repr=False)  # not in the fingerprints of models, which say it otherwise


class TokenModel(nn.Module):
    """Computes a vector for each scored token.

    Args:
        model: the encoder.
        modules: applied to the states of tokens, in order.
        interaction: which tokens are read and scored.
        reading: prompts and lower-casing.
        max_tokens: the encoder's limit or less.
    """

    def __init__(
        self,
        model: HeadedModel,
        modules: Sequence[nn.Module],
        interaction: LateInteraction,
        *,
        reading: TextReading | None = None,
        max_tokens: int | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.after = nn.Sequential(*modules)
        self.interaction = interaction
        self.reading = reading or TextReading()
        limit = model.encoder.max_tokens
        self.max_tokens = limit if max_tokens is None else min(max_tokens, limit)

    def forward(self, batch: PackedBatch, scored_T: Tensor) -> Tensor:
        """The vectors of the scored tokens, (M, E)."""
        vectors_TE: Tensor = self.after(self.model(batch))
        # Selected last, so that the number of rows that the map multiplies is the batch's (independent_batches.py).
        return vectors_TE[scored_T]


def check_expansion(encoder: Encoder, length: int, source: str) -> None:
    """Check that tokens of an encoder can attend to the first tokens of their sequence alone.

    Raises:
        UsageError: its attention cannot.
    """
    attentions = [part for part in encoder.modules() if type(part).__name__.endswith("Attention")]
    if not attentions or not all(_hides_keys(part, length) for part in attentions):
        raise UsageError(
            f"{source}: the family {encoder.config.model_type!r} cannot leave the [MASK] tokens of queries out of its"
            f" attention for {length} tokens; set embedding.late_interaction.attend_to_expansion=true, or"
            " embedding.late_interaction.expand_queries=false"
        )


def _hides_keys(part: nn.Module, length: int) -> bool:
    if isinstance(part, LocalRotaryAttention):  # windows are exact if they contain the whole query
        return part.each_side is None or length <= part.each_side
    return type(part) in (SelfAttention, BiasedAttention, RotaryAttention)


def padded(vectors_ME: Tensor, start_N: Tensor, count_N: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of several texts side by side, (N, L, E), with zeros after the last; and where there is a row, (N, L).

    Args:
        vectors_ME: the rows.
        start_N: the first row of each text.
        count_N: its number of rows.
    """
    place_L = torch.arange(int(count_N.max()), device=vectors_ME.device)
    real_NL = place_L < count_N[:, None]
    rows_NLE = vectors_ME[torch.where(real_NL, start_N[:, None] + place_L, 0)]
    return rows_NLE * real_NL[..., None], real_NL


def maxsim(query_IQE: Tensor, document_CLE: Tensor, real_CL: Tensor) -> Tensor:
    """The score of each query with each document, (I, C), in blocks of documents whose products are not kept for the
    backward pass if there are several. Rows of zeros in queries add nothing."""
    queries, tokens, _ = query_IQE.shape
    rows = max(1, _CELLS // max(1, queries * tokens * document_CLE.shape[1]))
    blocks = list(zip(torch.split(document_CLE, rows), torch.split(real_CL, rows), strict=True))
    if len(blocks) == 1 or not torch.is_grad_enabled():
        return torch.cat([_scores(query_IQE, *block) for block in blocks], dim=1)
    return torch.cat([checkpoint(_scores, query_IQE, *block, use_reentrant=False) for block in blocks], dim=1)


def _scores(query_IQE: Tensor, document_CLE: Tensor, real_CL: Tensor) -> Tensor:
    products = query_IQE.flatten(0, 1) @ document_CLE.flatten(0, 1).T
    products_IQCL = products.view(*query_IQE.shape[:2], *document_CLE.shape[:2])
    return products_IQCL.masked_fill(~real_CL, -torch.inf).max(dim=-1).values.sum(dim=1)


def maxsim_of_own(query_IQE: Tensor, document_INLE: Tensor, real_INL: Tensor) -> Tensor:
    """The score of each query with its own documents, (I, N)."""
    products_IQC = query_IQE @ document_INLE.flatten(1, 2).transpose(1, 2)
    products_IQNL = products_IQC.view(*query_IQE.shape[:2], *document_INLE.shape[1:3])
    return products_IQNL.masked_fill(~real_INL[:, None], -torch.inf).max(dim=-1).values.sum(dim=1)


def score(query_QE: Float32Array, document_LE: Float32Array) -> float:
    """The score of one query and one document, whose bits depend on nothing else."""
    return float((query_QE @ document_LE.T).max(axis=1).astype(np.float64).sum())


def all_scores(queries: Sequence[Float32Array], documents: Sequence[Float32Array]) -> Any:
    """The score of each query with each document, (Q, N) in float64; memory is that of `_CELLS` products."""
    found = np.empty((len(queries), len(documents)))
    first = 0
    query_lengths = np.array([len(each) for each in queries])
    starts_Q, query_ME = np.cumsum(query_lengths) - query_lengths, np.concatenate(queries)
    while first < len(documents):
        lengths = np.array([len(each) for each in documents[first : first + 4096]])
        count = max(1, int((lengths.cumsum() * len(query_ME) <= _CELLS).sum()))
        block = np.concatenate(documents[first : first + count])
        greatest_MN = np.maximum.reduceat(query_ME @ block.T, np.cumsum(lengths[:count]) - lengths[:count], axis=1)
        found[:, first : first + count] = np.add.reduceat(greatest_MN.astype(np.float64), starts_Q, axis=0)
        first += count
    return found


def load_token_model(directory: Path) -> TokenModel:
    """Read a directory of a MultiVectorEncoder, of PyLate or of ColBERT's own code, or the file of BGE-M3's output.

    Raises:
        DataError: a file is damaged, or something is not supported.
    """
    if directory.name == TOKENS_FILE:
        return _load_of_m3(directory)
    if is_of_colbert(directory):
        return _load_of_colbert(directory)
    steps = module_directories(directory)
    if not steps or steps[0][0] != "Transformer":
        raise DataError(
            f"{directory / MODULES_FILE}: expected a Transformer first, found {steps[0][0] if steps else 'nothing'}"
        )
    root = steps[0][1]
    model, _ = load_model(root, heads=())
    mask = next((read_json(path / CONFIG_FILE) for kind, path in steps if kind == MASK_MODULE), {})
    others = [step for step in steps[1:] if step[0] != MASK_MODULE]
    modules = modules_after(others, model.encoder.width, reads=_TOKENS)
    version, file = optional_json(directory / VERSION_FILE), settings_file(root)
    settings = optional_json(file)
    reading = TextReading.of(directory, root)
    if is_of_pylate(version):
        # Without a list of its own, it leaves out punctuation.
        words = version.get("skiplist_words")
        settings = _settings_of_pylate(version) | settings
        mask = {"skiplist_words": list(PUNCTUATION) if words is None else words}
        modules += [] if any(isinstance(each, Normalise) for each in modules) else [Normalise()]
        markers = {name: version.get(f"{name}_prefix") or "" for name in ("query", "document")}
        own = {name: reading.prompts.get(name, "").removeprefix(marker) for name, marker in markers.items()}
        reading = reading.with_roles(*(markers[name] + own[name] for name in ("query", "document")))
    interaction = _interaction(settings, file, mask, directory)
    if interaction.expansion == "hidden":
        check_expansion(model.encoder, interaction.query_length or 1, str(directory))
    limit = whole_number(settings, "max_seq_length", file) or stored_length(root)
    return TokenModel(model, modules, interaction, reading=reading, max_tokens=limit).eval()


def _load_of_colbert(directory: Path) -> TokenModel:
    """Read a directory of ColBERT's own code, whose weights have the linear map beside the encoder's. Settings that
    artifact.metadata lacks are those of `MultiVectorEncoder`."""
    model, _ = load_model(directory, heads=())
    weights = find_weights(directory)
    weight_ED = read_weights(weights).get("linear.weight")
    if weight_ED is None or weight_ED.ndim != 2 or weight_ED.shape[1] != model.encoder.width:
        raise DataError(f"{weights}: has no linear.weight of {model.encoder.width} columns, the linear map of ColBERT")
    dense = Dense(weight_ED.shape[1], weight_ED.shape[0], bias=False, activation=nn.Identity())
    dense.linear.load_state_dict({"weight": weight_ED})
    file = directory / METADATA_FILE
    stored = optional_json(file)
    length, attend = stored.get("query_maxlen") or 32, bool(stored.get("attend_to_mask_tokens"))
    expansion = {"strategy": "fixed", "attend": attend, "token": None, "length": length}
    settings = {"document_length": stored.get("doc_maxlen"), "query_expansion": expansion}
    skipped = PUNCTUATION if stored.get("mask_punctuation", True) else ()
    interaction = _interaction(settings, file, {"skiplist_words": list(skipped)}, directory)
    if interaction.expansion == "hidden":
        check_expansion(model.encoder, length, str(directory))
    markers = (("query", "query_token_id", "[unused0]"), ("document", "doc_token_id", "[unused1]"))
    reading = TextReading({role: f"{stored.get(key) or usual} " for role, key, usual in markers})
    limit = stored_length(directory)
    return TokenModel(model, [dense, Normalise()], interaction, reading=reading, max_tokens=limit).eval()


def _load_of_m3(path: Path) -> TokenModel:
    root = encoder_directory(path)
    model, _ = load_model(root, heads=())
    linear = load_output(path, model.encoder.width)
    dense = Dense(linear.in_features, linear.out_features, bias=True, activation=nn.Identity())
    dense.linear = linear
    limit, reading = stored_limit(root), TextReading.of(path.parent, root)
    interaction = LateInteraction(scores_first=False)
    return TokenModel(model, [dense, Normalise()], interaction, reading=reading, max_tokens=limit).eval()


def _settings_of_pylate(version: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a config_sentence_transformers.json of PyLate, under their present names."""
    length, expands = version.get("query_length") or 32, version.get("do_query_expansion", True)
    attend = bool(version.get("attend_to_expansion_tokens", version.get("attend_to_mask_tokens")))
    expansion = {"strategy": "fixed", "attend": attend, "token": None, "length": length} if expands else None
    return {
        "query_length": None if expands else length,
        "document_length": version.get("document_length"),
        "query_expansion": expansion,
    }


def _interaction(settings: Mapping[str, Any], file: Path, mask: Mapping[str, Any], directory: Path) -> LateInteraction:
    """The settings of the modules Transformer and MultiVectorMask.

    Raises:
        DataError: one is of the wrong form, or not supported.
    """
    expansion = settings.get("query_expansion")
    if expansion is not None and not isinstance(expansion, dict):
        raise DataError(f"{file}: query_expansion is {expansion!r:.60}; expected an object or null")
    if expansion is not None and (expansion.get("strategy") != "fixed" or expansion.get("token") is not None):
        raise DataError(
            f"{file}: query_expansion is {expansion}; only the strategy fixed with the mask token is supported"
        )
    if mask.get("keep_only_token_ids") or mask.get("skiplist_tasks", ["document"]) != ["document"]:
        raise DataError(
            f"{directory}: its {MASK_MODULE} has keep_only_token_ids, or skiplist_tasks other than document; this is"
            " not supported"
        )
    skipped = mask.get("skiplist_words") or []
    if not isinstance(skipped, list) or not all(isinstance(word, str) for word in skipped):
        raise DataError(f"{directory}: skiplist_words: expected a list of texts")
    holder, key = (settings, "query_length") if expansion is None else (expansion, "length")
    length = whole_number(holder, key, file)
    how: Expansion | None = None if expansion is None else "attended" if expansion.get("attend") else "hidden"
    return LateInteraction(length, whole_number(settings, "document_length", file), how, tuple(skipped))


def own_projection(model: TokenModel, directory: Path) -> nn.Linear:
    """The linear map of a model that was read from this directory, if it has no other modules.

    Raises:
        DataError: it has others, which cannot be trained here.
    """
    modules = list(model.after)
    dense = [each for each in modules if isinstance(each, Dense)]
    is_plain = len(dense) == 1 and isinstance(dense[0].activation, nn.Identity) and dense[0].linear.bias is None
    if not is_plain or modules[0] is not dense[0] or not isinstance(modules[-1], Normalise):
        raise DataError(
            f"{directory}: has other modules than one linear map without bias and a normalisation, which cannot be"
            " trained here; use only its encoder (a directory without modules.json)"
        )
    return dense[0].linear


def write_token_files(
    directory: Path,
    weight_ED: Tensor,
    interaction: LateInteraction,
    *,
    max_tokens: int,
    reading: TextReading,
) -> None:
    """Write the files that make an encoder's directory a MultiVectorEncoder; sentence_files.py has those of one vector
    per text.

    Args:
        directory: the encoder's.
        weight_ED: of the linear map.
        interaction: which tokens are read and scored.
        max_tokens: of the longest sequence.
        reading: prompts and lower-casing.
    """
    names = {"module_input_name": _TOKENS, "module_output_name": _TOKENS}
    width, inner = weight_ED.shape
    activation = {"activation_function": "torch.nn.modules.linear.Identity"}
    dense = {"in_features": inner, "out_features": width, "bias": False} | activation | names
    mask = {"skiplist_words": list(interaction.skipped), "skiplist_tasks": ["document"], "keep_only_token_ids": None}
    attend = interaction.expansion == "attended"
    expansion = {"strategy": "fixed", "attend": attend, "token": None, "length": interaction.query_length}
    lengths = {
        "max_seq_length": max_tokens,
        "do_lower_case": reading.lowercases,
        "query_length": interaction.query_length,
        "document_length": interaction.document_length,
        "query_expansion": None if interaction.expansion is None else expansion,
    }
    write_json(directory / SETTINGS_FILE, lengths)
    kind = {"model_type": "MultiVectorEncoder", "similarity_fn_name": None}
    write_json(directory / VERSION_FILE, version_settings(reading) | kind)
    (projection, *_) = write_modules(
        directory,
        f"{_PACKAGE}.transformer.Transformer",
        [(f"{_PACKAGE}.dense.Dense", dense), (_MASK_TYPE, mask), (f"{_PACKAGE}.normalize.Normalize", names)],
    )
    weight = weight_ED.detach().float().cpu().contiguous()
    write_safetensors(projection / WEIGHTS_FILE, {"linear.weight": weight})

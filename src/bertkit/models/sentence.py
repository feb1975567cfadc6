"""Sentence encoders: an encoder, a pooling of its states, and further modules.

Reimers and Gurevych 2019, Sentence-BERT, arXiv:1908.10084, section 3. Directories are those of `sentence-transformers`:
modules.json lists the modules; the encoder, the first one, is in the root or in a directory of its own. Unlike the
pooler in headed.py, pooling can use all states, and nothing here is trained for a task. Sibling splade.py has the
pooling of sparse vectors.

Shapes: T packed tokens, B sequences, D width, E width of the vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError, UsageError
from bertkit.files import read_json
from bertkit.models.bge_m3 import LEXICAL, SPARSE_FILE, TOKENS_FILE, LexicalWeights, load_output
from bertkit.models.families.static import load_static, truncation
from bertkit.models.files.hub import load_model, read_config
from bertkit.models.files.model_files import (
    CONFIG_FILE,
    MODULES_FILE,
    encoder_directory,
    find_weights,
    module_directories,
    read_modules,
    read_weights,
)
from bertkit.models.headed import HeadedModel, summarise
from bertkit.models.operators.matmul import Linear
from bertkit.models.similarity import Similarity, read_similarity
from bertkit.models.splade import (
    ENCODERS,
    POOLING,
    WORDS_HEAD,
    MostWords,
    SpladeMode,
    is_sparse,
    no_words_head,
    pool_words,
    read_mode,
)
from bertkit.models.text_reading import (
    VERSION_FILE,
    TextReading,
    optional_json,
    stored_limit,
    whole_number,
)
from bertkit.text.tokenizer_files import load_tokenizer

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
AnyPooling = PoolingMode | SpladeMode | Literal["lexical"]

OLD_POOLING_KEYS: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Older keys in a pooling's config.json, one switch per mode; if several are on, vectors are joined in this order."""

_VECTOR = "sentence_embedding"
"""The name of a text's vector, which the modules after the pooling read and replace."""
MASK_MODULE = "MultiVectorMask"
"""The module of a directory with a vector for each token (late_interaction.py)."""

_DENSE_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "torch.nn.modules.activation.Tanh": nn.Tanh,
    "torch.nn.modules.activation.ReLU": nn.ReLU,
    "torch.nn.modules.activation.GELU": nn.GELU,
    "torch.nn.modules.linear.Identity": nn.Identity,
}


def pool(mode: PoolingMode, hidden_TD: Tensor, batch: PackedBatch) -> Tensor:
    """One vector per sequence from its states, (B, D).

    `mean_sqrt_len_tokens` divides the sum by the square root of the length; `weightedmean` weights a token by its
    position, counted from 1.
    """
    if mode in ("cls", "lasttoken", "mean"):
        return summarise({"cls": "first", "lasttoken": "last", "mean": "mean"}[mode], hidden_TD, batch)  # type: ignore[arg-type]  # values of a dict lose their Literal
    lengths_B = batch.sequences.cu_seqlens_B1.diff().long()
    sequence_T = torch.repeat_interleave(lengths_B, output_size=batch.num_tokens)
    zeros_BD = hidden_TD.new_zeros(lengths_B.numel(), hidden_TD.shape[1])
    if mode == "max":
        index_TD = sequence_T[:, None].expand_as(hidden_TD)
        return zeros_BD.scatter_reduce(0, index_TD, hidden_TD, "amax", include_self=False)
    if mode == "mean_sqrt_len_tokens":
        return zeros_BD.index_add(0, sequence_T, hidden_TD) / lengths_B[:, None].to(hidden_TD.dtype).sqrt()
    weight_T1 = (batch.positions_T + 1)[:, None].to(hidden_TD.dtype)
    weights_B1 = (lengths_B * (lengths_B + 1) // 2)[:, None].to(hidden_TD.dtype)
    return zeros_BD.index_add(0, sequence_T, hidden_TD * weight_T1) / weights_B1


def pooled(model: HeadedModel, pooling: Sequence[AnyPooling], hidden_TD: Tensor, batch: PackedBatch) -> Tensor:
    """One vector per sequence, (B, E): those of several modes are concatenated."""
    if is_sparse(pooling):
        (mode,) = pooling
        return pool_words(mode, model, hidden_TD, batch)
    return torch.cat([pool(mode, hidden_TD, batch) for mode in pooling], dim=-1)  # type: ignore[arg-type]  # none is SPLADE's


SIZE_KEYS = {False: "truncate_dim", True: "max_active_dims"}
"""Keys of the number of numbers that are kept of a vector, dense or sparse."""


class Normalise(nn.Module):
    """Scales vectors to length one."""

    def forward(self, vectors_BE: Tensor) -> Tensor:
        return functional.normalize(vectors_BE, dim=-1)


class Dense(nn.Module):
    """A linear map and an activation after the pooling."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, activation: nn.Module) -> None:
        super().__init__()
        self.linear = Linear(inputs, outputs, bias=bias)
        self.activation = activation

    def forward(self, vectors_BE: Tensor) -> Tensor:
        mapped: Tensor = self.activation(self.linear(vectors_BE))
        return mapped

    def settings(self) -> dict[str, Any]:
        """The contents of its config.json."""
        (name,) = (name for name, kind in _DENSE_ACTIVATIONS.items() if type(self.activation) is kind)
        sizes = {"in_features": self.linear.in_features, "out_features": self.linear.out_features}
        return {**sizes, "bias": self.linear.bias is not None, "activation_function": name}


class Truncate(nn.Module):
    """Keeps the first numbers of vectors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, vectors_BE: Tensor) -> Tensor:
        return vectors_BE[:, : self.width]

    def extra_repr(self) -> str:
        return str(self.width)


class SentenceModel(nn.Module):
    """Computes vectors of texts.

    Args:
        model: the encoder.
        pooling: pooling modes, whose vectors are concatenated.
        modules: modules applied to the pooled vectors, in order.
        max_tokens: the caller truncates texts to this length; None: the encoder's limit.
        reading: what the caller does with a text before it is tokenised; None: nothing.
        pools_prompt: whether the states of a prompt's tokens are pooled; if not, the caller counts them.
        similarity: how its vectors are compared; sparse ones always by the dot product.
    """

    def __init__(
        self,
        model: HeadedModel,
        pooling: Sequence[AnyPooling] = ("mean",),
        modules: Sequence[nn.Module] = (),
        *,
        max_tokens: int | None = None,
        reading: TextReading | None = None,
        pools_prompt: bool = True,
        similarity: Similarity = "cosine",
    ) -> None:
        super().__init__()
        self.model = model
        self.pooling = tuple(pooling)
        self.after_pooling = nn.Sequential(*modules)
        limit = model.encoder.max_tokens
        self.max_tokens = limit if max_tokens is None else min(max_tokens, limit)
        self.reading = reading or TextReading()
        self.pools_prompt = pools_prompt
        self.similarity: Similarity = "dot" if is_sparse(pooling) else similarity

    def forward(self, batch: PackedBatch, unpooled_B: Tensor | None = None) -> Tensor:
        """(B, E). `unpooled_B`: how many of the first tokens of each sequence are not pooled, fewer than it has; None:
        all tokens are pooled."""
        hidden_TD: Tensor = self.model(batch)
        if unpooled_B is None:
            return self.vectors(hidden_TD, batch)
        lengths_B = batch.sequences.cu_seqlens_B1.diff().long()
        kept_T = batch.positions_T >= torch.repeat_interleave(unpooled_B, lengths_B, output_size=batch.num_tokens)
        rows = torch.split(batch.ids_T[kept_T], (lengths_B - unpooled_B).tolist())
        kept = PackedBatch.from_ids([row.tolist() for row in rows]).to(hidden_TD.device)
        return self.vectors(hidden_TD[kept_T], kept)

    def vectors(self, hidden_TD: Tensor, batch: PackedBatch) -> Tensor:
        """(B, E), from the states of all tokens."""
        vectors_BE: Tensor = self.after_pooling(pooled(self.model, self.pooling, hidden_TD, batch))
        return vectors_BE


class LexicalModel(SentenceModel):
    """Computes the weights of a text's words (BGE-M3): the only module after the encoder reads the states."""

    def vectors(self, hidden_TD: Tensor, batch: PackedBatch) -> Tensor:
        (weights,) = self.after_pooling
        vectors_BV: Tensor = weights(hidden_TD, batch)
        return vectors_BV


def load_sentence_model(directory: Path) -> SentenceModel:
    """Read a directory of `sentence-transformers`; any other model directory gets mean pooling. The path of the words'
    weights of BGE-M3 gives these.

    Raises:
        DataError: a file is damaged, or a module is unknown.
        UsageError: the model computes a vector for each token.
    """
    if is_token_encoder(directory):
        raise UsageError(
            f"{directory}: computes a vector for each token (ColBERT), not one for a text; `bertkit search --rerank`,"
            " `bertkit eval retrieval` and /rerank of `bertkit serve` score texts with it"
        )
    if directory.name == SPARSE_FILE:
        return _load_lexical(directory)
    if not (directory / MODULES_FILE).is_file():
        model, _ = load_model(directory, heads=())
        return SentenceModel(model).eval()
    listed, steps = directory / MODULES_FILE, module_directories(directory)
    if steps and steps[0][0] == "StaticEmbedding":
        table, cut = load_static(steps[0][1]), truncation(steps[0][1] / "tokenizer.json")
        after = [*modules_after(steps[1:], table.encoder.width), *_shortened(directory, sparse=False)]
        reading = TextReading.of(directory, steps[0][1])
        similarity = read_similarity(directory / VERSION_FILE)
        return SentenceModel(table, modules=after, max_tokens=cut, reading=reading, similarity=similarity).eval()
    _check_first(listed, [kind for kind, _ in steps])
    (_, root), (kind, pooling), *modules = steps
    heads = (WORDS_HEAD,) if kind == POOLING else ()
    model, report = load_model(root, heads=heads)
    if heads and report.newly_initialised:
        raise DataError(no_words_head(str(root)))
    reading = TextReading.of(directory, root)
    modes, pools_prompt = _modes(kind, pooling / CONFIG_FILE)
    width = model.encoder.vocab_size if heads else model.encoder.width * len(modes)
    return SentenceModel(
        model,
        modes,
        [*modules_after(modules, width), *_shortened(directory, sparse=kind == POOLING)],
        max_tokens=stored_limit(root),
        reading=reading,
        pools_prompt=pools_prompt,
        similarity=read_similarity(directory / VERSION_FILE, sparse=kind == POOLING),
    ).eval()


def _load_lexical(path: Path) -> SentenceModel:
    root = encoder_directory(path)
    model, _ = load_model(root, heads=())
    linear = load_output(path, model.encoder.width)
    if linear.out_features != 1:
        raise DataError(f"{path}: gives {linear.out_features} numbers for a token; expected one, its weight")
    weights = LexicalWeights(linear, load_tokenizer(root), model.encoder.vocab_size)
    limit, reading = stored_limit(root), TextReading.of(path.parent, root)
    return LexicalModel(model, (LEXICAL,), [weights], max_tokens=limit, reading=reading).eval()


def _shortened(directory: Path, *, sparse: bool) -> list[nn.Module]:
    kept = stored_size(directory / VERSION_FILE, sparse=sparse)
    return [] if kept is None else [shortening(kept, sparse=sparse)]


def stored_size(file: Path, *, sparse: bool) -> int | None:
    """How many numbers of a vector are kept, as a config_sentence_transformers.json says; None: all.

    Raises:
        DataError: it is not a whole number of at least 1.
    """
    return whole_number(optional_json(file), SIZE_KEYS[sparse], file)


def shortening(kept: int, *, sparse: bool) -> nn.Module:
    """What keeps the first numbers of dense vectors, or the greatest weights of sparse ones."""
    return MostWords(kept) if sparse else Truncate(kept)


def is_embedder(directory: Path) -> bool:
    """Whether a directory of `sentence-transformers` pools states. A cross-encoder of version 6 also has modules.json,
    but with only a Transformer."""
    return not _kinds(directory).isdisjoint(("Pooling", POOLING, "StaticEmbedding"))


def is_sparse_embedder(directory: Path) -> bool:
    """Whether a directory of `sentence-transformers`, or a file of BGE-M3, has sparse vectors."""
    return directory.name == SPARSE_FILE or POOLING in _kinds(directory)


def is_token_encoder(directory: Path) -> bool:
    """Whether a directory of `sentence-transformers`, PyLate or ColBERT's own code, or a file of BGE-M3, has a vector
    for each token."""
    if directory.name == TOKENS_FILE:
        return True
    kinds, version = _kinds(directory), optional_json(directory / VERSION_FILE)
    is_named = version.get("model_type") == "MultiVectorEncoder" or is_of_pylate(version)
    return MASK_MODULE in kinds or (is_named and bool(kinds) and "Pooling" not in kinds) or is_of_colbert(directory)


def is_of_colbert(directory: Path) -> bool:
    """Whether ColBERT's own code wrote a directory (colbert-ir/colbertv2.0)."""
    architectures = () if _kinds(directory) else optional_json(directory / CONFIG_FILE).get("architectures")
    return "HF_ColBERT" in (architectures or ())


def is_of_pylate(version: Mapping[str, Any]) -> bool:
    """Whether PyLate before version 4 wrote this config_sentence_transformers.json, with or without a model_type."""
    kind = version.get("model_type")
    return kind == "ColBERT" or (kind in (None, "SentenceTransformer") and "query_prefix" in version)


def _kinds(directory: Path) -> set[str]:
    """The kinds of modules in a directory of `sentence-transformers`; none in any other."""
    listed = directory / MODULES_FILE
    return {module.kind for module in read_modules(listed)} if listed.is_file() else set()


def read_pooling(directory: Path) -> tuple[tuple[AnyPooling, ...], list[nn.Module]]:
    """The pooling of a directory of `sentence-transformers`, and the modules after it.

    Raises:
        DataError: a file is damaged, or the modules do not begin with an encoder and a pooling.
    """
    steps = module_directories(directory)
    kinds = tuple(kind for kind, _ in steps)
    _check_first(directory / MODULES_FILE, kinds)
    file, reading = steps[1][1] / CONFIG_FILE, TextReading.of(directory, steps[0][1])
    modes, pools_prompt = _modes(kinds[1], file)
    if reading.default_prompt and not pools_prompt:
        raise DataError(f"{file}: include_prompt is false, but the model has a prompt; this cannot be trained")
    with torch.device("meta"):
        width = read_config(steps[0][1])[0].build(1).width * len(modes)
    return modes, modules_after(steps[2:], width)


def _check_first(listed: Path, kinds: Sequence[str]) -> None:
    """Check that the first two modules are an encoder and a pooling of its output.

    Raises:
        DataError: they are not.
    """
    first, second = (*kinds, "", "")[:2]
    if (first, second) != ("Transformer", "Pooling") and not (first in ENCODERS and second == POOLING):
        raise DataError(
            f"{listed}: expected a Transformer and a Pooling first, or {ENCODERS[0]} and {POOLING}, found"
            f" {', '.join(kinds) or 'nothing'}"
        )


def modules_after(steps: Sequence[tuple[str, Path]], width: int, *, reads: str = _VECTOR) -> list[nn.Module]:
    """The modules for vectors of this width, which they read and replace under the name `reads`.

    Raises:
        DataError: a file is damaged, a module is unknown, or it reads something other than those vectors.
    """
    modules: list[nn.Module] = []
    for kind, path in steps:
        if kind not in ("Dense", "Normalize"):
            raise DataError(
                f"{path}: a module of type {kind} is not supported; known are Transformer, Pooling, Dense, Normalize"
            )
        settings = optional_json(path / CONFIG_FILE)
        for key in ("module_input_name", "module_output_name"):
            if settings.get(key) not in (None, reads):
                raise DataError(f"{path / CONFIG_FILE}: {key} is {settings[key]!r}; only {reads!r} is supported")
        if kind == "Normalize":
            modules.append(Normalise())
            continue
        dense = _dense(path)
        if dense.linear.in_features != width:
            raise DataError(
                f"{path / CONFIG_FILE}: in_features is {dense.linear.in_features}, but the vectors that it reads have"
                f" {width} numbers"
            )
        modules.append(dense)
        width = dense.linear.out_features
    return modules


def _dense(path: Path) -> Dense:
    file = path / CONFIG_FILE
    settings = read_json(file)
    if settings.get("use_residual", False):
        raise DataError(f"{file}: use_residual is true; only a Dense module without it is supported")
    name = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh"))
    if name not in _DENSE_ACTIVATIONS:
        raise DataError(f"{file}: activation_function is {name!r}; known are {', '.join(_DENSE_ACTIVATIONS)}")
    inputs, outputs = (whole_number(settings, key, file) for key in ("in_features", "out_features"))
    if inputs is None or outputs is None:
        raise DataError(f"{file}: in_features or out_features is missing; give both")
    activation = _DENSE_ACTIVATIONS[name]()
    dense = Dense(inputs, outputs, bias=bool(settings.get("bias", True)), activation=activation)
    weights = find_weights(path)
    try:
        dense.load_state_dict(read_weights(weights))
    except (RuntimeError, SafetensorError) as error:
        raise DataError(f"{weights}: {error}") from error
    return dense


def _modes(kind: str, path: Path) -> tuple[tuple[AnyPooling, ...], bool]:
    """The modes of a pooling of this kind, and whether it includes the tokens of a prompt.

    Raises:
        DataError: a mode is unknown, or cannot leave out a prompt.
    """
    if kind == POOLING:
        return read_mode(path), True
    settings = read_json(path)
    pools_prompt = bool(settings.get("include_prompt", True))
    modes = settings.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in OLD_POOLING_KEYS.items() if settings.get(key)] or ["mean"]
    modes = tuple(modes) if isinstance(modes, list) else (modes,)
    if not modes or not all(mode in get_args(PoolingMode) for mode in modes):
        given = settings["pooling_mode"]
        raise DataError(f"{path}: pooling_mode is {given!r}; known are {', '.join(get_args(PoolingMode))}")
    if not pools_prompt and "weightedmean" in modes:
        raise DataError(f"{path}: include_prompt is false, which is not supported with the pooling_mode weightedmean")
    return modes, pools_prompt

"""Sentence encoders: an encoder, a pooling of its states, and further modules.

Reimers and Gurevych 2019, Sentence-BERT, arXiv:1908.10084, section 3. Directories are those of `sentence-transformers`:
modules.json lists the modules; the encoder is in the root or in 0_Transformer. Unlike the pooler in headed.py, pooling
can use all states, and nothing here is trained for a task.

Shapes: T packed tokens, B sequences, D width, E width of the vectors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import tokenizers
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.files import file_within, read_json, read_json_file
from bertkit.models.families.static import load_static
from bertkit.models.files.hub import load_model
from bertkit.models.files.model_files import CONFIG_FILE, MODULES_FILE, find_weights, read_weights
from bertkit.models.headed import HeadedModel, summarise
from bertkit.models.operators.matmul import Linear

SETTINGS_FILE = "sentence_bert_config.json"
VERSION_FILE = "config_sentence_transformers.json"
_SETTINGS_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""The settings of an encoder module, under all names that `sentence-transformers` has used for them."""

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]

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


class SentenceModel(nn.Module):
    """Computes vectors of texts.

    Args:
        model: the encoder.
        pooling: pooling modes, whose vectors are concatenated.
        modules: modules applied to the pooled vectors, in order.
        max_tokens: the caller truncates texts to this length; None: the encoder's limit.
        lowercases: whether texts are lower-cased before they are tokenised.
        prompt: prefix of every text.
    """

    def __init__(
        self,
        model: HeadedModel,
        pooling: Sequence[PoolingMode] = ("mean",),
        modules: Sequence[nn.Module] = (),
        *,
        max_tokens: int | None = None,
        lowercases: bool = False,
        prompt: str = "",
    ) -> None:
        super().__init__()
        self.model = model
        self.pooling = tuple(pooling)
        self.after_pooling = nn.Sequential(*modules)
        limit = model.encoder.max_tokens
        self.max_tokens = limit if max_tokens is None else min(max_tokens, limit)
        self.lowercases = lowercases
        self.prompt = prompt

    def forward(self, batch: PackedBatch) -> Tensor:
        """(B, E)."""
        hidden_TD = self.model(batch)
        pooled_BE = torch.cat([pool(mode, hidden_TD, batch) for mode in self.pooling], dim=-1)
        vectors_BE: Tensor = self.after_pooling(pooled_BE)
        return vectors_BE


def load_sentence_model(directory: Path) -> SentenceModel:
    """Read a directory of `sentence-transformers`; any other model directory gets mean pooling.

    Raises:
        DataError: a file is damaged, or a module is unknown.
    """
    if not (directory / MODULES_FILE).is_file():
        model, _ = load_model(directory, heads=())
        return SentenceModel(model).eval()
    listed = directory / MODULES_FILE
    steps = [(step.kind, file_within(directory, step.path, listed)) for step in read_modules(listed)]
    prompt = _default_prompt(directory / VERSION_FILE)
    if steps and steps[0][0] == "StaticEmbedding":
        table, cut = load_static(steps[0][1]), _truncation(steps[0][1] / "tokenizer.json")
        after = _after_pooling(steps[1:], table.encoder.width)
        return SentenceModel(table, modules=after, max_tokens=cut, prompt=prompt).eval()
    if [kind for kind, _ in steps[:2]] != ["Transformer", "Pooling"]:
        raise DataError(
            f"{directory / MODULES_FILE}: expected a Transformer and a Pooling first, found"
            f" {', '.join(kind for kind, _ in steps) or 'nothing'}"
        )
    (_, root), (_, pooling), *modules = steps
    model, _ = load_model(root, heads=())
    file = settings_file(root)
    settings = _optional(file)
    modes = _pooling_modes(pooling / CONFIG_FILE, has_prompt=bool(prompt))
    return SentenceModel(
        model,
        modes,
        _after_pooling(modules, model.encoder.width * len(modes)),
        max_tokens=_whole(settings, "max_seq_length", file) or _tokenizer_limit(root),
        lowercases=bool(settings.get("do_lower_case", False)),
        prompt=prompt,
    ).eval()


def settings_file(root: Path) -> Path:
    """The settings file of an encoder module: the first of its possible names that exists, or the usual one."""
    return next((root / name for name in _SETTINGS_FILES if (root / name).is_file()), root / SETTINGS_FILE)


@dataclass(frozen=True)
class TextReading:
    """What an embedder does with a text before it is tokenised.

    Attributes:
        prompts: by name.
        default: name of the prompt that is before every text; None: no prompt is.
        lowercases: whether texts are lower-cased, together with the prompt.
    """

    prompts: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None
    lowercases: bool = False

    @classmethod
    def of(cls, directory: Path, encoder: Path) -> TextReading:
        """Of a directory of `sentence-transformers` and its encoder's.

        Raises:
            DataError: a file is damaged.
        """
        prompts = read_prompts(directory / VERSION_FILE)
        name = _optional(directory / VERSION_FILE).get("default_prompt_name")
        lowercases = bool(_optional(settings_file(encoder)).get("do_lower_case", False))
        return cls(prompts, name if name in prompts else None, lowercases)

    def __call__(self, text: str) -> str:
        """The text that is tokenised."""
        whole = text if self.default is None else self.prompts[self.default] + text
        return whole.lower() if self.lowercases else whole


def read_prompts(path: Path) -> dict[str, str]:
    """The prompts in a config_sentence_transformers.json by name, without empty ones.

    Raises:
        DataError: they are not texts.
    """
    prompts = _optional(path).get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(each, str | None) for each in prompts.values()):
        raise DataError(f"{path}: prompts: expected texts by name")
    return {name: text for name, text in prompts.items() if text}


def _default_prompt(path: Path) -> str:
    """The directory's default prompt, the prefix of every text; empty if there is none."""
    name = _optional(path).get("default_prompt_name")
    return "" if name is None else read_prompts(path).get(str(name), "")


def is_embedder(directory: Path) -> bool:
    """Whether a directory of `sentence-transformers` pools states. A cross-encoder of version 6 also has modules.json,
    but with only a Transformer."""
    listed = directory / MODULES_FILE
    return listed.is_file() and any(module.kind in ("Pooling", "StaticEmbedding") for module in read_modules(listed))


def read_pooling(directory: Path) -> tuple[tuple[PoolingMode, ...], tuple[str, ...]]:
    """The pooling of a directory of `sentence-transformers`, and the kinds of modules after it.

    Raises:
        DataError: a file is damaged, or the modules do not begin with an encoder and a pooling.
    """
    listed = directory / MODULES_FILE
    modules = read_modules(listed)
    kinds = tuple(module.kind for module in modules)
    if kinds[:2] != ("Transformer", "Pooling"):
        raise DataError(f"{listed}: expected a Transformer and a Pooling first, found {', '.join(kinds) or 'nothing'}")
    has_prompt = bool(_default_prompt(directory / VERSION_FILE))
    path = file_within(directory, modules[1].path, listed) / CONFIG_FILE
    return _pooling_modes(path, has_prompt=has_prompt), kinds[2:]


class ModuleEntry(NamedTuple):
    """An entry of modules.json: its kind, such as Pooling, and its directory below the model's."""

    kind: str
    path: str


def read_modules(path: Path) -> list[ModuleEntry]:
    """The modules of a modules.json in order; callers check the names of directories with `file_within`.

    Raises:
        DataError: the file does not contain a list of modules.
    """
    steps = read_json_file(path)
    if not isinstance(steps, list) or not all(map(_is_module, steps)):
        raise DataError(f"{path}: expected a list of modules, each with a type and path (texts) and an idx (integer)")
    ordered = sorted(steps, key=lambda step: int(step.get("idx", 0)))
    return [ModuleEntry(step["type"].rpartition(".")[2], step.get("path", "")) for step in ordered]


def _is_module(step: Any) -> bool:
    return (
        isinstance(step, dict)
        and isinstance(step.get("type"), str)
        and isinstance(step.get("path", ""), str)
        and isinstance(step.get("idx", 0), int)
    )


def _after_pooling(steps: Sequence[tuple[str, Path]], width: int) -> list[nn.Module]:
    """The modules for pooled vectors of this width.

    Raises:
        DataError: a file is damaged, a module is unknown, or it reads something other than those vectors.
    """
    modules: list[nn.Module] = []
    for kind, path in steps:
        if kind not in ("Dense", "Normalize"):
            raise DataError(
                f"{path}: a module of type {kind} is not supported; known are Transformer, Pooling, Dense, Normalize"
            )
        settings = _optional(path / CONFIG_FILE)
        for key in ("module_input_name", "module_output_name"):
            if settings.get(key) not in (None, _VECTOR):
                raise DataError(f"{path / CONFIG_FILE}: {key} is {settings[key]!r}; only {_VECTOR!r} is supported")
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
    settings = read_json(path / CONFIG_FILE)
    if settings.get("use_residual", False):
        raise DataError(f"{path / CONFIG_FILE}: use_residual is true; only a Dense module without it is supported")
    name = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh"))
    if name not in _DENSE_ACTIVATIONS:
        raise DataError(
            f"{path / CONFIG_FILE}: activation_function is {name!r}; known are {', '.join(_DENSE_ACTIVATIONS)}"
        )
    inputs, outputs = (_whole(settings, key, path / CONFIG_FILE) for key in ("in_features", "out_features"))
    if inputs is None or outputs is None:
        raise DataError(f"{path / CONFIG_FILE}: in_features or out_features is missing; give both")
    dense = Dense(
        inputs,
        outputs,
        bias=bool(settings.get("bias", True)),
        activation=_DENSE_ACTIVATIONS[name](),
    )
    weights = find_weights(path)
    try:
        dense.load_state_dict(read_weights(weights))
    except (RuntimeError, SafetensorError) as error:
        raise DataError(f"{weights}: {error}") from error
    return dense


def _pooling_modes(path: Path, *, has_prompt: bool) -> tuple[PoolingMode, ...]:
    settings = read_json(path)
    if has_prompt and not settings.get("include_prompt", True):
        raise DataError(f"{path}: include_prompt is false, but the model has a prompt; this is not supported")
    modes = settings.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in OLD_POOLING_KEYS.items() if settings.get(key)] or ["mean"]
    modes = (modes,) if isinstance(modes, str) else tuple(modes) if isinstance(modes, list) else (modes,)
    unknown = [mode for mode in modes if mode not in get_args(PoolingMode)]
    if unknown:
        raise DataError(f"{path}: pooling_mode is {unknown[0]!r}; known are {', '.join(get_args(PoolingMode))}")
    return modes


def _truncation(path: Path) -> int | None:
    """The length to which a tokenizer.json itself truncates texts, which sentence-transformers does for a table."""
    if not path.is_file():
        return None
    try:
        settings = tokenizers.Tokenizer.from_file(str(path)).truncation
    except Exception as error:  # a plain one for every fault of a file
        raise DataError(f"{path}: not a readable tokenizer file: {error}") from error
    return None if settings is None else int(settings["max_length"])


def _tokenizer_limit(root: Path) -> int | None:
    """The maximum length where sentence-transformers 6 stores it; older versions use sentence_bert_config.json."""
    limit = _optional(root / "tokenizer_config.json").get("model_max_length")
    return int(limit) if isinstance(limit, int | float) and 1 <= limit < math.inf else None


def _whole(settings: Mapping[str, Any], key: str, path: Path) -> int | None:
    """A number in a file; None if the key is missing.

    Raises:
        DataError: it is not a whole number of at least 1.
    """
    value = settings.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise DataError(f"{path}: {key} is {value!r}; expected a whole number of at least 1")
    return value


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}

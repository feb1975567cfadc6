"""Adapters of PEFT: the low-rank updates of a model that is stored elsewhere, as changes of its tensors and settings.

Hu et al. 2021, LoRA, arXiv:2106.09685, section 4.1; Kalajdzievski 2023, rsLoRA, arXiv:2312.03732; Liu et al. 2024,
DoRA, arXiv:2402.09353, section 4. Files of `peft`: adapter_config.json and adapter_model.safetensors, whose names are
those of the model's class in `transformers`, after `base_model.model.`. Sibling model_files.py finds the model, and
writes the merged one to the cache; adapter_writing.py is the inverse, for the method `lora`.

Shapes: D width in, F width out, R rank.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from bertkit.errors import DataError
from bertkit.files import read_json
from bertkit.models.labels import Labels

ADAPTER_FILE = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
HEADS = {
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
}
"""The ending of the model's class for each task_type that has a head of its own."""
_CLASSIFIER = re.compile(r"(^|\.)(classifier|(classifier|classification_head)\.out_proj|score|logits_proj)\.weight$")
"""The names of weights that have a row per label."""
_UNSUPPORTED = (
    *("use_qalora", "use_bdlora", "kasa_config", "monteclora_config", "arrow_config"),
    *("layer_replication", "target_parameters", "trainable_token_indices", "alora_invocation_tokens"),
)
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Initial values of `init_lora_weights` for which the model's own weights are those that it was published with."""
TASKS = ("retrieval.query", "retrieval.passage", "separation", "classification", "text-matching")
"""The tasks of jina-embeddings-v3 (Sturua et al. 2024, arXiv:2409.10173, section 4), whose files have updates for each
of them beside the weights; families/jina_embeddings_v3.py."""
_PARAMETRISED = ".parametrizations.weight."
_MERGE = "merge it into its model with PEFT (merge_and_unload), and save that"


def with_task(tensors: Mapping[str, Tensor], contents: Mapping[str, Any], task: str, source: str) -> dict[str, Tensor]:
    """The tensors of jina-embeddings-v3 with the updates of one of its tasks, and without the others.

    Args:
        tensors: its matrices in the form of torch's parametrisations, each with the updates of all tasks.
        contents: its config.json.
        task: one of `TASKS`.
        source: the model's name, for messages.

    Raises:
        DataError: the model has no updates for the task, or lacks some of them.
    """
    tasks = contents.get("lora_adaptations") or ()
    if task not in tasks:
        raise DataError(f"{source}: has no updates for the task {task}; it has {', '.join(tasks) or 'none'}")
    number, scale = tasks.index(task), contents.get("lora_alpha", 1) / contents.get("lora_rank", 4)
    found = {}
    for name, tensor in tensors.items():
        stem, inner, leaf = name.partition(_PARAMETRISED)
        if not inner:
            found[name] = tensor
        elif leaf == "original":
            try:
                first, second = (tensors[f"{stem}{inner}0.lora_{part}"][number].float() for part in "AB")
            except (KeyError, IndexError) as error:
                raise DataError(f"{source}: {stem} has no update for the task {task}") from error
            # The first factor of a table has its rows, that of a linear map its columns.
            update = first @ second if stem.endswith("embeddings") else second @ first
            found[f"{stem}.weight"] = tensor.float() + scale * update
    return found


def adapter_settings(directory: Path) -> dict[str, Any]:
    """The settings of an adapter.

    Raises:
        DataError: it is not of LoRA, has a setting that is not supported, or does not name its model.
    """
    path = directory / ADAPTER_FILE
    settings = read_json(path)
    if settings.get("peft_type") != "LORA":
        raise DataError(f"{path}: peft_type is {settings.get('peft_type')!r}; only LORA can be read; {_MERGE}")
    start = settings.get("init_lora_weights")
    unknown = [key for key in _UNSUPPORTED if settings.get(key)]
    if unknown or start not in _PLAIN_STARTS:
        key = unknown[0] if unknown else "init_lora_weights"
        raise DataError(f"{path}: {key} is {settings[key]!r:.60}, which cannot be read; {_MERGE}")
    if not isinstance(settings.get("base_model_name_or_path"), str):
        raise DataError(f"{path}: base_model_name_or_path must name the model that the adapter was trained on")
    if not (directory / ADAPTER_WEIGHTS).is_file():
        raise DataError(f"{directory}: an adapter without {ADAPTER_WEIGHTS}; {_MERGE}")
    return settings


def merge(
    tensors: dict[str, Tensor], adapter: Mapping[str, Tensor], settings: Mapping[str, Any], *, source: Path
) -> None:
    """Change a model's tensors by those of an adapter: whole ones replace the model's, or are new.

    Raises:
        DataError: the adapter is of another model, or updates an embedding.
    """
    updates: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for full_name, tensor in adapter.items():
        name = full_name.removeprefix("base_model.model.")
        name = name.replace(".modules_to_save.", ".").replace(".base_layer.", ".")
        module, is_update, part = name.partition(".lora_")
        if is_update:
            updates[module][part.removesuffix(".weight")] = tensor.float()
        elif ".original_module." not in name:
            tensors[next(_places(name, tensors), name)] = tensor
    for module, parts in updates.items():
        if "embedding_A" in parts:
            raise DataError(
                f"{source / ADAPTER_WEIGHTS}: {module} is an embedding, whose update cannot be read; {_MERGE}"
            )
        place = next(_places(f"{module}.weight", tensors), None)
        if place is None:
            raise DataError(
                f"{source / ADAPTER_WEIGHTS}: {module} is not in the adapter's model; is that another model?"
            )
        try:
            tensors[place] = _updated(tensors[place].float(), parts, module, settings).contiguous()
            if "B.bias" in parts:
                bias = next(_places(f"{module}.bias", tensors))
                tensors[bias] = tensors[bias] + _scale(module, parts["A"].shape[0], settings) * parts["B.bias"]
        except (KeyError, RuntimeError, StopIteration) as error:
            raise DataError(
                f"{source / ADAPTER_WEIGHTS}: {module} does not fit the adapter's model: {error!r}"
            ) from error


def _places(name: str, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """The names under which a model's file may have this tensor: a bare encoder's lack the prefix of its class."""
    if name in tensors:
        yield name
    yield from (each for each in tensors if each.endswith(f".{name}") or name.endswith(f".{each}"))


def _updated(weight: Tensor, parts: Mapping[str, Tensor], module: str, settings: Mapping[str, Any]) -> Tensor:
    """W + scale * B A, whose rows DoRA gives the lengths of a vector; GPT-2's linear maps store W the other way round
    (`fan_in_fan_out`)."""
    transposed = bool(settings.get("fan_in_fan_out"))
    update_FD = _scale(module, parts["A"].shape[0], settings) * (parts["B"] @ parts["A"])
    whole_FD = (weight.T if transposed else weight) + update_FD
    if "magnitude_vector" in parts:
        whole_FD = whole_FD * (parts["magnitude_vector"].flatten() / whole_FD.norm(dim=1))[:, None]
    return whole_FD.T if transposed else whole_FD


def _scale(module: str, rank: int, settings: Mapping[str, Any]) -> float:
    patterns = settings.get("alpha_pattern") or {}
    alphas = [alpha for pattern, alpha in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module)]
    alpha = float(alphas[0] if alphas else settings["lora_alpha"])
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def changed_config(
    contents: Mapping[str, Any], adapter: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The keys of config.json that an adapter changes: the model's class, and its labels if their number differs."""
    changed: dict[str, Any] = {"dtype": "float32"}
    ending = HEADS.get(str(settings.get("task_type")))
    names = contents.get("architectures") or []
    if ending is not None and names:
        changed["architectures"] = [re.sub(r"(For[A-Z]\w*|LMHeadModel|Model)$", "", names[0]) + ending]
    rows = next((len(tensor) for name, tensor in adapter.items() if _CLASSIFIER.search(name)), None)
    if rows is not None and rows != Labels.from_hub(contents).count:
        changed |= Labels.unnamed(rows).to_hub()
    return changed

"""Writes the low-rank updates of a fine-tuned model as an adapter of PEFT, for the model that it was trained from.

Hu et al. 2021, LoRA, arXiv:2106.09685, section 4.1. Sibling adapters.py reads such files. Some Hub classes have several
maps in one matrix, as GPT-2 and ModernBERT have queries, keys and values: the updates of k of them are one of rank k R,
whose up-projection has a block for each.

Shapes: D width in, F width out, R rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bertkit.files import write_text
from bertkit.models.files.adapters import ADAPTER_FILE, ADAPTER_WEIGHTS, HEADS
from bertkit.models.files.hub import write_config
from bertkit.models.files.model_files import write_safetensors
from bertkit.models.headed import HeadedModel
from bertkit.models.weights import HubForm

ADAPTER = "adapter"
"""The subdirectory of a model with the updates that were merged into it."""
ADAPTED_HEADS = frozenset({"sequence_classification", "token_classification", "span", "multiple_choice"})
"""Heads that belong to a class of their own, and can be part of an adapter."""
_WEIGHT = ".weight"


class LowRank(NamedTuple):
    """An update of a weight, scale * up down: (F, R) and (R, D)."""

    up_FR: Tensor
    down_RD: Tensor


def write_adapter(
    model: HeadedModel,
    updates: Mapping[str, LowRank],
    directory: Path,
    *,
    scale: float,
    base: str,
) -> bool:
    """Write adapter_config.json, adapter_model.safetensors and config.json, which has the labels.

    Args:
        model: with the updates in its weights, and one of `ADAPTED_HEADS`, which is written whole.
        updates: by the name of the weight.
        directory: created.
        scale: alpha over rank.
        base: Hub id or directory of the model without the updates.

    Returns:
        Whether it could be written: PEFT has no updates of matrices in the form of this family.
    """
    form = replace(model.hub_form(), copies={})
    state = {name: tensor.detach().cpu() for name, tensor in model.own_state_dict().items()}
    places = form.hub_names(state)
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    transposed = False
    for hub in dict.fromkeys(places[name] for name in updates):
        parts = {name: tensor for name, tensor in state.items() if places[name] == hub}
        joined = _joined(hub, parts, updates, form)
        if joined is None:
            return False
        update, transposed = joined
        module = hub.removesuffix(_WEIGHT)
        ranks[module] = len(update.down_RD)
        tensors |= {f"{module}.lora_A.weight": update.down_RD, f"{module}.lora_B.weight": update.up_FR}
    whole = form.to_hub({name: tensor for name, tensor in state.items() if not name.startswith("encoder.")})
    prefix = f"{model.encoder.config.hub_prefix}."
    # PEFT wraps a head as a whole, and below the encoder single modules.
    saved = {name.rpartition(".")[0] if name.startswith(prefix) else name.partition(".")[0] for name in whole}
    rank = min(ranks.values())
    architecture = model.architectures[0]
    settings = {
        "peft_type": "LORA",
        "task_type": next((kind for kind, ending in HEADS.items() if architecture.endswith(ending)), None),
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": scale * rank,
        "rank_pattern": {module: own for module, own in ranks.items() if own != rank},
        "alpha_pattern": {module: scale * own for module, own in ranks.items() if own != rank},
        "target_modules": sorted(ranks),
        "modules_to_save": sorted(saved),
        "fan_in_fan_out": transposed,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    directory.mkdir()
    write_config(model, None, directory)
    write_text(directory / ADAPTER_FILE, json.dumps(settings, indent=2, sort_keys=True) + "\n")
    found = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in (tensors | whole).items()}
    write_safetensors(directory / ADAPTER_WEIGHTS, found)
    (directory / ADAPTER_WEIGHTS).chmod((directory / ADAPTER_FILE).stat().st_mode)
    return True


def _joined(
    hub: str, parts: Mapping[str, Tensor], updates: Mapping[str, LowRank], form: HubForm
) -> tuple[LowRank, bool] | None:
    """The update of a matrix in a Hub file, and whether the file has the matrix transposed; None if it is no matrix.

    Args:
        hub: its name.
        parts: the weights that it contains.
        updates: of some of them.
        form: of the file.
    """
    whole = form.to_hub(parts)[hub]
    if not hub.endswith(_WEIGHT) or whole.dim() != 2:
        return None
    own = [name for name in parts if name in updates]
    down_RD = torch.cat([updates[name].down_RD.detach().cpu() for name in own])
    ups = {name: weight.new_zeros(len(weight), len(down_RD)) for name, weight in parts.items()}
    end = 0
    for name in own:
        up_FR = updates[name].up_FR.detach().cpu()
        ups[name][:, end : end + up_FR.shape[1]] = up_FR
        end += up_FR.shape[1]
    up = form.to_hub(ups)[hub]
    transposed = up.shape != (whole.shape[0], len(down_RD))
    return LowRank(up.T if transposed else up, down_RD), transposed

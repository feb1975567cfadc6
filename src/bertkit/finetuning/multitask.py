"""Several tasks with one encoder and a head each: joining their models, and the directory for them.

Liu et al. 2019, MT-DNN, arXiv:1901.11504, section 3: the layers of the encoder are shared by all tasks, and each task
has its own output layer. The pooler is shared too. Sibling trainer.py trains the joined model, in the order of
task_order.py.

    RUN/model/               the shared encoder: what `AutoModel.from_pretrained` loads; if a task is `embedding`, the
                             embedder that all data sets of this kind train
      model.safetensors
      rte/                   a whole model with the head of a task: `--model RUN/model/rte`
        model.safetensors.index.json
        model-00001-of-00002.safetensors      the encoder's file again: a hard link, else a copy
        model-00002-of-00002.safetensors      the head

Quirk: all heads have the dropout of the model's own configuration; the paper uses another for two tasks.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bertkit.errors import UsageError
from bertkit.files import joint_sha256, sha256_of, write_text
from bertkit.finetuning.data import Prepared
from bertkit.models.files.hub import CONFIG_FILE, WEIGHTS_FILE, save_model, write_config, write_tokenizer
from bertkit.models.files.model_files import write_safetensors
from bertkit.models.headed import POOLER, HeadedModel
from bertkit.tasks.base import Task
from bertkit.tasks.embedding.task import Embedding
from bertkit.text.tokenizer import Tokenizer

_SHARED, _OWN = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def task_seed(seed: int, number: int, name: str) -> int:
    """The seed of a task's own draws; for the first or only task, the run's seed."""
    if number == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4], "little")


def require_joinable(tasks: Iterable[Task]) -> None:
    """Refuse several tasks of which one trains vectors with weights of its own, of which each would have others.

    Raises:
        UsageError: one of them trains sparse vectors, token vectors, or maps behind the pooling.
    """
    if any(isinstance(task, Embedding) and (task.form.maps or not task.of_encoder) for task in tasks):
        raise UsageError(
            "task: sparse vectors and token vectors are trained on one data set, and so is a model with Dense modules;"
            " put the rows of all into one file"
        )


def joined(models: Sequence[HeadedModel]) -> HeadedModel:
    """The model that a run trains: the only one, or the first one's encoder, shared by all.

    The others' encoders are dropped. Each model remains usable as a companion of the returned model.
    """
    if len(models) == 1:
        return models[0]
    encoder = models[0].encoder
    poolers = [model.get_submodule(POOLER) for model in models if model.has_pooler]
    whole = HeadedModel(encoder, (POOLER,) if poolers else ())
    if poolers:
        whole.add_module(POOLER, poolers[0])
    whole.extras = dict(models[0].extras)
    for number, model in enumerate(models):
        model.add_module("encoder", encoder)
        if model.has_pooler:
            model.add_module(POOLER, poolers[0])
        whole.companions[str(number)] = model
    return whole


def save_joined(
    whole: HeadedModel, models: Mapping[str, HeadedModel], tokenizer: Tokenizer | None, directory: Path
) -> None:
    """Write the result of `joined`: the model itself, or the shared encoder with one subdirectory per task.

    Args:
        whole: from `joined`.
        models: by task.
        tokenizer: of all of them.
        directory: created if missing.
    """
    save_model(whole, tokenizer, directory)
    if not whole.named_companions():
        return
    shared = whole.hub_form().to_hub({name: tensor.detach() for name, tensor in whole.own_state_dict().items()}).keys()
    for name, model in models.items():
        own = directory / name
        own.mkdir()
        write_config(model, tokenizer, own)
        state = {key: tensor.detach().cpu() for key, tensor in model.own_state_dict().items()}
        tensors = model.hub_form().to_hub(state)
        head = {key: tensor.clone() for key, tensor in tensors.items() if key not in shared}
        write_safetensors(own / _OWN, head)
        (own / _OWN).chmod((own / CONFIG_FILE).stat().st_mode)
        _link(directory / WEIGHTS_FILE, own / _SHARED)
        index = {
            # The hashes make the index unique: it identifies a model of several files.
            "metadata": {
                "total_size": sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
                "sha256": {file: sha256_of(own / file) for file in (_SHARED, _OWN)},
            },
            "weight_map": {key: _SHARED if key in shared else _OWN for key in sorted(tensors)},
        }
        text = json.dumps(index, indent=2, sort_keys=True)
        write_text(own / f"{WEIGHTS_FILE}.index.json", text + "\n")
        if tokenizer is not None:
            write_tokenizer(model, tokenizer, own)


def joint_fingerprints(prepared: Sequence[Prepared]) -> dict[str, str]:
    """Fingerprints of data, tokenizer and model of all tasks together; of a single task, its own."""
    found = [each.fingerprints for each in prepared]
    if len(found) == 1:
        return dict(found[0])
    return {key: joint_sha256(each[key] for each in found) for key in found[0]}


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # not every file system has hard links
        shutil.copyfile(source, target)

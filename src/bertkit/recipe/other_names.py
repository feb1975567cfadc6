"""Where a setting is that was written by its name alone, or by the name that other libraries give it.

Not from a paper. The names are those of transformers' `TrainingArguments` and examples, and of other training loops.
Sibling key_aliases.py has the short names that are accepted; these are only suggested.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, get_args

from pydantic import BaseModel

from bertkit.recipe.named_item import NamedItem

OTHER_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "adam_epsilon": ("eps",),
        "batch_size": ("batch_sequences",),
        "bf16": ("precision",),
        "block_size": ("sequence_length", "max_length"),
        "dataloader_num_workers": ("workers",),
        "eval_steps": ("evaluate_every_steps",),
        "fp16": ("precision",),
        "gradient_accumulation_steps": ("micro_batch_tokens",),
        "gradient_checkpointing": ("activation_checkpointing",),
        "gradient_clipping": ("clip_norm",),
        "label_smoothing_factor": ("label_smoothing",),
        "learning_rate": ("peak",),
        "logging_steps": ("log_every_steps",),
        "lr": ("peak",),
        "lr_scheduler": ("schedule",),
        "lr_scheduler_type": ("schedule",),
        "max_grad_norm": ("clip_norm",),
        "max_seq_length": ("sequence_length", "max_length"),
        "max_steps": ("steps",),
        "mlm_probability": ("rate",),
        "num_epochs": ("epochs",),
        "num_steps": ("steps",),
        "num_train_epochs": ("epochs",),
        "num_workers": ("workers",),
        "optim": ("optimizer",),
        "per_device_train_batch_size": ("batch_sequences",),
        "save_steps": ("save_every_steps",),
        "save_total_limit": ("keep_checkpoints",),
        "seq_length": ("sequence_length", "max_length"),
        "tokenizer": ("tokenizer.path",),
        "torch_compile": ("compile",),
        "train_batch_size": ("batch_sequences",),
        "warmup_ratio": ("warmup_share",),
    }
)
_MOST = 3


def keys_named(schema: type[BaseModel], name: str) -> list[str]:
    """The dotted keys of a recipe that end with this name, or with what it stands for in other libraries: at most
    three, the shortest first.

    Args:
        schema: the recipe's class.
        name: of a setting.
    """
    every = list(_keys(schema))
    for wanted in (*OTHER_NAMES.get(name, ()), name):
        if found := sorted({key for key in every if f".{key}".endswith(f".{wanted}")}, key=_depth):
            return found[:_MOST]
    return []


def _depth(key: str) -> tuple[int, str]:
    return key.count("."), key


def _keys(schema: type[BaseModel], above: str = "") -> Iterator[str]:
    for name, field in schema.model_fields.items():
        yield above + name
        for inner in _settings_in(field.annotation):
            yield from _keys(inner, f"{above}{name}.")


def _settings_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The settings that a key leads to; of a list, only if its items are found by name."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    for argument in get_args(annotation):
        inner = list(_settings_in(argument))
        is_list = getattr(annotation, "__origin__", None) in (list, tuple)
        yield from (each for each in inner if not is_list or issubclass(each, NamedItem))

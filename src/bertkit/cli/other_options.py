"""What to write in place of an option that a command does not have: another option, or a key of the recipe.

Sibling app.py reports the error. recipe/other_names.py has the names of keys; those here are of options alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import get_args, get_type_hints

_OUT = ("--out", "--run-dir", "--to")
_MODEL = ("--model", "--init")
OTHER_OPTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "batch-size": ("--batch",),
        "corpus": ("--data",),
        "cpu": ("--device",),
        "cuda": ("--device",),
        "dataset": ("--data", "--train"),
        "dataset-name": ("--data", "--train"),
        "destination": _OUT,
        "dry-run": ("--plan",),
        "force": ("--fresh",),
        "gpu": ("--device",),
        "input": ("--data", "--train"),
        "learning-rate": ("--lr",),
        "max-len": ("--max-length",),
        "max-seq-length": ("--max-length",),
        "model-name": _MODEL,
        "model-name-or-path": _MODEL,
        "nproc-per-node": ("--nproc",),
        "num-epochs": ("--epochs",),
        "num-proc": ("--workers", "--jobs"),
        "num-train-epochs": ("--epochs",),
        "num-workers": ("--workers", "--jobs"),
        "out": _OUT,
        "output": _OUT,
        "output-dir": _OUT,
        "output-file": _OUT,
        "overwrite": ("--fresh",),
        "overwrite-output-dir": ("--fresh",),
        "per-device-train-batch-size": ("--batch",),
        "resume-from-checkpoint": ("--resume",),
        "run-dir": _OUT,
        "save-dir": _OUT,
        "task-name": ("--task",),
        "test-file": ("--test",),
        "train-batch-size": ("--batch",),
        "train-file": ("--train", "--data"),
        "valid": ("--dev",),
        "validation": ("--dev",),
        "validation-file": ("--dev",),
        "wandb": ("--report-to",),
    }
)
"""Names in other tools, without dashes before them, each with the options that a command may have for it."""


def written_as(option: str, options: Iterable[str], command: str) -> str:
    """What to write in place of an option, as a clause; empty if nothing is known.

    Args:
        option: the unknown one, such as `--batch-size`.
        options: those that the command has.
        command: its name, such as `pretrain`.
    """
    name = option.lstrip("-").replace("_", "-")
    known = set(options)
    if own := next((each for each in OTHER_OPTIONS.get(name, ()) if each in known), None):
        return f"write {own}"
    if "--set" in known and (keys := _keys(command, name.replace("-", "_"))):
        return "write " + " or ".join(f"--set {key}=VALUE" for key in keys)
    return ""


def _keys(command: str, name: str) -> list[str]:
    """The keys of this name in the recipes that a command runs."""
    from bertkit.recipe.other_names import keys_named
    from bertkit.recipe.resolve import KINDS

    if command not in KINDS:
        return []
    made = get_type_hints(import_module(KINDS[command]).from_tree)["return"]
    found = [keys_named(schema, name) for schema in get_args(made) or (made,)]
    return next((keys for keys in found if keys), [])

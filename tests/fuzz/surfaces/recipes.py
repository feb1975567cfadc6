"""Recipes of every kind, `--set`, studies and files of tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from tests.fuzz.hostile import WORDS, damaged_bytes, damaged_json, hostile
from tests.fuzz.surfaces.base import Surface, written

RECIPE: dict[str, Any] = {
    "extends": "bert-tiny",
    "name": "mine",
    "data": {"layout": {"name": "segment-pair"}, "sources": ["a.txt"], "sequence_length": 32, "held_out": 0.1},
    "tokenizer": {"type": "wordpiece", "vocab_size": 300},
    "model": {"family": "bert", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3},
    "objective": [{"masked_lm": {"rate": {"start": 0.3, "end": 0.15}}}, "next_sentence"],
    "optimisation": {
        "optimizer": {"name": "adamw", "betas": [0.9, 0.98]},
        "schedule": {"name": "linear", "peak": 1e-3, "warmup_steps": 3},
        "batch_sequences": 8,
        "steps": 30,
        "stages": [{"share": 0.5, "set": {"data.sequence_length": 16}}, {"share": 0.5}],
        "groups": [{"parameters": "encoder.layers.0.*", "rate": 0.5}],
        "roll_back": {"at_most": 2},
        "spikes": {"deviations": 4.0},
    },
    "engine": {"device": "cpu", "log_every_steps": 3},
}
TASK_RECIPE: dict[str, Any] = {
    "kind": "finetune",
    "task": {"train": "a.csv", "dev": "b.csv", "columns": {"text": "review", "label": "stars"}},
    "model": "some/model",
    "method": {"name": "lora", "rank": 4},
    "optimisation": {"epochs": 2.0, "early_stopping": 2, "schedule": {"peak": 1e-4}},
    "data": {"train_examples": 100},
}
DISTILL_RECIPE: dict[str, Any] = {
    "kind": "distill",
    "teacher": "some/model",
    "task": "mrpc",
    "student": {"layers": "last", "number": 1},
    "distillation": [{"labels": {"weight": 0.3}}, {"hidden_states": {"layers": [[0, 0], [1, 2]]}}],
}


def _yaml_bytes(value: Any) -> bytes:
    return yaml.safe_dump(value, allow_unicode=True).encode("utf-8", "surrogatepass")


def recipes(home: Path) -> list[Surface]:
    """The surfaces."""
    from bertkit.finetuning.recipe import load_own_task
    from bertkit.recipe.resolve import Override, load_any
    from bertkit.study.run import load_study
    from tests.study.tiny_study import STUDY

    scalar_keys = st.sampled_from([1, -3, 2.5, True, None, float("nan"), 10**30])
    keys = [".".join(map(str, place)) for place in _dotted(RECIPE)]
    path = home / "mine.yaml"

    def load(value: Any) -> object:
        return load_any(str(written(path, value if isinstance(value, bytes) else _yaml_bytes(value))))

    valid = st.sampled_from([RECIPE, TASK_RECIPE, DISTILL_RECIPE])
    damaged = valid.flatmap(damaged_json)
    with_odd_keys = st.tuples(damaged, scalar_keys, hostile).map(
        lambda drawn: {**drawn[0], drawn[1]: drawn[2]} if isinstance(drawn[0], dict) else drawn[0]
    )
    task = {"kind": "classification", **TASK_RECIPE["task"]}
    return [
        Surface("recipes", damaged | with_odd_keys, load, 3),
        Surface("recipes, damaged text", valid.map(_yaml_bytes).flatmap(damaged_bytes), load, 2),
        Surface(
            "--set",
            st.tuples(st.sampled_from(keys) | st.sampled_from(WORDS) | st.text("abdo.0²_- ", max_size=20), hostile),
            lambda drawn: load_any("bert-tiny", [Override.parse(f"{drawn[0]}={_yaml_text(drawn[1])}")]),
            3,
        ),
        Surface(
            "studies",
            damaged_json(STUDY),
            lambda value: load_study(str(written(home / "study.yaml", _yaml_bytes(value)))),
        ),
        Surface(
            "task files",
            damaged_json(task).map(_yaml_bytes) | damaged_bytes(_yaml_bytes(task)),
            lambda content: load_own_task(written(home / "task.yaml", content)),
        ),
    ]


def _dotted(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ())
    return ([at] if at else []) + [place for key, item in items for place in _dotted(item, (*at, key))]


def _yaml_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)

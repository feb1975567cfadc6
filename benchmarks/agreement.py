"""Differences from `transformers` for every family and head: the tables of docs/models.md.

Two-layer models with odd sizes and random weights, as in tests/models/cases; sequences of unequal lengths up to the
longest, packed here and padded there. Run from the checkout: `python -m benchmarks.agreement` (a minute).
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tests.models.oracle import (
    Case,
    Inputs,
    all_cases,
    ask_oracle,
    make_inputs,
    make_twins,
    oracle_logits,
)
from tests.models.test_families import points
from tests.models.test_parameter_counts import SIZES, count
from torch import Tensor

from bertkit.models.headed import HeadedModel
from bertkit.models.recorder import Recorder
from bertkit.models.registry import FAMILIES


@dataclass
class Row:
    """A family's line of the table; differences are maxima over all of its cases."""

    classes: set[str] = field(default_factory=set)
    largest: dict[str, float] = field(default_factory=lambda: {"states": 0.0, "logits": 0.0, "gradients": 0.0})

    def add(self, kind: str, ours: Tensor, theirs: Tensor) -> None:
        self.largest[kind] = max(self.largest[kind], float((ours - theirs).detach().abs().max()))


def measure(case: Case, head: str, architecture: str, rows: defaultdict[str, Row]) -> None:
    """Compare one head and return its entry in the family's row."""
    with tempfile.TemporaryDirectory() as directory:
        twins = make_twins(case, architecture, Path(directory))
    row = rows[twins.model.encoder.config.model_type]
    row.classes.add(case.config_class)
    inputs = make_inputs(case, twins.model)
    recorder = Recorder(points(case))
    hidden_TD = twins.model(inputs.batch, recorder)
    logits = twins.model.logits(head, hidden_TD, inputs.batch)
    outputs = ask_oracle(head, twins.oracle, inputs.padded)
    expected = oracle_logits(head, outputs, inputs.real_BS)
    row.add("logits", logits, expected)
    compare_states(case, recorder, outputs, inputs, row)
    logits.square().mean().backward()
    expected.square().mean().backward()
    compare_gradients(twins.model, twins.oracle, row)


def compare_states(case: Case, recorder: Recorder, outputs: Any, inputs: Inputs, row: Row) -> None:
    for layer, state in enumerate(case.states):
        if state is not None:
            ours = recorder.kept[f"blocks.{layer}.hook_resid_post"]
            row.add("states", ours, outputs.hidden_states[state][inputs.real_BS])


def compare_gradients(model: HeadedModel, oracle: Any, row: Row) -> None:
    theirs = dict(oracle.named_parameters(remove_duplicate=False))
    ours = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    for name, gradient in model.hub_form().to_hub(ours).items():
        if theirs[name].grad is not None:
            row.add("gradients", gradient, theirs[name].grad)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    logging.disable(logging.WARNING)
    rows: defaultdict[str, Row] = defaultdict(Row)
    for case in all_cases():
        for head, architecture in case.heads.items():
            measure(case, head, architecture, rows)
    print(
        "| `model_type` | heads | classes of `transformers` | states | logits | gradients |\n|---|---|---|---|---|---|"
    )
    for family, row in sorted(rows.items()):
        classes = ", ".join(f"`{name.removesuffix('Config')}*`" for name in sorted(row.classes))
        figures = " | ".join(f"{row.largest[kind]:.1e}" for kind in ("states", "logits", "gradients"))
        print(f"| `{family}` | {', '.join(FAMILIES[family]().heads())} | {classes} | {figures} |")
    print("\n| model | published, million | embeddings, layers, pooler | with heads |\n|---|---|---|---|")
    for name, size in SIZES.items():
        pooler = ("pooler",) if size.config.pooler_hub_name is not None else ()
        printed = "" if size.published_millions is None else f"{size.published_millions[0]:g}"
        total = f"{count(size.config, size.vocabulary, size.heads):,} ({', '.join(size.heads)})" if size.heads else ""
        print(f"| {name} | {printed} | {count(size.config, size.vocabulary, pooler):,} | {total} |")


if __name__ == "__main__":
    main()

"""Every encoder family with a masked-LM head, trained from scratch on one text at one size: whether each one learns.

    python -m benchmarks.families TEXT --out DIR [--families bert,modernbert] [--peaks 1e-3,3e-3] [--steps 2000]

Three layers, 128 wide, 8,192 words, no dropout, initial standard deviation 0.05 where a family has that setting, the
same samples and masks; one run for each peak learning rate. Families whose layers are another's (`camembert`,
`data2vec-text`, `ernie`, `xlm-roberta`) are left out. Prints the pseudo-perplexity on held-out text by family. The runs
stay in DIR, and a run that is finished is not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from bertkit.models.registry import FAMILIES

SIZES = {
    "hidden_size": 128,
    "embedding_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": 128,
    "initializer_range": 0.05,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
"""Used as far as a family has these settings."""
OF_ONE_FAMILY: dict[str, dict[str, Any]] = {
    "albert": {"num_hidden_groups": 3},
    "big_bird": {"attention_type": "original_full"},
    "mobilebert": {"intra_bottleneck_size": 128},
}
TWINS = {"camembert", "data2vec-text", "ernie", "xlm-roberta"}
RECIPE: dict[str, Any] = {
    "tokenizer": {"type": "wordpiece", "vocab_size": 8192},
    "data": {"layout": {"name": "full-sentences"}, "sequence_length": 64, "static_copies": None},
    "objective": [{"masked_lm": {"rate": 0.15}}],
    "engine": {"evaluate_every_steps": 100_000, "pseudo_perplexity_sequences": 64, "examples": None},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--families", default="")
    parser.add_argument("--peaks", default="1e-3,3e-3")
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    names = options.families.split(",") if options.families else masked_families()
    peaks = [float(each) for each in options.peaks.split(",")]
    found = {name: [trained(name, peak, options) for peak in peaks] for name in names}
    print("| family |", " | ".join(f"peak {peak:g}" for peak in peaks), "|")
    print("|---|" + "---|" * len(peaks))
    for name, figures in sorted(found.items(), key=lambda item: min(item[1])):
        print(f"| `{name}` | {' | '.join(f'{each:.1f}' for each in figures)} |")


def masked_families() -> list[str]:
    """The families with a masked-LM head and layers of their own."""
    kinds = {name: kind for name, kind in FAMILIES.items() if name not in TWINS}
    return [name for name, kind in kinds.items() if name != "marian" and "masked_lm" in kind(**sizes(name)).heads()]


def sizes(family: str) -> dict[str, Any]:
    """The model settings of a family."""
    fields = FAMILIES[family].model_fields
    shared = {key: value for key, value in SIZES.items() if key in fields}
    return {"family": family, **shared, **OF_ONE_FAMILY.get(family, {})}


def trained(family: str, peak: float, options: argparse.Namespace) -> float:
    """The held-out pseudo-perplexity of one run."""
    run = options.out / f"{family}-{peak:g}"
    if not (run / "results.json").exists():
        schedule = {"name": "linear", "peak": peak, "warmup_share": 0.1}
        optimisation = {"schedule": schedule, "batch_sequences": 32, "steps": options.steps}
        recipe = {**RECIPE, "model": sizes(family), "optimisation": optimisation}
        file = options.out / f"{family}-{peak:g}.yaml"
        options.out.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(recipe))
        command = [
            sys.executable,
            "-m",
            "bertkit",
            "pretrain",
            str(file),
            "--data",
            options.text,
            "--run-dir",
            str(run),
        ]
        subprocess.run([*command, "--quiet"], check=True)
    results = json.loads((run / "results.json").read_text())
    return float(results["held_out"]["pseudo_perplexity"])


if __name__ == "__main__":
    main()

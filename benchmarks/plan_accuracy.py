"""Compare `--plan` with the planned run: parameters, FLOPs and peak resident memory of ten short runs.

    python -m benchmarks.plan_accuracy --text TEXT --data DATA --model MODEL --out FOLDER [--only NAME ...]

TEXT is a plain text file of about a megabyte, DATA the folder of the tasks' official files (`glue/`, `conll2003/`),
MODEL a BERT of some 20 M parameters that is fine-tuned. Each plan and each run is a separate process. The peak reported
by the operating system is compared with `memory_mb`, the operations counted in the steps with `flops`, and the weights
in the last checkpoint with `parameters`. A table in Markdown is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SHORT = (
    "--set engine.keep_checkpoints=1 --set engine.evaluation_sequences=32 --set engine.pseudo_perplexity_sequences=0"
)
RUNS = {
    "bert-tiny": f"pretrain bert-tiny --data TEXT --set optimisation.batch_sequences=32 --max-steps 16 {SHORT}",
    "bert-tiny, float32": "pretrain bert-tiny --data TEXT --set optimisation.batch_sequences=32 --max-steps 16"
    f" --precision fp32 {SHORT}",
    "quickstart": f"pretrain quickstart --data TEXT --set optimisation.batch_sequences=64 --max-steps 16 {SHORT}",
    "bert-mini": f"pretrain bert-mini --data TEXT --set optimisation.batch_sequences=16 --max-steps 8 {SHORT}",
    "electra-small": f"pretrain electra-small --data TEXT --set optimisation.batch_sequences=8 --max-steps 3 {SHORT}",
    "albert-base": "pretrain albert-base --data TEXT --set optimisation.batch_sequences=4 --max-steps 2"
    f" --set data.sequence_length=128 {SHORT}",
    "bert": "pretrain bert --data TEXT --set optimisation.batch_sequences=4 --max-steps 2"
    f" --set optimisation.stages=[] --set data.sequence_length=128 {SHORT}",
    "distilbert of bert-mini": "distill distilbert --teacher OUT/bert-mini --data TEXT"
    " --set student.layers=first --set model.num_hidden_layers=2"
    " --set model.hidden_size=256 --set model.num_attention_heads=4 --set model.intermediate_size=1024"
    f" --set optimisation.batch_sequences=16 --set data.sequence_length=128 --max-steps 6 {SHORT}",
    "RTE": "finetune --task rte --data-dir DATA/glue --model MODEL --set optimisation.steps=6"
    " --set engine.keep_checkpoints=1 --set engine.save_every_steps=4",
    "CoNLL-2003": "finetune --task conll2003 --data-dir DATA/conll2003 --model MODEL --set optimisation.steps=8"
    " --set data.train_examples=1000 --set engine.keep_checkpoints=1"
    " --set engine.save_every_steps=4",
}
COUNTED = "BERTKIT_COUNTED_FLOPS"
HEADER = ["run", "parameters", "planned", "FLOPs", "planned", "ratio", "peak MB", "planned", "ratio"]


def counted(arguments: list[str]) -> int:
    """Run the command, in the process of the run, and record the operations of its steps."""
    from bertkit.cli.app import run
    from bertkit.training.meters import WindowMeter

    total, add = 0.0, WindowMeter.add

    def adding(self: WindowMeter, outcome: Any, **costs: float) -> None:
        nonlocal total
        total += costs["flops"]
        add(self, outcome, **costs)

    WindowMeter.add = adding  # type: ignore[method-assign]  # nothing but a meter
    code = run(arguments)
    Path(os.environ[COUNTED]).write_text(str(total))
    return code


def measured(name: str, words: list[str], out: Path) -> list[str]:
    """A row of the table."""
    planned = subprocess.run(
        [sys.executable, "-m", "bertkit", *words, "--plan", "--json"], stdout=subprocess.PIPE, check=True
    )
    plan = json.loads(planned.stdout)
    directory, flops_file = out / name.replace(" ", "-"), out / "flops"
    command = [sys.executable, "-m", "benchmarks.plan_accuracy", "--counted", *words, "--run-dir", str(directory)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, COUNTED: str(flops_file)}
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{name}: exit status {status}; see {directory}")
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
    flops = float(flops_file.read_text())
    weights = weights_of(max((directory / "checkpoints").glob("step-*")))
    of = plan["parameters"]["total"]
    print(f"{name}: {plan['memory_terms_mb']}", file=sys.stderr, flush=True)
    return [
        *(name, f"{weights:,}", f"{of:,}"),
        *(f"{flops:.3g}", f"{plan['flops']:.3g}", f"{plan['flops'] / flops:.2f}"),
        *(f"{peak:,.0f}", f"{plan['memory_mb']:,.0f}", f"{plan['memory_mb'] / peak:.2f}"),
    ]


def weights_of(checkpoint: Path) -> int:
    """Number of elements in a checkpoint's weights."""
    from safetensors import safe_open

    with safe_open(str(checkpoint / "weights.safetensors"), "np") as file:
        shapes = [file.get_slice(key).get_shape() for key in file.keys()]  # noqa: SIM118  # no mapping
    total = 0
    for shape in shapes:
        count = 1
        for size in shape:
            count *= size
        total += count
    return total


def main() -> None:
    if sys.argv[1:2] == ["--counted"]:
        raise SystemExit(counted(sys.argv[2:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("text", "data", "model", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=list(RUNS), help="some of the runs")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    places = {"TEXT": given.text, "DATA": given.data, "MODEL": given.model, "OUT": given.out}
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}", flush=True)
    for name in given.only or RUNS:
        words = RUNS[name].split()
        for place, path in places.items():
            words = [word.replace(place, str(path.absolute())) if word.startswith(place) else word for word in words]
        print(f"| {' | '.join(measured(name, words, given.out))} |", flush=True)


if __name__ == "__main__":
    main()

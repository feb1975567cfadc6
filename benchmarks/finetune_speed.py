"""Fine-tuning speed of bertkit and of plain `transformers` loops: examples per second on the same SST-2 batches.

The peers are what one writes with the library (finetune_peer.py): all-MiniLM-L6-v2, SDPA, fused AdamW, clipping,
batches of 32 in random order; one pads to the limit of 128 tokens, as the library's GLUE example does by default, one
to the longest of each batch. All three process the same examples in one process, alternating step by step, so a
slowdown of the machine affects all of them. Texts are tokenised in advance; building a batch is timed. `cpu_ratio`
compares processor time, which excludes other programs and is the better figure on a busy machine.

One thread, fp32, four steps on a busy machine: 10.8 times the examples of padding to 128, 3.2 times those of padding to
the longest (processor time: 11.6 and 3.2). Of the 550 ms of bertkit's step, 93% are forward and backward, most of it
matrix products, 6% AdamW, 1% clipping; building the batch takes 1.5 ms, which `bertkit finetune` does in a thread.
Contributions:

- no padding: 426 tokens per step instead of 1,284 with padding to the longest
- the last layer computes only [CLS] (`Encoder.forward_summary_token`): 14% fewer operations
- the table's gradient by rows (training/clipping.py): dense, its zeros alone cost as much as AdamW's whole update

    python -m benchmarks.finetune_speed --tasks DATA                 with OMP_NUM_THREADS threads
    python -m benchmarks.finetune_speed --tasks DATA --profile       profile of bertkit's step
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from benchmarks.finetune_peer import Loop, LoopSettings, PeerClassification, minilm
from torch.profiler import ProfilerActivity, profile

from bertkit.finetuning.loss_terms import TaskTerms
from bertkit.finetuning.task_order import EpochOrder
from bertkit.models.files.hub import load_model
from bertkit.models.labels import Labels
from bertkit.tasks.base import Features, TaskBatch
from bertkit.tasks.catalogue import find_task
from bertkit.tasks.classification import Classification, TextSettings
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.readers import load_split
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.clipping import RowClipping
from bertkit.training.compiled_kernels import use_kernels
from bertkit.training.config import EngineConfig
from bertkit.training.engine import resolve_engine
from bertkit.training.gradients import Gradient
from bertkit.training.optimizers import AdamWConfig
from bertkit.training.product_rate import measured_peak_flops
from bertkit.training.step import Step

LIMIT, BATCH, RATE = 128, 32, 5e-5


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=Path, required=True, help="folder that holds glue/")
    parser.add_argument("--task", default="sst2")
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each side")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--examples", type=int, default=16_384, help="of train, so many are read")
    parser.add_argument("--profile", action="store_true")
    return parser.parse_args()


class Ours:
    """bertkit's step."""

    def __init__(self, task: str, examples: list[Any], precision: Literal["fp32", "bf16"]) -> None:
        spec = find_task(task)
        assert spec.labels is not None
        labels = Labels(spec.labels)
        self.task = Classification(labels, spec.metrics, TextSettings())
        encoder = SequenceEncoder(load_tokenizer(minilm()), max_tokens=LIMIT)
        self.features: Features = self.task.encode(examples, encoder)
        self.config = EngineConfig(device="cpu", precision=precision)
        self.engine = resolve_engine(self.config)
        self.model, _ = load_model(minilm(), heads=(self.task.head,), labels=labels)
        optimizer = AdamWConfig().build(self.model)
        self.terms = TaskTerms(self.task)
        self.training_step = Step(self.model, optimizer, self.engine, RowClipping(self.model, 1.0), Gradient())

    def batches(self, items: Any) -> list[TaskBatch]:
        return [self.features.batch(part) for part in self.features.cut(items, self.engine.micro_batch_tokens)]

    def step(self, items: Any) -> None:
        self.training_step.update(self.batches(items), self.terms, RATE)


def peers(task: str, examples: list[Any], *, bf16: bool) -> dict[str, Callable[[Any], object]]:
    """Both peers, each with its own weights."""
    made: dict[str, Callable[[Any], object]] = {}
    for name, length in (("padded to 128", LIMIT), ("padded to the longest", None)):
        peer = PeerClassification.of(find_task(task), minilm(), LIMIT)
        features = peer.features(examples)
        loop = Loop(peer.build(), LoopSettings(RATE, 10_000, bf16=bf16))

        def step(
            items: Any,
            peer: PeerClassification = peer,
            loop: Loop = loop,
            features: list[Any] = features,
            length: int | None = length,
        ) -> None:
            loop.step(peer.batch([features[i] for i in items], length=length), 1000)

        made[name] = step
    return made


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of wall time, and seconds of processor time."""
    started, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - used


def parts_of(ours: Ours, orders: Iterator[Any], steps: int) -> dict[str, float]:
    """Median milliseconds of processor time for the parts of bertkit's step."""
    training_step, found = ours.training_step, []
    clip, update, clear = training_step.clipping.clip, training_step.optimizer.step, training_step.clipping.clear
    seconds: dict[str, float] = {}

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            started = time.process_time()
            result = call(*given, **named)
            seconds[name] = seconds.get(name, 0.0) + time.process_time() - started
            return result

        return run

    training_step.clipping.clip, training_step.clipping.clear = watched("clipping", clip), watched("clipping", clear)  # type: ignore[method-assign]
    training_step.optimizer.step = watched("AdamW", update)  # type: ignore[method-assign]
    for _ in range(steps):
        items = next(orders)
        seconds.clear()
        started = time.process_time()
        batches = ours.batches(items)
        seconds["batch"] = time.process_time() - started
        _, whole = timed(partial(training_step.update, batches, ours.terms, RATE))
        seconds["forward and backward"] = whole - seconds["clipping"] - seconds["AdamW"]
        found.append(dict(seconds))
    training_step.clipping.clip, training_step.clipping.clear, training_step.optimizer.step = clip, clear, update  # type: ignore[method-assign]
    return {name: round(1000 * statistics.median(each[name] for each in found), 2) for name in found[0]}


def show_profile(ours: Ours, orders: Iterator[Any], steps: int) -> None:
    """The operators of bertkit's step by their own time."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=False) as found:
        for _ in range(steps):
            ours.step(next(orders))
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=35, max_name_column_width=60))


def main() -> None:
    options = arguments()
    spec = find_task(options.task)
    examples = load_split(spec, "train", str(options.tasks / "glue")).examples[: options.examples]
    ours = Ours(options.task, examples, options.precision)
    with use_kernels(ours.config, ours.engine):  # once: finding the library takes milliseconds
        measure(ours, examples, options)


def measure(ours: Ours, examples: list[Any], options: argparse.Namespace) -> None:
    """Time all sides and print the document, or bertkit's profile."""
    order = EpochOrder(len(examples), BATCH, seed=0)
    orders = (order.items(step) for step in range(10**6))
    for _ in range(2):
        ours.step(next(orders))
    parts = parts_of(ours, orders, options.steps)
    if options.profile:
        print(json.dumps(parts))
        show_profile(ours, orders, options.steps)
        return
    sides = {"bertkit": ours.step, **peers(options.task, examples, bf16=options.precision == "bf16")}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    flops = []
    for step in range(options.steps + 1):
        items = next(orders)
        for name, run in sides.items():
            spent = timed(partial(run, items))
            if step:  # the first step of each warms up
                seconds[name].append(spent)
        flops.append(ours.terms.flops(ours.model, ours.batches(items)))

    def ratios(kind: int) -> dict[str, list[float]]:
        """The peer's time divided by bertkit's, per step."""
        own = [each[kind] for each in seconds["bertkit"]]
        return {
            name: [theirs[kind] / mine for theirs, mine in zip(spent, own, strict=True)]
            for name, spent in seconds.items()
            if name != "bertkit"
        }

    wall, processor = ratios(0), ratios(1)
    rates = {name: BATCH / statistics.median(wall_of for wall_of, _ in spent) for name, spent in seconds.items()}
    document = {
        "task": options.task,
        "batch": BATCH,
        "precision": options.precision,
        "threads": torch.get_num_threads(),
        "mean_tokens": round(float(ours.features.tokens_I.mean()), 1),
        "examples_per_s": {name: round(rate, 1) for name, rate in rates.items()},
        "ratio": {name: round(statistics.median(each), 2) for name, each in wall.items()},
        "ratio_lowest_highest": {name: [round(min(each), 2), round(max(each), 2)] for name, each in wall.items()},
        "cpu_ratio": {name: round(statistics.median(each), 2) for name, each in processor.items()},
        "cpu_milliseconds_of_our_step": parts,
        "gflops": round(statistics.mean(flops) / BATCH * rates["bertkit"] / 1e9, 1),
        "matmul_peak_gflops": round(measured_peak_flops(ours.engine.device, bf16=ours.engine.bf16) / 1e9, 1),
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()

"""Speed of an update relative to the device's limit: tokens/s and share of the peak bf16 rate, by model, length and
form.

    python -m benchmarks.update_speed --peak 989 [--sizes base,large] [--lengths 128,512] [--forms plain,compiled]
    python -m benchmarks.update_speed --device cpu --sizes small --forms plain --lengths 128 --tokens 4096

BERT's masked language modelling with dropout on random words, AdamW: the step of `bertkit pretrain` on batches prepared
as by its workers. Sequences all have the maximum length ("fixed"), or lognormal lengths with a mean of 60% of it
("varied") at the same number of tokens per update; the two alternate. Writes update_speed.json and prints the table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from bertkit.data.batch import PackedBatch
from bertkit.data.pinned import pinned
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Vocabulary
from bertkit.models.attention.projection import project_separately
from bertkit.models.attention.self_attention import SelfAttention
from bertkit.models.families.bert import BertConfig
from bertkit.models.headed import HeadedModel
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.pretraining.loss_terms import ObjectiveTerms
from bertkit.run.environment import device_name
from bertkit.training.compiled_kernels import use_kernels
from bertkit.training.config import EngineConfig
from bertkit.training.cost import training_flops
from bertkit.training.engine import resolve_engine
from bertkit.training.optimizers import AdamWConfig
from bertkit.training.product_rate import measured_peak_flops, synchronise
from bertkit.training.step import Step

VOCABULARY = 30_528
"""BERT's 30,522 tokens, rounded up to a multiple of 64."""
SIZES = {"small": (256, 4, 4), "base": (768, 12, 12), "large": (1024, 24, 16)}
"""Width, layers, heads: Devlin et al. 2019, arXiv:1810.04805, section 3; Turc et al. 2019, arXiv:1908.08962."""
MASK, CLS, SEP = 4, 2, 3
OBJECTIVES = (MaskedLM(),)
SPREAD = 0.6
"""Standard deviation of the logarithm of a length."""


@dataclass(frozen=True)
class Form:
    """How the layers are computed.

    Attributes:
        compiled: by torch.compile.
        attention_dropout: whether attention probabilities are dropped out, as in BERT's recipe.
        separate: queries, keys and values in three matrix products.
    """

    compiled: bool = False
    attention_dropout: bool = True
    separate: bool = False


FORMS = {
    "plain": Form(),
    "compiled": Form(compiled=True),
    "separate": Form(separate=True),
    "no-attention-dropout": Form(compiled=True, attention_dropout=False),
}
KINDS = {"fixed": False, "varied": True}


def lengths_of(limit: int, tokens: int, *, varied: bool, seed: int) -> list[int]:
    """Lengths of sequences that together have this many tokens or slightly fewer."""
    if not varied:
        return [limit] * (tokens // limit)
    generator = np.random.default_rng(seed)
    found: list[int] = []
    while True:
        drawn = generator.lognormal(np.log(0.62 * limit) - SPREAD**2 / 4, SPREAD)
        length = int(np.clip(drawn, 8, limit))
        if sum(found) + length > tokens:
            return found
        found.append(length)


def samples_of(lengths: list[int], seed: int) -> Samples:
    """Sequences [CLS] words [SEP] with masked tokens."""
    ends_B = np.cumsum(lengths)
    bounds_B1 = np.concatenate([[0], ends_B])
    ids_T = np.random.default_rng(seed).integers(5, VOCABULARY, bounds_B1[-1])
    special_T = np.zeros(ids_T.size, dtype=np.bool_)
    special_T[bounds_B1[:-1]] = special_T[ends_B - 1] = True
    ids_T[bounds_B1[:-1]], ids_T[ends_B - 1] = CLS, SEP
    samples = Samples(
        ids_T=ids_T,
        token_types_T=np.zeros_like(ids_T),
        special_T=special_T,
        cu_seqlens_B1=bounds_B1,
        epoch_B=np.zeros(len(lengths), dtype=np.int64),
        sample_B=np.arange(len(lengths)),
    )
    vocabulary = Vocabulary(VOCABULARY, 0, CLS, SEP, MASK, np.ones(VOCABULARY, dtype=np.bool_))
    return OBJECTIVES[0].corrupt(samples, vocabulary, Draw(seed))


class Measurement:
    """The updates of one model in one form."""

    def __init__(self, size: str, form: Form, arguments: argparse.Namespace) -> None:
        width, layers, heads = SIZES[size]
        config = BertConfig(
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            attention_probs_dropout_prob=0.1 if form.attention_dropout else 0.0,
            hidden_act="gelu_new",
        )
        self.tokens = arguments.tokens
        self.model = HeadedModel(config.build(VOCABULARY), ["masked_lm"])
        settings = {"device": arguments.device, "precision": "bf16", "compile": form.compiled}
        settings |= {"micro_batch_tokens": arguments.micro_batch_tokens or arguments.tokens}
        self.config = EngineConfig.model_validate(settings)
        self.engine = resolve_engine(self.config)
        self.model.to(self.engine.device).initialise(0)
        for part in self.model.modules():
            if form.separate and isinstance(part, SelfAttention):
                part.projection = project_separately
        self.step = Step.plain(self.model, AdamWConfig().build(self.model), self.engine, 1.0)
        self.terms = ObjectiveTerms(OBJECTIVES)

    def updates(self, limit: int, *, varied: bool) -> list[list[PackedBatch]]:
        """The micro-batches of a few updates."""
        made = []
        for number in range(4):
            samples = samples_of(lengths_of(limit, self.tokens, varied=varied, seed=number), number)
            parts = [PackedBatch.from_samples(part) for part in samples.split(self.engine.micro_batch_tokens)]
            made.append(pinned(parts) if self.engine.pins_batches else parts)
        return made

    def timed(self, parts: list[PackedBatch]) -> float:
        """Seconds per update."""
        synchronise(self.engine.device)
        before = time.perf_counter()
        self.step.update(parts, self.terms, 1e-4)
        synchronise(self.engine.device)
        return time.perf_counter() - before

    def measured(self, limit: int, rounds: int) -> dict[str, dict[str, Any]]:
        """Medians for both kinds of lengths."""
        if self.engine.pins_batches:
            torch.cuda.reset_peak_memory_stats()
        made = {kind: self.updates(limit, varied=varied) for kind, varied in KINDS.items()}
        first = {kind: sum(self.timed(updates[0]) for _ in range(3)) for kind, updates in made.items()}
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(rounds):
            for kind in KINDS:
                seconds[kind].append(self.timed(made[kind][number % len(made[kind])]))
        found = {}
        for kind, updates in made.items():
            tokens = statistics.mean(sum(part.num_tokens for part in parts) for parts in updates)
            flops = statistics.mean(training_flops(self.model, parts, OBJECTIVES) for parts in updates)
            median = statistics.median(seconds[kind])
            found[kind] = {
                "tokens_per_s": tokens / median,
                "milliseconds": 1e3 * median,
                "tflops": flops / median / 1e12,
                "first_updates_s": first[kind],
                "memory_gb": torch.cuda.max_memory_allocated() / 1e9 if self.engine.pins_batches else 0.0,
            }
        return found

    def kernels(self, limit: int) -> list[tuple[str, float, int]]:
        """The kernels of an update on a GPU, longest first: name, milliseconds, calls."""
        parts = self.updates(limit, varied=False)[0]
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            self.timed(parts)
        events = [event for event in seen.key_averages() if event.device_type.name == "CUDA"]
        rows = [(event.key[:110], event.self_device_time_total / 1e3, event.count) for event in events]
        return sorted(rows, key=lambda row: -row[1])


def report(row: dict[str, Any], peak: float, products: float) -> str:
    """A line of the table."""
    shares = f"{100 * row['tflops'] / peak:.1f} % of the data sheet, " if peak else ""
    point = f"{row['size']:>6} {row['form']:>10} {row['limit']:>4} {row['lengths']:>7}"
    return (
        f"{point} {row['tokens_per_s']:>9,.0f} tokens/s"
        f" {row['milliseconds']:>6.1f} ms {row['tflops']:>6.2f} TFLOP/s ({shares}{100 * row['tflops'] / products:.1f} %"
        f" of products) {row['memory_gb']:>5.1f} GB, first updates {row['first_updates_s']:.1f} s"
    )


def arguments_of_the_command() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="base,large")
    parser.add_argument("--lengths", default="128,512")
    parser.add_argument("--forms", default="plain,compiled", help=", ".join(FORMS))
    parser.add_argument("--tokens", type=int, default=65_536, help="of an update")
    parser.add_argument("--micro-batch-tokens", type=int, help="default: all of an update at once")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--peak", type=float, default=0.0, help="dense bf16 TFLOP/s by the maker's data sheet")
    parser.add_argument("--profile", type=int, default=0, help="list so many kernels of an update")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("update_speed"))
    return parser.parse_args()


def main() -> None:
    arguments = arguments_of_the_command()
    arguments.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(arguments.device)
    products = measured_peak_flops(device, bf16=True) / 1e12
    print(f"{device_name(device)}, torch {torch.__version__}; products {products:,.2f} TFLOP/s measured", flush=True)
    rows: list[dict[str, Any]] = []
    for size, form in itertools.product(arguments.sizes.split(","), arguments.forms.split(",")):
        torch.compiler.reset()  # torch caches eight graphs per layer, and each model needs its own
        measurement = Measurement(size, FORMS[form], arguments)
        for limit in map(int, arguments.lengths.split(",")):
            with use_kernels(measurement.config, measurement.engine):
                both = measurement.measured(limit, arguments.rounds)
                kernels = measurement.kernels(limit)[: arguments.profile] if arguments.profile else []
            for kind, found in both.items():
                rows.append({"size": size, "form": form, "limit": limit, "lengths": kind, **found})
                print(report(rows[-1], arguments.peak, products), flush=True)
            ratio = rows[-1]["tokens_per_s"] / rows[-2]["tokens_per_s"]
            print(f"       tokens/s of varied lengths over those of one: {ratio:.3f}", flush=True)
            for kernel, milliseconds, calls in kernels:
                print(f"      {milliseconds:>8.2f} ms {calls:>5} {kernel[:70]}", flush=True)
        (arguments.out / "update_speed.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

"""How near an update comes to a GPU's limit: tokens/s and share of the dense bf16 rate, by model, length and form.

    python -m benchmarks.gpu_step --peak 989 --out gpu [--sizes base,large] [--lengths 128,512] [--forms plain,compiled]

BERT's masked language modelling with dropout, made texts of random words, AdamW: the step of `bertkit pretrain` on
batches in pinned memory, as its workers prepare them. Lengths are all the limit ("fixed"), or drawn lognormal with a
mean of 60% of it ("varied"), with as many tokens an update. Needs a GPU; writes gpu_step.json and prints the table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
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
from bertkit.models.attention import SelfAttention, project_separately
from bertkit.models.bert import BertConfig
from bertkit.models.headed import HeadedModel
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.pretraining.loss_terms import ObjectiveTerms
from bertkit.training.config import EngineConfig
from bertkit.training.cost import training_flops
from bertkit.training.engine import resolve_engine
from bertkit.training.optimizers import AdamWConfig
from bertkit.training.product_rate import measured_peak_flops
from bertkit.training.step import Step

VOCABULARY = 30_528
"""BERT's 30,522 words, up to a multiple of 64."""
SIZES = {"base": (768, 12, 12), "large": (1024, 24, 16)}
"""Width, layers, heads: Devlin et al. 2019, arXiv:1810.04805, section 3."""
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
        separate: queries, keys and values in three products.
    """

    compiled: bool = False
    attention_dropout: bool = True
    separate: bool = False


FORMS = {
    "plain": Form(),
    "compiled": Form(compiled=True),
    "separate": Form(separate=True),
    "kept": Form(attention_dropout=False),
    "compiled-kept": Form(compiled=True, attention_dropout=False),
}


def lengths_of(limit: int, tokens: int, *, varied: bool, seed: int) -> list[int]:
    """Lengths of sequences that have so many tokens together, or slightly fewer."""
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
    """Sequences [CLS] words [SEP], with masks."""
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
    """An update's speed for one model and form; the model is built once."""

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
        self.device = torch.device(arguments.device)
        self.tokens = arguments.tokens
        self.model = HeadedModel(config.build(VOCABULARY), ["masked_lm"])
        self.model.to(self.device).initialise(0)
        for part in self.model.modules():
            if form.separate and isinstance(part, SelfAttention):
                part.projection = project_separately
        settings = {"device": arguments.device, "precision": "bf16", "compile": form.compiled}
        settings |= {"micro_batch_tokens": arguments.micro_batch_tokens}
        self.engine = resolve_engine(EngineConfig.model_validate(settings))
        self.step = Step.plain(self.model, AdamWConfig().build(self.model), self.engine, 1.0)
        self.terms = ObjectiveTerms(OBJECTIVES)

    def batches(self, limit: int, *, varied: bool, count: int) -> list[list[PackedBatch]]:
        """The micro-batches of some updates."""
        updates = []
        for number in range(count):
            samples = samples_of(lengths_of(limit, self.tokens, varied=varied, seed=number), number)
            parts = [PackedBatch.from_samples(part) for part in samples.split(self.engine.micro_batch_tokens)]
            updates.append(pinned(parts) if self.device.type == "cuda" else parts)
        return updates

    def measured(self, limit: int, *, varied: bool, updates: int, profiled: bool = False) -> dict[str, Any]:
        """Medians over single updates."""
        made = self.batches(limit, varied=varied, count=4)
        before = time.perf_counter()
        for number in range(3):
            self.step.update(made[number % len(made)], self.terms, 1e-4)
        warm = time.perf_counter() - before
        seconds, rates = [], []
        for number in range(updates):
            parts = made[number % len(made)]
            self._wait()
            before = time.perf_counter()
            outcome = self.step.update(parts, self.terms, 1e-4)
            self._wait()
            seconds.append(time.perf_counter() - before)
            rates.append(training_flops(self.model, parts, OBJECTIVES) / seconds[-1])
        found = {
            "tokens_per_s": statistics.median(outcome.tokens / each for each in seconds),
            "milliseconds": 1e3 * statistics.median(seconds),
            "tflops": statistics.median(rates) / 1e12,
            "first_updates_s": warm,
            "memory_gb": torch.cuda.max_memory_allocated() / 1e9 if self.device.type == "cuda" else 0.0,
        }
        if profiled:
            found["kernels"] = self.kernels(made[0])
        return found

    def kernels(self, parts: list[PackedBatch]) -> list[tuple[str, float, int]]:
        """The longest kernels of an update: name, milliseconds, calls."""
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            self.step.update(parts, self.terms, 1e-4)
            self._wait()
        events = [event for event in seen.key_averages() if event.device_type.name == "CUDA"]
        rows = [(event.key[:110], event.self_device_time_total / 1e3, event.count) for event in events]
        return sorted(rows, key=lambda row: -row[1])

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def points(arguments: argparse.Namespace) -> Iterator[tuple[str, str, Callable[[], Measurement]]]:
    for size in arguments.sizes.split(","):
        for name in arguments.forms.split(","):
            yield size, name, lambda size=size, name=name: Measurement(size, FORMS[name], arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="base,large")
    parser.add_argument("--lengths", default="128,512")
    parser.add_argument("--forms", default="plain,compiled")
    parser.add_argument("--tokens", type=int, default=65_536, help="of an update")
    parser.add_argument("--micro-batch-tokens", type=int, default=65_536)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--peak", type=float, default=989.0, help="dense bf16 TFLOP/s by the maker's data sheet")
    parser.add_argument("--profile", default="", help="forms whose kernels are listed, at the first length")
    parser.add_argument("--shown", type=int, default=40, help="kernels")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(arguments.device)
    products = measured_peak_flops(device, bf16=True) / 1e12
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(
        f"{name}, torch {torch.__version__}; products {products:,.0f} TFLOP/s measured, {arguments.peak:,.0f} by the data sheet"
    )
    found: list[dict[str, Any]] = []
    for size, form, build in points(arguments):
        try:
            measurement = build()
            for limit in map(int, arguments.lengths.split(",")):
                for varied in (False, True):
                    wanted = form in arguments.profile.split(",") and not varied
                    row = measurement.measured(limit, varied=varied, updates=arguments.updates, profiled=wanted)
                    row = {
                        "size": size,
                        "form": form,
                        "limit": limit,
                        "lengths": "varied" if varied else "fixed",
                        **row,
                    }
                    found.append(row)
                    print(
                        f"{size:>6} {form:>14} {limit:>5} {row['lengths']:>7} {row['tokens_per_s']:>10,.0f} tokens/s"
                        f" {row['milliseconds']:>7.1f} ms {row['tflops']:>6.0f} TFLOP/s {100 * row['tflops'] / arguments.peak:>5.1f} %"
                        f" ({100 * row['tflops'] / products:.1f} % of products) {row['memory_gb']:>5.1f} GB,"
                        f" first updates {row['first_updates_s']:.1f} s",
                        flush=True,
                    )
                    kernels = row.get("kernels", [])
                    if kernels:
                        print(f"      {sum(each[1] for each in kernels):>8.2f} ms in all kernels")
                    for kernel, milliseconds, calls in kernels[: arguments.shown]:
                        print(f"      {milliseconds:>8.2f} ms {calls:>5} {kernel[:70]}", flush=True)
        except Exception as error:  # a form that fails leaves the others their time
            print(f"{size} {form}: {type(error).__name__}: {str(error)[:600]}", flush=True)
        measurement = None
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        (arguments.out / "gpu_step.json").write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

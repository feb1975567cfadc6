"""Pretraining speed beside a plain `transformers` loop: real tokens a second on the same batches, alternating.

The peer is what one writes with the library: BertForPreTraining, SDPA, fused AdamW, rows padded to the sequence length,
logits for every position. Both see the same samples and masks, in one process, step about, so that a machine that slows
down slows both.

    python -m benchmarks.pretrain_speed --data TEXT            256 wide, 4 layers, 32 x 128
    python -m benchmarks.pretrain_speed --data TEXT --base     BERT base, 16 x 128

Precisions: the peer runs with bf16 autocast where the processor multiplies in bf16, and in fp32 where it does not
(there bf16 is emulated, at a hundredth of the speed, and would flatter the ratio); `--precision` chooses another.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bertkit.data.batch import PackedBatch
from bertkit.data.layouts import SegmentPair
from bertkit.data.prepare import prepare_shards
from bertkit.data.samples import Samples, Vocabulary
from bertkit.data.split import split_documents
from bertkit.data.stream import SampleSpec, SampleStream, StepBatches
from bertkit.files import cache_directory
from bertkit.models.bert import BertConfig
from bertkit.models.headed import HeadedModel
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.sentence_relations import NextSentence
from bertkit.pretraining.loss_terms import ObjectiveTerms
from bertkit.text.sources import open_corpus
from bertkit.text.tokenizer import Tokenizer, TokenizerConfig
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.config import EngineConfig
from bertkit.training.cost import training_flops
from bertkit.training.engine import resolve_engine
from bertkit.training.optimizers import AdamWConfig
from bertkit.training.product_rate import measured_peak_flops
from bertkit.training.step import Step

LENGTH = 128
OBJECTIVES = (MaskedLM(max_predictions=20), NextSentence())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", default=["builtin:pydocs"], help="sources of text")
    parser.add_argument("--tokenizer", help="an existing tokenizer; left out: 30,522 WordPieces learnt from the text")
    parser.add_argument("--base", action="store_true", help="BERT base in place of 256 x 4")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each side")
    parser.add_argument("--precision", choices=["auto", "fp32", "bf16"], default="auto")
    parser.add_argument("--dropout", type=float, default=0.1)
    return parser.parse_args()


def batches_of(options: argparse.Namespace, sequences: int) -> tuple[StepBatches, Tokenizer]:
    cache = cache_directory()
    shards = prepare_shards(open_corpus(options.data), TokenizerConfig(path=options.tokenizer), cache=cache)
    tokenizer = load_tokenizer(shards.directory)
    training, _ = split_documents(shards, 0.01, 0)
    stream = SampleStream(SampleSpec(0, "train/0", SegmentPair(), LENGTH, 10), shards, training, cache / "plans")
    batches = StepBatches(
        stream, Vocabulary.of(tokenizer), OBJECTIVES, batch_sequences=sequences, micro_batch_tokens=None
    )
    return batches, tokenizer


class Peer:
    """The plain loop."""

    def __init__(self, config: BertConfig, vocab_size: int, *, bf16: bool) -> None:
        from transformers import BertConfig as HubConfig
        from transformers import BertForPreTraining

        settings = config.model_dump(exclude={"family"})
        self.model = BertForPreTraining(
            HubConfig(**settings, vocab_size=vocab_size, attn_implementation="sdpa")
        ).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.bf16 = bf16

    def step(self, samples: Samples) -> None:
        rows = samples.lengths_B.size
        ids, types, mask = (torch.zeros(rows, LENGTH, dtype=torch.int64) for _ in range(3))
        labels = torch.full((rows, LENGTH), -100)
        for row, one in enumerate(samples.split(1)):
            length = one.ids_T.size
            ids[row, :length] = torch.from_numpy(one.ids_T)
            types[row, :length] = torch.from_numpy(one.token_types_T)
            mask[row, :length] = 1
            targets = one.targets["masked_lm"]
            labels[row, torch.from_numpy(targets.index_M)] = torch.from_numpy(targets.id_M)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.bf16):
            output = self.model(
                input_ids=ids,
                token_type_ids=types,
                attention_mask=mask,
                labels=labels,
                next_sentence_label=torch.from_numpy(samples.labels["next_sentence"]),
            )
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def timed(work: Callable[[], object]) -> float:
    """Seconds that it takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    options = arguments()
    width, layers, sequences = (768, 12, 16) if options.base else (256, 4, 32)
    batches, tokenizer = batches_of(options, sequences)
    config = BertConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        hidden_dropout_prob=options.dropout,
        attention_probs_dropout_prob=options.dropout,
    )
    engine = resolve_engine(EngineConfig(device="cpu", precision=options.precision))
    torch.manual_seed(0)
    model = HeadedModel(config.build(tokenizer.vocab_size), [objective.term for objective in OBJECTIVES])
    model.initialise(0)
    ours = Step.plain(model, AdamWConfig(bias_correction=False).build(model), engine, 1.0)
    peer = Peer(config, tokenizer.vocab_size, bf16=engine.bf16)

    rates: dict[str, list[float]] = {"bertkit": [], "transformers": []}
    flops = 0.0
    for step in range(options.steps + 1):
        samples = batches.samples(step)
        parts = [PackedBatch.from_samples(part) for part in samples.split(engine.micro_batch_tokens)]
        seconds = {
            "bertkit": timed(partial(ours.update, parts, ObjectiveTerms(OBJECTIVES), 1e-4)),
            "transformers": timed(partial(peer.step, samples)),
        }
        if step:  # the first step of each warms up
            for name, rate in rates.items():
                rate.append(samples.ids_T.size / seconds[name])
        flops = training_flops(model, parts, OBJECTIVES) / samples.ids_T.size
    medians = {name: statistics.median(rate) for name, rate in rates.items()}
    document: dict[str, Any] = {
        "model": f"{width} x {layers}",
        "batch": f"{sequences} x {LENGTH}",
        "vocabulary": tokenizer.vocab_size,
        "precision": engine.precision,
        "threads": torch.get_num_threads(),
        "tokens_per_s": medians,
        "ratio": medians["bertkit"] / medians["transformers"],
        "ratio_lowest_highest": sorted(a / b for a, b in zip(*rates.values(), strict=True))[:: options.steps - 1],
        "gflops": medians["bertkit"] * flops / 1e9,
        "share_of_matmul_peak": medians["bertkit"] * flops / measured_peak_flops(engine.device, bf16=engine.bf16),
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()

"""Pretraining compared with a plain `transformers` loop: updates on the same samples and masks.

Devlin et al. 2019, BERT, arXiv:1810.04805. The peer is the usual code for the library: BertForPreTraining, SDPA, fused
AdamW, rows padded to the sequence length, logits for every position, bf16 by autocast. If bf16 would be emulated, both
compute in fp32: emulation at a hundredth of the speed would flatter the ratio.

Shapes: T packed tokens, B sequences, M predicted tokens.
"""

from __future__ import annotations

import itertools
from functools import partial
from statistics import fmean
from typing import Any

import torch

from bertkit.bench.comparison import OPTIMIZER_BYTES
from bertkit.bench.material import config_of, shards_of
from bertkit.bench.settings import SIZES, BenchSettings
from bertkit.bench.workload import OWN, Peers, Work, Workload, peer_library, plain_update
from bertkit.data.batch import PackedBatch
from bertkit.data.layouts import SegmentPair
from bertkit.data.samples import Samples, Vocabulary
from bertkit.data.split import split_documents
from bertkit.data.stream import SampleSpec, SampleStream, StepBatches
from bertkit.files import cache_directory
from bertkit.models.families.bert import BertConfig
from bertkit.models.headed import HeadedModel
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.sentence_relations import NextSentence
from bertkit.pretraining.loss_terms import ObjectiveTerms
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.cost import count_parameters, training_flops
from bertkit.training.engine import Engine
from bertkit.training.optimizers import AdamWConfig
from bertkit.training.product_rate import synchronise
from bertkit.training.step import Step

RATE = 1e-4
CLIP_NORM = 1.0
IGNORED = -100
"""The label of a token that the peer's loss ignores."""
OBJECTIVES = (MaskedLM(max_predictions=20), NextSentence())
UPDATES = 24
"""Number of batches before the first is repeated: training sees no batch twice, and each has its own shapes."""


def pretraining(settings: BenchSettings, engine: Engine) -> Workload:
    """An update, each on another batch of the text, with BERT's two objectives.

    Raises:
        DataError: no such text, or too little of it.
    """
    size = SIZES[settings.size]
    sequences = settings.sequences or size.sequences
    updates, tokenizer = samples_of(settings, sequences)
    config = config_of(size)
    torch.manual_seed(0)
    model = HeadedModel(config.build(tokenizer.vocab_size), [objective.term for objective in OBJECTIVES])
    model.initialise(0)
    model.to(engine.device)
    size_of_part = engine.micro_batch_tokens
    batches = [[PackedBatch.from_samples(part) for part in samples.split(size_of_part)] for samples in updates]
    peers = Peers(wanted=settings.peers)
    peers.add("transformers", partial(peer_update, config, tokenizer.vocab_size, updates, settings.length, engine))
    return Workload(
        about={
            "model": f"{size.width} x {size.layers}",
            "batch": f"{sequences} x {settings.length}",
            "vocabulary": tokenizer.vocab_size,
            "precision": engine.precision,
        },
        unit="tokens",
        amount=fmean(samples.ids_T.size for samples in updates),
        sides={OWN: own_update(model, batches, engine), **peers.sides},
        left_out=peers.left_out,
        flops=fmean(training_flops(model, parts, OBJECTIVES) for parts in batches),
        memory_bytes=OPTIMIZER_BYTES * count_parameters(model).total,
    )


def samples_of(settings: BenchSettings, sequences: int) -> tuple[list[Samples], Tokenizer]:
    """The samples of the first updates, as `bertkit pretrain bert` would draw them."""
    shards = shards_of(settings)
    tokenizer = load_tokenizer(shards.directory)
    training, _ = split_documents(shards, 0.01, 0)
    spec = SampleSpec(0, "train/0", SegmentPair(), settings.length, 10)
    stream = SampleStream(spec, shards, training, cache_directory() / "plans")
    batches = StepBatches(
        stream, Vocabulary.of(tokenizer), OBJECTIVES, batch_sequences=sequences, micro_batch_tokens=None
    )
    return [batches.samples(number) for number in range(UPDATES)], tokenizer


def own_update(model: HeadedModel, batches: list[list[PackedBatch]], engine: Engine) -> Work:
    """bertkit's own step, on one batch after the other."""
    step = Step.plain(model, AdamWConfig(bias_correction=False).build(model), engine, CLIP_NORM)
    in_turn = itertools.cycle(batches)

    def update() -> None:
        step.update(next(in_turn), ObjectiveTerms(OBJECTIVES), RATE)
        synchronise(engine.device)

    return update


def peer_update(config: BertConfig, vocab_size: int, updates: list[Samples], length: int, engine: Engine) -> Work:
    """The plain loop's step on one update's samples after the other, padding included.

    Raises:
        ImportError: transformers is not installed.
    """
    transformers = peer_library("transformers")
    settings = config.model_dump(exclude={"family"})
    hub_config = transformers.BertConfig(**settings, vocab_size=vocab_size, attn_implementation="sdpa")
    model = transformers.BertForPreTraining(hub_config).to(engine.device).train()
    in_turn = itertools.cycle([padded(samples, length) for samples in updates])
    return plain_update(model, lambda: next(in_turn), engine, rate=RATE, clip_norm=CLIP_NORM)


def padded(samples: Samples, length: int) -> dict[str, Any]:
    """The samples as rows of one length, with the names of BertForPreTraining's arguments; all are (B, length)."""
    rows = samples.lengths_B.size
    ids, types, mask = (torch.zeros(rows, length, dtype=torch.int64) for _ in range(3))
    labels = torch.full((rows, length), IGNORED)
    for row, one in enumerate(samples.split(1)):
        end = one.ids_T.size
        ids[row, :end] = torch.from_numpy(one.ids_T)
        types[row, :end] = torch.from_numpy(one.token_types_T)
        mask[row, :end] = 1
        targets = one.targets["masked_lm"]
        labels[row, torch.from_numpy(targets.index_M)] = torch.from_numpy(targets.id_M)
    return {
        "input_ids": ids,
        "token_type_ids": types,
        "attention_mask": mask,
        "labels": labels,
        "next_sentence_label": torch.from_numpy(samples.labels["next_sentence"]),
    }

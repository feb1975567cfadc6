"""Fine-tuning compared with a plain `transformers` loop: updates of a two-label classifier on the same sentences.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 4.1. The peer pads to the longest of the batch and uses SDPA, fused
AdamW and clipping. Texts are tokenised beforehand; building the batch is timed. Labels alternate, since they do not
affect the time. Sibling benchmarks/finetune_speed.py uses a published task and also pads to the limit.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch

from bertkit.bench.comparison import OPTIMIZER_BYTES
from bertkit.bench.material import sentences_of
from bertkit.bench.settings import BenchSettings
from bertkit.bench.workload import OWN, Peers, Work, Workload, peer_library, plain_update
from bertkit.finetuning.loss_terms import TaskTerms
from bertkit.models.files.hub import load_model
from bertkit.models.files.model_files import encoder_directory
from bertkit.models.labels import Labels
from bertkit.tasks.classification import Classification, TextSettings
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.examples import TextExample
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.clipping import RowClipping
from bertkit.training.cost import count_parameters
from bertkit.training.engine import Engine
from bertkit.training.gradients import Gradient
from bertkit.training.optimizers import AdamWConfig
from bertkit.training.product_rate import synchronise
from bertkit.training.step import Step

BATCH = 32
RATE = 5e-5
CLIP_NORM = 1.0
LABELS = Labels(("0", "1"))


def finetuning(settings: BenchSettings, engine: Engine, directory: Path, name: str, *, offline: bool) -> Workload:
    """An update on a batch of the text's sentences.

    Args:
        settings: text and length.
        engine: for both sides.
        directory: of the model.
        name: of the model.
        offline: nothing is downloaded.

    Raises:
        DataError: a file of the model is damaged, or there is no such text.
        UsageError: the model's family cannot classify.
    """
    directory = encoder_directory(directory)
    texts = sentences_of(settings, BATCH)
    task = Classification(LABELS, ("accuracy",), TextSettings())
    model, _ = load_model(directory, heads=(task.head,), labels=LABELS, new=(task.head,), is_trained=True)
    model.to(engine.device)
    limit = min(settings.length, model.encoder.max_tokens)
    types = model.encoder.config.reads_token_types
    encoder = SequenceEncoder(load_tokenizer(directory, offline=offline), max_tokens=limit, token_types=types)
    examples = [TextExample(f"{number}", text, label=f"{number % 2}") for number, text in enumerate(texts)]
    features = task.encode(examples, encoder)
    step = Step(model, AdamWConfig().build(model), engine, RowClipping(model, CLIP_NORM), Gradient())
    everything = np.arange(len(texts))

    def update() -> None:
        parts = [features.batch(part) for part in features.cut(everything, engine.micro_batch_tokens)]
        step.update(parts, TaskTerms(task), RATE)
        synchronise(engine.device)

    peers = Peers(wanted=settings.peers)
    peers.add("transformers", partial(peer_update, directory, texts, limit, engine))
    return Workload(
        about={
            "model": name,
            "batch": len(texts),
            "tokens_per_example": round(float(features.tokens_I.mean()), 1),
            "precision": engine.precision,
        },
        unit="examples",
        amount=len(texts),
        sides={OWN: update, **peers.sides},
        left_out=peers.left_out,
        flops=TaskTerms(task).flops(model, [features.batch(everything)]),
        memory_bytes=OPTIMIZER_BYTES * count_parameters(model).total,
    )


def peer_update(directory: Path, texts: list[str], limit: int, engine: Engine) -> Work:
    """The step of the plain loop.

    Raises:
        ImportError: transformers is not installed.
        ValueError: it does not support the model's family.
    """
    transformers = peer_library("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory, num_labels=len(LABELS.names))
    model.to(engine.device).train()
    rows = [tokenizer(text, truncation=True, max_length=limit) for text in texts]
    labels = torch.arange(len(texts)) % 2

    def inputs() -> dict[str, torch.Tensor]:
        return {**tokenizer.pad(rows, return_tensors="pt"), "labels": labels}

    return plain_update(model, inputs, engine, rate=RATE, clip_norm=CLIP_NORM)

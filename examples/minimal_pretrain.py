"""Pretrain a small BERT in one readable file: no recipe, no trainer, no command line.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 3.1: predict masked words, and whether two segments of text belong
together. `bertkit pretrain` combines the same parts, and adds checkpoints, a run directory and a recipe.

    python examples/minimal_pretrain.py my.txt "The capital of the [MASK]." --steps 1000

Shapes: N documents.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from bertkit.data.layouts import SegmentPair
from bertkit.data.prepare import prepare_shards
from bertkit.data.samples import Vocabulary
from bertkit.data.split import split_documents
from bertkit.data.stream import SampleSpec, SampleStream, StepBatches
from bertkit.models.families.bert import BertConfig
from bertkit.models.scoring.fill_mask import fill_masks
from bertkit.objectives.forward import pretraining_model
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.sentence_relations import NextSentence
from bertkit.pretraining.loss_terms import ObjectiveTerms
from bertkit.text.sources import open_corpus
from bertkit.text.tokenizer import TokenizerConfig
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.engine import resolve_engine
from bertkit.training.engine_config import EngineConfig
from bertkit.training.optimizers.adam import AdamWConfig
from bertkit.training.schedules import LinearSchedule
from bertkit.training.step import Step, evaluate

SEED = 0
SEQUENCE_LENGTH = 64
BATCH_SEQUENCES = 32
PEAK_LEARNING_RATE = 1e-3


def main(text: str, sentence: str, steps: int, cache: Path) -> None:
    # 1. Text to tokens. The corpus is tokenised once, into flat files that are memory-mapped: training never waits for
    #    the tokenizer, and a corpus may be larger than memory. The WordPiece vocabulary is trained on the text itself.
    corpus = open_corpus([text], cache=cache)
    shards = prepare_shards(corpus, TokenizerConfig(type="wordpiece", vocab_size=2000), cache=cache)
    tokenizer = load_tokenizer(shards.directory)
    vocabulary = Vocabulary.of(tokenizer)
    print(f"{shards.num_documents} documents, {shards.tokens} tokens, a vocabulary of {vocabulary.size}")

    # 2. The objectives. An objective corrupts samples in numpy and computes a loss from the encoder's states in torch.
    #    `prepared` returns it with what it needs from this tokenizer and this corpus.
    objectives = [each.prepared(tokenizer, shards) for each in (MaskedLM(rate=0.15), NextSentence())]

    # 3. Batches. A layout cuts documents into samples: here pairs of segments, about half of which have a random second
    #    segment. Every choice (order, pairs, masks) is a pure function of seed, sample and position, not of a generator
    #    with a state, so `batches[7]` is the same batch on every machine and after any restart.
    spec = SampleSpec(SEED, "example", SegmentPair(), SEQUENCE_LENGTH, static_copies=None)
    training_N2, held_out_N2 = split_documents(shards, held_out=0.05, seed=SEED)
    engine = resolve_engine(EngineConfig(precision="fp32"))

    batches, held_out = (
        StepBatches(
            SampleStream(spec, shards, documents_N2, plan_directory=None),
            vocabulary,
            objectives,
            batch_sequences=BATCH_SEQUENCES,
            micro_batch_tokens=engine.micro_batch_tokens,
        )
        for documents_N2 in (training_N2, held_out_N2)
    )

    # 4. The model: an encoder and one head per objective. The sequences of a batch are concatenated, without padding.
    config = BertConfig(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=512,
        max_position_embeddings=SEQUENCE_LENGTH,
        hidden_dropout_prob=0.0,  # such a short run cannot memorise its text
        attention_probs_dropout_prob=0.0,
    )
    model = pretraining_model(config, objectives, vocabulary.size, pad_id=vocabulary.pad_id)
    model.initialise(SEED)
    model.to(engine.device)

    # 5. One update: forward and backward over all micro-batches, gradient clipping, the optimiser's step. Losses are
    #    sums with counts, divided once, so the update does not depend on how the batch is cut into micro-batches.
    optimizer = AdamWConfig(weight_decay=0.01).build(model)
    schedule = LinearSchedule(peak=PEAK_LEARNING_RATE, warmup_steps=steps // 10)
    step = Step.plain(model, optimizer, engine, clip_norm=1.0)
    terms = ObjectiveTerms(objectives)

    # 6. The loop.
    for number in range(steps):
        outcome = step.update(batches[number], terms, schedule.learning_rate(number, steps))
        if number % max(1, steps // 10) == 0 or number == steps - 1:
            losses = ", ".join(f"{term} {total.mean:.3f}" for term, total in outcome.terms.items())
            print(f"step {number:4}  loss {terms.total(outcome.terms):.3f} ({losses})")

    # 7. Does it generalise? Evaluate on a batch from held-out documents.
    totals = evaluate(model, terms, held_out[0], engine)
    print(f"held-out text: {totals['masked_lm'].accuracy:.1%} of the masked tokens are predicted right")
    filled = fill_masks(model, tokenizer, [sentence], device=engine.device)
    print(sentence, "->", ", ".join(each["token"] for each in filled[0]["masks"][0]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="a text file (blank lines separate documents), or builtin:pydocs")
    parser.add_argument("sentence", help="with a [MASK] that is filled in at the end")
    parser.add_argument("--steps", type=int, default=300, help="number of updates (default: 300)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        main(options.text, options.sentence, options.steps, Path(folder))

"""What every registered objective, with every masking strategy, has to fulfil: on generated text, with tiny models.

A new one is tested here without being named. Only one that needs other text, another model or other objectives beside
it gets an entry in NEEDS.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from bertkit.data.batch import PackedBatch
from bertkit.data.stream import StepBatches, corrupted
from bertkit.objectives.base import Objective
from bertkit.objectives.forward import pretraining_model
from bertkit.objectives.masking import AnyUnits
from bertkit.objectives.registry import OBJECTIVES
from bertkit.pretraining.loss_terms import ObjectiveTerms
from bertkit.pretraining.recipe import Recipe
from bertkit.pretraining.run import open_shards
from bertkit.pretraining.stage_run import StageRun
from bertkit.pretraining.stages import stages_of
from bertkit.progress import silent_progress
from bertkit.recipe.errors import validate
from bertkit.recipe.tree import Located
from bertkit.text.tokenizer_files import load_tokenizer
from tests.training.tiny_run import write_pairs, write_text

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
PLAIN: dict[str, Any] = {
    "tokenizer": {"vocab_size": 90},
    "data": {"layout": {"name": "full-sentences"}, "sequence_length": 32, "held_out": 0.1},
    "model": {"family": "bert", **SIZES, "max_position_embeddings": 40},
    "optimisation": {"schedule": {"name": "constant", "peak": 0.01}, "batch_sequences": 12, "steps": 40},
    "engine": {"device": "cpu", "precision": "fp32"},
}
PAIRS = {"layout": {"name": "segment-pair", "swap_probability": 0.3}}
BOTH_WAYS = {"layout": {"name": "continuous", "bidirectional": True}}
ONE_DOCUMENT = {"layout": {"name": "doc-sentences"}}
TRANSLATION = {"layout": {"name": "parallel"}, "reading": {"target_field": "target"}, "sources": ["pairs.tsv"]}
ELMO = {"family": "elmo", "filters": [[1, 3], [2, 5]], "projection_size": 6, "lstm_width": 7, "max_characters": 9}
LANES = {"tokenizer": {"type": "word", "vocab_size": 90}, "data": BOTH_WAYS, "model": ELMO}
ELECTRIC = {"model": {"family": "electra", **SIZES}, "objective": ["two_tower_cloze", "noise_contrastive"]}
SENTINELS = {"tokenizer": {"vocab_size": 150, "sentinels": 20}}
NEEDS: dict[str, dict[str, Any]] = {
    "backward_lm": {**LANES, "objective": ["forward_lm", "backward_lm"]},
    "bag_of_words": {"objective": ["masked_lm", "bag_of_words"]},
    "capitalisation": {"data": {"reading": {"mark_capitals": True}}},
    "denoising": {"data": ONE_DOCUMENT, "model": {"family": "transformer", **SIZES}},
    "enhanced_decoding": {"objective": ["masked_lm", "enhanced_decoding"]},
    "forward_lm": {**LANES, "objective": ["forward_lm", "backward_lm"]},
    "masked_permuted_lm": {"tokenizer": {"vocab_size": 90, "pad_id": 1}, "model": {"family": "mpnet", **SIZES}},
    "next_sentence": {"data": PAIRS},
    "noise_contrastive": ELECTRIC,
    "permutation_lm": {"model": {"family": "xlnet", **SIZES}},
    "pondering": {
        "data": TRANSLATION,
        "model": {"family": "universal-transformer", **SIZES, "halting": True},
        "objective": ["seq2seq_lm", "pondering"],
    },
    "replaced_token": {"objective": ["masked_lm", {"replaced_token": {"generator_size": 0.5, "tie": "none"}}]},
    "sentence_order": {"data": PAIRS},
    "sentence_structure": {"data": PAIRS},
    "seq2seq_lm": {"data": TRANSLATION, "model": {"family": "transformer", **SIZES}},
    "span_boundary": {"objective": [{"masked_lm": {"units": {"name": "spans"}}}, "span_boundary"]},
    "span_corruption": {**SENTINELS, "data": ONE_DOCUMENT, "model": {"family": "t5", **SIZES}},
    "two_tower_cloze": ELECTRIC,
    "word_order": {"objective": ["masked_lm", "word_order"]},
    "masked_lm-annotated": {"data": {"reading": {"span_fields": ["spans"]}, "sources": ["spans.jsonl"]}},
    "masked_lm-entity-spans": {"data": {"reading": {"span_fields": ["entities"]}, "sources": ["spans.jsonl"]}},
}
"""The sections of a recipe in which an objective, or a masking strategy, cannot have what PLAIN has."""
UNITS = [get_args(kind.model_fields["name"].annotation)[0] for kind in get_args(AnyUnits.__origin__)]
CASES: dict[str, Any] = {name: name for name in OBJECTIVES}
CASES |= {f"masked_lm-{name}": {"masked_lm": {"units": {"name": name}}} for name in UNITS}


@dataclass(frozen=True)
class Made:
    """A recipe's objectives, prepared, the first of which is tested, and its batches."""

    recipe: Recipe
    vocab_size: int
    tested: Objective
    objectives: tuple[Objective, ...]
    batches: StepBatches

    def at(self, step: int) -> Objective:
        return self.tested.at(self.batches.progress(step))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("registered")
    sentences = write_text(root / "text.txt").read_text(encoding="utf-8").split("\n")
    write_pairs(root / "pairs.tsv", 200)
    spans = [[[4, each.index(" ", 4)]] for each in sentences if each]
    records = [
        {"text": text, "spans": own, "entities": own} for text, own in zip(filter(None, sentences), spans, strict=True)
    ]
    (root / "spans.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return root


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest, directory: Path) -> Made:
    needs, name = NEEDS.get(request.param, {}), request.param.partition("-")[0]
    settings = {"name": "small", **PLAIN, "objective": [CASES[request.param]], **needs}
    data = {**PLAIN["data"], "sources": ["text.txt"], **needs.get("data", {})}
    settings["data"] = data | {"sources": [str(directory / source) for source in data["sources"]]}
    recipe = validate(Located.of(settings, "small"), Recipe)
    shards = open_shards(recipe, cache=directory, offline=True, progress=silent_progress)
    tokenizer = load_tokenizer(shards.directory)
    run = StageRun(stages_of(recipe)[0], shards, tokenizer, cache=directory)
    (tested,) = (each for each in run.objectives if each.term == name)
    return Made(recipe, tokenizer.vocab_size, tested, run.objectives, run.batches)


def plain(value: Any) -> Any:
    """Arrays as lists, so that samples can be compared."""
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


def test_a_sequence_is_corrupted_alike_in_any_batch(made: Made) -> None:
    batches = made.batches
    draw, progress = batches.stream.spec.draw, batches.progress(5)
    together = list(batches.samples(5).split(1))
    alone = [
        corrupted(each, made.objectives, batches.vocabulary, draw, progress=progress)
        for each in batches.uncorrupted(5).split(1)
    ]
    assert len(alone) == len(together) > 3
    for one, same in zip(alone, together, strict=True):
        assert plain(one) == plain(same), "take random numbers only from `draw`, by the sample's address"


def test_special_tokens_stay_and_targets_are_in_order(made: Made) -> None:
    before, after = made.batches.uncorrupted(2), made.batches.samples(2)
    if before.ids_T.size == after.ids_T.size:
        changed_T = after.ids_T != before.ids_T
        assert not (changed_T & before.special_T).any(), "change only tokens of `samples.free_T`"
    targets = after.targets.get(made.tested.term)
    if targets is not None:
        assert (np.diff(targets.index_M) > 0).all(), "targets are in ascending order, each once"
        assert targets.index_M.size == targets.id_M.size
        assert 0 <= targets.index_M.min() <= targets.index_M.max() < after.ids_T.size


def test_the_estimated_number_of_predictions_is_about_the_real_one(made: Made) -> None:
    found, expected = 0.0, 0.0
    for step in range(12):
        before, after, objective = made.batches.uncorrupted(step), made.batches.samples(step), made.at(step)
        targets = after.targets.get(objective.term)
        is_read = objective.states == "targets" and targets is not None
        found += targets.id_M.size if is_read else objective.count(PackedBatch.from_samples(after))
        expected += sum(map(objective.expected_count, before.lengths_B.tolist()))
    expected *= made.tested.share_of_sequences(made.recipe.data)
    assert expected == pytest.approx(found, rel=0.25), "expected_count is for the FLOPs of --plan"


def test_the_loss_is_a_sum_over_its_count_and_trains_the_model(made: Made) -> None:
    torch.manual_seed(0)
    model = pretraining_model(made.recipe.model, made.objectives, made.vocab_size)
    model.initialise(0)
    terms, batch = ObjectiveTerms(made.objectives), PackedBatch.from_samples(made.batches.samples(1))
    loss = terms.losses(model, batch)[made.tested.term]
    assert loss.count == terms.counts(batch)[made.tested.term] > 0, "`count` is known before the step"
    loss.sum.backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    assert gradients
    assert all(each.isfinite().all() for each in gradients)
    assert 0 <= int(loss.correct) <= loss.count

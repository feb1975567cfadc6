"""The batches of a stage, without training on them.

Own design. A batch is a pure function of recipe, text and step (see data/stream.py); sibling pretrain.py trains on the
same ones.
"""

from __future__ import annotations

from pathlib import Path

from bertkit.data.language_stream import training_and_held_out
from bertkit.data.samples import Vocabulary
from bertkit.data.shards import TokenShards
from bertkit.data.stream import StepBatches
from bertkit.pretraining.stages import Stage
from bertkit.text.tokenizer import Tokenizer


def stage_batches(stage: Stage, shards: TokenShards, tokenizer: Tokenizer, *, cache: Path) -> StepBatches:
    """A stage's training batches by step (from 0 in the stage), each in one piece.

    Raises:
        UsageError: if the tokenizer cannot serve an objective.
        DataError: if the corpus is shorter than a batch.
    """
    recipe = stage.recipe
    training, _ = training_and_held_out(
        recipe.data, shards, seed=recipe.seed, stage=stage.number, plans=cache / "plans"
    )
    batches = StepBatches(
        training,
        Vocabulary.of(tokenizer),
        [objective.prepared(tokenizer, shards) for objective in recipe.objectives],
        batch_sequences=recipe.optimisation.batch_sequences,
        micro_batch_tokens=None,
        first_step=stage.first_step,
        run_steps=recipe.optimisation.steps,
    )
    batches.check_enough()
    return batches
